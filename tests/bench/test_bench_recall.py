"""tests/benchmarks/bench_recall.py in small, and the tables that are made of its file (30 s)."""

from __future__ import annotations

import json
import sys
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import bench_recall
from evaluations import Evaluations, read_runs, text_of, together

from kvquant.cli.demo import MODEL
from kvquant.evaluation.evaluate import Sizes
from kvquant.evaluation.statistics import paired

SMALL = ["--format", "int8", "--format", "int4", "--no-plans", "--no-peers", "--length", "256"]
SMALL += ["--window", "0/0", "--window", "4/64", "--task", "keys", "--task", "variables"]
SMALL += ["--prompts", "2", "--questions", "2", "--device", "cpu", "--seconds", "600"]


def measured(*options: str, path: Path) -> str:
    given = [str(MODEL), *SMALL, *options, "--json", str(path)]
    done = CliRunner().invoke(bench_recall.main, given, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow
def test_each_seed_and_window_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_recall, "Sizes", partial(Sizes, scored=8))
    path = tmp_path / "recall.json"
    path.write_text(text_of({}, [run_of("another", 64, {"keys": [0.5]})]))
    printed = measured("--seeds", "2", "--least", "0", "--kl", path=path)
    other, screened, *others = read_runs(path)
    assert other["model"]["name"] == "another"  # runs of other models stay
    assert [one["cache"] for one in screened["caches"]] == ["16 bit", "bf16"]
    of_keys = screened["retrieval"]["256"]["keys"]
    assert of_keys["caches"][0]["lost"] == of_keys["caches"][0]["won"] == 0
    found = [
        (one["settings"]["sizes"]["seed"], one["caches"][1]["sink_len"], [*one["retrieval"]["256"]])
        for one in others
    ]
    asked = ["keys", "variables"]
    assert found == [(seed, sinks, asked) for seed in (0, 1) for sinks in (0, 4)]
    assert ["kl" in run for run in others] == [True, True, False, False]
    for run in others:
        assert [one["packed_bits"] for one in run["caches"]] == [16, 8.25, 4.25]
        keys = run["retrieval"]["256"]["keys"]
        assert 10 < keys["facts"] < 30 and keys["caches"][0]["answers"] == 4
    assert "not a test" in printed and str(MODEL) not in path.read_text()
    assert json.loads(path.read_text())["machine"]["date"].startswith("20")


def test_what_the_model_cannot_do_is_asked_of_no_cache(tmp_path: Path) -> None:
    printed = measured("--seeds", "1", path=tmp_path / "recall.json")  # the demo's knows no keys
    (screened,) = read_runs(tmp_path / "recall.json")
    assert screened["retrieval"]["256"]["keys"]["exact"] < 0.95
    assert printed.count("seed 0") == 1


def run_of(
    name: str, length: int, given: dict[str, list[float]], *, exact: float = 1.0, facts: int = 10
) -> dict[str, Any]:
    """A run of 100 answers, with caches of 16, 8, 7, ... bits and the shares given by task."""

    def cache(title: str, bits: float) -> dict[str, Any]:
        return {"cache": title, "packed_bits": bits, "sink_len": 0, "recent_len": 0}

    def task(shares: list[float]) -> dict[str, Any]:
        pair = {"exact": exact, "error": 0.01, "answers": 100}
        return {"facts": facts, "caches": [pair | {"given": one} for one in shares]}

    tasks = {name: task(shares) for name, shares in given.items()}
    if "variables" in given:
        tasks["variables"]["by_lines"] = {"3": tasks["variables"]["caches"]}
    count = len(next(iter(given.values())))
    return {
        "model": {"name": name, "parameters": 2e6},
        "settings": {"text": "packaged", "sizes": {"seed": 0}},
        "caches": [cache("16 bit", 16.0), *(cache(f"c{at}", 8.0 - at) for at in range(count))],
        "retrieval": {str(length): tasks},
    }


def test_seeds_are_put_together_as_one_sample_of_all_prompts() -> None:
    answers = [[[True] * 3, [True, False, True]], [[True], [True]], [[False, True]]]
    ours = [[[True, False, True], [True, False, True]], [[True], [False]], [[False, True]]]
    parts = [vars(paired(a, b)) for a, b in zip(answers, ours, strict=True)]
    whole = paired([*chain(*answers)], [*chain(*ours)])
    found = together(parts)
    assert found.exact == pytest.approx(whole.exact) and found.answers == whole.answers
    assert found.given == pytest.approx(whole.given)
    same = together([parts[0]] * 4)
    assert same.error == pytest.approx(parts[0]["error"] / 2)


def test_capacity_is_the_largest_count_that_is_kept_as_are_all_smaller_ones() -> None:
    runs = [
        run_of("m", 128, {"keys": [1.0, 1.0, 0.98]}, facts=9),
        run_of("m", 256, {"keys": [1.0, 0.97, 1.0], "variables": [1.0, 0.5, 0.5]}, facts=18),
        run_of("m", 512, {"keys": [0.99, 0.995, 0.9]}, facts=36),
        run_of("m", 1024, {"keys": [0.9, 0.9, 0.9]}, exact=0.97, facts=72),  # 16 bit loses, too
    ]
    titles, rows = Evaluations("m", runs).capacity((0, 0))
    assert titles == ["cache", "bits", "keys", "steps of variables"]
    assert rows == [
        ["16 bit", "16.00", "36", "2"],
        ["c0", "8.00", "36", "2"],
        ["c1", "7.00", "9", "< 2"],
        ["c2", "6.00", "< 9", "< 2"],
    ]
