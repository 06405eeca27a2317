"""The row formats: the one home of every layout fact.

A row holds one token of one KV head. A quantized row starts with its parameters, then its codes:

    byte 0     2     4     6           4G                                row_bytes
         ┌─────┬─────┬─────┬─────┬ ─ ─ ┬───────┬───────┬ ─ ─ ─ ─ ┬───────┐
         │scale│shift│scale│shift│     │ code  │ code  │         │ code  │
         │  0  │  0  │  1  │  1  │     │ 0 (1) │       │         │       │
         └─────┴─────┴─────┴─────┴ ─ ─ ┴───────┴───────┴ ─ ─ ─ ─ ┴───────┘
          header: G groups, fp16 each   codes in the order of the elements

    value = code * scale[group] + shift[group]      group = element // group_size

Numbers are little endian. INT4 packs two codes a byte, the even element in the low nibble; INT2
packs four, the first element in the lowest bits; INT8 codes are unsigned bytes; FP8 codes are E4M3
(finite, NaN but no Inf). 16-bit rows (bf16, fp16) have no header: the elements stand as they are.
The table of all this is in codec.py. The INT4 layout is that of FBGEMM's and xFormers' INT4 KV
caches, the FP8 layout with one group that of FBGEMM's per-token in-row FP8.

INT3 rows have two planes of codes:

    byte 0     4               4 + D/4           4 + D/4 + D/8      D = head_dim
         ┌─────┬─────────────────┬───────────────────┐
         │scale│ the two low     │ the high bits,    │
         │shift│ bits, as INT2   │ eight a byte      │
         └─────┴─────────────────┴───────────────────┘

    high bits of 16 elements, from the lowest:  0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15

A word of low bits holds 16 elements. The order of their high bits is such that masks and two shifts
make two words of nibbles from both, of the even and of the odd elements: elements 0 to 7 and 8 to
15 stand in different halves of the word, and their high bits as far apart as these allow.

Rows of 32 elements are parts of latent rows (latent.py), and so is FP8_DS_MLA, the one codec whose
codes come first: 512 E4M3 codes, then 4 float32 scales without shifts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from numbers import Integral

from ..errors import ConfigError, shown
from .codec import CODECS, GROUPS, Codec, T, codec_names, one_of

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512)
ROW_DIMS = (32, *HEAD_DIMS)  # 32: the RoPE parts of latent rows


@dataclass(frozen=True)
class RowFormat:
    """How the elements of one token and one KV head are stored as bytes.

    Attributes:
        codec: "int2", "int3", "int4", "int8", "fp8" (E4M3), "bf16" or "fp16"; "fp8_ds_mla" for
            latents.
        groups: 1, 2, 4 or 8 equal parts of the row with a scale and a shift each; 1 for "int2",
            "int3" and 16-bit rows, 4 for "fp8_ds_mla".
        head_dim: elements in a row: 64, 80, 96, 112, 128, 192, 256 or 512; 32 as part of latent
            rows.
        facts: the codec's entry in the table of codecs.

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
    facts: Codec = field(init=False, repr=False, compare=False)
    _name: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", self._checked())
        has_groups = self.groups > 1 and self.facts.only is None
        # kept: torch.compile takes numbers that change between calls for symbols, which no text can
        # be made of
        name = f"{self.codec}-g{self.groups}" if has_groups else self.codec
        object.__setattr__(self, "_name", name)

    def _checked(self) -> Codec:
        codec = CODECS.get(self.codec) if isinstance(self.codec, str) else None
        if codec is not None and codec.only == (self.groups, self.head_dim):
            return codec
        if codec is None or codec.only is not None:
            names = one_of(codec_names())
            raise ConfigError(f"codec {shown(self.codec)} does not exist: use {names}")
        if type(self.head_dim) is not int or self.head_dim not in ROW_DIMS:
            raise ConfigError(
                f"head_dim {shown(self.head_dim)} is not supported: use {one_of(HEAD_DIMS)}"
            )
        if type(self.groups) is not int or self.groups not in GROUPS:
            raise ConfigError(f"groups {shown(self.groups)} is not supported: use {one_of(GROUPS)}")
        if self.groups not in codec.groups:
            raise ConfigError(f"{self.codec} rows have no groups: use {self.codec!r}")
        return codec

    @classmethod
    def parse(cls, name: str | RowFormat, head_dim: int) -> RowFormat:
        """Make a format from its short name.

        Args:
            name: "int2", "int3", "int4", "int8", "fp8", "bf16" or "fp16"; "int4", "int8" and "fp8"
                also with "-g2", "-g4" or "-g8" for more groups than one ("int4-g4"). A RowFormat
                is checked and returned as it is.
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
        return self.facts.header == "none"

    @property
    def is_of_heads(self) -> bool:
        """Whether K and V of heads may have these rows; other rows are parts of latent rows."""
        return self.head_dim in HEAD_DIMS and self.facts.only is None

    def pick(self, **choices: T) -> T:
        """The choice for the codec, as Codec.pick."""
        return self.facts.pick(**choices)

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return self.facts.bits

    @property
    def group_size(self) -> int:
        """Elements that share one scale and one shift."""
        return self.head_dim // self.groups

    @cached_property
    def header_bytes(self) -> int:
        """Bytes of all scales and shifts, which come first; but see code_offset."""
        return self.pick(pairs=4 * self.groups, scales=4 * self.groups, none=0)

    @cached_property
    def code_offset(self) -> int:
        """The first byte of the codes."""
        return self.pick(pairs=self.header_bytes, scales=0, none=0)

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
        """The largest magnitude that the format can hold."""
        return self.facts.max_abs

    @cached_property
    def _hash(self) -> int:
        return hash((self.codec, self.groups, self.head_dim))


NAMES = tuple(  # that RowFormat.parse takes
    codec if groups == 1 else f"{codec}-g{groups}"
    for codec in codec_names()
    for groups in CODECS[codec].groups
)

# names in llama.cpp, vLLM, torch and bitsandbytes -> the nearest of ours, with as many bits or more
_NEAREST = {
    theirs: ours
    for ours, names in {
        "bf16": "bfloat16",
        "fp16": "float16 f16 half",
        "fp8": "fp8_e4m3 fp8_e5m2 fp8_inc fp8_per_token_head float8_e4m3fn float8_e5m2",
        "int8": "q8_0 q5_0 q5_1 int8_per_token_head",
        "int4": "int4_per_token_head turboquant_4bit_nc ultraquant_4bit",
        "int4-g4": "q4_0 q4_1 iq4_nl nf4 fp4 mxfp4",
        "int4-g8": "nvfp4 nvfp4_4over6",
        "int3": "turboquant_3bit_nc",
    }.items()
    for theirs in names.split()
}


def nearest(name: str) -> str:
    """The format here that matches a name of another project, for an error message; or ""."""
    ours = _NEAREST.get(name.lower().removeprefix("torch."))
    return f"; the nearest here is {ours!r}" if ours else ""


@lru_cache(maxsize=4096, typed=True)  # typed: 128.0 is refused even after 128
def _parse(name: str, head_dim: int) -> RowFormat:
    known = CODECS.get(name)
    if known is not None and known.only is not None and known.only[1] == head_dim:
        return RowFormat(name, *known.only)
    codec, dash, groups = name.partition("-g")
    if codec in codec_names() and (not dash or re.fullmatch("0|[1-9][0-9]?", groups)):
        return RowFormat(codec, int(groups) if dash else 1, head_dim)
    if "+" in name:
        raise ConfigError(
            f"format {shown(name)} has several parts, as latent rows have: name one format here, "
            "of K, of V or of one part (int4-g4)"
        )
    raise ConfigError(
        f"format {shown(name)} does not exist: use {one_of(codec_names())}, "
        f"with -g2, -g4 or -g8 for groups (int4-g4){nearest(name)}"
    )


def mean_bits(formats: Iterable[RowFormat]) -> float:
    """Bits per element of rows of all these formats together, headers included."""
    sizes = [(fmt.row_bytes, fmt.head_dim) for fmt in formats]
    return 8 * sum(size for size, _ in sizes) / sum(dim for _, dim in sizes)


def check_head_dims(*formats: RowFormat) -> None:
    """Raise ConfigError unless K and V of heads can have rows of these formats."""
    for fmt in formats:
        if not fmt.is_of_heads:
            what = f"codec {fmt}" if fmt.facts.only else f"head_dim {fmt.head_dim}"
            raise ConfigError(
                f"{what} is that of a part of latent rows: rows of heads have "
                f"{one_of(HEAD_DIMS)}, of {one_of(codec_names())}; for latent rows there are "
                "mla_decode_attention, LatentKVCache and LatentPagedKVCache"
            )
