"""A step of one token in one launch: what pays while a layer's states are small. Names as in kernel.py.

Two forms of one kernel. FOLDS: the state first absorbs all rows of the ring and is written, then read: the plain
recurrence, one read and one write, which is all that any kernel of it moves. Otherwise, for a decay by head, it is
replay, where each program works out for itself the coefficients that prepare.py leaves for kernel.py: with few programs
at work that costs less than to wait for a first launch.
"""

import triton
import triton.language as tl

from replayssm.backends.triton.folding import absorb
from replayssm.backends.triton.tiles import exp


@triton.jit
def step_kernel(
    q, k, v, w, g, out, slots, ckpt, ring_k, ring_d, ring_w, ring_g, head, count,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_wb, s_wh, s_gb, s_gh, s_ob, s_oh,
    s_cn, s_ch, s_rkn, s_rkh, s_rdn, s_rdh, s_rwn, s_rwh, s_rgn, s_rgh,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, LIMIT: tl.constexpr,
    CHANNEL: tl.constexpr, ERASE: tl.constexpr, FOLDS: tl.constexpr, EPS: tl.constexpr, BK: tl.constexpr,
    BC: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """BV state rows of one value head a program. Grid: (B * HV * cdiv(V, BV),)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    EXACT: tl.constexpr = ckpt.dtype.element_ty == tl.float32
    pid = tl.program_id(0)
    i_v, i_h, i_b = pid % NV, (pid // NV) % HV, (pid // (NV * HV)).to(tl.int64)
    i_g = i_h // (HV // H)
    o_v, o_r = i_v * BV + tl.arange(0, BV), tl.arange(0, BR)
    o_k = tl.arange(0, BK // BC)[:, None] * BC + tl.arange(0, BC)[None, :]
    m_v, m_k = (o_v < V) | (V % BV == 0), (o_k < K) | (K == BK)
    i_slot = tl.load(slots + i_b).to(tl.int64)
    p_o = out + i_b * s_ob + i_h * s_oh + o_v
    if i_slot < 0:
        tl.store(p_o, tl.zeros([BV], p_o.dtype.element_ty), mask=m_v)
        return
    p_S, m_S = ckpt + i_slot * s_cn + i_h * s_ch, m_v[:, None, None] & m_k[None, :, :]
    p_block = tl.max_contiguous(p_S + o_v[:, None, None] * K + o_k[None, :, :], [4, 2, 16])
    b_S = tl.load(p_block, mask=m_S, other=0.0)
    n, i_phased = tl.load(count + i_slot), tl.load(head + i_slot)
    i_head = i_phased % R
    i_new = (i_head + n) % R
    p_rk, p_rd = ring_k + i_slot * s_rkn + i_g * s_rkh, ring_d + i_slot * s_rdn + i_h * s_rdh
    p_rw, p_rg = ring_w + i_slot * s_rwn + i_h * s_rwh, ring_g + i_slot * s_rgn + i_h * s_rgh
    p_g = g + i_b * s_gb + i_h * s_gh
    b_q = tl.load(q + i_b * s_qb + i_g * s_qh + o_k, mask=m_k, other=0.0)
    b_k = tl.load(k + i_b * s_kb + i_g * s_kh + o_k, mask=m_k, other=0.0)
    b_g = tl.load(p_g + o_k, mask=m_k, other=0.0) if CHANNEL else tl.load(p_g)
    b_d = tl.load(v + i_b * s_vb + i_h * s_vh + o_v, mask=m_v, other=0.0)
    b_w = tl.load(w + i_b * s_wb + i_h * s_wh)
    i_row, m_r = (i_head + o_r) % R, o_r < n
    if not FOLDS:
        p_far = tl.max_contiguous(p_rk + i_row[:, None, None] * K + o_k[None, :, :], [4, 2, 16])
        b_rk = tl.load(p_far, mask=m_r[:, None, None] & m_k[None, :, :], other=0.0)
        b_rd = tl.load(p_rd + i_row[:, None] * V + o_v[None, :], mask=m_r[:, None] & m_v[None, :], other=0.0)
        b_next = tl.load(p_rg + (i_head + o_r + 1) % R, mask=o_r + 1 < n, other=0.0)
        b_oldest = tl.load(p_rg + i_head, mask=n > 0, other=0.0)
        b_far = tl.load(p_rw + i_row, mask=m_r, other=0.0)
    if FOLDS:  # before what is stored below, which no load passes
        b_S = b_S.to(tl.float32)
        for i in range(n):
            i_old = (i_head + i) % R
            b_dw = tl.load(p_rd + i_old * V + o_v, mask=m_v, other=0.0).to(tl.float32) * tl.load(p_rw + i_old)
            b_old = tl.load(p_rk + i_old * K + o_k, mask=m_k, other=0.0).to(tl.float32)
            if CHANNEL:
                b_fade = tl.load(p_rg + i_old * K + o_k, mask=m_k, other=0.0).to(tl.float32)
                b_S *= exp(b_fade, EXACT)[None, :, :]
            else:
                b_S *= exp(tl.load(p_rg + i_old), EXACT)
            b_S += b_dw[:, None, None] * b_old[None, :, :]
        if n > 0:
            tl.store(p_block, b_S.to(p_S.dtype.element_ty), mask=m_S)
    b_q, b_k, b_g, b_w = b_q.to(tl.float32), b_k.to(tl.float32), b_g.to(tl.float32), b_w.to(tl.float32)
    unit_q, unit_k, b_decay = 1.0, 1.0, b_g
    if EPS > 0:
        unit_q = (K**-0.5) / tl.sqrt_rn(tl.sum(tl.sum(b_q * b_q, 0), 0) + EPS)
        unit_k = 1.0 / tl.sqrt_rn(tl.sum(tl.sum(b_k * b_k, 0), 0) + EPS)
        b_w *= unit_k
    b_near = tl.sum(tl.sum(b_q * b_k, 0), 0) * (unit_q * b_w)
    if i_v == 0:
        tl.store(p_rw + i_new, b_w)
        if CHANNEL:
            tl.store(p_rg + i_new * K + o_k, b_g.to(p_rg.dtype.element_ty), mask=m_k)
        else:
            tl.store(p_rg + i_new, b_g)
        if i_h % (HV // H) == 0:
            tl.store(p_rk + i_new * K + o_k, b_k.to(p_rk.dtype.element_ty), mask=m_k)
    if not FOLDS:
        b_far *= tl.exp(tl.cumsum(b_next, 0, reverse=True) + b_g)
        b_decay += tl.sum(b_next, 0) + b_oldest
    b_decay = exp(b_decay, EXACT)
    if CHANNEL:
        b_q, b_k, b_decay = b_q * b_decay, b_k * b_decay, 1.0
    b_S, b_d = b_S.to(tl.float32), b_d.to(tl.float32)
    b_o = tl.sum(tl.sum(b_S * b_q[None, :, :], 1), 1) * (b_decay * unit_q)
    if ERASE:
        b_d -= tl.sum(tl.sum(b_S * b_k[None, :, :], 1), 1) * (b_decay * unit_k)
    if not FOLDS:
        b_rk, b_rd = b_rk.to(tl.float32), b_rd.to(tl.float32)
        b_c = tl.sum(tl.sum(b_rk * b_q[None, :, :], 2), 1) * b_far * unit_q
        b_o += tl.sum(b_rd * b_c[:, None], 0)
        if ERASE:
            b_c = tl.sum(tl.sum(b_rk * b_k[None, :, :], 2), 1) * b_far * unit_k
            b_d -= tl.sum(b_rd * b_c[:, None], 0)
    tl.store(p_o, (b_o + b_d * b_near).to(p_o.dtype.element_ty), mask=m_v)
    tl.store(p_rd + i_new * V + o_v, b_d.to(p_rd.dtype.element_ty), mask=m_v)
    if not FOLDS:  # noqa: SIM102 (what one compiles and what runs)
        if n > tl.maximum(LIMIT - i_phased // R, 0):
            absorb(p_S, p_rk, p_rd, p_rw, p_rg, i_head, n, i_v, K, V, R, CHANNEL, UPCAST, BK, BV, 16, BR)
