"""The short causal convolution before a recurrence, with its window: one launch for all its steps (conv.py)."""

import triton
import triton.language as tl


@triton.jit
def convolve_kernel(
    x, window, weight, bias, out, slots, head, count,
    B, s_xb, s_xc, s_xt, s_wn, s_wc, s_wt, s_kc, s_kt, s_b,
    CH: tl.constexpr, T: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    BB: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """x [B, CH, T] -> out [B, T, CH]; window [N, CH, C], weight [CH, W]. BB rows share the weights that a program
    loads. Grid: (cdiv(CH, BC), cdiv(B, BB))."""
    i_b, o_c = tl.program_id(1) * BB + tl.arange(0, BB), tl.program_id(0) * BC + tl.arange(0, BC)
    m_c = (o_c < CH) | (CH % BC == 0)
    i_slot = tl.load(slots + i_b, mask=i_b < B, other=-1).to(tl.int64)
    i_safe = tl.maximum(i_slot, 0)
    i_end = (tl.load(head + i_safe) + tl.load(count + i_safe)) % C  # C divides R, so a phase in head changes nothing
    i_long = i_b.to(tl.int64)
    m_x = (i_b < B)[:, None] & m_c[None, :]
    p_w, m_w = window + (i_safe * s_wn)[:, None] + (o_c * s_wc)[None, :], (i_slot >= 0)[:, None] & m_c[None, :]
    values, taps = (), ()
    for i in tl.static_range(W - 1):
        b_old = tl.load(p_w + ((i_end + C - (W - 1) + i) % C * s_wt)[:, None], mask=m_w, other=0.0)
        values = values + (b_old.to(x.dtype.element_ty),)
    for t in tl.static_range(T):
        p_x = x + (i_long * s_xb)[:, None] + (o_c * s_xc + t * s_xt)[None, :]
        values = values + (tl.load(p_x, mask=m_x, other=0.0),)
    for i in tl.static_range(W):
        taps = taps + (tl.load(weight + o_c * s_kc + i * s_kt, mask=m_c, other=0.0).to(tl.float32)[None, :],)
    b_bias = tl.load(bias + o_c * s_b, mask=m_c, other=0.0).to(tl.float32)[None, :] if BIAS else 0.0
    for t in tl.static_range(T):
        b_y = tl.zeros([BB, BC], tl.float32) + b_bias
        for i in tl.static_range(W):
            b_y += taps[i] * values[t + i].to(tl.float32)
        if SILU:
            b_y = b_y.to(weight.dtype.element_ty).to(tl.float32)
            b_y = b_y / (1.0 + tl.exp(-b_y))
        b_y = b_y.to(weight.dtype.element_ty).to(out.dtype.element_ty)
        tl.store(out + ((i_long * T + t) * CH)[:, None] + o_c[None, :], b_y, mask=m_x)
    for t in tl.static_range(T):
        tl.store(p_w + ((i_end + t) % C * s_wt)[:, None], values[W - 1 + t].to(window.dtype.element_ty), mask=m_w)
