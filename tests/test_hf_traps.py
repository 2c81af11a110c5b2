"""One test for each trap that transformers' cache protocol has for a replayed state (docs/transformers.md)."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from tiny_models import BACKEND, assert_as_exact, build, truth

import replayssm
from replayssm.hf import explain

transformers.logging.set_verbosity_error()
IDS = torch.randint(3, 100, (1, 90), generator=torch.Generator().manual_seed(1))
ONE_EACH = ["qwen3_5", "kimi_linear", "mamba2"]


@pytest.fixture(params=ONE_EACH)
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    model = replayssm.attach(build(request.param), backend=BACKEND)
    yield model
    replayssm.detach(model)


@torch.no_grad()
def logits(model: Any, cache: Any, *tokens: torch.Tensor) -> torch.Tensor:
    """Of all these calls, one after the other."""
    return torch.cat([model(ids, cache=cache, use_cache=True).logits for ids in tokens], 1)


def assert_goes_on(model: Any, cache: Any, n: int) -> None:
    """The cache is as if it had seen exactly ``IDS[:, :n]``."""
    got = logits(model, cache, *IDS[:, n : n + 6].split(1, 1))
    with torch.no_grad():
        want = model(IDS[:, : n + 6], use_cache=False).logits[:, n:]
    assert_as_exact(got, want, truth(model, IDS[:, : n + 6])[:, n:])


@pytest.mark.parametrize("T", [4, 20, 60])
def test_prompt_and_draft_in_one_call(model: Any, T: int) -> None:
    """1. Assisted decoding prefills both in one call and then crops: the last tokens must be in the ring."""
    cache = replayssm.ReplayCache(model)
    cache.activate_past_recording()
    logits(model, cache, IDS[:, :T])
    cache.crop(-3)
    assert_goes_on(model, cache, T - 3)


def test_recorded_single_tokens_are_taken_back(model: Any) -> None:
    """2. Mixers of KDA update the convolution's state in place even while recording, which stock cannot roll back."""
    cache = replayssm.ReplayCache(model)
    cache.activate_past_recording()
    logits(model, cache, IDS[:, :20], *IDS[:, 20:26].split(1, 1))
    cache.crop(-2)
    cache.crop(0)  # nothing
    cache.crop(-3)
    assert_goes_on(model, cache, 21)


def test_as_many_tokens_as_the_window_are_always_kept() -> None:
    """Folds leave the last ``window`` rows, wherever the folds come."""
    model = replayssm.attach(build("qwen3_5"), fold_every=4, window=3, backend=BACKEND)
    cache = replayssm.ReplayCache(model)
    n = 20
    logits(model, cache, IDS[:, :n])
    for T in (1, 1, 1, 2, 1, 3, 1, 1, 1, 1, 1, 1):
        logits(model, cache, IDS[:, n : n + T])
        n += T
        assert cache.croppable >= 3
    cache.crop(-3)
    assert_goes_on(model, cache, n - 3)
    replayssm.detach(model)


def test_recording_keeps_no_prompt(model: Any) -> None:
    """3. Stock keeps the convolution's inputs of the whole prompt until the first crop."""
    sizes = []
    for T in (30, 80):
        cache = replayssm.ReplayCache(model)
        cache.activate_past_recording()
        logits(model, cache, IDS[:, :T])
        sizes.append(cache.nbytes)
    assert sizes[0] == sizes[1]


def test_recording_that_starts_late(model: Any) -> None:
    """A cache that has been decoding plainly gets a window, and keeps what it knows."""
    cache = replayssm.ReplayCache(model)
    logits(model, cache, IDS[:, :30], *IDS[:, 30:35].split(1, 1))
    cache.activate_past_recording()
    logits(model, cache, IDS[:, 35:43])
    assert cache.croppable >= 7
    cache.crop(-7)
    assert_goes_on(model, cache, 36)


def test_generate_does_not_compile_the_cache(model: Any) -> None:
    """4. A cache of recurrent layers only is compiled by generate on a GPU, unless it says no."""
    assert not replayssm.ReplayCache(model).is_compileable


def test_recurrent_layers_alone_know_their_length() -> None:
    """5. Stock's cache for mamba2 has no length, so generate feeds the whole prompt to it again."""
    model = replayssm.attach(build("mamba2"), backend=BACKEND)
    cache = replayssm.ReplayCache(model)
    logits(model, cache, IDS[:, :30], IDS[:, 30:31])
    assert cache.get_seq_length() == 31
    kwargs: dict[str, Any] = dict(attention_mask=torch.ones(1, 40), max_new_tokens=8, do_sample=False)
    want = model.generate(IDS[:, :40], **kwargs)
    assert torch.equal(model.generate(IDS[:, :40], cache=cache, **kwargs), want)
    assert cache.get_seq_length() == 47
    replayssm.detach(model)


@pytest.mark.parametrize("T", [1, 2, 3, 30])
@pytest.mark.parametrize("recording", [False, True])
def test_three_convolutions_in_a_layer(T: int, recording: bool) -> None:
    """6. qwen4_exp: also token ids, padded in a first call shorter than the n-grams; none of it in some layers."""
    model = replayssm.attach(build("qwen4_exp"), backend=BACKEND)
    cache = replayssm.ReplayCache(model)
    if recording:
        cache.activate_past_recording()
    logits(model, cache, IDS[:, :T], *IDS[:, T : T + 5].split(1, 1))
    if recording:
        cache.crop(-4)
        assert_goes_on(model, cache, T + 1)
        cache.crop(-min(cache.croppable, T + 7))
        assert_goes_on(model, cache, cache.get_seq_length())
    else:
        assert_goes_on(model, cache, T + 5)
    replayssm.detach(model)


def limited(**options: Any) -> tuple[Any, Any]:
    """A model whose lower limit on dt binds nearly always, stock and attached."""
    stock, ours = (build("nemotron_h", time_step_min=0.2) for _ in range(2))
    for model in (stock, ours):
        for name, p in model.named_parameters():
            if name.endswith("dt_bias"):
                p.data.fill_(-3.0)
    return stock, replayssm.attach(ours, backend=BACKEND, **options)


@pytest.mark.parametrize("T", [1, 25])
def test_the_limit_of_dt_is_where_stock_has_it(T: int) -> None:
    """7. By default: in prompts, be they one token or in chunks, and not in decoding."""
    stock, ours = limited()
    kwargs: dict[str, Any] = dict(attention_mask=torch.ones(1, T), max_new_tokens=30, do_sample=False)
    want = stock.generate(IDS[:, :T], **kwargs)
    assert torch.equal(ours.generate(IDS[:, :T], **kwargs), want)
    if T > 1:
        assert torch.equal(ours.generate(IDS[:, :T], prefill_chunk_size=7, **kwargs), want)
    replayssm.detach(ours)


def test_the_limit_of_dt_everywhere() -> None:
    """7. With exact_dt_limit a decoded token is what a forward over the whole text says; stock's is not."""
    stock, ours = limited(exact_dt_limit=True)
    cache = replayssm.ReplayCache(ours)
    got = logits(ours, cache, IDS[:, :1], *IDS[:, 1:40].split(1, 1), IDS[:, 40:45])
    wide = truth(stock, IDS[:, :45])
    with torch.no_grad():
        assert_as_exact(got, stock(IDS[:, :45], use_cache=False).logits, wide)
        decoded = logits(stock, transformers.DynamicCache(config=stock.config), *IDS[:, :40].split(1, 1))
    assert float((decoded - wide[:, :40]).abs().max()) > 0.1
    kwargs: dict[str, Any] = dict(attention_mask=torch.ones(1, 40), max_new_tokens=30, do_sample=False)
    prompt = IDS[:, :20].repeat(1, 2)
    assert torch.equal(ours.generate(prompt, prompt_lookup_num_tokens=3, **kwargs), ours.generate(prompt, **kwargs))
    replayssm.detach(ours)


def test_assistants_get_a_cache_that_records() -> None:
    """8. Assistant models make their cache inside generate; target and assistant are both attached here, then one."""
    model, assistant = build("qwen3_5"), build("mamba2")
    kwargs: dict[str, Any] = dict(attention_mask=torch.ones(1, 20), max_new_tokens=20, do_sample=False)
    want = model.generate(IDS[:, :20], **kwargs)
    replayssm.attach(model, backend=BACKEND)
    replayssm.attach(assistant, backend=BACKEND)
    assert torch.equal(model.generate(IDS[:, :20], assistant_model=assistant, **kwargs), want)
    assert "(recording)" in explain(assistant)
    assert "(recording)" in explain(model)
    replayssm.detach(assistant)
    assert torch.equal(model.generate(IDS[:, :20], **kwargs), want)
    replayssm.detach(model)


def test_sliding_attention_is_taken_back_as_well() -> None:
    """lara_mini: its attention layers say no where they cannot, and then nothing is changed."""
    model = replayssm.attach(build("lara_mini"), window=4, backend=BACKEND)
    cache = replayssm.ReplayCache(model)
    logits(model, cache, IDS[:, :40], *IDS[:, 40:44].split(1, 1))
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-2)
    assert cache.recurrent.tokens == 44
    assert_goes_on(model, cache, 44)
    replayssm.detach(model)


def test_reset_forgets_what_a_short_prompt_does_not_cover(model: Any) -> None:
    cache = replayssm.ReplayCache(model)
    logits(model, cache, IDS[:, 40:70])
    cache.reset()
    logits(model, cache, *IDS[:, :2].split(1, 1))
    assert_goes_on(model, cache, 2)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_calls(model: Any, seed: int) -> None:
    """A random walk over everything that a cache can be asked for, against forwards over the whole texts."""
    rng = random.Random(seed)
    cache: Any = replayssm.ReplayCache(model)
    if seed % 2:
        cache.activate_past_recording()
    rows = [IDS[0, :0].clone() for _ in range(3)]
    for turn in range(40):
        T = rng.choice([1, 1, 1, 1, 2, 3, 8, 17, 30])
        new = torch.randint(3, 100, (len(rows), T), generator=torch.Generator().manual_seed(100 * seed + turn))
        rows = [torch.cat(pair) for pair in zip(rows, new, strict=True)]
        out = model(new, cache=cache, use_cache=True).logits[:, -1]
        assert cache.get_seq_length() == len(rows[0])
        action = rng.choice(["", "", "crop", "crop", "reorder", "copy", "select", "repeat", "record", "reset"])
        if action == "crop" and cache.croppable:
            n = rng.randint(1, cache.croppable)
            cache.crop(-n)
            rows = [row[: len(row) - n] for row in rows]
        elif action in ("reorder", "select"):
            index = [rng.randrange(len(rows)) for _ in range(len(rows) if action == "reorder" else rng.choice([2, 3]))]
            (cache.reorder_cache if action == "reorder" else cache.batch_select_indices)(torch.tensor(index))
            rows = [rows[i] for i in index]
        elif action == "repeat" and len(rows) < 3:
            cache.batch_repeat_interleave(2)
            rows = [row for row in rows for _ in range(2)]
        elif action == "copy":
            cache, other = copy.deepcopy(cache), cache
            model(new, cache=other, use_cache=True)  # must leave the copy alone
        elif action == "record" and turn > 20:
            cache.activate_past_recording()
        elif action == "reset" and turn > 30:
            cache.reset()
            rows = [row[:0] for row in rows]
        elif action == "":
            want = model(torch.stack(rows), use_cache=False).logits[:, -1]
            torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-3)


def test_a_window_smaller_than_the_drafts_grows() -> None:
    """``window`` is what can always be taken back; generate's drafts may ask for more."""
    model = replayssm.attach(build("mamba2"), window=3, backend=BACKEND)
    ids = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]])
    plain = model.generate(ids, max_new_tokens=24, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=24, do_sample=False, prompt_lookup_num_tokens=10), plain)
    replayssm.detach(model)
