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
from collections.abc import Sequence
from typing import Any

import torch

from .. import debug
from ..errors import ConfigError, DeviceError, ShapeError, UnsupportedError
from ..rehearsal import is_rehearsed
from ..rows.arguments import check_flag, check_kind, check_tensors
from ..rows.basis import LayerBasis
from ..rows.call import AttentionCall
from ..rows.format import RowFormat
from ..rows.segment import (
    Segment,
    check_segment_values,
    check_segments,
    parse_formats,
    query_shape,
)
from ..rows.variant import (
    PLAIN,
    AttentionVariant,
    add_sinks,
    check_variant,
    check_variant_values,
    in_use,
    names_of,
)
from .attention import (
    Result,
    State,
    Transformed,
    attend,
    check_types,
    segment_of,
    with_missing_scores,
)
from .dispatch import WRONG_TYPES, torch_op
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
            variant may have soft_cap, sink_logits, score_offsets and tree_mask; a soft cap or
            offsets take the decode kernels.
        prefix: tokens of one sequence (batch 1), before those of the members; may be empty.
        members: [num_members], int64: the indices of sequences that share the prefix, each
            once; negative ones are ignored. All sequences when None.
        basis, seq_lens, transformed: as in attend; seq_lens counts the prefix, too.

    Returns:
        As attend; the state of the own tokens is rounded to the dtype of q before the merge.

    Raises:
        ShapeError: the prefix is of several sequences, members are no indices into the batch,
            or queries stand in the prefix (on CUDA in debug mode only; see kvquant.debug).
        ConfigError, DeviceError: members are not int64 on the device of q, or the prefix is a
            ring.
        UnsupportedError: the variant has window or alibi_slopes, which count positions: attend
            to whole sequences.
        As decode_attention.
    """
    q, segments, sm_scale, num_splits, return_lse, q_lens, variant, backend, *_ = call
    check_flag("return_lse", return_lse)
    check_kind("the prefix", prefix, Segment, "give a Segment")
    if isinstance(prefix.k_format, str) or isinstance(prefix.v_format, str):
        prefix = parse_formats(q, prefix)
    try:
        _check_prefix(q, prefix, segments)
        is_served = has_kernel(prefix.k_format, prefix.v_format)
    except WRONG_TYPES:
        for rows in ([prefix], segments):
            check_types(q, rows)
        raise
    if members is not None:
        _check_members(members, q)
    variant = _check_variant(variant, q, q_lens) or PLAIN
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
        if debug.may_read(q):
            _check_queries(q, q_lens, members, segments, variant.tree_mask is not None)
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
        out, lse = _merged(out, lse, found[0], found[1], members)
    if given.ndim == 4:
        out, lse = out.view(*given.shape[:-1], out.shape[-1]), lse.view(given.shape[:-1])
        seq_lens = (lse[..., 0] != -torch.inf).int()  # all that counts: whether there are any
    result: Result = out, None if sinks is None and not return_lse else lse
    if basis is not None:
        result = restore_result(*result, given, basis, seq_lens, given_scale, backend, is_whole)
    if sinks is not None and result[1] is not None:
        result = add_sinks(result[0], result[1], sinks)
    return result[0], result[1] if return_lse else None


def _check_variant(
    variant: AttentionVariant | None, q: torch.Tensor, q_lens: torch.Tensor | None
) -> AttentionVariant | None:
    """The variant, None if it changes nothing; raise if it hides or shifts parts of a prefix."""
    variant = in_use(variant)
    if variant is None:
        return None
    if not is_shareable(variant):
        names = ", ".join(name for name in names_of(variant) if name not in _OF_QUERIES)
        raise UnsupportedError(
            f"{names}: beside a shared prefix only {', '.join(sorted(_OF_QUERIES))} are possible, "
            "others count positions: attend to whole sequences"
        )
    check_variant(q, variant)
    if debug.may_read(q):
        check_variant_values(q, q_lens, variant)
    return variant


def _check_prefix(q: torch.Tensor, prefix: Segment, segments: Sequence[Segment]) -> None:
    if prefix.k_rows.ndim != 4 or prefix.seq_lens.ndim != 1:
        raise ShapeError(
            f"the prefix has k_rows {list(prefix.k_rows.shape)} and seq_lens "
            f"{list(prefix.seq_lens.shape)}: they must be [batch or pages, num_kv_heads, capacity, "
            "row_bytes] and [1]"
        )
    if not isinstance(segments, Sequence):
        check_types(q, segments)
    prefix_batch = prefix.seq_lens.shape[0]
    if prefix_batch != 1:
        raise ShapeError(f"the prefix is of {prefix_batch} sequences: it must be of one")
    num_q_heads, num_kv_heads = query_shape(q)[-2], prefix.k_rows.shape[1]
    if not segments or segments[0].k_rows.shape[1] != num_kv_heads:
        own = segments[0].k_rows.shape[1] if segments else "no"
        raise ShapeError(f"the prefix has {num_kv_heads} KV heads, the segments {own}")
    if prefix.starts is not None or prefix.seq_slots is not None:
        raise ConfigError(
            "the prefix is a ring: it must begin with row 0 (no starts, no sequence slots)"
        )
    if num_q_heads % max(num_kv_heads, 1):
        raise ShapeError(f"{num_q_heads} query heads do not fit {num_kv_heads} KV heads")


def _check_members(members: torch.Tensor, q: torch.Tensor) -> None:
    check_tensors(members=members)
    batch = len(q)
    if members.ndim != 1 or members.dtype != torch.int64:
        raise ConfigError(
            f"members are {list(members.shape)} {members.dtype}: use one list of places, int64"
        )
    if members.device != q.device:
        raise DeviceError(f"q is on {q.device}, members on {members.device}")
    if not debug.may_read(members):
        return
    used = members[members >= 0]
    if bool((used >= batch).any()) or len(used.unique()) < len(used):
        raise ShapeError(f"members are {members.tolist()}: give places 0 to {batch - 1}, each once")


def _check_queries(
    q: torch.Tensor,
    q_lens: torch.Tensor | None,
    members: torch.Tensor | None,
    segments: Sequence[Segment],
    in_tree: bool,
) -> None:
    """Raise unless all queries of the members see the whole prefix; a tree must follow it."""
    own = torch.stack([segment.seq_lens for segment in segments]).sum(0)
    counts = torch.full_like(own, q.shape[1]) if q_lens is None else q_lens
    inside = counts > own + (0 if in_tree else 1)  # the prefix's last token sees all of it
    if members is not None:
        chosen = members[members >= 0]
        inside = torch.zeros_like(inside).index_copy(0, chosen, inside[chosen])
    if bool(inside.any()):
        at = int(inside.nonzero()[0])
        raise ShapeError(
            f"sequence {at} has {int(counts[at])} queries and {int(own[at])} tokens behind the "
            "prefix: the first queries would see a part of it. Give a shorter prefix, or leave the "
            "sequence out of the members"
        )


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


def _merged(
    out: torch.Tensor,
    lse: torch.Tensor,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    members: torch.Tensor | None,
) -> State:
    """Merge the members' states, [num_kv_heads, num_members, ...], into those of all."""
    of_prefix = [x.transpose(0, 1).flatten(1, 2) for x in (prefix_out, prefix_lse)]
    if members is None:
        return merge_states((out, lse), (of_prefix[0], of_prefix[1]))
    # the member that each sequence is; the others get an empty state, padded behind the last one
    batch, num_members = out.shape[0], len(members)
    sequences = torch.where(members < 0, batch, members)
    numbers = torch.arange(num_members, device=members.device)
    member = members.new_full((batch + 1,), num_members).index_copy(0, sequences, numbers)[:batch]
    padded_out = torch.nn.functional.pad(of_prefix[0], (0, 0, 0, 0, 0, 1))
    padded_lse = torch.nn.functional.pad(of_prefix[1], (0, 0, 0, 1), value=-torch.inf)
    return merge_states((out, lse), (padded_out[member], padded_lse[member]))


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
