"""The bench on a CPU: figures of a case, none of a wrong result (3 s)."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from kvquant.bench import cpu
from kvquant.bench.cases import Case, list_cases
from kvquant.errors import KVQuantError
from kvquant.ops.attention import Result, attend


def case(name: str = "int8/int4-g4") -> Case:
    sizes: dict[str, Any] = {"batches": (2,), "seq_lens": (40,), "num_q_heads": 4}
    (one,) = list_cases((name,), num_kv_heads=2, head_dim=64, dtype=torch.float32, **sizes)
    return one


def test_figures_are_those_of_the_case() -> None:
    found = cpu.bench_decode(case(), seconds=0.01)
    assert (found["format"], found["batch"], found["seq_len"]) == ("int8/int4-g4", 2, 40)
    assert (found["num_q_heads"], found["num_kv_heads"]) == (4, 2)
    assert 0 < found["error"] < 1e-5
    assert found["gb_per_s"] == pytest.approx(2 * 2 * 40 * (68 + 48) / found["ms"] / 1e6)
    assert found["sdpa_ratio"] == pytest.approx(found["sdpa_ms"] / found["ms"])
    assert found["matmul_ratio"] == pytest.approx(found["matmul_ms"] / found["ms"])
    assert "int8/int4-g4" in cpu.render_decode([found])


def test_wrong_results_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*args: Any, **options: Any) -> Result:
        out, lse = attend(*args, **options)
        return out + 0.01, lse

    monkeypatch.setattr("kvquant.bench.cases.attend", spoiled)
    monkeypatch.setattr(cpu, "time_in_turn", lambda *_: pytest.fail("it was timed"))
    with pytest.raises(KVQuantError, match=r"int8/int4-g4, batch 2, 4:2 heads, T 40: .* not timed"):
        cpu.bench_decode(case())


def test_rows_are_timed_where_both_backends_agree() -> None:
    found = cpu.bench_rows("int4-g4", shape=(2, 8, 64), seconds=0.01)
    assert found["format"] == "int4-g4" and found["quantize_ms"] > 0
    assert "int4-g4" in cpu.render_rows([found])


AMD = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC

processor\t: 1
model name\t: another
"""
ARM = """processor\t: 0
BogoMIPS\t: 2000.00
CPU part\t: 0xd4f
"""


def test_a_record_of_the_machine_names_processor_versions_and_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu, "read_bandwidth", lambda: 34.71)
    monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "cpuinfo")
    named = {"": platform.machine(), AMD: "AMD EPYC (family 25, model 17)"}
    for text, name in (named | {ARM: platform.machine()}).items():
        if text:
            cpu.CPUINFO.write_text(text)
        machine = cpu.describe_machine("0.1.0")
        assert machine.cpu == name
    assert machine.threads == torch.get_num_threads() and machine.torch == torch.__version__
    assert machine.kvquant == "0.1.0" and machine.date.endswith("+00:00")
    first, second = cpu.render_machine(machine).splitlines()
    assert first == machine.cpu and second.endswith("peak bandwidth 34.7 GB/s")
