"""Every layout fact of every row format."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from kvquant import RowFormat
from kvquant.errors import ConfigError
from kvquant.rows.codec import CODECS, GROUPS, codec_names
from kvquant.rows.format import NAMES, ROW_DIMS

QUANTIZED = [
    RowFormat(codec, groups, head_dim)
    for codec, groups, head_dim in itertools.product(
        ("int2", "int3", "int4", "int8", "fp8"), GROUPS, ROW_DIMS
    )
    if groups in CODECS[codec].groups
]
EXACT = [RowFormat(codec, 1, head_dim) for codec in ("bf16", "fp16") for head_dim in ROW_DIMS]


def label(fmt: RowFormat) -> str:
    return f"{fmt}-of-{fmt.head_dim}"


@pytest.mark.parametrize(
    ("name", "row_bytes", "alignment", "bits_per_element"),
    [
        ("int2", 36, 4, 2.25),
        ("int3", 52, 4, 3.25),
        ("int4-g8", 96, 32, 6.0),
        ("int8", 132, 4, 8.25),
        ("fp8-g4", 144, 16, 9.0),
        ("bf16", 256, 256, 16.0),
    ],
)
def test_rows_of_128_elements_have_the_documented_sizes(
    name: str, row_bytes: int, alignment: int, bits_per_element: float
) -> None:
    fmt = RowFormat.parse(name, head_dim=128)
    assert fmt.row_bytes == row_bytes
    assert fmt.alignment == alignment
    assert fmt.bits_per_element == bits_per_element


@pytest.mark.parametrize("fmt", QUANTIZED + EXACT, ids=label)
def test_parameters_come_first_then_codes_and_names_are_printed_as_they_are_parsed(
    fmt: RowFormat,
) -> None:
    assert fmt.is_exact == (fmt in EXACT)
    assert fmt.header_bytes == (0 if fmt.is_exact else 4 * fmt.groups)
    assert fmt.code_bytes == fmt.head_dim * fmt.bits // 8
    assert fmt.row_bytes == fmt.header_bytes + fmt.code_bytes
    assert fmt.group_size * fmt.groups == fmt.head_dim
    assert fmt.is_exact or fmt.max_abs == 65504
    assert RowFormat.parse(str(fmt), fmt.head_dim) == fmt
    assert ("-g" in str(fmt)) == (fmt.groups > 1)
    assert RowFormat.parse(fmt, fmt.head_dim) is fmt
    if fmt in QUANTIZED and fmt.groups == 1 and 4 in CODECS[fmt.codec].groups:  # may be written out
        assert RowFormat.parse(f"{fmt}-g1", fmt.head_dim) == fmt


def test_all_names_are_listed() -> None:
    listed = [*NAMES, "int4-g1", "int8-g1", "fp8-g1"]
    assert len(set(NAMES)) == len(NAMES) == 16
    assert [str(RowFormat.parse(name, 64)) for name in NAMES] == list(NAMES)
    made = {
        f"{codec}{end}"
        for codec in codec_names()
        for end in ("", "-g1", "-g2", "-g4", "-g8", "-g16")
    }
    for name in made - {*listed, "int2-g1", "int3-g1", "bf16-g1", "fp16-g1"}:
        with pytest.raises(ConfigError):
            RowFormat.parse(name, 64)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int6", "'int6' does not exist: use int2, int3, int4, int8, fp8, bf16 or fp16"),
        ("INT4", "format 'INT4' does not exist"),
        ("q8_0", "for groups (int4-g4); the nearest here is 'int8'"),
        ("Q4_0", "the nearest here is 'int4-g4'"),
        ("nf4", "the nearest here is 'int4-g4'"),
        ("fp8_e5m2", "the nearest here is 'fp8'"),
        ("int4_per_token_head", "the nearest here is 'int4'"),
        ("torch.bfloat16", "the nearest here is 'bf16'"),
        ("", "format '' does not exist"),
        ("int4g4", "format 'int4g4' does not exist"),
        ("int4-g-4", "format 'int4-g-4' does not exist"),
        ("int4-g4-g4", "format 'int4-g4-g4' does not exist"),
        (" int4", "format ' int4' does not exist"),
        ("int4-g8+fp8-g4", "format 'int4-g8+fp8-g4' has several parts, as latent"),
        ("int4-g3", "groups 3 is not supported: use 1, 2, 4 or 8"),
        *(
            (f"int4-g{groups}", "does not exist: use int2, int3")
            for groups in ("04", "4 ", "\N{FULLWIDTH DIGIT FOUR}", "9" * 5000, "")
        ),
        ("int8-g16", "groups 16 is not supported"),
        ("fp8-g0", "groups 0 is not supported"),
        ("bf16-g4", "bf16 rows have no groups: use 'bf16'"),
        ("int3-g4", "int3 rows have no groups: use 'int3'"),
        ("int2-g2", "int2 rows have no groups: use 'int2'"),
        ("int3-g3", "groups 3 is not supported: use 1, 2, 4 or 8"),
        (4, "format 4 is not possible"),
        (None, "format None is not possible"),
        (RowFormat("int4", 4, 64), "format int4-g4 has head_dim 64, not 128"),
    ],
)
def test_other_names_are_refused(name: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RowFormat.parse(name, 128)
    assert message in str(caught.value) and len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "head_dim", [0, -64, 1, 16, 72, 100, 120, 127, 160, 576, 128.0, True, "128", None]
)
def test_other_head_dims_are_refused(head_dim: Any) -> None:
    known: Any = np.int64(128)
    assert RowFormat.parse("int4", known) == RowFormat("int4", 1, 128)  # 128.0 must not find it
    for make in (RowFormat.parse, lambda name, dim: RowFormat(name, 1, dim)):
        with pytest.raises(
            ConfigError, match="is not supported: use 64, 80, 96, 112, 128, 192, 256 or 512"
        ):
            make("int4", head_dim)


@pytest.mark.parametrize("groups", [2.0, True, "4", None])
def test_groups_are_whole_numbers(groups: int) -> None:
    with pytest.raises(ConfigError, match=r"groups .* is not supported"):
        RowFormat("int4", groups, 128)
