"""The Triton kernels of a step: one source for every recurrence, switched by CHANNEL (decay) and ERASE.

A step is two launches. ``prepare_kernel`` does all that needs no state: it takes the new queries and keys back through
the new tokens and the ring, from the newest row to the oldest, leaves a coefficient for each row they meet, and
appends k, w and g. ``read_kernel`` streams the state: each program owns BV rows of one value head, reads them once, and
writes outputs, d rows and, where the fold is due, the rows themselves. Programs share nothing they write: an append
goes to free ring rows only (ring.py), and each block of a state has one owner.

With x a query or a key at token t, after all decay down to where it stands::

    x S_t = scale (x S0) + sum_r far_r d_r + sum_j near_tj d_j        r: ring rows, j: new tokens

so ``d_t = v_t - (k S_t)`` follows token by token, and ``o_t`` from it. The numbers lie in a workspace, float32, a value
head: far [X, BR], near [X, T], scale [T] and the decay of all ring rows; X = T queries, then with ERASE T keys.

Names: ``i_`` index, ``o_`` offsets, ``p_`` pointer, ``b_`` block value, ``m_`` mask.
"""

import triton
import triton.language as tl

from replayssm.backends.triton.folding import absorb, absorb_dot


@triton.jit
def prepare_kernel(
    q, k, w, g, slots, ring_k, ring_w, ring_g, head, count, work, work_x,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_wb, s_wt, s_wh, s_gb, s_gt, s_gh, s_rkn, s_rkh, s_rwn, s_rwh, s_rgn, s_rgh,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, R: tl.constexpr, LIMIT: tl.constexpr,
    CHANNEL: tl.constexpr, ERASE: tl.constexpr, PDL: tl.constexpr,
    BK: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Coefficients of one key head's value heads (CHANNEL: of one value head). Grid: (B * H,) or (B * HV,).

    work [B, HV, WIDTH] float32: see above. work_x [B, HV, X + 1, K] float32, CHANNEL only: queries, then keys, decayed
    down to the checkpoint (so scale is 1), and the decay of all ring rows. BN: of near, where it is gathered to be
    stored at once, or 0. AHEAD: ring rows loaded at once, CHANNEL only."""
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
    o_k, o_h, o_r = tl.arange(0, BK // BC)[:, None] * BC + tl.arange(0, BC)[None, :], tl.arange(0, BG), tl.arange(0, BR)
    m_k, m_h, i_row = o_k < K, o_h < GROUP, (i_head + o_r) % R
    p_q, p_k = q + i_b * s_qb + i_g * s_qh + o_k, k + i_b * s_kb + i_g * s_kh + o_k
    p_w = w + i_b * s_wb + (i_first + o_h) * s_wh
    p_rk = ring_k + i_slot * s_rkn + i_g * s_rkh
    p_rw = ring_w + i_slot * s_rwn + (i_first + o_h) * s_rwh
    p_far = work + (i_b * HV + i_first + o_h) * WIDTH  # [BG]
    p_near, p_scale = p_far + X * BR, p_far + X * (BR + T)
    if CHANNEL:
        m_g = m_k
        p_g, p_rg, s_row = g + i_b * s_gb + i_first * s_gh + o_k, ring_g + i_slot * s_rgn + i_first * s_rgh + o_k, K
    else:
        m_g = m_h
        p_g, p_rg = g + i_b * s_gb + (i_first + o_h) * s_gh, ring_g + i_slot * s_rgn + (i_first + o_h) * s_rgh
        s_row = 1
        m_rk = (o_r < n)[:, None, None] & m_k[None, :, :]
        b_rk = tl.load(p_rk + i_row[:, None, None] * K + o_k[None, :, :], mask=m_rk, other=0.0)
        m_hr, p_next = m_h[:, None] & (o_r < n)[None, :], p_rg[:, None] + ((i_head + o_r + 1) % R)[None, :]
        b_keep = tl.load(p_rw[:, None] + i_row[None, :], mask=m_hr, other=0.0)  # [BG, BR]
        b_next = tl.load(p_next, mask=m_h[:, None] & (o_r + 1 < n)[None, :], other=0.0)
        b_oldest = tl.load(p_rg + i_head, mask=m_h, other=0.0)

    # The new tokens, from the last one back; logs: the log-decay from after token j to each t. Logarithms are added up,
    # for the error of an exponential would multiply up.
    qs, ks, logs, b_near = (), (), (), tl.zeros([BG, max(BN, 1)], tl.float32)
    for j in tl.static_range(T - 1, -1, -1):
        i_new = (i_head + n + j) % R
        b_q = tl.load(p_q + j * s_qt, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + j * s_kt, mask=m_k, other=0.0)
        b_w = tl.load(p_w + j * s_wt, mask=m_h, other=0.0).to(tl.float32)
        b_g = tl.load(p_g + j * s_gt, mask=m_g, other=0.0).to(tl.float32)
        tl.store(p_rw + i_new, b_w, mask=m_h)
        tl.store(p_rg + i_new * s_row, b_g, mask=m_g)
        if i_first % (HV // H) == 0:
            tl.store(p_rk + i_new * K + o_k, b_k.to(p_rk.dtype.element_ty), mask=m_k)
        b_k = b_k.to(tl.float32)
        qs, ks, logs = (b_q,) + qs, (b_k,) + ks, (b_g * 0.0,) + logs
        for t in tl.static_range(j, T):
            b_decay = tl.exp(logs[t - j])
            b_to, b_wj = (b_k * b_decay, b_w) if CHANNEL else (b_k, b_w * b_decay)
            b_near = _put(b_near, p_near, t * T + j, _dot1(qs[t - j], b_to) * b_wj, m_h, BN)
            if ERASE and t > j:
                b_near = _put(b_near, p_near, (T + t) * T + j, _dot1(ks[t - j], b_to) * b_wj, m_h, BN)
        logs = _plus(logs, b_g)
    if BN > 0:
        o_n = tl.arange(0, BN)
        tl.store(p_near[:, None] + o_n[None, :], b_near, mask=m_h[:, None] & (o_n < X * T)[None, :])

    if CHANNEL:
        xs, fars, b_back = (), (), tl.zeros(o_k.shape, tl.float32)  # b_back: log-decay over the ring rows so far
        for x in tl.static_range(X):
            xs = xs + ((qs[x] if x < T else ks[x - T]) * tl.exp(logs[x % T]),)
            fars = fars + (tl.zeros([BR], tl.float32),)
        for i in range(0, n, AHEAD):
            rows = ()
            for a in tl.static_range(AHEAD):
                i_old = (i_head + tl.maximum(n - 1 - i - a, 0)) % R  # past the oldest row: that again, without decay
                b_g = tl.where(n > i + a, tl.load(p_rg + i_old * K, mask=m_k, other=0.0), 0.0)
                rows = rows + (tl.load(p_rk + i_old * K + o_k, mask=m_k, other=0.0), b_g)
            for a in tl.static_range(AHEAD):
                b_k, done = rows[2 * a].to(tl.float32) * tl.exp(b_back), ()
                for x in tl.static_range(X):
                    done = done + (tl.where(o_r == n - 1 - i - a, _dot1(xs[x], b_k), fars[x]),)
                fars, b_back = done, b_back + rows[2 * a + 1]
        b_total, b_keep = tl.exp(b_back), tl.load(p_rw + i_row, mask=o_r < n, other=0.0)
        p_x = work_x + (i_b * HV + i_first) * (X + 1) * K + o_k
        for x in tl.static_range(X):
            tl.store(work + (i_b * HV + i_first) * WIDTH + x * BR + o_r, fars[x] * b_keep)
            tl.store(p_x + x * K, xs[x] * b_total, mask=m_k)
        if n > LIMIT:
            tl.store(p_x + X * K, b_total, mask=m_k)
    else:
        b_all = tl.sum(b_next, 1) + tl.where(n > 0, b_oldest, 0.0)
        b_keep *= tl.exp(tl.cumsum(b_next, 1, reverse=True))  # suffix sums, never differences of prefix sums
        for x in tl.static_range(X):
            b_x = qs[x] if x < T else ks[x - T]
            b_score = tl.sum(tl.sum(b_rk.to(tl.float32) * b_x[None, :, :], 1), 1)
            b_far = b_score[None, :] * (b_keep * tl.exp(logs[x % T])[:, None])
            tl.store(p_far[:, None] + x * BR + o_r[None, :], b_far, mask=m_h[:, None])
        for t in tl.static_range(T):
            tl.store(p_scale + t, tl.exp(logs[t] + b_all), mask=m_h)
        tl.store(p_scale + T, tl.exp(b_all), mask=m_h)


@triton.jit
def _dot1(a, b):
    """The product of two vectors, both [NC, BC]."""
    return tl.sum(tl.sum(a * b, 0), 0)


@triton.jit
def _put(b_near, p_near, i: tl.constexpr, b_value, m_h, BN: tl.constexpr):
    """Number ``i`` of near [BG]: into the block where there is one, otherwise into memory."""
    if BN > 0:
        b_near = tl.where((tl.arange(0, BN) == i)[None, :], b_value[:, None], b_near)
    else:
        tl.store(p_near + i, b_value, mask=m_h)
    return b_near


@triton.jit
def _plus(blocks, b):
    """Each of a tuple of blocks plus ``b``."""
    out = ()
    for i in tl.static_range(len(blocks)):
        out = out + (blocks[i] + b,)
    return out


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
    p_q, p_k, s_qt, s_kt, p_far, p_scale, n, o_k, m_k,
    T: tl.constexpr, X: tl.constexpr, BX: tl.constexpr, BR: tl.constexpr, CHANNEL: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """What :func:`_products` needs beside state and d: vectors, far and scale; DOT: as blocks, otherwise one by one."""
    o_r = tl.arange(0, BR)
    if DOT:
        o_x = tl.arange(0, BX)
        m_x = (o_x < X)[:, None]
        p_x = tl.where(o_x < T, p_q + o_x * s_qt, p_k + (o_x - T) * s_kt)[:, None]
        b_x = tl.load(p_x + o_k, mask=m_x & m_k, other=0.0)
        b_far = tl.load(p_far + o_x[:, None] * BR + o_r[None, :], mask=m_x & (o_r < n)[None, :], other=0.0)
        return b_x, b_far, 1.0 if CHANNEL else tl.load(p_scale + o_x % T)[None, :]
    else:
        loaded = ()
        for x in tl.static_range(X):
            p_x = p_q + x * s_qt if x < T else p_k + (x - T) * s_kt
            b_far = tl.load(p_far + x * BR + o_r, mask=o_r < n, other=0.0)
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
    q, k, v, out, slots, ckpt, ring_k, ring_d, ring_w, ring_g, head, count, work, work_x,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_ob, s_ot, s_oh,
    s_cn, s_ch, s_rkn, s_rkh, s_rdn, s_rdh, s_rwn, s_rwh, s_rgn, s_rgh,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    LIMIT: tl.constexpr, CHANNEL: tl.constexpr, ERASE: tl.constexpr, PDL: tl.constexpr,
    BK: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, BR: tl.constexpr,
    BX: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr, HEADS_FIRST: tl.constexpr, DOT: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Outputs of the step, new d rows, and folds. Grid: (cdiv(V, BV), B, HV), or with HEADS_FIRST (.., HV, B).

    q, k: the inputs, or with CHANNEL their decayed copies in work_x, one a value head. UPCAST: for the interpreter,
    which cannot multiply bf16."""
    X: tl.constexpr = 2 * T if ERASE else T
    DTYPE: tl.constexpr = tl.float32 if UPCAST else ckpt.dtype.element_ty
    i_v, i_b, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    if HEADS_FIRST:
        i_b, i_h = i_h.to(tl.int64), tl.program_id(1)
    i_x = i_h if CHANNEL else i_h // (HV // H)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < V
    i_slot = tl.load(slots + i_b).to(tl.int64)
    p_o, p_v = out + i_b * s_ob + i_h * s_oh + o_v, v + i_b * s_vb + i_h * s_vh + o_v
    if i_slot < 0:
        for t in tl.static_range(T):
            tl.store(p_o + t * s_ot, tl.zeros([BV], p_o.dtype.element_ty), mask=m_v)
        return
    # In the order in which latencies hide behind each other.
    n, i_head, o_r = tl.load(count + i_slot), tl.load(head + i_slot), tl.arange(0, BR)
    p_S = ckpt + i_slot * s_cn + i_h * s_ch
    if DOT:
        o_k = tl.arange(0, BK)[None, :]
        m_k = o_k < K
        b_S = tl.load(p_S + o_v[:, None] * K + o_k, mask=m_v[:, None] & m_k, other=0.0)
    else:
        o_k = tl.arange(0, BK // BC)[:, None] * BC + tl.arange(0, BC)[None, :]
        m_k = o_k < K
        m_S = m_v[:, None, None] & m_k[None, :, :]
        b_S = tl.load(p_S + o_v[:, None, None] * K + o_k[None, :, :], mask=m_S, other=0.0)
    p_rd = ring_d + i_slot * s_rdn + i_h * s_rdh
    m_rd = (o_r < n)[:, None] & m_v[None, :]
    b_rd = tl.load(p_rd + ((i_head + o_r) % R)[:, None] * V + o_v[None, :], mask=m_rd, other=0.0)
    vs = ()
    for t in tl.static_range(T):
        vs = vs + (tl.load(p_v + t * s_vt, mask=m_v, other=0.0),)
    p_q, p_k, p_far = q + i_b * s_qb + i_x * s_qh, k + i_b * s_kb + i_x * s_kh, work + (i_b * HV + i_h) * WIDTH
    p_near, p_scale = p_far + X * BR, p_far + X * (BR + T)
    if PDL:
        tl.extra.cuda.gdc_wait()
    operands = _operands(p_q, p_k, s_qt, s_kt, p_far, p_scale, n, o_k, m_k, T, X, BX, BR, CHANNEL, DOT)
    if n >= 0:  # always: the compiler may not move the first use of a load up here, before the loads that follow it
        ys, ds = _products(b_S, b_rd.to(tl.float32), operands, X, BX, DOT, DTYPE), ()
        for t in tl.static_range(T):
            b_o, b_d = ys[t], vs[t].to(tl.float32)
            if ERASE:
                b_d -= ys[T + t]
                for j in tl.static_range(t):
                    b_d -= ds[j] * tl.load(p_near + (T + t) * T + j)
            ds = ds + (b_d,)
            for j in tl.static_range(t + 1):
                b_o += ds[j] * tl.load(p_near + t * T + j)
            tl.store(p_o + t * s_ot, b_o.to(p_o.dtype.element_ty), mask=m_v)
            tl.store(p_rd + ((i_head + n + t) % R) * V + o_v, b_d.to(p_rd.dtype.element_ty), mask=m_v)
        if n > LIMIT:
            p_rk, p_rg = ring_k + i_slot * s_rkn + (i_h // (HV // H)) * s_rkh, ring_g + i_slot * s_rgn + i_h * s_rgh
            p_rw = ring_w + i_slot * s_rwn + i_h * s_rwh
            p_total = work_x + ((i_b * HV + i_h) * (X + 1) + X) * K + o_k
            b_total = tl.load(p_total, mask=m_k, other=0.0) if CHANNEL else tl.load(p_scale + T)
            if DOT:
                absorb_dot(
                    p_S, p_rk, p_rd, p_rw, p_rg, b_total, i_head, n, i_v, K, V, R, CHANNEL, BK, BV, BF, BR, DTYPE
                )  # fmt: skip
            else:
                absorb(p_S, p_rk, p_rd, p_rw, p_rg, b_total, i_head, n, i_v, o_k, m_k, K, V, R, CHANNEL, BV, BF, AHEAD)
