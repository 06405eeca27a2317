"""Machine code keeps its registers: no spills, no arrays in local memory. No GPU is needed.

Of the kernels with a table of their own: test_compile.py (decode), test_rows_compile.py (append,
dequantize), test_mla.py and test_mla_many_heads.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvquant import RowFormat
from kvquant.kernels.cuda.affine.launch import AffineSpec
from kvquant.kernels.cuda.append.spec import (
    MOST_SHARED,
    FeedbackSide,
    Side,
    StepSpec,
    make_feedback_spec,
)
from kvquant.kernels.cuda.decode.ragged import PiecesSpec
from kvquant.kernels.cuda.mla.spec import MOST_GROUPS, MlaCombineSpec
from kvquant.kernels.cuda.prefix.spec import CombineSpec, PrefixSpec, fit
from kvquant.kernels.cuda.ranks.launch import ExchangeSpec
from kvquant.kernels.cuda.runtime.compile import compile_spec
from kvquant.kernels.cuda.runtime.launch import GPUS, OVERLAPS
from kvquant.kernels.cuda.runtime.spec import Spec
from kvquant.kernels.cuda.slots.launch import SlotSpec
from kvquant.kernels.cuda.slots.window_launch import WindowSpec

parse = RowFormat.parse
ARCHS = "sm_80", "sm_89", "sm_90", "sm_100"


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


# kernel, architecture, most registers: so that blocks have room beside one another
CASES: list[tuple[Spec, str, int]] = [
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
    (AffineSpec(128, "fp16", width=2), "sm_90", 128),
    (AffineSpec(256, "bf16", encodes=True, width=2), "sm_90", 128),
    (AffineSpec(512, "bf16"), "sm_90", 128),
    (step("int4-g4", "k_matrix v_matrix", "bf16"), "sm_90", 168),
    (step("int8", "k_matrix v_matrix k_feedback", "bf16"), "sm_100", 168),
    (step("int4", "k_feedback v_feedback"), "sm_80", 168),
    (step("int3", "k_matrix k_feedback v_feedback"), "sm_90", 168),
    (step("int4-g4", "", "fp16", 4), "sm_89", 168),
    (feedback("int4-g4", 128, 4, "clip exact rope both"), "sm_90", 168),
    (feedback("int4-g4", 128, 1, "clip float32 exact"), "sm_90", 168),
    (feedback("int8-g8", 80, 4, "clip exact"), "sm_80", 168),
    (feedback("int4", 256, 1, "float32"), "sm_100", 168),
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
    assert report.stack_bytes == 0 and report.registers <= most
    assert spec.shared_bytes <= room
