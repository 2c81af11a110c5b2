"""The pass over a checkpoint, for cpu_kernels.py: BLOCK rows at a time, read by every query and key, and folded."""

from __future__ import annotations

from numba import njit

from replayssm.backends import cpu_vectors as vec
from replayssm.backends.cpu_rows import (
    FLOAT32,
    LANES,
    LINE,
    ROW,
    ZERO,
    get_row,
    padded_,
    prefetch,
    put_row,
    ring_row,
    size_of,
)

BLOCK = 8  # checkpoint rows worked on at once: as many sums as hide the latency of a multiply-add


@njit(error_model="numpy")
def _read_one(y, x, r0, r1, r2, r3, r4, r5, r6, r7, width, ahead, lines):
    """y [BLOCK] += rows r0 .. r7 . x; prefetches ``lines`` a vector."""
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = vec.splat(ZERO)
    for c in range(0, 4 * width, ROW):
        x_c = vec.load(x + c)
        ahead = prefetch(ahead, lines)
        a0 = vec.muladd(vec.load(r0 + c), x_c, a0)
        a1 = vec.muladd(vec.load(r1 + c), x_c, a1)
        a2 = vec.muladd(vec.load(r2 + c), x_c, a2)
        a3 = vec.muladd(vec.load(r3 + c), x_c, a3)
        a4 = vec.muladd(vec.load(r4 + c), x_c, a4)
        a5 = vec.muladd(vec.load(r5 + c), x_c, a5)
        a6 = vec.muladd(vec.load(r6 + c), x_c, a6)
        a7 = vec.muladd(vec.load(r7 + c), x_c, a7)
    vec.add_totals(y, a0, a1, a2, a3, a4, a5, a6, a7)
    return ahead


@njit(error_model="numpy")
def _read_two(y, z, x, u, r0, r1, r2, r3, r4, r5, r6, r7, width, ahead, lines):
    """The same for two vectors at once: y += rows . x and z += rows . u."""
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = vec.splat(ZERO)
    b0 = b1 = b2 = b3 = b4 = b5 = b6 = b7 = vec.splat(ZERO)
    for c in range(0, 4 * width, ROW):
        x_c, u_c = vec.load(x + c), vec.load(u + c)
        ahead = prefetch(ahead, lines)
        r = vec.load(r0 + c)
        a0, b0 = vec.muladd(r, x_c, a0), vec.muladd(r, u_c, b0)
        r = vec.load(r1 + c)
        a1, b1 = vec.muladd(r, x_c, a1), vec.muladd(r, u_c, b1)
        r = vec.load(r2 + c)
        a2, b2 = vec.muladd(r, x_c, a2), vec.muladd(r, u_c, b2)
        r = vec.load(r3 + c)
        a3, b3 = vec.muladd(r, x_c, a3), vec.muladd(r, u_c, b3)
        r = vec.load(r4 + c)
        a4, b4 = vec.muladd(r, x_c, a4), vec.muladd(r, u_c, b4)
        r = vec.load(r5 + c)
        a5, b5 = vec.muladd(r, x_c, a5), vec.muladd(r, u_c, b5)
        r = vec.load(r6 + c)
        a6, b6 = vec.muladd(r, x_c, a6), vec.muladd(r, u_c, b6)
        r = vec.load(r7 + c)
        a7, b7 = vec.muladd(r, x_c, a7), vec.muladd(r, u_c, b7)
    vec.add_totals(y, a0, a1, a2, a3, a4, a5, a6, a7)
    vec.add_totals(z, b0, b1, b2, b3, b4, b5, b6, b7)
    return ahead


@njit(error_model="numpy")
def read_block(y, y_stride, x, reads, r0, r1, r2, r3, r4, r5, r6, r7, width, ahead, lines):
    """Row r of y, its first BLOCK numbers, += rows r0 .. r7 . row r of x, for every read r."""
    for r in range(0, reads - 1, 2):
        y_r, x_r = y + y_stride * r, x + 4 * width * r
        ahead = _read_two(
            y_r, y_r + y_stride, x_r, x_r + 4 * width, r0, r1, r2, r3, r4, r5, r6, r7, width, ahead, lines
        )
    if reads % 2:
        r = reads - 1
        ahead = _read_one(y + y_stride * r, x + 4 * width * r, r0, r1, r2, r3, r4, r5, r6, r7, width, ahead, lines)
    return ahead


@njit(error_model="numpy")
def _fold_block(S, width, e, channel, keys, stride, first, R, d, d_stride, n, ahead, lines):
    """S [BLOCK, width] = S * e + d [n, BLOCK]^T @ keys [n, width], held in registers while going over the n rows.

    Prefetches ``lines`` a vector, and one at a time where there are enough rows: a burst would hold up the
    arithmetic."""
    for c in range(0, 4 * width, 2 * ROW):
        e0, e1, at = vec.load(e + c * channel), vec.load(e + (c + ROW) * channel), S + c
        prefetch(ahead + n * LINE, 2 * lines - n)
        s0, t0 = vec.mul(vec.load(at + 0 * width), e0), vec.mul(vec.load(at + 0 * width + ROW), e1)
        s1, t1 = vec.mul(vec.load(at + 4 * width), e0), vec.mul(vec.load(at + 4 * width + ROW), e1)
        s2, t2 = vec.mul(vec.load(at + 8 * width), e0), vec.mul(vec.load(at + 8 * width + ROW), e1)
        s3, t3 = vec.mul(vec.load(at + 12 * width), e0), vec.mul(vec.load(at + 12 * width + ROW), e1)
        s4, t4 = vec.mul(vec.load(at + 16 * width), e0), vec.mul(vec.load(at + 16 * width + ROW), e1)
        s5, t5 = vec.mul(vec.load(at + 20 * width), e0), vec.mul(vec.load(at + 20 * width + ROW), e1)
        s6, t6 = vec.mul(vec.load(at + 24 * width), e0), vec.mul(vec.load(at + 24 * width + ROW), e1)
        s7, t7 = vec.mul(vec.load(at + 28 * width), e0), vec.mul(vec.load(at + 28 * width + ROW), e1)
        for i in range(n):
            vec.prefetch(ahead + i * LINE)
            k_i, d_i = ring_row(keys, stride, first, i, R) + c, d + i * d_stride
            k0, k1 = vec.load(k_i), vec.load(k_i + ROW)
            b = vec.splat(vec.number(d_i + 0))
            s0, t0 = vec.muladd(b, k0, s0), vec.muladd(b, k1, t0)
            b = vec.splat(vec.number(d_i + 4))
            s1, t1 = vec.muladd(b, k0, s1), vec.muladd(b, k1, t1)
            b = vec.splat(vec.number(d_i + 8))
            s2, t2 = vec.muladd(b, k0, s2), vec.muladd(b, k1, t2)
            b = vec.splat(vec.number(d_i + 12))
            s3, t3 = vec.muladd(b, k0, s3), vec.muladd(b, k1, t3)
            b = vec.splat(vec.number(d_i + 16))
            s4, t4 = vec.muladd(b, k0, s4), vec.muladd(b, k1, t4)
            b = vec.splat(vec.number(d_i + 20))
            s5, t5 = vec.muladd(b, k0, s5), vec.muladd(b, k1, t5)
            b = vec.splat(vec.number(d_i + 24))
            s6, t6 = vec.muladd(b, k0, s6), vec.muladd(b, k1, t6)
            b = vec.splat(vec.number(d_i + 28))
            s7, t7 = vec.muladd(b, k0, s7), vec.muladd(b, k1, t7)
        vec.store(at + 0 * width, s0)
        vec.store(at + 0 * width + ROW, t0)
        vec.store(at + 4 * width, s1)
        vec.store(at + 4 * width + ROW, t1)
        vec.store(at + 8 * width, s2)
        vec.store(at + 8 * width + ROW, t2)
        vec.store(at + 12 * width, s3)
        vec.store(at + 12 * width + ROW, t3)
        vec.store(at + 16 * width, s4)
        vec.store(at + 16 * width + ROW, t4)
        vec.store(at + 20 * width, s5)
        vec.store(at + 20 * width + ROW, t5)
        vec.store(at + 24 * width, s6)
        vec.store(at + 24 * width + ROW, t6)
        vec.store(at + 28 * width, s7)
        vec.store(at + 28 * width + ROW, t7)
        ahead += 2 * lines * LINE
    return ahead


@njit(error_model="numpy")
def pass_over(S, dtype, V, K, x, reads, y, VW, e, channel, keys, stride, first, R, d, n, due, rows, ahead, end):
    """Adds S . x to y for every read and, where due, folds the ring's rows into S: one pass over V state rows of a
    head.

    Rows of another dtype or of broken vectors, and the last ones where BLOCK does not divide V, are worked on in the
    copy
    ``rows``. Prefetches evenly from ``ahead`` to ``end``.
    """
    KW, size = padded_(K), size_of(dtype)
    vectors = -(-V // BLOCK) * (KW // LANES) * (1 if due else (reads + 1) // 2)
    lines = (end - ahead + vectors * LINE - 1) // (vectors * LINE)
    for v in range(0, V, BLOCK):
        m = min(BLOCK, V - v)
        at = S + v * K * size
        block = at
        if dtype != FLOAT32 or KW != K or m < BLOCK:
            block = rows
            for i in range(m):
                get_row(rows + i * 4 * KW, at + i * K * size, dtype, K)
        ahead = read_block(
            y + 4 * v, 4 * VW, x, reads, block, block + 4 * KW, block + 8 * KW, block + 12 * KW, block + 16 * KW,
            block + 20 * KW, block + 24 * KW, block + 28 * KW, KW, ahead, 0 if due else lines,
        )  # fmt: skip
        if due:
            d_v = d + 4 * v
            ahead = _fold_block(block, KW, e, channel, keys, stride, first, R, d_v, 4 * VW, n, ahead, lines)
            if block != at:
                for i in range(m):
                    put_row(at + i * K * size, dtype, rows + i * 4 * KW, K)
