"""New rows from shared memory to float32: RoPE and an offset, as kvquant/rows/basis.py.

Lane `part` of a row has its elements 16 part to 16 part + 15. Every operation rounds by itself.

    units of 16 bytes in shared memory     0 1 2 3 4 5 6 7 | 9 8 11 10 13 12 15 14 | 16 17 ...

Every other 8 units are swapped in pairs against bank conflicts.
"""

from numba import cuda, float32, uint32, uint64

from .codes import HALVES
from .jit import device_function
from .ptx import (
    add,
    load_global_f32,
    load_global_f32x4,
    load_shared_f32,
    load_shared_f32x4,
    load_shared_u16,
    load_shared_u32x4,
    multiply,
    subtract,
)
from .row_layout import ELEMENTS, SIZES

EIGHT = 8  # elements of a chunk, which RoPE treats alike


@device_function
def swizzle(unit):
    return uint32(unit ^ (uint32(unit >> uint32(3)) & uint32(1)))


def _make_place(swizzled):
    """Make the function that gives the place of a unit."""

    @device_function
    def place_of(unit):
        return swizzle(unit) if swizzled else unit

    return place_of


def make_widen(kind):
    """Make the function from a word of two 16-bit numbers to two floats, low and high."""
    low, high = HALVES[kind]

    @device_function
    def widen(word):
        return low(word), high(word)

    return widen


def make_load(codec, swizzled=True):
    """The function that loads 8 elements of rows, counted from a stage's first row."""
    IS_FLOAT32, place_of = codec == "fp32", _make_place(swizzled)
    widen = None if IS_FLOAT32 else make_widen(codec)

    @device_function
    def load(stage, element, x, to):
        if IS_FLOAT32:
            unit = uint32(element >> uint32(2))
            for half in range(2):
                place = place_of(uint32(unit + uint32(half)))
                four = load_shared_f32x4(stage + uint32(16) * place)
                for i in range(4):
                    x[to + 4 * half + i] = four[i]
        else:
            place = place_of(uint32(element >> uint32(3)))
            words = load_shared_u32x4(stage + uint32(16) * place)
            for i in range(4):
                x[to + 2 * i], x[to + 2 * i + 1] = widen(words[i])

    return load


def make_transform(spec, side, rotary_dim, swizzled=True):
    """The function that gives a lane its 16 elements, transformed; rotary_dim 0 for V. Arguments:
    stage, the row's first element, part, 16 floats for the result, offset, cos, sin."""
    HEAD_DIM = side.fmt.head_dim
    ACTIVE, FULL = HEAD_DIM // ELEMENTS, spec.lanes * ELEMENTS == HEAD_DIM
    TURNS, OFFSET = rotary_dim > 0, side.offset
    load = make_load(spec.source, swizzled)
    turn = _make_turn(spec.source, rotary_dim, spec.interleaved, swizzled)

    @device_function
    def transform(stage, first, part, x, offset, cos, sin):
        own = part if FULL else uint32(min(part, uint32(ACTIVE - 1)))
        element = uint32(uint32(ELEMENTS) * own)
        load(stage, uint32(first + element), x, 0)
        load(stage, uint32(first + element + uint32(EIGHT)), x, EIGHT)
        if TURNS:
            turn(stage, first, element, x, cos, sin)
        if OFFSET:
            offsets = cuda.local.array(ELEMENTS, float32)
            load_offsets(offset, own, offsets)
            for i in range(ELEMENTS):
                x[i] = subtract(x[i], offsets[i])

    return transform


@device_function
def load_offsets(offset, part, offsets):
    """A head's offset of a lane's elements, or zeros."""
    for i in range(ELEMENTS // 4):
        four = (float32(0.0), float32(0.0), float32(0.0), float32(0.0))
        if offset != uint64(0):
            four = load_global_f32x4(offset + uint64(4 * ELEMENTS) * uint64(part) + uint64(16 * i))
        for j in range(4):
            offsets[4 * i + j] = four[j]


def _make_turn(codec, rotary_dim, interleaved, swizzled):
    """Make the function that turns a lane's elements by RoPE."""
    HALF, DIM = rotary_dim // 2, rotary_dim
    load, load_one = make_load(codec, swizzled), _make_load_one(codec, swizzled)

    @device_function
    def turn_neighbours(stage, first, element, x, cos, sin):
        for i in range(ELEMENTS // 2):
            angle = uint32(uint32(element >> uint32(1)) + uint32(i))
            if angle < uint32(HALF):
                c = load_global_f32(cos + uint64(4) * uint64(angle))
                s = load_global_f32(sin + uint64(4) * uint64(angle))
                one, two = x[2 * i], x[2 * i + 1]
                x[2 * i] = subtract(multiply(one, c), multiply(two, s))
                x[2 * i + 1] = add(multiply(two, c), multiply(one, s))

    @device_function
    def turn_chunks(stage, first, element, x, cos, sin):
        others = cuda.local.array(EIGHT, float32)
        for chunk in range(ELEMENTS // EIGHT):
            start = uint32(element + uint32(chunk * EIGHT))
            is_first = start < uint32(HALF)
            if start < uint32(DIM):
                angle = start if is_first else uint32(start - uint32(HALF))
                other = uint32(start + uint32(HALF)) if is_first else angle
                load(stage, uint32(first + other), others, 0)
                for i in range(EIGHT // 4):
                    c = load_global_f32x4(cos + uint64(4) * uint64(angle + uint32(4 * i)))
                    s = load_global_f32x4(sin + uint64(4) * uint64(angle + uint32(4 * i)))
                    for j in range(4):
                        k = chunk * EIGHT + 4 * i + j
                        part = multiply(others[4 * i + j], -s[j] if is_first else s[j])
                        x[k] = add(multiply(x[k], c[j]), part)

    @device_function
    def turn_one_by_one(stage, first, element, x, cos, sin):
        for i in range(ELEMENTS):
            place = uint32(element + uint32(i))
            is_first = place < uint32(HALF)
            if place < uint32(DIM):
                angle = place if is_first else uint32(place - uint32(HALF))
                other = uint32(place + uint32(HALF)) if is_first else angle
                c = load_global_f32(cos + uint64(4) * uint64(angle))
                s = load_global_f32(sin + uint64(4) * uint64(angle))
                part = multiply(load_one(stage, uint32(first + other)), -s if is_first else s)
                x[i] = add(multiply(x[i], c), part)

    if interleaved:
        return turn_neighbours
    return turn_one_by_one if HALF % EIGHT else turn_chunks


def _make_load_one(codec, swizzled):
    """Make the function that loads one element, counted from the first row of a stage."""
    place_of = _make_place(swizzled)
    IS_FLOAT32, SIZE = codec == "fp32", SIZES[codec]
    SHIFT, widen = (2, None) if IS_FLOAT32 else (3, make_widen(codec))

    @device_function
    def load_one(stage, element):
        unit = place_of(uint32(element >> uint32(SHIFT)))
        inside = uint32(element & uint32((1 << SHIFT) - 1)) * uint32(SIZE)
        place = stage + uint32(16) * unit + inside
        if IS_FLOAT32:
            return load_shared_f32(place)
        return widen(uint32(load_shared_u16(place)))[0]

    return load_one
