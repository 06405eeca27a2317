"""P V of a block's tiles, by two warpgroups: 64 columns x a half of the latents each.

sums    lane 4g + t of warp w: columns 16w + g and + 8, elements 8n + 2t and + 1
"""

from numba import cuda, float32, int32, uint32, uint64

from ...device.combine import make_write
from ...device.fragments import make_scale_rows
from ...device.jit import device_function, in_turn
from ...device.ptx import (
    arrive,
    barrier,
    load_shared_f32,
    load_shared_f32x4,
    load_shared_u32,
    store_global_f32x4,
    store_shared_f32,
    store_shared_f32x2,
    word_from_lane,
)
from ...device.warpgroup import BLOCK, EIGHT, descriptor_of, make_products
from .scores import P_AT
from .spec import (
    DONE,
    END,
    FACTORS,
    FIRST_NOTES,
    FIRST_STAGE,
    FLAGS,
    FREE,
    GROUP,
    LATENT_DIM,
    NOTES,
    READY,
    SHARES,
    STAGE,
    TOKENS,
)

HALF = LATENT_DIM // 2  # elements of a warpgroup
AT_ONCE = 128  # of an instruction: with all 256 ptxas finds no registers
SUMS, PART = HALF // 2, AT_ONCE // 2  # of a lane; of an instruction
# P's 16 tokens, V's, of all elements
STEPS = tuple(
    (PART * part, 32 * k, 2 * EIGHT * k + BLOCK * (AT_ONCE // 64) * part)
    for k in range(TOKENS // 16)
    for part in range(HALF // AT_ONCE)
)
COLUMN = 4 * (LATENT_DIM + 4)  # bytes of a column's output in shared memory
FOURS = LATENT_DIM // 4


def make_add_values(spec):
    """Make the function that adds all tiles of a block, and writes a part, or the output."""
    products = make_products(spec.codec, AT_ONCE, STEPS, transposed=True)
    write = make_write(spec.query)
    AS_IT_IS, IS_INT4 = (spec.orders[0] == order for order in ("as they are", "pairs"))

    rescale = in_turn([make_scale_rows(at, at + PART) for at in range(0, SUMS, PART)])

    def make_put(first):
        @device_function
        def put(at, sums, low, high):
            for n in range(PART // 4):
                for h in range(2):
                    share = high if h else low
                    one = sums[first + 4 * n + 2 * h] * share
                    two = sums[first + 4 * n + 2 * h + 1] * share
                    here = at + uint32(2 * 4 * first + 32 * n + 8 * COLUMN * h)
                    if AS_IT_IS:
                        store_shared_f32x2(here, one, two)
                    else:
                        store_shared_f32(here, one)
                        store_shared_f32(here + uint32(16 if IS_INT4 else 8), two)

        return put

    put_output = in_turn([make_put(first) for first in range(0, SUMS, PART)])

    @device_function
    def add_values(shared, first, end, half, places):
        whole, columns, out, part_out = places
        thread = uint32(cuda.threadIdx.x) % uint32(GROUP)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        g, t = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
        column = uint32(uint32(16) * warp + g)
        sums = cuda.local.array(SUMS, float32)
        for i in range(SUMS):
            sums[i] = float32(0)
        stage = uint32(0)
        while first < end:
            barrier(uint32(READY) + stage, uint32(3 * GROUP))
            notes = uint32(shared + uint32(FIRST_NOTES) + uint32(NOTES) * stage)
            flag = load_shared_u32(notes + uint32(FLAGS) + uint32(4) * warp)
            if word_from_lane(flag, uint32(0)) != uint32(0):
                at = notes + uint32(FACTORS) + uint32(4) * column
                rescale(sums, load_shared_f32(at), load_shared_f32(at + uint32(32)))
            rows = uint32(shared + uint32(FIRST_STAGE) + uint32(STAGE) * stage)
            values = uint32(rows + uint32(BLOCK * HALF // 64) * half)
            products(sums, descriptor_of(uint32(rows + uint32(P_AT))), descriptor_of(values))
            arrive(uint32(FREE) + stage, uint32(3 * GROUP))
            first = int32(first + int32(TOKENS))
            stage = uint32(stage ^ uint32(1))

        barrier(uint32(END), uint32(3 * GROUP))
        at = shared + uint32(SHARES) + uint32(4) * column
        low, high = load_shared_f32(at), load_shared_f32(at + uint32(32))
        outputs = uint32(shared + uint32(FIRST_STAGE))
        at = outputs + uint32(COLUMN) * column + uint32(4 * HALF) * half
        if AS_IT_IS:
            at += uint32(8) * t
        elif IS_INT4:
            at += uint32(4) * t
        else:
            at += uint32(4) * uint32(t & uint32(1)) + uint32(16) * uint32(t >> uint32(1))
        put_output(at, sums, low, high)
        barrier(uint32(DONE), uint32(2 * GROUP))
        item = uint32(thread + uint32(GROUP) * half)
        while item < columns * uint32(FOURS):
            of_column = item // uint32(FOURS)
            four = item - of_column * uint32(FOURS)
            at = outputs + of_column * uint32(COLUMN) + four * uint32(16)
            found = load_shared_f32x4(at)
            place = uint64(item) * uint64(4)
            if not whole:
                store_global_f32x4(part_out + uint64(4) * place, found)
            else:
                write(out + uint64(2) * place, found)
            item = uint32(item + uint32(2 * GROUP))

    return add_values
