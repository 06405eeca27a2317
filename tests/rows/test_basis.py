"""Bases of stored rows, and the rounding that goes with them (5 s)."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from small_caches import make_basis

from kvquant import KVCache, RowFormat, dequantize_rows, quantize_rows
from kvquant.errors import ConfigError, ShapeError
from kvquant.ops import transform
from kvquant.ops.quantize import quantize_calibrated
from kvquant.rows.basis import Basis, LayerBasis, _per_head, for_fp16
from kvquant.rows.quantize import clip_rows, feedback_matrix

HEADS, DIM = 2, 64
EXACT = {"k_format": "fp16", "v_format": "fp16"}


basis = partial(make_basis, size=4.0)


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(9)
    k, v = torch.randn(2, 3, HEADS, count, DIM)
    return k + 5 * torch.arange(DIM).eq(3), v


def cache(bases: list[LayerBasis] | None, **options: object) -> KVCache:
    given = {"sink_len": 2, "recent_len": 5, "exact_format": "fp16", "bases": bases} | options
    return KVCache(1, 3, HEADS, DIM, 40, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["none", "matrix"])
@pytest.mark.parametrize("windows", [(0, 0), (2, 5)], ids=["packed", "windows"])
def test_attention_does_not_see_the_basis(kind: str, windows: tuple[int, int]) -> None:
    torch.manual_seed(1)
    q = torch.randn(3, 6, DIM)
    k, v = tokens(23)
    lens = torch.tensor([23, 4, 0])
    found = []
    for bases in (None, [LayerBasis(basis(kind), basis(kind, 5))]):
        one = cache(bases, sink_len=windows[0], recent_len=windows[1], **EXACT)
        one.append(0, k, v, lens)
        found.append(one.attend(0, q, return_lse=True, sm_scale=0.1))
    (out, lse), (given, given_lse) = found
    torch.testing.assert_close(given, out, atol=0.03, rtol=0.02)
    torch.testing.assert_close(given_lse, lse, atol=0.03, rtol=0.01)
    assert given[2].abs().max() == 0 and float(given_lse[2, 0]) == -math.inf


def test_feedback_lowers_the_error_that_is_weighed() -> None:
    torch.manual_seed(3)
    roots = torch.randn(HEADS, DIM, DIM).double() * torch.logspace(0, -1.5, DIM).double()
    weights = roots @ roots.mT + 1e-3 * torch.eye(DIM)
    x, fmt = torch.randn(4, HEADS, 50, DIM), RowFormat.parse("int4", DIM)

    def error(rows: torch.Tensor) -> float:
        wrong = dequantize_rows(rows, fmt) - x
        return float(((wrong @ weights.float()) * wrong).sum())

    fed = quantize_calibrated(x, fmt, feedback=feedback_matrix(weights).float())
    assert error(fed) < 0.7 * error(quantize_rows(x, fmt))


def test_feedback_of_independent_errors_changes_nothing() -> None:
    x, fmt = torch.randn(4, HEADS, 50, DIM), RowFormat.parse("int4-g4", DIM)
    eye = torch.eye(DIM).expand(HEADS, DIM, DIM)
    assert torch.equal(
        quantize_calibrated(x, fmt, feedback=eye.contiguous()), quantize_rows(x, fmt)
    )


def test_feedback_matrix_is_unit_lower_triangular_and_explains_the_weights() -> None:
    roots = torch.randn(HEADS, DIM, DIM).double()
    weights = roots @ roots.mT + torch.eye(DIM)
    lower = feedback_matrix(weights)
    torch.testing.assert_close(lower, lower.tril())
    inverse = torch.linalg.inv(lower)
    diagonal = inverse.mT @ weights @ inverse
    off = diagonal - torch.diag_embed(diagonal.diagonal(dim1=-2, dim2=-1))
    assert float(off.abs().max()) < 1e-8


def test_clipping_keeps_a_share_of_each_groups_range() -> None:
    x, _ = tokens(5)
    clipped = clip_rows(x, 4, torch.tensor([0.5, 1.0]))
    grouped, given = clipped.unflatten(-1, (4, -1)), x.unflatten(-1, (4, -1))
    spans = [(y.amax(-1) - y.amin(-1)) for y in (grouped, given)]
    torch.testing.assert_close(spans[0][:, 0], 0.5 * spans[1][:, 0])
    torch.testing.assert_close(clipped[:, 1], x[:, 1], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"matrix": "hadamard"}, ConfigError, "matrix is of type str"),
        ({"matrix": torch.zeros(2, 64, 64)}, ConfigError, "must have an inverse"),
        ({"clip": torch.ones(3)}, ShapeError, r"clip is \[3\]: it must be \[2\]"),
        ({"offset": torch.full((2, 64), torch.nan)}, ConfigError, "must be finite"),
        ({"clip": torch.tensor([0.9, -0.1])}, ConfigError, "clip of a basis must be positive"),
        ({"offset": torch.zeros(64)}, ShapeError, "num_kv_heads, head_dim"),
        ({"offset": torch.zeros(2, 0)}, ShapeError, r"offset is \[2, 0\]"),
    ],
    ids=["kind", "singular", "clip", "nan", "negative", "offset", "no-channels"],
)
def test_impossible_bases_are_refused(
    change: dict[str, object], error: type[Exception], words: str
) -> None:
    given = {"offset": torch.zeros(2, 64)} | change
    with pytest.raises(error, match=words):
        Basis(**given)  # type: ignore[arg-type]


def test_fingerprints_tell_bases_apart_and_ignore_rounding() -> None:
    kinds = ("none", "matrix")
    assert len({basis(kind, seed).fingerprint for kind in kinds for seed in (0, 1)}) == 4
    fed = basis("matrix", clip=0.9, feedback=True)
    assert fed.fingerprint == basis("matrix").fingerprint == fed.with_clip(None).fingerprint


def test_no_gradient_comes_through() -> None:
    """The query is turned, read and turned back; half of a gradient would be a wrong one."""
    given = basis("matrix")
    bases = [LayerBasis(given, basis("matrix")), LayerBasis(basis("none"), given)]
    for tensor in (given.offset, given.matrix):
        assert tensor is not None and not tensor.requires_grad
    one = KVCache(2, 3, HEADS, DIM, 40, bases=bases)
    q = torch.randn(3, 6, DIM, requires_grad=True)
    for layer in (0, 1):
        one.append(layer, *tokens(9))
        for backend in ("cpu", "reference"):
            for result in one.attend(layer, q, return_lse=True, backend=backend):
                assert not result.requires_grad
        assert not any(x.requires_grad for x in one.dequantized(layer))
    trained = Basis(torch.zeros(HEADS, DIM, requires_grad=True))
    assert not trained.encode(tokens(2)[0]).requires_grad


@pytest.mark.parametrize("scale", [1.0, 1e3, 3e4])
def test_a_query_of_fp16_does_not_overflow_when_it_is_turned(scale: float) -> None:
    """The keys of a channel are as wide as its stored ones are narrow: M^T q is beyond fp16."""
    keys = (torch.randn(3, HEADS, 9, DIM) * min(scale, 1e3)).half()
    values, q = torch.randn(3, HEADS, 9, DIM).half(), torch.randn(3, 6, DIM).half() * 40
    wide = Basis(torch.zeros(HEADS, DIM), (scale * torch.eye(DIM)).repeat(HEADS, 1, 1))
    narrow = LayerBasis(wide, Basis(torch.zeros(HEADS, DIM)))
    found = []
    for bases in (None, [narrow]):
        one = cache(bases, k_format="fp16", v_format="fp16")
        one.append(0, keys, values)
        found.append(one.attend(0, q, return_lse=True))
        assert found[-1][0].dtype == torch.float16 and bool(found[-1][0].isfinite().all())
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-3, atol=1e-2)


def test_a_power_of_two_goes_from_the_matrix_to_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, where the launch that turns queries rounds them to fp16; it is stood in for here."""
    given = basis("matrix")
    assert given.matrix is not None
    chosen = Basis(given.offset, given.matrix * 300)
    matrix = chosen.matrix
    assert matrix is not None and chosen.fp16_matrix is matrix  # it is not needed on the CPU
    turning, factor = for_fp16(matrix)
    assert math.log2(factor) == int(math.log2(factor)) > 0
    assert torch.equal(turning * factor, matrix)
    worst = 65504 * matrix.mT.sign()
    assert bool((worst @ turning).half().isfinite().all())
    assert for_fp16(matrix / 2**20)[1] == 1

    one = cache([LayerBasis(chosen, Basis(torch.zeros(HEADS, DIM)))])
    one.append(0, *tokens(23))
    q = torch.randn(3, 6, DIM).half()
    expected = one.attend(0, q, return_lse=True, sm_scale=0.1)
    turned_by = []

    def affine_rows(
        x: torch.Tensor, matrix: torch.Tensor, offset: Any = None, *_: object, **__: object
    ) -> torch.Tensor:
        turned_by.append(matrix)
        return _per_head(x, matrix, offset).to(x.dtype)

    monkeypatch.setattr(transform, "takes_one_launch", lambda *of: True)
    monkeypatch.setattr(transform, "affine_rows", affine_rows)
    chosen.fp16_matrix, chosen.fp16_factor = turning, factor
    found = one.attend(0, q, return_lse=True, sm_scale=0.1)
    assert turned_by[0] is turning
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


def test_what_was_computed_of_a_basis_goes_where_it_goes() -> None:
    """Twins of other clip ratios share it, and so do their twins elsewhere."""
    torch.manual_seed(0)
    matrix = torch.linalg.qr(torch.randn(2, 32, 32))[0] * 3
    first = Basis(torch.randn(2, 32), matrix, None, torch.zeros(2, 32, 32))
    clipped = first.with_clip(torch.full((2,), 0.9))
    again = Basis(first.offset, matrix, torch.full((2,), 0.9), first.feedback)
    assert clipped.matrix is first.matrix and clipped.encoding.matrix is first.encoding.matrix
    for one, other in zip(clipped.encoding, again.encoding, strict=True):
        assert one is other or (
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and torch.equal(one, other)
        )
    x = torch.randn(1, 2, 5, 32)
    assert torch.equal(clipped.encode(x), again.encode(x))
    meta = clipped.to("meta")
    assert meta.encoding.offset is meta.offset and meta.clip is meta.encoding.clip
    assert first.clip is first.encoding.clip is None
    with pytest.raises(ConfigError, match="must be positive"):
        first.with_clip(torch.zeros(2))
