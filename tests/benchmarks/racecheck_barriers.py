"""Does racecheck of compute-sanitizer follow barriers at which some warps only arrive?

In the kernels for many query heads (decode/wide/, mla/wgmma/) some warps write tiles and others
read them. Between the two are barriers at which one side arrives (`bar.arrive`) and the other side
waits (`bar.sync`). In this program a warp hands one word of each thread to another warp in this
way, and nothing else. There are correct kernels and one with a race. Run it by hand, on a GPU:

    compute-sanitizer --tool racecheck python tests/benchmarks/racecheck_barriers.py sync
    compute-sanitizer --tool racecheck python tests/benchmarks/racecheck_barriers.py arrive
    compute-sanitizer --tool racecheck python tests/benchmarks/racecheck_barriers.py uneven
    compute-sanitizer --tool racecheck python tests/benchmarks/racecheck_barriers.py wrong

    sync     both warps wait at both barriers: correct
    arrive   the writer arrives when words are there, the reader when it has read them, and neither
             waits at its own barrier: correct, as in our kernels
    uneven   one pair of warps meets twice at its barrier, the other pair once. All meet at the
             barrier of the whole block, and each pair reads the other's words: correct
    wrong    as arrive, but the writer writes before the reader has read the words before: a race

If racecheck reports `arrive` or `uneven`, do not trust its reports of kernels with such barriers.
The program itself fails if a word is lost.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from numba import cuda, int32, uint32

from kvquant.kernels.cuda.device.ptx import arrive, barrier

LANES, BLOCK = 32, 128  # threads of a warp, and of the block of `uneven`
ROUNDS, FULL, FREE = 64, 1, 2  # barriers have numbers from 1; 0 is the block's


def make_hand_over(waits: bool, early: bool) -> Any:
    """Make a kernel in which a warp hands words to another one.

    Args:
        waits: both warps wait at both barriers.
        early: the writer overwrites its last words before it waits for the reader: a race.
    """

    def hand_over(out: Any) -> None:
        words = cuda.shared.array(LANES, int32)
        thread = cuda.threadIdx.x
        lane = thread % LANES
        if thread < LANES:
            for at in range(ROUNDS):
                if early:
                    words[lane] = at * LANES + lane
                if at:
                    barrier(uint32(FREE), uint32(2 * LANES))
                if not early:
                    words[lane] = at * LANES + lane
                if waits:
                    barrier(uint32(FULL), uint32(2 * LANES))
                else:
                    arrive(uint32(FULL), uint32(2 * LANES))
        else:
            total = int32(0)
            for at in range(ROUNDS):
                barrier(uint32(FULL), uint32(2 * LANES))
                total += words[LANES - 1 - lane]
                if at < ROUNDS - 1:
                    if waits:
                        barrier(uint32(FREE), uint32(2 * LANES))
                    else:
                        arrive(uint32(FREE), uint32(2 * LANES))
            out[lane] = total

    return cuda.jit(hand_over)


def meet_unevenly(out: Any) -> None:
    """Each of two pairs of warps reads the other's words behind a barrier of the whole block."""
    words = cuda.shared.array(BLOCK, int32)
    thread = cuda.threadIdx.x
    pair = thread // (2 * LANES)
    total = int32(0)
    for _ in range(ROUNDS):
        for _ in range(1 + pair):
            barrier(uint32(pair + 1), uint32(2 * LANES))
        words[thread] = total
        cuda.syncthreads()
        total = words[BLOCK - 1 - thread] + 1
        cuda.syncthreads()
    out[thread] = total


KERNELS = {
    "sync": make_hand_over(True, False),
    "arrive": make_hand_over(False, False),
    "wrong": make_hand_over(False, True),
    "uneven": cuda.jit(meet_unevenly),
}


def main() -> None:
    """Run one kernel, and check its sums."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernel", choices=KERNELS)
    name = parser.parse_args().kernel
    if name == "uneven":
        threads, right = BLOCK, np.full(BLOCK, ROUNDS)
    else:
        threads = 2 * LANES
        right = ROUNDS * (ROUNDS - 1) // 2 * LANES + ROUNDS * (LANES - 1 - np.arange(LANES))
    out = cuda.device_array(len(right), np.int32)
    KERNELS[name][1, threads](out)
    found = out.copy_to_host()
    print(f"{name}: {'right' if (found == right).all() else 'WRONG'}")
    if name != "wrong" and (found != right).any():
        raise SystemExit(1)


if __name__ == "__main__":
    main()
