"""Speed of decode attention on a GPU, each case checked first, beside torch's own attention."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..ops.attention import attend_segments
from .cases import Case, Inputs, check, make_inputs
from .timer import Call, Timer

GIVE_UP = 2.0  # a peer this much slower than the best is not timed to the end
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Times:
    """Microseconds of a call, alone and in a row; None in a row if the inputs stay in L2."""

    alone: float
    in_a_row: float | None


@dataclass(frozen=True)
class Peer:
    """Torch's attention at its best: alone and in a row, which need not be the same backend.

    Attributes:
        name: what is fastest alone, such as "flash, folded".
        in_a_row_name: what is fastest in a row.
        times: of these two.
    """

    name: str
    in_a_row_name: str
    times: Times


@dataclass(frozen=True)
class Result:
    """A case: relative error, times, and torch's best on the 16-bit cache or why there is none."""

    case: Case
    error: float
    times: Times
    sdpa: Peer | str


def check_and_time(
    case: Case, inputs: Sequence[Inputs], timer: Timer, limit: float = math.inf
) -> tuple[float, Times]:
    """The relative error of a case, and its times; over a limit it is timed alone and roughly."""
    error = check(case, inputs[0])
    calls = [partial(attend_segments, one.q, one.segments) for one in inputs]
    alone = timer.alone(calls[0], limit)
    rotates = alone <= limit and timer.rotation(case.nbytes)
    return error, Times(alone, timer.in_a_row(calls) if rotates else None)


def rotated_inputs(case: Case, timer: Timer) -> list[Inputs]:
    """Inputs of a case that outgrow the L2 cache together, or one where they cannot."""
    return make_inputs(case, max(timer.rotation(case.nbytes), 1), timer.device)


def best_sdpa(case: Case, timer: Timer) -> Peer | str:
    """Time scaled_dot_product_attention on the 16-bit cache of a case's shape.

    Every backend is tried, with enable_gqa and with the query heads of a KV head folded into q_len.

    Returns:
        The fastest, or why there is none.
    """
    exact = case.exact
    alone: dict[str, float] = {}
    in_a_row: dict[str, float] = {}
    rotates = timer.rotation(exact.nbytes)
    why = "no backend takes it"
    try:
        candidates = _sdpa_calls(exact, timer)
    except torch.OutOfMemoryError:
        return f"{exact.nbytes / 1e9:.1f} GB do not fit"
    for name, calls in candidates.items():
        limit = GIVE_UP * min(alone.values(), default=math.inf)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says at length why a backend cannot
                us = timer.alone(calls[0], limit)
                if us <= limit:
                    in_a_row[name] = timer.in_a_row(calls) if rotates else math.inf
                    alone[name] = us
        except torch.OutOfMemoryError:
            why = f"{exact.nbytes / 1e9:.1f} GB leave no memory to work in"
        except RuntimeError:  # not with this backend
            continue
    if not alone:
        return why
    best, best_in_a_row = min(alone, key=alone.__getitem__), min(in_a_row, key=in_a_row.__getitem__)
    times = Times(alone[best], in_a_row[best_in_a_row] if rotates else None)
    return Peer(best, best_in_a_row, times)


def _sdpa_calls(case: Case, timer: Timer) -> dict[str, list[Call]]:
    inputs = [
        (one.q, *(rows.view(case.dtype) for rows in (segment.k_rows, segment.v_rows)))
        for one in rotated_inputs(case, timer)
        for segment in one.segments
    ]
    folded = (case.batch, case.num_kv_heads, -1, case.head_dim)
    forms: dict[str, list[Call]] = {
        "enable_gqa": [
            partial(F.scaled_dot_product_attention, q[:, :, None], k, v, enable_gqa=True)
            for q, k, v in inputs
        ],
        "folded": [
            partial(F.scaled_dot_product_attention, q.view(folded), k, v) for q, k, v in inputs
        ],
    }
    return {
        f"{name}, {form}": [partial(_with, backend, call) for call in calls]
        for name, backend in BACKENDS.items()
        for form, calls in forms.items()
    }


def _with(backend: SDPBackend, call: Call) -> object:
    with sdpa_kernel(backend):
        return call()


def measure(case: Case, timer: Timer, known: dict[Case, Peer | str]) -> Result:
    """Check and time a case, and torch's attention beside it.

    Args:
        case: what to measure.
        timer: takes the times, on its device.
        known: what torch's attention took on caches of other cases, or why it did not run; added
            to.

    Raises:
        KVQuantError: the result is not within the limits; nothing is timed then.
    """
    error, times = check_and_time(case, rotated_inputs(case, timer), timer)
    if case.exact not in known:
        known[case.exact] = best_sdpa(case, timer)
    return Result(case, error, times, known[case.exact])
