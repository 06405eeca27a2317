"""tests/benchmarks/bench_vllm.py and bench_window.py in small, on the CPU (2 minutes each)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import MODEL, ROOT

SMALL = "--layers 1 --width 512 --batch 2 --context 64 --outputs 4 8 --requests 4 --rounds 1"
PARTS = "--part decode --part load --rate 8 --engine kvquant"


WINDOWED = "--format default --passages 2 --first 300 --new-tokens 16 --recent 128"


def run(name: str, tmp_path: Path, *arguments: str, **more: str) -> dict[str, Any]:
    """What a script of tests/benchmarks writes to its JSON."""
    script, file = ROOT / "tests" / "benchmarks" / name, tmp_path / "found.json"
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(tmp_path),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **more,
    }
    command = [sys.executable, str(script), "--json", str(file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.slow
def test_an_engine_is_measured_in_a_batch_and_under_load(tmp_path: Path) -> None:
    given = *SMALL.split(), *PARTS.split()
    read = run("bench_vllm.py", tmp_path, *given, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    found = read["engines"]["kvquant"]
    assert "errors" not in found
    (decode,) = found["decode"]
    assert decode["batch"] == 2 and decode["ended_too_early"] == 0
    assert decode["tokens_per_s"] == pytest.approx(2e3 / decode["step_ms"])
    shares = [one["share"] for one in found["load"]]
    assert shares == [0.5, 0.7, 0.9]
    for one in found["load"]:
        assert one["rate"] == pytest.approx(8 * one["share"]) and one["requests"] == 4
        assert 0 < one["first_token_ms_p50"] <= one["first_token_ms_p99"]
    log = (tmp_path / "kvquant.log").read_text(errors="replace")
    assert "kvquant: K rows int4-g4, V rows int4-g4" in log


@pytest.mark.slow
def test_an_engine_with_a_window_is_as_near_to_16_bit_as_a_cache_of_transformers(
    tmp_path: Path,
) -> None:
    given = str(MODEL), *WINDOWED.split(), "--format", "16 bit"
    rows = run("bench_window.py", tmp_path, *given)["rows"]
    found = {(row["key"]["format"], row["key"]["part"]): row for row in rows}
    exact, turns, chunks = (
        found["16 bit", "turns"],
        found["default", "turns"],
        found["default", "chunks"],
    )
    for kl in (*exact["vllm"].values(), *exact["apart"].values()):
        assert max(kl) < 1e-6, exact  # both predict the same tokens, and preemption changes none
    assert exact["preemptions"] == turns["preemptions"] == 2
    assert turns["hits"]["prefix hit"] > 0.8 and not turns["hits"]["plain"]
    for row in (turns, chunks):
        for state, theirs in row["transformers"].items():
            ours = row["vllm"][state]
            assert 1e-5 < sum(ours) and (state == "slots taken" or sum(ours) < 1.3 * sum(theirs))
