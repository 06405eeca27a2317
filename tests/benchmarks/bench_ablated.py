"""The decode kernel without each of its techniques on a GPU: times in a row, and bank conflicts.

Run by hand: python tests/benchmarks/bench_ablated.py --json FILE [--case TEXT ...]
First, beside other work: the same with --compile.

The product has no switch for this: `without` changes the text of a module, or how rows are padded,
in this process only. A text that is not there any more ends the script. Before a kernel is timed,
its machine code must differ from the whole kernel's, and its output is compared with the reference.
All kernels of a case follow the plan of the whole one. ncu, if it is there, counts bank conflicts
of one call of each kernel; what it prints stays beside FILE (.csv).
"""

from __future__ import annotations

import csv
import hashlib
import inspect
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import click
import torch
from measuring import Times, begin, figures_of

from kvquant import __version__
from kvquant.bench.cases import Case, check, list_cases, make_inputs
from kvquant.bench.measure import case_figures, rotated_inputs
from kvquant.bench.timer import Timer, describe_machine
from kvquant.cli.console import write_json
from kvquant.kernels.cuda.decode import launch
from kvquant.kernels.cuda.decode.plan import Plan, fit, plan, with_workers
from kvquant.kernels.cuda.decode.spec import DecodeSpec
from kvquant.kernels.cuda.decode.tuned import measured_plans
from kvquant.kernels.cuda.device.row_layout import UNIT, StagedRow
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.kernels.cuda.runtime.compile import load_cubin
from kvquant.kernels.cuda.runtime.compile_pool import cores
from kvquant.kernels.cuda.runtime.launch import GPU
from kvquant.kernels.disk_cache import cache_folder
from kvquant.rehearsal import rehearse
from kvquant.rows.call import AttentionCall

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from forced_plan import forced  # of the tests
from machine_code import sections

PAD = "padded shared memory"
# of a technique: a module of decode/, and texts of it, how often each stands there, and what takes
# its place
EDITS: dict[str, tuple[str, tuple[tuple[str, int, str], ...]]] = {
    "unrolled loads": (
        "copies",
        (
            (  # a second exit, and a count that LLVM does not know, so that it unrolls by no number
                "        for i in range(STEPS):\n",
                2,
                "        for i in range(int32(int32(STEPS) * int32(cuda.blockDim.z))):\n"
                "            if i >= int32(int32(STEPS) * int32(cuda.blockDim.y)):\n"
                "                break\n",
            ),
        ),
    ),
    "V prefetch": (
        "mainloop",
        (
            (
                "    meet = _make_meet(SHARERS)\n",
                1,
                "    meet, wait_for_values = _make_meet(SHARERS), wait_copies[1]\n",
            ),
            *(
                (
                    "                stage = uint32(stage + uint32(K_TILE))\n"
                    f"                copy_v(stage, v_base, where, asked, {end}, v_outer, v_row, "
                    "around, mask)\n",
                    1,
                    "",
                )
                for end in ("limit", "end")
            ),
            (
                "            meet(of_ring)\n            following = ",
                1,
                "            meet(of_ring)\n"
                "            here = locate(first, end, index, shift)\n"
                "            stage = uint32(ring + current * uint32(STAGE_BYTES) + "
                "uint32(K_TILE))\n"
                "            copy_v(stage, v_base, here, first, end, v_outer, v_row, "
                "around, mask)\n"
                "            commit_copies()\n"
                "            following = ",
            ),
            (
                "            if V_REALIGNED:\n",
                1,
                "            wait_for_values()\n"
                "            meet(of_ring)\n"
                "            if V_REALIGNED:\n",
            ),
        ),
    ),
    "lazy rescale": ("mainloop", (("        grown = False\n", 1, "        grown = True\n"),)),
}
WHOLE = ""
TECHNIQUES = ("unrolled loads", "V prefetch", PAD, "lazy rescale")
# rows, head_dim; the last three have a pad. Sequences, query heads, KV heads, tokens
ROWS = (("int4-g4", 128), ("int4", 80), ("int8", 112), ("bf16", 128))
SHAPES = ((256, 8, 1, 8192), (64, 32, 8, 8192), (8, 32, 8, 32768))
ROUNDS = 3  # of all kernels of a case, one after another: the median counts
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared"
# what ncu counts: conflicts, and accesses of 128 bytes at most; the last two if it knows the names
COUNTED = (
    CONFLICTS,
    f"{CONFLICTS}_op_ld",
    f"{CONFLICTS}_op_st",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared",
    *(f"sm__sass_{CONFLICTS.replace('__', '_')}_op_{name}" for name in ("ldsm", "ldgsts")),
)


def list_all() -> list[Case]:
    """The cases by default."""
    return [
        case
        for batch, q_heads, kv_heads, tokens in SHAPES
        for name, dim in ROWS
        for case in list_cases(
            [name],
            batches=[batch],
            seq_lens=[tokens],
            num_q_heads=q_heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
        )
    ]


def name_of(case: Case) -> str:
    """Such as "int4, head_dim 80, 256 x 8:1 x 8192"."""
    return f"{case.name}, head_dim {case.head_dim}, {case.batch} x {case.heads} x {case.seq_len}"


def edited(technique: str) -> ModuleType:
    """The module that has a technique, without it; SystemExit if a text is not there any more."""
    name, edits = EDITS[technique]
    package = launch.__name__.rpartition(".")[0]
    module = __import__(f"{package}.{name}", fromlist=["_"])
    text = inspect.getsource(module)
    for old, count, new in edits:
        if text.count(old) != count:
            raise SystemExit(
                f"{technique}: decode/{name}.py has this text {text.count(old)} times in place of "
                f"{count}: correct EDITS of {Path(__file__).name}\n{old}"
            )
        text = text.replace(old, new)
    made = ModuleType(module.__name__)
    made.__package__ = package
    exec(compile(text, f"{name}.py without {technique}", "exec"), made.__dict__)
    return made


@contextmanager
def without(technique: str) -> Iterator[None]:
    """Build and launch decode kernels without a technique; WHOLE leaves none out.

    Cubins lie in a folder of their own, whose name changes with this script.
    """
    from kvquant.kernels.cuda.decode import kernel, mainloop  # import numba

    with ExitStack() as stack:
        fit.cache_clear()  # it depends on the padding
        stack.callback(fit.cache_clear)
        stack.enter_context(mock.patch.object(runtime, "_kernels", {}))
        if technique != WHOLE:
            script = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
            folder = cache_folder() / f"ablated-{script}" / technique.replace(" ", "-")
            variable = {"KVQUANT_CACHE_DIR": str(folder)}
            stack.enter_context(mock.patch.dict(os.environ, variable))
        if technique == PAD:
            tight = lambda self, units, even: UNIT * units  # noqa: E731
            stack.enter_context(mock.patch.object(StagedRow, "_spread", tight))
        elif technique != WHOLE:
            made = edited(technique)
            in_loop = EDITS[technique][0] == "mainloop"
            home: Any = kernel if in_loop else mainloop
            name = "make_attend" if in_loop else "make_copy"
            stack.enter_context(mock.patch.object(home, name, getattr(made, name)))
        yield


def planned(case: Case, gpu: GPU) -> tuple[DecodeSpec, Plan]:
    """The kernel of a case and the plan that a call takes."""
    with rehearse(gpu):
        (inputs,) = make_inputs(case, 1, torch.device("meta"))
        call = AttentionCall(inputs.q, inputs.segments)
        work = launch.describe(call, may_widen=False)
    chosen = plan(work.spec, gpu, work.units, work.capacities, rows=measured_plans())
    spec = replace(work.spec, warps=chosen.warps, stages=chosen.stages)
    return spec, with_workers(chosen, fit(spec, gpu), work.units, work.capacities)


def techniques_of(spec: DecodeSpec) -> tuple[str, ...]:
    """WHOLE, and what can be left out; padding only where rows have any."""
    bytes_of = [spec.ring_bytes(spec.first)]
    with without(PAD):
        bytes_of.append(spec.ring_bytes(spec.first))
    padded = bytes_of[0] != bytes_of[1]
    return (WHOLE, *(one for one in TECHNIQUES if one != PAD or padded))


def machine_code(technique: str, spec: DecodeSpec, arch: str) -> bytes:
    """The instructions of a kernel, which is compiled if it is not on the disk."""
    with without(technique):
        code = load_cubin(spec, arch).code
    return b"".join(
        code[start : start + length]
        for _, flags, start, length in sections(code)
        if flags & 4  # it holds instructions
    )


def compile_kernels(specs: Sequence[DecodeSpec], arch: str) -> None:
    """Compile all kernels at a time; AssertionError if leaving something out changes nothing."""
    wanted = [(one, spec) for spec in dict.fromkeys(specs) for one in techniques_of(spec)]
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(cores(), len(wanted)), spawned) as pool:
        columns = zip(*wanted, strict=True)
        codes = dict(
            zip(wanted, pool.map(machine_code, *columns, [arch] * len(wanted)), strict=True)
        )
    for technique, spec in wanted:
        if technique != WHOLE:
            same = codes[technique, spec] == codes[WHOLE, spec]
            assert not same, f"without {technique}: the same machine code of {spec}"


@contextmanager
def running(technique: str, chosen: Plan) -> Iterator[None]:
    """Let calls follow a plan without a technique."""
    with without(technique), forced(chosen):
        yield


def measure(
    case: Case, spec: DecodeSpec, chosen: Plan, timer: Timer
) -> list[tuple[str, float, Times]]:
    """Check and time the kernels of a case, in turns: techniques left out, errors, times."""
    inputs, techniques = rotated_inputs(case, timer), techniques_of(spec)
    calls, found = [one.attend for one in inputs], []
    errors, alone = dict[str, float](), dict[str, float]()
    times: dict[str, list[float]] = {one: [] for one in techniques}
    for _ in range(ROUNDS):
        for one in techniques:
            with running(one, chosen):
                if one not in errors:
                    errors[one], alone[one] = check(case, inputs[0]), timer.alone(calls[0])
                times[one].append(timer.in_a_row(calls))
    for one in techniques:
        middle = statistics.median(times[one])
        print(f"{name_of(case):45}{title(one):32}{middle:9.1f} us", flush=True)
        found.append((one, errors[one], Times(alone[one], middle)))
    return found


def title(technique: str) -> str:
    return f"without {technique}" if technique else "all techniques"


def call_once(cases: Sequence[tuple[Case, DecodeSpec, Plan]]) -> None:
    """Launch each kernel once, in order: what ncu counts."""
    device = torch.device("cuda", torch.cuda.current_device())
    for case, spec, chosen in cases:
        (inputs,) = make_inputs(case, 1, device)
        for one in techniques_of(spec):
            with running(one, chosen):
                inputs.attend()
                torch.cuda.synchronize()


def count(file: Path, names: Sequence[str]) -> list[dict[str, int]]:
    """What ncu counts of each kernel of a process with --count; it prints to the file."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise FileNotFoundError("ncu is not installed here")
    asked = [ncu, "--query-metrics", "--chips", "gh100"]
    known = subprocess.run(asked, capture_output=True, text=True).stdout.split()
    counted = [f"{one}.sum" for one in COUNTED if one in known or one.startswith("l1tex")]
    command = [ncu, "--metrics", ",".join(counted), "--clock-control", "none", "--csv"]
    command += ["--page", "raw", "--print-units", "base", "--log-file", str(file)]
    command += ["--kernel-name-base", "mangled", "--kernel-name", "regex:decode_one"]
    command += [sys.executable, __file__, "--count"]
    for name in names:
        command += ["--case", name]
    subprocess.run(command, check=True)
    return read_counts(file.read_text(encoding="utf-8"))


def read_counts(text: str) -> list[dict[str, int]]:
    """Of what ncu prints: the counted numbers of each kernel, in the order of launches."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    rows = [row for row in csv.DictReader(lines[start:]) if (row["ID"] or "").isdecimal()]
    return [
        {
            name.removesuffix(".sum"): int(float(value.replace(",", "")))
            for name, value in row.items()
            if name.endswith(".sum") and value[:1].isdecimal()
        }
        for row in rows
    ]


@click.command()
@click.option("--case", "texts", multiple=True, help="Only cases whose names have this text.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--compile", "is_compiled", is_flag=True, help="Compile the kernels, and end.")
@click.option("--count", "is_counted", is_flag=True, hidden=True)
def main(
    texts: tuple[str, ...], json_file: Path | None, is_compiled: bool, is_counted: bool
) -> None:
    """Time each kernel of each case; print a line for each."""
    wanted = [one for one in list_all() if not texts or any(text in name_of(one) for text in texts)]
    gpu = runtime.gpu_of(torch.cuda.current_device())
    cases = [(one, *planned(one, gpu)) for one in wanted]
    if is_counted:
        call_once(cases)
        return
    compile_kernels([spec for _, spec, _ in cases], gpu.arch)
    if is_compiled:
        return
    timer = begin()
    machine, kernels = describe_machine(timer, __version__), list[dict[str, Any]]()
    for case, spec, chosen in cases:
        for technique, error, times in measure(case, spec, chosen, timer):
            told = {"kernel": title(technique), **asdict(chosen), "error": error}
            kernels.append(case_figures(case) | told | figures_of(case, times, machine))
        write_json(json_file, {"machine": asdict(machine), "kernels": kernels})
    file = (json_file or Path("ablated.json")).with_suffix(".csv")
    counts = count(file, [name_of(one) for one in wanted])
    for kernel, counted in zip(kernels, counts, strict=True):
        kernel["counted"] = counted
    write_json(json_file, {"machine": asdict(machine), "kernels": kernels})


if __name__ == "__main__":
    main()
