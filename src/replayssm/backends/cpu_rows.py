"""Rows of numbers at raw addresses, for cpu_kernels.py: loads and stores in any dtype, and float32 arithmetic.

Rows of scratch are float32 and whole pairs of vectors, with zeros behind the last number.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from replayssm.backends import cpu_vectors as vec

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2  # dtype codes
LANES = vec.LANES
ROW = 4 * LANES  # bytes of a vector
LINE = 64  # bytes of a cache line
ZERO, ONE = np.float32(0), np.float32(1)


def padded(n: int) -> int:
    """The width of a scratch row of n numbers: whole pairs of vectors."""
    return (n + 2 * LANES - 1) // (2 * LANES) * (2 * LANES)


padded_ = njit(error_model="numpy")(padded)


@njit(error_model="numpy")
def size_of(dtype):
    """Bytes of a number."""
    return 4 if dtype == FLOAT32 else 2


@njit(error_model="numpy")
def at_(view, i, j, k, offset):
    """Address of the number ``offset`` after [i, j, k]."""
    return view.address + i * view.s0 + j * view.s1 + k * view.s2 + offset * size_of(view.dtype)


@njit(error_model="numpy")
def ring_row(x, stride, first, i, R):
    """Address of row i, counted from ``first`` on, of a ring of R rows."""
    row = first + i
    return x + stride * (row - R if row >= R else row)


@njit(error_model="numpy")
def prefetch(at, lines):
    """Asks for cache lines from an address on; returns the address behind them."""
    for i in range(lines):
        vec.prefetch(at + i * LINE)
    return at + lines * LINE


@njit(error_model="numpy")
def number(at, dtype):
    """The number at an address, as float32."""
    if dtype == FLOAT32:
        return vec.number(at)
    return vec.number_bfloat16(at) if dtype == BFLOAT16 else vec.number_float16(at)


@njit(error_model="numpy")
def put(at, dtype, x):
    """Writes a float32 to an address, rounded to the dtype."""
    if dtype == FLOAT32:
        vec.put(at, x)
    elif dtype == BFLOAT16:
        vec.put_bfloat16(at, x)
    else:
        vec.put_float16(at, x)


@njit(error_model="numpy")
def fill(y, value, width):
    """y = value."""
    for i in range(0, 4 * width, ROW):
        vec.store(y + i, vec.splat(value))


@njit(error_model="numpy")
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
    if whole < padded_(n):
        fill(y + 4 * whole, ZERO, padded_(n) - whole)
        for i in range(whole, n):
            vec.put(y + 4 * i, number(at + i * size_of(dtype), dtype))


@njit(error_model="numpy")
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


@njit(error_model="numpy")
def get_decay(y, view, i, j, k, channel, K):
    """The log-decay [i, j, k] as a scratch row: K numbers (channel = 1), or one vector of the same number."""
    at = at_(view, i, j, k, 0)
    if channel:
        get_row(y, at, view.dtype, K)
    else:
        vec.store(y, vec.splat(number(at, view.dtype)))


@njit(error_model="numpy")
def add(y, x, width):
    """y += x."""
    for i in range(0, 4 * width, ROW):
        vec.store(y + i, vec.add(vec.load(y + i), vec.load(x + i)))


@njit(error_model="numpy")
def sub(y, x, width):
    """y -= x."""
    for i in range(0, 4 * width, ROW):
        vec.store(y + i, vec.sub(vec.load(y + i), vec.load(x + i)))


@njit(error_model="numpy")
def exp(y, x, width):
    """y = exp(x)."""
    for i in range(0, 4 * width, ROW):
        vec.store(y + i, vec.exp(vec.load(x + i)))


@njit(error_model="numpy")
def decay(y, x, e, channel, width):
    """y = x * e; e has a number for each of x's (channel = 1), or is one vector of the same number (channel = 0)."""
    for i in range(0, 4 * width, ROW):
        vec.store(y + i, vec.mul(vec.load(x + i), vec.load(e + i * channel)))


@njit(error_model="numpy")
def decay_key(y, x, sums, g, width):
    """y = x * exp(sums), then sums += g."""
    for i in range(0, 4 * width, ROW):
        sums_i = vec.load(sums + i)
        vec.store(y + i, vec.mul(vec.load(x + i), vec.exp(sums_i)))
        vec.store(sums + i, vec.add(sums_i, vec.load(g + i)))


@njit(error_model="numpy")
def dot(x, y, width):
    """x . y."""
    a = vec.splat(ZERO)
    for i in range(0, 4 * width, ROW):
        a = vec.muladd(vec.load(x + i), vec.load(y + i), a)
    return vec.total(a)


@njit(error_model="numpy")
def add_rows(y, sign, scores, x, stride, first, n, R, width):
    """y += sign * sum over n rows of scores[i] * x[i], rows of a ring."""
    for c in range(0, 4 * width, 2 * ROW):
        a, b = vec.load(y + c), vec.load(y + c + ROW)
        for i in range(n):
            score, at = vec.splat(sign * vec.number(scores + 4 * i)), ring_row(x, stride, first, i, R) + c
            a, b = vec.muladd(score, vec.load(at), a), vec.muladd(score, vec.load(at + ROW), b)
        vec.store(y + c, a)
        vec.store(y + c + ROW, b)
