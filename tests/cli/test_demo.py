"""The demo in small (10 s)."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
from kvquant.cli import demo
from kvquant.errors import ConfigError
from kvquant.rows.spacing import spaced_len


@pytest.fixture(scope="module")
def stages() -> list[str]:
    return []


@pytest.fixture(scope="module")
def result(stages: list[str]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "ROUNDS", 2)
        return demo.run_demo(context=200, scored=8, continued=6, report=stages.append)


def test_every_cache_is_measured(result: dict[str, Any], stages: list[str]) -> None:
    assert len(stages) == demo.STAGES
    caches = {row["name"]: row for row in result["caches"]}
    assert list(caches) == [
        "transformers, float32",
        "transformers, bfloat16",
        *map(str, demo.SCHEMES),
    ]
    assert [result["passages"], result["context"], result["scored"]] == [4, 200, 8]
    assert caches["bf16"]["kl"] == 0.0
    assert caches["transformers, float32"]["kl"] < 1e-3
    assert caches["int8"]["kl"] < caches["int4"]["kl"]
    for row in caches.values():
        assert row["ms_per_step"] > 0
        assert 0 <= row["top1"] <= 1
        assert ("continuation" in row) == (not row["name"].startswith("transformers"))


def test_bytes_are_those_of_the_tokens(result: dict[str, Any]) -> None:
    caches = {row["name"]: row for row in result["caches"]}
    tokens = 4 * (200 + 8 + 2)
    assert caches["transformers, bfloat16"]["nbytes"] == tokens * 4 * 2 * 256
    assert caches["transformers, float32"]["nbytes"] == tokens * 4 * 2 * 512
    rows = 4 * spaced_len(200 + 8 + 2, [80, 80])
    assert caches["int4-g4"]["nbytes"] == pytest.approx(rows * 4 * 2 * 80, rel=1e-3)


def test_the_report_shows_table_and_continuations(result: dict[str, Any]) -> None:
    text = demo.render_demo(result, width=90)
    assert max(map(len, text.splitlines())) <= 100
    for row in result["caches"]:
        assert sum(line.strip().startswith(row["name"]) for line in text.splitlines()) >= 1
    assert "1.00x" in text
    words = result["caches"][2]["continuation"].split()
    assert " ".join(words[:3]) in text


def test_short_texts_shorten_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ROUNDS", 1)
    monkeypatch.setattr(demo, "SCHEMES", demo.SCHEMES[:1])
    text = tmp_path / "short.txt"
    text.write_text("The ship was built of iron and sailed to the island. " * 4)
    result = demo.run_demo(text_file=text, scored=4, continued=2)
    assert result["passages"] == 1
    assert 10 < result["context"] < 60


def test_texts_without_room_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("The ship.")
    with pytest.raises(ConfigError, match="give a text with more than 129"):
        demo.run_demo(text_file=text)
    text.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        demo.run_demo(text_file=text)


def test_missing_bundled_files_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MODEL", Path("nowhere") / "llama-demo-5m")
    with pytest.raises(ConfigError, match="give --model FOLDER and --text FILE"):
        demo.run_demo()
