"""``replayssm.generate`` on every model type and drafter: the greedy text of stock transformers, the distribution of
plain sampling; what it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from test_hf_generate import prompt
from test_speculative import chi_square_limit
from tiny_models import BACKEND, BUILDERS, build

import replayssm
from replayssm import Sampling
from replayssm.hf.trees import SPARSE
from replayssm.lookup import EarlierOutputs
from replayssm.speculative import Draft, Tree
from replayssm.tiny import TINY, tiny_model

transformers.logging.set_verbosity_error()
NEW = 18
GREEDY: dict[str, Any] = dict(max_new_tokens=NEW, do_sample=False)


class Fixed:
    """Drafts from texts that it was given: all right, all wrong, or wrong now and then; some rows get fewer."""

    def __init__(self, texts: Sequence[Sequence[int]], how: str) -> None:
        self.texts, self.how = [list(text) for text in texts], how
        self.step = 0

    def propose(self, texts: Sequence[Sequence[int]], most: Sequence[int], sampling: Sampling) -> Draft:
        self.step += 1
        rows = []
        for row, (text, n) in enumerate(zip(texts, most, strict=True)):
            whole = next(whole for whole in self.texts if whole[: len(text)] == list(text))
            draft = whole[len(text) :][: max(0, n - row * (self.how == "mixed"))]
            wrong = len(draft) if self.how == "bad" else (self.step + row) % 3 if self.how == "mixed" else 0
            rows.append([token if i < len(draft) - wrong else (token + 1) % 100 for i, token in enumerate(draft)])
        return Draft.of(rows)

    def select(self, rows: Sequence[int]) -> None:
        pass


class Always:
    """Drafts the same tokens, whatever the text is."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def propose(self, texts: Sequence[Sequence[int]], most: Sequence[int], sampling: Sampling) -> Draft:
        return Draft.of([self.tokens[:n] for n in most])

    def select(self, rows: Sequence[int]) -> None:
        pass


class Planted(Fixed):
    """Trees of three alternatives that are wrong from the first, second or third token on, and all from some token."""

    def propose(self, texts: Sequence[Sequence[int]], most: Sequence[int], sampling: Sampling) -> Draft | Tree:
        self.step += 1
        rows = []
        for row, (text, n) in enumerate(zip(texts, most, strict=True)):
            whole = next(whole for whole in self.texts if whole[: len(text)] == list(text))
            right = whole[len(text) :]
            lengths = [2, max(n - 5, 0), 3] if n >= 5 else [n]
            turn = (self.step + row) % 3  # which alternative is right the longest
            rows.append([
                [(token + (i >= (wrong + turn) % 3 + (wrong == turn))) % 100 for i, token in enumerate(right[:length])]
                for wrong, length in enumerate(lengths)
            ])  # fmt: skip
        return Tree.of(rows)


class Subject(NamedTuple):
    model: Any
    close: Any  # much like the model
    inputs: dict[str, torch.Tensor]
    want: torch.Tensor

    def texts(self) -> list[list[int]]:
        """Without padding."""
        pads = (self.inputs["attention_mask"] == 0).sum(1)
        return [row[pad:].tolist() for row, pad in zip(self.want, pads, strict=True)]


def close_to(model: Any, name: str) -> Any:
    other = build(name)
    weight = other.get_output_embeddings().weight
    with torch.no_grad():
        weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
    return other


@pytest.fixture(scope="module", params=list(BUILDERS))
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    model = build(request.param)
    model.generation_config.eos_token_id = None
    inputs = prompt(27, 5, 14)
    want = model.generate(**inputs, **GREEDY)
    close = close_to(model, request.param)
    for m in (model, close):
        replayssm.attach(m, backend=BACKEND)
    yield Subject(model, close, inputs, want)
    for m in (model, close):
        replayssm.detach(m)


def run(subject: Subject, draft: Any, **kwargs: Any) -> Any:
    out = replayssm.generate(
        subject.model, **subject.inputs, draft=draft, **dict(max_new_tokens=NEW, eos_token_id=()) | kwargs
    )
    assert out.new_tokens == [NEW] * 3
    assert out.accepted <= out.drafted and out.row_steps <= 3 * out.steps
    assert sum(out.new_tokens) == 3 + out.row_steps + out.accepted
    return out


def test_greedy_with_lookups(subject: Subject) -> None:
    for draft in (None, "prompt-lookup", "earlier-outputs"):
        out = run(subject, draft)
        assert torch.equal(out.sequences, subject.want), draft
    assert out.steps <= NEW - 1


def test_greedy_with_a_bad_a_perfect_and_a_mixed_drafter(subject: Subject) -> None:
    results = {}
    for how in ("bad", "perfect", "mixed"):
        results[how] = run(subject, Fixed(subject.texts(), how), draft_tokens=4)
        assert torch.equal(results[how].sequences, subject.want), how
    assert results["bad"].acceptance == 0 and results["bad"].steps == NEW - 1
    assert results["perfect"].acceptance == 1 and results["perfect"].steps == 4
    assert 0.3 < results["mixed"].acceptance < 1


def test_greedy_with_a_draft_model(subject: Subject) -> None:
    itself, close = run(subject, subject.model), run(subject, subject.close)
    assert torch.equal(itself.sequences, subject.want) and torch.equal(close.sequences, subject.want)
    assert itself.acceptance == 1 and itself.steps < 6
    assert 0.05 < close.acceptance < 1


def test_greedy_with_trees(subject: Subject) -> None:
    """Of every type whose attention does not count columns."""
    drafters = [Planted(subject.texts(), "tree"), "prompt-tree"]
    if subject.model.config.get_text_config().model_type in SPARSE:
        with pytest.raises(ValueError, match="draft trees are not supported"):
            run(subject, drafters[0])
        return
    results = [run(subject, draft, draft_tokens=8) for draft in drafters]
    assert all(torch.equal(out.sequences, subject.want) for out in results)
    assert 0.1 < results[0].acceptance < 0.9 and results[0].steps < 13


def test_sampled_by_every_type(subject: Subject) -> None:
    """150 texts of three tokens out of three each, counted, as below; the drafts are sampled, then always the same."""
    start, sampling = [3], Sampling(4.0, top_k=3, generator=torch.Generator().manual_seed(2))
    ids = torch.tensor([start])
    best = subject.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)[0, 2:]
    expected = 150 * exact(subject.model, start, sampling)
    for draft in (subject.close, Always(*best.tolist())):
        out = replayssm.generate(
            subject.model, ids.expand(150, -1), max_new_tokens=4, draft=draft, draft_tokens=2, sampling=sampling,
            eos_token_id=(),
        )  # fmt: skip
        assert 0 < out.accepted <= out.drafted
        assert_counts(out.sequences[:, 1:4], expected)


def assert_counts(texts: torch.Tensor, expected: torch.Tensor) -> None:
    """Chi-square, four deviations. Texts that are rare, or that sampling leaves out, count as one."""
    counts = torch.zeros_like(expected)
    counts.index_put_(tuple(texts.T), torch.ones(len(texts), dtype=counts.dtype), accumulate=True)
    assert float(counts[expected == 0].sum()) == 0
    rare = expected < 3
    counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    error = ((counts - expected) ** 2 / expected)[expected > 0]
    assert error.numel() > 8
    assert float(error.sum()) < chi_square_limit(error.numel())


def small(name: str) -> Any:
    """Five tokens, of which all texts are likely enough to be counted."""
    model = build(name, vocab_size=5, pad_token_id=0, bos_token_id=1)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 0.5
    return replayssm.attach(model, backend=BACKEND)


@torch.no_grad()
def exact(model: Any, start: list[int], sampling: Sampling) -> torch.Tensor:
    """Probabilities ``[V, V, V]`` of the three tokens that follow; only those are run that can."""

    def after(texts: torch.Tensor) -> torch.Tensor:
        return sampling.probs(model(texts, use_cache=False).logits[:, -1].double())

    texts, p = torch.tensor([start]), torch.ones(1, dtype=torch.float64)
    for _ in range(3):
        each = after(texts)
        row, token = each.nonzero(as_tuple=True)
        texts, p = torch.cat([texts[row], token[:, None]], 1), p[row] * each[row, token]
    out = torch.zeros(*[each.shape[1]] * 3, dtype=torch.float64)
    out[tuple(texts[:, -3:].T)] = p
    return out


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "mamba2"])
@pytest.mark.parametrize("drafter", ["model", "always"])
def test_sampling_is_lossless(name: str, drafter: str) -> None:
    """2,000 texts of three tokens, counted, against their exact probabilities: chi-square, four deviations."""
    model, start = small(name), [3]  # a prompt of one token: KDA's own function pads more to 64
    draft: Any = llama(5, bos_token_id=1, initializer_range=0.5) if drafter == "model" else Always(1, 4)
    sampling = Sampling(0.9, top_k=4, generator=torch.Generator().manual_seed(11))
    ids = torch.tensor([start]).expand(500, -1)
    texts = []
    for _ in range(4):
        out = replayssm.generate(
            model, ids, max_new_tokens=4, draft=draft, draft_tokens=2, sampling=sampling, eos_token_id=()
        )
        texts.append(out.sequences[:, 1:4])  # two drafts at first
        assert 0 < out.accepted < out.drafted
    assert_counts(torch.cat(texts), 2000 * exact(model, start, sampling))
    replayssm.detach(model)


def test_rows_stop_early() -> None:
    """Each at its own end, of several; the others go on. What follows an accepted end is dropped."""
    model = build("qwen3_5")
    inputs = prompt(27, 5, 14, 20)
    plain = model.generate(**inputs, **GREEDY)
    ends = [int(plain[0, -15]), int(plain[2, -9])]
    want = model.generate(**inputs, **GREEDY, eos_token_id=ends)
    replayssm.attach(model, backend=BACKEND)
    texts = [row[row.tolist().index(next(t for t in row.tolist() if t)) :].tolist() for row in plain]
    told: dict[int, list[int]] = {}
    for draft in ("prompt-lookup", Fixed(texts, "perfect"), Fixed(texts, "mixed"), model):
        told.clear()
        out = replayssm.generate(
            model, **inputs, max_new_tokens=NEW, draft=draft, eos_token_id=ends,
            on_tokens=lambda row, tokens: told.setdefault(row, []).extend(tokens),
        )  # fmt: skip
        assert torch.equal(out.sequences, want)
        assert out.new_tokens[0] < out.new_tokens[1] or out.new_tokens[2] < out.new_tokens[1]
        assert [len(told[row]) for row in range(4)] == out.new_tokens
        assert all(out.sequences[row, 27 : 27 + n].tolist() == told[row] for row, n in enumerate(out.new_tokens))
    replayssm.detach(model)


@pytest.mark.parametrize("new", [1, 2])
def test_one_and_two_tokens(new: int) -> None:
    model = build("mamba2")
    inputs = prompt(1, 1)
    want = model.generate(**inputs, max_new_tokens=new, do_sample=False)
    replayssm.attach(model, backend=BACKEND)
    out = replayssm.generate(model, **inputs, max_new_tokens=new)
    assert torch.equal(out.sequences, want) and out.steps == new - 1
    replayssm.detach(model)


def llama(vocab_size: int = 128, **kwargs: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, num_hidden_layers=1, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0, eos_token_id=None, **kwargs,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def test_models_with_attention_only() -> None:
    """As a drafter for a hybrid, and as the model itself; neither has to be attached."""
    model, other = build("qwen3_5"), llama()
    inputs = prompt(27, 5, 14)
    want, theirs = (m.generate(**inputs, **GREEDY) for m in (model, other))
    replayssm.attach(model, backend=BACKEND)
    out = replayssm.generate(model, **inputs, max_new_tokens=NEW, draft=other, draft_tokens=5)
    assert torch.equal(out.sequences, want) and out.acceptance < 0.2
    out = replayssm.generate(other, **inputs, max_new_tokens=NEW, draft=model, draft_tokens=3)
    assert torch.equal(out.sequences, theirs)
    replayssm.detach(model)


def test_automatic_drafts_follow_acceptance() -> None:
    model = build("mamba2")
    inputs = {"input_ids": prompt(9)["input_ids"]}
    text = model.generate(**inputs, max_new_tokens=70, do_sample=False)
    replayssm.attach(model, backend=BACKEND)
    bad, good = (
        replayssm.generate(model, **inputs, max_new_tokens=70, draft=Fixed(text.tolist(), how))
        for how in ("bad", "perfect")
    )
    assert torch.equal(bad.sequences, text) and torch.equal(good.sequences, text)
    assert bad.steps == 69 and bad.drafted < 35
    assert good.steps < 12
    replayssm.detach(model)


def test_earlier_outputs_across_calls() -> None:
    """The second time the text is known."""
    model = replayssm.attach(build("kimi_linear"), backend=BACKEND)
    drafter, inputs = EarlierOutputs(), prompt(9, 14)
    first, second = (replayssm.generate(model, **inputs, max_new_tokens=NEW, draft=drafter) for _ in range(2))
    assert torch.equal(first.sequences, second.sequences)
    assert second.steps < first.steps / 2 and second.acceptance > 0.9
    replayssm.detach(model)


@pytest.mark.parametrize("name", TINY)
def test_trained_models(name: str) -> None:
    """The three that come with the package: each drafter, and one of the others as a draft model."""
    model, other = (
        transformers.AutoModelForCausalLM.from_pretrained(tiny_model(n), dtype=torch.float32)
        for n in (name, "gdn" if name == "mamba2" else "mamba2")
    )
    texts = [[0, *b"class Server:\n    def __init__(self"], [0, *b"import os\nimport sys\n"]]
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    want = model.generate(ids, attention_mask=mask, max_new_tokens=48, min_new_tokens=48, do_sample=False)
    for m in (model, other):
        replayssm.attach(m, backend=BACKEND)
    for draft in ("prompt-lookup", "earlier-outputs", other):
        out = replayssm.generate(model, ids, mask, max_new_tokens=48, draft=draft)
        assert torch.equal(out.sequences, want)
        assert out.acceptance > 0.1 and out.steps < 45
    for m in (model, other):
        replayssm.detach(m)


def test_errors() -> None:
    model = build("mamba2")
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match=r"not attached; call replayssm.attach"):
        replayssm.generate(model, ids)
    replayssm.attach(model, backend=BACKEND)
    cases: list[tuple[dict[str, Any], str]] = [
        (dict(draft="mcts"), "unknown draft 'mcts'; valid: prompt-lookup"),
        (dict(draft_tokens=0), "draft_tokens must be 'auto' or at least 1; got 0"),
        (dict(draft_tokens="many"), "draft_tokens must be 'auto'"),
        (dict(max_new_tokens=0), "max_new_tokens must be at least 1; got 0"),
        (dict(draft=llama(99)), "vocabulary of 128; got 99"),
        (dict(attention_mask=torch.tensor([[1, 1, 0]])), "padding must be on the left"),
        (dict(attention_mask=torch.tensor([[1, 0, 1]])), "padding must be on the left"),
        (dict(attention_mask=torch.ones(1, 2)), r"attention_mask must be like input_ids, \(1, 3\); got \(1, 2\)"),
    ]
    for kwargs, message in cases:
        with pytest.raises(ValueError, match=message):
            replayssm.generate(model, ids, **kwargs)
    with pytest.raises(ValueError, match=r"input_ids must be \[B, T\]"):
        replayssm.generate(model, ids[0])
    replayssm.detach(model)


def test_a_draft_model_that_writes_its_state_every_step() -> None:
    """As the model it can be run so; as a drafter it has nothing to go back to."""
    model, inputs = build("qwen3_5"), prompt(9, 5)
    want = model.generate(**inputs, **GREEDY)
    replayssm.attach(model, backend="sequential")
    out = replayssm.generate(model, **inputs, max_new_tokens=NEW)
    assert torch.equal(out.sequences, want)
    with pytest.raises(ValueError, match="attach that model with another backend"):
        replayssm.generate(model, **inputs, max_new_tokens=NEW, draft=model)
    replayssm.detach(model)
