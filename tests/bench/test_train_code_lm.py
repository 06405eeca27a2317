"""tests/benchmarks/train_code_lm.py and bench_code.py in small (60 s)."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from train_code_lm import prepare, read_sources
from transformers import AutoTokenizer

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
