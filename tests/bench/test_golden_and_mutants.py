"""The scripts that compare before and after: golden values, and mutants of the product."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvquant import KVCache, save_cache

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import golden
import mutants

TEXT = '''
"""Not changed."""
def least(a: int = 0, b: int = 7) -> int:
    """Nor this 1."""
    print("%d", 1)
    if not a < b and b:
        raise ValueError(f"{a} is not below {b} and 1")
    return a
'''
TEST = "from kvquant.io.one import least\n\ndef test() -> None:\n    assert least(1, 2) == 1\n"


def test_golden_values_show_a_changed_row_and_no_changed_version(tmp_path: Path) -> None:
    found = []
    for last in (2.0, 2.0, 3.0):
        cache = KVCache(1, 1, 1, 64, 8, k_format="int4", recent_len=0)
        cache.append(0, *torch.full((2, 1, 1, 6, 64), last))
        path = save_cache(cache, tmp_path / "cache.safetensors")
        found.append(dict(golden.content(path)))
    assert not {"manifest version", "manifest writer", "manifest sha256"} & found[0].keys()
    assert not [*golden.differences(found[0], found[1], 0.1)]
    names = dict(golden.differences(found[0], found[2], 0.1))
    assert {"layers.0.k_packed", "layers.0.v_packed"} <= names.keys() < found[0].keys()
    old = {"a": (3.0, 10.0), "b": torch.ones(2), "c": "x", "d": "y"}
    new = {"a": (4.0, 10.0), "b": torch.tensor([1.0, 1.5]), "c": "x", "e": "y"}
    expected = {"a": "slower", "b": "relative error 3.5e-01", "d": "gone", "e": "new"}
    assert dict(golden.differences(old, new, 0.1)) == expected


def test_mutants_leave_out_what_is_said_and_move_with_their_function() -> None:
    found = [*mutants.mutants_of(TEXT, "files", "a.py")]
    changed = {(TEXT.encode()[one.start : one.stop].decode()[:5], one.new) for one in found}
    assert changed == {
        *{("0", "(1)"), ("0", "(-1)"), ("7", "(8)"), ("7", "(6)"), ("a", "(b)"), ("raise", "pass")},
        *{("a < b", "(a <= b)"), ("not a", "(a < b)"), ("not a", "(not a < b or b)")},
        ("retur", "pass"),
    }
    moved = mutants.mutants_of("x = y\n" + TEXT, "files", "b.py")
    assert {one.rank for one in moved} == {one.rank for one in found}


@pytest.mark.slow  # processes of their own
def test_mutants_are_caught_or_survive_and_a_run_goes_on(tmp_path: Path) -> None:
    files = {"kvquant/__init__.py": "", "kvquant/io/one.py": TEXT, "tests/io/test_one.py": TEST}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    out, rows = tmp_path / "out.jsonl", []
    for count in (5, 10):
        args = [str(out), "--tree", str(tmp_path), "--count", str(count)]
        assert not CliRunner().invoke(mutants.main, args, catch_exceptions=False).exit_code
        rows.append([json.loads(line) for line in out.read_text().splitlines()])
    assert rows[0] == rows[1][:1]
    found = [(row["was"], row["new"], row["result"], row["test"]) for row in rows[1]]
    caught = "not a < b", "(a < b)", "caught", "tests/io/test_one.py::test"
    assert found == [("0", "(-1)", "survived", ""), caught]
