"""Shared by all tests: the markers gpu and extra, seeds, poisoned memory."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if "PYTEST_XDIST_WORKER" in os.environ:  # a process per core: threads would wait for one another
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start, too

import hypothesis
import pytest
import torch
from relative_l2 import relative_l2

if TYPE_CHECKING:
    from fake_cuda import FakeDriver

    from kvquant.hf.model import CachedModel

gc.disable()  # until tests are collected: what they import stays
pytest.register_assert_rewrite("cuda_cases", "mla_calls")
if "PYTEST_XDIST_WORKER" in os.environ:  # a process per core: threads would wait for one another
    torch.set_num_threads(1)
hypothesis.settings.register_profile(
    "kvquant", deadline=None, derandomize=True, database=None, print_blob=True
)
hypothesis.settings.load_profile("kvquant")


def _empty_strided(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# of which launchers make their results, before they import it: else they would not be poisoned
torch._C._dynamo.guards._empty_strided_cuda = _empty_strided  # type: ignore[attr-defined]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--jitter", type=int, metavar="SEED", help="see tests/support/jitter.py")
    parser.addoption("--every", type=int, metavar="N", default=1, help="only each N-th test")


def pytest_configure(config: pytest.Config) -> None:
    seed = config.getoption("--jitter")
    if seed is not None:
        from jitter import replace_kernels

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that its kernels are replaced
            config.stash[_JITTER] = replace_kernels(seed)  # they are replaced while it lives


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("--jitter")
    return None if seed is None else f"jitter: seed {seed}"


_JITTER = pytest.StashKey[torch.library.Library]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let Python's collector leave out what will live to the end: a tenth of the whole time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # after those of -m are chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu"):  # numba-cuda and torch warn of matters of their own
            item.add_marker(pytest.mark.filterwarnings("default"))
    if config.option.markexpr == "slow":  # files of the simulator take minutes: they come first
        counts = Counter(item.path for item in items)
        takes_minutes = functools.cache(lambda file: "simulator" in file.read_text("utf-8"))
        items.sort(key=lambda item: (not takes_minutes(item.path), -counts[item.path]))
    items[:] = items[:: config.getoption("--every")]


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadfile a worker has whole files, and one of them all that share a simulator.

    xdist's groups are no way to say so: with pytest 9.2 its --dist loadgroup does nothing.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    @functools.cache
    def unit_of(file: str) -> str:
        text = (config.rootpath / file).read_text(encoding="utf-8")
        shares = "@in_simulator" in text and config.option.markexpr != "slow"  # these do not
        return "simulator" if shares else file

    if config.option.markexpr == "slow":
        config.option.loadscopereorder = False  # see pytest_collection_modifyitems
    scheduler = LoadFileScheduling(config, log)
    scheduler._split_scope = lambda nodeid: unit_of(nodeid.partition("::")[0])
    return scheduler


# the modules of each
EXTRAS = {"cuda": ["numba_cuda"], "hf": ["transformers"]}
EXTRAS |= {"gguf": ["gguf", "accelerate"], "report": ["matplotlib", "jinja2"]}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name in (name for mark in item.iter_markers("extra") for name in mark.args):
        for module in EXTRAS[name]:
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"needs the {name} extra: {module} is not installed")
    counts = [_count(*mark.args, **mark.kwargs) for mark in item.iter_markers("gpu")]
    if counts and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: torch.cuda.is_available() is False")
    if counts and max(counts) > torch.cuda.device_count():
        pytest.skip(f"needs {max(counts)} NVIDIA GPUs: torch finds {torch.cuda.device_count()}")


def _count(count: int = 1) -> int:
    """The argument of the gpu marker."""
    return count


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Let torch.empty and its kin give NaN (uint8: 255): nothing unwritten goes unseen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True, scope="module")
def _compiled_by_other_files() -> Iterator[None]:
    """Let torch.compile forget it: it refuses to compile a function a ninth time."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(name="relative_l2")
def _relative_l2() -> Callable[[torch.Tensor, torch.Tensor], float]:
    return relative_l2


@pytest.fixture(scope="module")
def model() -> CachedModel:
    """The model of the demo."""
    from kvquant.cli.demo import MODEL
    from kvquant.hf.model import CachedModel

    return CachedModel.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def text(model: CachedModel) -> list[int]:
    """Token ids of a text that the demo's model has not read."""
    path = Path(__file__).parents[1] / "examples" / "unseen.txt"
    return model.encode(path.read_text(encoding="utf-8"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The CPU as an H200 with a driver that takes notes."""
    from fake_cuda import install

    return install(monkeypatch)
