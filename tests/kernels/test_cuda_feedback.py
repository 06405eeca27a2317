"""The feedback kernel: in numba's simulator, as machine code, its launches, and on a GPU (-m gpu).

All bytes are those of plain torch (rounding.py).
"""

from __future__ import annotations

import importlib.util
import struct
from typing import Any

import pytest
import torch
from fake_cuda import CPU, STREAM, FakeDriver, install_for_rows, note_devices
from feedback_cases import make_rows, quantized
from in_simulator import SIMULATED, in_simulator

from kvquant import RowFormat
from kvquant.errors import UnsupportedError
from kvquant.kernels import feedback as launching
from kvquant.kernels.cuda import loaded
from kvquant.kernels.cuda.compile import compile_spec, cubin_key
from kvquant.kernels.cuda.feedbackspec import FEEDBACK, MOST_SHARED, FeedbackSpec
from kvquant.layout import HEAD_DIMS
from kvquant.rounding import quantize_fitted

if SIMULATED:
    from kvquant.kernels.cuda import feedback, simulator

needs_numba_cuda = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="needs the cuda extra: numba-cuda"
)
FORMATS = "int4 int4-g2 int4-g4 int4-g8 int8 int8-g8".split()


# In the simulator


def simulate(
    name: str, head_dim: int, lanes: int, shape: tuple[int, int, int] = (2, 1, 6), *orders: bool
) -> None:
    """Compare with the meaning; orders: whether lanes and blocks run backwards."""
    fmt = RowFormat.parse(name, head_dim)
    batch, heads, tokens = shape
    x, weights = make_rows(fmt, batch, heads, tokens)
    room: Any = feedback
    spec = FeedbackSpec(fmt, lanes)
    grid = (-(-batch * tokens // spec.block_rows), heads, 1)
    for backwards in orders or (False,):
        rows, expected = quantized(x, fmt, weights)
        tensors = (x, rows, weights)
        values = [*(one.data_ptr() for one in tensors), batch * tokens, tokens, heads]
        arguments = [one(n) for one, n in zip(room.signature(spec), values, strict=True)]
        memory = [(one.data_ptr(), one.nbytes) for one in tensors]
        kernel = room.make_feedback_kernel(spec)
        simulator.launch(
            kernel, grid, spec.threads, spec.shared_bytes, arguments, memory, backwards=backwards
        )
        assert torch.equal(rows, expected), (rows != expected).nonzero()[0]


@in_simulator
def test_a_lane_has_a_row() -> None:
    simulate("int4-g4", 64, 1)


@in_simulator
def test_four_lanes_have_a_row() -> None:
    simulate("int8", 64, 4, (2, 1, 6), False, True)


@in_simulator
def test_groups_that_end_within_a_tile() -> None:
    simulate("int4-g8", 80, 4)


@in_simulator
def test_several_blocks_and_heads() -> None:
    simulate("int4", 64, 8, (3, 2, 7), True)


# Machine code


@needs_numba_cuda
@pytest.mark.parametrize(
    ("name", "head_dim", "lanes", "arch"),
    [
        ("int4-g4", 128, 1, "sm_90"),
        ("int8", 128, 4, "sm_80"),
        ("int4-g8", 80, 1, "sm_89"),
        ("int4", 256, 1, "sm_100"),
    ],
)
def test_machine_code_spills_nothing(name: str, head_dim: int, lanes: int, arch: str) -> None:
    spec = FeedbackSpec(RowFormat.parse(name, head_dim), lanes)
    report = compile_spec(spec, arch).report
    assert report.stack_bytes == 0 and report.registers <= 168


def test_a_block_fits_every_gpu_and_the_code_is_that_of_its_spec() -> None:
    specs = [
        FeedbackSpec(RowFormat.parse(name, head_dim), lanes)
        for name in FORMATS
        for head_dim in HEAD_DIMS
        for lanes in (1, 2, 4, 8)
    ]
    for spec in specs:
        assert spec.shared_bytes <= MOST_SHARED and spec.threads >= 64
    assert len({cubin_key(spec, "sm_90") for spec in specs}) == len(specs)


# Launches


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The CPU as an H200 with a driver that takes notes."""
    return install_for_rows(monkeypatch, launching)


def launch(batch: int, heads: int, tokens: int, *, odd: bool = False) -> list[torch.Tensor]:
    """Launch on zeros; odd: x where 16 bytes cannot be read."""
    fmt = RowFormat.parse("int4", 64)
    x = torch.zeros(batch * heads * tokens * 64 + 1)[int(odd) :][: batch * heads * tokens * 64]
    tensors = [
        x.view(batch, heads, tokens, 64),
        torch.zeros(batch, heads, tokens, fmt.row_bytes, dtype=torch.uint8),
        torch.zeros(heads, 64, 64),
    ]
    launching.round_with_feedback(tensors[0], tensors[1], fmt, tensors[2])
    return tensors


def test_few_rows_have_several_lanes_each(cuda: FakeDriver) -> None:
    launch(64, 8, 1)
    launch(1, 8, 4096)
    specs: list[FeedbackSpec] = [key[0] for key in loaded._kernels]  # type: ignore[index]
    assert [spec.lanes for spec in specs] == [4, 1]
    assert [one.grid for one in cuda.launched] == [(2, 8, 1), (32, 8, 1)]
    for spec, one in zip(specs, cuda.launched, strict=True):
        assert (one.block, one.shared) == ((128, 1, 1), spec.shared_bytes)
        assert one.stream == STREAM


def test_arguments_are_those_of_the_call(cuda: FakeDriver) -> None:
    tensors = launch(3, 2, 5)
    launch(0, 2, 5)
    (one,) = cuda.launched
    values = struct.unpack(FeedbackSpec(RowFormat.parse("int4", 64)).arguments, one.arguments)
    given = dict(zip((name for name, _ in FEEDBACK), values, strict=True))
    wanted = {"num_rows": 15, "tokens": 5, "num_heads": 2}
    names = ("x", "rows", "feedback")
    wanted |= {name: x.data_ptr() for name, x in zip(names, tensors, strict=True)}
    assert given == wanted
    (x, *_) = launch(3, 2, 5, odd=True)
    address = struct.unpack_from("=Q", cuda.launched[1].arguments)[0]
    assert address != x.data_ptr() and address % 16 == 0
    assert len(launching._settled) == 1


def test_a_launch_goes_to_the_device_of_its_tensors(
    cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = note_devices(monkeypatch, launching)
    launch(3, 2, 5)
    assert entered == [CPU] and len(cuda.launched) == 1


def test_older_gpus_are_refused(cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UnsupportedError, match=r"compute capability 8.0 .* has 7.5"):
        launch(3, 2, 5)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        *((name, 128) for name in FORMATS),
        *((name, head_dim) for name in ("int4-g8", "int8") for head_dim in HEAD_DIMS),
    ],
)
@pytest.mark.parametrize("shape", [(2, 3, 7), (1, 3, 4001)], ids=["few", "many"])
def test_bytes_are_those_of_the_meaning(
    name: str, head_dim: int, shape: tuple[int, int, int]
) -> None:
    fmt = RowFormat.parse(name, head_dim)
    x, feedback = make_rows(fmt, *shape)
    clip = torch.linspace(0.8, 1.0, shape[1])
    wanted = quantize_fitted(x, fmt, clip=clip, feedback=feedback)
    got = quantize_fitted(x.cuda(), fmt, clip=clip.cuda(), feedback=feedback.cuda(), backend="cuda")
    assert torch.equal(got.cpu(), wanted)


@pytest.mark.gpu
def test_torch_on_the_gpu_says_the_same() -> None:
    fmt = RowFormat.parse("int4-g4", 128)
    x, feedback = make_rows(fmt, 1, 8, 1024)
    got, wanted = (
        quantize_fitted(x.cuda(), fmt, feedback=feedback.cuda(), backend=backend)
        for backend in ("cuda", "torch")
    )
    assert torch.equal(got, wanted)


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_rows() -> None:
    fmt = RowFormat.parse("int4-g4", 128)
    x, feedback = (one.cuda() for one in make_rows(fmt, 4, 8, 1))
    rows, _ = quantized(x, fmt, feedback)
    launching.round_with_feedback(x, rows.clone(), fmt, feedback)  # compiled
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launching.round_with_feedback(x, rows, fmt, feedback)
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        nearest, wanted = quantized(x, fmt, feedback)
        rows.copy_(nearest)
        graph.replay()
        assert torch.equal(rows, wanted)
