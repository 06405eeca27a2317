"""plan="auto": made once, kept by weights, taken by every door that holds a model (20 s)."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from example_plan import example_plan
from refusals import assert_refused

from kvquant import PagedKVCache
from kvquant.calibration import auto
from kvquant.calibration.calibrate import calibrate
from kvquant.calibration.fidelity import Scheme
from kvquant.calibration.windows import Sizes, observed_windows, packaged_texts, spread, too_little
from kvquant.engine.settings import Settings, _kept_plan, tell_settings, with_kept_plan
from kvquant.errors import CheckpointError, ConfigError
from kvquant.io import plan_store
from kvquant.io.model_id import model_identity
from kvquant.io.plan import CachePlan
from kvquant.io.plan_store import place_of, stored_plan

pytest.importorskip("transformers")
from tiny_models import tiny_model

from kvquant.cli.main import main
from kvquant.evaluation.caches import parse_cache
from kvquant.hf.cache import QuantizedCache
from kvquant.hf.model import CachedModel
from kvquant.hf.models.fingerprint import FOLDED, fingerprint

MODEL = Path(__file__).parents[2] / "examples" / "llama-demo-5m"
SMALL = Sizes(observed=512, length=128, windows=2, context=48, scored=8)
OPTIONS = [f"--{name}={value}" for name, value in vars(SMALL).items()]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVQUANT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that plans were made of, from little text."""
    found: list[Any] = []

    def small(model: Any, **options: Any) -> CachePlan | None:
        found.append(model)
        return calibrate(model, sizes=SMALL, **options)

    monkeypatch.setattr(auto, "calibrate", small)
    return found


@pytest.fixture
def model() -> CachedModel:
    return CachedModel.from_pretrained(MODEL)


def test_a_plan_is_made_once_and_kept(
    model: CachedModel, made: list[Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = {path: path.stat().st_mtime_ns for path in MODEL.iterdir()}
    caplog.set_level(logging.INFO, "kvquant")
    cache = model.new_cache(1, 64, plan="auto")
    place = place_of(model_identity(model.config_dict))
    assert place.parent == folder and place.is_file() and len(made) == 1
    assert f"plan made, kept in {place}: KL " in caplog.text
    assert {path: path.stat().st_mtime_ns for path in MODEL.iterdir()} == before
    caplog.clear()
    again = CachedModel.from_pretrained(MODEL).new_cache(1, 64, plan="auto")
    assert len(made) == 1 and "plan taken from the user's folder: KL " in caplog.text
    assert cache.bases is not None and again.bases is not None
    for ours, theirs in zip(cache.bases, again.bases, strict=True):
        assert ours.k.fingerprint == theirs.k.fingerprint
    assert str(cache.layers[0].k_format) == "int4"


def test_every_door_takes_it(model: CachedModel, made: list[Any]) -> None:
    model.model.set_attn_implementation("kvquant")
    cache = QuantizedCache(model.model, plan="auto")  # its tokenizer lies beside the weights
    assert cache._outline.bases
    paged = PagedKVCache.for_model(model.model, 4, max_num_seqs=2, plan="auto")
    assert paged.bases and len(made) == 1
    choice: Any = parse_cache("auto,recent=64", model=model)
    assert choice.plan.facts["model"]["weights"] == fingerprint(model.model)
    assert (choice.sink_len, choice.recent_len) == (4, 64) and str(choice).startswith("auto")
    for none in (False, None):
        assert model.new_cache(1, 64, plan=none).bases is None
        assert QuantizedCache(model.model, plan=none)._outline.bases is None


def test_what_contradicts_it_is_refused_before_one_is_made(
    model: CachedModel, made: list[Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = partial(model.new_cache, 1, 64, plan="auto")
    assert_refused(
        ConfigError,
        (partial(QuantizedCache, model.model.config, plan="auto"), "needs the model, and LlamaCo"),
        (partial(new, v_format="int8"), "v_format with plan 'auto'"),
        (lambda: parse_cache("auto"), "needs the model"),
        (partial(QuantizedCache, model.model, plan="auto"), "attends by"),
    )
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        assert_refused(ConfigError, (new, "run `kvquant calibrate MODEL` once"))
    monkeypatch.setattr(model.model, FOLDED, "before", raising=False)
    assert_refused(ConfigError, (lambda: auto.auto_plan(model), "plan that fold_values returned"))
    assert not made and not folder.exists()


def test_other_weights_and_another_config_have_another_plan(
    model: CachedModel, made: list[Any]
) -> None:
    first = auto.auto_plan(model)
    with torch.no_grad():
        model.model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    second = auto.auto_plan(model)
    assert len(made) == 2 and first is not None and second is not None
    assert not torch.equal(first.tensors["k.offset"], second.tensors["k.offset"])
    with pytest.raises(CheckpointError, match="with weights"):
        CachedModel.from_pretrained(MODEL).new_cache(1, 64, plan=second)
    model.model.config.max_position_embeddings *= 2
    model.model.set_attn_implementation("kvquant")
    for _ in range(2):
        assert QuantizedCache(model.model, plan="auto")._outline.bases
    assert len(made) == 3


def test_a_plan_that_costs_too_much_is_not_taken(
    model: CachedModel,
    made: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(plan_store, "SAFE", 0.0)
    cache = model.new_cache(1, 64, plan="auto")
    assert cache.bases is None and "the default formats are taken" in caplog.text
    plain = model.new_cache(1, 64).layers[0]
    choice = parse_cache("auto", model=model)
    assert isinstance(choice, Scheme) and len(made) == 1
    assert (choice.k_format, choice.v_format) == (str(plain.k_format), str(plain.v_format))


def test_a_damaged_file_is_made_anew(
    model: CachedModel, made: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert auto.auto_plan(model) is not None
    place = place_of(model_identity(model.config_dict))
    place.write_bytes(place.read_bytes()[:-1000])
    assert auto.auto_plan(model) is not None
    assert "cannot be read" in caplog.text and len(made) == 2
    assert stored_plan(model_identity(model.config_dict)) is not None


def test_a_folder_that_cannot_be_written_keeps_nothing(
    model: CachedModel, made: list[Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.write_text("in the way")
    caplog.set_level(logging.INFO, "kvquant")
    assert auto.auto_plan(model) is not None
    assert "will not be kept" in caplog.text and "not kept (" in caplog.text


def test_an_engine_takes_what_is_kept(
    model: CachedModel, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, commands = {"plan": "auto"}, []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def run(command: list[str], **others: Any) -> Any:
        commands.append(command[1:])
        env = others["env"]  # with KVQUANT_CACHE_DIR: the plan goes where this process looks
        assert {**env, "WORLD_SIZE": "2", "RANK": "1"} == {**os.environ} and "RANK" not in env
        if len(commands) > 1:
            auto.auto_plan(model)
        return SimpleNamespace(returncode=len(commands))

    monkeypatch.setattr("subprocess.run", run)
    # the command locks nothing that the engine has locked
    monkeypatch.setattr(auto, "locked", lambda path: nullcontext())
    with pytest.raises(ConfigError, match=r"`kvquant calibrate .*llama-demo-5m` made none"):
        with_kept_plan(given, str(MODEL))
    assert with_kept_plan(given, str(MODEL)) and len(made) == 1
    assert commands == 2 * [["-m", "kvquant", "calibrate", str(MODEL), "--device", "cpu"]]
    found = with_kept_plan(given, str(MODEL))
    assert given == {"plan": "auto"}  # a second engine of this process asks again
    assert found == {"plan": str(place_of(model_identity(model.config_dict)))}
    assert Settings.parse(found).k_format == "int4"
    for other in ({"plan": None}, {"k_format": "int8"}, "words"):
        assert with_kept_plan(other, "nowhere") == other
    assert with_kept_plan(given | {"recent_len": 128}, str(MODEL)) == found | {"recent_len": 128}
    for more, message in (
        ({"k_format": "int8"}, "k_format with plan 'auto'"),
        ({"recent_len": 128, "prompts": "rows"}, "leave one of them out"),
        ({"recent_len": -1}, "recent_len -1 is not possible"),
    ):
        with pytest.raises(ConfigError, match=message):
            with_kept_plan(given | more, "nowhere")  # no model is read
    assert Settings.parse({"plan": False}).plan is None
    monkeypatch.setattr(plan_store, "RUINED", 0.0)  # without 16-bit rows
    _kept_plan.cache_clear()
    with pytest.raises(ConfigError, match=r"costs a KL of .*leave \"plan\" out"):
        with_kept_plan(given, str(MODEL))


def test_the_cpu_makes_a_plan_where_the_gpu_has_no_room(
    model: CachedModel, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = []

    def run(command: list[str], **others: Any) -> Any:
        devices.append(command[-1])
        if devices[-1] == "cpu":
            auto.auto_plan(model)
        return SimpleNamespace(returncode=int(devices[-1] != "cpu"))

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr(auto, "locked", lambda path: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _kept_plan.cache_clear()
    assert with_kept_plan({"plan": "auto"}, str(MODEL)) and devices == ["cuda:0", "cpu"]


def test_an_engine_without_a_place_for_a_plan_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVQUANT_CACHE_DIR", str(tmp_path / "file" / "kvquant"))
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("minutes for nothing"))
    _kept_plan.cache_clear()
    with pytest.raises(ConfigError, match=r"no plan can be kept .*: set KVQUANT_CACHE_DIR, or"):
        with_kept_plan({"plan": "auto"}, str(MODEL))


@pytest.mark.slow  # 30 s
def test_an_engine_makes_a_plan(caplog: pytest.LogCaptureFixture) -> None:
    _kept_plan.cache_clear()
    found = with_kept_plan({"plan": "auto"}, str(MODEL))
    assert "which takes minutes" in caplog.text
    facts = CachePlan.load(found["plan"]).facts
    assert facts["model"]["weights"] == fingerprint(CachedModel.from_pretrained(MODEL).model)


def test_a_plan_of_other_weights_is_refused_at_every_door(
    model: CachedModel, made: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    auto.auto_plan(model)
    path = str(place_of(model_identity(model.config_dict)))
    for here in (str(MODEL), None):
        tell_settings(Settings.parse({"plan": path}), here, "")
    with torch.no_grad():
        model.model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    model.model.save_pretrained(tmp_path / "other")
    model.model.set_attn_implementation("kvquant")
    for door in (
        lambda: QuantizedCache(model.model, plan=path),
        lambda: PagedKVCache.for_model(model.model, 4, max_num_seqs=2, plan=path),
        lambda: tell_settings(Settings.parse({"plan": path}), str(tmp_path / "other"), ""),
    ):
        with pytest.raises(CheckpointError, match=r"for (a 'llama' model with )?weights"):
            door()
    tell_settings(Settings.parse({"plan": path}), str(tmp_path), "")  # no model: said, and no error
    assert "was not compared with the weights" in caplog.text


def test_a_model_of_few_positions_has_shorter_passages() -> None:
    found = tiny_model("GPT2", num_key_value_heads=4)
    assert found.max_positions is not None and found.max_positions < 1089
    plan = calibrate(found, [1, 2, 3, 4] * 4000, [4, 3, 2, 1] * 4000)
    assert plan.facts["measured"]["context"] == found.max_positions - Sizes.scored - 1


def test_the_command_keeps_the_plan_that_auto_would_make(
    model: CachedModel, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = CliRunner().invoke(main, ["calibrate", str(MODEL)])
    place = place_of(model_identity(model.config_dict))
    assert done.exit_code == 0, done.output
    assert place.name in done.output.replace("\n", "") and place.is_file()
    assert "QuantizedCache(model, plan='auto')" in done.output
    path = tmp_path / "plan.safetensors"
    again = ["calibrate", str(MODEL), "--format=int4-g4", f"--output={path}", *OPTIONS]
    done = CliRunner().invoke(main, again)
    assert done.exit_code == 0, done.output
    assert [one.name for one in folder.glob("*.safetensors")] == [place.name] and path.is_file()
    assert CachePlan.load(path).formats == [("int4-g4", "int4-g4")] * 4
    text = ["--text", str(MODEL / "config.json")]
    for options in (text, ["--zero-data"], ["--format=int4-g4"], OPTIONS[:1]):
        done = CliRunner().invoke(main, ["calibrate", str(MODEL), *options])
        assert done.exit_code == 2 and "give -o FILE" in done.output
    monkeypatch.setenv("KVQUANT_CACHE_DIR", str(path))  # a file
    done = CliRunner().invoke(main, ["calibrate", str(MODEL)])
    assert done.exit_code == 2 and "no plan can be kept" in done.output


def test_a_plan_that_cannot_be_kept_is_saved_and_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: CachePlan) -> Path:
        raise OSError(28, "No space left on device", "plans/x")

    monkeypatch.setattr("kvquant.io.plan_store.keep_plan", full)
    monkeypatch.setattr("kvquant.calibration.calibrate.calibrate", lambda *_, **__: example_plan())
    path = tmp_path / "plan.safetensors"
    done = CliRunner().invoke(main, ["calibrate", str(MODEL), "-o", str(path)])
    assert done.exit_code == 2 and "No space left on device" in done.output
    assert f"the plan is saved in {path}, and not kept" in " ".join(done.output.split())
    assert CachePlan.load(path).num_layers == 3


def test_one_call_takes_a_folder_or_a_model_of_transformers(model: CachedModel) -> None:
    small = partial(calibrate, sizes=SMALL)
    plans = [small(MODEL), small(model.model), small(model.model, tokenizer=model.tokenizer)]
    assert plans[0].facts["measured"]["scored"] == 16
    for plan in plans:
        assert plan.facts["model"]["weights"] == fingerprint(model.model)
        assert plan.facts["sensitivity"] == []  # formats were given: no side is measured alone
    nameless = tiny_model("Llama").model
    with pytest.raises(ConfigError, match=r"tokenizer of .* could not be loaded.*give tokenizer="):
        small(nameless)


def test_packaged_texts_are_long_enough_and_share_no_passage(model: CachedModel) -> None:
    sizes = Sizes()
    observed, held = (model.encode(text) for text in packaged_texts())
    first, second = observed_windows(observed, sizes, None)
    assert first.numel() + second.numel() == sizes.observed
    assert spread(held, sizes.windows, sizes.context + sizes.scored + 1).shape[0] == 8
    observed_lines, held_lines = (set(text.splitlines()) for text in packaged_texts())
    shared = [line for line in observed_lines & held_lines if len(line) > 60]
    assert not [line for line in shared if "raise" not in line and "import" not in line]
    for text in packaged_texts():
        assert text.count("User: ") > 5 and text.count("def ") > 5 and text.count("\n= ") > 2


def test_progress_goes_on_and_too_little_text_is_said_before_the_work(
    model: CachedModel, caplog: pytest.LogCaptureFixture
) -> None:
    assert not too_little(7168, Sizes(), is_scored=True)
    seen: dict[str, list[int]] = {}
    told: list[str] = []

    def progress(stage: str, share: int) -> None:
        seen.setdefault(stage, []).append(share)
        told.append(caplog.text)

    calibrate(model, sizes=SMALL, progress=progress)
    assert "too little text: 384 tokens are observed, a good plan needs 4096" in told[0]
    assert "16 tokens of 2 passages are scored, a verdict needs 256 of 4" in told[0]
    assert list(seen) == ["observe", "choose", "read", "score"]
    for stage, shares in seen.items():
        assert sum(shares) <= 100 and sum(share > 0 for share in shares) >= 8, stage
        assert max(shares) <= 20, stage
