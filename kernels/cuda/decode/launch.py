"""Attend on CUDA: prepare once what depends on shapes, then launch with little Python.

This is the hot path of decoding: a cached launch packs its addresses itself, and a launch is bound
to the segments of a cache (runtime/launch.py).
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import struct
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from kvquant.errors import UnsupportedError
from kvquant.rehearsal import is_rehearsed
from kvquant.rows.arguments import address
from kvquant.rows.call import AttentionCall
from kvquant.rows.segment import FixedSegments, Segment
from kvquant.rows.variant import AttentionVariant, names_of

from ..runtime.driver import Kernel, Launcher
from ..runtime.launch import (
    GPU,
    OVERLAPS,
    Rehearsed,
    current_device,
    current_stream,
    empty_strided,
    gpu_of,
    keep,
    kernel_of,
)
from ..runtime.spec import layout_of
from ..runtime.workspace import Workspaces, workspaces_of
from .arrange import (
    LOG2_E,
    MOST_TOKENS,
    arguments,
    arrange,
    arrange_in_order,
    codec_of,
    counts_of,
    log2_scale,
    make_spec,
    pack_counts,
)
from .plan import Fit, Plan, crowd, fit, narrow, pays, plan, shared_bytes, with_workers
from .ragged import Cut, Kind, kinds_of
from .spec import COMMON, HALF, POSITIONAL, QUERIES, SEGMENT, VARIANT, DecodeSpec
from .tuned import Tuned, measured_plans
from .wide.spec import widened

State = tuple[torch.Tensor, "torch.Tensor | None"]
Addresses = tuple[int, int, int, int, int]  # K, V, lengths, starts or table, sequence slots
Check = Callable[[AttentionCall], AttentionCall]
Prepared: TypeAlias = "Launch | Launches | Nothing"
UNIT = 16  # bytes that a query is aligned to
MOST_BLOCKS = 65535  # of a grid, but along x
WARPGROUPS = (9, 0)  # the one compute capability with wgmma

# what stands after the addresses, in all arguments, in those of a segment, in those of queries
QUERY, ROWS, AXIS = (
    struct.Struct(layout_of(table)) for table in (COMMON[5:-1], SEGMENT[5:], QUERIES[1:])
)
ADDRESSES = struct.Struct("@5P")  # of a segment, see Addresses
SEGMENT_BYTES = ADDRESSES.size + ROWS.size

_launches: dict[Hashable, Prepared] = {}


@dataclass(frozen=True)
class Work:
    """What a call asks for, as the planner sees it.

    Attributes:
        spec: the kernel, with any warps and stages.
        units: sequences times KV heads times blocks of columns that share one.
        order: the segments that have room, as indices, that of spec.first first.
        capacities: the most tokens that are attended to in each, in this order.
        batch: sequences, or with ragged queries the most pieces of a kind (ragged.py).
        q_len: queries of each, at most.
    """

    spec: DecodeSpec
    gpu: GPU
    units: int
    order: tuple[int, ...]
    capacities: tuple[int, ...]
    batch: int
    q_len: int


def attend(call: AttentionCall, check: Check | None = None) -> State:
    """Attend to all segments in one launch, or in one for each kind of pieces of ragged queries.

    Args:
        call: its q is bfloat16 or float16. q_lens are clamped to 0 to q_len. With a q_indptr that
            falls results mean nothing.
        check: raises unless q can attend to the segments, and returns the call with formats in
            place of names; called only before a launch is prepared.

    Returns:
        out, as q with the head_dim of V; lse, float32, base e, without that axis, or None.
        Padding, and queries that see no token, give zeros and -inf. NaN in a row of V reaches
        queries that do not see the row, too.

    Raises:
        ConfigError: q is float32, or rows are not aligned.
        UnsupportedError: there is no kernel for these segments, or this GPU.
        DeviceError: CUDA refuses the launch.
    """
    q, segments, _, num_splits, _, q_lens, variant, *_ = call
    index, address, q_indptr = q.get_device(), q.data_ptr(), call.q_indptr
    # all that the check and the launch depend on, beside the segments
    key: Hashable = (
        q.shape,
        q.is_contiguous() or q.stride(),
        q.dtype,
        address % UNIT,
        q.is_neg(),
        index,
        num_splits,
        q_lens if q_lens is None else _facts(q_lens),
        variant and _facts_of_variant(variant),
        q_indptr if q_indptr is None else _facts(q_indptr),
        call.return_lse,  # the kernel for wide groups is not for it
    )
    bound = segments.bound if type(segments) is FixedSegments else None
    launch: Prepared | None = None if bound is None else bound.get(key)
    addresses: Sequence[Addresses] = ()
    if launch is None:
        facts, addresses = _look_at(segments)
        launch = _launches.get((key, facts))
        if launch is None:
            checked = check(call) if check else call
            try:
                launch = _prepare(checked)
            except Rehearsed:
                launch = Nothing((*q.shape[:-1], checked.segments[0].v_format.head_dim))
                return launch(call, address, addresses)
            keep(_launches, (key, facts), launch)
        if bound is not None:
            bound.keep(key, launch.bind(addresses))
    if index == current_device():
        return launch(call, address, addresses)
    with torch.cuda.device(index):
        return launch(call, address, addresses)


def _look_at(segments: Sequence[Segment]) -> tuple[Hashable, list[Addresses]]:
    """What check and launch depend on, and addresses; True stands for contiguous strides."""
    facts: tuple[Hashable, ...] = ()
    addresses: list[Addresses] = []
    for k, v, lens, k_format, v_format, starts, table, sinks, seq_slots in segments:
        k_address, v_address = k.data_ptr(), v.data_ptr()
        index_address = 0 if starts is None else starts.data_ptr()
        if table is not None:
            index_address = table.data_ptr()
        seq_slots_address = 0 if seq_slots is None else seq_slots.data_ptr()
        lens_address = lens.data_ptr()
        if not (k_address and v_address and lens_address) and not lens.is_meta:
            for name, tensor in (("k_rows", k), ("v_rows", v), ("seq_lens", lens)):
                address(tensor, name)  # else a kernel would read from 0 on
        addresses.append((k_address, v_address, lens_address, index_address, seq_slots_address))
        facts += (
            k_format,
            v_format,
            k.shape,
            v.shape,
            lens.shape,
            k.is_contiguous() or k.stride(),
            v.is_contiguous() or v.stride(),
            lens.is_contiguous(),
            k.dtype,
            v.dtype,
            lens.dtype,
            k.get_device(),
            v.get_device(),
            lens.get_device(),
            k_address % UNIT,
            v_address % UNIT,
            starts if starts is None else _facts(starts),
            table if table is None else _facts(table),
            sinks,
            seq_slots if seq_slots is None else _facts(seq_slots),
        )
    return facts, addresses


def _facts(tensor: torch.Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def _facts_of_variant(variant: AttentionVariant) -> Hashable:
    """What a launch depends on: the numbers themselves, of tensors what describes them."""
    return tuple(_facts(one) if isinstance(one, torch.Tensor) else one for one in variant)


def describe(call: AttentionCall, kind: Kind | None = None, *, may_widen: bool = True) -> Work:
    """What a call with work to do asks for, as plan.plan wants it; errors as of attend.

    kind: of pieces, if queries are ragged; None for the last. may_widen: whether the kernel for
    wide groups is taken where it pays.
    """
    q, segments, _, _, _, q_lens, variant, *_ = call
    batch, q_len, num_q_heads, _ = _four_axes(call).shape
    num_kv_heads = segments[0].k_rows.shape[1]
    ratio = num_q_heads // num_kv_heads
    gpu = gpu_of(q.get_device())
    names, window = names_of(variant), MOST_TOKENS
    if variant is not None and variant.window is not None:
        window = variant.window
        if window >= sum(segment.capacity for segment in segments):  # it hides nothing
            names = tuple(name for name in names if name != "window")
    ragged = call.q_indptr is not None
    # else the one query sees all, wherever it is
    causal = q_len > 1 or ragged or q_lens is not None or not POSITIONAL.isdisjoint(names)
    order = arrange_in_order(segments) if causal else arrange(segments)
    ordered = [segments[i] for i in order]
    if ragged:
        kind = kind or _kinds_of(call)[-1]
        batch, q_len = kind.room, kind.size
    count = ratio * q_len
    spec = make_spec(ordered, codec_of("q", q), count, causal=causal, variant=names)
    spec = narrow(replace(spec, ragged=ragged), gpu)
    if gpu.capability == WARPGROUPS and may_widen and not call.return_lse and len(order) <= 2:
        wide = widened(spec, count)
        if wide is not None:
            units = batch * num_kv_heads * -(-count // wide.block_columns)
            if is_rehearsed(q) or pays(wide, gpu, units, count, ordered):
                spec = wide
    columns = num_kv_heads * -(-count // spec.block_columns)
    if batch > MOST_BLOCKS or columns > MOST_BLOCKS:
        queries = f" and {q_len} queries a sequence" if q.ndim == 4 else ""
        given = f"{q.shape[0]} ragged queries in {batch} pieces" if ragged else f"batch {batch}"
        raise UnsupportedError(
            f"{given} with {num_q_heads} query heads on {num_kv_heads} KV heads{queries} is too "
            f"much for one launch: at most {MOST_BLOCKS} {'pieces' if ragged else 'sequences'}, "
            f"and KV heads times blocks of {spec.block_columns} query heads that share one. Cut "
            "the batch"
        )
    if gpu.capability >= OVERLAPS:
        spec = replace(spec, overlapped=True)
    most = window + q_len + HALF  # rows of a segment that are in a window, or read with them
    capacities = tuple(min(segments[i].capacity, most) for i in order)
    if spec.is_wide:
        capacities = (sum(capacities),)
    units = batch * columns
    return Work(crowd(spec, gpu, units), gpu, units, order, capacities, batch, q_len)


def _kinds_of(call: AttentionCall) -> tuple[Kind, ...]:
    q, segments = call.q, call.segments
    ratio = q.shape[1] // segments[0].k_rows.shape[1]
    formats = [fmt for one in segments for fmt in (one.k_format, one.v_format)]
    return kinds_of(q.shape[0], len(segments[0].seq_lens), ratio, formats)


def _four_axes(call: AttentionCall) -> torch.Tensor:
    """Queries with an axis of them; ragged ones as those of one sequence."""
    q = call.q
    if call.q_indptr is not None:
        return q[None]
    return q if q.ndim == 4 else q[:, None]


class Launch:
    """A prepared launch of a call, or of one kind of its pieces: all but addresses and scale."""

    def __init__(
        self,
        call: AttentionCall,
        work: Work,
        chosen: Plan,
        kernel: Kernel,
        shared: int,
        most_parts: int,
        workspaces: Workspaces,
    ) -> None:
        q, segments, variant = call.q, call.segments, call.variant
        queries, batch, q_len = _four_axes(call), work.batch, work.q_len
        num_q_heads, head_dim = q.shape[-2:]
        num_kv_heads = segments[0].k_rows.shape[1]
        ratio = num_q_heads // num_kv_heads
        head_blocks = -(-ratio * q_len // work.spec.block_columns)
        v_dim = segments[0].v_format.head_dim
        parts, workers = sum(chosen.splits), chosen.workers
        places = work.units * parts
        if workers:
            places = max(places, workers + work.units * work.spec.segments)
        self._index = q.get_device()
        self._scale = head_dim**-0.5 * LOG2_E
        shape = *q.shape[:-1], v_dim
        contiguous = tuple(math.prod(shape[i:]) for i in range(1, len(shape) + 1))
        self._out = shape, contiguous, q.dtype
        self._lse = shape[:-1], tuple(n // v_dim for n in contiguous[:-1]), torch.float32
        self._workspaces = workspaces if parts > 1 or workers else None
        self._partial = places * work.spec.block_columns * (v_dim + 1)
        self._units = work.units
        strides = [2 * queries.stride(i) if queries.shape[i] > 1 else 0 for i in range(3)]
        aligned = q.data_ptr(), *strides
        self._copies_query = queries.stride(3) != 1 or q.is_neg() or any(n % UNIT for n in aligned)
        if self._copies_query:
            of_query = 2 * num_q_heads * head_dim
            strides = [q_len * of_query, of_query, 2 * head_dim]
        heads = num_q_heads, ratio, head_blocks
        units = batch, num_kv_heads * head_blocks, parts, places, workers, most_parts
        self._query = QUERY.pack(strides[0], strides[2], *heads, *units)
        self._axis = AXIS.pack(strides[1], q_len) if work.spec.causal else None
        self._variant = [(name, _numbers_of(name, variant)) for name in work.spec.variant]
        self._segments = []
        # a kernel for wide groups splits both of its segments as one
        for i, splits in itertools.zip_longest(work.order, chosen.splits, fillvalue=1):
            copies = any(pack_counts(one) is not one for one in counts_of(segments[i]))
            self._segments.append((i, copies, ROWS.pack(*arguments(segments[i], splits))))
        self._layout = f"@5P{QUERY.size}sf" + (f"P{AXIS.size}s" if work.spec.causal else "")
        self._layout += "".join(code for name in work.spec.variant for _, code in VARIANT[name])
        layout = self._layout + len(work.order) * f"5P{ROWS.size}s"
        self._missing = (work.spec.segments - len(work.order)) * SEGMENT_BYTES  # zeros
        grid = num_kv_heads * head_blocks, batch, parts
        self._launcher = functools.partial(Launcher, kernel, grid, shared=shared)
        self._launch = self._launcher(f"{layout}{self._missing}x")
        self._bound = b""

    def bind(self, addresses: Sequence[Addresses]) -> Launch | None:
        """This launch with segments that stay, and lie there; None if their lengths are copied."""
        if any(copies for _, copies, _ in self._segments):
            return None
        bound = copy.copy(self)
        bound._bound = b"".join(
            ADDRESSES.pack(*addresses[i]) + rows for i, _, rows in self._segments
        )
        bound._launch = self._launcher(f"{self._layout}0P{len(bound._bound)}s{self._missing}x")
        bound._segments = []
        return bound

    def new_state(self, want_lse: bool) -> State:
        return empty_strided(*self._out), empty_strided(*self._lse) if want_lse else None

    def placed(self, q: torch.Tensor, address: int) -> tuple[torch.Tensor, int]:
        """q and its address; a contiguous copy of q where the kernel cannot read it in place."""
        if self._copies_query:
            q = q.detach().clone(memory_format=torch.contiguous_format)
            address = q.data_ptr()
        return q, address

    def __call__(
        self,
        call: AttentionCall,
        address: int,
        addresses: Sequence[Addresses],
        pieces: int = 0,
        state: State | None = None,
    ) -> State:
        """Launch on the current stream of the current device, which is that of q.

        address: of q, or of the copy that `placed` made. addresses: of the segments, unless bound.
        pieces: the address of the first piece of the kind. state: out and lse to write to; new ones
        when None.
        """
        q, segments, sm_scale, _, want_lse, q_lens, variant, *_ = call
        out, lse = state or self.new_state(want_lse)
        lse_address = 0 if lse is None else lse.data_ptr()
        stream = current_stream(self._index)
        counters = partial = 0
        if self._workspaces is not None:
            workspace = self._workspaces.take(stream, self._units, self._partial)
            counters, partial = workspace.counters_address, workspace.partial_address
        if not pieces:  # with pieces Launches has copied q already, once for all kinds
            q, address = self.placed(q, address)
        values: list[float | bytes] = [
            address,
            out.data_ptr(),
            lse_address,
            partial,
            counters,
            self._query,
            self._scale if sm_scale is None else log2_scale(sm_scale),
        ]
        kept: list[torch.Tensor | None] = []  # copies, until the launch is enqueued
        if self._axis is not None:
            numbers = pack_counts(q_lens)
            kept.append(numbers)
            values += (pieces if numbers is None else numbers.data_ptr(), self._axis)
        for name, constants in self._variant:
            given = getattr(variant, name)
            if isinstance(given, torch.Tensor):
                given = given.resolve_neg().contiguous()  # itself, if it is
                kept.append(given)
                values.append(given.data_ptr())
            values += constants
        for i, copies, rows in self._segments:
            values += addresses[i]
            if copies:
                packed = [pack_counts(one) for one in counts_of(segments[i])]
                kept += packed
                values[-3:] = [0 if one is None else one.data_ptr() for one in packed]
            values.append(rows)
        if self._bound:
            values.append(self._bound)
        self._launch(stream, values)
        return out, lse


class Launches:
    """A prepared call with ragged queries: a launch that cuts pieces, then one for each kind."""

    def __init__(self, cut: Cut, launches: Sequence[Launch]) -> None:
        self._cut, self._launches = cut, launches

    def bind(self, addresses: Sequence[Addresses]) -> Launches | None:
        """As Launch.bind."""
        bound = [one.bind(addresses) for one in self._launches]
        kept = [one for one in bound if one is not None]
        return Launches(self._cut, kept) if len(kept) == len(bound) else None

    def __call__(self, call: AttentionCall, address: int, addresses: Sequence[Addresses]) -> State:
        """As Launch."""
        assert call.q_indptr is not None
        pieces = self._cut(call.q_indptr)
        first, state = pieces.data_ptr(), self._launches[0].new_state(call.return_lse)
        # _copy keeps that memory until the last launch is enqueued
        _copy, address = self._launches[0].placed(call.q, address)
        for start, launch in zip(self._cut.starts, self._launches, strict=True):
            launch(call, address, addresses, first + start, state)
        return state


class Nothing:
    """A call without heads, sequences or rows."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def bind(self, addresses: Sequence[Addresses]) -> Nothing:
        return self

    def __call__(self, call: AttentionCall, address: int, addresses: Sequence[Addresses]) -> State:
        """Zeros, and -inf."""
        lse = None
        if call.return_lse:
            lse = call.q.new_full(self._shape[:-1], -math.inf, dtype=torch.float32)
        return call.q.new_zeros(self._shape), lse


def _prepare(call: AttentionCall) -> Prepared:
    q, segments = call.q, call.segments
    batch = len(segments[0].seq_lens)
    codec_of("q", q)  # refused without rows, too
    if not (q.numel() and batch and any(one.capacity for one in segments)):
        return Nothing((*q.shape[:-1], segments[0].v_format.head_dim))
    if call.q_indptr is None:
        return _prepare_launch(call)
    kinds, launches = _kinds_of(call), list[Launch]()
    for kind in kinds:
        with suppress(Rehearsed):  # a rehearsal notes the kernels of the other kinds, too
            launches.append(_prepare_launch(call, kind))
    cut = Cut(q.get_device(), q.shape[0], batch, kinds)
    if len(launches) < len(kinds):
        raise Rehearsed
    return Launches(cut, launches)


def _prepare_launch(call: AttentionCall, kind: Kind | None = None) -> Launch:
    num_splits, device = call.num_splits, call.q.get_device()
    work = describe(call, kind)

    def choose(spec: DecodeSpec, asked: Work = work, registers: int | None = None) -> Plan:
        rows = _measured_plans()
        return plan(spec, asked.gpu, asked.units, asked.capacities, num_splits, rows, registers)

    if work.spec.is_wide and is_rehearsed(call.q):
        # other batches gain nothing by the kernel for wide groups (plan.pays): note both kernels
        exact = describe(call, kind, may_widen=False)
        with suppress(Rehearsed):
            _load(exact, choose(exact.spec, exact), device)
    kernel, fitted = _load(work, choose(work.spec), device)
    while not fitted.blocks:  # it takes more registers than was thought
        smaller = choose(fitted.spec, registers=kernel.registers)
        kernel, fitted = _load(work, smaller, device)
    chosen = choose(fitted.spec, registers=kernel.registers)
    if num_splits is None and work.batch > 1:  # lengths may differ
        chosen = with_workers(chosen, fitted, work.units, work.capacities)
    return _made(call, work, chosen, kernel, fitted)


def _made(call: AttentionCall, work: Work, chosen: Plan, kernel: Kernel, fitted: Fit) -> Launch:
    """The launch of a call by a plan, whose kernel is loaded."""
    shared = shared_bytes(fitted, work.units, chosen.splits)
    spaces = workspaces_of(call.q.device)
    return Launch(call, work, chosen, kernel, shared, fitted.most_parts, spaces)


def _numbers_of(name: str, variant: AttentionVariant | None) -> tuple[float, ...]:
    """What stands in spec.VARIANT for a field, but for its address."""
    given = getattr(variant, name)
    if name == "soft_cap":
        return (given * LOG2_E,)
    if name == "window":
        return (min(given, MOST_TOKENS),)
    return ()


def _load(work: Work, chosen: Plan, device: int) -> tuple[Kernel, Fit]:
    """The kernel with the warps and stages of a plan, compiled, and how it fits the GPU."""
    spec = replace(work.spec, warps=chosen.warps, stages=chosen.stages)
    most_shared = work.gpu.shared_per_block if spec.second else 0
    kernel = kernel_of(spec, device, most_shared)
    return kernel, fit(spec, work.gpu, kernel.registers)


@functools.cache
def _measured_plans() -> tuple[Tuned, ...]:
    return measured_plans()
