"""What only the compiled CPU backend has: refusals, numba's cache, threads, its own dtypes and strides, many tokens."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from harness import make_spec
from torch import Tensor

from replayssm import GDN, KDA, MAMBA2, LayerState, Recurrence, Ring
from replayssm.backends import cpu
from replayssm.testing import GUARD, Inputs, assert_close_to_oracle, make_inputs, plain

cpu_kernels = pytest.importorskip("replayssm.backends.cpu_kernels", exc_type=ImportError)

N, R, WINDOW = 4, 24, 4
SLOTS = torch.tensor([2, -1, 0, 3], dtype=torch.int32)


def build(recurrence: Recurrence, window: int = WINDOW, **spec: object) -> LayerState:
    """A layer whose slots hold 3, 0, 8 and 15 committed rows (the last one due), with NaN in all dead rows."""
    rng = torch.Generator().manual_seed(0)
    ring = Ring.build(N, R + 2 * window, window, limit=14)
    layer = make_spec(recurrence, **spec).build(ring)
    ring.head[:N] = torch.tensor([5, R, 1, R - 3])
    ring.count[:N] = torch.tensor([3, 0, 8, 15])
    s = make_inputs(recurrence, N, 15, layer.H, layer.HV, layer.K, layer.V, generator=rng)
    for x in layer.tensors.values():
        x.fill_(float("nan"))
    layer.ckpt.copy_(torch.randn(layer.ckpt.shape, generator=rng))
    for slot in range(N):
        for i in range(int(ring.count[slot])):
            row = (int(ring.head[slot]) + i) % ring.R
            for name, x in (("k", s.k), ("d", s.v), ("w", s.w), ("g", s.g)):
                getattr(layer, name)[slot, :, row] = x[slot, i].to(getattr(layer, name).dtype)
    return layer


def inputs(layer: LayerState, T: int = 3, dtype: torch.dtype = torch.float32) -> Inputs:
    rng = torch.Generator().manual_seed(1)
    return make_inputs(layer.recurrence, N, T, layer.H, layer.HV, layer.K, layer.V, dtype, rng)


def step(layer: LayerState, given: Inputs, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Runs a copy of the layer; returns all that may have changed."""
    layer = replace(layer, **{name: x.clone() for name, x in layer.tensors.items()})
    out = torch.full_like(given.v, 7, dtype=dtype)
    cpu.verify(layer, *given, SLOTS, out)
    return {"out": out, **layer.tensors}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """The same numbers, to the last bit."""
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0, equal_nan=True, msg=name)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_refuses_other_devices() -> None:
    layer = make_spec(GDN).build(Ring.build(N, R, 1, device="meta"))
    assert cpu.refuses(layer) == "the pool is on meta"


@pytest.mark.parametrize("name", ["state_dtype", "input_dtype"])
def test_refuses_float64(name: str) -> None:
    layer = make_spec(MAMBA2, **{name: torch.float64}).build(Ring.build(N, R, 1))
    assert (cpu.refuses(layer) or "").startswith("it computes in float32, and the pool's ")


def test_without_numba() -> None:
    """Refuses with the command that helps; "auto" goes on to the next backend."""
    code = """if True:
        import sys
        sys.modules["numba"] = None
        from replayssm import GDN, LayerSpec, StatePool, ops, backends
        import torch
        layer = StatePool(2).add_layer(LayerSpec(GDN, 1, 1, 4, 4))
        choice = backends.explain(layer)
        assert choice.name == "torch" and "pip install 'replayssm[cpu]'" in choice.reasons["cpu"], choice
        x = torch.ones(1, 1, 1, 4)
        out = ops.verify(layer, x, x, x, x[..., 0], -x[..., 0], slots=torch.zeros(1, dtype=torch.int32))
        assert out.shape == x.shape
    """
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


# --- compilation ------------------------------------------------------------------------------------------------------


def test_no_directory_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core import caching

    def tiny(sources: int) -> Callable[[int], None]:
        def work(address: int) -> None:
            pass

        return work

    monkeypatch.setattr(cpu_kernels, "_worker", tiny)  # to be compiled at once
    base = caching.CompileResultCacheImpl.__mro__[1]  # its name depends on the version of numba
    monkeypatch.setattr(base, "_locator_classes", [])
    assert cpu_kernels.worker.__wrapped__() != 0


def test_other_errors_of_the_compiler_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("LLVM is out of registers")

    monkeypatch.setattr(cpu_kernels, "cfunc", broken)
    with pytest.raises(RuntimeError, match="out of registers"):
        cpu_kernels.worker.__wrapped__()


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("launch", ["torch's", "python's"])
def test_threads_change_nothing(launch: str, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does how a head is divided among them, nor on whose threads the kernel runs."""
    monkeypatch.setattr(cpu, "_GRAIN", 64)
    layer = build(GDN, V=72, K=32)
    given = inputs(layer)
    threads(1)
    alone = step(layer, given)
    if launch == "python's":
        monkeypatch.setattr(cpu, "_launcher", lambda: cpu._run_threads)
    for n in (2, 3, 16):
        threads(n)
        assert_same(step(layer, given), alone)


def test_blocks_of_a_head() -> None:
    assert cpu._block(V=128, heads=4096, threads=2, unit=8) == 128
    assert cpu._block(V=128, heads=2, threads=2, unit=8) == 32
    assert cpu._block(V=72, heads=1, threads=2, unit=8) == 16
    assert cpu._block(V=7, heads=1, threads=64, unit=8) == 7


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_inputs_of_any_dtype(recurrence: Recurrence, dtype: torch.dtype) -> None:
    """Wider or narrower inputs are those numbers in float32, and outputs are rounded once, to nearest even."""
    layer = build(recurrence)
    given = inputs(layer, dtype=dtype)
    wide, same = step(layer, Inputs(*(x.float() for x in given))), step(layer, given, dtype)
    assert_same(same, {**wide, "out": wide["out"].to(dtype)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_states_and_rows_are_rounded_once(recurrence: Recurrence, dtype: torch.dtype) -> None:
    narrow = build(recurrence, state_dtype=dtype, input_dtype=dtype)
    wide = replace(narrow, ckpt=narrow.ckpt.float(), k=narrow.k.float(), d=narrow.d.float())
    given = inputs(narrow, dtype=dtype)
    a, b = step(narrow, given, dtype), step(wide, given, dtype)
    assert_same(a, {name: x.to(a[name].dtype) for name, x in b.items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_rows_of_whole_vectors(recurrence: Recurrence, dtype: torch.dtype) -> None:
    """Rows as wide as scratch memory has them, on this machine, of which those of float32 are read where they are."""
    width = cpu_kernels.rows.padded(1)
    narrow = build(recurrence, state_dtype=dtype, input_dtype=dtype, K=width, V=width)
    wide = replace(narrow, **{name: x.float() for name, x in narrow.tensors.items()})
    given = inputs(narrow, dtype=dtype)
    a, b = step(narrow, given, dtype), step(wide, given, dtype)
    assert_same(a, {name: x.to(a[name].dtype) for name, x in b.items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_special_numbers_in_narrow_states(dtype: torch.dtype) -> None:
    """Infinity and NaN of a state survive its fold, at every place of a row; numbers too large become infinity."""
    layer = build(MAMBA2, state_dtype=dtype, K=35, V=9)
    layer.g[3], layer.w[3], special = 0.0, 0.0, torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-7, 0.0])
    layer.ckpt[3] = special.repeat(63).view(9, 35).to(dtype)
    layer.k[3], layer.d[3] = 0.0, 0.0
    assert_same({"ckpt": step(layer, inputs(layer))["ckpt"][3]}, {"ckpt": layer.ckpt[3]})
    layer.w[3], layer.k[3], layer.d[3], layer.ckpt[3] = 1.0, 1e3, 1e38, 0.0
    assert step(layer, inputs(layer))["ckpt"][3].isinf().all()


# --- strides ----------------------------------------------------------------------------------------------------------


def test_strided_inputs() -> None:
    """Splits of one projection, tokens before the batch, one key head for all, a last dimension that is not dense."""
    layer = build(KDA, H=3, HV=3, K=12, V=12)
    given = inputs(layer)
    expected = step(layer, given)
    joint = torch.cat([given.q.flatten(2), given.k.flatten(2), given.v.flatten(2)], -1)
    q, k, v = (x.unflatten(-1, (3, 12)) for x in joint.split(36, -1))
    w = given.w.transpose(1, 2).contiguous().transpose(1, 2)
    g = given.g.transpose(0, 1).contiguous().transpose(0, 1)
    assert_same(step(layer, Inputs(q, k, v, w, g)), expected)
    assert_same(step(layer, Inputs(*(x.transpose(1, -1).contiguous().transpose(1, -1) for x in given))), expected)
    one = given._replace(q=given.q[:, :, :1].expand_as(given.q), k=given.k[:, :, :1].expand_as(given.k))
    assert_same(step(layer, one), step(layer, Inputs(*(x.contiguous() for x in one))))


@pytest.mark.parametrize("rule", [MAMBA2, KDA], ids=["mamba2", "kda"])
def test_strided_pages_and_output(rule: Recurrence) -> None:
    """Slots and heads of the pool at any distance; what lies between is not touched, nor around a strided output."""
    layer = build(rule, K=32, V=16)

    def spread(x: Tensor) -> Tensor:
        page = torch.full((2 * x.shape[0], 3 * x.shape[1], *x.shape[2:]), GUARD, dtype=x.dtype)
        page[::2, 1::3] = x
        return page

    pages = {name: spread(x) for name, x in layer.tensors.items()}
    apart = replace(layer, **{name: page[::2, 1::3] for name, page in pages.items()})
    given, wide = inputs(layer), torch.full((N, 3, 6, 2, 16), GUARD)
    out = wide[:, :, :, 0]
    cpu.verify(apart, *given, SLOTS, out)
    assert_same({"out": out, **apart.tensors}, step(layer, given))
    assert (wide[:, :, :, 1] == GUARD).all()
    for page in pages.values():
        page[::2, 1::3] = GUARD
        assert (page == GUARD).all()


# --- many tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [16, 40])
def test_many_tokens(recurrence: Recurrence, T: int) -> None:
    layer = build(recurrence, window=T, K=70, V=33)
    layer.ring.count.zero_()
    given = inputs(layer, T)
    real = SLOTS >= 0
    S, rows = layer.ckpt[SLOTS[real].long()], Inputs(*(x[real] for x in given))
    same, _ = plain(recurrence, S, rows)
    exact, _ = plain(recurrence, S.double(), Inputs(*(x.double() for x in rows)), torch.float64)
    assert_close_to_oracle(step(layer, given)["out"][real], same, exact)
