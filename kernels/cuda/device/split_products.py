"""16-bit rows times a matrix in float32, by tensor cores: operands split into bfloat16 parts.

    M      = high + middle + low, 8 binary digits each: all 24 of a float32 number
    row      bfloat16 is one part; float16, with its 11 digits, is two
    MMA    16 rows x 16 elements (A) times 16 elements x 8 columns (B), float32 sums

Every product of two parts is exact; what is left out, the low parts of both, is below 2**-26 of a
product. Elements are added in their order, 16 at a time, whatever the rows beside a row are: its
bits depend on it and on M alone. A row with Inf may give NaN, as Inf times a part that is 0 does.

    lane 4g + t    rows g, g + 8 of A;  column g of B;  columns 2t, 2t + 1 of rows g, g + 8 of sums
"""

from numba import cuda, uint32, uint64

from .fragments import ZEROS
from .jit import device_function, in_turn
from .ptx import (
    high_bf16,
    high_f16,
    load_written_f32,
    load_written_u32,
    low_bf16,
    low_f16,
    mma_bf16,
    pack_bf16,
)

STEP, WORDS = 16, 6  # elements of an MMA; words of a lane for its part of M in one
A_WORDS = 4


def make_load_columns(head_dim):
    """Make the function that gives a lane its part of 8 columns of M, in bfloat16 parts.

    Its arguments: the address of M, the first of the columns, and a local array of `part_words`.
    """
    return in_turn([_make_load_step(head_dim, i) for i in range(head_dim // STEP)])


def part_words(head_dim):
    """Words of a lane for 8 columns of M."""
    return WORDS * head_dim // STEP


def _make_load_step(head_dim, i):
    @device_function
    def load(matrix, column, part):
        lane = uint32(uint32(cuda.threadIdx.x) & uint32(31))
        g, t = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
        row = uint32(uint32(STEP * i) + uint32(2) * t)
        at = matrix + uint64(4) * uint64(uint32(head_dim) * row + uint32(column + g))
        for half in range(2):
            near = at + uint64(4 * head_dim * 8 * half)
            one, two = load_written_f32(near), load_written_f32(near + uint64(4 * head_dim))
            for n in range(3):  # high, middle, low
                word = pack_bf16(two, one)
                part[WORDS * i + 2 * n + half] = word
                one, two = one - low_bf16(word), two - high_bf16(word)

    return load


def make_multiply(head_dim, source):
    """Make the function that multiplies 16 rows by 8 columns of M.

    Its arguments: the addresses of a lane's rows g and g + 8, and its part of M. It gives the sums.
    """
    STEPS, TWO = head_dim // STEP, source == "fp16"
    ALL = A_WORDS * STEPS
    add_step = [_make_add_step(i, TWO) for i in range(STEPS)]
    load = in_turn([_make_load_rows(i) for i in range(STEPS)])
    add = _add_in_turn(add_step)

    @device_function
    def multiply(first, second, part):
        words = cuda.local.array(ALL, uint32)
        load(first, second, words)
        return add(words, part, ZEROS)

    return multiply


def _make_load_rows(i):
    @device_function
    def load(first, second, words):
        t = uint64(uint32(uint32(cuda.threadIdx.x) & uint32(3)))
        for half in range(2):
            place = uint64(2 * STEP * i + STEP * half) + uint64(4) * t
            words[A_WORDS * i + 2 * half] = load_written_u32(first + place)
            words[A_WORDS * i + 2 * half + 1] = load_written_u32(second + place)

    return load


@device_function
def _high_part(word):
    """Two numbers of float16, as bfloat16."""
    return pack_bf16(high_f16(word), low_f16(word))


@device_function
def _low_part(word):
    """What bfloat16 has lost of two numbers of float16."""
    near = _high_part(word)
    return pack_bf16(high_f16(word) - high_bf16(near), low_f16(word) - low_bf16(near))


def _make_add_step(i, two):
    TWO = two

    @device_function
    def add(words, part, sums):
        a = (
            words[A_WORDS * i],
            words[A_WORDS * i + 1],
            words[A_WORDS * i + 2],
            words[A_WORDS * i + 3],
        )
        high = (part[WORDS * i], part[WORDS * i + 1])
        middle = (part[WORDS * i + 2], part[WORDS * i + 3])
        low = (part[WORDS * i + 4], part[WORDS * i + 5])
        if TWO:
            rest = (_low_part(a[0]), _low_part(a[1]), _low_part(a[2]), _low_part(a[3]))
            a = (_high_part(a[0]), _high_part(a[1]), _high_part(a[2]), _high_part(a[3]))
            sums = mma_bf16(rest, middle, sums)
            sums = mma_bf16(rest, high, sums)
        sums = mma_bf16(a, low, sums)
        sums = mma_bf16(a, middle, sums)
        return mma_bf16(a, high, sums)

    return add


def _add_in_turn(functions):
    function = functions[0]
    for following in functions[1:]:
        function = _after(function, following)
    return function


def _after(first, second):
    @device_function
    def both(words, part, sums):
        return second(words, part, first(words, part, sums))

    return both
