"""PTX instructions as functions that numba.cuda kernels call, or stand-ins under numba's
simulator.

Each has a template, the types of its results and of its arguments.
Addresses: uint32 in shared memory, uint64 in global memory.
"""

import inspect

from llvmlite import ir
from numba import config
from numba.cuda import types, typing
from numba.cuda.extending import intrinsic

from .jit import stand_ins

_KINDS = {
    "u16": ("h", ir.IntType(16), types.uint16),
    "u32": ("r", ir.IntType(32), types.uint32),
    "u64": ("l", ir.IntType(64), types.uint64),
    "f32": ("f", ir.FloatType(), types.float32),
}


def instruction(template, results, arguments, *, pure=True):
    """An intrinsic of a PTX template with $0, $1 ... for results, then arguments.

    results, arguments: kinds, such as "f32 f32"; "f32x4" is a tuple of four. pure: whether the
    result depends on the arguments alone, so that LLVM may move, merge or drop it.
    """
    if config.ENABLE_CUDASIM:
        return stand_ins.instruction(template, results, arguments)
    results = [_KINDS[word] for word in results.split()]
    arguments = [(_KINDS[word[:3]], int(word[4:] or 0)) for word in arguments.split()]
    operands = [kind for kind, count in arguments for _ in range(count or 1)]
    wanted = [types.UniTuple(kind[2], count) if count else kind[2] for kind, count in arguments]
    result_type = types.void
    llvm_result = ir.VoidType()
    if len(results) == 1:
        _, llvm_result, result_type = results[0]
    elif results:
        llvm_result = ir.LiteralStructType([kind for _, kind, _ in results])
        result_type = types.UniTuple(results[0][2], len(results))
    constraints = [f"={letter}" for letter, _, _ in results] + [letter for letter, _, _ in operands]
    if not pure:
        constraints.append("~{memory}")
    llvm_function = ir.FunctionType(llvm_result, [kind for _, kind, _ in operands])
    assembly = ir.InlineAsm(llvm_function, template, ",".join(constraints), side_effect=not pure)

    def generate(context, builder, signature, args):
        values = []
        for value, have, want, (_, count) in zip(
            args, signature.args, wanted, arguments, strict=True
        ):
            value = context.cast(builder, value, have, want)
            values += [builder.extract_value(value, i) for i in range(count)] or [value]
        made = builder.call(assembly, values)
        if not results:
            return context.get_dummy_value()
        if len(results) == 1:
            return made
        parts = [builder.extract_value(made, i) for i in range(len(results))]
        return context.make_tuple(builder, signature.return_type, parts)

    def typed(typingctx, *given):
        return typing.signature(result_type, *wanted), generate

    names = ["typingctx", *(f"a{i}" for i in range(len(arguments)))]
    typed.__signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )  # numba packs *given into a tuple unless it sees the names
    return intrinsic(typed)


# copies of 16 bytes from global to shared memory, past the registers; zeros after `$2`
copy_16 = instruction("cp.async.cg.shared.global [$0],[$1],16,$2;", "", "u32 u64 u32", pure=False)
copy_8 = instruction("cp.async.ca.shared.global [$0],[$1],8,$2;", "", "u32 u64 u32", pure=False)
copy_4 = instruction("cp.async.ca.shared.global [$0],[$1],4,$2;", "", "u32 u64 u32", pure=False)
prefetch = instruction("prefetch.global.L2 [$0];", "", "u64", pure=False)  # the line of 128 bytes
commit_copies = instruction("cp.async.commit_group;", "", "", pure=False)
wait_copies = [
    instruction(f"cp.async.wait_group {pending};", "", "", pure=False) for pending in range(8)
]

# 8x8 matrices of 16-bit units between shared memory and the registers of a warp
load_matrix_x4 = instruction(
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3},[$4];",
    "u32 u32 u32 u32",
    "u32",
    pure=False,
)
load_matrix_x2 = instruction(
    "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {$0,$1},[$2];", "u32 u32", "u32", pure=False
)
load_matrix_x2_t = instruction(
    "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {$0,$1},[$2];", "u32 u32", "u32", pure=False
)
load_matrix_x4_t = instruction(
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3},[$4];",
    "u32 u32 u32 u32",
    "u32",
    pure=False,
)
transpose_matrix = instruction(
    "movmatrix.sync.aligned.m8n8.trans.b16 $0,$1;", "u32", "u32", pure=False
)

# D[16x8] = A[16x16] B[16x8] + C, float32 sums
_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 "
    "{{$0,$1,$2,$3}},{{$4,$5,$6,$7}},{{$8,$9}},{{$10,$11,$12,$13}};"
)
mma_f16 = instruction(_MMA.format("f16"), "f32 f32 f32 f32", "u32x4 u32x2 f32x4")
mma_bf16 = instruction(_MMA.format("bf16"), "f32 f32 f32 f32", "u32x4 u32x2 f32x4")

load_shared_u32 = instruction("ld.shared.u32 $0,[$1];", "u32", "u32", pure=False)
load_shared_u32x2 = instruction("ld.shared.v2.u32 {$0,$1},[$2];", "u32 u32", "u32", pure=False)
load_shared_u32x4 = instruction(
    "ld.shared.v4.u32 {$0,$1,$2,$3},[$4];", "u32 u32 u32 u32", "u32", pure=False
)
load_shared_u16 = instruction("ld.shared.u16 $0,[$1];", "u16", "u32", pure=False)
load_shared_f32 = instruction("ld.shared.f32 $0,[$1];", "f32", "u32", pure=False)
load_shared_f32x4 = instruction(
    "ld.shared.v4.f32 {$0,$1,$2,$3},[$4];", "f32 f32 f32 f32", "u32", pure=False
)
store_shared_u32x4 = instruction(
    "st.shared.v4.u32 [$0],{$1,$2,$3,$4};", "", "u32 u32x4", pure=False
)
store_shared_f32x4 = instruction(
    "st.shared.v4.f32 [$0],{$1,$2,$3,$4};", "", "u32 f32x4", pure=False
)
store_shared_u32 = instruction("st.shared.u32 [$0],$1;", "", "u32 u32", pure=False)
store_shared_u32x2 = instruction("st.shared.v2.u32 [$0],{$1,$2};", "", "u32 u32x2", pure=False)
store_shared_f32 = instruction("st.shared.f32 [$0],$1;", "", "u32 f32", pure=False)
store_shared_f32x2 = instruction("st.shared.v2.f32 [$0],{$1,$2};", "", "u32 f32 f32", pure=False)

# .nc: not written while the kernel runs; .cg: past the L1 cache, which does not see other SMs
load_global_u8 = instruction("ld.global.nc.u8 $0,[$1];", "u32", "u64", pure=False)
load_global_u32 = instruction("ld.global.nc.u32 $0,[$1];", "u32", "u64", pure=False)
load_global_u32x2 = instruction("ld.global.nc.v2.u32 {$0,$1},[$2];", "u32 u32", "u64", pure=False)
load_global_u32x4 = instruction(
    "ld.global.nc.v4.u32 {$0,$1,$2,$3},[$4];", "u32 u32 u32 u32", "u64", pure=False
)
load_global_u64 = instruction("ld.global.nc.u64 $0,[$1];", "u64", "u64", pure=False)
load_global_f32 = instruction("ld.global.nc.f32 $0,[$1];", "f32", "u64", pure=False)
load_global_f32x4 = instruction(
    "ld.global.nc.v4.f32 {$0,$1,$2,$3},[$4];", "f32 f32 f32 f32", "u64", pure=False
)
load_written_u32x4 = instruction(
    "ld.global.cg.v4.u32 {$0,$1,$2,$3},[$4];", "u32 u32 u32 u32", "u64", pure=False
)
load_written_u32 = instruction("ld.global.cg.u32 $0,[$1];", "u32", "u64", pure=False)
load_written_u64 = instruction("ld.global.cg.u64 $0,[$1];", "u64", "u64", pure=False)
load_written_f32 = instruction("ld.global.cg.f32 $0,[$1];", "f32", "u64", pure=False)
load_written_f32x4 = instruction(
    "ld.global.cg.v4.f32 {$0,$1,$2,$3},[$4];", "f32 f32 f32 f32", "u64", pure=False
)
store_global_f32 = instruction("st.global.f32 [$0],$1;", "", "u64 f32", pure=False)
store_global_f32x2 = instruction("st.global.v2.f32 [$0],{$1,$2};", "", "u64 f32 f32", pure=False)
store_global_f32x4 = instruction(
    "st.global.v4.f32 [$0],{$1,$2,$3,$4};", "", "u64 f32x4", pure=False
)
store_global_u16 = instruction("st.global.u16 [$0],$1;", "", "u64 u16", pure=False)
store_global_u32 = instruction("st.global.u32 [$0],$1;", "", "u64 u32", pure=False)
store_global_u32x2 = instruction("st.global.v2.u32 [$0],{$1,$2};", "", "u64 u32 u32", pure=False)
store_global_u32x4 = instruction(
    "st.global.v4.u32 [$0],{$1,$2,$3,$4};", "", "u64 u32x4", pure=False
)

# waits until so many threads of the block, whole warps, have come to a barrier; 0 is syncthreads'
barrier = instruction("bar.sync $0,$1;", "", "u32 u32", pure=False)
arrive = instruction("bar.arrive $0,$1;", "", "u32 u32", pure=False)  # without waiting
# sm_90 and newer: what this thread wrote to shared memory is seen by wgmma, after a barrier
fence_shared = instruction("fence.proxy.async.shared::cta;", "", "", pure=False)
fence = instruction("fence.acq_rel.gpu;", "", "", pure=False)
# between GPUs: what came before a release is seen by who has acquired what it stored
fence_system = instruction("fence.acq_rel.sys;", "", "", pure=False)
store_released_u32 = instruction("st.release.sys.global.u32 [$0],$1;", "", "u64 u32", pure=False)
load_acquired_u32 = instruction("ld.acquire.sys.global.u32 $0,[$1];", "u32", "u64", pure=False)
# sm_90 and newer, of a launch that overlaps the one before it: wait until that is complete and what
# it wrote is seen; let the next one begin once all blocks have come here
wait_for_launch = instruction("griddepcontrol.wait;", "", "", pure=False)
begin_next_launch = instruction("griddepcontrol.launch_dependents;", "", "", pure=False)
# first one, then the other: what the next launch reads before it waits must be older than this one
hand_over = instruction(
    "griddepcontrol.wait; griddepcontrol.launch_dependents;", "", "", pure=False
)
# counts up to `last`, then from 0 again; gives the count before
atomic_inc_wrap = instruction("atom.global.inc.u32 $0,[$1],$2;", "u32", "u64 u32", pure=False)
atomic_add = instruction("atom.global.add.u32 $0,[$1],$2;", "u32", "u64 u32", pure=False)
atomic_min = instruction("atom.global.min.u32 $0,[$1],$2;", "u32", "u64 u32", pure=False)

exp2 = instruction("ex2.approx.ftz.f32 $0,$1;", "f32", "f32")
log2 = instruction("lg2.approx.ftz.f32 $0,$1;", "f32", "f32")
maximum = instruction("max.f32 $0,$1,$2;", "f32", "f32 f32")
minimum_or_nan = instruction("min.NaN.f32 $0,$1,$2;", "f32", "f32 f32")
maximum_or_nan = instruction("max.NaN.f32 $0,$1,$2;", "f32", "f32 f32")
# with a rounding mode they are never fused
# bits of $1 where $3 has them, and of $2 elsewhere; ptxas does not make it of two masks
select_bits = instruction("lop3.b32 $0,$1,$2,$3,0xE4;", "u32", "u32 u32 u32")
and_or = instruction("lop3.b32 $0,$1,$2,$3,0xEA;", "u32", "u32 u32 u32")  # $1 & $2 | $3
permute = instruction("prmt.b32 $0,$1,$2,$3;", "u32", "u32 u32 u32")  # bytes, by 4 numbers
add = instruction("add.rn.f32 $0,$1,$2;", "f32", "f32 f32")
subtract = instruction("sub.rn.f32 $0,$1,$2;", "f32", "f32 f32")
multiply = instruction("mul.rn.f32 $0,$1,$2;", "f32", "f32 f32")
# clamped to 0 to 1, and 0 for NaN
add_clamped = instruction("add.rn.sat.f32 $0,$1,$2;", "f32", "f32 f32")
multiply_clamped = instruction("mul.rn.sat.f32 $0,$1,$2;", "f32", "f32 f32")
multiply_add = instruction("fma.rn.f32 $0,$1,$2,$3;", "f32", "f32 f32 f32")
reciprocal = instruction("rcp.approx.ftz.f32 $0,$1;", "f32", "f32")
half_nearest = instruction("cvt.rn.f16.f32 $0,$1;", "u16", "f32")
half_down = instruction("cvt.rm.f16.f32 $0,$1;", "u16", "f32")
half_up = instruction("cvt.rp.f16.f32 $0,$1;", "u16", "f32")
# sm_89 and newer
pack_e4m3 = instruction("cvt.rn.satfinite.e4m3x2.f32 $0,$1,$2;", "u16", "f32 f32")  # high, low
unpack_e4m3 = instruction("cvt.rn.f16x2.e4m3x2 $0,$1;", "u32", "u16")
unpack_four_e4m3 = instruction(
    "{.reg .b16 l,h; mov.b32 {l,h},$2; cvt.rn.f16x2.e4m3x2 $0,l; cvt.rn.f16x2.e4m3x2 $1,h;}",
    "u32 u32",
    "u32",
)
pack_f16 = instruction("cvt.rn.f16x2.f32 $0,$1,$2;", "u32", "f32 f32")  # high, low
pack_bf16 = instruction("cvt.rn.bf16x2.f32 $0,$1,$2;", "u32", "f32 f32")  # high, low
multiply_f16 = instruction("mul.rn.f16x2 $0,$1,$2;", "u32", "u32 u32")
multiply_add_f16 = instruction("fma.rn.f16x2 $0,$1,$2,$3;", "u32", "u32 u32 u32")
lost_f16 = instruction(  # what a product, the third, has lost by rounding
    "{.reg .b32 t; neg.f16x2 t,$3; fma.rn.f16x2 $0,$1,$2,t;}", "u32", "u32 u32 u32"
)
low_f16 = instruction("{.reg .b16 l,h; mov.b32 {l,h},$1; cvt.f32.f16 $0,l;}", "f32", "u32")
high_f16 = instruction("{.reg .b16 l,h; mov.b32 {l,h},$1; cvt.f32.f16 $0,h;}", "f32", "u32")
shfl_xor = instruction("shfl.sync.bfly.b32 $0,$1,$2,0x1f,0xffffffff;", "f32", "f32 u32", pure=False)
shfl = instruction("shfl.sync.idx.b32 $0,$1,$2,0x1f,0xffffffff;", "f32", "f32 u32", pure=False)
shfl_of_16 = instruction(  # from a lane of the half of a warp
    "shfl.sync.idx.b32 $0,$1,$2,0x101f,0xffffffff;", "f32", "f32 u32", pure=False
)
word_from_lane = instruction(
    "shfl.sync.idx.b32 $0,$1,$2,0x1f,0xffffffff;", "u32", "u32 u32", pure=False
)
ballot = instruction(  # a bit for each lane
    "{.reg .pred p; setp.ne.u32 p,$1,0; vote.sync.ballot.b32 $0,p,0xffffffff;}",
    "u32",
    "u32",
    pure=False,
)
largest_word = instruction("redux.sync.max.u32 $0,$1,0xffffffff;", "u32", "u32", pure=False)
sum_of_words = instruction("redux.sync.add.u32 $0,$1,0xffffffff;", "u32", "u32", pure=False)
any_lane = instruction(
    "{.reg .pred p; setp.ne.u32 p,$1,0; vote.sync.any.pred p,p,0xffffffff; selp.u32 $0,1,0,p;}",
    "u32",
    "u32",
    pure=False,
)
low_bf16 = instruction("{.reg .b32 t; shl.b32 t,$1,16; mov.b32 $0,t;}", "f32", "u32")
high_bf16 = instruction("{.reg .b32 t; and.b32 t,$1,0xffff0000; mov.b32 $0,t;}", "f32", "u32")
maximum_f16 = instruction("max.f16x2 $0,$1,$2;", "u32", "u32 u32")
reaches_f16 = instruction(  # whether either half is as large
    "{.reg .pred p,q; setp.ge.f16x2 p|q,$1,$2; or.pred p,p,q; selp.u32 $0,1,0,p;}", "u32", "u32 u32"
)
float_bits = instruction("mov.b32 $0,$1;", "u32", "f32")
bits_float = instruction("mov.b32 $0,$1;", "f32", "u32")


def _shared_address(typingctx, array):
    """The address of a shared array, for the instructions above."""

    def generate(context, builder, signature, args):
        made = context.make_array(signature.args[0])(context, builder, args[0])
        place = builder.ptrtoint(made.data, ir.IntType(64))
        assembly = ir.InlineAsm(
            ir.FunctionType(ir.IntType(32), [ir.IntType(64)]),
            "{.reg .u64 t; cvta.to.shared.u64 t,$1; cvt.u32.u64 $0,t;}",
            "=r,l",
            side_effect=False,
        )
        return builder.call(assembly, [place])

    return typing.signature(types.uint32, array), generate


shared_address = stand_ins.shared_address if config.ENABLE_CUDASIM else intrinsic(_shared_address)
