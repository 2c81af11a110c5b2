"""The fold, alone or at the end of a step, and what it shares with kernel.py (whose names hold here)."""

import triton
import triton.language as tl


@triton.jit
def high_part(x):
    """The leading 11 bits of a float32's mantissa: what a tf32 product sees of it."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _folded(b_S, b_decay, b_dw, b_k, UPCAST: tl.constexpr):
    """``S decay + dw k`` to float32 accuracy: b_S [BV, BK], b_dw [BV, BR] float32, b_k [BR, BK]. bf16 keys take three
    bf16 products, whose parts of dw hold all of its 24 bits; others, or all with UPCAST, plain multiply-adds."""
    b_S = b_S.to(tl.float32) * b_decay
    if UPCAST or b_k.dtype != tl.bfloat16:
        return tl.dot(b_dw, b_k.to(tl.float32), acc=b_S, input_precision="ieee")
    else:
        b_1 = b_dw.to(tl.bfloat16)
        b_dw -= b_1.to(tl.float32)
        b_2 = b_dw.to(tl.bfloat16)
        b_3 = (b_dw - b_2.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(b_1, b_k, acc=tl.dot(b_2, b_k, acc=tl.dot(b_3, b_k, acc=b_S)))


@triton.jit
def keys(p_k, p_g, i_head, n, o_r, o_k, m_k, K: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr):
    """Keys of the first ``n`` ring rows, [BR, BK]; with decay by channel, decayed to the last of them, in float32, and
    the log-decay over all of them, [BK] (otherwise 0.0). Suffix sums, never differences of prefix sums."""
    i_row = (i_head + o_r) % R
    m_row = (o_r < n)[:, None] & m_k[None, :]
    b_k = tl.load(p_k + i_row[:, None] * K + o_k[None, :], mask=m_row, other=0.0)
    if CHANNEL:
        b_g = tl.load(p_g + i_row[:, None] * K + o_k[None, :], mask=m_row, other=0.0)
        b_later = tl.where(o_r[None, :] > o_r[:, None], 1.0, 0.0)  # (i, l): a product, for a scan goes lane by lane
        b_1 = high_part(b_g)  # 0 and 1 are exact in tf32, and g is in three parts
        b_2 = high_part(b_g - b_1)
        b_after = tl.dot(b_later, b_g - b_1 - b_2, input_precision="tf32")
        b_after = tl.dot(b_later, b_2, acc=b_after, input_precision="tf32")
        b_after = tl.dot(b_later, b_1, acc=b_after, input_precision="tf32")
        return b_k.to(tl.float32) * tl.exp(tl.minimum(b_after, 0.0)), tl.sum(b_g, 0)
    else:
        return b_k, 0.0


@triton.jit
def fold_rows(
    p_S, p_rk, p_rd, p_rw, p_rg, i_head, n, i_v0,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr, UPCAST: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """State rows ``[i_v0, i_v0 + BV)`` of one value head absorb the first ``n > 0`` ring rows, BF at a time."""
    o_k, o_r = tl.arange(0, BK), tl.arange(0, BR)
    m_k, m_r, i_row = o_k < K, o_r < n, (i_head + o_r) % R
    b_rk, b_total = keys(p_rk, p_rg, i_head, n, o_r, o_k, m_k, K, R, CHANNEL)
    b_keep = tl.load(p_rw + i_row, mask=m_r, other=0.0)
    if CHANNEL:
        b_decay = tl.exp(b_total)[None, :]
    else:
        b_next = tl.load(p_rg + (i_head + o_r + 1) % R, mask=o_r + 1 < n, other=0.0)
        b_keep *= tl.exp(tl.cumsum(b_next, 0, reverse=True))
        b_decay = tl.exp(tl.sum(b_next, 0) + tl.load(p_rg + i_head))
    for i in range(0, BV, BF):
        o_v = i_v0 + i + tl.arange(0, BF)
        m_v = o_v < V
        m_S = m_v[:, None] & m_k[None, :]
        p_block = p_S + o_v[:, None] * K + o_k[None, :]
        p_d = p_rd + o_v[:, None] + i_row[None, :] * V
        b_dw = tl.load(p_d, mask=m_v[:, None] & m_r[None, :], other=0.0).to(tl.float32) * b_keep[None, :]
        b_S = _folded(tl.load(p_block, mask=m_S, other=0.0), b_decay, b_dw, b_rk, UPCAST)
        tl.store(p_block, b_S.to(p_S.dtype.element_ty), mask=m_S)


@triton.jit
def fold_kernel(
    slots, rows, ckpt, ring_k, ring_d, ring_w, ring_g, head,
    s_cn, s_ch, s_kn, s_kh, s_dn, s_dh, s_wn, s_wh, s_gn, s_gh,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr,
    UPCAST: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Stand-alone fold of the first ``rows[b]`` committed rows. Grid: (B * HV * cdiv(V, BV),)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v, i_h, i_b = pid % NV, (pid // NV) % HV, pid // (NV * HV)
    i_slot, n = tl.load(slots + i_b).to(tl.int64), tl.load(rows + i_b)
    if (i_slot < 0) | (n <= 0):
        return
    p_k, p_g = ring_k + i_slot * s_kn + (i_h // (HV // H)) * s_kh, ring_g + i_slot * s_gn + i_h * s_gh
    p_S, p_d = ckpt + i_slot * s_cn + i_h * s_ch, ring_d + i_slot * s_dn + i_h * s_dh
    p_w, i_head = ring_w + i_slot * s_wn + i_h * s_wh, tl.load(head + i_slot)
    fold_rows(p_S, p_k, p_d, p_w, p_g, i_head, n, i_v * BV, K, V, R, CHANNEL, UPCAST, BK, BV, BF, BR)
