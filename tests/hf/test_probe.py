"""K rows of few bits that would ruin a model are refused where a cache is made of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")
from safetensors.torch import save_file
from tiny_models import tiny_model

from kvquant import AccuracyError, CachedModel, ConfigError, PagedKVCache, QuantizedCache, RowFormat
from kvquant.engine.settings import Settings, tell_settings
from kvquant.hf.models import probe
from kvquant.hf.models.fingerprint import fingerprint_of
from kvquant.rows.probe import REFUSED, WARNED, combined, divergence


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Figures of this test alone, on disk and in the process."""
    monkeypatch.setenv("KVQUANT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "_figures", type(probe._figures)())
    tell_settings.cache_clear()
    yield tmp_path / "cache"


def biased(size: float = 300.0) -> CachedModel:
    """A model in which a few channels of keys are large, and queries and keys vary beside them."""
    model = tiny_model("Qwen2", bias=1e-3)
    with torch.no_grad():
        for layer in model.model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight.mul_(2)
            layer.self_attn.k_proj.bias[30::64] = size  # turns slowly: all keys have it
    return model


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


def make(way: str, model: CachedModel, **options: Any) -> Any:
    if way == "CachedModel":
        return model.new_cache(1, 16, **options)
    if way == "PagedKVCache":
        return PagedKVCache.for_model(model.model, 4, max_num_seqs=2, **options)
    model.model.set_attn_implementation("kvquant")
    return QuantizedCache(model.model, **options)


@pytest.mark.parametrize("way", ["CachedModel", "QuantizedCache", "PagedKVCache"])
def test_rows_that_ruin_a_model_are_refused(way: str, folder: Path) -> None:
    model = biased()
    weights = {name: x.clone() for name, x in model.model.state_dict().items()}
    torch.manual_seed(5)
    drawn, _ = torch.rand(1), torch.manual_seed(5)
    with pytest.raises(AccuracyError, match=r"rows of int4.*plan=\"auto\".*leave k_format out"):
        make(way, model, k_format="int4", v_format="int4-g4")
    assert torch.equal(torch.rand(1), drawn), "random numbers of the caller are as before"
    assert all(torch.equal(x, weights[name]) for name, x in model.model.state_dict().items())
    assert len(list(folder.rglob("probes/*"))) == 1
    make(way, model, k_format="int4", v_format="int4-g4", accept_loss=True)
    with pytest.raises(AccuracyError):
        make(way, model, k_format="int4", v_format="int8")


@pytest.mark.parametrize("way", ["CachedModel", "QuantizedCache", "PagedKVCache"])
def test_rows_of_8_bits_are_not_probed(way: str, folder: Path) -> None:
    with mock.patch.object(probe, "observe", side_effect=AssertionError):
        make(way, biased(), k_format="int8", v_format="int2")
        make(way, biased(), k_format="bf16", v_format="int4")
    assert not folder.exists()


def test_a_loss_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model = biased(0.0)
    with mock.patch.object(probe, "combined", return_value=2 * WARNED):
        model.new_cache(1, 16, k_format="int4")
        model.new_cache(1, 16, k_format="int4", v_format="int8")
    (told,) = warnings(caplog)
    assert "K rows of int4 without a plan" in told and "Expect a loss" in told and "0.02" in told


def test_a_figure_is_kept_by_weights_and_formats(folder: Path) -> None:
    model, other = biased(), biased(200.0)
    for again in range(2):
        with pytest.raises(AccuracyError):
            model.new_cache(1, 16, k_format="int4")
        if not again:
            probe._figures.clear()  # as in a new process
            forbidden = mock.patch.object(probe, "observe", side_effect=AssertionError)
            forbidden.start()
    forbidden.stop()
    with mock.patch.object(probe, "observe", side_effect=RuntimeError("read")) as read:
        other.new_cache(1, 16, k_format="int4")
        model.new_cache(1, 16, k_format="int3")
        model.new_cache(1, 16, k_format=["int4", "int8"])
    assert read.call_count == 3
    (path,) = folder.rglob("probes/*")
    path.write_bytes(b"damaged")
    probe._figures.clear()
    with pytest.raises(AccuracyError):
        model.new_cache(1, 16, k_format="int4")


def test_a_folder_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVQUANT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(AccuracyError):
        biased().new_cache(1, 16, k_format="int4")


def test_a_model_that_cannot_be_read_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = biased()
    for error in (ValueError("give pixel_values"), torch.OutOfMemoryError("no memory left")):
        caplog.clear()
        with mock.patch.object(probe, "observe", side_effect=error):
            model.new_cache(1, 16, k_format="int4")
        (told,) = warnings(caplog)
        assert f"could not be probed: {error}: run kvquant check" in told
        assert "ids alone" not in told
    with pytest.raises(AccuracyError):  # the next cache is probed
        model.new_cache(1, 16, k_format="int4")


def test_kept_figures_are_those_of_folders(tmp_path: Path) -> None:
    """An engine's start neither waits for the hub or a GGUF file, nor stops at odd configs."""
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(24))
    with mock.patch.object(probe, "fingerprint_of", side_effect=AssertionError):
        for source in ("owner/name", str(tmp_path / "model.gguf")):
            assert probe.kept_figure(source, "int4") is None
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "t5", "num_layers": 1}')
    assert probe.kept_figure(tmp_path, "int4") is None
    with pytest.raises(ConfigError, match=r"no causal language model .* config of t5: Unrec"):
        fingerprint_of(tmp_path)


def test_models_run_as_before_beside_a_probe() -> None:
    model = biased(0.0)
    tokens = torch.arange(8)[None]
    before = model.model(tokens).logits
    compiled = torch.compile(model.model, backend="eager")
    with torch.inference_mode():
        CachedModel(model.model).new_cache(1, 16, k_format="int2", accept_loss=True)
        CachedModel(model.model).new_cache(1, 16, k_format="int4-g4")
    probe.check_accuracy(compiled, model.new_cache(1, 16, k_format="int4-g8"), model._layers)
    assert len(probe._figures[model.model]) == 2, "what torch.compile has wrapped is the model"
    model.model.train()
    model.new_cache(1, 16, k_format="int4")
    assert model.model.training
    model.model.eval()
    assert torch.equal(model.model(tokens).logits, before)


def test_the_divergence_is_that_of_weights() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 32, 64), torch.randn(1, 2, 32, 64)
    fmt, window = RowFormat.parse("int3", 64), 5
    from kvquant import dequantize_rows, quantize_rows

    def weights(keys: torch.Tensor, head: int, at: int) -> torch.Tensor:
        seen = keys[0, head // 2, max(at - window + 1, 0) : at + 1].double()
        return (seen @ q[0, head, at].double() * 0.3).softmax(0)

    rounded = dequantize_rows(quantize_rows(k, fmt), fmt)
    found = []
    for head in range(4):
        exact, other = weights(k, head, 16), weights(rounded, head, 16)
        found.append((exact * (exact / other).log()).sum())
    expected = float(torch.stack(found).mean())
    assert expected > 1e-3
    # float32 scores of size 10 or so, and differences of their logarithms: 32 roundings at most
    assert float(divergence(q, k, fmt, 0.3, window)) == pytest.approx(expected, abs=32 * 1e-6)
    assert combined([torch.tensor(0.04), torch.tensor(0.16)]) == pytest.approx(0.1)


@pytest.mark.parametrize("figure", [0.5 * WARNED, 2 * WARNED, 2 * REFUSED, None])
def test_engines_warn_by_the_kept_figure(
    figure: float | None, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    model = biased(0.0)
    model.model.save_pretrained(tmp_path / "model")
    if figure is not None:
        with mock.patch.object(probe, "combined", return_value=figure):
            try:
                model.new_cache(1, 16, k_format="int4-g4")
            except AccuracyError:
                assert figure >= REFUSED
    caplog.clear()
    ruins = figure == 2 * REFUSED
    for k_format in ("int4-g4", "int4-g4", "int8"):
        given = {"k_format": k_format, "v_format": "int4-g4", "accept_loss": ruins}
        tell_settings(Settings.parse(given), str(tmp_path / "model"))
        if ruins and k_format == "int4-g4":
            with pytest.raises(AccuracyError, match=r'0\.24.*"accept_loss": true'):
                tell_settings(
                    Settings.parse(given | {"accept_loss": False}), str(tmp_path / "model")
                )
    told = " ".join(warnings(caplog))
    assert ("no probe of this model is kept" in told) == (figure is None)
    assert ("Expect a loss" in told) == (figure == 2 * WARNED)
    assert (f"and from {REFUSED:g} on" in told and "0.24" in told) == (figure == 2 * REFUSED)
