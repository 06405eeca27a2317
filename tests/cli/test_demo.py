"""The demo in small (10 s)."""

import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
from kvquant.calibration.fidelity import Scheme
from kvquant.cli import demo
from kvquant.errors import ConfigError
from kvquant.hf.model import CachedModel
from kvquant.rows.spacing import spaced_len


@pytest.fixture(scope="module")
def stages() -> list[str]:
    return []


@pytest.fixture(scope="module")
def result(stages: list[str]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "ROUNDS", 2)
        patch.setattr(demo, "MOST_ROUNDS", 4)
        patch.setattr(demo, "BUSY", 0.0)  # never stable: a second turn, from the same tokens on
        return demo.run_demo(context=200, scored=8, continued=6, report=stages.append)


def test_every_cache_is_measured(result: dict[str, Any], stages: list[str]) -> None:
    assert len(stages) == demo.STAGES
    caches = {row["name"]: row for row in result["caches"]}
    names = ["transformers", "bf16", "default + window", "int4-g4 + window"]
    assert list(caches) == [*names, "int8", "int4-g4", "int4"]
    assert result["default"] == "K int8-g4, V int4-g4" and result["left_out"] == {}
    assert caches["default + window"]["kl"] < caches["int4-g4 + window"]["kl"]
    assert [result["passages"], result["context"], result["scored"]] == [4, 200, 8]
    assert caches["bf16"]["kl"] == 0.0
    assert caches["transformers"]["kl"] < 1e-3
    assert caches["int8"]["kl"] < caches["int4"]["kl"]
    assert result["rounds"] == 4 and not result["is_stable"]
    for row in caches.values():
        assert row["ms_per_step"] > 0 and row["ms_spread"] > 0
        assert 0 <= row["top1"] <= 1
        assert ("continuation" in row) == (not row["name"].startswith("transformers"))


def test_bytes_are_those_of_the_tokens(result: dict[str, Any]) -> None:
    caches = {row["name"]: row for row in result["caches"]}
    assert caches["transformers"]["nbytes"] == 4 * (200 + 8) * 4 * 2 * 512
    rows = 4 * spaced_len(200 + 8 + 2, [80, 80])
    assert caches["int4-g4"]["nbytes"] == pytest.approx(rows * 4 * 2 * 80, rel=1e-3)


def test_the_report_shows_table_and_continuations(result: dict[str, Any]) -> None:
    text = demo.render_demo(result)
    assert max(map(len, text.splitlines())) <= 80
    for row in result["caches"]:
        assert sum(line.strip().startswith(row["name"]) for line in text.splitlines()) >= 1
    assert "1.00x" in text
    words = result["caches"][1]["continuation"].split()
    assert "Default: K int8-g4, V int4-g4." in " ".join(text.split())
    assert " ".join(words[:3]) in text
    assert "Warning: this machine is busy" in text
    assert "Warning" not in demo.render_demo(result | {"is_stable": True})
    last = " ".join(text.split("\n\n")[-1].split())
    assert last == demo.advice(result["caches"])


class Clock:
    """Steps that take as long as is said, of a time that only they let pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *times: Callable[[int], float]) -> None:
        self.now, self.begun = 0.0, 0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        self.starts = [partial(self.start, time, itertools.count()) for time in times]

    def start(self, time: Callable[[int], float], count: Iterator[int]) -> Callable[[], None]:
        self.begun += 1
        return partial(self.step, time, count)

    def step(self, time: Callable[[int], float], count: Iterator[int]) -> None:
        self.now += time(next(count)) / 1e3


def test_an_idle_machine_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda i: 5.0 + 0.1 * (i % 3), lambda i: 10.0)
    taken = demo._time(clock.starts)
    assert [len(times) for times in taken] == [demo.ROUNDS] * 2 and clock.begun == 2
    assert taken[0][:3] == pytest.approx([5.0, 5.1, 5.2]) and demo._is_stable(taken)
    assert demo._spread(taken[1]) == pytest.approx(0)
    assert demo._spread([1, 2, 3, 4, 5]) == 1


def test_rounds_go_on_until_times_are_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    late = 3 * demo.ROUNDS // 5  # the first step is slow at first, while the other is not
    clock = Clock(monkeypatch, lambda i: 7.0 if i < late else 5.0, lambda i: 10.0)
    taken = demo._time(clock.starts)
    assert len(taken[0]) > demo.ROUNDS and demo._is_stable(taken)
    assert clock.begun == 2 * len(taken[0]) // demo.ROUNDS, "each turn begins from the same tokens"


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[Callable[[int], float], Callable[[int], float], int]] = [
        (lambda i: 5.0, lambda i: 10.0 + i, demo.MOST_ROUNDS),  # times that drift
        (lambda i: 5.0, lambda i: (5.0, 15.0)[i % 2], demo.MOST_ROUNDS),  # times that jump
        # the time is over before
        (lambda i: 450.0, lambda i: 450.0 + 450 * (i % 2), 2 * demo.ROUNDS),
    ]
    for first, other, rounds in cases:
        taken = demo._time(Clock(monkeypatch, first, other).starts)
        assert len(taken[0]) == rounds and not demo._is_stable(taken), rounds


def test_advice_is_one_sentence_by_what_was_measured() -> None:
    for safe, small, words in (
        (1e-4, 0.001, "default + window (2.0 times smaller, KL 0.0001), or int4-g4 + win"),
        (1e-4, 0.2, "KL 0.0001); do not take int4-g4 + window (2.5 times smaller, KL 0.2000); "),
        (0.3, 0.9, "none of these; do not take default + window (2.0 times smaller, KL 0.3000) or"),
    ):
        rows = {"transformers": (200, 0.0), "bf16": (100, 0.0), "int8": (50, 0.9)}
        rows |= {"default + window": (50, safe), "int4-g4 + window": (40, small)}
        caches = [{"name": name, "nbytes": size, "kl": kl} for name, (size, kl) in rows.items()]
        told = demo.advice(caches)
        assert told.startswith("What to take: ") and words in told and "int8" not in told
        assert told.endswith(".") and ". " not in told and "`kvquant check MODEL`" in told


@pytest.fixture
def in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ROUNDS", 1)
    monkeypatch.setattr(demo, "MOST_ROUNDS", 2)
    monkeypatch.setattr(demo, "BUSY", 0.0)
    monkeypatch.setattr(demo, "SCHEMES", demo.SCHEMES[:1])
    monkeypatch.setattr(demo, "SIZES", {True: (40, 4), False: (30, 4)})


def test_a_model_of_ones_own_reads_less(in_small: None) -> None:
    assert demo.run_demo(continued=2)["context"] == 40
    result = demo.run_demo(demo.MODEL, continued=2)
    assert (result["model"], result["context"], result["scored"]) == ("llama-demo-5m", 30, 4)


def test_what_a_model_cannot_have_is_left_out_with_the_reason(
    in_small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "SCHEMES", (Scheme("int5", "int5"), *demo.SCHEMES))
    result = demo.run_demo(continued=2)
    assert [row["name"] for row in result["caches"]][1:] == ["bf16", "default + window"]
    assert "int5" in result["left_out"]["int5"]
    assert "Without int5: format 'int5' does not exist" in demo.render_demo(result)


def test_models_with_sliding_windows_are_served(
    in_small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Gemma 3 has."""
    for file in demo.MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((demo.MODEL / "config.json").read_text()) | {"model_type": "mistral"}
    config |= {"architectures": ["MistralForCausalLM"], "sliding_window": 16}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = demo.run_demo(tmp_path, continued=2)
    caches = {row["name"]: row for row in result["caches"]}
    assert result["rounds"] == 1 and caches["bf16"]["kl"] == 0.0
    assert caches["transformers"]["kl"] < 1e-3


def test_short_texts_shorten_the_prompt(
    in_small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "SIZES", {True: (3072, 128)})
    text = tmp_path / "short.txt"
    text.write_text("The ship was built of iron and sailed to the island. " * 4)
    result = demo.run_demo(text_file=text, scored=4, continued=2)
    assert result["passages"] == 1
    assert 10 < result["context"] < 60


def test_what_has_no_room_or_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "short.txt"
    text.write_text("The ship.")
    with pytest.raises(ConfigError, match="give a text with more than 129"):
        demo.run_demo(text_file=text)
    monkeypatch.setattr(CachedModel, "max_positions", 128)
    with pytest.raises(ConfigError, match="has 128 positions: the demo needs a model with more"):
        demo.run_demo()
    monkeypatch.setattr(demo, "MODEL", Path("nowhere") / "llama-demo-5m")
    with pytest.raises(ConfigError, match="name a model: kvquant demo MODEL"):
        demo.run_demo()
