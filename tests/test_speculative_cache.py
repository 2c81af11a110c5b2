"""The cache of rows that take tokens back one by one: keys, convolution windows and rings stay in step, whatever is
accepted. And the check that says so sees what is planted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from test_speculative_tree import path_to, random_tree
from tiny_models import BACKEND, assert_as_exact, build, truth

import replayssm
import replayssm.hf.runner as runner_module
from replayssm.hf import ragged
from replayssm.hf.runner import Runner
from replayssm.ring import Ring

transformers.logging.set_verbosity_error()
# One of each recurrence, and the caches that need care: attention beside the recurrence in a layer, sliding attention.
KINDS = ["qwen3_5", "kimi_linear", "mamba2", "falcon_h1", "lara_mini"]
Texts = list[list[int]]


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    model = replayssm.attach(build(request.param), fold_every=5, backend=BACKEND)
    yield model
    replayssm.detach(model)


class Walk:
    """Texts of a batch under random acceptance, and the logits of every token that stayed, as the cache gave them."""

    def __init__(self, model: Any, lengths: tuple[int, ...], *, window: int = 5, back: int = 0, seed: int = 0) -> None:
        self.rng, self.gen = random.Random(seed), torch.Generator().manual_seed(seed)
        self.model, self.runner = model, Runner(model, window, back)
        self.texts: Texts = [self._new(n) for n in lengths]
        self.logits: list[list[torch.Tensor]] = [[row] for row in self.runner.prefill(self.texts)]
        self.prompts = list(lengths)
        self.ended: list[tuple[list[int], int, torch.Tensor]] = []

    def _new(self, n: int) -> list[int]:
        return torch.randint(3, 100, (n,), generator=self.gen).tolist()

    def step(self, T: int | None = None, accepted: list[int] | None = None) -> None:
        """Feeds ``T`` tokens a row; rows keep ``accepted`` of them, and lose earlier ones where that is negative."""
        T = T or self.rng.choice([1, 1, 1, 2, 3, self.runner.window])
        new = [self._new(T) for _ in self.texts]
        logits = self.runner.step(torch.tensor(new))
        n = accepted or [self.rng.choice([0, T, self.rng.randint(0, T)]) for _ in self.texts]
        self.runner.take_back([T - a for a in n])
        for row, a in enumerate(n):
            keep = len(self.texts[row]) + min(a, 0)
            self.texts[row] = self.texts[row][:keep] + new[row][: max(a, 0)]
            self.logits[row] = self.logits[row][: keep - self.prompts[row] + 1] + list(logits[row, : max(a, 0)])

    def step_tree(self) -> None:
        """Feeds a random tree a row; rows keep a random path of it, or nothing."""
        T = self.rng.randint(1, self.runner.window)
        new, parents = [self._new(T) for _ in self.texts], random_tree(len(self.texts), T, self.gen)
        logits = self.runner.step_tree(torch.tensor(new), parents)
        paths = [path_to(tree, self.rng.randint(-1, T - 1)) for tree in parents]
        self.runner.take_path(paths, T)
        for row, path in enumerate(paths):
            self.texts[row] = self.texts[row] + [new[row][i] for i in path]
            self.logits[row] += [logits[row, i] for i in path]

    def end(self, keep: list[int]) -> None:
        """The other rows end."""
        gone = [row for row in range(len(self.texts)) if row not in keep]
        self.ended += [(self.texts[row], self.prompts[row], torch.stack(self.logits[row])) for row in gone]
        for x in ("texts", "logits", "prompts"):
            setattr(self, x, [getattr(self, x)[row] for row in keep])
        self.runner.select(keep)

    def check(self) -> None:
        """Every logit that was given against a forward over the whole text; cursors and lengths too. Errors of all rows
        together, as in one token's sum that cancels one rounding more or less is several times another's."""
        rows, seen = zip(self.texts, self.prompts, self.logits, strict=True), []
        for text, prompt, logits in [*((t, p, torch.stack(x)) for t, p, x in rows), *self.ended]:
            ids = torch.tensor([text])
            with torch.no_grad():
                stock = self.model(ids, use_cache=False).logits[0, prompt - 1 :]
            seen.append((logits, stock, truth(self.model, ids)[0, prompt - 1 :]))
        ours, stock, wide = (torch.cat(x) for x in zip(*seen, strict=True))
        assert_as_exact(ours, stock, wide)
        recurrent = self.runner.cache.recurrent
        recurrent.pool.check()
        lengths = torch.tensor([len(text) for text in self.texts])
        assert torch.equal(self.runner.columns - self.runner.pads, lengths)
        assert recurrent.pool.ring.at(recurrent.slots)[1].tolist() == recurrent._rows.tolist()


def test_two_hundred_steps(model: Any) -> None:
    """Rows of 1 to 9 tokens in the prompt; a row ends twice, mid-window."""
    walk = Walk(model, (9, 4, 1, 6))
    for step in range(200):
        walk.step()
        if step in (70, 140):
            walk.end([0, 1, 3] if step == 70 else [2, 0])
    assert min(map(len, walk.texts)) > 100, "many folds"
    walk.check()


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "mamba2", "falcon_h1"])
def test_trees_between_chains(name: str) -> None:
    model = replayssm.attach(build(name), fold_every=5, backend=BACKEND)
    walk = Walk(model, (5, 9, 1), window=7, seed=2)
    for step in range(40):
        walk.step() if step % 4 == 3 else walk.step_tree()
    walk.end([2, 0])
    walk.step_tree()
    assert min(map(len, walk.texts)) > 40
    walk.check()
    replayssm.detach(model)


@pytest.mark.parametrize("what", ["ring", "windows", "keys"])
def test_the_check_sees_paths_that_were_not_moved(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = replayssm.attach(build("qwen3_5"), fold_every=5, backend=BACKEND)
    walk = Walk(model, (5, 9), window=7, seed=2)
    where: tuple[Any, str] = {
        "ring": (ragged, "move_columns"),
        "windows": (ragged.RaggedWindow, "take_path"),
        "keys": (runner_module, "order_attention"),
    }[what]
    monkeypatch.setattr(*where, lambda *args: None)
    for _ in range(12):
        walk.step_tree()
    with pytest.raises(AssertionError, match=r"error .* where stock has"):
        walk.check()
    replayssm.detach(model)


def test_back_beyond_the_last_step(model: Any) -> None:
    """As a draft model goes back; folds leave the last tokens in the ring."""
    walk = Walk(model, (5, 9, 2), window=3, back=4, seed=1)
    for _ in range(20):
        walk.step(2, [1, 2, 1])
        for _ in range(3):
            walk.step(1, [1, 1, 1])
        walk.step(1, [walk.rng.randint(-3, 1) for _ in range(3)])  # the three before it are taken back too
    walk.check()


@pytest.mark.parametrize("accepted", [[4, 0], [1, 3]])
def test_the_first_step_after_the_prompt(model: Any, accepted: list[int]) -> None:
    walk = Walk(model, (6, 3, 4, 7, 2, 5))
    walk.step(4, accepted * 3)
    walk.step(2, [1, 2] * 3)
    walk.check()


def test_fed_in_pieces(model: Any) -> None:
    """Rows of very different lengths, longer than the window."""
    runner = Runner(model, 3)
    runner.feed([[5, 6, 7], [8]])
    more = [list(range(10, 20)), [30]]
    got = runner.feed(more)
    assert runner.pads.tolist() == [0, 11] and runner.columns == 13
    for row, text in enumerate([[5, 6, 7, *more[0]], [8, 30]]):
        ids = torch.tensor([text])
        with torch.no_grad():
            stock = model(ids, use_cache=False).logits[0, -1]
        assert_as_exact(got[row], stock, truth(model, ids)[0, -1])


def corrupt(name: str) -> Callable[[Walk, pytest.MonkeyPatch], None]:
    """A ring row of row 1 is overwritten."""

    def plant(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
        recurrent = walk.runner.cache.recurrent
        state = next(iter(recurrent.states.values()))
        recurrent._close()
        head, count = (int(x[1]) for x in state.ring.at(recurrent.slots))
        assert count > 0
        state.tensors[name][1, :, (head + count - 1) % state.ring.R] += 0.5

    return plant


def one_token_too_few(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring commits a rejected draft."""
    commit = Ring.commit

    def wrong(self: Ring, slots: torch.Tensor, accepted: torch.Tensor) -> None:
        commit(self, slots, accepted + torch.tensor([0, 1], dtype=torch.int32))

    monkeypatch.setattr(Ring, "commit", wrong)


def windows_stay(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolution windows are not rolled back."""
    monkeypatch.setattr(ragged.RaggedWindow, "take_back", lambda self, n: None)


def keys_stay(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of rejected drafts are dropped as if all rows had rejected as many."""
    shift = ragged.shift_attention
    monkeypatch.setattr(
        ragged, "shift_attention", lambda cache, keep, right, lead: shift(cache, keep, right * 0 + lead, lead)
    )


PLANTED = [corrupt("k"), corrupt("d"), corrupt("w"), corrupt("g"), one_token_too_few, windows_stay, keys_stay]
IDS = ["k", "d", "w", "g", "commit", "windows", "keys"]


@pytest.mark.parametrize("plant", PLANTED, ids=IDS)
def test_the_check_sees_what_is_planted(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = replayssm.attach(build("qwen3_5"), fold_every=5, backend=BACKEND)
    try:
        walk = Walk(model, (6, 3))
        walk.step(3, [2, 2])
        walk.check()
        plant(walk, monkeypatch)
        walk.step(3, [3, 1])
        walk.step(3, [2, 2])
        with pytest.raises(AssertionError, match=r"error .* where stock has"):
            walk.check()
    finally:
        replayssm.detach(model)


def test_what_is_not_in_the_ring_cannot_be_taken_back() -> None:
    model = replayssm.attach(build("qwen3_5"), backend=BACKEND)
    runner = Runner(model, 3)
    runner.prefill([[5, 6], [7, 8]])
    runner.step(torch.tensor([[1, 2], [3, 4]]))
    for n in ([3, 0], [0, -1]):
        with pytest.raises(ValueError, match="can be taken back"):
            runner.take_back(n)
    runner.take_back([2, 1])
    assert "window 3 (drafts, each row its own)" in runner.cache.explain()
    with pytest.raises(ValueError, match="must fit into the window of 3"):
        runner.step_tree(torch.ones(2, 4, dtype=torch.long), torch.full((2, 4), -1))
    runner.step(torch.ones(2, 4, dtype=torch.long))  # more than the window: no drafts
    with pytest.raises(ValueError, match="can be taken back"):
        runner.take_back([1, 0])
    with pytest.raises(RuntimeError, match="taken back by"):
        runner.cache.crop(-1)
    replayssm.detach(model)
