"""``replayssm.generate``: speculative decoding of a batch whose rows accept their own numbers of drafts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from replayssm.hf.drafters import DraftModel
from replayssm.hf.mtp import MTPHead
from replayssm.hf.runner import Runner
from replayssm.hf.trees import check_trees
from replayssm.lookup import EarlierOutputs, PromptLookup
from replayssm.speculative import Draft, Drafter, DraftLength, Sampling, Tree, judge, judge_tree

_Verified = tuple[list[list[int]], list[int], list[int], list[int]]
"""By row: the accepted tokens, the one after them, how many were drafted, how many of these were looked at."""

MOST = 8
"""Drafts a step where their number is chosen automatically."""

NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1, "no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0, "guidance_scale": 1,
    "encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "sequence_bias": None,
    "suppress_tokens": None, "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None, "watermarking_config": None, "stop_strings": None,
}  # fmt: skip
"""Settings of a generation configuration that change greedy text of ``model.generate``, and the values that do not."""


@dataclass
class Generation:
    """sequences: int64 ``[B, prompt + the longest row's new tokens]``, padded on the right. new_tokens: of each row.
    steps: forwards of the model after the prompt's. drafted, accepted: drafts of all rows that were verified, and of
    these the ones accepted; row_steps: forwards times the rows that were not through."""

    sequences: Tensor
    new_tokens: list[int]
    steps: int = 0
    row_steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        """Share of the drafts that was accepted; 0 where there were none."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """New tokens that a forward gave a row, drafts and the one that follows them."""
        return 1 + self.accepted / self.row_steps if self.row_steps else 1.0


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int = 128,
    draft: str | Drafter | PreTrainedModel | None = "prompt-lookup",
    draft_tokens: int | Literal["auto"] = "auto",
    sampling: Sampling | None = None,
    eos_token_id: int | Sequence[int] | Tensor | None = None,
    on_tokens: Callable[[int, list[int]], None] | None = None,
) -> Generation:
    """Continues a batch of prompts, verifying several drafted tokens of each row in one forward of ``model``.

    The tokens are those of decoding without drafts: greedy, the same ones, as far as the logits of a verification are
    those of single steps (in float32, rounding apart); sampled, tokens of the same distribution.

    model: attached (:func:`replayssm.attach`), or one with attention only. input_ids: int64 ``[B, T]``; attention_mask:
    ``[B, T]``, zeros for padding, on the left; None: there is none.
    draft: ``"prompt-lookup"``, ``"prompt-tree"`` (three alternatives), ``"earlier-outputs"``, ``"mtp"`` (the head in
    the checkpoint that the model was loaded from), a model of the same vocabulary, any
    :class:`replayssm.speculative.Drafter`, or None: plain decoding. draft_tokens: how many a step; ``"auto"`` follows
    each row's acceptance, up to 8. Never more than are still wanted.
    sampling: greedy by default. eos_token_id: ends a row; None: the model's own, an empty sequence: none.
    on_tokens: called with a row's number and its new tokens, step by step.
    Raises ValueError for arguments out of range, prompts padded elsewhere or empty, drafts that do not suit the model,
    and a model whose generation configuration asks ``model.generate`` for what is not done here: :data:`NEUTRAL`.
    """
    sampling = Sampling() if sampling is None else sampling
    _check(model, sampling, on_tokens)
    max_new_tokens = _whole("max_new_tokens must be", max_new_tokens)
    run = _Run(model, input_ids, attention_mask, max_new_tokens, sampling, on_tokens)
    run.ends = _ends(model, eos_token_id)
    auto = isinstance(draft_tokens, str) and draft_tokens == "auto"
    most = MOST if auto else _whole("draft_tokens must be 'auto' or", draft_tokens)
    most = min(most, max(max_new_tokens - 1, 1))  # the model gives one token itself
    drafter = _drafter(model, draft, most)
    most = 0 if drafter is None else most
    run.lengths = [DraftLength(most, fixed=not auto) for _ in run.texts]
    if drafter is None:
        return run.all(_NoDrafts(), 1)
    drafter.select([])  # whatever an interrupted call has left there
    try:
        return run.all(drafter, most + 1)
    finally:
        drafter.select([])


@dataclass
class _Run:
    """One call of :func:`generate`. texts: of all rows; live: which of them go on, in the runner's order."""

    model: PreTrainedModel
    input_ids: Tensor
    attention_mask: Tensor | None
    max_new_tokens: int
    sampling: Sampling
    on_tokens: Callable[[int, list[int]], None] | None
    ends: Sequence[int] = ()
    lengths: list[DraftLength] = field(default_factory=list)

    def __post_init__(self) -> None:
        embedding: Any = self.model.get_input_embeddings()
        self.vocabulary: int = embedding.weight.shape[0]
        self.texts = _prompts(self.input_ids, self.attention_mask, self.vocabulary)
        self.prompts = [len(text) for text in self.texts]
        self.live = list(range(len(self.texts)))
        self.result = Generation(self.input_ids, [])

    def all(self, drafter: Drafter, window: int) -> Generation:
        """To the end of all rows."""
        runner = Runner(self.model, window)
        if isinstance(drafter, MTPHead):
            drafter.watch(runner)
        token = self.sampling.pick(runner.prefill(self.texts))
        self._append([[t] for t in token.tolist()], runner, drafter)
        while self.live:
            self._step(runner, drafter)
        return self._finish()

    def _step(self, runner: Runner, drafter: Drafter) -> None:
        result, texts = self.result, [self.texts[i] for i in self.live]
        left = [self.max_new_tokens - (len(self.texts[i]) - self.prompts[i]) for i in self.live]
        most = [min(self.lengths[i].next(), n - 1) for i, n in zip(self.live, left, strict=True)]
        draft = _checked(drafter.propose(texts, most, self.sampling), len(texts), self.vocabulary)
        last = torch.tensor([text[-1:] for text in texts], device=draft.tokens.device)
        if isinstance(draft, Tree):
            accepted, nexts, drafted, looked_at = self._verify_tree(runner, last, draft, most)
        else:
            accepted, nexts, drafted, looked_at = self._verify(runner, last, draft, most)
        result.steps += 1
        result.row_steps += len(texts)
        result.drafted += sum(drafted)
        result.accepted += sum(map(len, accepted))
        for i, tokens, n in zip(self.live, accepted, looked_at, strict=True):
            self.lengths[i].learn(n, len(tokens))
        self._append([[*row, t] for row, t in zip(accepted, nexts, strict=True)], runner, drafter)

    def _verify(self, runner: Runner, last: Tensor, draft: Draft, most: list[int]) -> _Verified:
        draft = _cut(draft, most)
        lengths = draft.lengths.tolist()
        logits = runner.step(torch.cat([last, draft.tokens], 1), [n + 1 for n in lengths])
        verdict = judge(draft, logits, self.sampling)
        accepted = verdict.accepted.tolist()
        runner.take_back([draft.tokens.shape[1] - n for n in accepted])
        tokens = [row[:n] for row, n in zip(draft.tokens.tolist(), accepted, strict=True)]
        return tokens, verdict.token.tolist(), lengths, lengths

    def _verify_tree(self, runner: Runner, last: Tensor, tree: Tree, most: list[int]) -> _Verified:
        """The last token is node 0, so guess ``i`` is node ``i + 1``."""
        tree = _prune(tree, most)
        parents = torch.nn.functional.pad(tree.parents + 1, (1, 0), value=-1).clamp(min=-1)
        logits = runner.step_tree(torch.cat([last, tree.tokens], 1), parents.cpu())
        paths, token = judge_tree(tree, logits, self.sampling)
        runner.take_path([[0, *(i + 1 for i in path)] for path in paths], parents.shape[1])
        tokens = [[row[i] for i in path] for row, path in zip(tree.tokens.tolist(), paths, strict=True)]
        ends = [path[-1] if path else -1 for path in paths]
        more = [end in parents for end, parents in zip(ends, tree.parents.tolist(), strict=True)]
        drafted = (tree.parents >= -1).sum(1).tolist()
        return tokens, token.tolist(), drafted, [len(path) + n for path, n in zip(paths, more, strict=True)]

    def _append(self, new: list[list[int]], runner: Runner, drafter: Drafter) -> None:
        """The live rows' new tokens; lets the rows go that end with them."""
        stay = []
        for at, (i, tokens) in enumerate(zip(self.live, new, strict=True)):
            end = next((n + 1 for n, token in enumerate(tokens) if token in self.ends), None)
            tokens = tokens[:end]
            self.texts[i] += tokens
            if self.on_tokens is not None:
                self.on_tokens(i, tokens)
            if end is None and len(self.texts[i]) - self.prompts[i] < self.max_new_tokens:
                stay.append(at)
        if 0 < len(stay) < len(self.live):
            runner.select(stay)
            if self.result.steps:  # it has seen no rows before
                drafter.select(stay)
        self.live = [self.live[at] for at in stay]

    def _finish(self) -> Generation:
        new = [text[n:] for text, n in zip(self.texts, self.prompts, strict=True)]
        longest = max(map(len, new))
        pad = _config(self.model, "pad_token_id")
        if pad is None:  # as model.generate does
            pad = next(iter(self.ends), 0)
        padded = torch.tensor([row + [pad] * (longest - len(row)) for row in new], device=self.input_ids.device)
        self.result.sequences = torch.cat([self.input_ids, padded], 1)
        self.result.new_tokens = [len(row) for row in new]
        return self.result


def _check(model: Any, sampling: Any, on_tokens: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"generate: model must be a transformers PreTrainedModel; got {type(model).__name__}")
    if not isinstance(sampling, Sampling):
        raise ValueError(f"generate: sampling must be a replayssm.Sampling or None; got {sampling!r}")
    if on_tokens is not None and not callable(on_tokens):
        raise ValueError(f"generate: on_tokens must be a function or None; got {on_tokens!r}")
    config: Any = getattr(model, "generation_config", None)
    asked = {name: getattr(config, name, None) for name in NEUTRAL}
    asked = {name: value for name, value in asked.items() if value is not None and value != NEUTRAL[name]}
    if asked:
        settings = ", ".join(f"{name}={value}" for name, value in asked.items())
        raise ValueError(
            f"generate: model.generation_config asks for {settings}, "
            "which is done by model.generate only; set it to None to go without"
        )


def _whole(what: str, value: Any) -> int:
    """``value`` as an int of at least 1; numpy's and one-element tensors are as good."""
    number = None
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        number = operator.index(value)
    if number is None or number < 1:
        raise ValueError(f"generate: {what} a whole number of at least 1; got {value!r}")
    return number


class _NoDrafts:
    """A drafter for plain decoding."""

    def propose(self, texts: Sequence[Sequence[int]], most: Sequence[int], sampling: Sampling) -> Draft:
        return Draft.of([[] for _ in texts])

    def select(self, rows: Sequence[int]) -> None:
        pass


def _checked(draft: Any, B: int, vocabulary: int) -> Draft | Tree:
    """What a drafter proposed for ``B`` rows, with token 0 for what is no draft. Raises ValueError for what it must not
    be."""
    if not isinstance(draft, Draft | Tree):
        raise ValueError(f"generate: the drafter must propose a Draft or a Tree; got {type(draft).__name__}")
    tokens, second = draft[:2]
    form = second.shape == tokens.shape if isinstance(draft, Tree) else second.shape == (B,)
    if tokens.dim() != 2 or tokens.shape[0] != B or not form:
        raise ValueError(
            f"generate: for {B} rows a drafter must propose tokens [B, D] with lengths [B], or parents [B, D]; got "
            f"{tuple(tokens.shape)} and {tuple(second.shape)}"
        )
    if tokens.dtype != torch.long or second.dtype != torch.long:
        raise ValueError(f"generate: a drafter must propose int64; got {tokens.dtype} and {second.dtype}")
    number = torch.arange(tokens.shape[1])
    second = second.cpu()
    if isinstance(draft, Tree):
        some = second >= -1
        if bool((second >= number).any()):
            raise ValueError(f"generate: the parent of a guess must be an earlier one or -1; got {second.tolist()}")
    else:
        some = number < second[:, None]
        if bool(((second < 0) | (second > tokens.shape[1])).any()):
            raise ValueError(f"generate: lengths must be 0 .. D={tokens.shape[1]}; got {second.tolist()}")
    tokens = tokens.masked_fill(~some.to(tokens.device), 0)
    if bool(((tokens < 0) | (tokens >= vocabulary)).any()):
        raise ValueError(
            f"generate: drafted tokens must be in [0, {vocabulary}), the vocabulary; got {int(tokens.min())} .. "
            f"{int(tokens.max())}"
        )
    return draft._replace(tokens=tokens)


def _cut(draft: Draft, most: Sequence[int]) -> Draft:
    """Only as many drafts as were asked for, and no column without any."""
    lengths = torch.minimum(draft.lengths.cpu(), torch.tensor(most))
    D = int(lengths.max())
    return Draft(draft.tokens[:, :D], lengths, None if draft.probs is None else draft.probs[:, :D])


def _prune(tree: Tree, most: Sequence[int]) -> Tree:
    """Only each row's first guesses, as many as were asked for."""
    D = max(most)
    extra = torch.arange(tree.parents[:, :D].shape[1]) >= torch.tensor(most)[:, None]
    return Tree(tree.tokens[:, :D], tree.parents[:, :D].masked_fill(extra.to(tree.parents.device), -2))


def _drafter(model: PreTrainedModel, draft: Any, most: int) -> Drafter | None:
    if isinstance(draft, PreTrainedModel):
        ours, theirs = (m.config.get_text_config(decoder=True).vocab_size for m in (model, draft))
        if ours != theirs:
            raise ValueError(f"generate: the draft model must have the model's vocabulary of {ours}; got {theirs}")
        return DraftModel(draft, most)
    if draft == "prompt-lookup":
        return PromptLookup()
    if draft == "mtp":
        return MTPHead.load(model)
    if draft == "prompt-tree":
        draft = PromptLookup(branches=3)
    if draft == "earlier-outputs":
        return EarlierOutputs()
    known = draft is None or all(callable(getattr(draft, name, None)) for name in ("propose", "select"))
    if not known or isinstance(draft, type):
        valid = "prompt-lookup, prompt-tree, earlier-outputs, mtp, a model, a Drafter"
        raise ValueError(f"generate: unknown draft {draft!r}; valid: {valid}")
    if isinstance(draft, PromptLookup) and draft.branches > 1:
        check_trees(model)
    return draft


def _prompts(input_ids: Any, attention_mask: Any, vocabulary: int) -> list[list[int]]:
    """The rows' tokens without their padding."""
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.long, torch.int):
        got = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(f"generate: input_ids must be an int64 tensor; got {got}")
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"generate: input_ids must be [B, T], with at least one token; got {tuple(input_ids.shape)}")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if getattr(attention_mask, "shape", None) != input_ids.shape:
        shape = getattr(attention_mask, "shape", None)
        raise ValueError(
            f"generate: attention_mask must be like input_ids, {tuple(input_ids.shape)}; got "
            f"{type(attention_mask).__name__ if shape is None else tuple(shape)}"
        )
    real = torch.as_tensor(attention_mask, device=input_ids.device).bool()
    if not bool(real[:, -1].all()) or bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise ValueError("generate: padding must be on the left of every prompt, as its last tokens are continued")
    if bool((((input_ids < 0) | (input_ids >= vocabulary)) & real).any()):
        least, most = int(input_ids[real].min()), int(input_ids[real].max())
        raise ValueError(f"generate: input_ids must be in [0, {vocabulary}), the vocabulary; got {least} .. {most}")
    return [row[mask].tolist() for row, mask in zip(input_ids, real, strict=True)]


def _ends(model: PreTrainedModel, eos_token_id: Any) -> list[int]:
    ends = _config(model, "eos_token_id") if eos_token_id is None else eos_token_id
    ends = () if ends is None else ends.tolist() if hasattr(ends, "tolist") else ends  # torch's and numpy's
    try:
        return [operator.index(end) for end in (ends if isinstance(ends, Iterable) else [ends])]
    except TypeError:
        raise ValueError(f"generate: eos_token_id must be a token or several; got {eos_token_id!r}") from None


def _config(model: PreTrainedModel, name: str) -> Any:
    """A token of the model's generation configuration, or else of its text configuration."""
    value = getattr(getattr(model, "generation_config", None), name, None)
    return value if value is not None else getattr(model.config.get_text_config(decoder=True), name, None)
