"""Vectors of 16 floats for numba: a type, and the operations that the CPU kernels are made of.

LLVM maps a vector to one AVX-512 register, two of AVX2 or four of NEON. Memory is addressed by
plain integers (bytes), because rows have any strides and alignment.
"""

import functools
import inspect
import math

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils, registry
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

LANES = 16
CACHE_LINE = 64  # bytes

F16, F32 = ir.HalfType(), ir.FloatType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


class _F32x16(types.Type):
    def __init__(self):
        super().__init__(name="f32x16")


f32x16 = _F32x16()
literal = types.Literal


@register_model(_F32x16)
class _F32x16Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.VectorType(F32, LANES))


@functools.cache
def in_hardware(name):
    """Whether the processor has "fma", or converts "half", or has a feature by LLVM's name
    ("avx512f").

    Virtual machines hide features. Without "fma" or "half" LLVM would call a function instead.
    """
    codegen = registry.cpu_target.target_context.codegen()
    if name.startswith("avx512"):
        return f"+{name}" in codegen.magic_tuple()[2].split(",")
    body, called = {
        "fma": ("call <16 x float> @llvm.fma.v16f32(<16 x float> %x, <16 x float> %x, "
                "<16 x float> %x)", ("fmaf",)),
        "half": ("fpext <16 x half> %h to <16 x float>", ("extendhfsf2", "h2f")),
    }[name]  # fmt: skip
    text = (
        "declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)\n"
        f"define <16 x float> @f(<16 x float> %x, <16 x half> %h) {{\n%y = {body}\n"
        "ret <16 x float> %y\n}"
    )
    assembly = codegen._tm.emit_assembly(llvm.parse_assembly(text))
    return not any(function in assembly for function in called)


class Emitter:
    """Writes LLVM instructions on vectors: what the intrinsics of this room are made of."""

    def __init__(self, builder):
        self.builder = builder

    def load(self, address, kind, count=LANES):
        """count elements from a byte address, of any alignment."""
        pointer = self.builder.inttoptr(address, ir.VectorType(kind, count).as_pointer())
        return self.builder.load(pointer, align=1)

    def load_scalar(self, address, kind):
        """One element from a byte address."""
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=1)

    def store(self, address, value):
        """A vector or an element to a byte address, of any alignment."""
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        self.builder.store(value, pointer, align=1)

    def at(self, address, offset):
        """address + a constant offset."""
        return self.builder.add(address, ir.Constant(I64, offset)) if offset else address

    def prefetch(self, address, size):
        """Ask for the cache lines of size bytes; any address will do."""
        pointer = I8.as_pointer()
        function = cgutils.get_or_insert_function(
            self.builder.module,
            ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32]),
            "llvm.prefetch.p0",
        )
        read, into_l1, data = (ir.Constant(I32, word) for word in (0, 3, 1))
        for offset in range(0, size, CACHE_LINE):
            place = self.builder.inttoptr(self.at(address, offset), pointer)
            self.builder.call(function, [place, read, into_l1, data])

    def times(self, value, factor):
        return self.builder.mul(value, ir.Constant(I64, factor))

    def constant(self, value, kind=F32, count=LANES):
        return ir.Constant(ir.VectorType(kind, count), [ir.Constant(kind, value)] * count)

    def each(self, values, kind):
        return ir.Constant(ir.VectorType(kind, len(values)), [ir.Constant(kind, v) for v in values])

    def splat(self, scalar, count=LANES):
        undefined = ir.Constant(ir.VectorType(scalar.type, count), ir.Undefined)
        single = self.builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(single, undefined, self.constant(0, I32, count))

    def load_splat(self, address):
        """A float from a byte address in every lane."""
        return self.splat(self.load_scalar(address, F32))

    def call(self, name, *args):
        """An LLVM intrinsic on vectors, such as llvm.fma."""
        kind = args[0].type
        suffix = f"v{kind.count}" + {F32: "f32", F16: "f16", I32: "i32"}[kind.element]
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(kind, [kind] * len(args)), f"{name}.{suffix}"
        )
        return self.builder.call(function, args)

    def look_up(self, table, lanes):
        """The float of a table of 16 that the four low bits of each lane number, with AVX-512."""
        function = cgutils.get_or_insert_function(
            self.builder.module,
            ir.FunctionType(table.type, [table.type, lanes.type]),
            "llvm.x86.avx512.permvar.sf.512",
        )
        return self.builder.call(function, [table, lanes])

    def pick_lanes(self, x, lanes):
        """The vector whose lane i is lane lanes[i] of x."""
        return self.builder.shuffle_vector(
            x, ir.Constant(x.type, ir.Undefined), self.each(lanes, I32)
        )

    def reduce(self, name, x):
        """The least ("fmin") or greatest ("fmax") lane of a vector of floats; "or" of int32."""
        kind = x.type.element
        suffix = {F32: "v16f32", I32: "v16i32"}[kind]
        function = cgutils.get_or_insert_function(
            self.builder.module,
            ir.FunctionType(kind, [x.type]),
            f"llvm.vector.reduce.{name}.{suffix}",
        )
        return self.builder.call(function, [x])

    def fma(self, a, b, c):
        """a * b + c, rounded once where the processor can."""
        if in_hardware("fma"):
            return self.call("llvm.fma", a, b, c)
        return self.builder.fadd(self.builder.fmul(a, b), c)

    def from_half(self, bits):
        b, count = self.builder, bits.type.count
        floats, ints = ir.VectorType(F32, count), ir.VectorType(I32, count)
        if in_hardware("half"):
            return b.fpext(b.bitcast(bits, ir.VectorType(F16, count)), floats)

        constant = functools.partial(self.constant, kind=I32, count=count)
        wide = b.zext(bits, ints)
        sign = b.shl(b.and_(wide, constant(0x8000)), constant(16))
        magnitude = b.and_(wide, constant(0x7FFF))
        normal = b.add(b.shl(magnitude, constant(13)), constant((127 - 15) << 23))
        odd = b.add(normal, constant((127 - 15) << 23))  # Inf and NaN
        # from the integer: as a float it would be denormal, which torch.set_flush_denormal makes 0
        small = b.bitcast(b.fmul(b.sitofp(magnitude, floats), constant(2.0**-24, kind=F32)), ints)
        is_odd = b.icmp_unsigned(">=", magnitude, constant(0x7C00))
        is_small = b.icmp_unsigned("<", magnitude, constant(0x400))
        whole = b.select(is_odd, odd, b.select(is_small, small, normal))
        return b.bitcast(b.or_(whole, sign), floats)

    def to_half(self, x):
        """The bits of a vector of floats, none of them NaN, rounded to the nearest fp16."""
        b, count = self.builder, x.type.count
        bits16, ints = ir.VectorType(I16, count), ir.VectorType(I32, count)
        if in_hardware("half"):
            return b.bitcast(b.fptrunc(x, ir.VectorType(F16, count)), bits16)

        constant = functools.partial(self.constant, kind=I32, count=count)
        bits = b.bitcast(x, ints)
        sign = b.and_(bits, constant(-(2**31)))
        magnitude = b.xor(bits, sign)
        odd = b.and_(b.lshr(magnitude, constant(13)), constant(1))
        rebased = b.sub(magnitude, constant((127 - 15) << 23))
        normal = b.lshr(b.add(b.add(rebased, constant(0xFFF)), odd), constant(13))
        # added to 1/2, a number below 2**-14 is rounded to multiples of 2**-24
        moved = b.fadd(b.bitcast(magnitude, x.type), constant(0.5, kind=F32))
        small = b.sub(b.bitcast(moved, ints), constant(126 << 23))
        is_small = b.icmp_signed("<", magnitude, constant((127 - 14) << 23))
        is_large = b.icmp_signed(">=", magnitude, constant((127 + 16) << 23))
        half = b.select(is_large, constant(0x7C00), b.select(is_small, small, normal))
        return b.trunc(b.or_(half, b.lshr(sign, constant(16))), bits16)

    def exp2(self, x):
        """2**x for x <= 0, relative error under 2e-7; 0 below -126.5, NaN for NaN.

        2**x = 2**n * 2**f, n the nearest integer; 2**f by the series of exp(f ln 2) to f**7.
        """
        b = self.builder
        lowest = self.constant(-127.0)
        x = b.select(b.fcmp_ordered("<", x, lowest), lowest, x)
        magic = self.constant(1.5 * 2**23)
        shifted = b.fadd(x, magic)
        f = b.fsub(x, b.fsub(shifted, magic))
        terms = [math.log(2) ** k / math.factorial(k) for k in range(8)]
        power = self.constant(terms[7])
        for term in reversed(terms[:7]):
            power = self.fma(power, f, self.constant(term))
        n = b.bitcast(shifted, ir.VectorType(I32, LANES))
        exponent = b.add(b.shl(n, self.constant(23, I32)), self.constant(127 << 23, I32))
        return b.fmul(power, b.bitcast(exponent, ir.VectorType(F32, LANES)))  # n = -127 makes 0

    def tanh(self, x):
        """tanh(x), relative error under 1e-6; NaN for NaN.

        (1 - t) / (1 + t), t = 2**(-2 |x| log2(e)); near 0, where t is too close to 1, the series.
        """
        b = self.builder
        magnitude = self.call("llvm.fabs", x)
        t = self.exp2(b.fmul(magnitude, self.constant(-2 * math.log2(math.e))))
        one = self.constant(1.0)
        far = self.call("llvm.copysign", b.fdiv(b.fsub(one, t), b.fadd(one, t)), x)
        square = b.fmul(x, x)
        power = self.constant(62 / 2835)
        for term in (-17 / 315, 2 / 15, -1 / 3, 1.0):
            power = self.fma(power, square, self.constant(term))
        is_near = b.fcmp_ordered("<", magnitude, self.constant(0.25))
        return b.select(is_near, b.fmul(x, power), far)

    def sums(self, vectors):
        """A vector whose lane i is the sum of the lanes of vectors[i]; 16 vectors, None for none.

        A tree: two vectors become one by adding the even to the odd lanes of their concatenation.
        """
        b = self.builder
        even, odd = (self.each(range(first, 2 * LANES, 2), I32) for first in (0, 1))
        zero = self.constant(0.0)
        while len(vectors) > 1:
            halves = []
            for left, right in zip(vectors[0::2], vectors[1::2], strict=True):
                if left is None:
                    halves.append(None)
                    continue
                right = zero if right is None else right
                low = b.shuffle_vector(left, right, even)
                halves.append(b.fadd(low, b.shuffle_vector(left, right, odd)))
            vectors = halves
        return vectors[0]


def operation(result, *arguments):
    """Make an intrinsic of numba, for these types, from a function (emitter, *values) -> value.

    A `literal` argument must be a compile-time constant (int or str).
    """

    def wrap(emit):
        def typed(typingctx, *given):
            constants = [
                have.literal_value if want is literal else None
                for have, want in zip(given, arguments, strict=True)
            ]
            want = [
                have if want is literal else want
                for have, want in zip(given, arguments, strict=True)
            ]

            def generate(context, builder, signature, args):
                values = [
                    context.cast(builder, value, have, want) if constant is None else constant
                    for value, have, want, constant in zip(
                        args, signature.args, want, constants, strict=True
                    )
                ]
                made = emit(Emitter(builder), *values)
                return context.get_dummy_value() if made is None else made

            return result(*want), generate

        names = ["typingctx", *list(inspect.signature(emit).parameters)[1:]]
        typed.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        )  # numba packs *given into a tuple unless it sees the names
        typed.__name__ = typed.__qualname__ = emit.__name__
        typed.__doc__ = emit.__doc__
        return intrinsic(prefer_literal=True)(typed)

    return wrap


@operation(f32x16, types.int64)
def load(emit, address):
    """16 floats from a byte address."""
    return emit.load(address, F32)


@operation(types.void, types.int64, f32x16)
def store(emit, address, value):
    """16 floats to a byte address."""
    emit.store(address, value)


@operation(types.void, types.int64, literal)
def prefetch(emit, address, size):
    """Ask for the cache lines of size bytes; any address will do."""
    emit.prefetch(address, size)


@operation(f32x16, types.float32)
def splat(emit, scalar):
    return emit.splat(scalar)


@operation(f32x16, f32x16, f32x16)
def add(emit, a, b):
    return emit.builder.fadd(a, b)


@operation(f32x16, f32x16, f32x16)
def maximum(emit, a, b):
    """The greater of each pair of lanes; a NaN loses."""
    return emit.call("llvm.maxnum", a, b)


@operation(f32x16, f32x16, f32x16)
def minimum(emit, a, b):
    """The lesser of each pair of lanes; a NaN loses."""
    return emit.call("llvm.minnum", a, b)


@operation(f32x16, f32x16, f32x16)
def exp2_of_difference(emit, a, b):
    """2**(a - b), for a <= b."""
    return emit.exp2(emit.builder.fsub(a, b))


@operation(f32x16, types.int64)
def load_splat(emit, address):
    """A float from a byte address, in every lane."""
    return emit.load_splat(address)


@operation(f32x16, f32x16, f32x16)
def times(emit, a, b):
    return emit.builder.fmul(a, b)


@operation(f32x16, f32x16, types.float32)
def soft_capped(emit, scores, cap):
    """cap * tanh(scores / cap); -inf, which is no score, stays."""
    b, caps = emit.builder, emit.splat(cap)
    capped = b.fmul(caps, emit.tanh(b.fdiv(scores, caps)))
    return b.select(b.fcmp_ordered("==", scores, emit.constant(-math.inf)), scores, capped)


@operation(types.int64, literal)
def stack_floats(emit, count):
    """The address of count floats, uninitialized, that live until the kernel returns.

    An array of numba's would be freed after its last use by name, though its address still serves.
    """
    with emit.builder.goto_entry_block():
        place = emit.builder.alloca(ir.ArrayType(F32, count))
    place.align = CACHE_LINE
    return emit.builder.ptrtoint(place, I64)


@operation(types.float32, types.int64)
def load_float(emit, address):
    """A float from a byte address."""
    return emit.load_scalar(address, F32)


@operation(types.void, types.int64, types.float32)
def store_float(emit, address, value):
    """A float to a byte address."""
    emit.store(address, value)


@operation(types.int64, types.int64, types.int64)
def argument(emit, arguments, index):
    """One of the int64 arguments of a kernel."""
    return emit.load_scalar(emit.builder.add(arguments, emit.times(index, 8)), I64)


@operation(types.int64, types.int64)
def load_int32(emit, address):
    """An int32 from a byte address."""
    return emit.builder.sext(emit.load_scalar(address, I32), I64)


@operation(types.void, types.int64, types.int64, types.int64)
def call_kernel(emit, kernel, arguments, item):
    """Call the C function (arguments, item) at an address."""
    kind = ir.FunctionType(ir.VoidType(), [I64, I64])
    emit.builder.call(emit.builder.inttoptr(kernel, kind.as_pointer()), [arguments, item])


@operation(types.void, types.int64, types.int64, types.int64)
def call_team(emit, start, work, job):
    """Call work(job) in each thread of OpenMP's team, by the address of its GOMP_parallel."""
    kind, none = ir.FunctionType(ir.VoidType(), [I64, I64, I32, I32]), ir.Constant(I32, 0)
    start = emit.builder.inttoptr(start, kind.as_pointer())
    emit.builder.call(start, [work, job, none, none])  # no number of threads means all, no flags


@operation(types.int64, types.int64)
def next_item(emit, address):
    """The int64 at an address, which is counted up for all threads at once."""
    pointer = emit.builder.inttoptr(address, I64.as_pointer())
    return emit.builder.atomic_rmw("add", pointer, ir.Constant(I64, 1), "monotonic")


@operation(types.void, types.int64, types.int64)
def store_int32(emit, address, value):
    """The low 32 bits of an integer to a byte address."""
    emit.store(address, emit.builder.trunc(value, I32))


@operation(types.void, types.int64, types.int64)
def store_int(emit, address, value):
    """An int64 to a byte address."""
    emit.store(address, value)
