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
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from ..rows.variant import PLAIN, AttentionVariant, add_sinks
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
    return [one.attend for one in inputs]


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
    Of variants that calls with a mask cannot give, soft caps and sink logits, flex_attention alone
    is tried; beside latent rows also two bmm and a softmax.

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
    inputs = rotated_inputs(case, timer)
    lens = torch.tensor(case.all_lens, dtype=torch.int32, device=timer.device)
    longest, ratio = max(case.all_lens), case.num_q_heads // case.num_kv_heads
    attention = partial(F.scaled_dot_product_attention, scale=case.sm_scale)
    given: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionVariant | None]] = []
    forms: dict[str, list[Call]] = {"enable_gqa": [], "folded": [], "lower right": [], "bmm": []}
    for one in inputs:
        k, v = _values(case, one)
        # [batch, num_q_heads, q_len, head_dim]
        q = one.q.view(case.batch, case.q_len, case.num_q_heads, case.head_dim).transpose(1, 2)
        given.append((q, k, v, one.variant))
        first = 0 if case.window is None else longest - case.window
        k, v = (x[:, :, first:longest] for x in (k, v))
        mask = _mask(case, one.variant, lens)
        grouped = partial(attention, q, k, v, enable_gqa=True)
        forms["enable_gqa"].append(partial(grouped, attn_mask=mask))
        lower_right = causal_lower_right(case.q_len, longest)
        forms["lower right"].append(partial(grouped, attn_mask=lower_right))
        if case.sm_scale is not None:
            heads = _folded(q, ratio)[:, 0], k[:, 0], v[:, 0]
            seen = None if mask is None else _folded(mask, ratio)[:, 0]
            forms["bmm"].append(partial(bmm_attention, *heads, case.sm_scale, seen))
        # the query heads of a KV head as its queries
        q, mask = _folded(q, ratio), mask if mask is None else _folded(mask, ratio)
        forms["folded"].append(partial(attention, q, k, v, attn_mask=mask))
    own: dict[str, Callable[[], list[Call]]] = {}  # of no backend
    names = ["enable_gqa", "folded"]
    if case.is_latent:  # enable_gqa would copy K and V for each head
        names, own["bmm"] = ["folded"], partial(list, forms["bmm"])
    if case.variant in ("soft_cap", "sink_logits"):
        names = []
    has_lower_right = case.q_len > 1 and not case.variant and not case.is_latent
    if case.lens:
        own["varlen_attn"] = lambda: [varlen_call(q, k, v, lens) for q, k, v, _ in given]
    if case.lens or case.variant:
        own["flex_attention"] = lambda: [flex_call(*one, lens) for one in given]
    found: dict[str, tuple[list[SDPBackend], Callable[[], list[Call]]]] = {
        f"{name}, {form}": ([backend], partial(list, forms[form]))
        for name, backend in BACKENDS.items()
        for form in (*names, "lower right")
        if form != "lower right" or (name == "flash" and has_lower_right)
    }
    return found | {name: (list(BACKENDS.values()), make) for name, make in own.items()}


def _values(case: Case, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [batch, num_kv_heads, capacity, head_dim] of plain 16-bit rows, where they are."""
    (segment,) = inputs.segments
    k = segment.k_rows.view(case.dtype)
    v = k[..., : case.v_format.head_dim] if case.is_latent else segment.v_rows.view(case.dtype)
    return k, v


def _folded(x: torch.Tensor, ratio: int) -> torch.Tensor:
    """[batch, heads, q_len, ...], with the query heads of a KV head as its queries; of a mask for
    all heads the same, and of all queries."""
    if x.shape[1] == 1:
        return x if x.shape[2] == 1 else x.repeat_interleave(ratio, 2)
    grouped: torch.Tensor = x.unflatten(1, (-1, ratio))
    return grouped.transpose(2, 3).flatten(2, 3)


def _mask(case: Case, variant: AttentionVariant | None, lens: torch.Tensor) -> torch.Tensor | None:
    """What scaled_dot_product_attention adds to scores, or lets a query see, [batch or 1, heads or
    1, q_len, tokens]; None for all. Windows and scores that are capped have none."""
    longest, variant = max(case.all_lens), variant or PLAIN
    places = torch.arange(longest, device=lens.device)
    if variant.alibi_slopes is not None:
        bias = variant.alibi_slopes[:, None, None] * (places - longest + 1)
        return bias[None].to(case.dtype)
    if case.q_len > 1:  # each sees the tokens up to its own
        seen = torch.ones(case.q_len, longest, dtype=torch.bool, device=lens.device)
        seen = seen.tril(longest - case.q_len).expand(len(lens), 1, -1, -1)
        if variant.tree_mask is None:
            return seen[:1]
        seen = seen.clone()
        seen[:, 0, :, -case.q_len :] = variant.tree_mask
        return seen
    if min(case.all_lens) == longest:
        return None
    mask = torch.zeros(len(lens), 1, 1, longest, dtype=case.dtype, device=lens.device)
    return mask.masked_fill_((places >= lens[:, None])[:, None, None], -math.inf)


def bmm_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention by two products, with the softmax in float32 between them.

    Args:
        q: [batch, num_heads, head_dim].
        k, v: [batch, tokens, head_dim of K or V].
        sm_scale: factor on the scores.
        seen: [batch or 1, num_heads, tokens], bool: what a head sees; None for all.
    """
    scores = torch.bmm(q, k.transpose(1, 2)).float() * sm_scale
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    return torch.bmm(scores.softmax(-1).to(q.dtype), v)


def varlen_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor) -> Call:
    """Torch's attention to sequences of different lengths without padding.

    Args:
        q: [batch, num_q_heads, 1, head_dim].
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


def flex_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: AttentionVariant | None,
    lens: torch.Tensor,
) -> Call:
    """Torch's flex_attention, compiled, which skips blocks of 128 places that no query sees.

    Args:
        q: [batch, num_q_heads, q_len, head_dim].
        k, v: [batch, num_kv_heads, capacity, head_dim], as they are.
        variant: of a batch whose sequences all have capacity tokens.
        lens: [batch], int32.

    Returns:
        A call that gives [batch, num_q_heads, q_len, head_dim].
    """
    cap, sinks, slopes, window, tree, _ = variant or PLAIN
    batch, _, q_len, _ = q.shape
    capacity = k.shape[2]
    first = capacity - q_len  # of the tokens that have queries

    def score(
        s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, place: torch.Tensor
    ) -> torch.Tensor:
        s = s if cap is None else cap * torch.tanh(s / cap)
        return s if slopes is None else s + slopes[h] * (place - first - i)

    def is_seen(b: torch.Tensor, _h: object, i: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        if tree is not None:
            return (place < first) | tree[b, i, (place - first).clamp(min=0)]
        return place < lens[b] if window is None else place > first + i - window

    blocks = None
    if variant is None or window is not None or tree is not None:
        blocks = create_block_mask(is_seen, batch, None, q_len, capacity, device=q.device)
    changes = any(x is not None for x in (cap, slopes))
    options: dict[str, Any] = {
        "score_mod": score if changes else None,
        "block_mask": blocks,
        "enable_gqa": True,
    }
    if sinks is None:
        return partial(_compiled(flex_attention), q, k, v, **options)
    try:
        from torch.nn.attention.flex_attention import AuxRequest
    except ImportError as error:
        raise RuntimeError(f"flex_attention of torch {torch.__version__} gives no lse") from error
    options["return_aux"] = AuxRequest(lse=True)
    return partial(_compiled(_flex_with_sinks), q, k, v, sinks, **options)


def _flex_with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, **options: Any
) -> torch.Tensor:
    """[batch, num_q_heads, q_len, head_dim], by the lse that flex_attention gives."""
    out, aux = flex_attention(q, k, v, **options)
    out, _ = add_sinks(out.transpose(1, 2), aux.lse.transpose(1, 2), sinks)
    return out.transpose(1, 2)


@functools.cache
def _compiled(function: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(function, dynamic=False)


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
