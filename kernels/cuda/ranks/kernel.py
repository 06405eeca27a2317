"""Exchange the states of ranks through one another's memory, and merge them, in place.

    grid    rows: query heads of the sequences, a warp each

        out, lse    [num_rows, head_dim], [num_rows]: before, of this rank's tokens; after, of all
        peers       [world]: the address of each rank's memory, mapped by NVLink or PCIe
        memory      flags [world, blocks], then slots [2, world, most_rows] of out and lse

Each block writes its rows to this rank's slots in every rank's memory, then the number of this call
to its flag there. The block waits for this number from the same block of all ranks, then merges the
rows in its own memory. Calls take the two halves of the slots in turn. Two halves suffice: a rank
waits for all flags in each call, so it is at most one call ahead of another rank.

Source: the one-shot all-reduce of custom_all_reduce in vLLM (https://github.com/vllm-project/vllm).
"""

import math

from numba import cuda, float32, int32, uint32, uint64

from ..decode.arrange import LOG2_E
from ..device.combine import LN2, make_over_lanes, make_write
from ..device.jit import device_function
from ..device.ptx import (
    add,
    exp2,
    fence_system,
    load_acquired_u32,
    load_global_u64,
    load_written_f32,
    load_written_u32,
    log2,
    maximum_or_nan,
    shfl,
    store_global_f32,
    store_global_u32,
    store_global_u32x2,
    store_released_u32,
)
from ..device.transform import make_widen
from .launch import slot_bytes

NOTHING = -math.inf  # the log-sum-exp of no tokens


def make_exchange_kernel(spec):
    WARPS, QUADS, SLOT = spec.warps, spec.head_dim // 4, slot_bytes(spec.head_dim)
    ROUNDS = -(-QUADS // 32)
    widen, write = make_widen(spec.query), make_write(spec.query)
    over_lanes = make_over_lanes(32)

    @device_function
    def words_at(address):
        return load_written_u32(address), load_written_u32(address + uint64(4))

    def exchange(out, lse, peers, calls, rank, world, most_rows, num_rows):
        tid, block = uint32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        lane, row = tid & uint32(31), int32(block * int32(WARPS) + int32(tid >> uint32(5)))
        blocks = int32(most_rows // WARPS)
        call = uint32(load_written_u32(calls + uint64(4) * uint64(block)) + uint32(1))
        half = uint64(4) * uint64(world) * uint64(blocks)  # behind the flags
        step = uint64(SLOT) * uint64(most_rows)  # from a rank's slots to the next one's
        half += uint64(call & uint32(1)) * uint64(world) * step + uint64(SLOT) * uint64(row)
        memory = load_global_u64(peers + uint64(8) * uint64(rank))

        # Step 1: the states of this rank, to all ranks
        if row < num_rows:
            slot = half + uint64(rank) * step
            at = out + uint64(8 * QUADS) * uint64(row)
            for i in range(ROUNDS):
                quad = lane + uint32(32 * i)
                if 32 * i + 31 < QUADS or quad < uint32(QUADS):
                    words = words_at(at + uint64(8) * uint64(quad))
                    for peer in range(world):
                        there = load_global_u64(peers + uint64(8) * uint64(peer)) + slot
                        store_global_u32x2(there + uint64(8) * uint64(quad), words[0], words[1])
            if lane < uint32(world):
                there = load_global_u64(peers + uint64(8) * uint64(lane)) + slot
                own = load_written_f32(lse + uint64(4) * uint64(row))
                store_global_f32(there + uint64(8 * QUADS), own)
        cuda.syncthreads()

        # Step 2: tell all ranks, and wait for all
        if tid < uint32(world):
            there = load_global_u64(peers + uint64(8) * uint64(tid))
            fence_system()
            store_released_u32(there + uint64(4) * uint64(rank * blocks + block), call)
            flag = memory + uint64(4) * uint64(int32(tid) * blocks + block)
            # a rank may have begun its next call
            while int32(uint32(load_acquired_u32(flag) - call)) < int32(0):
                pass
        cuda.syncthreads()
        if tid == uint32(0):
            store_global_u32(calls + uint64(4) * uint64(block), call)
        if row >= num_rows:
            return

        # Step 3: the weight of each rank's state, in its lane
        state = float32(NOTHING)
        if lane < uint32(world):
            state = load_written_f32(memory + half + uint64(lane) * step + uint64(8 * QUADS))
        top = over_lanes(state, maximum_or_nan)
        if top == float32(NOTHING):
            return  # no rank has tokens
        weight = exp2((state - top) * float32(LOG2_E))
        total = over_lanes(weight, add)

        # Step 4: the sum of the outs, in the order of ranks: all ranks get the same bits
        for i in range(ROUNDS):
            quad = lane + uint32(32 * i)
            is_mine = 32 * i + 31 < QUADS or quad < uint32(QUADS)
            readable = min(quad, uint32(QUADS - 1))
            a = b = c = d = float32(0)
            for peer in range(world):
                share = shfl(weight, uint32(peer))
                there = memory + half + uint64(peer) * step + uint64(8) * uint64(readable)
                words = words_at(there)
                if shfl(state, uint32(peer)) != float32(NOTHING):  # else its out may be anything
                    w, x = widen(words[0])
                    y, z = widen(words[1])
                    a, b = float32(a + w * share), float32(b + x * share)
                    c, d = float32(c + y * share), float32(d + z * share)
            if is_mine:
                at = out + uint64(8) * (uint64(row) * uint64(QUADS) + uint64(quad))
                write(at, (a / total, b / total, c / total, d / total))
        if lane == uint32(0):
            store_global_f32(lse + uint64(4) * uint64(row), top + log2(total) * float32(LN2))

    return exchange
