"""The examples run (10 s)."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_every_example_is_tested_and_short() -> None:
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert [path.name for path in scripts] == ["decode_hf.py", "decode_paged.py", "quickstart.py"]
    for path in scripts:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 60, path


def test_quickstart_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "quickstart.py"), run_name="__main__")
    assert capsys.readouterr().out.startswith("[1005] tokens in ")


def test_decode_hf_continues_the_loaded_cache_alike(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    runpy.run_path(str(EXAMPLES / "decode_hf.py"))["main"](120)
    counts, memory, file = capsys.readouterr().out.strip().splitlines()
    assert " tokens in " in counts
    assert memory.removeprefix("in memory: ") == file.removeprefix("from the file: ")


def test_decode_paged_shares_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "decode_paged.py"), run_name="__main__")
    first, second, last = capsys.readouterr().out.strip().splitlines()
    assert first == "a: 0 of 501 tokens were there"
    assert second == "b: 324 of 502 tokens were there"
    assert last == "{'a': 520, 'b': 521, 'c': 521} 53 free pages"


def test_the_bundled_model_and_text_name_their_sources() -> None:
    attribution = (EXAMPLES / "llama-demo-5m" / "ATTRIBUTION.md").read_text(encoding="utf-8")
    assert "CC BY-SA 3.0" in attribution
    assert (EXAMPLES / "llama-demo-5m" / "wikipedia_articles.tsv.xz").is_file()
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert "unseen.txt" in readme and "CC BY-SA" in readme
