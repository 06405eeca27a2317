"""Codes of packed rows as fp16 operands of an MMA, without conversions.

A code in the low bits of a half is the fp16 subnormal code * 2**-24, which tensor cores multiply
exactly; one four bits higher is 16 times that. E4M3 shifted to fp16's place is the value * 2**-8.

    a word of INT2, codes 0 to 15    & 0x00030003 -> codes 8 and 0
                                     & 0x000C000C -> 9 and 1, times 4; then 10 and 2, times 16;
                                     11 and 3, times 64
                                     >> 8, then the same     -> 12 and 4, 13 and 5, ...
    a word of INT4, codes 0 to 7     & 0x000F000F -> codes 4 and 0
                                     & 0x00F000F0 -> 5 and 1, times 16
                                     >> 8, then the same     -> 6 and 2; 7 and 3, times 16
    a word of bytes, 0 to 3          & 0x00FF00FF -> codes 2 and 0
                                     >> 8, then the same     -> 3 and 1

INT3's planes make two words of nibbles of 16 elements. Masks of 3 bits leave the fourth bit out.

    low      & 0x33333333 | bits & 0xCCCCCCCC        -> elements 14 12 10 8 6 4 2 0
    low >> 1 & 0x77777777 | bits & 0x88888888        -> 15 13 11 9 7 5 3 1, times 2
                                                        bits: the half word << 2, the same << 16
"""

from numba import uint32

from .jit import device_function
from .ptx import (
    high_bf16,
    high_f16,
    load_shared_u32,
    load_shared_u32x2,
    load_shared_u32x4,
    low_bf16,
    low_f16,
    mma_bf16,
    mma_f16,
    pack_bf16,
    pack_f16,
    permute,
    select_bits,
)
from .row_layout import bits_apart, strands_of

LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632  # of two words, for permute

# by the kind of 16-bit numbers, of a query or of an operand (row_layout.operand_of): the floats of
# a word, the word of two floats (high, low), the MMA
HALVES = {"bf16": (low_bf16, high_bf16), "fp16": (low_f16, high_f16)}
PACK = {"bf16": pack_bf16, "fp16": pack_f16}
MMA = {"bf16": mma_bf16, "fp16": mma_f16}
# which of eight elements stand one after another where codes come out of words as above
ORDERS = {
    "as they are": (0, 1, 2, 3, 4, 5, 6, 7),
    "pairs": (0, 4, 1, 5, 2, 6, 3, 7),
    "bytes": (0, 2, 1, 3, 4, 6, 5, 7),
}


def make_unpack(fmt):
    """The function from a word of codes to the pairs of its m-th MMA; None for 16-bit rows. Words
    of INT2 serve four MMAs, of nibbles two, of bytes one. strand: 1 for odd elements of INT3."""
    if fmt.is_exact:
        return None
    return fmt.pick(integers=_make_unpack_integers, e4m3=lambda _: unpack_e4m3)(fmt)


def make_pair_factor(fmt):
    """The function to the factor by which the j-th pair of a word is too large."""
    bit_of = make_bit_of(fmt)

    @device_function
    def pair_factor(j, strand):
        return uint32(1) << uint32(bit_of(j, strand))

    return pair_factor


def make_bit_of(fmt):
    """The function to the bit at which the j-th pair stands in a word, or in the word >> 8."""
    APART = 8 if fmt.is_exact else bits_apart(fmt)
    PER_BYTE = 8 // APART

    @device_function
    def bit_of(j, strand):
        return APART * (j % PER_BYTE) + strand

    return bit_of


def masks_of(fmt):
    """The masks of the pairs of integer codes, of a byte each."""
    APART = bits_apart(fmt)
    return tuple(0x00010001 * (2**fmt.bits - 1) << bit for bit in range(0, 8, APART))


def _make_unpack_integers(fmt):
    PER_BYTE = 8 // bits_apart(fmt)
    MASK, bit_of = masks_of(fmt)[0], make_bit_of(fmt)

    @device_function
    def pair(word, j, strand):
        return (word >> uint32(8 * (j // PER_BYTE))) & uint32(MASK << bit_of(j, strand))

    @device_function
    def unpack(word, m, strand=0):
        return pair(word, 2 * m, strand), pair(word, 2 * m + 1, strand)

    return unpack


@device_function
def unpack_e4m3(word, m, strand=0):
    odd = word >> uint32(8)
    low = (word & uint32(0x007F007F)) << uint32(7) | (word & uint32(0x00800080)) << uint32(8)
    high = (odd & uint32(0x007F007F)) << uint32(7) | (odd & uint32(0x00800080)) << uint32(8)
    return low, high


def make_load_codes(fmt):
    """The function that loads a lane's 16 codes, the `part`-th of the row at `codes`."""
    HIGH = fmt.head_dim // 4  # where INT3 has its high bits

    @device_function
    def load_planes(codes, part):
        low = load_shared_u32(codes + uint32(4) * part)
        high = load_shared_u32(codes + uint32(HIGH) + uint32(4) * uint32(part >> uint32(1)))
        which = uint32(HIGH_HALVES) if part & uint32(1) else uint32(LOW_HALVES)
        return nibbles_of(low, high_bits(high, which))

    @device_function
    def load_two(codes, part):
        return load_shared_u32x2(codes + uint32(8) * part)

    @device_function
    def load_four(codes, part):
        return load_shared_u32x4(codes + uint32(16) * part)

    return fmt.pick(quarters=load_word, planes=load_planes, nibbles=load_two, bytes=load_four)


def make_load_word(fmt):
    """The function that loads the `part`-th word of the row at `codes`; two of INT3's nibbles."""
    return make_load_codes(fmt) if strands_of(fmt) > 1 else load_word


@device_function
def halves_of(one, other, high):
    """The low halves of two words as a word, or the high ones."""
    return permute(one, other, uint32(HIGH_HALVES) if high else uint32(LOW_HALVES))


@device_function
def load_word(codes, part):
    return (load_shared_u32(codes + uint32(4) * part),)


@device_function
def high_bits(word, which):
    """The high bits of 16 elements where nibbles have them; `which`: LOW_HALVES or HIGH_HALVES."""
    return permute(word << uint32(2), word, which)


@device_function
def nibbles_of(low, bits):
    """Words of nibbles of the even elements, and of the odd ones times 2."""
    even = select_bits(low, bits, uint32(0x33333333))
    return even, select_bits(low >> uint32(1), bits, uint32(0x77777777))


@device_function
def planes_of(even, odd):
    """The word of low bits, and the half word of high bits, of two words of nibbles up to 7."""
    low = (even & uint32(0x33333333)) | ((odd & uint32(0x33333333)) << uint32(2))
    even, odd = even >> uint32(2), odd >> uint32(1)
    high = (even & uint32(0x1111)) | (even >> uint32(14) & uint32(0x4444))
    high |= (odd & uint32(0x2222)) | (odd >> uint32(14) & uint32(0x8888))
    return low, high


def make_in_order(order):
    """Make the function that packs eight elements to fp16, in an order of ORDERS."""
    A, B, C, D, E, F, G, H = ORDERS[order]

    @device_function
    def in_order(x):
        return (
            pack_f16(x[B], x[A]),
            pack_f16(x[D], x[C]),
            pack_f16(x[F], x[E]),
            pack_f16(x[H], x[G]),
        )

    return in_order
