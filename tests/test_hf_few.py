"""What a captured step has in place of stock's for few tokens: attention over latents, experts that are not copied."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import pytest
import torch
from fake_graphs import fake_graphs as fake_graphs
from test_hf_static import captured_text, prompt
from tiny_models import BACKEND, build
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import replayssm
from replayssm.hf import explain
from replayssm.hf.attention import FEW, _as_cached, attend, grouped_attention
from replayssm.hf.captured import CapturedStep, Compiled
from replayssm.hf.experts import read_in_place

MLA = ("kimi_linear", "glm5_next", "bailing_hybrid")
DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]


def expanding(model: Any) -> list[Any]:
    """The modules of multi-head latent attention."""
    return [module for module in model.modules() if hasattr(type(module), "expand_kv")]


def count_expansions(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry for each expansion, by the tokens that it is of."""
    kind, calls = type(expanding(model)[0]), []
    stock = kind.expand_kv

    @functools.wraps(stock)
    def spy(self: Any, latents: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(latents.shape[2])
        return stock(self, latents, turned)

    monkeypatch.setattr(kind, "expand_kv", spy)
    return calls


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MLA)
def test_latents_are_attended_as_they_are_cached(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = replayssm.attach(build(name).to(device), fold_every=6, backend=BACKEND)
    ids = prompt(model, length=12)["input_ids"]
    cache, calls = replayssm.StaticReplayCache(model, 40), count_expansions(model, monkeypatch)
    with torch.no_grad():
        model(ids, cache=cache)
        assert len(calls) == len(expanding(model)) > 0
        for tokens in (1, 3):
            other, x = copy.deepcopy(cache), ids[:, :tokens]
            want, before = model(x, cache=other).logits, len(calls)
            with grouped_attention(model):
                got = model(x, cache=cache).logits
            assert len(calls) == before
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert not any("expand_kv" in module.__dict__ for module in expanding(model))
    replayssm.detach(model)


def test_many_tokens_and_projections_with_a_hook_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = replayssm.attach(build("kimi_linear"), fold_every=6, backend=BACKEND)
    ids = prompt(model, length=FEW + 1)["input_ids"]
    cache, calls = replayssm.StaticReplayCache(model, 64), count_expansions(model, monkeypatch)
    with torch.no_grad():
        model(ids, cache=cache)
        other, before = copy.deepcopy(cache), len(calls)
        want = model(ids, cache=other).logits
        with grouped_attention(model):
            got = model(ids, cache=cache).logits
        assert len(calls) == before + 2 * len(expanding(model))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        hooks = [m.kv_b_proj.register_forward_hook(lambda m, x, y: y * 0) for m in expanding(model)]
        other, before = copy.deepcopy(cache), len(calls)
        want = model(ids[:, :1], cache=other).logits
        with grouped_attention(model):
            got = model(ids[:, :1], cache=cache).logits
        assert len(calls) == before + 2 * len(expanding(model))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        for hook in hooks:
            hook.remove()
    replayssm.detach(model)


def _twice(module: Any) -> None:
    stock = type(module)

    def expand_kv(self: Any, latents: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        k, v = stock.expand_kv(self, latents, turned)
        return k, v * 2

    module.expand_kv = types.MethodType(expand_kv, module)


def _wrapped(module: Any) -> None:
    own = module.kv_b_proj.forward
    module.kv_b_proj.forward = lambda x: own(x) * 2


class _Odd(torch.nn.Parameter):
    """A weight of another kind."""


def _odd(module: Any) -> None:
    module.kv_b_proj.weight = _Odd(module.kv_b_proj.weight.data)


@pytest.mark.parametrize("change", [_twice, _wrapped, _odd], ids=["own expand_kv", "own forward", "own weight"])
def test_what_is_not_stock_s_is_left_alone(change: Any) -> None:
    model = replayssm.attach(build("kimi_linear"), fold_every=6, backend=BACKEND)
    for module in expanding(model):
        change(module)
    ids, cache = prompt(model)["input_ids"], replayssm.StaticReplayCache(model, 40)
    before = [dict(module.__dict__) for module in expanding(model)]
    with torch.no_grad():
        model(ids, cache=cache)
        other = copy.deepcopy(cache)
        want = model(ids[:, :1], cache=other).logits
        with grouped_attention(model):
            assert not any(module.__dict__.get("expand_kv") is _as_cached for module in expanding(model))
            got = model(ids[:, :1], cache=cache).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert [module.__dict__.keys() for module in expanding(model)] == [each.keys() for each in before]
    replayssm.detach(model)


def test_modules_with_a_configuration_of_their_own_expand() -> None:
    model = replayssm.attach(build("kimi_linear"), fold_every=6, backend=BACKEND)
    ids, cache = prompt(model)["input_ids"], replayssm.StaticReplayCache(model, 40)
    model.config = copy.deepcopy(model.config)  # theirs is the one before
    with torch.no_grad():
        model(ids, cache=cache)
        other = copy.deepcopy(cache)
        want = model(ids[:, :1], cache=other).logits
        with grouped_attention(model):
            got = model(ids[:, :1], cache=cache).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    replayssm.detach(model)


def test_latent_attention_is_attention() -> None:
    gen = torch.Generator().manual_seed(0)
    B, heads, S, rank, plain, turned, dv = 2, 6, 11, 16, 8, 4, 5

    class Latent(torch.nn.Module):
        config: Any = None

        def __init__(self) -> None:
            super().__init__()
            self.kv_b_proj = torch.nn.Linear(rank, heads * (plain + dv), bias=False, dtype=torch.float64)

        def expand_kv(self, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
            k, v = self.kv_b_proj(c).view(B, S, heads, plain + dv).transpose(1, 2).split([plain, dv], -1)
            return torch.cat([k, r.expand(-1, heads, -1, -1)], -1), v

    Latent.expand_kv.__module__ = "transformers.models.own"  # as if it were one of theirs
    model = build("kimi_linear")
    module = Latent()
    model.own, module.config = module, model.config
    c, r = (torch.randn(B, 1, S, n, generator=gen, dtype=torch.float64) for n in (rank, turned))
    q = torch.randn(B, heads, 3, plain + turned, generator=gen, dtype=torch.float64)
    mask = torch.rand(B, 1, 3, S, generator=gen) < 0.7
    mask[..., 0] = True
    k, v = module.expand_kv(c, r)
    weights = (q @ k.transpose(2, 3) * 0.3).masked_fill(~mask, -torch.inf).softmax(-1)
    with grouped_attention(model), torch.no_grad():
        assert module.expand_kv(c, r)[0] is c
        got, _ = attend(module, q, c, r, mask, scaling=0.3)
    torch.testing.assert_close(got, (weights @ v).transpose(1, 2).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_picked_matrix_is_read_in_place(transposed: bool, tokens: int) -> None:
    class Picks(torch.nn.Module):
        def forward(self, W: Tensor, ids: Tensor, x: Tensor, U: Tensor) -> Tensor:
            picked = torch.bmm(x[:, None], W[ids]) if transposed else torch.bmm(W[ids], x[:, :, None])
            return torch.bmm(picked if transposed else picked.mT, U)

    gen = torch.Generator().manual_seed(0)
    inputs = (torch.randn(7, 6, 6, generator=gen), torch.arange(tokens) % 3, torch.randn(tokens, 6, generator=gen),
              torch.randn(tokens, 6, 2, generator=gen))  # fmt: skip
    graph = torch.fx.symbolic_trace(Picks())
    want = graph(*inputs)
    read_in_place(graph)
    graph.graph.lint()
    graph.recompile()
    assert sum(node.target is torch.bmm for node in graph.graph.nodes) == 1, "what was not picked stays"
    torch.testing.assert_close(graph(*inputs), want)
    rounded = [x.bfloat16() if x.is_floating_point() else x for x in inputs]
    assert graph(*rounded).dtype == torch.bfloat16
    exact = [x.double() if x.is_floating_point() else x for x in inputs]
    torch.testing.assert_close(graph(*exact), torch.fx.symbolic_trace(Picks())(*exact), rtol=1e-14, atol=1e-14)


def test_a_product_with_an_output_type_of_its_own_stays() -> None:
    class Picks(torch.nn.Module):
        def forward(self, W: Tensor, ids: Tensor, x: Tensor) -> Tensor:
            return torch.bmm(W[ids], x, torch.float32)

    graph = torch.fx.symbolic_trace(Picks())
    read_in_place(graph)
    assert any(node.target is torch.bmm for node in graph.graph.nodes)


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_graphs_that_break_within_a_layer_take_each_layer_s_weights(name: str) -> None:
    torch.compiler.reset()
    model = replayssm.attach(build(name), fold_every=6, backend=BACKEND)
    seen: list[float] = []
    note = torch.compiler.disable(lambda x: seen.append(float(x.abs().max())))
    for part, module in model.named_modules():
        if part.endswith(("linear_attn", "self_attn")):
            module.register_forward_hook(lambda m, x, out: note(out[0] if isinstance(out, tuple) else out) and None)
    step = Compiled(model, lambda graph, inputs: graph)
    ids = prompt(model)["input_ids"]
    cache, other = (replayssm.StaticReplayCache(model, 32) for _ in range(2))
    with torch.no_grad():
        for each in (cache, other):
            model(ids, cache=each)
        for _ in range(3):
            got, want = step(input_ids=ids[:, :1], cache=cache).logits, model(ids[:, :1], cache=other).logits
            torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
    assert seen
    replayssm.detach(model)


def test_the_vector_is_made_once_and_not_for_each_row() -> None:
    class Fed(torch.nn.Module):
        def forward(self, W: Tensor, ids: Tensor, x: Tensor) -> Tensor:
            return torch.bmm(W[ids], torch.nn.functional.silu(x)[:, :, None])

    graph = torch.fx.symbolic_trace(Fed())
    read_in_place(graph)
    graph.recompile()
    traced = make_fx(graph)(torch.randn(7, 6, 6), torch.arange(3), torch.randn(3, 6))
    kept = [node for node in traced.graph.nodes if node.target is torch.ops.aten.as_strided.default]
    assert len(kept) == 1, "the strides at which Inductor stops"


def test_experts_of_a_step_are_not_copied() -> None:
    torch.compiler.reset()
    model = replayssm.attach(build("kimi_linear"), fold_every=6, backend=BACKEND)
    model.set_experts_implementation("batched_mm")  # as generate does for its steps
    graphs: list[Any] = []
    step = Compiled(model, lambda graph, inputs: graphs.append(graph) or graph)
    ids = prompt(model)["input_ids"]
    cache, other = (replayssm.StaticReplayCache(model, 32) for _ in range(2))
    with torch.no_grad():
        for each in (cache, other):
            model(ids, cache=each)
        got, want = step(input_ids=ids[:, :1], cache=cache).logits, model(ids[:, :1], cache=other).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    names = [getattr(node.target, "__name__", "") for graph in graphs for node in graph.graph.nodes]
    experts = sum(hasattr(module, "gate_up_proj") for module in model.modules())
    assert names.count("_product") == 2 * experts > 0
    replayssm.detach(model)


@torch.no_grad()
def test_what_a_step_has_in_place_of_stock_s_is_said(fake_graphs: None) -> None:
    torch.compiler.reset()
    model = replayssm.attach(build("kimi_linear"), fold_every=6, backend=BACKEND)
    model.set_experts_implementation("batched_mm")
    step, ids = CapturedStep(Compiled(model, lambda graph, inputs: graph)), prompt(model)["input_ids"]
    cache = replayssm.StaticReplayCache(model, 32)
    captured_text(model, step, cache, ids)
    said = f"merged, {len(expanding(model))} layers attend to latents, experts read in place"
    assert said in explain(model) and said in cache.explain()
    cache.reset()
    captured_text(model, step, cache, ids, n=1)
    assert said in explain(model), "its graph is still there"
    grows = replayssm.ReplayCache(model)
    for tokens in (ids, ids[:, :1]):
        model(tokens, cache=grows)
    assert "step:" not in explain(model), "the newest cache's, which captures nothing"
    hook = model.model.norm.register_forward_hook(lambda *args: None)
    captured_text(model, step, replayssm.StaticReplayCache(model, 32), ids)
    assert "step: not captured (the model's modules have hooks" in explain(model)
    hook.remove()
    replayssm.detach(model)
