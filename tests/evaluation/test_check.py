"""kvquant check: sizes, verdicts and lines (10 s)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("transformers")
from tiny_models import tiny_model

from kvquant import ConfigError, KVCache, RowFormat
from kvquant.calibration.fidelity import Reference
from kvquant.calibration.verdict import CLOSE, SAFE_WORD, SMALL
from kvquant.calibration.windows import spread
from kvquant.cli.main import main
from kvquant.evaluation.caches import parse_cache
from kvquant.evaluation.check import ENOUGH, best, check, check_size, parse_memory, render, verdict
from kvquant.evaluation.evaluate import HELD_OUT
from kvquant.hf.hybrid import load_decoder
from kvquant.hf.model import CachedModel
from kvquant.hf.models.configs import cache_layers
from kvquant.io.plan_store import SAFE
from kvquant.rows.defaults import RECENT, SINKS, default_format

MODEL = Path(__file__).parents[2] / "examples" / "llama-demo-5m"


@pytest.fixture(scope="module")
def model() -> CachedModel:
    return load_decoder(MODEL, dtype=torch.float32)


@pytest.fixture(scope="module")
def found(model: CachedModel) -> dict[str, Any]:
    return check(model, samples=2, memory=2**30)


def test_the_ladder_orders_bits_and_losses(found: dict[str, Any]) -> None:
    names = [row["cache"] for row in found["rows"]]
    assert names == ["int8", "default", "int4-g4", "int4"]
    for column in (
        [row["bits"] for row in found["rows"]],
        [row["bytes"]["32768"] for row in found["rows"]],
        [-row["window"]["kl"] for row in found["rows"]],
        [-row["none"]["kl"] for row in found["rows"]],
    ):
        assert column == sorted(column, reverse=True), column
    for row in found["rows"]:
        assert row["window"]["kl"] < row["none"]["kl"], "a window of 16-bit tokens loses less"


def test_it_tells_what_decoding_tells(model: CachedModel, found: dict[str, Any]) -> None:
    """The KL of the default without a window, within the standard error of two passages."""
    size = found["context"] + found["scored"] // 2 + 1
    windows = spread(model.encode(HELD_OUT.read_text(encoding="utf-8")), 2, size)
    decoded = Reference(model, windows, found["context"]).measure(
        parse_cache("default,sinks=0,recent=0")
    )
    kl = found["rows"][1]["none"]["kl"]
    assert abs(decoded.kl - kl) < max(decoded.kl_error or 0, kl / 10)


def test_bytes_are_those_of_caches(model: CachedModel, found: dict[str, Any]) -> None:
    config = model.config
    shape = config.num_hidden_layers, 1, config.num_key_value_heads, config.head_dim
    cache = KVCache(*shape, max_seq_len=4096)
    row = found["rows"][1]
    assert row["bytes"]["4096"] == cache.nbytes
    assert row["sequences"]["4096"] == 2**30 // cache.nbytes
    assert found["exact"]["bytes"]["4096"] > cache.nbytes * 1.9


def test_size_only_is_the_same_without_weights(found: dict[str, Any]) -> None:
    from kvquant.hf.models.loading import load_config

    alone = check_size(load_config(MODEL), memory=2**30)
    for row, one in zip(found["rows"], alone["rows"], strict=True):
        assert {name: row[name] for name in one} == one
    assert "window" not in alone["rows"][0] and "KL" not in render(alone)


def test_few_passages_have_no_verdict() -> None:
    assert [verdict(SAFE / 2, SAFE / 10, ENOUGH - few) for few in (0, 1)] == [SAFE_WORD, CLOSE]


def test_the_best_is_the_smallest_that_is_safe() -> None:
    rows = [
        {"cache": "a", "bits": 8.0, "window": {"verdict": SAFE_WORD}},
        {"cache": "b", "bits": 5.0, "window": {"verdict": SAFE_WORD}},
        {"cache": "c", "bits": 4.0, "window": {"verdict": SMALL}},
    ]
    assert best({"rows": rows}, "window") == rows[1]
    assert best({"rows": rows[2:]}, "window") is None
    for row, bits in zip(rows, (4.5, 6.0, 4.0), strict=True):  # the default has others then
        row |= {"none": row["window"], "bits_without_window": bits}
    assert best({"rows": rows}, "none") == rows[0]


def test_bits_are_told_with_the_window_and_without_it() -> None:
    config = tiny_model("Qwen2").config
    config.head_dim = 192
    row = check_size(config)["rows"][1]
    assert row["formats"] != row["formats_without_window"]
    layers = cache_layers(config)
    for key, window in (("bits", (SINKS, RECENT)), ("bits_without_window", (0, 0))):
        pair = [RowFormat.parse(default_format(side, 192, *window), 192) for side in "kv"]
        assert row[key] == pytest.approx(8 * sum(one.row_bytes for one in pair) / 384)
    assert layers.k_dims[0] == 192


@pytest.mark.parametrize("positions", [64, 192, 328])
def test_a_prompt_that_stays_in_16_bit_is_refused(positions: int) -> None:
    model = tiny_model("Llama", max_position_embeddings=positions)
    with pytest.raises(ConfigError, match=f"^{positions} positions are too few .* needs 329:"):
        check(model, samples=4, text="a")


def test_progress_reaches_all_and_moves_within_caches(model: CachedModel) -> None:
    told: list[tuple[str, int]] = []
    found = check(model, samples=1, progress=lambda name, share: told.append((name, share)))
    assert sum(share for _, share in told) == 100 and min(share for _, share in told) >= 0
    names = list(dict.fromkeys(name for name, _ in told))
    assert names == ["16 bit", "int8", "default", "int4-g4", "int4"]
    assert sum(share > 0 for name, share in told if name == "16 bit") > 5
    assert {row[place]["verdict"] for row in found["rows"] for place in ("window", "none")} == {
        CLOSE
    }
    assert "give 4 --samples" in render(found) and "is safe" not in render(found)


def test_lines_run_as_they_stand(model: CachedModel, found: dict[str, Any]) -> None:
    """Those for Python make the cache that was measured, that for vLLM is one that it takes."""
    from kvquant import QuantizedCache
    from kvquant.engine.settings import Settings

    model.model.set_attn_implementation("kvquant")
    for row in found["rows"]:
        names = {"model": model.model, "QuantizedCache": QuantizedCache, "KVCache": KVCache}
        names |= {"batch": 1, "max_seq_len": 4096}
        exec(row["lines"]["your own loop"], names)
        assert names["cache"].nbytes == row["bytes"]["4096"]
        exec(row["lines"]["QuantizedCache"], names)
        text = row["lines"]["vLLM"].partition("'")[2].rstrip("'")
        layout = Settings.parse(json.loads(text)["kvquant"]).layout(1, 128, 128)
        formats = f"K {layout.k_format}, V {layout.v_format}", str(layout.k_format)
        assert row["formats_without_window"] in formats


def test_a_plan_is_one_more_row(model: CachedModel) -> None:
    from kvquant.calibration.calibrate import Sizes, calibrate

    plan = calibrate(model, None, zero_data=True, sizes=Sizes(observed=512, length=256))
    found = check(model, plan=plan, plan_name="plan.safetensors", samples=1)
    row = found["rows"][-1]
    assert row["cache"] == "plan" and row["bits"] == plan.bits
    assert row["lines"]["QuantizedCache"].endswith("plan='plan.safetensors')")
    assert row["window"]["kl_error"] is None and "plan" in render(found)


def test_latent_rows_have_a_ladder_of_their_own() -> None:
    model = tiny_model("DeepseekV3", **{"num_hidden_layers": 1})
    found = check_size(model.config)
    assert [row["cache"] for row in found["rows"]] == ["int8-g4+int8-g4", "default", "int4-g4"]
    assert all("fmt=" in row["lines"]["QuantizedCache"] for row in found["rows"][::2])


def test_too_little_text_is_refused_before_work(model: CachedModel) -> None:
    with pytest.raises(ConfigError, match="100 samples need 108,900 tokens, and the text has"):
        check(model, samples=100)


def test_memory() -> None:
    sizes = {"24GiB": 24 * 2**30, "80 GB": 80 * 10**9, "1.5gib": 3 * 2**29}
    assert {text: parse_memory(text) for text in sizes} == sizes
    for text in ("", "GiB", "-1GiB", "24 apples", "1e3", "24"):
        with pytest.raises(ConfigError, match="no size with a unit: write it as 24GiB"):
            parse_memory(text)


def test_the_command(tmp_path: Path) -> None:
    kept = tmp_path / "check.json"
    run = CliRunner().invoke(main, ["check", str(MODEL), "--samples", "4", "--json", str(kept)])
    assert run.exit_code == 0, run.output
    assert "is safe. In QuantizedCache:" in run.output and "vllm serve MODEL" in run.output
    assert "a thousand tokens or more, up to 0.003." in " ".join(run.output.split())
    assert json.loads(kept.read_text(encoding="utf-8"))["passages"] == 4
    sizes = CliRunner().invoke(main, ["check", str(MODEL), "--size-only", "--memory", "24GiB"])
    assert sizes.exit_code == 0 and "24 GiB" in sizes.output and "KL" not in sizes.output
