"""Append and dequantize kernels as machine code, without a GPU: nothing spilled.

The slow tests compile a representative part of the matrix; the whole, with a line for each kernel:

    KVQUANT_CUBINS=all pytest -m slow -s tests/kernels/cuda/test_rows_compile.py
"""

from __future__ import annotations

import functools
import os
import struct
from dataclasses import replace
from typing import Any

import pytest

from kvquant.kernels.cuda.append.spec import AppendSpec, FeedbackSide, FeedbackSpec, Side
from kvquant.kernels.cuda.dequantize.launch import DequantizeSpec
from kvquant.kernels.cuda.mla.mma.spec import MlaSpec
from kvquant.kernels.cuda.prefix.spec import CombineSpec
from kvquant.kernels.cuda.runtime.compile import compile_spec
from kvquant.kernels.cuda.runtime.spec import layout_of
from kvquant.rows.format import RowFormat

compile_once = functools.cache(compile_spec)

GPUS = ("sm_80", "sm_89", "sm_90", "sm_100")
FORMATS = "int2 int3 int4 int4-g2 int4-g4 int4-g8 int8 int8-g4 fp8 fp8-g4 bf16 fp16".split()


FEEDBACK = FeedbackSpec((FeedbackSide(RowFormat.parse("int4", 64), share=4),) * 2)
MLA = MlaSpec(RowFormat.parse("bf16", 512), RowFormat.parse("bf16", 64), teams=1, stages=2)


def make_row_spec(text: str) -> AppendSpec | DequantizeSpec:
    """An append or dequantize kernel: "K[/V] [head_dim[/that of V]] [word ...]"; the words are
    "exact" (16-bit rows), "moved" (both, by an offset), "clip", "rope", "float32" and
    "dequantize"."""
    formats, *words = text.split()
    dims = next((word for word in words if word[0].isdecimal()), "128")
    k_name, _, v_name = formats.partition("/")
    k_dim, _, v_dim = dims.partition("/")
    head_dim = int(k_dim)
    k = RowFormat.parse(k_name, head_dim)
    v = RowFormat.parse(v_name or k_name, int(v_dim or k_dim))
    element = "fp32" if "float32" in words else "bf16"
    if "dequantize" in words:
        return DequantizeSpec(k, element)
    moved, clip = "moved" in words, "clip" in words
    return AppendSpec(
        Side(k, moved, clip),
        Side(v, moved, clip),
        element,
        "bf16" if "exact" in words else "",
        head_dim if "rope" in words else 0,
    )


DEQUANTIZE = "fp8-g8 80 dequantize float32"
SOME_ROWS = (
    ("int4-g4 exact moved rope clip", "sm_80"),
    ("int4/int8-g8 96 exact", "sm_100"),
    ("int3/int2 exact clip", "sm_90"),
    ("fp8 256 moved", "sm_89"),
    ("fp8/int4-g8 80", "sm_90"),
    (DEQUANTIZE, "sm_90"),
    ("int4-g8/fp8-g4 512/64 exact", "sm_90"),
    ("fp8_ds_mla/bf16 512/64 exact", "sm_80"),
)
LATENTS = ("int4-g8/fp8-g4", "int8-g4/bf16", "int4-g8/bf16", "fp8_ds_mla/bf16", "bf16", "fp16")
ROW_WORDS = ("", " exact", " moved", " exact moved rope", " dequantize")
ALL_ROWS = [
    *(f"{name}{words}" for name in FORMATS for words in ROW_WORDS),
    *(
        f"{name} {dim}"
        for name in FORMATS
        for dim in (64, 80, 96, 112, 192, 256, 512)
        if (name, dim) not in (("int3", 80), ("int3", 112))  # refused
    ),
    *(f"int4-g4 float32{words}" for words in ROW_WORDS),
    *(f"{name} 512/64{words}" for name in LATENTS for words in ("", " exact", " exact float32")),
]


@pytest.mark.slow
@pytest.mark.extra("cuda")
@pytest.mark.parametrize(
    ("text", "arch"),
    [(text, arch) for text in ALL_ROWS for arch in GPUS]
    if os.environ.get("KVQUANT_CUBINS") == "all"
    else SOME_ROWS,
    ids=lambda word: word.replace(" ", "-"),
)
def test_machine_code_of_rows_spills_nothing(text: str, arch: str) -> None:
    spec = make_row_spec(text)
    if arch == "sm_80":
        spec = replace(spec, converts_fp8=False)
    report = compile_once(spec, arch).report
    print(f"{text:32} {arch:6} {report}")
    assert report.stack_bytes == 0, "spilled, or arrays in local memory"
    blocks = 65536 // (spec.threads * -(-report.registers // 8) * 8)
    assert blocks * spec.threads >= 512, "too few threads to hide the memory's latency"


@pytest.mark.slow
@pytest.mark.extra("cuda")
@pytest.mark.parametrize(
    "spec",
    [make_row_spec("fp8/int4-g8 80"), make_row_spec(DEQUANTIZE), CombineSpec(64), FEEDBACK, MLA],
    ids=lambda spec: type(spec).__name__,
)
def test_arguments_have_the_size_that_the_kernel_takes(spec: Any) -> None:
    # a launch with more is refused; on sm_90 they begin at byte 0x210 of constant bank 0
    code = compile_once(spec, "sm_90").code
    assert sections(code)[".nv.constant0."] - 0x210 == struct.calcsize(layout_of(spec.arguments))


def sections(code: bytes) -> dict[str, int]:
    """Sizes of the sections of a cubin, by what their names begin with up to the second dot."""
    (table,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names_at = struct.unpack_from("<3H", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", code, table + i * size) for i in range(count)]
    found = {}
    for name, _, _, _, _, length in headers:
        start = headers[names_at][4] + name
        text = code[start : code.index(b"\0", start)].decode()
        found[".".join(text.split(".")[:3]) + "."] = length
    return found
