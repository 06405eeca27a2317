"""Every PTX instruction's stand-in against numpy, in numba's simulator: a process of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from in_simulator import SIMULATED, in_simulator, lanes, word

pytestmark = pytest.mark.extra("cuda")
if SIMULATED:
    import instructions as simulated
    import memory as simulatedmemory
    from numba import cuda

    from kvquant.kernels.cuda.device import ptx, warpgroup

f32, u32, u64 = np.float32, np.uint32, np.uint64
Array = npt.NDArray[Any]


def shared_memory() -> Any:
    """The address of the block's dynamic shared memory."""
    return ptx.shared_address(cuda.shared.array(0, u32))


def at(array: Array, index: int = 0) -> Any:
    """The address of an element in global memory."""
    return u64(array.ctypes.data + index * array.itemsize)


def check_mma(mma: Any, bits: Callable[[Array], Array]) -> None:
    """Against a product of matrices; the places of elements are those of the PTX ISA."""
    random = np.random.default_rng(0)
    a = random.integers(-64, 64, (16, 16)).astype(f32) / 8
    b = random.integers(-64, 64, (16, 8)).astype(f32) / 8
    c = random.standard_normal((16, 8)).astype(f32)

    def multiply(lane: int) -> Any:
        g, t = lane // 4, lane % 4
        of_a = [a[g + 8 * (i // 2 % 2), 2 * t + i % 2 + 8 * (i // 4)] for i in range(8)]
        of_b = [b[2 * t + i % 2 + 8 * (i // 2), g] for i in range(4)]
        of_c = [c[g + 8 * (i // 2), 2 * t + i % 2] for i in range(4)]
        words = [tuple(bits(np.array(values)).view(u32)) for values in (of_a, of_b)]
        return mma(*words, tuple(of_c))

    d = np.empty((16, 8), f32)
    for lane, sums in enumerate(lanes(multiply)):
        for i in range(4):
            d[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] = sums[i]
    np.testing.assert_array_equal(d, (a.astype(float) @ b + c).astype(f32))


@in_simulator
def test_mma() -> None:
    check_mma(ptx.mma_f16, lambda x: x.astype(np.float16).view(np.uint16))
    check_mma(ptx.mma_bf16, lambda x: (x.view(u32) >> 16).astype(np.uint16))
    # codes are subnormal numbers
    codes, ones, zeros = (u32(0x000F000F),) * 4, (u32(0x3C003C00),) * 2, (f32(0),) * 4
    sums = lanes(lambda lane: ptx.mma_f16(codes, ones, zeros))
    assert np.all(np.array(sums) == 16 * 15 * 2.0**-24)


@in_simulator
def test_ldmatrix() -> None:
    numbers = np.arange(256, dtype=np.uint16).reshape(32, 8)

    def load(lane: int) -> Any:
        base = shared_memory()
        ptx.store_shared_u32x4(base + u32(16 * lane), tuple(numbers[lane].view(u32)))
        cuda.syncwarp()
        every = base + u32(16 * lane)
        sixteen = every if lane < 16 else u32(1)  # x2 has no use for the others' addresses
        straight = ptx.load_matrix_x4(every), ptx.load_matrix_x2(sixteen)
        return straight, (ptx.load_matrix_x4_t(every), ptx.load_matrix_x2_t(sixteen))

    for lane, (straight, transposed) in enumerate(lanes(load, shared=512)):
        g, t = lane // 4, lane % 4
        matrices = numbers.reshape(4, 8, 8)
        wanted = tuple(word(m[g, 2 * t], m[g, 2 * t + 1]) for m in matrices)
        assert straight == (wanted, wanted[:2])
        wanted = tuple(word(m[2 * t, g], m[2 * t + 1, g]) for m in matrices)
        assert transposed == (wanted, wanted[:2])


@in_simulator
def test_movmatrix() -> None:
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8)
    given = matrix.view(u32).reshape(32)
    got = np.array(lanes(lambda lane: ptx.transpose_matrix(given[lane])), u32)
    np.testing.assert_array_equal(got.view(np.uint16).reshape(8, 8), matrix.T)


@in_simulator
def test_shuffles_and_votes() -> None:
    assert lanes(lambda i: ptx.shfl_xor(f32(i), u32(5))) == [i ^ 5 for i in range(32)]
    assert lanes(lambda i: ptx.shfl(f32(i), u32(31 - i))) == [31 - i for i in range(32)]
    assert lanes(lambda i: ptx.shfl_of_16(f32(i), u32(3))) == [3] * 16 + [19] * 16
    assert lanes(lambda i: ptx.word_from_lane(u32(i), u32(i // 2))) == [i // 2 for i in range(32)]
    assert lanes(lambda i: ptx.largest_word(u32(2**31 + i))) == [2**31 + 31] * 32
    assert lanes(lambda i: ptx.sum_of_words(u32(i + 1))) == [528] * 32
    assert lanes(lambda i: ptx.any_lane(u32(i == 9))) == [1] * 32
    assert lanes(lambda i: ptx.any_lane(u32(0))) == [0] * 32
    assert lanes(lambda i: ptx.ballot(u32(2 * (i in (3, 31))))) == [2**31 + 8] * 32


@in_simulator
def test_copies_are_poison_until_their_group_is_waited_for() -> None:
    source = np.arange(64, dtype=u32)

    def copy(lane: int) -> Any:
        base = shared_memory()
        if lane:
            return None
        for group in range(3):
            ptx.copy_16(base + u32(16 * group), at(source, 4 * group), u32(16))
            ptx.commit_copies()
        seen = []
        for pending in (3, 2, 0):
            ptx.wait_copies[pending]()
            seen.append([ptx.load_shared_u32(base + u32(16 * i)) for i in range(3)])
        return seen

    seen = lanes(copy, shared=64, memory=[source])[0]
    poison = 0xFFFFFFFF
    assert seen == [[poison] * 3, [0, poison, poison], [0, 4, 8]]


@in_simulator
def test_copies_of_fewer_bytes_are_filled_with_zeros() -> None:
    source = np.arange(1, 5, dtype=u32)

    def copy(lane: int) -> Any:
        target = shared_memory() + u32(16 * lane)
        if lane < 2:  # of the second nothing is read, so it may lie anywhere
            ptx.copy_16(target, at(source) if lane == 0 else u64(0), u32(8 * (1 - lane)))
            ptx.commit_copies()
        ptx.wait_copies[0]()
        cuda.syncwarp()
        return ptx.load_shared_u32x4(target) if lane < 2 else None

    assert lanes(copy, shared=32, memory=[source])[:2] == [(1, 2, 0, 0), (0, 0, 0, 0)]


@in_simulator
def test_copies_of_4_and_8_bytes() -> None:
    source = np.arange(1, 5, dtype=u32)

    def copy(lane: int) -> Any:
        if lane:
            return None
        base = shared_memory()
        ptx.copy_4(base + u32(4), at(source, 3), u32(4))
        ptx.copy_4(base, at(source, 3), u32(0))
        ptx.copy_8(base + u32(8), at(source, 2), u32(8))
        ptx.commit_copies()
        ptx.wait_copies[0]()
        return ptx.load_shared_u32x4(base)

    assert lanes(copy, shared=16, memory=[source])[0] == (0, 4, 3, 4)


@in_simulator
def test_shared_memory() -> None:
    def use(lane: int) -> Any:
        mine = shared_memory() + u32(64 * lane)
        fresh = ptx.load_shared_f32(mine)
        ptx.store_shared_u32(mine, u32(7))
        ptx.store_shared_f32(mine + u32(4), f32(lane + 0.5))
        ptx.store_shared_f32x2(mine + u32(8), f32(2), f32(3))
        ptx.store_shared_u32x4(mine + u32(16), (u32(4), u32(5), u32(6), u32(lane)))
        words = ptx.load_shared_u32x4(mine + u32(16))
        assert ptx.load_shared_u32x2(mine + u32(24)) == words[2:]
        ptx.store_shared_u32x2(mine + u32(48), (u32(0x70006), u32(8)))
        assert ptx.load_shared_u32x2(mine + u32(48)) == (0x70006, 8)
        assert ptx.load_shared_u16(mine + u32(50)) == 7
        ptx.store_shared_f32x4(mine + u32(32), (f32(5), f32(6), f32(7), f32(lane)))
        assert ptx.load_shared_f32x4(mine + u32(32)) == (5, 6, 7, lane)
        return fresh, ptx.load_shared_u32(mine), ptx.load_shared_f32x4(mine)[1:], words

    for lane, (fresh, seven, floats, words) in enumerate(lanes(use, shared=2048)):
        assert np.isnan(fresh) and seven == 7
        assert floats == (lane + 0.5, 2, 3) and words == (4, 5, 6, lane)
        assert {type(x) for x in floats} == {f32} and {type(x) for x in words} == {u32}


@in_simulator
def test_global_memory() -> None:
    source, target = np.arange(4, dtype=u32), np.zeros(16, f32)

    def use(lane: int) -> Any:
        if lane:
            return None
        one, two = ptx.load_global_u32(at(source, 1)), ptx.load_global_u32x2(at(source, 2))
        byte = ptx.load_global_u8(at(source, 3))
        assert byte == 3 and type(byte) is u32
        ptx.store_global_f32(at(target, 0), f32(5))
        ptx.store_global_u32x2(at(target, 2), u32(0x3F800000), u32(0x40000000))
        ptx.store_global_f32x2(at(target, 10), f32(2), f32(3))
        ptx.store_global_f32x4(at(target, 4), (f32(6), f32(7), f32(8), f32(9)))
        ptx.store_global_u16(at(target, 15), np.uint16(7))
        ptx.fence()
        written = ptx.load_written_f32(at(target)), ptx.load_written_f32x4(at(target, 4))
        ptx.store_global_u32(at(target, 8), u32(0x40400000))
        ptx.store_global_u32x4(at(target, 12), (u32(1), u32(2), u32(3), u32(4)))
        assert ptx.load_written_u32x4(at(target, 12)) == (1, 2, 3, 4)
        assert ptx.load_written_u32(at(target, 13)) == 2
        ptx.fence_system()
        ptx.store_released_u32(at(target, 13), u32(9))
        assert ptx.load_acquired_u32(at(target, 13)) == 9
        return one, two, ptx.load_global_u32x4(at(source)), written

    got = lanes(use, memory=[source, target])[0]
    assert got == (1, (2, 3), (0, 1, 2, 3), (5, (6, 7, 8, 9)))
    assert target[:12].tolist() == [5, 0, 1, 2, 6, 7, 8, 9, 3, 0, 2, 3]
    assert target[12:].view(u32).tolist() == [1, 9, 3, 4]


@in_simulator
def test_numbers_from_global_memory() -> None:
    wide, floats = np.array([2**63 + 1, 5], u64), np.arange(8, dtype=f32)

    def use(lane: int) -> Any:
        number = ptx.load_global_u64(at(wide))
        assert number == ptx.load_written_u64(at(wide))
        return number, ptx.load_global_f32(at(floats, 3)), ptx.load_global_f32x4(at(floats, 4))

    got = lanes(use, memory=[wide, floats])[0]
    assert got == (2**63 + 1, 3, (4, 5, 6, 7)) and type(got[0]) is u64


@in_simulator
def test_launches_follow_one_another_in_the_simulator() -> None:
    def use(lane: int) -> Any:
        return ptx.begin_next_launch(), ptx.wait_for_launch(), ptx.hand_over(), lane

    assert lanes(use)[31] == (None, None, None, 31)


@in_simulator
def test_a_counter_goes_around() -> None:
    counter = np.zeros(4, u32)
    got = lanes(lambda lane: ptx.atomic_inc_wrap(at(counter), u32(11)), memory=[counter])
    assert got == [i % 12 for i in range(32)] and counter[0] == 32 % 12
    got = lanes(lambda lane: ptx.atomic_add(at(counter, 1), u32(2)), memory=[counter])
    assert got == list(range(0, 64, 2)) and counter[1] == 64
    got = lanes(lambda lane: ptx.atomic_min(at(counter, 1), u32(50 - lane)), memory=[counter])
    assert got == [64, *range(50, 19, -1)] and counter[1] == 19


@in_simulator
def test_arguments_are_cast_as_numba_casts_them_and_bits_are_chosen() -> None:
    same = ptx.permute(np.int64(-1), 0, 0x3210)
    assert same == 0xFFFFFFFF and type(same) is u32
    assert ptx.float_bits(1) == 0x3F800000
    assert ptx.select_bits(u32(0x12345678), u32(0x9ABCDEF0), u32(0xFF00F00F)) == 0x12BC5EF8
    assert ptx.and_or(u32(0x12345678), u32(0xFF00F00F), u32(0x00010200)) == 0x12015208


@in_simulator
def test_a_block_meets_at_syncthreads_and_a_warp_at_syncwarp() -> None:
    for backwards in (False, True):

        def use(lane: int) -> Any:
            words = cuda.shared.array(0, u32)
            words[lane] = lane
            cuda.syncwarp()
            neighbour = words[lane ^ 1]
            cuda.syncthreads()
            return neighbour, words[lane ^ 32]

        wanted = [(lane ^ 1, lane ^ 32) for lane in range(64)]
        assert lanes(use, threads=64, shared=256, backwards=backwards) == wanted


@in_simulator
def test_some_warps_meet_at_a_barrier() -> None:
    def use(lane: int, partner: int) -> Any:
        base = shared_memory()
        ptx.store_shared_u32(base + u32(4 * lane), u32(lane))
        ptx.barrier(u32(1 + lane // 64), u32(64))  # warps 0 and 1, 2 and 3
        return ptx.load_shared_u32(base + u32(4 * (lane ^ partner)))

    def meet(barrier: int, threads: int, lane: int) -> None:
        ptx.barrier(u32(barrier), u32(threads))

    for backwards in (False, True):
        got = lanes(lambda lane: use(lane, 32), threads=128, shared=512, backwards=backwards)
        assert got == [lane ^ 32 for lane in range(128)]
    with pytest.raises(simulatedmemory.Fault, match=r"a race: .* no barrier in between"):
        lanes(lambda lane: use(lane, 64), threads=128, shared=512)
    for given in ((0, 64), (16, 64), (1, 40)):
        with pytest.raises(simulatedmemory.Fault, match="1 to 15, whole warps"):
            lanes(partial(meet, *given), threads=64)


@in_simulator
def test_what_nobody_has_written_is_poison() -> None:
    def use(lane: int) -> Any:
        words = cuda.shared.array(0, u32)
        neighbour = words[lane ^ 1]  # no barrier in between: half of the lanes come too early
        words[lane] = lane
        return neighbour, cuda.local.array(2, f32)

    got = lanes(use, shared=128)
    assert [neighbour for neighbour, _ in got] != [lane ^ 1 for lane in range(32)]
    assert got[0][0] == 0xFFFFFFFF and np.isnan(got[0][1]).all()


FAULTS: dict[str, Callable[[int, Any, Array], Any]] = {
    r"16 bytes at shared address 8: it must be a multiple of 16": (
        lambda lane, base, array: ptx.load_matrix_x4(base + u32(8))
    ),
    r"4 bytes at shared address 512": lambda lane, base, array: ptx.load_shared_u32(
        base + u32(512)
    ),
    r"4 bytes at shared address -4": (
        lambda lane, base, array: ptx.store_shared_u32(base - u32(4), u32(0))
    ),
    r"aligned to 16": lambda lane, base, array: ptx.load_global_u32x4(at(array, 1)),
    r"in no tensor": lambda lane, base, array: ptx.load_global_u32(at(array, 64)),
    r"written while a copy to it is under way": lambda lane, base, array: (
        ptx.copy_16(base + u32(16 * lane), at(array), u32(16)),
        ptx.store_shared_u32(base + u32(16 * lane), u32(0)),
    ),
    r"thread 1: .*written while a copy": (
        lambda lane, base, array: ptx.copy_16(base, at(array), u32(16))
    ),
    r"a race: shared address 0 is written by thread 1, written by thread 0": (
        lambda lane, base, array: ptx.store_shared_u32(base + u32(lane // 2 * 4), u32(0))
    ),
    r"a race: .* is read by several lanes, written by thread 0": lambda lane, base, array: (
        ptx.store_shared_u32(base + u32(16 * lane), u32(0)),
        ptx.load_matrix_x4(base + u32(16 * lane)),
    ),
    r"a race: .* is written by thread 0, read by several lanes": lambda lane, base, array: (
        ptx.load_shared_u32(base),
        ptx.any_lane(u32(0)),
        ptx.store_shared_u32(base, u32(0)) if lane == 0 else None,
    ),
    r"a copy of 20 bytes into 16": lambda lane, base, array: ptx.copy_16(base, at(array), u32(20)),
    r"read as a constant": lambda lane, base, array: (
        ptx.store_global_f32(at(array), f32(0)),
        ptx.load_global_u32(at(array)),
    ),
    r"meet at different instructions: \['ldmatrix.*', 'syncwarp'\]": lambda lane, base, array: (
        cuda.syncwarp() if lane == 7 else ptx.load_matrix_x4(base)
    ),
    r"never come: \{'the end': \[0\], 'syncwarp': \[1, 2,": lambda lane, base, array: (
        cuda.syncwarp() if lane else None
    ),
    r"thread 3: ZeroDivisionError": lambda lane, base, array: 1 // (lane - 3),
}


@in_simulator
def test_what_hardware_would_not_do_is_a_fault() -> None:
    array = np.arange(64, dtype=u32)

    def run(function: Callable[[int, Any, Array], Any]) -> None:
        lanes(lambda lane: function(lane, shared_memory(), array), shared=512, memory=[array])

    for message, function in FAULTS.items():
        with pytest.raises(simulatedmemory.Fault, match=message):
            run(function)


@in_simulator
def test_instructions_need_a_kernel() -> None:
    with pytest.raises(simulatedmemory.Fault, match="run in kernels only"):
        ptx.load_shared_u32(u32(1024))


@in_simulator
def test_an_instruction_without_a_stand_in_is_refused() -> None:
    instruction: Any = ptx.instruction
    with pytest.raises(NotImplementedError, match=r"popc\.b32 has no stand-in"):
        instruction("popc.b32 $0,$1;", "u32", "u32")


@in_simulator
def test_no_stand_in_is_left_over_and_every_instruction_is_tested() -> None:
    take: Any = warpgroup.take_registers
    take(8)
    assert simulated.USED == set(simulated.OPERATIONS)  # what ptx.py lacks it does not import with
    names = {
        name
        for name, value in vars(ptx).items()
        if getattr(value, "__name__", "") == "instruction" and value is not ptx.instruction
    }
    assert len(names) > 40
    files = Path(__file__).parent.glob("test_*instructions.py")
    texts = [file.read_text(encoding="utf-8") for file in files]
    tested = set(re.findall(r"ptx\.(\w+)", "".join(texts)))
    assert names <= tested, f"not tested: {sorted(names - tested)}"
