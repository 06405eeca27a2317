"""merge_states: attention over parts becomes attention over the whole."""

from __future__ import annotations

import math

import pytest
import torch
from fake_cuda import OnCuda
from hypothesis import given
from hypothesis import strategies as st

from kvquant import merge_states
from kvquant.errors import ConfigError, ShapeError
from kvquant.kernels.cuda.prefix import launch
from kvquant.ops.merge import merge_by_kernels

State = tuple[torch.Tensor, torch.Tensor]


def attend(scores: torch.Tensor, v: torch.Tensor) -> State:
    """Scores [..., tokens] and v [tokens, dim] to out and lse; no tokens give zeros and -inf."""
    if not scores.shape[-1]:
        return scores.new_zeros(*scores.shape[:-1], v.shape[-1]), scores.sum(-1) - torch.inf
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """Scores [3, tokens], values [tokens, 8] and the tokens of each part; some parts are empty."""
    tokens, parts = draw(st.integers(1, 40)), draw(st.integers(1, 6))
    owner = draw(st.lists(st.integers(0, parts - 1), min_size=tokens, max_size=tokens))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from((0.0, 1.0, 30.0, 1e4)))
    scores = spread * torch.randn(3, tokens, generator=generator, dtype=torch.float64)
    v = torch.randn(tokens, 8, generator=generator, dtype=torch.float64)
    return scores, v, [[t for t in range(tokens) if owner[t] == part] for part in range(parts)]


@given(partitions())
def test_any_partition_of_the_tokens_merges_to_the_whole(
    case: tuple[torch.Tensor, torch.Tensor, list[list[int]]],
) -> None:
    scores, v, parts = case
    out, lse = attend(scores, v)
    states = [attend(scores[:, part], v[part]) for part in parts]
    merged_out, merged_lse = merge_states(*states)
    assert merged_out.dtype == merged_lse.dtype == torch.float64
    torch.testing.assert_close(merged_out, out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(merged_lse, lse, rtol=1e-12, atol=1e-12)

    one_by_one = states[0]
    for state in states[1:]:
        one_by_one = merge_states(one_by_one, state)
    torch.testing.assert_close(one_by_one[0], out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(one_by_one[1], lse, rtol=1e-12, atol=1e-12)

    backwards, _ = merge_states(*reversed(states))
    torch.testing.assert_close(backwards, out, rtol=1e-12, atol=1e-12)


INF, NAN = math.inf, math.nan
STATE, EMPTY = (2.0, 0.5), [(out, -INF) for out in (0.0, 7.0, NAN, INF)]
# out and lse of some states, and of what they are together; float32 has no log of 3 behind 1e5
EDGES: list[tuple[list[tuple[float, float]], float, float]] = [
    *(([(1.0, lse)] * 3, 1.0, lse + math.log(3)) for lse in (1e3, 1e5, 2e7)),
    ([(0.0, -3e38), (1.0, 3e38)], 1.0, 3e38),
    *(([STATE, empty], *STATE) for empty in EMPTY),
    *(([empty, STATE, empty], *STATE) for empty in EMPTY),
    (EMPTY, 0.0, -INF),
    ([(2.0, 0.0), (NAN, 0.0)], NAN, math.log(2)),
    ([(2.0, 0.0), (1.0, NAN)], NAN, NAN),
    *(
        ([(1.0, a), (1.0, b)], NAN, INF)
        for a, b in ((0.0, INF), (INF, 0.0), (INF, INF), (-INF, INF))
    ),
]


@pytest.mark.parametrize(("states", "out", "lse"), EDGES, ids=str)
def test_empty_large_and_infinite_states(
    states: list[tuple[float, float]], out: float, lse: float
) -> None:
    """What is empty changes nothing, and NaN of others is not hidden."""
    found = merge_states(*((torch.full((1, 4), x), torch.full((1,), y)) for x, y in states))
    wanted = torch.full((1, 4), out), torch.full((1,), lse)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_states_of_other_than_floats_are_refused(dtype: torch.dtype) -> None:
    """Whole numbers would be cut, and complex ones lose a part."""
    for dtypes in ((dtype, torch.float32), (torch.float32, dtype)):
        out, lse = (
            torch.ones(shape, dtype=d) for shape, d in zip(((1, 2), (1,)), dtypes, strict=True)
        )
        with pytest.raises(ConfigError, match=f"{dtype}.*: use floats"):
            merge_states((out, lse))


@pytest.mark.parametrize(
    ("dtypes", "out_dtype", "lse_dtype"),
    [
        ((torch.bfloat16, torch.float32), torch.bfloat16, torch.float32),
        ((torch.float16, torch.bfloat16), torch.float16, torch.float32),
        ((torch.float32, torch.float64), torch.float32, torch.float64),
        ((torch.float64, torch.float64), torch.float64, torch.float64),
    ],
    ids=str,
)
def test_out_keeps_its_dtype_and_lse_is_float32_or_float64(
    dtypes: tuple[torch.dtype, torch.dtype], out_dtype: torch.dtype, lse_dtype: torch.dtype
) -> None:
    states = [
        (
            torch.randn(3, 4, dtype=torch.float64).to(out),
            torch.randn(3, dtype=torch.float64).to(lse),
        )
        for out, lse in (dtypes, (torch.float32, torch.float32))
    ]
    out, lse = merge_states(*states)
    assert (out.dtype, lse.dtype) == (out_dtype, lse_dtype)
    lses = torch.stack([lse.double() for _, lse in states])
    weights = lses.softmax(0)[..., None]
    exact = (weights * torch.stack([out.double() for out, _ in states])).sum(0)
    torch.testing.assert_close(out.double(), exact, rtol=2**-7, atol=1e-2)


def test_what_does_not_fit_is_refused() -> None:
    out, lse = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    with pytest.raises(ShapeError, match="at least one"):
        merge_states()
    for other in (
        (torch.zeros(2, 3, 5), lse),
        (torch.zeros(2, 4, 4), torch.zeros(2, 4)),
        (out, torch.zeros(2, 4)),
        (out, torch.zeros(2, 3, 1)),
    ):
        with pytest.raises(ShapeError, match="cannot be merged with out"):
            merge_states((out, lse), other)
    with pytest.raises(ShapeError, match=r"out \[2, 3, 4\] with lse \[2\]"):
        merge_states((out, torch.zeros(2)))


def gathered(world_size: int, device: str) -> torch.Tensor:
    """What ranks gather: out and lse of each side by side, [world_size, 3, 4, 64 + 1]."""
    return torch.randn(world_size, 3, 4, 65, device=device)


def test_the_kernel_is_given_rows_that_lie_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, seen = gathered(2, "cpu"), []
    monkeypatch.setattr(launch, "combine", lambda *given: seen.extend(given))
    outs, lses = (x.as_subclass(OnCuda) for x in (found[..., :-1], found[..., -1]))
    merge_by_kernels(outs, lses, torch.bfloat16, None)
    assert all(one is None or one.is_contiguous() for one in seen)
    assert torch.equal(seen[2], found[..., :-1].reshape(2, 1, 12, 64))
    assert torch.equal(seen[3], found[..., -1].reshape(2, 1, 12))
    seen.clear()
    for dtype, backend in ((torch.float32, None), (torch.bfloat16, "reference")):
        out, lse = merge_by_kernels(outs, lses, dtype, backend)
        expected = merge_states(*((one[..., :-1], one[..., -1]) for one in found))
        assert torch.equal(out, expected[0].to(dtype)) and torch.equal(lse, expected[1])
    assert not seen


def test_rounded_states_are_merged_into_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found, seen = gathered(3, "cpu"), []
    monkeypatch.setattr(launch, "combine", lambda *given: seen.extend(given))
    outs = found[..., :-1].bfloat16().contiguous()
    lses = found[..., -1].contiguous()
    given = outs.as_subclass(OnCuda), lses.as_subclass(OnCuda)
    out, lse = merge_by_kernels(*given, torch.bfloat16, None)
    assert torch.equal(seen[2], outs[1:].reshape(2, 1, 12, 64))
    assert torch.equal(seen[3], lses[1:].reshape(2, 1, 12))
    assert (out.data_ptr(), lse.data_ptr()) == (outs.data_ptr(), lses.data_ptr())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_on_a_gpu(count: int, dtype: torch.dtype) -> None:
    """Some parts are empty, and their outs NaN; so is a whole query; scores differ by far."""
    found = torch.randn(count, 3, 5, 6, 81, device="cuda")
    found[..., -1] *= 30
    found[torch.rand(count, 3, 5, 6, device="cuda") < 0.2] = -torch.inf
    found[:, 1, 2] = -torch.inf
    outs, lses = found[..., :-1], found[..., -1]
    outs[lses == -torch.inf] = torch.nan
    out, lse = merge_by_kernels(outs, lses, dtype, None)
    expected = merge_states(*zip(outs.double(), lses.double(), strict=True))
    assert out.dtype == dtype and lse.dtype == torch.float32
    # scores of about 100 are float32 numbers 2**-17 apart, and weights their powers
    limit = {torch.bfloat16: 3e-3, torch.float16: 8e-4, torch.float32: 2**-17}[dtype]
    assert float((out - expected[0]).norm() / expected[0].norm()) < limit
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=1e-5)
    assert not out[1, 2].any()
