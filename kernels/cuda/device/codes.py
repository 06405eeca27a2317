"""Codes of packed rows as fp16 operands of an MMA, without conversions.

A code in the low bits of a half is the fp16 subnormal code * 2**-24, which tensor cores multiply
exactly; one four bits higher is 16 times that. E4M3 shifted to fp16's place is the value * 2**-8.

    a word of INT4, codes 0 to 7     7 6 5 4 3 2 1 0         & 0x000F000F -> codes 4 and 0
                                                             & 0x00F000F0 -> 5 and 1, times 16
                                     >> 8, then the same     -> 6 and 2; 7 and 3, times 16
    a word of bytes, 0 to 3          3 . 2 . 1 . 0 .         & 0x00FF00FF -> codes 2 and 0
                                     >> 8, then the same     -> 3 and 1
"""

from numba import uint32

from .jit import device_function
from .ptx import high_bf16, high_f16, low_bf16, low_f16, mma_bf16, mma_f16, pack_bf16, pack_f16

# by the kind of 16-bit numbers, of a query or of an operand (row_layout.operand_of): the floats of
# a word, the word of two floats (high, low), the MMA
HALVES = {"bf16": (low_bf16, high_bf16), "fp16": (low_f16, high_f16)}
PACK = {"bf16": pack_bf16, "fp16": pack_f16}
MMA = {"bf16": mma_bf16, "fp16": mma_f16}


def make_unpack(fmt):
    """The function from a word of codes to the two pairs of fp16 of its m-th MMA.

    INT4 words serve two MMAs (m = 0, 1), words of bytes one. None for 16-bit rows.
    """
    of_integers = fmt.pick(nibbles=unpack_nibbles, bytes=unpack_bytes, elements=None)
    return fmt.pick(integers=of_integers, e4m3=unpack_e4m3, bf16=None, fp16=None)


@device_function
def unpack_nibbles(word, m):
    word = word >> uint32(8 * m)
    return word & uint32(0x000F000F), word & uint32(0x00F000F0)


@device_function
def unpack_bytes(word, m):
    odd = word >> uint32(8)
    return word & uint32(0x00FF00FF), odd & uint32(0x00FF00FF)


@device_function
def unpack_e4m3(word, m):
    odd = word >> uint32(8)
    low = (word & uint32(0x007F007F)) << uint32(7) | (word & uint32(0x00800080)) << uint32(8)
    high = (odd & uint32(0x007F007F)) << uint32(7) | (odd & uint32(0x00800080)) << uint32(8)
    return low, high
