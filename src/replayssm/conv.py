"""The short causal convolution before a recurrent layer, on the same cursors as the ring.

Logical row ``i`` of a slot's window is the convolution's input at that token, at column ``(head + i) % C``. ``C``
divides ``R``, so that the ring's ``head`` (mod R) is also right mod C, and is at least ``W - 1 + window``: the
``W - 1`` inputs before the draft rows and the draft rows themselves. A commit, a rollback and a fold move the ring's
cursors and, with them, the window; no column is ever shifted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm import checks
from replayssm.backends import triton
from replayssm.ring import Ring, without_padding


def columns(R: int, width: int, window: int) -> int:
    """Columns of a window: the smallest divisor of ``R`` that holds ``width - 1 + window``."""
    need = width - 1 + window
    if need > R:
        raise ValueError(f"conv: width={width} with window={window} needs {need} columns, more than R={R} rows")
    return next(c for c in range(need, R + 1) if R % c == 0)


@dataclass(frozen=True)
class ConvWindow:
    """The last inputs of one convolution, for all slots: ``x [N, channels, C]``, of which a column's channels are
    neighbours, so that a step writes its own columns only; ``width``: taps W."""

    ring: Ring
    x: Tensor
    width: int

    @staticmethod
    def build(ring: Ring, channels: int, width: int, dtype: torch.dtype) -> ConvWindow:
        """Allocates zero windows for all slots of ``ring``."""
        C = columns(ring.R, width, ring.window)
        x = torch.zeros(ring.N, C, channels, dtype=dtype, device=ring.head.device)
        return ConvWindow(ring, x.transpose(1, 2), width)

    def convolve(
        self, new: Tensor, slots: Tensor, weight: Tensor, bias: Tensor | None = None, silu: bool = False
    ) -> Tensor:
        """Records the inputs ``new [B, channels, T]`` as :meth:`extend` does, and returns their causal convolution,
        ``[B, channels, T]``, with ``weight [channels, W]`` and ``bias [channels]``.

        Rounded to weight's dtype, then with ``silu`` ``y / (1 + exp(-y))``, then to new's. It has no gradient. slots:
        int32 ``[B]``, each at most once. On a GPU with Triton one launch; under torch.compile one node of the graph.
        """
        if tuple(weight.shape) != (new.shape[1], self.width) or (bias is not None and bias.shape != weight.shape[:1]):
            raise ValueError(
                f"conv: expected weight [channels={new.shape[1]}, W={self.width}] and bias [channels]; got "
                f"{tuple(weight.shape)} and {None if bias is None else tuple(bias.shape)}"
            )
        self._check(new, slots)
        new, weight, bias = new.detach(), weight.detach(), None if bias is None else bias.detach().to(weight.dtype)
        if new.shape[2] == 0:
            return torch.empty_like(new)
        if not torch.compiler.is_compiling():
            return self._convolve(new, slots, weight, bias, silu)
        ring = self.ring
        geometry = [ring.R, ring.window, ring.limit, ring.most]
        out = torch.ops.replayssm.convolve(new, self.x, weight, bias, slots, [ring.head, ring.count], geometry, silu)
        return out.transpose(1, 2)

    def _convolve(self, new: Tensor, slots: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        checks.check_slots("conv", slots, self.ring.N, self.x.device)
        fits = new.shape[2] <= self.ring.window and torch.float64 not in (new.dtype, self.x.dtype, weight.dtype)
        if fits and triton.unusable(self.x.device) is None:
            ring = self.ring
            return triton.convolve(new, self.x, weight, bias, slots, ring.head, ring.count, silu).transpose(1, 2)
        y = F.conv1d(self.extend(new, slots).to(weight.dtype), weight[:, None], bias, groups=weight.shape[0])
        return (F.silu(y) if silu else y).to(new.dtype)

    def extend(self, new: Tensor, slots: Tensor) -> Tensor:
        """Records the inputs ``new [B, channels, T]`` as draft rows; returns ``[B, channels, W - 1 + T]``, with the
        ``W - 1`` inputs before them in front. Padding slots (< 0) record nothing and see zeros.

        Of more than C new inputs the last C are kept, so up to ``C - (W - 1)`` of a long append can be rolled back.
        """
        self._check(new, slots)
        C, T = self.x.shape[2], new.shape[2]
        full = torch.cat([self.before(slots).to(new.dtype), new], 2)
        head, count = self.ring.at(slots)
        column = ((head + count)[:, None] + torch.arange(max(0, T - C), T, device=new.device)) % C
        self._put(slots, column, new[:, :, max(0, T - C) :])
        return full

    def before(self, slots: Tensor) -> Tensor:
        """The ``W - 1`` inputs before the next, ``[B, channels, W - 1]``; zeros for padding slots (< 0)."""
        head, count = self.ring.at(slots)
        column = ((head + count)[:, None] + torch.arange(1 - self.width, 0, device=slots.device)) % self.x.shape[2]
        x = self.x[slots.clamp(min=0).long()[:, None], :, column].transpose(1, 2)
        return x.masked_fill((slots < 0)[:, None, None], 0)

    def seed(self, last: Tensor, slots: Tensor) -> None:
        """Sets the inputs right before the next token from ``last [B, channels, <= C]``, newest last; zeros before."""
        C = self.x.shape[2]
        head, count = self.ring.at(slots)
        last = torch.nn.functional.pad(last, (max(0, C - last.shape[2]), 0))[:, :, -C:]
        self._put(slots, ((head + count)[:, None] + torch.arange(C, device=last.device)) % C, last)

    def _check(self, new: Tensor, slots: Tensor) -> None:
        if new.dim() != 3 or new.shape[1] != self.x.shape[1] or new.shape[0] != slots.numel():
            raise ValueError(
                f"conv: new inputs must be [B={slots.numel()}, channels={self.x.shape[1]}, T]; got {tuple(new.shape)}"
            )

    def _put(self, slots: Tensor, column: Tensor, new: Tensor) -> None:
        """Writes ``new [B, channels, n]`` at ``column [B, n]``. Padding rows repeat the first real row's write."""
        if slots.numel() == 0:
            return
        rows, index, _, alive = without_padding(slots)
        index, column = index[:, None], column[rows]
        kept = self.x[index, :, column]
        new = new.detach()[rows].transpose(1, 2).to(self.x.dtype)
        self.x[index, :, column] = torch.where(alive[:, None, None], new, kept)


@torch.library.custom_op("replayssm::convolve", mutates_args=("window",))
def _convolve(
    new: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, cursors: list[Tensor],
    geometry: list[int], silu: bool,
) -> Tensor:  # fmt: skip
    """:meth:`ConvWindow.convolve` as one node of a graph, ``[B, T, channels]``."""
    (head, count), (R, most_new, limit, most) = cursors, geometry
    conv = ConvWindow(Ring(head, count, R, most_new, limit, most), window, weight.shape[1])
    return conv._convolve(new, slots, weight, bias, silu).transpose(1, 2).contiguous()


@_convolve.register_fake
def _(new: Tensor, *args: object) -> Tensor:
    return new.new_empty(new.shape[0], new.shape[2], new.shape[1])
