"""Cut ragged queries into pieces, from q_indptr on the device; see ragged.py.

    block    the pieces of one kind, without gaps; their number stands after the room for them
    thread   counts the pieces of a sequence, then writes pieces of any of the block's sequences

Rows of q after the last sequence are one more sequence of the last kind, without tokens, so that
zeros are written. Entries of q_indptr are clamped to 0 to total.
"""

from numba import cuda, int32, uint32, uint64

from ..device.jit import device_function
from ..device.ptx import (
    load_global_u32,
    load_shared_u32,
    shared_address,
    store_global_u32,
    store_global_u32x4,
    store_shared_u32,
)
from .ragged import EVERY

NO_TOKENS = 1 << 30  # more queries after a piece than a sequence has tokens


@device_function
def start_of(q_indptr, sequence, total):
    start = int32(load_global_u32(q_indptr + uint64(4) * uint64(sequence)))
    return int32(max(min(start, total), int32(0)))


@device_function
def rows_of(q_indptr, sequence, batch, total):
    """The first row of q of a sequence, and the first after it."""
    start, end = start_of(q_indptr, sequence, total), int32(total)
    if sequence < batch:
        end = start_of(q_indptr, int32(sequence + int32(1)), total)
    return start, max(start, end)


def make_pieces_kernel(spec):
    THREADS = spec.threads

    @device_function
    def up_to(number, shared, thread):
        """Store the sums of the numbers of all threads up to each in shared memory."""
        at = uint32(shared + uint32(4) * uint32(thread))
        store_shared_u32(at, uint32(number))
        step = int32(1)
        while step < int32(THREADS):
            cuda.syncthreads()
            before = int32(0)
            if thread >= step:
                before = int32(load_shared_u32(uint32(at - uint32(4) * uint32(step))))
            cuda.syncthreads()
            number = int32(number + before)
            store_shared_u32(at, uint32(number))
            step = int32(step * int32(2))
        cuda.syncthreads()

    @device_function
    def sum_at(shared, thread):
        return int32(load_shared_u32(uint32(shared + uint32(4) * uint32(thread))))

    @device_function
    def thread_of(place, shared):
        """The thread that has counted a piece: the first one whose sum exceeds its place."""
        low, high = int32(0), int32(THREADS - 1)
        while low < high:
            middle = int32((low + high) >> int32(1))
            if sum_at(shared, middle) > place:
                high = middle
            else:
                low = int32(middle + int32(1))
        return low

    def cut(q_indptr, pieces, batch, total, one, two, three):
        shared = shared_address(cuda.shared.array(0, uint32))
        thread = int32(cuda.threadIdx.x)
        kind = one
        if uint32(cuda.blockIdx.x) == uint32(1):
            kind = two
        if uint32(cuda.blockIdx.x) == uint32(2):
            kind = three
        least, most, size, room, row = kind
        pieces += uint64(16) * uint64(row)
        made = int32(0)
        first = int32(0)  # the sequence that thread 0 counts
        while first <= batch:
            # Step 1: the pieces of a sequence
            sequence = int32(first + thread)
            number = int32(0)
            if sequence <= batch:
                start, end = rows_of(q_indptr, sequence, batch, total)
                queries = int32(end - start)
                told = int32(EVERY) if sequence == batch else queries
                if least <= told and told <= most:
                    number = int32(int32(queries + size - int32(1)) // size)
            up_to(number, shared, thread)

            # Step 2: the pieces of all of them
            here = sum_at(shared, int32(THREADS - 1))
            place = thread
            while place < here and int32(made + place) < room:
                owner = thread_of(place, shared)
                if owner > int32(0):
                    before = int32(place - sum_at(shared, int32(owner - int32(1))))
                else:
                    before = place
                sequence = int32(first + owner)
                start, end = rows_of(q_indptr, sequence, batch, total)
                start = int32(start + before * size)
                number = int32(min(int32(end - start), size))
                behind = int32(int32(end - start) - number)
                if sequence == batch:
                    sequence, behind = int32(batch - int32(1)), int32(NO_TOKENS)
                words = uint32(sequence), uint32(start), uint32(number), uint32(behind)
                store_global_u32x4(pieces + uint64(16) * uint64(int32(made + place)), words)
                place = int32(place + int32(THREADS))
            cuda.syncthreads()  # the next sums take the same shared memory
            made = int32(min(int32(made + here), room))
            first = int32(first + int32(THREADS))
        if thread == int32(0):
            store_global_u32(pieces + uint64(16) * uint64(room), uint32(made))

    return cut
