"""The codecs: how one element of a row is stored. The one table that all code looks up.

Code that treats formats differently reads a fact of the codec (`levels`, `bits`) or picks by one of
these words; it never compares names in a chain that ends in `else`:

    layout     nibbles     two codes a byte, the even element in the low nibble
               quarters    four codes a byte, the first element in the lowest bits
               planes      the two low bits of all codes, as quarters; then the high bits
               bytes       a code a byte
               elements    no codes: the 16-bit elements themselves
    numbers    integers    a code is an integer from 0 to levels
               e4m3        a code is an E4M3 number (finite, NaN but no Inf)
               bf16, fp16  the element
    header     pairs       scale and shift of each group, fp16, before the codes
               scales      scale of each group, float32, a power of two, after the codes; no shifts
               none        no parameters

    PER_WORD = fmt.pick(nibbles=8, bytes=4)

A codec whose word is not among the choices raises an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from ..errors import ConfigError, UnsupportedError, shown

T = TypeVar("T")

GROUPS = (1, 2, 4, 8)  # that a row may have, unless its codec says otherwise
FP8_DS_MLA = "fp8_ds_mla"  # vLLM's name of it; the latents of FlashMLA's FP8 rows
FP16_MAX = 65504.0
BF16_MAX = 3.3895313892515355e38
E4M3_MAX = 448.0
FP8_DS_MLA_MAX = 240 * 2.0**120  # the next code would be 256, and 2**128 is Inf


@dataclass(frozen=True)
class Codec:
    """How one element is stored.

    Attributes:
        name: the first part of format names ("int4").
        bits: of a code, or of a 16-bit element.
        layout, numbers, header: words of the table above.
        max_abs: the largest magnitude that an element, or its parameters, can hold.
        levels: the greatest code; 0 without codes.
        groups: the numbers of groups that a row may have.
        only: the number of groups and the head_dim of all rows of the codec; None for any.
    """

    name: str
    bits: int
    layout: str
    numbers: str
    header: str
    max_abs: float
    levels: float = 0.0
    groups: tuple[int, ...] = GROUPS
    only: tuple[int, int] | None = None

    @cached_property
    def is_integer(self) -> bool:
        """Whether codes are integers: only these have clip ratios and rounding with feedback."""
        return self.numbers == "integers"

    def pick(self, **choices: T) -> T:
        """The choice for this codec, as in pick(e4m3=a, integers=b, elements=None).

        Raises:
            UnsupportedError: no choice is for this codec, or two are.
        """
        words = [one for one in (self.layout, self.numbers, self.header) if one in choices]
        if len(words) == 1:
            return choices[words[0]]
        if words:
            raise UnsupportedError(
                f"{self.name} rows are not served here: there is code for {' and for '.join(words)}"
                ", and they are both"
            )
        served = [
            codec.name
            for codec in CODECS.values()
            if not choices.keys().isdisjoint((codec.layout, codec.numbers, codec.header))
        ]
        raise UnsupportedError(
            f"{self.name} rows are not served here, where there is code for {one_of(served)} only: "
            "use one of these formats"
        )


def one_of(choices: Iterable[object]) -> str:
    """The choices as "a, b or c"."""
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


CODECS = {
    codec.name: codec
    for codec in (
        Codec("int2", 2, "quarters", "integers", "pairs", FP16_MAX, 3.0, (1,)),
        Codec("int3", 3, "planes", "integers", "pairs", FP16_MAX, 7.0, (1,)),
        Codec("int4", 4, "nibbles", "integers", "pairs", FP16_MAX, 15.0),
        Codec("int8", 8, "bytes", "integers", "pairs", FP16_MAX, 255.0),
        Codec("fp8", 8, "bytes", "e4m3", "pairs", FP16_MAX, E4M3_MAX),
        Codec("bf16", 16, "elements", "bf16", "none", BF16_MAX, 0.0, (1,)),
        Codec("fp16", 16, "elements", "fp16", "none", FP16_MAX, 0.0, (1,)),
        Codec(FP8_DS_MLA, 8, "bytes", "e4m3", "scales", FP8_DS_MLA_MAX, E4M3_MAX, only=(4, 512)),
    )
}
EXACT_CODECS = tuple(name for name, codec in CODECS.items() if codec.header == "none")


def codec_names() -> list[str]:
    """The names of the codecs that rows of any head_dim may have."""
    return [name for name, codec in CODECS.items() if codec.only is None]


def check_exact_format(name: object) -> None:
    """Raise ConfigError unless 16-bit rows can have this codec."""
    if name not in EXACT_CODECS:
        raise ConfigError(f"exact_format {shown(name)} does not exist: use 'bf16' or 'fp16'")
