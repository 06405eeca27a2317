"""Choose how a decode kernel cuts its work: splits of each segment, warps and stages of a block.

The host knows shapes and never lengths. The table of measured plans decides where it has a row for
the GPU and the formats (as the dataflow of FlashDecoding++, https://arxiv.org/abs/2311.01282), else
the plan with the lowest weighted price in microseconds (FILLED).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvquant.errors import UnsupportedError
from kvquant.rows.segment import Segment

from ..runtime.launch import GPU, QUARTERS, REGISTERS_PER_QUARTER, RESERVED_SHARED
from .spec import TILE, UNIT_STEPS, WIDE_GROUPS, DecodeSpec
from .tuned import Tuned, lookup

# rings that a block may have, and stages of a ring, the preferred first
RINGS, STAGES = (1, 2, 4, 8), (2, 3, 4)
REGISTERS = {
    64: 112,
    128: 144,
    256: 248,
    512: 255,
}  # of a thread, by head_dim, before it is compiled
REGISTERS_OF_GROUPS = 176  # of one whose rows have more than WIDE_GROUPS groups
MOST_REGISTERS = 255  # of any thread, and of one whose warp has 16 columns
# Constants of prices, whose times are microseconds: fitted to times of an H200 (kernels/FACTS.md,
# "Launch plans")
READ = 0.9  # share of the bandwidth by clock and bus that reads reach
SHARE = 4814 / 132  # GB/s for an SM of an H200; taken for GPUs whose bandwidth is not known
# with b blocks on an SM, each of which reads k KiB of K at once, reads take longer by
# SCATTER * b ** OF_BLOCKS / k ** OF_KIB
SCATTER, OF_BLOCKS, OF_KIB = 0.22, 0.4, 0.65
# with fewer KiB of loads in flight on an SM, reads take longer by this factor; counted for splits
# of so many tiles, the only ones that were measured
IN_FLIGHT, FEW_IN_FLIGHT, MANY_TILES = 32, 1.08, 512
TILE_TIME, WARP_TIME = 0.5, 0.07  # of a warp for a tile, and what each warp of the SM adds to it
EIGHT_TIME = {1: 1.0, 2: 1.2}  # times as long, with so many eights of columns
MANY_GROUPS = 1.6  # times as long, with rows of more than WIDE_GROUPS groups
START = 3.5  # a block starts and ends
LAST = 0.37  # share of a block's time: after several waves SMs wait so long for the last block
MERGE, MERGE_KIB = 2.2, 0.022  # the last block of a unit merges parts; each KiB of them
MOST_OTHERS = 16  # the most splits of a segment that is not the first
MOST_WAVES = 16  # of whole units: more of them even out by themselves
LONGEST_LINE = 1 << 31  # steps
SHORT = 4  # steps of a sequence up to which no length is worth it
# Up to FEW_TILES tiles a sequence kernels of one warp are considered. Up to MORE_TILES they are
# where all units run at a time. With longer sequences several warps were faster (scratch, H200,
# 2026-11-27)
FEW_TILES, MORE_TILES = 4, 32
# The host does not know lengths. So a plan is priced for sequences that fill these parts of their
# capacity, with these weights. Not all of it: caches have some rows more than their sequences, and
# a split that takes one step more for those rows would look too slow
FILLED = {31 / 32: 1.0, 1 / 8: 0.4, 1 / 64: 0.15}
MOST_TILES = 1 << 30
# of a kernel for wide groups: the least tokens of a split, the tokens that a block could do in the
# time of its start and merge, and waves of blocks (kernels/FACTS.md has what they follow from)
LEAST, STARTING, WIDE_WAVES = 512, 400, 4
# share of the GPU's time that must go to tokens: with up to so many columns, and with more
FEW_COLUMNS, BUSY, BUSY_OF_MANY = 32, 0.8, 0.6


@dataclass(frozen=True)
class Plan:
    """How a launch cuts its work.

    Attributes:
        splits: of each segment: blocks that share the tokens of a unit.
        warps, stages: warps of a block; tiles of K and V in a warp's ring.
        workers: blocks that share the work where lengths differ (schedule.py); 0: even division.
    """

    splits: tuple[int, ...]
    warps: int
    stages: int
    workers: int = 0


@dataclass(frozen=True)
class Fit:
    """A kernel on a GPU.

    Attributes:
        blocks: that an SM holds at a time; 0 if none fits.
        slots: blocks that the GPU holds at a time.
        steps: tokens of a tile of every warp, in the first segment and in the others.
        most_parts: splits of all segments that the merge has room for.
        token_bytes: K and V of a token in the first segment, and in the others.
        share: bytes that an SM reads in a microsecond while all do.
    """

    spec: DecodeSpec
    gpu: GPU
    blocks: int
    slots: int
    steps: tuple[int, int]
    most_parts: int
    token_bytes: tuple[int, int]
    share: float

    def reading(self, blocks: int, nbytes: int, tiles: int = MOST_TILES, segment: int = 0) -> float:
        """Microseconds in which an SM reads and computes splits of so many bytes and tiles."""
        spec, tile_bytes = self.spec, TILE * self.token_bytes[min(segment, 1)]
        rings = min(spec.warps // spec.sharers, tiles)  # those of a block that have any
        tile = (TILE_TIME + WARP_TIME * blocks * rings * spec.sharers) * EIGHT_TIME[spec.eights]
        if spec.first.k_format.groups > WIDE_GROUPS:
            tile *= MANY_GROUPS
        together = rings * tile_bytes / 2 / 1024  # of K, or of V
        scattered: float = 1 + SCATTER * blocks**OF_BLOCKS / together**OF_KIB
        if tiles >= MANY_TILES and 2 * together * blocks * (spec.stages - 1) < IN_FLIGHT:
            scattered *= FEW_IN_FLIGHT
        by_memory = blocks * nbytes * scattered / self.share
        return max(nbytes / (rings * tile_bytes) * tile, by_memory)

    def load(self, segment: int, capacity: int, splits: int) -> int:
        """Bytes of the longest split of a segment."""
        step = self.steps[min(segment, 1)]
        tokens = -(-capacity // (splits * step)) * step
        return min(tokens, capacity) * self.token_bytes[min(segment, 1)]


@functools.lru_cache(1024)
def fit(spec: DecodeSpec, gpu: GPU, registers: int | None = None) -> Fit:
    """How a kernel, with its warps and stages, fits a GPU."""
    if registers is None:
        widest = max(spec.first.k_format.head_dim, spec.first.v_format.head_dim)
        registers = next(number for most, number in REGISTERS.items() if widest <= most)
        if spec.first.k_format.groups > WIDE_GROUPS:
            registers = max(registers, REGISTERS_OF_GROUPS)
        if spec.eights > 1:
            registers = MOST_REGISTERS
        registers = min(registers, spec.most_registers or registers)
        if spec.is_wide:  # compiled for its number of threads
            share = QUARTERS * REGISTERS_PER_QUARTER // spec.threads // 8 * 8
            registers = min(share, MOST_REGISTERS)
    blocks = gpu.blocks_per_sm(spec.warps, registers, spec.shared_bytes)
    first, second = (
        path.k_format.row_bytes + path.v_format.row_bytes
        for path in (spec.first, spec.second or spec.first)
    )
    return Fit(
        spec=spec,
        gpu=gpu,
        blocks=blocks,
        slots=blocks * gpu.sm_count,
        steps=spec.steps,
        most_parts=spec.most_parts,
        token_bytes=(first, second),
        share=1e3 * READ * (gpu.bandwidth / gpu.sm_count or SHARE),
    )


def stages_of(spec: DecodeSpec) -> tuple[int, ...]:
    """Stages that a ring may have, the preferred first: more where there are fewer rings."""
    if spec.sharers == 1:
        return STAGES
    preferred = min(STAGES) + min(spec.sharers, 4) - 1
    return (*range(preferred, preferred + len(STAGES)), *range(preferred - 1, min(STAGES) - 1, -1))


def narrow(spec: DecodeSpec, gpu: GPU) -> DecodeSpec:
    """The kernel with no more warps that share a ring than a block of the GPU has memory for."""
    for blocks in range(1, spec.sharers):
        sharers = -(-spec.sharers // blocks)
        smallest = replace(spec, sharers=sharers, warps=sharers, stages=min(STAGES))
        if fit(smallest, gpu).blocks:
            return replace(spec, sharers=sharers)
    return replace(spec, sharers=1)


def crowd(spec: DecodeSpec, gpu: GPU, units: int) -> DecodeSpec:
    """The kernel with few registers a thread, where an SM then holds more warps and has work for
    them. With few units it may lose: 8 of 8,192 tokens took an H200 up to 1.46 times as long
    (scratch, 2026-11-30)."""
    if not (spec.may_be_crowded and 2 * units >= gpu.sm_count):
        return spec
    small = replace(spec, warps=4, stages=min(STAGES))
    few = replace(small, crowded=True)
    return replace(spec, crowded=fit(few, gpu).blocks > fit(small, gpu).blocks)


def _rings_of(spec: DecodeSpec) -> tuple[int, ...]:
    """Rings that a block may have. With a second segment a crowded kernel of 8 took an H200 up to
    1.07 times as long as one of 4 (256 units of 4,096 tokens, scratch, 2026-11-30)."""
    return RINGS[:-1] if spec.crowded and spec.second else RINGS


def plan(
    spec: DecodeSpec,
    gpu: GPU,
    units: int,
    capacities: Sequence[int],
    num_splits: int | None = None,
    rows: Iterable[Tuned] = (),
    registers: int | None = None,
) -> Plan:
    """Choose a plan.

    Args:
        spec: the kernel; its warps and stages do not count, unless registers are given.
        units: sequences times KV heads times blocks of query heads that share one.
        capacities: the most tokens of each segment, that of spec.first first; at least 1.
        num_splits: splits of the first segment, if the caller wants so many.
        rows: the table of measured plans.
        registers: of a thread, once it is compiled: warps and stages stay where a block fits.

    Raises:
        UnsupportedError: the smallest block does not fit into the GPU's shared memory.
    """
    if spec.is_wide:
        return _plan_wide(fit(spec, gpu, registers), units, capacities, num_splits)
    row = lookup(rows, gpu.name, *formats_of_rows(spec), units, capacities[0], spec.block_columns)
    if row is not None and not (
        row.warps in [rings * spec.sharers for rings in _rings_of(spec)]
        and row.stages in stages_of(spec)
        and fit(replace(spec, warps=row.warps, stages=row.stages), gpu).blocks
    ):
        row = None  # made by another version, or another segment needs more room
    exact = row is not None and len(capacities) == 1 and row.units == units
    if row is not None and exact and num_splits is None:
        num_splits = row.splits
    compiled = fit(spec, gpu, registers) if registers is not None else None
    if compiled is not None and compiled.blocks:
        choice: tuple[Fit, ...] = (compiled,)
    elif row is not None and compiled is None:
        choice = (fit(replace(spec, warps=row.warps, stages=row.stages), gpu),)
    else:
        found, tiles = kernels(spec, gpu, registers), capacities[0] / TILE
        several = tuple(
            one
            for one in found
            if one.spec.warps > 1 or tiles <= (MORE_TILES if units <= one.slots else FEW_TILES)
        )
        choice = several or found
    return _by_formula(choice, units, tuple(capacities), num_splits)


def pays(spec: DecodeSpec, gpu: GPU, units: int, columns: int, segments: Sequence[Segment]) -> bool:
    """Whether the kernel for wide groups `spec` keeps the GPU busy enough to be the faster one.

    units: as in plan. columns: of a KV head. segments: what is attended to.
    """
    kernel, capacity = fit(spec, gpu), sum(one.capacity for one in segments)
    if not kernel.slots:
        return False
    tokens = units * capacity / kernel.slots
    share = BUSY if columns <= FEW_COLUMNS else BUSY_OF_MANY
    best = min(
        _price_of_wide(kernel, units, capacity, n) for n in _wide_splits(kernel, units, capacity)
    )
    return tokens >= share * best


def _plan_wide(kernel: Fit, units: int, capacities: Sequence[int], num_splits: int | None) -> Plan:
    """Splits of a kernel for wide groups: those with the lowest price."""
    wanted = num_splits or min(
        _wide_splits(kernel, units, capacities[0]),
        key=lambda n: _price_of_wide(kernel, units, capacities[0], n),
    )
    count = useful_splits(kernel, capacities, wanted, even=num_splits is None)
    return Plan((count,), kernel.spec.warps, kernel.spec.stages)


def _wide_splits(kernel: Fit, units: int, capacity: int) -> list[int]:
    """The splits that a kernel for wide groups may have: they fill the GPU once or a few times."""
    most = max(min(capacity // LEAST, kernel.most_parts), 1)
    counts = (waves * kernel.slots // units for waves in range(1, WIDE_WAVES + 1))
    return sorted({min(max(count, 1), most) for count in counts})


def _price_of_wide(kernel: Fit, units: int, capacity: int, splits: int) -> float:
    """What a launch of such a kernel costs, in tokens that a block attends to meanwhile."""
    waves = math.ceil(units * splits / kernel.slots)
    return waves * (capacity / splits + STARTING)


@functools.lru_cache(256)
def kernels(spec: DecodeSpec, gpu: GPU, registers: int | None = None) -> tuple[Fit, ...]:
    """The kernels that the formula chooses from, each with as many stages as cost no neighbour.

    registers: of a thread, where one of them is compiled. UnsupportedError if none fits the GPU.
    """
    if spec.is_wide:
        return (fit(spec, gpu, registers),)
    found = []
    for rings in _rings_of(spec):
        sizes = [(rings * spec.sharers, stages) for stages in stages_of(spec)]
        specs = [replace(spec, warps=warps, stages=stages) for warps, stages in sizes]
        fits = [fit(one, gpu, registers) for one in specs]
        best = max(fits, key=lambda one: one.blocks)  # the first of equals
        if best.blocks:
            found.append(best)
    if not found:
        smallest = replace(spec, warps=spec.sharers, stages=min(STAGES))
        largest = max(spec.paths, key=smallest.ring_bytes)
        advice = "use formats with fewer bytes"
        if largest is spec.second:
            advice = "keep no sinks and recent tokens in 16 bit (sink_len=0, recent_len=0)"
        raise UnsupportedError(
            f"K in {largest.k_format} and V in {largest.v_format} take {smallest.shared_bytes} "
            f"bytes of shared memory in the smallest kernel, a block has {gpu.shared_per_block} on "
            f"{gpu.name}: {advice}, or backend='reference'"
        )
    return tuple(found)


def price(kernel: Fit, units: int, capacities: Sequence[int], splits: Sequence[int]) -> float:
    """Microseconds of a launch with these splits of each segment, by the constants above."""
    pairs = zip(capacities, splits, strict=True)
    loads = [kernel.load(i, capacity, count) for i, (capacity, count) in enumerate(pairs)]
    others = units * sum(n * one for n, one in zip(splits[1:], loads[1:], strict=True))
    sms, parts = kernel.gpu.sm_count, sum(splits)
    blocks = math.ceil(units * splits[0] / sms)  # of the SM with the most
    waves, rest = divmod(blocks, kernel.blocks)
    tiles = -(-capacities[0] // (splits[0] * TILE))
    reading = waves * kernel.reading(kernel.blocks, loads[0], tiles)
    if rest:
        reading += kernel.reading(rest, loads[0], tiles)
    if waves + (rest > 0) > 1:
        reading += LAST * kernel.reading(1, loads[0], tiles)
    longest = [kernel.reading(1, one, segment=1) for one in loads[1:]]
    reading = max([reading + others / sms / kernel.share, *longest])
    part_bytes = 4 * kernel.spec.block_columns * (kernel.spec.first.v_format.head_dim + 1)
    merging = MERGE + MERGE_KIB * part_bytes * parts / 1024 if parts > 1 else 0.0
    return reading + START * (waves + (rest > 0)) + merging


def shared_bytes(kernel: Fit, units: int, splits: Sequence[int]) -> int:
    """Shared memory to ask for, for a block.

    Where the blocks of several segments have no room at once, those of the first spread unevenly.
    Then a block asks for more memory, so that an SM has room for its share of them only.
    """
    needed, gpu = kernel.spec.shared_bytes, kernel.gpu
    share = -(-units * splits[0] // gpu.sm_count)
    if units * sum(splits) <= kernel.slots or len(splits) == 1 or share >= kernel.blocks:
        return needed
    return min(gpu.shared_per_sm // share - RESERVED_SHARED, gpu.shared_per_block) // 128 * 128


def with_workers(chosen: Plan, kernel: Fit, units: int, capacities: Sequence[int]) -> Plan:
    """A plan with workers, for sequences whose lengths may differ: as many as there is room for.

    Without them where they are not worth it, or the line of all work is too long (schedule.py).
    """
    spec = kernel.spec
    line = UNIT_STEPS - (-capacities[0] // spec.steps[0])
    line += sum(spec.second_weight * -(-most // spec.steps[1]) for most in capacities[1:])
    is_short = capacities[0] <= SHORT * spec.steps[0]
    if is_short or units > MOST_WAVES * kernel.slots or units * line >= LONGEST_LINE:
        return chosen
    return replace(chosen, workers=min(units * chosen.splits[0], kernel.slots))


@functools.lru_cache(4096)
def _by_formula(
    choice: tuple[Fit, ...], units: int, capacities: tuple[int, ...], num_splits: int | None
) -> Plan:
    """The plan of these kernels with the lowest price, weighted over FILLED."""
    priced = []
    for kernel in choice:
        if num_splits is None:
            counts = _counts(kernel, units, capacities)
        else:
            counts = {useful_splits(kernel, capacities, num_splits, even=False)}
        for count in sorted(counts):
            splits = even_splits(kernel, capacities, count)
            priced.append((_prices(kernel, units, capacities, splits), splits, kernel.spec))
    least = [min(each) for each in zip(*(prices for prices, _, _ in priced), strict=True)]

    def cost(one: tuple[Sequence[float], tuple[int, ...], DecodeSpec]) -> float:
        each = zip(FILLED.values(), one[0], least, strict=True)
        return math.fsum(weight * paid / lowest for weight, paid, lowest in each)

    _, splits, spec = min(priced, key=cost)  # of equal ones the first: fewest warps, then splits
    return Plan(splits, spec.warps, spec.stages)


def _prices(
    kernel: Fit, units: int, capacities: Sequence[int], splits: Sequence[int]
) -> tuple[float, ...]:
    """What a launch costs for sequences whose first segment is filled to each part of FILLED."""
    step, found = kernel.steps[0], []
    for part in FILLED:
        tokens = math.ceil(capacities[0] * part)
        held = min(splits[0], -(-tokens // step))  # the other splits have no tokens
        lengths, cut = (tokens, *capacities[1:]), (held, *splits[1:])
        found.append(price(kernel, units, lengths, cut))
    return tuple(found)


def _counts(kernel: Fit, units: int, capacities: Sequence[int]) -> set[int]:
    """Splits of the first segment worth pricing: few, geometric, and what fills whole waves."""
    counts = {*range(1, 9), *(wave * kernel.slots // units for wave in range(1, 5))}
    limit = min(capacities[0] / kernel.steps[0], 2 * kernel.slots / units)
    counts |= {math.ceil(1.2**i) for i in range(12, 40) if 1.2**i <= limit}
    return {useful_splits(kernel, capacities, count) for count in counts}


def useful_splits(kernel: Fit, capacities: Sequence[int], count: int, even: bool = True) -> int:
    """Splits of the first segment that can hold a token and be merged; if even, the fewest."""
    steps = -(-capacities[0] // kernel.steps[0])
    others = MOST_OTHERS * (len(capacities) - 1)
    count = max(1, min(count, steps, kernel.most_parts - others))
    return -(-steps // -(-steps // count)) if even else count


def even_splits(kernel: Fit, capacities: Sequence[int], count: int) -> tuple[int, ...]:
    """Splits of all segments: of the others so many that they are no longer than the first's."""
    longest = kernel.load(0, capacities[0], count)
    others = []
    for i, capacity in enumerate(capacities[1:], 1):
        wanted = math.ceil(kernel.load(i, capacity, 1) / longest)
        steps = -(-capacity // kernel.steps[1])
        most = max(1, min(wanted, steps, MOST_OTHERS))
        others.append(-(-steps // -(-steps // most)))  # without those that cannot hold a token
    return (count, *others)


def formats_of_rows(spec: DecodeSpec) -> tuple[str, str]:
    k, v = spec.first.k_format, spec.first.v_format
    return f"{k}/{k.head_dim}", f"{v}/{v.head_dim}"
