"""ReplaySSM: hybrid language models decoded from a checkpoint of each state and a ring of recent inputs.

    S = S * exp(g);  d = v - S @ k  (delta rules)  or  v;  S = S + w * outer(d, k);  o = S @ q

Nothing optional is imported here.
"""

from replayssm.layer import LayerSpec, LayerState
from replayssm.ops import commit, copy, decode, fold, reset, rewind, seed, verify
from replayssm.pool import StatePool
from replayssm.recurrence import GDN, KDA, MAMBA2, Recurrence, recurrence
from replayssm.ring import Ring

__version__ = "0.1.0"

__all__ = [
    "GDN", "KDA", "MAMBA2", "LayerSpec", "LayerState", "Recurrence", "Ring", "StatePool", "commit", "copy", "decode",
    "fold", "recurrence", "reset", "rewind", "seed", "verify",
]  # fmt: skip
