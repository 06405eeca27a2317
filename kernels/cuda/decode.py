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

from operator import add

import numpy as np
from numba import cuda, float32, int32, uint32, uint64

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


ZEROS = (np.float32(0), np.float32(0), np.float32(0), np.float32(0))


def make_unpack(fmt):
    """Make the function from a word of codes to the two pairs of fp16 of its m-th MMA.

    INT4: codes 2m and 2m + 4, then 2m + 1 and 2m + 5, these 16 times too large. Bytes: 0 and 2,
    then 1 and 3; E4M3 becomes fp16 times 2**-8 when its sign and its magnitude are shifted apart.
    """
    IS_INT4, IS_INT8 = fmt.codec == "int4", fmt.codec == "int8"

    @cuda.jit(device=True, inline="always")
    def unpack(word, m):
        if IS_INT4:
            word = word >> uint32(8 * m)
            return word & uint32(0x000F000F), word & uint32(0x00F000F0)
        odd = word >> uint32(8)
        if IS_INT8:
            return word & uint32(0x00FF00FF), odd & uint32(0x00FF00FF)
        low = ((word & uint32(0x007F007F)) << uint32(7)) | (
            (word & uint32(0x00800080)) << uint32(8)
        )
        high = ((odd & uint32(0x007F007F)) << uint32(7)) | ((odd & uint32(0x00800080)) << uint32(8))
        return low, high

    return unpack


@cuda.jit(device=True, inline="always")
def add_rows(sums, low, high, values):
    """sums + values times `low` in row g and `high` in row g + 8 of a fragment."""
    return (
        sums[0] + low * values[0],
        sums[1] + low * values[1],
        sums[2] + high * values[2],
        sums[3] + high * values[3],
    )


@cuda.jit(device=True, inline="always")
def scale_columns(sums, first, second):
    """sums times `first` in column 2t and `second` in column 2t + 1 of a fragment."""
    return sums[0] * first, sums[1] * second, sums[2] * first, sums[3] * second


@cuda.jit(device=True, inline="always")
def over_rows(value, combine):
    """A value combined over the lanes of a column, in all of them."""
    value = combine(value, exchange(value, uint32(4)))
    value = combine(value, exchange(value, uint32(8)))
    return combine(value, exchange(value, uint32(16)))


def make_copy(staged):
    """Make the function that asks for the rows of a tile, all copies unrolled."""
    ROW, HEADER, PIECES, GRANULE = staged.stride, staged.header, staged.pieces, staged.granule
    copy = {4: copy_4, 8: copy_8, 16: copy_16}[GRANULE]

    @cuda.jit(device=True, inline="always")
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
    unpack_k, unpack_v = make_unpack(k_format), make_unpack(v_format)
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
                                    if K_PARTS == 1 or d // int32(K_GROUP) == c * K_PARTS + part:
                                        lo = q_float(load_global_u16(qrow + uint64(2) * uint64(d)))
                                if e < int32(K_DIM):
                                    if K_PARTS == 1 or e // int32(K_GROUP) == c * K_PARTS + part:
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
        z = ZEROS  # of the shifts
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
                matrix = ka + row16 * uint32(K_ROW) + half16 + uint32(K_PREFIX)
                scores = ZEROS
                if K_EXACT:
                    for c in range(K_EVEN // 2):
                        w = load_matrix_x4(matrix + uint32(32 * c))
                        scores = k_mma(w, (qf[2 * c], qf[2 * c + 1]), scores)
                    scores = scale_columns(scores, score_scale, score_scale)
                else:
                    shifted = ZEROS
                    a = ZEROS
                    for c in range(K_CHUNKS):
                        if c % 2 == 0:
                            w = load_matrix_x4(matrix + uint32(16 * c))
                        x = w[0] if c % 2 == 0 else w[2]
                        y = w[1] if c % 2 == 0 else w[3]
                        for part in range(K_PARTS):
                            for m in range(K_MMAS):
                                i = ((c * K_PARTS + part) * K_MMAS + m) * 2
                                x0, x1 = unpack_k(x, m)
                                y0, y1 = unpack_k(y, m)
                                a = mma_f16((x0, y0, x1, y1), (qf[i], qf[i + 1]), a)
                            if K_PARTS > 1 or (c + 1) * K_SPAN % K_GROUP == 0 or c == K_CHUNKS - 1:
                                grp = c * K_SPAN // K_GROUP + part
                                at = ka + uint32(g) * uint32(K_ROW) + uint32(K_HEADER + 4 * grp)
                                u = load_shared_u32(at)
                                v = load_shared_u32(at + uint32(8 * K_ROW))
                                q0, q1 = qs[2 * grp], qs[2 * grp + 1]
                                scores = add_rows(scores, low_f16(u), low_f16(v), a)
                                shifted = add_rows(
                                    shifted, high_f16(u), high_f16(v), (q0, q1, q0, q1)
                                )
                                a = ZEROS
                    code_scale = score_scale * float32(K_FACTOR)
                    scores = scale_columns(scores, code_scale, code_scale)
                    scores = add_rows(scores, score_scale, score_scale, shifted)
                token = tok0 + int32(h * 16) + g
                first_in, second_in = token < t_end, token + int32(8) < t_end
                S[4 * h] = scores[0] if first_in else float32(-1e30)
                S[4 * h + 1] = scores[1] if first_in else float32(-1e30)
                S[4 * h + 2] = scores[2] if second_in else float32(-1e30)
                S[4 * h + 3] = scores[3] if second_in else float32(-1e30)
            # Step 5: lazy rescale
            n0 = maximum(maximum(S[0], S[2]), maximum(S[4], S[6]))
            n1 = maximum(maximum(S[1], S[3]), maximum(S[5], S[7]))
            grow = uint32(1) if (n0 > m0 + float32(4)) or (n1 > m1 + float32(4)) else uint32(0)
            if any_lane(grow):
                n0 = maximum(over_rows(n0, maximum), m0)
                n1 = maximum(over_rows(n1, maximum), m1)
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
                z = scale_columns(z, e0, e1)
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
                matrix = va + row16 * uint32(V_ROW) + half16
                if V_EXACT:
                    for c in range(V_EVEN // 2):
                        w = load_matrix_x4_t(matrix + uint32(32 * c))
                        i = 4 * c
                        a = (o[i], o[i + 1], o[i + 2], o[i + 3])
                        a = v_mma((w[0], w[2], w[1], w[3]), (b0, b1), a)
                        o[i], o[i + 1], o[i + 2], o[i + 3] = a[0], a[1], a[2], a[3]
                else:
                    if V_GROUPS == 8:
                        w = load_matrix_x4_t(matrix)
                        z = mma_f16((w[0], w[2], w[1], w[3]), (b0, b1), z)
                    else:
                        d = load_matrix_x2_t(va + row16 * uint32(V_ROW) + uint32(V_PREFIX - 16))
                        z = mma_f16((d[0], uint32(0), d[1], uint32(0)), (b0, b1), z)
                    pb0 = uint32(0)
                    pb1 = uint32(0)
                    vrow = va + uint32(t) * uint32(2 * V_ROW) + uint32(V_HEADER)
                    for c in range(V_CHUNKS):
                        if c % 2 == 0:
                            w = load_matrix_x4_t(matrix + uint32(V_PREFIX + 16 * c))
                        for part in range(V_PARTS):
                            if V_PARTS > 1 or c * V_SPAN % V_GROUP == 0:
                                at = vrow + uint32(4 * (c * V_SPAN // V_GROUP + part))
                                u0 = load_shared_u32(at)
                                u1 = load_shared_u32(at + uint32(V_ROW))
                                u2 = load_shared_u32(at + uint32(8 * V_ROW))
                                u3 = load_shared_u32(at + uint32(9 * V_ROW))
                                pb0 = multiply_f16(b0, low_halves(u0, u1))
                                pb1 = multiply_f16(b1, low_halves(u2, u3))
                            x = w[0] if c % 2 == 0 else w[2]
                            y = w[1] if c % 2 == 0 else w[3]
                            if V_PARTS > 1 and g * int32(V_SPAN // 8) // int32(V_GROUP) != part:
                                x = uint32(0)
                                y = uint32(0)
                            for m in range(V_MMAS):
                                x0, x1 = unpack_v(x, m)
                                y0, y1 = unpack_v(y, m)
                                i = (c * V_MMAS + m) * 4
                                a = (o[i], o[i + 1], o[i + 2], o[i + 3])
                                a = mma_f16((x0, x1, y0, y1), (pb0, pb1), a)
                                o[i], o[i + 1], o[i + 2], o[i + 3] = a[0], a[1], a[2], a[3]
            stage += int32(1)
            if stage == int32(STAGES):
                stage = int32(0)
            ahead += int32(1)
            if ahead == int32(STAGES):
                ahead = int32(0)
            cuda.syncwarp()
        # Step 7: merge the warps
        l0 = over_rows(l0, add)
        l1 = over_rows(l1, add)
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
                        y0 = from_lane(z[0], src)
                        y1 = from_lane(z[1], src)
                    else:
                        y0 = from_lane(z[2], src)
                        y1 = from_lane(z[3], src)
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
