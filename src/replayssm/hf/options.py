"""What ``attach`` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm.layer import FLOATS


@dataclass(frozen=True)
class Options:
    """What :func:`replayssm.attach` was called with; see there."""

    fold_every: int = 16
    window: int | None = None
    state_dtype: torch.dtype = torch.float32
    backend: str = "auto"
    exact_dt_limit: bool = False

    def __post_init__(self) -> None:
        if self.fold_every < 1 or (self.window is not None and self.window < 1):
            raise ValueError(
                f"attach: fold_every and window must be at least 1; got fold_every={self.fold_every}, "
                f"window={self.window}"
            )
        if self.state_dtype not in FLOATS:
            valid = ", ".join(str(t) for t in FLOATS)
            raise ValueError(f"attach: state_dtype must be one of {valid}; got {self.state_dtype}")
