"""Drop-in for Hugging Face transformers: after ``attach(model)``, ``model.generate`` decodes from checkpoint and ring.

Needs transformers 5.23 or later. docs/transformers.md says how it hooks in and what differs from stock.
"""

from __future__ import annotations

import copy
import inspect
import logging
import types
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.generation.configuration_utils import GenerationMode

from replayssm.backends import names
from replayssm.hf import captured, deferred, dispatch
from replayssm.hf.cache import ReplayCache
from replayssm.hf.generation import Generation, generate
from replayssm.hf.models import SUPPORTED, ModelType, lookup
from replayssm.hf.options import Options
from replayssm.hf.static import LENGTH, StaticReplayCache

__all__ = ["SUPPORTED", "Generation", "ReplayCache", "StaticReplayCache", "attach", "detach", "explain", "generate"]

_log = logging.getLogger("replayssm")
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


class Attachment:
    """What ``attach`` leaves on a model, as ``model._replayssm``."""

    def __init__(self, model: PreTrainedModel, kind: ModelType, options: Options) -> None:
        self.kind, self.options = kind, options
        self.dt_limits = {
            module.layer_idx: tuple(module.time_step_limit)  # pyright: ignore
            for module in model.modules()
            if hasattr(module, "time_step_limit") and hasattr(module, "layer_idx")
        }
        self.parameters = tuple(inspect.signature(type(model).forward).parameters)[1:]
        self.handle = model.register_forward_pre_hook(_give_cache, with_kwargs=True)
        self.logged: set[str] = set()
        self.report: dict[str, str] = {}  # the newest cache writes what it runs on
        self.compiled: captured.Compiled | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        """Of a copied model: one user more of what is installed, and nothing of what was compiled for the other."""
        other = object.__new__(Attachment)
        memo[id(self)] = other
        other.__dict__ |= copy.deepcopy({k: x for k, x in vars(self).items() if k not in ("kind", "compiled")}, memo)
        other.kind, other.compiled = self.kind, None
        dispatch.install(self.kind.module, self.kind.recurrence.name)
        deferred.install()
        return other


def attach(
    model: PreTrainedModel,
    *,
    fold_every: int | None = None,
    window: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    backend: str = "auto",
    exact_dt_limit: bool = False,
) -> PreTrainedModel:
    """Lets ``model`` decode through a :class:`ReplayCache`; returns the model. Undone by :func:`detach`.

    fold_every: tokens between two writes of a checkpoint; None: 16, or 1 in a static cache for which
    :func:`replayssm.auto.fold_every` finds the plain recurrence faster. window: how many of the last tokens
    ``cache.crop`` can always take back; None: none in plain decoding. Where generate asks the cache to record (assisted
    decoding), as many as its number of drafts needs, if that is more. state_dtype: of the checkpoints. backend: "auto"
    or a name from ``replayssm.backends.names()``. exact_dt_limit: clamp Mamba-2's dt in every step; by default only
    where stock transformers does, in prompts.

    A model that is attached already stays as it is if the options are the same. Raises ValueError for an unsupported
    model type or option, TypeError for what is not a transformers model, and RuntimeError for a release of transformers
    whose functions are not the ones that are known, or a model that is attached with other options.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"attach: expected a transformers PreTrainedModel; got {type(model).__name__}. Of a wrapped model attach "
            "the one inside"
        )
    options = Options(fold_every, window, state_dtype, backend, exact_dt_limit)
    if backend != "auto" and backend not in names():
        raise ValueError(f"attach: unknown backend {backend!r}; valid: auto, {', '.join(names())}")
    present = getattr(model, "_replayssm", None)
    if present is not None:
        if present.options == options:
            return model
        raise RuntimeError(f"attach: the model is attached with {present.options}; detach it first to use {options}")
    kind = lookup(model.config)
    if all(type(module).__module__ != kind.module for module in model.modules()):
        raise ValueError(
            f"attach: no layer of {type(model).__name__} is from {kind.module}; code of its own is not known"
        )
    dispatch.install(kind.module, kind.recurrence.name)
    deferred.install()
    model._replayssm = Attachment(model, kind, options)  # pyright: ignore[reportArgumentType]
    if hasattr(model, "_prepare_cache_for_generation"):
        model._prepare_cache_for_generation = types.MethodType(_prepare_cache, model)  # pyright: ignore
        model.get_compiled_call = types.MethodType(_compiled_call, model)
    model._is_stateful = False  # which keeps generate from assisted decoding; this cache can roll back
    return model


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Undoes :func:`attach`; returns the model. Its ReplayCaches cannot be used any more. A model that is not attached
    is left as it is."""
    attachment = getattr(model, "_replayssm", None)
    if attachment is not None:
        attachment.handle.remove()
        if attachment.compiled is not None and attachment.compiled.merging is not None:
            attachment.compiled.merging.undo()
        for name in ("_replayssm", "_prepare_cache_for_generation", "get_compiled_call", "_is_stateful"):
            model.__dict__.pop(name, None)
        dispatch.uninstall(attachment.kind.module)
        deferred.uninstall()
    return model


def explain(model: PreTrainedModel) -> str:
    """What an attached model's newest cache runs on, and why; before the first call, what was asked for."""
    attachment = getattr(model, "_replayssm", None)
    if attachment is None:
        return f"{type(model).__name__} is not attached"
    nothing = "nothing has run yet; the backend is chosen at the first call"
    return f"{attachment.options}\n{attachment.report.get('explanation', nothing)}"


def _prepare_cache(
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> Any:
    """Stock's, and then a cache of ours in place of the empty one that it made."""
    given = next((model_kwargs[name] for name in _CACHE_NAMES if model_kwargs.get(name) is not None), None)
    if isinstance(given, StaticReplayCache):
        given.check_size(max_cache_length)
    result = type(model)._prepare_cache_for_generation(
        model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    )
    drafts = getattr(generation_config, "prompt_lookup_num_tokens", None)
    for name in _CACHE_NAMES:
        made = model_kwargs.get(name)
        if given is not None or made is None:
            continue
        if type(made) not in (DynamicCache, StaticCache) or made.offloading:
            _log_once(
                model, f"cache_implementation={generation_config.cache_implementation!r} runs on stock transformers"
            )
            continue
        if type(made) is StaticCache:
            if generation_mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
                length = -(-model._previous_max_cache_length // LENGTH) * LENGTH
                model_kwargs[name] = StaticReplayCache(model, length)
                continue
            _log_once(model, f"{generation_mode.value} does not run on a static cache but on the default one")
        cache = model_kwargs[name] = ReplayCache(model)
        if drafts:
            cache.recurrent.draft_window = drafts + 1
        if any(getattr(layer, "record_past", False) for layer in made.layers):
            cache.activate_past_recording()
    return result


def _compiled_call(model: Any, compile_config: Any) -> Callable[..., Any]:
    """Stock's, or in its place, if nothing was said of how to compile, steps that are captured: hf/captured.py."""
    stock = type(model).get_compiled_call
    if compile_config is not None or model.device.type != "cuda":
        return stock(model, compile_config)

    def forward(**inputs: Any) -> Any:
        cache = inputs.get("cache")
        ids = inputs.get("input_ids")
        if not isinstance(cache, StaticReplayCache) or ids is None or ids.shape[1] != 1 or not cache.recurrent.started:
            return stock(model, compile_config)(**inputs)
        attachment = model._replayssm
        attachment.compiled = attachment.compiled or captured.Compiled(model)
        why = captured.refuses(cache, inputs)
        if why is not None:
            _log_once(model, f"steps are compiled, but not captured as one CUDA graph: {why}")
            cache.recurrent.tell_step(f"not captured ({why})")
            return attachment.compiled(**inputs)
        if cache.step is None or cache.step.forward is not attachment.compiled:  # none, or another model's
            cache.step = captured.CapturedStep(attachment.compiled)
        return cache.step(cache, inputs)

    return forward


def _give_cache(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook: a ReplayCache where the model would make itself a DynamicCache; checks one that is given."""
    parameters = model._replayssm.parameters
    given = dict(zip(parameters, args, strict=False)) | kwargs
    present = next((given[name] for name in _CACHE_NAMES if given.get(name) is not None), None)
    if present is not None:
        inputs = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        if isinstance(present, (ReplayCache, StaticReplayCache)) and inputs is not None:
            present.check(model, inputs.shape[0])
        return None
    use_cache = given.get("use_cache")
    if use_cache is None:
        use_cache = getattr(model.config.get_text_config(decoder=True), "use_cache", True)
    name = next((name for name in _CACHE_NAMES if name in parameters), None)
    if model.training or not use_cache or name is None or name in parameters[: len(args)]:
        return None
    return args, kwargs | {name: ReplayCache(model)}


def _log_once(model: Any, what: str) -> None:
    logged = model._replayssm.logged
    if what not in logged:
        logged.add(what)
        _log.warning("replayssm: %s", what)
