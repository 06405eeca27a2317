"""What is installed is found from every folder, and goes without a trace (10 s)."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from importlib.metadata import distributions
from pathlib import Path

import pytest

import kvquant
from kvquant.errors import DISTRIBUTION

ROOT = Path(__file__).parents[1]
INSTALL = ROOT / ".ci" / "install.py"
LOCAL = shutil.ignore_patterns(".git", ".venv*", ".*cache", ".hypothesis", "build", "*.egg-info")
# Asked of the metadata: a search for the module pip tells setuptools that this process is pip, and
# setuptools cannot be imported afterwards (Python 3.10 and 3.11), which torch.compile does.
pytestmark = pytest.mark.skipif(
    not all(any(distributions(name=name)) for name in ("pip", "setuptools")),
    reason="needs pip and setuptools",
)
# a name of the library, and modules of both rooms
CODE = """
import kvquant.kernels.cuda.decode.tuned, kvquant.calibration.format_search
from kvquant import RowFormat
"""


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a checkout of the name kvquant."""
    folder = tmp_path_factory.mktemp("parent")
    shutil.copytree(ROOT, folder / "kvquant", symlinks=True, ignore=LOCAL)
    return folder


def call(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "options", [pytest.param(["--editable"], marks=pytest.mark.slow), []], ids=["editable", "wheel"]
)
def test_the_package_is_found_from_every_folder(
    options: list[str], parent: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    given = [path for path in sys.path if "site-packages" in path]
    (site / "dependencies.pth").write_text("\n".join(given))
    before = set(site.iterdir())
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--no-input"]
    checkout = parent / "kvquant"
    options = ["--no-deps", "--no-build-isolation", "--no-index", *options]
    done = call(*pip, "install", *options, checkout, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for folder in (parent, checkout, tmp_path):
        for command in (["-c", CODE], ["-m", "kvquant", "--version"]):
            done = call(python, *command, cwd=folder)
            assert done.returncode == 0, (folder, done.stderr)
        done = call(python.with_name("kvquant"), "--version", cwd=folder)
        assert done.stdout == f"kvquant, version {kvquant.__version__}\n"
    if "--editable" in options:  # without code that runs at start: type checkers read the path
        (line,) = [path.read_text() for path in site.glob("*kvquant*.pth")]
        assert Path(line.strip()) == checkout
        place = f"-e '{checkout}[cuda]'"
        (checkout / "kvquant" / "fresh.py").write_text("")
        assert call(python, "-c", "import kvquant.fresh", cwd=tmp_path).returncode == 0
        (checkout / "kvquant" / "fresh.py").unlink()
    else:
        assert (site / "kvquant" / "py.typed").is_file()
        place = f"'{DISTRIBUTION}[cuda]'"
    code = "from kvquant.errors import missing_extra; raise missing_extra('X', 'cuda', None)"
    done = call(python, "-c", code, cwd=tmp_path)
    assert done.stderr.rstrip().endswith(f"{python} -m pip install {place}")
    assert call(*pip, "uninstall", "--yes", DISTRIBUTION, cwd=tmp_path).returncode == 0
    assert set(site.iterdir()) == before
    found = call(
        python, "-c", "import importlib.util as u; print(u.find_spec('kvquant'))", cwd=site
    )
    assert str(site) not in found.stdout  # one beside the tests' own libraries may be there


def test_what_is_built_is_whole_and_says_what_it_is(parent: Path, tmp_path: Path) -> None:
    code = "from setuptools import build_meta as backend; folder = "
    code += f"{str(tmp_path)!r}; backend.build_sdist(folder); backend.build_wheel(folder)"
    done = call(sys.executable, "-c", code, cwd=parent / "kvquant")
    assert done.returncode == 0, done.stderr
    (sdist,), (wheel,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    name = f"{DISTRIBUTION.replace('-', '_')}-{kvquant.__version__}"
    with tarfile.open(sdist) as archive:
        sources = {member.name.removeprefix(f"{name}/") for member in archive if member.isfile()}
    shared = ("tests", "examples")
    wanted = {"Makefile", "constraints.txt", "CHANGELOG.md", "LICENSE", "README.md"}
    wanted |= {".ci/install.py"}  # the Makefile calls it
    wanted |= {
        str(path.relative_to(parent / "kvquant"))
        for folder in shared
        for path in (parent / "kvquant" / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    code_files = {
        str(path.relative_to(parent / "kvquant"))
        for room in ("", "kernels", "calibration")  # links, which rglob does not follow
        for path in (parent / "kvquant" / "kvquant" / room).rglob("*")
        if path.suffix in (".py", ".typed", ".jinja", ".json", ".txt")
        or path.parts[-2:] == ("texts", "README.md")  # whose the packaged texts are
    }
    assert len(code_files) > 100
    assert wanted | code_files <= sources
    with zipfile.ZipFile(wheel) as archive:
        built = {path for path in archive.namelist() if ".dist-info" not in path}
        metadata = message_from_bytes(archive.read(f"{name}.dist-info/METADATA"))
        entries = archive.read(f"{name}.dist-info/entry_points.txt").decode()
    assert built == code_files
    assert metadata["Name"] == DISTRIBUTION
    assert "[vllm.general_plugins]\nkvquant = kvquant.vllm.plugin:register" in entries
    assert metadata["Author"] == "The kvquant developers"
    assert metadata["License-Expression"] == "Apache-2.0 AND CC-BY-SA-3.0"
    sources_of_texts = "kvquant/calibration/texts/SOURCES.txt"
    assert metadata.get_all("License-File") == ["LICENSE", sources_of_texts]
    assert wheel.stat().st_size <= 1e6
    assert "Operating System :: POSIX :: Linux" in metadata.get_all("Classifier", [])
    assert metadata["Keywords"]
    needed = metadata.get_all("Requires-Dist", [])
    for extra in ("cuda", "vllm"):  # a GPU needs the compilers, whoever launches kernels there
        assert f'numba-cuda[cu13]>=0.30; extra == "{extra}"' in needed


def test_make_uninstalls_the_old_name_before_it_installs() -> None:
    """The distribution was called kvquant: two of them would offer the same entry points."""
    makefile = (ROOT / "Makefile").read_text()
    rules = [rule for rule in makefile.split("\n\n") if "$(INSTALL)" in rule]
    assert len(rules) == 3
    for rule in rules:
        assert 0 < rule.index("FORGET_OLD_NAME") < rule.index("--editable")
    assert re.search(r"^FORGET_OLD_NAME := .* pip uninstall .*--yes kvquant\b", makefile, re.M)


def test_a_line_tells_how_far_pip_is() -> None:
    stage = runpy.run_path(str(INSTALL))["stage"]
    for line, words in {
        "Collecting torch==2.13.0 (from -c constraints.txt (line 3))": "looking for torch",
        "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (30 kB)": None,
        "Downloading https://x.org/a/numba-0.68.1-cp311-x86_64.whl (3.8 MB)": (
            "downloading numba-0.68.1-cp311-x86_64 (3.8 MB)"
        ),
        "  Building editable for kvquant-cache (pyproject.toml): started": (
            "building kvquant-cache"
        ),
        "Installing collected packages: mpmath, sympy, torch": "installing 3 packages",
        "Requirement already satisfied: click>=8.2": None,
    }.items():
        assert stage(line) == words


def test_what_pip_says_of_errors_is_passed_on() -> None:
    install = sys.executable, INSTALL
    done = call(*install, "--no-index", "no-such-distribution", cwd=ROOT)
    assert done.returncode == 1 and "no-such-distribution" in done.stderr
    assert re.fullmatch(r"pip: failed, \d+ s\n", done.stdout)
    done = call(*install, "--dry-run", "--no-index", "pip", cwd=ROOT)
    assert done.returncode == 0 and re.fullmatch(r"pip: done, \d+ s\n", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("extras", ["cuda", "hf,report", "sglang", "vllm"])
def test_extras_resolve(extras: str, python: str, tmp_path: Path) -> None:
    """A dry run of pip finds versions without going back over many, in less than a minute of its
    own time; it waits for the package registry besides, which may send whole wheels for metadata.
    """
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"]]
    for extra in extras.split(","):
        wanted += project["optional-dependencies"][extra]
    options = ["--dry-run", "--ignore-installed", "--target", str(tmp_path), "--only-binary=:all:"]
    before = os.times()
    done = call(
        *(sys.executable, "-m", "pip", "install", *options, "--python-version", python, *wanted),
        cwd=tmp_path,
    )
    after = os.times()
    if "NewConnectionError" in done.stdout + done.stderr:
        pytest.skip("needs the package registry")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "pip is looking at multiple versions" not in done.stdout
    taken = (after.children_user + after.children_system) - (
        before.children_user + before.children_system
    )
    assert taken < 60
