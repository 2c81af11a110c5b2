"""The CPU kernel, compiled by numba: one function for every recurrence, shape and dtype.

What differs between recurrences is looked at while running, once a head or a row, never an element: ``G``, the width of
the decay (1 or K), ``X``, the reads a token (1, or 2 with erase), and the dtype code of each tensor. So there is one
thing
to compile, and it is cached on disk. A task is a value head of one row of the call, or a block of its state's rows
``v``;
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
from replayssm.backends.cpu_pass import BLOCK, pass_over, read_block
from replayssm.backends.cpu_rows import (
    FLOAT32,
    LANES,
    LINE,
    ONE,
    ZERO,
    add,
    add_rows,
    at_,
    decay,
    decay_key,
    dot,
    exp,
    fill,
    get_decay,
    get_row,
    number,
    padded,
    padded_,
    prefetch,
    put,
    put_row,
    ring_row,
    size_of,
    sub,
)

_RING_HEAD, _RING_CHANNEL = 1024, 512  # bytes of the checkpoint asked for with each ring row, by decay
_SCORE_LINES = 512  # and lines with the scores of a block of rows
_BEYOND = 8192  # bytes that prefetching runs on into the next head's checkpoint


class View(ctypes.Structure):
    """A tensor: address, dtype code, and byte strides of up to three leading dimensions; what follows them is dense."""

    _fields_ = [(name, ctypes.c_int64) for name in ("address", "dtype", "s0", "s1", "s2")]


class Call(ctypes.Structure):
    """Arguments of one call. ``next`` and ``workers`` are counters, zero at first: tasks taken, scratch areas taken.

    slots, head, count: addresses of int32. rows: address of int64 ``[B]``, the committed rows to fold; or 0 in a step,
    where each slot's count and ``limit`` say it. X: reads a token. channel: 1 where the decay is by channel, else 0.
    block: state rows a task. scratch: address of ``floats`` float32 a worker.
    """

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("next", "workers", "tasks", "chunk", "slots", "head", "count", "rows", "limit")
        ),
        *((name, ctypes.c_int64) for name in ("T", "X", "H", "HV", "K", "V", "R", "channel", "block")),
        *((name, ctypes.c_int64) for name in ("scratch", "floats")),
        *((name, View) for name in ("ckpt", "ring_k", "ring_d", "ring_w", "ring_g", "q", "k", "v", "w", "g", "out")),
    ]


def scratch_floats(T: int, X: int, K: int, R: int, block: int) -> int:
    """Float32 numbers of one worker's scratch area, which :func:`_task` lays out."""
    KW, VW, RW, reads = padded(K), padded(block), padded(R), T * X
    return KW * (R + 3 * T + reads + 4 + BLOCK) + VW * (R + reads + T) + RW * (1 + reads) + padded(T * reads + T)


@njit(error_model="numpy")
def _prefetch_ring(a, slot, h, v0, V, head, n):
    """Asks for the ring rows of value head h."""
    group = a.HV // a.H
    for i in range(n):
        row = head + i - (a.R if head + i >= a.R else 0)
        prefetch(at_(a.ring_d, slot, h, row, v0), V * size_of(a.ring_d.dtype) // LINE)
        if h % group == 0:
            prefetch(at_(a.ring_k, slot, h // group, row, 0), a.K * size_of(a.ring_k.dtype) // LINE)
        if a.channel:
            prefetch(at_(a.ring_g, slot, h, row, 0), a.K * size_of(a.ring_g.dtype) // LINE)


@njit(error_model="numpy")
def _task(a, b, h, v0, scratch):
    """One value head of one row of the call: its state rows from v0 on, at most ``a.block``."""
    T, K, R, reads, channel = a.T, a.K, a.R, a.T * a.X, a.channel
    V, h_k = min(a.block, a.V - v0), h // (a.HV // a.H)
    slot = vec.int32(a.slots + 4 * b)
    KW, VW, RW = padded_(K), padded_(a.block), padded_(R)
    GW = KW if channel else LANES
    if slot < 0:
        fill(scratch, ZERO, VW)
        for t in range(T):
            put_row(at_(a.out, b, t, h, v0), a.out.dtype, scratch, V)
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

    S = at_(a.ckpt, slot, h, 0, v0 * K)
    S_end = S + V * K * size_of(a.ckpt.dtype)
    ahead = prefetch(S + _BEYOND + 64 * 1, 1)
    each = _RING_CHANNEL if channel else _RING_HEAD

    # 1. Ring rows, the newest first: the log-decays after a row are then a running sum. A decay by head goes into the
    # row's
    # weight, one by channel into its key. Rows that can be read in place are not copied.
    whole_k, whole_d = a.ring_k.dtype == FLOAT32 and K == KW, a.ring_d.dtype == FLOAT32 and V == VW
    keys, k_stride, k_first = copied_k, 4 * KW, 0
    if whole_k and not channel:
        keys, k_stride, k_first = at_(a.ring_k, slot, h_k, 0, 0), a.ring_k.s2, head
    ds, d_stride, d_first = copied_d, 4 * VW, 0
    if whole_d:
        ds, d_stride, d_first = at_(a.ring_d, slot, h, 0, v0), a.ring_d.s2, head
    fill(sums, ZERO, GW)
    for i in range(n - 1, -1, -1):
        row = head + i - (R if head + i >= R else 0)
        if ahead + each < S_end:
            ahead = prefetch(ahead, each // LINE)
        k_i, g_i = at_(a.ring_k, slot, h_k, row, 0), at_(a.ring_g, slot, h, row, 0)
        if not whole_k:
            get_row(copied_k + i * 4 * KW, k_i, a.ring_k.dtype, K)
            k_i = copied_k + i * 4 * KW
        if not whole_d:
            get_row(copied_d + i * 4 * VW, at_(a.ring_d, slot, h, row, v0), a.ring_d.dtype, V)
        if channel:
            if K != KW:
                get_row(one, g_i, a.ring_g.dtype, K)
                g_i = one
            decay_key(copied_k + i * 4 * KW, k_i, sums, g_i, KW)
        else:
            vec.put(weights + 4 * i, vec.number(sums))
            vec.put(sums, vec.number(sums) + number(g_i, a.ring_g.dtype))
    if channel:
        for i in range(n):
            row = head + i - (R if head + i >= R else 0)
            vec.put(weights + 4 * i, number(at_(a.ring_w, slot, h, row, 0), a.ring_w.dtype))
    else:
        vec.store(sums, vec.splat(vec.number(sums)))
        exp(weights, weights, padded_(n))
        for i in range(n):
            row = head + i - (R if head + i >= R else 0)
            vec.put(
                weights + 4 * i, vec.number(weights + 4 * i) * number(at_(a.ring_w, slot, h, row, 0), a.ring_w.dtype)
            )
    exp(total, sums, GW)

    # 2. This step's tokens: reads decayed to the last ring row, their scores, then decayed on to the checkpoint.
    fill(sums, ZERO, GW)
    for t in range(T):
        q_t, k_t, g_t = new_q + 4 * KW * t, new_k + 4 * KW * t, new_g + 4 * KW * t
        get_row(q_t, at_(a.q, b, t, h_k, 0), a.q.dtype, K)
        get_row(k_t, at_(a.k, b, t, h_k, 0), a.k.dtype, K)
        get_decay(g_t, a.g, b, t, h, channel, K)
        vec.put(new_w + 4 * t, number(at_(a.w, b, t, h, 0), a.w.dtype))
        add(sums, g_t, GW)
        exp(e, sums, GW)
        for r in range(t, reads, T):
            decay(x + 4 * KW * r, q_t if r < T else k_t, e, channel, KW)
    ahead = prefetch(ahead, 1)
    for r in range(reads):
        fill(score + 4 * RW * r, ZERO, RW)
    for i in range(0, n, BLOCK):
        r0 = ring_row(keys, k_stride, k_first, min(i + 0, n - 1), R)
        r1 = ring_row(keys, k_stride, k_first, min(i + 1, n - 1), R)
        r2 = ring_row(keys, k_stride, k_first, min(i + 2, n - 1), R)
        r3 = ring_row(keys, k_stride, k_first, min(i + 3, n - 1), R)
        r4 = ring_row(keys, k_stride, k_first, min(i + 4, n - 1), R)
        r5 = ring_row(keys, k_stride, k_first, min(i + 5, n - 1), R)
        r6 = ring_row(keys, k_stride, k_first, min(i + 6, n - 1), R)
        r7 = ring_row(keys, k_stride, k_first, min(i + 7, n - 1), R)
        lines = _SCORE_LINES if ahead + _SCORE_LINES * (KW // LANES) * reads * LINE < S_end else 0
        ahead = read_block(score + 4 * i, 4 * RW, x, reads, r0, r1, r2, r3, r4, r5, r6, r7, KW, ahead, lines)
    for r in range(reads):
        decay(score + 4 * RW * r, score + 4 * RW * r, weights, 1, padded_(n))
        decay(x + 4 * KW * r, x + 4 * KW * r, total, channel, KW)
    ahead = prefetch(ahead, 1)
    for j in range(T):
        k_j, w_j = new_k + 4 * KW * j, vec.number(new_w + 4 * j)
        fill(sums, ZERO, GW)
        for t in range(j, T):
            if t > j:
                add(sums, new_g + 4 * KW * t, GW)
                exp(e, sums, GW)
                decay(one, new_k + 4 * KW * j, e, channel, KW)
                k_j = one
                if reads > T:
                    vec.put(near + 4 * ((T + t) * T + j), w_j * dot(one, new_k + 4 * KW * t, KW))
            vec.put(near + 4 * (t * T + j), w_j * dot(k_j, new_q + 4 * KW * t, KW))

    ahead = prefetch(ahead, 1)
    # 3. Ring, then checkpoint.
    for r in range(reads):
        fill(y + 4 * VW * r, ZERO, VW)
        add_rows(y + 4 * VW * r, ONE, score + 4 * RW * r, ds, d_stride, d_first, n, R, VW)
    if due:
        for i in range(n):
            vec.store(e, vec.splat(vec.number(weights + 4 * i)))
            decay(copied_d + i * 4 * VW, ring_row(ds, d_stride, d_first, i, R), e, 0, VW)
    if h + 1 < a.HV:
        _prefetch_ring(a, slot, h + 1, v0, V, head, n)
        for t in range(T):
            prefetch(at_(a.v, b, t, h + 1, v0), V // 16)
    if due or reads > 0:
        pass_over(
            S, a.ckpt.dtype, V, K, x, reads, y, VW, total, channel, keys, k_stride, k_first, R, copied_d, n, due, rows,
            ahead, S_end + _BEYOND,
        )  # fmt: skip

    # 4. d_t = v_t - S_t k_t by substitution; near has nothing for keys on the diagonal.
    prefetch(S_end + _BEYOND, 1)
    for t in range(T):
        d_t, o_t = new_d + 4 * VW * t, y + 4 * VW * t
        row = (head + n + t) % R
        get_row(d_t, at_(a.v, b, t, h, v0), a.v.dtype, V)
        if reads > T:
            sub(d_t, y + 4 * VW * (T + t), VW)
            add_rows(d_t, -ONE, near + 4 * T * (T + t), new_d, 4 * VW, 0, t, T, VW)
        add_rows(o_t, ONE, near + 4 * T * t, new_d, 4 * VW, 0, t + 1, T, VW)
        put_row(at_(a.out, b, t, h, v0), a.out.dtype, o_t, V)
        put_row(at_(a.ring_d, slot, h, row, v0), a.ring_d.dtype, d_t, V)
        if v0 == 0:  # what the tasks of a head, or of a key head's group, share
            put(at_(a.ring_w, slot, h, row, 0), a.ring_w.dtype, vec.number(new_w + 4 * t))
            put_row(at_(a.ring_g, slot, h, row, 0), a.ring_g.dtype, new_g + 4 * KW * t, K if channel else 1)
            if h % (a.HV // a.H) == 0:
                put_row(at_(a.ring_k, slot, h_k, row, 0), a.ring_k.dtype, new_k + 4 * KW * t, K)


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
    """Address of the compiled ``void worker(Call *)``, which every thread of a call runs. Compiled, or read from
    numba's
    cache on disk, when first asked for; without a directory to write, compiled in each process."""
    compile_ = functools.partial(cfunc, types.void(types.int64), error_model="numpy")
    try:
        return compile_(cache=True)(_work).address
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return compile_()(_work).address
