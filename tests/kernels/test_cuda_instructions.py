"""Every PTX instruction's stand-in against numpy, in numba's simulator: a process of its own."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="needs the cuda extra: numba-cuda"
)
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
if SIMULATED:
    from numba import cuda

    from kvquant.kernels.cuda import ptx, simulated, simulatedmemory, simulator

f32, u32, u64 = np.float32, np.uint32, np.uint64
Array = npt.NDArray[Any]


@functools.cache
def run_in_simulator() -> tuple[set[str], str]:
    """Run this file with the simulator on: the tests that pass, and all that pytest says."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return set(re.findall(r"::(\w+) PASSED", done.stdout)), done.stdout + done.stderr


def in_simulator(test: Callable[[], None]) -> Callable[[], None]:
    """Run a test there: numba reads NUMBA_ENABLE_CUDASIM once, when it is imported."""

    @functools.wraps(test)
    def delegated() -> None:
        passed, log = run_in_simulator()
        assert test.__name__ in passed, log

    return test if SIMULATED else delegated


def lanes(
    function: Callable[[int], Any],
    *,
    threads: int = 32,
    shared: int = 0,
    memory: Sequence[Array] = (),
    backwards: bool = False,
) -> list[Any]:
    """What a function gives in every thread of a block, which run together."""
    results: list[Any] = [None] * threads

    def kernel() -> None:
        lane = cuda.threadIdx.x
        results[lane] = function(lane)

    spans = [(array.ctypes.data, array.nbytes) for array in memory]
    simulator.launch(kernel, (1, 1, 1), threads, shared, (), spans, backwards=backwards)
    return results


def shared_memory() -> Any:
    """The address of the block's dynamic shared memory."""
    return ptx.shared_address(cuda.shared.array(0, u32))


def at(array: Array, index: int = 0) -> Any:
    """The address of an element in global memory."""
    return u64(array.ctypes.data + index * array.itemsize)


def word(low: Any, high: Any) -> Any:
    """A register of two 16-bit numbers."""
    return np.array([low, high]).view(u32)[0]


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
def test_mma_f16() -> None:
    check_mma(ptx.mma_f16, lambda x: x.astype(np.float16).view(np.uint16))


@in_simulator
def test_mma_bf16() -> None:
    check_mma(ptx.mma_bf16, lambda x: (x.view(u32) >> 16).astype(np.uint16))


@in_simulator
def test_mma_takes_codes_as_subnormals() -> None:
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
    assert lanes(lambda i: ptx.exchange(f32(i), u32(5))) == [i ^ 5 for i in range(32)]
    assert lanes(lambda i: ptx.from_lane(f32(i), u32(31 - i))) == [31 - i for i in range(32)]
    assert lanes(lambda i: ptx.word_from_lane(u32(i), u32(i // 2))) == [i // 2 for i in range(32)]
    assert lanes(lambda i: ptx.any_lane(u32(i == 9))) == [1] * 32
    assert lanes(lambda i: ptx.any_lane(u32(0))) == [0] * 32


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
        ptx.store_shared_f32x4(mine + u32(32), (f32(5), f32(6), f32(7), f32(lane)))
        assert ptx.load_shared_f32x4(mine + u32(32)) == (5, 6, 7, lane)
        return fresh, ptx.load_shared_u32(mine), ptx.load_shared_f32x4(mine)[1:], words

    for lane, (fresh, seven, floats, words) in enumerate(lanes(use, shared=2048)):
        assert np.isnan(fresh) and seven == 7
        assert floats == (lane + 0.5, 2, 3) and words == (4, 5, 6, lane)
        assert {type(x) for x in floats} == {f32} and {type(x) for x in words} == {u32}


@in_simulator
def test_global_memory() -> None:
    source, target = np.arange(4, dtype=u32), np.zeros(12, f32)

    def use(lane: int) -> Any:
        if lane:
            return None
        one, two = ptx.load_global_u32(at(source, 1)), ptx.load_global_u32x2(at(source, 2))
        ptx.store_global_f32(at(target, 0), f32(5))
        ptx.store_global_u32x2(at(target, 2), u32(0x3F800000), u32(0x40000000))
        ptx.store_global_f32x4(at(target, 4), (f32(6), f32(7), f32(8), f32(9)))
        ptx.fence()
        written = ptx.load_written_f32(at(target)), ptx.load_written_f32x4(at(target, 4))
        return one, two, ptx.load_global_u32x4(at(source)), written

    got = lanes(use, memory=[source, target])[0]
    assert got == (1, (2, 3), (0, 1, 2, 3), (5, (6, 7, 8, 9)))
    assert target.tolist() == [5, 0, 1, 2, 6, 7, 8, 9, 0, 0, 0, 0]


@in_simulator
def test_a_counter_goes_around() -> None:
    counter = np.zeros(4, u32)
    got = lanes(lambda lane: ptx.count_around(at(counter), u32(11)), memory=[counter])
    assert got == [i % 12 for i in range(32)] and counter[0] == 32 % 12


@in_simulator
def test_floats_become_16_bits_by_rounding_to_even() -> None:
    random = torch.randn(512) * torch.logspace(-9, 9, 512)
    ties = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 65519.0, 65520.0])
    rare = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 3.4e38, 2.0**-25, 3 * 2.0**-25, 1e-40])
    x = torch.cat([random, ties, rare])
    for pack, dtype in ((ptx.pack_f16, torch.float16), (ptx.pack_bf16, torch.bfloat16)):
        wanted = x.to(dtype).view(torch.int16).numpy().view(np.uint16)
        with np.errstate(over="ignore"):
            got = np.array([pack(f32(1), value) for value in x.numpy()], u32).view(np.uint16)
        np.testing.assert_array_equal(got[0::2], wanted)
        assert set(got[1::2].tolist()) == {0x3C00 if dtype == torch.float16 else 0x3F80}
        assert pack(f32(np.nan), f32(0)) >> 16 & 0x7FFF > 0x7C00


@in_simulator
def test_16_bits_become_floats() -> None:
    halves = word(np.float16(-1.5), np.float16(2.0**-24))
    assert (ptx.low_f16(halves), ptx.high_f16(halves)) == (-1.5, 2.0**-24)
    brains = u32(0x3FC0C000)
    assert (ptx.low_bf16(brains), ptx.high_bf16(brains)) == (-2, 1.5)
    assert {type(f(brains)) for f in (ptx.low_f16, ptx.high_f16, ptx.low_bf16)} == {f32}


@in_simulator
def test_pairs_of_f16() -> None:
    x = word(np.float16(3), np.float16(np.nan))
    y = word(np.float16(1 / 3), np.float16(2))
    product = np.float16(3) * np.float16(1 / 3)
    assert ptx.multiply_f16(x, y) & 0xFFFF == product.view(np.uint16)
    third = ptx.multiply_f16(y, y)
    lost = np.array([ptx.lost_f16(y, y, third)], np.uint32).view(np.float16).astype(np.float64)
    kept = np.array([third], np.uint32).view(np.float16).astype(np.float64)
    exact = np.array([y], np.uint32).view(np.float16).astype(np.float64) ** 2
    assert lost[0] != 0 and list(kept + lost) == list(exact)
    assert ptx.maximum_f16(x, y) == word(np.float16(3), np.float16(2))
    numbers = [word(np.float16(1), np.float16(2)), word(np.float16(2), np.float16(3))]
    assert [ptx.reaches_f16(a, b) for a in numbers for b in numbers] == [1, 0, 1, 1]
    assert [ptx.reaches_f16(a, b) for a in (x, y) for b in (x, y)] == [1, 1, 0, 1]


@in_simulator
def test_functions_of_floats() -> None:
    assert [ptx.exp2(f32(x)) for x in (-2, 0.5, -130, -np.inf)] == [0.25, f32(2) ** f32(0.5), 0, 0]
    with np.errstate(divide="ignore"):
        logs = [ptx.log2(f32(x)) for x in (8, 0, 1e-40)]
    assert logs == [3, -np.inf, -np.inf]
    assert [ptx.maximum(f32(x), f32(1)) for x in (2, 0, np.nan)] == [2, 1, 1]
    assert type(ptx.exp2(f32(1))) is type(ptx.log2(f32(1))) is f32


@in_simulator
def test_bits_are_kept() -> None:
    assert ptx.float_bits(f32(1)) == 0x3F800000 and type(ptx.float_bits(f32(1))) is u32
    assert ptx.bits_float(u32(0x40000000)) == 2 and type(ptx.bits_float(u32(0))) is f32
    assert ptx.opaque(u32(12)) == 12


@in_simulator
def test_arguments_are_cast_as_numba_casts_them() -> None:
    assert ptx.opaque(np.int64(-1)) == 0xFFFFFFFF and type(ptx.opaque(3)) is u32
    assert ptx.float_bits(1) == 0x3F800000


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
def test_no_stand_in_is_left_over_and_every_instruction_is_tested_here() -> None:
    assert simulated.USED == set(simulated.OPERATIONS)  # what ptx.py lacks it does not import with
    names = {
        name
        for name, value in vars(ptx).items()
        if getattr(value, "__name__", "") == "instruction" and value is not ptx.instruction
    }
    assert len(names) > 40
    tested = set(re.findall(r"ptx\.(\w+)", Path(__file__).read_text(encoding="utf-8")))
    assert names <= tested, f"not tested: {sorted(names - tested)}"
