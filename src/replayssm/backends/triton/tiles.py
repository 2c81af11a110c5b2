"""Blocks loaded as products on tensor cores want them, and products of more than 16 bits. Names as in kernel.py.

In such a product a thread has numbers from a few columns of a row. Which ones is fixed, but how columns are counted is
not: a sum has no order. So a block of C columns is loaded as [4, rows, C / 4], each thread C / 4 neighbours (of a state
16 bytes), and counted in the order in which products would have given it those. No number has to change threads.

Which dimension of a block neighbouring threads share follows from how contiguous its addresses are, and where several
are not at all, from Triton's version. So addresses carry a hint (``tl.max_contiguous``) that ranks the dimensions; it
is true of the first alone, the only one whose numbers are loaded together."""

import triton
import triton.language as tl


@triton.jit
def load_columns(p, m_row, i: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PAIRS: tl.constexpr):
    """Piece i, C columns of the rows at ``p``: [4, rows, C / 4].

    PAIRS: pieces 2 i and 2 i + 1 have alternate vectors of the same 2 C columns, so that the four threads of a row ask
    for them, a line of the cache, at once: in halves it comes later (docs/log.md). Stores must not do so, since they
    would write half sectors."""
    P: tl.constexpr = 2 if PAIRS and BK // C % 2 == 0 else 1
    o_c = i // P * P * C + i % P * (C // 4) + tl.arange(0, 4)[:, None] * (P * C // 4) + tl.arange(0, C // 4)[None, :]
    m_c = (o_c < K) | (K == BK)
    p_c = tl.max_contiguous(p[None, :, None] + o_c[:, None, :], [4, 2, 16])
    return tl.load(p_c, mask=m_row[None, :, None] & m_c[:, None, :], other=0.0)


@triton.jit
def ordered(b, W: tl.constexpr):
    """Of ``[4, rows, C / 4]`` the block ``[rows, C]`` as products count columns, W at a time to each of 4 threads."""
    M: tl.constexpr = b.shape[1]
    E: tl.constexpr = b.shape[2]
    return tl.reshape(tl.permute(tl.reshape(b, [4, M, E // W, W]), [1, 2, 0, 3]), [M, 4 * E])


@triton.jit
def unordered(b, W: tl.constexpr):
    """The inverse of :func:`ordered`."""
    M: tl.constexpr = b.shape[0]
    E: tl.constexpr = b.shape[1] // 4
    return tl.reshape(tl.permute(tl.reshape(b, [M, E // W, 4, W]), [2, 0, 1, 3]), [4, M, E])


@triton.jit
def by_thread(b):
    """Of a product ``[M, X]`` what each thread has, side by side: [4, 8, 2, X / 8, M / 8] are threads (i, j), and of
    each the columns ``2 i``, ``2 i + 1`` and so on in steps of 8, and rows ``j + 8 a``. Stored so, a thread's rows
    leave at once."""
    E: tl.constexpr = b.shape[0] // 8
    return tl.permute(tl.reshape(b, [E, 8, b.shape[1] // 8, 4, 2]), [3, 1, 4, 2, 0])


@triton.jit
def parts(b, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """``b`` as a sum of PARTS blocks of DTYPE, of float32 as tensor cores take it (the upper 19 bits); itself alone
    where that holds it."""
    if PARTS == 1 or (b.dtype.primitive_bitwidth <= 16 and (b.dtype == DTYPE or tl.float32 == DTYPE)):
        return (b.to(DTYPE),)
    else:
        b, out = b.to(tl.float32), ()
        for _ in tl.static_range(PARTS - 1):
            if tl.float32 == DTYPE:
                b_part = (b.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
            else:
                b_part = b.to(DTYPE)
            out, b = out + (b_part,), b - b_part.to(tl.float32)
        return out + (b.to(DTYPE),)


@triton.jit
def dot(a, b, y, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """``y + a @ b`` of two sums of blocks, from the smallest products that count to the largest."""
    for i in tl.static_range(PARTS - 1, -1, -1):
        for j in tl.static_range(i, -1, -1):
            if i - j < len(a) and j < len(b):
                y = tl.dot(a[i - j], b[j], acc=y, input_precision=PRECISION)
    return y


@triton.jit
def add_product(b_y, a, b, STATE: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """``b_y + a @ b^T``. Of what is exact to float32 (STATE), ``a`` in parts too, and each product from 0, as tensor
    cores truncate while they add; 16 bits need neither."""
    if tl.float32 == STATE:
        aa, bb = parts(a, PARTS, DTYPE), parts(tl.trans(b), PARTS, DTYPE)
        return b_y + dot(aa, bb, tl.zeros_like(b_y), PARTS, PRECISION)
    else:
        return dot(parts(a, 1, DTYPE), parts(tl.trans(b), 2, DTYPE), b_y, 2, PRECISION)


@triton.jit
def exp(x, EXACT: tl.constexpr):
    """``e^x`` of ``x <= 0``, EXACT to within a rounding: for decays that a float32 state takes at every token, since a
    GPU's own exponential is off by a few, and always in the same direction."""
    if not EXACT:
        return tl.exp(x)
    m_some = x > -87.0
    x = tl.where(m_some, x, 0.0)
    i = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - i * 0.693145751953125) - i * 1.428606765330187e-06  # ln 2 in two parts
    y = 1.0 / 720 + r * (1.0 / 5040)
    y = 1.0 / 24 + r * (1.0 / 120 + r * y)
    y = 1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6 + r * y)))
    return tl.where(m_some, y * ((i.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True), 0.0)
