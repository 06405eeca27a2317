"""The feedback kernel: its launches, and on a GPU (-m gpu).

In the simulator it is tested with the append kernel, by test_append_simulated.py. All bytes
are those of plain torch (quantize.py, append.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from append_cases import Case, append, differences, expected, launch_append, make_call, results
from fake_cuda import STREAM, FakeDriver, arguments_of, install, loaded_specs

from kvquant import RowFormat
from kvquant.errors import ConfigError, ShapeError
from kvquant.kernels.cuda.affine.launch import AffineSpec
from kvquant.kernels.cuda.append import launch as launching
from kvquant.kernels.cuda.append.launch import quantize_with_feedback
from kvquant.kernels.cuda.append.spec import (
    MOST_SHARED,
    AppendSpec,
    FeedbackSide,
    FeedbackSpec,
    make_feedback_spec,
)
from kvquant.kernels.cuda.runtime.compile import cubin_key
from kvquant.rows.format import HEAD_DIMS

FORMATS = "int2 int3 int4 int4-g2 int4-g4 int4-g8 int8 int8-g8".split()


def test_a_block_fits_every_gpu_and_the_code_is_that_of_its_spec() -> None:
    specs = [
        make_feedback_spec([FeedbackSide(RowFormat.parse(name, head_dim), clip, share=share)])
        for name in FORMATS
        for head_dim in HEAD_DIMS
        if (name, head_dim) not in (("int3", 80), ("int3", 112))  # refused
        for share in ((1, 2, 4) if head_dim <= launching.WIDEST else (launching.FEW_LANES,))
        for clip in (False, True)
    ]
    for spec in specs:
        (side,) = spec.sides
        assert spec.shared_bytes <= MOST_SHARED and spec.threads >= 32
        assert side.buffer_bytes // 16 % 2 == side.stride // 16 % 2 == 1, "bank conflicts"
        assert side.rows * side.lanes >= 32, "a row for every lane of the first pass"
    assert len({cubin_key(spec, "sm_90") for spec in specs}) == len(specs)


# Launches


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The CPU as an H200 with a driver that takes notes; nothing is a step (test_step.py)."""
    monkeypatch.setattr(launching, "WITH_FEEDBACK", 0)
    monkeypatch.setattr(launching, "BLOCKS_PER_SM", 0)
    return install(monkeypatch)


def test_few_rows_have_several_lanes_each(cuda: FakeDriver) -> None:
    for dim, shape in ((64, (64, 8, 1)), (64, (1, 8, 4096)), (512, (1, 1, 20000))):
        fmt, feedback = RowFormat.parse("int4", dim), torch.zeros(shape[1], dim, dim)
        quantize_with_feedback(torch.zeros(*shape, dim), fmt, None, feedback)
    *specs, wide = loaded_specs()
    assert [spec.sides[0].share for spec in specs] == [4, 1]
    assert (wide.sides[0].share, wide.threads) == (4, 64), "wider rows always have as many"
    *launched, _ = cuda.launched
    assert [one.grid for one in launched] == [(2, 8, 1), (32, 8, 1)]
    for spec, one in zip(specs, launched, strict=True):
        assert (one.block, one.shared) == ((128, 1, 1), spec.shared_bytes)
        assert one.stream == STREAM


def test_a_side_without_feedback_has_a_kernel_of_its_own(cuda: FakeDriver) -> None:
    launch_append(**make_call(Case(feedback="v", v="int8")))
    launch_append(**make_call(Case(matrix="k", feedback="kv", v="fp8")))
    plain, fed, product, of_matrix, fp8 = loaded_specs()
    assert isinstance(plain, AppendSpec) and isinstance(fed, FeedbackSpec)
    assert isinstance(of_matrix, FeedbackSpec) and isinstance(fp8, AppendSpec)
    assert isinstance(product, AffineSpec) and product.encodes
    sources = fed.sides[0].source, of_matrix.sides[0].source
    assert sources == ("bf16", "fp32"), "what was multiplied is float32"
    assert [one.grid[2] for one in cuda.launched] == [1] * 5


def test_rows_that_cannot_be_read_are_copied(cuda: FakeDriver) -> None:
    call = make_call(Case(feedback="v", clip="v", offset="v", exact="bf16", heads=2, layout="odd"))
    launch_append(**call)
    x = arguments_of(loaded_specs()[1], cuda.launched[1].arguments)["k.x"]
    assert x != call["v"].data_ptr() and x % 16 == 0


def test_nothing_is_launched_of_a_call_that_is_refused(cuda: FakeDriver) -> None:
    call = make_call(Case(feedback="kv"))
    rows = call["v_rows"]
    odd = torch.zeros(rows.numel() + 16, dtype=torch.uint8)[4:][: rows.numel()].view(rows.shape)
    with pytest.raises(ConfigError, match=r"v_rows: rows of .* must be aligned to 16 bytes"):
        launch_append(**call | {"v_rows": odd})

    def refuse() -> None:
        raise ShapeError("does not fit")

    with pytest.raises(ShapeError, match="does not fit"):
        launch_append(**make_call(Case(matrix="k")), check=refuse)
    assert not cuda.launched


KINDS: dict[str, Any] = {
    "dtype": (Case(matrix="k", offset="k"), lambda matrix: matrix.half()),
    "strides": (Case(matrix="k", offset="k"), lambda matrix: matrix.mT),
    "rows of float32": (Case(matrix="k", source="fp32"), lambda matrix: matrix),
}


@pytest.mark.parametrize(("case", "change"), KINDS.values(), ids=KINDS)
def test_another_kind_of_matrix_is_checked_again(cuda: FakeDriver, case: Case, change: Any) -> None:
    call = make_call(case)
    launch_append(**call)

    def refuse() -> None:
        raise ShapeError("does not fit")

    transform = call["k_transform"]
    other = transform._replace(matrix=change(transform.matrix))
    with pytest.raises(ShapeError, match="does not fit"):
        launch_append(**call | {"k_transform": other}, check=refuse)


# On a GPU


@pytest.mark.gpu
def test_a_compiled_call_writes_the_same_bytes() -> None:
    call = make_call(Case(feedback="kv", matrix="k", clip="v", tokens=40, heads=4), "cuda")
    wanted = expected(call)
    torch.compile(append, fullgraph=True, backend="aot_eager")(**call)
    problem = differences(results(call), wanted)
    assert not problem, problem
