"""A Triton kernel that only reads: the bandwidth that every figure is a share of. Imported on a GPU only."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

VARIANTS = ((4096, 4), (8192, 8), (16384, 8))  # numbers a program, its warps


@triton.jit
def read_kernel(x, out, BLOCK: tl.constexpr):
    """A program loads ``BLOCK`` numbers of ``x`` and sums them up."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x + i), 0)
    if total == 1.25e30:  # never: keeps the loads
        tl.store(out, total)


def read(x: Tensor, out: Tensor, block: int, warps: int) -> None:
    """Reads all of ``x``, float32 of a multiple of ``block`` numbers."""
    read_kernel[(x.numel() // block,)](x, out, block, num_warps=warps, enable_fp_fusion=True)
