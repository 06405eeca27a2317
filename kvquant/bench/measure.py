"""Times of a case and of torch's attention on the 16-bit cache, as plain data and as a table."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..text import Column, number, render_table
from .cases import LATENT_SCALE, Case, Inputs, check, make_inputs
from .timer import GIVE_UP, Call, Machine, Timer

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def measure(case: Case, timer: Timer, machine: Machine) -> dict[str, Any]:
    """Check a case, then time it beside torch's attention on a 16-bit cache of the same shape.

    Returns:
        The case and its figures, as time_figures makes them. "error" is relative L2. "sdpa" has the
        figures of torch's fastest call, its name, and "ratio", torch's time divided by ours. "sdpa"
        is empty if no call of torch's runs.

    Raises:
        KVQuantError: the result is wrong.
        torch.OutOfMemoryError: the rows do not fit the GPU.
    """
    exact, inputs = case.exact, rotated_inputs(case, timer)
    error, ours = check(case, inputs[0]), [one.attend for one in inputs]
    peers: dict[str, list[Call]] = {}
    try:
        peers = running(torch_calls(exact, rotated_inputs(exact, timer)))
    except torch.OutOfMemoryError:  # those rows are larger
        pass
    *alone, us = timer.alone_each([*(calls[0] for calls in peers.values()), ours[0]])
    if us == math.inf:
        raise torch.OutOfMemoryError
    in_a_row = timer.in_a_row(ours) if timer.rotation(case.nbytes) else None
    sdpa: dict[str, Any] = {}
    best, name = min(zip(alone, peers, strict=True), default=(math.inf, ""))
    if best < math.inf:
        sdpa = {"name": name, "ratio": best / us, "in_a_row_ratio": None}
        row = None
        if timer.rotation(exact.nbytes):
            near = [one for one, t in zip(peers, alone, strict=True) if t <= GIVE_UP * best]
            row, sdpa["in_a_row_name"] = min((timer.in_a_row(peers[one]), one) for one in near)
            sdpa["in_a_row_ratio"] = in_a_row and row / in_a_row
        sdpa |= time_figures(exact, best, row, machine)
    figures = case_figures(case) | time_figures(case, us, in_a_row, machine)
    return figures | {"error": error, "sdpa": sdpa}


def rotated_inputs(case: Case, timer: Timer) -> list[Inputs]:
    """Inputs of a case that outgrow the L2 cache together, or one where they cannot."""
    return make_inputs(case, max(timer.rotation(case.nbytes), 1), timer.device)


def torch_calls(case: Case, inputs: Sequence[Inputs]) -> dict[str, list[Call]]:
    """torch's ways to attend to a 16-bit cache: by name, a call for each of the inputs.

    scaled_dot_product_attention folds a KV head's query heads into its queries, or has enable_gqa:
    on a GPU by each backend, on a CPU also in float32. Another way is two products and a float32
    softmax.
    """
    found: defaultdict[str, list[Call]] = defaultdict(list)
    sm_scale = LATENT_SCALE if case.is_latent else case.head_dim**-0.5
    ways: dict[str, Any] = BACKENDS if inputs[0].q.is_cuda else {"16 bit": None, "float32": None}
    for one in inputs:
        (segment,) = one.segments
        k = segment.k_rows.view(case.dtype)[:, :, : case.seq_len]
        v = k if case.is_latent else segment.v_rows.view(case.dtype)[:, :, : case.seq_len]
        tensors = one.q[:, :, None], one.q.unflatten(1, (case.num_kv_heads, -1)), k, v
        for name, backend in ways.items():
            each = [x.float() for x in tensors] if name == "float32" else tensors
            q, folded, k, v = each[0], each[1], each[2], each[3][..., : case.v_format.head_dim]
            found[f"{name}, folded"].append(partial(sdpa, backend, folded, k, v, sm_scale))
            if not case.is_latent:  # it would copy K and V for each head
                found[f"{name}, gqa"].append(partial(sdpa, backend, q, k, v, sm_scale))
        _, q, k, v = tensors
        v = v[..., : case.v_format.head_dim]
        found["matmul"].append(partial(matmul_attention, q, k, v, sm_scale))
    return dict(found)


def sdpa(
    backend: SDPBackend | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float
) -> torch.Tensor:
    """scaled_dot_product_attention by one backend, or by torch's choice."""
    grouped = q.shape[1] != k.shape[1]
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, scale=sm_scale, enable_gqa=grouped)


def matmul_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float
) -> torch.Tensor:
    """Attention by two products of [batch, num_kv_heads, ..., head_dim]."""
    scores = (q @ k.transpose(-1, -2)).float() * sm_scale
    return scores.softmax(-1).to(q.dtype) @ v


def running(calls: dict[str, list[Call]]) -> dict[str, list[Call]]:
    """Those that run here: a backend may reject a shape, a call may need too much memory."""
    found = {}
    for name, one in calls.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns at length why a backend cannot
            try:
                one[0]()
            except RuntimeError:
                continue
        found[name] = one
    return found


def case_figures(case: Case) -> dict[str, Any]:
    """A case as plain data."""
    found = asdict(case) | {"k_format": str(case.k_format), "v_format": str(case.v_format)}
    words = {"dtype": str(case.dtype).removeprefix("torch."), "name": case.name}
    return found | words | {"head_dim": case.head_dim, "nbytes": case.nbytes}


def time_figures(
    case: Case, alone: float, in_a_row: float | None, machine: Machine
) -> dict[str, float | None]:
    """Microseconds, alone and in a row; GB/s of rows, and percent of the peak bandwidth."""
    found: dict[str, float | None] = {}
    for prefix, us in (("", alone), ("in_a_row_", in_a_row)):
        speed = None if us is None else case.nbytes / us / 1e3
        found[f"{prefix}us"], found[f"{prefix}gb_per_s"] = us, speed
        found[f"{prefix}roof_percent"] = speed and 100 * speed / machine.read_gb_per_s
    return found


def render_machine(machine: Machine) -> str:
    """The device, the versions and the peak bandwidth."""
    versions = f"{machine.device}, {machine.backend}, torch {machine.torch}"
    return f"{versions}:\npeak bandwidth {machine.read_gb_per_s:.0f} GB/s"


def render_results(results: Sequence[dict[str, Any]]) -> str:
    """A table of what measure returned; without times in a row where none has one."""
    has_rows = any(one["in_a_row_us"] for one in results)
    columns = [Column("format", left=True), *map(Column, ("batch", "heads", "T"))]
    columns += [Column(title, part=1) for title in ("us", "GB/s", "peak")]
    columns += [Column(title, part=1) for title in ("in a row\nus", "peak") if has_rows]
    columns += [Column("error", part=1), Column("torch", left=True, part=2)]
    columns += [Column(title, part=2) for title in ("us", "ratio")]
    columns += [Column(title, part=2) for title in ("in a row\nus", "ratio") if has_rows]
    lines = []
    for one in results:
        heads, peer = f"{one['num_q_heads']}:{one['num_kv_heads']}", one["sdpa"]
        cells = [one["name"], str(one["batch"]), heads, str(one["seq_len"])]
        cells += [f"{one['us']:,.1f}", f"{one['gb_per_s']:,.1f}", f"{one['roof_percent']:.0f} %"]
        if has_rows:
            cells.append(number(one["in_a_row_us"], ",.1f"))
            cells.append(number(one["in_a_row_roof_percent"], ".0f", " %"))
        cells += [f"{one['error']:.1e}", peer.get("name", "none runs")]
        for kind in ("", "in_a_row_") if has_rows else ("",):
            cells.append(number(peer.get(f"{kind}us"), ",.1f"))
            cells.append(number(peer.get(f"{kind}ratio"), ".2f", "x"))
        lines.append(cells)
    return render_table(columns, lines)
