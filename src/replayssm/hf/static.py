"""The cache of an attached model for ``generate(..., cache_implementation="static")``: fixed memory, so that a decode
step is one graph that torch.compile builds once, and CUDA graphs replay.

Attention layers are stock's, which have fixed addresses already; convolutions lie on the ring's cursors. What
:class:`ReplayCache` counts on the host, to take drafts back and to absorb prompts, is left out here: a step of one
token is replayed, one of more is absorbed, and cursors are moved on the device by the last recurrent layer. So nothing
of a step depends on a number that changes from step to step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin, StaticCache

from replayssm import ops
from replayssm.auto import fold_every
from replayssm.conv import ConvWindow
from replayssm.hf.captured import CapturedStep
from replayssm.hf.handle import ConvHandle, Handle, refuse_gradient, returned
from replayssm.hf.options import Options
from replayssm.hf.reports import describe, explain_state
from replayssm.hf.state import Step
from replayssm.layer import LayerSpec, LayerState
from replayssm.pool import StatePool

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LENGTH = 64
"""Static caches that are not asked for by hand are made for a multiple of as many tokens: each length is compiled for.
"""


def static_arguments(device: torch.device) -> dict[str, Any]:
    """Arguments of ``generate``, attached or not, for a static cache; compiled where that is made for, on CUDA."""
    return {"cache_implementation": "static", "disable_compile": device.type != "cuda"}


class StaticState:
    """The pool behind one cache: slot ``b`` is row ``b`` of the batch. To the adapters what
    :class:`replayssm.hf.state.RecurrentState` is.

    started: tokens have come. Until then layers are built as they come, in a forward that is not compiled.
    report: gets the explanation of what runs.
    """

    recording = False

    def __init__(
        self,
        layers: Sequence[int],
        options: Options,
        dt_limits: Mapping[int, tuple[float, float]],
        report: dict[str, str],
    ) -> None:
        self.layers, self.options, self.dt_limits, self.report = tuple(layers), options, dict(dt_limits), report
        self.pool: StatePool | None = None
        self.states: dict[int, LayerState] = {}
        self.specs: dict[int, LayerSpec] = {}
        self.width, self.convs = 1, dict[int, ConvWindow]()
        self._inputs: dict[int, Tensor] = {}  # of convolutions, until their layer comes to its recurrence
        self.started = False
        self.purpose, self._step = "static cache", ""  # how steps run, once that is known
        self.turn = 0  # forwards that were not compiled: a text begins, or goes on after its prompt grew
        self._open = False  # one of these has not come to its end

    def plan(self, layer: int, T: int, B: int, device: torch.device) -> Step:
        """How a forward of ``T`` tokens goes; at its first layer, the ring is emptied for one that is absorbed."""
        if self.pool is None:
            self._rows, self._device = B, device
        self.check_batch(B)
        if layer == self.layers[0]:
            if not torch.compiler.is_compiling():
                self.turn += 1
            if self._open:
                raise RuntimeError(
                    "StaticReplayCache: the last forward stopped before its end, so this cache is between two tokens; "
                    "reset() it or use a new one"
                )
            self._open = True
            if T > 1 and self.started:
                self._fold()  # pyright: ignore[reportAttributeAccessIssue]
        return Step(first=not self.started, tokens=T, replayed=int(T == 1))

    def conv(self, layer: int, x: Tensor, kernel: int) -> Tensor:
        """The inputs ``x [B, channels, T]`` of a mixer's own convolution: of a step a :class:`ConvHandle`; else, behind
        those before them, to be convolved by the model."""
        if self.started and x.shape[2] <= self._pool.ring.window:
            self._inputs.pop(layer, None)  # of a forward that failed before this layer's recurrence
            return ConvHandle(self.convs[layer], x, self.slots)  # pyright: ignore[reportReturnType]
        full = x
        if self.started:
            full = torch.cat([self.convs[layer].before(self.slots).to(x.dtype), x], 2)
        self.width, self._inputs[layer] = kernel, full.detach()
        return full

    def layer(self, layer: int, spec: LayerSpec) -> LayerState:
        """The layer's memory, allocated at its first call."""
        if self.pool is None:
            self._build(spec)  # pyright: ignore[reportAttributeAccessIssue]
        known = self.specs.get(layer)
        if known is None:
            self._add(layer, spec)  # pyright: ignore[reportAttributeAccessIssue]
        elif known != spec:
            raise ValueError(f"StaticReplayCache: layer {layer} was built for {known}; got {spec}")
        if layer in self._inputs:
            self._seed_conv(layer)  # pyright: ignore[reportAttributeAccessIssue]
        return self.states[layer]

    def verify(self, layer: int, q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor) -> Tensor:
        """Replays one token; see :func:`replayssm.ops.verify`."""
        refuse_gradient(q, k, v, w, g)
        return ops.verify(self.states[layer], q, k, v, w, g, slots=self.slots, backend=self._pool.backend)

    def seed(self, layer: int, state: Tensor) -> None:
        """The model's own function has absorbed tokens: its new state ``[B, HV, V, K]`` becomes the checkpoint."""
        self.states[layer].ckpt.copy_(state.detach())

    def finish(self, layer: int, step: Step) -> None:
        """The layer is through; with the last one the step ends."""
        if layer == self.layers[-1]:
            self._open = False
            if step.replayed:
                self._pool.commit(self.slots, step.tokens)
            if not self.started:
                self.started = True
                self._explain()  # pyright: ignore[reportAttributeAccessIssue]

    def reset(self) -> None:
        """Forgets the sequences; the memory stays."""
        if self.pool is not None:
            self.pool.reset(self.slots)
        self._inputs.clear()
        self.started = self._open = False

    def explain(self) -> str:
        """Which backend runs and why, the ring's geometry, and how steps run."""
        return explain_state(self) + (f"\nstep: {self._step}" if self._step else "")

    def tell_step(self, how: str) -> None:
        """Takes down how steps run."""
        if how != self._step:
            self._step = how
            self._explain()  # pyright: ignore[reportAttributeAccessIssue]

    def check_batch(self, B: int) -> None:
        """Raises ValueError where the cache was built for another number of sequences."""
        if self.pool is not None and self.pool.N != B:
            raise ValueError(
                f"StaticReplayCache: expected a batch of {self.pool.N}, for which this cache was built; got a batch of "
                f"{B}. A static cache cannot change its size: use a new one"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of checkpoints, rings and cursors."""
        return 0 if self.pool is None else self.pool.nbytes

    @property
    def _pool(self) -> StatePool:
        assert self.pool is not None
        return self.pool

    # Not for graphs: what happens once a text, and memory whose addresses are to stay.

    @torch.compiler.disable
    def _fold(self) -> None:
        self._pool.fold(self.slots)

    @torch.compiler.disable
    def _build(self, spec: LayerSpec) -> None:
        N, device, every = self._rows, self._device, self.options.fold_every
        if every is None:
            chosen = fold_every(spec, N, device)
            every, self.purpose = chosen.tokens, f"static cache; {chosen.reason}"
        with torch.inference_mode(False):
            self.pool = StatePool(N, fold_every=every, width=self.width, device=device, backend=self.options.backend)
            self.slots = torch.arange(N, dtype=torch.int32, device=device)
        stay(self.slots, self.pool.ring.head, self.pool.ring.count)

    @torch.compiler.disable
    def _add(self, layer: int, spec: LayerSpec) -> None:
        with torch.inference_mode(False):
            self.states[layer] = self._pool.add_layer(spec)
        self.specs[layer] = spec
        stay(*self.states[layer].tensors.values())

    @torch.compiler.disable
    def _seed_conv(self, layer: int) -> None:
        x = self._inputs.pop(layer)
        if layer not in self.convs:
            with torch.inference_mode(False):
                self.convs[layer] = self._pool.add_conv(x.shape[1], self.width, x.dtype)
            stay(self.convs[layer].x)
        window = self.convs[layer]
        if x.shape[2] == 1:  # a prompt of one token is replayed, so the cursors will move past it
            window.extend(x, self.slots)
        else:
            window.seed(x, self.slots)

    @torch.compiler.disable
    def _explain(self) -> None:
        self.report["explanation"] = self.explain()


def stay(*tensors: Tensor) -> None:
    """Tells torch.compile that these addresses stay, so that CUDA graphs may write there."""
    for x in tensors:
        torch._dynamo.mark_static_address(x)  # pyright: ignore[reportPrivateImportUsage]


class StaticReplayCache(StaticCache):
    """A cache of ``max_cache_len`` tokens for ``model``, which must be attached; ``generate`` makes its own with
    ``cache_implementation="static"``. It decodes forward only: no crop, no beams, no other batch than its first.
    """

    def __init__(self, model: PreTrainedModel, max_cache_len: int) -> None:
        attachment = getattr(model, "_replayssm", None)
        if attachment is None:
            raise RuntimeError(
                f"StaticReplayCache: {type(model).__name__} is not attached; call replayssm.attach(model) first"
            )
        super().__init__(config=model.config, max_cache_len=max_cache_len)
        self.max_cache_len = max_cache_len
        recurrent = [i for i, x in enumerate(self.layers) if isinstance(x, LinearAttentionCacheLayerMixin)]
        self.recurrent = self._make_state(recurrent, attachment.options, attachment.dt_limits, attachment.report)
        self._handles = {i: Handle(self.recurrent, i) for i in recurrent}
        self._model = describe(model)
        self.experts = model.get_experts_implementation()  # before generate changes it for its steps
        self.step: CapturedStep | None = None

    def _make_state(self, *args: Any) -> StaticState:
        return StaticState(*args)

    def __getstate__(self) -> dict[str, Any]:
        """A copy captures its own step."""
        return self.__dict__ | {"step": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.max_cache_len} tokens, {len(self._handles)} of {len(self.layers)} layers)"

    @property
    def nbytes(self) -> int:
        """Bytes of checkpoints, rings, convolutions and cursors; keys and values are not counted."""
        return self.recurrent.nbytes

    def explain(self) -> str:
        """Which backend runs the recurrent layers and why, the ring's geometry, and how steps run."""
        return self.recurrent.explain()

    def check_size(self, tokens: int) -> None:
        """Raises ValueError where generate cannot write a text of ``tokens`` tokens with this cache."""
        if self.max_cache_len < tokens:
            raise ValueError(
                f"generate: the StaticReplayCache holds {self.max_cache_len} tokens; this text may get {tokens}"
            )
        if all(self.is_linear) and self.recurrent.started:
            raise ValueError(
                "generate: no layer of this model has attention, so its StaticReplayCache does not know how many "
                "tokens it holds and cannot go on; reset() it, or go on with the default cache"
            )

    def check(self, model: PreTrainedModel, B: int) -> None:
        """Raises where a forward of ``model`` with a batch of ``B`` cannot go on from this cache."""
        if self._model != describe(model):
            raise ValueError(f"StaticReplayCache: made for {self._model}; got {describe(model)}")
        self.recurrent.check_batch(B)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """None for a mixer's own convolution, so that it hands over its inputs, one as well as several; another's
        state."""
        return super().get_conv_state(layer_idx, state_idx) if state_idx else None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Takes a convolution's inputs; what it returns goes to the model's ``causal_conv1d_fn``."""
        if state_idx:
            return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        return self.recurrent.conv(layer_idx, conv_states, kwargs["conv_kernel_size"])

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether tokens have come."""
        return self.recurrent.started

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The layer's :class:`Handle`, from the first call on."""
        return self._handles[layer_idx]  # pyright: ignore[reportReturnType]

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Takes the handle back; the adapter has done the work."""
        return returned(recurrent_states)

    def reset(self) -> None:
        """Forgets the sequences; the memory stays."""
        super().reset()
        self.recurrent.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Refused, as for any static cache of a hybrid."""
        raise RuntimeError("StaticReplayCache: it cannot take tokens back; use the default cache for drafts")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refused: beams run on the default cache."""
        raise RuntimeError("StaticReplayCache: it cannot reorder its rows; use the default cache for beams")
