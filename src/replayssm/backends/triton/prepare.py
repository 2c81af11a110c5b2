"""The first launch of a step, all that needs no state; kernel.py says what for, and whose names these are.

New queries and keys are taken back through the new tokens and the ring, from the newest row to the oldest; each row
that they meet gets a coefficient. Log-decays are added up before the exponential is taken: errors of exponentials would
multiply up. Sums are over suffixes, never differences of prefix sums."""

import triton
import triton.language as tl


@triton.jit
def prepare_kernel(
    q, k, w, g, slots, ring_k, ring_w, ring_g, head, count, work, work_x,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_wb, s_wt, s_wh, s_gb, s_gt, s_gh, s_rkn, s_rkh, s_rwn, s_rwh, s_rgn, s_rgh,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    CHANNEL: tl.constexpr, ERASE: tl.constexpr,
    BK: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BX: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr,
    WIDTH: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Coefficients of one key head's value heads (CHANNEL: of one value head). Grid: (B * H,) or (B * HV,).

    work [B, HV, WIDTH] float32: see kernel.py. work_x [B, HV, X, K] float32, CHANNEL only: queries, then keys, decayed
    down to the checkpoint (so scale is 1). BN: numbers of near, where they are gathered to be stored at once, or 0.
    AHEAD: ring rows loaded at once, CHANNEL only."""
    GROUP: tl.constexpr = 1 if CHANNEL else HV // H
    X: tl.constexpr = 2 * T if ERASE else T
    pid = tl.program_id(0)
    i_h, i_b = (pid % (HV // GROUP)) * GROUP, (pid // (HV // GROUP)).to(tl.int64)  # first value head
    i_g = i_h // (HV // H)
    i_slot = tl.load(slots + i_b).to(tl.int64)
    if i_slot < 0:
        return
    n, i_head = tl.load(count + i_slot), tl.load(head + i_slot) % R
    o_k, o_h, o_r = tl.arange(0, BK // BC)[:, None] * BC + tl.arange(0, BC)[None, :], tl.arange(0, BG), tl.arange(0, BR)
    m_k, m_h = o_k < K, o_h < GROUP
    p_q, p_k = q + i_b * s_qb + i_g * s_qh, k + i_b * s_kb + i_g * s_kh
    p_w, p_g = w + i_b * s_wb + (i_h + o_h) * s_wh, g + i_b * s_gb + i_h * s_gh
    p_rk, p_rg = ring_k + i_slot * s_rkn + i_g * s_rkh, ring_g + i_slot * s_rgn + i_h * s_rgh
    p_rw, p_far = ring_w + i_slot * s_rwn + (i_h + o_h) * s_rwh, work + (i_b * HV + i_h + o_h) * WIDTH
    if CHANNEL:
        p_x, p_far1 = work_x + (i_b * HV + i_h) * X * K + o_k, work + (i_b * HV + i_h) * WIDTH
        _by_channel(
            p_q, p_k, w + i_b * s_wb + i_h * s_wh, p_g, p_rk, ring_w + i_slot * s_rwn + i_h * s_rwh, p_rg, p_far1, p_x,
            i_head, n, o_k, m_k, o_r, s_qt, s_kt, s_wt, s_gt, T, X, K, R, BX, BR, AHEAD,
        )  # fmt: skip
    else:
        p_g, p_rg = p_g + o_h * s_gh, p_rg + o_h * s_rgh
        _by_head(
            p_q + o_k, p_k + o_k, p_w, p_g, p_rk, p_rw, p_rg, p_far, i_head, n, o_k, m_k, m_h, o_r,
            s_qt, s_kt, s_wt, s_gt, T, X, K, R, ERASE, BR, BG, BN,
        )  # fmt: skip
    for t in tl.static_range(T):  # the new rows but for d
        i_new = (i_head + n + t) % R
        tl.store(p_rw + i_new, tl.load(p_w + t * s_wt, mask=m_h, other=0.0).to(tl.float32), mask=m_h)
        if CHANNEL:
            b_g = tl.load(p_g + t * s_gt + o_k, mask=m_k, other=0.0).to(tl.float32)
            tl.store(p_rg + i_new * K + o_k, b_g, mask=m_k)
        else:
            tl.store(p_rg + i_new, tl.load(p_g + t * s_gt, mask=m_h, other=0.0).to(tl.float32), mask=m_h)
        if i_h % (HV // H) == 0:
            b_k = tl.load(p_k + t * s_kt + o_k, mask=m_k, other=0.0)
            tl.store(p_rk + i_new * K + o_k, b_k.to(p_rk.dtype.element_ty), mask=m_k)


@triton.jit
def _by_head(
    p_q, p_k, p_w, p_g, p_rk, p_rw, p_rg, p_far, i_head, n, o_k, m_k, m_h, o_r, s_qt, s_kt, s_wt, s_gt,
    T: tl.constexpr, X: tl.constexpr, K: tl.constexpr, R: tl.constexpr, ERASE: tl.constexpr,
    BR: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Products with keys are shared by the value heads, decays [BG] are not."""
    m_rk, i_row = (o_r < n)[:, None, None] & m_k[None, :, :], (i_head + o_r) % R
    b_rk = tl.load(p_rk + i_row[:, None, None] * K + o_k[None, :, :], mask=m_rk, other=0.0)
    m_hr, p_next = m_h[:, None] & (o_r < n)[None, :], p_rg[:, None] + ((i_head + o_r + 1) % R)[None, :]
    b_keep = tl.load(p_rw[:, None] + i_row[None, :], mask=m_hr, other=0.0)  # [BG, BR]
    b_next = tl.load(p_next, mask=m_h[:, None] & (o_r + 1 < n)[None, :], other=0.0)
    b_oldest = tl.load(p_rg + i_head, mask=m_h, other=0.0)
    p_near, p_scale = p_far + X * BR, p_far + X * (BR + T)
    # From the last token back; logs: the log-decay from after token j to each t that follows.
    qs, ks, logs, b_near = (), (), (), tl.zeros([BG, max(BN, 1)], tl.float32)
    for j in tl.static_range(T - 1, -1, -1):
        b_w = tl.load(p_w + j * s_wt, mask=m_h, other=0.0).to(tl.float32)
        b_g = tl.load(p_g + j * s_gt, mask=m_h, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + j * s_kt, mask=m_k, other=0.0).to(tl.float32)
        qs = (tl.load(p_q + j * s_qt, mask=m_k, other=0.0).to(tl.float32),) + qs
        ks, logs = (b_k,) + ks, (tl.zeros([BG], tl.float32),) + logs
        for t in tl.static_range(j, T):
            b_wt = b_w * tl.exp(logs[t - j])
            b_near = _put(b_near, p_near, t * T + j, tl.sum(tl.sum(qs[t - j] * b_k, 0), 0) * b_wt, m_h, BN)
            if ERASE and t > j:
                b_near = _put(b_near, p_near, (T + t) * T + j, tl.sum(tl.sum(ks[t - j] * b_k, 0), 0) * b_wt, m_h, BN)
        logs = _plus(logs, b_g)
    if BN > 0:
        o_n = tl.arange(0, BN)
        tl.store(p_near[:, None] + o_n[None, :], b_near, mask=m_h[:, None] & (o_n < X * T)[None, :])
    b_all = tl.sum(b_next, 1) + tl.where(n > 0, b_oldest, 0.0)
    b_keep *= tl.exp(tl.cumsum(b_next, 1, reverse=True))
    for x in tl.static_range(X):
        b_x = qs[x] if x < T else ks[x - T]
        b_score = tl.sum(tl.sum(b_rk.to(tl.float32) * b_x[None, :, :], 1), 1)
        b_far = b_score[None, :] * (b_keep * tl.exp(logs[x % T])[:, None])
        tl.store(p_far[:, None] + x * BR + o_r[None, :], b_far, mask=m_h[:, None])
    for t in tl.static_range(T):
        tl.store(p_scale + t, tl.exp(logs[t] + b_all), mask=m_h)


@triton.jit
def _put(b_near, p_near, i: tl.constexpr, b_value, m_h, BN: tl.constexpr):
    """Number ``i`` of near, [BG]: into the block where there is one, otherwise into memory."""
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
def _by_channel(
    p_q, p_k, p_w, p_g, p_rk, p_rw, p_rg, p_far, p_x, i_head, n, o_k, m_k, o_r, s_qt, s_kt, s_wt, s_gt,
    T: tl.constexpr, X: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    BX: tl.constexpr, BR: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """All vectors in one block [BX, NC, BC], as they decay by channel."""
    o_x = tl.arange(0, BX)
    o_t, m_x = o_x % T, (o_x < X)[:, None, None] & m_k[None, :, :]
    p_in = tl.where(o_x < T, p_q + o_x * s_qt, p_k + (o_x - T) * s_kt)[:, None, None] + o_k[None, :, :]
    b_x = tl.load(p_in, mask=m_x, other=0.0).to(tl.float32)
    for i in range(T):
        j = T - 1 - i
        b_k = tl.load(p_k + j * s_kt + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_g = tl.load(p_g + j * s_gt + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_near = tl.sum(tl.sum(b_x * b_k[None, :, :], 1), 1) * tl.load(p_w + j * s_wt).to(tl.float32)
        tl.store(p_far + X * BR + o_x * T + j, b_near, mask=(o_x < X) & (o_t >= j))  # of a key at t = j: never read
        b_x = tl.where((o_t >= j)[:, None, None], b_x * tl.exp(b_g)[None, :, :], b_x)
    b_back, b_far = tl.zeros(o_k.shape, tl.float32), tl.zeros([BX, BR], tl.float32)
    for i in range(0, n, AHEAD):
        rows = ()
        for a in tl.static_range(AHEAD):
            i_old = (i_head + tl.maximum(n - 1 - i - a, 0)) % R  # past the oldest row: that again, without decay
            b_g = tl.where(n > i + a, tl.load(p_rg + i_old * K + o_k, mask=m_k, other=0.0), 0.0)
            rows = rows + (tl.load(p_rk + i_old * K + o_k, mask=m_k, other=0.0), b_g)
        for a in tl.static_range(AHEAD):
            b_k = rows[2 * a].to(tl.float32) * tl.exp(b_back)
            b_one = tl.sum(tl.sum(b_x * b_k[None, :, :], 1), 1)
            b_far = tl.where((o_r == n - 1 - i - a)[None, :], b_one[:, None], b_far)
            b_back += rows[2 * a + 1]
    b_keep = tl.load(p_rw + (i_head + o_r) % R, mask=o_r < n, other=0.0)
    tl.store(p_far + o_x[:, None] * BR + o_r[None, :], b_far * b_keep[None, :], mask=(o_x < X)[:, None])
    tl.store(p_x[None, :, :] + o_x[:, None, None] * K, b_x * tl.exp(b_back)[None, :, :], mask=m_x)
