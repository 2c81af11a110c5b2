"""What caches say of themselves and of their models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from replayssm import backends
from replayssm.backends import explain, for_trees
from replayssm.hf.options import Options
from replayssm.layer import LayerState
from replayssm.pool import StatePool

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class State(Protocol):
    """The memory behind a cache."""

    pool: StatePool | None
    options: Options

    @property
    def states(self) -> dict[int, LayerState]:
        """By index of the layer in the model."""
        ...

    @property
    def purpose(self) -> str:
        """What the window is for."""
        ...

    @property
    def nbytes(self) -> int:
        """All bytes of it."""
        ...


def explain_state(state: State) -> str:
    """Which backend runs the recurrent layers and why, and the ring's geometry."""
    pool = state.pool
    if pool is None or not state.states:
        return "nothing has run yet; the backend is chosen at the first call"
    layer, ring = next(iter(state.states.values())), pool.ring
    tree = explain(layer, for_trees(state.options.backend), tree=True).name
    return "\n".join(
        [
            backends.describe(layer, pool.N, backend=state.options.backend),
            *([f"draft trees: {tree}"] if ring.window > 1 else []),
            f"recurrence: {layer.recurrence.name}, H={layer.H} HV={layer.HV} K={layer.K} V={layer.V}, "
            f"{len(state.states)} layers, {pool.N} sequences",
            f"ring: R={ring.R} rows, a fold after {ring.limit + 1} tokens, window {ring.window} ({state.purpose})",
            f"dtypes: checkpoint {layer.ckpt.dtype}, k {layer.k.dtype}, d {layer.d.dtype}, w {layer.w.dtype}, "
            f"g {layer.g.dtype}" + ("" if layer.norm is None else "; k as the model has it, before its norm"),
            f"bytes: {state.nbytes // pool.N} a sequence",
        ]
    )


def describe(model: PreTrainedModel) -> str:
    """What two models must have in common to share a cache."""
    config = model.config.get_text_config(decoder=True)
    return f"{config.model_type} with {config.num_hidden_layers} layers of width {config.hidden_size}"
