"""The cursors against plain Python lists."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count as counter
from random import Random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from replayssm import Ring


@dataclass
class Slot:
    """A sequence as a list: ``tokens[:folded]`` are in the checkpoint, the others must be in the ring."""

    tokens: list[int] = field(default_factory=list)
    folded: int = 0

    def copy(self) -> Slot:
        return Slot(list(self.tokens), self.folded)


SEEDS = st.integers(0, 2**32)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Cursors(RuleBasedStateMachine):
    """Plays layer and model: writes token ids to physical rows where the cursors say, and keeps each sequence as a
    list. Whatever is done, the live rows must be the list's tail.

    Hypothesis chooses the operations; their numbers come evenly from a seed, as its own choices keep close to 0."""

    @initialize(seed=SEEDS)
    def build(self, seed: int) -> None:
        rng = Random(seed)
        window = rng.choice([1, 1, 2, 3, 5, 9])
        self.R = rng.randint(2 * window, 2 * window + rng.choice([0, 3, 20]))
        limit = rng.choice([None, rng.randint(0, self.R - 2 * window)])
        self.N, self.window = rng.randint(1, 4), window
        self.ring = Ring.build(self.N, self.R, window, limit)
        self.rows = [[-1] * self.R for _ in range(self.N)]
        self.model = [Slot() for _ in range(self.N)]
        self.ids = counter()

    def some_slots(self, rng: Random) -> list[int]:
        """Real slots, each at most once, in any order, with padding between."""
        real = rng.sample(range(self.N), rng.randint(0, self.N))
        return rng.sample(mixed := [*real, *rng.choices([-1, -2, -9], k=rng.randint(0, 2))], len(mixed))

    def append(self, slot: int, T: int) -> list[int]:
        """A layer's verify: T draft rows, which may not overwrite what the launch still reads, and the fold if due."""
        head, count = (int(x) for x in self.ring.at(int32([slot])))
        assert count + T <= self.R
        draft = [next(self.ids) for _ in range(T)]
        for t, token in enumerate(draft):
            self.rows[slot][(head + count + t) % self.R] = token
        if bool(self.ring.due(torch.tensor(count), head)):
            self.model[slot].folded += count
        return draft

    def step(self, rng: Random, slots: list[int], most: int) -> None:
        T = rng.randint(0, most)
        drafts = [self.append(slot, T) if slot >= 0 else [] for slot in slots]
        accepted = [rng.randint(0, T) for _ in slots]
        if rng.random() < 0.3:
            accepted = [T] * len(slots)
            self.ring.commit(int32(slots), T)
        else:
            self.ring.commit(int32(slots), torch.tensor(accepted, dtype=rng.choice([torch.int32, torch.int64])))
        for slot, draft, n in zip(slots, drafts, accepted, strict=True):
            if slot >= 0:
                self.model[slot].tokens += draft[:n]

    @rule(seed=SEEDS)
    def steps(self, seed: int) -> None:
        rng = Random(seed)
        for _ in range(rng.randint(1, 8)):
            self.step(rng, self.some_slots(rng), self.window)
            self.live_rows_are_the_tail_of_the_list()

    @rule(seed=SEEDS)
    def long_append_to_an_empty_ring(self, seed: int) -> None:
        rng = Random(seed)
        slots = [i for i in self.some_slots(rng) if i < 0 or not self.live(i)]
        self.step(rng, slots, self.ring.most)

    @rule(seed=SEEDS)
    def fold_a_prefix(self, seed: int) -> None:
        rng = Random(seed)
        slots = self.some_slots(rng)
        n = [rng.randint(0, self.live(i)) if i >= 0 else 77 for i in slots]
        self.ring.absorb(int32(slots), int32(n))
        for slot, rows in zip(slots, n, strict=True):
            if slot >= 0:
                self.model[slot].folded += rows

    @rule(seed=SEEDS)
    def rewind(self, seed: int) -> None:
        rng = Random(seed)
        slots = self.some_slots(rng)
        n = [rng.randint(0, self.live(i)) if i >= 0 else 77 for i in slots]
        if rng.random() < 0.3:
            least = min([rows for rows, slot in zip(n, slots, strict=True) if slot >= 0], default=0)
            n = [least] * len(slots)
            self.ring.rewind(int32(slots), least)
        else:
            self.ring.rewind(int32(slots), int32(n))
        for slot, rows in zip(slots, n, strict=True):
            if slot >= 0 and rows:
                del self.model[slot].tokens[-rows:]

    @rule(seed=SEEDS)
    def reset(self, seed: int) -> None:
        slots = self.some_slots(Random(seed))
        self.ring.reset(int32(slots))
        for slot in slots:
            if slot >= 0:
                self.model[slot] = Slot()

    @rule(seed=SEEDS)
    def copy(self, seed: int) -> None:
        """As if all at once: swaps and one source of many included."""
        rng = Random(seed)
        dst = self.some_slots(rng)
        src = [rng.randrange(self.N) for _ in dst]
        self.ring.copy(int32(src), int32(dst))
        old = [(list(rows), seq.copy()) for rows, seq in zip(self.rows, self.model, strict=True)]
        for a, b in zip(src, dst, strict=True):
            if b >= 0:
                self.rows[b], self.model[b] = list(old[a][0]), old[a][1].copy()

    @rule(seed=SEEDS)
    def export_and_import(self, seed: int) -> None:
        rng = Random(seed)
        a, b = rng.randrange(self.N), rng.randrange(self.N)
        self.ring.put(int32([b, -1]), int32([int(self.ring.head[a]), 5]), int32([int(self.ring.count[a]), 5]))
        self.rows[b], self.model[b] = list(self.rows[a]), self.model[a].copy()

    def live(self, slot: int) -> int:
        return len(self.model[slot].tokens) - self.model[slot].folded

    @invariant()
    def padding_shares_no_entry(self) -> None:
        """What padding writes stays in bounds too, and no slot reads it."""
        assert self.ring.head.shape == self.ring.count.shape == (self.N + 1,)
        assert 0 <= self.ring.head[-1] < self.R and self.ring.count[-1] == 0

    @invariant()
    def live_rows_are_the_tail_of_the_list(self) -> None:
        assert self.ring.head.dtype == self.ring.count.dtype == torch.int32
        head, count = self.ring.at(torch.arange(self.N, dtype=torch.int32))
        for slot, seq in enumerate(self.model):
            h, c = int(head[slot]), int(count[slot])
            assert 0 <= h < self.R and 0 <= c <= self.ring.most
            assert [self.rows[slot][(h + i) % self.R] for i in range(c)] == seq.tokens[seq.folded :]

    @invariant()
    def padding_reads_zeros(self) -> None:
        assert [x.tolist() for x in self.ring.at(int32([-1, -5]))] == [[0, 0], [0, 0]]


Cursors.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None, derandomize=True)
test_cursors = Cursors.TestCase


@pytest.mark.parametrize("R", [2, 3, 9, 16, 24])
def test_the_fold_comes_in_time_and_not_before(R: int) -> None:
    """Plain decoding with the default limit: one fold every R - 1 steps, none sooner."""
    ring, slots, folds = Ring.build(1, R, 1), int32([0]), []
    for step in range(5 * R):
        if bool(ring.due(*reversed(ring.at(slots)))):
            folds.append(step)
        ring.commit(slots, 1)
    assert [b - a for a, b in zip([0, *folds], folds, strict=False)] == [R - 1] * len(folds)


@pytest.mark.parametrize("bad", [dict(N=0), dict(window=0), dict(R=3), dict(limit=-1), dict(limit=5)], ids=str)
def test_geometry_errors(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"Ring: .*got"):
        Ring.build(**{**dict(N=2, R=8, window=2), **bad})


@pytest.mark.parametrize(("window", "fold_every"), [(1, 16), (1, 5), (4, 16)])
def test_rows_admitted_together_do_not_fold_together(window: int, fold_every: int) -> None:
    """With stagger, no step folds many of a full batch, and a row still folds once in ``fold_every`` tokens."""
    N, tokens = 4 * fold_every, 8 * fold_every
    folds = {}
    for stagger in (False, True):
        ring = Ring.build(N, fold_every - 1 + 2 * window, window, fold_every - 1, stagger=stagger)
        slots, a_step = torch.arange(N, dtype=torch.int32), []
        for _ in range(tokens):
            a_step.append(int(ring.due(*reversed(ring.at(slots))).sum()))
            ring.commit(slots, 1)
        folds[stagger] = a_step
    assert max(folds[False]) == N
    assert max(folds[True]) <= N // fold_every
    # Over whole cycles the cost is the same; a phase costs a row one fold at most.
    assert abs(sum(folds[True]) - sum(folds[False])) <= N
    assert sum(folds[True][fold_every:]) / (tokens - fold_every) == pytest.approx(N / fold_every, rel=0.01)


def test_an_empty_ring_keeps_its_phase_and_others_bring_theirs() -> None:
    ring = Ring.build(6, 9, 1, 7, stagger=True)
    slots = torch.tensor([1, 3], dtype=torch.int32)
    assert (ring.head[slots.long()] // 9).tolist() == [1, 3]
    ring.copy(slots[:1], slots[1:])
    assert int(ring.head[3]) // 9 == 3, "a prompt given to several slots must not make them fold together"
    ring.commit(slots, 2)
    ring.copy(slots[:1], slots[1:])
    assert int(ring.head[3]) // 9 == 1, "a fork goes on as its source"
    ring.absorb(slots, torch.tensor([2, 1], dtype=torch.int32))
    assert (ring.head[slots.long()] // 9).tolist() == [1, 0]
    assert (ring.head[slots.long()] % 9).tolist() == [2, 1]
