"""GPU backend: two launches a step, prepare.py and kernel.py, or one, single.py.

Under Triton's interpreter on CPU tensors too (tests)."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from replayssm.backends.triton.config import LaunchConfig, launch_config, power_of_2
from replayssm.layer import LayerState

OLDEST = (3, 6)  # of Triton: earlier compilers refuse the kernels
FUSED: dict[str, Any] = dict(enable_fp_fusion=True)  # of multiply and add, which Triton 3.10 has to be asked for


def normalises(layer: LayerState) -> bool:
    """Takes q and k of layers with a norm as they come."""
    return True


def refuses(layer: LayerState) -> str | None:
    """Needs Triton, a GPU (or the interpreter), and no float64."""
    if torch.float64 in (layer.ckpt.dtype, layer.w.dtype):
        return "it does not compute in float64"
    return unusable(layer.ckpt.device)


def unusable(device: torch.device) -> str | None:
    """Why Triton cannot run on ``device``; None if it can."""
    try:
        import triton
    except ImportError:
        return "triton is not installed (pip install 'replayssm[gpu]')"
    if _numbers(triton.__version__) < OLDEST:
        return f"the kernels need triton {OLDEST[0]}.{OLDEST[1]} or newer; {triton.__version__} is installed"
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        return "the pool is on the CPU, and Triton's interpreter (TRITON_INTERPRET=1) is off"
    if device.type not in ("cpu", "cuda", "xpu"):
        return f"Triton does not run on {device.type}"
    return None


def verify(
    layer: LayerState, q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor, slots: Tensor, out: Tensor
) -> None:
    """See :func:`replayssm.ops.verify`."""
    launch_verify(layer, q, k, v, w, g, slots, out, config(layer, *v.shape[:2]))


def verify_tree(
    layer: LayerState, q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor, slots: Tensor, out: Tensor,
    parents: Tensor,
) -> None:  # fmt: skip
    """See :func:`replayssm.tree.verify_tree`."""
    launch_verify(layer, q, k, v, w, g, slots, out, config(layer, *v.shape[:2]), parents)


def config(layer: LayerState, B: int, T: int) -> LaunchConfig:
    """The launch configuration that :func:`verify` takes for ``T`` new tokens of ``B`` sequences."""
    recurrence = layer.recurrence
    return launch_config(
        channel=recurrence.channel,
        erase=recurrence.erase,
        state_bits=layer.ckpt.element_size() * 8,
        K=layer.K,
        V=layer.V,
        T=T,
        rows=B * layer.HV,
        ring=layer.ring.most,
        folds=layer.ring.limit == 0,
    )


def describe(layer: LayerState, B: int, T: int) -> str:
    """In how many launches :func:`verify` does it, and why."""
    states = f"{B * layer.HV * layer.V * layer.K * layer.ckpt.element_size() / 1e6:.0f} MB of states"
    if config(layer, B, T).launches == 1:
        return "one launch: every step folds" if layer.ring.limit == 0 else f"one launch: it reads {states} only"
    if T > 1 or layer.recurrence.channel:
        return "two launches: one alone serves one token with a decay by head, or with a fold at every step"
    return f"two launches: with {states} one alone would not be faster"


def launch_verify(
    layer: LayerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    g: Tensor,
    slots: Tensor,
    out: Tensor,
    config: LaunchConfig,
    parents: Tensor | None = None,
) -> None:
    """:func:`verify`, or of a tree, with an explicit configuration (tuning and tests)."""
    if config.launches == 1:
        return launch_single(layer, q, k, v, w, g, slots, out, config)
    from replayssm.backends.triton.kernel import read_kernel
    from replayssm.backends.triton.prepare import prepare_kernel

    B, T = v.shape[:2]
    slots = slots.contiguous()
    H, HV, K, V, R = layer.H, layer.HV, layer.K, layer.V, layer.ring.R
    channel, erase, device = layer.recurrence.channel, layer.recurrence.erase, v.device
    if q.dtype != k.dtype or q.dtype == torch.float64:  # read as one block
        common = torch.float32 if torch.float64 in (q.dtype, k.dtype) else torch.promote_types(q.dtype, k.dtype)
        q, k = q.to(common), k.to(common)
    q, k, v = _dense(q), _dense(k), _dense(v)
    g = _dense(g) if channel else g
    X, group, size = (2 * T if erase else T), HV // H, layer.ckpt.element_size()
    if channel:
        group = math.gcd(HV, config.heads)  # heads is a power of two
    elif group % config.heads == 0:
        group = config.heads
    BK, BR = power_of_2(K, 32), power_of_2(layer.ring.most, 16)
    width = -(-(X * (BR + T + 1) + BR + 1) // 8) * 8  # whole sectors of 32 bytes
    rows = B * HV
    by_channel = (-(-rows * X * K * size // 4), rows * BR * K * size // 4, rows * K) if channel else (0, 0, 0)
    work_x, keys, decays, work, meta = layer.ring.scratch.take(*by_channel, rows * width, 4 * B, device=device)
    meta = meta.view(torch.int32)
    if channel:
        work_x, keys = work_x.view(layer.ckpt.dtype)[: rows * X * K], keys.view(layer.ckpt.dtype)
    cuda, tensor_cores, early = _hardware(device)
    tf32 = device.type == "cpu" or (tensor_cores and cuda)  # in two parts, three of float32 inputs; else as it is
    shape = dict(
        T=T, H=H, HV=HV, K=K, R=R, CHANNEL=channel, ERASE=erase, BK=BK, BR=BR, WIDTH=width, UPCAST=not tensor_cores,
        PARTS=1 if not tf32 else 3 if 4 in (q.element_size(), v.element_size()) else 2,
        PRECISION="tf32" if tf32 else "ieee", EARLY=early,
    )  # fmt: skip
    prepare_kernel[(B * HV // group,)](
        q, k, w, g, slots, slots if parents is None else parents, layer.k, layer.w, layer.g, layer.ring.head,
        layer.ring.count, meta, work, work_x, keys, decays, *(0, 0) if parents is None else parents.stride(),
        *q.stride()[:3], *k.stride()[:3], *w.stride()[:3], *g.stride()[:3],
        *layer.k.stride()[:2], *layer.w.stride()[:2], *layer.g.stride()[:2],
        BC=min(BK, 128 // group) if channel else 32, BX=power_of_2(X, 1 if channel else 8), BT=power_of_2(T, 16),
        GROUP=group, BG=power_of_2(group), LIMIT=layer.ring.limit, TREE=parents is not None, EPS=layer.norm or 0.0,
        KEEP="evict_last" if T == 1 or size == 2 else "", num_warps=1, **FUSED, **shape,
    )  # fmt: skip
    if channel:  # the decayed X, [B, X, HV, K], in place of the inputs
        x = work_x.view(B, HV, X, K).transpose(1, 2)
        q, k = x[:, :T], x[:, X - T :]
    grid = {"v": -(-V // config.BV), "b": B, "h": HV}
    options: dict[str, Any] = {"maxnreg": config.registers} if cuda and config.registers else {}
    if early:
        options["launch_pdl"] = True
    read_kernel[tuple(grid[axis] for axis in config.order)](
        q, k, v, out, *layer.tensors.values(), keys, meta, work, decays,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        *(s for x in layer.tensors.values() for s in x.stride()[:2]),
        V=V, BC=64 // size if config.dot else 32, BV=config.BV, BX=power_of_2(X, 8), DOT=config.dot,
        AXIS_V=config.order.index("v"), AXIS_B=config.order.index("b"), AXIS_H=config.order.index("h"),
        num_warps=config.num_warps, **options, **FUSED, **shape,
    )  # fmt: skip


def launch_single(
    layer: LayerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    g: Tensor,
    slots: Tensor,
    out: Tensor,
    config: LaunchConfig,
) -> None:
    """One token in one launch (BV, BC and num_warps of ``config`` are used): of a pool that folds every step the plain
    recurrence, else replay with a decay by head."""
    from replayssm.backends.triton.single import step_kernel

    B, H, HV, K, V, folds = v.shape[0], layer.H, layer.HV, layer.K, layer.V, layer.ring.limit == 0
    if v.shape[1] != 1 or not (folds or (not layer.recurrence.channel and config.BV >= 16)):
        raise ValueError(
            "launch_single: one launch serves one token, of a pool that folds every step or with a decay by head and "
            f"BV >= 16; got T={v.shape[1]}, limit={layer.ring.limit}, {layer.recurrence.name}, BV={config.BV}"
        )
    q, k, v, out, w, g = (x[:, 0] for x in (_dense(q), _dense(k), _dense(v), out, w, g))
    g = _dense(g) if layer.recurrence.channel else g
    BK = power_of_2(K, 16)
    step_kernel[(B * HV * -(-V // config.BV),)](
        q, k, v, w, g, out, slots.contiguous(), *layer.tensors.values(), layer.ring.head, layer.ring.count,
        *(s for x in (q, k, v, w, g, out) for s in x.stride()[:2]),
        *(s for x in layer.tensors.values() for s in x.stride()[:2]),
        H=H, HV=HV, K=K, V=V, R=layer.ring.R, LIMIT=layer.ring.limit, CHANNEL=layer.recurrence.channel,
        ERASE=layer.recurrence.erase, FOLDS=folds, EPS=layer.norm or 0.0, BK=BK, BC=min(config.BC, BK), BV=config.BV,
        BR=power_of_2(layer.ring.most, 16), UPCAST=layer.ckpt.device.type == "cpu", num_warps=config.num_warps, **FUSED,
    )  # fmt: skip


def fold(layer: LayerState, slots: Tensor, n: Tensor) -> None:
    """See :func:`replayssm.ops.fold`; the cursors are moved by the caller."""
    from replayssm.backends.triton.folding import fold_kernel

    BV = min(64, power_of_2(layer.V, 16))
    fold_kernel[(-(-layer.V // BV), layer.HV, slots.numel())](
        slots.contiguous(), n.to(torch.int32).contiguous(), *layer.tensors.values(), layer.ring.head,
        *(s for x in layer.tensors.values() for s in x.stride()[:2]),
        H=layer.H, HV=layer.HV, K=layer.K, V=layer.V, R=layer.ring.R, CHANNEL=layer.recurrence.channel,
        UPCAST=layer.ckpt.device.type == "cpu", BK=power_of_2(layer.K, 16), BV=BV, BF=16,
        BR=power_of_2(layer.ring.most, 16), num_warps=2, **FUSED,
    )  # fmt: skip


def convolve(
    new: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, head: Tensor, count: Tensor,
    silu: bool,
) -> Tensor:  # fmt: skip
    """See :meth:`replayssm.conv.ConvWindow.convolve`; ``[B, T, channels]``."""
    from replayssm.backends.triton.convolution import convolve_kernel

    B, channels, T = new.shape
    out = new.new_empty(B, T, channels)
    BB, BC = (4 if B >= 64 else 1), min(256, power_of_2(channels, 32))  # of a sweep on an H200
    convolve_kernel[(-(-channels // BC), -(-B // BB))](
        new, window, weight, weight if bias is None else bias, out, slots.contiguous(), head, count,
        B, *new.stride(), *window.stride(), *weight.stride(), 1 if bias is None else bias.stride(0),
        CH=channels, T=T, C=window.shape[2], W=weight.shape[1], BIAS=bias is not None, SILU=silu, BB=BB, BC=BC,
        num_warps=4, **FUSED,
    )  # fmt: skip
    return out


@functools.cache
def _numbers(version: str) -> tuple[int, ...]:
    """The first two of a version."""
    return tuple(int(x) for x in version.split(".")[:2])


@functools.cache
def _hardware(device: torch.device) -> tuple[bool, bool, bool]:
    """Whether it is an NVIDIA GPU, whether it multiplies 16 bits on tensor cores, and whether a launch that depends on
    another can start before that has ended (programmatic dependent launch)."""
    cuda = device.type == "cuda" and torch.version.cuda is not None
    major = torch.cuda.get_device_capability(device)[0] if cuda else 0
    return cuda, device.type != "cpu" and (not cuda or major >= 8), major >= 9


def _dense(x: Tensor) -> Tensor:
    """The kernels take any strides but in the last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()
