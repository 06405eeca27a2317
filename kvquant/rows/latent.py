"""Latent rows: one row a token for all heads, of multi-head latent attention (MLA).

A latent row is two rows side by side: that of the latent, which serves as K and as V, and that of
the RoPE part, which serves as K only. Each has its own format, header first (format.py):

    byte 0           16G' = latent.row_bytes                      row_bytes
         ┌──────────┬──────────────────┬──────────┬──────────────┐
         │ header   │ codes of 512 (or │ header   │ codes of 64  │     int4-g8+int8-g4:
         │ (scales) │ 256) latents     │ (scales) │ (or 32) RoPE │     32 + 256 + 16 + 64 = 368
         └──────────┴──────────────────┴──────────┴──────────────┘
          ├────────────── V ──────────┤
          ├─────────────────────── K ────────────────────────────┤

"int4-g8+fp8-g4" takes the same bytes with five times the error of RoPE parts (Gaussian: 0.021, not
0.004).

"fp8" is the layout of FlashMLA's FP8 cache (V3.2; vLLM's fp8_ds_mla) to the byte, 656 bytes: the
codes first, 512 E4M3; then a float32 scale for each 128 of them, a power of two; then 64 bf16. See
quantize_k_cache in https://github.com/deepseek-ai/FlashMLA/blob/main/tests/quant.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from ..errors import ConfigError, shown
from .codec import FP8_DS_MLA, one_of
from .format import RowFormat

LATENT_DIMS = (512, 256)
ROPE_DIMS = (64, 32)


@dataclass(frozen=True)
class LatentFormat:
    """How the latent and the RoPE part of one token are stored as bytes.

    Attributes:
        latent: format of the latent, of 512 or 256 elements.
        rope: format of the RoPE part, of 64 or 32 elements.

    Raises:
        ConfigError: a part of another size.

    Example:
        >>> from kvquant import LatentFormat
        >>> int4 = LatentFormat.parse("int4-g8+int8-g4")
        >>> int4.row_bytes, int4.latent.row_bytes, int4.rope.row_bytes
        (368, 288, 80)
        >>> LatentFormat.parse("int4-g8").row_bytes  # RoPE part in bf16
        416
    """

    latent: RowFormat
    rope: RowFormat

    def __post_init__(self) -> None:
        for name, part, dims in (
            ("latent", self.latent, LATENT_DIMS),
            ("rope", self.rope, ROPE_DIMS),
        ):
            if not isinstance(part, RowFormat):
                raise ConfigError(f"{name} is {shown(part)}: give a RowFormat")
            if part.head_dim not in dims:
                raise ConfigError(
                    f"{name} has {part.head_dim} elements: latent rows have {one_of(dims)}"
                )
        if str(self.latent) == "fp8":
            raise ConfigError("fp8 latents have groups: use fp8-g2, fp8-g4 or fp8-g8")
        if self.latent.codec == FP8_DS_MLA and str(self.rope) != "bf16":
            raise ConfigError(f"fp8 is FlashMLA's layout, of bf16 RoPE parts, not {self.rope}")

    @classmethod
    def parse(
        cls, name: str | LatentFormat, latent_dim: int = 512, rope_dim: int = 64
    ) -> LatentFormat:
        """Make a format from its short name.

        Args:
            name: a name of RowFormat for the latent ("int4-g8"), with "+" and another one for the
                RoPE part ("int4-g8+int8-g4"), which else is bf16, or fp16 in rows of fp16. "fp8" is
                FlashMLA's layout, for 512 and 64 only. A LatentFormat is checked and returned.
            latent_dim: 512 or 256.
            rope_dim: 64 or 32.

        Raises:
            ConfigError: the name or a size does not exist, or they contradict each other.
        """
        if isinstance(name, LatentFormat):
            if (name.latent_dim, name.rope_dim) != (latent_dim, rope_dim):
                raise ConfigError(
                    f"format {name} has {name.latent_dim} latents and {name.rope_dim} RoPE "
                    f"elements, not {latent_dim} and {rope_dim}"
                )
            return name
        if not isinstance(name, str):
            raise ConfigError(
                f"format {shown(name)} is not possible: give a name ('int4-g8+int8-g4')"
            )
        return _parse(name, latent_dim, rope_dim)

    def __str__(self) -> str:
        latent = "fp8" if self.latent.codec == FP8_DS_MLA else str(self.latent)
        rope = str(self.rope)
        return latent if rope == _rope_of(latent) else latent + "+" + rope

    def __repr__(self) -> str:
        return f"LatentFormat.parse({str(self)!r}, {self.latent_dim}, {self.rope_dim})"

    @property
    def parts(self) -> tuple[RowFormat, RowFormat]:
        """The formats in the order of the bytes."""
        return self.latent, self.rope

    @property
    def latent_dim(self) -> int:
        """Elements of the latent: V, and the first ones of K."""
        return self.latent.head_dim

    @property
    def rope_dim(self) -> int:
        """Elements of the RoPE part, the last ones of K."""
        return self.rope.head_dim

    @property
    def head_dim(self) -> int:
        """Elements of a row, and of a query: latent_dim + rope_dim."""
        return self.latent_dim + self.rope_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.latent.row_bytes + self.rope.row_bytes

    @property
    def alignment(self) -> int:
        """The largest power of two that divides row_bytes: what a row in an array is aligned to."""
        return self.row_bytes & -self.row_bytes

    @property
    def bits_per_element(self) -> float:
        """Bits of a row, headers included, per element."""
        return 8 * self.row_bytes / self.head_dim


AnyFormat: TypeAlias = "RowFormat | LatentFormat"


def parse_any(name: str, head_dim: int) -> AnyFormat:
    for latent_dim in LATENT_DIMS:
        if head_dim - latent_dim in ROPE_DIMS:
            return LatentFormat.parse(name, latent_dim, head_dim - latent_dim)
    return RowFormat.parse(name, head_dim)


def parts_of(fmt: AnyFormat) -> tuple[RowFormat, ...]:
    """The rows side by side in a row: one, or the two of a latent row."""
    return fmt.parts if isinstance(fmt, LatentFormat) else (fmt,)


def _rope_of(latent: str) -> str:
    return "fp16" if latent == "fp16" else "bf16"


@lru_cache(maxsize=256, typed=True)
def _parse(name: str, latent_dim: int, rope_dim: int) -> LatentFormat:
    latent, plus, rope = name.partition("+")
    for what, dim, dims in (
        ("latent_dim", latent_dim, LATENT_DIMS),
        ("rope_dim", rope_dim, ROPE_DIMS),
    ):
        if type(dim) is not int or dim not in dims:
            raise ConfigError(f"{what} {shown(dim)} is not supported: use {one_of(dims)}")
    if latent == "fp8":
        if (latent_dim, rope_dim) != (512, 64):
            raise ConfigError(
                f"fp8 is FlashMLA's layout, of 512 latents and 64 RoPE elements, not {latent_dim} "
                f"and {rope_dim}: use fp8-g4"
            )
        latent = FP8_DS_MLA
    rope = rope if plus else _rope_of(latent)
    return LatentFormat(RowFormat.parse(latent, latent_dim), RowFormat.parse(rope, rope_dim))
