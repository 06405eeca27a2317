"""Attention over a prefix that sequences share: its rows are read once for all of them.

    q          [batch, q_heads]                      own tokens ──▶ (out, lse) ──┐
       └──▶    [members x ratio] of each KV head     prefix     ──▶ (out, lse) ──┴──▶ merged

To the prefix the queries of all members are those of one sequence, because they see all of it. On
CUDA a kernel expands its rows once for up to 256 queries (kernels/cuda/prefix/launch.py); on the
CPU, for changed scores, and for rows of more than 256 elements, they are many heads of one token.
The log-sum-exps merge both states exactly. torch.ops.kvquant.add_prefix is the prefix's part under
torch.compile.

Source: cascade inference, https://flashinfer.ai/2024/02/02/cascade-inference.html.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import debug
from ..rehearsal import is_rehearsed
from ..rows.arguments import check_flag
from ..rows.basis import LayerBasis
from ..rows.call import AttentionCall
from ..rows.format import RowFormat
from ..rows.segment import Segment, check_segment_values, check_segments
from ..rows.variant import (
    PLAIN,
    AttentionVariant,
    add_sinks,
    check_variant,
    check_variant_values,
    in_use,
    names_of,
)
from .attention import Result, State, Transformed, attend, segment_of, with_missing_scores
from .dispatch import torch_op
from .merge import merge_states
from .transform import restore_result, transform_query

ADD_PREFIX = (
    "(Tensor q, Tensor k_rows, Tensor v_rows, Tensor seq_lens, str k_format, str v_format, "
    "Tensor? block_table, Tensor? members, Tensor(a!) out, Tensor(b!) lse, float sm_scale, "
    "int? num_splits) -> ()"
)


# what changes the scores of a query alike for all tokens of a prefix, whoever shares it; windows,
# ALiBi and biases of tokens count positions, which are others in each sequence
_OF_QUERIES = {"sink_logits", "soft_cap", "score_offsets", "tree_mask"}


def is_shareable(variant: AttentionVariant | None) -> bool:
    """Whether sequences with this variant can read a prefix once for all of them."""
    return _OF_QUERIES.issuperset(names_of(variant))


def has_kernel(*formats: RowFormat) -> bool:
    """Whether CUDA's prefix kernel expands these rows; the decode kernel reads others."""
    from ..kernels.cuda.prefix.spec import WIDEST

    return all(fmt.head_dim <= WIDEST for fmt in formats)


def attend_shared(
    call: AttentionCall,
    prefix: Segment,
    members: torch.Tensor | None = None,
    basis: LayerBasis | None = None,
    seq_lens: torch.Tensor | None = None,
    transformed: Transformed | None = None,
) -> Result:
    """Attend to a shared prefix and to each sequence's own tokens.

    Args:
        call: its segments are each sequence's tokens after the prefix. Queries of a member come
            after the prefix; only the first may be its last token (not with a tree_mask). The
            variant is_shareable; a soft cap or offsets take the decode kernels.
        prefix: tokens of one sequence (batch 1), before those of the members; may be empty. No
            ring, with the KV heads of the segments.
        members: [num_members], int64: the indices of sequences that share the prefix, each
            once; negative ones are ignored. All sequences when None.
        basis, seq_lens, transformed: as in attend; seq_lens counts the prefix, too.

    Returns:
        As attend; the state of the own tokens is rounded to the dtype of q before the merge.

    It trusts prefix and members, and raises as decode_attention for the rest.
    """
    q, segments, sm_scale, num_splits, return_lse, q_lens, variant, backend, *_ = call
    check_flag("return_lse", return_lse)
    is_served = has_kernel(prefix.k_format, prefix.v_format)
    variant = in_use(variant) or PLAIN
    if variant.sink_logits is not None:  # which attend does not see
        check_variant(q, variant)
        if debug.may_read(q):
            check_variant_values(q, q_lens, variant)
    sinks, variant, is_whole = variant.sink_logits, variant._replace(sink_logits=None), False
    given, given_scale = q, sm_scale
    if basis is not None:
        variant, is_whole = with_missing_scores(variant, q, basis, sm_scale)
    if transformed is not None:
        q, sm_scale = transformed
    elif basis is not None:
        check = functools.partial(check_segments, q, segments, q_lens)
        q, sm_scale = transform_query(q, basis.k, sm_scale, backend, check)
    num_q_heads, head_dim = q.shape[-2:]
    num_kv_heads = prefix.k_rows.shape[1]
    call = call._replace(q=q, sm_scale=sm_scale, return_lse=True, variant=variant)
    (out, own_lse), offsets = attend(call), variant.score_offsets
    assert own_lse is not None
    lse = own_lse
    if given.ndim == 4:
        members = _queries_of(members, q_lens, q)
        q, out, lse = (x.flatten(0, 1) for x in (q, out, lse))
        offsets = None if offsets is None else offsets.flatten(0, 1)
    is_plain = variant.soft_cap is None and offsets is None  # to the prefix a tree is nothing
    if is_plain and is_served and (out.is_cuda or is_rehearsed(out)) and backend != "reference":
        scale = head_dim**-0.5 if sm_scale is None else float(sm_scale)
        _add_prefix(q, prefix, members, out, lse, scale, num_splits)
    else:
        heads = num_kv_heads, num_q_heads // num_kv_heads

        def by_kv_head(x: torch.Tensor) -> torch.Tensor:
            chosen = x if members is None else x.index_select(0, members.clamp(min=0))
            by_head: torch.Tensor = chosen.unflatten(1, heads).transpose(0, 1)
            return by_head.reshape(1, -1, *x.shape[2:])

        changed = AttentionVariant(
            soft_cap=variant.soft_cap,
            score_offsets=None if offsets is None else by_kv_head(offsets),
        )
        state = attend(
            call._replace(q=by_kv_head(q), segments=[prefix], q_lens=None, variant=changed)
        )
        num_members = len(q if members is None else members)
        found = [
            x.view(heads[0], num_members, heads[1], *x.shape[2:]) for x in state if x is not None
        ]
        out, lse = _merged((out, lse), found, members)
    if given.ndim == 4:
        out, lse = out.view(*given.shape[:-1], out.shape[-1]), lse.view(given.shape[:-1])
        seq_lens = (lse[..., 0] != -torch.inf).int()  # all that counts: whether there are any
    result: Result = out, None if sinks is None and not return_lse else lse
    if basis is not None:
        result = restore_result(*result, given, basis, seq_lens, given_scale, backend, is_whole)
    if sinks is not None and result[1] is not None:
        result = add_sinks(result[0], result[1], sinks)
    return result[0], result[1] if return_lse else None


def _queries_of(
    members: torch.Tensor | None, q_lens: torch.Tensor | None, q: torch.Tensor
) -> torch.Tensor | None:
    """The places of the members' queries among all [batch * q_len]; None for all."""
    if members is None and q_lens is None:
        return None
    batch, q_len = q.shape[:2]
    row = torch.arange(q_len, device=q.device)
    if members is None:
        members, counts = torch.arange(batch, device=q.device), q_lens
    else:
        counts = None if q_lens is None else q_lens.index_select(0, members.clamp(min=0))
    queries = torch.add(row, members[:, None], alpha=q_len)  # below 0 where the member is
    if counts is not None:
        queries = torch.where(row < counts[:, None], queries, -1)
    return queries.flatten()


def _merged(own: State, found: list[torch.Tensor], members: torch.Tensor | None) -> State:
    """Merge the members' out and lse, [num_kv_heads, num_members, ...], into those of all."""
    out, lse = (x.transpose(0, 1).flatten(1, 2) for x in found)
    if members is None:
        return merge_states(own, (out, lse))
    # the member that each sequence is; the others get an empty state, padded behind the last one
    batch, num_members = len(own[0]), len(members)
    sequences = torch.where(members < 0, batch, members)
    numbers = torch.arange(num_members, device=members.device)
    member = members.new_full((batch + 1,), num_members).index_copy(0, sequences, numbers)[:batch]
    padded_out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, 1))
    padded_lse = torch.nn.functional.pad(lse, (0, 0, 0, 1), value=-torch.inf)
    return merge_states(own, (padded_out[member], padded_lse[member]))


def _add_prefix(
    q: torch.Tensor,
    prefix: Segment,
    members: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    sm_scale: float,
    num_splits: int | None,
) -> None:
    """Merge attention over a prefix into states, in place; see kernels/cuda/prefix/launch.py."""
    k_rows, v_rows, seq_lens, k_format, v_format, _, table, _, _ = prefix
    if torch.compiler.is_compiling():
        rows = k_rows, v_rows, seq_lens, str(k_format), str(v_format), table
        add_prefix_op(q.detach(), *rows, members, out, lse, sm_scale, num_splits)
        return
    from ..kernels.cuda.prefix.launch import add_prefix as launch

    if debug.enabled:
        check_segment_values([prefix])
    launch(q, prefix, members, out, lse, sm_scale, num_splits, lambda: check_prefix(q, prefix))


def check_prefix(q: torch.Tensor, prefix: Segment) -> None:
    if len(q):
        check_segments(q[:1], [prefix])


def _op_arguments(q: torch.Tensor, *args: Any) -> tuple[Any, ...]:
    k_rows, v_rows, seq_lens, k_format, v_format, table, members, out, *others = args
    rows = k_rows, v_rows, seq_lens, k_format, v_format, None, table
    prefix = segment_of(q, int(out.shape[-1]), *rows)
    return q, prefix, members, out, *others


def _add_prefix_op(*args: Any) -> None:
    _add_prefix(*_op_arguments(*args))


def _add_prefix_fake(*args: Any) -> None:
    q, prefix, *_ = _op_arguments(*args)
    check_prefix(q, prefix)


add_prefix_op = torch_op("add_prefix", ADD_PREFIX, _add_prefix_op, _add_prefix_fake)
