"""Products of tiles in shared memory by a warpgroup: 4 warps, wgmma, on Hopper alone (sm_90a).

    sums[64 x N]  +=  A[64 x K]  times  B[K x N]        16 bits in, float32 sums, K 16 at a time

    a block    64 rows of 64 elements: 128 bytes each, whose units of 16 bytes are swizzled, so that
               a column of units touches all banks: unit u of row r stands at u ^ (r % 8)
    A          rows are rows of A, one block after another along K
    B          rows are columns of B (K of attention), or rows of B (V), transposed by the hardware
    sums       lane 4g + t of warp w: rows 16w + g and + 8, columns 8n + 2t and + 1 of each n, as of
               four MMAs (fragments.py), sums 4n to 4n + 3

Products are one piece of PTX, so that ptxas does not wait after every instruction.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
"""

from llvmlite import ir
from numba import config, uint32, uint64
from numba.cuda import types, typing
from numba.cuda.extending import intrinsic

from .jit import device_function, stand_ins
from .ptx import instruction

ROWS = 64  # of A
DEPTH = 16  # elements along K of an instruction
LINE = 128  # bytes of a row of a block
BLOCK = ROWS * LINE  # bytes of a block
EIGHT = 8 * LINE  # bytes of eight rows
SWIZZLED = 1 << 62  # units are swizzled over 128 bytes
DESCRIPTOR = SWIZZLED | EIGHT // 16 << 32 | BLOCK // 16 << 16


@device_function
def descriptor_of(address):
    """The descriptor of a tile of blocks that begins at an address in shared memory."""
    return uint64(DESCRIPTOR) | uint64(uint32(address >> uint32(4)))


def make_products(codec, columns, steps, *, transposed=False, begin=False, waits=True):
    """The function of float32 sums and the descriptors of A and B that adds products, and waits for
    them.

    Args:
        codec: "bf16" or "fp16".
        columns: N of an instruction, a multiple of 8.
        steps: of each instruction its first sum, and the bytes from the begin of A, and of B.
        transposed: whether the rows of B stand in memory as rows.
        begin: whether the first step overwrites the sums; only where all steps have the same.
        waits: False: make_wait's function does. Until then nothing may touch the sums.
    """
    if config.ENABLE_CUDASIM:
        return stand_ins.products(codec, columns, steps, transposed, begin)
    return _make(codec, columns, steps, transposed, begin, 0, waits)


def make_register_products(codec, columns, steps, *, transposed=False):
    """As make_products, with A in registers: four words, of a local array, for each 16 of K. A step
    says its first word in place of bytes of A."""
    words = max(first for _, first, _ in steps) + 4
    if config.ENABLE_CUDASIM:
        return stand_ins.products(codec, columns, steps, transposed, False, of_registers=True)
    return _make(codec, columns, steps, transposed, False, words)


def _make(codec, columns, steps, transposed, begin, words, waits=True):
    """The intrinsic; `words`: of A in registers, or 0 where A has a descriptor."""
    per_step = columns // 2  # sums of a lane
    count = max(first for first, _, _ in steps) + per_step
    behind = 2 * count  # after the sums that are written, and those read
    b = f"${behind + (words or 1)}"
    kind = {"bf16": "bf16", "fp16": "f16"}[codec]
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k{DEPTH}.f32.{kind}.{kind}"
    text = "{.reg .pred p; .reg .b64 a, b; wgmma.fence.sync.aligned;"
    for number, (first, of_a, of_b) in enumerate(steps):
        sums = ",".join(f"${first + i}" for i in range(per_step))
        text += f"setp.ne.u32 p,{int(not begin or number > 0)},0;"
        text += f"add.u64 b,{b},{of_b // 16};"
        if words:
            four = ",".join(f"${behind + of_a + i}" for i in range(4))
            text += f"{name} {{{sums}}},{{{four}}},b,p,1,1,{int(transposed)};"
        else:
            text += f"add.u64 a,${behind},{of_a // 16};"
            text += f"{name} {{{sums}}},a,b,p,1,1,0,{int(transposed)};"
    text += "wgmma.commit_group.sync.aligned;"
    text += "wgmma.wait_group.sync.aligned 0;}" if waits else "}"
    single, word, wide = ir.FloatType(), ir.IntType(32), ir.IntType(64)
    of_a = [word] * words or [wide]
    made = ir.FunctionType(ir.LiteralStructType([single] * count), [single] * count + of_a + [wide])
    ties = ["=f"] * count + [str(i) for i in range(count)]
    ties += ["r"] * words or ["l"]
    assembly = ir.InlineAsm(made, text, ",".join([*ties, "l", "~{memory}"]), side_effect=True)

    def typed(typingctx, sums, a, b):
        def generate(context, builder, signature, args):
            def places_of(which, number):
                array = context.make_array(signature.args[which])(context, builder, args[which])
                return [builder.gep(array.data, [ir.Constant(wide, i)]) for i in range(number)]

            places = places_of(0, count)
            given = [builder.load(place) for place in places]
            given += [builder.load(place) for place in places_of(1, words)] if words else [args[1]]
            found = builder.call(assembly, [*given, args[2]])
            for i, place in enumerate(places):
                builder.store(builder.extract_value(found, i), place)
            return context.get_dummy_value()

        a = a if words else types.uint64
        return typing.signature(types.void, sums, a, types.uint64), generate

    return intrinsic(typed)


def make_wait(count):
    """Make the function that waits for all products, of which a local array has sums."""
    if config.ENABLE_CUDASIM:
        return lambda sums: None
    single = ir.FloatType()
    made = ir.FunctionType(ir.LiteralStructType([single] * count), [single] * count)
    ties = ["=f"] * count + [str(i) for i in range(count)] + ["~{memory}"]
    text = "wgmma.wait_group.sync.aligned 0;"
    assembly = ir.InlineAsm(made, text, ",".join(ties), side_effect=True)

    def typed(typingctx, sums):
        def generate(context, builder, signature, args):
            array = context.make_array(signature.args[0])(context, builder, args[0])
            places = [
                builder.gep(array.data, [ir.Constant(ir.IntType(64), i)]) for i in range(count)
            ]
            found = builder.call(assembly, [builder.load(place) for place in places])
            for i, place in enumerate(places):
                builder.store(builder.extract_value(found, i), place)
            return context.get_dummy_value()

        return typing.signature(types.void, sums), generate

    return intrinsic(typed)


def take_registers(count):
    """The instruction by which a warpgroup takes registers that others of its block gave."""
    return instruction(f"setmaxnreg.inc.sync.aligned.u32 {count};", "", "", pure=False)


def give_registers(count):
    """The instruction by which a warpgroup keeps so many registers and gives back the others."""
    return instruction(f"setmaxnreg.dec.sync.aligned.u32 {count};", "", "", pure=False)
