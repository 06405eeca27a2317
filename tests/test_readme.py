"""The README's Python code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def python_blocks() -> list[str]:
    """The ```python blocks of README.md, in order."""
    if not README.exists():
        return []
    text = README.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def test_the_readme_has_python_code() -> None:
    assert README.exists(), "README.md is missing"
    assert python_blocks(), "README.md has no ```python block"


@pytest.mark.filterwarnings("default")
def test_the_python_code_runs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert python_blocks(), "README.md is missing or has no ```python block"
    monkeypatch.chdir(tmp_path)  # what it writes goes there; what it reads comes from examples/
    (tmp_path / "examples").symlink_to(README.parent / "examples")
    names: dict[str, object] = {"__name__": "readme"}
    for i, block in enumerate(python_blocks()):
        exec(compile(block, f"README.md, Python block {i + 1}", "exec"), names)


def test_the_readme_never_installs_the_package_of_that_name_on_pypi() -> None:
    """kvquant on PyPI belongs to others."""
    assert README.exists(), "README.md is missing"
    text = README.read_text(encoding="utf-8")
    assert not re.search(r"install\s+(-\S+\s+)*[\"']?kvquant\b", text)
