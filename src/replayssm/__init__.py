"""ReplaySSM: hybrid language models decoded from a checkpoint of each state and a ring of recent inputs.

    S = S * exp(g);  d = v - S @ k  (delta rules)  or  v;  S = S + w * outer(d, k);  o = S @ q

Nothing optional is imported here; what needs transformers is imported at its first use.
"""

from typing import TYPE_CHECKING, Any

from replayssm.layer import LayerSpec, LayerState
from replayssm.ops import commit, copy, decode, fold, reset, rewind, seed, verify
from replayssm.pool import StatePool
from replayssm.recurrence import GDN, KDA, MAMBA2, Recurrence, recurrence
from replayssm.ring import Ring
from replayssm.speculative import Sampling

if TYPE_CHECKING:
    from replayssm.hf import ReplayCache, StaticReplayCache, attach, detach, generate

__version__ = "0.1.0"

__all__ = [
    "GDN", "KDA", "MAMBA2", "LayerSpec", "LayerState", "Recurrence", "ReplayCache", "Ring", "Sampling", "StatePool",
    "StaticReplayCache", "attach", "commit", "copy", "decode", "detach", "fold", "generate", "recurrence", "reset",
    "rewind", "seed", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("ReplayCache", "StaticReplayCache", "attach", "detach", "generate"):
        from replayssm import hf

        return getattr(hf, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
