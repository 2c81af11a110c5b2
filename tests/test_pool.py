"""Slots as a whole: handing out, counting, moving, and a random walk against a model that recomputes from scratch."""

from __future__ import annotations

import dataclasses
import gc
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Where, make_spec
from torch import Tensor

from replayssm import GDN, KDA, MAMBA2, StatePool, ops
from replayssm.testing import Inputs, Tally, assert_untouched, make_inputs, memory, plain, poison, same_bits, snapshot

TORCH = Where("torch", "cpu")
F64 = torch.float64


def build(where: Where = TORCH, channels: int = 3, **kwargs: Any) -> StatePool:
    """One layer of each recurrence and one convolution, poisoned."""
    dtypes = kwargs.pop("dtypes", dict(state_dtype=F64, input_dtype=F64))
    specs = [make_spec(rec, HV=4, K=5, V=3, **dtypes) for rec in (MAMBA2, GDN, KDA)]
    pool = where.pool(specs, **{"N": 4, **kwargs})
    if channels:
        pool.add_conv(channels, dtype=F64)
    poison(pool)
    return pool


def test_alloc_gives_every_slot_once_and_reset() -> None:
    pool = build()
    slots = pool.alloc(4)
    assert slots.dtype == torch.int32 and sorted(slots.tolist()) == [0, 1, 2, 3] and pool.free_slots == 0
    assert not any(layer.ckpt.any() for layer in pool.layers) and not pool.convs[0].x.any()
    assert not pool.ring.count.any()
    assert pool.alloc(0).shape == (0,)


def test_a_full_pool_gives_nothing() -> None:
    pool = build()
    pool.alloc(3)
    with pytest.raises(RuntimeError, match="full: 2 slots asked for, 1 of 4 free"):
        pool.alloc(2)
    assert pool.free_slots == 1
    assert pool.alloc().tolist() == [3]
    with pytest.raises(ValueError, match="must not be negative; got -1"):
        pool.alloc(-1)


@pytest.mark.parametrize("bad", [[1], [0, 0], [4], [-1], [0, 2]], ids=["free", "twice", "outside", "padding", "half"])
def test_free_takes_only_what_was_given(bad: list[int]) -> None:
    pool = build()
    assert pool.alloc().tolist() == [0]
    with pytest.raises(ValueError, match=rf"free: slot {bad[-1]} is not allocated \(N=4, 3 free\)"):
        pool.free(bad)
    assert pool.free_slots == 3
    pool.free(torch.tensor([0]))
    with pytest.raises(ValueError, match="slot 0 is not allocated"):
        pool.free([0])
    assert sorted(pool.alloc(4).tolist()) == [0, 1, 2, 3]


def tensors_of(x: Any, seen: set[int]) -> list[Tensor]:
    """Every tensor that can be reached from ``x`` by attributes and containers."""
    if id(x) in seen or isinstance(x, type):
        return []
    seen.add(id(x))
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        inside = [*x.values()]
    elif isinstance(x, list | tuple):
        inside = [*x]
    elif dataclasses.is_dataclass(x) or hasattr(x, "__dict__"):
        inside = [*vars(x).values()]
    else:
        return []
    return [t for y in inside for t in tensors_of(y, seen)]


@pytest.mark.parametrize("state", [F64, torch.float32, torch.bfloat16], ids=str)
def test_nbytes_counts_every_byte(state: torch.dtype) -> None:
    gc.collect()
    before = {id(x) for x in gc.get_objects() if issubclass(type(x), Tensor)}
    pool = StatePool(4, window=3)
    for rec in (MAMBA2, GDN, KDA):
        pool.add_layer(make_spec(rec, state_dtype=state, input_dtype=torch.bfloat16))
    pool.add_conv(5)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors_of(pool, set())}
    assert pool.nbytes == sum(storages.values())
    gc.collect()
    alive = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and id(x) not in before]
    assert {x.untyped_storage().data_ptr() for x in alive} == set(storages)
    assert pool.nbytes == pool.N * pool.nbytes_a_slot + 8  # the cursors' spare entry
    assert all(x.shape[0] == pool.N for x in memory(pool))


def advance(pool: StatePool, slots: Tensor, T: int, accepted: int, rng: torch.Generator) -> list[Tensor]:
    """One step of all layers and convolutions; returns what they put out."""
    outs = []
    for layer in pool.layers:
        made = make_inputs(layer.recurrence, slots.numel(), T, layer.H, layer.HV, layer.K, layer.V, F64, rng)
        outs.append(ops.verify(layer, *made, slots=slots))
    outs += [conv.extend(torch.randn(slots.numel(), conv.x.shape[1], T, dtype=F64), slots) for conv in pool.convs]
    pool.commit(slots, accepted)
    return outs


def test_the_next_owner_sees_nothing_of_the_last() -> None:
    """A used slot, filled with NaN and handed out again, computes bitwise what a fresh one does."""
    used, fresh = build(window=2), build(window=2)
    slots = used.alloc(4)
    rng = torch.Generator().manual_seed(0)
    for _ in range(7):
        advance(used, slots, 2, 2, rng)
    used.free(slots)
    poison(used)
    states = [rng.manual_seed(1), torch.Generator().manual_seed(1)]
    for pool, gen in zip((used, fresh), states, strict=True):
        pool.alloc(4)
        torch.manual_seed(0)
        outs = [advance(pool, slots, 2, 1, gen) for _ in range(9)]
        if pool is used:
            first = outs
    for a, b in zip(first, outs, strict=True):
        assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))
        assert not any(x.isnan().any() for x in a)


def walked(**kwargs: Any) -> tuple[StatePool, torch.Generator]:
    """A pool whose slots 0, 1 and 2 have unfolded rows; slot 3 is poison."""
    pool, rng = build(window=2, **kwargs), torch.Generator().manual_seed(3)
    slots = pool.alloc(3)
    for n in (2, 1, 2):
        advance(pool, slots, 2, n, rng)
    return pool, rng


def slot_of(pool: StatePool, slot: int) -> list[Tensor]:
    return [x[slot].clone() for x in memory(pool)]


def test_copies_are_taken_before_anything_is_written() -> None:
    pool, _ = walked()
    before = snapshot(pool)
    pool.copy(TORCH.slots(1, 0, 1, 2), TORCH.slots(0, 1, 3, 2))  # a swap, a fork and a self-copy
    for dst, src in ((0, 1), (1, 0), (3, 1), (2, 2)):
        for x, old in zip(memory(pool), before, strict=True):
            assert same_bits(x[dst], old[src])


def test_export_and_import_round_trip() -> None:
    pool, rng = walked()
    other, _ = walked()
    saved = pool.export(1)
    kept = [x.clone() for x in saved["tensors"]]
    before = snapshot(other)
    other.import_(3, saved)
    assert_untouched(other, before, [3])
    assert all(same_bits(x, y) for x, y in zip(slot_of(other, 3), slot_of(pool, 1), strict=True))
    outs = []
    for p, slot in ((pool, 1), (other, 3)):
        rng.manual_seed(5)
        torch.manual_seed(5)
        outs.append([advance(p, TORCH.slots(slot), 2, 1, rng) for _ in range(8)])
    for a, b in zip(*outs, strict=True):
        assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    assert all(same_bits(x, y) for x, y in zip(saved["tensors"], kept, strict=True))  # a copy, not a view


@pytest.mark.parametrize("slot", [-1, 4])
def test_export_and_import_of_no_slot(slot: int) -> None:
    pool, _ = walked()
    before = snapshot(pool)
    with pytest.raises(ValueError, match=rf"export: slot {slot} is out of range; the pool has N=4"):
        pool.export(slot)
    with pytest.raises(ValueError, match=rf"import_: slot {slot} is out of range; the pool has N=4"):
        pool.import_(slot, pool.export(0))
    assert_untouched(pool, before)


def test_import_into_another_geometry() -> None:
    pool, _ = walked(fold_every=12)
    saved = pool.export(0)
    wide = dict(state_dtype=F64, input_dtype=F64)
    others = [
        build(window=2, fold_every=20),
        build(window=2, fold_every=12, channels=4),
        build(window=2, fold_every=12, dtypes=dict(state_dtype=torch.float32, input_dtype=F64)),
        TORCH.pool([make_spec(MAMBA2, HV=4, K=5, V=3, **wide)], window=2, fold_every=12),
    ]
    swapped = TORCH.pool(
        [make_spec(rec, HV=4, K=5, V=3, **wide) for rec in (GDN, MAMBA2, KDA)], N=4, window=2, fold_every=12
    )
    swapped.add_conv(3, dtype=F64)
    for other in [*others, swapped]:
        before = snapshot(other)
        with pytest.raises(ValueError, match=r"import_: the slot comes from a pool of another geometry \(R="):
            other.import_(0, saved)
        assert_untouched(other, before)


def test_import_leaves_room_for_the_window() -> None:
    """Two pools of equal R: rows that one may keep unfolded leave the other no room to append."""
    pool, other = (build(fold_every=f, window=w, width=1, channels=0) for f, w in ((15, 1), (3, 7)))
    assert pool.ring.R == other.ring.R == 16
    rng = torch.Generator()
    slots = pool.alloc()
    for _ in range(12):
        advance(pool, slots, 1, 1, rng)
    before = snapshot(other)
    with pytest.raises(ValueError, match="import_: the slot's 12 committed rows leave no room"):
        other.import_(0, pool.export(0))
    assert_untouched(other, before)
    pool.fold(slots)
    other.import_(0, pool.export(0))


@pytest.mark.parametrize("backend", ["auto", "sequential"])
def test_fold_every_1_is_the_plain_recurrence(backend: str) -> None:
    """The checkpoint follows every step, at most one window behind."""
    pool = build(Where(backend, "cpu"), fold_every=1 if backend == "auto" else 9, window=2)
    assert pool.ring.limit == 0
    rng, slots = torch.Generator().manual_seed(0), pool.alloc(2)
    for n in (2, 1, 2, 1):
        before = snapshot(pool)
        advance(pool, slots, 2, n, rng)
        assert pool.ring.at(slots)[1].tolist() == [n, n]
        if before[-1][0]:
            assert not any(
                same_bits(layer.ckpt[0], old[0]) for layer, old in zip(pool.layers, before[::5], strict=False)
            )


def test_the_checkpoint_is_written_once_in_fold_every_steps() -> None:
    pool = build(fold_every=5)
    rng, slots, writes = torch.Generator().manual_seed(0), pool.alloc(), []
    for step in range(26):
        before = pool.layers[0].ckpt.clone()
        advance(pool, slots, 1, 1, rng)
        writes += [step] * (not same_bits(before, pool.layers[0].ckpt))
    assert writes == [5, 10, 15, 20, 25]


@pytest.mark.parametrize("bad", [dict(fold_every=0), dict(window=0), dict(width=0), dict(N=0)], ids=str)
def test_pool_geometry_errors(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="got"):
        StatePool(**{"N": 2, **bad})


@pytest.mark.parametrize("window", range(1, 9))
@pytest.mark.parametrize("fold_every", [1, 2, 5, 16])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_rows_suit_ring_and_convolution(fold_every: int, window: int, width: int) -> None:
    pool = StatePool(1, fold_every=fold_every, window=window, width=width)
    columns = pool.add_conv(1, width).x.shape[2]
    assert pool.ring.R % columns == 0 and columns >= width - 1 + window
    assert pool.ring.limit == fold_every - 1 <= pool.ring.R - 2 * window


# The convolution's window --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 3, 8, 11])
def test_conv_extend_of_any_length(T: int) -> None:
    """T beyond the columns too: then the last C inputs stay, and the newest of them can still be rolled back."""
    pool = TORCH.pool([make_spec(GDN)], window=5, fold_every=7)
    conv = pool.add_conv(2, dtype=F64)
    C = conv.x.shape[2]
    assert C == 8
    slots, x = TORCH.slots(3, -1, 0), torch.randn(3, 2, 40, dtype=F64)
    before = conv.x.fill_(float("nan")).clone()
    conv.seed(x[:, :, :5], slots)
    at = 5
    for _ in range(4):
        full = conv.extend(x[:, :, at : at + T], slots)
        assert torch.equal(full[[0, 2]], x[[0, 2], :, at - 3 : at + T])
        assert not full[1, :, :3].any() and torch.equal(full[1, :, 3:], x[1, :, at : at + T])
        back = min(T, C - 3)
        pool.commit(slots, T - back)
        assert torch.equal(
            conv.extend(x[:, :, at + T - back :][:, :, :1], slots)[0], x[0, :, at + T - back - 3 :][:, :4]
        )
        pool.commit(slots, 1)
        at += T - back + 1
    rest = [1, 2, 4, 5]
    assert same_bits(conv.x[rest], before[rest])


def test_conv_of_no_rows_no_tokens_and_only_padding() -> None:
    pool = TORCH.pool([make_spec(GDN)], window=2)
    conv = pool.add_conv(2)
    before = conv.x.fill_(7).clone()
    assert conv.extend(torch.ones(0, 2, 1), TORCH.slots()).shape == (0, 2, 4)
    assert conv.extend(torch.ones(1, 2, 0), TORCH.slots(1)).shape == (1, 2, 3)
    conv.extend(torch.ones(2, 2, 1), TORCH.slots(-1, -1))
    conv.seed(torch.ones(2, 2, 3), TORCH.slots(-1, -1))
    conv.seed(torch.ones(0, 2, 3), TORCH.slots())
    assert same_bits(conv.x, before)


def test_conv_seed_of_fewer_inputs_puts_zeros_before() -> None:
    pool = TORCH.pool([make_spec(GDN)], window=1)
    conv = pool.add_conv(1)
    conv.x.fill_(float("nan"))
    conv.seed(torch.tensor([[[5.0]]]), TORCH.slots(2))
    assert conv.extend(torch.tensor([[[6.0]]]), TORCH.slots(2)).tolist() == [[[0, 0, 5, 6]]]


def test_conv_errors() -> None:
    pool = StatePool(2, window=1, width=1, fold_every=2)
    with pytest.raises(ValueError, match="conv: width=9 with window=1 needs 9 columns, more than R=3 rows"):
        pool.add_conv(1, width=9)
    conv = pool.add_conv(3, width=2)
    for shape in ((1, 3), (2, 3, 1), (1, 2, 1)):
        with pytest.raises(ValueError, match=r"conv: new inputs must be \[B=1, channels=3, T\]; got"):
            conv.extend(torch.zeros(shape), TORCH.slots(0))


def test_rewind_stops_where_the_convolution_forgets() -> None:
    pool = build(window=1, fold_every=12)
    C, rng, slots = pool.convs[0].x.shape[2], torch.Generator(), pool.alloc(2)
    most = C - 3
    for _ in range(most + 2):
        advance(pool, slots, 1, 1, rng)
    before = snapshot(pool)
    for n in (most + 1, torch.tensor([0, most + 1])):
        with pytest.raises(
            ValueError, match=f"rewind: a convolution window keeps the inputs for at most {most} tokens"
        ):
            pool.rewind(slots, n)
    assert_untouched(pool, before)
    pool.rewind(TORCH.slots(0, -1), torch.tensor([most, 99]))


# The whole pool against a model --------------------------------------------------------------------------------------


class Sequence:
    """All that happened to one slot since its reset: every layer's tokens, the convolution's inputs."""

    def __init__(self, layers: int) -> None:
        self.layers: list[list[Inputs]] = [[] for _ in range(layers)]
        self.conv: list[Tensor] = []
        self.newest = 0  # tokens ever appended to the window, rejected ones included

    def copy(self) -> Sequence:
        new = Sequence(0)
        new.layers, new.conv, new.newest = [list(x) for x in self.layers], list(self.conv), self.newest
        return new


class Walk:
    """Random steps of a pool. Every output is compared with the recurrence, recomputed in float64 from the first token
    of each sequence, and with ``F.conv1d`` over the whole sequence."""

    def __init__(self, where: Where, dtype: torch.dtype, window: int, fold_every: int, seed: int) -> None:
        self.where, self.dtype, self.window = where, dtype, window
        narrow = dict(state_dtype=dtype, input_dtype=dtype)
        self.pool = build(where, dtypes=narrow, window=window, fold_every=fold_every)
        self.random, self.rng = Random(seed), torch.Generator().manual_seed(seed)
        self.live: dict[int, Sequence] = {}
        self.weight = torch.randn(3, 1, 4, dtype=F64, generator=self.rng)
        self.tallies = [Tally(dtype) for _ in self.pool.layers]
        self.folds = 0

    def walk(self, operations: int) -> None:
        weights = {
            self.steps: 20, self.alloc: 4, self.fold: 3, self.rewind: 3, self.long_append: 2, self.copy: 2,
            self.move: 1, self.reset: 1, self.free: 1,
        }  # fmt: skip
        self.alloc()
        for operation in self.random.choices([*weights], [*weights.values()], k=operations):
            if self.live or operation == self.alloc:
                operation()
            self.pool.check()
        for tally in self.tallies:
            tally.check()

    def pick(self) -> list[int]:
        """Live slots in any order, with padding between."""
        live, draw = [*self.live], self.random
        ids = [*draw.sample(live, draw.randint(0, len(live))), *draw.choices([-1, -4], k=draw.randint(0, 1))]
        return draw.sample(ids, len(ids))

    def slots(self, ids: list[int]) -> Tensor:
        return self.where.slots(*ids)

    def alloc(self) -> None:
        for slot in self.pool.alloc(min(self.random.randint(1, 4), self.pool.free_slots)).tolist():
            assert slot not in self.live
            self.live[slot] = Sequence(len(self.pool.layers))

    def free(self) -> None:
        slot = self.random.choice([*self.live])
        del self.live[slot]
        self.pool.free([slot])
        for x in memory(self.pool)[:-2]:
            x[slot] = float("nan")

    def steps(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            before, ids, T = snapshot(self.pool), self.pick(), self.random.randint(0, self.window)
            self.step(ids, T, [self.random.choice([T, self.random.randint(0, T)]) for _ in ids])
            assert_untouched(self.pool, before, ids)

    def step(self, ids: list[int], T: int, accepted: list[int], folded: bool = False) -> None:
        slots = self.slots(ids)
        real = [(b, slot) for b, slot in enumerate(ids) if slot >= 0]
        self.folds += int(self.pool.ring.due(*reversed(self.pool.ring.at(slots))).sum())
        for i, layer in enumerate(self.pool.layers):
            new = make_inputs(layer.recurrence, len(ids), T, layer.H, layer.HV, layer.K, layer.V, self.dtype, self.rng)
            given = (x.to(self.where.device) for x in new)
            out = ops.verify(layer, *given, slots=slots, folded=folded, backend=self.where.backend).cpu()
            self.compare(i, real, new, out)
            for b, slot in real:
                self.live[slot].layers[i] += [
                    new.rows(slice(b, b + 1)).tokens(slice(t, t + 1)) for t in range(accepted[b])
                ]
            assert not out[[b for b, slot in enumerate(ids) if slot < 0]].any()
        inputs = torch.randn(len(ids), 3, T, dtype=F64, generator=self.rng)
        full = self.pool.convs[0].extend(inputs.to(self.where.device), slots).cpu()
        for b, slot in real:
            seq = self.live[slot]
            before = torch.stack(seq.conv, -1) if seq.conv else torch.zeros(3, 0, dtype=F64)
            if T:
                want = F.conv1d(F.pad(torch.cat([before, inputs[b]], 1), (3, 0)), self.weight, groups=3)[:, -T:]
                got = F.conv1d(full[b], self.weight, groups=3)
                torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
            seq.newest = max(seq.newest, len(seq.conv) + T)
            seq.conv += list(inputs[b, :, : accepted[b]].unbind(-1))
        self.pool.commit(slots, torch.tensor(accepted, device=slots.device, dtype=torch.int32))

    def compare(self, i: int, real: list[tuple[int, int]], new: Inputs, out: Tensor) -> None:
        """Outputs, by the rule. The plain recurrence sees every token from the first; shorter sequences get tokens of
        zeros in front, which leave a zero state as it is."""
        if not real or not new.v.shape[1]:
            return
        layer, T = self.pool.layers[i], new.v.shape[1]
        tokens = [[*self.live[slot].layers[i], new.rows(slice(b, b + 1))] for b, slot in real]
        length = max(map(len, tokens)) - 1 + T
        rows = [Inputs(*(torch.cat(x, 1) for x in zip(*seq, strict=True))) for seq in tokens]
        fields = zip(*rows, strict=True)
        whole = Inputs(*(torch.cat([_zeros_in_front(x, length) for x in field]) for field in fields))
        S = torch.zeros(len(real), layer.HV, layer.V, layer.K, dtype=F64)
        exact, _ = plain(layer.recurrence, S, Inputs(*(x.double() for x in whole)), F64)
        same, _ = plain(layer.recurrence, S.float(), Inputs(*(x.float() for x in whole)))
        self.tallies[i].add(out[[b for b, _ in real]], same[:, -T:], exact[:, -T:])
        self.tallies[i].check(
            f"slots {[slot for _, slot in real]}, layer {i}, tokens {[len(seq) - 1 for seq in tokens]}"
        )

    def long_append(self) -> None:
        ids, ring = self.pick(), self.pool.ring
        T, back = self.random.randint(1, ring.most), self.pool.convs[0].x.shape[2] - 3
        self.pool.fold(self.slots(ids))
        self.step(ids, T, [self.random.randint(max(0, T - back), T) for _ in ids], folded=True)

    def counts(self, ids: list[int]) -> list[int]:
        return self.pool.ring.at(self.slots(ids))[1].tolist()

    def fold(self) -> None:
        ids = self.pick()
        n = [self.random.randint(0, c) if slot >= 0 else -5 for slot, c in zip(ids, self.counts(ids), strict=True)]
        self.pool.fold(self.slots(ids), torch.tensor(n, device=self.where.device, dtype=torch.int32))

    def rewind(self) -> None:
        ids, n, C = self.pick(), [], self.pool.convs[0].x.shape[2]
        for slot, count in zip(ids, self.counts(ids), strict=True):
            if slot < 0:
                n.append(99)
                continue
            seq = self.live[slot]
            held = len(seq.conv) - 3 - (seq.newest - C)  # the window holds the newest C inputs, rejected ones included
            n.append(self.random.randint(0, max(0, min(count, held))))
            for tokens in [seq.conv, *seq.layers]:
                del tokens[len(tokens) - n[-1] :]
        self.pool.rewind(self.slots(ids), torch.tensor(n, device=self.where.device, dtype=torch.int32))

    def reset(self) -> None:
        ids = self.pick()[:2]
        self.pool.reset(self.slots(ids))
        self.live |= {slot: Sequence(len(self.pool.layers)) for slot in ids if slot >= 0}

    def copy(self) -> None:
        dst = self.pick()
        src = self.random.choices([*self.live, -1], k=len(dst))
        self.pool.copy(self.slots(src), self.slots(dst))
        old = {slot: seq.copy() for slot, seq in self.live.items()}
        self.live |= {d: old[s].copy() for s, d in zip(src, dst, strict=True) if min(s, d) >= 0}

    def move(self) -> None:
        src, dst = self.random.choices([*self.live], k=2)
        self.pool.import_(dst, self.pool.export(src))
        self.live[dst] = self.live[src].copy()


def _zeros_in_front(x: Tensor, length: int) -> Tensor:
    return torch.cat([x.new_zeros(1, length - x.shape[1], *x.shape[2:]), x], 1)


@pytest.mark.parametrize(
    ("dtype", "window", "fold_every"), [(F64, 3, 5), (torch.float32, 1, 4), (torch.float32, 3, 1)], ids=str
)
def test_a_random_walk(where: Where, dtype: torch.dtype, window: int, fold_every: int) -> None:
    walk = Walk(where, dtype, window, fold_every, seed=window)
    walk.walk(150)
    assert walk.folds > 10
