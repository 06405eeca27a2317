"""append_rows in a basis: the bytes are those of the basis, whatever the chunks; 10 s."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvquant import RowFormat, append_rows, dequantize_rows, quantize_rows, slots_of
from kvquant.ops.quantize import quantize_calibrated
from kvquant.rows.basis import Basis
from kvquant.rows.quantize import feedback_matrix, is_nan_row
from kvquant.rows.rotation import Rope, apply_rope
from kvquant.rows.slots import Split

BATCH, HEADS, DIM, TOKENS = 3, 2, 64, 13
CHUNKS = {"whole": [13], "one by one": [1] * 13, "chunks": [5, 1, 7]}
FORMATS = {
    "int4-g4 and int8": ("int4-g4", "int8"),
    "int4 and fp8": ("int4", "fp8"),
    "int3 and int2": ("int3", "int2"),
}


def make_basis(kind: str, clip: bool = True, feedback: bool = True, seed: int = 0) -> Basis:
    """A basis whose matrix is exact in any order of summation: a signed permutation."""
    torch.manual_seed(seed)
    matrix = torch.stack([torch.eye(DIM)[torch.randperm(DIM)] for _ in range(HEADS)])
    matrix *= torch.where(torch.rand(HEADS, DIM, 1) < 0.5, -0.5, 2.0)
    roots = torch.eye(DIM) + 0.1 * torch.randn(HEADS, DIM, DIM)
    return Basis(
        torch.randn(HEADS, DIM),
        kind,
        matrix if kind == "matrix" else None,
        torch.linspace(0.85, 1.0, HEADS) if clip else None,
        feedback_matrix((roots @ roots.mT).double()).float() if feedback else None,
    )


BASES = {
    "hadamard with feedback and clip, matrix with clip": (
        make_basis("hadamard"),
        make_basis("matrix", feedback=False),
    ),
    "matrix with feedback, none with clip and feedback": (
        make_basis("matrix", clip=False),
        make_basis("none", seed=3),
    ),
    "matrix, hadamard": (
        make_basis("matrix", clip=False, feedback=False),
        make_basis("hadamard", clip=False, feedback=False),
    ),
}


class Cache:
    """Rows of K and V of a batch, written by append_rows.

    Args:
        names: formats of K and of V.
        windows: sink_len, recent_len.
        bases: of K and of V.
        backend: of append_rows.
    """

    def __init__(
        self,
        names: tuple[str, str],
        windows: tuple[int, int],
        bases: tuple[Basis, Basis],
        backend: str | None = None,
    ) -> None:
        self.formats = [RowFormat.parse(name, DIM) for name in names]
        self.exact_format = RowFormat("bf16", 1, DIM)
        self.windows, self.bases, self.backend = windows, bases, backend
        self.packed = [self._rows(30, fmt) for fmt in self.formats]
        self.exact = [self._rows(sum(windows), self.exact_format) for _ in "kv"]
        self.seq_lens = self.packed_lens = torch.zeros(BATCH, dtype=torch.int32)
        self.bad = torch.zeros(2, dtype=torch.int32)

    @staticmethod
    def _rows(length: int, fmt: RowFormat) -> torch.Tensor:
        return torch.zeros(BATCH, HEADS, length, fmt.row_bytes, dtype=torch.uint8)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add tokens [batch, heads, tokens, dim] to all sequences."""
        (sink_len, recent_len), new = self.windows, k.shape[2]
        slots = slots_of(
            self.seq_lens, self.packed_lens, None, new, 30, sink_len=sink_len, recent_len=recent_len
        )
        has_exact = slots.exact is not None
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
        options: Any = {"k_transform": self.bases[0], "v_transform": self.bases[1]}
        options |= {"bad": self.bad, "backend": self.backend}
        options |= zip(
            ("exact_k", "exact_v"), self.exact if has_exact else (None, None), strict=True
        )
        append_rows(k, v, self.packed[0], self.packed[1], slots, *self.formats, **options)
        self.seq_lens = self.seq_lens + new
        self.packed_lens = Split(sink_len, recent_len, 1).packed_lens(
            self.seq_lens, self.packed_lens
        )

    def tensors(self) -> list[torch.Tensor]:
        return [*self.packed, *self.exact]

    def by_hand(self, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """What tensors must be once k and v are appended to nothing, by the meaning of a basis."""
        (sink_len, recent_len), total = self.windows, k.shape[2]
        last = max(total - recent_len, sink_len)
        packed, exact = [], []
        for x, fmt, basis in zip((k, v), self.formats, self.bases, strict=True):
            stored = basis.encode(x)
            ring = self._rows(sum(self.windows), self.exact_format)
            if any(self.windows):
                rounded = quantize_rows(stored, self.exact_format, check=False)
                stored = dequantize_rows(rounded, self.exact_format)
                ring[:, :, :sink_len] = rounded[:, :, :sink_len]
                for token in range(last, total):
                    row = sink_len + (token - sink_len) % recent_len
                    ring[:, :, row] = rounded[:, :, token]
            rows = self._rows(30, fmt)
            middle = stored[:, :, sink_len:last]
            rows[:, :, : last - sink_len] = quantize_calibrated(
                middle, fmt, clip=basis.clip, feedback=basis.feedback
            )
            packed.append(rows)
            exact.append(ring)
        return packed + exact


@pytest.mark.parametrize("names", FORMATS)
@pytest.mark.parametrize("windows", [(0, 0), (2, 5)], ids=["packed", "windows"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("kind", BASES)
def test_bytes_are_those_of_the_basis_whatever_the_chunks(
    kind: str, backend: str, windows: tuple[int, int], names: str
) -> None:
    k, v = torch.randn(2, BATCH, HEADS, TOKENS, DIM) * torch.logspace(-1, 1, DIM)
    for chunks in CHUNKS.values():
        cache = Cache(FORMATS[names], windows, BASES[kind], backend)
        for k_part, v_part in zip(k.split(chunks, 2), v.split(chunks, 2), strict=True):
            cache.append(k_part, v_part)
        for tensor, wanted in zip(cache.tensors(), cache.by_hand(k, v), strict=True):
            assert torch.equal(tensor, wanted), chunks


def test_any_matrix_gives_the_values_of_its_basis() -> None:
    k, v = torch.randn(2, BATCH, HEADS, TOKENS, DIM)
    basis = Basis(
        torch.randn(HEADS, DIM), "matrix", torch.eye(DIM) + 0.1 * torch.randn(HEADS, DIM, DIM)
    )
    cache = Cache(("int8", "int8"), (0, 0), (basis, basis))
    cache.append(k, v)
    values, wanted = (
        dequantize_rows(rows[0], cache.formats[0])
        for rows in (cache.tensors(), cache.by_hand(k, v))
    )
    torch.testing.assert_close(values, wanted, atol=0.05, rtol=0)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_keys_are_turned_before_they_are_encoded(backend: str) -> None:
    basis, plain = make_basis("matrix"), make_basis("none", clip=False, feedback=False)
    theta = 100 * torch.rand(TOKENS, DIM // 2)
    rope = Rope(theta.cos(), theta.sin())
    x = torch.randn(TOKENS, HEADS, DIM).bfloat16()
    fmt = RowFormat.parse("int4-g4", DIM)
    found = []
    for k, turn in ((x, rope), (apply_rope(x, rope), None)):
        rows = torch.zeros(2, 1, HEADS, TOKENS, fmt.row_bytes, dtype=torch.uint8)
        transforms: Any = {"k_transform": basis, "v_transform": plain, "rope": turn}
        slots = torch.arange(TOKENS)
        append_rows(
            k, x.to(k.dtype), rows[0], rows[1], slots, fmt, fmt, **transforms, backend=backend
        )
        found.append(rows)
    assert torch.equal(*found) and bool(found[0].any())


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


def test_sixteen_bit_rows_with_nan_are_counted_once() -> None:
    basis = make_basis("hadamard")
    cache = Cache(("int4", "int4"), (1, 3), (basis, basis))
    k = torch.randn(BATCH, HEADS, 6, DIM)
    k[0, 0, 2, 9] = torch.nan
    cache.append(k[:, :, :4], k[:, :, :4])
    assert cache.bad.tolist() == [1, 1]
    cache.append(k[:, :, 4:], k[:, :, 4:])
    assert cache.bad.tolist() == [1, 1], "the row has left the window, and was counted before"
    assert bool(dequantize_rows(cache.packed[0][0, 0, 1], cache.formats[0]).isnan().all())


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_row_that_only_its_16_bit_format_holds_is_counted_when_it_leaves(backend: str) -> None:
    basis = make_basis("none")
    cache = Cache(("int4", "int4"), (0, 2), (basis, basis), backend)
    k, v = torch.zeros(2, BATCH, HEADS, 5, DIM)
    k[1, 0, 1] = 1e5  # bfloat16 holds it, int4 ends at 65504
    for token, count in enumerate([0, 0, 0, 1, 1]):
        cache.append(k[:, :, token : token + 1], v[:, :, token : token + 1])
        assert cache.bad.tolist() == [count, 0]
