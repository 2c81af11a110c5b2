"""The fold, alone or at the end of a step, and what it shares with kernel.py (whose names hold here)."""

import triton
import triton.language as tl


@triton.jit
def _parts(b, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """``b`` as a sum of PARTS blocks of DTYPE; itself alone where it is as narrow."""
    if b.dtype.primitive_bitwidth <= DTYPE.primitive_bitwidth:
        return (b.to(DTYPE),)
    else:
        out = ()
        for _ in tl.static_range(PARTS):
            b_part = b.to(DTYPE)
            out, b = out + (b_part,), b - b_part.to(b.dtype)
        return out


@triton.jit
def _dot(a, b, y, PARTS: tl.constexpr):
    """``y + a @ b`` of two sums of blocks, from the smallest products that count to the largest."""
    for i in tl.static_range(PARTS - 1, -1, -1):
        for j in tl.static_range(i, -1, -1):
            if i - j < len(a) and j < len(b):
                y = tl.dot(a[i - j], b[j], acc=y, input_precision="ieee")
    return y


@triton.jit
def absorb(
    p_S, p_rk, p_rd, p_rw, p_rg, i_head, n, i_v,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr, UPCAST: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """State rows ``[i_v BV, (i_v + 1) BV)`` of one value head absorb the first ``n > 0`` ring rows, BF at a time.

    On tensor cores, with ``d w`` and decayed keys in parts of 16 bits: three, all of a float32, where the state is of
    float32, otherwise two. A step has the state in registers, but holding it back would cost them to every program
    while few fold; here it comes from L2. UPCAST: for Triton's interpreter, which cannot multiply bf16."""
    PARTS: tl.constexpr = 1 if UPCAST else 3 if p_S.dtype.element_ty == tl.float32 else 2
    NARROW: tl.constexpr = tl.float16 if p_S.dtype.element_ty == tl.float16 else tl.bfloat16
    DTYPE: tl.constexpr = tl.float32 if UPCAST else NARROW
    BP: tl.constexpr = min(BK, 32 if CHANNEL and PARTS == 3 else 64)  # columns at a time: more takes too many registers
    o_r = tl.arange(0, BR)
    i_row = (i_head + o_r) % R
    b_w = tl.load(p_rw + i_row, mask=o_r < n, other=0.0)
    b_decay = 1.0
    if not CHANNEL:  # suffix sums of log-decays, never differences of prefix sums
        b_next = tl.load(p_rg + (i_head + o_r + 1) % R, mask=o_r + 1 < n, other=0.0)
        b_w *= tl.exp(tl.cumsum(b_next, 0, reverse=True))
        b_decay = tl.exp(tl.sum(b_next, 0) + tl.load(p_rg + i_head))
    for i_k in range(0, BK, BP):
        o_k = i_k + tl.arange(0, BP)
        m_row = (o_r < n)[:, None] & (o_k < K)[None, :]
        b_k = tl.load(p_rk + i_row[:, None] * K + o_k[None, :], mask=m_row, other=0.0)
        b_S_decay = b_decay
        if CHANNEL:
            b_g = tl.load(p_rg + i_row[:, None] * K + o_k[None, :], mask=m_row, other=0.0)
            # As a product, for a scan goes lane by lane.
            b_later = tl.where(o_r[None, :] > o_r[:, None], 1.0, 0.0).to(DTYPE)
            b_after = _dot((b_later,), _parts(b_g, PARTS, DTYPE), tl.zeros([BR, BP], tl.float32), PARTS)
            b_k = b_k.to(tl.float32) * tl.exp(tl.minimum(b_after, 0.0))
            b_S_decay = tl.exp(tl.sum(b_g, 0))[None, :]
        keys = _parts(b_k, PARTS, DTYPE)
        for i_f in range(0, BV, BF):
            o_v = i_v * BV + i_f + tl.arange(0, BF)
            m_v = o_v < V
            p_block, m_S = p_S + o_v[:, None] * K + o_k[None, :], m_v[:, None] & (o_k < K)[None, :]
            p_d, m_d = p_rd + o_v[:, None] + i_row[None, :] * V, m_v[:, None] & (o_r < n)[None, :]
            b_d = tl.load(p_d, mask=m_d, other=0.0).to(tl.float32) * b_w[None, :]
            b_new = _dot(_parts(b_d, PARTS, DTYPE), keys, tl.zeros([BF, BP], tl.float32), PARTS)
            b_new += tl.load(p_block, mask=m_S, other=0.0).to(tl.float32) * b_S_decay
            tl.store(p_block, b_new.to(p_S.dtype.element_ty), mask=m_S)


@triton.jit
def fold_kernel(
    slots, rows, ckpt, ring_k, ring_d, ring_w, ring_g, head,
    s_cn, s_ch, s_kn, s_kh, s_dn, s_dh, s_wn, s_wh, s_gn, s_gh,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr,
    UPCAST: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Stand-alone fold of the first ``rows[b]`` committed rows. Grid: (cdiv(V, BV), HV, B)."""
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_slot, n = tl.load(slots + i_b).to(tl.int64), tl.load(rows + i_b)
    if (i_slot < 0) | (n <= 0):
        return
    p_k, p_g = ring_k + i_slot * s_kn + (i_h // (HV // H)) * s_kh, ring_g + i_slot * s_gn + i_h * s_gh
    p_S, p_d = ckpt + i_slot * s_cn + i_h * s_ch, ring_d + i_slot * s_dn + i_h * s_dh
    p_w, i_head = ring_w + i_slot * s_wn + i_h * s_wh, tl.load(head + i_slot) % R
    absorb(p_S, p_k, p_d, p_w, p_g, i_head, n, i_v, K, V, R, CHANNEL, UPCAST, BK, BV, BF, BR)
