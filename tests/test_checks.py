"""Every error of the ops: its message holds what was expected and what came, and nothing has been written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Where, make_spec

from replayssm import GDN, KDA, MAMBA2, LayerSpec, Recurrence, StatePool, backends, ops, recurrence
from replayssm.testing import Inputs, assert_untouched, make_inputs, snapshot

TORCH = Where("torch", "cpu")


@pytest.fixture
def pool() -> StatePool:
    """H=2, HV=6, K=12, V=7; N=6 slots, of which 0 and 1 have 2 rows; window 3, R=12."""
    pool = TORCH.pool([make_spec(GDN)], window=3, fold_every=7, width=1)
    pool.reset(TORCH.slots(*range(6)))
    ops.verify(pool.layers[0], *given(T=2), slots=TORCH.slots(0, 1))
    pool.commit(TORCH.slots(0, 1), 2)
    assert pool.ring.R == 12
    return pool


def given(B: int = 2, T: int = 1, **changes: Any) -> Inputs:
    return make_inputs(GDN, B, T, 2, 6, 12, 7)._replace(**changes)


def raises(pool: StatePool, kind: type[Exception], message: str, call: Callable[[], Any]) -> None:
    """The message begins with ``message``, as it stands, and the pool is untouched."""
    before = snapshot(pool)
    with pytest.raises(kind) as info:
        call()
    assert str(info.value).startswith(message), str(info.value)
    assert_untouched(pool, before)


def z(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


VERIFY = {
    "q-dims": (dict(q=z(2, 1, 2)), "verify: q must be [B, T, H, K]; got q.shape=(2, 1, 2)"),
    "q-rows": (
        dict(q=z(3, 1, 2, 12)),
        "verify: q has 3 where the call has B=2 (q: [B, T, H, K]); got q.shape=(3, 1, 2, 12)",
    ),
    "k-heads": (
        dict(k=z(2, 1, 3, 12)),
        "verify: k has 3 where the pool was built with H=2 (k: [B, T, H, K]); got k.shape=(2, 1, 3, 12)",
    ),
    "k-tokens": (
        dict(k=z(2, 2, 2, 12)),
        "verify: k has 2 where the call has T=1 (k: [B, T, H, K]); got k.shape=(2, 2, 2, 12)",
    ),
    "k-dim": (
        dict(k=z(2, 1, 2, 11)),
        "verify: k has 11 where the pool was built with K=12 (k: [B, T, H, K]); got k.shape=(2, 1, 2, 11)",
    ),
    "v-heads": (
        dict(v=z(2, 1, 2, 7)),
        "verify: v has 2 where the pool was built with HV=6 (v: [B, T, HV, V]); got v.shape=(2, 1, 2, 7)",
    ),
    "v-dim": (
        dict(v=z(2, 1, 6, 12)),
        "verify: v has 12 where the pool was built with V=7 (v: [B, T, HV, V]); got v.shape=(2, 1, 6, 12)",
    ),
    "w-shape": (dict(w=z(2, 1, 6, 1)), "verify: w must be [B, T, HV]; got w.shape=(2, 1, 6, 1)"),
    "w-heads": (
        dict(w=z(2, 1, 2)),
        "verify: w has 2 where the pool was built with HV=6 (w: [B, T, HV]); got w.shape=(2, 1, 2)",
    ),
    "g-by-channel": (dict(g=z(2, 1, 6, 12)), "verify: g must be [B, T, HV]; got g.shape=(2, 1, 6, 12)"),
    "q-dtype": (
        dict(q=z(2, 1, 2, 12, dtype=torch.int32)),
        "verify: q must be one of float32, bfloat16, float16, float64; got torch.int32",
    ),
    "g-dtype": (
        dict(g=z(2, 1, 6, dtype=torch.bool)),
        "verify: g must be one of float32, bfloat16, float16, float64; got torch.bool",
    ),
    "v-device": (dict(v=z(2, 1, 6, 7, device="meta")), "verify: v is on meta, the pool on cpu"),
}


@pytest.mark.parametrize(("changes", "message"), VERIFY.values(), ids=VERIFY)
@pytest.mark.parametrize("op", ["verify", "decode"])
def test_inputs(pool: StatePool, op: str, changes: dict[str, Any], message: str) -> None:
    kind = TypeError if "one of" in message else ValueError
    slots, layer = TORCH.slots(3, 4), pool.layers[0]
    if op == "verify":
        raises(pool, kind, message, lambda: ops.verify(layer, *given(**changes), slots=slots))
    elif next(iter(changes.values())).shape[1:2] == (1,):
        inputs = (x[:, 0] for x in given(**changes))
        message = "decode: " if " must be [" in message else message.replace("verify", "decode")
        raises(pool, kind, message, lambda: ops.decode(layer, *inputs, slots=slots))


def test_decode_names_the_dimensions() -> None:
    pool = TORCH.pool([make_spec(GDN), make_spec(KDA)])
    head, channel = pool.layers
    slots = TORCH.slots(0, 1)
    good = [x[:, 0] for x in given()]
    for i, name in enumerate(("q", "k", "v", "w", "g")):
        for layer, want in ((head, (3, 3, 3, 2, 2)), (channel, (3, 3, 3, 2, 3))):
            bad = [*good[:4], z(2, 6, 12) if layer is channel else good[4]]
            bad[i] = bad[i][None]
            message = f"decode: {name} must have {want[i]} dimensions; got {name}.shape={tuple(bad[i].shape)}"
            raises(pool, ValueError, message, lambda layer=layer, bad=bad: ops.decode(layer, *bad, slots=slots))


SLOTS = {
    "int64": (torch.tensor([0, 1]), TypeError, "slots must be int32 [B]; got torch.int64 of shape (2,)"),
    "shape": (
        torch.tensor([[0, 1]], dtype=torch.int32),
        TypeError,
        "slots must be int32 [B]; got torch.int32 of shape (1, 2)",
    ),
    "range": (
        TORCH.slots(0, 6),
        ValueError,
        "slot 6 is out of range; the pool has N=6 slots, 0 to 5",
    ),
    "twice": (TORCH.slots(1, 1), ValueError, "slot 1 comes more than once in one call"),
    "device": (z(2, dtype=torch.int32, device="meta"), ValueError, "slots is on meta, the pool on cpu"),
}


@pytest.mark.parametrize(("slots", "kind", "message"), SLOTS.values(), ids=SLOTS)
def test_slots(pool: StatePool, slots: torch.Tensor, kind: type[Exception], message: str) -> None:
    layer = pool.layers[0]
    calls = {
        "verify": lambda: ops.verify(layer, *given(), slots=slots),
        "decode": lambda: ops.decode(layer, *(x[:, 0] for x in given()), slots=slots),
        "seed": lambda: ops.seed(layer, z(2, 6, 7, 12), slots),
        "commit": lambda: pool.commit(slots, 1),
        "fold": lambda: pool.fold(slots),
        "rewind": lambda: pool.rewind(slots, 0),
        "reset": lambda: pool.reset(slots),
        "copy": lambda: pool.copy(TORCH.slots(0, 1), slots),
    }
    for op, call in calls.items():
        raises(pool, kind, f"{op}: {message}", call)


def test_padding_may_come_often(pool: StatePool) -> None:
    ops.verify(pool.layers[0], *given(B=3), slots=TORCH.slots(-1, -1, -7))


@pytest.mark.parametrize(("slots", "kind", "message"), SLOTS.values(), ids=SLOTS)
def test_copy_sources(pool: StatePool, slots: torch.Tensor, kind: type[Exception], message: str) -> None:
    if "once" in message:
        return  # a source may come twice: see test_copies_are_taken_before_anything_is_written
    message = "copy: " + message.replace("slots must", "src must").replace("slots is", "src is")
    raises(pool, kind, message, lambda: pool.copy(slots, TORCH.slots(4, 5)))


def test_copy_of_as_many(pool: StatePool) -> None:
    message = "copy: src must be as many slots as dst; got 1 and 2"
    raises(pool, ValueError, message, lambda: pool.copy(TORCH.slots(0), TORCH.slots(4, 5)))


def test_tokens_that_do_not_fit(pool: StatePool) -> None:
    layer, slots = pool.layers[0], TORCH.slots(3, 4)
    message = "verify: T=4 new tokens, but the ring (R=12, window=3) has room for 3 in this call; "
    raises(pool, ValueError, message, lambda: ops.verify(layer, *given(T=4), slots=slots))
    message = "verify: T=10 new tokens, but the ring (R=12, window=3) has room for 9 in this call; "
    raises(pool, ValueError, message, lambda: ops.verify(layer, *given(T=10), slots=slots, folded=True))
    message = "verify: folded=True needs empty rings, but slot 1 has 2 committed rows; fold or reset it"
    raises(pool, ValueError, message, lambda: ops.verify(layer, *given(), slots=TORCH.slots(3, 1), folded=True))


@pytest.mark.parametrize(
    ("out", "got"),
    [
        (z(2, 1, 6, 8), "torch.float32 (2, 1, 6, 8) on cpu"),
        (z(2, 1, 6, 7, dtype=torch.bfloat16), "torch.bfloat16 (2, 1, 6, 7) on cpu"),
        (z(2, 1, 6, 7, device="meta"), "torch.float32 (2, 1, 6, 7) on meta"),
    ],
    ids=["shape", "dtype", "device"],
)
def test_out(pool: StatePool, out: torch.Tensor, got: str) -> None:
    message = f"verify: out must be like v, torch.float32 (2, 1, 6, 7) on cpu; got {got}"
    raises(pool, ValueError, message, lambda: ops.verify(pool.layers[0], *given(), slots=TORCH.slots(3, 4), out=out))


@pytest.mark.parametrize(
    ("state", "kind", "message"),
    [
        (z(2, 6, 12), ValueError, "seed: state must be [B, HV, V, K]; got state.shape=(2, 6, 12)"),
        (
            z(2, 6, 12, 7),
            ValueError,
            "seed: state has 12 where the pool was built with V=7 (state: [B, HV, V, K]); got state.shape=(2, 6, 12",
        ),
        (
            z(2, 6, 7, 12, dtype=torch.int8),
            TypeError,
            "seed: state must be one of float32, bfloat16, float16, float64;",
        ),
        (z(2, 6, 7, 12, device="meta"), ValueError, "seed: state is on meta, the pool on cpu"),
    ],
    ids=["dims", "transposed", "dtype", "device"],
)
def test_seed_states(pool: StatePool, state: torch.Tensor, kind: type[Exception], message: str) -> None:
    raises(pool, kind, message, lambda: ops.seed(pool.layers[0], state, TORCH.slots(3, 4)))


def test_seed_of_a_ring_with_rows(pool: StatePool) -> None:
    message = "seed: a seed goes to empty rings, but slot 0 has 2 committed rows; fold or reset it"
    raises(pool, ValueError, message, lambda: ops.seed(pool.layers[0], z(2, 6, 7, 12), TORCH.slots(4, 0)))


@pytest.mark.parametrize("op", ["fold", "rewind"])
def test_numbers_of_rows(pool: StatePool, op: str) -> None:
    call, slots = getattr(pool, op), TORCH.slots(4, 1)
    for n, rows, slot, has in ((1, 1, 4, 0), (-1, -1, 4, 0), (torch.tensor([0, 3]), 3, 1, 2)):
        message = f"{op}: {rows} rows of slot {slot}, which has {has} committed rows in its ring"
        raises(pool, ValueError, message, lambda n=n: call(slots, n))
    for n in (torch.tensor([0.0, 0.0]), torch.tensor([0]), torch.tensor(0)):
        message = f"{op}: n must be an int or integers of shape (2,); got {n.dtype} {tuple(n.shape)}"
        raises(pool, TypeError, message, lambda n=n: call(slots, n))
    n = z(2, dtype=torch.int32, device="meta")
    raises(pool, ValueError, f"{op}: n is on meta, the pool on cpu", lambda: call(slots, n))


def test_accepted(pool: StatePool) -> None:
    slots = TORCH.slots(4, 1)
    for accepted, most, got in ((-1, 9, -1), (10, 9, 10)):
        message = f"commit: accepted must be in 0 .. {most}; got {got}"
        raises(pool, ValueError, message, lambda accepted=accepted: pool.commit(slots, accepted))
    for accepted, room, slot, got in (
        (8, 7, 1, 8),
        (torch.tensor([-1, 0]), 9, 4, -1),
        (torch.tensor([9, 8], dtype=torch.int32), 7, 1, 8),
    ):
        message = f"commit: accepted must be in 0 .. {room} for slot {slot}; got {got}"
        raises(pool, ValueError, message, lambda accepted=accepted: pool.commit(slots, accepted))
    for accepted in (torch.tensor([0.0, 0.0]), torch.tensor([1])):
        message = (
            f"commit: accepted must be an int or integers of shape (2,); got {accepted.dtype} {tuple(accepted.shape)}"
        )
        raises(pool, TypeError, message, lambda accepted=accepted: pool.commit(slots, accepted))
    accepted = z(2, dtype=torch.int32, device="meta")
    raises(pool, ValueError, "commit: accepted is on meta, the pool on cpu", lambda: pool.commit(slots, accepted))
    pool.commit(TORCH.slots(-1, 4), torch.tensor([-9, 1]))  # a padding row's number is not looked at
    assert pool.ring.count.tolist() == [2, 2, 0, 0, 1, 0, 0]


def test_layers_of_one_pool(pool: StatePool) -> None:
    other = TORCH.pool([make_spec(GDN)])
    slots = TORCH.slots(0)
    calls = {
        "fold": lambda layers: ops.fold(layers, slots),
        "copy": lambda layers: ops.copy(layers, slots, slots),
        "reset": lambda layers: ops.reset(layers, slots),
        "rewind": lambda layers: ops.rewind(layers, slots, 0),
    }
    for op, call in calls.items():
        raises(pool, ValueError, f"{op}: no layers", lambda call=call: call([]))
        message = f"{op}: the layers do not share one pair of cursors; they belong to different pools"
        raises(pool, ValueError, message, lambda call=call: call([*pool.layers, *other.layers]))


def test_unknown_names_list_the_valid_ones(pool: StatePool) -> None:
    valid = "valid: auto, " + ", ".join(backends.names())
    layer, slots = pool.layers[0], TORCH.slots(0)
    message = f"unknown backend 'cuda'; {valid}"
    raises(pool, ValueError, message, lambda: ops.verify(layer, *given(B=1), slots=slots, backend="cuda"))
    raises(pool, ValueError, message, lambda: ops.fold([layer], slots, backend="cuda"))
    raises(pool, ValueError, message, lambda: backends.explain(layer, "cuda"))
    raises(pool, ValueError, f"StatePool: {message}", lambda: StatePool(1, backend="cuda"))
    with pytest.raises(ValueError, match="unknown recurrence 'mamba'; valid: mamba2, gdn, kda"):
        recurrence("mamba")
    with pytest.raises(ValueError, match="Recurrence: decay must be 'head' or 'channel'; got 'row'"):
        Recurrence(decay="row", erase=True)  # type: ignore[arg-type]


def test_a_backend_that_cannot_serve_the_layer(pool: StatePool) -> None:
    message = "backend 'sequential' cannot serve this layer: the pool folds every 7 rows; build it with fold_every=1"
    call = lambda: ops.verify(pool.layers[0], *given(), slots=TORCH.slots(3, 4), backend="sequential")  # noqa: E731
    raises(pool, ValueError, message, call)


def test_explain_gives_a_reason_for_every_other_backend(pool: StatePool) -> None:
    for asked in ("auto", "torch"):
        choice = backends.explain(pool.layers[0], asked)
        assert {choice.name, *choice.reasons} == set(backends.names()) and choice.name not in choice.reasons
        assert all(choice.reasons.values()) and choice.name in str(choice)
        chosen = backends.choose(asked, pool.layers[0])
        assert chosen is backends.load(choice.name) and chosen.refuses(pool.layers[0]) is None
    assert choice.name == "torch"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(HV=5), "LayerSpec: need H, HV, K, V >= 1 and HV a multiple of H; got H=2, HV=5, K=12, V=7"),
        (dict(K=0), "LayerSpec: need H, HV, K, V >= 1 and HV a multiple of H; got H=2, HV=6, K=0, V=7"),
        (
            dict(state_dtype=torch.int8),
            "LayerSpec: state_dtype must be one of float32, bfloat16, float16, float64; got",
        ),
        (
            dict(input_dtype=torch.int8),
            "LayerSpec: input_dtype must be one of float32, bfloat16, float16, float64; got",
        ),
    ],
    ids=["heads", "empty", "state", "input"],
)
def test_layer_specs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as info:
        make_spec(MAMBA2, **changes)
    assert str(info.value).startswith(message)


@pytest.mark.parametrize("rec", [MAMBA2, GDN, KDA], ids=lambda rec: rec.name)
def test_what_a_ring_may_round(rec: Recurrence) -> None:
    """w never; d where it is the input itself, or as much as the state, as by channel g."""
    narrow = torch.bfloat16
    layer = StatePool(1).add_layer(LayerSpec(rec, 1, 1, 4, 4, input_dtype=narrow))
    assert layer.w.dtype == layer.g.dtype == layer.ckpt.dtype == torch.float32
    assert layer.k.dtype == narrow and layer.d.dtype == (torch.float32 if rec.erase else narrow)
    for state in (torch.bfloat16, torch.float16):
        layer = StatePool(1).add_layer(LayerSpec(rec, 1, 1, 4, 4, state, narrow))
        assert layer.ckpt.dtype == state and layer.w.dtype == torch.float32
        assert layer.d.dtype == (state if rec.erase else narrow)
        assert layer.g.dtype == (narrow if rec.channel else torch.float32)
    wide = StatePool(1).add_layer(LayerSpec(rec, 1, 1, 4, 4, torch.bfloat16, torch.float64))
    assert wide.w.dtype == wide.g.dtype == wide.d.dtype == torch.float64
    assert recurrence(rec.name) is rec


def test_a_specification_takes_a_recurrence_and_not_its_name() -> None:
    with pytest.raises(TypeError, match=r"must be a Recurrence, such as MAMBA2, GDN, KDA; got 'gdn'"):
        LayerSpec("gdn", 1, 1, 4, 4)  # pyright: ignore[reportArgumentType]
