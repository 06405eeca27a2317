"""Tables, warnings and the file of statistics (1 s)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from kvquant.calibration.collect import Statistics
from kvquant.calibration.fidelity import Fidelity, Scheme
from kvquant.calibration.observers import ChannelObserver
from kvquant.calibration.report import (
    plan_metadata,
    render_fidelity,
    render_table,
    warnings,
    write_plan,
)

GOOD = Fidelity(Scheme("int8", "int8"), 8.25, 1000, 0.0002, 0.99, 15.0)
BAD = Fidelity(Scheme("int4", "int8", 4, 128), 4.25, 500, 2.318, 0.3625, 161.0)


def statistics(offset: float = 0.0) -> Statistics:
    layers = []
    for layer in range(3):
        torch.manual_seed(layer)
        x = torch.randn(1, 2, 200, 64)
        if layer == 1:
            x[:, 1, :, 7] += offset
        observer = ChannelObserver(2, 64, ("int8",))
        observer.update(x)
        layers.append(observer)
    return Statistics(layers, layers)


def test_tables_are_aligned() -> None:
    assert render_table(["name", "x"], [["a", "10.5"], ["longer", "2"]]) == (
        "name       x\n──────  ────\na       10.5\nlonger     2"
    )


def test_the_table_names_each_scheme_with_its_figures() -> None:
    lines = render_fidelity([GOOD, BAD]).splitlines()
    assert lines[2].split() == ["int8", "8.25", "1.94x", "0.00020", "99.00", "15.000"]
    assert lines[3].startswith("K int4, V int8 + 4 sinks, 128 recent")
    assert lines[3].split()[-3:] == ["2.31800", "36.25", "161.000"]


def test_a_model_that_bears_all_is_not_warned_of() -> None:
    assert warnings(statistics(), [GOOD]) == []


@pytest.mark.parametrize("kl", [2.318, float("nan")])
def test_formats_that_destroy_the_predictions_are_named(kl: float) -> None:
    bad = Fidelity(BAD.scheme, 4.25, 500, kl, 0.3625, 161.0)
    (warning,) = warnings(None, [GOOD, bad])
    assert warning.startswith(f"K int4, V int8 + 4 sinks, 128 recent: KL {kl:.2f} nats")
    assert "do not decode" in warning


def test_a_noticeable_loss_is_told_in_milder_words() -> None:
    worn = Fidelity(Scheme("int4-g8", "int4-g8"), 6.0, 500, 0.0712, 0.874, 17.0)
    (warning,) = warnings(None, [GOOD, worn])
    assert warning.startswith("int4-g8: KL 0.071 nats per token, 87 % of the likeliest")
    assert "noticeable" in warning and "do not" not in warning


def test_keys_with_offsets_are_named() -> None:
    (warning,) = warnings(statistics(offset=40), [GOOD])
    assert "layer 1, KV head 1, channel 7: mean 40 times" in warning


def test_the_file_holds_statistics_and_table(tmp_path: Path) -> None:
    found, path = statistics(), tmp_path / "plan.safetensors"
    metadata = plan_metadata({"type": "llama", "sha256": "0"}, found, [GOOD, BAD], {"context": 9})
    path.write_text("old")
    write_plan(path, found, metadata)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.safetensors"]
    with safe_open(path, framework="pt") as file:
        for name, tensor in found.tensors().items():
            assert torch.equal(file.get_tensor(name), tensor), name
        written = json.loads(file.metadata()["kvquant"])
    assert written == json.loads(json.dumps(metadata))
    assert [written["format"], written["version"]] == ["kvquant-calibration", 1]
    assert [written["observed_tokens"], written["settings"]] == [200, {"context": 9}]
    assert written["fidelity"][1] == {
        "k_format": "int4",
        "v_format": "int8",
        "sink_len": 4,
        "recent_len": 128,
        "bits": 4.25,
        "nbytes": 500,
        "kl": 2.318,
        "top1": 0.3625,
        "perplexity": 161.0,
    }
    assert written["warnings"] == warnings(found, [BAD])
