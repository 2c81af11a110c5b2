"""The convolution of a step, held against sums over each row's accepted inputs in float64: on the CPU, in Triton's
interpreter and, where there is one, on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import build
from torch import Tensor

from replayssm import StatePool
from replayssm.backends import triton
from replayssm.hf import experts
from replayssm.hf.adapters import Call, convolve
from replayssm.hf.experts import grouped_experts
from replayssm.hf.handle import ConvHandle
from replayssm.hf.static import StaticReplayCache

CHANNELS = 37


def follow(device: str, dtype: torch.dtype, width: int, window: int, silu: bool, bias: bool) -> None:
    """Steps of random lengths, of which each row keeps a random part, over several folds."""
    rng = torch.Generator().manual_seed(width * 10 + window)
    pool = StatePool(5, fold_every=5, window=window, width=width, device=device)
    conv = pool.add_conv(CHANNELS, width, dtype)
    weight = torch.randn(CHANNELS, width, generator=rng, dtype=torch.float64).to(dtype)
    b = torch.randn(CHANNELS, generator=rng, dtype=torch.float64).to(dtype) if bias else None
    history: dict[int, list[Tensor]] = {slot: [] for slot in range(5)}
    for step in range(14):
        slots = [[2, -1, 0, 4], [1, 0, 2, -1]][step % 2]
        T = int(torch.randint(1, window + 1, (), generator=rng))
        inputs = torch.randn(4, T, CHANNELS + 3, generator=rng, dtype=torch.float64).to(dtype)[..., 2:-1]
        index = torch.tensor(slots, dtype=torch.int32, device=device)
        where = inputs.to(device).transpose(1, 2)
        y = conv.convolve(where, index, weight.to(device), None if b is None else b.to(device), silu).cpu()
        kept = torch.randint(0, T + 1, (4,), generator=rng, dtype=torch.int32)
        for row, slot in enumerate(slots):
            before = history.get(slot, [])
            x = torch.stack([torch.zeros(CHANNELS, dtype=dtype)] * (width - 1) + before + list(inputs[row])).double()
            taps = x.T.unfold(1, width, 1)[:, -T:]
            want = (taps * weight.double()[:, None]).sum(-1) + (0 if b is None else b.double()[:, None])
            size = (taps.abs() * weight.double().abs()[:, None]).sum(-1) + (
                0 if b is None else b.double().abs()[:, None]
            )
            eps = torch.finfo(dtype).eps
            assert ((y[row] - (F.silu(want) if silu else want)).abs() <= 3 * eps * (1 + size)).all(), (step, row)
            if slot >= 0:
                history[slot] = before + list(inputs[row, : int(kept[row])])
        pool.commit(index, kept.to(device))


def interpreted(code: str) -> None:
    """Runs it in Triton's interpreter, which is chosen when Triton is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


CASES = [
    (torch.float32, 4, 1, True, False),
    (torch.float32, 3, 4, False, True),
    (torch.bfloat16, 4, 3, True, True),
    (torch.float16, 2, 2, False, False),
]


@pytest.mark.parametrize("case", [*CASES, (torch.float64, 4, 2, True, True)], ids=str)
def test_a_step_continues_the_accepted_inputs(case: Any) -> None:
    follow("cpu", *case)


def test_in_the_interpreter() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nimport test_conv\ntest_conv.by_triton('cpu')"
    )
    interpreted(code)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_cuda() -> None:
    by_triton("cuda")


def by_triton(device: str) -> None:
    """All cases by the kernel, as the number of its calls shows."""
    calls, real = [], triton.convolve
    triton.convolve = lambda *args: calls.append(1) or real(*args)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        for case in CASES:
            follow(device, *case)
    finally:
        triton.convolve = real  # pyright: ignore[reportAttributeAccessIssue]
    assert len(calls) == 14 * len(CASES)


def test_many_channels_and_rows_a_program() -> None:
    """Every program's block and a ragged last one, against torch."""
    code = """
import torch
from replayssm import StatePool
from replayssm.backends import triton
pools = [StatePool(70, fold_every=4, window=2) for _ in range(2)]
a, b = (pool.add_conv(300) for pool in pools)
x, weight, slots = torch.randn(70, 300, 2), torch.randn(300, 4), torch.arange(70, dtype=torch.int32)
calls, real = [], triton.convolve
triton.convolve = lambda *args: calls.append(1) or real(*args)
y = a.convolve(x, slots, weight)
assert calls
triton.unusable = lambda device: "not now"
torch.testing.assert_close(y, b.convolve(x, slots, weight))
assert torch.equal(a.x, b.x)
"""
    interpreted(code)


def test_one_node_of_a_graph() -> None:
    pool = StatePool(2, fold_every=4, window=2)
    conv, slots, weight = pool.add_conv(6), torch.tensor([1, 0], dtype=torch.int32), torch.randn(6, 4)
    other = StatePool(2, fold_every=4, window=2).add_conv(6)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: conv.convolve(x, slots, weight, silu=True) * 2, fullgraph=True, backend="aot_eager"
    )
    for T in (2, 1):
        x = torch.randn(2, 6, T)
        torch.testing.assert_close(compiled(x), other.convolve(x, slots, weight, silu=True) * 2)
        assert torch.equal(conv.x, other.x)


@pytest.mark.parametrize("weight, bias", [((6, 3), None), ((5, 4), None), ((6, 4), (5,))])
def test_weights_of_another_shape_are_refused(weight: tuple[int, ...], bias: tuple[int, ...] | None) -> None:
    conv = StatePool(1).add_conv(6)
    b = None if bias is None else torch.zeros(bias)
    with pytest.raises(ValueError, match=r"expected weight \[channels=6, W=4\]"):
        conv.convolve(torch.zeros(1, 6, 1), torch.zeros(1, dtype=torch.int32), torch.zeros(weight), b)


def test_another_activation_is_the_models_own() -> None:
    def original(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        assert activation == "gelu"
        return F.gelu(F.conv1d(F.pad(x, (3, 0)), weight[:, None], bias, groups=6))

    pools = [StatePool(2, window=2) for _ in range(2)]
    conv, other = (pool.add_conv(6) for pool in pools)
    slots, weight = torch.arange(2, dtype=torch.int32), torch.randn(6, 4)
    names = ("hidden_states", "weight", "bias", "activation")
    for T in (2, 1):
        x = torch.randn(2, 6, T)
        handle = ConvHandle(conv, x, slots)
        got = convolve(handle, Call(original, names, (handle, weight, None), {"activation": "gelu"}))
        torch.testing.assert_close(got, F.gelu(other.convolve(x, slots, weight)))


def test_slots_with_a_stride_are_those_of_their_values() -> None:
    code = """
import torch
from replayssm import GDN, LayerSpec, StatePool, ops
from replayssm.testing import make_inputs
pools = [StatePool(6, fold_every=4) for _ in range(2)]
layers, convs = [pool.add_layer(LayerSpec(GDN, 1, 1, 16, 16)) for pool in pools], [pool.add_conv(6) for pool in pools]
strided = torch.tensor([0, 5, 3, 5], dtype=torch.int32)[::2]
inputs, new, weight = make_inputs(GDN, 2, 1, 1, 1, 16, 16, torch.float32), torch.randn(2, 6, 1), torch.randn(6, 4)
for pool, layer, conv, slots in zip(pools, layers, convs, (strided, strided.contiguous())):
    for _ in range(5):
        ops.verify(layer, *inputs, slots=slots, backend="triton")
        conv.convolve(new, slots, weight)
        pool.commit(slots, 1)
    ops.fold([layer], slots, backend="triton")
assert all(torch.equal(a, b) for a, b in zip(layers[0].tensors.values(), layers[1].tensors.values()))
assert torch.equal(convs[0].x, convs[1].x) and not layers[0].ckpt[[1, 2, 4, 5]].any()
"""
    interpreted(code)


@pytest.mark.parametrize("slots, dtype", [([0, 1], torch.int64), ([1, 1], torch.int32)])
def test_slots_are_checked(slots: list[int], dtype: torch.dtype) -> None:
    conv = StatePool(2).add_conv(6)
    with pytest.raises((TypeError, ValueError), match="conv: "):
        conv.convolve(torch.zeros(2, 6, 1), torch.tensor(slots, dtype=dtype), torch.zeros(6, 4))


def test_no_gradient_and_no_token() -> None:
    conv, slots = StatePool(2).add_conv(6), torch.arange(2, dtype=torch.int32)
    x, weight = torch.randn(2, 6, 1, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    assert not conv.convolve(x, slots, weight).requires_grad and not conv.x.requires_grad
    conv.extend(x, slots)
    assert not conv.x.requires_grad
    assert conv.convolve(x[..., :0], slots, weight).shape == (2, 6, 0)


@torch.no_grad()
def test_a_chunk_that_failed_leaves_the_convolution_as_it_was() -> None:
    from replayssm import attach, detach

    ids = torch.randint(3, 100, (2, 11), generator=torch.Generator().manual_seed(0))
    want = build("qwen3_5")(ids, use_cache=False).logits
    model = attach(build("qwen3_5"), fold_every=4)
    cache = StaticReplayCache(model, 64)

    def off(i: int, j: int) -> float:
        positions = torch.arange(i, j)[None].expand(2, -1)
        return float((model(ids[:, i:j], cache=cache, position_ids=positions).logits - want[:, i:j]).abs().max())

    assert max(off(0, 5), off(5, 6)) < 1e-4
    detach(model)
    with pytest.raises(RuntimeError, match="not attached"):
        off(6, 10)
    attach(model, fold_every=4)
    assert max(off(6, 7), off(7, 9), off(9, 10), off(10, 11)) < 1e-4
    detach(model)


def test_experts_are_grouped_for_many_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from replayssm import attach, detach

    model = build("qwen3_5_moe").to(torch.bfloat16)
    assert not experts._groups(model)  # on a CPU
    monkeypatch.setattr(experts, "_groups", lambda model: True)
    attach(model)
    model.set_experts_implementation("grouped_mm")
    cache = StaticReplayCache(model, 8)
    model.set_experts_implementation("batched_mm")  # as generate does for its steps
    seen = []
    for B in (1, 8):
        with grouped_experts(model, {"cache": cache, "input_ids": torch.zeros(B, 1, dtype=torch.long)}):
            seen.append(set(model.get_experts_implementation().values()))
        assert set(model.get_experts_implementation().values()) == {"batched_mm"}
    assert seen == [{"batched_mm"}, {"grouped_mm"}]
    asked = StaticReplayCache(model, 8)  # of a user who wants it so
    with grouped_experts(model, {"cache": asked, "input_ids": torch.zeros(8, 1, dtype=torch.long)}):
        assert set(model.get_experts_implementation().values()) == {"batched_mm"}
    detach(model)
