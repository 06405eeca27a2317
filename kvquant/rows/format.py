"""The row formats: the one home of every layout fact.

A row holds one token of one KV head. A quantized row starts with its parameters, then its codes:

    byte 0     2     4     6           4G                                row_bytes
         ┌─────┬─────┬─────┬─────┬ ─ ─ ┬───────┬───────┬ ─ ─ ─ ─ ┬───────┐
         │scale│shift│scale│shift│     │ code  │ code  │         │ code  │
         │  0  │  0  │  1  │  1  │     │ 0 (1) │       │         │       │
         └─────┴─────┴─────┴─────┴ ─ ─ ┴───────┴───────┴ ─ ─ ─ ─ ┴───────┘
          header: G groups, fp16 each   codes in the order of the elements

    value = code * scale[group] + shift[group]      group = element // group_size

Numbers are little endian. INT4 packs two codes a byte, the even element in the low nibble; INT8
codes are unsigned bytes; FP8 codes are E4M3 (finite, NaN but no Inf). 16-bit rows (bf16, fp16) have
no header: the elements stand as they are. The INT4 layout is that of FBGEMM's and xFormers' INT4 KV
caches, the FP8 layout with one group that of FBGEMM's per-token in-row FP8.

Rows of 512 and 32 elements are parts of latent rows (latent.py), and so is FP8_DS_MLA, the one
codec whose codes come first: 512 E4M3 codes, then 4 float32 scales without shifts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from numbers import Integral

from ..errors import ConfigError, shown

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
ROW_DIMS = (32, *HEAD_DIMS, 512)  # the others are parts of latent rows
GROUPS = (1, 2, 4, 8)
BITS = {"int4": 4, "int8": 8, "fp8": 8, "bf16": 16, "fp16": 16}
EXACT_CODECS = ("bf16", "fp16")
FP8_DS_MLA = "fp8_ds_mla"  # vLLM's name of it; the latents of FlashMLA's FP8 rows
FP16_MAX = 65504.0
BF16_MAX = 3.3895313892515355e38
E4M3_MAX = 448.0
FP8_DS_MLA_MAX = 240 * 2.0**120  # the next code would be 256, and 2**128 is Inf


@dataclass(frozen=True)
class RowFormat:
    """How the elements of one token and one KV head are stored as bytes.

    Attributes:
        codec: "int4", "int8", "fp8" (E4M3), "bf16" or "fp16"; "fp8_ds_mla" for latents.
        groups: 1, 2, 4 or 8 equal parts of the row with a scale and a shift each; 1 for 16-bit
            rows, 4 for "fp8_ds_mla".
        head_dim: elements in a row: 64, 80, 96, 112, 128, 192 or 256; 32 and 512 as parts of latent
            rows.

    Raises:
        ConfigError: a codec, a number of groups or a head_dim that does not exist.

    Example:
        >>> from kvquant import RowFormat
        >>> int4 = RowFormat.parse("int4-g4", 128)
        >>> int4.row_bytes, int4.groups
        (80, 4)
    """

    codec: str
    groups: int
    head_dim: int
    _name: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        has_groups = self.groups > 1 and self.codec in BITS
        # kept: torch.compile takes numbers that change between calls for symbols, which no text can
        # be made of
        name = f"{self.codec}-g{self.groups}" if has_groups else self.codec
        object.__setattr__(self, "_name", name)

    def _check(self) -> None:
        if self.codec == FP8_DS_MLA and (self.groups, self.head_dim) == (4, 512):
            return
        if not isinstance(self.codec, str) or self.codec not in BITS:
            raise ConfigError(f"codec {shown(self.codec)} does not exist: use {one_of(BITS)}")
        if type(self.head_dim) is not int or self.head_dim not in ROW_DIMS:
            raise ConfigError(
                f"head_dim {shown(self.head_dim)} is not supported: use {one_of(HEAD_DIMS)}"
            )
        if type(self.groups) is not int or self.groups not in GROUPS:
            raise ConfigError(f"groups {shown(self.groups)} is not supported: use {one_of(GROUPS)}")
        if self.is_exact and self.groups != 1:
            raise ConfigError(f"{self.codec} rows have no groups: use {self.codec!r}")

    @classmethod
    def parse(cls, name: str | RowFormat, head_dim: int) -> RowFormat:
        """Make a format from its short name.

        Args:
            name: "int4", "int8", "fp8", "bf16" or "fp16", with "-g2", "-g4" or "-g8" for more
                groups than one ("int4-g4"); a RowFormat is checked and returned as it is.
            head_dim: elements in a row.

        Raises:
            ConfigError: the name or the head_dim does not exist, or they contradict each other.
        """
        if isinstance(name, RowFormat):
            if name.head_dim != head_dim:
                raise ConfigError(f"format {name} has head_dim {name.head_dim}, not {head_dim}")
            return name
        if not isinstance(name, str):
            raise ConfigError(f"format {shown(name)} is not possible: give a name ('int4-g4')")
        if type(head_dim) is not int and not isinstance(head_dim, bool):
            if not isinstance(head_dim, Integral):
                return RowFormat("bf16", 1, head_dim)  # tells what is wrong
            head_dim = int(head_dim)
        return _parse(name, head_dim)

    def __hash__(self) -> int:
        return self._hash  # taken in every call on CUDA

    def __reduce__(self) -> tuple[type[RowFormat], tuple[str, int, int]]:
        return RowFormat, (self.codec, self.groups, self.head_dim)  # hashes differ by process

    def __repr__(self) -> str:
        return f"RowFormat.parse({str(self)!r}, {self.head_dim})"

    def __str__(self) -> str:
        return self._name

    @property
    def is_exact(self) -> bool:
        """Whether rows hold the 16-bit elements themselves, without codes."""
        return self.codec in EXACT_CODECS

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return BITS.get(self.codec, 8)

    @property
    def group_size(self) -> int:
        """Elements that share one scale and one shift."""
        return self.head_dim // self.groups

    @property
    def header_bytes(self) -> int:
        """Bytes of all scales and shifts, which come first; but see code_offset."""
        return 0 if self.is_exact else 4 * self.groups

    @property
    def code_offset(self) -> int:
        """The first byte of the codes."""
        return 0 if self.codec == FP8_DS_MLA else self.header_bytes

    @property
    def code_bytes(self) -> int:
        """Bytes of all codes."""
        return self.head_dim * self.bits // 8

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.header_bytes + self.code_bytes

    @property
    def alignment(self) -> int:
        """The largest power of two that divides row_bytes: what a row in an array is aligned to."""
        return self.row_bytes & -self.row_bytes

    @property
    def bits_per_element(self) -> float:
        """Bits of a row, header included, per element."""
        return 8 * self.row_bytes / self.head_dim

    @property
    def max_abs(self) -> float:
        """The largest magnitude that the format can hold: what fp16 or bf16 can, or nearly."""
        if self.codec == FP8_DS_MLA:
            return FP8_DS_MLA_MAX
        return BF16_MAX if self.codec == "bf16" else FP16_MAX

    @cached_property
    def _hash(self) -> int:
        return hash((self.codec, self.groups, self.head_dim))


NAMES = tuple(  # that RowFormat.parse takes
    codec if groups == 1 else f"{codec}-g{groups}"
    for codec in BITS
    for groups in (GROUPS[:1] if codec in EXACT_CODECS else GROUPS)
)


@lru_cache(maxsize=4096, typed=True)  # typed: 128.0 is refused even after 128
def _parse(name: str, head_dim: int) -> RowFormat:
    if name == FP8_DS_MLA and head_dim == 512:
        return RowFormat(name, 4, head_dim)
    codec, dash, groups = name.partition("-g")
    if codec in BITS and (not dash or re.fullmatch("0|[1-9][0-9]?", groups)):
        return RowFormat(codec, int(groups) if dash else 1, head_dim)
    if "+" in name:
        raise ConfigError(
            f"format {shown(name)} has several parts, as latent rows have: name one format here, "
            "of K, of V or of one part (int4-g4)"
        )
    raise ConfigError(
        f"format {shown(name)} does not exist: use {one_of(BITS)}, "
        "with -g2, -g4 or -g8 for groups (int4-g4)"
    )


def check_head_dims(*formats: RowFormat) -> None:
    """Raise ConfigError unless K and V of heads can have rows of these formats."""
    for fmt in formats:
        if fmt.head_dim not in HEAD_DIMS:
            raise ConfigError(
                f"head_dim {fmt.head_dim} is that of a part of latent rows: rows of heads have "
                f"{one_of(HEAD_DIMS)}; for latent rows there are mla_decode_attention, "
                "LatentKVCache and LatentPagedKVCache"
            )


def one_of(choices: object) -> str:
    """Words to choose from: "a, b or c"."""
    words = [str(choice) for choice in choices]  # type: ignore[attr-defined]
    return ", ".join(words[:-1]) + f" or {words[-1]}"
