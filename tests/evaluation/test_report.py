"""The page of an evaluation: its figures, its words, the command that writes it (30 s)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from html_page import HtmlPage, assert_stands_alone

pytest.importorskip("transformers")
from kvquant.cli.demo import MODEL
from kvquant.cli.main import main
from kvquant.evaluation.figures import accuracy
from kvquant.evaluation.report import render_page as render
from kvquant.evaluation.statistics import paired

NAMES = "16 bit", "int8", "int4 + 4 sinks, 64 recent"
LENGTHS = "512", "2048"


def answers(exact: float, *given: float) -> dict[str, Any]:
    """Of 20 prompts of 10 questions these shares are right."""

    def right(share: float) -> list[list[bool]]:
        return [[at < 10 * share for at in range(10)]] * 20

    pairs = [vars(paired(right(exact), right(one))) for one in given]
    facts = {"exact": exact, "fails": exact < 0.5, "least_distance": 100, "facts": 9}
    return {**facts, "caches": pairs}


def texts(*parted: int | None) -> dict[str, Any]:
    agreement = {"32": {"share": 0.5, "error": 0.1}, "64": {"share": 0.0, "error": None}}
    return {"first_divergence": [*parted], "agreement": agreement, "prompts": len(parted)}


def kl(mean: float) -> dict[str, Any]:
    found = {"kl": mean, "kl_error": None, "kl_tail": 20 * mean, "top1": 0.9, "top1_error": 0.01}
    return {**found, "by_position": [mean] * 4, "tokens": 64, "passages": 1}


def an_evaluation(**changes: Any) -> dict[str, Any]:
    costs = [
        {"cache": name, "recent_len": recent, "bits": 4.25, "bytes_a_token": 512.0}
        | {"tokens_per_gib": 7}
        for name, recent in zip(NAMES, (0, 0, 64), strict=True)
    ]
    runs = {"greedy": [texts(None, 3), texts(0, 40)], "sampled": [texts(None, None), texts(1, 2)]}
    settings: dict[str, Any] = {"model": "llama", "dtype": "torch.float32", "text": "packaged"}
    settings |= {"sizes": {"seed": 7, "lengths": [512, 2048]}, "task": {"chat": None}}
    settings |= {"reading": {"chunk": None, "from_rows": False}}
    return {
        "settings": settings,
        "caches": costs,
        "kl": {length: [kl(0.001), kl(0.0)] for length in LENGTHS},
        "generation": {"0": runs | {"greedy_answers": answers(1.0, 1.0, 0.4)}},
        "retrieval": {
            length: {"keys": answers(1.0, 1.0, 0.6), "copy": answers(share, share, share)}
            for length, share in zip(LENGTHS, (0.8, 0.2), strict=True)
        },
        "seconds": {"kl": [1.25, 2.0, 3.0], "keys": [4.0, 5.0, 6.0]},
    } | changes


@pytest.fixture(scope="module")
def page() -> str:
    pytest.importorskip("matplotlib", reason="needs the report extra")
    return render(an_evaluation(), {"model": "a <model>", "prompts": "mine.jsonl"}, 5.0)


def words(page: str) -> str:
    return " ".join(HtmlPage(page).text.split())


def test_the_page_stands_alone_and_has_every_figure(page: str) -> None:
    assert_stands_alone(page)
    names = [tag for tag, _ in HtmlPage(page).tags]
    assert names.count("svg") == names.count("figure") == 3
    assert page == render(an_evaluation(), {"model": "a <model>", "prompts": "mine.jsonl"}, 5.0)


def test_what_the_page_says(page: str) -> None:
    text = words(page)
    assert text.index("Limit exceeded.") < text.index("Texts") < text.index("Finding facts")
    assert "loses 40.0" in text and "more than 5" in text and "1 more: see the tables" not in text
    assert "last quarter" in text and "points): answers are lost." in text
    assert "Table: contexts of 2,048 tokens" in text
    assert "What a <model> loses" in text and "seed 7" in text and "packaged, held_out.txt" in text
    assert "-40.0 ± " in text and "and 36 or more before the last tokens in 16 bit" in text
    for cell in ("4.25", "512", "mine.jsonl", "default"):
        assert cell in text, cell


def test_a_task_that_16_bit_fails_is_marked(page: str) -> None:
    text = words(page)
    assert "fails `copy` among 9 facts (20 % right) in contexts of 2,048 tokens: this is" in text
    long = text[text.index("Table: contexts of 2,048 tokens") :]
    assert long.count("not a test") == 2  # a cell of each cache
    alone = an_evaluation()
    alone["retrieval"]["2048"]["copy"]["caches"] = []  # as of a task that only 16 bit was asked
    told = words(render(alone, {"model": ""}))
    assert told.count("not asked") == 2 and "so no other cache was asked." in told
    svg = accuracy(an_evaluation())
    assert svg in page and svg.count("not a test") == 1  # in the panel of copy
    passes = an_evaluation(retrieval={"512": {"keys": answers(1.0, 1.0, 1.0)}})
    assert "this is not a test of the cache" not in words(render(passes, {"model": ""}))
    assert "not a test" not in accuracy(passes)


@pytest.mark.extra("report")
def test_the_text_is_named() -> None:
    nothing: dict[str, Any] = {"kl": {}, "generation": {}, "retrieval": {}}
    found, mine = an_evaluation(**nothing), {"text": "mine.txt"}
    for text, names, told in (
        ("packaged", {}, "text: packaged, held_out.txt"),
        ("0123", mine, "text: mine.txt"),
        ("0123", {}, "text: given, hash 0123"),
    ):
        found["settings"]["text"] = text
        assert told in words(render(found, {"model": "m", **names}))


@pytest.mark.extra("report")
def test_a_verdict_names_a_few_reasons() -> None:
    tasks = {f"task{at}": answers(1.0, 0.0, 0.0) for at in range(4)}
    text = words(render(an_evaluation(retrieval={"512": tasks}), {"model": "m"}, 5.0))
    before = text[: text.index("What each cache takes")]
    assert before.count(" loses 100.0 ") == 5 and "4 more: see the tables." in before
    good = an_evaluation(retrieval={"512": {"keys": answers(1.0, 1.0, 1.0)}}, generation={})
    assert "Within the limit." in words(render(good, {"model": "m"}, 50.0))


@pytest.mark.extra("report")
@pytest.mark.parametrize("kind", ["kl", "generation", "retrieval"])
def test_a_page_of_one_task(kind: str) -> None:
    left: dict[str, Any] = {one: {} for one in ("kl", "generation", "retrieval") if one != kind}
    found = HtmlPage(render(an_evaluation(**left), {"model": "m"}))
    assert [tag for tag, _ in found.tags].count("svg") == 1
    assert "Limit" not in found.text


SMALL = ["--length", "100", "--samples", "1", "--scored", "4", "--new-tokens", "4"]


@pytest.mark.extra("report")
def test_the_command_writes_it(tmp_path: Path) -> None:
    path, figures = tmp_path / "out.html", tmp_path / "out.json"
    arguments = ["evaluate", str(MODEL), "--cache", "int4,recent=0,sinks=0", *SMALL]
    arguments += ["--tasks", "kl,generation", "--report", str(path), "--json", str(figures)]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    text = words(path.read_text(encoding="utf-8"))
    assert f"What {MODEL.name} loses" in text and "text: packaged" in text
    (task,) = json.loads(figures.read_text())["generation"].values()
    assert task.keys() == {"greedy", "sampled"}


def test_a_page_that_cannot_be_written_is_refused_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvquant.hf.model.CachedModel.from_pretrained", None)  # never called
    arguments = ["evaluate", str(MODEL), "--cache", "int8", "--report"]
    done = CliRunner().invoke(main, [*arguments, str(tmp_path / "out.pdf")])
    assert done.exit_code == 2 and "name it NAME.html" in done.output
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = CliRunner().invoke(main, [*arguments, str(tmp_path / "out.html")])
    assert done.exit_code == 2 and "kvquant evaluate --report needs matplotlib" in done.output
    assert "-m pip install -e" in done.output and "[report]" in done.output
