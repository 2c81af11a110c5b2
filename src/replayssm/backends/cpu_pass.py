"""The pass over a checkpoint, for the CPU kernel: BLOCK rows at a time, read for every query and key, and folded.

What bounds it is memory, so it asks for what lies ahead, evenly while it computes: a burst of requests fills the
processor's buffers for them and then holds up the arithmetic.
"""

from __future__ import annotations

from replayssm.backends import cpu_rows as rows
from replayssm.backends import cpu_vectors as vec
from replayssm.backends.cpu_rows import LINE, ROW, ZERO, jit, jit_inline

BLOCK = 8  # checkpoint rows worked on at once: as many sums as hide the latency of a multiply-add
_LINES = BLOCK * ROW // LINE  # of a float32 checkpoint, in one vector of each row


@jit_inline()
def _ask(ahead, step):
    """Prefetches the next ``step`` bytes, if any; returns the address behind them."""
    if step > 0:
        for i in range(_LINES):
            vec.prefetch(ahead + i * LINE)
    return ahead + step


@jit()
def _read_one(y, x, r0, r1, r2, r3, r4, r5, r6, r7, width, ahead, step):
    """y [BLOCK] += rows r0 .. r7 . x; asks for ``step`` bytes a vector."""
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = vec.splat(ZERO)
    for c in range(0, 4 * width, ROW):
        ahead = _ask(ahead, step)
        x_c = vec.load(x + c)
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


@jit()
def _read_two(y, z, x, u, r0, r1, r2, r3, r4, r5, r6, r7, width, ahead, step):
    """The same for two reads: y += rows . x and z += rows . u."""
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = vec.splat(ZERO)
    b0 = b1 = b2 = b3 = b4 = b5 = b6 = b7 = vec.splat(ZERO)
    for c in range(0, 4 * width, ROW):
        ahead = _ask(ahead, step)
        x_c, u_c = vec.load(x + c), vec.load(u + c)
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


@jit()
def read_block(y, stride, x, reads, r0, r1, r2, r3, r4, r5, r6, r7, width, ahead, step):
    """Row r of y, its first BLOCK numbers, += rows r0 .. r7 . row r of x, for every read r; ``stride`` of y in bytes.

    The first two reads ask for what lies ahead, ``step`` bytes a vector."""
    for r in range(0, reads - 1, 2):
        y_r, x_r = y + stride * r, x + 4 * width * r
        z_r, u_r, step_r = y_r + stride, x_r + 4 * width, 0 if r else step
        ahead = _read_two(y_r, z_r, x_r, u_r, r0, r1, r2, r3, r4, r5, r6, r7, width, ahead, step_r)
    if reads % 2:
        r = reads - 1
        y_r, x_r, step_r = y + stride * r, x + 4 * width * r, 0 if r else step
        ahead = _read_one(y_r, x_r, r0, r1, r2, r3, r4, r5, r6, r7, width, ahead, step_r)
    return ahead


@jit()
def _fold_rows(S, width, e, channel, keys, d, d_stride, n, ahead, step):
    """S [4, width] = S * e + d [n, 4]^T @ keys [n, width]: four vectors of each row stay in registers over all n.

    ``keys`` are Rows. Asks for ``step`` bytes a vector, with each of the n rows for one line."""
    for c in range(0, 4 * width, 4 * ROW):
        at, bt, ct, dt = S + c, S + c + 4 * width, S + c + 8 * width, S + c + 12 * width
        rows.prefetch(ahead + n * LINE, 4 * step // LINE + 1 - n)
        e0 = vec.load(e + (c + 0 * ROW) * channel)
        e1 = vec.load(e + (c + 1 * ROW) * channel)
        e2 = vec.load(e + (c + 2 * ROW) * channel)
        e3 = vec.load(e + (c + 3 * ROW) * channel)
        a0, a1 = vec.mul(vec.load(at), e0), vec.mul(vec.load(at + ROW), e1)
        a2, a3 = vec.mul(vec.load(at + 2 * ROW), e2), vec.mul(vec.load(at + 3 * ROW), e3)
        b0, b1 = vec.mul(vec.load(bt), e0), vec.mul(vec.load(bt + ROW), e1)
        b2, b3 = vec.mul(vec.load(bt + 2 * ROW), e2), vec.mul(vec.load(bt + 3 * ROW), e3)
        c0, c1 = vec.mul(vec.load(ct), e0), vec.mul(vec.load(ct + ROW), e1)
        c2, c3 = vec.mul(vec.load(ct + 2 * ROW), e2), vec.mul(vec.load(ct + 3 * ROW), e3)
        d0, d1 = vec.mul(vec.load(dt), e0), vec.mul(vec.load(dt + ROW), e1)
        d2, d3 = vec.mul(vec.load(dt + 2 * ROW), e2), vec.mul(vec.load(dt + 3 * ROW), e3)
        for i in range(n):
            vec.prefetch(ahead + i * LINE)
            k, d_i = rows.row_of(keys, i) + c, d + i * d_stride
            k0, k1, k2, k3 = vec.load(k), vec.load(k + ROW), vec.load(k + 2 * ROW), vec.load(k + 3 * ROW)
            w = vec.splat(vec.number(d_i + 0))
            a0, a1 = vec.muladd(w, k0, a0), vec.muladd(w, k1, a1)
            a2, a3 = vec.muladd(w, k2, a2), vec.muladd(w, k3, a3)
            w = vec.splat(vec.number(d_i + 4))
            b0, b1 = vec.muladd(w, k0, b0), vec.muladd(w, k1, b1)
            b2, b3 = vec.muladd(w, k2, b2), vec.muladd(w, k3, b3)
            w = vec.splat(vec.number(d_i + 8))
            c0, c1 = vec.muladd(w, k0, c0), vec.muladd(w, k1, c1)
            c2, c3 = vec.muladd(w, k2, c2), vec.muladd(w, k3, c3)
            w = vec.splat(vec.number(d_i + 12))
            d0, d1 = vec.muladd(w, k0, d0), vec.muladd(w, k1, d1)
            d2, d3 = vec.muladd(w, k2, d2), vec.muladd(w, k3, d3)
        vec.store(at, a0)
        vec.store(at + ROW, a1)
        vec.store(at + 2 * ROW, a2)
        vec.store(at + 3 * ROW, a3)
        vec.store(bt, b0)
        vec.store(bt + ROW, b1)
        vec.store(bt + 2 * ROW, b2)
        vec.store(bt + 3 * ROW, b3)
        vec.store(ct, c0)
        vec.store(ct + ROW, c1)
        vec.store(ct + 2 * ROW, c2)
        vec.store(ct + 3 * ROW, c3)
        vec.store(dt, d0)
        vec.store(dt + ROW, d1)
        vec.store(dt + 2 * ROW, d2)
        vec.store(dt + 3 * ROW, d3)
        ahead += 4 * step
    return ahead


@jit()
def pass_over(S, dtype, V, K, x, reads, y, VW, e, channel, keys, d, n, due, copy, ahead, end):
    """One pass over V state rows: adds S . x to y for every read and, where due, folds the ring's rows into S.

    S: address of [V, K] of a dtype. x, y: scratch [reads, .]. Due, S becomes S * e + d^T @ keys, of n rows ``d``
    (scratch) and ``keys`` (Rows). Rows of another dtype or of broken vectors, and the last ones where BLOCK does not
    divide V, are worked on in ``copy``, BLOCK scratch rows. Asks for the memory from ``ahead`` to ``end``.
    """
    KW, size = rows.padded_(K), rows.size_of(dtype)
    step = max(0, (end - ahead) // (-(-V // BLOCK) * (KW // rows.LANES)) + 1)
    for v in range(0, V, BLOCK):
        m, at = min(BLOCK, V - v), S + v * K * size
        block = at
        if dtype != rows.FLOAT32 or KW != K or m < BLOCK:
            block = copy
            for i in range(m):
                rows.get_row(copy + i * 4 * KW, at + i * K * size, dtype, K)
        ahead = read_block(
            y + 4 * v, 4 * VW, x, reads, block, block + 4 * KW, block + 8 * KW, block + 12 * KW, block + 16 * KW,
            block + 20 * KW, block + 24 * KW, block + 28 * KW, KW, ahead, 0 if due else step,
        )  # fmt: skip
        if due:
            for i in range(0, BLOCK, 4):
                S_i, d_i = block + i * 4 * KW, d + 4 * (v + i)
                ahead = _fold_rows(S_i, KW, e, channel, keys, d_i, 4 * VW, n, ahead, step // 2)
            if block != at:
                for i in range(m):
                    rows.put_row(at + i * K * size, dtype, copy + i * 4 * KW, K)
