"""The oracle's rule, the same everywhere and with no tolerance chosen by hand.

Against the recurrence in float64,

    error <= 2 * error of the plain recurrence in the same dtypes + floor

where an error is the largest absolute difference and the floor is eps of the compared dtype times the largest absolute
value of the oracle: one rounding at the top of the range, which two correct implementations may do differently.
In float64 the plain recurrence would be its own oracle. There its float32 run stands in, with its error scaled by
eps(float64) / eps(float32): rounding errors are proportional to eps, and the inputs made here are exact in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.layer import LayerSpec, LayerState
from replayssm.recurrence import Recurrence
from replayssm.testing.inputs import Inputs


def plain(
    recurrence: Recurrence, S: Tensor, inputs: Inputs, wide: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The plain recurrence, vectorised over rows and heads: what an engine without a ring computes.

    ``S [B, HV, V, K]``. Arithmetic in ``wide``, outputs in v's dtype, the state rounded to S's dtype after every token.
    Returns the outputs ``[B, T, HV, V]`` and all states, ``[T + 1, B, HV, V, K]`` with S first.
    """
    q, k, v, w, g = (x.to(wide) for x in inputs)
    T, group = v.shape[1], v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    g = g if recurrence.channel else g[..., None]
    states, out = [S], torch.zeros_like(inputs.v)
    for t in range(T):
        S = states[-1].to(wide) * g[:, t, :, None].exp()
        d = v[:, t] - (S @ k[:, t, :, :, None])[..., 0] if recurrence.erase else v[:, t]
        S = S + (w[:, t, :, None] * d)[..., None] * k[:, t, :, None]
        out[:, t] = (S @ q[:, t, :, :, None])[..., 0].to(out.dtype)
        states.append(S.to(states[0].dtype))
    return out, torch.stack(states)


@dataclass
class Tally:
    """Largest errors seen so far, and the rule over them."""

    dtype: torch.dtype
    error: float = 0.0
    plain_error: float = 0.0
    scale: float = 0.0

    def add(self, actual: Tensor, plain: Tensor, exact: Tensor) -> None:
        """Counts ``actual`` against the float64 oracle ``exact``, beside ``plain``, in the same dtype as ``actual`` (or
        float32, standing in for float64). NaN counts as an infinite error."""
        if actual.dtype != self.dtype or exact.dtype != torch.float64:
            raise TypeError(f"need actual in {self.dtype} and exact in float64; got {actual.dtype} and {exact.dtype}")
        if actual.shape != exact.shape or plain.shape != exact.shape:
            raise ValueError(f"shapes differ: {tuple(actual.shape)}, {tuple(plain.shape)}, {tuple(exact.shape)}")
        if exact.numel() == 0:
            return
        ratio = torch.finfo(actual.dtype).eps / torch.finfo(plain.dtype).eps if self._stand_in(plain) else 1.0
        self.error = max(self.error, _largest(actual.double() - exact))
        self.plain_error = max(self.plain_error, ratio * _largest(plain.double() - exact))
        self.scale = max(self.scale, _largest(exact))

    @property
    def allowed(self) -> float:
        """``2 * error of plain + eps * largest value``."""
        return 2 * self.plain_error + torch.finfo(self.dtype).eps * self.scale

    @property
    def ok(self) -> bool:
        """The rule. It holds for finite numbers only: where plain overflows, nothing can be said."""
        return self.error <= self.allowed < math.inf

    def check(self, what: str = "") -> None:
        """Raises AssertionError where the rule is broken."""
        if not self.ok:
            raise AssertionError(
                f"{what or 'result'}: error {self.error:.3g} against the float64 oracle; allowed {self.allowed:.3g}, "
                f"twice that of the plain recurrence ({self.plain_error:.3g}) and one rounding of {self.scale:.3g} in "
                f"{self.dtype}"
            )

    def _stand_in(self, plain: Tensor) -> bool:
        return self.dtype == torch.float64 and plain.dtype == torch.float32


def _largest(x: Tensor) -> float:
    return float(x.abs().nan_to_num(nan=float("inf")).max())


def assert_close_to_oracle(actual: Tensor, plain: Tensor, exact: Tensor, what: str = "") -> None:
    """The rule for one tensor; see the module's docstring and :meth:`Tally.add`."""
    tally = Tally(actual.dtype)
    tally.add(actual, plain, exact)
    tally.check(what)


class Oracle:
    """Two plain recurrences that follow the sequences of a layer, one state a slot: one in float64, one in the layer's
    dtypes (see the module's docstring for float64 layers)."""

    def __init__(self, spec: LayerSpec, N: int, dtype: torch.dtype | None = None) -> None:
        """``dtype``: of the layer's inputs and outputs, ``spec.input_dtype`` by default."""
        self.recurrence = spec.recurrence
        self.exact = torch.zeros(N, spec.HV, spec.V, spec.K, dtype=torch.float64)
        dtype = dtype or spec.input_dtype
        self._stand_in = torch.float64 == spec.state_dtype == dtype
        self.same = self.exact.to(torch.float32 if self._stand_in else spec.state_dtype)
        self.wide = torch.float32 if self._stand_in else spec.wide_dtype
        self.outputs, self.states = Tally(dtype), Tally(spec.state_dtype)
        self._drafts: tuple[Tensor, Tensor, Tensor] | None = None

    def seed(self, slots: Tensor, state: Tensor) -> None:
        """Sets the states of ``slots`` from ``state [B, HV, V, K]``, which must be exact in the layer's state dtype."""
        self.exact[slots.long()], self.same[slots.long()] = state.double(), state.to(self.same.dtype)

    def verify(self, inputs: Inputs, slots: Tensor, out: Tensor) -> None:
        """Follows a ``verify`` of the backend under test and counts its outputs. Padding rows must be 0."""
        pad = (slots < 0).cpu()
        out = out.cpu()
        if bool(out[pad].any()):
            raise AssertionError("the output of a padding row is not 0")
        inputs, real = Inputs(*(x.cpu()[~pad] for x in inputs)), slots.cpu()[~pad].long()
        exact, states64 = plain(self.recurrence, self.exact[real], Inputs(*(x.double() for x in inputs)), torch.float64)
        if self._stand_in:
            inputs = Inputs(*(x.float() for x in inputs))
        same, states = plain(self.recurrence, self.same[real], inputs, self.wide)
        self.outputs.add(out[~pad], same, exact)
        self._drafts = slots.cpu(), states64, states

    def commit(self, accepted: Tensor | int) -> None:
        """The first ``accepted`` of the last verify's tokens become final."""
        assert self._drafts is not None
        slots, states64, states = self._drafts
        n = torch.as_tensor(accepted).cpu().expand(slots.shape)[slots >= 0].long()
        real, row = slots[slots >= 0].long(), torch.arange(n.numel())
        self.exact[real], self.same[real] = states64[n, row], states[n, row]
        self._drafts = None

    def fold(self, layer: LayerState, slots: Tensor) -> None:
        """Counts the checkpoints of ``slots``, whose rings have just been folded."""
        real = slots[slots >= 0].long()
        self.states.add(layer.ckpt[real].cpu(), self.same[real.cpu()], self.exact[real.cpu()])

    def check(self, what: str = "") -> None:
        """Raises AssertionError where outputs or states break the rule."""
        self.outputs.check(f"{what} outputs")
        self.states.check(f"{what} states")
