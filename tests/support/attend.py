"""Attention of ops/ and of its launchers by arguments, for tests: they make the record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvquant.kernels.cuda.decode import launch
from kvquant.ops import attention, mla, shared_prefix
from kvquant.rows.call import AttentionCall, LatentCall
from kvquant.rows.segment import Segment

STORED = ("basis", "seq_lens", "transformed")


def _parts(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a record, and what says how rows are stored."""
    stored = {name: options.pop(name) for name in STORED if name in options}
    return options, stored


def _result(out: torch.Tensor, lse: torch.Tensor | None) -> Any:
    return out if lse is None else (out, lse)


def attend_segments(q: torch.Tensor, segments: Sequence[Segment], **options: Any) -> Any:
    """attention.attend, with the result of decode_attention."""
    fields, stored = _parts(options)
    return _result(*attention.attend(AttentionCall(q, segments, **fields), **stored))


def attend_shared(
    q: torch.Tensor,
    prefix: Segment,
    segments: Sequence[Segment],
    *,
    members: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """shared_prefix.attend_shared, with the result of decode_attention."""
    fields, stored = _parts(options)
    call = AttentionCall(q, segments, **fields)
    return _result(*shared_prefix.attend_shared(call, prefix, members, **stored))


def attend_latents(
    q_latent: torch.Tensor, q_rope: torch.Tensor, segments: Sequence[Segment], **options: Any
) -> Any:
    """mla.attend_latents, with the result of mla_decode_attention."""
    fields, stored = _parts(options)
    return _result(*mla.attend_latents(LatentCall(q_latent, q_rope, segments, **fields), **stored))


def launch_attention(
    *fields: Any, check: launch.Check | None = None, **options: Any
) -> launch.State:
    """The launcher of kernels/cuda/decode, of an AttentionCall's fields; lse too unless return_lse
    is given as False."""
    call = AttentionCall(*fields, **options)
    is_given = len(fields) > 4 or "return_lse" in options
    return launch.attend(call if is_given else call._replace(return_lse=True), check)
