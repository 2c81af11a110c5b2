"""Lets generate look one step late whether all texts have ended, where a :class:`StaticReplayCache` decodes on a GPU.

Otherwise the host waits for each step's tokens before it prepares the next, and the GPU for the host: about a
millisecond a step. transformers has the later look already (``DeferredStopCheck``), but takes it on Apple's GPUs only.
It costs one step more at the end, whose token is dropped, so a cache that the caller gets back is left out.
Counted, so that the last removal undoes it; releases without that class are left as they are."""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers.generation import utils

from replayssm.hf.static import StaticReplayCache

_lock = threading.Lock()
_users = 0
_original: Any = None


def install() -> None:
    """Counts one user more; with the first, generate's own test is wrapped."""
    global _users, _original
    check: Any = getattr(utils, "DeferredStopCheck", None)
    with _lock:
        _users += 1
        if _users > 1 or check is None:
            return
        original = _original = check.is_supported

        def is_supported(
            device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool, **kwargs: Any
        ) -> bool:
            ours = device.type == "cuda" and isinstance(cache, StaticReplayCache)
            if ours and not cache_is_returned and not is_assistant:
                return True
            return original(device, cache, cache_is_returned, is_assistant=is_assistant, **kwargs)

        check.is_supported = staticmethod(is_supported)


def uninstall() -> None:
    """Takes one user away; with the last, the original is put back."""
    global _users, _original
    with _lock:
        _users -= 1
        if _users == 0 and _original is not None:
            utils.DeferredStopCheck.is_supported = staticmethod(_original)  # pyright: ignore
            _original = None
