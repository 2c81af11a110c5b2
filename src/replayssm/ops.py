"""Public ops over the memory of a layer or of all layers of a model: validate, choose the backend, call it.

One step of decoding is, for each layer, :func:`verify` (``T = 1``: plain decoding), then one :func:`commit`. What is
not committed is rolled back by doing nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replayssm import checks, library
from replayssm.backends import choose
from replayssm.layer import LayerState
from replayssm.ring import Ring, copy_slots, put_slots


@torch.no_grad()
def verify(
    layer: LayerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    g: Tensor,
    *,
    slots: Tensor,
    out: Tensor | None = None,
    folded: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Appends ``T`` new tokens as draft rows and reads their outputs from checkpoint and ring.

    Equivalent, from the state after the committed rows, to ``T`` times::

        S = S * exp(g);  d = v - S @ k  (erase)  or  v;  S = S + w * outer(d, k);  o = S @ q

    q, k: ``[B, T, H, K]``; v: ``[B, T, HV, V]``; w: ``[B, T, HV]``; g: ``[B, T, HV]`` or, decay by channel,
    ``[B, T, HV, K]``, never positive. Any float dtypes and strides. slots: int32 ``[B]``, each at most once; ``< 0`` is
    padding: nothing is written for that row and its output is 0.
    out: ``[B, T, HV, V]`` like v, written and returned; allocated if None.
    folded: the rings of these slots are empty (just folded, see :func:`fold`, reset or seeded), so up to ``ring.most``
    tokens fit; otherwise ``window`` do.
    backend: ``"auto"`` or a name from :func:`replayssm.backends.names`; ``explain`` says what auto takes and why.

    Where the ring's fold is due, the layer's checkpoint also absorbs the committed rows. Cursors move only in
    :func:`commit`, once for all layers; so each verify of a slot is to be followed by a commit, of 0 to reject
    everything, before the slot's next verify. Raises ValueError or TypeError on a wrong shape, dtype, device or slot.
    """
    return _step("verify", layer, (q, k, v, w, g), slots, out, folded, backend)


@torch.no_grad()
def decode(
    layer: LayerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    g: Tensor,
    *,
    slots: Tensor,
    backend: str = "auto",
) -> Tensor:
    """:func:`verify` of one token a row, without the ``T`` dimension: q, k ``[B, H, K]``; v ``[B, HV, V]``; w
    ``[B, HV]``; g ``[B, HV]`` or ``[B, HV, K]``. Returns ``[B, HV, V]``. Call :func:`commit` with 1 after all layers.
    """
    for name, x, dims in (("q", q, 3), ("k", k, 3), ("v", v, 3), ("w", w, 2), ("g", g, 2 + layer.recurrence.channel)):
        if x.dim() != dims:
            raise ValueError(f"decode: {name} must have {dims} dimensions; got {name}.shape={tuple(x.shape)}")
    inputs = [x.unsqueeze(1) for x in (q, k, v, w, g)]
    return _step("decode", layer, inputs, slots, None, False, backend)[:, 0]


def _step(
    op: str, layer: LayerState, inputs: Sequence[Tensor], slots: Tensor, out: Tensor | None, folded: bool, backend: str
) -> Tensor:
    out = torch.empty_like(inputs[2], memory_format=torch.contiguous_format) if out is None else out
    step = library.traced if torch.compiler.is_compiling() else library.run
    step(op, layer, inputs, slots, out, folded, backend)
    return out


def commit(ring: Ring, slots: Tensor, accepted: Tensor | int) -> None:
    """Ends a step for all layers at once: ``accepted`` of the step's draft rows (one int, or ``[B]``; 0..T, the bonus
    token included) become committed. To be called once, after every layer's :func:`verify`, with the same slots."""
    if not torch.compiler.is_compiling():
        checks.check_accepted(ring, slots, accepted)
    ring.commit(slots, accepted)


@torch.no_grad()
def seed(layer: LayerState, state: Tensor, slots: Tensor) -> None:
    """Writes states ``[B, HV, V, K]`` (any float dtype) as the checkpoints of ``slots``, whose rings must be empty."""
    checks.check_state("seed", layer, state, slots)
    put_slots(layer.ckpt, slots, state)


def fold(layers: Sequence[LayerState], slots: Tensor, n: Tensor | int | None = None, backend: str = "auto") -> None:
    """Every layer's checkpoint absorbs the first ``n`` committed rows of ``slots`` (all of them by default).

    ``n``: one int or integers ``[B]``, at most the committed rows. Between steps only, as it moves the cursors."""
    checks.check_rows("fold", layers, slots, 0 if n is None else n)
    ring = layers[0].ring
    rows = ring.at(slots)[1] if n is None else n if isinstance(n, Tensor) else torch.full_like(slots, n)
    if slots.numel() == 0:
        return
    for layer in layers:
        choose(backend, layer).fold(layer, slots, rows)
    ring.absorb(slots, rows)


def copy(layers: Sequence[LayerState], src: Tensor, dst: Tensor) -> None:
    """``dst`` slots become copies of ``src`` slots (both int32 ``[B]``), as if all at once: a source may come more than
    once, and slots may swap. A pair with padding (``< 0``) on either side copies nothing."""
    checks.check_rows("copy", layers, dst, 0)
    checks.check_sources("copy", src, dst, layers[0].ring.N)
    copy_slots([x for layer in layers for x in layer.tensors.values()], src, dst)
    layers[0].ring.copy(src, dst)


def reset(layers: Sequence[LayerState], slots: Tensor) -> None:
    """``slots`` start anew: zero checkpoint, empty ring. Ring rows are left as they are; no dead row is ever read."""
    checks.check_rows("reset", layers, slots, 0)
    for layer in layers:
        put_slots(layer.ckpt, slots, 0)
    layers[0].ring.reset(slots)


def rewind(layers: Sequence[LayerState], slots: Tensor, n: Tensor | int) -> None:
    """Takes the last ``n`` committed tokens of ``slots`` back, as long as they are still in the ring."""
    checks.check_rows("rewind", layers, slots, n)
    layers[0].ring.rewind(slots, n)
