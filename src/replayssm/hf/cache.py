"""The cache of an attached model: attention layers as in ``DynamicCache``, recurrent ones in a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from replayssm.hf.handle import Handle, returned
from replayssm.hf.reports import describe, explain_state
from replayssm.hf.state import RecurrentState

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ReplayLayer(LinearAttentionLayer):
    """A recurrent layer, whose memory is the cache's pool."""

    is_croppable = True  # pyright: ignore (a property of the base)

    def crop(self, tokens_to_remove: int) -> None:
        """The cache's, for all recurrent layers at once."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """The cache's."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """The cache's."""


class ReplayHybridLayer(LinearAttentionAndFullAttentionLayer):
    """A layer with both: attention here, the recurrence in the cache's pool."""

    is_croppable = True  # pyright: ignore

    def crop(self, tokens_to_remove: int) -> None:
        """The attention's part."""
        DynamicLayer.crop(self, tokens_to_remove)


class ReplayCache(DynamicCache):
    """A cache for ``model``, which must be attached (:func:`replayssm.attach`); ``generate`` then makes its own.

    The last ``window`` tokens can always be taken back with :meth:`crop` where attach was given a window, or after
    :meth:`activate_past_recording`; otherwise as many as happen to be in the ring, see :attr:`croppable`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        attachment = getattr(model, "_replayssm", None)
        if attachment is None:
            raise RuntimeError(
                f"ReplayCache: {type(model).__name__} is not attached; call replayssm.attach(model) first"
            )
        super().__init__(config=model.config)
        kinds = {LinearAttentionLayer: ReplayLayer, LinearAttentionAndFullAttentionLayer: ReplayHybridLayer}
        recurrent = []
        for i, layer in enumerate(self.layers):
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                if type(layer) not in kinds:
                    raise ValueError(f"ReplayCache: unsupported cache layer {i}, {type(layer).__name__}")
                self.layers[i] = kinds[type(layer)](layer.number_of_states)
                recurrent.append(i)
        self.recurrent = self._make_state(recurrent, attachment)
        self._handles = {i: Handle(self.recurrent, i) for i in recurrent}
        self._model = describe(model)
        # Without attention, `generate` takes a cache to be one that knows no length, and feeds it the prompt again.
        self._counts = len(recurrent) == len(self.layers)
        self._report: dict[str, str] | None = attachment.report  # until all layers have run

    def _make_state(self, layers: list[int], attachment: Any) -> RecurrentState:
        return RecurrentState(layers, attachment.options, attachment.dt_limits)

    def __repr__(self) -> str:
        pool = self.recurrent.pool
        if pool is None:
            return "ReplayCache(empty)"
        ring = pool.ring
        return (
            f"ReplayCache({pool.N} sequences of {self.recurrent.tokens} tokens, {len(self.recurrent.layers)} recurrent "
            f"of {len(self.layers)} layers, R={ring.R}, window={ring.window}, {self.nbytes} bytes)"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the recurrent layers' memory; attention's keys and values are not counted."""
        return self.recurrent.nbytes

    @property
    def croppable(self) -> int:
        """How many of the last tokens :meth:`crop` can take back now."""
        return self.recurrent.croppable

    def explain(self) -> str:
        """Which backend runs the recurrent layers and why, and the ring's geometry."""
        return explain_state(self.recurrent)

    def check(self, model: PreTrainedModel, B: int) -> None:
        """Raises where a forward of ``model`` with a batch of ``B`` cannot go on from this cache."""
        if self._model != describe(model):
            raise ValueError(f"ReplayCache: made for {self._model}; got {describe(model)}")
        self.recurrent.check_complete()
        self.recurrent.check_batch(B)

    # What mixers call.

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A copy of a convolution's last inputs; None before the first."""
        recurrent = self._at(layer_idx)
        return recurrent.lend(layer_idx) if state_idx == 0 else recurrent.peek(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Records a convolution's inputs; returns them behind the inputs that came before them."""
        return self._at(layer_idx).conv(conv_states, layer_idx, state_idx, kwargs["conv_kernel_size"])

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The layer's :class:`Handle`, from the first call on."""
        self._at(layer_idx)
        return self._handles[layer_idx]  # pyright: ignore[reportReturnType]

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Takes the handle back; the adapter has done the work."""
        return returned(recurrent_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the recurrent layers have seen tokens."""
        if layer_idx is not None and layer_idx < len(self.layers):
            self._at(layer_idx)
        return self.recurrent.tokens > 0

    def _at(self, layer_idx: int) -> RecurrentState:
        if layer_idx not in self._handles:
            raise ValueError(
                f"ReplayCache: layer {layer_idx} is not one of its recurrent layers, {list(self._handles)}; the cache "
                "was made for another model"
            )
        if self._report is not None and len(self.recurrent.states) == len(self.recurrent.layers):
            self._report["explanation"] = self.explain()
            self._report = None
        # The layers' flag, as generate sets and clears it there.
        layer: Any = self.layers[self.recurrent.layers[0]]
        self.recurrent.recording = layer.record_past
        return self.recurrent

    # What generate and its users call.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the cache, also where no layer has attention."""
        return self.recurrent.tokens if self._counts else super().get_seq_length(layer_idx)

    @property
    def is_linear(self) -> list[bool]:
        """As stock, but all False where no layer has attention: this cache knows its length, so continuing from it
        must feed the new tokens only."""
        return [False] * len(self.layers) if self._counts else super().is_linear

    @property
    def is_compileable(self) -> bool:
        """False: the steps depend on counts that are Python ints."""
        return False

    @property
    def batch_size(self) -> int:
        """Sequences in the cache, -1 before the first call."""
        return -1 if self.recurrent.pool is None else self.recurrent.pool.N

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last ``-tokens_to_remove`` tokens. Raises ValueError, changing nothing, where they are not in
        the ring any more."""
        if tokens_to_remove > 0:
            raise ValueError(f"ReplayCache.crop: expected minus the number of tokens to remove; got {tokens_to_remove}")
        self.recurrent.check_crop(-tokens_to_remove)
        super().crop(tokens_to_remove)
        self.recurrent.crop(-tokens_to_remove)

    def reset(self) -> None:
        """Forgets the sequences; the next ones may be more or fewer."""
        super().reset()
        self.recurrent.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``b`` continues from what was row ``beam_idx[b]``."""
        self.recurrent.select(beam_idx)
        super().reorder_cache(beam_idx)  # pyright: ignore[reportArgumentType]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times."""
        if self.recurrent.pool is not None:
            self.recurrent.select(torch.arange(self.batch_size).repeat_interleave(repeats))
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only the sequences ``indices``, integers or a mask."""
        if self.recurrent.pool is not None:
            self.recurrent.select(torch.arange(self.batch_size)[indices.cpu()])
        super().batch_select_indices(indices)
