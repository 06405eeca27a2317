"""Cut ragged queries into pieces, from q_indptr on the device; see ragged.py.

    thread   a piece: the last sequence whose pieces begin no later (binary search), and its place
             among them

The rows behind the last sequence's are those of one more sequence, without tokens: so that they
become zeros. Entries count as within 0 to total, so no row outside of q is ever named.
"""

from numba import cuda, int32, uint32, uint64

from ..device.jit import device_function
from ..device.ptx import load_global_u32, store_global_u32x4

NO_TOKENS = 1 << 30  # more queries behind a piece than a sequence has tokens


@device_function
def start_of(q_indptr, sequence, total):
    """The first row of q of a sequence."""
    start = int32(load_global_u32(q_indptr + uint64(4) * uint64(sequence)))
    return int32(max(min(start, total), int32(0)))


@device_function
def first_piece_of(start, sequence, most):
    """The number of the first piece of a sequence: there is room for all those before it."""
    return int32((start + sequence * int32(most - int32(1))) // most)


def make_pieces_kernel(spec):
    """Make the kernel, a Python function that numba compiles with `spec.signature()`."""
    THREADS = spec.threads

    def cut(q_indptr, pieces, batch, total, most, count):
        piece = int32(int32(cuda.blockIdx.x) * int32(THREADS) + int32(cuda.threadIdx.x))
        if piece >= count:
            return
        low, high = int32(0), int32(batch)
        while low < high:
            middle = int32((low + high + int32(1)) >> int32(1))
            start = start_of(q_indptr, middle, total)
            if first_piece_of(start, middle, most) <= piece:
                low = middle
            else:
                high = int32(middle - int32(1))
        start, end = start_of(q_indptr, low, total), int32(total)
        if low < batch:
            end = start_of(q_indptr, int32(low + int32(1)), total)
        first = int32(start + int32(piece - first_piece_of(start, low, most)) * most)
        number = int32(max(min(int32(end - first), most), int32(0)))
        behind = int32(int32(end - first) - number)
        if low == batch or number == int32(0):
            behind = int32(NO_TOKENS)
        sequence = int32(min(low, int32(batch - int32(1))))
        words = uint32(sequence), uint32(first), uint32(number), uint32(behind)
        store_global_u32x4(pieces + uint64(16) * uint64(piece), words)

    return cut
