"""Speed of decode attention on a GPU, each case checked first, beside torch's own attention."""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

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
    """Microseconds of a call.

    Attributes:
        alone: with a cold L2 cache.
        in_a_row: of many on inputs that outgrow the L2 cache; None if they do not.
        eager: of many from Python, without a graph; None if that was not measured.
    """

    alone: float
    in_a_row: float | None
    eager: float | None = None


@dataclass(frozen=True)
class Peer:
    """Torch's attention at its best, of each time: that need not be the same backend.

    Attributes:
        name: what is fastest alone, such as "flash, folded".
        in_a_row_name: what is fastest in a row.
        times: of these two; eager of the fastest so.
    """

    name: str
    in_a_row_name: str
    times: Times


@dataclass(frozen=True)
class Result:
    """A case: relative error, times, and torch's best on the 16-bit cache or why there is none.

    Attributes:
        even: of a ragged case, what the same tokens take when they are spread evenly.
    """

    case: Case
    error: float
    times: Times
    sdpa: Peer | str
    even: Times | None = None


def check_and_time(
    case: Case, inputs: Sequence[Inputs], timer: Timer, limit: float = math.inf
) -> tuple[float, Times]:
    """The relative error of a case, and its times; over a limit it is timed alone and roughly."""
    error = check(case, inputs[0])
    calls = _our_calls(inputs)
    alone = timer.alone(calls[0], limit)
    rotates = alone <= limit and copies_of(case, timer)
    return error, Times(alone, timer.in_a_row(calls) if rotates else None)


def _our_calls(inputs: Sequence[Inputs]) -> list[Call]:
    return [partial(attend_segments, one.q, one.segments) for one in inputs]


def copies_of(case: Case, timer: Timer) -> int:
    """Inputs of a case that outgrow the L2 cache together; 0 for one call alone. Ragged batches are
    timed alone: each holds memory for many more tokens than a call reads."""
    return 0 if case.lens else timer.rotation(case.nbytes)


def rotated_inputs(case: Case, timer: Timer) -> list[Inputs]:
    """Inputs of a case that outgrow the L2 cache together, or one where they cannot."""
    return make_inputs(case, max(copies_of(case, timer), 1), timer.device)


def best_sdpa(case: Case, timer: Timer) -> Peer | str:
    """Time torch's attention on the 16-bit cache of a case's shape.

    Every backend of scaled_dot_product_attention is tried, with enable_gqa and with the query heads
    of a KV head folded into q_len. Of a ragged batch it reads as many places as the longest
    sequence has tokens, with a mask of those without; torch's varlen_attn and compiled
    flex_attention are tried too. Several queries have a causal mask, aligned to the lower right.

    Returns:
        The fastest, or why there is none.
    """
    exact = case.exact
    alone: dict[str, float] = {}
    in_a_row: dict[str, float] = {}
    eager: dict[str, float] = {}
    rotates = copies_of(exact, timer)
    gigabytes = replace(exact, lens=()).nbytes / 1e9
    why = "no backend takes it"
    try:
        candidates = _torch_calls(exact, timer)
    except torch.OutOfMemoryError:
        return f"{gigabytes:.1f} GB do not fit"
    for name, (backends, make) in candidates.items():
        limit = GIVE_UP * min(alone.values(), default=math.inf)
        try:
            with _quiet(), sdpa_kernel(backends):
                calls = make()
                us = timer.alone(calls[0], limit)
                if us <= limit:
                    in_a_row[name] = timer.in_a_row(calls) if rotates else math.inf
                    alone[name], eager[name] = us, timer.eager(calls)
        except torch.OutOfMemoryError:
            why = f"{gigabytes:.1f} GB leave no memory to work in"
        except RuntimeError:  # not with this backend
            continue
    if not alone:
        return why
    best, best_in_a_row = min(alone, key=alone.__getitem__), min(in_a_row, key=in_a_row.__getitem__)
    in_a_row_us = in_a_row[best_in_a_row] if rotates else None
    return Peer(best, best_in_a_row, Times(alone[best], in_a_row_us, min(eager.values())))


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch warns, and logs, at length why a backend cannot."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _torch_calls(
    case: Case, timer: Timer
) -> dict[str, tuple[list[SDPBackend], Callable[[], list[Call]]]]:
    """Ways to attend to 16-bit rows by torch: backends to allow, and what makes the calls."""
    inputs = [
        (one.q, *(rows.view(case.dtype) for rows in (segment.k_rows, segment.v_rows)))
        for one in rotated_inputs(case, timer)
        for segment in one.segments
    ]
    lens = torch.tensor(case.all_lens, dtype=torch.int32, device=timer.device)
    longest, mask = max(case.all_lens), None
    if min(case.all_lens) < longest:
        mask = torch.zeros(case.batch, 1, 1, longest, dtype=case.dtype, device=timer.device)
        places = torch.arange(longest, device=timer.device)
        mask.masked_fill_((places >= lens[:, None])[:, None, None], -math.inf)
    ratio, folded_mask = case.num_q_heads // case.num_kv_heads, mask
    if case.q_len > 1:  # each sees the tokens up to its own
        mask = torch.ones(case.q_len, longest, dtype=torch.bool, device=timer.device)
        mask = mask.tril(longest - case.q_len)
        folded_mask = mask.repeat_interleave(ratio, 0)
    attention = F.scaled_dot_product_attention
    folded = (case.batch, case.num_kv_heads, -1, case.head_dim)
    forms: dict[str, list[Call]] = {"enable_gqa": [], "folded": [], "lower right": []}
    for q, *rows in inputs:
        k, v = (one[:, :, :longest] for one in rows)
        q = q.view(case.batch, case.q_len, case.num_q_heads, case.head_dim).transpose(1, 2)
        grouped = partial(attention, q, k, v, enable_gqa=True)
        forms["enable_gqa"].append(partial(grouped, attn_mask=mask))
        lower_right = causal_lower_right(case.q_len, longest)
        forms["lower right"].append(partial(grouped, attn_mask=lower_right))
        # the query heads of a KV head as its queries
        q = q.unflatten(1, (-1, ratio)).transpose(2, 3).reshape(folded)
        forms["folded"].append(partial(attention, q, k, v, attn_mask=folded_mask))
    found: dict[str, tuple[list[SDPBackend], Callable[[], list[Call]]]] = {
        f"{name}, {form}": ([backend], partial(list, calls))
        for name, backend in BACKENDS.items()
        for form, calls in forms.items()
        if form != "lower right" or (name == "flash" and case.q_len > 1)
    }
    if case.lens:
        for name, make in (("varlen_attn", varlen_call), ("flex_attention", flex_call)):
            found[name] = list(BACKENDS.values()), partial(_calls_of, make, inputs, lens)
    return found


def _calls_of(
    make: Callable[..., Call], inputs: Sequence[tuple[torch.Tensor, ...]], lens: torch.Tensor
) -> list[Call]:
    return [make(*one, lens) for one in inputs]


def varlen_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor) -> Call:
    """Torch's attention to sequences of different lengths without padding.

    Args:
        q: [batch, num_q_heads, head_dim].
        k, v: [batch, num_kv_heads, capacity, head_dim]; copied to one token after another.
        lens: [batch], int32.

    Returns:
        A call that gives [batch * query heads of a KV head, num_kv_heads, head_dim].

    Raises:
        RuntimeError: this torch has none.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise RuntimeError(f"torch {torch.__version__} has no varlen_attn") from error
    batch, num_kv_heads, capacity, head_dim = k.shape
    ratio = q.shape[1] // num_kv_heads
    present = torch.arange(capacity, device=k.device) < lens[:, None]
    k, v = (rows.transpose(1, 2)[present] for rows in (k, v))  # [tokens, num_kv_heads, head_dim]
    # the query heads of a KV head stand as tokens
    q = q.view(batch, num_kv_heads, ratio, head_dim).transpose(1, 2)
    q = q.reshape(batch * ratio, num_kv_heads, head_dim)
    counts = torch.arange(batch + 1, dtype=torch.int32, device=k.device) * ratio
    ends = F.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    return partial(varlen_attn, q, k, v, counts, ends, ratio, int(lens.max()))


def flex_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor) -> Call:
    """Torch's flex_attention, compiled, which skips blocks of 128 places without tokens.

    Args:
        q, k, v, lens: as of varlen_call; k and v as they are.

    Returns:
        A call that gives [batch, num_q_heads, 1, head_dim].
    """

    def is_there(b: torch.Tensor, _h: object, _q: object, place: torch.Tensor) -> torch.Tensor:
        return place < lens[b]

    blocks = create_block_mask(is_there, len(q), None, 1, k.shape[2], device=q.device)
    return partial(_compiled_flex(), q[:, :, None], k, v, block_mask=blocks, enable_gqa=True)


@functools.cache
def _compiled_flex() -> Callable[..., object]:
    return torch.compile(flex_attention, dynamic=False)


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
    error, times = _time_ours(case, timer)
    even = _time_ours(case.even, timer)[1] if case.lens else None
    if case.exact not in known:
        known[case.exact] = best_sdpa(case, timer)
    return Result(case, error, times, known[case.exact], even)


def _time_ours(case: Case, timer: Timer) -> tuple[float, Times]:
    inputs = rotated_inputs(case, timer)
    error, times = check_and_time(case, inputs, timer)
    return error, replace(times, eager=timer.eager(_our_calls(inputs)))
