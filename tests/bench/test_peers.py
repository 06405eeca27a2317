"""tests/benchmarks/peers.py on the CPU, where no other project is there: its checks, its file."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from fake_timer import CPU, MACHINE, FakeTimer

from kvquant.bench.timer import Call
from kvquant.kernels.cuda.runtime.launch import GPUS

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import peers


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["4:2x70x2", "4:mlax70x2"])
def test_what_is_installed_is_checked_and_timed(shape: str) -> None:
    at = peers.make_inputs(shape, CPU)
    found = {
        (peer.project, peer.cache): peers.measure(peer, at, FakeTimer())  # type: ignore[arg-type]
        for peer in peers.takers(shape, peers.PEERS)
        if peer.module in ("kvquant", "torch")
    }
    assert len(found) == (4 if "mla" in shape else 6)
    for one in found.values():
        assert one is not None and one["us"] == 10 and 0 < one["error"] < 3e-3
    if "mla" not in shape:
        torchs = found["torch", "BF16"]
        assert torchs is not None and torchs["gb_per_s"] == 2 * at.k.nbytes / 10 / 1e3


def test_wrong_results_are_named_and_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    at = peers.make_inputs("4:2x70x2", CPU)

    def prepare(at: peers.Inputs) -> peers.Ready:
        right = peers.prepare_torch(at).calls["math, folded"]
        zeros = partial(torch.zeros_like, at.q)
        calls: dict[str, Call] = {"wrong": zeros, "right": right}
        return peers.Ready(calls, peers.ends(at.k), peers.ends(at.v), at.k.nbytes)

    found = peers.measure(replace(peers.PEERS[0], prepare=prepare), at, FakeTimer())  # type: ignore[arg-type]
    assert found is not None and found["kernel"] == "right"
    assert "wrong: AssertionError: relative error 1.0e+00 is over 0.005" in capsys.readouterr().out


def test_json_says_what_was_measured_and_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(peers, "GraphTimer", FakeTimer)
    monkeypatch.setattr(peers, "describe_machine", lambda timer, version: MACHINE)
    monkeypatch.setattr(peers, "gpu_of", lambda index: GPUS["sm_90"])
    monkeypatch.setattr(peers, "compile_kernels", lambda specs, arch: compiled.extend(specs))
    monkeypatch.setattr(peers, "commit", lambda: "0123abc")
    file = tmp_path / "peers.json"
    given = ["--shape", "4:2x8x2", "--project", "torch", "--project", "FBGEMM"]
    monkeypatch.setattr(sys, "argv", ["peers.py", *given, "--json", str(file)])
    peers.main()
    found = json.loads(file.read_text())
    assert found["machine"]["device"] == "GPU" and found["commit"] == "0123abc"
    assert compiled == []
    assert [(one["shape"], one["project"], one["cache"]) for one in found["peers"]] == [
        ("4:2x8x2", "torch", "BF16")
    ]
    for one in found["peers"]:
        assert one["us"] == 10 and one["gb_per_s"] > 0 and 0 < one["error"] < 8e-2 and one["kernel"]
    out = capsys.readouterr().out
    assert "FBGEMM, BF16: not measured (No module named 'fbgemm_gpu'): pip install" in out
