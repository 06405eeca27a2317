"""The fidelity benchmark and the peers written out for it, without the optional ones (15 s)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import fidelity
from example_plan import example_plan
from fidelity_peers import (
    HF_BITS,
    KIVI_GROUP,
    PEERS,
    Peer,
    SeparateLayer,
)
from fidelity_record import Record
from peer_schemes import kivi_keys, kivi_values

from kvquant.cache.contiguous import KVCache
from kvquant.calibration.fidelity import compare, predict, read_prompt
from kvquant.errors import ConfigError
from kvquant.hf.model import CachedModel
from kvquant.io.model_id import model_identity
from kvquant.io.plan import CachePlan

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ["--tokens", "16", "--scored", "8", "--context", "96", "--batch", "1"]


def by_name(name: str) -> Peer:
    return next(peer for peer in PEERS if peer.name == name)


@pytest.fixture(scope="module")
def model() -> CachedModel:
    return CachedModel.from_pretrained(EXAMPLES / "llama-demo-5m")


@pytest.fixture(scope="module")
def window(model: CachedModel) -> torch.Tensor:
    text = (EXAMPLES / "unseen.txt").read_text(encoding="utf-8")
    return torch.tensor(model.encode(text)[:202]).view(2, 101)


def test_kivi_groups_keys_by_channel_and_values_by_token() -> None:
    x = torch.randn(2, 1, 70, 64)
    x[..., 5] += 1000  # one channel far away
    keys, values = kivi_keys(x), kivi_values(x)
    for start in (0, 32, 64):
        group = x[:, :, start : start + KIVI_GROUP]
        step = (group.amax(2) - group.amin(2)) / 15
        wrong = (keys[:, :, start : start + KIVI_GROUP] - group).abs().amax(2)
        limit = 0.51 * step + group.abs().amax(2) * 2**-10
        assert bool((wrong <= limit).all())
    groups = x.unflatten(-1, (2, 32))
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    wrong = (values.unflatten(-1, (2, 32)) - groups).abs().amax(-1)
    assert bool((wrong <= 0.6 * step).all())
    assert float(wrong[..., 0].mean()) > 20 * float(wrong[..., 1].mean())
    assert torch.equal(kivi_keys(torch.full((1, 1, 40, 32), 2.5)), torch.full((1, 1, 40, 32), 2.5))


def test_the_16_bit_control_agrees_with_kvquants_own(
    model: CachedModel, window: torch.Tensor
) -> None:
    exact = read_prompt(model, window[:, :80], 20)
    expected = predict(model, exact, window[:, 80:100])
    exact.crop(80)
    given, bits = by_name("transformers 16 bit").predict(model, exact, window[:, 80:100])
    kl, top1, _ = compare(expected, given, window[:, 81:101].t()[..., None])
    assert abs(kl) < 1e-6 and top1 == 1.0 and bits == 16


def test_a_window_of_exact_rows_helps_and_costs_bits(
    model: CachedModel, window: torch.Tensor
) -> None:
    exact = read_prompt(model, window[:, :80], 20)
    expected = predict(model, exact, window[:, 80:100])
    found = []
    for name in ("KIVI, no window", "KIVI, last 32 in 16 bit"):
        exact.crop(80)
        given, bits = by_name(name).predict(model, exact, window[:, 80:100])
        found.append((compare(expected, given, window[:, 81:101].t()[..., None])[0], bits))
    (plain, plain_bits), (recent, recent_bits) = found
    assert 0 < recent < plain / 2 < 0.02
    # up to 31 keys of a group that is filling are in 16 bit without a window, too
    assert 5.0 < plain_bits < 7.0 < recent_bits < 12.0


def test_peers_refuse_models_with_sliding_windows(model: CachedModel, window: torch.Tensor) -> None:
    exact = KVCache(4, 2, 1, 128, 100, k_format="bf16", v_format="bf16", windows=[32, None] * 2)
    for name in ("transformers 16 bit", "KIVI, no window"):
        with pytest.raises(NotImplementedError, match="sliding windows"):
            by_name(name).predict(model, exact, window[:, 80:100])


class StoredOnce:
    """Like transformers' quantized layers: a state, dequantized at each update."""

    def __init__(self) -> None:
        self.held, self.calls = torch.empty(0), 0
        self.keys = torch.empty(1, 1, 3, 64)

    def update(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.held.numel():
            self.held = k * 2
        return torch.cat([self._dequantize(self.held), k], 2), v

    def _dequantize(self, held: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return held / 2

    def get_seq_length(self) -> int:
        return 7


def test_sequences_have_layers_of_their_own_and_dequantize_once() -> None:
    layer = SeparateLayer(StoredOnce)
    k = torch.randn(3, 2, 5, 64)
    for _ in range(4):
        keys, _ = layer.update(k, k)
    assert torch.equal(keys, torch.cat([k, k], 2))
    assert [one.calls for one in layer.layers] == [1, 1, 1]
    assert layer.get_seq_length() == 7 and layer.num_exact == 3


def test_bits_count_the_rest_in_16_bit() -> None:
    peer = Peer("x", HF_BITS, lambda config: [])
    layer = SeparateLayer(StoredOnce)
    layer.update(torch.zeros(1, 1, 7, 64), torch.zeros(1, 1, 7, 64))
    cache = type("Cache", (), {"layers": [layer]})
    assert peer.stored_bits(cache) == pytest.approx(4.5 * 4 / 7 + 16 * 3 / 7)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the benchmark on a short text, in a wide terminal."""
    monkeypatch.setenv("COLUMNS", "120")
    text = tmp_path / "text.txt"
    text.write_text((EXAMPLES / "unseen.txt").read_text(encoding="utf-8")[:2000], encoding="utf-8")

    def invoke(*options: str) -> Any:
        arguments = ["--text", str(text), *TINY, *options]
        return CliRunner().invoke(fidelity.main, arguments, catch_exceptions=False)

    return invoke


def test_what_is_measured_is_kept_and_not_measured_again(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "fidelity.json")
    first = run("--only", "int8", "--only", "KIVI, no window", "--json", path)
    lines = first.stdout.splitlines()
    assert lines[0] == "llama-demo-5m, context 96, 16 tokens scored"
    names = [line.split("  ")[0] for line in lines[4:] if line]
    assert names == [
        "16 bit",
        "int8",
        "int8-g4",
        "int8 + 4 sinks, 128 recent",
        "KIVI, no window",
    ]
    kept = json.loads(Path(path).read_text())
    caches = kept["caches"]["llama-demo-5m, context 96"]
    assert [len(parts) for parts in caches.values()] == [2] * 5
    assert set(caches["int8"][0]) == {"bits", "kl", "top1", "nll"}
    measured: list[list[str]] = []

    def measure(*args: Any) -> Any:
        measured.append([one.name for one in args[3]])
        return original(*args)

    original = fidelity.measure_batch
    monkeypatch.setattr(fidelity, "measure_batch", measure)
    again = run("--only", "int8", "--only", "KIVI, no window", "--json", path)
    assert again.stdout == first.stdout and measured == []
    more = run("--only", "int4-g8", "--json", path)
    assert measured == [["int4-g8"], ["int4-g8"]]
    assert more.stdout.splitlines()[-2].startswith("int4-g8")


def test_a_record_of_other_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fidelity.json"
    Record(path, {"tokens": 1}).add("m", "a", [{"kl": 0.0}])
    with pytest.raises(ConfigError, match="other settings"):
        Record(path, {"tokens": 2})
    path.write_text("[]")
    with pytest.raises(ConfigError, match="not a file of this program"):
        Record(path, {"tokens": 1})


def planned(model: CachedModel, *, identity: bool = True) -> CachePlan:
    """A plan of the model's shape whose transforms change nothing."""
    plan = example_plan(4, 1, 128)
    tensors = dict(plan.tensors)
    for name, tensor in tensors.items():
        if ".clip." in name:
            tensors[name] = torch.ones_like(tensor)
        elif name.endswith(".offset"):
            tensors[name] = torch.zeros_like(tensor)
    side = {"format": "int8", "basis": "matrix", "rounding": "nearest"}
    layers = [{"k": side, "v": side, "kept": None}] * 4
    facts = {**plan.facts, "layers": layers}
    if identity:
        facts["model"] = model_identity(model.config_dict)
    return CachePlan(facts, tensors)


@pytest.mark.slow
def test_plans_are_measured_with_several_formats(
    run: Callable[..., Any], model: CachedModel, tmp_path: Path
) -> None:
    path, record = tmp_path / "mine.safetensors", tmp_path / "fidelity.json"
    planned(model).save(path)
    only = ("--only", "int4", "--only", "int8", "--only", "mine")
    lines = run(*only, "--plan", str(path), "--json", str(record)).stdout.splitlines()
    found = {line.split("  ")[0]: line.split()[-4:] for line in lines[4:] if line}
    for name in ("int4", "int4-g4", "int4 + 4 sinks, 128 recent"):
        assert found[f"plan mine, {name}"] == found[name], name
    assert found["plan mine"] == found["int8"]
    assert "plan mine, int8" not in found
    planned(model, identity=False).save(path)
    with pytest.raises(ConfigError, match="made for none of these models"):
        run("--only", "fp8", "--plan", str(path))


def test_figures_of_another_plan_are_forgotten() -> None:
    record = Record(None, {})
    for digest, left in (("a", 0), ("a", 1), ("b", 0)):
        record.check_plan("m", "plan", digest)
        assert len(record.parts("m", "plan")) == left
        record.add("m", "plan", [{"kl": 0.0}])


def test_a_peer_that_cannot_run_is_named_with_its_reason(
    model: CachedModel, window: torch.Tensor
) -> None:
    def missing(config: Any) -> list[Any]:
        raise ImportError("You need to\n install it")

    record = Record(None, {})
    peers = [Peer("absent", 4.5, missing), by_name("KIVI, no window")]
    done: list[str] = []
    fidelity.run_all(model, window, 4, peers, record, "m", batch=1, progress=done.append)
    assert done == ["16 bit", "absent", peers[1].name, "16 bit", peers[1].name]
    table = record.table("m")
    assert table.splitlines()[-1] == (
        "absent: cannot run here (ImportError: You need to install it)"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--context", "8"], "must be more than --scored"),
        (["--tokens", "99999"], "too few"),
        (["--json", "no/folder.json"], "is not a folder"),
    ],
    ids=["context", "tokens", "json"],
)
def test_sizes_and_files_that_do_not_fit_are_told(
    run: Callable[..., Any], options: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run(*options)


@pytest.mark.slow
def test_a_context_beyond_the_model_is_left_out(run: Callable[..., Any]) -> None:
    assert "left out, the model is made for 4096" in run("--context", "5000").stdout
