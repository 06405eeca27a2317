"""append_rows in a basis: the bytes are those of the basis, whatever the chunks; 10 s."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvquant import KVCache, RowFormat, Slots, append_rows, dequantize_rows, quantize_rows
from kvquant.ops.quantize import quantize_calibrated
from kvquant.rows.basis import Basis, LayerBasis
from kvquant.rows.quantize import feedback_matrix, is_nan_row

BATCH, HEADS, DIM, TOKENS = 3, 2, 64, 13
CHUNKS = {"whole": [13], "one by one": [1] * 13, "chunks": [5, 1, 7]}
FORMATS = {
    "int4-g4 and int8": ("int4-g4", "int8"),
    "int4 and fp8": ("int4", "fp8"),
    "int3 and int2": ("int3", "int2"),
}


def make_basis(kind: str, clip: bool = True, feedback: bool = True) -> Basis:
    """A basis whose matrix is exact in any order of summation: a signed permutation."""
    torch.manual_seed(0)
    matrix = torch.stack([torch.eye(DIM)[torch.randperm(DIM)] for _ in range(HEADS)])
    matrix *= torch.where(torch.rand(HEADS, DIM, 1) < 0.5, -0.5, 2.0)
    roots = torch.eye(DIM) + 0.1 * torch.randn(HEADS, DIM, DIM)
    return Basis(
        torch.randn(HEADS, DIM),
        matrix if kind == "matrix" else None,
        torch.linspace(0.85, 1.0, HEADS) if clip else None,
        feedback_matrix((roots @ roots.mT).double()).float() if feedback else None,
    )


BASES = {
    "none with feedback and clip, matrix with clip": (
        make_basis("none"),
        make_basis("matrix", feedback=False),
    ),
    "matrix with feedback, none": (
        make_basis("matrix", clip=False),
        make_basis("none", clip=False, feedback=False),
    ),
}


def make(names: tuple[str, str], windows: tuple[int, int], bases: tuple[Basis, Basis]) -> KVCache:
    """One layer of room for 30 packed tokens."""
    kept: Any = {"sink_len": windows[0], "recent_len": windows[1], "rollback_len": 0}
    kept |= {"k_format": names[0], "v_format": names[1], "bases": [LayerBasis(*bases)]}
    return KVCache(1, BATCH, HEADS, DIM, 30 + sum(windows), **kept)


def by_hand(
    names: tuple[str, str], windows: tuple[int, int], bases: tuple[Basis, Basis], new: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The packed and the 16-bit rows of K and of V, once new ones are appended to nothing."""
    (sink_len, recent_len), total = windows, new.shape[3]
    last = max(total - recent_len, sink_len)
    found, exact = [], RowFormat("bf16", 1, DIM)
    for x, name, basis in zip(new, names, bases, strict=True):
        stored, fmt = basis.encode(x), RowFormat.parse(name, DIM)
        ring = torch.zeros(BATCH, HEADS, sum(windows), exact.row_bytes, dtype=torch.uint8)
        if any(windows):
            rounded = quantize_rows(stored, exact, check=False)
            stored = dequantize_rows(rounded, exact)
            ring[:, :, :sink_len] = rounded[:, :, :sink_len]
            for token in range(last, total):
                ring[:, :, sink_len + (token - sink_len) % recent_len] = rounded[:, :, token]
        rounding: Any = {"clip": basis.clip, "feedback": basis.feedback}
        found.append((quantize_calibrated(stored[:, :, sink_len:last], fmt, **rounding), ring))
    return found


@pytest.mark.parametrize("names", FORMATS)
@pytest.mark.parametrize("windows", [(0, 0), (2, 5)], ids=["packed", "windows"])
@pytest.mark.parametrize("kind", BASES)
def test_bytes_are_those_of_the_basis_whatever_the_chunks(
    kind: str, windows: tuple[int, int], names: str
) -> None:
    new = torch.randn(2, BATCH, HEADS, TOKENS, DIM) * torch.logspace(-1, 1, DIM)
    given = FORMATS[names], windows, BASES[kind]
    wanted = by_hand(*given, new)
    for chunks in CHUNKS.values():
        cache = make(*given)
        for part in new.split(chunks, 3):
            cache.append(0, part[0], part[1])
        at = cache.layers[0]
        found = (at.k_packed, at.k_exact_rows), (at.v_packed, at.v_exact_rows)
        for (packed, exact), (rows, ring) in zip(found, wanted, strict=True):
            assert torch.equal(packed[:, :, : rows.shape[2]], rows), chunks
            assert torch.equal(exact, ring), chunks


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("feedback", [False, True], ids=["clip", "clip and feedback"])
def test_rows_that_cannot_be_held_are_nan_and_counted(feedback: bool, backend: str) -> None:
    basis, fmt = make_basis("none", feedback=feedback), RowFormat.parse("int4-g4", DIM)
    x = torch.randn(6, HEADS, DIM)
    x[1, 0, 3], x[2, 1, 5] = torch.nan, -torch.inf
    x[4, 0, 0] = 7e4  # would be in range once clipped
    rows = torch.zeros(2, 1, HEADS, 6, fmt.row_bytes, dtype=torch.uint8)
    bad = torch.tensor([5, 0], dtype=torch.int32)
    slots = torch.tensor([5, 4, 3, -1, 1, 0])
    options: Any = {"k_transform": basis, "v_transform": basis, "bad": bad, "backend": backend}
    append_rows(x, x, rows[0], rows[1], slots, fmt, fmt, **options)
    wrong = is_nan_row(rows[0, 0], fmt).nonzero().tolist()
    assert wrong == [[0, 1], [0, 4], [1, 3]] and bad.tolist() == [8, 3]
    assert bool(dequantize_rows(rows[0, 0, 0, 1], fmt).isnan().all())
    assert not rows[0, 0, :, 2].any(), "no token goes there"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_row_that_only_its_16_bit_format_holds_is_counted_when_it_leaves(backend: str) -> None:
    basis, fmt, exact = make_basis("none"), RowFormat.parse("int4", DIM), RowFormat("bf16", 1, DIM)
    packed, kept = (
        [torch.zeros(1, HEADS, 2, f.row_bytes, dtype=torch.uint8) for _ in "kv"]
        for f in (fmt, exact)
    )
    bad, zero = torch.zeros(2, dtype=torch.int32), torch.zeros(1, HEADS, DIM)
    large = zero.clone()
    large[0, 0] = 1e5  # bfloat16 holds it, int4 ends at 65504
    options: Any = {"exact_k": kept[0], "exact_v": kept[1], "bad": bad, "backend": backend}
    options |= {"k_transform": basis, "v_transform": basis}
    for k, evicted, count in ((large, -1, 0), (zero, 0, 1), (zero, 1, 1)):
        slots = Slots(*(torch.tensor([slot]) for slot in (-1, 0, evicted)))
        append_rows(k, zero, packed[0], packed[1], slots, fmt, fmt, **options)
        assert bad.tolist() == [count, 0]
