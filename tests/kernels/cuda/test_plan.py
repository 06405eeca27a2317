"""The planner of the CUDA kernels and its table of measured plans. No GPU is needed."""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path as FilePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvquant.errors import ConfigError, UnsupportedError
from kvquant.kernels.cuda.decode import tuned
from kvquant.kernels.cuda.decode.plan import (
    RINGS,
    SHARE,
    STAGES,
    Fit,
    Plan,
    crowd,
    fit,
    kernels,
    narrow,
    plan,
    price,
    shared_bytes,
    stages_of,
    with_workers,
)
from kvquant.kernels.cuda.decode.spec import (
    LEAST_PARTS,
    MMA_COLUMNS,
    MOST_COLUMNS,
    MOST_SHARERS,
    DecodeSpec,
    Path,
    columns_of,
)
from kvquant.kernels.cuda.decode.tuned import Tuned, load_table, lookup, measured_plans
from kvquant.kernels.cuda.runtime.launch import GPU
from kvquant.rows.format import RowFormat

sys.path.insert(0, str(FilePath(__file__).parents[2] / "benchmarks"))
from bench_tune import save_table, tuned_row

A100 = GPU("NVIDIA A100", (8, 0), 108, 167936, 166912)
RTX_4090 = GPU("NVIDIA GeForce RTX 4090", (8, 9), 128, 102400, 101376)
H200 = GPU("NVIDIA H200", (9, 0), 132, 233472, 232448)
GPUS = [A100, RTX_4090, H200]
Two = tuple[int, int]


def make_spec(
    name: str = "int4-g4", head_dim: int = 128, exact_segments: bool = False
) -> DecodeSpec:
    fmt, exact = RowFormat.parse(name, head_dim), RowFormat.parse("bf16", head_dim)
    return DecodeSpec(Path(fmt, fmt), Path(exact, exact, "ring", False) if exact_segments else None)


def spec_of(spec: DecodeSpec, chosen: Plan) -> DecodeSpec:
    return replace(spec, warps=chosen.warps, stages=chosen.stages)


names = st.sampled_from("int4 int4-g4 int8 int8-g4 fp8 bf16".split())
head_dims, gpus = st.sampled_from([64, 128, 256]), st.sampled_from(GPUS)
shapes = st.tuples(st.integers(1, 100_000), st.integers(1, 1 << 21))
exact_lens = st.none() | st.tuples(st.integers(1, 3000), st.integers(1, 3000))  # other segments


@given(names, head_dims, gpus, shapes, st.integers(1, 300), exact_lens, st.booleans())
def test_plans_fit_the_gpu_and_no_split_is_empty(
    name: str, head_dim: int, gpu: GPU, shape: Two, ratio: int, others: Two | None, causal: bool
) -> None:
    """Of any number of query heads on a KV head, and of several queries."""
    plain = replace(make_spec(name, head_dim, others is not None), causal=causal)
    columns, sharers = columns_of(ratio, plain.first.k_format)
    spec = narrow(replace(plain, columns=columns, sharers=sharers), gpu)
    assert 1 <= spec.sharers <= MOST_SHARERS and (ratio > MMA_COLUMNS or spec == plain)
    units, capacities = shape[0], (shape[1], *(others or ()))
    chosen = plan(spec, gpu, units, capacities)
    kernel = spec_of(spec, chosen)
    held = fit(kernel, gpu)
    assert chosen.warps % spec.sharers == 0 and chosen.stages in stages_of(spec)
    assert spec.sharers > 1 or (chosen.warps in RINGS and chosen.stages in STAGES)
    assert kernel.shared_bytes <= gpu.shared_per_block and held.blocks >= 1
    assert len(chosen.splits) == len(capacities)
    for i, (splits, most) in enumerate(zip(chosen.splits, capacities, strict=True)):
        assert splits >= 1
        step = held.steps[min(i, 1)]
        chunk = -(-most // (splits * step)) * step  # as the kernel cuts
        assert (splits - 1) * chunk < most, "the last split never holds a token"
    assert sum(chosen.splits) <= held.most_parts == kernel.most_parts, "room to merge"
    weights = 4 * kernel.block_columns * kernel.most_parts
    assert kernel.most_parts >= LEAST_PARTS and weights <= kernel.asked_at
    copies = kernel.asked * kernel.asked_bytes
    assert kernel.rings_at + kernel.asked_at + copies <= kernel.shared_bytes


@given(names, gpus, shapes)
def test_no_other_number_of_splits_is_cheaper_by_much(
    name: str, gpu: GPU, shape: tuple[int, int]
) -> None:
    """For sequences that nearly fill their capacity. Shorter ones count less, but they do."""
    units, capacity = shape
    spec, tokens = make_spec(name), math.ceil(capacity * 31 / 32)
    chosen = plan(spec, gpu, units, [capacity])
    kernel = fit(spec_of(spec, chosen), gpu)
    steps = -(-tokens // kernel.steps[0])

    def paid(splits: int) -> float:
        return price(kernel, units, [tokens], [min(splits, steps)])

    for splits in (1, 2, 3, 5, 10, 20, 40, 80, 160, 320):
        if splits <= min(-(-capacity // kernel.steps[0]), kernel.most_parts):
            assert paid(chosen.splits[0]) <= 1.4 * paid(splits)


@pytest.mark.parametrize("units", [1, 8, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("capacity", [2048, 8192, 1 << 15, 1 << 17])
def test_a_plan_is_good_for_sequences_that_fill_little_of_their_room(
    units: int, capacity: int
) -> None:
    chosen = plan(make_spec(), H200, units, [capacity])
    kernel = fit(spec_of(make_spec(), chosen), H200)
    for tokens in (capacity, capacity // 8, capacity // 64):
        held = min(chosen.splits[0], -(-tokens // kernel.steps[0]))
        own = plan(make_spec(), H200, units, [tokens])
        best = price(fit(spec_of(make_spec(), own), H200), units, [tokens], own.splits)
        assert price(kernel, units, [tokens], [held]) <= 1.2 * best


@pytest.mark.parametrize("units", [1, 3, 8, 32, 64, 100, 128])
def test_long_sequences_keep_most_of_the_gpu_busy(units: int) -> None:
    chosen = plan(make_spec(), H200, units, [32768])
    busiest = math.ceil(units * chosen.splits[0] / H200.sm_count)
    assert busiest <= fit(spec_of(make_spec(), chosen), H200).blocks, "one wave"
    warps_per_sm = units * chosen.splits[0] * chosen.warps / H200.sm_count
    assert warps_per_sm <= 12 and (warps_per_sm >= 6 or units == 1)


def test_plans_of_shapes_whose_best_is_known() -> None:
    def chosen(units: int, capacity: int) -> Plan:
        return plan(make_spec(), H200, units, [capacity])

    # many sequences that fill whole waves, and short ones, are not split
    for units, capacity in ((256, 8192), (512, 8192), (792, 8192), (1188, 8192), (1, 100), (1, 1)):
        assert chosen(units, capacity).splits == (1,)
    # warps without a tile are worth nothing: one token to 128, four warps have a tile at most
    assert all(chosen(32, capacity).warps <= 4 for capacity in (1, 100, 128))
    # blocks of one warp are for many short sequences alone
    assert chosen(8192, 128).warps == 1 < chosen(8192, 2048).warps


@given(st.integers(1, 1 << 40), shapes)
def test_num_splits_is_followed_up_to_the_tiles(num_splits: int, shape: tuple[int, int]) -> None:
    units, capacity = shape
    chosen = plan(make_spec(), H200, units, [capacity], num_splits)
    kernel = fit(spec_of(make_spec(), chosen), H200)
    tiles = -(-capacity // kernel.steps[0])
    assert chosen.splits == (min(num_splits, tiles, kernel.most_parts),)


def test_short_exact_segments_take_one_block_and_long_ones_more() -> None:
    spec = make_spec(exact_segments=True)
    assert plan(spec, H200, 64, [8192, 4, 128]).splits[1:] == (1, 1)
    assert plan(spec, H200, 8, [65536, 4, 8192]).splits[2] > 1


@given(shapes, st.tuples(st.integers(1, 64), st.integers(1, 4)), st.sampled_from(RINGS))
def test_more_shared_memory_only_spreads_blocks_that_have_no_room_at_once(
    shape: tuple[int, int], splits: tuple[int, int], warps: int
) -> None:
    kernel = fit(replace(make_spec(exact_segments=True), warps=warps, stages=2), H200)
    units, needed = shape[0], kernel.spec.shared_bytes
    asked = shared_bytes(kernel, units, splits)
    share = -(-units * splits[0] // H200.sm_count)  # of an SM, blocks of the first segment
    if units * sum(splits) <= kernel.slots or share >= kernel.blocks:
        assert asked == needed
    else:
        assert needed <= asked <= H200.shared_per_block
        assert H200.shared_per_sm // (asked + 1024) == share
    assert shared_bytes(kernel, units, splits[:1]) == needed


def test_rows_of_few_bits_fill_an_sm_with_warps() -> None:
    """Where shared memory has room for 16 warps, threads have few registers; else as many as the
    compiler likes."""

    def warps_of(name: str, units: int, *lens: int, gpu: GPU = H200) -> tuple[int, int]:
        spec = crowd(make_spec(name, exact_segments=bool(lens)), gpu, units)
        kernel = spec_of(spec, plan(spec, gpu, units, [8192, *lens], rows=measured_plans()))
        return kernel.warps, fit(kernel, gpu).blocks * kernel.warps

    assert warps_of("int2", 512) == warps_of("int3", 512, 4, 128) == (4, 16)
    assert warps_of("int4", 512)[1] == 16  # its rows are read where they land
    assert warps_of("int3", 128) == (8, 16) and warps_of("int3", 128, 4, 128) == (4, 16)
    assert warps_of("int2", 65, 4, 128)[1] < 16 and warps_of("int8", 512)[1] < 16
    for name, gpu in (("int8", H200), ("int4-g4", H200), ("bf16", H200), ("int4", A100)):
        assert not crowd(make_spec(name), gpu, 512).crowded
    assert not crowd(replace(make_spec("int2"), variant=("soft_cap",)), H200, 512).crowded


def test_registers_of_the_compiled_kernel_keep_its_warps() -> None:
    spec = replace(make_spec(), warps=2, stages=2)
    chosen = plan(spec, H200, 64, [8192], registers=128)
    assert (chosen.warps, chosen.stages) == (2, 2)
    assert fit(spec, H200, 128).blocks > fit(spec, H200, 255).blocks


def test_a_kernel_with_more_registers_than_was_thought_gets_smaller_blocks() -> None:
    """10 warps of 174 registers: one quarter of an SM would have 3, and has room for 2."""
    spec = replace(make_spec(), sharers=5, warps=10, stages=5)
    assert fit(spec, H200).blocks and not fit(spec, H200, 174).blocks
    chosen = plan(spec, H200, 8, [300], registers=174)
    assert chosen.warps == 5
    assert fit(replace(spec, warps=chosen.warps, stages=chosen.stages), H200, 174).blocks
    assert fit(replace(spec, sharers=1, warps=2, stages=2), H200, 174).blocks == 4


def test_rows_too_large_for_shared_memory_are_refused() -> None:
    small = replace(RTX_4090, name="a small GPU", shared_per_block=48 << 10)
    with pytest.raises(UnsupportedError, match="a block has 49152 on a small GPU"):
        plan(make_spec("bf16", 256), small, 1, [100])


def test_rows_of_512_elements_fit_large_gpus_and_some_formats_small_ones() -> None:
    formats = "int4 int4-g2 int4-g4 int4-g8 int8 int8-g4 fp8 fp8-g4 bf16".split()
    for gpu, name in itertools.product([H200, A100], formats):
        for spec in (make_spec(name, 512), make_spec(name, 512, True)):
            assert all(one.blocks for one in kernels(spec, gpu)), (gpu, name)
    for name in ("int4", "int4-g2", "int4-g4", "int4-g8", "int8-g4", "fp8", "fp8-g4"):
        assert kernels(make_spec(name, 512), RTX_4090)
    for name in ("int8", "bf16"):
        with pytest.raises(UnsupportedError, match=f"K in {name} .*use formats with fewer bytes"):
            kernels(make_spec(name, 512), RTX_4090)
    with pytest.raises(UnsupportedError, match=r"K in bf16 .*keep no sinks and recent .*_len=0"):
        kernels(make_spec("int4-g4", 512, True), RTX_4090)


def test_blocks_have_as_many_warps_as_fit() -> None:
    assert {one.spec.warps for one in kernels(make_spec(), H200)} == {1, 2, 4, 8}
    assert max(one.spec.warps for one in kernels(make_spec("bf16", 256), RTX_4090)) < 4


@given(names, st.integers(1, 1024), st.integers(1, 1 << 17))
def test_a_gpu_whose_bandwidth_is_unknown_is_planned_as_an_h200(
    name: str, units: int, capacity: int
) -> None:
    known = replace(H200, bandwidth=SHARE * 132)
    spec = make_spec(name)
    assert plan(spec, known, units, [capacity]) == plan(spec, H200, units, [capacity])


def test_prices_are_times_of_which_bandwidth_is_a_part() -> None:
    spec = replace(make_spec(), warps=4, stages=2)
    full, half = (fit(spec, replace(H200, bandwidth=SHARE * 132 * part)) for part in (1, 0.5))
    # a token: a block starts, and a warp has a tile
    assert price(half, 1, [1], [1]) == pytest.approx(price(full, 1, [1], [1]), rel=0.01)
    # many sequences: the memory
    bound = [price(one, 3 * 132, [1 << 20], [1]) for one in (full, half)]
    assert bound[1] == pytest.approx(2 * bound[0], rel=0.01)
    assert 3 * 132 * (1 << 20) * 160 / bound[0] / 1e3 <= SHARE * 132  # no faster than it is


@pytest.mark.parametrize("name", ["int4-g4", "int8-g4", "bf16"])
def test_less_bandwidth_needs_fewer_warps(name: str) -> None:
    def warps(units: int, gpu: GPU) -> int:
        chosen = plan(make_spec(name), gpu, units, [8192])
        return units * chosen.splits[0] * chosen.warps

    for part in (0.25, 0.5, 0.7):
        slower = replace(H200, name="a made-up GPU", bandwidth=SHARE * 132 * part)
        many = [(warps(units, slower), warps(units, H200)) for units in (1, 8, 32, 64)]
        assert all(fewer <= more for fewer, more in many)
        assert part > 0.25 or many[1][0] < many[1][1]


def test_a_measured_plan_is_used_for_its_shape() -> None:
    measured = Plan((7,), 8, 2)
    rows = [tuned_row(make_spec(), H200, 48, 8192, measured)]
    assert plan(make_spec(), H200, 48, [8192], rows=rows) == measured
    assert plan(make_spec(), H200, 48, [9000], rows=rows) == measured  # the nearest
    near = plan(make_spec(), H200, 56, [8192], rows=rows)
    assert (near.warps, near.stages) == (8, 2)  # splits by the formula
    for units, capacity in ((64, 8192), (48, 20_000)):  # too far
        usual = plan(make_spec(), H200, units, [capacity])
        assert plan(make_spec(), H200, units, [capacity], rows=rows) == usual
    assert plan(make_spec(), A100, 48, [8192], rows=rows) == plan(make_spec(), A100, 48, [8192])
    other = make_spec("int8-g4")
    assert plan(other, H200, 48, [8192], rows=rows) == plan(other, H200, 48, [8192])


def test_a_measured_plan_that_does_not_fit_is_left() -> None:
    small = replace(H200, shared_per_block=48 << 10)
    rows = [tuned_row(make_spec(), H200, 64, 8192, Plan((4,), 8, 4))]
    usual = plan(make_spec(), small, 64, [8192])
    assert plan(make_spec(), small, 64, [8192], rows=rows) == usual
    usual = plan(make_spec(), H200, 64, [8192])
    for warps, stages in ((3, 2), (16, 2), (4, 1), (4, 9)):
        rows = [tuned_row(make_spec(), H200, 64, 8192, Plan((4,), warps, stages))]
        assert plan(make_spec(), H200, 64, [8192], rows=rows) == usual


def row(units: int, capacity: int = 8192, splits: int = 1) -> Tuned:
    return Tuned("NVIDIA H200", "int4-g4/128", "int4-g4/128", units, capacity, splits, 4, 3)


def test_plans_that_are_shipped_stand_behind_the_users(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVQUANT_CACHE_DIR", str(tmp_path / "users"))
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "plans")
    assert measured_plans() == ()
    save_table([row(8), row(32)], tmp_path / "plans" / "nvidia-h200.json")
    assert measured_plans() == (row(8), row(32))
    save_table([row(32, splits=5)])
    formats = ("int4-g4/128", "int4-g4/128")
    found = [lookup(measured_plans(), "NVIDIA H200", *formats, n, 8192) for n in (8, 32)]
    assert found == [row(8), row(32, splits=5)]


def test_shipped_plans_are_followed() -> None:
    for path in sorted(tuned.SHIPPED.glob("*.json")):
        version, rows = tuned._parse_table(path.read_bytes())
        assert version == tuned.TABLE_VERSION and rows
        assert {one.gpu.lower().replace(" ", "-") for one in rows} == {path.stem}
        assert len({one.shape for one in rows}) == len(rows)
        for one in rows:
            k, v = (RowFormat.parse(name.removesuffix("/128"), 128) for name in (one.k, one.v))
            sharers = -(-one.columns // MOST_COLUMNS)
            columns = one.columns // sharers
            spec = DecodeSpec(Path(k, v), columns=columns, sharers=sharers)
            gpu = replace(H200, name=one.gpu)
            chosen = plan(spec, gpu, one.units, [one.capacity], rows=[one])
            assert chosen == Plan((one.splits,), one.warps, one.stages)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 2, "rows": []}',
        '{"version": 0}',
        '{"version": "1", "rows": []}',
        '{"version": 1, "rows": 5}',
        '{"version": 1, "rows": [{"gpu": "x"}]}',
        json.dumps({"version": 1, "rows": [{**vars(row(8)), "splits": 0}]}),
        json.dumps({"version": 1, "rows": [{**vars(row(8)), "warps": "4"}]}),
        json.dumps({"version": 1, "rows": [{**vars(row(8)), "units": 10**400}]}),
        pytest.param("[" * 10**5, id="deep"),
    ],
)
def test_a_damaged_table_is_warned_of_and_not_used(tmp_path: FilePath, text: str) -> None:
    path = tmp_path / "tuned.json"
    path.touch(mode=0o600)  # others may not write it, whatever the umask
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match="planned by a formula"):
        assert load_table(path) == ()
    if '"version": 2' not in text:  # which is a newer one
        save_table([row(8)], path)
        assert load_table(path) == (row(8),)


def test_a_table_that_others_can_have_written_is_not_used(tmp_path: FilePath) -> None:
    path = tmp_path / "tuned.json"
    save_table([row(8)], path)
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    path.chmod(0o662)
    with pytest.warns(RuntimeWarning, match=r"others may write to .*\(mode 662\): chmod go-w it"):
        assert load_table(path) == ()
    path.chmod(0o644)
    tmp_path.chmod(0o770)
    with pytest.warns(RuntimeWarning, match="others may write"):
        assert load_table(path) == ()
    with pytest.raises(ConfigError, match="others may write"):
        save_table([row(16)], path)
    tmp_path.chmod(0o700)
    assert load_table(path) == (row(8),)


def make_even(units: int, capacities: list[int], exact_segments: bool = False) -> tuple[Plan, Fit]:
    """A plan for sequences of one length, and its kernel."""
    spec = make_spec(exact_segments=exact_segments)
    even = plan(spec, H200, units, capacities)
    return even, fit(spec_of(spec, even), H200)


@given(shapes)
def test_workers_are_blocks_that_the_launch_has_and_the_gpu_has_room_for(
    shape: tuple[int, int],
) -> None:
    units, capacity = shape
    even, kernel = make_even(units, [capacity])
    chosen = with_workers(even, kernel, units, [capacity])
    assert replace(chosen, workers=0) == even
    assert 0 <= chosen.workers <= min(units * even.splits[0], kernel.slots)


def test_long_sequences_of_a_batch_have_workers_where_they_can_help() -> None:
    helps = (256, [32768]), (64, [32768, 4, 128]), (2048, [8192])
    for units, capacities in (*helps, (64, [100]), (20_000, [8192]), (4000, [1 << 30])):
        even, kernel = make_even(units, capacities, len(capacities) > 1)
        most = min(units * even.splits[0], kernel.slots) if (units, capacities) in helps else 0
        assert with_workers(even, kernel, units, capacities).workers == most
