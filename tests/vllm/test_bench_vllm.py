"""tests/benchmarks/bench_vllm.py in small, on the CPU (2 minutes)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_engines import ROOT

SMALL = "--layers 1 --width 512 --batch 2 --context 64 --outputs 4 8 --requests 4 --rounds 1"
PARTS = "--part decode --part load --rate 8 --engine kvquant"


@pytest.mark.slow
def test_an_engine_is_measured_in_a_batch_and_under_load(tmp_path: Path) -> None:
    script, file = ROOT / "tests" / "benchmarks" / "bench_vllm.py", tmp_path / "found.json"
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(tmp_path),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    command = [sys.executable, str(script), "--json", str(file), *SMALL.split(), *PARTS.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads(file.read_text())["engines"]["kvquant"]
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
