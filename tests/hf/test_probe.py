"""K rows of few bits that would ruin a model are refused where a cache is made of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("transformers")
from safetensors.torch import save_file
from tiny_models import biased_model

from kvquant import AccuracyError, CachedModel, ConfigError, PagedKVCache, QuantizedCache, RowFormat
from kvquant.cli.main import main
from kvquant.engine import settings
from kvquant.engine.settings import Settings, folder_of, tell_settings
from kvquant.hf.models import loading, probe
from kvquant.hf.models.fingerprint import fingerprint_of
from kvquant.rows.probe import REFUSED, WARNED, combined, divergence


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Figures of this test alone, on disk and in the process."""
    monkeypatch.setenv("KVQUANT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "_figures", type(probe._figures)())
    tell_settings.cache_clear()
    yield tmp_path / "cache"


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
    model = biased_model()
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
        make(way, biased_model(), k_format="int8", v_format="int2")
        make(way, biased_model(), k_format="bf16", v_format="int4")
    assert not folder.exists()


def test_a_loss_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model = biased_model(0.0)
    with mock.patch.object(probe, "combined", return_value=2 * WARNED):
        model.new_cache(1, 16, k_format="int4")
        model.new_cache(1, 16, k_format="int4", v_format="int8")
    (told,) = warnings(caplog)
    assert "K rows of int4 without a plan" in told and "Expect a loss" in told and "0.02" in told


def test_a_figure_is_kept_by_weights_and_formats(folder: Path) -> None:
    model, other = biased_model(), biased_model(200.0)
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
        biased_model().new_cache(1, 16, k_format="int4")


def test_a_model_that_cannot_be_read_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = biased_model()
    for error in (ValueError("give pixel_values"), torch.OutOfMemoryError("no memory left")):
        caplog.clear()
        with mock.patch.object(probe, "observe", side_effect=error):
            model.new_cache(1, 16, k_format="int4")
        (told,) = warnings(caplog)
        assert f"could not be probed: {error}: run kvquant check" in told
        assert "ids alone" not in told
    with pytest.raises(AccuracyError):  # the next cache is probed
        model.new_cache(1, 16, k_format="int4")


def test_an_odd_config_has_no_figure(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "t5", "num_layers": 1}')
    with pytest.raises(ConfigError, match=r"no causal language model .* config of t5: Unrec"):
        fingerprint_of(tmp_path)
    told = accuracy_of(Settings("int4-g4", None), str(tmp_path))
    assert "this one was not probed: no causal language model" in told


def test_models_run_as_before_beside_a_probe() -> None:
    model = biased_model(0.0)
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


def accuracy_of(asked: Settings, folder: str | None) -> str:
    return settings.accuracy_of(asked, lambda _: folder)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that engines start, which run in this process, on its CPU."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> None:
        commands.append(command[3:])
        if command[-1] == "cpu":
            CliRunner().invoke(main, command[3:])

    monkeypatch.setattr("subprocess.run", run)
    settings._made_figure.cache_clear()
    return commands


@pytest.mark.parametrize("figure", [0.5 * WARNED, 2 * WARNED, 2 * REFUSED, None])
def test_engines_judge_by_a_figure_that_they_make_once(
    figure: float | None,
    started: list[list[str]],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    folder = str(tmp_path / "model")  # without a tokenizer
    biased_model(0.0).model.save_pretrained(folder)
    int4, ruins = Settings("int4-g4", "int8"), figure == 2 * REFUSED
    fails = {"side_effect": MemoryError} if figure is None else {"return_value": figure}
    with mock.patch.object(probe, "combined", **fails):
        for _ in range(2):  # before the model is loaded, and after
            if ruins:
                with pytest.raises(AccuracyError, match=r'0\.24.*"accept_loss": true serves'):
                    accuracy_of(int4, folder)
            else:
                told = accuracy_of(int4, folder)
                assert ("Expect a loss" in told) == (figure == 2 * WARNED)
                assert ("no figure is kept" in told) == (figure is None)
                assert bool(told) == (figure != 0.5 * WARNED)
    command = ["check", folder, "--k-format", "int4-g4", "--dtype", "bfloat16", "--device", "cpu"]
    assert started == [command]
    no_place = mock.patch.object(settings, "locked", side_effect=OSError("read-only"))
    if figure == 2 * WARNED:
        with no_place:  # a kept figure needs none
            assert accuracy_of(int4, folder) == told
    caplog.clear()
    caplog.set_level(logging.INFO, "kvquant")
    for one in (Settings("int4-g4", "int8", accept_loss=True), Settings("int8", "int4")):
        tell_settings(one, folder, "10 tokens")
    assert "no figure is kept" in accuracy_of(Settings("int3", None, accept_loss=True), folder)
    assert started == [command]
    assert "kvquant: K rows int8, V rows int4: 10 tokens" in caplog.text
    told = "".join(warnings(caplog))
    assert ("0.24" in told) == ruins and ("not probed" in told) == (figure is None)


def test_an_engine_goes_on_without_room_for_a_probe(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    biased_model().model.save_pretrained(tmp_path)
    int4, folder = Settings("int4-g4", "int8"), str(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(settings, "available_memory", lambda: 1 << 20)
    assert "no figure is kept" in accuracy_of(int4, folder)
    assert not started, "the system would end processes: a model is loaded on the CPU first"
    monkeypatch.setattr(settings, "available_memory", lambda: 1 << 40)
    settings._made_figure.cache_clear()  # as in the next start
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert accuracy_of(int4, folder) == "" and not started, "the first rank speaks"
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    with pytest.raises(AccuracyError):
        accuracy_of(int4, folder)
    assert [one[-1] for one in started] == ["cuda:0", "cpu"]
    monkeypatch.setenv("KVQUANT_CACHE_DIR", str(tmp_path / "config.json" / "cache"))
    assert "was not probed: " in accuracy_of(int4, folder), "no place for a figure"


def test_random_and_absent_weights_are_not_probed(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert folder_of(str(tmp_path), "dummy", None, None) is None
    assert folder_of(str(tmp_path), "auto", None, None) == str(tmp_path)
    cache = str(tmp_path / "hub")
    assert folder_of("owner/name", "auto", None, cache) is None
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / "a1"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a1")
    assert folder_of("owner/name", "auto", None, cache) == str(snapshot)
    with mock.patch("huggingface_hub.snapshot_download", return_value=str(snapshot)) as fill:
        assert folder_of("owner/name", "auto", "v2", cache, True) == str(snapshot)
    assert fill.call_args.kwargs == {
        "revision": "v2",
        "cache_dir": cache,
        "allow_patterns": list(loading.FILES),
        "local_files_only": False,
    }
    told = accuracy_of(Settings("int4", None), None)
    assert "not probed: its weights are random, or in no folder here" in told and not started
    for accepts in (False, True):  # without a probe there is nothing to download for
        find = mock.Mock(return_value=None)
        settings.accuracy_of(Settings("int4", None, accept_loss=accepts), find)
        find.assert_called_once_with(not accepts)


def test_the_command_keeps_a_figure(folder: Path, tmp_path: Path) -> None:
    for size, code, said in ((0.0, 0, "are not refused"), (300.0, 2, "texts are ruined")):
        biased_model(size).model.save_pretrained(tmp_path / "model")
        done = CliRunner().invoke(main, ["check", str(tmp_path / "model"), "--k-format", "int4"])
        assert (done.exit_code, said in done.output) == (code, True), done.output
    assert len(list(folder.rglob("probes/*"))) == 2
    odd = CliRunner().invoke(main, ["check", "model", "--k-format", "int4", "--samples", "4"])
    assert "--samples does not go with --k-format" in odd.output
