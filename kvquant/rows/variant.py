"""What models change in plain softmax attention: capped scores, sinks, positions, masks."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NamedTuple

import torch

from .. import debug
from ..errors import ConfigError, ShapeError, shown
from .arguments import (
    check_kind,
    check_readable,
    check_same_device,
    check_size,
    check_tensor,
)

MOST_TREE = 64  # queries of a sequence with a tree mask: a word of bits each
MOST_CAP = 10_000  # models have 30 to 50


class AttentionVariant(NamedTuple):
    """What a model changes in plain attention. A field of None changes nothing.

    The score of a query and a token is `sm_scale * q·k`. What is given changes it in the order
    score_offsets, soft_cap, alibi_slopes; what is hidden then has no part in the softmax.
    Positions count the tokens of a sequence over all its segments, from 0.

    Kernels may multiply the V of a hidden token by 0, so NaN there reaches queries that do not see
    it. Pages that lie wholly before the windows of all queries of a sequence are not read.

    Attributes:
        soft_cap: scores s become soft_cap * tanh(s / soft_cap); a positive number up to MOST_CAP:
            float32 has 1e-7 of it as the error of a score.
        sink_logits: [num_q_heads], float32: a logit in each head's softmax, without a value;
            lse includes it. A query that sees no token still gives zeros and -inf.
        alibi_slopes: [num_q_heads], float32: adds slope * (position of the token - position of the
            query).
        window: a query sees this many tokens up to its own, the last ones.
        tree_mask: [batch, q_len, q_len], bool: which of the last q_lens tokens each query sees;
            it sees all tokens before them. A query has the position of its row and sees nothing if
            that is before the first token. Only with q of four axes, q_len at most 64; no query's
            row may be all False.
        score_offsets: the shape of q without its last axis, float32: added to all scores of a
            query.

    Example:
        >>> import torch
        >>> from kvquant import AttentionVariant, decode_attention, quantize_rows
        >>> rows = quantize_rows(torch.randn(1, 8, 100, 128), "int8")
        >>> lens = torch.tensor([100], dtype=torch.int32)
        >>> gemma = AttentionVariant(soft_cap=50.0, window=64)
        >>> gpt_oss = AttentionVariant(sink_logits=torch.randn(32), window=64)
        >>> for variant in (gemma, gpt_oss):
        ...     out = decode_attention(
        ...         torch.randn(1, 32, 128),
        ...         rows,
        ...         rows,
        ...         lens,
        ...         k_format="int8",
        ...         v_format="int8",
        ...         variant=variant,
        ...     )
        >>> out.shape
        torch.Size([1, 32, 128])

    Sources: soft cap, Gemma 2 (https://arxiv.org/abs/2408.00118); sink logits, gpt-oss
    (https://arxiv.org/abs/2508.10925); ALiBi (https://arxiv.org/abs/2108.12409); sliding windows,
    Mistral 7B (https://arxiv.org/abs/2310.06825); tree masks, SpecInfer
    (https://arxiv.org/abs/2305.09781).
    """

    soft_cap: float | None = None
    sink_logits: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    window: int | None = None
    tree_mask: torch.Tensor | None = None
    score_offsets: torch.Tensor | None = None


PLAIN = AttentionVariant()


def names_of(variant: AttentionVariant | None) -> tuple[str, ...]:
    """The names of the fields in use, sorted; ConfigError for another type."""
    if variant is None:
        return ()
    check_kind("variant", variant, AttentionVariant, "give a kvquant.AttentionVariant, or None")
    return tuple(sorted(name for name, value in variant._asdict().items() if value is not None))


def moved(variant: AttentionVariant, device: torch.device | str) -> AttentionVariant:
    """A copy with its tensors on a device."""
    given = variant._asdict().items()
    tensors: dict[str, Any] = {name: x.to(device) for name, x in given if torch.is_tensor(x)}
    return variant._replace(**tensors)


def in_use(variant: AttentionVariant | None) -> AttentionVariant | None:
    """The variant without gradients, or None if it changes nothing; raises as names_of."""
    if variant is None or not names_of(variant):
        return None
    learned: dict[str, Any] = {
        name: value.detach()
        for name, value in variant._asdict().items()
        if isinstance(value, torch.Tensor) and value.requires_grad
    }
    return variant._replace(**learned) if learned else variant


def within(variant: AttentionVariant | None, window: int) -> AttentionVariant:
    """The variant with its window limited to a layer's window."""
    variant = variant or PLAIN
    shown = window if variant.window is None else min(variant.window, window)
    return variant._replace(window=shown)


def check_variant(q: torch.Tensor, variant: AttentionVariant) -> None:
    """Raise unless the queries, checked by check_segments, fit the variant; values are not read."""
    if (cap := variant.soft_cap) is not None:
        is_number = isinstance(cap, Real) and not isinstance(cap, bool)
        if not is_number or not 0 < cap <= MOST_CAP:
            raise ConfigError(
                f"soft_cap is {shown(cap)}: use a positive number up to {MOST_CAP:,}, or None"
            )
    if variant.window is not None and not isinstance(variant.window, torch.SymInt):
        check_size("window", variant.window, at_least=1)  # the call has a number, a trace has none
    if variant.tree_mask is not None and (q.ndim != 4 or q.shape[1] > MOST_TREE):
        raise ShapeError(
            f"a tree_mask is given with q {list(q.shape)}: it needs q [batch, q_len, num_q_heads, "
            f"head_dim] with a q_len of {MOST_TREE} at most"
        )
    tree, heads = (q.shape[0], q.shape[1], q.shape[1]), q.shape[-2]
    for name, shape in (
        ("sink_logits", (heads,)),
        ("alibi_slopes", (heads,)),
        ("tree_mask", tree),
        ("score_offsets", q.shape[:-1]),
    ):
        given = getattr(variant, name)
        if given is None:
            continue
        check_tensor(name, given, [torch.bool if name == "tree_mask" else torch.float32], shape)
        check_same_device(q=q, **{name: given})


def check_variant_values(
    q: torch.Tensor, q_lens: torch.Tensor | None, variant: AttentionVariant
) -> None:
    """Raise unless a variant's values are possible; nothing while capturing a CUDA graph."""
    if debug.is_recorded(q):
        return
    given = variant._asdict().items()
    check_readable(**{name: value for name, value in given if isinstance(value, torch.Tensor)})
    if (slopes := variant.alibi_slopes) is not None and not bool(slopes.isfinite().all()):
        raise ConfigError("alibi_slopes must be finite")
    if (sinks := variant.sink_logits) is not None and not bool((sinks < math.inf).all()):
        raise ConfigError("sink_logits must be finite, or -inf for a head without a sink")
    if (tree := variant.tree_mask) is not None:
        counts = tree.shape[1] if q_lens is None else q_lens[:, None]
        is_query = torch.arange(tree.shape[1], device=tree.device).expand(tree.shape[:2]) < counts
        blind = is_query & ~(tree & is_query[:, None]).any(-1)
        if bool(blind.any()):
            sequence, row = blind.nonzero()[0].tolist()
            raise ShapeError(
                f"query {row} of sequence {sequence} sees no token of the tree: let it see itself"
            )


def add_sinks(
    out: torch.Tensor, lse: torch.Tensor, sink_logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add sink logits [num_q_heads] to out [..., num_q_heads, head_dim] and its lse."""
    share = torch.sigmoid(lse - sink_logits)[..., None]
    empty = lse == -torch.inf
    whole = torch.logaddexp(lse, sink_logits.to(lse.dtype)).masked_fill(empty, -torch.inf)
    return (out * share).to(out.dtype).masked_fill(empty[..., None], 0), whole
