"""kvquant warmup; compiling takes no time here."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from example_plan import example_plan
from latent_plans import latent_plan

from kvquant.cli import main as cli
from kvquant.cli.warmup import ARCHS
from kvquant.kernels import disk_cache
from kvquant.kernels.cuda.runtime import compile as compiling
from kvquant.kernels.cuda.runtime import compile_pool
from kvquant.kernels.cuda.runtime.compile import Cubin, Report, keep_cubin
from kvquant.kernels.cuda.runtime.launch import GPUS
from kvquant.kernels.cuda.runtime.spec import Spec

MODEL = Path(__file__).parents[2] / "examples" / "llama-demo-5m"
EMPTY = Cubin("f", b"", Report(1, 0))
INSTEAD = """
from kvquant.kernels.cuda.runtime import compile as compiling
from kvquant.kernels.cuda.runtime.compile_pool import compile_alone
compiling.compile_spec = lambda spec, arch: compiling.Cubin("f", b"", compiling.Report(1, 0))
compile_alone()
"""

pytestmark = pytest.mark.extra("cuda")
needs_hf = pytest.mark.extra("hf")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, on a machine without a GPU."""
    monkeypatch.setenv("KVQUANT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(compile_pool, "ALONE", INSTEAD)
    monkeypatch.setattr(disk_cache, "_warned", set())
    return tmp_path


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no processes, each of which would import numba."""

    def compile_here(todo: list[Spec], arch: str, report: Callable[[Spec], object]) -> None:
        for spec in todo:
            keep_cubin(spec, arch)
            report(spec)

    monkeypatch.setattr(compiling, "compile_spec", lambda spec, arch: EMPTY)
    monkeypatch.setattr(compile_pool, "_compile", compile_here)


def run(*args: object) -> Result:
    return CliRunner().invoke(cli.main, ["warmup", *map(str, args)])


def test_kernels_are_compiled_once() -> None:
    given = "--arch", "sm_90", "--format", "int8/int4", "--batch", 8
    first, again = run(*given), run(*given, "--format", "int8/int4", "--sink-len", 4)
    assert first.exit_code == 0, first.output
    assert "3 kernels for sm_90: 0 were there, 3 compiled in " in first.stdout
    assert first.stderr.splitlines()[-1].startswith("Compiling: ") and "100 %" in first.stderr
    assert "3 kernels for sm_90: 3 were there, 0 compiled in 0 s" in again.stdout


@needs_hf
@pytest.mark.usefixtures("in_this_process")
def test_a_model_says_heads_and_a_plan_formats(folder: Path) -> None:
    path = folder / "plan.safetensors"
    example_plan(3, 2, 64).save(path)
    by_plan = run("--arch", "sm_90", "--plan", path, "--batch", 1)
    assert by_plan.exit_code == 0, by_plan.output
    assert " kernels for sm_90: 0 were there, " in by_plan.stdout
    other = run("--arch", "sm_80", "--plan", path, "--batch", 1)
    assert " kernels for sm_80: 0 were there" in other.stdout
    by_model = run("--arch", "sm_90", "--model", MODEL, "--batch", 1)
    assert by_model.stdout.startswith("3 kernels for sm_90: 1 were there, 2 compiled")
    both = run("--arch", "sm_90", "--model", MODEL, "--plan", path)
    assert both.exit_code == 2 and "plan" in both.stderr
    nothing = run("--arch", "sm_90", "--model", folder)
    assert nothing.exit_code == 2 and "config.json could not be read" in nothing.stderr


def kernels(result: Result) -> tuple[int, int]:
    """How many there are, and how many were there."""
    assert result.exit_code == 0, result.output
    words = result.stdout.split()
    return int(words[0]), int(words[4])


@pytest.mark.usefixtures("in_this_process")
def test_kernels_of_few_bits_soft_caps_and_sink_logits() -> None:
    """Of three kernels the one for attention is another one with a cap or logits."""
    given = "--arch", "sm_90", "--batch", 8
    assert kernels(run(*given)) == (3, 0)
    assert kernels(run(*given, "--soft-cap")) == (3, 2)
    assert kernels(run(*given, "--sink-logits")) == (3, 2)
    assert kernels(run(*given, "--sink-logits", "--soft-cap")) == (3, 2)
    assert kernels(run(*given, "--soft-cap")) == (3, 3)
    assert kernels(run(*given, "--format", "int3/int2"))[0] == 3


@needs_hf
@pytest.mark.usefixtures("in_this_process")
def test_latent_rows_of_a_format_a_model_and_a_plan(folder: Path) -> None:
    """Their kernels differ by query heads: 16 and 128 where these are not known."""
    from transformers import AutoConfig, DeepseekV3Config

    given = "--arch", "sm_90", "--batch", 1
    assert kernels(run(*given, "--format", "int4-g8+fp8-g4", "--q-heads", 16)) == (5, 0)
    count, there = kernels(run(*given, "--format", "int4-g8+fp8-g4"))
    assert count > 5 == there
    DeepseekV3Config(num_hidden_layers=2, num_attention_heads=16, dtype="bfloat16").save_pretrained(
        folder
    )
    assert kernels(run(*given, "--model", folder, "--format", "int4-g8+fp8-g4")) == (5, 5)
    assert kernels(run(*given, "--model", folder))[1] < 5  # int8-g4
    config = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    latent_plan(2, config).save(folder / "plan.safetensors")
    count, there = kernels(run(*given, "--plan", folder / "plan.safetensors"))
    assert there < count
    latent_plan(2, AutoConfig.from_pretrained(folder).to_dict()).save(folder / "own.safetensors")
    of_model = kernels(run(*given, "--model", folder, "--plan", folder / "own.safetensors"))
    assert count > of_model[0] == of_model[1] > 5  # of 16 heads; a layer is kept in 16 bit
    both = run(*given, "--model", folder, "--plan", folder / "plan.safetensors")
    assert both.exit_code == 2 and "the plan was made for a 'deepseek_v3' model" in both.stderr
    for format_, message in (
        ("int8+int8", "int8 latents of 512 elements have no CUDA kernel of MLA"),
        ("int8/int4", "'int8/int4'"),
    ):
        refused = run(*given, "--model", folder, "--format", format_)
        assert refused.exit_code == 2 and message in refused.stderr
    refused = run(*given, "--model", MODEL, "--format", "int8+int4")
    assert refused.exit_code == 2 and "int8+int4" in refused.stderr


def test_what_does_not_go_together_is_told() -> None:
    for args, message in (
        ((), "torch finds no GPU here: say which one by --arch"),
        (("--arch", "sm_70"), "'sm_70' is not one of"),
        (("--plan", __file__, "--format", "int4"), "--plan says the formats"),
        (("--arch", "sm_90", "--q-heads", "7", "--kv-heads", "3"), "7 query heads do not fit 3 KV"),
        (("--model", ".", "--head-dim", "64"), "--head-dim is the model's: leave it out"),
        (("--plan", __file__, "--kv-heads", "8"), "--kv-heads is the plan's: leave it out"),
        (("--format", "int8+bf16", "--head-dim", "64"), "--head-dim is of K and V, and these are "),
        (("--format", "int8+bf16", "--arch", "sm_90", "--soft-cap"), "--soft-cap applies to rows"),
    ):
        result = run(*args)
        assert result.exit_code == 2 and message in result.stderr, args


@pytest.mark.filterwarnings("ignore:the table of measured plans")  # read once a process
def test_a_folder_that_cannot_be_written_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("KVQUANT_CACHE_DIR", str(folder / "file"))
    with pytest.warns(RuntimeWarning, match="KVQUANT_CACHE_DIR"):
        result = run("--arch", "sm_90")
    assert result.exit_code == 2 and "let KVQUANT_CACHE_DIR name a folder" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("begin", ["in time", "late"])
def test_compilers_end_with_a_command_that_is_killed(folder: Path, begin: str) -> None:
    """Such as a command that had no memory left; after they began, and before."""
    pids = folder / "pids"
    pids.mkdir()
    compiler = f"""
import os, pathlib, sys, time
from kvquant.kernels.cuda.runtime import compile as compiling, compile_pool
def wait(spec=None, arch=None, is_over=lambda: False):
    pathlib.Path({str(pids)!r}, str(os.getpid())).touch()
    end = time.monotonic() + 100
    while time.monotonic() < end and not is_over():
        time.sleep(0.1)
if {begin == "late"}:
    wait(is_over=lambda: os.getppid() != int(sys.argv[1]))
compiling.compile_spec = wait
compile_pool.compile_alone()
"""
    command = f"""
from kvquant.cli.main import main
from kvquant.kernels.cuda.runtime import compile_pool
compile_pool.ALONE = {compiler!r}
main(["warmup", "--arch", "sm_90", "--batch", "1"])
"""
    paths = os.pathsep.join(path for path in sys.path if path)
    env = os.environ | {"PYTHONPATH": paths}
    with subprocess.Popen([sys.executable, "-c", command], env=env) as warmup:
        wait_for(lambda: any(pids.iterdir()))
        warmup.kill()
    wait_for(lambda: not any(is_running(path.name) for path in pids.iterdir()))


def wait_for(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


def is_running(pid: str) -> bool:
    try:
        state = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_every_architecture_has_a_gpu() -> None:
    assert tuple(GPUS) == ARCHS
