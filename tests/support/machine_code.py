"""Instructions of machine code, by their numbers, as nvdisasm shows them."""

from __future__ import annotations

import struct

COPY_TO_SHARED = 0xFAE  # LDGSTS, which is cp.async
WARPGROUP_PRODUCT = 0x9F0  # HGMMA, which is wgmma
WARPGROUP_ORDER = 0x9C5  # WARPGROUP: the begin of a chain of products, or its end


def count_instructions(code: bytes, number: int) -> int:
    """Instructions with a number in an ELF file: of each 16 bytes the low 12 bits are it."""
    (table,) = struct.unpack_from("<Q", code, 0x28)
    size, count = struct.unpack_from("<2H", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", code, table + i * size) for i in range(count)]
    return sum(
        struct.unpack_from("<H", code, at)[0] & 0xFFF == number
        for _, _, flags, _, start, length in headers
        if flags & 4  # it holds instructions
        for at in range(start, start + length, 16)
    )
