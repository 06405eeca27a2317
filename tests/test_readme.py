"""What READMEs show runs as it stands, and their figures are those that were measured (40 s)."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from example_plan import example_plan
from forgotten import forget
from slow_cases import mark_slow

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
import results

from kvquant.bench.timer import Timer
from kvquant.cli.main import main
from kvquant.kernels.cuda.runtime import compile as compile_cuda

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
TOPS = ("kvquant", "kernels", "calibration", "tests", "examples")
PAGES = [README, *(path for top in TOPS for path in sorted((ROOT / top).rglob("README.md")))]
PYTHON = {
    f"{page.parent.name}-{number}": block
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    )
}
MOST_WORDS = 40  # of a sentence
FIDELITY = ROOT / "calibration" / "FIDELITY.md"
MOST_OF_FIDELITY = 3000  # words, those of tables included
MOST_OF_ALL = 1400  # words of README.md, as wc -w counts them: code and tables, too
SHOWN = results.shown()
# numbers with a point that are no measurement: versions, GPUs' compute capabilities, models' sizes
VERSIONS = "0.1 0.2 0.5 0.32 1.5 2.6 2.11 2.13 3.10 3.11 3.12 3.13 5.14 5.17 5.24".split()
VERSIONS += "8.0 8.9 9.0 10.0".split()
UNITS = r"times|x|[mu]?s|seconds?|minutes?|[KMG]i?B(?:/s)?|%|nats|tokens/s"
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"  # tests have no network: another model stands for it
COMMANDS = (ROOT / "kvquant" / "cli" / "README.md").read_text(encoding="utf-8")
LINES = re.findall(
    r"^    (kvquant .*)$", (TEXT + COMMANDS).replace("\\\n", " "), flags=re.MULTILINE
)
SHELL = [line.replace(HUB, "examples/llama-demo-5m") for line in LINES]


def test_the_readme_has_python_code_and_commands() -> None:
    assert len(PYTHON) >= 7 and len(PAGES) >= 10
    commands = {shlex.split(line)[1] for line in SHELL}
    assert commands == set(main.commands), "each command is shown"
    assert [line.split()[1] for line in LINES if HUB in line and line in TEXT] == ["demo", "check"]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", PYTHON)
def test_each_piece_of_python_runs_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = PYTHON[name]
    if "CachedModel" in block or "transformers" in block:
        pytest.importorskip("transformers", reason="needs the hf extra")
    monkeypatch.chdir(tmp_path)  # what it writes goes there
    before = set(ROOT.iterdir())
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert set(ROOT.iterdir()) == before


# a number that costs time, and one that does not
LESS = {"4096": "512", "512": "128", "256": "64", "32": "8", "2000": "300", "2048": "64"}
LESS |= {"0.5": "0.02"}


@pytest.mark.extra("hf", "report")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("less", mark_slow([{}, LESS], [LESS]), ids=bool)
def test_the_commands_run_one_after_the_other(
    less: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they stand, and with fewer tokens and less time for each."""
    if less:
        from kvquant.cli import demo

        monkeypatch.setattr(demo, "MOST_SECONDS", 0.0)
        monkeypatch.setattr(demo, "ROUNDS", 2)
        monkeypatch.setattr(demo, "SIZES", {True: (64, 8), False: (64, 8)})
        less_of_each = partial(demo.run_demo, scored=8, continued=8)
        monkeypatch.setattr(demo, "run_demo", less_of_each)
        monkeypatch.setattr(Timer, "read_bandwidth", lambda timer: 1.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    # it would take a minute; imported later, compile_pool would keep the stand-in for good
    importlib.import_module("kvquant.kernels.cuda.runtime.compile_pool")
    monkeypatch.setattr(compile_cuda, "missing", lambda specs, arch: [])
    for line in SHELL:
        words = [less.get(word, word) for word in shlex.split(line)[1:]]
        done = CliRunner().invoke(main, words, catch_exceptions=False)
        assert done.exit_code == 0, f"{line}\n{done.output}"
        assert "Warning" not in done.stderr, f"{line}\n{done.stderr}"
        assert max(map(len, done.stdout.splitlines())) <= 80, line


# what a command of the README imports of an extra
NEEDED = {
    "calibrate": ("hf", "transformers"),
    "demo": ("hf", "transformers"),
    "evaluate": ("hf", "transformers"),
    "quantize": ("hf", "transformers"),
    "report": ("report", "matplotlib"),
    "warmup": ("cuda", "numba_cuda"),
}


@pytest.mark.parametrize("command", NEEDED)
def test_a_command_without_its_extra_says_how_to_install_it(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra, module = NEEDED[command]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVQUANT_CACHE_DIR", str(tmp_path / "kernels"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    example_plan(4, 1).save(tmp_path / "plan.safetensors")
    monkeypatch.setitem(sys.modules, module, None)
    if extra == "hf":  # what imports transformers is imported anew
        packages = "kvquant.hf", "kvquant.calibration", "kvquant.evaluation", "kvquant.cli.demo"
        forget(monkeypatch, *packages)
    line = next(line for line in SHELL if shlex.split(line)[1] == command)
    if command == "warmup":
        line = "kvquant warmup --arch sm_90 --format int8"  # its model needs another extra
    done = CliRunner().invoke(main, shlex.split(line)[1:], catch_exceptions=False)
    assert done.exit_code == 2
    words = f"-m pip install -e '{ROOT}[{extra}]'"
    assert f"install the extra '{extra}'" in done.stderr and done.stderr.rstrip().endswith(words)


def test_make_installs_what_the_commands_need() -> None:
    rule = (ROOT / "Makefile").read_text().partition("$(STAMP): ")[2].partition("touch $(STAMP)")[0]
    (extras,) = re.findall(r"--editable '\.\[(.*)\]'", rule)
    assert {extra for extra, _ in NEEDED.values()} <= set(extras.split(","))
    for extra in extras.split(","):
        assert f"`{extra}` for " in TEXT


def test_every_make_target_is_there() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"(?:`|^    )make ([a-z]+)", TEXT, flags=re.MULTILINE)) <= set(targets)


@pytest.mark.parametrize("page", [*PAGES, FIDELITY], ids=lambda page: page.parent.name)
def test_files_that_are_named_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = re.findall(r"`((?:examples|kernels|calibration|tests|kvquant)/[\w./-]*)`", text)
    for name in names:
        assert (ROOT / name).exists() or (ROOT / "kvquant" / name).exists(), name
    table = re.findall(r"^\| (`.*?) \|", text, flags=re.MULTILINE)
    for name in re.findall(r"`([\w/]+\.py)`", " ".join(table)):
        assert (page.parent / name).exists(), f"{name} in the table of {page}"


@pytest.mark.parametrize("page", [*PAGES, FIDELITY], ids=lambda page: page.parent.name)
def test_sentences_are_short(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for block in re.split(r"\n\s*\n|\n(?=\s*[-*] |\s*\d+\. |#|\|)", text):
        if not block.startswith(("    ", "|", "#")):  # code, tables, headings
            for sentence in re.split(r"(?<=[.!?])[)*]*\s+(?=[A-Z0-9`*(])", " ".join(block.split())):
                assert len(sentence.split()) <= MOST_WORDS, sentence


def test_links_lead_somewhere_on_any_page() -> None:
    """The README is the page of the package, too: links to files of the checkout are dead there."""
    links = re.findall(r"\]\(([^)]*)\)", TEXT)
    assert all(link.startswith(("https://", "#")) for link in links), links


def test_the_readme_never_installs_the_package_of_that_name_on_pypi() -> None:
    """kvquant on PyPI belongs to others, and what is not there yet may come to."""
    assert not re.search(r"install\s+(-\S+\s+)*[\"']?kvquant\b", TEXT)


def plain(text: str) -> str:
    """A text on one line."""
    return " ".join(text.split())


def unmeasured(text: str, measured: list[str]) -> list[str]:
    """Figures of a page that stand in none of these texts, and not in code."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = plain("\n".join(text.splitlines()))
    for one in sorted(map(plain, measured), key=len, reverse=True):
        text = text.replace(one, "")
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    found = re.findall(rf"[\d,.]*\d ?(?:{UNITS})(?!\w)|(?<![\w-])\d+\.\d+", text)
    return [one for one in found if one not in VERSIONS]


@pytest.mark.parametrize("page", SHOWN)
def test_tables_and_figures_are_those_that_were_measured(page: str) -> None:
    text = plain((ROOT / page).read_text(encoding="utf-8"))
    for one in SHOWN[page]:
        assert plain(one) in text, f"{page} does not show what results.py makes:\n{one}"


def test_readme_and_fidelity_have_no_figure_that_was_not_measured() -> None:
    for page in (README, FIDELITY):
        text = re.sub(r"^    kvquant .*(?:\n {8}.*)*$", "", page.read_text(), flags=re.MULTILINE)
        assert not unmeasured(text, SHOWN[str(page.relative_to(ROOT))])
    measured = ["2.8 times as fast", "| 1 | 9.3 |"]
    assert not unmeasured("It is 2.8 times as fast\nwith torch 2.11 on 2 cores; 16-bit.", measured)
    for text, figure in {
        "On a CPU it is 3 times as fast.": "3 times",
        "| 1 | 9.4 |": "9.4",
        "It takes 1,024 MiB.": "1,024 MiB",
        "8 % slower": "8 %",
        "in 40 ms": "40 ms",
    }.items():
        assert unmeasured(f"{text} 2.8 times as fast", measured) == [figure]


def test_each_measurement_says_where_when_and_of_which_commit() -> None:
    files = sorted(results.RESULTS.glob("*.json"))
    assert len(files) >= 7
    for path in files:
        name = "public-NAME" if path.stem.startswith("public-") else path.stem
        assert f" {name}" in (results.__doc__ or "")
        found = results.read(path.stem)
        assert re.fullmatch(r"[0-9a-f]{40}", found["commit"]), path
        assert re.match(r"20\d\d-\d\d-\d\dT", found["date"]), path


def test_a_file_that_is_kept_has_commit_and_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr("subprocess.check_output", lambda *_, **__: "0123abc\n")
    written = tmp_path / "bench.json"
    written.write_text('{"machine": {"date": "2026-11-26T01:01:39+00:00"}, "decode": [1]}')
    results.keep("zen4-decode", written)
    kept = results.read("zen4-decode")
    assert kept["commit"] == "0123abc" and kept["date"] == "2026-11-26T01:01:39+00:00"
    assert kept["decode"] == [1]
    written.write_text('{"commit": "of the run", "caches": {}}')  # what a script tells counts
    results.keep("recall", written)
    kept = results.read("recall")
    assert kept["commit"] == "of the run" and kept["date"].startswith("20")


def test_the_readme_is_short() -> None:
    assert len(TEXT.split()) <= MOST_OF_ALL


def test_the_page_of_fidelity_is_short_and_its_links_lead_somewhere() -> None:
    text = FIDELITY.read_text(encoding="utf-8")
    assert len(text.split()) <= MOST_OF_FIDELITY
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links and all((FIDELITY.parent / link).exists() for link in links), links


def test_the_first_door_is_in_an_example() -> None:
    """Which compares it with 16 bit."""
    code = (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")
    first = next(block for name, block in PYTHON.items() if name.endswith("-0"))
    calls = re.findall(r"cache\.\w+\(.*?\)", first)
    assert len(calls) == 2 and all(call in code for call in calls)
