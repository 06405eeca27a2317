"""tests/benchmarks/train_code_lm.py and bench_code.py in small (60 s)."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import code_tasks
from train_code_lm import prepare, read_sources
from transformers import AutoTokenizer

from kvquant.evaluation.prompts import Writer
from kvquant.evaluation.retrieval import TASKS

PACKAGES = ("first", "second", "asked", "planned")
HELD = ("asked", "planned")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages of made-up source code: each line names its package."""
    folder = tmp_path_factory.mktemp("site")
    for package in PACKAGES:
        (folder / package / "inner").mkdir(parents=True)
        (folder / package / "__init__.py").write_text("short = 1\n")
        for number in range(10):
            rng = Random(f"{package} {number}")
            lines = [
                f"def {package}_{rng.randrange(100)}(value):\n    return value + {rng.random():.3f}"
                for _ in range(60)
            ]
            (folder / package / "inner" / f"part{number}.py").write_text("\n".join(lines))
    (folder / "no_package").mkdir()
    return folder


@pytest.fixture(scope="module")
def folder(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made") / "code-lm"
    prepare(made, site, HELD, 400)
    return made


def test_packages_that_are_held_out_are_not_trained_on(site: Path, folder: Path) -> None:
    sources = read_sources(site, HELD)
    assert {name: len(texts) for name, texts in sources.items()} == {
        "train": 20,
        "test": 10,
        "valid": 10,
    }
    assert all("asked_" in one and "first_" not in one for one in sources["test"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = np.load(folder / "tokens.npy")
    text = tokenizer.decode(tokens.astype(np.int64))
    assert "first_" in text and "second_" in text
    assert not any(f"{one}_" in text for one in HELD)
    assert (tokens == tokenizer.eos_token_id).sum() == 20
    assert "asked_" in (folder / "test.txt").read_text()
    assert "planned_" in (folder / "valid.txt").read_text()
    assert len(tokenizer("4711")["input_ids"]) == 4  # each digit is a token
    with pytest.raises(SystemExit, match=r"nowhere is not enough\. There are asked, first"):
        read_sources(site, ("asked", "nowhere"))
    with pytest.raises(SystemExit, match="two packages or more"):
        read_sources(site, ("asked",))


@pytest.mark.parametrize("kind", code_tasks.KINDS)
def test_definitions_stand_in_code_and_before_the_last_quarter(kind: str, folder: Path) -> None:
    source = (folder / "valid.txt").read_text()
    code_tasks.add(source)
    sheet = TASKS[kind](Random(3), 40)
    assert len({one.begun for one in sheet.questions}) == len(sheet.questions) == 30
    for one in sheet.questions:
        (at,) = one.lines
        *passage, definition = sheet.lines[at].splitlines()
        assert at < 30 and definition.endswith(one.answer) and len(one.answer) == 4
        assert "\n".join(passage) in source and len(passage) == code_tasks.PASSAGE
        name = one.begun.removeprefix("assert ").removeprefix("print(").split("(")[0].split(")")[0]
        assert name in definition and sum(name in line for line in sheet.lines) == 1
    words = [one.begun.split("_")[-3:-1] for one in sheet.questions]
    assert len({first for first, _ in words}) < 10  # so others share it
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = Writer(tokenizer, 2048, [5], window=0, sinks=0, num_questions=8).write(kind, "0")
    assert min(one.distance for one in prompt.asked) > 2048 // 5
