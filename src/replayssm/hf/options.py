"""What ``attach`` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm.auto import FOLD_EVERY
from replayssm.layer import FLOATS


@dataclass(frozen=True)
class Options:
    """What :func:`replayssm.attach` was called with; see there."""

    fold_every: int | None = None
    window: int | None = None
    state_dtype: torch.dtype = torch.float32
    backend: str = "auto"
    exact_dt_limit: bool = False

    def __post_init__(self) -> None:
        for name in ("fold_every", "window"):
            n = getattr(self, name)
            if n is not None and n < 1:
                raise ValueError(f"attach: {name} must be at least 1, or None for the library's choice; got {name}={n}")
        if self.state_dtype not in FLOATS:
            valid = ", ".join(str(t) for t in FLOATS)
            raise ValueError(f"attach: state_dtype must be one of {valid}; got {self.state_dtype}")

    @property
    def folds(self) -> int:
        """fold_every, where a ring is needed whatever is faster."""
        return FOLD_EVERY if self.fold_every is None else self.fold_every
