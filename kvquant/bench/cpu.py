"""Speed of the kernels on this machine, beside torch's own ways to do the same.

Every case is checked before it is timed: attention against the float64 reference on the
dequantized rows, rows against the plain torch reference, byte for byte. Times are medians of single
calls, ours and the peers' in turn, so that all see the same machine and find the caches as cold.
"""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch
import torch.nn.functional as F

from ..errors import KVQuantError
from ..ops.quantize import dequantize_rows, quantize_rows
from ..rows.format import RowFormat
from ..text import Column, render_table
from .cases import Case, check, make_inputs

FORMATS = ("int4-g4", "int4", "int3", "int2", "int8", "fp8", "bf16")
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Machine:
    """The CPU, what ran on it and when, and the bandwidth of its memory as measured, GB/s."""

    cpu: str
    threads: int
    torch: str
    kvquant: str
    date: str
    read_gb_per_s: float


class DecodeResult(TypedDict):
    """One case of decode attention; times in milliseconds."""

    format: str
    batch: int
    num_q_heads: int
    num_kv_heads: int
    seq_len: int
    error: float
    ms: float
    gb_per_s: float
    sdpa: str
    sdpa_ms: float
    sdpa_ratio: float
    matmul_ms: float
    matmul_ratio: float


class RowsResult(TypedDict):
    """One format of quantize_rows and dequantize_rows; times in milliseconds."""

    format: str
    quantize_ms: float
    quantize_ratio: float
    dequantize_ms: float
    dequantize_ratio: float


def time_in_turn(
    calls: Sequence[Callable[[], object]],
    seconds: float,
    pick: Callable[[list[float]], float] = statistics.median,
) -> list[float]:
    """Milliseconds of each call, the median or another pick; calls take turns till time is up."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while not times[0] or time.perf_counter() < end:
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return [1e3 * pick(taken) for taken in times]


def read_bandwidth(seconds: float = 1.0) -> float:
    """GB/s at which torch sums 1 GiB of float32 on the CPU."""
    x = torch.zeros(1 << 28, dtype=torch.float32, device="cpu")
    return x.nbytes / time_in_turn([x.sum], seconds)[0] / 1e6


def describe_machine(version: str) -> Machine:
    """Measure the bandwidth of the memory and name what else matters."""
    return Machine(
        cpu=processor_name(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        kvquant=version,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        read_gb_per_s=read_bandwidth(),
    )


def processor_name() -> str:
    """The processor's name as Linux tells it; the architecture where it tells none (Arm).

    Virtual machines cut names short: family and model tell the generation all the same.

    Example:
        AMD EPYC (family 25, model 17)
    """
    text = CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""
    first = text.partition("\n\n")[0]  # processors are paragraphs
    pairs = (line.partition(":") for line in first.splitlines())
    facts = {key.strip(): value.strip() for key, _, value in pairs}
    name = facts.get("model name") or platform.machine()
    if "cpu family" in facts and "model" in facts:
        name += f" (family {facts['cpu family']}, model {facts['model']})"
    return name


def bench_decode(case: Case, seconds: float = 3.0) -> DecodeResult:
    """Time attention on the CPU against torch's on the same values in 16 and in 32 bit.

    The peers: scaled_dot_product_attention with the query group folded into q_len or with
    enable_gqa, in float32 and in bfloat16 (the fastest of the four counts), and apart from it the
    same attention as two batched matmuls and a softmax in bfloat16.

    Args:
        case: with packed rows, without pages.
        seconds: how long all of them are timed together.

    Raises:
        KVQuantError: the result differs from the reference by more than MAX_ERROR of the case's
            dtype; nothing is timed then.
    """
    (inputs,) = make_inputs(case, 1, torch.device("cpu"))
    error = check(case, inputs)
    (segment,) = inputs.segments
    k = dequantize_rows(segment.k_rows, case.k_format)
    v = dequantize_rows(segment.v_rows, case.v_format)
    ours = inputs.attend
    peers: dict[str, Callable[[], object]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        kd, vd = k.to(dtype), v.to(dtype)
        q = inputs.q.to(dtype)
        folded = q.view(case.batch, case.num_kv_heads, -1, case.head_dim)
        word = str(dtype).removeprefix("torch.")
        peers[f"folded {word}"] = _sdpa(folded, kd, vd, enable_gqa=False)
        peers[f"enable_gqa {word}"] = _sdpa(q[:, :, None], kd, vd, enable_gqa=True)
    peers["matmul bfloat16"] = lambda: (
        torch.softmax(folded @ kd.transpose(-1, -2) * case.head_dim**-0.5, dim=-1) @ vd
    )
    ms, *peer_ms = time_in_turn([ours, *peers.values()], seconds)
    *sdpa_ms, matmul_ms = peer_ms
    best = min(range(len(sdpa_ms)), key=sdpa_ms.__getitem__)
    return DecodeResult(
        format=case.name,
        batch=case.batch,
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        seq_len=case.seq_len,
        error=error,
        ms=ms,
        gb_per_s=case.nbytes / ms / 1e6,
        sdpa=list(peers)[best],
        sdpa_ms=sdpa_ms[best],
        sdpa_ratio=sdpa_ms[best] / ms,
        matmul_ms=matmul_ms,
        matmul_ratio=matmul_ms / ms,
    )


def bench_rows(
    fmt: str, *, shape: tuple[int, ...] = (8, 4096, 128), seconds: float = 2.0
) -> RowsResult:
    """Time quantize_rows and dequantize_rows, numba against plain torch, on float32 of a shape.

    The fastest call of each counts: a new result of 16 MiB costs either of them up to 3 ms when the
    system has to find pages for it.

    Raises:
        KVQuantError: the two differ in a byte or a value; nothing is timed then.
    """
    row_format = RowFormat.parse(fmt, shape[-1])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    rows = quantize_rows(x, row_format, backend="reference")
    values = dequantize_rows(rows, row_format, backend="reference")
    if not torch.equal(rows, quantize_rows(x, row_format, backend="cpu")) or not torch.equal(
        values, dequantize_rows(rows, row_format, backend="cpu")
    ):
        raise KVQuantError(f"{fmt}: the backends differ: not timed")
    both = ("cpu", "reference")
    quantize_ms, torch_quantize_ms = time_in_turn(
        [partial(quantize_rows, x, row_format, backend=backend) for backend in both], seconds, min
    )
    dequantize_ms, torch_dequantize_ms = time_in_turn(
        [partial(dequantize_rows, rows, row_format, backend=backend) for backend in both],
        seconds,
        min,
    )
    return RowsResult(
        format=fmt,
        quantize_ms=quantize_ms,
        quantize_ratio=torch_quantize_ms / quantize_ms,
        dequantize_ms=dequantize_ms,
        dequantize_ratio=torch_dequantize_ms / dequantize_ms,
    )


DECODE = (
    Column("format", left=True),
    *map(Column, ("batch", "heads", "T")),
    *(Column(title, part=1) for title in ("ms", "GB/s", "error")),
    Column("best SDPA", left=True, part=2),
    *(Column(title, part=2) for title in ("ms", "ratio", "matmul\nms", "ratio")),
)
ROWS = (
    Column("format", left=True),
    *map(Column, ("quantize\nms", "against\ntorch", "dequantize\nms", "against\ntorch")),
)


def render_machine(machine: Machine) -> str:
    """Two lines for the head of the output."""
    versions = f"{machine.threads} threads, torch {machine.torch}"
    return f"{machine.cpu}\n{versions}, peak bandwidth {machine.read_gb_per_s:.1f} GB/s"


def render_decode(results: Sequence[DecodeResult]) -> str:
    """A table of decode results."""
    rows = [
        [
            *(r["format"], str(r["batch"]), f"{r['num_q_heads']}:{r['num_kv_heads']}"),
            *(str(r["seq_len"]), f"{r['ms']:.3f}", f"{r['gb_per_s']:.1f}", f"{r['error']:.1e}"),
            *(r["sdpa"], f"{r['sdpa_ms']:.3f}", f"{r['sdpa_ratio']:.1f}x"),
            *(f"{r['matmul_ms']:.3f}", f"{r['matmul_ratio']:.1f}x"),
        ]
        for r in results
    ]
    return render_table(DECODE, rows)


def render_rows(results: Sequence[RowsResult]) -> str:
    """A table of quantize and dequantize results."""
    rows = [
        [
            *(r["format"], f"{r['quantize_ms']:.2f}", f"{r['quantize_ratio']:.1f}x"),
            *(f"{r['dequantize_ms']:.2f}", f"{r['dequantize_ratio']:.1f}x"),
        ]
        for r in results
    ]
    return render_table(ROWS, rows)


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, enable_gqa: bool
) -> Callable[[], object]:
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa)
