"""Rows to vectors of floats: the scales and shifts of a row, and its elements 16 at a time.

parameters of a row as floats ("widened"), one layout of two:
    groups of whole chunks      [scale 0, shift 0, scale 1, shift 1, ...]
    any other group size        per chunk of 16 elements [16 scales, 16 shifts]
"""

from llvmlite import ir

from kvquant.layout import RowFormat

from .simd import F16, F32, I8, I16, I32, I64, LANES


def spec(fmt):
    """A format as a word that a kernel can hold as a constant: "int4-g4/128"."""
    return f"{fmt}/{fmt.head_dim}"


def parse_spec(word):
    """The format of a word."""
    name, head_dim = word.split("/")
    return RowFormat.parse(name, int(head_dim))


def widened_floats(fmt):
    """Floats that the widened parameters of a row take."""
    if fmt.is_exact:
        return 0
    return 2 * (fmt.groups if fmt.group_size % LANES == 0 else fmt.head_dim)


class RowReader:
    """Writes the instructions that read rows of one format."""

    def __init__(self, emit, fmt):
        self.emit, self.fmt = emit, fmt
        self.chunks = fmt.head_dim // LANES
        self.chunk_bytes = LANES * fmt.bits // 8

    def widen(self, row, params):
        """Write the parameters of a row, as floats, to an address."""
        emit, fmt = self.emit, self.fmt
        if fmt.is_exact:
            return
        halves = emit.load(row, F16, 2 * fmt.groups)
        floats = emit.builder.fpext(halves, ir.VectorType(F32, 2 * fmt.groups))
        if fmt.codec == "fp8":  # see unpack
            factors = [ir.Constant(F32, factor) for factor in (256.0, 1.0) * fmt.groups]
            floats = emit.builder.fmul(floats, ir.Constant(floats.type, factors))
        if fmt.group_size % LANES == 0:
            emit.store(params, floats)
            return
        for i in range(2 * self.chunks):
            chunk, is_shift = divmod(i, 2)
            elements = range(chunk * LANES, (chunk + 1) * LANES)
            lanes = [ir.Constant(I32, 2 * (e // fmt.group_size) + is_shift) for e in elements]
            spread = ir.Constant(ir.VectorType(I32, LANES), lanes)
            emit.store(
                emit.at(params, 4 * LANES * i), emit.builder.shuffle_vector(floats, floats, spread)
            )

    def values(self, row, params, chunk):
        """The 16 values of a chunk (its index an i64), from a row and its widened parameters."""
        emit, fmt, b = self.emit, self.fmt, self.emit.builder
        address = emit.at(b.add(row, emit.times(chunk, self.chunk_bytes)), fmt.header_bytes)
        numbers = self.unpack(address)
        if fmt.is_exact:
            return numbers
        if fmt.group_size % LANES == 0:
            group = b.udiv(chunk, ir.Constant(I64, fmt.group_size // LANES))
            at = b.add(params, emit.times(group, 8))
            scale, shift = emit.load_splat(at), emit.load_splat(emit.at(at, 4))
        else:
            at = b.add(params, emit.times(chunk, 8 * LANES))
            scale, shift = emit.load(at, F32), emit.load(emit.at(at, 4 * LANES), F32)
        return emit.fma(numbers, scale, shift)

    def unpack(self, address):
        """16 codes or 16-bit elements as floats, in the order of the elements.

        INT4: the 8 bytes become 8 quadwords x. x | x << 28 has the low nibble, at bit 28, and the
        high nibble, at bit 32, apart; masked, the two halves of a quadword are two codes.
        E4M3: its 7 magnitude bits at the place of fp16's are the number times 2**-8; the widened
        scale has the factor 2**8. Sign-extended to 16 bits and shifted, the byte brings its sign
        along, at bits 15 and 14.
        """
        emit, b = self.emit, self.emit.builder
        floats = ir.VectorType(F32, LANES)
        if self.fmt.codec == "int4":
            wide = b.zext(emit.load(address, I8, LANES // 2), ir.VectorType(I64, LANES // 2))
            pairs = b.or_(wide, b.shl(wide, emit.constant(28, I64, LANES // 2)))
            pairs = b.and_(pairs, emit.constant(0x0000000F_0000000F, I64, LANES // 2))
            return b.sitofp(b.bitcast(pairs, ir.VectorType(I32, LANES)), floats)
        if self.fmt.codec == "int8":
            return b.sitofp(b.zext(emit.load(address, I8), ir.VectorType(I32, LANES)), floats)
        if self.fmt.codec == "fp8":
            wide = b.sext(emit.load(address, I8), ir.VectorType(I16, LANES))
            half = b.and_(b.shl(wide, emit.constant(7, I16)), emit.constant(0xBF80, I16))
            magnitude = b.and_(wide, emit.constant(0x7F, I16))
            is_nan = b.icmp_unsigned("==", magnitude, emit.constant(0x7F, I16))
            half = b.select(is_nan, emit.constant(0x7E00, I16), half)
            return b.fpext(b.bitcast(half, ir.VectorType(F16, LANES)), floats)
        if self.fmt.codec == "bf16":
            wide = b.zext(emit.load(address, I16), ir.VectorType(I32, LANES))
            return b.bitcast(b.shl(wide, emit.constant(16, I32)), floats)
        return b.fpext(emit.load(address, F16), floats)
