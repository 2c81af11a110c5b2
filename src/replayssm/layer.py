"""What one recurrent layer keeps: the specification of its shapes, and the views that a step works on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.recurrence import RECURRENCES, Recurrence
from replayssm.ring import Ring


@dataclass(frozen=True)
class LayerSpec:
    """Shapes and dtypes of one layer.

    H key heads serve HV value heads, HV / H consecutive ones each; the state of a value head is ``[V, K]``.
    state_dtype: of the checkpoint. input_dtype: in which ring rows keep the layer's inputs; ``k`` always, ``d`` only
    without erase, where it is the input ``v`` itself. With erase ``d`` is computed, and its rounding feeds back through
    every later fold: it has float32 or wider, unless the checkpoint itself is rounded to 16 bits, which then are enough
    for it too, and for a ``g`` by channel (the drift test decides, docs/log.md). ``w`` and other ``g`` are wide.
    norm: None, or the eps of :func:`replayssm.gates.delta_qk` where q and k are given without it (erase only). Then
    ring rows keep k as it came, which 16 bits hold, and w times the factor of its norm.
    """

    recurrence: Recurrence
    H: int
    HV: int
    K: int
    V: int
    state_dtype: torch.dtype = torch.float32
    input_dtype: torch.dtype = torch.float32
    norm: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.recurrence, Recurrence):
            raise TypeError(
                f"LayerSpec: recurrence must be a Recurrence, such as {', '.join(map(str.upper, RECURRENCES))}; got "
                f"{self.recurrence!r}"
            )
        if min(self.H, self.HV, self.K, self.V) < 1 or self.HV % self.H:
            raise ValueError(
                f"LayerSpec: need H, HV, K, V >= 1 and HV a multiple of H; got H={self.H}, HV={self.HV}, K={self.K}, "
                f"V={self.V}"
            )
        for name in ("state_dtype", "input_dtype"):
            if getattr(self, name) not in FLOATS:
                valid = ", ".join(str(t).removeprefix("torch.") for t in FLOATS)
                raise ValueError(f"LayerSpec: {name} must be one of {valid}; got {getattr(self, name)}")

        if self.norm is not None and not (self.recurrence.erase and self.norm > 0):
            raise ValueError(
                f"LayerSpec: norm is an eps above 0, for a recurrence with erase; got {self.norm} for "
                f"{self.recurrence.name}"
            )

    @property
    def wide_dtype(self) -> torch.dtype:
        """Of everything that must not be rounded: float32, or float64 where inputs or state are."""
        return torch.float64 if torch.float64 in (self.state_dtype, self.input_dtype) else torch.float32

    @property
    def d_dtype(self) -> torch.dtype:
        """Of ring rows ``d``."""
        if not self.recurrence.erase:
            return self.input_dtype
        return self.state_dtype if self._narrow else self.wide_dtype

    @property
    def g_dtype(self) -> torch.dtype:
        """Of ring rows ``g``; bfloat16 where narrow, as large decays are beyond float16."""
        return torch.bfloat16 if self._narrow and self.recurrence.channel else self.wide_dtype

    @property
    def _narrow(self) -> bool:
        return self.state_dtype.itemsize == 2 and self.wide_dtype == torch.float32

    def build(self, ring: Ring) -> LayerState:
        """Allocates the layer's memory for all slots of ``ring``: a zero checkpoint and empty rings."""
        N, R, device, wide = ring.N, ring.R, ring.head.device, self.wide_dtype
        gate = (N, self.HV, R, self.K) if self.recurrence.channel else (N, self.HV, R)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return LayerState(
            recurrence=self.recurrence,
            ring=ring,
            ckpt=zeros(N, self.HV, self.V, self.K, dtype=self.state_dtype),
            k=zeros(N, self.H, R, self.K, dtype=self.input_dtype),
            d=zeros(N, self.HV, R, self.V, dtype=self.d_dtype),
            w=zeros(N, self.HV, R, dtype=wide),
            g=zeros(*gate, dtype=self.g_dtype),
            norm=self.norm,
        )


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class LayerState:
    """Views of one layer's memory, all that an op needs beside its inputs.

    ckpt ``[N, HV, V, K]``; ring rows k ``[N, H, R, K]``, d ``[N, HV, R, V]``, w ``[N, HV, R]``, g ``[N, HV, R]`` or
    ``[N, HV, R, K]``. Any strides over slots and heads; the last two dimensions of ckpt, k and d are dense.
    Rows outside the live ones may hold anything, NaN included.
    """

    recurrence: Recurrence
    ring: Ring
    ckpt: Tensor
    k: Tensor
    d: Tensor
    w: Tensor
    g: Tensor
    norm: float | None = None

    @property
    def H(self) -> int:
        """Key heads."""
        return self.k.shape[1]

    @property
    def HV(self) -> int:
        """Value heads."""
        return self.ckpt.shape[1]

    @property
    def V(self) -> int:
        """Value dimension of a head."""
        return self.ckpt.shape[2]

    @property
    def K(self) -> int:
        """Key dimension of a head."""
        return self.ckpt.shape[3]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything that belongs to a slot, slot-major: what copy, reset, export and nbytes go over."""
        return {"ckpt": self.ckpt, "k": self.k, "d": self.d, "w": self.w, "g": self.g}
