"""The one recurrence behind Mamba-2, Gated DeltaNet and Kimi Delta Attention, and the two switches between them.

Per value head, with state ``S: [V, K]`` and log-decay ``g <= 0``, one token does::

    decay   S  = S * exp(g)              g: one number a head, or one a key channel
    erase   d  = v - S @ k               delta rules only; otherwise d = v
    write   S += w * outer(d, k)
    read    o  = S @ q

Sources of the three forms: Mamba-2 / SSD (Dao and Gu 2024, arXiv:2405.21060), Gated DeltaNet (Yang et al. 2024,
arXiv:2412.06464), Kimi Delta Attention (Kimi Team 2025, arXiv:2510.26692). How each model's tensors map to
``q, k, v, w, g`` is in :mod:`replayssm.gates`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Decay = Literal["head", "channel"]


@dataclass(frozen=True)
class Recurrence:
    """Which recurrence a layer runs.

    decay: ``"head"``, one log-decay a value head and token (``g: [B, T, HV]``), or ``"channel"``, one a key channel
        (``g: [B, T, HV, K]``).
    erase: whether the state's own prediction ``S @ k`` is subtracted from ``v`` before the write (the delta rule).
    """

    decay: Decay
    erase: bool

    def __post_init__(self) -> None:
        if self.decay not in ("head", "channel"):
            raise ValueError(f"Recurrence: decay must be 'head' or 'channel'; got {self.decay!r}")

    @property
    def channel(self) -> bool:
        """True where the decay is per key channel."""
        return self.decay == "channel"

    @property
    def name(self) -> str:
        """The registered name, or the two switches spelled out."""
        for name, recurrence in RECURRENCES.items():
            if recurrence == self:
                return name
        return f"decay={self.decay},erase={self.erase}"


MAMBA2 = Recurrence(decay="head", erase=False)
GDN = Recurrence(decay="head", erase=True)
KDA = Recurrence(decay="channel", erase=True)

RECURRENCES: dict[str, Recurrence] = {"mamba2": MAMBA2, "gdn": GDN, "kda": KDA}


def recurrence(name: str) -> Recurrence:
    """The recurrence registered under ``name``; raises ValueError with the valid names otherwise."""
    try:
        return RECURRENCES[name]
    except KeyError:
        raise ValueError(f"unknown recurrence {name!r}; valid: {', '.join(RECURRENCES)}") from None
