"""Kernels without a technique, as tests/benchmarks/bench_ablated.py makes them; ncu's numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvquant.kernels.cuda.runtime.compile import load_cubin
from kvquant.kernels.cuda.runtime.launch import GPUS

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import bench_ablated
from bench_ablated import EDITS, PAD, TECHNIQUES, WHOLE, read_counts, without
from machine_code import count_instructions

ASYNCHRONOUS_COPY = 0xFAE  # LDGSTS


@pytest.mark.extra("cuda")
def test_techniques_can_be_left_out_of_todays_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [bench_ablated.planned(one, GPUS["sm_90"])[0] for one in bench_ablated.list_all()[:2]]
    left_out = [bench_ablated.techniques_of(spec) for spec in specs]
    assert left_out[1] == (WHOLE, *TECHNIQUES) and PAD not in left_out[0]
    for technique in TECHNIQUES:
        with without(technique):
            pass
    monkeypatch.setitem(EDITS, "lazy rescale", ("mainloop", (("grown = None", 1, ""),)))
    with pytest.raises(SystemExit, match="has this text 0 times in place of 1: correct EDITS"):
        bench_ablated.edited("lazy rescale")


@pytest.mark.slow
@pytest.mark.extra("cuda")
def test_machine_code_lacks_what_is_left_out() -> None:
    spec, _ = bench_ablated.planned(bench_ablated.list_all()[1], GPUS["sm_90"])
    copies = {}
    for technique in (WHOLE, "unrolled loads", "V prefetch"):
        with without(technique):
            copies[technique] = count_instructions(
                load_cubin(spec, "sm_90").code, ASYNCHRONOUS_COPY
            )
    # K and V of the first tiles and of the loop, 3 each; V is copied in the loop only
    assert copies[WHOLE] - copies["unrolled loads"] == 4 * (3 - 1)
    assert copies[WHOLE] - copies["V prefetch"] == 3


def test_counts_of_ncu_are_those_of_launches() -> None:
    printed = """==PROF== Connected to process 7
"ID","Kernel Name","a.sum","b.sum"
"","","","inst"
"0","decode_one","1,234","0"
"1","decode_one","2","n/a"
"""
    assert read_counts(printed) == [{"a": 1234, "b": 0}, {"a": 2}]
