"""attach, detach and the boundaries: what is refused, with what message, and what is left untouched."""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from tiny_models import BACKEND, build

import replayssm
from replayssm.hf import SUPPORTED, dispatch, explain
from replayssm.hf.adapters import ADAPTERS

transformers.logging.set_verbosity_error()
attach = functools.partial(replayssm.attach, backend=BACKEND)
IDS = torch.randint(3, 100, (1, 21), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model() -> Iterator[Any]:
    """An attached model of two layers; detached whatever the test does."""
    model = attach(small())
    yield model
    replayssm.detach(model)


def small(**kwargs: Any) -> Any:
    return build("qwen3_5", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], **kwargs)


def greedy(model: Any, n: int = 6, ids: torch.Tensor = IDS, **kwargs: Any) -> torch.Tensor:
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, **kwargs)


def functions(kind: str) -> list[Any]:
    entry = SUPPORTED[kind]
    module = importlib.import_module(entry.module)
    return [getattr(module, name) for name in dispatch.FUNCTIONS[entry.recurrence.name]]


def test_importing_replayssm_does_not_import_transformers() -> None:
    code = "import sys, replayssm; assert 'transformers' not in sys.modules; replayssm.attach; "
    code += "assert 'transformers' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_supported_module_has_the_functions_as_expected() -> None:
    for entry in SUPPORTED.values():
        dispatch.install(entry.module, entry.recurrence.name)
        dispatch.uninstall(entry.module)
    assert set(ADAPTERS) == set(dispatch.PARAMETERS)


def test_detach_undoes_everything() -> None:
    before = functions("qwen3_5_text")
    model = small()
    state = set(model.__dict__), len(model._forward_pre_hooks)
    want = greedy(model)
    assert attach(model) is model
    assert functions("qwen3_5_text") != before
    assert torch.equal(greedy(model), want)
    assert replayssm.detach(model) is model
    assert functions("qwen3_5_text") == before
    assert (set(model.__dict__), len(model._forward_pre_hooks)) == state
    assert model._is_stateful
    assert type(greedy(model, return_dict_in_generate=True).cache) is transformers.DynamicCache
    replayssm.detach(model)  # not attached: nothing to do


def test_functions_stay_until_the_last_model_is_detached() -> None:
    before = functions("qwen3_5_text")
    a, b = attach(small()), attach(small())
    replayssm.detach(a)
    assert functions("qwen3_5_text") != before
    greedy(b)
    replayssm.detach(b)
    assert functions("qwen3_5_text") == before


def test_attaching_twice(model: Any) -> None:
    assert attach(model) is model
    with pytest.raises(RuntimeError, match=r"attached with Options\(fold_every=None.*detach it first"):
        attach(model, fold_every=8)
    replayssm.detach(model)  # one detach is enough
    assert not hasattr(model, "_replayssm")


def test_refused_models() -> None:
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=8
    )
    with pytest.raises(ValueError, match=r"unsupported model type 'llama'; supported: qwen3_5_text, .*, zamba2"):
        attach(transformers.LlamaForCausalLM(config))
    config.model_type = "mamba2"  # as remote code may say
    with pytest.raises(ValueError, match=r"no layer of LlamaForCausalLM is from transformers\.models\.mamba2"):
        attach(transformers.LlamaForCausalLM(config))
    with pytest.raises(TypeError, match="expected a transformers PreTrainedModel; got Linear"):
        attach(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fold_every": 0}, "fold_every must be at least 1, or None for the library's choice; got fold_every=0"),
        ({"window": 0}, "window must be at least 1, .*; got window=0"),
        ({"state_dtype": torch.int8}, "state_dtype must be one of .*; got torch.int8"),
        ({"backend": "cuda"}, "unknown backend 'cuda'; valid: auto, "),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    model = small()
    with pytest.raises(ValueError, match=message):
        attach(model, **options)
    assert not hasattr(model, "_replayssm")


def test_another_release_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function with other parameters is refused before anything is replaced."""
    module = importlib.import_module(SUPPORTED["qwen3_5_text"].module)
    before = module.torch_chunk_gated_delta_rule

    def other(q: Any, k: Any, v: Any) -> None: ...

    monkeypatch.setattr(module, "torch_recurrent_gated_delta_rule", other)
    with pytest.raises(RuntimeError, match=r"expected .*recurrent_gated_delta_rule\(query, key.*got \(q, k, v\)"):
        attach(small())
    assert module.torch_chunk_gated_delta_rule is before
    monkeypatch.delattr(module, "torch_recurrent_gated_delta_rule")
    with pytest.raises(RuntimeError, match="got no such function"):
        attach(small())


def test_a_cache_without_its_model(model: Any) -> None:
    cache = greedy(model, return_dict_in_generate=True).cache
    with pytest.raises(RuntimeError, match="Qwen3_5ForCausalLM is not attached"):
        replayssm.ReplayCache(small())
    with pytest.raises(ValueError, match=r"made for qwen3_5_text with 2 layers of width 64; got .* of width 32"):
        other = attach(small(hidden_size=32))
        try:
            greedy(other, cache=cache)
        finally:
            replayssm.detach(other)
    replayssm.detach(model)
    with pytest.raises(RuntimeError, match="reached a model that is not attached"):
        greedy(model, cache=cache)


@pytest.mark.parametrize("kind", ["kimi_linear", "nemotron_h"])
@pytest.mark.parametrize("T", [1, 3])
def test_a_handle_is_no_state(kind: str, T: int) -> None:
    """The other recurrences' functions refuse it too."""
    model = attach(build(kind))
    cache = greedy(model, return_dict_in_generate=True).cache
    replayssm.detach(model)
    with pytest.raises(RuntimeError, match="reached a model that is not attached"), torch.no_grad():
        model(IDS[:, :T], cache=cache)


@torch.no_grad()
def test_another_batch_size(model: Any) -> None:
    cache = model(IDS).cache
    for T in (1, 3, 40):
        with pytest.raises(ValueError, match="expected a batch of 1, the sequences in this cache; got a batch of 2"):
            model(torch.full((2, T), 5), cache=cache)
    assert cache.get_seq_length() == 21
    model(IDS[:, :1], cache=cache)  # nothing was changed


@torch.no_grad()
@pytest.mark.parametrize("where", ["in the first layer", "before the last"])
def test_a_forward_that_stopped_halfway(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = attach(build("qwen3_5"))
    cache = model(IDS).cache
    if where == "before the last":
        hook = model.model.layers[3].register_forward_pre_hook(lambda *args: 1 / 0)
        missing = r"\[3\]"
    else:
        monkeypatch.setattr(replayssm.hf.state.ops, "verify", lambda *args, **kwargs: 1 / 0)
        missing = r"\[0, 1, 3\]"
    with pytest.raises(ZeroDivisionError):
        model(IDS[:, :1], cache=cache)
    if where == "before the last":
        hook.remove()
    monkeypatch.undo()
    for use in (
        lambda: model(IDS[:, :1], cache=cache),
        lambda: cache.crop(-1),
        lambda: cache.reorder_cache(IDS[0, :1] * 0),
    ):
        with pytest.raises(RuntimeError, match=f"stopped before the recurrent layers {missing} were through"):
            use()
    cache.reset()
    assert torch.equal(model(IDS, cache=cache).logits, model(IDS).logits)
    replayssm.detach(model)


def test_gradients(model: Any) -> None:
    """Prompts have them, as in stock; a replayed step says that it has none."""
    out = model(IDS)
    out.logits.sum().backward()
    assert model.model.layers[0].linear_attn.in_proj_qkv.weight.grad.abs().sum() > 0
    with pytest.raises(RuntimeError, match=r"has no gradient; call the model under torch.no_grad\(\)"):
        model(IDS[:, :1], cache=out.cache)
    model.train()
    assert type(model(IDS, use_cache=True).cache) is transformers.DynamicCache
    model.eval()
    assert model(IDS, use_cache=False).cache is None


def test_inference_mode_and_no_grad_mix(model: Any) -> None:
    with torch.inference_mode():
        cache = model(IDS).cache
        model(IDS[:, :1], cache=cache)
    with torch.no_grad():
        model(IDS[:, :1], cache=cache)
        model(IDS[:, :3], cache=cache)


class Offloading(transformers.DynamicCache):
    """What generate makes for ``cache_implementation="offloaded"``, which needs a GPU."""


def test_other_caches_run_on_stock_and_say_so(
    model: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = greedy(model)
    monkeypatch.setattr("transformers.generation.utils.DynamicCache", Offloading)
    with caplog.at_level(logging.WARNING, logger="replayssm"):
        for _ in range(2):
            assert torch.equal(greedy(model), want)
    said = [r.getMessage() for r in caplog.records]
    assert said == ["replayssm: cache_implementation=None runs on stock transformers"]
    monkeypatch.undo()
    given = transformers.DynamicCache(config=model.config)
    out = greedy(model, cache=given, return_dict_in_generate=True)
    assert out.cache is given
    assert torch.equal(out.sequences, want)
    assert torch.equal(greedy(model, use_cache=False), want)
    with pytest.raises(ValueError, match="only supported for models with only full attention"):
        greedy(model, cache_implementation="quantized")


def test_explain(model: Any) -> None:
    assert "nothing has run yet" in explain(model)
    greedy(model)
    text = explain(model)
    for part in (
        "backend: ",
        "recurrence: gdn, H=2 HV=4 K=16 V=16",
        "R=17 rows",
        "window 1 (plain decoding)",
        "float32",
    ):
        assert part in text
    assert "not attached" in explain(small())


def test_the_cache_tells_what_it_is(model: Any) -> None:
    cache = replayssm.ReplayCache(model)
    assert (repr(cache), cache.nbytes, cache.batch_size, cache.croppable) == ("ReplayCache(empty)", 0, -1, 0)
    greedy(model, cache=cache)
    assert "1 sequences of 26 tokens, 1 recurrent of 2 layers" in repr(cache)
    assert cache.nbytes > 4 * 4 * 16 * 16
    assert cache.has_previous_state(0)
    with pytest.raises(ValueError, match=r"layer 1 is not one of its recurrent layers, \[0\]"):
        cache.get_recurrent_state(1)


@pytest.mark.parametrize(
    "options", [{"fold_every": 1}, {"backend": "sequential"}, {"fold_every": 5, "window": 3}, {"backend": "torch"}]
)
def test_options_do_not_change_the_text(options: dict[str, Any]) -> None:
    model = small()
    want = greedy(model, 40)
    attach(model, **options)
    assert torch.equal(greedy(model, 40), want)
    assert torch.equal(greedy(model, 40, prompt_lookup_num_tokens=2), want)
    replayssm.detach(model)


def test_bfloat16_checkpoints() -> None:
    model = attach(small(), state_dtype=torch.bfloat16)
    cache = greedy(model, 30, return_dict_in_generate=True).cache
    assert cache.recurrent.states[0].ckpt.dtype == torch.bfloat16
    replayssm.detach(model)


def test_copies_of_an_attached_model(model: Any) -> None:
    other = copy.deepcopy(model)
    assert torch.equal(greedy(other), greedy(model))


def test_bare_model_without_generate() -> None:
    stock = small().model
    ours = attach(small().model)
    with torch.no_grad():
        want, got = stock(IDS, use_cache=True), ours(IDS)
        assert isinstance(got.cache, replayssm.ReplayCache)
        want, got = stock(IDS[:, :1], cache=want.cache, use_cache=True), ours(IDS[:, :1], cache=got.cache)
    torch.testing.assert_close(got.last_hidden_state, want.last_hidden_state)
    replayssm.detach(ours)
