"""The kernel that turns queries and outputs and encodes new rows: in the simulator, as machine
code, its launches, and on a GPU (-m gpu)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from fake_cuda import CPU, STREAM, arguments_of, install, note_devices
from in_simulator import SIMULATED, in_simulator

from kvquant.kernels.cuda.affine import launch as launching
from kvquant.kernels.cuda.affine.launch import AffineSpec
from kvquant.ops.transform import affine_rows_op, takes_one_launch
from kvquant.rows.format import HEAD_DIMS

if SIMULATED:
    from simulated_launches import simulated

needs_numba_cuda = pytest.mark.extra("cuda")
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
Arguments = tuple[torch.Tensor, "torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]


def make(
    head_dim: int = 64,
    batch: int = 3,
    heads: tuple[int, int] = (6, 2),
    dtype: torch.dtype = torch.bfloat16,
    words: str = "matrix offset lens",
    device: str = "cpu",
) -> Arguments:
    """Rows and what turns them; the rows of each sequence of length 0 are NaN.

    words: what there is; "shared", the matrix of all KV heads is one; "strided", x has strides;
    "swapped", its heads are before its batch.
    """
    torch.manual_seed(batch)
    q_heads, kv_heads = heads
    x = torch.randn(batch, q_heads, head_dim).to(device, dtype)
    matrix = offset = lens = None
    if "matrix" in words:
        matrix = torch.randn(kv_heads, head_dim, head_dim).to(device)
    if "shared" in words:
        matrix = torch.randn(head_dim, head_dim).to(device).expand(kv_heads, head_dim, head_dim)
    if "offset" in words:
        offset = 3 * torch.randn(kv_heads, head_dim).to(device)
    if "lens" in words:
        lens = (torch.arange(2 * (batch + 1), device=device) % 3).int()[::2]  # 0, 2, 1, 0 ...
        x[lens[:batch] == 0] = torch.nan
    if "strided" in words:
        x = torch.cat([x, x.new_full((batch, q_heads, 10), torch.nan)], 2)[..., :head_dim]
    if "swapped" in words:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    return x, matrix, offset, lens


def roundings_of(head_dim: int) -> int:
    """Sums in a row that are rounded, and a few: of a warp's part, of 8 parts, of the offset."""
    return max(45, head_dim // 8 + 8 + 5)


def check_result(y: torch.Tensor, given: Arguments) -> None:
    """Compare with float64: the limit is one rounding to 16 bit and sums in float32."""
    x, matrix, offset, lens = (t if t is None else t.double().cpu() for t in given)
    assert x is not None and y.shape == x.shape and y.dtype == given[0].dtype and y.is_contiguous()
    per_head = matrix if matrix is not None else offset
    assert per_head is not None
    rows = x.unflatten(1, (per_head.shape[0], -1))
    size = rows.abs()
    if matrix is not None:
        rows, size = (
            torch.einsum("bhgd,hde->bhge", a, b) for a, b in ((rows, matrix), (size, matrix.abs()))
        )
    if offset is not None:
        rows, size = rows + offset[:, None], size + offset.abs()[:, None]
    wanted, size = rows.flatten(1, 2), size.flatten(1, 2)
    if lens is not None:
        empty = lens[: len(x)] == 0
        wanted[empty], size[empty] = 0, 0
    of_sums = roundings_of(x.shape[-1]) * 2**-24 * size
    limit = ROUNDING[y.dtype] * (wanted.abs() + of_sums) + of_sums + (size > 0) * 2**-25
    error = (y.double().cpu() - wanted).abs()
    assert bool((error <= limit).all()), float(
        (error / limit.clamp(min=1e-30)).nan_to_num(99).max()
    )


def check_encoded(y: torch.Tensor, given: Arguments) -> None:
    """Likewise of (x - offset) M, which is not rounded to 16 bit."""
    x, matrix, offset, _ = (t if t is None else t.double().cpu() for t in given)
    assert x is not None and matrix is not None
    assert y.shape == x.shape and y.dtype == torch.float32 and y.is_contiguous()
    rows, size = (x, x.abs()) if offset is None else (x - offset, x.abs() + offset.abs())
    wanted, size = (
        torch.einsum("bhd,hde->bhe", a, b) for a, b in ((rows, matrix), (size, matrix.abs()))
    )
    error = (y.double().cpu() - wanted).abs()
    most = roundings_of(x.shape[-1]) * 2**-24 * size + 1e-30
    assert bool((error <= most).all()), float((error / size).max() * 2**24)


# In the simulator


def simulate(given: Arguments, warps: int = 4, *, encodes: bool = False) -> None:
    """Turn or encode rows in the simulator, by as few warps as can.

    Blocks do not meet, so one order of them will do: backwards where heads are an odd number.
    """

    def few_warps(*args: Any) -> AffineSpec:
        return replace(AffineSpec(*args), warps=warps)

    few = mock.patch.object(launching, "AffineSpec", few_warps)
    with few, simulated(*given, backwards=given[0].shape[1] % 2 == 1):
        if encodes:
            check_encoded(launching.encode_rows(*given[:3]), given)
        else:
            check_result(launching.affine_rows(*given), given)


@needs_numba_cuda
@in_simulator
def test_rows_are_turned_or_get_their_offset() -> None:
    simulate(make(heads=(4, 2)))
    simulate(make(words="offset lens"))


@pytest.mark.slow
@in_simulator
def test_rows_of_any_strides() -> None:
    # turned
    simulate(make(80, 5, (2, 2), torch.float16, "shared offset strided"))
    simulate(make(64, 1, (3, 1), words="matrix swapped"), warps=8)
    # encoded
    simulate(make(heads=(2, 2), words="matrix offset"), encodes=True)
    simulate(make(80, 9, (1, 1), torch.float16, "matrix offset strided"), 8, encodes=True)
    simulate(make(64, 5, (2, 2), words="shared swapped"), encodes=True)
    # with an offset alone
    simulate(make(80, 9, (1, 1), torch.float16, "offset strided"), warps=8)
    # blocks go on with more rows
    given = make(80, 5, (5, 1), words="matrix lens")
    with mock.patch.object(launching, "BLOCKS_PER_SM", 12):  # 3 chunks of 3 groups
        simulate(given)


# Launches


def test_rows_are_cut_by_slices_heads_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = install(monkeypatch)
    given = make(80, 65, (8, 2))
    assert launching.affine_rows(*given).data_ptr() != given[0].data_ptr()
    launching.affine_rows(*make(128, 256, (32, 8), words="shared"))
    small, large = cuda.launched
    assert (small.block, small.stream, small.shared) == ((256, 1, 1), STREAM, 32 * (80 + 256))
    assert small.grid == (3, 2, 33)  # 260 rows of each KV head
    assert large.grid == (1, 8, 16)  # of 1024 rows, 64 each; lanes of four columns
    assert large.shared == 32 * (128 + 1024)


def test_launches_are_cached_by_all_that_they_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = install(monkeypatch)
    entered, checked = note_devices(monkeypatch), []
    for words in ("matrix", "matrix", "shared", "matrix offset", "offset", "matrix strided"):
        launching.affine_rows(*make(words=words), check=lambda: checked.append(1))
    assert entered == 6 * [CPU] and len(cuda.launched) == 6 and len(checked) == 5
    odd = torch.zeros(1 + 3 * 6 * 64, dtype=torch.float16)[1:].view(3, 6, 64)
    for x in (odd, torch.zeros(3, 64, 6).half().transpose(1, 2)):
        launching.affine_rows(x, make()[1], None, None)
        assert arguments_of(AffineSpec(64), cuda.launched[-1].arguments)["x"] % 4 == 0
    assert launching.affine_rows(odd[:0], make()[1], None, None).shape == (0, 6, 64)
    assert len(cuda.launched) == 8


def test_a_matrix_is_read_early_only_where_the_launch_before_does_not_write_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, (x, matrix, offset, lens) = install(monkeypatch), make()
    odd = torch.zeros(1 + x.numel(), dtype=x.dtype)[1:].view(x.shape)  # it is copied before
    for rows, overlaps in ((x, False), (x, True), (odd, True)):
        launching.affine_rows(rows, matrix, offset, lens, overlaps=overlaps)
    given = [arguments_of(AffineSpec(64), one.arguments) for one in cuda.launched]
    assert [one["waits"] for one in given] == [1, 0, 1]
    assert all(one.overlaps for one in cuda.launched)


def test_the_op_tells_a_compiler_what_it_gives() -> None:
    given = make(words="matrix offset lens strided")
    x, *others = (t if t is None else t.to("meta") for t in given)
    y = affine_rows_op(x, *others)
    assert y.shape == given[0].shape and y.dtype == given[0].dtype and y.is_contiguous()
    assert not takes_one_launch(given[0], None)  # on the CPU torch is the meaning


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rows_on_a_gpu_are_those_of_float64(head_dim: int, dtype: torch.dtype) -> None:
    words = "matrix offset lens", "shared", "matrix swapped", "offset lens strided"
    for ratio, batch, said in zip((1, 4, 8, 71), (1, 8, 65, 7), words, strict=True):
        for one in (said, "matrix offset lens"):
            given = make(head_dim, batch, (2 * ratio, 2), dtype, one, "cuda")
            check_result(launching.affine_rows(*given), given)
    words = "matrix offset", "shared", "matrix swapped", "matrix offset strided"
    for heads, tokens, said in zip((1, 8, 2, 3), (1, 64, 1001, 7), words, strict=True):
        given = make(head_dim, tokens, (heads, heads), dtype, said, "cuda")
        x, matrix, offset, _ = given
        y = launching.encode_rows(x, matrix, offset)
        check_encoded(y, given)
        alone = launching.encode_rows(x[tokens // 2 :], matrix, offset)
        assert torch.equal(alone, y[tokens // 2 :]), "a row depends on the others"
