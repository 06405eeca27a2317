"""Does racecheck of compute-sanitizer follow barriers at which some warps only arrive?

The kernels for many query heads (decode/wide/, mla/wgmma/) hand tiles from warps that write to
warps that read: `bar.arrive` by the one, `bar.sync` by the other. This program has nothing but such
a hand-over of one word a thread, right and wrong. Run it by hand, on a GPU:

    compute-sanitizer --tool racecheck python tests/benchmarks/racecheck_barriers.py sync
    compute-sanitizer --tool racecheck python tests/benchmarks/racecheck_barriers.py arrive
    compute-sanitizer --tool racecheck python tests/benchmarks/racecheck_barriers.py uneven
    compute-sanitizer --tool racecheck python tests/benchmarks/racecheck_barriers.py wrong

    sync     both warps wait at both barriers: right
    arrive   who only gives arrives without waiting: right, as in our kernels
    uneven   a pair of warps meets twice as often as the other pair before the barrier of the whole
             block, and then they read one another's words: right
    wrong    as arrive, but the writer writes before it waits until its last words are read: a race

If the tool reports `arrive` or `uneven`, its reports of such kernels are worth nothing. The program
itself fails if a word is lost.
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
    """A warp hands words to another one. `waits`: both wait at both barriers; `early`: the writer
    writes before it waits until its last words are read."""

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
    """Two pairs of warps, whose words the other pair reads behind a barrier of the block."""
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
    """Run one of them, and check what it has added up."""
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
