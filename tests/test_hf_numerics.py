"""Error of an attached model against a float64 copy: at most twice that of stock, step for step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_models import BACKEND, assert_as_exact, build, rms, truth

import replayssm

transformers.logging.set_verbosity_error()
TWO = ["linear_attention", "full_attention"]
SMALL: dict[str, dict[str, Any]] = {
    "qwen3_5": dict(num_hidden_layers=2, layer_types=TWO),
    "kimi_linear": dict(num_hidden_layers=2, layer_types=TWO, mlp_layer_types=["dense", "dense"]),
    "mamba2": dict(num_hidden_layers=2),
}


def decode(model: Any, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Logits of the given text, token by token behind a prompt."""
    with torch.inference_mode():
        out = model(ids[:, :prompt], use_cache=True)
        rows = [out.logits]
        for token in ids[:, prompt:].split(1, 1):
            out = model(token, cache=out.cache, use_cache=True)
            rows.append(out.logits)
    return torch.cat(rows, 1).clone()


@pytest.mark.parametrize("name", list(SMALL))
def test_two_thousand_tokens(name: str) -> None:
    """125 folds, on one layer with attention behind it (mamba2: two layers)."""
    ids = torch.randint(3, 100, (1, 2016), generator=torch.Generator().manual_seed(1))
    stock, ours = build(name, **SMALL[name]), replayssm.attach(build(name, **SMALL[name]), backend=BACKEND)
    want, got = decode(stock, ids, 16), decode(ours, ids, 16)
    wide = truth(stock, ids)
    assert_as_exact(got, want, wide)
    assert_as_exact(got[:, -200:], want[:, -200:], wide[:, -200:])  # no drift that the mean would hide
    replayssm.detach(ours)


@pytest.mark.parametrize("name", list(SMALL))
def test_bfloat16_models(name: str) -> None:
    """9. Against a float64 copy of the same rounded weights. Stock's one-token step of Mamba-2 multiplies in bfloat16,
    ours in float32, so their tokens may differ."""
    ids = torch.randint(3, 100, (2, 80), generator=torch.Generator().manual_seed(1))
    stock = build(name, **SMALL[name]).bfloat16()
    ours = replayssm.attach(build(name, **SMALL[name]).bfloat16(), backend=BACKEND)
    got, want, wide = decode(ours, ids, 10), decode(stock, ids, 10), truth(stock, ids)
    assert got.dtype == want.dtype
    assert rms(got - wide) <= 2 * rms(want - wide)
    cache = replayssm.ReplayCache(ours)
    with torch.no_grad():
        ours(ids[:, :10], cache=cache)
        ours(ids[:, 10:11], cache=cache)
    state = cache.recurrent.states[0]
    d = torch.bfloat16 if name == "mamba2" else torch.float32
    assert (state.ckpt.dtype, state.k.dtype, state.d.dtype, state.w.dtype) == (
        torch.float32, torch.bfloat16, d, torch.float32,
    )  # fmt: skip
    replayssm.detach(ours)
