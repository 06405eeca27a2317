"""Which kernel of MLA decode is faster on a GPU: that for few heads, or that for many, in how many
splits.

Run by hand on Hopper: python tests/benchmarks/bench_mla.py. Each case is timed with the kernel for
few heads, and with that for many with several values of LEAST (kernels/cuda/mla/launch.py: tokens
of a block, at least; FILLED is 0, so that it is taken in any case). Kernels are compiled first, all
at a time. The first results are compared with float64, the others with them. Times are of one call
inside a CUDA graph, alone with the L2 cache overwritten. The best is marked *; the last columns are
what a call takes by itself, and how much more than the best that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import click
from measuring import relative_error

from kvquant import __version__
from kvquant.bench.cases import LATENT_DIM, Case, check, make_inputs, parse_formats, rehearse_case
from kvquant.bench.measure import render_machine
from kvquant.bench.timer import GraphTimer, describe_machine
from kvquant.cli.console import compile_kernels
from kvquant.kernels.cuda.mla import launch
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.kernels.cuda.runtime.warmup import kernels_of

FORMATS = "bf16", "int4-g8+fp8-g4", "int4-g8+int8-g4", "int8-g4", "fp8"
# sequences, tokens, heads
CASES = (
    *((64, 8192, heads) for heads in (16, 32, 64, 128)),
    *((64, 1024, heads) for heads in (16, 32, 128)),
    *((1, 131072, heads) for heads in (16, 64, 128)),
    *((1, 32768, heads) for heads in (16, 64)),
    *((4, 32768, 64), (8, 8192, 64)),
)
LEASTS = 256, 512, 1024, 2048
MOST_ERROR = 5e-3  # of outputs of both kernels against each other


def few_heads() -> dict[str, Any]:
    """Lets the launcher take the kernel for few heads."""
    return {"NARROW": dict.fromkeys(launch.NARROW, 2 * (1 << 30,))}


def many_heads(least: int) -> dict[str, Any]:
    """Lets it take the one for many."""
    return {"NARROW": dict.fromkeys(launch.NARROW, (0, 0)), "LEAST": least, "FILLED": 0.0}


WAYS = {"few": few_heads(), **{f"many {least}": many_heads(least) for least in LEASTS}}


@contextmanager
def choosing(how: dict[str, Any]) -> Iterator[None]:
    """Let launches be prepared anew, with other constants."""
    runtime._launches.clear()
    with mock.patch.multiple(launch, **how):
        yield
    runtime._launches.clear()


def rehearse(case: Case, how: dict[str, Any]) -> None:
    """Note the kernels of a case."""
    with mock.patch.multiple(launch, **how):
        rehearse_case(case)


@click.command()
@click.option("--format", "formats", multiple=True, default=FORMATS, show_default=True)
def main(formats: tuple[str, ...]) -> None:
    """Print a line per case."""
    timer = GraphTimer(0.005)
    cases = [
        Case(*parse_formats(name, LATENT_DIM), batch, heads, 1, tokens)
        for name in formats
        for batch, tokens, heads in CASES
    ]
    gpu = runtime.gpu_of(timer.device.index)
    if gpu.capability != launch.WARPGROUPS:
        raise click.ClickException(f"{gpu.name} has no kernel for many heads: use a Hopper GPU")
    calls = [partial(rehearse, case, how) for case in cases for how in WAYS.values()]
    compile_kernels(kernels_of(calls, gpu), gpu.arch)
    print(render_machine(describe_machine(timer, __version__)))
    print(f"{'rows':<17}{'batch':>6}{'tokens':>8}{'heads':>6}", end="")
    print("".join(f"{name:>13}" for name in WAYS) + f"{'itself':>10}{'more':>7}")
    for case in cases:
        measure(case, timer)


def measure(case: Case, timer: GraphTimer) -> None:
    """Check all ways of a case, time them and print a line."""
    (inputs,) = make_inputs(case, 1, timer.device)
    times: dict[str, float] = {}
    first = None
    for name, how in WAYS.items():
        with choosing(how):
            if first is None:
                check(case, inputs)
                first = inputs.attend()
            error = relative_error(inputs.attend(), first)
            assert error < MOST_ERROR, (case.title, name, error)
            times[name] = timer.alone(inputs.attend)
    runtime._launches.clear()
    itself = timer.alone(inputs.attend)
    best = min(times, key=times.__getitem__)
    cells = (f"{us:.1f}{'*' if name == best else ' '}" for name, us in times.items())
    print(
        f"{case.name:<17}{case.batch:>6}{case.seq_len:>8}{case.num_q_heads:>6}"
        + "".join(f"{cell:>13}" for cell in cells)
        + f"{itself:>10.1f}{itself / times[best] - 1:>7.0%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
