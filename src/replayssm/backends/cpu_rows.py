"""Rows of numbers at raw addresses, for the CPU kernel: loads and stores in any dtype, and float32 arithmetic.

Rows of scratch memory are float32 and ``padded`` wide, with zeros behind the last number that was loaded.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import numpy as np
from numba import njit

from replayssm.backends import cpu_vectors as vec

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2  # dtype codes
LANES = vec.LANES
ROW = 4 * LANES  # bytes of a vector
LINE = 64  # bytes of a cache line
ZERO, ONE = np.float32(0), np.float32(1)

# Divisions do not raise: nobody could catch it. Small functions are inlined, the others are compiled once.
jit = functools.partial(njit, error_model="numpy")
jit_inline = functools.partial(njit, error_model="numpy", forceinline=True)


def padded(n: int) -> int:
    """The width of a scratch row of n numbers: whole groups of four vectors, the most that loops take at a time."""
    return (n + 4 * LANES - 1) // (4 * LANES) * (4 * LANES)


padded_ = jit_inline()(padded)


@jit_inline()
def size_of(dtype):
    """Bytes of a number."""
    return 4 if dtype == FLOAT32 else 2


@jit_inline()
def at(view, i, j, k, offset):
    """Address of the number ``offset`` after [i, j, k]."""
    return view.address + i * view.s0 + j * view.s1 + k * view.s2 + offset * size_of(view.dtype)


class View(ctypes.Structure):
    """A tensor: address, dtype code, and byte strides of up to three leading dimensions; what follows them is dense."""

    _fields_ = [(name, ctypes.c_int64) for name in ("address", "dtype", "s0", "s1", "s2")]


class Rows(NamedTuple):
    """Rows at equal distances in memory, counted from ``first`` on and around the end of R of them: a ring's, or those
    of a scratch matrix, where first is 0. base: address of row 0. stride: bytes from row to row."""

    base: int
    stride: int
    first: int
    R: int


@jit_inline()
def wrapped(row, R):
    """A ring row below 2 * R, taken modulo R."""
    return row - R if row >= R else row


@jit_inline()
def row_of(rows, i):
    """Address of row i."""
    return rows.base + rows.stride * wrapped(rows.first + i, rows.R)


@jit_inline()
def prefetch(at, lines):
    """Asks for cache lines from an address on; returns the address behind them."""
    for i in range(lines):
        vec.prefetch(at + i * LINE)
    return at + lines * LINE


@jit_inline()
def number(at, dtype):
    """The number at an address, as float32."""
    if dtype == FLOAT32:
        return vec.number(at)
    return vec.number_bfloat16(at) if dtype == BFLOAT16 else vec.number_float16(at)


@jit_inline()
def put(at, dtype, x):
    """Writes a float32 to an address, rounded to the dtype."""
    if dtype == FLOAT32:
        vec.put(at, x)
    elif dtype == BFLOAT16:
        vec.put_bfloat16(at, x)
    else:
        vec.put_float16(at, x)


@jit_inline()
def fill(y, value, width):
    """y = value."""
    for i in range(0, 4 * width, ROW):
        vec.store(y + i, vec.splat(value))


@jit()
def get_row(y, at, dtype, n):
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
    fill(y + 4 * whole, ZERO, padded_(n) - whole)
    for i in range(whole, n):
        vec.put(y + 4 * i, number(at + i * size_of(dtype), dtype))


@jit()
def put_row(at, dtype, x, n):
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
        put(at + i * size_of(dtype), dtype, vec.number(x + 4 * i))


@jit()
def get_decay(y, at, dtype, channel, K):
    """A log-decay as a scratch row: K numbers (channel = 1), or one vector of the same number."""
    if channel:
        get_row(y, at, dtype, K)
    else:
        vec.store(y, vec.splat(number(at, dtype)))


@jit_inline()
def add(y, x, width):
    """y += x."""
    for i in range(0, 4 * width, ROW):
        vec.store(y + i, vec.add(vec.load(y + i), vec.load(x + i)))


@jit_inline()
def sub(y, x, width):
    """y -= x."""
    for i in range(0, 4 * width, ROW):
        vec.store(y + i, vec.sub(vec.load(y + i), vec.load(x + i)))


@jit()
def exp(y, x, width):
    """y = exp(x)."""
    for i in range(0, 4 * width, ROW):
        vec.store(y + i, vec.exp(vec.load(x + i)))


@jit_inline()
def decay(y, x, e, channel, width):
    """y = x * e; e has a number for each of x's (channel = 1), or is one vector of the same number (channel = 0)."""
    for i in range(0, 4 * width, ROW):
        vec.store(y + i, vec.mul(vec.load(x + i), vec.load(e + i * channel)))


@jit()
def decay_key(y, x, sums, g, width):
    """y = x * exp(sums), then sums += g."""
    for i in range(0, 4 * width, ROW):
        sums_i = vec.load(sums + i)
        vec.store(y + i, vec.mul(vec.load(x + i), vec.exp(sums_i)))
        vec.store(sums + i, vec.add(sums_i, vec.load(g + i)))


@jit_inline()
def dot(x, y, width):
    """x . y."""
    a = vec.splat(ZERO)
    for i in range(0, 4 * width, ROW):
        a = vec.muladd(vec.load(x + i), vec.load(y + i), a)
    return vec.total(a)


@jit()
def add_rows(y, sign, scores, rows, n, width):
    """y += sign * sum over the first n of ``rows`` of scores[i] * row i."""
    for c in range(0, 4 * width, 4 * ROW):
        at = y + c
        a0, a1, a2, a3 = vec.load(at), vec.load(at + ROW), vec.load(at + 2 * ROW), vec.load(at + 3 * ROW)
        for i in range(n):
            score, row = vec.splat(sign * vec.number(scores + 4 * i)), row_of(rows, i) + c
            a0, a1 = vec.muladd(score, vec.load(row), a0), vec.muladd(score, vec.load(row + ROW), a1)
            a2, a3 = vec.muladd(score, vec.load(row + 2 * ROW), a2), vec.muladd(score, vec.load(row + 3 * ROW), a3)
        vec.store(at, a0)
        vec.store(at + ROW, a1)
        vec.store(at + 2 * ROW, a2)
        vec.store(at + 3 * ROW, a3)
