"""The short causal convolution before a recurrence, with its window: one launch for all its steps (conv.py)."""

import triton
import triton.language as tl


@triton.jit
def convolve_kernel(
    x, window, weight, bias, out, slots, head, count,
    s_xb, s_xc, s_xt, s_wn, s_wc, s_wt, s_kc, s_kt, s_b,
    CH: tl.constexpr, T: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """x [B, CH, T] -> out [B, T, CH]; window [N, CH, C], weight [CH, W]. Grid: (B, cdiv(CH, BC))."""
    i_b, o_c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BC + tl.arange(0, BC)
    m_c, i_slot = (o_c < CH) | (CH % BC == 0), tl.load(slots + i_b).to(tl.int64)
    taps, inputs = (), ()
    for i in tl.static_range(W):
        taps = taps + (tl.load(weight + o_c * s_kc + i * s_kt, mask=m_c, other=0.0).to(tl.float32),)
    for t in tl.static_range(T):
        inputs = inputs + (tl.load(x + i_b * s_xb + o_c * s_xc + t * s_xt, mask=m_c, other=0.0),)
    b_bias = tl.load(bias + o_c * s_b, mask=m_c, other=0.0).to(tl.float32) if BIAS else tl.zeros([BC], tl.float32)
    i_safe = tl.maximum(i_slot, 0)
    i_end = (tl.load(head + i_safe) + tl.load(count + i_safe)) % C  # C divides R, so a phase in head changes nothing
    p_w, m_w = window + i_safe * s_wn + o_c * s_wc, o_c < tl.where(i_slot >= 0, CH, 0)
    values = ()
    for i in tl.static_range(W - 1):
        b_old = tl.load(p_w + (i_end + C - (W - 1) + i) % C * s_wt, mask=m_w, other=0.0)
        values = values + (b_old.to(x.dtype.element_ty).to(tl.float32),)
    for t in tl.static_range(T):
        values = values + (inputs[t].to(tl.float32),)
    for t in tl.static_range(T):
        b_y = b_bias
        for i in tl.static_range(W):
            b_y += taps[i] * values[t + i]
        if SILU:
            b_y = b_y.to(weight.dtype.element_ty).to(tl.float32)
            b_y = b_y / (1.0 + tl.exp(-b_y))
        b_y = b_y.to(weight.dtype.element_ty).to(out.dtype.element_ty)
        tl.store(out + (i_b * T + t) * CH + o_c, b_y, mask=m_c)
        tl.store(p_w + (i_end + t) % C * s_wt, inputs[t].to(window.dtype.element_ty), mask=m_w)
