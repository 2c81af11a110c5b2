"""Drafts from a second, smaller model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from replayssm.hf.runner import Runner
from replayssm.speculative import Draft, Sampling, Tree

WINDOW = 4
"""Tokens that are fed at once to catch up with a text; after a step one or two are missing."""


class DraftModel:
    """Drafts by a causal language model of the same vocabulary, attached or with attention only, with its own cache.

    It remembers what it was fed: where that is not how the text went on, it takes its tokens back. most: drafts a step.
    branches: with more than one, a tree: as many of the likeliest tokens at each place, of which the first goes on.
    Raises ValueError for models that :class:`replayssm.hf.runner.Runner` refuses.
    """

    def __init__(self, model: PreTrainedModel, most: int = 8, branches: int = 1) -> None:
        if type(branches) is not int or branches < 1:
            raise ValueError(f"DraftModel: branches must be a whole number of at least 1; got {branches!r}")
        Runner(model, WINDOW)  # refuses a model that does not suit
        attachment = getattr(model, "_replayssm", None)
        if attachment is not None and attachment.options.backend == "sequential":
            raise ValueError(
                "replayssm: backend 'sequential' writes the state at every step, so a draft model cannot take its "
                "drafts back; attach that model with another backend"
            )
        self.model, self.most, self.branches = model, most, branches
        self._runner: Runner | None = None
        self._known: list[int] = []  # tokens of each text that it was fed
        self._guessed: list[list[int]] = []  # its own drafts that it was fed after these

    def propose(self, texts: Sequence[Sequence[int]], most: Sequence[int], sampling: Sampling) -> Draft | Tree:
        """See :class:`replayssm.speculative.Drafter`."""
        most = [-(-n // self.branches) for n in most]  # places: guesses of a tree are pruned where there are too many
        steps = min(self.most, max(most))
        lengths = torch.tensor(most).clamp(max=steps)
        if steps == 0:
            return Draft(torch.zeros(len(texts), 0, dtype=torch.long), lengths)
        if self._runner is None:
            self._runner = Runner(self.model, WINDOW, back=self.most)
            logits = self._runner.prefill(texts)
        else:
            logits = self._catch_up(self._runner, texts)
        self._known, self._guessed = [len(text) for text in texts], [[] for _ in texts]
        tokens, probs, guesses = [], [], []
        for step in range(steps):
            if step:
                # From the last draft that is asked for on, -1, -2, ..: its position stays where it is.
                real = [min(1, n - step) for n in most]
                logits = self._runner.step(tokens[-1][:, None], real)[:, -1]
                for guessed, token in zip(self._guessed, tokens[-1].tolist(), strict=True):
                    guessed.append(token)
            if self.branches > 1:
                guesses.append(logits.topk(self.branches).indices)
                tokens.append(guesses[-1][:, 0])
                continue
            if not sampling.greedy:
                probs.append(sampling.probs(logits))
            tokens.append(sampling.draw(probs[-1]) if probs else logits.argmax(-1))
        if guesses:
            return Tree.comb(torch.stack(guesses, 1))
        return Draft(torch.stack(tokens, 1), lengths, torch.stack(probs, 1) if probs else None)

    def select(self, rows: Sequence[int]) -> None:
        """See :class:`replayssm.speculative.Drafter`."""
        self._known, self._guessed = [self._known[i] for i in rows], [self._guessed[i] for i in rows]
        if not rows:
            self._runner = None
        elif self._runner is not None:
            self._runner.select(rows)

    def _catch_up(self, runner: Runner, texts: Sequence[Sequence[int]]) -> Tensor:
        """Logits after the texts."""
        wrong, missing = [], []
        for known, guessed, text in zip(self._known, self._guessed, texts, strict=True):
            new = text[known:]
            agree = next((i for i, (a, b) in enumerate(zip(guessed, new, strict=False)) if a != b), len(guessed))
            agree = min(agree, len(new) - 1)  # the last token is fed again if need be, as its logits are wanted
            wrong.append(len(guessed) - agree)
            missing.append(new[agree:])
        runner.take_back(wrong)
        return runner.feed(missing)
