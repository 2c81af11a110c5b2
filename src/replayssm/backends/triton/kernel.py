"""The second launch of a step, which streams the state. One source for every recurrence, switched by CHANNEL and ERASE.

The first, prepare.py, does all that needs no state: coefficients, and the append of k, w and g. Here each program owns
BV rows of one value head's state, reads them once, and writes outputs, d rows and, where the fold is due, the rows
themselves. Programs share nothing they write: an append goes to free ring rows only (ring.py), and each block of a
state has one owner.

With x a query or a key at token t, after all decay down to where it stands::

    x S_t = scale (x S0) + sum_r far_r d_r + sum_j near_tj d_j        r: ring rows, j: new tokens

so ``d_t = v_t - (k S_t)`` follows token by token, and ``o_t`` from it. The numbers lie in a workspace, float32, a value
head: far [X, BR], near [X, T], scale [T]; X = T queries, then with ERASE T keys.

Names: ``i_`` index, ``o_`` offsets, ``p_`` pointer, ``b_`` block value, ``m_`` mask.
"""

import triton
import triton.language as tl

from replayssm.backends.triton.folding import absorb


@triton.jit
def _dot(a, b, DTYPE: tl.constexpr):
    """``a [M, K] @ b [N, K]^T`` in float32 of two blocks taken as DTYPE, the second in two parts where it is wider."""
    b_high = b.to(DTYPE)
    y = tl.dot(a.to(DTYPE), tl.trans(b_high), input_precision="ieee")
    if b.dtype.primitive_bitwidth > b_high.dtype.primitive_bitwidth:
        y = tl.dot(a.to(DTYPE), tl.trans((b - b_high.to(b.dtype)).to(DTYPE)), acc=y, input_precision="ieee")
    return y


@triton.jit
def _operands(
    p_q, p_k, s_qt, s_kt, p_far, p_scale, o_k, m_k,
    T: tl.constexpr, X: tl.constexpr, BX: tl.constexpr, BR: tl.constexpr, CHANNEL: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """What :func:`_products` needs beside state and d: vectors, far and scale; DOT: as blocks, otherwise one by one."""
    o_r = tl.arange(0, BR)
    if DOT:
        o_x = tl.arange(0, BX)
        m_x = (o_x < X)[:, None]
        p_x = tl.where(o_x < T, p_q + o_x * s_qt, p_k + (o_x - T) * s_kt)[:, None]
        b_x = tl.load(p_x + o_k, mask=m_x & m_k, other=0.0)
        b_far = tl.load(p_far + o_x[:, None] * BR + o_r[None, :], mask=m_x, other=0.0)
        return b_x, b_far, 1.0 if CHANNEL else tl.load(p_scale + o_x % T)[None, :]
    else:
        loaded = ()
        for x in tl.static_range(X):
            p_x = p_q + x * s_qt if x < T else p_k + (x - T) * s_kt
            b_far = tl.load(p_far + x * BR + o_r)
            scale = 1.0 if CHANNEL else tl.load(p_scale + x % T)
            loaded = loaded + (tl.load(p_x + o_k, mask=m_k, other=0.0), b_far, scale)
        return loaded


@triton.jit
def _products(b_S, b_rd, operands, X: tl.constexpr, BX: tl.constexpr, DOT: tl.constexpr, DTYPE: tl.constexpr):
    """``scale (x S0) + sum_r far_r d_r`` of each vector x, X blocks [BV]; b_rd [BR, BV].

    DOT: products of b_S [BV, BK] on tensor cores, as DTYPE. Otherwise multiply-adds in float32, and K lies in pieces of
    BC, b_S [BV, NC, BC], so that neighbouring threads share few columns of a row and each keeps the same ones of all
    pieces: most of a sum needs no exchange between threads."""
    products = ()
    if DOT:
        b_x, b_far, scale = operands
        b_y = _dot(b_S, b_x, DTYPE) * scale
        b_y += _dot(tl.trans(b_rd), b_far, DTYPE)
        for x in tl.static_range(X):
            products = products + (tl.sum(tl.where((tl.arange(0, BX) == x)[None, :], b_y, 0.0), 1),)
    else:
        for x in tl.static_range(X):
            b_x, b_far, scale = operands[3 * x], operands[3 * x + 1], operands[3 * x + 2]
            b_y = tl.sum(tl.sum(b_S.to(tl.float32) * b_x.to(tl.float32)[None, :, :], 1), 1)
            products = products + (b_y * scale + tl.sum(b_rd * b_far[:, None], 0),)
    return products


@triton.jit
def read_kernel(
    q, k, v, out, slots, ckpt, ring_k, ring_d, ring_w, ring_g, head, count, work,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_ob, s_ot, s_oh,
    s_cn, s_ch, s_rkn, s_rkh, s_rdn, s_rdh, s_rwn, s_rwh, s_rgn, s_rgh,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    LIMIT: tl.constexpr, CHANNEL: tl.constexpr, ERASE: tl.constexpr,
    BK: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, BR: tl.constexpr, BX: tl.constexpr,
    WIDTH: tl.constexpr, AXIS_V: tl.constexpr, AXIS_B: tl.constexpr, AXIS_H: tl.constexpr, DOT: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Outputs of the step, new d rows, and folds. Grid: cdiv(V, BV), B and HV, in the order of AXIS_.

    q, k: the inputs, or with CHANNEL their decayed copies, one a value head. UPCAST: for the interpreter,
    which cannot multiply bf16."""
    X: tl.constexpr = 2 * T if ERASE else T
    DTYPE: tl.constexpr = tl.float32 if UPCAST else ckpt.dtype.element_ty
    EARLY: tl.constexpr = (32 if DOT else 16) >= X * T  # more of near would take too many registers
    i_v, i_b, i_h = tl.program_id(AXIS_V), tl.program_id(AXIS_B).to(tl.int64), tl.program_id(AXIS_H)
    i_x = i_h if CHANNEL else i_h // (HV // H)
    o_v, o_r = i_v * BV + tl.arange(0, BV), tl.arange(0, BR)
    m_v = o_v < V
    if DOT:
        o_k = tl.arange(0, BK)[None, :]
    else:
        o_k = tl.arange(0, BK // BC)[:, None] * BC + tl.arange(0, BC)[None, :]
    m_k = o_k < K
    # First all that needs no slot, while that is on its way; then the state, and ring rows once the cursors are there.
    i_slot = tl.load(slots + i_b).to(tl.int64)
    p_o, p_v = out + i_b * s_ob + i_h * s_oh + o_v, v + i_b * s_vb + i_h * s_vh + o_v
    p_q, p_k, p_far = q + i_b * s_qb + i_x * s_qh, k + i_b * s_kb + i_x * s_kh, work + (i_b * HV + i_h) * WIDTH
    p_near, p_scale = p_far + X * BR, p_far + X * (BR + T)
    vs, nears = (), ()
    for t in tl.static_range(T):
        vs = vs + (tl.load(p_v + t * s_vt, mask=m_v, other=0.0),)
    if EARLY:
        for i in tl.static_range(X * T):
            nears = nears + (tl.load(p_near + i),)
    operands = _operands(p_q, p_k, s_qt, s_kt, p_far, p_scale, o_k, m_k, T, X, BX, BR, CHANNEL, DOT)
    if i_slot < 0:
        for t in tl.static_range(T):
            tl.store(p_o + t * s_ot, tl.zeros([BV], p_o.dtype.element_ty), mask=m_v)
        return
    n, i_phased = tl.load(count + i_slot), tl.load(head + i_slot)
    i_head = i_phased % R
    p_S = ckpt + i_slot * s_cn + i_h * s_ch
    if DOT:
        b_S = tl.load(p_S + o_v[:, None] * K + o_k, mask=m_v[:, None] & m_k, other=0.0)
    else:
        m_S = m_v[:, None, None] & m_k[None, :, :]
        b_S = tl.load(p_S + o_v[:, None, None] * K + o_k[None, :, :], mask=m_S, other=0.0)
    p_rd, m_rd = ring_d + i_slot * s_rdn + i_h * s_rdh, (o_r < n)[:, None] & m_v[None, :]
    b_rd = tl.load(p_rd + ((i_head + o_r) % R)[:, None] * V + o_v[None, :], mask=m_rd, other=0.0)
    ys, ds = _products(b_S, b_rd.to(tl.float32), operands, X, BX, DOT, DTYPE), ()
    for t in tl.static_range(T):
        b_o, b_d = ys[t], vs[t].to(tl.float32)
        if ERASE:
            b_d -= ys[T + t]
            for j in tl.static_range(t):
                b_d -= ds[j] * (nears[(T + t) * T + j] if EARLY else tl.load(p_near + (T + t) * T + j))
        ds = ds + (b_d,)
        for j in tl.static_range(t + 1):
            b_o += ds[j] * (nears[t * T + j] if EARLY else tl.load(p_near + t * T + j))
        tl.store(p_o + t * s_ot, b_o.to(p_o.dtype.element_ty), mask=m_v)
        tl.store(p_rd + ((i_head + n + t) % R) * V + o_v, b_d.to(p_rd.dtype.element_ty), mask=m_v)
    if n > LIMIT - i_phased // R:
        p_rk, p_rg = ring_k + i_slot * s_rkn + (i_h // (HV // H)) * s_rkh, ring_g + i_slot * s_rgn + i_h * s_rgh
        p_rw = ring_w + i_slot * s_rwn + i_h * s_rwh
        absorb(p_S, p_rk, p_rd, p_rw, p_rg, i_head, n, i_v, K, V, R, CHANNEL, UPCAST, BK, BV, BF, BR)
