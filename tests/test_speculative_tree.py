"""Draft trees on one layer: every node against the recurrence along its path, and the ring after one path is taken."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import WHERE
from harness import Where, make_spec
from torch import Tensor

from replayssm import Recurrence, StatePool, ops
from replayssm.backends import explain, for_trees
from replayssm.testing import Inputs, make_inputs, memory
from replayssm.testing.memory import assert_untouched
from replayssm.testing.oracle import Tally, plain
from replayssm.tree import commit_path, extend_tree, verify_tree

N, WINDOW = 5, 7
TORCH = Where("torch", "cpu")


def random_tree(B: int, T: int, rng: torch.Generator) -> Tensor:
    """Parents ``[B, T]``."""
    return torch.stack([torch.randint(-1, max(t, 1), (B,), generator=rng) if t else torch.full((B,), -1)
                        for t in range(T)], 1)  # fmt: skip


def path_to(parents: Tensor, node: int) -> list[int]:
    """Nodes of one row from the root's child to ``node``."""
    path = [node] if node >= 0 else []
    while path and int(parents[path[0]]) >= 0:
        path.insert(0, int(parents[path[0]]))
    return path


def paths(parents: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """A random node of each row, as the path to it, and its length; sometimes none."""
    B, T = parents.shape
    nodes = torch.randint(-1, T, (B,), generator=rng).tolist()
    found = [path_to(parents[row], node) for row, node in enumerate(nodes)]
    most = max(map(len, found))
    path = torch.tensor([p + [99] * (most - len(p)) for p in found], dtype=torch.long).view(B, most)
    return path, torch.tensor([len(p) for p in found])


class Run:
    """A pool in poisoned memory and the states of its slots, in float64 and in float32."""

    def __init__(self, recurrence: Recurrence, where: Where = TORCH, seed: int = 0) -> None:
        self.where, self.rng = where, torch.Generator().manual_seed(seed)
        self.spec = make_spec(recurrence)
        self.pool = where.pool([self.spec], N=N, fold_every=6, window=WINDOW, width=4, generator=self.rng)
        self.layer = self.pool.layers[0]
        s = self.spec
        self.same = torch.randn(N, s.HV, s.V, s.K, generator=self.rng)
        self.exact = self.same.double()
        ops.seed(self.layer, self.same.to(where.device), where.slots(*range(N)))
        self.tally = Tally(torch.float32)

    def inputs(self, B: int, T: int) -> Inputs:
        s = self.spec
        return make_inputs(s.recurrence, B, T, s.H, s.HV, s.K, s.V, generator=self.rng)

    def verify(self, slots: Tensor, inputs: Inputs, parents: Tensor) -> Tensor:
        to = self.where.device
        given = (x.to(to) for x in (*inputs, parents))
        out = verify_tree(self.layer, *given, slots=slots.to(to), backend=self.where.backend).cpu()
        for row, slot in enumerate(slots.tolist()):
            if slot < 0:
                assert not out[row].any()
                continue
            for node in range(parents.shape[1]):
                path = torch.tensor(path_to(parents[row], node))
                mine = inputs.rows(slice(row, row + 1)).tokens(path)
                same, _ = plain(self.spec.recurrence, self.same[slot, None], mine)
                exact, _ = plain(
                    self.spec.recurrence, self.exact[slot, None], Inputs(*(x.double() for x in mine)), torch.float64
                )
                self.tally.add(out[row, node], same[0, -1], exact[0, -1])
        return out

    def follow(self, slots: Tensor, inputs: Inputs, path: Tensor, accepted: Tensor) -> None:
        """The states after the accepted nodes."""
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0 and accepted[row]:
                mine = inputs.rows(slice(row, row + 1)).tokens(path[row, : accepted[row]])
                self.same[slot] = plain(self.spec.recurrence, self.same[slot, None], mine)[1][-1, 0]
                wide = Inputs(*(x.double() for x in mine))
                self.exact[slot] = plain(self.spec.recurrence, self.exact[slot, None], wide, torch.float64)[1][-1, 0]


def walk(run: Run, steps: int) -> None:
    """Random trees, paths and slots, over folds, padding among them; a chain by ``ops.verify`` now and then, and at the
    end all rows are folded. Slots that a call does not name stay as they are, bit by bit."""
    to = run.where.device
    for step in range(steps):
        slots = torch.randperm(N, generator=run.rng)[:3].int()
        slots[1] = -1 if step % 4 == 0 else slots[1]
        before = memory(run.pool)
        T = int(torch.randint(1, WINDOW + 1, (), generator=run.rng))
        inputs = run.inputs(3, T)
        if step % 5 == 4:
            parents = torch.arange(-1, T - 1).expand(3, T)
            ops.verify(run.layer, *(x.to(to) for x in inputs), slots=slots.to(to), backend=run.where.backend)
        else:
            parents = random_tree(3, T, run.rng)
            run.verify(slots, inputs, parents)
        path, accepted = paths(parents, run.rng)
        commit_path(run.pool.layers, path.to(to), accepted.to(to), slots.to(to))
        run.follow(slots, inputs, path, accepted)
        run.pool.check()
        assert_untouched(run.pool, before, slots.tolist())
    run.tally.check("nodes")
    run.pool.fold(run.where.slots(*range(N)))
    states = Tally(torch.float32)
    states.add(run.layer.ckpt.cpu(), run.same, run.exact)
    states.check("states")


@pytest.fixture(params=[x for x in WHERE if x.backend == for_trees(x.backend)], ids=str)
def where(request: pytest.FixtureRequest) -> Where:
    """Those that verify trees."""
    return request.param


def test_trees_over_many_steps(recurrence: Recurrence, where: Where) -> None:
    walk(Run(recurrence, where), 30)


def test_a_chain_is_a_tree(recurrence: Recurrence) -> None:
    run, other = Run(recurrence), Run(recurrence)
    slots = torch.tensor([3, 0], dtype=torch.int32)
    for T in (1, 5, 7, 2):
        inputs = run.inputs(2, T)
        chain = torch.arange(-1, T - 1).expand(2, T)
        run.verify(slots, inputs, chain)
        commit_path(run.pool.layers, chain + 1, torch.tensor([T, T - 1]), slots)
        run.follow(slots, inputs, chain + 1, torch.tensor([T, T - 1]))
        ops.verify(other.layer, *inputs, slots=slots, backend="torch")
        ops.commit(other.pool.ring, slots, torch.tensor([T, T - 1]))
        assert torch.equal(run.pool.ring.count, other.pool.ring.count)
    run.tally.check("nodes")


def test_a_node_sees_its_ancestors_only(recurrence: Recurrence) -> None:
    """What stands in other branches does not matter, to the bit."""
    run = Run(recurrence)
    slots, parents = torch.tensor([2], dtype=torch.int32), torch.tensor([[-1, -1, 0, 1, 2]])
    inputs = run.inputs(1, 5)
    mine = verify_tree(run.layer, *inputs, parents, slots=slots)
    for x in inputs:
        x[:, [1, 3]] = x[:, [1, 3]].clone() * 0.5
    again = verify_tree(run.layer, *inputs, parents, slots=slots)
    assert torch.equal(mine[:, [0, 2, 4]], again[:, [0, 2, 4]]) and not torch.equal(mine[:, 1], again[:, 1])


def test_convolution_windows() -> None:
    """Each node's inputs are its path's; the window goes on from the path that was taken."""
    rng = torch.Generator().manual_seed(0)
    pool = StatePool(2, fold_every=4, window=WINDOW, width=4)
    pool.add_layer(make_spec(Recurrence("head", False)))
    conv = pool.add_conv(3)
    slots = torch.tensor([1, 0], dtype=torch.int32)
    texts = [torch.zeros(3, 0), torch.zeros(3, 0)]
    for _ in range(25):
        T = int(torch.randint(1, WINDOW + 1, (), generator=rng))
        new, parents = torch.randn(2, 3, T, generator=rng), random_tree(2, T, rng)
        windows = extend_tree(conv, new, parents, slots)
        path, accepted = paths(parents, rng)
        for row in range(2):
            for node in range(T):
                whole = torch.cat([texts[row], new[row][:, path_to(parents[row], node)]], 1)
                assert torch.equal(windows[row, :, node], F.pad(whole, (4, 0))[:, -4:])
            texts[row] = torch.cat([texts[row], new[row][:, path[row, : accepted[row]]]], 1)
        s = pool.layers[0]
        ops.verify(s, *make_inputs(s.recurrence, 2, T, s.H, s.HV, s.K, s.V, generator=rng), slots=slots)
        commit_path(pool.layers, path, accepted, slots, pool.convs)


def test_a_tree_without_nodes_folds_what_is_due(recurrence: Recurrence, where: Where) -> None:
    """As a chain without tokens: the commit takes it as done."""
    run, to = Run(recurrence, where), where.device
    slots = torch.tensor([2, 0], dtype=torch.int32)
    for _ in range(12):
        x = run.inputs(2, 1)
        ops.verify(run.layer, *(y.to(to) for y in x), slots=slots.to(to), backend=where.backend)
        run.pool.commit(slots.to(to), 1)
        run.follow(slots, x, torch.zeros(2, 1, dtype=torch.long), torch.ones(2, dtype=torch.long))
        none = run.inputs(2, 0)
        empty = torch.zeros(2, 0, dtype=torch.long)
        run.verify(slots, none, empty)
        commit_path(run.pool.layers, empty.to(to), torch.zeros(2, dtype=torch.long, device=to), slots.to(to))
    assert int(run.pool.ring.count[2]) < 12, "no fold was part of the test"
    run.pool.fold(slots.to(to))
    states = Tally(torch.float32)
    states.add(run.layer.ckpt.cpu(), run.same, run.exact)
    states.check("states")


def test_which_backend_verifies_trees() -> None:
    run, slots = Run(Recurrence("head", True)), torch.tensor([2], dtype=torch.int32)
    choice = explain(run.layer, tree=True)
    assert choice.name == "torch" and choice.reasons["cpu"] == "it verifies chains only"
    assert for_trees("cpu") == "auto" and for_trees("torch") == "torch"
    with pytest.raises(ValueError, match="backend 'cpu' cannot serve this layer: it verifies chains only"):
        verify_tree(run.layer, *run.inputs(1, 2), torch.tensor([[-1, -1]]), slots=slots, backend="cpu")
    for T in (2, 0):
        with pytest.raises(ValueError, match="unknown backend 'tree'; valid: auto, "):
            verify_tree(run.layer, *run.inputs(1, T), torch.full((1, T), -1), slots=slots, backend="tree")


def test_errors() -> None:
    run = Run(Recurrence("head", True))
    slots, inputs = torch.tensor([2, 0], dtype=torch.int32), run.inputs(2, 3)
    cases: list[tuple[Tensor, type[Exception], str]] = [
        (torch.zeros(2, 2, dtype=torch.long), TypeError, r"parents must be int64 \[B=2, T=3\]"),
        (torch.zeros(2, 3, dtype=torch.int32), TypeError, "parents must be int64"),
        (torch.tensor([[-1, 0, 1], [-1, 1, 0]]), ValueError, "parent of node 1 must be an earlier node or -1; got 1"),
        (torch.tensor([[-1, 0, 1], [-1, -2, 0]]), ValueError, "got -2 in row 1"),
    ]
    for parents, error, message in cases:
        with pytest.raises(error, match=message):
            verify_tree(run.layer, *inputs, parents, slots=slots)
    verify_tree(run.layer, *inputs, torch.tensor([[-1, 0, 1], [-1, 0, 0]]), slots=slots)
    two = torch.tensor([2, 2])
    for path, error, message in [
        (torch.tensor([[0, 1]]), TypeError, r"path must be int64 \[B=2, P <= 7\]"),
        (torch.tensor([[0, 1], [2, 0]]), ValueError, "must ascend"),
        (torch.tensor([[0, 1], [0, 7]]), ValueError, "below 7"),
        (torch.tensor([[0], [1]]), ValueError, "at most the 1 nodes"),
    ]:
        with pytest.raises(error, match=message):
            commit_path(run.pool.layers, path, two, slots)
