"""Merging of attention states."""

from __future__ import annotations

import torch

from ..errors import ConfigError, DeviceError, ShapeError
from ..rows.arguments import check_tensors
from ..rows.quantize import EXACT_DTYPES
from .attention import State
from .dispatch import kernels_for


def merge_states(*states: State) -> State:
    """Merge attention over disjoint sets of tokens into attention over all of them, exactly.

    Args:
        states: pairs of out [..., head_dim] and lse [...], base e, as decode_attention returns
            them; lse -inf marks a state without tokens, whose out does not matter.

    Returns:
        out, the dtype of the first one, and lse, float32 (float64 if any lse is), computed in the
        dtype of lse. Without any tokens: zeros and -inf. Where an lse is +inf out is NaN.

    Raises:
        ShapeError: no state, or states that do not fit one another.
        ConfigError: a state is no pair of tensors of floats.
        DeviceError: they lie on several devices.

    Example:
        >>> import torch
        >>> from kvquant import merge_states
        >>> prompt = torch.ones(1, 8, 64), torch.zeros(1, 8)
        >>> answer = torch.zeros(1, 8, 64), torch.zeros(1, 8)
        >>> out, lse = merge_states(prompt, answer)
        >>> float(out[0, 0, 0]), round(float(lse[0, 0]), 4)
        (0.5, 0.6931)

    Source: the attention states of FlashInfer (https://arxiv.org/abs/2501.01005), there in base 2.
    """
    if not states:
        raise ShapeError("merge_states needs at least one (out, lse)")
    for state in states:
        pair = isinstance(state, tuple | list) and len(state) == 2
        if not pair or not all(isinstance(x, torch.Tensor) for x in state):
            raise ConfigError(
                f"a state is a {type(state).__name__} and no pair of tensors: give the states one "
                "by one, merge_states((out, lse), (out, lse)), and a list as merge_states(*states)"
            )
        check_tensors(out=state[0], lse=state[1])
        if not state[0].is_floating_point() or not state[1].is_floating_point():
            raise ConfigError(f"out is {state[0].dtype} and lse {state[1].dtype}: use floats")
    states = tuple((out.detach(), lse.detach()) for out, lse in states)
    first_out = states[0][0]
    for out, lse in states:
        if out.device != first_out.device or lse.device != first_out.device:
            raise DeviceError(f"states on {first_out.device}, {out.device} and {lse.device}")
        if out.shape != first_out.shape or lse.shape != out.shape[:-1]:
            raise ShapeError(
                f"out {list(out.shape)} with lse {list(lse.shape)} cannot be merged with out "
                f"{list(first_out.shape)}: outs must be alike, and lse an out without its last axis"
            )
    lses = torch.stack([lse if lse.dtype == torch.float64 else lse.float() for _, lse in states])
    outs = torch.stack([out.to(lses.dtype) for out, _ in states])
    return _merge(outs, lses, first_out.dtype)


def _merge(outs: torch.Tensor, lses: torch.Tensor, dtype: torch.dtype) -> State:
    """Merge stacked states; arguments as of merge_by_kernels."""
    top = lses.amax(0)
    # all empty: exp(-inf - 0) = 0; where a score was infinite: NaN, as in decode_attention
    weights = (lses - top.masked_fill(top == -torch.inf, 0.0)).exp()
    total = weights.sum(0)  # exp(lse) would be rounded, by much where scores are large
    parts = torch.where(lses[..., None] == -torch.inf, 0.0, weights[..., None] * outs)
    share = 1 / total.masked_fill(total == 0, 1.0)
    return (parts.sum(0) * share[..., None]).to(dtype), lses.logsumexp(0)


def merge_by_kernels(
    outs: torch.Tensor, lses: torch.Tensor, dtype: torch.dtype, backend: str | None
) -> State:
    """Merge stacked states, 16-bit ones on CUDA by one kernel.

    outs [states, ..., head_dim] and lses [states, ...] are float32; or outs of `dtype`, each state
    contiguous: then the first one may be overwritten and returned.
    """
    has_kernel = dtype in EXACT_DTYPES.values() and outs.shape[-1] % 4 == 0 and outs.numel() > 0
    if not (has_kernel and outs.is_cuda) or kernels_for(outs, backend) == "reference":
        return _merge(outs.to(lses.dtype), lses, dtype)
    from ..kernels.cuda.prefix.launch import combine
    from ..kernels.cuda.prefix.spec import MOST_SPLITS

    if len(outs) > MOST_SPLITS:
        return _merge(outs.to(lses.dtype), lses, dtype)
    # as splits of a prefix, a query a row, with one KV head
    rows, dim = lses[0].numel(), outs.shape[-1]
    if outs.dtype == dtype:  # what is the sequence's own is the first state
        others = outs.flatten(1, -2)[1:, None], lses.flatten(1)[1:, None]
        out, lse = outs[0].view(rows, 1, dim), lses[0].view(rows, 1)
    else:  # nothing is
        states = len(outs), 1, rows
        others = outs.contiguous().view(*states, dim), lses.contiguous().view(states)
        out = torch.zeros(rows, 1, dim, dtype=dtype, device=outs.device)
        lse = torch.full((rows, 1), -torch.inf, dtype=torch.float32, device=outs.device)
    combine(out, lse, *others, None)
    return out.view(outs.shape[1:]), lse.view(lses.shape[1:])
