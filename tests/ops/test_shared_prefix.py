"""Attention over a shared prefix: that of the whole sequences, whoever shares what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attend import attend_segments, attend_shared
from fake_cuda import FakeDriver
from relative_l2 import relative_l2
from segment_cases import lens as int32
from variant_cases import variant_with

from kvquant import AttentionVariant, quantize_rows
from kvquant.kernels.cuda.prefix.launch import combine
from kvquant.ops.attention import State
from kvquant.rows.basis import Basis, LayerBasis
from kvquant.rows.format import RowFormat
from kvquant.rows.segment import Segment

INT4, INT8 = RowFormat.parse("int4-g4", 64), RowFormat.parse("int8", 64)
VARIANTS = (
    ("soft_cap",),
    ("score_offsets",),
    ("tree_mask",),
    ("soft_cap", "sink_logits", "tree_mask", "score_offsets"),
)


def rows(batch: int, tokens: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """K and V rows [batch, 2, tokens, row bytes]."""
    k, v = torch.randn(2, batch, 2, tokens, 64)
    return quantize_rows(k, INT4).to(device), quantize_rows(v, INT8).to(device)


def shared(
    prefix_len: int, own_lens: tuple[int, ...], sharing: tuple[int, ...], device: str = "cpu"
) -> tuple[Segment, Segment, Segment]:
    """A prefix, each sequence's own tokens, and the whole sequences."""
    one, own = rows(1, prefix_len, device), rows(len(own_lens), max(own_lens), device)
    lens = int32(*own_lens).to(device)
    prefix = Segment(*one, int32(prefix_len).to(device), INT4, INT8)
    rest = Segment(*own, lens, INT4, INT8)
    whole, whole_lens = [], lens.clone()
    for head, tail in zip(one, own, strict=True):
        made = torch.zeros(len(own_lens), 2, prefix_len + tail.shape[2], tail.shape[3])
        made = made.to(device, torch.uint8)
        for b in range(len(own_lens)):
            start = prefix_len if b in sharing else 0
            made[b, :, :start] = head[0, :, :start]
            made[b, :, start : start + tail.shape[2]] = tail[b]
        whole.append(made)
    for b in sharing:
        whole_lens[b] += prefix_len
    return prefix, rest, Segment(whole[0], whole[1], whole_lens, INT4, INT8)


def queries(device: str) -> tuple[torch.Tensor, float]:
    """[3, 3, 6, 64], and the largest error of their results."""
    q = torch.randn(3, 3, 6, 64, device=device)
    return (q, 1e-5) if device == "cpu" else (q.bfloat16(), 4e-3)


def assert_right(found: State, expected: State, limit: float) -> None:
    """Assert that out and lse are what was expected, 0 and -inf where a query sees nothing."""
    (out, lse), (wanted, wanted_lse) = found, expected
    empty = wanted_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty) and not out[empty].any()
    assert relative_l2(out, wanted) < limit
    assert relative_l2(lse[~empty], wanted_lse[~empty]) < limit


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("sharing", [(0, 1, 2), (2, 0), ()], ids=["all", "some", "none"])
def test_several_queries_see_all_of_the_prefix(
    sharing: tuple[int, ...], ragged: bool, device: str
) -> None:
    prefix, own, whole = shared(140, (9, 2, 17), sharing, device)
    q, limit = queries(device)
    q_lens = int32(1, 3, 0).to(device) if ragged else None
    members = None if len(sharing) == 3 else torch.tensor([-1, *sharing], dtype=torch.int64)
    members = members if members is None else members.to(device)
    found = attend_shared(q, prefix, [own], members=members, q_lens=q_lens, return_lse=True)
    expected = attend_segments(q, [whole], q_lens=q_lens, return_lse=True, backend="reference")
    assert_right(found, expected, limit)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sinks_take_part_once(device: str) -> None:
    prefix, own, whole = shared(140, (9, 2, 17), (2, 0), device)
    q, limit = queries(device)
    variant = AttentionVariant(sink_logits=torch.randn(6, device=device))
    options: dict[str, Any] = {"variant": variant, "q_lens": int32(3, 3, 2).to(device)}
    members = torch.tensor([2, 0], device=device)
    found = attend_shared(q, prefix, [own], members=members, return_lse=True, **options)
    expected = attend_segments(q, [whole], return_lse=True, backend="reference", **options)
    assert_right(found, expected, limit)
    assert torch.equal(attend_shared(q, prefix, [own], members=members, **options), found[0])


@pytest.mark.parametrize(
    "backend", ["cpu", "reference", pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("in_basis", [False, True], ids=["", "basis"])
@pytest.mark.parametrize("fields", VARIANTS, ids="-".join)
def test_a_variant_of_queries_is_that_of_whole_sequences(
    fields: tuple[str, ...], in_basis: bool, backend: str
) -> None:
    device = "cuda" if backend == "cuda" else "cpu"
    prefix, own, whole = shared(140, (9, 4, 17), (2, 0), device)
    q, limit = queries(device)
    made: dict[str, Any] = variant_with(fields, 3, 3, 6)._asdict()
    tensors = {name: x.to(device) for name, x in made.items() if isinstance(x, torch.Tensor)}
    variant = AttentionVariant(**{**made, **tensors})
    basis = None
    if in_basis:
        sides = (Basis(torch.randn(2, 64)).to(torch.device(device)) for _ in "kv")
        basis, limit = LayerBasis(*sides), 2 * limit
    options: dict[str, Any] = {"q_lens": int32(3, 1, 2).to(device), "basis": basis}
    options |= {"variant": variant, "return_lse": True, "sm_scale": 0.3}
    members = torch.tensor([-1, 2, 0], device=device)
    found = attend_shared(q, prefix, [own], members=members, backend=backend, **options)
    assert_right(found, attend_segments(q, [whole], backend="reference", **options), limit)
    if variant.tree_mask is None:
        if variant.score_offsets is not None:
            variant = variant._replace(score_offsets=variant.score_offsets[:, 0])
        lens = whole.seq_lens if in_basis else None
        options |= {"variant": variant, "q_lens": None, "seq_lens": lens}
        one = attend_shared(q[:, 0], prefix, [own], members=members, backend=backend, **options)
        wanted = attend_segments(q[:, 0], [whole], backend="reference", **options)
        assert_right(one, wanted, limit)


@pytest.mark.parametrize("prefix_len", [0, 30])
def test_empty_prefixes_and_empty_sequences_add_nothing(prefix_len: int) -> None:
    prefix, own, whole = shared(30, (0, 5), (0, 1))
    prefix = prefix._replace(seq_lens=int32(prefix_len))
    q = torch.randn(2, 6, 64)
    out, lse = attend_shared(q, prefix, [own], return_lse=True)
    if prefix_len:
        expected: Any = attend_segments(q, [whole], return_lse=True)
    else:
        expected = attend_segments(q, [own], return_lse=True)
        assert not out[0].any() and bool((lse[0] == -torch.inf).all())
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_stored_in_basis", [False, True], ids=["plain", "basis"])
@pytest.mark.parametrize("shape", [(3, 0), (0, 2), (0,)], ids=str)
def test_no_queries(shape: tuple[int, ...], is_stored_in_basis: bool) -> None:
    matrix = Basis(torch.randn(2, 64), torch.eye(64).expand(2, 64, 64))
    basis = LayerBasis(matrix, matrix) if is_stored_in_basis else None
    prefix, own, _ = shared(40, (9, 1, 17), ())
    own = own._replace(**{name: getattr(own, name)[: shape[0]] for name in own._fields[:3]})
    q = torch.zeros(*shape, 6, 64)
    out, lse = attend_shared(q, prefix, [own], basis=basis, return_lse=True)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])


def test_nothing_is_merged_of_a_prefix_for_nobody(cuda: FakeDriver) -> None:
    out, lse = torch.zeros(5, 8, 64, dtype=torch.bfloat16), torch.zeros(5, 8)
    prefix_out, prefix_lse = torch.zeros(7, 2, 3 * 4, 64), torch.zeros(7, 2, 3 * 4)
    combine(out, lse, prefix_out, prefix_lse, torch.tensor([4, 0, 2]))
    combine(out, lse, prefix_out[:, :, :0], prefix_lse[:, :, :0], None)
    assert [(note.grid, note.block) for note in cuda.launched] == [((6, 1, 1), (128, 1, 1))]
