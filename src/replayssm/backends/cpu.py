"""Compiled CPU backend: one pass over the checkpoint a step, on torch's own threads. Needs numba.

The kernel is in cpu_kernels.py. It is bound by reading the checkpoint from memory, so the work here is to keep every
core at that and nothing else.

Threads: as many as :func:`torch.get_num_threads` says, and, where torch uses an OpenMP with the GNU interface (Linux),
the very ones that torch's operators run on. numba's own pools would be a second set; with both, each idle worker spins
for milliseconds where the other set's is to run, which was measured to double a step between two torch operators.
Results do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import torch
from torch import Tensor

from replayssm.layer import LayerState

_GRAIN = 32768  # numbers of state that are worth a thread, as in torch
_TURNS = 16  # how often a thread comes back for more: often enough for equal ends, seldom enough for neighbouring heads
_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in cpu_rows.py


def refuses(layer: LayerState) -> str | None:
    """Why this backend cannot serve the layer: no numba, a pool elsewhere, or float64."""
    if layer.ckpt.device.type != "cpu":
        return f"the pool is on {layer.ckpt.device}"
    for name, x in layer.tensors.items():
        if x.dtype not in _CODES:
            return f"it computes in float32, and the pool's {name} is {str(x.dtype).removeprefix('torch.')}"
    return _missing()


def verify(
    layer: LayerState, q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor, slots: Tensor, out: Tensor
) -> None:
    """See :func:`replayssm.ops.verify`."""
    inputs = [_float32(q), _float32(k), _float32(v), _float32(w), _float32(g, dense=layer.recurrence.channel)]
    target = out if out.dtype in _CODES and out.stride(-1) == 1 else out.new_empty(out.shape, dtype=torch.float32)
    _run(layer, slots, [*inputs, target], v.shape[1], 0, layer.ring.limit)
    if target is not out:
        out.copy_(target)


def fold(layer: LayerState, slots: Tensor, n: Tensor) -> None:
    """See :func:`replayssm.ops.fold`; the cursors are moved by the caller."""
    rows = n.long().contiguous()
    _run(layer, slots, [], 0, rows.data_ptr(), 0)


def _run(layer: LayerState, slots: Tensor, inputs: list[Tensor], T: int, rows: int, limit: int) -> None:
    """Fills in the kernel's arguments and runs it. inputs: q, k, v, w, g, out, or none of them."""
    kernels, ring, slots = _kernels(), layer.ring, slots.contiguous()
    B, HV, V, K = slots.numel(), *layer.ckpt.shape[1:]
    X, channel = 2 if layer.recurrence.erase else 1, int(layer.recurrence.channel)
    threads = min(torch.get_num_threads(), -(-B * HV * V * K // _GRAIN))
    block = _block(V, B * HV, threads, kernels.BLOCK)
    tasks = B * HV * -(-V // block)
    chunk = max(1, tasks // (_TURNS * threads))
    floats = kernels.scratch_floats(T, X, K, ring.R, block)
    scratch = torch.empty(threads * floats)
    tensors = [_view(x) for x in (layer.ckpt, layer.k, layer.d, layer.w, layer.g, *inputs)]
    call = kernels.Call(
        0, 0, tasks, chunk, slots.data_ptr(), ring.head.data_ptr(), ring.count.data_ptr(), rows, limit,
        T, X, layer.H, HV, K, V, ring.R, channel, block, scratch.data_ptr(), floats, *tensors,
    )  # fmt: skip
    if threads == 1:
        _run_threads(kernels.worker(), ctypes.addressof(call), 1)
    else:
        _launcher()(kernels.worker(), ctypes.addressof(call), threads)


def _view(x: Tensor) -> tuple[int, ...]:
    """A tensor as the kernel sees it: three leading dimensions by stride, what follows dense."""
    size, (s0, s1, s2, *_) = x.element_size(), x.stride()
    return x.data_ptr(), _CODES[x.dtype], s0 * size, s1 * size, s2 * size


def _float32(x: Tensor, dense: bool = True) -> Tensor:
    """An input that the kernel can load: float64 rounded to float32, a strided last dimension made dense."""
    x = x if x.dtype in _CODES else x.float()
    return x if not dense or x.stride(-1) == 1 else x.contiguous()


def _block(V: int, heads: int, threads: int, unit: int) -> int:
    """State rows a task: all of a head's, or fewer where that leaves less than four tasks a thread to balance. Each
    task repeats the scores with the ring, so never fewer than 16."""
    parts = -(-4 * threads // heads)
    return V if parts < 2 else min(V, max(16, -(-V // (parts * unit)) * unit))


@functools.cache
def _missing() -> str | None:
    """Why the kernels cannot be imported, if they cannot."""
    try:
        _kernels()
    except ImportError as error:
        return f"it needs numba (pip install 'replayssm[cpu]'): {error}"
    return None


@functools.cache
def _kernels() -> ModuleType:
    from replayssm.backends import cpu_kernels

    return cpu_kernels


@functools.cache
def _launcher() -> Callable[[int, int, int], None]:
    """``run(worker, call, threads)``: ``worker(call)`` on that many threads at once, this one included."""
    try:
        # Searched from torch's own libraries on, so this is the OpenMP that torch runs on, whatever else is loaded.
        run = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return _run_threads
    run.argtypes, run.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return lambda worker, call, threads: run(worker, call, threads, 0)


def _run_threads(worker: int, call: int, threads: int) -> None:
    """The same with Python's threads; a foreign call lets go of the interpreter lock."""
    run = ctypes.CFUNCTYPE(None, ctypes.c_int64)(worker)
    others = [_pool(threads).submit(run, call) for _ in range(threads - 1)]
    run(call)
    for other in others:
        other.result()


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "replayssm")
