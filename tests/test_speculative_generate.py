"""``replayssm.generate`` on every model type and drafter: the greedy text of stock transformers, the distribution of
plain sampling; what it refuses."""

from __future__ import annotations

import sys
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
from replayssm.hf import explain
from replayssm.hf.drafters import DraftModel
from replayssm.hf.trees import SPARSE
from replayssm.lookup import EarlierOutputs, PromptLookup
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


class Says:
    """Proposes what it was given."""

    def __init__(self, draft: Any) -> None:
        self.draft = draft

    def propose(self, texts: Sequence[Sequence[int]], most: Sequence[int], sampling: Sampling) -> Any:
        return self.draft

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
    drafters = [Planted(subject.texts(), "tree"), "prompt-tree", DraftModel(subject.close, branches=2)]
    if subject.model.config.get_text_config().model_type in SPARSE:
        with pytest.raises(ValueError, match="draft trees are not supported"):
            run(subject, drafters[0])
        return
    results = [run(subject, draft, draft_tokens=8) for draft in drafters]
    assert all(torch.equal(out.sequences, subject.want) for out in results)
    assert 0.1 < results[0].acceptance < 0.9 and results[0].steps < 13
    assert "draft trees: torch" in explain(subject.model)


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
@pytest.mark.parametrize("drafter", ["model", "always", "tree"])
def test_sampling_is_lossless(name: str, drafter: str) -> None:
    """2,000 texts of three tokens, counted, against their exact probabilities: chi-square, four deviations."""
    model, start = small(name), [3]  # a prompt of one token: KDA's own function pads more to 64
    draft: Any = Always(1, 4) if drafter == "always" else llama(5, bos_token_id=1, initializer_range=0.5)
    if drafter == "tree":
        draft = DraftModel(draft, branches=2)
    sampling = Sampling(0.9, top_k=4, generator=torch.Generator().manual_seed(11))
    ids = torch.tensor([start]).expand(500, -1)
    texts = []
    for _ in range(4):
        out = replayssm.generate(
            model, ids, max_new_tokens=4, draft=draft, draft_tokens=2 + 2 * (drafter == "tree"), sampling=sampling,
            eos_token_id=(),
        )  # fmt: skip
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
        (dict(draft=PromptLookup), "unknown draft <class"),
        (dict(draft=3), "unknown draft 3; valid"),
        (dict(draft=llama().model), "LlamaModel is no causal language model"),
        (
            dict(draft=build("kimi_linear"), on_tokens=print),
            "KimiLinearForCausalLM has recurrent layers and is not att",
        ),
        (dict(draft="mtp"), "MTPHead: known for qwen3_5_text"),
        (dict(draft_tokens=0), "draft_tokens must be 'auto' or a whole number of at least 1; got 0"),
        (dict(draft_tokens="many"), "draft_tokens must be 'auto'"),
        (dict(draft_tokens=True), "draft_tokens must be 'auto' or a whole number of at least 1; got True"),
        (dict(max_new_tokens=0), "max_new_tokens must be a whole number of at least 1; got 0"),
        (dict(max_new_tokens=2.5), "max_new_tokens must be a whole number of at least 1; got 2.5"),
        (dict(eos_token_id="</s>"), "eos_token_id must be a token or several; got '</s>'"),
        (dict(eos_token_id=1.0), "eos_token_id must be a token or several; got 1.0"),
        (dict(sampling={"temperature": 1}), r"sampling must be a replayssm.Sampling or None; got \{"),
        (dict(on_tokens=3), "on_tokens must be a function or None; got 3"),
        (dict(draft=llama(99)), "vocabulary of 128; got 99"),
        (dict(attention_mask=torch.tensor([[1, 1, 0]])), "padding must be on the left"),
        (dict(attention_mask=torch.tensor([[1, 0, 1]])), "padding must be on the left"),
        (dict(attention_mask=torch.ones(1, 2)), r"attention_mask must be like input_ids, \(1, 3\); got \(1, 2\)"),
        (dict(attention_mask=[[1, 1, 1]]), r"attention_mask must be like input_ids, \(1, 3\); got list"),
        (dict(input_ids=ids[0]), r"input_ids must be \[B, T\]"),
        (dict(input_ids=ids.tolist()), "input_ids must be an int64 tensor; got list"),
        (dict(input_ids=ids.float()), "input_ids must be an int64 tensor; got torch.float32"),
        (dict(input_ids=ids + 122), r"input_ids must be in \[0, 128\), the vocabulary; got 127 .. 129"),
        (dict(model="gdn"), "model must be a transformers PreTrainedModel; got str"),
        (dict(model=llama().model), "LlamaModel is no causal language model"),
    ]
    for kwargs, message in cases:
        with pytest.raises(ValueError, match=message):
            replayssm.generate(**dict[str, Any](model=model, input_ids=ids) | kwargs)
    replayssm.detach(model)


def wrong_drafts() -> list[tuple[Any, str]]:
    """For two rows, and what is said of each."""
    two, ones = torch.tensor([2, 2]), torch.ones(2, 2, dtype=torch.long)
    return [
        (None, "must propose a Draft or a Tree; got NoneType"),
        ([[1], [1]], "must propose a Draft or a Tree; got list"),
        (Draft.of([[1]]), r"for 2 rows .* got \(1, 1\) and \(1,\)"),
        (Draft(ones, two + 1), r"lengths must be 0 .. D=2; got \[3, 3\]"),
        (Draft(ones, -two), r"lengths must be 0 .. D=2; got \[-2, -2\]"),
        (Draft(ones.float(), two), "must propose int64; got torch.float32"),
        (Draft(ones * 128, two), r"must be in \[0, 128\), the vocabulary; got 128 .. 128"),
        (Draft(ones, two, torch.ones(2, 2, 7)), r"probs must be \[B, D, vocabulary\], \(2, 2, 128\); got \(2, 2, 7\)"),
        (Tree(ones, two), r"for 2 rows .* got \(2, 2\) and \(2,\)"),
        (Tree(ones, torch.tensor([[-1, 1], [-1, 0]])), r"must be an earlier one or -1; got \[\[-1, 1\]"),
        (Tree(-ones, torch.tensor([[-1, 0], [-1, 0]])), r"must be in \[0, 128\), the vocabulary; got -1 .. -1"),
    ]


@pytest.mark.parametrize("case", range(len(wrong_drafts())))
def test_what_a_drafter_must_not_propose(case: int) -> None:
    """Some of it would not fail by itself: a length beyond the tokens changes what is sampled."""
    draft, message = wrong_drafts()[case]
    with pytest.raises(ValueError, match=message):
        replayssm.generate(
            llama(), torch.tensor([[5, 6], [7, 8]]), max_new_tokens=9, draft=Says(draft), sampling=Sampling(1.0)
        )


def test_what_is_no_draft_can_be_anything() -> None:
    model, ids = llama(), torch.tensor([[5, 6], [7, 8]])
    want = replayssm.generate(model, ids, max_new_tokens=9, draft=None).sequences
    tokens = torch.tensor([[3, -100], [-100, 999]])
    for draft in (Draft(tokens, torch.tensor([1, 0])), Tree(tokens, torch.tensor([[-1, -2], [-2, -9]]))):
        assert torch.equal(replayssm.generate(model, ids, max_new_tokens=9, draft=Says(draft)).sequences, want)


@pytest.mark.parametrize("draft", ["prompt-lookup", "prompt-tree", "earlier-outputs", "itself"])
def test_a_row_that_ends_with_its_first_token(draft: str) -> None:
    """Before anything was proposed. The ends are a tensor, or any whole number."""
    model = build("mamba2", pad_token_id=None)
    inputs = prompt(27, 5, 14)
    end = int(model.generate(**inputs, **GREEDY)[1, 27])
    want = model.generate(**inputs, **GREEDY, eos_token_id=end)
    replayssm.attach(model, backend=BACKEND)
    how = model if draft == "itself" else draft
    for ends in (torch.tensor([end, 127]), torch.tensor(end).numpy(), [end])[2 * (draft != "prompt-lookup") :]:
        out = replayssm.generate(model, **inputs, max_new_tokens=NEW, draft=how, eos_token_id=ends)
        assert out.new_tokens[1] == 1
        assert torch.equal(out.sequences[:, : want.shape[1]], want)  # padded as there, by the first end
    replayssm.detach(model)


def test_positions_end_where_the_text_does() -> None:
    """Rows that may draft less than others are filled up, but not beyond the last position that a model has."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=128, n_embd=32, n_layer=1, n_head=2, n_positions=27 + NEW, eos_token_id=None
    )
    limited, model, inputs = transformers.GPT2LMHeadModel(config).eval(), build("mamba2"), prompt(27, 5, 14)
    wants = [m.generate(**inputs, **GREEDY, pad_token_id=0) for m in (limited, model)]
    replayssm.attach(model, backend=BACKEND)
    for m, want in zip((limited, model), wants, strict=True):
        bad = Fixed([row[(row != 0).nonzero()[0] :].tolist() for row in want], "mixed")
        for draft in (limited, bad):
            out = replayssm.generate(m, **inputs, max_new_tokens=NEW, draft=draft, draft_tokens=6)
            assert torch.equal(out.sequences, want)
    replayssm.detach(model)


def test_more_drafts_than_tokens_take_no_memory() -> None:
    model, inputs = build("mamba2"), prompt(9)
    want = model.generate(**inputs, **GREEDY)
    replayssm.attach(model, backend=BACKEND)
    out = replayssm.generate(model, **inputs, max_new_tokens=NEW, draft_tokens=10**9)
    assert torch.equal(out.sequences, want)
    replayssm.detach(model)


def test_what_only_transformers_does_is_refused() -> None:
    """Where the checkpoint asks for it, the text would not be that of model.generate."""
    model, ids = llama(), torch.tensor([[5, 6, 7]])
    for name, value in dict(repetition_penalty=1.5, suppress_tokens=[3], min_new_tokens=4).items():
        model.generation_config = transformers.GenerationConfig(**{name: value})
        with pytest.raises(ValueError, match=rf"asks for {name}=.*set it to None"):
            replayssm.generate(model, ids)
    model.generation_config = transformers.GenerationConfig(
        repetition_penalty=1.0, no_repeat_ngram_size=0, min_length=0
    )
    assert replayssm.generate(model, ids, max_new_tokens=2).new_tokens == [2]


def test_trees_need_positions() -> None:
    """A model that takes none counts them itself, in a chain."""
    config = transformers.BloomConfig(vocab_size=128, hidden_size=32, n_layer=1, n_head=2)
    told: list[Any] = []
    with pytest.raises(ValueError, match="not supported for bloom: it takes no positions; draft chains"):
        replayssm.generate(
            transformers.BloomForCausalLM(config), torch.tensor([[5, 6, 7]]), draft="prompt-tree",
            on_tokens=lambda row, tokens: told.append(tokens),
        )  # fmt: skip
    assert not told


@pytest.mark.parametrize("where", ["propose", "on_tokens", "forward"])
def test_an_interrupted_call_leaves_nothing(where: str) -> None:
    """Neither on the model nor in transformers; the same drafter goes on with the next text."""
    model, inputs, drafter, calls = build("qwen3_5"), prompt(9, 5), PromptLookup(branches=3), []
    want = model.generate(**inputs, **GREEDY)
    module: Any = sys.modules[type(model).__module__]
    replayssm.attach(model, backend=BACKEND)
    before = module.causal_conv1d_fn

    def third(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt

    def propose(*args: Any) -> Any:
        third()
        return PromptLookup.propose(drafter, *args)

    handle = model.model.layers[2].register_forward_hook(third) if where == "forward" else None
    drafter.propose = propose if where == "propose" else drafter.propose
    with pytest.raises(KeyboardInterrupt):
        replayssm.generate(
            model, **inputs, max_new_tokens=NEW, draft=drafter, on_tokens=third if where == "on_tokens" else None
        )
    if handle is not None:
        handle.remove()
    assert module.causal_conv1d_fn is before
    assert torch.equal(replayssm.generate(model, **inputs, max_new_tokens=NEW, draft=drafter).sequences, want)
    assert torch.equal(model.generate(**inputs, **GREEDY), want)
    replayssm.detach(model)


def test_a_draft_model_that_writes_its_state_every_step() -> None:
    """As the model it can be run so; as a drafter it has nothing to go back to."""
    model, inputs = build("qwen3_5"), prompt(9, 5)
    want = model.generate(**inputs, **GREEDY)
    replayssm.attach(model, backend="sequential")
    out = replayssm.generate(model, **inputs, max_new_tokens=NEW)
    assert torch.equal(out.sequences, want)
    said: list[Any] = []
    with pytest.raises(ValueError, match="attach that model with another backend"):
        replayssm.generate(model, **inputs, max_new_tokens=NEW, draft=model, on_tokens=lambda *new: said.append(new))
    assert not said, "before anything is computed"
    replayssm.detach(model)
