"""Which code runs a step. Every choice can be asked for by name, and :func:`explain` says why.

A backend is a module with ``verify``, ``fold`` and ``refuses(layer) -> str | None``, with ``verify_tree`` where it can
do that, and with ``normalises(layer) -> bool`` where it may have code for a layer's norm. Optional packages are
imported only when it is asked.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from replayssm.gates import l2norm, unit
from replayssm.layer import LayerState


class Backend(Protocol):
    """What ``ops`` calls; arguments are already checked."""

    @staticmethod
    def verify(
        layer: LayerState, q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor, slots: Tensor, out: Tensor
    ) -> None: ...

    @staticmethod
    def verify_tree(
        layer: LayerState, q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor, slots: Tensor, out: Tensor,
        parents: Tensor,
    ) -> None: ...  # fmt: skip

    @staticmethod
    def fold(layer: LayerState, slots: Tensor, n: Tensor) -> None: ...

    @staticmethod
    def refuses(layer: LayerState) -> str | None: ...


# In order of preference.
_MODULES = {
    "cpu": "replayssm.backends.cpu",
    "triton": "replayssm.backends.triton",
    "torch": "replayssm.backends.torch",
    "sequential": "replayssm.backends.sequential",
}


@dataclass(frozen=True)
class Choice:
    """Outcome of a choice: the backend's name and, for every other one, why it was not taken."""

    name: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        return "\n".join([f"backend: {self.name}"] + [f"  {name}: {why}" for name, why in self.reasons.items()])


def names() -> list[str]:
    """Valid values of ``backend=``, beside ``"auto"``."""
    return list(_MODULES)


def for_trees(backend: str) -> str:
    """``backend``, or ``"auto"`` where it verifies chains only: what a model attached with it takes for trees."""
    return backend if backend == "auto" or hasattr(load(backend), "verify_tree") else "auto"


@functools.cache
def load(name: str) -> Backend:
    """The backend module; raises ValueError with the valid names if there is none."""
    if name not in _MODULES:
        raise ValueError(f"unknown backend {name!r}; valid: auto, {', '.join(_MODULES)}")
    return cast(Backend, importlib.import_module(_MODULES[name]))


def explain(layer: LayerState, backend: str = "auto", tree: bool = False) -> Choice:
    """Which backend ``backend`` means for this layer, and why not the others. tree: for draft trees. Raises ValueError
    where a named backend cannot serve the layer."""
    if backend != "auto":
        why = _refuses(backend, layer, tree)
        if why is not None:
            raise ValueError(f"backend {backend!r} cannot serve this layer: {why}")
        return Choice(backend, {name: f"{backend} was asked for" for name in _MODULES if name != backend})
    reasons: dict[str, str] = {}
    chosen = ""
    for name in _MODULES:
        why = _refuses(name, layer, tree)
        if why is None and not chosen:
            chosen = name
        else:
            reasons[name] = why or f"{chosen} comes first in the order of preference"
    return Choice(chosen, reasons)


def describe(layer: LayerState, B: int, T: int = 1, backend: str = "auto") -> str:
    """:func:`explain`, and of a backend that has several ways the one it takes for ``B`` sequences of ``T`` tokens."""
    chosen = explain(layer, backend)
    way = getattr(load(chosen.name), "describe", None)
    return str(chosen) if way is None else f"{chosen}\n  {way(layer, B, T)}"


def choose(backend: str, layer: LayerState, tree: bool = False) -> Backend:
    """The backend to call for this layer; see :func:`explain`."""
    for name in _MODULES if backend == "auto" else (backend,):
        if _refuses(name, layer, tree) is None:
            return load(name)
    return load(explain(layer, backend, tree).name)  # raises: torch serves every layer, so this is a named one


def take_norm(
    backend: Backend, layer: LayerState, q: Tensor, k: Tensor, v: Tensor, w: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and w as ``backend`` takes them. Where the layer's norm is left to the call and the backend has no code
    for it, k = r k' with its factor r moves to where nothing is rounded, so that k' stays what ring rows keep::

        d = v - r S k',  S += w d (r k')^T   is   d = r d',  d' = v / r - S k',  S += (w r^2) d' k'^T
    """
    normalises = getattr(backend, "normalises", None)
    if layer.norm is None or (normalises is not None and normalises(layer)):
        return q, k, v, w
    r = unit(k, layer.norm).to(layer.w.dtype).repeat_interleave(layer.HV // layer.H, 2)
    return l2norm(q, layer.norm) * layer.K**-0.5, k, v / r[..., None], w * r * r


def _refuses(name: str, layer: LayerState, tree: bool) -> str | None:
    module = load(name)
    return "it verifies chains only" if tree and not hasattr(module, "verify_tree") else module.refuses(layer)
