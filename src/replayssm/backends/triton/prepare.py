"""The first launch of a step, all that needs no state; kernel.py says what for, and whose names these are.

New queries and keys are taken back through the new tokens and the ring, from the newest row to the oldest; each row
that they meet gets a coefficient. Of a draft tree's tokens they meet their ancestors alone. Log-decays are added up
before the exponential is taken: errors of exponentials would multiply up. Sums are over suffixes, never differences of
prefix sums.

What is written here caches are asked to keep (KEEP) for the second launch while states stream through, but for more
than one token on float32 states, where that takes them more room than it is worth (docs/log.md).

Where q and k come without their norm (EPS), its factor goes into the coefficients of each, and a key's into the w of
its row; so the state is read with, and the ring keeps, what came."""

import triton
import triton.language as tl

from replayssm.backends.triton.tiles import add_product, load_columns, ordered

LOG2_E = tl.constexpr(1.4426950408889634)  # e^x = 2^(x log2 e): without the care for tiny results that tl.exp takes


@triton.jit
def prepare_kernel(
    q, k, w, g, slots, parents, ring_k, ring_w, ring_g, head, count, meta, work, work_x, keys, decays,
    s_pb, s_pt, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_wb, s_wt, s_wh, s_gb, s_gt, s_gh,
    s_rkn, s_rkh, s_rwn, s_rwh, s_rgn, s_rgh,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, R: tl.constexpr, LIMIT: tl.constexpr,
    CHANNEL: tl.constexpr, ERASE: tl.constexpr, TREE: tl.constexpr, GROUP: tl.constexpr,
    BK: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BX: tl.constexpr, BT: tl.constexpr, BG: tl.constexpr,
    WIDTH: tl.constexpr, EPS: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    KEEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Coefficients of GROUP value heads, with a decay by head of one key head. Grid: (B * HV / GROUP,).

    meta, work, keys, decays: see kernel.py. work_x [B, HV, X, K], CHANNEL only: queries, then keys, decayed down to the
    checkpoint (so scale is 1)."""
    X: tl.constexpr = 2 * T if ERASE else T
    pid = tl.program_id(0)
    i_h, i_b = (pid % (HV // GROUP)) * GROUP, (pid // (HV // GROUP)).to(tl.int64)  # first value head
    i_g = i_h // (HV // H)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # the second launch
    i_slot, p_meta = tl.load(slots + i_b).to(tl.int64), meta + i_b * 4
    if i_slot < 0:
        if i_h == 0:
            tl.store(p_meta, -1)
        return
    n, i_phased = tl.load(count + i_slot), tl.load(head + i_slot)
    i_head, due = i_phased % R, (n > tl.maximum(LIMIT - i_phased // R, 0)).to(tl.int32)
    if i_h == 0:
        tl.store(p_meta, i_slot.to(tl.int32))
        tl.store(p_meta + 1, i_head)
        tl.store(p_meta + 2, n)
        tl.store(p_meta + 3, due)
    o_h, o_r, o_x, p_up = tl.arange(0, BG), tl.arange(0, BR), tl.arange(0, BX), parents + i_b * s_pb
    if CHANNEL:
        _by_channel(
            q + i_b * s_qb, k + i_b * s_kb, w + i_b * s_wb, g + i_b * s_gb, ring_k + i_slot * s_rkn,
            ring_w + i_slot * s_rwn, ring_g + i_slot * s_rgn, work + i_b * HV * WIDTH, work_x + i_b * HV * X * K,
            keys + i_b * HV * BR * K, decays + i_b * HV * K, i_head, n, due, i_h + o_h, o_r, o_x, p_up,
            s_pt, s_qt, s_qh, s_kt, s_kh, s_wt, s_wh, s_gt, s_gh, s_rkh, s_rwh, s_rgh,
            T, X, HV // H, K, R, BK, BC, BR, WIDTH, TREE, EPS, KEEP,
        )  # fmt: skip
    else:
        m_h, o_k = o_h < GROUP, tl.arange(0, BK)
        p_q, p_k, p_w = q + i_b * s_qb + i_g * s_qh, k + i_b * s_kb + i_g * s_kh, w + i_b * s_wb + (i_h + o_h) * s_wh
        p_g, p_rg = g + i_b * s_gb + (i_h + o_h) * s_gh, ring_g + i_slot * s_rgn + (i_h + o_h) * s_rgh
        p_rk, p_rw = ring_k + i_slot * s_rkn + i_g * s_rkh, ring_w + i_slot * s_rwn + (i_h + o_h) * s_rwh
        b_unit = _by_head(
            p_q, p_k, p_w, p_g, p_rk, p_rw, p_rg, work + (i_b * HV + i_h + o_h) * WIDTH, i_head, n, due, m_h, o_r, o_x,
            p_up, s_pt, s_qt, s_kt, s_wt, s_gt, T, X, K, R, BK, BR, GROUP, BG, BX, BT, TREE, EPS, PARTS, PRECISION,
            UPCAST, KEEP,
        )  # fmt: skip
        for t in range(T):  # the new rows but for d
            i_new = (i_head + n + t) % R
            b_w = tl.load(p_w + t * s_wt, mask=m_h, other=0.0).to(tl.float32)
            tl.store(p_rw + i_new, b_w * (_at(b_unit, o_x, T + t) if EPS > 0 else 1.0), mask=m_h)
            tl.store(p_rg + i_new, tl.load(p_g + t * s_gt, mask=m_h, other=0.0).to(tl.float32), mask=m_h)
            if i_h % (HV // H) == 0:
                b_k = tl.load(p_k + t * s_kt + o_k, mask=o_k < K, other=0.0)
                tl.store(p_rk + i_new * K + o_k, b_k.to(p_rk.dtype.element_ty), mask=o_k < K)


@triton.jit
def _meets(b_at, o_t, j, i_up, TREE: tl.constexpr):
    """Which of the tokens ``o_t`` meet token ``j``, whose parent is ``i_up``, on their way back, and which one each
    meets next, so far ``b_at``."""
    if TREE:
        m_on = b_at == j
        return m_on, tl.where(m_on, i_up, b_at)
    else:
        return o_t >= j, b_at


@triton.jit
def _at(b, o, i):
    """The number of ``b`` that stands where ``o`` is ``i``."""
    return tl.sum(tl.where(o == i, b, 0.0), 0)


@triton.jit
def _ranked(p):
    """Of addresses [GROUP, NC, BC] the hint of tiles.py: threads to heads before pieces."""
    return tl.max_contiguous(p, [2, 1, 4])


@triton.jit
def _times_one(blocks, p, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """Of rows loaded by columns the products with the vector at ``p``: [rows]."""
    b = tl.zeros(blocks[0].shape, tl.float32)
    for i in tl.static_range(BK // C):
        b_one = load_columns(p + tl.zeros([1], tl.int32), tl.full([1], True, tl.int1), i, K, BK, C, True)
        b += blocks[i].to(tl.float32) * b_one.to(tl.float32)
    return tl.sum(tl.sum(b, 2), 0)


@triton.jit
def _by_head(
    p_q, p_k, p_w, p_g, p_rk, p_rw, p_rg, p_work, i_head, n, due, m_h, o_r, o_x, p_up, s_pt, s_qt, s_kt, s_wt, s_gt,
    T: tl.constexpr, X: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    GROUP: tl.constexpr, BG: tl.constexpr, BX: tl.constexpr, BT: tl.constexpr, TREE: tl.constexpr,
    EPS: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Products with keys are shared by the value heads, decays [BG] are not. On tensor cores, but for a few of float32,
    which would have to go there in parts."""
    INPUT: tl.constexpr = p_k.dtype.element_ty if p_k.dtype.element_ty == p_rk.dtype.element_ty else tl.float32
    W: tl.constexpr = 32 // INPUT.primitive_bitwidth
    FEW: tl.constexpr = W == 1 and X <= 8  # more of them do not fit into registers
    C: tl.constexpr = 16 * W
    o_j, o_t, i_row = tl.arange(0, BT), o_x % T, (i_head + o_r) % R
    p_x, xs, news, olds = tl.where(o_x < T, p_q + o_x * s_qt, p_k + (o_x - T) * s_kt), (), (), ()
    for i in tl.static_range(BK // C):
        xs = xs + (load_columns(p_x, o_x < X, i, K, BK, C, True),)
        olds = olds + (load_columns(p_rk + i_row * K, o_r < n, i, K, BK, C, True),)
        if not FEW:
            news = news + (load_columns(p_k + o_j * s_kt, o_j < T, i, K, BK, C, True),)
    m_hr, p_next = m_h[:, None] & (o_r < n)[None, :], p_rg[:, None] + ((i_head + o_r + 1) % R)[None, :]
    b_keep = tl.load(p_rw[:, None] + i_row[None, :], mask=m_hr, other=0.0)  # [BG, BR]
    b_next = tl.load(p_next, mask=m_h[:, None] & (o_r + 1 < n)[None, :], other=0.0)
    b_oldest = tl.load(p_rg + i_head, mask=m_h, other=0.0)
    ws, gs, ups = (), (), ()
    for t in tl.static_range(T):
        ws = ws + (tl.load(p_w + t * s_wt, mask=m_h, other=0.0).to(tl.float32),)
        gs = gs + (tl.load(p_g + t * s_gt, mask=m_h, other=0.0).to(tl.float32),)
        ups = ups + (tl.load(p_up + t * s_pt).to(tl.int32) if TREE else 0,)
    b_unit, b_factor = tl.full(o_x.shape, 1.0, tl.float32), tl.full(o_x.shape, 1.0, tl.float32)
    if EPS > 0:
        b_squares = tl.zeros(xs[0].shape, tl.float32)
        for i in tl.static_range(BK // C):
            b_squares += xs[i].to(tl.float32) * xs[i].to(tl.float32)
        b_unit = 1.0 / tl.sqrt_rn(tl.sum(tl.sum(b_squares, 2), 0) + EPS)
        b_factor = tl.where(o_x < T, b_unit * (K**-0.5), b_unit)
    grams, scores = (), ()  # of each new key with all x, [BX]; of each x with all old keys, [BR]
    if FEW:
        for j in tl.static_range(T):
            grams = grams + (_times_one(xs, p_k + j * s_kt, K, BK, C),)
        for x in tl.static_range(X):
            p_one = p_q + x * s_qt if x < T else p_k + (x - T) * s_kt
            scores = scores + (_times_one(olds, p_one, K, BK, C),)
    else:
        DTYPE: tl.constexpr = tl.float32 if UPCAST else INPUT
        b_gram, b_score = tl.zeros([BT, BX], tl.float32), tl.zeros([BR, BX], tl.float32)
        for i in tl.static_range(BK // C):
            b_x = ordered(xs[i], W)
            b_gram = add_product(b_gram, ordered(news[i], W), b_x, INPUT, PARTS, DTYPE, PRECISION)
            b_score = add_product(b_score, ordered(olds[i], W), b_x, INPUT, PARTS, DTYPE, PRECISION)
        for j in tl.static_range(T):
            grams = grams + (tl.sum(tl.where((o_j == j)[:, None], b_gram, 0.0), 0),)
        for x in tl.static_range(X):
            scores = scores + (tl.sum(tl.where((o_x == x)[None, :], b_score, 0.0), 1),)
    # From the last token back; b_log: the log-decay from after token j to each x that follows.
    p_near, p_scale, p_keep = p_work + X * BR, p_work + X * (BR + T), p_work + X * (BR + T + 1)
    b_log, b_at, m_hx = tl.zeros([BG, BX], tl.float32), o_t, m_h[:, None] & (o_x < X)[None, :]
    for j in tl.static_range(T - 1, -1, -1):
        b_w = ws[j] * _at(b_unit, o_x, T + j) if EPS > 0 else ws[j]
        b_near = (grams[j] * b_factor)[None, :] * b_w[:, None] * tl.exp2(b_log * LOG2_E)
        m_on, b_at = _meets(b_at, o_t, j, ups[j], TREE)
        m_near = m_on & ((o_x < T) | (o_t > j))  # a key reads what came before it
        b_near = tl.where(m_near[None, :], b_near, 0.0)
        tl.store(p_near[:, None] + j * X + o_x[None, :], b_near, mask=m_hx, eviction_policy=KEEP)
        b_log += tl.where(m_on[None, :], gs[j][:, None], 0.0)
    b_all = tl.sum(b_next, 1) + tl.where(n > 0, b_oldest, 0.0)
    b_keep *= tl.exp2(tl.cumsum(b_next, 1, reverse=True) * LOG2_E)
    b_scale = tl.exp2((b_log + b_all[:, None]) * LOG2_E) * b_factor[None, :]
    tl.store(p_scale[:, None] + o_x[None, :], b_scale, mask=m_hx, eviction_policy=KEEP)
    for x in tl.static_range(X):
        b_e = tl.exp2(tl.sum(tl.where((o_x == x)[None, :], b_log, 0.0), 1) * LOG2_E)
        if EPS > 0:
            b_e *= _at(b_factor, o_x, x)
        b_far = scores[x][None, :] * (b_keep * b_e[:, None])
        tl.store(p_work[:, None] + x * BR + o_r[None, :], b_far, mask=m_h[:, None], eviction_policy=KEEP)
    tl.store(p_keep[:, None] + o_r[None, :], b_keep, mask=m_h[:, None] & (o_r < BR * due)[None, :])
    tl.store(p_keep + BR, tl.exp2(b_all * LOG2_E), mask=tl.arange(0, BG) < GROUP * due)
    return b_unit


@triton.jit
def _by_channel(
    p_q, p_k, p_w, p_g, p_rk, p_rw, p_rg, p_work, p_out, p_keys, p_decay, i_head, n, due, o_h, o_r, o_x, p_up,
    s_pt, s_qt, s_qh, s_kt, s_kh, s_wt, s_wh, s_gt, s_gh, s_rkh, s_rwh, s_rgh,
    T: tl.constexpr, X: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
    BC: tl.constexpr, BR: tl.constexpr, WIDTH: tl.constexpr, TREE: tl.constexpr, EPS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Of value heads ``o_h``, SHARE to a key head: rows [GROUP, NC, BC], and all vectors [GROUP, BX, NC, BC], as they
    decay by channel. Each head has threads of its own, and each thread the same columns of all NC pieces, so that
    little of a sum passes from thread to thread."""
    SOME: tl.constexpr = 4 if X <= 2 else 2  # ring rows at a time, as many as registers allow
    GROUP: tl.constexpr = o_h.shape[0]
    BX: tl.constexpr = o_x.shape[0]
    o_k = (tl.arange(0, BK // BC)[:, None] * BC + tl.arange(0, BC)[None, :])[None, :, :]
    o_k = tl.max_contiguous(o_k, [1, 1, 4])  # four to a thread, of any type: so no block changes threads
    o_g, o_t, m_k, m_x = o_h // SHARE, o_x % T, (o_k < K) | (K == BK), ((o_x < X) | (X == BX))[None, :]
    p_q, p_k = p_q + (o_g * s_qh)[:, None, None] + o_k, _ranked(p_k + (o_g * s_kh)[:, None, None] + o_k)
    p_g, p_w = _ranked(p_g + (o_h * s_gh)[:, None, None] + o_k), p_w + o_h * s_wh
    p_rk, p_rg = p_rk + (o_g * s_rkh)[:, None, None] + o_k, _ranked(p_rg + (o_h * s_rgh)[:, None, None] + o_k)
    p_rk, p_keys = _ranked(p_rk), _ranked(p_keys + (o_h * BR * K)[:, None, None] + o_k)
    p_rw, p_work, p_decay = p_rw + o_h * s_rwh, p_work + o_h * WIDTH, _ranked(p_decay + (o_h * K)[:, None, None] + o_k)
    p_x = tl.where((o_x < T)[None, :, None, None], p_q[:, None, :, :], p_k[:, None, :, :])
    p_x += tl.where(o_x < T, o_x * s_qt, (o_x - T) * s_kt)[None, :, None, None]
    m_xk, p_x = m_x[:, :, None, None] & m_k[:, None, :, :], tl.max_contiguous(p_x, [2, 1, 1, 4])
    b_x = tl.load(p_x, mask=m_xk, other=0.0).to(tl.float32)
    b_unit, b_at = tl.full([GROUP, BX], 1.0, tl.float32), o_t
    if EPS > 0:
        b_unit = 1.0 / tl.sqrt_rn(tl.sum(tl.sum(b_x * b_x, 2), 2) + EPS)
        b_x *= tl.where((o_x < T)[None, :], b_unit * (K**-0.5), b_unit)[:, :, None, None]
    for i in tl.range(0, T, loop_unroll_factor=T if T <= 4 else 1):
        j = T - 1 - i
        b_k, b_g = tl.load(p_k + j * s_kt, mask=m_k, other=0.0), tl.load(p_g + j * s_gt, mask=m_k, other=0.0)
        b_w = tl.load(p_w + j * s_wt).to(tl.float32)
        if EPS > 0:
            b_w *= tl.sum(tl.where((o_x == T + j)[None, :], b_unit, 0.0), 1)
        i_new = (i_head + n + j) % R  # the new row but for d
        tl.store(p_rw + i_new, b_w)
        tl.store(p_rg + i_new * K, b_g.to(p_rg.dtype.element_ty), mask=m_k)
        tl.store(p_rk + i_new * K, b_k.to(p_rk.dtype.element_ty), mask=m_k & (o_h % SHARE == 0)[:, None, None])
        i_up = tl.load(p_up + j * s_pt).to(tl.int32) if TREE else 0
        b_near = tl.sum(tl.sum(b_x * b_k.to(tl.float32)[:, None, :, :], 2), 2) * b_w[:, None]
        m_on, b_at = _meets(b_at, o_t, j, i_up, TREE)
        b_near = tl.where((m_on & ((o_x < T) | (o_t > j)))[None, :], b_near, 0.0)  # a key reads what came before it
        tl.store(p_work[:, None] + X * BR + j * X + o_x[None, :], b_near, mask=m_x, eviction_policy=KEEP)
        b_decay = tl.exp2(b_g.to(tl.float32) * LOG2_E)
        b_x = tl.where(m_on[None, :, None, None], b_x * b_decay[:, None, :, :], b_x)
    b_back = tl.zeros([GROUP, BK // BC, BC], tl.float32)  # log2 of the decay from after a row to the step
    for i in range(0, n, SOME):
        rows, ones = (), ()
        for a in tl.static_range(SOME):
            i_row, m_row = (i_head + tl.maximum(n - 1 - i - a, 0)) % R, o_k < tl.where(n > i + a, K, 0)
            rows = rows + (tl.load(p_rk + i_row * K, mask=m_row, other=0.0),)
            rows = rows + (tl.load(p_rg + i_row * K, mask=m_row, other=0.0), tl.load(p_rw + i_row))
        for a in tl.static_range(SOME):
            b_k = rows[3 * a].to(tl.float32) * tl.exp2(b_back)
            b_back += rows[3 * a + 1].to(tl.float32) * LOG2_E
            ones = ones + (tl.sum(tl.sum(b_x * b_k[:, None, :, :], 2), 2) * rows[3 * a + 2][:, None],)
            if due != 0:
                m_row = o_k < tl.where(n > i + a, K, 0)
                tl.store(p_keys + (n - 1 - i - a) * K, b_k.to(p_keys.dtype.element_ty), mask=m_row)
        if SOME == 2:
            b_far = tl.join(ones[0], ones[1])
        else:
            b_far = tl.reshape(tl.join(tl.join(ones[0], ones[2]), tl.join(ones[1], ones[3])), [GROUP, BX, SOME])
        o_old = n - 1 - i - tl.arange(0, SOME)[None, None, :]
        p_far, m_far = p_work[:, None, None] + o_x[None, :, None] * BR + o_old, m_x[:, :, None] & (o_old >= 0)
        tl.store(p_far, b_far, mask=m_far, eviction_policy=KEEP)
    p_dead = p_work[:, None, None] + o_x[None, :, None] * BR + o_r[None, None, :]
    tl.store(p_dead, tl.zeros([GROUP, BX, BR], tl.float32), mask=m_x[:, :, None] & (o_r >= n)[None, None, :])
    b_keep = tl.load(p_rw[:, None] + ((i_head + o_r) % R)[None, :], mask=(o_r < n)[None, :], other=0.0)
    tl.store(p_work[:, None] + X * (BR + T + 1) + o_r[None, :], b_keep, mask=(o_r < BR * due)[None, :])
    b_decay = tl.exp2(b_back)
    tl.store(p_decay, b_decay, mask=o_k < K * due)
    p_out = (p_out + (o_h * X * K)[:, None, None] + o_k)[:, None, :, :] + o_x[None, :, None, None] * K
    p_out = tl.max_contiguous(p_out, [2, 1, 1, 4])
    tl.store(p_out, (b_x * b_decay[:, None, :, :]).to(p_out.dtype.element_ty), mask=m_xk, eviction_policy=KEEP)
