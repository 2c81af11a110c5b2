"""Verifying drafts with fixed memory: a static cache whose rows stand at places of their own, and the runner over it.

Every step feeds as many tokens, filled up where there are fewer drafts, so that one compiled and captured graph serves
all of them. Nothing is moved when drafts are rejected: a row's next tokens are written where its accepted ones end, in
the attention's memory as in the ring, and masks and positions say what a token sees. Rows that have ended are computed
on, without effect.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionAndStaticFullAttentionLayer, StaticLayer

from replayssm.auto import FOLD_EVERY
from replayssm.hf.captured import CAPTURED, CapturedStep, Compiled
from replayssm.hf.state import Step
from replayssm.hf.static import LENGTH, StaticReplayCache, StaticState, stay
from replayssm.hf.trees import attention_mask, check_trees
from replayssm.layer import LayerSpec
from replayssm.pool import StatePool


class Places:
    """The column ``ends [B]`` (int64) at which each row goes on; None while the prompt is fed."""

    ends: Tensor | None = None


class RowLayer(StaticLayer):
    """Keys and values ``[B, heads, columns, dim]``; new ones go to each row's own columns."""

    places: Places

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes a step's keys and values; returns all."""
        if self.places.ends is None:
            return super().update(key_states, value_states, *args, **kwargs)
        at = self.places.ends[:, None] + torch.arange(key_states.shape[2], device=key_states.device)
        keys: Any = self.keys
        values: Any = self.values
        for x, new in ((keys, key_states), (values, value_states)):
            x.scatter_(2, at[:, None, :, None].expand_as(new), new)
        return keys, values


class RowHybridLayer(RowLayer, LinearAttentionAndStaticFullAttentionLayer):
    """The same beside a recurrence."""


class VerifyState(StaticState):
    """A :class:`StaticState` with a window: the tokens of a step are committed by :meth:`accept`."""

    def __init__(self, window: int, *args: Any) -> None:
        super().__init__(*args)
        self.window = window
        self.purpose = "drafts, fixed memory"

    @property
    def recording(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """From the prompt on a token is a draft, which models treat as they do one token."""
        return self.started

    def plan(self, layer: int, T: int, B: int, device: torch.device) -> Step:
        """A prompt is absorbed (one token: replayed), what follows is replayed, as one token is: nothing is folded for
        it but what verify itself finds due."""
        started = self.started
        step = super().plan(layer, 1 if started else T, B, device)
        if started:
            step.tokens = step.replayed = T
        return step

    def finish(self, layer: int, step: Step) -> None:
        """The layer is through."""
        if step.first:
            super().finish(layer, step)
        elif layer == self.layers[-1]:
            self._open = False

    def accept(self, n: Tensor) -> None:
        """Of the last step's tokens the first ``n [B]`` (int32) stay."""
        self._pool.commit(self.slots, n)

    @torch.compiler.disable
    def _build(self, spec: LayerSpec) -> None:
        # By default so that a step finds 16 rows at most, what kernels read as one block.
        every = self.options.fold_every or max(FOLD_EVERY // 2, FOLD_EVERY + 1 - self.window)
        with torch.inference_mode(False):
            self.pool = StatePool(
                self._rows, fold_every=every, window=self.window, width=self.width, device=self._device,
                backend=self.options.backend,
            )  # fmt: skip
            self.slots = torch.arange(self._rows, dtype=torch.int32, device=self._device)
        stay(self.slots, self.pool.ring.head, self.pool.ring.count)


class VerifyCache(StaticReplayCache):
    """Memory for ``max_cache_len`` tokens of which up to ``window`` at a time are drafts, each row's own."""

    recurrent: VerifyState

    def __init__(self, model: PreTrainedModel, max_cache_len: int, window: int) -> None:
        self._window = window
        super().__init__(model, max_cache_len)
        self.places = Places()
        kinds = {StaticLayer: RowLayer, LinearAttentionAndStaticFullAttentionLayer: RowHybridLayer}
        for i, layer in enumerate(self.layers):
            if type(layer) in kinds:
                states = {name: x for name, x in vars(layer).items() if name == "number_of_states"}
                row: Any = kinds[type(layer)](max_cache_len=max_cache_len, **states)
                row.places, self.layers[i] = self.places, row

    def _make_state(self, *args: Any) -> StaticState:
        return VerifyState(self._window, *args)

    def begin(self, columns: int) -> None:
        """The prompt is there, ``columns`` of it with its padding."""
        slots = self.recurrent.slots
        self.places.ends = torch.full(slots.shape, columns, dtype=torch.long, device=slots.device)
        stay(self.places.ends)

    def accept(self, n: Tensor) -> None:
        """Of the last step's tokens the first ``n [B]`` (int32) stay."""
        assert self.places.ends is not None
        self.recurrent.accept(n)
        self.places.ends.add_(n)


def check_static(model: PreTrainedModel) -> None:
    """Raises ValueError where the drafts of ``model`` cannot be verified with fixed memory."""
    if getattr(model, "_replayssm", None) is None:
        raise ValueError(f"replayssm: static=True needs a model that is attached; {type(model).__name__} is not")
    if "cache" not in inspect.signature(type(model).forward).parameters:
        raise ValueError(f"replayssm: static=True needs transformers 5.24 or newer; got {transformers.__version__}")
    try:
        check_trees(model)  # its conditions are ours: attention that takes positions and a mask
    except ValueError:
        kind = model.config.get_text_config(decoder=True).model_type
        raise ValueError(
            f"replayssm: static=True is not known for {kind} with {model.config._attn_implementation} attention: it "
            "needs attention that takes positions and a mask, and counts no columns; leave it out"
        ) from None
    odd = {type(layer).__name__ for layer in StaticReplayCache(model, 1).layers if type(layer) not in CAPTURED}
    if odd:
        raise ValueError(f"replayssm: static=True is not known for layers of type {', '.join(sorted(odd))}")


class StaticRunner:
    """As :class:`replayssm.hf.runner.Runner`, with fixed memory for ``tokens`` new tokens a row. On CUDA steps are
    compiled and captured."""

    def __init__(self, model: PreTrainedModel, window: int, tokens: int) -> None:
        check_static(model)
        self.model, self.window, self.tokens = model, window, tokens
        self.hidden = None
        self.live: list[int] = []  # the rows of the cache that go on
        self._fed = 0

    @property
    def device(self) -> torch.device:
        """Where tokens go."""
        return self.model.get_input_embeddings().weight.device  # pyright: ignore

    def prefill(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Feeds the first tokens of all rows, at least one each; returns the logits ``[B, vocabulary]`` after these."""
        T = max(map(len, texts))
        length = -(-(T + self.tokens + self.window) // LENGTH) * LENGTH
        self.cache = VerifyCache(self.model, length, self.window)
        self.pads = torch.tensor([T - len(text) for text in texts], device=self.device)
        tokens = torch.tensor([[0] * (T - len(text)) + list(text) for text in texts], device=self.device)
        at = torch.arange(T, device=self.device) - self.pads[:, None]
        known = inspect.signature(type(self.model).forward).parameters
        last: dict[str, Any] = dict(logits_to_keep=1) if "logits_to_keep" in known else {}  # not of the whole prompt
        with torch.no_grad():
            out = self.model(
                tokens, attention_mask=(at >= 0).long(), position_ids=at.clamp(min=0), cache=self.cache, use_cache=True,
                **last,
            )  # fmt: skip
        self.cache.begin(T)
        self.live = list(range(len(texts)))
        self._index = torch.tensor(self.live, device=self.device)
        self._run = self._stepper()
        self._columns = torch.arange(self.cache.max_cache_len, device=self.device)
        self._places = torch.arange(self.window, device=self.device)
        return out.logits[:, -1]

    def step(self, tokens: Tensor, real: Sequence[int] | None = None) -> Tensor:
        """Feeds ``tokens [B, T <= window]``; returns the logits ``[B, T, vocabulary]`` after each. real: how many of
        them are any in each row; what fills it up behind these gets no later position."""
        ends, T = self.cache.places.ends, tokens.shape[1]
        assert ends is not None
        all_tokens = torch.zeros(ends.numel(), self.window, dtype=torch.long, device=self.device)
        all_tokens[self._index, :T] = tokens.to(self.device)
        last = torch.zeros_like(ends)
        last[self._index] = torch.tensor([T] * len(self.live) if real is None else list(real), device=self.device) - 1
        at = torch.minimum(self._places, last[:, None])
        seen = self._columns <= (ends[:, None] + self._places)[:, :, None]
        mask = attention_mask(seen & (self._columns >= self.pads[:, None, None]), self.model.dtype)
        inputs: dict[str, Any] = dict(
            input_ids=all_tokens, attention_mask=mask, position_ids=(ends - self.pads)[:, None] + at, use_cache=True
        )
        with torch.no_grad():
            out = self._run(self.cache, inputs)
        self._fed = T
        return out.logits[self._index, :T]  # a copy: the next step writes there

    def _stepper(self) -> Callable[[VerifyCache, dict[str, Any]], Any]:
        """What runs a step's forward."""
        if self.device.type != "cuda":
            model = self.model  # not through self, which holds the cache
            return lambda cache, inputs: model(cache=cache, **inputs)
        attachment: Any = self.model._replayssm
        attachment.compiled = attachment.compiled or Compiled(self.model)
        return CapturedStep(attachment.compiled)

    def take_back(self, n: Sequence[int]) -> None:
        """Takes back the last ``n[b]`` of the step's tokens of each row; to be called after every step."""
        stay = torch.zeros(self.pads.numel(), dtype=torch.int32)
        stay[self.live] = self._fed - torch.tensor(n, dtype=torch.int32)
        self.cache.accept(stay.to(self.device))

    def select(self, rows: Sequence[int]) -> None:
        """Goes on with these rows only."""
        self.live = [self.live[row] for row in rows]
        self._index = torch.tensor(self.live, device=self.device)
