"""Mutants of the product: how many small faults the tests catch, before and after a change.

    python tests/benchmarks/mutants.py OUT.jsonl [--tree DIR] [--count 200] [--list]

Each mutant is one change in a scratch copy of the tree. The tests of its family run, first those
that name its module, until one fails; that one then has to pass without the mutant. OUT gets a row
each. A second call goes on after the rows that are there. Mutants are ranked by a hash of their
function and statement, so a statement that stays, or moves to another file, is drawn again. Code
that runs on GPUs alone is caught by the simulator's tests: --slow runs slow tests, too.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import click

ROOT = Path(__file__).parents[2]
SEED = 20261128
FAMILIES = {  # folders below kvquant/, before and after their names change
    "numbers": "rows contract ops kernels",
    "files": "io",
    "paging": "paged pages cache store",
    "hf": "hf calibration",
    "engines": "engine engines vllm sglang lmcache",
}
PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)]
OPPOSITE = dict([*PAIRS, (ast.In, ast.NotIn)])
OPPOSITE |= {second: first for first, second in OPPOSITE.items()}
MESSAGES = ("log", "warn", "warnings", "shown", "print")
UNREAD = "annotation", "returns", "decorator_list", "type_params", "handlers"
DELETED = ast.Expr | ast.AugAssign | ast.Raise | ast.Return | ast.Break | ast.Continue
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Mutant(NamedTuple):
    """A change of the text of a file: bytes start to stop become new."""

    rank: str
    family: str
    file: str
    line: int
    kind: str
    start: int
    stop: int
    new: str


def changes(node: ast.AST, arguments: list[str]) -> Iterator[tuple[str, str]]:
    """The kinds of mutants of an expression, and what it becomes."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            ops = [*node.ops[:i], OPPOSITE[type(op)](), *node.ops[i + 1 :]]
            yield f"comparison {i}", ast.unparse(ast.Compare(node.left, ops, node.comparators))
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield from (("+1", str(node.value + 1)), ("-1", str(node.value - 1)))
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and/or", ast.unparse(ast.BoolOp(other, node.values))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", ast.unparse(node.operand)
    elif isinstance(node, ast.Name) and node.id in arguments[:-1]:
        yield "neighbour", arguments[arguments.index(node.id) + 1]


def is_said(node: ast.AST) -> bool:
    """Whether a node is a docstring, or only a call that makes a message."""
    node = node.value if isinstance(node, ast.Expr) else node
    call = re.split(r"[.(]", ast.unparse(node))[0] if isinstance(node, ast.Call) else ""
    return call in MESSAGES or (isinstance(node, ast.Constant) and type(node.value) is str)


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """All below a node but statements, annotations and messages."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if name in UNREAD or isinstance(child, ast.stmt) or not isinstance(child, ast.AST):
                continue
            if not isinstance(child, ast.JoinedStr) and not is_said(child):
                yield child
                yield from expressions(child)


def statements(node: ast.AST, within: str, names: list[str]) -> Iterator[tuple[ast.stmt, str, Any]]:
    """The statements of a tree, the functions that they are in, and arguments of these."""
    for child in ast.iter_child_nodes(node):
        is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if is_typing or isinstance(child, ast.Assert):
            continue
        inner, arguments = within, names
        if isinstance(child, Function | ast.ClassDef):
            inner = f"{within}.{child.name}"
            if child.name == "__repr__" or "overload" in map(ast.unparse, child.decorator_list):
                continue
        if isinstance(child, Function):
            arguments = [one.arg for one in child.args.posonlyargs + child.args.args]
            arguments = [name for name in arguments if name not in ("self", "cls")]
        if isinstance(child, ast.stmt):
            yield child, inner, arguments
        yield from statements(child, inner, arguments)


def mutants_of(text: str, family: str, file: str) -> Iterator[Mutant]:
    """All mutants of a file. Equal statements of a function have the same ranks."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for statement, within, arguments in statements(ast.parse(text), "", []):
        found: list[tuple[Any, str, str]] = []
        is_bare = isinstance(statement, ast.Return) and statement.value is None
        if isinstance(statement, DELETED) and not is_bare and not is_said(statement):
            found.append((statement, "deleted", "pass"))
        if not isinstance(statement, ast.Raise):
            for place, node in enumerate(expressions(statement)):
                returned = arguments if isinstance(statement, ast.Return) else []
                for kind, new in changes(node, returned):
                    found.append((node, f"{kind} at {place}", f"({new})"))
        whole = ast.unparse(statement).split("\n")[0]
        for node, kind, new in found:
            key = f"{SEED} {family} {within} {whole} {kind}".encode()
            start = starts[node.lineno - 1] + node.col_offset
            stop = starts[node.end_lineno - 1] + node.end_col_offset
            rank = hashlib.sha256(key).hexdigest()
            yield Mutant(rank, family, file, node.lineno, kind, start, stop, new)


def draw(tree: Path, count: int) -> list[Mutant]:
    """As many of each family, those of the lowest ranks."""
    drawn = []
    for family, folders in FAMILIES.items():
        found: dict[str, Mutant] = {}
        for folder in folders.split():
            for path in sorted((tree / "kvquant" / folder).rglob("*.py")):
                file = path.relative_to(tree).as_posix()
                if "simulator" not in file:
                    text = path.read_text("utf-8")
                    for one in mutants_of(text, family, file):
                        found.setdefault(one.rank, one)
        drawn += [found[rank] for rank in sorted(found)[: count // len(FAMILIES)]]
    return drawn


def tests_of(tree: Path, file: str) -> list[str]:
    """The files of tests of a module's folder, those that name it first; then others that do."""
    module = Path(file).with_suffix("")
    name = rf"\b{re.escape('.'.join(module.parts))}\b"
    name += rf"|\b{module.parent.name} import .*\b{module.name}\b"
    rooms = (Path("tests", one.relative_to("kvquant")) for one in module.parents)
    room = next(one for one in rooms if (tree / one).is_dir())
    files = sorted(path.relative_to(tree) for path in (tree / "tests").rglob("test_*.py"))
    named = [path for path in files if re.search(name, (tree / path).read_text("utf-8"))]
    own = [path for path in files if room in path.parents]
    return [str(path) for path in dict.fromkeys([*(p for p in named if p in own), *own, *named])]


def run(
    python: str, tree: Path, tests: list[str], limit: float, more: list[str]
) -> tuple[str, str]:
    """Run tests until one fails: "caught", "survived" or "timeout", and the one that failed."""
    names = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    names |= {"KVQUANT_CACHE_DIR": str(tree / "cache")}
    words = [python, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", "--tb=no", *more]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    pipes |= {"cwd": tree, "env": os.environ | names, "start_new_session": True}
    with subprocess.Popen([*words, *tests], **pipes) as process:
        try:
            out, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "timeout", ""
        finally:
            shutil.rmtree(tree / "cache" / "plans", ignore_errors=True)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", out, re.MULTILINE)
    if failed or process.returncode not in (0, 5):  # 5: every test was deselected
        return "caught", failed[1] if failed else ""
    return "survived", ""


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--tree", default=ROOT, type=click.Path(path_type=Path), help="Of the product.")
@click.option("--count", default=200, show_default=True, help="Mutants, all families together.")
@click.option("--limit", default=900.0, show_default=True, help="Seconds for the tests of one.")
@click.option("--slow", is_flag=True, help="Run slow tests, too.")
@click.option("--engines", default=sys.executable, help="The Python with vLLM, for its tests.")
@click.option("--deselect", multiple=True, help="A test that fails without a mutant, too.")
@click.option("--list", "only_list", is_flag=True, help="Print the mutants and run nothing.")
def main(
    out: Path,
    tree: Path,
    count: int,
    limit: float,
    slow: bool,
    engines: str,
    deselect: tuple[str, ...],
    only_list: bool,
) -> None:
    """Append a row for each mutant to OUT, and print how many were caught."""
    drawn = draw(tree, count)
    if only_list:
        print(*(json.dumps(one._asdict()) for one in drawn), sep="\n")
        return
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {row["rank"] for row in rows}
    more = ["-m", "slow or not slow"] * slow + [f"--deselect={test}" for test in deselect]
    with TemporaryDirectory() as folder:
        copy = Path(folder, "tree")
        ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__")
        shutil.copytree(tree, copy, symlinks=True, ignore=ignored)
        for mutant in (one for one in drawn if one.rank not in done):
            path, start = copy / mutant.file, time.monotonic()
            whole = path.read_bytes()
            python = engines if mutant.family == "engines" else sys.executable
            tests = tests_of(copy, mutant.file)
            path.write_bytes(whole[: mutant.start] + mutant.new.encode() + whole[mutant.stop :])
            try:
                result, test = run(python, copy, tests, limit, more)
            finally:
                path.write_bytes(whole)
            again = [test] if test else tests[:1]
            if result == "caught" and run(python, copy, again, limit, more)[0] != "survived":
                raise click.ClickException(f"fails without the mutant, too: {again[0]}")
            was = whole[mutant.start : mutant.stop].decode()
            row = mutant._asdict() | {"was": was, "result": result, "test": test}
            rows.append(row | {"seconds": round(time.monotonic() - start)})
            with out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(mutant.file, mutant.line, repr(was), "->", mutant.new, result, test, flush=True)
    for family in FAMILIES:
        print(family, dict(Counter(row["result"] for row in rows if row["family"] == family)))


if __name__ == "__main__":
    main()
