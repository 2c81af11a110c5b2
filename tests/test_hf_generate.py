"""Every supported model type of transformers, attached, against stock: the calls that users make."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tiny_models import BACKEND, BUILDERS, assert_as_exact, assert_same_tokens, build, truth

import replayssm

transformers.logging.set_verbosity_error()
NEW = 44


class Pair(NamedTuple):
    name: str
    stock: Any
    ours: Any


@pytest.fixture(scope="module", params=list(BUILDERS))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The same model twice, stock and attached; both live in one process."""
    stock, ours = build(request.param), build(request.param)
    stock.generation_config.eos_token_id = ours.generation_config.eos_token_id = None
    replayssm.attach(ours, backend=BACKEND)
    yield Pair(request.param, stock, ours)
    replayssm.detach(ours)


def prompt(*lengths: int, width: int | None = None) -> dict[str, torch.Tensor]:
    """Left-padded prompts of these lengths; the text repeats itself, so that there is something to look up."""
    gen = torch.Generator().manual_seed(1)
    width = width or max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        text = torch.randint(3, 100, (18,), generator=gen).repeat(1 + length // 18)[:length]
        ids[row, width - length :], mask[row, width - length :] = text, 1
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> Any:
    settings: dict[str, Any] = dict(
        max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_scores=True, output_logits=True
    )
    return model.generate(**inputs, **settings | kwargs)


def test_greedy(pair: Pair) -> None:
    inputs = prompt(27)
    stock, ours = generate(pair.stock, inputs), generate(pair.ours, inputs)
    assert isinstance(ours.cache, replayssm.ReplayCache)
    assert len(set(stock.sequences[0, 27:].tolist())) > 8, "the text must vary to tell anything"
    assert_same_tokens(ours, stock)
    wide = truth(pair.stock, stock.sequences)[:, 26:-1].transpose(0, 1)
    assert_as_exact(torch.stack(ours.logits), torch.stack(stock.logits), wide)
    assert ours.cache.get_seq_length() == 27 + NEW - 1


def test_beams(pair: Pair) -> None:
    inputs = prompt(27)
    stock, ours = (generate(m, inputs, num_beams=3, max_new_tokens=20) for m in (pair.stock, pair.ours))
    assert torch.equal(ours.sequences, stock.sequences)
    torch.testing.assert_close(ours.sequences_scores, stock.sequences_scores)


def test_sampling(pair: Pair) -> None:
    results = []
    for model in (pair.stock, pair.ours):
        torch.manual_seed(3)
        results.append(
            generate(
                model, prompt(27), do_sample=True, temperature=1.3, top_k=30, num_return_sequences=2, max_new_tokens=24
            )
        )
    assert_same_tokens(results[1], results[0])


def test_left_padded_batch(pair: Pair) -> None:
    inputs = prompt(27, 5, 14, 20)
    stock, ours = (generate(m, inputs, max_new_tokens=20) for m in (pair.stock, pair.ours))
    assert_same_tokens(ours, stock)


@pytest.mark.parametrize("extra", [1, 5, 30])
def test_continuing_from_a_returned_cache(pair: Pair, extra: int) -> None:
    """The next turn is ``extra`` new tokens: one, some that fit into the ring, more than fit."""
    first = generate(pair.ours, prompt(27), max_new_tokens=12)
    text = torch.cat([first.sequences, prompt(extra)["input_ids"]], 1)
    inputs = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    stock = generate(pair.stock, inputs, max_new_tokens=12)  # anew: stock continues wrongly on mamba2
    ours = generate(pair.ours, inputs, max_new_tokens=12, cache=first.cache)
    assert_same_tokens(ours, stock)
    assert ours.cache is first.cache


@pytest.mark.parametrize("chunk", [1, 7, 20])
def test_prefill_in_chunks(pair: Pair, chunk: int) -> None:
    """Chunks of one token, that fit into the ring, and that do not; padded rows among them, but not in chunks of one
    token, as stock's masks leave padding out of account there."""
    inputs = prompt(45, 45 if chunk == 1 else 31)
    stock = generate(pair.stock, inputs, max_new_tokens=10)
    ours = generate(pair.ours, inputs, max_new_tokens=10, prefill_chunk_size=chunk)
    assert_same_tokens(ours, stock)


@torch.no_grad()
def test_plain_forwards_make_a_cache_of_ours(pair: Pair) -> None:
    ids = prompt(20)["input_ids"]
    stock, ours = pair.stock(ids, use_cache=True), pair.ours(ids)
    assert isinstance(ours.cache, replayssm.ReplayCache)
    for token in range(5, 25):
        position = torch.tensor([[15 + token]])  # bamba needs it: stock starts again at 0
        kwargs = {"position_ids": position} if pair.name == "bamba" else {}
        new = torch.tensor([[token]])
        stock = pair.stock(new, cache=stock.cache, use_cache=True, **kwargs)
        ours = pair.ours(new, cache=ours.cache, use_cache=True, **kwargs)
        torch.testing.assert_close(ours.logits, stock.logits, rtol=1e-3, atol=1e-3)


def continued(model: Any, cache: Any, inputs: torch.Tensor, n: int) -> torch.Tensor:
    """Greedy continuation of a cache that has all of ``inputs`` but the last token."""
    return model.generate(
        inputs, attention_mask=torch.ones_like(inputs), cache=cache, max_new_tokens=n, do_sample=False
    )


def test_crop(pair: Pair) -> None:
    """The last tokens are taken back, and decoded again to the same text; drafts and committed tokens alike."""
    inputs = prompt(27)
    whole = generate(pair.ours, inputs, max_new_tokens=40).sequences
    cache = replayssm.ReplayCache(pair.ours)
    cache.activate_past_recording()
    generate(pair.ours, inputs, max_new_tokens=15, cache=cache)
    for n in (1, 9, 3, 20):
        length = cache.get_seq_length()
        cache.crop(-n)
        assert cache.get_seq_length() == length - n
        text = continued(pair.ours, cache, whole[:, : length - n + 1], 20)
        assert torch.equal(text[:, : whole.shape[1]], whole[:, : text.shape[1]])
    with pytest.raises(ValueError, match="tokens to remove, but only the last"):
        cache.crop(-200)
    with pytest.raises(ValueError, match="expected minus the number"):
        cache.crop(3)


def test_deepcopy_select_repeat_and_reset(pair: Pair) -> None:
    inputs = prompt(27, 27, 27)
    whole = generate(pair.ours, inputs, max_new_tokens=20).sequences
    cache = generate(pair.ours, inputs, max_new_tokens=10).cache
    text = whole[:, :37]

    other = copy.deepcopy(cache)
    assert torch.equal(continued(pair.ours, other, text, 10), whole)
    assert cache.get_seq_length() == 36, "the copy shares nothing"

    picked = copy.deepcopy(cache)
    picked.batch_select_indices(torch.tensor([2, 0]))
    assert torch.equal(continued(pair.ours, picked, text[[2, 0]], 10), whole[[2, 0]])

    repeated = copy.deepcopy(cache)
    repeated.batch_repeat_interleave(2)
    rows = [0, 0, 1, 1, 2, 2]
    assert repeated.batch_size == 6
    assert torch.equal(continued(pair.ours, repeated, text[rows], 10), whole[rows])

    cache.reorder_cache(torch.tensor([1, 1, 0]))
    assert torch.equal(continued(pair.ours, cache, text[[1, 1, 0]], 10), whole[[1, 1, 0]])

    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(pair.ours, inputs, max_new_tokens=20, cache=cache).sequences, whole)
    cache.reset()  # the next sequences may be fewer
    one = {name: x[:1] for name, x in inputs.items()}
    assert torch.equal(generate(pair.ours, one, max_new_tokens=20, cache=cache).sequences, whole[:1])


def test_prompt_lookup(pair: Pair) -> None:
    inputs = prompt(45)
    greedy = generate(pair.ours, inputs, max_new_tokens=30)
    for drafts in (3, 12):
        ours = generate(pair.ours, inputs, prompt_lookup_num_tokens=drafts, max_new_tokens=30)
        assert_same_tokens(ours, greedy)
        assert ours.cache.get_seq_length() == greedy.cache.get_seq_length()


def test_assistant(pair: Pair) -> None:
    """An attached model drafts for itself, so that both good and rejected drafts come up."""
    inputs = prompt(27)
    greedy = generate(pair.ours, inputs, max_new_tokens=30)
    assistant = build(pair.name, seed=5)
    with torch.no_grad():  # close to the model, but not the same
        assistant.get_output_embeddings().weight += 0.02 * torch.randn(
            assistant.get_output_embeddings().weight.shape, generator=torch.Generator().manual_seed(2)
        )
    assistant.generation_config.eos_token_id = None
    replayssm.attach(assistant, backend=BACKEND)
    try:
        ours = generate(pair.ours, inputs, assistant_model=assistant, max_new_tokens=30)
    finally:
        replayssm.detach(assistant)
    assert_same_tokens(ours, greedy)
