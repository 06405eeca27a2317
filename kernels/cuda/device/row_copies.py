"""Rows between global memory and a warp's shared memory, as wide as their format allows.

Each lane of a row copies every lanes-th unit, so that neighbours touch neighbouring bytes.
"""

from numba import uint32, uint64

from .jit import device_function
from .ptx import (
    atomic_add,
    copy_4,
    copy_8,
    copy_16,
    load_shared_u32,
    load_shared_u32x2,
    load_shared_u32x4,
    load_written_u32x4,
    store_global_u32,
    store_global_u32x2,
    store_global_u32x4,
)
from .row_layout import ELEMENTS
from .transform import swizzle

COPIES = {4: copy_4, 8: copy_8, 16: copy_16}
NANS = {"bf16": 0x7F81, "fp16": 0x7C01}  # the least magnitude of a NaN, as bits


@device_function
def page_and_offset(slot, exists, pages):
    """The page of a slot and its place there; zeros without. pages: slots, page size, divisor."""
    _, page_size, factor, shift = pages
    near = uint32(slot) if exists else uint32(0)
    page = uint32(uint64(uint64(near) * uint64(factor)) >> uint64(shift))
    return page, uint32(near - uint32(page * page_size))


@device_function
def count_bad(bad, part, is_bad):
    """Count a row that cannot be held, if rows are counted."""
    if is_bad and part == uint32(0) and bad != uint64(0):
        atomic_add(bad, uint32(1))


@device_function
def was_counted(old, nan):
    """Whether the 16-bit row of which a lane has the first words is NaN; nan: as in NANS."""
    return uint32(old[0] & uint32(0x7FFF)) >= uint32(nan)


def make_load_old(head_dim):
    """The function that gives a lane its 8 words of a 16-bit row, or zeros if not `wanted`."""
    ACTIVE = head_dim // ELEMENTS

    @device_function
    def load_old(words, address, part, wanted):
        for half in range(2):
            if wanted and part < uint32(ACTIVE):
                place = uint64(uint32(32) * part + uint32(16 * half))
                four = load_written_u32x4(address + place)
                for i in range(4):
                    words[4 * half + i] = four[i]
            else:
                for i in range(4):
                    words[4 * half + i] = uint32(0)

    return load_old


def make_ask(row_bytes, lanes, unit, swizzled):
    """The function that starts the copy of a row to shared memory; zeros if not `wanted`.

    unit: bytes of a copy: 4, 8 or 16. swizzled: whether units of a stage are swapped
    (transform.py); then `row` is the stage, and `first` the row's first unit in it.
    """
    UNITS, copy = row_bytes // unit, COPIES[unit]
    STEPS = -(-UNITS // lanes)

    @device_function
    def ask(row, first, source, part, wanted):
        for i in range(STEPS):
            index = uint32(part + uint32(i * lanes))
            if i * lanes + lanes <= UNITS or index < uint32(UNITS):
                place = uint32(first + index)
                if swizzled:
                    place = swizzle(place)
                valid = uint32(unit) if wanted else uint32(0)
                copy(row + uint32(unit) * place, source + uint64(uint32(unit) * index), valid)

    return ask


def make_store(row_bytes, lanes, unit, swizzled):
    """Make the function that stores a row from shared memory; arguments as of make_ask."""
    UNITS = row_bytes // unit
    STEPS = -(-UNITS // lanes)

    @device_function
    def store(row, first, target, part, wanted):
        for i in range(STEPS):
            index = uint32(part + uint32(i * lanes))
            if wanted and (i * lanes + lanes <= UNITS or index < uint32(UNITS)):
                place = uint32(first + index)
                if swizzled:
                    place = swizzle(place)
                source = row + uint32(unit) * place
                to = target + uint64(uint32(unit) * index)
                if unit == 4:
                    store_global_u32(to, load_shared_u32(source))
                elif unit == 8:
                    words = load_shared_u32x2(source)
                    store_global_u32x2(to, words[0], words[1])
                else:
                    store_global_u32x4(to, load_shared_u32x4(source))

    return store
