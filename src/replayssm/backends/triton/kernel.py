"""The second launch of a step, which streams the state. One source for every recurrence, switched by CHANNEL and ERASE.

The first, prepare.py, does all that needs no state: coefficients, and the append of k, w and g. Here each program owns
BV rows of one value head's state, reads them once, and writes outputs, d rows and, where the fold is due, the rows
themselves. Programs share nothing they write: an append goes to free ring rows only (ring.py), and each block of a
state has one owner.

With x a query or a key at token t, after all decay down to where it stands::

    x S_t = scale (x S0) + sum_r far_r d_r + sum_j near_tj d_j        r: ring rows, j: new tokens

so ``d_t = v_t - (k S_t)`` follows token by token, and ``o_t`` from it. The numbers lie in a workspace, float32, a value
head: far [X, BR], near [T, X], scale [X]; X = T queries, then with ERASE T keys. For a fold::

    S = decay S0 + sum_r keep_r d_r key_r                             keep [BR], decay [1]; CHANNEL: decay [K]

with CHANNEL of keys that are decayed. Where a row's slot is, where its ring and whether it folds: meta [B, 4].

EARLY (NVIDIA, from Hopper on): programs may start while those of the first launch end, so each waits for what that has
written before it loads anything, and, since a later launch waits for this one alone, whether it loads or not.

One warp a program, in one of two ways. DOT: products on tensor cores, which take their operands from the registers that
the loads fill, since columns and rows are counted in the order that suits both (tiles.py); so no thread waits for
another, and every load stands before the first product. Otherwise, for one token on float32 states: multiply-adds.

Names: ``i_`` index, ``o_`` offsets, ``p_`` pointer, ``b_`` block value, ``m_`` mask.
"""

import triton
import triton.language as tl

from replayssm.backends.triton.folding import absorb, absorb_prepared
from replayssm.backends.triton.tiles import add_product, by_thread, load_columns, ordered


@triton.jit
def read_kernel(
    q, k, v, out, ckpt, ring_k, ring_d, ring_w, ring_g, keys, meta, work, decays,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_ob, s_ot, s_oh,
    s_cn, s_ch, s_rkn, s_rkh, s_rdn, s_rdh, s_rwn, s_rwh, s_rgn, s_rgh,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    CHANNEL: tl.constexpr, ERASE: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
    BX: tl.constexpr, WIDTH: tl.constexpr, AXIS_V: tl.constexpr, AXIS_B: tl.constexpr, AXIS_H: tl.constexpr,
    DOT: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Outputs of the step, new d rows, and folds. Grid: cdiv(V, BV), B and HV, in the order of AXIS_.

    q, k: the inputs, or with CHANNEL their decayed copies, one a value head. keys [B, HV, BR, K], decays [B, HV, K]: of
    a fold with CHANNEL. UPCAST: for the interpreter and old GPUs, which cannot multiply bf16."""
    i_v, i_b, i_h = tl.program_id(AXIS_V), tl.program_id(AXIS_B).to(tl.int64), tl.program_id(AXIS_H)
    i_x, i_bh, p_meta = i_h if CHANNEL else i_h // (HV // H), i_b * HV + i_h, meta + i_b * 4
    if EARLY:
        tl.extra.cuda.gdc_wait()  # for the first launch's results
    i_slot, i_head, n, due = tl.load(p_meta).to(tl.int64), tl.load(p_meta + 1), tl.load(p_meta + 2), tl.load(p_meta + 3)
    p_v, p_o, p_work = v + i_b * s_vb + i_h * s_vh, out + i_b * s_ob + i_h * s_oh, work + i_bh * WIDTH
    p_q, p_k = q + i_b * s_qb + i_x * s_qh, k + i_b * s_kb + i_x * s_kh
    p_S, p_rd = ckpt + i_slot * s_cn + i_h * s_ch, ring_d + i_slot * s_rdn + i_h * s_rdh
    p_rk = ring_k + i_slot * s_rkn + (i_h // (HV // H)) * s_rkh
    if DOT:
        p_keys = keys + i_bh * BR * K if CHANNEL else p_rk
        _by_products(
            p_q, p_k, p_v, p_o, p_S, p_rd, p_keys, p_work, decays + i_bh * K, i_slot, i_head, n, due, i_v,
            s_qt, s_kt, s_vt, s_ot,
            T, K, V, R, CHANNEL, ERASE, BK, BC, BV, BR, BX, PARTS, PRECISION, UPCAST,
        )  # fmt: skip
    else:
        p_rw, p_rg = ring_w + i_slot * s_rwn + i_h * s_rwh, ring_g + i_slot * s_rgn + i_h * s_rgh
        _by_multiply_adds(
            p_q, p_k, p_v, p_o, p_S, p_rd, p_rk, p_rw, p_rg, p_work, i_slot, i_head, n, due, i_v,
            K, V, R, CHANNEL, ERASE, BK, BC, BV, BR, UPCAST,
        )  # fmt: skip


@triton.jit
def _by_products(
    p_q, p_k, p_v, p_o, p_S, p_rd, p_keys, p_work, p_decay, i_slot, i_head, n, due, i_v, s_qt, s_kt, s_vt, s_ot,
    T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr, ERASE: tl.constexpr,
    BK: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr, BX: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """All queries and keys at once, [BV, BX]; BC columns a product."""
    X: tl.constexpr = 2 * T if ERASE else T
    STATE: tl.constexpr = p_S.dtype.element_ty
    DTYPE: tl.constexpr = tl.float32 if UPCAST else STATE
    # Neighbours that a thread has of an operand of 32 bits: by the narrower side, as Triton counts them.
    W: tl.constexpr = 32 // min(STATE.primitive_bitwidth, p_q.dtype.element_ty.primitive_bitwidth)
    WD: tl.constexpr = 32 // min(STATE.primitive_bitwidth, p_rd.dtype.element_ty.primitive_bitwidth)
    E: tl.constexpr = BV // 8
    o_m, o_x = tl.arange(0, BV), tl.arange(0, BX)
    o_v = i_v * BV + o_m % 8 * E + o_m // 8  # so that a thread's rows of a product are neighbours, as it loads d
    m_v, m_x = (o_v < V) | (V % BV == 0), (o_x < X) | (BX == X)
    p_out, m_out = p_o + o_x[None, :] * s_ot + o_v[:, None], m_v[:, None] & ((o_x < T) | (BX == T))[None, :]
    p_near, p_scale = p_work + X * BR, p_work + X * (BR + T)
    vs, nears, xs, fars, Ss, ds = (), (), (), (), (), ()
    for t in tl.static_range(T):
        vs = vs + (tl.load(p_v + t * s_vt + o_v, mask=m_v, other=0.0),)
    p_x = tl.where(o_x < T, p_q + o_x * s_qt, p_k + (o_x - T) * s_kt)
    for i in tl.static_range(BK // BC):
        xs = xs + (load_columns(p_x, m_x, i, K, BK, BC, True),)
    for t in tl.static_range(T):
        nears = nears + (tl.load(p_near + t * X + o_x, mask=m_x, other=0.0),)
    for i in tl.static_range(BR // 16):
        fars = fars + (load_columns(p_work + o_x * BR, m_x, i, BR, BR, 16, False),)
    scale = 1.0 if CHANNEL else tl.load(p_scale + o_x, mask=m_x, other=0.0)[None, :]
    if i_slot < 0:
        tl.store(p_out, tl.zeros([BV, BX], p_o.dtype.element_ty), mask=m_out)
        return
    for i in tl.static_range(BK // BC):
        Ss = Ss + (load_columns(p_S + o_v * K, m_v, i, K, BK, BC, True),)
    o_r = tl.arange(0, 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    o_e = i_v * BV + tl.arange(0, 8)[:, None] * E + tl.arange(0, E)[None, :]
    m_e = (o_e < V) | (V % BV == 0)
    for i in tl.static_range(BR // 16):
        p_e = p_rd + ((i_head + i * 16 + o_r) % R)[:, None, :, None] * V + o_e[None, :, None, :]
        p_e = tl.max_contiguous(p_e, [8, 4, 2, 16])
        b_e = tl.load(p_e, mask=(i * 16 + o_r < n)[:, None, :, None] & m_e[None, :, None, :], other=0.0)
        ds = ds + (tl.reshape(tl.permute(b_e, [0, 3, 1, 2]), [4, BV, 4]),)
    b_y = tl.zeros([BV, BX], tl.float32)
    for i in tl.static_range(BK // BC):
        b_y = add_product(b_y, ordered(Ss[i], W), ordered(xs[i], W), STATE, PARTS, DTYPE, PRECISION)
    b_y *= scale
    for i in tl.static_range(BR // 16):
        b_y = add_product(b_y, ordered(ds[i], WD), ordered(fars[i], WD), STATE, PARTS, DTYPE, PRECISION)
    b_new = tl.zeros([BV, BX], tl.float32)
    for t in tl.static_range(T):
        b_d = vs[t].to(tl.float32)
        if ERASE:
            b_d -= tl.sum(tl.where((o_x == T + t)[None, :], b_y, 0.0), 1)
        b_y += b_d[:, None] * nears[t][None, :]
        b_new = tl.where((o_x == t)[None, :], b_d[:, None], b_new)
    o_c = tl.arange(0, 4)[:, None, None] * 2 + tl.arange(0, 2)[None, :, None] + tl.arange(0, BX // 8)[None, None, :] * 8
    o_c, o_n = o_c[:, None, :, :, None], o_e[None, :, None, None, :]
    m_n = m_e[None, :, None, None, :] & ((o_c < T) | (BX == T))
    p_y = tl.max_contiguous(p_o + o_c * s_ot + o_n, [16, 8, 4, 2, 32])
    p_new = tl.max_contiguous(p_rd + (i_head + n + o_c) % R * V + o_n, [16, 8, 4, 2, 32])
    tl.store(p_y, by_thread(b_y.to(p_o.dtype.element_ty)), mask=m_n)
    tl.store(p_new, by_thread(b_new.to(p_rd.dtype.element_ty)), mask=m_n)
    if due != 0:
        p_keep = p_work + X * (BR + T + 1)
        absorb_prepared(
            p_S, o_v, m_v, ds, o_r, p_keep, p_keys, p_decay, i_head, n, K, R, CHANNEL, UPCAST, BK, BC, BV, BR
        )


@triton.jit
def _by_multiply_adds(
    p_q, p_k, p_v, p_o, p_S, p_rd, p_rk, p_rw, p_rg, p_work, i_slot, i_head, n, due, i_v,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr, ERASE: tl.constexpr,
    BK: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One token, decay by head. K lies in pieces of BC, [BV, NC, BC], so that neighbouring threads share few columns of
    a row and each keeps the same ones of all pieces: most of a sum needs no exchange between threads."""
    X: tl.constexpr = 2 if ERASE else 1
    o_v, o_r = i_v * BV + tl.arange(0, BV), tl.arange(0, BR)
    o_k = tl.arange(0, BK // BC)[:, None] * BC + tl.arange(0, BC)[None, :]
    m_v, m_k = (o_v < V) | (V % BV == 0), (o_k < K) | (K == BK)
    b_d, near = tl.load(p_v + o_v, mask=m_v, other=0.0).to(tl.float32), tl.load(p_work + X * BR)
    b_q, b_far, scale = tl.load(p_q + o_k, mask=m_k, other=0.0), tl.load(p_work + o_r), tl.load(p_work + X * (BR + 1))
    if ERASE:
        b_k, b_far_k = tl.load(p_k + o_k, mask=m_k, other=0.0), tl.load(p_work + BR + o_r)
        scale_k = tl.load(p_work + X * (BR + 1) + 1)
    if i_slot < 0:
        tl.store(p_o + o_v, tl.zeros([BV], p_o.dtype.element_ty), mask=m_v)
        return
    m_S = m_v[:, None, None] & m_k[None, :, :]
    p_block = tl.max_contiguous(p_S + o_v[:, None, None] * K + o_k[None, :, :], [4, 2, 16])
    b_S = tl.load(p_block, mask=m_S, other=0.0).to(tl.float32)
    m_rd = (o_r < n)[:, None] & m_v[None, :]
    b_rd = tl.load(p_rd + ((i_head + o_r) % R)[:, None] * V + o_v[None, :], mask=m_rd, other=0.0).to(tl.float32)
    b_o = tl.sum(tl.sum(b_S * b_q.to(tl.float32)[None, :, :], 1), 1) * scale + tl.sum(b_rd * b_far[:, None], 0)
    if ERASE:
        b_k = b_k.to(tl.float32)
        b_d -= tl.sum(tl.sum(b_S * b_k[None, :, :], 1), 1) * scale_k + tl.sum(b_rd * b_far_k[:, None], 0)
    tl.store(p_o + o_v, (b_o + b_d * near).to(p_o.dtype.element_ty), mask=m_v)
    tl.store(p_rd + (i_head + n) % R * V + o_v, b_d.to(p_rd.dtype.element_ty), mask=m_v)
    if due != 0:
        absorb(p_S, p_rk, p_rd, p_rw, p_rg, i_head, n, i_v, K, V, R, CHANNEL, UPCAST, BK, BV, 16, BR)
