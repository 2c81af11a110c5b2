"""Inputs as models make them, and guard bands around them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.recurrence import Recurrence

GUARD = 1e30  # fills guard bands; saturated where the dtype ends earlier


class Inputs(NamedTuple):
    """What one step feeds to ``verify``, in its order."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    g: Tensor

    def rows(self, index: Tensor | slice) -> Inputs:
        """The rows ``index`` of the batch."""
        return Inputs(*(x[index] for x in self))

    def tokens(self, index: Tensor | slice) -> Inputs:
        """The tokens ``index``."""
        return Inputs(*(x[:, index] for x in self))

    def guarded(self) -> Inputs:
        """Each input as a strided view between guard bands."""
        return Inputs(*(guarded(x) for x in self))


def make_inputs(
    recurrence: Recurrence,
    B: int,
    T: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
    extremes: bool = True,
) -> Inputs:
    """Inputs as a model's gates make them, on the CPU: ``q, k, v`` in ``dtype``, ``w`` and ``g`` in float32 or wider.

    Erase: normalised ``k``, normalised and scaled ``q``, ``w`` in (0, 1). Otherwise ``q`` and ``k`` of about unit norm,
    ``w`` a positive step size. ``g`` from -1e-3 to -3, evenly in its logarithm; with ``extremes``, one in eight is 0
    (nothing forgotten) and one in eight -1e4 (all forgotten: exp underflows).
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    q, k, v, w = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V), normal(B, T, HV)
    gate = (B, T, HV, K) if recurrence.channel else (B, T, HV)
    g = -(10 ** (uniform(*gate) * 3.5 - 3))
    if extremes:
        kind = uniform(*gate)
        g = g.masked_fill(kind < 1 / 8, 0).masked_fill(kind > 7 / 8, -1e4)
    if recurrence.erase:
        q, k, w = F.normalize(q, dim=-1) * K**-0.5, F.normalize(k, dim=-1), w.sigmoid()
    else:
        q, k, w = q * K**-0.5, k * K**-0.5, F.softplus(w)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Inputs(q.to(dtype), k.to(dtype), v.to(dtype), w.to(wide), g.to(wide))


def guarded(x: Tensor) -> Tensor:
    """A copy of ``x`` as a strided view into a larger buffer of :data:`GUARD`, with a band on every side: a read past
    its end shows in the result, a write past it in :func:`assert_guards`."""
    buffer = torch.full([n + 2 for n in x.shape], guard(x), dtype=x.dtype, device=x.device)
    view = buffer[tuple(slice(1, 1 + n) for n in x.shape)]
    view.copy_(x)
    return view


def assert_guards(*views: Tensor) -> None:
    """Raises AssertionError if something was written around a view made by :func:`guarded`."""
    for view in views:
        base = view._base
        assert base is not None, "not a guarded view"
        around = base.clone()
        around[tuple(slice(1, 1 + n) for n in view.shape)] = guard(view)
        if not same_bits(around, torch.full_like(around, guard(view))):
            raise AssertionError(f"a write outside of the tensor of shape {tuple(view.shape)}")


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Bitwise equality, in which NaN equals itself."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.dtype == y.dtype and torch.equal(x.contiguous().view(bits), y.contiguous().view(bits))


def guard(x: Tensor) -> float:
    """What the guard bands around ``x`` hold."""
    return min(GUARD, torch.finfo(x.dtype).max)
