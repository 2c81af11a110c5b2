"""The decode step of ``generate(..., cache_implementation="static")`` on a GPU: compiled, then a CUDA graph.

Stock compiles the model with CUDA graphs of torch's making, and checks at every step whether what was compiled still
holds: milliseconds for a model of many layers, more than a small batch's step takes. Here the graph belongs to a cache,
so within a text nothing that it depends on changes but the tensors that generate passes in; these are copied to where
the graph reads them. That is so where layers keep all their counts on the device, see :data:`CAPTURED`. What can change
between texts is looked at when one begins, see :func:`signature`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.cache_utils import (
    DummyLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
)

from replayssm.hf.attention import grouped_attention, latent_layers
from replayssm.hf.experts import grouped, grouped_experts
from replayssm.hf.merged import Merging

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from replayssm.hf.static import StaticReplayCache

_log = logging.getLogger("replayssm")

CAPTURED = (StaticLayer, LinearAttentionLayer, LinearAttentionAndStaticFullAttentionLayer, DummyLayer)
"""Layers of a cache whose steps are the same whatever the length. Sliding layers, say, count on the host."""

WARM = 2
"""Steps before the capture: the first compiles, and all of them allocate what is to stay."""

LENGTHS = 64  # caches of so many lengths and batches before torch stops compiling


def refuses(cache: StaticReplayCache, inputs: dict[str, Any]) -> str | None:
    """Why a forward with ``inputs`` is not captured; None where it is."""
    odd = {type(layer).__name__ for layer in cache.layers if type(layer) not in CAPTURED}
    if odd:
        return f"the cache has layers that count on the host ({', '.join(sorted(odd))})"
    if inputs.get("output_hidden_states") or inputs.get("output_attentions"):
        return "hidden states or attentions are asked for, and a graph would overwrite those of the step before"
    return None


def signature(model: PreTrainedModel) -> tuple[Any, ...]:
    """What a captured graph holds of a model beside its inputs: where its parameters and buffers lie, and its hooks,
    which a graph does not call."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return *((name, id(x), x.data_ptr()) for name, x in tensors), _hooks(model)


def _hooks(model: PreTrainedModel) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


class CapturedStep:
    """Forward passes of as many tokens each with one cache; ``forward``: a :class:`Compiled`."""

    def __init__(self, forward: Compiled) -> None:
        self.forward, self.device = forward, forward.model.device
        self.turn = -1  # of the cache, when the signature was last compared
        self.signature: tuple[Any, ...] = ()
        self.key: Any = None
        self.steps = 0  # with this key, up to the capture
        self.graph: torch.cuda.CUDAGraph | None = None
        self.refused: str | None = None  # what came up at the capture

    def __call__(self, cache: StaticReplayCache, inputs: dict[str, Any]) -> Any:
        """The model's output for ``inputs``; its logits are overwritten by the next call."""
        inputs = {name: x for name, x in inputs.items() if x is not cache}
        if self.refused:
            return self.forward(cache=cache, **inputs)
        leaves, spec = tree_flatten(inputs)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        key = spec, [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in leaves]
        if self.graph is not None and cache.recurrent.turn != self.turn:
            self.turn = cache.recurrent.turn
            if signature(self.forward.model) != self.signature:
                self.key = None
        if key != self.key:
            self.key, self.steps, self.graph = key, 0, None
        if any(x.device != self.device for x in tensors):  # its content would be in the graph
            return self.forward(cache=cache, **inputs)
        if self.graph is None and self.steps < WARM:
            self.steps += 1
            return self.forward(cache=cache, **inputs)
        if self.graph is None:
            if _hooks(self.forward.model) > 1:  # the one is ours
                return self._refuse("the model's modules have hooks, which a graph does not call", cache, inputs)
            opened = cache.recurrent._open
            try:
                self._capture(cache, leaves, spec)  # which runs nothing, so that nothing is lost where it fails
            except RuntimeError as error:
                cache.recurrent._open = opened
                return self._refuse(f"{type(error).__name__}: {str(error).splitlines()[0]}", cache, inputs)
            cache.recurrent.tell_step(f"one CUDA graph; {self.forward.explain(cache, inputs)}")
        for x, new in zip(self._inputs, tensors, strict=True):
            x.copy_(new)
        assert self.graph is not None
        self.graph.replay()
        return self._type(**self._fields, cache=cache)

    def _refuse(self, why: str, cache: StaticReplayCache, inputs: dict[str, Any]) -> Any:
        self.refused = why
        _log.warning("replayssm: steps are compiled, but not captured as one CUDA graph: %s", why)
        cache.recurrent.tell_step(f"not captured ({why}); {self.forward.explain(cache, inputs)}")
        return self.forward(cache=cache, **inputs)

    def _capture(self, cache: StaticReplayCache, leaves: list[Any], spec: Any) -> None:
        own = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        graph = torch.cuda.CUDAGraph()
        self.turn, self.signature = cache.recurrent.turn, signature(self.forward.model)
        with (
            torch.cuda.device(self.device),
            torch.cuda.graph(graph, stream=torch.cuda.Stream(self.device), capture_error_mode="thread_local"),
        ):
            output = self.forward(cache=cache, **tree_unflatten(own, spec))
        self._inputs = [x for x in own if isinstance(x, Tensor)]
        # Without the cache, which holds this object: a cycle would keep a finished cache's memory.
        self._type, self._fields = type(output), {name: x for name, x in output.items() if x is not cache}
        self.graph = graph


class Compiled:
    """The forward of ``model``, compiled for a few tokens; ``inner``: see :class:`replayssm.hf.merged.Merging`."""

    def __init__(self, model: PreTrainedModel, inner: Callable[..., Any] | None = None) -> None:
        self.model, self.inner = model, inner
        self.merging: Merging | None = Merging(model, inner)
        self._run = self._compile()

    def _compile(self) -> Callable[..., Any]:
        assert self.merging is not None
        return torch.compile(self.model.__call__, dynamic=False, backend=self.merging)

    def explain(self, cache: StaticReplayCache, inputs: dict[str, Any]) -> str:
        """What a step with these inputs has in place of stock's."""
        merged = f"{self.merging.groups} groups of projections merged" if self.merging else "no projections merged"
        parts = [f"compiled, {merged}"]
        if latent := len(latent_layers(self.model)):
            parts.append(f"{latent} layers attend to latents")
        if grouped(self.model, inputs | {"cache": cache}):
            parts.append("tokens grouped by expert")
        elif self.merging is not None and self.merging.in_place:
            parts.append("experts read in place")
        return ", ".join(parts)

    def __call__(self, **inputs: Any) -> Any:
        """The model's output."""
        if self.merging is not None and not self.merging.valid:
            self.merging = Merging(self.model, self.inner)
            self._run = self._compile()
        # Each length of a cache is compiled for; torch would stop at eight and go on in eager mode.
        with (
            grouped_attention(self.model),
            grouped_experts(self.model, inputs),
            torch._dynamo.config.patch(recompile_limit=LENGTHS),
        ):
            try:
                return self._run(**inputs)
            except BackendCompilerFailed as error:
                # Merging leans on how torch hands graphs over. Where it fails before anything has run, go on without.
                if self.merging is None or self.merging.compiled:
                    raise
                _log.warning("replayssm: projections are not merged: %s", str(error).splitlines()[0])
                self.merging, self._run = None, torch.compile(self.model.__call__, dynamic=False)
                return self._run(**inputs)
