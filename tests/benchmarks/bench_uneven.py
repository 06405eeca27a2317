"""Times of decode attention to sequences of very unequal lengths, and to sequences far shorter than
their room.

Run by hand: python tests/benchmarks/bench_uneven.py --json uneven.json. With --values 0,1,2,3 the
script compares prices of a unit's start: a value is UNIT_STEPS of kernels/cuda/decode/spec.py, the
steps that a unit counts besides those of its tokens (schedule.py). Without --values the script
takes the value in the sources. To compare two checkouts, run it twice on one machine, each time
with another checkout's folder first in PYTHONPATH.

Rows are INT4 in 4 groups, with 32 query heads on 8 KV heads of 128. Each value has a process and a
folder of compiled kernels of its own. All processes compile at once, and then take times one after
another. Outputs are compared with float64 first. A time is that of a single call inside a CUDA
graph, with the L2 cache overwritten before it: a median, in us. "evenly" is the time of as many
tokens in all, equally many in each sequence, without more room than they need. It is measured with
the first of the values. In the last lines all lengths are equal: there the difference to "evenly"
is what spare capacity costs. The very last line has no spare capacity.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from measuring import begin

from kvquant import RowFormat, __version__
from kvquant.bench.cases import RAGGED, ROOM, Case, check, make_inputs, uneven
from kvquant.bench.timer import describe_machine
from kvquant.kernels.cuda.decode import plan, schedule
from kvquant.kernels.cuda.decode.spec import UNIT_STEPS

FORMAT = RowFormat.parse("int4-g4", 128)
# lengths of sequences, and the room of each
LENGTHS = (
    (uneven(128, 1, 12345, 64), 12345),
    (uneven(128, 1, 12345, 64), ROOM),
    (uneven(64, 1, 12345, 64), 12345),
    (uneven(128, 8, 4096, 64), 4096),
    (uneven(256, 2, 8192, 32), 8192),
    *((lens, ROOM) for lens in RAGGED),
    ((160,) * 128, 12345),
    *(((tokens,) * 64, 16384) for tokens in (160, 512, 2048)),
    *(((tokens,) * 256, 16384) for tokens in (160, 512)),
    ((8192,) * 64, 8192),
)
CASES = [Case(FORMAT, FORMAT, len(lens), 32, 8, room, lens=lens) for lens, room in LENGTHS]
Times = dict[str, dict[str, float]]  # by case: "now" and "evenly"


@click.command()
@click.option("--values", default=str(UNIT_STEPS), help="UNIT_STEPS to measure, by commas.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the times to this file, in us.",
)
@click.option(
    "--alone",
    type=click.Choice(["compile", "time"]),
    help="Internal: only compile, or only time, in this process.",
)
def main(values: str, json_file: Path | None, alone: str | None) -> None:
    """Print a line per case, with a column per value."""
    wanted = [int(word) for word in values.split(",")]
    if alone is not None:
        for module in (plan, schedule):
            vars(module)["UNIT_STEPS"] = wanted[0]
        measured = compile_all() if alone == "compile" else take_times()
        if json_file is not None:
            json_file.write_text(json.dumps(measured), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as folder:
        for started in [start(value, "compile", Path(folder)) for value in wanted]:
            if started.wait():
                raise SystemExit(started.returncode)
        found = []
        for value in wanted:
            if code := start(value, "time", Path(folder)).wait():
                raise SystemExit(code)
            found.append(json.loads((Path(folder) / f"{value}.json").read_text("utf-8")))
    times: dict[int, Times] = {one: of["us"] for one, of in zip(wanted, found, strict=True)}
    print(f"{'UNIT_STEPS':44}" + "".join(f"{value:>9}" for value in wanted) + f"{'evenly':>9}")
    for name, first in times[wanted[0]].items():
        row = [times[value][name]["now"] for value in wanted] + [first["evenly"]]
        print(f"{name:44}" + "".join(f"{one:9.1f}" for one in row))
    if json_file is not None:
        figures = {"machine": found[0]["machine"], "us": times}
        json_file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def start(value: int, alone: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start the process of a value."""
    command = [sys.executable, __file__, "--values", str(value), "--alone", alone]
    command += ["--json", str(folder / f"{value}.json")]
    env = {**os.environ, "KVQUANT_CACHE_DIR": str(folder / f"kernels-{value}")}
    return subprocess.Popen(command, env=env, stdout=sys.stderr)


def compile_all() -> dict[str, Any]:
    """Run each case once, so that its kernels are compiled, and check the outputs."""
    for case in CASES:
        for one in {case, case.even}:
            (inputs,) = make_inputs(one, 1, torch.device("cuda"))
            check(one, inputs)
            del inputs
    return {}


def take_times() -> dict[str, Any]:
    """The times of all cases, and the machine."""
    timer, found = begin(), Times()
    for case in CASES:
        found[f"{case.lengths}, room for {case.seq_len}"] = times = {}
        for name, one in (("now", case), ("evenly", case.even)):
            (inputs,) = make_inputs(one, 1, torch.device("cuda"))
            times[name] = timer.alone(inputs.attend)
            del inputs
    return {"machine": asdict(describe_machine(timer, __version__)), "us": found}


if __name__ == "__main__":
    main()
