"""The CPU kernel, compiled by numba: one function for every recurrence, shape and dtype.

What differs between recurrences is looked at while running, once a head or a row, never an element: ``G``, the width of
the decay (1 or K), ``X``, the reads a token (1, or 2 with erase), and the dtype code of each tensor. So there is one thing
to compile, and it is cached on disk. A task is a value head of one row of the call, or a block of its state's rows ``v``;
its steps, in the notation of backends/torch.py, are

1. decayed keys of the live ring rows, ``exp(after_i) k_i``, and their ``w_i d_i``;
2. reads ``x`` (queries, then keys) decayed to the checkpoint, their scores with the ring and with each other;
3. one pass over the checkpoint: ``y_x[v] = S0[v] . x + sum_i score_xi w_i d_i[v]``, and in a due row the folded state;
4. ``d`` by substitution, the outputs and the appended rows.

Everything is float32 between load and store. ``fastmath`` never assumes the absence of NaN or infinity; dead rows are
outside of the loops' bounds.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np
from numba import carray, cfunc, njit, types

from replayssm.backends import cpu_vectors as vec

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2  # dtype codes
LANES = vec.LANES
BLOCK = 8  # checkpoint rows worked on at once: as many sums as hide the latency of a multiply-add

_ROW = 4 * LANES
_AHEAD = 4096  # bytes that the pass over the checkpoint prefetches ahead, across the pages where hardware stops
_LINE = 64  # bytes
_ZERO, _ONE = np.float32(0), np.float32(1)


class View(ctypes.Structure):
    """A tensor: address, dtype code, and byte strides of up to three leading dimensions; what follows them is dense."""

    _fields_ = [(name, ctypes.c_int64) for name in ("address", "dtype", "s0", "s1", "s2")]  # noqa: RUF012


class Call(ctypes.Structure):
    """Arguments of one call. ``next`` and ``workers`` are counters, zero at first: tasks taken, scratch areas taken.

    slots, head, count: addresses of int32. rows: address of int64 ``[B]``, the committed rows to fold; or 0 in a step,
    where each slot's count and ``limit`` say it. X: reads a token. channel: 1 where the decay is by channel, else 0.
    block: state rows a task. scratch: address of ``floats`` float32 a worker.
    """

    _fields_ = [  # noqa: RUF012
        *((name, ctypes.c_int64) for name in ("next", "workers", "tasks", "chunk", "slots", "head", "count", "rows", "limit")),
        *((name, ctypes.c_int64) for name in ("T", "X", "H", "HV", "K", "V", "R", "channel", "block")),
        *((name, ctypes.c_int64) for name in ("scratch", "floats", "p0", "p1", "p2", "p3", "p4")),
        *((name, View) for name in ("ckpt", "ring_k", "ring_d", "ring_w", "ring_g", "q", "k", "v", "w", "g", "out")),
    ]


def padded(n: int) -> int:
    """The width of a scratch row of n numbers: whole pairs of vectors."""
    return (n + 2 * LANES - 1) // (2 * LANES) * (2 * LANES)


def scratch_floats(T: int, X: int, K: int, R: int, block: int) -> int:
    """Float32 numbers of one worker's scratch area, which :func:`_task` lays out."""
    KW, VW, RW, reads = padded(K), padded(block), padded(R), T * X
    return KW * (R + 3 * T + reads + 4 + BLOCK) + VW * (R + reads + T) + RW * (1 + reads) + padded(T * reads + T)


# --- rows of numbers: scratch ones are float32, whole pairs of vectors, with zeros behind the last number ----------------

_padded = njit(error_model="numpy")(padded)


@njit(error_model="numpy")
def _size(dtype):
    return 4 if dtype == FLOAT32 else 2


@njit(error_model="numpy")
def _at(view, i, j, l, offset):
    """Address of the number ``offset`` after [i, j, l]."""
    return view.address + i * view.s0 + j * view.s1 + l * view.s2 + offset * _size(view.dtype)


@njit(error_model="numpy")
def _row(x, stride, first, i, R):
    """Address of row i, counted from ``first`` on, of a ring of R rows."""
    row = first + i
    return x + stride * (row - R if row >= R else row)


@njit(error_model="numpy")
def _prefetch(at, lines):
    for i in range(lines):
        vec.prefetch(at + i * _LINE)
    return at + lines * _LINE


@njit(error_model="numpy")
def _number(at, dtype):
    if dtype == FLOAT32:
        return vec.number(at)
    return vec.number_bfloat16(at) if dtype == BFLOAT16 else vec.number_float16(at)


@njit(error_model="numpy")
def _put(at, dtype, x):
    if dtype == FLOAT32:
        vec.put(at, x)
    elif dtype == BFLOAT16:
        vec.put_bfloat16(at, x)
    else:
        vec.put_float16(at, x)


@njit(error_model="numpy")
def _fill(y, value, width):
    for i in range(0, 4 * width, _ROW):
        vec.store(y + i, vec.splat(value))


@njit(error_model="numpy")
def _get_row(y, at, dtype, n):
    """Scratch row y = the n numbers at an address."""
    whole = n - n % LANES
    if dtype == FLOAT32:
        for i in range(0, whole, LANES):
            vec.store(y + 4 * i, vec.load(at + 4 * i))
    elif dtype == BFLOAT16:
        for i in range(0, whole, LANES):
            vec.store(y + 4 * i, vec.load_bfloat16(at + 2 * i))
    else:
        for i in range(0, whole, LANES):
            vec.store(y + 4 * i, vec.load_float16(at + 2 * i))
    if whole < _padded(n):
        _fill(y + 4 * whole, _ZERO, _padded(n) - whole)
        for i in range(whole, n):
            vec.put(y + 4 * i, _number(at + i * _size(dtype), dtype))


@njit(error_model="numpy")
def _put_row(at, dtype, x, n):
    """Writes the n numbers of scratch row x, rounded to nearest even."""
    whole = n - n % LANES
    if dtype == FLOAT32:
        for i in range(0, whole, LANES):
            vec.store(at + 4 * i, vec.load(x + 4 * i))
    elif dtype == BFLOAT16:
        for i in range(0, whole, LANES):
            vec.store_bfloat16(at + 2 * i, vec.load(x + 4 * i))
    else:
        for i in range(0, whole, LANES):
            vec.store_float16(at + 2 * i, vec.load(x + 4 * i))
    for i in range(whole, n):
        _put(at + i * _size(dtype), dtype, vec.number(x + 4 * i))


@njit(error_model="numpy")
def _get_decay(y, view, i, j, l, channel, K):
    """The log-decay [i, j, l] as a scratch row: K numbers (channel = 1), or one vector of the same number."""
    at = _at(view, i, j, l, 0)
    if channel:
        _get_row(y, at, view.dtype, K)
    else:
        vec.store(y, vec.splat(_number(at, view.dtype)))


@njit(error_model="numpy")
def _add(y, x, width):
    for i in range(0, 4 * width, _ROW):
        vec.store(y + i, vec.add(vec.load(y + i), vec.load(x + i)))


@njit(error_model="numpy")
def _sub(y, x, width):
    for i in range(0, 4 * width, _ROW):
        vec.store(y + i, vec.sub(vec.load(y + i), vec.load(x + i)))


@njit(error_model="numpy")
def _exp(y, x, width):
    for i in range(0, 4 * width, _ROW):
        vec.store(y + i, vec.exp(vec.load(x + i)))


@njit(error_model="numpy")
def _decay(y, x, e, channel, width):
    """y = x * e; e has a number for each of x's (channel = 1), or is one vector of the same number (channel = 0)."""
    for i in range(0, 4 * width, _ROW):
        vec.store(y + i, vec.mul(vec.load(x + i), vec.load(e + i * channel)))


@njit(error_model="numpy")
def _decay_key(y, x, sums, g, width):
    """y = x * exp(sums), then sums += g."""
    for i in range(0, 4 * width, _ROW):
        sums_i = vec.load(sums + i)
        vec.store(y + i, vec.mul(vec.load(x + i), vec.exp(sums_i)))
        vec.store(sums + i, vec.add(sums_i, vec.load(g + i)))


@njit(error_model="numpy")
def _dot(x, y, width):
    a = vec.splat(_ZERO)
    for i in range(0, 4 * width, _ROW):
        a = vec.muladd(vec.load(x + i), vec.load(y + i), a)
    return vec.total(a)


@njit(error_model="numpy")
def _add_rows(y, sign, scores, x, stride, first, n, R, width):
    """y += sign * sum over n rows of scores[i] * x[i], rows of a ring."""
    for c in range(0, 4 * width, 2 * _ROW):
        a, b = vec.load(y + c), vec.load(y + c + _ROW)
        for i in range(n):
            score, at = vec.splat(sign * vec.number(scores + 4 * i)), _row(x, stride, first, i, R) + c
            a, b = vec.muladd(score, vec.load(at), a), vec.muladd(score, vec.load(at + _ROW), b)
        vec.store(y + c, a)
        vec.store(y + c + _ROW, b)


# --- the checkpoint ----------------------------------------------------------------------------------------------------


@njit(error_model="numpy")
def _read_one(y, x, r0, r1, r2, r3, r4, r5, r6, r7, width, ahead, lines):
    """y [BLOCK] += rows r0 .. r7 . x; prefetches ``lines`` a vector."""
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = vec.splat(_ZERO)
    for c in range(0, 4 * width, _ROW):
        x_c = vec.load(x + c)
        ahead = _prefetch(ahead, lines)
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
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = vec.splat(_ZERO)
    b0 = b1 = b2 = b3 = b4 = b5 = b6 = b7 = vec.splat(_ZERO)
    for c in range(0, 4 * width, _ROW):
        x_c, u_c = vec.load(x + c), vec.load(u + c)
        ahead = _prefetch(ahead, lines)
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
def _read_block(y, y_stride, x, reads, r0, r1, r2, r3, r4, r5, r6, r7, width, ahead, lines):
    """Row r of y, its first BLOCK numbers, += rows r0 .. r7 . row r of x, for every read r."""
    for r in range(0, reads - 1, 2):
        y_r, x_r = y + y_stride * r, x + 4 * width * r
        ahead = _read_two(y_r, y_r + y_stride, x_r, x_r + 4 * width, r0, r1, r2, r3, r4, r5, r6, r7, width, ahead, lines)
    if reads % 2:
        r = reads - 1
        ahead = _read_one(y + y_stride * r, x + 4 * width * r, r0, r1, r2, r3, r4, r5, r6, r7, width, ahead, lines)
    return ahead


@njit(error_model="numpy")
def _fold_block(S, width, e, channel, keys, stride, first, R, d, d_stride, n, ahead, lines):
    """S [BLOCK, width] = S * e + d [n, BLOCK]^T @ keys [n, width], held in registers while going over the n rows.

    Prefetches ``lines`` a vector, and one at a time where there are enough rows: a burst would hold up the arithmetic."""
    for c in range(0, 4 * width, 2 * _ROW):
        e0, e1, at = vec.load(e + c * channel), vec.load(e + (c + _ROW) * channel), S + c
        _prefetch(ahead + n * _LINE, 2 * lines - n)
        s0, t0 = vec.mul(vec.load(at + 0 * width), e0), vec.mul(vec.load(at + 0 * width + _ROW), e1)
        s1, t1 = vec.mul(vec.load(at + 4 * width), e0), vec.mul(vec.load(at + 4 * width + _ROW), e1)
        s2, t2 = vec.mul(vec.load(at + 8 * width), e0), vec.mul(vec.load(at + 8 * width + _ROW), e1)
        s3, t3 = vec.mul(vec.load(at + 12 * width), e0), vec.mul(vec.load(at + 12 * width + _ROW), e1)
        s4, t4 = vec.mul(vec.load(at + 16 * width), e0), vec.mul(vec.load(at + 16 * width + _ROW), e1)
        s5, t5 = vec.mul(vec.load(at + 20 * width), e0), vec.mul(vec.load(at + 20 * width + _ROW), e1)
        s6, t6 = vec.mul(vec.load(at + 24 * width), e0), vec.mul(vec.load(at + 24 * width + _ROW), e1)
        s7, t7 = vec.mul(vec.load(at + 28 * width), e0), vec.mul(vec.load(at + 28 * width + _ROW), e1)
        for i in range(n):
            vec.prefetch(ahead + i * _LINE)
            k_i, d_i = _row(keys, stride, first, i, R) + c, d + i * d_stride
            k0, k1 = vec.load(k_i), vec.load(k_i + _ROW)
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
        vec.store(at + 0 * width + _ROW, t0)
        vec.store(at + 4 * width, s1)
        vec.store(at + 4 * width + _ROW, t1)
        vec.store(at + 8 * width, s2)
        vec.store(at + 8 * width + _ROW, t2)
        vec.store(at + 12 * width, s3)
        vec.store(at + 12 * width + _ROW, t3)
        vec.store(at + 16 * width, s4)
        vec.store(at + 16 * width + _ROW, t4)
        vec.store(at + 20 * width, s5)
        vec.store(at + 20 * width + _ROW, t5)
        vec.store(at + 24 * width, s6)
        vec.store(at + 24 * width + _ROW, t6)
        vec.store(at + 28 * width, s7)
        vec.store(at + 28 * width + _ROW, t7)
        ahead += 2 * lines * _LINE
    return ahead


@njit(error_model="numpy")
def _pass(S, dtype, V, K, x, reads, y, VW, e, channel, keys, stride, first, R, d, n, due, rows, ahead, end):
    """Adds S . x to y for every read and, where due, folds the ring's rows into S: one pass over V state rows of a head.

    Rows of another dtype or of broken vectors, and the last ones where BLOCK does not divide V, are worked on in the copy
    ``rows``. Prefetches evenly from ``ahead`` to ``end``.
    """
    KW, size = _padded(K), _size(dtype)
    vectors = -(-V // BLOCK) * (KW // LANES) * (1 if due else (reads + 1) // 2)
    lines = (end - ahead + vectors * _LINE - 1) // (vectors * _LINE)
    for v in range(0, V, BLOCK):
        m = min(BLOCK, V - v)
        at = S + v * K * size
        block = at
        if dtype != FLOAT32 or KW != K or m < BLOCK:
            block = rows
            for i in range(m):
                _get_row(rows + i * 4 * KW, at + i * K * size, dtype, K)
        ahead = _read_block(
            y + 4 * v, 4 * VW, x, reads, block, block + 4 * KW, block + 8 * KW, block + 12 * KW, block + 16 * KW, block + 20 * KW, block + 24 * KW, block + 28 * KW, KW, ahead, 0 if due else lines
        )  # fmt: skip
        if due:
            d_v = d + 4 * v
            ahead = _fold_block(block, KW, e, channel, keys, stride, first, R, d_v, 4 * VW, n, ahead, lines)
            if block != at:
                for i in range(m):
                    _put_row(at + i * K * size, dtype, rows + i * 4 * KW, K)


@njit(error_model="numpy")
def _prefetch_ring(a, slot, h, v0, V, head, n):
    """Asks for the ring rows of value head h."""
    group = a.HV // a.H
    for i in range(n):
        row = head + i - (a.R if head + i >= a.R else 0)
        _prefetch(_at(a.ring_d, slot, h, row, v0), V * _size(a.ring_d.dtype) // _LINE)
        if h % group == 0:
            _prefetch(_at(a.ring_k, slot, h // group, row, 0), a.K * _size(a.ring_k.dtype) // _LINE)
        if a.channel:
            _prefetch(_at(a.ring_g, slot, h, row, 0), a.K * _size(a.ring_g.dtype) // _LINE)


@njit(error_model="numpy")
def _task(a, b, h, v0, scratch):
    """One value head of one row of the call: its state rows from v0 on, at most ``a.block``."""
    T, K, R, reads, channel = a.T, a.K, a.R, a.T * a.X, a.channel
    V, h_k = min(a.block, a.V - v0), h // (a.HV // a.H)
    slot = vec.int32(a.slots + 4 * b)
    KW, VW, RW = _padded(K), _padded(a.block), _padded(R)
    GW = KW if channel else LANES
    if slot < 0:
        _fill(scratch, _ZERO, VW)
        for t in range(T):
            _put_row(_at(a.out, b, t, h, v0), a.out.dtype, scratch, V)
        return
    head = vec.int32(a.head + 4 * slot)
    n, due = vec.int32(a.count + 4 * slot), False
    if a.rows:
        n = vec.int64(a.rows + 8 * b)
        due = n > 0
    else:
        due = n > a.limit

    # Scratch matrices: rows of KW, rows of VW, and last rows of RW or T numbers.
    copied_k = scratch
    new_q = copied_k + 4 * KW * R
    new_k = new_q + 4 * KW * T
    new_g = new_k + 4 * KW * T
    x = new_g + 4 * KW * T
    one = x + 4 * KW * reads
    e, sums, total = one + 4 * KW, one + 8 * KW, one + 12 * KW
    rows = one + 16 * KW
    copied_d = rows + 4 * KW * BLOCK
    y = copied_d + 4 * VW * R
    new_d = y + 4 * VW * reads
    weights = new_d + 4 * VW * T
    score = weights + 4 * RW
    near = score + 4 * RW * reads
    new_w = near + 4 * T * reads

    S = _at(a.ckpt, slot, h, 0, v0 * K)
    S_end = S + V * K * _size(a.ckpt.dtype)
    ahead = _prefetch(S + a.p3 + 64 * a.p4, a.p4)
    each1 = a.p1 if channel else a.p0

    # 1. Ring rows, the newest first: the log-decays after a row are then a running sum. A decay by head goes into the row's
    # weight, one by channel into its key. Rows that can be read in place are not copied.
    whole_k, whole_d = a.ring_k.dtype == FLOAT32 and K == KW, a.ring_d.dtype == FLOAT32 and V == VW
    keys, k_stride, k_first = copied_k, 4 * KW, 0
    if whole_k and not channel:
        keys, k_stride, k_first = _at(a.ring_k, slot, h_k, 0, 0), a.ring_k.s2, head
    ds, d_stride, d_first = copied_d, 4 * VW, 0
    if whole_d:
        ds, d_stride, d_first = _at(a.ring_d, slot, h, 0, v0), a.ring_d.s2, head
    _fill(sums, _ZERO, GW)
    for i in range(n - 1, -1, -1):
        row = head + i - (R if head + i >= R else 0)
        if ahead + each1 < S_end:
            ahead = _prefetch(ahead, each1 // _LINE)
        k_i, g_i = _at(a.ring_k, slot, h_k, row, 0), _at(a.ring_g, slot, h, row, 0)
        if not whole_k:
            _get_row(copied_k + i * 4 * KW, k_i, a.ring_k.dtype, K)
            k_i = copied_k + i * 4 * KW
        if not whole_d:
            _get_row(copied_d + i * 4 * VW, _at(a.ring_d, slot, h, row, v0), a.ring_d.dtype, V)
        if channel:
            if K != KW:
                _get_row(one, g_i, a.ring_g.dtype, K)
                g_i = one
            _decay_key(copied_k + i * 4 * KW, k_i, sums, g_i, KW)
        else:
            vec.put(weights + 4 * i, vec.number(sums))
            vec.put(sums, vec.number(sums) + _number(g_i, a.ring_g.dtype))
    if channel:
        for i in range(n):
            row = head + i - (R if head + i >= R else 0)
            vec.put(weights + 4 * i, _number(_at(a.ring_w, slot, h, row, 0), a.ring_w.dtype))
    else:
        vec.store(sums, vec.splat(vec.number(sums)))
        _exp(weights, weights, _padded(n))
        for i in range(n):
            row = head + i - (R if head + i >= R else 0)
            vec.put(weights + 4 * i, vec.number(weights + 4 * i) * _number(_at(a.ring_w, slot, h, row, 0), a.ring_w.dtype))
    _exp(total, sums, GW)

    # 2. This step's tokens: reads decayed to the last ring row, their scores, then decayed on to the checkpoint.
    _fill(sums, _ZERO, GW)
    for t in range(T):
        q_t, k_t, g_t = new_q + 4 * KW * t, new_k + 4 * KW * t, new_g + 4 * KW * t
        _get_row(q_t, _at(a.q, b, t, h_k, 0), a.q.dtype, K)
        _get_row(k_t, _at(a.k, b, t, h_k, 0), a.k.dtype, K)
        _get_decay(g_t, a.g, b, t, h, channel, K)
        vec.put(new_w + 4 * t, _number(_at(a.w, b, t, h, 0), a.w.dtype))
        _add(sums, g_t, GW)
        _exp(e, sums, GW)
        for r in range(t, reads, T):
            _decay(x + 4 * KW * r, q_t if r < T else k_t, e, channel, KW)
    ahead = _prefetch(ahead, a.p4)
    for r in range(reads):
        _fill(score + 4 * RW * r, _ZERO, RW)
    for i in range(0, n, BLOCK):
        r0 = _row(keys, k_stride, k_first, min(i + 0, n - 1), R)
        r1 = _row(keys, k_stride, k_first, min(i + 1, n - 1), R)
        r2 = _row(keys, k_stride, k_first, min(i + 2, n - 1), R)
        r3 = _row(keys, k_stride, k_first, min(i + 3, n - 1), R)
        r4 = _row(keys, k_stride, k_first, min(i + 4, n - 1), R)
        r5 = _row(keys, k_stride, k_first, min(i + 5, n - 1), R)
        r6 = _row(keys, k_stride, k_first, min(i + 6, n - 1), R)
        r7 = _row(keys, k_stride, k_first, min(i + 7, n - 1), R)
        lines = a.p2 if ahead + a.p2 * (KW // LANES) * reads * _LINE < S_end else 0
        ahead = _read_block(score + 4 * i, 4 * RW, x, reads, r0, r1, r2, r3, r4, r5, r6, r7, KW, ahead, lines)
    for r in range(reads):
        _decay(score + 4 * RW * r, score + 4 * RW * r, weights, 1, _padded(n))
        _decay(x + 4 * KW * r, x + 4 * KW * r, total, channel, KW)
    ahead = _prefetch(ahead, a.p4)
    for j in range(T):
        k_j, w_j = new_k + 4 * KW * j, vec.number(new_w + 4 * j)
        _fill(sums, _ZERO, GW)
        for t in range(j, T):
            if t > j:
                _add(sums, new_g + 4 * KW * t, GW)
                _exp(e, sums, GW)
                _decay(one, new_k + 4 * KW * j, e, channel, KW)
                k_j = one
                if reads > T:
                    vec.put(near + 4 * ((T + t) * T + j), w_j * _dot(one, new_k + 4 * KW * t, KW))
            vec.put(near + 4 * (t * T + j), w_j * _dot(k_j, new_q + 4 * KW * t, KW))

    ahead = _prefetch(ahead, a.p4)
    # 3. Ring, then checkpoint.
    for r in range(reads):
        _fill(y + 4 * VW * r, _ZERO, VW)
        _add_rows(y + 4 * VW * r, _ONE, score + 4 * RW * r, ds, d_stride, d_first, n, R, VW)
    if due:
        for i in range(n):
            vec.store(e, vec.splat(vec.number(weights + 4 * i)))
            _decay(copied_d + i * 4 * VW, _row(ds, d_stride, d_first, i, R), e, 0, VW)
    if h + 1 < a.HV:
        _prefetch_ring(a, slot, h + 1, v0, V, head, n)
        for t in range(T):
            _prefetch(_at(a.v, b, t, h + 1, v0), V // 16)
    if due or reads > 0:
        _pass(
            S, a.ckpt.dtype, V, K, x, reads, y, VW, total, channel, keys, k_stride, k_first, R, copied_d, n, due, rows, ahead,
            S_end + a.p3,
        )  # fmt: skip

    # 4. d_t = v_t - S_t k_t by substitution; near has nothing for keys on the diagonal.
    _prefetch(S_end + a.p3, a.p4)
    for t in range(T):
        d_t, o_t = new_d + 4 * VW * t, y + 4 * VW * t
        row = (head + n + t) % R
        _get_row(d_t, _at(a.v, b, t, h, v0), a.v.dtype, V)
        if reads > T:
            _sub(d_t, y + 4 * VW * (T + t), VW)
            _add_rows(d_t, -_ONE, near + 4 * T * (T + t), new_d, 4 * VW, 0, t, T, VW)
        _add_rows(o_t, _ONE, near + 4 * T * t, new_d, 4 * VW, 0, t + 1, T, VW)
        _put_row(_at(a.out, b, t, h, v0), a.out.dtype, o_t, V)
        _put_row(_at(a.ring_d, slot, h, row, v0), a.ring_d.dtype, d_t, V)
        if v0 == 0:  # what the tasks of a head, or of a key head's group, share
            _put(_at(a.ring_w, slot, h, row, 0), a.ring_w.dtype, vec.number(new_w + 4 * t))
            _put_row(_at(a.ring_g, slot, h, row, 0), a.ring_g.dtype, new_g + 4 * KW * t, K if channel else 1)
            if h % (a.HV // a.H) == 0:
                _put_row(_at(a.ring_k, slot, h_k, row, 0), a.ring_k.dtype, new_k + 4 * KW * t, K)


def _work(address):
    """One worker: takes runs of ``chunk`` neighbouring tasks until none is left."""
    a = carray(vec.pointer(address), 1, _CALL)[0]
    scratch = a.scratch + 4 * a.floats * vec.take(address + 8)
    blocks = -(-a.V // a.block)
    first = a.chunk * vec.take(address)
    while first < a.tasks:
        for task in range(first, min(first + a.chunk, a.tasks)):
            head = task // blocks
            _task(a, head // a.HV, head % a.HV, task % blocks * a.block, scratch)
        first = a.chunk * vec.take(address)


_CALL = np.dtype(Call)


@functools.cache
def worker() -> int:
    """Address of the compiled ``void worker(Call *)``, which every thread of a call runs. Compiled, or read from numba's
    cache on disk, when first asked for; without a directory to write, compiled in each process."""
    compile_ = functools.partial(cfunc, types.void(types.int64), error_model="numpy")
    try:
        return compile_(cache=True)(_work).address
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return compile_()(_work).address
