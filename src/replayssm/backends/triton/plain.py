"""The plain recurrence in one launch, for pools that fold every step (``fold_every=1``, one token a step).

The row that the last step committed is absorbed in the pass that reads the new token's output: one read and one write
of the state, which is all that any kernel of the plain recurrence moves. The baseline, and what pays at small batch.
Names as in kernel.py.
"""

import triton
import triton.language as tl


@triton.jit
def plain_kernel(
    q, k, v, w, g, out, slots, ckpt, ring_k, ring_d, ring_w, ring_g, head, count,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_wb, s_wh, s_gb, s_gh, s_ob, s_oh,
    s_cn, s_ch, s_rkn, s_rkh, s_rdn, s_rdh, s_rwn, s_rwh, s_rgn, s_rgh,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    CHANNEL: tl.constexpr, ERASE: tl.constexpr, EPS: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One token; BV state rows of one value head a program. Grid: (B * HV * cdiv(V, BV),)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v, i_h, i_b = pid % NV, (pid // NV) % HV, (pid // (NV * HV)).to(tl.int64)
    i_g = i_h // (HV // H)
    o_v, o_k = i_v * BV + tl.arange(0, BV), tl.arange(0, BK // BC)[:, None] * BC + tl.arange(0, BC)[None, :]
    m_v, m_k = o_v < V, o_k < K
    i_slot = tl.load(slots + i_b).to(tl.int64)
    p_o = out + i_b * s_ob + i_h * s_oh + o_v
    if i_slot < 0:
        tl.store(p_o, tl.zeros([BV], p_o.dtype.element_ty), mask=m_v)
        return
    m_S = m_v[:, None, None] & m_k[None, :, :]
    p_S = ckpt + i_slot * s_cn + i_h * s_ch + o_v[:, None, None] * K + o_k[None, :, :]
    b_S = tl.load(p_S, mask=m_S, other=0.0).to(tl.float32)
    n, i_head = tl.load(count + i_slot), tl.load(head + i_slot) % R
    i_new = (i_head + n) % R
    p_rk, p_rd = ring_k + i_slot * s_rkn + i_g * s_rkh + o_k, ring_d + i_slot * s_rdn + i_h * s_rdh + o_v
    p_rw, p_rg = ring_w + i_slot * s_rwn + i_h * s_rwh, ring_g + i_slot * s_rgn + i_h * s_rgh
    p_g = g + i_b * s_gb + i_h * s_gh
    b_q = tl.load(q + i_b * s_qb + i_g * s_qh + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_k = tl.load(k + i_b * s_kb + i_g * s_kh + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_d = tl.load(v + i_b * s_vb + i_h * s_vh + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_w = tl.load(w + i_b * s_wb + i_h * s_wh).to(tl.float32)
    if EPS > 0:
        unit_k = 1.0 / tl.sqrt_rn(tl.sum(tl.sum(b_k * b_k, 0), 0) + EPS)
        b_q *= (K**-0.5) / tl.sqrt_rn(tl.sum(tl.sum(b_q * b_q, 0), 0) + EPS)
        b_w *= unit_k
    if n > 0:
        b_dw = tl.load(p_rd + i_head * V, mask=m_v, other=0.0).to(tl.float32) * tl.load(p_rw + i_head)
        b_rk = tl.load(p_rk + i_head * K, mask=m_k, other=0.0).to(tl.float32)
        if CHANNEL:
            b_S *= tl.exp(tl.load(p_rg + i_head * K + o_k, mask=m_k, other=0.0))[None, :, :]
        else:
            b_S *= tl.exp(tl.load(p_rg + i_head))
        b_S += b_dw[:, None, None] * b_rk[None, :, :]
        tl.store(p_S, b_S.to(p_S.dtype.element_ty), mask=m_S)
    b_near = tl.sum(tl.sum(b_q * b_k, 0), 0) * b_w
    if i_h % (HV // H) == 0 and i_v == 0:
        tl.store(p_rk + i_new * K, b_k.to(p_rk.dtype.element_ty), mask=m_k)
    if EPS > 0:
        b_k *= unit_k
    if CHANNEL:
        b_g = tl.load(p_g + o_k, mask=m_k, other=0.0).to(tl.float32)
        if i_v == 0:
            tl.store(p_rg + i_new * K + o_k, b_g, mask=m_k)
        b_q, b_k, b_scale = b_q * tl.exp(b_g), b_k * tl.exp(b_g), 1.0
    else:
        b_g = tl.load(p_g).to(tl.float32)
        if i_v == 0:
            tl.store(p_rg + i_new, b_g)
        b_scale = tl.exp(b_g)
    if i_v == 0:
        tl.store(p_rw + i_new, b_w)
    if ERASE:
        b_d -= tl.sum(tl.sum(b_S * b_k[None, :, :], 1), 1) * b_scale
    b_o = tl.sum(tl.sum(b_S * b_q[None, :, :], 1), 1) * b_scale + b_near * b_d
    tl.store(p_o, b_o.to(p_o.dtype.element_ty), mask=m_v)
    tl.store(p_rd + i_new * V, b_d.to(p_rd.dtype.element_ty), mask=m_v)
