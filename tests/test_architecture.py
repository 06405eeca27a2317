"""Who may import whom, what is shipped, and that `import kvquant` stays light."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvquant"
ROOMS = {"kvquant": PACKAGE}  # in a checkout the others are links
ROOMS |= {f"kvquant.{room}": (PACKAGE / room).resolve() for room in ("kernels", "calibration")}

# package or file of kvquant -> those that it may import; leaves import none
BASE = "errors debug rehearsal"
LEAVES = "errors rehearsal text version"
ALLOWED = dict.fromkeys(LEAVES.split(), "") | {
    "debug": "rehearsal",
    "rows": BASE,
    "ops": f"{BASE} rows",
    "cache": f"{BASE} rows ops",
    "paged": f"{BASE} rows ops cache",
    "io": f"version {BASE} text rows ops cache paged kernels.disk_cache",
    "report": "errors text",
    "hf": f"{BASE} rows ops cache io",
    "engine": f"{BASE} rows ops cache io kernels.disk_cache",
    "vllm": f"{BASE} rows engine",
    "sglang": f"{BASE} rows engine",
    "lmcache": f"{BASE} rows ops io engine",
    "calibration": f"{BASE} text report rows ops cache io hf kernels.disk_cache",
    "evaluation": f"version {BASE} text report rows cache io hf calibration",
    "lm_eval": f"{BASE} rows cache io hf calibration evaluation",
    "bench": "errors text rows ops",
    "cli": f"version {BASE} text report rows cache io hf calibration evaluation",
    "__init__": "errors version",
    "__main__": "",
    "kernels.disk_cache": "errors",
    "kernels.cpu": "errors rows kernels.disk_cache",
    "kernels.cuda.device": "errors rows",
    "kernels.cuda.runtime": "errors rehearsal rows kernels.disk_cache kernels.cuda.device",
    "kernels.cuda.affine": "rows kernels.cuda.device kernels.cuda.runtime",
    "kernels.cuda.append": "rows kernels.cuda.device kernels.cuda.runtime kernels.cuda.affine",
    "kernels.cuda.decode": (
        "errors rehearsal rows kernels.disk_cache kernels.cuda.device kernels.cuda.runtime"
    ),
    "kernels.cuda.dequantize": "rows kernels.cuda.device kernels.cuda.runtime",
    "kernels.cuda.mla": (
        "errors rehearsal rows kernels.cuda.device kernels.cuda.runtime kernels.cuda.decode"
    ),
    "kernels.cuda.prefix": (
        "errors rehearsal rows kernels.cuda.device kernels.cuda.runtime kernels.cuda.decode"
    ),
    "kernels.cuda.ranks": "kernels.cuda.device kernels.cuda.runtime kernels.cuda.decode",
    "kernels.cuda.slots": "kernels.cuda.device kernels.cuda.runtime",
}
# inside functions and for the type checker only
ALLOWED_LATE = {
    "__init__": "rows ops cache paged io hf calibration evaluation",
    "__main__": "cli",
    "ops": (
        "kernels.cpu kernels.cuda.affine kernels.cuda.append kernels.cuda.decode "
        "kernels.cuda.dequantize kernels.cuda.device kernels.cuda.mla kernels.cuda.prefix "
        "kernels.cuda.runtime kernels.cuda.slots"
    ),
    "cache": "io kernels.cuda.ranks kernels.cuda.runtime",
    "paged": "io kernels.cuda.runtime hf",
    "calibration": "kernels.cuda.runtime",
    "kernels.cuda.runtime": "text",
    "hf": "kernels.cuda.runtime kernels.disk_cache calibration",
    "engine": "kernels.cuda.runtime hf",
    "cli": "bench kernels.cuda.runtime",
}

# a library that `import kvquant` must not need -> the packages that name it
LIBRARIES = {
    "transformers": {"hf", "sglang"},
    "huggingface_hub": {"hf"},
    "accelerate": {"hf"},
    "gguf": {"hf"},
    "vllm": {"vllm"},
    "sglang": {"sglang"},
    "lmcache": {"lmcache"},
    "lm_eval": {"lm_eval"},
    "numba": {name for name in ALLOWED if name.startswith("kernels.")},
    "llvmlite": {name for name in ALLOWED if name.startswith("kernels.")},
    "click": {"cli"},
    "rich": {"text"},
    "jinja2": {"report"},
    "markupsafe": {"report"},
    "matplotlib": {"calibration", "report"},
    "platformdirs": {"kernels.disk_cache"},
}


def modules() -> dict[str, Path]:
    """Every module by its name below kvquant; links are not followed."""
    found = {}
    for room, folder in ROOMS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if room == "kvquant" and parts[0] in ("kernels", "calibration"):
                continue  # of a built package, where they are folders
            found[".".join([*room.split(".")[1:], *parts])] = path
    return found


MODULES = modules()


def package_of(name: str) -> str:
    """The row of a module: its package, or itself at the top. Packages in it have no rows."""
    parts = name.split(".")
    if parts[0] == "kernels":
        return ".".join(parts[:-1][:3]) if len(parts) > 2 else name
    return parts[0]


def imports(name: str) -> Iterator[tuple[str, bool]]:
    """What a module imports, absolute, and whether late: in a function or for the type checker."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    late = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.FunctionDef)
        or (isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test))
        for node in ast.walk(block)
    }
    package = f"kvquant.{name}".split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                known = whole.removeprefix("kvquant.") in MODULES
                yield whole if known else module, id(node) in late


def own(imported: str) -> str | None:
    """The module of kvquant that an import leads to, or None."""
    if imported == "kvquant":
        return "__init__"
    return imported.removeprefix("kvquant.") if imported.startswith("kvquant.") else None


def test_every_package_has_a_row_and_every_row_a_package() -> None:
    assert {package_of(name) for name in MODULES} == set(ALLOWED)


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_in_the_allowed_direction(name: str) -> None:
    mine = package_of(name)
    anywhere = ALLOWED[mine].split()
    late = ALLOWED_LATE.get(mine, "").split()
    for imported, is_late in imports(name):
        target = own(imported)
        if target is None or (package := package_of(target)) == mine:
            continue
        allowed = anywhere + late if is_late else anywhere
        assert package in allowed, f"{name} imports {target}{' late' if is_late else ''}"


@pytest.mark.parametrize("name", MODULES)
def test_private_names_stay_in_their_package(name: str) -> None:
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            other = node.level > 1 or not node.level
            for alias in node.names:
                private = alias.name.startswith("_") and not alias.name.startswith("__")
                assert not (other and private), f"{node.module}.{alias.name}"


def test_scripts_import_no_private_names() -> None:
    for path in sorted((ROOT / "tests" / "benchmarks").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvquant"):
                names = [alias.name for alias in node.names]
                private = [one for one in names if one.startswith("_") and one[1] != "_"]
                assert not private, f"{path.name} imports {node.module}.{private[0]}"


@pytest.mark.parametrize("name", MODULES)
def test_libraries_are_named_only_where_they_belong(name: str) -> None:
    package = package_of(name)
    for imported, _ in imports(name):
        library = imported.split(".")[0]
        assert package in LIBRARIES.get(library, {package}), f"{name} imports {library}"
        assert library not in ("kernels", "calibration"), "say kvquant.kernels, kvquant.calibration"


def test_the_allowed_imports_make_no_circle() -> None:
    assert_no_circle({name: set(allowed.split()) for name, allowed in ALLOWED.items()})


@pytest.mark.parametrize("room", ["cache", "hf", "paged", "sglang", "vllm"])
def test_files_of_a_room_make_no_circle(room: str) -> None:
    """Late imports neither, nor those for the type checker."""
    files = {name for name in MODULES if package_of(name) == room}
    assert_no_circle({name: {own(to) or "" for to, _ in imports(name)} & files for name in files})


def assert_no_circle(needed: dict[str, set[str]]) -> None:
    done: set[str] = set()
    while left := needed.keys() - done:
        ready = [name for name in left if needed[name] - {name} <= done]
        assert ready, f"these import one another: {sorted(left)}"
        done.update(ready)


def test_pyproject_ships_every_folder_with_code() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    packages = set(ast.literal_eval(text.split("\npackages = ")[1].split("\n]")[0] + "]"))
    folders = {".".join(["kvquant", *name.split(".")[:-1]]) for name in MODULES}
    folders |= {"kvquant.kernels.cuda"}  # the parent of the operations
    folders |= {"kvquant.kernels.cuda.decode.plans"}  # data, of which setuptools would warn
    assert packages == folders


@pytest.mark.parametrize("room", ["kernels", "calibration", "tests"])
def test_rooms_at_the_top_are_no_packages_of_that_name(room: str) -> None:
    """Hugging Face ships a package `kernels`, which ours would hide from transformers."""
    assert not list((ROOT / room).rglob("__init__.py"))


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="sources without git have folders there")
@pytest.mark.parametrize("room", ["kernels", "calibration"])
def test_rooms_are_linked_into_the_package(room: str) -> None:
    link = ROOT / "kvquant" / room
    assert link.is_symlink()
    assert link.resolve() == ROOT / room


def loaded_by(code: str, **env: str) -> tuple[str, set[str]]:
    """What code prints in a process of its own, and the packages that it loads."""
    code = f"""
import sys
before = set(sys.modules)
try:
    {code}
finally:
    print(*{{name.split(".")[0] for name in set(sys.modules) - before}}, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, **env},
    )
    return done.stdout, set(done.stderr.split())


def test_help_and_completion_load_nothing_but_click() -> None:
    light = {"click", "kvquant", "typing_extensions", *sys.stdlib_module_names}
    code = "from kvquant.cli.main import main; "
    code += "[main([*name, '--help'], standalone_mode=False) for name in ([], *zip(main.commands))]"
    printed, loaded = loaded_by(code)
    assert printed.count("Example:") == 11
    assert loaded <= light
    asked = {"COMP_WORDS": "kvquant bench --format int8/int4-g", "COMP_CWORD": "3"}
    code = "from kvquant.cli.main import main; main(prog_name='kvquant')"
    printed, loaded = loaded_by(code, _KVQUANT_COMPLETE="bash_complete", **asked)
    assert printed.split() == [f"plain,int8/int4-g{groups}" for groups in (2, 4, 8)]
    assert loaded <= light


def test_import_kvquant_loads_libraries_when_names_are_asked_for() -> None:
    heavy = {"numba", "llvmlite", "transformers", "click", "matplotlib", "pandas", "scipy", "rich"}
    _, loaded = loaded_by("import kvquant")
    assert not (heavy | {"torch", "numpy"}) & loaded
    _, loaded = loaded_by(
        "from kvquant.cache.contiguous import *; from kvquant import KVCache, load_cache"
    )
    assert "torch" in loaded and not heavy & loaded
    assert not {"kernels", "calibration"} & loaded


# that make tensors of torch's default dtype, and on its default device, where none are named
FACTORIES = "empty zeros ones full rand randn eye linspace empty_strided".split()
OF_WHOLE_NUMBERS = "arange tensor as_tensor randint randperm".split()


@pytest.mark.parametrize("name", MODULES)
def test_tensors_are_made_with_a_device_and_a_dtype(name: str) -> None:
    """The caller's defaults are the caller's. Commands run in processes of their own."""
    if name in ("cli.main", "cli.demo", "hf.masks"):  # the last one makes a mark, never read
        return
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch."):
            function = ast.unparse(node.func).removeprefix("torch.")
            given = {keyword.arg for keyword in node.keywords}
            if function in FACTORIES:
                assert given >= {"device", "dtype"}, f"line {node.lineno}: {ast.unparse(node)}"
            elif function in OF_WHOLE_NUMBERS:
                assert "device" in given, f"line {node.lineno}: {ast.unparse(node)}"
