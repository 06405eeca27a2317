"""torch.compile(fullgraph=True) over the attention calls, and the custom ops behind them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decode_rows import INT4
from segment_cases import packed as rows_of
from slow_cases import mark_slow
from small_caches import layer_basis
from torch._dynamo.testing import CompileCounterWithBackend

from kvquant import KVCache, RowFormat, decode_attention
from kvquant.errors import ShapeError
from kvquant.rows.variant import PLAIN

INT8 = RowFormat.parse("int8", 96)
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
COMPILERS = [
    "eager",
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler"),
            pytest.mark.filterwarnings("ignore"),  # it warns of matters of its own
        ],
    ),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def packed(batch: int, capacity: int, v_format: RowFormat = INT4) -> Rows:
    """K rows, V rows and lengths."""
    k_rows, v_rows = (rows_of(batch, 2, capacity, fmt=fmt) for fmt in (INT4, v_format))
    return k_rows, v_rows, torch.randint(1, capacity + 1, (batch,), dtype=torch.int32)


def paged(v_format: RowFormat) -> Rows:
    k_rows, v_rows, _ = packed(5, 16, v_format)
    return k_rows, v_rows, torch.tensor([20, 7, 32], dtype=torch.int32)


TABLE = torch.tensor([[4, 1], [0, -1], [2, 3]], dtype=torch.int32)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_projection_and_attention_make_one_graph_for_all_shapes(compiler: str) -> None:
    weight = torch.randn(32, 4 * 64, requires_grad=True)

    def step(x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor) -> Any:
        q = (x @ weight).view(x.shape[0], 4, 64)
        return decode_attention(q, k, v, lens, k_format="int4-g4", v_format=INT4, return_lse=True)

    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for batch, capacity in ((2, 40), (3, 50), (5, 77), (7, 128), (4, 9)):
        inputs = (torch.randn(batch, 32), *packed(batch, capacity))
        out, lse = compiled(*inputs)
        expected, expected_lse = step(*inputs)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse)
        assert not out.requires_grad
    assert counter.frame_count <= 2, "one graph for the first shapes, one for all others"


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "dtype", mark_slow([torch.float32, torch.bfloat16, torch.float16], [torch.bfloat16]), ids=str
)
def test_every_option_means_the_same_in_a_graph(dtype: torch.dtype, dynamic: bool) -> None:
    q, arguments = torch.randn(3, 4, 64).to(dtype), packed(3, 20, INT8)
    formats: dict[str, Any] = {"k_format": "int4-g4", "v_format": INT8}
    for rows, options in (
        (arguments, formats),
        (arguments, formats | {"sm_scale": 0.3, "num_splits": 2}),
        (arguments, formats | {"backend": "reference"}),
        (paged(INT8), formats | {"block_table": TABLE, "backend": "reference"}),
    ):

        def call(q: torch.Tensor, rows: Rows = rows, options: dict[str, Any] = options) -> Any:
            return decode_attention(q, *rows, **options)

        out = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)(q)
        expected = call(q)
        assert out.dtype == dtype and out.shape == (3, 4, 96)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", mark_slow([None, "none", "matrix"], ["none"]))
def test_several_queries_make_one_graph_for_all_numbers_of_them(kind: str | None) -> None:
    bases = None if kind is None else [layer_basis(kind)]
    cache = KVCache(1, 3, 2, 64, 100, sink_len=4, recent_len=16, bases=bases)
    k, v = torch.randn(2, 3, 2, 60, 64)
    cache.append(0, k, v, torch.tensor([60, 2, 0]))

    def attend(q: torch.Tensor, q_lens: torch.Tensor | None) -> Any:
        return cache.attend(0, 2 * q, q_lens, return_lse=True)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for q_len in (3, 5, 2, 8):
        q, q_lens = torch.randn(3, q_len, 4, 64), torch.tensor([q_len, 1, 0], dtype=torch.int32)
        found, expected = compiled(q, q_lens), attend(q, q_lens)
        assert found[0].shape == (3, q_len, 4, 64) and found[1].shape == (3, q_len, 4)
        for part, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(part, wanted)
    assert counter.frame_count <= 2, "one graph for the first shapes, one for all others"
    with pytest.raises(Exception, match=r"q_lens is .*: it must be .3."):
        compiled(q, q_lens[:2])  # the type is torch's


def test_one_graph_serves_all_numbers_of_splits() -> None:
    k_rows, v_rows, lens = packed(2, 64)
    q = torch.randn(2, 4, 64)

    def call(num_splits: int) -> Any:
        return decode_attention(
            q, k_rows, v_rows, lens, k_format=INT4, v_format=INT4, num_splits=num_splits
        )

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for num_splits in (2, 3, 4, 5):
        assert torch.equal(compiled(num_splits), call(num_splits))
    assert counter.frame_count == 2


def test_values_are_checked_where_a_graph_runs() -> None:
    k_rows, v_rows, lens = packed(2, 8)
    compiled = torch.compile(decode_attention, fullgraph=True, backend="eager")
    q = torch.zeros(2, 4, 64)
    formats: dict[str, Any] = {"k_format": INT4, "v_format": INT4}
    compiled(q, k_rows, v_rows, lens, **formats)
    with pytest.raises(ShapeError, match=r"seq_lens of sequence 0 is .*: there is room for 0 to 8"):
        compiled(q, k_rows, v_rows, lens + 8, **formats)


def one_segment(return_lse: bool, pages: bool) -> tuple[Any, ...]:
    rows = paged(INT8) if pages else packed(3, 20, INT8)
    starts, table = (None, TABLE) if pages else (torch.full((3,), 5, dtype=torch.int32), None)
    fields = [[part] for part in (*rows, "int4-g4", "int8", starts, table, 0, None)]
    backend = "reference" if pages else None
    options = (96, None, return_lse, None, backend, None, None, False, *PLAIN)
    return (torch.randn(3, 4, 64), *fields, *options)


def two_segments(return_lse: bool, pages: bool) -> tuple[Any, ...]:
    q, *fields = one_segment(return_lse, pages)
    seq_slots = None if pages else torch.tensor([2, 0, 2], dtype=torch.int32)
    rings = [0 if pages else 4, 0], [seq_slots, None]
    return (q, *(2 * field for field in fields[:7]), *rings, *fields[9:])


def several_queries(return_lse: bool, pages: bool) -> tuple[Any, ...]:
    _, *arguments = one_segment(return_lse, pages)[: -len(PLAIN) - 3]
    q_lens = torch.tensor([2, 0, 1], dtype=torch.int32)
    tree = torch.ones(3, 2, 2, dtype=torch.bool)
    variant = 50.0, torch.ones(4), -torch.ones(4), 7, tree, torch.ones(3, 2, 4)
    return (torch.randn(3, 2, 4, 64), *arguments, q_lens, None, False, *variant)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of opcheck's own graphs
@pytest.mark.parametrize("pages", mark_slow([False, True], [True]))
@pytest.mark.parametrize("return_lse", mark_slow([False, True], [True]))
@pytest.mark.parametrize("make_arguments", [one_segment, two_segments, several_queries])
def test_torch_finds_nothing_wrong_with_the_op(
    make_arguments: Callable[[bool, bool], tuple[Any, ...]], return_lse: bool, pages: bool
) -> None:
    op = torch.ops.kvquant.attend_segments.default
    arguments = make_arguments(return_lse, pages)
    torch.library.opcheck(op, arguments)
    results = op(*arguments)
    assert len(results) == 1 + return_lse
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = op(*arguments)
    for result, shown in zip(results, fake, strict=True):
        assert (result.shape, result.dtype) == (shown.shape, shown.dtype)


# the first call runs in the memory of CUDA graphs, the second is captured, the others are replays
REDUCED_OVERHEAD = """
import torch
from torch._dynamo.utils import counters

from kvquant import RowFormat, decode_attention, quantize_rows, reference_attention

def make_step(num_splits):
    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def step(q, k, v, lens):
        out, lse = decode_attention(
            2 * q, k, v, lens, k_format=INT4, v_format=INT4, num_splits=num_splits, return_lse=True
        )
        return 2 * out, lse
    return step

INT4 = RowFormat.parse("int4-g4", 128)
torch.manual_seed(0)
keys, values = torch.randn(2, 3, 2, 2048, 128, device="cuda")
rows = quantize_rows(keys, INT4), quantize_rows(values, INT4)
steps = [make_step(4), make_step(7)]  # the second one needs more memory
for i in range(4):
    for step in steps:
        q = torch.randn(3, 16, 128, device="cuda", dtype=torch.bfloat16)
        lens = torch.tensor([2048 - 100 * i, 1 + i, 700 + 13 * i], dtype=torch.int32, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        out, lse = step(q, *rows, lens)
        expected, expected_lse = reference_attention(
            2 * q, *rows, lens, k_format=INT4, v_format=INT4, return_lse=True
        )
        expected = 2 * expected.double()
        error = float((out.double() - expected).norm() / expected.norm())
        lse_error = float((lse.double() - expected_lse.double()).abs().max())
        assert error < 4e-3, f"call {i}: {error}"
        assert lse_error < 1e-3, f"call {i}: lse {lse_error}"
        # what a graph's memory held is overwritten
        junk = [torch.full((1 << n,), 255, dtype=torch.uint8, device="cuda") for n in range(9, 24)]
        del out, lse, junk
assert not counters["inductor"]["cudagraph_skips"], "there were graphs"
print("all calls right")
"""


@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_graphs_of_reduced_overhead_do_not_overwrite_what_lasts() -> None:
    command = [sys.executable, "-c", REDUCED_OVERHEAD]  # nothing was allocated before
    run = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "all calls right" in run.stdout
