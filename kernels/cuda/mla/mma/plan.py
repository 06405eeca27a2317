"""How many teams and stages the blocks of the kernel for few heads have.

An SM has registers for three teams of 16 columns, or two of 32. Three teams are three blocks, which
leave fewer SMs idle. With few tokens an SM one or two teams are faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...runtime.launch import GPU
from .spec import MlaSpec

# teams and stages, by the blocks of 16 columns that a team has; the first that fits is taken. Two
# stages leave rows on their way for half of the time only
SHAPES = {
    1: ((2, 3), (1, 5), (1, 4), (1, 3), (2, 2), (1, 2)),
    2: ((2, 3), (2, 2), (1, 3), (1, 2)),
}
# stages at most for segments of so few tokens, such as sinks and recent tokens: they leave shared
# memory to the launch before, beside which they run
SHORT, FEW_STAGES = 256, 3
APART = 1, 3  # the shape of blocks of one team
# of their threads, at most on sm_90: an SM holds three. Kernels for several queries take more, and
# some on sm_100. Then an SM holds two
APART_REGISTERS = 168
# Up to ONE tokens for each SM one team is the fastest, up to TWO two teams are (H200, 2026-11-27,
# scratch: 13 shapes of three formats). With three teams more parts are combined, and each costs as
# much time as PART tokens of an SM: TWO grows by that
ONE_OF_16, TWO_OF_16, PART = 64, 900, 2.5
ONE_OF_32 = 300


def teams_of(blocks: int, units: int, capacity: int, sm_count: int) -> int:
    """Teams of an SM that are the fastest.

    blocks: 16 columns each that a team has: 1 or 2. units: sequences times blocks of columns.
    capacity: the most tokens of a sequence.
    """
    limits = (ONE_OF_16, TWO_OF_16 + PART * 3 * sm_count / units) if blocks == 1 else (ONE_OF_32,)
    return 1 + sum(units * capacity / sm_count > most for most in limits)


def shapes_of(spec: MlaSpec, gpu: GPU, teams: int, capacity: int) -> Iterator[MlaSpec]:
    """The kernels for a segment that fit a GPU, the best first, with at most `teams` teams in a
    block and the spec's columns. With three teams three blocks of one come first."""
    for blocks in range(spec.blocks, 0, -1):
        apart = replace(spec, blocks=blocks, teams=APART[0], stages=APART[1])
        room = gpu.blocks_per_sm(apart.warps, APART_REGISTERS, apart.shared_bytes)
        if 2 < teams <= room and not spec.causal:
            yield apart
        for count, stages in SHAPES[blocks]:
            found = replace(spec, blocks=blocks, teams=count, stages=stages)
            if count > teams or (stages > FEW_STAGES and capacity <= SHORT):
                continue
            if found.shared_bytes <= gpu.shared_per_block:
                yield found
