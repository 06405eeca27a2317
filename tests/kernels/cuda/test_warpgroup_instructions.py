"""What warpgroups have of their own on Hopper, in numba's simulator: products against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from in_simulator import SIMULATED, in_simulator, lanes

pytestmark = pytest.mark.extra("cuda")
if SIMULATED:
    from memory import Fault
    from numba import cuda

    from kvquant.kernels.cuda.device import ptx, warpgroup

u32, f32 = np.uint32, np.float32
GROUP, BLOCK = 128, 8192
Array = npt.NDArray[Any]


def in_blocks(matrix: Array) -> Array:
    """A matrix of 64 rows of fp16 as blocks of 64 elements, swizzled, as words."""
    units = matrix.astype(np.float16).view(np.uint8).reshape(64, -1, 8, 16)
    found = np.empty((units.shape[1], 64, 8, 16), np.uint8)
    for row in range(64):
        for unit in range(8):
            found[:, row, unit ^ (row % 8)] = units[row, :, unit]
    return found.view(u32).reshape(-1)


def multiply(a: Array, b: Array, steps: Any, begin: bool, transposed: bool, columns: int) -> Array:
    """A, and behind it B, in shared memory; sums begin with 1, but where they are overwritten."""
    words = np.concatenate([in_blocks(a), in_blocks(b)])
    make: Any = warpgroup.make_products
    products = make("fp16", columns, steps, begin=begin, transposed=transposed)

    def run(lane: int) -> Any:
        base = ptx.shared_address(cuda.shared.array(0, u32))
        for i in range(lane, len(words), GROUP):
            ptx.store_shared_u32(base + u32(4 * i), words[i])
        ptx.fence_shared()
        cuda.syncthreads()
        sums = cuda.local.array(columns // 2, f32)
        for i in range(columns // 2):
            sums[i] = f32(1)
        at_b = u32(base + u32(4 * len(in_blocks(a))))
        products(sums, warpgroup.descriptor_of(base), warpgroup.descriptor_of(at_b))
        return sums.copy()

    found = np.empty((64, columns), f32)
    for lane, sums in enumerate(lanes(run, threads=GROUP, shared=4 * len(words))):
        warp, g, t = lane // 32, lane % 32 // 4, lane % 4
        for i, value in enumerate(sums):
            row = 16 * warp + g + 8 * (i // 2 % 2)
            found[row, 8 * (i // 4) + 2 * t + i % 2] = value
    return found


@in_simulator
def test_products_are_those_of_matrices() -> None:
    random = np.random.default_rng(0)
    a, b = (random.integers(-8, 8, (64, 128)).astype(f32) for _ in range(2))
    steps = [
        (0, BLOCK * block + 32 * k, BLOCK * block + 32 * k) for block in (0, 1) for k in range(4)
    ]
    for begin in (True, False):
        found = multiply(a, b, steps, begin, False, 64)
        np.testing.assert_array_equal(found, a @ b.T + (not begin))


@in_simulator
def test_products_with_a_matrix_in_registers() -> None:
    random = np.random.default_rng(0)
    a = random.integers(-8, 8, (64, 32)).astype(f32)
    b = random.integers(-8, 8, (64, 64)).astype(f32)
    words = in_blocks(b)
    steps = [(0, 4 * k, 32 * k) for k in range(2)]
    make: Any = warpgroup.make_register_products
    products = make("fp16", 64, steps)

    def run(lane: int) -> Any:
        base = ptx.shared_address(cuda.shared.array(0, u32))
        for i in range(lane, len(words), GROUP):
            ptx.store_shared_u32(base + u32(4 * i), words[i])
        ptx.fence_shared()
        cuda.syncthreads()
        row, k = 16 * (lane // 32) + lane % 32 // 4, 2 * (lane % 4)
        corners = [
            (row + 8 * i, k + 16 * n + 8 * j) for n in (0, 1) for j in (0, 1) for i in (0, 1)
        ]
        of_a = [a[i, j : j + 2].astype(np.float16).view(u32)[0] for i, j in corners]
        sums = cuda.local.array(32, f32)
        sums[:] = f32(1)
        products(sums, np.array(of_a, u32), warpgroup.descriptor_of(base))
        return sums.copy()

    found = np.empty((64, 64), f32)
    for lane, sums in enumerate(lanes(run, threads=GROUP, shared=4 * len(words))):
        for i, value in enumerate(sums):
            row = 16 * (lane // 32) + lane % 32 // 4 + 8 * (i // 2 % 2)
            found[row, 8 * (i // 4) + 2 * (lane % 4) + i % 2] = value
    np.testing.assert_array_equal(found, a @ b[:, :32].T + 1)


@in_simulator
def test_products_with_rows_that_stand_as_rows() -> None:
    """As V: 64 tokens, which are K, of 128 elements."""
    random = np.random.default_rng(0)
    p = random.integers(-8, 8, (64, 64)).astype(f32)
    v = random.integers(-8, 8, (64, 128)).astype(f32)
    steps = [(0, 32 * k, 2048 * k) for k in range(4)]
    np.testing.assert_array_equal(multiply(p, v, steps, False, True, 128), p @ v + 1)


@in_simulator
def test_what_is_written_is_seen_behind_a_fence() -> None:
    make: Any = warpgroup.make_products
    products = make("fp16", 8, [(0, 0, 0)], begin=True)

    def run(lane: int) -> None:
        base = ptx.shared_address(cuda.shared.array(0, u32))
        for i in range(lane, 2048, GROUP):
            ptx.store_shared_u32(base + u32(4 * i), u32(0))
        cuda.syncthreads()
        sums = cuda.local.array(4, f32)
        products(sums, warpgroup.descriptor_of(base), warpgroup.descriptor_of(base))

    with pytest.raises(Fault, match=r"wgmma reads shared address \d+, .* without fence"):
        lanes(run, threads=GROUP, shared=BLOCK)


@in_simulator
def test_all_warps_of_a_warpgroup_read_a_tile() -> None:
    """Who overwrites it has to meet all of them, not only one."""
    make: Any = warpgroup.make_products
    products = make("fp16", 8, [(0, 0, 0)], begin=True)

    def run(lane: int, met: int) -> None:
        base = ptx.shared_address(cuda.shared.array(0, u32))
        for i in range(lane, 2048, GROUP):
            ptx.store_shared_u32(base + u32(4 * i), u32(0))
        ptx.fence_shared()
        cuda.syncthreads()
        sums = cuda.local.array(4, f32)
        products(sums, warpgroup.descriptor_of(base), warpgroup.descriptor_of(base))
        if lane < 32 or lane >= GROUP + 32 - met:
            ptx.barrier(u32(1), u32(met))
        if lane < 32:
            ptx.store_shared_u32(base + u32(4 * lane), u32(1))

    lanes(lambda lane: run(lane, GROUP), threads=GROUP, shared=BLOCK)
    for backwards in (False, True):
        with pytest.raises(Fault, match=r"a race: .* no barrier in between"):
            lanes(lambda lane: run(lane, 64), threads=GROUP, shared=BLOCK, backwards=backwards)


@in_simulator
def test_who_arrives_at_a_barrier_goes_on() -> None:
    """Warp 0 writes for warp 1, which waits; the other way round nothing is known."""

    def use(lane: int, back: bool) -> Any:
        base = ptx.shared_address(cuda.shared.array(0, u32))
        if lane < 32:
            ptx.store_shared_u32(base + u32(4 * lane), u32(lane))
            ptx.arrive(u32(1), u32(64))
            return ptx.load_shared_u32(base + u32(4 * lane + 128)) if back else None
        ptx.store_shared_u32(base + u32(4 * lane), u32(lane))
        ptx.barrier(u32(1), u32(64))
        return ptx.load_shared_u32(base + u32(4 * (lane - 32)))

    for backwards in (False, True):
        got = lanes(lambda lane: use(lane, False), threads=64, shared=256, backwards=backwards)
        assert got[32:] == list(range(32))
    with pytest.raises(Fault, match=r"a race: .* no barrier in between"):
        lanes(lambda lane: use(lane, True), threads=64, shared=256, backwards=True)


@in_simulator
def test_a_barrier_that_too_many_come_to_is_a_fault() -> None:
    def run(lane: int) -> None:
        ptx.arrive(u32(1), u32(96 if lane < 64 else 64))

    with pytest.raises(Fault, match="barrier 1: 96 threads come, of 64"):
        lanes(run, threads=96, shared=128)


@in_simulator
def test_registers_are_shared_out_by_whole_warps() -> None:
    give: Any = warpgroup.give_registers
    take: Any = warpgroup.take_registers

    def run(lane: int) -> int:
        give(96)()
        take(160)()
        return lane

    assert lanes(run, threads=GROUP) == list(range(GROUP))


@in_simulator
def test_prefetch_and_four_numbers_of_e4m3() -> None:
    array = np.zeros(64, u32)

    def run(lane: int) -> Any:
        ptx.prefetch(np.uint64(array.ctypes.data + 4 * lane))
        return ptx.unpack_four_e4m3(u32(0xB8_38_7E_01))  # -1, 1, 448, 2**-9

    pair = lanes(run, memory=[array])[0]
    values = np.array(pair, u32).view(np.float16)
    assert values.tolist() == [2.0**-9, 448.0, 1.0, -1.0]
    with pytest.raises(Fault, match="in no tensor"):
        lanes(lambda lane: ptx.prefetch(np.uint64(array.ctypes.data + 256)), memory=[array])
