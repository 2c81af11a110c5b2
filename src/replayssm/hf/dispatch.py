"""Replaces, in a modeling module of transformers, the functions that its mixers call: a handle in place of the state
goes to the adapter, anything else to the original, untouched. Counted, so that the last removal undoes it."""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from replayssm.hf.adapters import ADAPTERS, Call
from replayssm.hf.handle import ConvHandle, Handle

_CHUNK = (
    "query", "key", "value", "g", "beta", "chunk_size", "initial_state", "output_final_state",
    "use_qk_l2norm_in_kernel", "kwargs",
)  # fmt: skip
_ONE = tuple(name for name in _CHUNK if name != "chunk_size")

PARAMETERS: dict[str, tuple[str, ...]] = {
    "torch_chunk_gated_delta_rule": _CHUNK,
    "torch_recurrent_gated_delta_rule": _ONE,
    "chunk_kimi_delta_attention": _CHUNK,
    "recurrent_kimi_delta_attention": _ONE,
    "mamba2_chunk_scan": (
        "hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states", "dt_softplus",
        "dt_limit", "return_final_states", "kwargs",
    ),
    "mamba2_selective_state_update": (
        "state", "hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "z", "kwargs",
    ),
    "causal_conv1d_fn": ("hidden_states", "weight", "bias", "activation", "kwargs"),
}  # fmt: skip
"""The functions replaced, with the parameters that the adapters were written for."""

FUNCTIONS = {
    "gdn": ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn"),
    "kda": ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", "causal_conv1d_fn"),
    "mamba2": ("mamba2_chunk_scan", "mamba2_selective_state_update", "causal_conv1d_fn"),
}
"""By recurrence: the function for several tokens, the one for one, and the convolution."""

_STATES = ("state", "initial_state", "initial_states", "hidden_states")  # the first of them is where a handle may be


class _Installed(NamedTuple):
    users: int
    module: ModuleType
    originals: dict[str, Callable[..., Any]]
    wrappers: dict[str, Callable[..., Any]]


_installed: dict[str, _Installed] = {}
_lock = threading.Lock()


def install(module_name: str, recurrence: str) -> None:
    """Replaces the recurrence's functions in the module, or counts one more user of them. Raises RuntimeError, changing
    nothing, where a function is not the one the adapters were written for."""
    with _lock:
        known = _installed.get(module_name)
        if known is not None:
            _installed[module_name] = known._replace(users=known.users + 1)
            return
        module = importlib.import_module(module_name)
        originals = {name: _checked(module, name) for name in FUNCTIONS[recurrence]}
        wrappers = {name: _wrapper(name, original) for name, original in originals.items()}
        for name, wrapper in wrappers.items():
            setattr(module, name, wrapper)
        _installed[module_name] = _Installed(1, module, originals, wrappers)


def uninstall(module_name: str) -> None:
    """Takes one user away; with the last, the originals are put back."""
    with _lock:
        known = _installed[module_name]
        if known.users > 1:
            _installed[module_name] = known._replace(users=known.users - 1)
            return
        del _installed[module_name]
        for name, wrapper in known.wrappers.items():
            if getattr(known.module, name) is wrapper:  # else somebody has replaced it since, and may call it
                setattr(known.module, name, known.originals[name])


def _checked(module: ModuleType, name: str) -> Callable[..., Any]:
    """The module's function, if its parameters are as expected."""
    original = getattr(module, name, None)
    expected = PARAMETERS[name]
    found: tuple[str, ...] | None = None
    if callable(original):
        found = tuple(inspect.signature(getattr(original, "forward", original)).parameters)
    if original is None or found is None or found != expected:
        got = "no such function" if found is None else f"({', '.join(found)})"
        raise RuntimeError(
            f"attach: this release of transformers is not one that replayssm knows: expected {module.__name__}.{name}"
            f"({', '.join(expected)}); got {got}"
        )
    return original


def _wrapper(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    names, adapter = tuple(p for p in PARAMETERS[name] if p != "kwargs"), ADAPTERS[name]
    position = names.index(next(p for p in _STATES if p in names))

    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        state = args[position] if len(args) > position else kwargs.get(names[position])
        if isinstance(state, (Handle, ConvHandle)):
            return adapter(state, Call(original, names, args, kwargs))
        return original(*args, **kwargs)

    return dispatch
