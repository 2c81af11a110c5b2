"""``generate(..., cache_implementation="static")`` of attached models against stock: eager, compiled, captured."""

from __future__ import annotations

import copy
import gc
import logging
import re
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from fake_graphs import fake_graphs as fake_graphs
from tiny_models import BACKEND, BUILDERS, build
from torch._dynamo.utils import counters

import replayssm
from replayssm.auto import FoldEvery
from replayssm.hf import explain
from replayssm.hf.attention import attend, grouped_attention
from replayssm.hf.captured import CAPTURED, CapturedStep, Compiled
from replayssm.hf.merged import LINEAR

transformers.logging.set_verbosity_error()
DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]
NEW = 40
BRANCHING = {"qwen4_exp"}  # its indexer branches on a count, so that a graph breaks there, in stock as well
COUNTING = {"lara_mini"}  # its sliding layers count on the host: compiled anew at every step, in stock as well


class Pair(NamedTuple):
    name: str
    stock: Any
    ours: Any


@pytest.fixture(scope="module", params=[(name, device) for name in BUILDERS for device in DEVICES], ids="-".join)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    name, device = request.param
    stock, ours = build(name).to(device), build(name).to(device)
    stock.generation_config.eos_token_id = ours.generation_config.eos_token_id = None
    replayssm.attach(ours, fold_every=6, backend=BACKEND)
    yield Pair(name, stock, ours)
    replayssm.detach(ours)


@pytest.fixture
def small() -> Iterator[Any]:
    model = build("qwen3_5")
    model.generation_config.eos_token_id = None
    yield replayssm.attach(model, fold_every=6, backend=BACKEND)
    replayssm.detach(model)


def prompt(model: Any, rows: int = 2, length: int = 9, **changes: Any) -> dict[str, Any]:
    ids = torch.randint(3, 100, (rows, length), generator=torch.Generator().manual_seed(1)).to(model.device)
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids)) | changes


def padded(model: Any) -> dict[str, Any]:
    inputs = prompt(model)
    inputs["attention_mask"][0, :4] = 0
    return inputs


def generate(model: Any, inputs: dict[str, Any], **kwargs: Any) -> torch.Tensor:
    settings: dict[str, Any] = dict(max_new_tokens=NEW, do_sample=False)
    return model.generate(**inputs, **settings | kwargs)


def compiled(backend: str, **kwargs: Any) -> transformers.CompileConfig:
    config = transformers.CompileConfig(backend=backend, mode=None, dynamic=False, **kwargs)
    config._compile_all_devices = True
    return config


@pytest.mark.parametrize("inputs", [prompt, padded])
def test_uncompiled(pair: Pair, inputs: Any) -> None:
    want = generate(pair.stock, inputs(pair.stock))
    got = generate(pair.ours, inputs(pair.ours), cache_implementation="static", disable_compile=True)
    assert torch.equal(got, want)
    assert "static cache" in explain(pair.ours)


def test_compiled_once(pair: Pair) -> None:
    torch.compiler.reset()
    counters.clear()
    want = generate(pair.stock, prompt(pair.stock), max_new_tokens=12 if pair.name in COUNTING else NEW)
    config = compiled("eager", fullgraph=pair.name not in BRANCHING | COUNTING)
    for _ in range(2):
        new = want.shape[1] - 9
        got = generate(
            pair.ours, prompt(pair.ours), cache_implementation="static", compile_config=config, max_new_tokens=new
        )
        assert torch.equal(got, want)
        if pair.name not in BRANCHING | COUNTING:
            assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("inputs", [prompt, padded])
def test_captured(pair: Pair, inputs: Any) -> None:
    if pair.ours.device.type != "cuda":
        pytest.skip("captured on a GPU only")
    torch.compiler.reset()
    new = 12 if pair.name in COUNTING else NEW
    want = generate(pair.stock, inputs(pair.stock), max_new_tokens=new)
    for _ in range(2):
        cache = replayssm.StaticReplayCache(pair.ours, 64)
        got = generate(pair.ours, inputs(pair.ours), cache=cache, max_new_tokens=new)
        assert torch.equal(got, want)
        known = all(type(layer) in CAPTURED for layer in cache.layers)
        assert (cache.step is not None) == known
        if known and pair.name not in BRANCHING:
            assert cache.step is not None and cache.step.graph is not None, cache.step and cache.step.refused


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_what_a_captured_step_cannot_keep_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    stock, ours = build("nemotron_h").cuda(), replayssm.attach(build("nemotron_h").cuda())
    kwargs: dict[str, Any] = dict(return_dict_in_generate=True, output_hidden_states=True, eos_token_id=None)
    with caplog.at_level(logging.WARNING, "replayssm"):
        got, want = (
            generate(model, prompt(model), **kwargs, **static)
            for model, static in ((ours, dict(cache_implementation="static")), (stock, {}))
        )
    assert "not captured" in caplog.text
    for a, b in zip(got.hidden_states, want.hidden_states, strict=True):  # pyright: ignore
        torch.testing.assert_close(a[-1], b[-1], rtol=1e-3, atol=1e-3)


def test_sampling(pair: Pair) -> None:
    out = []
    for model, kwargs in ((pair.stock, {}), (pair.ours, dict(cache_implementation="static", disable_compile=True))):
        torch.manual_seed(3)
        out.append(generate(model, prompt(model), do_sample=True, top_k=30, num_return_sequences=2, **kwargs))
    assert torch.equal(*out)


@pytest.mark.parametrize("compile", [False, True])
def test_a_prompt_in_pieces(small: Any, compile: bool) -> None:
    torch.compiler.reset()
    want = generate(small, prompt(small))
    kwargs: dict[str, Any] = dict(compile_config=compiled("eager")) if compile else dict(disable_compile=True)
    got = generate(small, prompt(small), cache_implementation="static", prefill_chunk_size=4, **kwargs)
    assert torch.equal(got, want)


def test_a_prompt_of_one_token(pair: Pair) -> None:
    want = generate(pair.stock, prompt(pair.stock, length=1))
    got = generate(pair.ours, prompt(pair.ours, length=1), cache_implementation="static", disable_compile=True)
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "nemotron_h"])
def test_a_conversation_goes_on_and_a_cache_starts_anew(name: str) -> None:
    small = replayssm.attach(build(name), fold_every=6, backend=BACKEND)
    small.generation_config.eos_token_id = None
    first = prompt(small)
    want = generate(small, first)
    more = torch.cat([want, want[:, 3:8]], 1)
    whole = generate(small, dict(input_ids=more, attention_mask=torch.ones_like(more)))
    cache = replayssm.StaticReplayCache(small, 128)
    for _ in range(2):
        assert torch.equal(generate(small, first, cache=cache), want)
        got = generate(small, dict(input_ids=more, attention_mask=torch.ones_like(more)), cache=cache)
        assert torch.equal(got, whole)
        cache.reset()
    replayssm.detach(small)


def test_without_attention_a_cache_does_not_go_on_but_starts_anew() -> None:
    model = replayssm.attach(build("mamba2"), backend=BACKEND)
    model.generation_config.eos_token_id = None
    cache = replayssm.StaticReplayCache(model, 64)
    want = generate(model, prompt(model), cache=cache)
    with pytest.raises(ValueError, match="does not know how many tokens it holds"):
        generate(model, prompt(model), cache=cache)
    cache.reset()
    assert torch.equal(generate(model, prompt(model), cache=cache), want)
    replayssm.detach(model)


def test_what_a_static_cache_cannot_do_is_said(small: Any, caplog: pytest.LogCaptureFixture) -> None:
    cache = replayssm.StaticReplayCache(small, 32)
    with pytest.raises(ValueError, match=r"holds 32 tokens; this text may get 48"):
        generate(small, prompt(small), cache=cache)
    generate(small, prompt(small), cache=cache, max_new_tokens=8)
    with pytest.raises(ValueError, match=r"expected a batch of 2.*got a batch of 3"):
        small(prompt(small, rows=3)["input_ids"], cache=cache)
    with pytest.raises(RuntimeError, match="cannot take tokens back"):
        cache.crop(-1)
    with pytest.raises(RuntimeError, match="cannot reorder"):
        cache.reorder_cache(torch.tensor([1, 0]))
    other = replayssm.attach(build("nemotron_h"))
    with pytest.raises(ValueError, match="made for qwen3_5_text"):
        other(prompt(other)["input_ids"], cache=cache)
    replayssm.detach(other)
    with pytest.raises(RuntimeError, match="not attached"):
        replayssm.StaticReplayCache(other, 32)


@pytest.mark.parametrize("kwargs", [dict(num_beams=3), dict(prompt_lookup_num_tokens=3)])
def test_beams_and_drafts_take_the_default_cache(
    small: Any, kwargs: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    inputs = prompt(small, rows=1)
    want = generate(small, inputs, **kwargs)
    with caplog.at_level(logging.WARNING, "replayssm"):
        out = generate(small, inputs, cache_implementation="static", return_dict_in_generate=True, **kwargs)
    assert torch.equal(out.sequences, want)  # pyright: ignore
    assert type(out.cache) is replayssm.ReplayCache  # pyright: ignore
    assert "static cache" in caplog.text


def test_detached_models_and_stock_caches_are_left_alone(small: Any) -> None:
    stock = build("qwen3_5")
    want = generate(stock, prompt(stock))
    assert torch.equal(generate(stock, prompt(stock), cache_implementation="static"), want)
    cache = transformers.StaticCache(config=small.config, max_cache_len=64)
    assert torch.equal(generate(small, prompt(small), cache=cache), want)


def test_the_look_at_the_end_is_deferred_for_our_caches_on_a_gpu_only() -> None:
    check: Any = pytest.importorskip("transformers.generation.utils").DeferredStopCheck
    stock = check.is_supported
    models = [replayssm.attach(build(name)) for name in ("qwen3_5", "nemotron_h")]
    ours, theirs = replayssm.StaticReplayCache(models[0], 8), transformers.DynamicCache()
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert check.is_supported(cuda, ours, False, is_assistant=False)
    for device, cache, returned, assistant in (
        (cpu, ours, False, False), (cuda, theirs, False, False), (cuda, ours, True, False), (cuda, ours, False, True),
    ):  # fmt: skip
        assert not check.is_supported(device, cache, returned, is_assistant=assistant)
    replayssm.detach(models[0])
    assert check.is_supported(cuda, ours, False, is_assistant=False)
    replayssm.detach(models[1])
    assert check.is_supported is stock


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "nemotron_h", "zamba2"])
def test_projections_of_one_input_are_one_product(name: str) -> None:
    torch.compiler.reset()
    model, stock = build(name), build(name)
    replayssm.attach(model, backend=BACKEND)

    def memory() -> int:
        return sum({(x := p.untyped_storage()).data_ptr(): x.nbytes() for p in model.parameters()}.values())

    before = memory()
    graphs: list[Any] = []
    step = Compiled(model, lambda graph, inputs: graphs.append(graph) or graph)
    cache, theirs = replayssm.StaticReplayCache(model, 32), transformers.DynamicCache(config=stock.config)
    ids = prompt(model)["input_ids"]
    with torch.no_grad():
        model(ids, cache=cache)
        stock(ids, cache=theirs)
        for i in range(4):
            got, want = step(input_ids=ids[:, :1], cache=cache).logits, stock(ids[:, :1], cache=theirs).logits
            torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
            assert i > 1 or memory() == before
            if i == 1:  # a change in place, as training makes it
                for each in (model, stock):
                    each.get_decoder().layers[0].apply(lambda m: [p.mul_(0.9) for p in m.parameters(recurse=False)])
            if i == 2:  # a parameter that is replaced: nothing of it may be where it was
                for each in (model, stock):
                    for layer in each.get_decoder().layers:
                        for module in layer.modules():
                            if isinstance(module, torch.nn.Linear):
                                module.weight = torch.nn.Parameter(module.weight * 0.8)
        assert len(graphs) == 2, "compiled once, and again for the replaced parameters"
    inputs = [[n.args[0] for n in graph.graph.nodes if n.target is LINEAR] for graph in graphs]
    if name != "zamba2":  # whose blocks share weights, which can be in one group only
        assert all(len(each) == len(set(each)) for each in inputs)
    replayssm.detach(model)


def test_where_merging_fails_a_step_is_compiled_without(
    small: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise AssertionError("torch hands graphs over in another way")

    monkeypatch.setattr("replayssm.hf.merged.GraphModule", broken)
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **k: original(f, **{"backend": "eager"} | k))
    torch.compiler.reset()
    cache, ids = replayssm.StaticReplayCache(small, 32), prompt(small)["input_ids"]
    other = replayssm.StaticReplayCache(small, 32)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "replayssm"):
        for each in (cache, other):
            small(ids, cache=each)
        got, want = Compiled(small)(input_ids=ids[:, :1], cache=cache).logits, small(ids[:, :1], cache=other).logits
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
    assert "projections are not merged" in caplog.text


def test_a_forward_that_stopped_halfway_is_noticed(small: Any) -> None:
    ids = prompt(small)["input_ids"]
    want = generate(small, prompt(small))
    cache = replayssm.StaticReplayCache(small, 64)

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        for tokens in (ids, ids[:, :1]):
            handle = small.model.layers[2].register_forward_pre_hook(stop)
            with pytest.raises(KeyboardInterrupt):
                small(tokens, cache=cache)
            handle.remove()
            with pytest.raises(RuntimeError, match="between two tokens"):
                small(tokens, cache=cache)
            cache.reset()
            small(ids, cache=cache)
    cache.reset()
    assert torch.equal(generate(small, prompt(small), cache=cache), want)


def captured_text(model: Any, step: Any, cache: Any, tokens: torch.Tensor, n: int = 8) -> list[torch.Tensor]:
    """Logits after a prompt and some tokens, each step as generate makes it on a GPU."""
    logits = []
    with torch.no_grad():
        model(tokens, cache=cache, use_cache=True)
        for i in range(n):
            out = step(cache, dict(input_ids=tokens[:, i : i + 1], use_cache=True))
            logits.append((out["logits"] if isinstance(out, dict) else out.logits).clone())
    return logits


def test_a_captured_step_knows_when_its_model_changed(small: Any, fake_graphs: None) -> None:
    torch.compiler.reset()
    ids, step = prompt(small)["input_ids"], CapturedStep(Compiled(small, lambda graph, inputs: graph))
    cache = replayssm.StaticReplayCache(small, 64)
    before = captured_text(small, step, cache, ids)
    assert step.graph is not None
    assert re.search(r"^step: one CUDA graph; compiled, [1-9]\d* groups of projections merged$", explain(small), re.M)
    small.load_state_dict({name: x * 0.9 for name, x in small.state_dict().items()}, assign=True)
    cache.reset()
    after = captured_text(small, step, cache, ids)
    plain = replayssm.StaticReplayCache(small, 64)
    with torch.no_grad():
        small(ids, cache=plain)
        want = [small(ids[:, i : i + 1], cache=plain).logits for i in range(8)]
    for got, right, old in zip(after, want, before, strict=True):
        torch.testing.assert_close(got, right, rtol=2e-4, atol=2e-4)
        assert (got - old).abs().max() > 0.01
    handle = small.model.norm.register_forward_hook(lambda *args: None)
    cache.reset()
    captured_text(small, step, cache, ids)
    assert step.graph is None and step.refused is not None and "hooks" in step.refused
    handle.remove()


def test_a_capture_that_fails_is_tried_once_and_said(
    small: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.compiler.reset()
    tries: list[int] = []

    def fails(self: CapturedStep, cache: Any, leaves: list[Any], spec: Any) -> None:
        tries.append(1)
        cache.recurrent._open = True  # what a forward leaves that stops halfway
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(CapturedStep, "_capture", fails)
    ids, step = prompt(small)["input_ids"], CapturedStep(Compiled(small, lambda graph, inputs: graph))
    with caplog.at_level(logging.WARNING, "replayssm"):
        got = captured_text(small, step, replayssm.StaticReplayCache(small, 64), ids)
    plain = replayssm.StaticReplayCache(small, 64)
    with torch.no_grad():
        small(ids, cache=plain)
        for i, logits in enumerate(got):
            torch.testing.assert_close(logits, small(ids[:, i : i + 1], cache=plain).logits, rtol=2e-4, atol=2e-4)
    assert len(tries) == 1 and caplog.text.count("not permitted") == 1


def test_copies_of_models_and_caches_stand_alone(small: Any) -> None:
    torch.compiler.reset()
    ids = prompt(small)["input_ids"]
    small._replayssm.compiled = Compiled(small, lambda graph, inputs: graph)
    cache = replayssm.StaticReplayCache(small, 64)
    cache.step = CapturedStep(small._replayssm.compiled)
    with torch.no_grad():
        small(ids, cache=cache)
        assert copy.deepcopy(cache).step is None
        other = copy.deepcopy(small)
        assert other._replayssm.compiled is None and other._replayssm is not small._replayssm
        for p in other.parameters():
            p.mul_(0.9)
        want = generate(small, prompt(small))
        assert not torch.equal(
            generate(other, prompt(other), cache_implementation="static", disable_compile=True), want
        )
        replayssm.detach(other)
        got = generate(small, prompt(small), cache_implementation="static", disable_compile=True)
    assert torch.equal(got, want), "the copy's detach is its own"


def test_merging_keeps_nothing_alive_and_can_be_undone() -> None:
    torch.compiler.reset()
    model = replayssm.attach(build("qwen3_5"), backend=BACKEND)
    step = model._replayssm.compiled = Compiled(model, lambda graph, inputs: graph)
    mlp = model.model.layers[0].mlp
    flat = torch.cat([p.detach().flatten() for p in mlp.parameters()])
    at = 0
    for p in mlp.parameters():  # views of memory that is somebody else's: they stay there
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    cache = replayssm.StaticReplayCache(model, 32)
    ids = prompt(model)["input_ids"]
    with torch.no_grad():
        model(ids, cache=cache)
        step(input_ids=ids[:, :1], cache=cache)
    assert all(p.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for p in mlp.parameters())
    merged = [p for p in model.parameters() if p.untyped_storage().nbytes() != p.nbytes and p.data_ptr()]
    assert len(merged) > 10
    model.model.layers[1].mlp.gate_proj = torch.nn.Sequential(model.model.layers[1].mlp.gate_proj)
    assert not step.merging.valid  # pyright: ignore
    model.model.layers[1].mlp.gate_proj = model.model.layers[1].mlp.gate_proj[0]
    replayssm.detach(model)
    own = [p for p in model.parameters() if p.untyped_storage().nbytes() == p.nbytes]
    assert len(own) == len(list(model.parameters())) - len(list(mlp.parameters()))
    gone = weakref.ref(model)
    del model, step, cache, mlp, merged, own, p
    gc.collect()
    assert gone() is None


def test_only_the_text_models_attention_is_grouped() -> None:
    model = build("qwen3_5")
    config = model.config.get_text_config(decoder=True)
    with grouped_attention(model):
        assert config._attn_implementation == "replayssm_grouped"
    assert config._attn_implementation == "sdpa"
    config._attn_implementation_internal = "eager"
    with grouped_attention(model):
        assert config._attn_implementation == "eager"


@pytest.mark.parametrize("tokens", [1, 3])
def test_how_often_states_are_written_is_chosen_and_said(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("kimi_linear")
    model.generation_config.eos_token_id = None
    want = generate(model, prompt(model))
    chosen = FoldEvery(tokens, "it was told to")
    monkeypatch.setattr("replayssm.hf.static.fold_every", lambda spec, rows, device: chosen)
    replayssm.attach(model, backend=BACKEND)
    assert torch.equal(generate(model, prompt(model), cache_implementation="static", disable_compile=True), want)
    assert f"a fold after {tokens} tokens, window 1 (static cache; it was told to)" in explain(model)
    replayssm.detach(model)


def test_attention_in_groups_is_attention() -> None:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, heads, n, 8, generator=gen) for heads, n in ((6, 1), (2, 11), (2, 11)))
    mask = torch.rand(3, 1, 1, 11, generator=gen) < 0.7
    mask[..., 0] = True
    module = torch.nn.Module()
    module.num_key_value_groups = 3  # pyright: ignore
    got, _ = attend(module, q, k, v, mask, scaling=0.3)
    added, _ = attend(module, q, k, v, torch.where(mask, 0.0, -1e30), scaling=0.3)
    assert torch.equal(added, got)
    whole, _ = attend(module, q, k, v, None)
    same, _ = attend(module, q, k, v, torch.ones_like(mask), scaling=8**-0.5)
    assert torch.equal(whole, same)
    scores = (q.double() @ k.double().repeat_interleave(3, 1).transpose(2, 3) * 0.3).masked_fill(~mask, -torch.inf)
    want = (scores.softmax(-1) @ v.double().repeat_interleave(3, 1)).transpose(1, 2)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    several = torch.randn(3, 6, 4, 8, generator=gen)
    ladder = (torch.arange(11) <= torch.arange(4)[:, None] + 6).expand(3, 1, 4, 11) & mask
    got, _ = attend(module, several, k, v, ladder, scaling=0.3)
    scores = several.double() @ k.double().repeat_interleave(3, 1).transpose(2, 3) * 0.3
    weights = scores.masked_fill(~ladder, -torch.inf).softmax(-1)
    each = (weights @ v.double().repeat_interleave(3, 1)).transpose(1, 2)
    torch.testing.assert_close(got.double(), each, rtol=1e-5, atol=1e-5)
    one_head, _ = attend(module, q, k, v, mask.expand(3, 6, 1, 11), scaling=0.3)  # a mask a head: stock's way
    torch.testing.assert_close(one_head.double(), want, rtol=1e-5, atol=1e-5)
