"""The fold, alone or at the end of a step, and what it shares with kernel.py (whose names hold here)."""

import triton
import triton.language as tl


@triton.jit
def absorb(
    p_S, p_rk, p_rd, p_rw, p_rg, b_total, i_head, n, i_v, o_k, m_k,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr,
    BV: tl.constexpr, BF: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """State rows ``[i_v BV, (i_v + 1) BV)`` of one value head absorb the first ``n`` ring rows, BF at a time.

    From the newest ring row to the oldest, each times its decay so far; b_total: the decay of all of them. A step has
    the state in registers, but holding it back would cost them to every program while few fold; here it comes from L2.
    o_k [NC, BC], see kernel.py; b_total [NC, BC] or a
    number. AHEAD: ring rows loaded at once."""
    for i_f in range(0, BV, BF):
        o_v = i_v * BV + i_f + tl.arange(0, BF)
        m_v = o_v < V
        m_S = m_v[:, None, None] & m_k[None, :, :]
        p_block = p_S + o_v[:, None, None] * K + o_k[None, :, :]
        b_S = tl.load(p_block, mask=m_S, other=0.0).to(tl.float32) * b_total
        b_back = tl.zeros(o_k.shape, tl.float32) if CHANNEL else 0.0  # log-decay over the rows so far
        for i in range(0, n, AHEAD):
            rows = ()
            for a in tl.static_range(AHEAD):
                i_row = (i_head + tl.maximum(n - 1 - i - a, 0)) % R  # past the oldest row: that again, with w 0
                b_k = tl.load(p_rk + i_row * K + o_k, mask=m_k, other=0.0)
                b_d = tl.load(p_rd + i_row * V + o_v, mask=m_v, other=0.0)
                b_w = tl.where(n > i + a, tl.load(p_rw + i_row), 0.0)
                if CHANNEL:
                    b_g = tl.load(p_rg + i_row * K + o_k, mask=m_k, other=0.0)
                else:
                    b_g = tl.load(p_rg + i_row)
                rows = rows + (b_k, b_d, b_w, b_g)
            for a in tl.static_range(AHEAD):
                b_k, b_d, b_w = rows[4 * a].to(tl.float32), rows[4 * a + 1].to(tl.float32), rows[4 * a + 2]
                if CHANNEL:
                    b_k *= tl.exp(b_back)
                else:
                    b_w *= tl.exp(b_back)
                b_S += (b_d * b_w)[:, None, None] * b_k[None, :, :]
                b_back += rows[4 * a + 3]
        tl.store(p_block, b_S.to(p_S.dtype.element_ty), mask=m_S)


@triton.jit
def absorb_dot(
    p_S, p_rk, p_rd, p_rw, p_rg, b_total, i_head, n, i_v,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, BR: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """:func:`absorb` on tensor cores, for states of 16 bits: ``d w`` and decayed keys each in two parts of DTYPE, which
    is finer by far than the rounding of the state. b_total [1, BK] or a number."""
    o_k, o_r = tl.arange(0, BK), tl.arange(0, BR)
    i_row = (i_head + o_r) % R
    m_row = (o_r < n)[:, None] & (o_k < K)[None, :]
    b_k = tl.load(p_rk + i_row[:, None] * K + o_k[None, :], mask=m_row, other=0.0)
    b_w = tl.load(p_rw + i_row, mask=o_r < n, other=0.0)
    if CHANNEL:
        b_g = tl.load(p_rg + i_row[:, None] * K + o_k[None, :], mask=m_row, other=0.0)
        b_later = tl.where(o_r[None, :] > o_r[:, None], 1.0, 0.0).to(DTYPE)  # as a product: a scan goes lane by lane
        b_k = b_k.to(tl.float32) * tl.exp(tl.minimum(_dot2(b_later, b_g, DTYPE), 0.0))
    else:
        b_next = tl.load(p_rg + (i_head + o_r + 1) % R, mask=o_r + 1 < n, other=0.0)
        b_w *= tl.exp(tl.cumsum(b_next, 0, reverse=True))
    for i_f in range(0, BV, BF):
        o_v = i_v * BV + i_f + tl.arange(0, BF)
        m_v = o_v < V
        p_block, m_S = p_S + o_v[:, None] * K + o_k[None, :], m_v[:, None] & (o_k < K)[None, :]
        m_d = m_v[:, None] & (o_r < n)[None, :]
        b_d = tl.load(p_rd + o_v[:, None] + i_row[None, :] * V, mask=m_d, other=0.0).to(tl.float32) * b_w[None, :]
        b_d_high = b_d.to(DTYPE)
        b_new = _dot2(b_d_high, b_k, DTYPE) + _dot2((b_d - b_d_high.to(tl.float32)).to(DTYPE), b_k, DTYPE)
        b_new += tl.load(p_block, mask=m_S, other=0.0).to(tl.float32) * b_total
        tl.store(p_block, b_new.to(p_S.dtype.element_ty), mask=m_S)


@triton.jit
def _dot2(a, b, DTYPE: tl.constexpr):
    """``a @ b`` in float32 of ``a`` of DTYPE, with ``b`` in two parts of it where it is wider."""
    b_high = b.to(DTYPE)
    y = tl.dot(a, b_high, input_precision="ieee")
    if b.dtype.primitive_bitwidth > b_high.dtype.primitive_bitwidth:
        y = tl.dot(a, (b - b_high.to(b.dtype)).to(DTYPE), acc=y, input_precision="ieee")
    return y


@triton.jit
def fold_kernel(
    slots, rows, ckpt, ring_k, ring_d, ring_w, ring_g, head,
    s_cn, s_ch, s_kn, s_kh, s_dn, s_dh, s_wn, s_wh, s_gn, s_gh,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr,
    BK: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Stand-alone fold of the first ``rows[b]`` committed rows. Grid: (cdiv(V, BV), HV, B)."""
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_slot, n = tl.load(slots + i_b).to(tl.int64), tl.load(rows + i_b)
    if (i_slot < 0) | (n <= 0):
        return
    i_head = tl.load(head + i_slot)
    p_k, p_g = ring_k + i_slot * s_kn + (i_h // (HV // H)) * s_kh, ring_g + i_slot * s_gn + i_h * s_gh
    p_d, p_w = ring_d + i_slot * s_dn + i_h * s_dh, ring_w + i_slot * s_wn + i_h * s_wh
    o_k = tl.arange(0, BK // BC)[:, None] * BC + tl.arange(0, BC)[None, :]
    m_k = o_k < K
    b_all = tl.zeros(o_k.shape, tl.float32) if CHANNEL else 0.0
    for i in range(n):
        i_row = (i_head + i) % R
        b_all += tl.load(p_g + i_row * K + o_k, mask=m_k, other=0.0) if CHANNEL else tl.load(p_g + i_row)
    b_total = tl.exp(b_all)
    p_S = ckpt + i_slot * s_cn + i_h * s_ch
    absorb(p_S, p_k, p_d, p_w, p_g, b_total, i_head, n, i_v, o_k, m_k, K, V, R, CHANNEL, BV, BV, AHEAD)
