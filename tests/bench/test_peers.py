"""tests/benchmarks/peers.py where no other project is installed: its checks, on the CPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import peers

CPU = torch.device("cpu")


class FakeTimer:
    """Runs every call once; it takes 10 us."""

    def alone(self, call: Any) -> float:
        call()
        return 10.0


@pytest.mark.slow
def test_what_is_installed_is_checked_and_timed() -> None:
    at = peers.make_inputs("4:2x70x2", CPU)
    found = {
        (peer.project, peer.cache): peers.measure(peer, at, FakeTimer())  # type: ignore[arg-type]
        for peer in peers.PEERS
        if peer.module in ("kvquant", "torch")
    }
    assert len(found) == 6
    for one in found.values():
        assert one is not None and one["us"] == 10 and 0 < one["error"] < 3e-3
    torchs = found["torch", "BF16"]
    assert torchs is not None and torchs["gb_per_s"] == 2 * at.k.nbytes / 10 / 1e3


def test_wrong_results_are_named_and_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    at = peers.make_inputs("4:2x70x2", CPU)

    def prepare(at: peers.Inputs) -> peers.Ready:
        right = peers.prepare_torch(at).calls["math, folded"]
        zeros = partial(torch.zeros_like, at.q)
        return peers.Ready({"wrong": zeros, "right": right}, at.k, at.v, at.k.nbytes)

    found = peers.measure(replace(peers.PEERS[0], prepare=prepare), at, FakeTimer())  # type: ignore[arg-type]
    assert found is not None and found["kernel"] == "right"
    assert "wrong: AssertionError: relative error 1.0e+00 is over 0.003" in capsys.readouterr().out


def test_rows_of_ours_are_those_of_fbgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "fbgemm_gpu.experimental.gen_ai"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    at = peers.make_inputs("8:1x64x2", CPU)
    monkeypatch.setattr(torch.ops.fbgemm, "gqa_attn_splitk", print, raising=False)
    ready = peers.prepare_fbgemm("int4-g4", at)
    given = ready.calls["4 splits"].args[0].args  # type: ignore[attr-defined]
    assert given[0].shape == (2, 1, 8, 128) and given[1].shape == (2, 64, 1, 80)
    assert given[3].tolist() == [63, 63] and given[5] == 4
    with pytest.raises(ValueError, match="one KV head"):
        peers.prepare_fbgemm("int4-g4", peers.make_inputs("4:2x64x1", CPU))


def test_pages_hold_the_tokens_in_order() -> None:
    at = peers.make_inputs("4:2x128x3", CPU)
    pages = peers.to_pages(at.k)
    assert pages.shape == (6, 2, 64, 128)
    assert torch.equal(pages[3, 1, 5], at.k[1, 1, 64 + 5])
    with pytest.raises(ValueError, match="no multiple"):
        peers.to_pages(at.k[:, :, :70].contiguous())


def test_a_missing_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["peers.py"])
    with pytest.raises(SystemExit, match="no GPU"):
        peers.main()
