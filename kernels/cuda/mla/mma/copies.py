"""A tile of rows from global to a team's shared memory, asked for by all its threads, back to
back.

    dense     rows lie in shared memory as in global memory: thread i copies units i, i + 128 ...
              of a run, which lies in one page
    padded    8 threads (or 4) copy a row, 16 rows at a time
    ring      the same, each row from its slot; so where it is in a sequence slot
    by row    the same, each row from its page, where pages are smaller than HALF rows

What lies after the last token becomes zeros, and is not read.
"""

from numba import int32, uint32, uint64

from ...decode.copies import slot_in_ring
from ...device.jit import device_function
from ...device.ptx import copy_16, load_global_u32
from ...device.row_layout import UNIT
from .spec import SLICES, TILE

THREADS = 32 * SLICES


def make_find_pages(spec):
    """Make the function that gives the pages of a tile's runs, or of a thread's rows."""
    LOOKUPS, PAGED, BY_ROW = spec.lookups, spec.place == "paged", spec.by_row
    STEP, LANES = TILE // LOOKUPS, spec.lanes_of_row

    @device_function
    def find_pages(pages, table, first, end, shift, thread):
        if BY_ROW:
            first = int32(first + int32(uint32(thread // uint32(LANES))))
        for r in range(LOOKUPS):
            pages[r] = uint32(0)
            token = int32(first + int32(STEP * r))
            if PAGED and token < end:
                pages[r] = load_global_u32(table + uint64(4) * uint64(token >> shift))

    return find_pages


def make_copy_tile(spec):
    """Make the function that asks for a tile; around: as slot_in_ring takes it."""
    if spec.place in ("ring", "slots") or spec.by_row:
        return _make_copy_rows(spec)
    RUN, RUNS, ROW, STRIDE, PAGED = (
        spec.run,
        TILE // spec.run,
        spec.row_bytes,
        spec.stride,
        spec.place == "paged",
    )
    UNITS, DENSE = ROW // UNIT, STRIDE == ROW
    ALL, STEPS = RUN * UNITS, -(-RUN * UNITS // THREADS)
    LANES = 8 if UNITS % 8 == 0 else 4
    AT_ONCE = min(THREADS // LANES, RUN)  # rows of a run
    PASSES = RUN // AT_ONCE

    @device_function
    def copy_run(target, source, left, thread):
        if DENSE:
            limit = uint32(uint32(left) * uint32(UNITS))
            source += uint64(uint32(UNIT) * thread)
            target += uint32(UNIT) * thread
            for i in range(STEPS):
                piece = uint32(thread + uint32(THREADS * i))
                if THREADS * (i + 1) <= ALL or piece < uint32(ALL):
                    valid = uint32(UNIT) if piece < limit else uint32(0)
                    copy_16(
                        target + uint32(UNIT * THREADS * i),
                        source + uint64(UNIT * THREADS * i),
                        valid,
                    )
        else:
            row, unit = uint32(thread // uint32(LANES)), uint32(thread % uint32(LANES))
            source += uint64(uint32(row * uint32(ROW)) + uint32(UNIT) * unit)
            target += row * uint32(STRIDE) + uint32(UNIT) * unit
            if THREADS // LANES > RUN and row >= uint32(RUN):
                return
            for i in range(PASSES):
                valid = uint32(0)
                if int32(row) + int32(AT_ONCE * i) < left:
                    valid = uint32(UNIT)
                for j in range(UNITS // LANES):
                    at = UNIT * LANES * j
                    copy_16(
                        target + uint32(AT_ONCE * STRIDE * i + at),
                        source + uint64(AT_ONCE * ROW * i + at),
                        valid,
                    )

    @device_function
    def copy_tile(target, rows, stride_outer, pages, first, end, mask, around, thread):
        for r in range(RUNS):
            token = int32(first + int32(RUN * r))
            left = int32(max(min(int32(end - token), int32(RUN)), int32(0)))
            source = rows
            if PAGED:
                source += uint64(pages[r]) * stride_outer
                token = int32(token & mask)
            source += uint64(uint32(token)) * uint64(ROW)
            copy_run(target + uint32(RUN * STRIDE * r), source, left, thread)

    return copy_tile


def _make_copy_rows(spec):
    """Make the function that asks for a tile of rows whose places go round, or of small pages."""
    ROW, STRIDE, UNITS = spec.row_bytes, spec.stride, spec.row_bytes // UNIT
    LANES, BY_ROW = spec.lanes_of_row, spec.by_row
    AT_ONCE, STEPS = THREADS // LANES, -(-UNITS // LANES)

    @device_function
    def copy_rows(target, rows, stride_outer, pages, first, end, mask, around, thread):
        row, unit = uint32(thread // uint32(LANES)), uint32(thread % uint32(LANES))
        target += row * uint32(STRIDE) + uint32(UNIT) * unit
        for i in range(TILE // AT_ONCE):
            token = int32(first + int32(row) + int32(AT_ONCE * i))
            valid = uint32(UNIT) if token < end else uint32(0)
            source = rows + uint64(uint32(UNIT) * unit)
            if BY_ROW:
                source += uint64(pages[i]) * stride_outer
                source += uint64(uint32(token & mask)) * uint64(ROW)
            else:
                slot = uint64(uint32(slot_in_ring(token, around)))
                source += slot * uint64(ROW)
            for j in range(STEPS):
                if LANES * (j + 1) <= UNITS or unit < uint32(UNITS - LANES * j):
                    at = UNIT * LANES * j
                    copy_16(target + uint32(AT_ONCE * STRIDE * i + at), source + uint64(at), valid)

    return copy_rows
