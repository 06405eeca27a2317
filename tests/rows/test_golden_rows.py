"""Rows written out by hand.

Every expected byte is derived in a comment from the contract in kvquant/rows/quantize.py, none was
copied from a run. fp16 numbers are given as their bits; in the rows they stand low byte first.
"""

from __future__ import annotations

import pytest
import torch

from kvquant import RowFormat, dequantize_rows, quantize_rows

BACKENDS = ("reference", "cpu")


def int2_row() -> tuple[list[float], list[float], str]:
    """Values, what they decode to, and the row."""
    # -1 to 0.5: shift -1 (bc00), scale 1.5 / 3 = 0.5 (3800). Four codes a byte, the first in the
    # lowest bits: 0 1 2 3 is 11 10 01 00 = e4, 3 2 1 0 is 1b, 0 2 2 3 is 11 10 10 00 = e8.
    codes = [0, 1, 2, 3] * 4 + [0, 2, 2, 3] + [3, 2, 1, 0] * 11
    values = decoded = [-1 + 0.5 * code for code in codes]
    # ties go to the even code: 0.5 -> 0, 1.5 -> 2, 2.5 -> 2
    values = [*values[:16], -0.75, -0.25, 0.25, *values[19:]]
    return values, decoded, "0038 00bc" + 4 * "e4" + "e8" + 11 * "1b"


def int3_row() -> tuple[list[float], list[float], str]:
    # -1 to 2.5: shift -1 (bc00), scale 3.5 / 7 = 0.5 (3800).
    sixteen = [0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4, 3, 2, 1, 0]
    second = [0, 4, 0, 0, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 0, 7]
    codes = sixteen + second + sixteen + sixteen
    values = decoded = [-1 + 0.5 * code for code in codes]
    # ties: 1.5 -> 2, 2.5 -> 2, 0.5 -> 0
    values = [*values[:24], -0.25, 0.25, -0.75, *values[27:]]
    # The low bits, four elements a byte: 0 1 2 3 is e4, 3 2 1 0 is 1b; of the second sixteen 00,
    # 2 2 0 0 = 00 00 10 10 = 0a and 0 0 0 3 = c0.
    low = "e4 e4 1b 1b  00 00 0a c0  e4 e4 1b 1b  e4 e4 1b 1b"
    # The high bits in the order 0 1 8 9 2 3 10 11, 4 5 12 13 6 7 14 15: of the first sixteen
    # elements 4 to 11 have one, 0 0 1 1 0 0 1 1 = cc and 1 1 0 0 1 1 0 0 = 33; of the second
    # elements 1 and 15, bits 1 and 15: 02 and 80.
    return values, decoded, "0038 00bc" + low + "cc 33  02 80  cc 33  cc 33"


def int4_one_group() -> tuple[list[float], list[float], str]:
    # Element 0 is -1/3. The nearest fp16 is -0.333252 (b555), above it; the one below is
    # -0.33349609375 (b556): the shift. The greatest element is shift + 7.5, so scale = 7.5 / 15 =
    # 0.5 (3800). Element i is shift + 0.5 * (i % 16): codes 0 1 ... 15, four times.
    shift = -0.33349609375
    decoded = [shift + 0.5 * (i % 16) for i in range(64)]
    values = list(decoded)
    values[0] = -1 / 3
    # Ties go to the even code: 0.5 -> 0, 1.5 -> 2, 2.5 -> 2.
    for element, steps, code in ((17, 0.5, 0), (18, 1.5, 2), (19, 2.5, 2)):
        values[element] = shift + 0.5 * steps
        decoded[element] = shift + 0.5 * code
    header = "0038 56b5"
    sixteen = "10 32 54 76 98 ba dc fe"  # low nibble = even element
    second = "00 22 54 76 98 ba dc fe"
    return values, decoded, f"{header} {sixteen} {second} {sixteen} {sixteen}"


def int4_four_groups() -> tuple[list[float], list[float], str]:
    values: list[float] = []
    decoded: list[float] = []
    # 16 times 1.0: scale 0, shift 1.0 (3c00), codes 0.
    values += [1.0] * 16
    decoded += [1.0] * 16
    # 0 ... 15: scale 1.0 (3c00), shift 0.
    values += [float(i) for i in range(16)]
    decoded += [float(i) for i in range(16)]
    # 0, -2 ... -30: shift -30 = -1.875 * 2**4 (cf80), scale 2.0 (4000), codes 15 ... 0.
    values += [-2.0 * i for i in range(16)]
    decoded += [-2.0 * i for i in range(16)]
    # 0 to 1: 1/15 lies between 0x2c44 and 0x2c45 = (1 + 69/1024) / 16, nearer to the first, but the
    # scale is rounded up. With it 1 -> 14.99 -> 15, 1/2 -> 7.495 -> 7, 1/4 -> 3.75 -> 4.
    scale = (1 + 69 / 1024) / 16
    values += [0.0, 1.0, 0.5, 0.25] * 4
    decoded += [0.0, 15 * scale, 7 * scale, 4 * scale] * 4
    headers = "0000 003c  003c 0000  0040 80cf  452c 0000"
    codes = (
        "00 00 00 00 00 00 00 00  10 32 54 76 98 ba dc fe  "
        "ef cd ab 89 67 45 23 01  f0 47 f0 47 f0 47 f0 47"
    )
    return values, decoded, headers + codes


def int8_one_group() -> tuple[list[float], list[float], str]:
    # -4 + code / 8 with codes 0, 4 ... 248, 255: shift -4 (c400), scale 31.875 / 255 = 1/8 (3000).
    # Times 8 the distance of element 1 to the shift is 4.5, a tie, of element 2 8.5, a tie too.
    codes = [4 * i for i in range(63)] + [255]
    values = decoded = [-4 + code / 8 for code in codes]
    values = [values[0], -4 + 4.5 / 8, -4 + 8.5 / 8, *values[3:]]
    return values, decoded, "0030 00c4" + "".join(f"{code:02x}" for code in codes)


def fp8_one_group() -> tuple[list[float], list[float], str]:
    # -223 to 225: the shift is the middle, 1.0 (3c00), scale = 224 / 448 = 0.5 (3800). E4M3 has the
    # sign, 4 bits of exponent (bias 7), 3 of mantissa; 448 = 1.75 * 2**8 is 0 1111 110 = 7e.
    sixteen = [
        (448, 448, "7e"),
        (-448, -448, "fe"),
        (0, 0, "00"),
        (1, 1, "38"),
        (-1, -1, "b8"),
        (1.5, 1.5, "3c"),
        (17, 16, "58"),  # a tie between 16 = 58 and 18 = 59
        (19, 20, "5a"),  # a tie between 18 and 20 = 5a
        (2**-9, 2**-9, "01"),  # the least subnormal
        (2**-10, 0, "00"),  # a tie between it and 0
        (3 * 2**-10, 2**-8, "02"),
        (240, 240, "77"),
        (-0.5, -0.5, "b0"),
        (2, 2, "40"),
        (0.75, 0.75, "34"),
        (416, 416, "7d"),
    ]
    values = [1 + 0.5 * number for number, _, _ in sixteen] * 4
    decoded = [1 + 0.5 * number for _, number, _ in sixteen] * 4
    return values, decoded, "0038 003c" + "".join(code for _, _, code in sixteen) * 4


def bf16_row() -> tuple[list[float], list[float], str]:
    # bf16 is the upper half of float32: 1.0 = 3f80, -2.5 = c020, 0.1 = 3dcccccd -> 3dcd, which is
    # 0.10009765625.
    return (
        [1.0, -2.5, 0.1, 0.0] * 16,
        [1.0, -2.5, 0.10009765625, 0.0] * 16,
        "803f 20c0 cd3d 0000" * 16,
    )


def fp16_row() -> tuple[list[float], list[float], str]:
    # 1.0 = 3c00, -2.5 = c100, 65504 = 7bff, 2**-24 = 0001.
    return (
        [1.0, -2.5, 65504.0, 2**-24] * 16,
        [1.0, -2.5, 65504.0, 2**-24] * 16,
        "003c 00c1 ff7b 0100" * 16,
    )


def wide_row() -> tuple[list[float], list[float], str]:
    # 512 elements in 8 groups of 64. Group j is 0 to 15 times 2**j, four times: its shift is 0, its
    # scale 2**j = 3c00, 4000, 4400 ... 5800, its codes 0 to 15.
    values = [2.0**j * (i % 16) for j in range(8) for i in range(64)]
    headers = "0000 ".join(f"00{code:02x} " for code in range(0x3C, 0x5C, 4)) + "0000"
    return values, values, headers + 32 * "10 32 54 76 98 ba dc fe"


GOLDEN = {
    "int2": int2_row,
    "int3": int3_row,
    "int4": int4_one_group,
    "int4-g4": int4_four_groups,
    "int4-g8": wide_row,
    "int8": int8_one_group,
    "fp8": fp8_one_group,
    "bf16": bf16_row,
    "fp16": fp16_row,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", GOLDEN)
def test_values_become_the_row_derived_by_hand(name: str, backend: str) -> None:
    values, _, row = GOLDEN[name]()
    fmt = RowFormat.parse(name, len(values))
    rows = quantize_rows(torch.tensor([values]), fmt, backend=backend)
    assert bytes(rows[0].tolist()).hex(" ") == bytes.fromhex(row).hex(" ")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", GOLDEN)
def test_the_row_derived_by_hand_decodes(name: str, backend: str) -> None:
    _, decoded, row = GOLDEN[name]()
    rows = torch.tensor(list(bytes.fromhex(row)), dtype=torch.uint8)
    values = dequantize_rows(rows, RowFormat.parse(name, len(decoded)), backend=backend)
    assert values.tolist() == torch.tensor(decoded).tolist()
