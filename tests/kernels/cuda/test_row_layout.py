"""Rows in shared memory: aligned, free of bank conflicts, or refused. No GPU is needed."""

from __future__ import annotations

from collections import Counter

import pytest

from kvquant.errors import UnsupportedError
from kvquant.kernels.cuda.device.row_layout import UNIT, StagedRow
from kvquant.rows.format import HEAD_DIMS, NAMES, RowFormat


def formats() -> list[RowFormat]:
    """Every format that has a CUDA kernel."""
    found = []
    for head_dim in HEAD_DIMS:
        for name in NAMES:
            fmt = RowFormat.parse(name, head_dim)
            try:
                StagedRow(fmt)
            except UnsupportedError:
                continue
            found.append(fmt)
    return found


@pytest.mark.parametrize("fmt", formats(), ids=lambda fmt: f"{fmt}/{fmt.head_dim}")
def test_eight_rows_share_no_bank_or_are_as_long_as_in_memory(fmt: RowFormat) -> None:
    row = StagedRow(fmt)
    banks = Counter(i * row.stride // UNIT % 8 for i in range(8))
    if row.stride // UNIT % 2:
        assert max(banks.values()) == 1
    else:  # twofold conflicts cost less than the padding
        assert max(banks.values()) == 2
        assert row.stride == row.prefix + fmt.code_bytes == -(-fmt.row_bytes // UNIT) * UNIT


@pytest.mark.parametrize("fmt", formats(), ids=lambda fmt: f"{fmt}/{fmt.head_dim}")
def test_codes_are_aligned_and_copies_fill_the_row(fmt: RowFormat) -> None:
    row = StagedRow(fmt)
    assert row.prefix % UNIT == 0
    assert row.prefix + fmt.code_bytes <= row.stride and row.prefix >= fmt.header_bytes
    for dense in (True, False):
        landed = StagedRow(fmt, dense)
        assert landed.stride == row.stride
        if landed.realigned and not dense:  # wherever the row starts, its windows cover it
            latest = UNIT - landed.alignment
            assert UNIT * landed.windows >= latest + fmt.row_bytes
            assert landed.landing % UNIT == 0
        if landed.realigned and dense:  # an odd number of words or pairs: no bank conflicts
            assert landed.landing == fmt.row_bytes
            is_even = (str(fmt), fmt.head_dim) == ("int2", 112)  # 32 bytes: twofold conflicts
            assert fmt.row_bytes // landed.alignment % 2 == (not is_even)
    assert row.chunks * row.span * (16 if fmt.is_exact else fmt.bits) <= 16 * 8 * row.chunks * (
        2 if fmt.is_exact else 1
    )


@pytest.mark.parametrize("fmt", formats(), ids=lambda fmt: f"{fmt}/{fmt.head_dim}")
def test_lanes_that_load_words_of_direct_rows_share_no_bank(fmt: RowFormat) -> None:
    pair = {"int2": 128, "int3": 128, "int4": 64, "int8": 32, "fp8": 32}.get(str(fmt))
    is_whole = pair is not None and fmt.head_dim % pair == 0 and fmt.head_dim <= 256
    assert StagedRow(fmt).may_be_direct == is_whole
    if not is_whole:
        return
    row = StagedRow(fmt, direct=True)
    assert row.landing == row.stride == row.fmt.row_bytes and not row.realigned
    of_row, of_matrix = row.token_steps
    tokens = {of_row * g + of_matrix * i for g in range(8) for i in range(4)}
    assert tokens == set(range(32)), "matrices have each token of a tile once"
    words = row.stride // 4
    for i in range(4):
        k = {(words * (of_row * g + of_matrix * i) + t) % 32 for g in range(8) for t in range(4)}
        pairs = [of_row * 2 * t + of_matrix * i for t in range(4)]
        v = {(words * token + g) % 32 for token in pairs for g in range(8)}
        assert len(k) == len(v) == 32


def test_groups_that_do_not_line_up_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="groups of 24 do not line up with the 32 elements"):
        StagedRow(RowFormat.parse("int4-g4", 96))
