"""Rows whose groups of elements have bits of their own: a simulation, for bench_graded.py.

A row x is stored as y = M^-1 (x - offset), as in a plan. Its elements are cut into groups of equal
size, and each group has bits of its own, 0 to 8; a group of 0 bits is read as 0. Kinds of M:

    sorted   W^-½ U S^a R with a Hadamard matrix R for each group: a group has directions of like
             importance, the most important ones first, and bits fall from group to group. Feedback
             cannot help one group by another: their errors do not meet
    mixed    the same with one R for all elements: all directions are in all elements. Feedback
             rounds elements one after another, and an element makes up for errors before it. So
             the last elements count most, and bits rise from group to group
    random   as mixed, with another R: rows in random order and of random signs

and three headers, in fp16, counted as bytes of the row:

    row      the middle and half the range of all elements with bits
    groups   the same of each group with bits
    scales   half the range of each group with bits about 0

A plan has for each head and group the share of its header's range that the codes span. Values
follow from header and plan alone, as a decoder would read them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np
import torch

from kvquant.calibration.bases import mixing, regularized, spreading
from kvquant.rows.quantize import feedback_matrix

KINDS = ("sorted", "mixed", "random")
BITS = (0, 1, 2, 3, 4, 5, 6, 8)
# of a Gaussian number: the least mean squared error that evenly spaced levels of so many bits
# have, and the largest level then (J. Max, 1960: Quantizing for minimum distortion)
ERRORS = {0: 1.0, 1: 0.3634, 2: 0.1188, 3: 0.03744, 4: 0.01154, 5: 0.003495, 6: 0.00104, 8: 9.2e-5}
ENDS = {1: 0.798, 2: 1.494, 3: 2.051, 4: 2.514, 5: 2.916, 6: 3.289, 8: 3.94}
HEADERS = {"row": 0, "groups": 4, "scales": 2}  # bytes of a group; a row has 4 more of "row"
STRETCHES = (0.85, 1.0, 1.2, 1.4)  # of ENDS
FEW = 3  # choices of bits of each kind that are tried, of those that theory likes best


@dataclass(frozen=True)
class Graded:
    """How rows of one side of one layer are kept.

    Attributes:
        offset: [heads, dim].
        matrix, feedback: [heads, dim, dim]: M and L, float32.
        bits: of each group.
        header: of HEADERS.
        spans: [heads, groups]: the share of the header's range that a group's codes span.
        kind: of M.
    """

    offset: torch.Tensor
    matrix: torch.Tensor
    feedback: torch.Tensor
    bits: tuple[int, ...]
    header: str
    spans: torch.Tensor
    kind: str = ""

    @functools.cached_property
    def inverse(self) -> torch.Tensor:
        """M^-1, [heads, dim, dim]."""
        found: torch.Tensor = torch.linalg.inv(self.matrix.double()).float()
        return found

    @property
    def row_bytes(self) -> float:
        """Bytes of a row, header and codes."""
        return bytes_of(self.bits, self.header, self.offset.shape[-1])

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [batch, heads, tokens, dim] in the basis."""
        encoded: torch.Tensor = (x - self.offset[:, None]) @ self.inverse.mT
        return encoded

    def ranges(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The middle and half the range of each group, as headers have them: [..., groups]."""
        grouped = y.unflatten(-1, (len(self.bits), -1))
        if self.header == "scales":
            half = grouped.abs().amax(-1)
            return torch.zeros_like(half), half.half().float()
        least, greatest = grouped.amin(-1), grouped.amax(-1)
        if self.header == "row":
            used = torch.tensor(self.bits) > 0
            least, greatest = least[..., used].amin(-1), greatest[..., used].amax(-1)
            least, greatest = (t[..., None].expand(grouped.shape[:-1]) for t in (least, greatest))
        middle, half = (least + greatest) / 2, (greatest - least) / 2
        return middle.half().float(), half.half().float()

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """What is read of rows [batch, heads, tokens, dim]."""
        y = self.encode(x)
        middle, half = self.ranges(y)
        half = half * self.spans[:, None]
        levels = torch.tensor([2.0**b - 1 for b in self.bits])
        step = torch.where(levels > 0, 2 * half / levels.clamp(min=1), 0)
        low = torch.where(levels > 0, middle - half, 0)
        width = y.shape[-1] // len(self.bits)
        low, step, levels = (t.repeat_interleave(width, -1) for t in (low, step, levels))
        values = rounded(y, low, step, levels, self.feedback)
        read: torch.Tensor = values @ self.matrix.mT + self.offset[:, None]
        return read


def rounded(
    y: torch.Tensor,
    low: torch.Tensor,
    step: torch.Tensor,
    levels: torch.Tensor,
    feedback: torch.Tensor,
) -> torch.Tensor:
    """Values of rows [batch, heads, tokens, dim] that are rounded element after element.

    As kvquant.rows.quantize.round_with_feedback, with levels [dim] of each element's own.
    """
    found = torch.empty_like(y)
    for head, factors in enumerate(feedback):
        rows = (t[:, head].reshape(-1, y.shape[-1]).numpy() for t in (y, low, step))
        values = torch.from_numpy(_rounded(*rows, levels.numpy(), factors.numpy()))
        found[:, head] = values.view_as(found[:, head])
    return found


@numba.njit(fastmath=True, cache=False)  # type: ignore[untyped-decorator]
def _rounded(y: Any, low: Any, step: Any, levels: Any, feedback: Any) -> Any:
    """The same of the rows [rows, dim] of one head."""
    found, error = np.empty_like(y), np.empty_like(y[0])
    for row in range(len(y)):
        for i in range(y.shape[1]):
            owed = np.float32(0)
            for j in range(i):
                owed += feedback[i, j] * error[j]
            wanted = y[row, i] - owed - low[row, i]
            code = np.float32(0)
            if step[row, i] > 0:
                code = min(max(np.rint(wanted / step[row, i]), np.float32(0)), levels[i])
            found[row, i] = code * step[row, i] + low[row, i]
            error[i] = found[row, i] - y[row, i]
    return found


def bytes_of(bits: tuple[int, ...], header: str, dim: int) -> float:
    """Bytes of a row."""
    used = sum(one > 0 for one in bits)
    return 4 * (header == "row") + HEADERS[header] * used + dim // len(bits) * sum(bits) / 8


def choices(groups: int, header: str, dim: int, row_bytes: float) -> Iterator[tuple[int, ...]]:
    """Bits of groups, falling, of rows that take all of so many bytes that they can."""

    def falling(count: int, most: int) -> Iterator[tuple[int, ...]]:
        if not count:
            yield ()
            return
        for first in BITS:
            if first <= most:
                for rest in falling(count - 1, first):
                    yield (first, *rest)

    fitting = [
        bits for bits in falling(groups, BITS[-1]) if bytes_of(bits, header, dim) <= row_bytes
    ]
    largest = max(bytes_of(bits, header, dim) for bits in fitting)
    yield from (bits for bits in fitting if bytes_of(bits, header, dim) == largest)


def made(
    weights: torch.Tensor,
    covariance: torch.Tensor,
    offset: torch.Tensor,
    kind: str,
    power: float,
    groups: int,
    header: str,
    row_bytes: float,
) -> Iterator[Graded]:
    """The FEW choices of bits that theory likes best.

    Args:
        weights, covariance: [heads, dim, dim], float64: W and C.
        offset: [heads, dim], float32.
        kind, power: of M, with a.
        groups, header, row_bytes: of rows.
    """
    weights, dim = regularized(weights), offset.shape[-1]
    u, s, _ = torch.linalg.svd(_power(weights, 0.5) @ _power(regularized(covariance), 0.5))
    turn = torch.block_diag(*[spreading(dim // groups)] * groups)
    if kind != "sorted":
        turn = spreading(dim) @ (mixing(dim) if kind == "random" else torch.eye(dim).double())
    matrix = _power(weights, -0.5) @ (u * s.pow(power)[:, None]) @ turn
    inverse = torch.linalg.inv(matrix)
    variance = (inverse @ covariance @ inverse.mT).diagonal(dim1=-2, dim2=-1)
    size = variance.mean(-1, keepdim=True).sqrt()  # so that elements have a mean square of 1
    matrix, variance = matrix * size[..., None], variance / size.square()
    metric = matrix.mT @ weights @ matrix
    feedback = feedback_matrix(metric)
    undone = torch.linalg.inv(feedback)
    steps = (undone.mT @ metric @ undone).diagonal(dim1=-2, dim2=-1)  # D of L^T D L
    counts = (steps * variance).unflatten(-1, (groups, -1)).mean((0, 2))
    order = counts.argsort(descending=True).tolist()
    ranked = []
    for falling in choices(groups, header, dim, row_bytes):
        bits = tuple(one for _, one in sorted(zip(order, falling, strict=True)))
        cost = sum(float(c) * ERRORS[b] for c, b in zip(counts, bits, strict=True))
        ranked.append((cost, bits))
    std = variance.unflatten(-1, (groups, -1)).mean(-1).sqrt().float()
    for _, bits in sorted(ranked)[:FEW]:
        ends = torch.tensor([ENDS.get(one, 0.0) for one in bits]) * std
        parts = offset, matrix.float(), feedback.float()
        yield Graded(*parts, bits, header, ends, kind)


def with_spans(one: Graded, x: torch.Tensor) -> Graded:
    """Spans of the header's range, from what made leaves there: ends of the codes themselves.

    Args:
        one: of made.
        x: [1, heads, tokens, dim]: rows whose ranges are taken as those of all.
    """
    _, half = one.ranges(one.encode(x))
    return replace(one, spans=one.spans / half.mean((0, 2)).clamp(min=1e-6))


def stretched(one: Graded, by: Mapping[int, float] | float) -> Graded:
    """With spans times a number, the same for groups of equal bits."""
    factors = [by if isinstance(by, float) else by.get(bits, 1.0) for bits in one.bits]
    return replace(one, spans=one.spans * torch.tensor(factors))


def searched(one: Graded, error: Callable[[Graded], float]) -> Graded:
    """With the spans of least error: those of all groups together, then of each number of bits."""
    best = min([stretched(one, by) for by in STRETCHES], key=error)
    for bits in sorted(set(best.bits) - {0}):
        more = [stretched(best, {bits: by}) for by in (0.85, 1.15, 1.35)]
        best = min([best, *more], key=error)
    return best


def _power(moment: torch.Tensor, exponent: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(moment)
    found: torch.Tensor = (vectors * values.clamp(min=1e-300).pow(exponent)[:, None]) @ vectors.mT
    return found
