"""The prefix kernel: in numba's simulator, as machine code, its launches, and on a GPU (-m gpu)."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from attend import attend_shared
from fake_cuda import FakeDriver, arguments_of, loaded_specs
from in_simulator import SIMULATED, in_simulator
from made_up_codec import INT5
from prefix_cases import PrefixCase, make_prefix, nothing_of_its_own
from relative_l2 import relative_l2

from kvquant import RowFormat
from kvquant.errors import ConfigError, UnsupportedError
from kvquant.kernels.cuda.prefix import launch as launching
from kvquant.kernels.cuda.prefix import spec as prefix_spec
from kvquant.kernels.cuda.prefix.spec import SHAPES, PrefixSpec, fit, worth_splits
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.rows.codec import CODECS
from kvquant.rows.format import HEAD_DIMS

if SIMULATED:
    from simulated_launches import simulated

needs_numba_cuda = pytest.mark.extra("cuda")
FORMATS = "int2 int3 int4 int4-g2 int4-g4 int4-g8 int8 int8-g8 fp8 fp8-g4 bf16 fp16".split()
H200, RTX_4090 = 232448, 101376  # shared memory of a block
LIMITS = {torch.bfloat16: 3e-3, torch.float16: 8e-4}
INT4 = RowFormat.parse("int4-g4", 128)


# In the simulator


def simulate(
    case: PrefixCase,
    splits: int = 1,
    *,
    members: list[int] | None = None,
    backwards: bool = False,
    **shape: Any,
) -> None:
    """Compare with float64; shape: warps, blocks, tokens and span of the spec."""
    places = torch.arange(len(case.q)) if members is None else torch.tensor(members)
    plain: dict[str, Any] = {"warps": 2, "blocks": 1, "tokens": 32, "span": 32}

    def fit(spec: PrefixSpec, *_: int) -> PrefixSpec:
        return replace(spec, **plain | shape)

    out = torch.zeros(*case.q.shape[:2], case.prefix.v_format.head_dim, dtype=case.q.dtype)
    lse = torch.full(case.q.shape[:2], -math.inf)  # nothing before
    given = case.q, case.prefix, None if members is None else places, out, lse
    with simulated(*given, backwards=backwards), mock.patch.object(launching, "fit", fit):
        launching.add_prefix(*given, case.q.shape[2] ** -0.5, splits)
    shared = (places >= 0) & (places < len(case.q))
    at = places[shared]
    assert float((out[at] - case.out[at]).norm() / case.out[at].norm()) < LIMITS[case.q.dtype]
    torch.testing.assert_close(lse[at].double(), case.lse[at], rtol=1e-4, atol=1e-3)
    others = torch.ones(len(case.q)).bool().index_fill(0, at, False)
    assert not out[others].any() and bool((lse[others] == -math.inf).all())


@pytest.mark.slow
@in_simulator
def test_the_kernel_in_the_simulator() -> None:
    # splits and pages
    simulate(make_prefix("int4-g4/int8", 64, 9, (4, 2), 150, page_size=16), 3)
    # small pages: with tiles of 64 rows a lane looks up two pages of one token
    for page_size, tokens in ((1, 64), (1, 32), (2, 64), (8, 16)):
        case = make_prefix("int4-g4/int4-g4", 64, 3, (4, 2), 150, page_size=page_size)
        simulate(case, 2, tokens=tokens, span=16)
    # splits without tokens say so
    simulate(make_prefix("int8/fp8", 64, 2, (2, 2), 33, page_size=32), 4)
    # members and two blocks of queries a warp
    case = make_prefix("int8-g2/int4-g2", 64, 4, (8, 2), 70)
    simulate(case, 2, members=[2, -1, 0, 1, 4], backwards=True, warps=1, blocks=2)
    # tiles in parts and rows in a run
    case = make_prefix("fp8/int4", 80, 3, (4, 1), 70, page_size=0, dtype=torch.float16)
    simulate(case, tokens=64)
    # rows of a made up codec
    with mock.patch.dict(CODECS, {INT5.name: INT5}):
        simulate(make_prefix("int5-g4/int5", 64, 9, (4, 2), 70))
    # rows of few bits
    for names, head_dim in (("int3/int2", 64), ("int2/int3", 96)):
        simulate(make_prefix(names, head_dim, 9, (4, 2), 70), 2)
    # 16 bit rows
    simulate(make_prefix("bf16/fp16", 80, 3, (4, 1), 50, dtype=torch.float16), span=16)
    # tiny and large numbers
    scales = (6e4, 1e-5, 1e-5)
    simulate(make_prefix("int4/int4-g4", 64, 3, (2, 1), 40, scales=scales))
    scales = (1e-4, 1e4, 1e4)
    simulate(make_prefix("int8/fp8", 64, 3, (2, 1), 40, scales=scales))


@needs_numba_cuda
@in_simulator
def test_blocks_of_nobody_end_at_once() -> None:
    case = make_prefix("int4", 64, 40, (1, 1), 40)
    simulate(case, members=[*range(32), *[-1] * 32], warps=2)


# Machine code, and what fits a GPU


def test_every_format_fits_every_gpu() -> None:
    for name in FORMATS:
        for head_dim in (dim for dim in HEAD_DIMS if dim <= prefix_spec.WIDEST):
            fmt = RowFormat.parse(name, head_dim)
            try:
                spec = PrefixSpec(fmt, fmt)
            except UnsupportedError as error:
                whats = "groups", f"{name} rows of head_dim"
                assert any(what in str(error) for what in whats)
                continue
            for num_rows in (1, 64, 65, 1000):
                for most in (H200, RTX_4090):
                    found = fit(spec, num_rows, most, 256, 132)
                    assert found.shared_bytes <= most
                    assert found.blocks == 1 or head_dim <= 128
    with pytest.raises(UnsupportedError, match="bytes of shared memory, this GPU has 1000"):
        fit(PrefixSpec(INT4, INT4), 64, 1000, 256, 132)


def test_blocks_are_as_wide_as_there_are_queries() -> None:
    def fitted(rows: int, units: int = 256) -> PrefixSpec:
        return fit(PrefixSpec(INT4, INT4), rows, H200, units, 132)

    shapes = [fitted(rows).rows for rows in (8, 64, 65, 128, 129, 512)]
    assert shapes == [64, 64, 128, 128, 256, 256]
    h200, found = runtime.GPUS["sm_90"], [fitted(rows) for rows in (64, 128, 256)]
    sizes = [(one.warps, prefix_spec.REGISTERS[one.blocks], one.shared_bytes) for one in found]
    assert [h200.blocks_per_sm(*size) for size in sizes] == [3, 2, 1]
    assert SHAPES[0] == (8, 2, 64)
    # KV heads times splits: 64 sequences behind 16,384 tokens and 1,024, of 8 KV heads and of one
    assert [worth_splits(tokens) for tokens in (0, 127, 1024, 16384)] == [1, 1, 8, 32]
    assert [fitted(256, 8 * 32).rows, fitted(256, 8 * 8).rows] == [256, 128]
    assert [fitted(512, 32).rows, fitted(256, 32).rows, fitted(2048, 32).rows] == [128, 64, 256]
    assert fitted(300, 1).tokens == 32 and fitted(300, 1).rows == 64, "too few in any case"


# Launches


def launch(case: PrefixCase, members: torch.Tensor | None = None, **options: Any) -> None:
    batch, num_heads, _ = case.q.shape
    out = torch.zeros(batch, num_heads, case.prefix.v_format.head_dim, dtype=case.q.dtype)
    launching.add_prefix(
        case.q, case.prefix, members, out, torch.zeros(batch, num_heads), 0.25, **options
    )


def test_a_prefix_is_cut_into_splits(cuda: FakeDriver) -> None:
    case = make_prefix("int4/int8", 64, 40, (8, 2), 700, page_size=64)
    members = torch.arange(40)
    launch(case, members)
    launch(case, members, num_splits=3)
    launch(case, members[:0])
    launch(case._replace(q=case.q[:0]))
    (spec,) = (one for one in loaded_specs() if isinstance(one, PrefixSpec))
    grids = [note.grid for note in cuda.launched]
    assert grids == [(3, 2, 22), (80, 1, 1), (3, 2, 3), (80, 1, 1)]  # at most a split a tile
    first = cuda.launched[0]
    assert first.block == (128, 1, 1) and first.shared == spec.shared_bytes and spec.rows == 64


def test_queries_that_cannot_be_read_are_copied(cuda: FakeDriver) -> None:
    case = make_prefix("int8", 64, 4, (4, 2), 40)
    wide = torch.zeros(4, 4, 65, dtype=torch.bfloat16)
    row = torch.zeros(4 * 4 * 64 + 1, dtype=torch.bfloat16)
    for q in (wide[:, :, 1:], row[1:].view(4, 4, 64), wide[:, :, :64]):
        launch(case._replace(q=q))
        given = arguments_of(PrefixSpec(INT4, INT4), cuda.launched[-2].arguments)
        assert given["q"] != q.data_ptr() and given["q"] % 4 == 0
        assert (given["q_stride_batch"], given["q_stride_head"]) == (4 * 64 * 2, 64 * 2)
    heads_first = torch.zeros(4, 4, 64, dtype=torch.bfloat16).transpose(0, 1)
    launch(case._replace(q=heads_first))
    given = arguments_of(PrefixSpec(INT4, INT4), cuda.launched[-2].arguments)
    assert given["q"] == heads_first.data_ptr()


def test_what_does_not_fit_is_refused(cuda: FakeDriver) -> None:
    case = make_prefix("int8", 64, 2, (2, 2), 40)
    moved = torch.zeros(case.prefix.k_rows.numel() + 4, dtype=torch.uint8)[1:-3]
    odd = case.prefix._replace(k_rows=moved.view(case.prefix.k_rows.shape))
    with pytest.raises(ConfigError, match="k_rows: rows of int8 with head_dim 64 must be aligned"):
        launch(case._replace(prefix=odd))
    assert not cuda.launched


# On a GPU


def check(case: PrefixCase, **options: Any) -> None:
    """Compare with float64; nothing but the prefix is attended to."""
    found: Any = attend_shared(
        case.q, case.prefix, [nothing_of_its_own(case)], return_lse=True, **options
    )
    assert relative_l2(found[0], case.out) < LIMITS[case.q.dtype]
    torch.testing.assert_close(found[1].double(), case.lse, rtol=1e-4, atol=1e-3)


GPU_CASES: dict[str, dict[str, Any]] = {
    f"{name}, {dtype}": {"names": name, "page_size": 64, "dtype": dtype}
    for name in FORMATS
    for dtype in LIMITS
}
for head_dim, names in itertools.product(HEAD_DIMS, ("int4", "int8/bf16")):
    # the decode kernel reads rows of 512, and needs pages aligned to 16 bytes
    for page_size in (0, 4, 16) if head_dim == 512 else (0, 1, 4, 16):
        case = {"names": names, "head_dim": head_dim, "batch": 33, "heads": (6, 2)}
        case |= {"tokens": 300, "page_size": page_size}
        GPU_CASES[f"{names} of {head_dim}, pages of {page_size}"] = case
for batch, heads in itertools.product((1, 5, 17, 80), ((4, 4), (8, 1), (71, 1), (10, 2))):
    case = {"batch": batch, "heads": heads, "tokens": 777, "page_size": 32}
    GPU_CASES[f"{batch} sequences, heads {heads}"] = case
SCALES = (6e4, 1e-5, 1e-5), (1e-4, 1e4, 1e4), (1e-4, 1e-5, 1e4), (1.0, 1.0, 1e-6)
for names, scales in itertools.product(("int4-g4", "fp8", "int8"), SCALES):
    case = {"names": names, "batch": 64, "heads": (4, 1), "tokens": 900, "scales": scales}
    GPU_CASES[f"{names}, scales {scales}"] = case


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_the_kernel_on_a_gpu(name: str) -> None:
    plain = {"names": "int4-g4", "head_dim": 128, "batch": 40, "heads": (8, 2), "tokens": 1000}
    case = make_prefix(**{**plain, **GPU_CASES[name]}, device="cuda")
    for num_splits in (None, 1, 3):
        check(case, num_splits=num_splits)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_of_all_sizes(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_spec, "SHAPES", (shape,))
    monkeypatch.setattr(runtime, "_launches", {})
    check(make_prefix("int4-g4", 128, 80, (4, 1), 1500, device="cuda"))


@pytest.mark.gpu
def test_a_row_of_nan_is_not_hidden() -> None:
    for side in ("k_rows", "v_rows"):
        case = make_prefix("int4-g4", 128, 64, (4, 1), 900, page_size=0, device="cuda")
        getattr(case.prefix, side)[0, 0, 700] = 0xFF
        out = attend_shared(case.q, case.prefix, [nothing_of_its_own(case)])
        assert isinstance(out, torch.Tensor) and bool(out.isnan().all())


@pytest.mark.gpu
def test_a_graph_serves_other_lengths_pages_and_members() -> None:
    cases = [make_prefix("int4-g4", 128, 64, (4, 1), n, device="cuda") for n in (900, 250, 480)]
    first = cases[0]
    own, members = nothing_of_its_own(first), torch.arange(64).cuda()
    attend_shared(first.q, first.prefix, [own], members=members)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend_shared(first.q, first.prefix, [own], members=members, return_lse=True)
    table = first.prefix.block_table
    assert table is not None
    for case, count in ((cases[1], 64), (cases[2], 20)):
        pages = case.prefix.block_table
        assert pages is not None
        num_pages = len(case.prefix.k_rows)
        first.prefix.k_rows[:num_pages] = case.prefix.k_rows
        first.prefix.v_rows[:num_pages] = case.prefix.v_rows
        first.prefix.seq_lens.copy_(case.prefix.seq_lens)
        table[:, : pages.shape[1]] = pages
        first.q.copy_(case.q)
        members.copy_(torch.where(torch.arange(64) < count, torch.arange(64), -1))
        graph.replay()
        assert relative_l2(out[:count], case.out[:count]) < 3e-3
        assert bool((lse[count:] == -torch.inf).all()) and not out[count:].any()
