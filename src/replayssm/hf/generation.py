"""``replayssm.generate``: speculative decoding of a batch whose rows accept their own numbers of drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from replayssm.hf.arguments import check_options, config_token, ends, prompts, whole
from replayssm.hf.drafters import DraftModel
from replayssm.hf.mtp import MTPHead
from replayssm.hf.runner import Runner
from replayssm.hf.trees import check_trees
from replayssm.hf.verifying import StaticRunner
from replayssm.lookup import EarlierOutputs, PromptLookup
from replayssm.speculative import Draft, Drafter, DraftLength, Sampling, Tree, judge, judge_tree

_Verified = tuple[list[list[int]], list[int], list[int], list[int]]
"""By row: the accepted tokens, the one after them, how many were drafted, how many of these were looked at."""

MOST = 8
"""Drafts a step where their number is chosen automatically."""


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
    static: bool = False,
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
    static: fixed memory, every step of ``draft_tokens + 1`` tokens a row; on CUDA steps are compiled and captured. Not
    for trees, the head in the checkpoint, and types that trees do not suit.
    Raises ValueError for arguments out of range, prompts padded elsewhere or empty, drafts that do not suit the model,
    and a model whose generation configuration asks ``model.generate`` for what is not done here, see
    :data:`replayssm.hf.arguments.NEUTRAL`.
    """
    sampling = Sampling() if sampling is None else sampling
    check_options(model, sampling, on_tokens)
    max_new_tokens = whole("max_new_tokens must be", max_new_tokens)
    run = _Run(model, input_ids, attention_mask, max_new_tokens, sampling, on_tokens)
    run.ends = ends(model, eos_token_id)
    auto = isinstance(draft_tokens, str) and draft_tokens == "auto"
    most = MOST if auto else whole("draft_tokens must be 'auto' or", draft_tokens)
    most = min(most, max(max_new_tokens - 1, 1))  # the model gives one token itself
    drafter = _drafter(model, draft, most)
    most = 0 if drafter is None else most
    run.lengths = [DraftLength(most, fixed=not auto) for _ in run.texts]
    run.static = static
    if static and (isinstance(drafter, MTPHead) or getattr(drafter, "branches", 1) > 1):
        raise ValueError("generate: static=True verifies chains, and cannot feed a head in the checkpoint")
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
    static: bool = False

    def __post_init__(self) -> None:
        embedding: Any = self.model.get_input_embeddings()
        self.vocabulary: int = embedding.weight.shape[0]
        self.texts = prompts(self.input_ids, self.attention_mask, self.vocabulary)
        self.prompts = [len(text) for text in self.texts]
        self.live = list(range(len(self.texts)))
        self.result = Generation(self.input_ids, [])

    def all(self, drafter: Drafter, window: int) -> Generation:
        """To the end of all rows."""
        static = StaticRunner(self.model, window, self.max_new_tokens) if self.static else None
        runner: Any = static or Runner(self.model, window)
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
        pad = config_token(self.model, "pad_token_id")
        if pad is None:  # as model.generate does
            pad = next(iter(self.ends), 0)
        padded = torch.tensor([row + [pad] * (longest - len(row)) for row in new], device=self.input_ids.device)
        self.result.sequences = torch.cat([self.input_ids, padded], 1)
        self.result.new_tokens = [len(row) for row in new]
        return self.result


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
    if getattr(draft, "branches", 1) > 1:
        check_trees(model)
    return draft
