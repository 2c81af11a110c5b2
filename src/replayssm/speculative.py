"""Speculative decoding without a model: which drafts are accepted, and how many to draft.

A step of a batch feeds each row's last token and its drafts ``x_1 .. x_D``; the logits then say, for each of them,
what comes next. :func:`judge` accepts as long a prefix of each row's drafts as leaves the distribution of the text what
it is without drafts, and gives one token more. Nothing here knows what computes the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from logits.

    temperature: 0 takes the likeliest. top_k: among that many only. top_p: among the likeliest that hold this share.
    generator: of random numbers, on the logits' device; None: torch's own. Raises ValueError for values out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, Real) or not self.temperature >= 0:
            raise ValueError(f"Sampling: temperature must be a number that is not negative; got {self.temperature!r}")
        if self.top_k is not None and (not isinstance(self.top_k, Integral) or self.top_k < 1):
            raise ValueError(f"Sampling: top_k must be a whole number of at least 1; got {self.top_k!r}")
        if self.top_p is not None and (not isinstance(self.top_p, Real) or not 0 < self.top_p <= 1):
            raise ValueError(f"Sampling: top_p must be a number above 0 and at most 1; got {self.top_p!r}")
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise ValueError(f"Sampling: generator must be a torch.Generator; got {self.generator!r}")

    @property
    def greedy(self) -> bool:
        """The likeliest token, with no chance in it."""
        return self.temperature == 0

    def probs(self, logits: Tensor) -> Tensor:
        """Probabilities ``[.., vocabulary]`` in at least float32 that a token is drawn with; one-hot where greedy."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.greedy:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        # Whatever the temperature, the likeliest token stays at 0, where no division makes it infinite.
        logits = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, torch.finfo(torch.float32).tiny)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[..., -1:], float("-inf"))
        p = logits.softmax(-1)
        if self.top_p is None or self.top_p == 1:
            return p
        ordered, index = torch.sort(p, dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # what the likelier ones hold; the first is always kept
        kept = ordered * (before < self.top_p)
        p = torch.zeros_like(p).scatter_(-1, index, kept)
        return p / p.sum(-1, keepdim=True)

    def pick(self, logits: Tensor) -> Tensor:
        """A token ``[B]`` for each row of ``logits [B, vocabulary]``."""
        return logits.argmax(-1) if self.greedy else self.draw(self.probs(logits))

    def draw(self, weights: Tensor) -> Tensor:
        """A token ``[B]`` with odds ``weights [B, vocabulary]``, which need not add up to 1."""
        return torch.multinomial(weights, 1, generator=self.generator)[:, 0]


class Draft(NamedTuple):
    """Drafts of a batch whose rows have different numbers of them.

    tokens: int64 ``[B, D]``; what lies beyond a row's length is anything. lengths: int64 ``[B]``, 0 .. D.
    probs: ``[B, D, vocabulary]``, the distribution that each token was drawn from; None if no chance was involved.
    """

    tokens: Tensor
    lengths: Tensor
    probs: Tensor | None = None

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> Draft:
        """From a list of tokens a row, on the CPU."""
        most = max(map(len, rows), default=0)
        tokens = torch.tensor([[*row, *[0] * (most - len(row))] for row in rows], dtype=torch.long)
        return Draft(tokens.view(len(rows), most), torch.tensor([len(row) for row in rows], dtype=torch.long))


class Tree(NamedTuple):
    """Draft trees of a batch: guesses without chance, several a position.

    tokens: int64 ``[B, D]``. parents: int64 ``[B, D]``, the number of an earlier guess of the row that each follows, or
    -1 for the text itself; anything below -1 marks what is no guess.
    """

    tokens: Tensor
    parents: Tensor

    @staticmethod
    def comb(guesses: Tensor) -> Tree:
        """From guesses ``[B, S, n]`` for each of S tokens, the likeliest first: it goes on, the others are leaves."""
        B, S, n = guesses.shape
        before = torch.arange(S).repeat_interleave(n) * n - n  # the host asks for it
        return Tree(guesses.flatten(1), before.clamp(min=-1).expand(B, -1))

    @staticmethod
    def of(rows: Sequence[Sequence[Sequence[int]]]) -> Tree:
        """From alternative continuations of each row; where they begin alike they share guesses."""
        tokens: list[list[int]] = []
        parents: list[list[int]] = []
        for alternatives in rows:
            known: dict[tuple[int, int], int] = {}  # parent and token -> number
            for guesses in alternatives:
                at = -1
                for token in guesses:
                    at = known.setdefault((at, token), len(known))
            tokens.append([token for _, token in known])
            parents.append([parent for parent, _ in known])
        most = max(map(len, tokens), default=0)
        shape = len(rows), most
        return Tree(
            torch.tensor([row + [0] * (most - len(row)) for row in tokens], dtype=torch.long).view(shape),
            torch.tensor([row + [-2] * (most - len(row)) for row in parents], dtype=torch.long).view(shape),
        )


class Verdict(NamedTuple):
    """accepted: int64 ``[B]``, how many of a row's drafts; token: int64 ``[B]``, the one that follows these."""

    accepted: Tensor
    token: Tensor


def judge(draft: Draft, logits: Tensor, sampling: Sampling) -> Verdict:
    """Which drafts are accepted, and each row's next token.

    logits: ``[B, D + 1, vocabulary]``, after the last token and after each draft. Greedy: a draft is accepted where it
    is the likeliest token. Sampled: a draft ``x`` of ``q`` is accepted with probability ``min(1, p(x) / q(x))``; the
    token after the first rejection is drawn from what ``p`` has more than ``q``; then every token is distributed as
    ``p`` says, whatever the drafts were (arXiv:2211.17192, arXiv:2302.01318). Drafts without chance are ``q(x) = 1``.
    Raises ValueError where shapes do not fit.
    """
    B, D = draft.tokens.shape
    if logits.dim() != 3 or logits.shape[:2] != (B, D + 1) or draft.lengths.shape != (B,):
        raise ValueError(
            f"judge: logits must be [B={B}, D + 1={D + 1}, vocabulary] and lengths [B]; got {tuple(logits.shape)} and "
            f"{tuple(draft.lengths.shape)}"
        )
    tokens, lengths = draft.tokens.to(logits.device), draft.lengths.to(logits.device)
    drafted = torch.arange(D, device=logits.device) < lengths[:, None]
    row = torch.arange(B, device=logits.device)
    if sampling.greedy:
        best = logits.argmax(-1)
        accepted = _prefix((tokens == best[:, :D]) & drafted)
        return Verdict(accepted, best[row, accepted])
    p = sampling.probs(logits)
    if draft.probs is not None and draft.probs.shape != (B, D, p.shape[2]):
        raise ValueError(
            f"judge: probs must be [B, D, vocabulary], {(B, D, p.shape[2])}; got {tuple(draft.probs.shape)}"
        )
    tokens = tokens.clamp(min=0)
    q = None if draft.probs is None else draft.probs.to(p)
    chance = torch.rand(B, D, generator=sampling.generator, device=logits.device, dtype=p.dtype)
    of_p = p[:, :D].gather(2, tokens[..., None])[..., 0]
    of_q = 1 if q is None else q.gather(2, tokens[..., None])[..., 0]
    accepted = _prefix((chance * of_q < of_p) & drafted)
    weights = _residual(p[row, accepted], tokens, q, accepted, accepted < lengths)
    return Verdict(accepted, sampling.draw(weights))


def judge_tree(tree: Tree, logits: Tensor, sampling: Sampling) -> tuple[list[list[int]], Tensor]:
    """The path of accepted guesses in each row's tree, as their numbers, and each row's next token ``[B]``.

    logits: ``[B, D + 1, vocabulary]``, after the last token and after each guess. From the root on a token is chosen as
    plain decoding would; a guess that is that token is accepted, and the choice goes on from there. So the text is
    distributed, or greedy, as without drafts. Raises ValueError where shapes do not fit.
    """
    B, D = tree.tokens.shape
    if logits.dim() != 3 or logits.shape[:2] != (B, D + 1):
        raise ValueError(f"judge_tree: logits must be [B={B}, D + 1={D + 1}, vocabulary]; got {tuple(logits.shape)}")
    chosen = sampling.pick(logits.flatten(0, 1)).view(B, D + 1)
    after, tokens, parents = chosen.tolist(), tree.tokens.tolist(), tree.parents.tolist()
    paths = []
    for row in range(B):
        children = {(parents[row][i], tokens[row][i]): i for i in range(D) if parents[row][i] >= -1}
        path, at = [], -1
        while (at := children.get((at, after[row][at + 1]), -2)) >= 0:
            path.append(at)
        paths.append(path)
    last = torch.tensor([path[-1] + 1 if path else 0 for path in paths], device=logits.device)
    return paths, chosen.gather(1, last[:, None])[:, 0]


def _prefix(ok: Tensor) -> Tensor:
    """How many in a row are True from the start, ``[B, D] -> [B]``."""
    return ok.long().cumprod(1).sum(1)


def _residual(p: Tensor, tokens: Tensor, q: Tensor | None, accepted: Tensor, rejected: Tensor) -> Tensor:
    """Odds of the token after the accepted ones: ``p [B, vocabulary]``, less ``q`` where a draft was rejected."""
    if tokens.shape[1] == 0:
        return p
    at = accepted.clamp(max=tokens.shape[1] - 1)
    row = torch.arange(p.shape[0], device=p.device)
    less = p.scatter(1, tokens[row, at][:, None], 0) if q is None else (p - q[row, at]).clamp(min=0)
    some = less.sum(1) > 0  # rounding alone can reject where p equals q
    return torch.where((rejected & some)[:, None], less, p)


class Drafter(Protocol):
    """Proposes drafts. ``texts`` are the rows' tokens so far, prompt included; they only ever grow."""

    def propose(self, texts: Sequence[Sequence[int]], most: Sequence[int], sampling: Sampling) -> Draft | Tree:
        """At most ``most[b]`` tokens that may follow ``texts[b]``, on any device, of a tree in all its branches."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """The batch that was proposed for goes on with these of its rows only; the others have ended. None: it is over;
        that is also said before the first."""
        ...


class DraftLength:
    """How many tokens to draft for one row: as many as its drafts so far let hope for.

    most: never more. fixed: always that many. Else the share ``a`` of drafts that were accepted is followed (over about
    the last 16), and drafts go on while the chance that all are accepted, ``a ** n``, is at least ``worth``. Where not
    even one is worth it, one is tried every ``PROBE`` steps.
    """

    PROBE = 8

    def __init__(self, most: int, *, fixed: bool = False, worth: float = 0.3) -> None:
        self.most, self.fixed, self.worth = most, fixed, worth
        self.rate = 0.8  # before anything is known
        self._idle = 0

    def next(self) -> int:
        """How many to draft now."""
        if self.fixed:
            return self.most
        n, chance = 0, self.rate
        while n < self.most and chance >= self.worth:
            n, chance = n + 1, chance * self.rate
        if n == 0 and self.most:
            self._idle += 1
            n = int(self._idle % self.PROBE == 0)
        return n

    def learn(self, drafted: int, accepted: int) -> None:
        """What became of a step's drafts. Those after the first rejection were not looked at."""
        for i in range(min(drafted, accepted + 1)):
            self.rate += ((i < accepted) - self.rate) / 16
