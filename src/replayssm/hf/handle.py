"""What stands for a recurrent layer's state in a ReplayCache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

if TYPE_CHECKING:
    from replayssm.conv import ConvWindow
    from replayssm.hf.state import RecurrentState
    from replayssm.hf.static import StaticState


NOT_ATTACHED = (
    "replayssm: a ReplayCache reached a model that is not attached; call replayssm.attach(model) first, and keep it "
    "attached while its caches are in use"
)


class Handle:
    """Given to a mixer where it asks its cache for the recurrent state, and found by the dispatch in the arguments of
    the function that the mixer calls with it. It is no tensor: any other use of it raises."""

    def __init__(self, recurrent: RecurrentState | StaticState, layer: int) -> None:
        self.recurrent, self.layer = recurrent, layer

    def to(self, target: Any = None, *args: Any, **kwargs: Any) -> Handle:
        """Itself: Kimi Delta Attention's mixers cast the state that they hand back to the cache."""
        if isinstance(target, Tensor):  # the model's own function, about to compute with it
            self._refuse()
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse()

    def __mul__(self, other: Any) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError(NOT_ATTACHED)


class ConvHandle:
    """Given to a mixer where it hands its cache the inputs ``x [B, channels, T]`` of a step's convolution."""

    def __init__(self, window: ConvWindow, x: Tensor, slots: Tensor) -> None:
        self.window, self.x, self.slots = window, x, slots

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(NOT_ATTACHED)


class PathHandle(ConvHandle):
    """The same for a draft tree's step: ``windows [B, channels, T, W]``, the inputs of each token's path."""

    def __init__(self, windows: Tensor) -> None:
        self.windows = windows


def refuse_gradient(*tensors: Tensor) -> None:
    """Raises RuntimeError where a replayed step is to be differentiated."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(
            "replayssm: a replayed step has no gradient; call the model under torch.no_grad(), or with "
            "use_cache=False to train"
        )


def returned(state: Any) -> Any:
    """What a mixer hands back to its cache, which must be the handle that it got."""
    if not isinstance(state, Handle):
        raise RuntimeError(
            "replayssm: a ReplayCache got a state from a model that is not attached; call replayssm.attach(model)"
        )
    return state
