"""transformers' own assisted decoding, which attach lets in: every type and kind of assistant, greedy and sampled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from test_hf_generate import Pair, generate, prompt
from test_speculative_generate import assert_counts, close_to, exact, llama, small
from tiny_models import BACKEND, BUILDERS, assert_same_tokens, build

import replayssm
from replayssm import Sampling

transformers.logging.set_verbosity_error()
SETTINGS: dict[str, Any] = dict(max_new_tokens=20, suppress_tokens=[0])
"""An assistant takes a 0 in the text for padding, stock's and ours, and then drafts worse."""


@pytest.fixture(scope="module", params=list(BUILDERS))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A model, and its greedy text by stock transformers."""
    model = build(request.param)
    model.generation_config.eos_token_id = None
    stock = generate(model, prompt(27), **SETTINGS)
    replayssm.attach(model, backend=BACKEND)
    yield Pair(request.param, stock, model)
    replayssm.detach(model)


def assist(model: Any, assistant: Any, drafts: int = 5) -> Any:
    """Greedy, with a fixed number of drafts."""
    assistant.generation_config.num_assistant_tokens = drafts
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    assistant.generation_config.eos_token_id = None
    return generate(model, prompt(27), **SETTINGS, assistant_model=assistant)


def test_assistant_with_attention_only(pair: Pair) -> None:
    """Its weights are random: a bad drafter."""
    assert_same_tokens(assist(pair.ours, llama()), pair.stock)


def test_perfect_assistant(pair: Pair) -> None:
    """The model itself, attached a second time: every draft is right, so a forward gives six tokens."""
    assistant = build(pair.name)
    replayssm.attach(assistant, backend=BACKEND)
    calls: list[int] = []
    handle = pair.ours.register_forward_pre_hook(lambda *args: calls.append(1))
    try:
        assert_same_tokens(assist(pair.ours, assistant), pair.stock)
    finally:
        handle.remove()
        replayssm.detach(assistant)
    assert len(calls) == 4


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "mamba2"])
def test_assistant_of_another_family(name: str) -> None:
    other = {"qwen3_5": "kimi_linear", "kimi_linear": "mamba2", "mamba2": "qwen3_5"}[name]
    model, assistant = build(name), close_to(None, other)
    stock = generate(model, prompt(27), **SETTINGS)
    for m in (model, assistant):
        replayssm.attach(m, backend=BACKEND)
    assert_same_tokens(assist(model, assistant), stock)
    for m in (model, assistant):
        replayssm.detach(m)


@pytest.mark.parametrize("how", ["prompt-lookup", "assistant"])
def test_sampling_is_lossless(how: str) -> None:
    """160 texts of three tokens, counted against their exact probabilities."""
    model = small("mamba2")
    start = [2, 3, 4, 2, 3]
    ids = torch.tensor([start])
    more: dict[str, Any] = {"prompt_lookup_num_tokens": 2}
    if how == "assistant":
        assistant = llama(5, bos_token_id=1, initializer_range=0.5)
        assistant.generation_config.num_assistant_tokens = 2
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        more = {"assistant_model": assistant}
    torch.manual_seed(5)
    calls: list[int] = []
    handle = model.register_forward_pre_hook(lambda *args: calls.append(1))
    texts = []
    for _ in range(160):
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=True, top_k=0, eos_token_id=None,
            **more,
        )  # fmt: skip
        texts.append(out[:, 5:8])
    handle.remove()
    assert len(calls) < 640, "drafts were accepted"
    assert_counts(torch.cat(texts), 160 * exact(model, start, Sampling(1.0)))
    replayssm.detach(model)
