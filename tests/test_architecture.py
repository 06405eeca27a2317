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

FACTS = "errors layout"
MEANING = f"{FACTS} arguments devices quant segments debug reference"
PLAN = "basis hadamard rounding"
CACHES = f"{MEANING} {PLAN} attention cachechecks layer cache"
DEVICE = "kernels.cuda.device kernels.cuda.fragments kernels.cuda.ptx kernels.cuda.spec"
FILES = "files identity jsonvalues manifest shards cachefile checkpoint writing"
ROW_KERNELS = (
    "kernels.cuda.device kernels.cuda.ptx kernels.cuda.quantize kernels.cuda.rowcopies "
    "kernels.cuda.rowspec kernels.cuda.transform"
)
RUN = "arguments kernels.cpu.compile kernels.cpu.parallel kernels.cpu.simd"
ROW_LAUNCH = "kernels.cuda.driver kernels.cuda.loaded kernels.cuda.rowspec"

# module of kvquant -> modules of kvquant that it may import
ALLOWED = {
    "__init__": "errors",
    "errors": "",
    "arguments": "errors",
    "layout": "errors",
    "quant": f"{FACTS} arguments devices",
    "segments": f"{FACTS} arguments quant",
    "debug": f"{FACTS} segments",
    "reference": f"{FACTS} arguments segments debug",
    "devices": "errors",
    "backends": MEANING,
    "ops": f"{FACTS} segments backends",
    "attention": f"{FACTS} arguments segments backends ops",
    "hadamard": f"{FACTS} quant",
    "transforms": "devices hadamard",
    "slots": "errors arguments debug",
    "slotops": "debug slots",
    "appendchecks": f"{FACTS} arguments debug quant basis slots transforms",
    "appendbackends": f"{FACTS} quant debug devices rounding slots transforms appendchecks",
    "appendops": "layout slots transforms appendchecks appendbackends",
    "append": (
        f"{FACTS} arguments quant basis slots transforms appendchecks appendbackends appendops"
    ),
    "rounding": f"{FACTS} quant",
    "basis": f"arguments devices {FACTS} hadamard rounding transforms",
    "cachechecks": f"{FACTS} arguments devices quant debug basis rowstacks",
    "layer": f"{FACTS} devices debug segments basis rowstacks append slots slotops",
    "cache": f"{MEANING} attention basis basisattention cachechecks layer",
    "plan": f"{FACTS} basis files identity jsonvalues shards writing",
    "kernels.cpu.simd": "",
    "kernels.cpu.values": f"{FACTS} kernels.cpu.simd",
    "kernels.cpu.compile": f"{FACTS} kernels.usercache",
    "kernels.cpu.parallel": "kernels.cpu.compile kernels.cpu.simd",
    "kernels.usercache": "errors",
    "kernels.tuned": "errors kernels.usercache",
    "kernels.tuning": "errors kernels.cuda.spec kernels.tuned",
    "kernels.cuda.simulatedmemory": "",
    "kernels.cuda.simulator": "kernels.cuda.simulatedmemory",
    "kernels.cuda.simulated": "kernels.cuda.simulatedmemory kernels.cuda.simulator",
    "kernels.cuda.simulatedfloats": "kernels.cuda.simulated",
    "kernels.cuda.ptx": "kernels.cuda.simulated kernels.cuda.simulatedfloats",
    "kernels.cuda.device": "",
    "kernels.cuda.staging": FACTS,
    "kernels.cuda.spec": "layout kernels.cuda.staging",
    "kernels.cuda.codes": "kernels.cuda.device",
    "kernels.cuda.fragments": "kernels.cuda.device kernels.cuda.ptx",
    "kernels.cuda.copies": "kernels.cuda.device kernels.cuda.ptx kernels.cuda.spec",
    "kernels.cuda.scores": f"{DEVICE} kernels.cuda.codes",
    "kernels.cuda.values": f"{DEVICE} kernels.cuda.codes",
    "kernels.cuda.merge": DEVICE,
    "kernels.cuda.aside": "kernels.cuda.device kernels.cuda.fragments kernels.cuda.ptx",
    "kernels.cuda.attend": (
        f"{DEVICE} kernels.cuda.aside kernels.cuda.copies kernels.cuda.merge kernels.cuda.scores "
        "kernels.cuda.values"
    ),
    "kernels.cuda.decode": f"{DEVICE} kernels.cuda.attend kernels.cuda.merge",
    "kernels.cuda.compile": (
        "errors layout kernels.usercache kernels.cuda.feedbackspec kernels.cuda.prefixspec "
        "kernels.cuda.rowspec kernels.cuda.slotspec kernels.cuda.spec kernels.cuda.statespec "
        "kernels.cuda.turnspec"
    ),
    "kernels.cuda.slotspec": "",
    "kernels.cuda.slots": "kernels.cuda.device kernels.cuda.ptx kernels.cuda.slotspec",
    "kernels.cuda.statespec": "",
    "kernels.cuda.turnspec": "",
    "kernels.cuda.turn": "kernels.cuda.device kernels.cuda.ptx kernels.cuda.turnspec",
    "kernels.cuda.mergestates": ("kernels.cuda.device kernels.cuda.ptx kernels.cuda.statespec"),
    "kernels.cuda.rowspec": "layout",
    "kernels.cuda.transform": "kernels.cuda.device kernels.cuda.ptx kernels.cuda.rowspec",
    "kernels.cuda.quantize": "layout kernels.cuda.device kernels.cuda.ptx kernels.cuda.rowspec",
    "kernels.cuda.rowcopies": (
        "kernels.cuda.device kernels.cuda.ptx kernels.cuda.rowspec kernels.cuda.transform"
    ),
    "kernels.cuda.prefixspec": "errors layout kernels.cuda.rowspec kernels.cuda.staging",
    "kernels.cuda.expand": (
        "kernels.cuda.codes kernels.cuda.device kernels.cuda.ptx kernels.cuda.quantize "
        "kernels.cuda.rowcopies kernels.cuda.rowspec"
    ),
    "kernels.cuda.prefixtile": (
        "kernels.cuda.device kernels.cuda.expand kernels.cuda.fragments kernels.cuda.prefixspec "
        "kernels.cuda.ptx"
    ),
    "kernels.cuda.prefix": (
        "kernels.cuda.device kernels.cuda.expand kernels.cuda.fragments kernels.cuda.prefixspec "
        "kernels.cuda.prefixtile kernels.cuda.ptx kernels.cuda.transform"
    ),
    "kernels.cuda.append": f"layout {ROW_KERNELS}",
    "kernels.cuda.dequantize": ROW_KERNELS,
    "kernels.cuda.loaded": (
        "errors layout kernels.cuda.compile kernels.cuda.driver kernels.cuda.feedbackspec "
        "kernels.cuda.prefixspec kernels.cuda.rowspec kernels.cuda.slotspec kernels.cuda.statespec "
        "kernels.cuda.turnspec"
    ),
    "kernels.cuda.feedbackspec": "layout kernels.cuda.rowspec",
    "kernels.cuda.feedback": (
        f"layout {ROW_KERNELS} kernels.cuda.feedbackrow kernels.cuda.feedbackspec"
    ),
    "kernels.cuda.feedbackrow": (
        "kernels.cuda.device kernels.cuda.feedbackspec kernels.cuda.ptx kernels.cuda.quantize"
    ),
    "kernels.feedback": (
        "layout slots transforms kernels.append kernels.cuda.driver kernels.cuda.feedbackspec "
        "kernels.cuda.loaded"
    ),
    "kernels.fitted": (
        "layout quant slots transforms kernels.append kernels.cuda.loaded kernels.feedback "
        "kernels.turn"
    ),
    "kernels.mergestates": "kernels.cuda.driver kernels.cuda.loaded kernels.cuda.statespec",
    "kernels.slots": "kernels.cuda.driver kernels.cuda.loaded kernels.cuda.slotspec",
    "kernels.turn": (
        "kernels.cuda.driver kernels.cuda.loaded kernels.cuda.rowspec kernels.cuda.turnspec"
    ),
    "kernels.prefix": (
        "segments kernels.cuda.arrange kernels.cuda.driver kernels.cuda.loaded "
        "kernels.cuda.prefixspec kernels.mergestates"
    ),
    "kernels.append": f"layout quant slots transforms {ROW_LAUNCH}",
    "kernels.dequantize": f"layout {ROW_LAUNCH}",
    "kernels.cuda.driver": "errors",
    "kernels.cuda.workspace": "kernels.cuda.driver",
    "kernels.cuda.arrange": f"{FACTS} segments kernels.cuda.spec kernels.cuda.staging",
    "kernels.cuda.launch": (
        "arguments errors segments kernels.tuned kernels.tuning kernels.cuda.arrange "
        "kernels.cuda.compile "
        "kernels.cuda.driver kernels.cuda.spec kernels.cuda.workspace"
    ),
    "kernels.cpu.merge": "kernels.cpu.compile kernels.cpu.simd",
    "kernels.cpu.feedback": RUN,
    "kernels.cpu.rows": f"{FACTS} {RUN} kernels.cpu.values",
    "kernels.cpu.append": f"{FACTS} {RUN} kernels.cpu.rows kernels.cpu.values",
    "kernels.cpu.slots": "kernels.cpu.compile",
    "kernels.cpu.transform": f"{RUN} kernels.cpu.rows",
    "kernels.cpu.decode": f"{FACTS} segments {RUN} kernels.cpu.merge kernels.cpu.values",
    "writing": "errors",
    "files": "devices errors jsonvalues writing",
    "shards": "errors files writing",
    "identity": "errors",
    "manifest": f"{FACTS} basis cache layer identity jsonvalues",
    "cachefile": f"{FACTS} quant files jsonvalues manifest shards writing",
    "checkpoint": f"{CACHES} devices files identity manifest shards cachefile plan writing",
    "exchange": f"{CACHES} arguments files jsonvalues shards writing",
    "tables": "",
    "rowfacts": f"{FACTS} quant exchange tables",
    "inspection": f"errors layout {FILES} pagedinspection pagedreader rowfacts tables",
    "switch": "errors",
    "configs": FACTS,
    "loading": "errors",
    "positions": "errors",
    "huggingface": f"{CACHES} configs",
    "rowpass": "errors switch",
    "observation": "errors rowpass switch",
    "model": f"{CACHES} configs debug huggingface loading observation plan positions switch",
    "calibration.moments": "errors files jsonvalues shards",
    "calibration.bases": "basis hadamard rounding calibration.moments",
    "calibration.scores": "",
    "calibration.choose": (
        f"{FACTS} quant basis calibration.bases calibration.moments calibration.scores"
    ),
    "calibration.formats": "",
    "calibration.texts": "arguments errors cachechecks",
    "calibration.fidelity": f"{CACHES} plan",
    "calibration.layers": f"{FACTS} calibration.choose calibration.moments",
    "calibration.passes": f"{FACTS} quant calibration.fidelity",
    "calibration.assemble": "plan calibration.choose calibration.moments calibration.scores",
    "calibration.run": (
        f"{FACTS} configs identity plan calibration.assemble calibration.choose "
        "calibration.fidelity calibration.formats calibration.layers calibration.moments "
        "calibration.passes calibration.texts"
    ),
    "calibration.report": "plan rowfacts tables calibration.fidelity",
    "calibration.verdict": f"{FACTS} plan rowfacts calibration.report",
    "calibration.figures": f"{FACTS} plan calibration.verdict",
    "calibration.htmlreport": (
        f"{FACTS} plan calibration.figures calibration.report calibration.verdict"
    ),
    "bench": f"{MEANING} attention tables",
    "console": "errors layout",
    "basisattention": "arguments attention basis basisops segments",
    "basisops": "errors",
    "cascadeops": "debug ops segments",
    "cascade": "arguments attention backends cascadeops debug errors segments",
    "jsonvalues": FACTS,
    "copying": "errors",
    "rowstacks": f"copying {FACTS}",
    "pagedslots": "",
    "staging": "copying devices",
    "swap": "copying errors pagedstate pagenames pagepool rowstacks",
    "pagedstate": "arguments copying errors pagedslots pagenames pagepool",
    "pagedrows": "basis copying devices layout pagedslots quant rowstacks segments",
    "paged": (
        f"{MEANING} basis cachechecks copying pagedrows pagedslots pagedstate pagenames pagepool "
        "swap"
    ),
    "sharedprefix": "",
    "pagedbatch": (
        "append arguments attention basisattention cascade copying errors segments "
        "sharedprefix slots transforms paged pagedstate pagepool staging"
    ),
    "pagedmanifest": f"{FACTS} jsonvalues manifest pagedstate segments",
    "pagedreader": f"errors {FILES} pagedmanifest",
    "pagedinspection": "layout pagedmanifest pagedreader rowfacts tables",
    "pagedfile": (
        f"arguments errors basis {FILES} paged pagedmanifest pagedreader pagedstate pagepool"
    ),
    "pagenames": "errors",
    "pagepool": "errors pagenames",
    "gpucases": f"{FACTS} quant segments",
    "gputimer": "",
    "gpubench": f"{MEANING} attention gpucases gputimer",
    "gputune": (
        "gpubench gpucases gputimer kernels.cuda.launch kernels.cuda.spec kernels.tuned "
        "kernels.tuning"
    ),
    "gpureport": f"{FACTS} gpubench gpucases gputimer gputune tables writing",
    "benchcli": "__init__ errors console",
    "demo": f"{CACHES} console model tables calibration.fidelity",
    "calibratecli": "errors console",
    "reportcli": "errors console",
    "cli": "__init__ errors console benchcli calibratecli reportcli",
    "__main__": "",
}
# inside functions and for the type checker only
ALLOWED_LATE = {
    "__init__": (f"{CACHES} checkpoint append slots transforms paged pagedbatch pagedfile plan"),
    "__main__": "cli",
    "quant": "kernels.cpu.rows",
    "backends": "kernels.cpu.decode kernels.cuda.compile kernels.cuda.launch",
    "appendbackends": (
        "kernels.append kernels.cpu.append kernels.cpu.transform kernels.dequantize kernels.fitted"
    ),
    "basis": "kernels.cpu.transform",
    "slots": "kernels.cpu.slots",
    "kernels.cuda.compile": (
        "kernels.cuda.append kernels.cuda.decode kernels.cuda.dequantize kernels.cuda.device "
        "kernels.cuda.feedback kernels.cuda.mergestates kernels.cuda.prefix kernels.cuda.slots "
        "kernels.cuda.turn"
    ),
    "basisops": "kernels.turn",
    "cascadeops": "kernels.prefix",
    "console": "writing",
    "slotops": "kernels.slots",
    "benchcli": (
        "bench gpubench gpucases gpureport gputimer gputune tables kernels.cuda.launch "
        "kernels.tuned"
    ),
    "rounding": "kernels.cpu.feedback kernels.feedback",
    "cachechecks": "layer plan",
    "cache": "plan",
    "paged": "plan",
    "calibratecli": "model rowfacts tables calibration.report calibration.run calibration.verdict",
    "calibration.passes": "rowpass",
    "reportcli": "plan tables writing calibration.htmlreport calibration.verdict",
    "cli": f"{CACHES} {FILES} exchange inspection model plan demo rowfacts tables",
}

# a library that `import kvquant` must not need -> the only modules that name it
LIBRARIES = {
    "transformers": {"huggingface", "loading", "observation", "rowpass"},
    "numba": {name for name in ALLOWED if name.startswith("kernels.")},
    "llvmlite": {name for name in ALLOWED if name.startswith("kernels.")},
    "click": {"benchcli", "calibratecli", "cli", "console", "reportcli"},
    "rich": {"console", "tables"},
    "jinja2": {"calibration.htmlreport"},
    "markupsafe": {"calibration.htmlreport"},
    "matplotlib": {"gpureport", "calibration.figures", "calibration.htmlreport"},
    "platformdirs": {"kernels.usercache"},
}


def modules() -> dict[str, Path]:
    """Every module by its name below kvquant; links are not followed."""
    found = {}
    for room, folder in ROOMS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if room == "kvquant" and len(parts) > 1:
                continue
            found[".".join([*room.split(".")[1:], *parts])] = path
    return found


MODULES = modules()


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


def test_every_module_has_a_row_and_every_row_a_module() -> None:
    assert set(MODULES) == set(ALLOWED)


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_in_the_allowed_direction(name: str) -> None:
    anywhere = ALLOWED.get(name, "").split()
    late = ALLOWED_LATE.get(name, "").split()
    for imported, is_late in imports(name):
        target = own(imported)
        if target is not None:
            allowed = anywhere + late if is_late else anywhere
            assert target in allowed, f"{name} imports {target}{' late' if is_late else ''}"


@pytest.mark.parametrize("name", MODULES)
def test_libraries_are_named_only_where_they_belong(name: str) -> None:
    for imported, _ in imports(name):
        library = imported.split(".")[0]
        assert name in LIBRARIES.get(library, {name}), f"{name} imports {library}"
        assert library not in ("kernels", "calibration"), "say kvquant.kernels, kvquant.calibration"


def test_the_allowed_imports_make_no_circle() -> None:
    done: set[str] = set()
    while left := [name for name in ALLOWED if name not in done]:
        ready = [name for name in left if set(ALLOWED[name].split()) <= done]
        assert ready, f"these import one another: {left}"
        done.update(ready)


def test_pyproject_ships_every_folder_with_code() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("packages = "))
    packages = set(ast.literal_eval(line.removeprefix("packages = ")))
    folders = {".".join(["kvquant", *name.split(".")[:-1]]) for name in MODULES}
    assert packages - {"kvquant.kernels"} == folders - {"kvquant.kernels"}
    assert "kvquant.kernels" in packages  # the parent of kvquant.kernels.cpu


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
    code = "from kvquant.cli import main; "
    code += "[main([*name, '--help'], standalone_mode=False) for name in ([], *zip(main.commands))]"
    printed, loaded = loaded_by(code)
    assert printed.count("Example:") == 8
    assert loaded <= light
    asked = {"COMP_WORDS": "kvquant bench --format int8/int4-g", "COMP_CWORD": "3"}
    code = "from kvquant.cli import main; main(prog_name='kvquant')"
    printed, loaded = loaded_by(code, _KVQUANT_COMPLETE="bash_complete", **asked)
    assert printed.split() == [f"plain,int8/int4-g{groups}" for groups in (2, 4, 8)]
    assert loaded <= light


def test_import_kvquant_loads_libraries_when_names_are_asked_for() -> None:
    heavy = {"numba", "llvmlite", "transformers", "click", "matplotlib", "pandas", "scipy", "rich"}
    _, loaded = loaded_by("import kvquant")
    assert not (heavy | {"torch", "numpy"}) & loaded
    _, loaded = loaded_by("from kvquant.cache import *; from kvquant import KVCache, load_cache")
    assert "torch" in loaded and not heavy & loaded
    assert not {"kernels", "calibration"} & loaded


# that make tensors of torch's default dtype, and on its default device, where none are named
FACTORIES = "empty zeros ones full rand randn eye linspace empty_strided".split()
OF_WHOLE_NUMBERS = "arange tensor as_tensor randint randperm".split()


@pytest.mark.parametrize("name", MODULES)
def test_tensors_are_made_with_a_device_and_a_dtype(name: str) -> None:
    """The caller's defaults are the caller's. Commands run in processes of their own."""
    if name in ("cli", "demo", "huggingface"):  # the last one makes a mark that is never read
        return
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch."):
            function = ast.unparse(node.func).removeprefix("torch.")
            given = {keyword.arg for keyword in node.keywords}
            if function in FACTORIES:
                assert given >= {"device", "dtype"}, f"line {node.lineno}: {ast.unparse(node)}"
            elif function in OF_WHOLE_NUMBERS:
                assert "device" in given, f"line {node.lineno}: {ast.unparse(node)}"
