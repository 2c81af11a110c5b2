"""The CPU kernel, compiled by numba: one function for every recurrence, shape and dtype.

What differs between recurrences is looked at while running, once a head or a row, never an element: whether the decay
is by channel, ``X``, the reads a token (2 with erase, else 1), and the dtype code of each tensor. So there is one thing
to compile, and it is cached on disk. A task is a value head of one row of the call, or a block of its state's rows v.
Its steps, in the notation of backends/torch.py, are

1. ring rows, the newest first: their weights ``w_i``, to which goes ``exp(after_i)``, or by channel to the keys;
2. reads ``x`` (queries, then keys) decayed to the newest ring row: their scores with the ring and with each other;
3. one pass over the checkpoint: ``y_x[v] = sum_i score_xi d_i[v] + S0[v] . x``, and in a due row the folded state;
4. ``d`` by substitution, the outputs and the appended rows.

Everything is float32 between load and store, and no exponent is positive. Dead rows are outside of all loops' bounds.
Where a step only computes, it also asks for parts of the checkpoint, so that memory does not wait for it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import carray, cfunc, types

from replayssm.backends import cpu_pass
from replayssm.backends import cpu_rows as rows
from replayssm.backends import cpu_vectors as vec
from replayssm.backends.cpu_pass import BLOCK, pass_over, read_block
from replayssm.backends.cpu_rows import jit

_BEYOND = 4096  # bytes that the pass over a checkpoint asks for behind its end: the next head's
_BETWEEN = 8  # cache lines asked for between two steps
_WITH_SCORES = rows.LINE  # bytes asked for with each vector of the scores


_NUMBERS = "next workers tasks chunk slots head count rows limit T X H HV K V R channel block scratch floats"
_VIEWS = "ckpt ring_k ring_d ring_w ring_g q k v w g out"


class Call(ctypes.Structure):
    """Arguments of one call. ``next`` and ``workers`` are counters, zero at first: tasks taken, scratch areas taken.

    chunk: tasks that are taken at a time. slots, head, count: addresses of int32. rows: address of int64 ``[B]``, the
    committed rows to fold; or 0 in a step, where each slot's count and ``limit`` say it. X: reads a token. channel: 1
    where the decay is by channel, else 0. block: state rows a task. scratch: address of ``floats`` float32 a worker.
    """

    _fields_ = [
        *((name, ctypes.c_int64) for name in _NUMBERS.split()),
        *((name, rows.View) for name in _VIEWS.split()),
    ]


class _Task(NamedTuple):
    """Value head h and key head h_k of row b of the call, its state rows ``v0 .. v0 + V``; its slot, the oldest of its
    n ring rows, and whether they are to be folded."""

    b: int
    h: int
    h_k: int
    v0: int
    V: int
    slot: int
    head: int
    n: int
    due: bool


class _Scratch(NamedTuple):
    """Addresses of scratch matrices, and the widths of their rows: ``padded`` K, block and R; GW, of a decay."""

    KW: int
    VW: int
    RW: int
    GW: int
    k: int  # [R, KW], ring rows that cannot be read in place
    d: int  # [R, VW], the same; due, times their weights
    new_q: int  # [T, KW]
    new_k: int
    new_g: int
    x: int  # [T * X, KW]
    one: int  # [KW], anything
    e: int  # [KW], exp of something
    sums: int  # [KW], running sums of log-decays
    total: int  # [KW], exp of the ring's log-decays
    copy: int  # [BLOCK, KW]
    y: int  # [T * X, VW]
    new_d: int  # [T, VW]
    weight: int  # [RW]
    score: int  # [T * X, RW]
    near: int  # [T * X, T]
    new_w: int  # [T]


def scratch_floats(T: int, X: int, K: int, R: int, block: int) -> int:
    """Float32 numbers of a worker's scratch memory, as :func:`_scratch` divides it."""
    KW, VW, RW, reads = rows.padded(K), rows.padded(block), rows.padded(R), T * X
    return KW * (R + 3 * T + reads + 4 + BLOCK) + VW * (R + reads + T) + RW * (1 + reads) + rows.padded(T * (reads + 1))


@jit()
def _scratch(a, at):
    """Divides a worker's scratch memory."""
    T, R, reads = a.T, a.R, a.T * a.X
    KW, VW, RW = rows.padded_(a.K), rows.padded_(a.block), rows.padded_(R)
    d = at + 4 * KW * R
    q = d + 4 * VW * R
    x = q + 12 * KW * T
    one = x + 4 * KW * reads
    copy = one + 16 * KW
    y = copy + 4 * KW * BLOCK
    new_d = y + 4 * VW * reads
    weight = new_d + 4 * VW * T
    score = weight + 4 * RW
    near = score + 4 * RW * reads
    return _Scratch(
        KW, VW, RW, KW if a.channel else rows.LANES, at, d, q, q + 4 * KW * T, q + 8 * KW * T, x, one, one + 4 * KW,
        one + 8 * KW, one + 12 * KW, copy, y, new_d, weight, score, near, near + 4 * T * reads,
    )  # fmt: skip


@jit()
def _ring_keys(a, t, s):
    """Step 1. Fills s.weight, s.total and, where the ring cannot be used itself, s.k; returns the keys as Rows."""
    in_place = a.ring_k.dtype == rows.FLOAT32 and a.K == s.KW
    rows.fill(s.sums, rows.ZERO, s.GW)
    for i in range(t.n - 1, -1, -1):
        row, k_i = rows.wrapped(t.head + i, a.R), s.k + i * 4 * s.KW
        from_k, from_g = rows.at(a.ring_k, t.slot, t.h_k, row, 0), rows.at(a.ring_g, t.slot, t.h, row, 0)
        if not in_place:
            rows.get_row(k_i, from_k, a.ring_k.dtype, a.K)
            from_k = k_i
        if a.channel:
            if a.K != s.KW or a.ring_g.dtype != rows.FLOAT32:
                rows.get_row(s.one, from_g, a.ring_g.dtype, a.K)
                from_g = s.one
            rows.decay_key(k_i, from_k, s.sums, from_g, s.KW)
            vec.put(s.weight + 4 * i, rows.ZERO)
        else:
            vec.put(s.weight + 4 * i, vec.number(s.sums))
            vec.put(s.sums, vec.number(s.sums) + rows.number(from_g, a.ring_g.dtype))
    if not a.channel:
        vec.store(s.sums, vec.splat(vec.number(s.sums)))
    rows.exp(s.total, s.sums, s.GW)
    rows.exp(s.weight, s.weight, rows.padded_(t.n))
    for i in range(t.n):
        w_i = rows.number(rows.at(a.ring_w, t.slot, t.h, rows.wrapped(t.head + i, a.R), 0), a.ring_w.dtype)
        vec.put(s.weight + 4 * i, vec.number(s.weight + 4 * i) * w_i)
    if in_place and not a.channel:
        return rows.Rows(rows.at(a.ring_k, t.slot, t.h_k, 0, 0), a.ring_k.s2, t.head, a.R)
    return rows.Rows(s.k, 4 * s.KW, 0, a.R)


@jit()
def _ring_d(a, t, s):
    """The ring's d as Rows: in place where it can be read so, otherwise copied to s.d."""
    if a.ring_d.dtype == rows.FLOAT32 and t.V == s.VW:
        return rows.Rows(rows.at(a.ring_d, t.slot, t.h, 0, t.v0), a.ring_d.s2, t.head, a.R)
    for i in range(t.n):
        d_i = rows.at(a.ring_d, t.slot, t.h, rows.wrapped(t.head + i, a.R), t.v0)
        rows.get_row(s.d + i * 4 * s.VW, d_i, a.ring_d.dtype, t.V)
    return rows.Rows(s.d, 4 * s.VW, 0, a.R)


@jit()
def _reads(a, t, s):
    """Step 2. Loads this call's tokens; s.x: their queries, with erase also keys, decayed to the newest ring row."""
    rows.fill(s.sums, rows.ZERO, s.GW)
    for i in range(a.T):
        q, k, g = s.new_q + 4 * s.KW * i, s.new_k + 4 * s.KW * i, s.new_g + 4 * s.KW * i
        rows.get_row(q, rows.at(a.q, t.b, i, t.h_k, 0), a.q.dtype, a.K)
        rows.get_row(k, rows.at(a.k, t.b, i, t.h_k, 0), a.k.dtype, a.K)
        rows.get_decay(g, rows.at(a.g, t.b, i, t.h, 0), a.g.dtype, a.channel, a.K)
        vec.put(s.new_w + 4 * i, rows.number(rows.at(a.w, t.b, i, t.h, 0), a.w.dtype))
        rows.add(s.sums, g, s.GW)
        rows.exp(s.e, s.sums, s.GW)
        rows.decay(s.x + 4 * s.KW * i, q, s.e, a.channel, s.KW)
        if a.X > 1:
            rows.decay(s.x + 4 * s.KW * (a.T + i), k, s.e, a.channel, s.KW)


@jit()
def _scores(a, t, s, keys, ahead, end):
    """Step 2. s.score: reads with ring rows, times the rows' weights."""
    reads, n = a.T * a.X, t.n
    rows.fill(s.score, rows.ZERO, s.RW * reads)
    for i in range(0, n, BLOCK):  # the last row again where BLOCK does not divide n
        r0, r1 = rows.row_of(keys, min(i, n - 1)), rows.row_of(keys, min(i + 1, n - 1))
        r2, r3 = rows.row_of(keys, min(i + 2, n - 1)), rows.row_of(keys, min(i + 3, n - 1))
        r4, r5 = rows.row_of(keys, min(i + 4, n - 1)), rows.row_of(keys, min(i + 5, n - 1))
        r6, r7 = rows.row_of(keys, min(i + 6, n - 1)), rows.row_of(keys, min(i + 7, n - 1))
        step = _WITH_SCORES if ahead + _WITH_SCORES * (s.KW // rows.LANES) < end else 0
        score = s.score + 4 * i
        ahead = read_block(score, 4 * s.RW, s.x, reads, r0, r1, r2, r3, r4, r5, r6, r7, s.KW, ahead, step)
    for r in range(reads):
        rows.decay(s.score + 4 * s.RW * r, s.score + 4 * s.RW * r, s.weight, 1, rows.padded_(n))
    return ahead


@jit()
def _near(a, s):
    """Step 2. s.near: reads with the tokens of this step up to them, keys with those before them, times their w."""
    for j in range(a.T):
        k, w = s.new_k + 4 * s.KW * j, vec.number(s.new_w + 4 * j)
        rows.fill(s.sums, rows.ZERO, s.GW)
        for i in range(j, a.T):
            if i > j:
                rows.add(s.sums, s.new_g + 4 * s.KW * i, s.GW)
                rows.exp(s.e, s.sums, s.GW)
                rows.decay(s.one, s.new_k + 4 * s.KW * j, s.e, a.channel, s.KW)
                k = s.one
                if a.X > 1:
                    vec.put(s.near + 4 * ((a.T + i) * a.T + j), w * rows.dot(k, s.new_k + 4 * s.KW * i, s.KW))
            vec.put(s.near + 4 * (i * a.T + j), w * rows.dot(k, s.new_q + 4 * s.KW * i, s.KW))


@jit()
def _finish(a, t, s):
    """Step 4. d_i = v_i - S_i k_i by substitution, outputs, appended rows."""
    new_d = rows.Rows(s.new_d, 4 * s.VW, 0, a.T)
    for i in range(a.T):
        d, o, row = s.new_d + 4 * s.VW * i, s.y + 4 * s.VW * i, (t.head + t.n + i) % a.R
        rows.get_row(d, rows.at(a.v, t.b, i, t.h, t.v0), a.v.dtype, t.V)
        if a.X > 1:
            rows.sub(d, s.y + 4 * s.VW * (a.T + i), s.VW)
            rows.add_rows(d, -rows.ONE, s.near + 4 * a.T * (a.T + i), new_d, i, s.VW)
        rows.add_rows(o, rows.ONE, s.near + 4 * a.T * i, new_d, i + 1, s.VW)
        rows.put_row(rows.at(a.out, t.b, i, t.h, t.v0), a.out.dtype, o, t.V)
        rows.put_row(rows.at(a.ring_d, t.slot, t.h, row, t.v0), a.ring_d.dtype, d, t.V)
        if t.v0 == 0:  # what the tasks of a head, or of a key head's group, share
            rows.put(rows.at(a.ring_w, t.slot, t.h, row, 0), a.ring_w.dtype, vec.number(s.new_w + 4 * i))
            width = a.K if a.channel else 1
            rows.put_row(rows.at(a.ring_g, t.slot, t.h, row, 0), a.ring_g.dtype, s.new_g + 4 * s.KW * i, width)
            if t.h % (a.HV // a.H) == 0:
                rows.put_row(rows.at(a.ring_k, t.slot, t.h_k, row, 0), a.ring_k.dtype, s.new_k + 4 * s.KW * i, a.K)


@jit()
def _prefetch_next(a, t):
    """Asks for the ring rows and the values of the slot's next head, which this worker is likely to take next."""
    h, group = t.h + 1, a.HV // a.H
    if h == a.HV:
        return
    K, V = a.K * rows.size_of(a.ring_k.dtype), t.V * rows.size_of(a.ring_d.dtype)
    for i in range(t.n):
        row = rows.wrapped(t.head + i, a.R)
        rows.prefetch(rows.at(a.ring_d, t.slot, h, row, t.v0), V // rows.LINE)
        if h % group == 0:
            rows.prefetch(rows.at(a.ring_k, t.slot, h // group, row, 0), K // rows.LINE)
        if a.channel:
            g = a.K * rows.size_of(a.ring_g.dtype)
            rows.prefetch(rows.at(a.ring_g, t.slot, h, row, 0), g // rows.LINE)
    for i in range(a.T):
        rows.prefetch(rows.at(a.v, t.b, i, h, t.v0), t.V * rows.size_of(a.v.dtype) // rows.LINE)


@jit()
def _step(a, t, s):
    """All of a task that is not padding."""
    reads = a.T * a.X
    S, bytes_ = rows.at(a.ckpt, t.slot, t.h, 0, t.v0 * a.K), t.V * a.K * rows.size_of(a.ckpt.dtype)
    ahead, end = S + _BEYOND + _BETWEEN * rows.LINE, S + bytes_ + _BEYOND  # where the head before may have left off
    ahead = rows.prefetch(ahead, _BETWEEN)
    keys, ds = _ring_keys(a, t, s), _ring_d(a, t, s)
    _reads(a, t, s)
    ahead = rows.prefetch(ahead, _BETWEEN)
    ahead = _scores(a, t, s, keys, ahead, end)
    for r in range(reads):
        rows.decay(s.x + 4 * s.KW * r, s.x + 4 * s.KW * r, s.total, a.channel, s.KW)
    ahead = rows.prefetch(ahead, _BETWEEN)
    _near(a, s)
    ahead = rows.prefetch(ahead, _BETWEEN)
    rows.fill(s.y, rows.ZERO, s.VW * reads)
    for r in range(reads):
        rows.add_rows(s.y + 4 * s.VW * r, rows.ONE, s.score + 4 * s.RW * r, ds, t.n, s.VW)
    if t.due:
        for i in range(t.n):
            vec.store(s.e, vec.splat(vec.number(s.weight + 4 * i)))
            rows.decay(s.d + i * 4 * s.VW, rows.row_of(ds, i), s.e, 0, s.VW)
    _prefetch_next(a, t)
    if t.due or reads > 0:
        pass_over(
            S, a.ckpt.dtype, t.V, a.K, s.x, reads, s.y, s.VW, s.total, a.channel, keys, s.d, t.n, t.due, s.copy,
            ahead, end,
        )  # fmt: skip
    rows.prefetch(end, _BETWEEN)
    _finish(a, t, s)


@jit()
def _run(a, b, h, v0, s):
    """A task: looks at the slot, and does what is to be done."""
    V, slot = min(a.block, a.V - v0), vec.int32(a.slots + 4 * b)
    if slot < 0:
        rows.fill(s.d, rows.ZERO, s.VW)
        for i in range(a.T):
            rows.put_row(rows.at(a.out, b, i, h, v0), a.out.dtype, s.d, V)
        return
    n = vec.int64(a.rows + 8 * b) if a.rows else vec.int32(a.count + 4 * slot)
    head = vec.int32(a.head + 4 * slot)
    due = n > 0 if a.rows else n > max(a.limit - head // a.R, 0)
    _step(a, _Task(b, h, h // (a.HV // a.H), v0, V, slot, head % a.R, n, due), s)


_CALL = np.dtype(Call)


def _worker(sources: int) -> Callable[[int], None]:
    """What every thread of a call runs. sources: stands for the files that numba's cache does not look at."""

    def work(address: int) -> None:
        a = carray(vec.pointer(address), 1, _CALL)[0]
        if a.tasks < sources:  # never; without it numba would not see ``sources``
            return
        s = _scratch(a, a.scratch + 4 * a.floats * vec.take(address + 8))
        blocks = -(-a.V // a.block)
        first = a.chunk * vec.take(address)
        while first < a.tasks:
            for task in range(first, min(first + a.chunk, a.tasks)):
                head = task // blocks
                _run(a, head // a.HV, head % a.HV, task % blocks * a.block, s)
            first = a.chunk * vec.take(address)

    return work


@functools.cache
def worker() -> int:
    """Address of the compiled ``void worker(Call *)``, which every thread of a call runs. Compiled, or read from
    numba's cache on disk, when first asked for; without a directory to write, compiled in each process."""
    files = b"".join(Path(str(module.__file__)).read_bytes() for module in (vec, rows, cpu_pass))
    work = _worker(-1 - int.from_bytes(hashlib.sha256(files).digest()[:4], "big"))
    compile_ = functools.partial(cfunc, types.void(types.int64), error_model="numpy")
    try:
        return compile_(cache=True)(work).address
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return compile_()(work).address
