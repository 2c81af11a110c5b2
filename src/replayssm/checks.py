"""The contract of every public op: shapes, dtypes, devices, slots. All the ops' user-facing errors are raised here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from replayssm.layer import FLOATS, LayerState
from replayssm.ring import Ring


def _shape(op: str, name: str, x: Tensor, want: dict[str, int], pool: bool = True) -> None:
    """Checks ``x`` against named dimensions in order; -1 takes anything."""
    letters = ", ".join(want)
    if x.dim() != len(want):
        raise ValueError(f"{op}: {name} must be [{letters}]; got {name}.shape={tuple(x.shape)}")
    for (letter, size), got in zip(want.items(), x.shape, strict=True):
        if size not in (-1, got):
            where = "the pool was built with" if letter in ("H", "HV", "K", "V") else "the call has"
            raise ValueError(
                f"{op}: {name} has {got} where {where} {letter}={size} ({name}: [{letters}]); "
                f"got {name}.shape={tuple(x.shape)}"
            )


def _float(op: str, name: str, x: Tensor) -> None:
    if x.dtype not in FLOATS:
        valid = ", ".join(str(t).removeprefix("torch.") for t in FLOATS)
        raise TypeError(f"{op}: {name} must be one of {valid}; got {x.dtype}")


def _device(op: str, name: str, x: Tensor, layer: LayerState) -> None:
    if x.device != layer.ckpt.device:
        raise ValueError(f"{op}: {name} is on {x.device}, the pool on {layer.ckpt.device}")


def check_slots(
    op: str, slots: Tensor, N: int, device: torch.device, name: str = "slots", repeat: bool = False
) -> None:
    """``slots`` must be int32 ``[B]`` on ``device``. On the CPU, where reading them costs no synchronisation, also that
    they are below ``N`` and, unless they may ``repeat``, that no real slot comes twice."""
    if slots.dim() != 1 or slots.dtype != torch.int32:
        raise TypeError(f"{op}: {name} must be int32 [B]; got {slots.dtype} of shape {tuple(slots.shape)}")
    if slots.device != device:
        raise ValueError(f"{op}: {name} is on {slots.device}, the pool on {device}")
    if slots.device.type != "cpu" or slots.numel() == 0:
        return
    live = [slot for slot in slots.tolist() if slot >= 0]  # faster than torch for as many as there ever are
    if live and max(live) >= N:
        raise ValueError(f"{op}: slot {max(live)} is out of range; the pool has N={N} slots, 0 to {N - 1}")
    if not repeat and len(set(live)) != len(live):
        twice = min(slot for slot, times in Counter(live).items() if times > 1)
        raise ValueError(f"{op}: slot {twice} comes more than once in one call")


def check_sources(op: str, src: Tensor, dst: Tensor, N: int) -> None:
    """``src`` of a copy to ``dst``: as many slots, where one may come more than once."""
    check_slots(op, src, N, dst.device, "src", repeat=True)
    if src.shape != dst.shape:
        raise ValueError(f"{op}: src must be as many slots as dst; got {src.numel()} and {dst.numel()}")


def check_verify(
    op: str,
    layer: LayerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    g: Tensor,
    slots: Tensor,
    folded: bool = False,
) -> None:
    """Inputs of ``verify``. That the rings are empty where ``folded`` says so is checked on the CPU only."""
    ring, device = layer.ring, layer.ckpt.device
    check_slots(op, slots, ring.N, device)
    HV, V, K = layer.ckpt.shape[1:]
    B, T = slots.numel(), q.shape[1] if q.dim() > 1 else 0
    keys, gates = (B, T, layer.H, K), (B, T, HV)
    wanted = keys, keys, (B, T, HV, V), gates, (*gates, K) if layer.recurrence.channel else gates
    # In an eager step of a model each comparison counts, so all at once; what is wrong is found out where anything is.
    if (q.shape, k.shape, v.shape, w.shape, g.shape) != wanted or not all(
        x.dtype in FLOATS and x.device == device for x in (q, k, v, w, g)
    ):
        _find(op, layer, (q, k, v, w, g), B)
    room = ring.most if folded else ring.window
    if room < T:
        raise ValueError(
            f"{op}: T={T} new tokens, but the ring (R={ring.R}, window={ring.window}) has room for {room} in this "
            "call; build the pool with a larger window, or fold these slots first and pass folded=True"
        )
    if folded:
        _empty(op, ring, slots, "folded=True needs")


def _find(op: str, layer: LayerState, inputs: Sequence[Tensor], B: int) -> None:
    """Raises for the first of q, k, v, w and g that is wrong."""
    H, HV, K, V = layer.H, layer.HV, layer.K, layer.V
    q, k, v, w, g = inputs
    _shape(op, "q", q, {"B": B, "T": -1, "H": H, "K": K})
    T = q.shape[1]
    _shape(op, "k", k, {"B": B, "T": T, "H": H, "K": K})
    _shape(op, "v", v, {"B": B, "T": T, "HV": HV, "V": V})
    _shape(op, "w", w, {"B": B, "T": T, "HV": HV})
    channel = {"K": K} if layer.recurrence.channel else {}
    _shape(op, "g", g, {"B": B, "T": T, "HV": HV} | channel)
    for name, x in zip("qkvwg", inputs, strict=True):
        _float(op, name, x)
        _device(op, name, x, layer)


def check_out(op: str, out: Tensor, v: Tensor) -> None:
    """A caller's output buffer must look like ``v``."""
    if out.shape != v.shape or out.dtype != v.dtype or out.device != v.device:
        raise ValueError(
            f"{op}: out must be like v, {v.dtype} {tuple(v.shape)} on {v.device}; got {out.dtype} {tuple(out.shape)} "
            f"on {out.device}"
        )


def check_state(op: str, layer: LayerState, state: Tensor, slots: Tensor) -> None:
    """A state to seed: ``[B, HV, V, K]``."""
    check_slots(op, slots, layer.ring.N, layer.ckpt.device)
    _shape(op, "state", state, {"B": slots.numel(), "HV": layer.HV, "V": layer.V, "K": layer.K})
    _float(op, "state", state)
    _device(op, "state", state, layer)
    _empty(op, layer.ring, slots, "a seed goes to")


def check_rows(op: str, layers: Sequence[LayerState], slots: Tensor, n: Tensor | int) -> None:
    """A number of committed rows a slot, ``n``: one int or int32/int64 ``[B]``. Range is checked on the CPU only."""
    if not layers:
        raise ValueError(f"{op}: no layers")
    ring = layers[0].ring
    if any(layer.ring is not ring for layer in layers):
        raise ValueError(f"{op}: the layers do not share one pair of cursors; they belong to different pools")
    check_slots(op, slots, ring.N, ring.head.device)
    _integers(op, "n", n, slots)
    if slots.device.type == "cpu" and slots.numel():
        _, count = ring.at(slots)
        bad = (torch.as_tensor((n < 0) | (n > count))) & (slots >= 0)
        if bool(bad.any()):
            i = int(bad.nonzero()[0])
            rows = int(n if isinstance(n, int) else n[i])
            raise ValueError(
                f"{op}: {rows} rows of slot {int(slots[i])}, which has {int(count[i])} committed rows in its ring"
            )


def check_accepted(ring: Ring, slots: Tensor, accepted: Tensor | int) -> None:
    """``accepted`` a slot: one int or integers ``[B]``, not negative, and leaving room for the next window. On the
    CPU checked against the cursors, elsewhere, for an int, against an empty ring."""
    check_slots("commit", slots, ring.N, ring.head.device)
    _integers("commit", "accepted", accepted, slots)
    most = ring.most
    if isinstance(accepted, int) and not 0 <= accepted <= most:
        raise ValueError(f"commit: accepted must be in 0 .. {most}; got {accepted}")
    if slots.device.type != "cpu" or slots.numel() == 0:
        return
    head, count = ring.at(slots)
    room = most - torch.where(ring.due(count, head), 0, count)
    bad = torch.as_tensor((accepted < 0) | (accepted > room)) & (slots >= 0)
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        rows = accepted if isinstance(accepted, int) else int(accepted[i])
        raise ValueError(f"commit: accepted must be in 0 .. {int(room[i])} for slot {int(slots[i])}; got {rows}")


def check_parents(op: str, parents: Tensor, slots: Tensor, T: int) -> None:
    """``parents`` of a draft tree: int64 ``[B, T]``. That each comes before its child is checked on the CPU only."""
    B = slots.numel()
    if parents.shape != (B, T) or parents.dtype != torch.int64:
        raise TypeError(
            f"{op}: parents must be int64 [B={B}, T={T}]; got {parents.dtype} of shape {tuple(parents.shape)}"
        )
    if parents.device != slots.device:
        raise ValueError(f"{op}: parents is on {parents.device}, the pool on {slots.device}")
    if slots.device.type == "cpu":
        bad = (parents < -1) | (parents >= torch.arange(T))
        if bool(bad.any()):
            row, t = (int(i) for i in bad.nonzero()[0])
            raise ValueError(
                f"{op}: the parent of node {t} must be an earlier node or -1; got {int(parents[row, t])} in row {row}"
            )


def check_path(op: str, path: Tensor, accepted: Tensor, slots: Tensor, window: int) -> None:
    """Accepted nodes ``path`` of a draft tree, int64 ``[B, P]``; on the CPU, that they ascend within the window."""
    B = slots.numel()
    if path.dim() != 2 or path.shape[0] != B or path.shape[1] > window or path.dtype != torch.int64:
        raise TypeError(
            f"{op}: path must be int64 [B={B}, P <= {window}]; got {path.dtype} of shape {tuple(path.shape)}"
        )
    if path.device != slots.device:
        raise ValueError(f"{op}: path is on {path.device}, the pool on {slots.device}")
    if slots.device.type == "cpu" and B:
        if int((accepted * (slots >= 0)).max()) > path.shape[1]:
            raise ValueError(
                f"{op}: accepted must be at most the {path.shape[1]} nodes of path; got {accepted.tolist()}"
            )
        counted = (torch.arange(path.shape[1]) < accepted[:, None]) & (slots >= 0)[:, None]
        before = torch.nn.functional.pad(path, (1, 0), value=-1)[:, :-1]
        if bool(((path <= before) | (path >= window))[counted].any()):
            raise ValueError(f"{op}: nodes of a path must ascend and lie below {window}; got {path.tolist()}")


def _integers(op: str, name: str, n: Tensor | int, slots: Tensor) -> None:
    """``n`` must be one int, or integers like ``slots``, on their device."""
    if isinstance(n, int):
        return
    if n.shape != slots.shape or n.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{op}: {name} must be an int or integers of shape {tuple(slots.shape)}; got {n.dtype} {tuple(n.shape)}"
        )
    if n.device != slots.device:
        raise ValueError(f"{op}: {name} is on {n.device}, the pool on {slots.device}")


def _empty(op: str, ring: Ring, slots: Tensor, why: str) -> None:
    """On the CPU: the rings of ``slots`` must be empty."""
    if slots.device.type == "cpu" and slots.numel():
        _, count = ring.at(slots)
        if bool(count.any()):
            i = int(count.nonzero()[0])
            raise ValueError(
                f"{op}: {why} empty rings, but slot {int(slots[i])} has {int(count[i])} committed rows; "
                "fold or reset it"
            )
