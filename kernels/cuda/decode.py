"""Decode attention on CUDA: softmax(q·K) V of one token a sequence, read from packed rows.

    block = (split of the tokens, 8 query heads that share a KV head, sequence)
    warp  = every WARPS-th tile of 32 tokens, through a ring of stages of its own
    lane  = g = lane // 4, t = lane % 4: rows g and g + 8 or columns 2t and 2t + 1 of an MMA

    K   A fragment: 16 tokens x 16 codes; B: the query heads. Codes are fp16 subnormals: a code in
        the low bits of a half is code * 2**-24, which tensor cores multiply exactly. Each group
        has its own sums, times its scale in float32; the shifts take the sums of q.
    P   is turned from the scores' fragment into a B fragment by movmatrix, in registers.
    V   A fragment, transposed by ldmatrix: 16 elements x 16 tokens. Its scales are multiplied into
        P; its shifts are one more MMA, on the rows' headers.

The three techniques: *unrolled loads* (all copies of a tile are issued back to back, without
registers), *V prefetch* (a stage holds K and V: V is on its way while K is computed with), *padded
shared memory* (staging.py). Softmax is online and rescales only when a score exceeds the maximum by
more than 2**4 (lazy rescale). All sums are float32. The splits are merged by their log-sum-exp.
"""

from numba import cuda, float32, int32, uint32, uint64
from numba.cuda.extending import register_jitable

from .ptx import (
    any_lane,
    bf16_float,
    commit_copies,
    copy_4,
    copy_8,
    copy_16,
    exchange,
    exp2,
    f16_float,
    from_lane,
    high_f16,
    load_global_u16,
    load_global_u32,
    load_matrix_x2_t,
    load_matrix_x4,
    load_matrix_x4_t,
    load_shared_f32,
    load_shared_u32,
    log2,
    low_f16,
    low_halves,
    maximum,
    mma_bf16,
    mma_f16,
    multiply_f16,
    pack_bf16,
    pack_f16,
    shared_address,
    store_global_f32,
    store_shared_f32,
    store_shared_f32x2,
    transpose_matrix,
    wait_copies,
)
from .staging import StagedRow

TILE = 32  # tokens: two MMAs of 16
HEADS = 8  # query heads of a block: the columns of an MMA
SIGNATURE = (uint64,) * 13 + (int32,) * 5 + (float32,)


@register_jitable
def fp8_pair(x):
    """Bytes 0 and 2 of a word, as E4M3, times 2**-8 as a pair of fp16."""
    return ((x & uint32(0x007F007F)) << uint32(7)) | ((x & uint32(0x00800080)) << uint32(8))


def make_copy(staged):
    """Make the function that asks for the rows of a tile, all copies unrolled."""
    ROW, HEADER, PIECES, GRANULE = staged.stride, staged.header, staged.pieces, staged.granule
    copy = {4: copy_4, 8: copy_8, 16: copy_16}[GRANULE]

    @register_jitable
    def copy_tile(target, base, stride, first, end, start, capacity):
        lane = int32(cuda.threadIdx.x) & int32(31)
        for i in range(PIECES):  # TILE = 32 rows: PIECES copies of each lane
            piece = lane + int32(32 * i)
            row = piece // int32(PIECES)
            byte = (piece % int32(PIECES)) * int32(GRANULE)
            valid = uint32(GRANULE) if first + row < end else uint32(0)
            token = start + min(first + row, end - int32(1))
            if token >= capacity:
                token -= capacity
            copy(
                target + uint32(row) * uint32(ROW) + uint32(byte + int32(HEADER)),
                base + uint64(token) * stride + uint64(byte),
                valid,
            )

    return copy_tile


def make_decode_kernel(k_format, v_format, warps, stages, q_is_bf16):
    """The kernel for rows of two formats, and the bytes of shared memory that it takes."""
    k, v = StagedRow(k_format), StagedRow(v_format)
    WARPS, STAGES = warps, stages
    K_DIM, V_DIM = k_format.head_dim, v_format.head_dim
    K_GROUPS, V_GROUPS = k_format.groups, v_format.groups
    K_GROUP, V_GROUP = k_format.group_size, v_format.group_size
    K_EXACT, V_EXACT = k_format.is_exact, v_format.is_exact
    K_INT4, V_INT4 = k_format.codec == "int4", v_format.codec == "int4"
    K_INT8, V_INT8 = k_format.codec == "int8", v_format.codec == "int8"
    K_ROW, K_PREFIX, K_HEADER, K_CHUNKS = k.stride, k.prefix, k.header, k.chunks
    V_ROW, V_PREFIX, V_HEADER, V_CHUNKS = v.stride, v.prefix, v.header, v.chunks
    K_EVEN, V_EVEN = K_CHUNKS + K_CHUNKS % 2, V_CHUNKS + V_CHUNKS % 2  # ldmatrix takes two
    K_PARTS, K_MMAS, K_SPAN, K_FACTOR = k.parts, k.mmas, k.span, k.factor
    V_PARTS, V_MMAS, V_SPAN, V_FACTOR = v.parts, v.mmas, v.span, v.factor
    K_TILE = TILE * K_ROW
    STAGE_BYTES = K_TILE + TILE * V_ROW
    WARP_BYTES = STAGES * STAGE_BYTES + 16  # an odd last chunk is read with the 16 bytes after it
    OUT_ROW = V_DIM + 4  # padded: the lanes of a quad write two rows apart
    SHARED = max(WARPS * WARP_BYTES, WARPS * 64 + WARPS * HEADS * OUT_ROW * 4)
    Q_WORDS = K_EVEN if K_EXACT else 2 * K_EVEN * K_PARTS * K_MMAS
    Q_SUMS = 2 * K_GROUPS
    SUMS = 2 * V_EVEN if V_EXACT else 4 * V_EVEN * V_MMAS
    copy_k, copy_v = make_copy(k), make_copy(v)
    wait_for_oldest = wait_copies[STAGES - 2]
    wait_all = wait_copies[0]
    k_mma = mma_bf16 if k_format.codec == "bf16" else mma_f16
    v_mma = mma_bf16 if v_format.codec == "bf16" else mma_f16
    k_pack = pack_bf16 if k_format.codec == "bf16" else pack_f16
    p_pack = pack_bf16 if v_format.codec == "bf16" else pack_f16
    q_float = bf16_float if q_is_bf16 else f16_float

    def decode_kernel(
        q,  # [batch, num_q_heads, head_dim], bfloat16 or float16
        k_rows,
        v_rows,
        seq_lens,  # [batch] int32
        starts,  # [batch] int32, or 0
        out,  # [num_splits, batch, num_q_heads, head_dim of V] float32
        lse,  # [num_splits, batch, num_q_heads] float32, base 2
        k_stride_batch,  # bytes from a sequence, a KV head, a token to the next
        k_stride_head,
        k_stride,
        v_stride_batch,
        v_stride_head,
        v_stride,
        capacity,
        num_q_heads,
        ratio,  # query heads on a KV head
        head_blocks,
        num_splits,
        score_scale,  # sm_scale * log2(e)
    ):
        dyn = cuda.shared.array(0, uint32)
        tid = int32(cuda.threadIdx.x)
        lane = tid & int32(31)
        warp = tid >> int32(5)
        g = lane >> int32(2)
        t = lane & int32(3)
        split = int32(cuda.blockIdx.x)
        b = int32(cuda.blockIdx.z)
        kv_head = int32(cuda.blockIdx.y) // head_blocks
        first_head = int32(cuda.blockIdx.y) % head_blocks * int32(8)
        heads = min(int32(8), ratio - first_head)
        head0 = kv_head * ratio + first_head
        length = int32(load_global_u32(seq_lens + uint64(4) * uint64(b)))
        chunk = (length + num_splits - int32(1)) // num_splits
        t_begin = min(split * chunk, length)
        t_end = min(t_begin + chunk, length)
        ntiles = (t_end - t_begin + int32(TILE * WARPS - 1)) // int32(TILE * WARPS)
        # Step 1: query fragments and, for each group, the sum of q
        qf = cuda.local.array(Q_WORDS, uint32)
        qs = cuda.local.array(Q_SUMS, float32)
        ok = g < heads
        qrow = q + uint64(2 * K_DIM) * (uint64(b) * uint64(num_q_heads) + uint64(head0 + g))
        if K_EXACT:
            for m in range(K_EVEN // 2):
                for r in range(2):
                    lo = float32(0)
                    hi = float32(0)
                    if ok:
                        a = qrow + uint64(2) * uint64(int32(16 * m + 8 * r) + int32(2) * t)
                        lo = q_float(load_global_u16(a))
                        hi = q_float(load_global_u16(a + uint64(2)))
                    qf[2 * m + r] = k_pack(hi, lo)
        else:
            for i in range(K_GROUPS):
                qs[2 * i] = float32(0)
                qs[2 * i + 1] = float32(0)
            for c in range(K_EVEN):
                for part in range(K_PARTS):
                    total = float32(0)
                    for m in range(K_MMAS):
                        for r in range(2):
                            lo = float32(0)
                            hi = float32(0)
                            if K_INT4:
                                d = int32(32 * c + 2 * m + r) + int32(8) * t
                                e = d + int32(4)
                            else:
                                d = int32(16 * c + r) + int32(4) * t
                                e = d + int32(2)
                            if ok and c < K_CHUNKS:
                                if d < int32(K_DIM):
                                    if K_PARTS == 1 or d // int32(K_GROUP) == int32(
                                        c * K_PARTS + part
                                    ):
                                        lo = q_float(load_global_u16(qrow + uint64(2) * uint64(d)))
                                if e < int32(K_DIM):
                                    if K_PARTS == 1 or e // int32(K_GROUP) == int32(
                                        c * K_PARTS + part
                                    ):
                                        hi = q_float(load_global_u16(qrow + uint64(2) * uint64(e)))
                            total += lo + hi
                            f = float32(0.0625) if (K_INT4 and r == 1) else float32(1)
                            qf[((c * K_PARTS + part) * K_MMAS + m) * 2 + r] = pack_f16(
                                hi * f, lo * f
                            )
                    total += exchange(total, uint32(1))
                    total += exchange(total, uint32(2))
                    if c < K_CHUNKS:
                        grp = (c * K_SPAN) // K_GROUP + part if K_PARTS == 1 else c * K_PARTS + part
                        qs[2 * grp] += from_lane(total, uint32(8) * uint32(t))
                        qs[2 * grp + 1] += from_lane(total, uint32(8) * uint32(t) + uint32(4))
        # Step 2: sums
        o = cuda.local.array(SUMS, float32)
        for i in range(SUMS):
            o[i] = float32(0)
        z0 = float32(0)
        z1 = float32(0)
        z2 = float32(0)
        z3 = float32(0)
        m0 = float32(-1e30)
        m1 = float32(-1e30)
        l0 = float32(0)
        l1 = float32(0)
        base = shared_address(dyn) + uint32(warp) * uint32(WARP_BYTES)
        k_base = k_rows + uint64(b) * k_stride_batch + uint64(kv_head) * k_stride_head
        v_base = v_rows + uint64(b) * v_stride_batch + uint64(kv_head) * v_stride_head
        start = int32(0)
        if starts != uint64(0):
            start = int32(load_global_u32(starts + uint64(4) * uint64(b)))
        # Step 3: fill the ring of stages
        for s in range(STAGES - 1):
            if s < ntiles:
                first = t_begin + (int32(s) * int32(WARPS) + warp) * int32(TILE)
                dst = base + uint32(s * STAGE_BYTES)
                copy_k(dst, k_base, k_stride, first, t_end, start, capacity)
                copy_v(dst + uint32(K_TILE), v_base, v_stride, first, t_end, start, capacity)
            commit_copies()
        stage = int32(0)
        ahead = int32(STAGES - 1)
        row16 = uint32(lane & int32(15))
        half16 = uint32(lane >> int32(4)) * uint32(16)
        for it in range(ntiles):
            wait_for_oldest()
            cuda.syncwarp()
            nt = int32(it) + int32(STAGES - 1)
            if nt < ntiles:
                first = t_begin + (nt * int32(WARPS) + warp) * int32(TILE)
                dst = base + uint32(ahead) * uint32(STAGE_BYTES)
                copy_k(dst, k_base, k_stride, first, t_end, start, capacity)
                copy_v(dst + uint32(K_TILE), v_base, v_stride, first, t_end, start, capacity)
            commit_copies()
            ks = base + uint32(stage) * uint32(STAGE_BYTES)
            vs = ks + uint32(K_TILE)
            tok0 = t_begin + (int32(it) * int32(WARPS) + warp) * int32(TILE)
            # Step 4: scores
            S = cuda.local.array(8, float32)
            for h in range(2):
                ka = ks + uint32(h * 16 * K_ROW)
                s0 = float32(0)
                s1 = float32(0)
                s2 = float32(0)
                s3 = float32(0)
                if K_EXACT:
                    for c in range(K_EVEN // 2):
                        w = load_matrix_x4(ka + row16 * uint32(K_ROW) + half16 + uint32(32 * c))
                        a = k_mma(w[0], w[1], w[2], w[3], qf[2 * c], qf[2 * c + 1], s0, s1, s2, s3)
                        s0 = a[0]
                        s1 = a[1]
                        s2 = a[2]
                        s3 = a[3]
                    s0 *= score_scale
                    s1 *= score_scale
                    s2 *= score_scale
                    s3 *= score_scale
                else:
                    h0 = float32(0)
                    h1 = float32(0)
                    h2 = float32(0)
                    h3 = float32(0)
                    a0 = float32(0)
                    a1 = float32(0)
                    a2 = float32(0)
                    a3 = float32(0)
                    for cp in range(K_EVEN // 2):
                        w = load_matrix_x4(
                            ka + row16 * uint32(K_ROW) + half16 + uint32(K_PREFIX + 32 * cp)
                        )
                        for q_ in range(2):
                            c = 2 * cp + q_
                            if c < K_CHUNKS:
                                for part in range(K_PARTS):
                                    x = w[0] if q_ == 0 else w[2]
                                    y = w[1] if q_ == 0 else w[3]
                                    for m in range(K_MMAS):
                                        i = ((c * K_PARTS + part) * K_MMAS + m) * 2
                                        if K_INT4:
                                            a = mma_f16(
                                                x & uint32(0x000F000F),
                                                y & uint32(0x000F000F),
                                                x & uint32(0x00F000F0),
                                                y & uint32(0x00F000F0),
                                                qf[i],
                                                qf[i + 1],
                                                a0,
                                                a1,
                                                a2,
                                                a3,
                                            )
                                            x = x >> uint32(8)
                                            y = y >> uint32(8)
                                        elif K_INT8:
                                            a = mma_f16(
                                                x & uint32(0x00FF00FF),
                                                y & uint32(0x00FF00FF),
                                                (x >> uint32(8)) & uint32(0x00FF00FF),
                                                (y >> uint32(8)) & uint32(0x00FF00FF),
                                                qf[i],
                                                qf[i + 1],
                                                a0,
                                                a1,
                                                a2,
                                                a3,
                                            )
                                        else:
                                            a = mma_f16(
                                                fp8_pair(x),
                                                fp8_pair(y),
                                                fp8_pair(x >> uint32(8)),
                                                fp8_pair(y >> uint32(8)),
                                                qf[i],
                                                qf[i + 1],
                                                a0,
                                                a1,
                                                a2,
                                                a3,
                                            )
                                        a0 = a[0]
                                        a1 = a[1]
                                        a2 = a[2]
                                        a3 = a[3]
                                    last = (
                                        True
                                        if K_PARTS > 1
                                        else (c + 1) * K_SPAN % K_GROUP == 0 or c == K_CHUNKS - 1
                                    )
                                    if last:
                                        grp = (
                                            c * K_PARTS + part
                                            if K_PARTS > 1
                                            else (c * K_SPAN) // K_GROUP
                                        )
                                        u = load_shared_u32(
                                            ka
                                            + uint32(g) * uint32(K_ROW)
                                            + uint32(K_HEADER + 4 * grp)
                                        )
                                        v = load_shared_u32(
                                            ka
                                            + uint32(g + int32(8)) * uint32(K_ROW)
                                            + uint32(K_HEADER + 4 * grp)
                                        )
                                        f0 = low_f16(u)
                                        f1 = low_f16(v)
                                        e0 = high_f16(u)
                                        e1 = high_f16(v)
                                        s0 += f0 * a0
                                        s1 += f0 * a1
                                        s2 += f1 * a2
                                        s3 += f1 * a3
                                        h0 += e0 * qs[2 * grp]
                                        h1 += e0 * qs[2 * grp + 1]
                                        h2 += e1 * qs[2 * grp]
                                        h3 += e1 * qs[2 * grp + 1]
                                        a0 = float32(0)
                                        a1 = float32(0)
                                        a2 = float32(0)
                                        a3 = float32(0)
                    code_scale = score_scale * float32(K_FACTOR)
                    s0 = s0 * code_scale + h0 * score_scale
                    s1 = s1 * code_scale + h1 * score_scale
                    s2 = s2 * code_scale + h2 * score_scale
                    s3 = s3 * code_scale + h3 * score_scale
                if tok0 + int32(h * 16) + g >= t_end:
                    s0 = float32(-1e30)
                    s1 = float32(-1e30)
                if tok0 + int32(h * 16 + 8) + g >= t_end:
                    s2 = float32(-1e30)
                    s3 = float32(-1e30)
                S[4 * h] = s0
                S[4 * h + 1] = s1
                S[4 * h + 2] = s2
                S[4 * h + 3] = s3
            # Step 5: lazy rescale
            n0 = maximum(maximum(S[0], S[2]), maximum(S[4], S[6]))
            n1 = maximum(maximum(S[1], S[3]), maximum(S[5], S[7]))
            grow = uint32(1) if (n0 > m0 + float32(4)) or (n1 > m1 + float32(4)) else uint32(0)
            if any_lane(grow):
                n0 = maximum(n0, exchange(n0, uint32(4)))
                n0 = maximum(n0, exchange(n0, uint32(8)))
                n0 = maximum(n0, exchange(n0, uint32(16)))
                n1 = maximum(n1, exchange(n1, uint32(4)))
                n1 = maximum(n1, exchange(n1, uint32(8)))
                n1 = maximum(n1, exchange(n1, uint32(16)))
                n0 = maximum(n0, m0)
                n1 = maximum(n1, m1)
                e0 = exp2(m0 - n0)
                e1 = exp2(m1 - n1)
                m0 = n0
                m1 = n1
                l0 *= e0
                l1 *= e1
                for i in range(SUMS // 4):
                    o[4 * i] *= e0
                    o[4 * i + 1] *= e1
                    o[4 * i + 2] *= e0
                    o[4 * i + 3] *= e1
                z0 *= e0
                z1 *= e1
                z2 *= e0
                z3 *= e1
            # Step 6: P V
            for h in range(2):
                p0 = exp2(S[4 * h] - m0)
                p1 = exp2(S[4 * h + 1] - m1)
                p2 = exp2(S[4 * h + 2] - m0)
                p3 = exp2(S[4 * h + 3] - m1)
                l0 += p0 + p2
                l1 += p1 + p3
                b0 = transpose_matrix(p_pack(p1, p0))
                b1 = transpose_matrix(p_pack(p3, p2))
                va = vs + uint32(h * 16 * V_ROW)
                if V_EXACT:
                    for c in range(V_EVEN // 2):
                        w = load_matrix_x4_t(va + row16 * uint32(V_ROW) + half16 + uint32(32 * c))
                        a = v_mma(
                            w[0],
                            w[2],
                            w[1],
                            w[3],
                            b0,
                            b1,
                            o[4 * c],
                            o[4 * c + 1],
                            o[4 * c + 2],
                            o[4 * c + 3],
                        )
                        o[4 * c] = a[0]
                        o[4 * c + 1] = a[1]
                        o[4 * c + 2] = a[2]
                        o[4 * c + 3] = a[3]
                else:
                    if V_GROUPS == 8:
                        w = load_matrix_x4_t(va + row16 * uint32(V_ROW) + half16)
                        a = mma_f16(w[0], w[2], w[1], w[3], b0, b1, z0, z1, z2, z3)
                    else:
                        d = load_matrix_x2_t(va + row16 * uint32(V_ROW) + uint32(V_PREFIX - 16))
                        a = mma_f16(d[0], uint32(0), d[1], uint32(0), b0, b1, z0, z1, z2, z3)
                    z0 = a[0]
                    z1 = a[1]
                    z2 = a[2]
                    z3 = a[3]
                    pb0 = uint32(0)
                    pb1 = uint32(0)
                    vrow = va + uint32(t) * uint32(2 * V_ROW) + uint32(V_HEADER)
                    for cp in range(V_EVEN // 2):
                        w = load_matrix_x4_t(
                            va + row16 * uint32(V_ROW) + half16 + uint32(V_PREFIX + 32 * cp)
                        )
                        for q_ in range(2):
                            c = 2 * cp + q_
                            if c < V_CHUNKS:
                                for part in range(V_PARTS):
                                    new = True if V_PARTS > 1 else c * V_SPAN % V_GROUP == 0
                                    if new:
                                        grp = (
                                            c * V_PARTS + part
                                            if V_PARTS > 1
                                            else (c * V_SPAN) // V_GROUP
                                        )
                                        u0 = load_shared_u32(vrow + uint32(4 * grp))
                                        u1 = load_shared_u32(vrow + uint32(V_ROW + 4 * grp))
                                        u2 = load_shared_u32(vrow + uint32(8 * V_ROW + 4 * grp))
                                        u3 = load_shared_u32(vrow + uint32(9 * V_ROW + 4 * grp))
                                        pb0 = multiply_f16(b0, low_halves(u0, u1))
                                        pb1 = multiply_f16(b1, low_halves(u2, u3))
                                    x = w[0] if q_ == 0 else w[2]
                                    y = w[1] if q_ == 0 else w[3]
                                    if V_PARTS > 1:
                                        mine = (g * int32(V_SPAN // 8)) // int32(V_GROUP) == int32(
                                            part
                                        )
                                        x = x if mine else uint32(0)
                                        y = y if mine else uint32(0)
                                    for m in range(V_MMAS):
                                        i = (c * V_MMAS + m) * 4
                                        if V_INT4:
                                            a = mma_f16(
                                                x & uint32(0x000F000F),
                                                x & uint32(0x00F000F0),
                                                y & uint32(0x000F000F),
                                                y & uint32(0x00F000F0),
                                                pb0,
                                                pb1,
                                                o[i],
                                                o[i + 1],
                                                o[i + 2],
                                                o[i + 3],
                                            )
                                            x = x >> uint32(8)
                                            y = y >> uint32(8)
                                        elif V_INT8:
                                            a = mma_f16(
                                                x & uint32(0x00FF00FF),
                                                (x >> uint32(8)) & uint32(0x00FF00FF),
                                                y & uint32(0x00FF00FF),
                                                (y >> uint32(8)) & uint32(0x00FF00FF),
                                                pb0,
                                                pb1,
                                                o[i],
                                                o[i + 1],
                                                o[i + 2],
                                                o[i + 3],
                                            )
                                        else:
                                            a = mma_f16(
                                                fp8_pair(x),
                                                fp8_pair(x >> uint32(8)),
                                                fp8_pair(y),
                                                fp8_pair(y >> uint32(8)),
                                                pb0,
                                                pb1,
                                                o[i],
                                                o[i + 1],
                                                o[i + 2],
                                                o[i + 3],
                                            )
                                        o[i] = a[0]
                                        o[i + 1] = a[1]
                                        o[i + 2] = a[2]
                                        o[i + 3] = a[3]
            stage += int32(1)
            if stage == int32(STAGES):
                stage = int32(0)
            ahead += int32(1)
            if ahead == int32(STAGES):
                ahead = int32(0)
            cuda.syncwarp()
        # Step 7: merge the warps
        l0 += exchange(l0, uint32(4))
        l0 += exchange(l0, uint32(8))
        l0 += exchange(l0, uint32(16))
        l1 += exchange(l1, uint32(4))
        l1 += exchange(l1, uint32(8))
        l1 += exchange(l1, uint32(16))
        wait_all()
        cuda.syncthreads()
        sb = shared_address(dyn)
        if g == int32(0):
            at = sb + uint32(warp * int32(32) + t * int32(8))
            store_shared_f32(at, m0)
            store_shared_f32(at + uint32(4), m1)
            store_shared_f32(at + uint32(WARPS * 32), l0)
            store_shared_f32(at + uint32(WARPS * 32 + 4), l1)
        cuda.syncthreads()
        M0 = float32(-1e30)
        M1 = float32(-1e30)
        for w_ in range(WARPS):
            M0 = maximum(M0, load_shared_f32(sb + uint32(w_ * 32) + uint32(t) * uint32(8)))
            M1 = maximum(M1, load_shared_f32(sb + uint32(w_ * 32 + 4) + uint32(t) * uint32(8)))
        L0 = float32(0)
        L1 = float32(0)
        for w_ in range(WARPS):
            L0 += load_shared_f32(sb + uint32(WARPS * 32 + w_ * 32) + uint32(t) * uint32(8)) * exp2(
                load_shared_f32(sb + uint32(w_ * 32) + uint32(t) * uint32(8)) - M0
            )
            L1 += load_shared_f32(
                sb + uint32(WARPS * 32 + w_ * 32 + 4) + uint32(t) * uint32(8)
            ) * exp2(load_shared_f32(sb + uint32(w_ * 32 + 4) + uint32(t) * uint32(8)) - M1)
        f0 = float32(0)
        f1 = float32(0)
        if L0 > float32(0):
            f0 = exp2(m0 - M0) / L0
        if L1 > float32(0):
            f1 = exp2(m1 - M1) / L1
        ob = sb + uint32(WARPS * 64)
        wo = ob + uint32(warp) * uint32(HEADS * OUT_ROW * 4) + uint32(t) * uint32(2 * OUT_ROW * 4)
        if V_EXACT:
            for c in range(V_EVEN // 2):
                d = int32(16 * c) + g
                at = wo + uint32(d) * uint32(4)
                store_shared_f32(at, o[4 * c] * f0)
                store_shared_f32(at + uint32(OUT_ROW * 4), o[4 * c + 1] * f1)
                store_shared_f32(at + uint32(32), o[4 * c + 2] * f0)
                store_shared_f32(at + uint32(32 + OUT_ROW * 4), o[4 * c + 3] * f1)
        else:
            for c in range(V_CHUNKS):
                # the shift sum of this lane's dims
                zz0 = float32(0)
                zz1 = float32(0)
                for part in range(V_PARTS):
                    grp = c * V_PARTS + part if V_PARTS > 1 else (c * V_SPAN) // V_GROUP
                    unit = 2 * grp + 1 if V_GROUPS == 8 else 8 - 2 * V_GROUPS + 2 * grp + 1
                    src = uint32((unit % 8) * 4) + uint32(t)
                    if unit < 8:
                        y0 = from_lane(z0, src)
                        y1 = from_lane(z1, src)
                    else:
                        y0 = from_lane(z2, src)
                        y1 = from_lane(z3, src)
                    mine = V_PARTS == 1 or (g * int32(V_SPAN // 8)) // int32(V_GROUP) == int32(part)
                    if mine:
                        zz0 = y0
                        zz1 = y1
                for m in range(V_MMAS):
                    i = (c * V_MMAS + m) * 4
                    if V_INT4:
                        d = int32(32 * c + 2 * m) + g * int32(4)
                        up1 = float32(V_FACTOR * 0.0625)
                    else:
                        d = int32(16 * c) + g * int32(2)
                        up1 = float32(V_FACTOR)
                    if d < int32(V_DIM):
                        at = wo + uint32(d) * uint32(4)
                        store_shared_f32x2(
                            at, (o[i] * float32(V_FACTOR) + zz0) * f0, (o[i + 2] * up1 + zz0) * f0
                        )
                        store_shared_f32x2(
                            at + uint32(OUT_ROW * 4),
                            (o[i + 1] * float32(V_FACTOR) + zz1) * f1,
                            (o[i + 3] * up1 + zz1) * f1,
                        )
        cuda.syncthreads()
        state = (uint64(split) * uint64(cuda.gridDim.z) + uint64(b)) * uint64(num_q_heads) + uint64(
            head0
        )
        if g == int32(0) and warp == int32(0):
            h0_ = t * int32(2)
            if h0_ < heads:
                store_global_f32(lse + uint64(4) * (state + uint64(h0_)), M0 + log2(L0))
            if h0_ + int32(1) < heads:
                store_global_f32(lse + uint64(4) * (state + uint64(h0_) + uint64(1)), M1 + log2(L1))
        idx = tid
        while idx < heads * int32(V_DIM):
            head = idx // int32(V_DIM)
            d = idx % int32(V_DIM)
            total = float32(0)
            for w_ in range(WARPS):
                total += load_shared_f32(
                    ob
                    + uint32(w_ * HEADS * OUT_ROW * 4)
                    + (uint32(head) * uint32(OUT_ROW) + uint32(d)) * uint32(4)
                )
            store_global_f32(
                out + uint64(4) * ((state + uint64(head)) * uint64(V_DIM) + uint64(d)), total
            )
            idx += int32(WARPS * 32)

    return decode_kernel, SHARED
