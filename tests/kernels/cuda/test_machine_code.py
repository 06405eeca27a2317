"""Machine code keeps its registers: no spills, no arrays in local memory. No GPU is needed.

Of the kernels with a table of their own: test_compile.py (decode), test_mla.py and
test_mla_many_heads.py. The slow test compiles a representative part of the append and dequantize
kernels; the whole, with a line for each kernel:

    KVQUANT_CUBINS=all pytest -m slow -s tests/kernels/cuda/test_machine_code.py
"""

from __future__ import annotations

import os
import struct
from dataclasses import replace

import pytest
from machine_code import sections

from kvquant import RowFormat
from kvquant.kernels.cuda.affine.launch import AffineSpec
from kvquant.kernels.cuda.append.spec import (
    MOST_SHARED,
    AppendSpec,
    FeedbackSide,
    FeedbackSpec,
    Side,
    StepSpec,
    make_feedback_spec,
)
from kvquant.kernels.cuda.decode.ragged import PiecesSpec
from kvquant.kernels.cuda.dequantize.launch import DequantizeSpec
from kvquant.kernels.cuda.mla.mma.spec import MlaSpec
from kvquant.kernels.cuda.mla.spec import MOST_GROUPS, MlaCombineSpec
from kvquant.kernels.cuda.prefix.spec import CombineSpec, PrefixSpec, fit
from kvquant.kernels.cuda.ranks.launch import ExchangeSpec
from kvquant.kernels.cuda.runtime.compile import compile_spec
from kvquant.kernels.cuda.runtime.launch import GPUS, OVERLAPS
from kvquant.kernels.cuda.runtime.spec import Spec, layout_of
from kvquant.kernels.cuda.slots.launch import SlotSpec
from kvquant.kernels.cuda.slots.window_launch import WindowSpec

parse = RowFormat.parse
ARCHS = "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"


def step(name: str, words: str = "", query: str = "", groups: int = 1) -> StepSpec:
    """The append kernel of a step; words: what rows have, "k_matrix" and others."""
    side = Side(parse(name, 128), True, True)
    has = dict.fromkeys(words.split(), True)
    return StepSpec(side, side, exact="bf16", query=query, groups=groups, **has)  # type: ignore[arg-type]  # its flags


def feedback(name: str, dim: int, share: int, words: str = "") -> Spec:
    """The feedback kernel; words: "clip", "exact", "float32", "rope", "both" (K and V)."""
    source, exact = "fp32" if "float32" in words else "bf16", "bf16" if "exact" in words else ""
    v = FeedbackSide(parse(name, dim), False, source, exact, share=share)
    rotary_dim = dim if "rope" in words else 0
    k = FeedbackSide(parse(name, dim), "clip" in words, source, exact, rotary_dim, share=share)
    return make_feedback_spec([k, v] if "both" in words else [k])


def prefix(k: str, v: str, dim: int, rows: int) -> Spec:
    h200 = GPUS["sm_90"]
    spec = PrefixSpec(parse(k, dim), parse(v, dim))
    return fit(spec, rows, h200.shared_per_block, 256, h200.sm_count)


def rows(text: str, arch: str = "sm_90") -> AppendSpec | DequantizeSpec:
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
    converts = GPUS[arch].converts_fp8
    if "dequantize" in words:
        return DequantizeSpec(k, element, converts_fp8=converts)
    moved, clip = "moved" in words, "clip" in words
    return AppendSpec(
        Side(k, moved, clip),
        Side(v, moved, clip),
        element,
        "bf16" if "exact" in words else "",
        head_dim if "rope" in words else 0,
        converts_fp8=converts,
    )


DEQUANTIZE = "fp8-g8 80 dequantize float32"
SOME_ROWS = [
    ("int4-g4 exact moved rope clip", "sm_86"),
    ("int4/int8-g8 96 exact", "sm_100"),
    ("int3/int2 exact clip", "sm_90"),
    ("fp8 256 moved", "sm_89"),
    ("fp8/int4-g8 80", "sm_90"),
    (DEQUANTIZE, "sm_120"),
    ("int4-g8/fp8-g4 512/64 exact", "sm_90"),
    ("fp8_ds_mla/bf16 512/64 exact", "sm_80"),
]
FORMATS = "int2 int3 int4 int4-g2 int4-g4 int4-g8 int8 int8-g4 fp8 fp8-g4 bf16 fp16".split()
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
if os.environ.get("KVQUANT_CUBINS") == "all":
    SOME_ROWS = [(text, arch) for text in ALL_ROWS for arch in ARCHS]

# kernel, architecture, most registers: so that blocks have room beside one another
CASES: list[tuple[Spec, str, int]] = [
    # few enough for 512 threads on an SM, to hide the memory's latency
    *((rows(text, arch), arch, 128) for text, arch in SOME_ROWS),
    *((spec, arch, 255) for spec in (PiecesSpec(), SlotSpec()) for arch in ARCHS),
    *((WindowSpec(), arch, 128) for arch in ARCHS),  # of a block of 16 warps
    # of 1,024 blocks, which an H200 holds at once
    *((ExchangeSpec(dim, "bf16"), arch, 64) for arch in ARCHS for dim in (128, 256)),
    *((CombineSpec(64, "bf16", flag), "sm_80", 255) for flag in (False, True)),
    *((CombineSpec(80, "fp16", flag), "sm_89", 255) for flag in (False, True)),
    *((CombineSpec(128, "bf16", flag), "sm_90", 255) for flag in (False, True)),
    *((CombineSpec(256, "fp16", flag), "sm_100", 255) for flag in (False, True)),
    *((MlaCombineSpec(512, "bf16", 16, MOST_GROUPS, flag), "sm_80", 128) for flag in (False, True)),
    *(
        (MlaCombineSpec(512, "bf16", 16, MOST_GROUPS, flag, True), "sm_90", 128)
        for flag in (False, True)
    ),
    (AffineSpec(64, "bf16"), "sm_80", 80),
    (AffineSpec(80, "fp16"), "sm_89", 80),
    (AffineSpec(128, "bf16"), "sm_90", 80),
    (AffineSpec(256, "fp16"), "sm_90", 80),
    (AffineSpec(256, "bf16"), "sm_100", 80),
    (AffineSpec(112, "bf16", product=False), "sm_90", 80),
    (AffineSpec(128, "bf16", encodes=True), "sm_90", 96),
    (AffineSpec(256, "fp16", encodes=True), "sm_80", 96),
    (AffineSpec(64, "fp16", width=2), "sm_90", 128),
    (AffineSpec(128, "bf16", width=4), "sm_90", 168),
    (AffineSpec(80, "fp16", encodes=True, width=4), "sm_80", 168),
    (AffineSpec(256, "bf16", encodes=True, width=2), "sm_90", 128),
    (AffineSpec(512, "bf16"), "sm_90", 128),
    (step("int4-g4", "k_matrix v_matrix", "bf16"), "sm_90", 168),
    (step("int8", "k_matrix v_matrix k_feedback", "bf16"), "sm_120", 168),
    (step("int4", "k_feedback v_feedback"), "sm_86", 168),
    (step("int3", "k_matrix k_feedback v_feedback"), "sm_90", 168),
    (step("int4-g4", "", "fp16", 4), "sm_89", 168),
    (feedback("int4-g4", 128, 4, "clip exact rope both"), "sm_90", 168),
    (feedback("int4-g4", 128, 1, "clip float32 exact"), "sm_90", 168),
    (feedback("int8-g8", 80, 4, "clip exact"), "sm_86", 168),
    (feedback("int4", 256, 1, "float32"), "sm_120", 168),
    (feedback("int4-g4", 512, 4, "clip exact"), "sm_90", 168),
    (feedback("int3", 128, 4, "clip exact rope both"), "sm_90", 168),
    (feedback("int2", 128, 1, "clip exact"), "sm_80", 168),
    (prefix("int4-g4", "int4-g4", 128, 256), "sm_90", 255),
    (prefix("int8", "fp8", 80, 128), "sm_89", 255),
    (prefix("bf16", "int4", 256, 64), "sm_100", 255),
    (prefix("int3", "int2", 128, 256), "sm_90", 255),
]


@pytest.mark.slow
@pytest.mark.extra("cuda")
@pytest.mark.parametrize(("spec", "arch", "most"), CASES, ids=lambda one: f"{one}"[:90])
def test_machine_code_spills_nothing(spec: Spec, arch: str, most: int) -> None:
    room = GPUS[arch].shared_per_block
    if isinstance(spec, StepSpec):
        spec, room = replace(spec, overlaps=GPUS[arch].capability >= OVERLAPS), MOST_SHARED
    report = compile_spec(spec, arch).report
    print(f"{f'{spec}'[:90]} {arch:6} {report}")
    assert report.stack_bytes == 0 and report.registers <= most
    assert spec.shared_bytes <= room


FEEDBACK = FeedbackSpec((FeedbackSide(parse("int4", 64), share=4),) * 2)
MLA = MlaSpec(parse("bf16", 512), parse("bf16", 64), teams=1, stages=2)


@pytest.mark.slow
@pytest.mark.extra("cuda")
@pytest.mark.parametrize(
    "spec",
    [rows("fp8/int4-g8 80"), rows(DEQUANTIZE), CombineSpec(64), FEEDBACK, MLA],
    ids=lambda spec: type(spec).__name__,
)
def test_arguments_have_the_size_that_the_kernel_takes(spec: Spec) -> None:
    # a launch with more is refused; on sm_90 they begin at byte 0x210 of constant bank 0
    found = sections(compile_spec(spec, "sm_90").code)
    (size,) = (length for name, *_, length in found if name.startswith(".nv.constant0."))
    assert size - 0x210 == struct.calcsize(layout_of(spec.arguments))
