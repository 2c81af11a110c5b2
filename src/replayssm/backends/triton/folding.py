"""Folds: alone or at the end of a step, from the ring or from what prepare.py has left. Names as in kernel.py."""

import triton
import triton.language as tl

from replayssm.backends.triton.tiles import dot, load_columns, ordered, parts, unordered


@triton.jit
def absorb(
    p_S, p_rk, p_rd, p_rw, p_rg, i_head, n, i_v,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr, UPCAST: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """State rows ``[i_v BV, (i_v + 1) BV)`` of one value head absorb the first ``n > 0`` ring rows, BF at a time.

    On tensor cores, with ``d w`` and decayed keys in parts of bfloat16: three, all of a float32, where the state is of
    float32, otherwise two. A step has the state in registers, but holding it back would cost them to every program
    while few fold; here it comes from L2. UPCAST: for Triton's interpreter, which cannot multiply bf16."""
    PARTS: tl.constexpr = 1 if UPCAST else 3 if p_S.dtype.element_ty == tl.float32 else 2
    DTYPE: tl.constexpr = tl.float32 if UPCAST else tl.bfloat16
    BP: tl.constexpr = min(BK, 32 if CHANNEL and PARTS == 3 else 64)  # columns at a time: more takes too many registers
    o_r = tl.arange(0, BR)
    i_row = (i_head + o_r) % R
    b_w = tl.load(p_rw + i_row, mask=o_r < n, other=0.0)
    b_decay = 1.0
    if not CHANNEL:  # suffix sums of log-decays, never differences of prefix sums
        b_next = tl.load(p_rg + (i_head + o_r + 1) % R, mask=o_r + 1 < n, other=0.0)
        b_w *= tl.exp(tl.cumsum(b_next, 0, reverse=True))
        b_decay = tl.exp(tl.sum(b_next, 0) + tl.load(p_rg + i_head))
    for i_k in range(0, BK, BP):
        o_k = i_k + tl.arange(0, BP)
        m_row = (o_r < n)[:, None] & (o_k < K)[None, :]
        b_k = tl.load(p_rk + i_row[:, None] * K + o_k[None, :], mask=m_row, other=0.0)
        b_S_decay = b_decay
        if CHANNEL:
            b_g = tl.load(p_rg + i_row[:, None] * K + o_k[None, :], mask=m_row, other=0.0)
            # As a product, for a scan goes lane by lane.
            b_later = tl.where(o_r[None, :] > o_r[:, None], 1.0, 0.0).to(DTYPE)
            b_after = dot((b_later,), parts(b_g, PARTS, DTYPE), tl.zeros([BR, BP], tl.float32), PARTS, "ieee")
            b_k = b_k.to(tl.float32) * tl.exp(tl.minimum(b_after, 0.0))
            b_S_decay = tl.exp(tl.sum(b_g.to(tl.float32), 0))[None, :]
        keys = parts(b_k, PARTS, DTYPE)
        for i_f in range(0, BV, BF):
            o_v = i_v * BV + i_f + tl.arange(0, BF)
            m_v = o_v < V
            p_block, m_S = p_S + o_v[:, None] * K + o_k[None, :], m_v[:, None] & (o_k < K)[None, :]
            p_d, m_d = p_rd + o_v[:, None] + i_row[None, :] * V, m_v[:, None] & (o_r < n)[None, :]
            b_d = tl.load(p_d, mask=m_d, other=0.0).to(tl.float32) * b_w[None, :]
            b_new = dot(parts(b_d, PARTS, DTYPE), keys, tl.zeros([BF, BP], tl.float32), PARTS, "ieee")
            b_new += tl.load(p_block, mask=m_S, other=0.0).to(tl.float32) * b_S_decay
            tl.store(p_block, b_new.to(p_S.dtype.element_ty), mask=m_S)


@triton.jit
def absorb_prepared(
    p_S, o_v, m_v, ds, o_r, p_keep, p_keys, p_decay, i_head, n,
    K: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr, UPCAST: tl.constexpr,
    BK: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """:func:`absorb` of rows ``o_v`` with all decays known, in the layouts of kernel.py: d as loaded there, the state
    as there, so only keys pass from thread to thread."""
    STATE: tl.constexpr = p_S.dtype.element_ty
    PARTS: tl.constexpr = 1 if UPCAST else 3 if tl.float32 == STATE else 2
    DTYPE: tl.constexpr = tl.float32 if UPCAST else tl.bfloat16
    SOME: tl.constexpr = max(BK // BC // 2, 1)
    o_l = tl.arange(0, 16)
    o_p = o_l // 2 % 4 * 4 + o_l // 8 * 2 + o_l % 2  # the row that products count as number o_l
    decay, ws = 1.0 if CHANNEL else tl.load(p_keep + BR), ()
    for j in tl.static_range(BR // 16):
        b_keep = tl.load(p_keep + j * 16 + o_r)  # 0 past the last row
        ws = ws + (parts(ordered(ds[j].to(tl.float32) * b_keep[:, None, :], 2), PARTS, DTYPE),)
    for i_some in tl.static_range(0, BK // BC, SOME):  # all loads of SOME pieces first, as none can pass a store
        blocks, rows, fades = (), (), ()
        for i in tl.static_range(i_some, i_some + SOME):
            o_a = i * BC + tl.arange(0, BC)
            for j in tl.static_range(BR // 16):
                i_r = j * 16 + o_p
                p_key = p_keys + (i_r if CHANNEL else (i_head + i_r) % R)[:, None] * K + o_a[None, :]
                m_key = (i_r < n)[:, None] & ((o_a < K) | (K == BK))[None, :]
                rows = rows + (tl.load(p_key, mask=m_key, other=0.0),)
            blocks = blocks + (load_columns(p_S + o_v * K, m_v, i, K, BK, BC, False),)
            if CHANNEL:
                o_c = i * BC + tl.arange(0, 4)[:, None] * (BC // 4) + tl.arange(0, BC // 4)[None, :]
                fades = fades + (tl.load(p_decay + o_c, mask=(o_c < K) | (K == BK), other=0.0),)
        for i in tl.static_range(SOME):
            b_add = tl.zeros([BV, BC], tl.float32)
            for j in tl.static_range(BR // 16):
                b_key = tl.permute(tl.reshape(rows[i * (BR // 16) + j], [16, 4, BC // 8, 2]), [0, 2, 1, 3])
                b_add = dot(ws[j], parts(tl.reshape(b_key, [16, BC]), PARTS, DTYPE), b_add, PARTS, "ieee")
            b_S = blocks[i].to(tl.float32) * (fades[i][:, None, :] if CHANNEL else decay) + unordered(b_add, 2)
            o_c = (i_some + i) * BC + tl.arange(0, 4)[:, None] * (BC // 4) + tl.arange(0, BC // 4)[None, :]
            p_block = tl.max_contiguous((p_S + o_v * K)[None, :, None] + o_c[:, None, :], [4, 2, 16])
            m_c = (o_c < K) | (K == BK)
            tl.store(p_block, b_S.to(STATE), mask=m_v[None, :, None] & m_c[:, None, :])


@triton.jit
def fold_kernel(
    slots, rows, ckpt, ring_k, ring_d, ring_w, ring_g, head,
    s_cn, s_ch, s_kn, s_kh, s_dn, s_dh, s_wn, s_wh, s_gn, s_gh,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr,
    UPCAST: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Stand-alone fold of the first ``rows[b]`` committed rows. Grid: (cdiv(V, BV), HV, B)."""
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_slot, n = tl.load(slots + i_b).to(tl.int64), tl.load(rows + i_b)
    if (i_slot < 0) | (n <= 0):
        return
    p_k, p_g = ring_k + i_slot * s_kn + (i_h // (HV // H)) * s_kh, ring_g + i_slot * s_gn + i_h * s_gh
    p_S, p_d = ckpt + i_slot * s_cn + i_h * s_ch, ring_d + i_slot * s_dn + i_h * s_dh
    p_w, i_head = ring_w + i_slot * s_wn + i_h * s_wh, tl.load(head + i_slot) % R
    absorb(p_S, p_k, p_d, p_w, p_g, i_head, n, i_v, K, V, R, CHANNEL, UPCAST, BK, BV, BF, BR)
