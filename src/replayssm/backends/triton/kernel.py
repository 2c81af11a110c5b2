"""The Triton kernels: one source for every recurrence, switched by CHANNEL (decay) and ERASE.

A step is two launches. ``prepare_kernel`` does all that needs no state: products of the new queries and keys with the
ring's keys and with each other, decays, the triangular solve of the delta rule, and the appends of k, w and g.
``read_kernel`` streams the state: each program owns BV rows of one value head, reads them once, and writes outputs, d
rows and, where the fold is due, the rows themselves. Programs share nothing they write: an append goes to free ring
rows only (ring.py), and each block of a state has one owner.

Outputs o and new rows d are linear in what the read kernel loads: the products Y of the state with the step's queries
and keys, the ring's d, and v. ``prepare_kernel`` leaves the coefficients, a few numbers a value head, in a workspace.

Names: ``i_`` index, ``o_`` offsets, ``p_`` pointer, ``b_`` block value, ``m_`` mask. DOT: products over K on tensor
cores; otherwise, for one token, row sums.
"""

import triton
import triton.language as tl

from replayssm.backends.triton.folding import fold_rows, high_part, keys


@triton.jit
def _dot(a, b, EXACT: tl.constexpr):
    """``a [M, K] @ b [N, K]^T`` in float32.

    EXACT: by plain multiply-adds, for float32 states, since tensor cores truncate as they add, which alone is more than
    the error of the plain recurrence in float32; and for Triton's interpreter, which cannot multiply bf16. Otherwise on
    tensor cores, a wider side in two parts: float32 as tf32 (22 bits of it are kept), 16 bits as they are."""
    if EXACT:
        return tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), input_precision="ieee")
    elif a.dtype == tl.float32:
        a_high = high_part(a)
        if b.dtype == tl.float32:
            b_high = high_part(b)
            y = tl.dot(a_high, tl.trans(b - b_high), input_precision="tf32")
            y = tl.dot(a - a_high, tl.trans(b_high), acc=y, input_precision="tf32")
        else:
            b_high = b.to(tl.float32)  # 16 bits fit in a tf32
            y = tl.dot(a - a_high, tl.trans(b_high), input_precision="tf32")
        return tl.dot(a_high, tl.trans(b_high), acc=y, input_precision="tf32")
    elif a.dtype == b.dtype:
        return tl.dot(a, tl.trans(b))
    else:
        b_high = b.to(a.dtype)
        b_low = (b.to(tl.float32) - b_high.to(tl.float32)).to(a.dtype)
        return tl.dot(a, tl.trans(b_high), acc=tl.dot(a, tl.trans(b_low)))


@triton.jit
def prepare_kernel(
    q, k, w, g, slots, ring_k, ring_w, ring_g, head, count, work, work_x,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_wb, s_wt, s_wh, s_gb, s_gt, s_gh, s_rkn, s_rkh, s_rwn, s_rwh, s_rgn, s_rgh,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    CHANNEL: tl.constexpr, ERASE: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
    BK: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr, BG: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Coefficients of one key head's value heads (CHANNEL: of one value head). Grid: (B * H,) or (B * HV,).

    work [B, HV, WIDTH] float32, a value head, X = T or, with ERASE, 2T rows: first o's coefficients, then d's.
    T = 1: far [X, BR] of ring rows, scale of Y, near of d. T > 1: of Y [X, X], of ring rows [X, BR], of v [X, T].
    work_x [B, HV, X, K] float32, CHANNEL only: queries, then keys, decayed to the checkpoint."""
    GROUP: tl.constexpr = 1 if CHANNEL else HV // H
    X: tl.constexpr = 2 * T if ERASE else T
    if PDL:  # the read kernel may start to stream the state
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    i_first, i_b = (pid % (HV // GROUP)) * GROUP, (pid // (HV // GROUP)).to(tl.int64)  # first value head
    i_g = i_first // (HV // H)
    i_slot = tl.load(slots + i_b).to(tl.int64)
    if i_slot < 0:
        return
    n, i_head = tl.load(count + i_slot), tl.load(head + i_slot)
    o_k, o_r, o_h = tl.arange(0, BK), tl.arange(0, BR), tl.arange(0, BG)
    m_k, m_r, m_h, i_row = o_k < K, o_r < n, o_h < GROUP, (i_head + o_r) % R
    p_q, p_k = q + i_b * s_qb + i_g * s_qh + o_k, k + i_b * s_kb + i_g * s_kh + o_k
    p_rk = ring_k + i_slot * s_rkn + i_g * s_rkh
    p_rw, p_rg = ring_w + i_slot * s_rwn + i_first * s_rwh, ring_g + i_slot * s_rgn + i_first * s_rgh
    p_w, p_g = w + i_b * s_wb + (i_first + o_h) * s_wh, g + i_b * s_gb + i_first * s_gh
    p_work = work + (i_b * HV + i_first + o_h) * WIDTH  # [BG]
    p_x0 = work_x + (i_b * HV + i_first) * X * K + o_k
    b_rk, b_total = keys(p_rk, p_rg, i_head, n, o_r, o_k, m_k, K, R, CHANNEL)
    m_hr = m_h[:, None] & m_r[None, :]
    b_keep = tl.load(p_rw + o_h[:, None] * s_rwh + i_row[None, :], mask=m_hr, other=0.0)  # [BG, BR]
    b_log = tl.zeros([BG], tl.float32)  # log-decay over all ring rows
    if not CHANNEL:
        p_next = p_rg + o_h[:, None] * s_rgh + ((i_head + o_r + 1) % R)[None, :]
        b_after = tl.load(p_next, mask=m_h[:, None] & (o_r + 1 < n)[None, :], other=0.0)
        b_oldest = tl.load(p_rg + o_h * s_rgh + i_head, mask=m_h, other=0.0)
        b_log = tl.sum(b_after, 1) + tl.where(n > 0, b_oldest, 0.0)
        b_keep *= tl.exp(tl.cumsum(b_after, 1, reverse=True))

    if T > 1:
        o_t = tl.arange(0, BT)
        m_t = o_t < T
        b_N = tl.zeros([BG, BT, BT], tl.float32)  # (t, j): what d_j adds to o_t
        b_L = tl.zeros([BG, BT, BT], tl.float32)  # (t, j): what d_j takes from d_t
        if CHANNEL:  # vectors of K: a block of tokens by K would spill
            b_Or = tl.zeros([BG, BT, BR], tl.float32)
            b_Dr = tl.zeros([BG, BT, BR], tl.float32)
            b_scale = 1.0 + tl.zeros([BG, BT], tl.float32)
            for t in range(T):
                m_row = (o_t == t)[None, :, None]
                b_q = tl.load(p_q + t * s_qt, mask=m_k, other=0.0).to(tl.float32)
                b_k = tl.load(p_k + t * s_kt, mask=m_k, other=0.0).to(tl.float32)
                b_cum = tl.zeros([BK], tl.float32)  # log-decay from after j up to t, going back over j
                for i in range(t + 1):
                    b_kj = tl.load(p_k + (t - i) * s_kt, mask=m_k, other=0.0).to(tl.float32) * tl.exp(b_cum)
                    b_wj = tl.sum(tl.load(p_w + (t - i) * s_wt, mask=m_h, other=0.0).to(tl.float32), 0)
                    m_tj = m_row & (o_t == t - i)[None, None, :]
                    b_N = tl.where(m_tj, tl.sum(b_q * b_kj, 0) * b_wj, b_N)
                    if ERASE:
                        b_L = tl.where(m_tj & (i > 0), tl.sum(b_k * b_kj, 0) * b_wj, b_L)
                    b_cum += tl.load(p_g + (t - i) * s_gt + o_k, mask=m_k, other=0.0).to(tl.float32)
                b_q *= tl.exp(b_cum)
                tl.store(p_x0 + t * K, b_q * tl.exp(b_total), mask=m_k)
                b_far = tl.sum(b_rk * b_q[None, :], 1)[None, :] * b_keep  # [BG, BR]
                b_Or = tl.where(m_row, b_far[:, None, :], b_Or)
                if ERASE:
                    b_k *= tl.exp(b_cum)
                    tl.store(p_x0 + (T + t) * K, b_k * tl.exp(b_total), mask=m_k)
                    b_far = tl.sum(b_rk * b_k[None, :], 1)[None, :] * b_keep
                    b_Dr = tl.where(m_row, -b_far[:, None, :], b_Dr)
        else:
            m_x = m_t[:, None] & m_k[None, :]
            b_q = tl.load(p_q[None, :] + o_t[:, None] * s_qt, mask=m_x, other=0.0)  # [BT, BK]
            b_k = tl.load(p_k[None, :] + o_t[:, None] * s_kt, mask=m_x, other=0.0)
            b_qk = _dot(b_q, b_k, EXACT)  # [BT, BT]
            b_kk = _dot(b_k, b_k, EXACT) if ERASE else b_qk
            b_cum = tl.zeros([BG, BT], tl.float32)  # log-decay from after j up to t, going back over j
            for i in range(T):  # j = T - 1 - i
                m_j = o_t == T - 1 - i
                b_wj = tl.load(p_w + (T - 1 - i) * s_wt, mask=m_h, other=0.0).to(tl.float32)[:, None] * tl.exp(b_cum)
                b_Nj = tl.sum(tl.where(m_j[None, :], b_qk, 0.0), 1)[None, :] * b_wj
                b_Nj = tl.where((o_t >= T - 1 - i)[None, :], b_Nj, 0.0)  # [BG, BT]
                b_N = tl.where(m_j[None, None, :], b_Nj[:, :, None], b_N)
                if ERASE:
                    b_Lj = tl.sum(tl.where(m_j[None, :], b_kk, 0.0), 1)[None, :] * b_wj
                    b_Lj = tl.where((o_t > T - 1 - i)[None, :], b_Lj, 0.0)
                    b_L = tl.where(m_j[None, None, :], b_Lj[:, :, None], b_L)
                b_gj = tl.load(p_g + o_h * s_gh + (T - 1 - i) * s_gt, mask=m_h, other=0.0).to(tl.float32)
                b_cum += tl.where((o_t >= T - 1 - i)[None, :], b_gj[:, None], 0.0)
            b_far = tl.exp(b_cum)[:, :, None] * b_keep[:, None, :]
            b_Or = _dot(b_q, b_rk, EXACT)[None, :, :] * b_far  # [BG, BT, BR]
            b_Dr = -_dot(b_k, b_rk, EXACT)[None, :, :] * b_far if ERASE else b_Or
            b_scale = tl.exp(b_log[:, None] + b_cum)  # [BG, BT]
        p_Y = p_work[:, None, None] + o_t[None, :, None] * X + o_t[None, None, :]
        p_r = p_work[:, None, None] + X * X + o_t[None, :, None] * BR + o_r[None, None, :]
        p_v = p_work[:, None, None] + X * X + X * BR + o_t[None, :, None] * T + o_t[None, None, :]
        m_tt = m_h[:, None, None] & m_t[None, :, None] & m_t[None, None, :]
        m_tr = m_h[:, None, None] & m_t[None, :, None]
        m_same = (o_t[:, None] == o_t[None, :])[None, :, :]
        tl.store(p_Y, tl.where(m_same, b_scale[:, :, None], 0.0), mask=m_tt)
        if ERASE:
            # Column by column, D_t -= L_tj D_j and O_t += N_tj D_j, for the coefficients of v (D starts as 1) and of
            # the ring; those of Y are v's times -scale.
            b_Dv = tl.where(m_same, 1.0 + tl.zeros([BG, BT, BT], tl.float32), 0.0)
            b_Ov = tl.zeros([BG, BT, BT], tl.float32)
            for j in range(T):
                m_row, m_col = (o_t == j)[None, :, None], (o_t == j)[None, None, :]
                b_Dvj = tl.sum(tl.where(m_row, b_Dv, 0.0), 1)[:, None, :]
                b_Drj = tl.sum(tl.where(m_row, b_Dr, 0.0), 1)[:, None, :]
                b_Lj = tl.sum(tl.where(m_col, b_L, 0.0), 2)[:, :, None]
                b_Nj = tl.sum(tl.where(m_col, b_N, 0.0), 2)[:, :, None]
                b_Dv -= b_Lj * b_Dvj
                b_Dr -= b_Lj * b_Drj
                b_Ov += b_Nj * b_Dvj
                b_Or += b_Nj * b_Drj
            tl.store(p_Y + T, -b_Ov * b_scale[:, None, :], mask=m_tt)
            tl.store(p_Y + T * X, tl.zeros([BG, BT, BT], tl.float32), mask=m_tt)
            tl.store(p_Y + T * X + T, -b_Dv * b_scale[:, None, :], mask=m_tt)
            tl.store(p_r + T * BR, b_Dr, mask=m_tr)
            tl.store(p_v, b_Ov, mask=m_tt)
            tl.store(p_v + T * T, b_Dv, mask=m_tt)
        else:  # d is v: no solve
            tl.store(p_v, b_N, mask=m_tt)
        tl.store(p_r, b_Or, mask=m_tr)
    else:
        b_q = tl.load(p_q, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(p_k, mask=m_k, other=0.0).to(tl.float32)
        b_near = tl.sum(b_q * b_k, 0) * tl.load(p_w, mask=m_h, other=0.0).to(tl.float32)  # [BG]
        tl.store(p_work + X * BR + 1, b_near, mask=m_h)
        if CHANNEL:
            b_decay = tl.exp(tl.load(p_g + o_k, mask=m_k, other=0.0).to(tl.float32))
            b_q, b_k = b_q * b_decay, b_k * b_decay
            tl.store(p_x0, b_q * tl.exp(b_total), mask=m_k)
            if ERASE:
                tl.store(p_x0 + K, b_k * tl.exp(b_total), mask=m_k)
            tl.store(p_work + X * BR, 1.0 + tl.zeros([BG], tl.float32), mask=m_h)
        else:
            b_gt = tl.load(p_g + o_h * s_gh, mask=m_h, other=0.0).to(tl.float32)
            tl.store(p_work + X * BR, tl.exp(b_log + b_gt), mask=m_h)
            b_keep *= tl.exp(b_gt)[:, None]
        b_rk = b_rk.to(tl.float32)
        p_far = p_work[:, None] + o_r[None, :]
        tl.store(p_far, tl.sum(b_rk * b_q[None, :], 1)[None, :] * b_keep, mask=m_h[:, None])
        if ERASE:
            tl.store(p_far + BR, tl.sum(b_rk * b_k[None, :], 1)[None, :] * b_keep, mask=m_h[:, None])

    for t in range(T):  # the new rows but for d
        i_new = (i_head + n + t) % R
        b_wt = tl.load(p_w + t * s_wt, mask=m_h, other=0.0).to(tl.float32)
        tl.store(p_rw + o_h * s_rwh + i_new, b_wt, mask=m_h)
        if CHANNEL:
            b_gt = tl.load(p_g + t * s_gt + o_k, mask=m_k, other=0.0).to(tl.float32)
            tl.store(p_rg + i_new * K + o_k, b_gt, mask=m_k)
        else:
            b_gt = tl.load(p_g + o_h * s_gh + t * s_gt, mask=m_h, other=0.0).to(tl.float32)
            tl.store(p_rg + o_h * s_rgh + i_new, b_gt, mask=m_h)
        if i_first % (HV // H) == 0:
            b_kt = tl.load(p_k + t * s_kt, mask=m_k, other=0.0)
            tl.store(p_rk + i_new * K + o_k, b_kt.to(p_rk.dtype.element_ty), mask=m_k)


@triton.jit
def _load_x(p_q, p_k, s_qt, s_kt, o_x, o_k, m_k, T: tl.constexpr, X: tl.constexpr, DOT: tl.constexpr):
    """DOT: the step's queries, then with erase its keys, [BX, BK], further rows zero; otherwise the one query."""
    if DOT:
        p_x = tl.where(o_x < T, p_q + o_x * s_qt, p_k + (o_x - T) * s_kt)[:, None] + o_k[None, :]
        return tl.load(p_x, mask=(o_x < X)[:, None] & m_k[None, :], other=0.0)
    else:
        return tl.load(p_q + o_k, mask=m_k, other=0.0)


@triton.jit
def read_kernel(
    q, k, v, out, slots, ckpt, ring_k, ring_d, ring_w, ring_g, head, count, work,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_ob, s_ot, s_oh,
    s_cn, s_ch, s_rkn, s_rkh, s_rdn, s_rdh, s_rwn, s_rwh, s_rgn, s_rgh,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    LIMIT: tl.constexpr, CHANNEL: tl.constexpr, ERASE: tl.constexpr, DOT: tl.constexpr, EXACT: tl.constexpr,
    UPCAST: tl.constexpr, PDL: tl.constexpr, ROWS_FIRST: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, BR: tl.constexpr, BX: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Outputs of the step, new d rows, and folds. Grid: (B * HV * cdiv(V, BV),). q, k: the inputs, or with CHANNEL
    their decayed copies in work_x, one a value head."""
    X: tl.constexpr = 2 * T if ERASE else T
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    if ROWS_FIRST:  # neighbouring programs of different rows: the few that fold are spread over time
        B = tl.num_programs(0) // (NV * HV)
        i_b, i_v, i_h = (pid % B).to(tl.int64), (pid // B) % NV, pid // (B * NV)
    else:
        i_v, i_h, i_b = pid % NV, (pid // NV) % HV, (pid // (NV * HV)).to(tl.int64)
    i_x = i_h if CHANNEL else i_h // (HV // H)
    o_v, o_k, o_r, o_x = i_v * BV + tl.arange(0, BV), tl.arange(0, BK), tl.arange(0, BR), tl.arange(0, BX)
    m_v, m_k, m_x = o_v < V, o_k < K, o_x < X
    i_slot = tl.load(slots + i_b).to(tl.int64)
    p_o, p_v = out + i_b * s_ob + i_h * s_oh, v + i_b * s_vb + i_h * s_vh
    if i_slot < 0:
        for t in tl.static_range(T):
            tl.store(p_o + t * s_ot + o_v, tl.zeros([BV], p_o.dtype.element_ty), mask=m_v)
        return
    # The state first: all else arrives while it streams.
    p_S = ckpt + i_slot * s_cn + i_h * s_ch
    b_S = tl.load(p_S + o_v[:, None] * K + o_k[None, :], mask=m_v[:, None] & m_k[None, :], other=0.0)
    n, i_head = tl.load(count + i_slot), tl.load(head + i_slot)
    p_rd = ring_d + i_slot * s_rdn + i_h * s_rdh
    m_rd = m_v[:, None] & (o_r < n)[None, :]
    b_rd = tl.load(p_rd + o_v[:, None] + ((i_head + o_r) % R)[None, :] * V, mask=m_rd, other=0.0).to(tl.float32)
    p_q, p_k, p_work = q + i_b * s_qb + i_x * s_qh, k + i_b * s_kb + i_x * s_kh, work + (i_b * HV + i_h) * WIDTH
    # Loads keep their order, so all of them come before the first use.
    if PDL and not CHANNEL:
        b_x = _load_x(p_q, p_k, s_qt, s_kt, o_x, o_k, m_k, T, X, DOT)
        tl.extra.cuda.gdc_wait()
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        b_x = _load_x(p_q, p_k, s_qt, s_kt, o_x, o_k, m_k, T, X, DOT)
    if T > 1:  # o and d in one block of X columns, [BV, BX]
        m_t = o_x < T
        m_vt, m_xt = m_v[:, None] & m_t[None, :], m_x[:, None] & m_t[None, :]
        p_c = p_work + o_x[:, None] * X + o_x[None, :]
        b_cY = tl.load(p_c, mask=m_x[:, None] & m_x[None, :], other=0.0)
        b_cr = tl.load(p_work + X * X + o_x[:, None] * BR + o_r[None, :], mask=m_x[:, None], other=0.0)
        b_cv = tl.load(p_work + X * X + X * BR + o_x[:, None] * T + o_x[None, :], mask=m_xt, other=0.0)
        b_v = tl.load(p_v + o_v[:, None] + o_x[None, :] * s_vt, mask=m_vt, other=0.0)
        b_Y = _dot(b_S, b_x, EXACT)
        b_Z = _dot(b_rd, b_cr, EXACT)
        if BX < 16:  # too few columns for a product
            b_Z += tl.sum(b_Y[:, None, :] * b_cY[None, :, :], 2)
            b_Z += tl.sum(b_v.to(tl.float32)[:, None, :] * b_cv[None, :, :], 2)
        else:
            b_Z += _dot(b_Y, b_cY, EXACT) + _dot(b_v.to(tl.float32), b_cv, EXACT)
        tl.store(p_o + o_v[:, None] + o_x[None, :] * s_ot, b_Z.to(p_o.dtype.element_ty), mask=m_vt)
        if ERASE:
            p_new = p_rd + o_v[:, None] + ((i_head + n + o_x - T) % R)[None, :] * V
            tl.store(p_new, b_Z.to(p_rd.dtype.element_ty), mask=m_v[:, None] & ((o_x >= T) & m_x)[None, :])
        else:
            p_new = p_rd + o_v[:, None] + ((i_head + n + o_x) % R)[None, :] * V
            tl.store(p_new, b_v.to(p_rd.dtype.element_ty), mask=m_vt)
    else:
        b_far_q, b_far_k = tl.load(p_work + o_r), tl.load(p_work + (X - 1) * BR + o_r)
        b_scale, b_near = tl.load(p_work + X * BR), tl.load(p_work + X * BR + 1)
        b_d = tl.load(p_v + o_v, mask=m_v, other=0.0).to(tl.float32)
        if DOT:
            b_Y = _dot(b_S, b_x, EXACT)
            b_o = tl.sum(tl.where((o_x == 0)[None, :], b_Y, 0.0), 1)
            b_e = tl.sum(tl.where((o_x == 1)[None, :], b_Y, 0.0), 1)
        else:
            b_Sf = b_S.to(tl.float32)
            b_o = tl.sum(b_Sf * b_x.to(tl.float32)[None, :], 1)
            b_e = b_o
            if ERASE:
                b_e = tl.sum(b_Sf * tl.load(p_k + o_k, mask=m_k, other=0.0).to(tl.float32)[None, :], 1)
        b_o = b_o * b_scale + tl.sum(b_rd * b_far_q[None, :], 1)
        if ERASE:
            b_d -= b_e * b_scale + tl.sum(b_rd * b_far_k[None, :], 1)
        b_o += b_d * b_near
        tl.store(p_o + o_v, b_o.to(p_o.dtype.element_ty), mask=m_v)
        tl.store(p_rd + ((i_head + n) % R) * V + o_v, b_d.to(p_rd.dtype.element_ty), mask=m_v)
    if n > LIMIT:  # reads the block again, from L2: holding it back would cost every program registers
        p_rk, p_rg = ring_k + i_slot * s_rkn + (i_h // (HV // H)) * s_rkh, ring_g + i_slot * s_rgn + i_h * s_rgh
        p_rw = ring_w + i_slot * s_rwn + i_h * s_rwh
        fold_rows(p_S, p_rk, p_rd, p_rw, p_rg, i_head, n, i_v * BV, K, V, R, CHANNEL, UPCAST, BK, BV, BF, BR)
