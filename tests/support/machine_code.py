"""Instructions of machine code, by their numbers, as nvdisasm shows them."""

from __future__ import annotations

import struct

WARPGROUP_PRODUCT = 0x9F0  # HGMMA, which is wgmma
WARPGROUP_PRODUCT_OF_REGISTERS = 0xDF0  # the same with A in registers
WARPGROUP_ORDER = 0x9C5  # WARPGROUP: the begin of a chain of products, or its end
SHARE_OF_REGISTERS = 0x9C8  # USETMAXREG: here begins what a warpgroup does
SPILLS = 0x387, 0x983  # STL and LDL: a register that is kept in memory


def sections(code: bytes) -> list[tuple[str, int, int, int]]:
    """The sections of an ELF file: name, flags, first byte, and length."""
    (table,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names_at = struct.unpack_from("<3H", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", code, table + i * size) for i in range(count)]
    names = code[headers[names_at][4] :]
    return [
        (names[at : names.index(b"\0", at)].decode(), flags, start, length)
        for at, _, flags, _, start, length in headers
    ]


def instructions(code: bytes) -> list[int]:
    """The numbers of the instructions in an ELF file: of each 16 bytes the low 12 bits are it."""
    return [
        struct.unpack_from("<H", code, at)[0] & 0xFFF
        for _, flags, start, length in sections(code)
        if flags & 4  # it holds instructions
        for at in range(start, start + length, 16)
    ]


def count_instructions(code: bytes, number: int) -> int:
    """Instructions with a number."""
    return instructions(code).count(number)


def parts_of(code: bytes, number: int) -> list[list[int]]:
    """The numbers of the instructions, cut at each of one number."""
    parts: list[list[int]] = [[]]
    for found in instructions(code):
        if found == number:
            parts.append([])
        else:
            parts[-1].append(found)
    return parts
