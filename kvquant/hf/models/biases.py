"""Models whose keys have large biases: rows of few bits need a plan there."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch

from ...cache.contiguous import KVCache
from ...io.row_stats import MAX_OFFSET

log = logging.getLogger("kvquant")
FEW_BITS = 4
_looked_at: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def warn_of_biased_keys(model: torch.nn.Module, cache: KVCache) -> None:
    """Log a warning, once for a model, if its keys have large biases and K has few bits.

    A group's scale covers its largest element. Where a bias makes one channel large, the codes of
    few bits leave nothing for the others: calibration/FIDELITY.md has a model that answers nothing
    then. A plan takes the offset away first.

    Args:
        model: of transformers, whose key projections are called k_proj. Others are not looked at.
        cache: of this model, made without a plan.
    """
    bits = [layer.k_format.bits for layer in cache.layers]
    if min(bits, default=16) > FEW_BITS or model in _looked_at:
        return
    _looked_at.add(model)
    offsets = [
        largest_offset(one) for name, one in model.named_modules() if name.endswith("k_proj")
    ]
    biased = [one for one in offsets if one > MAX_OFFSET]
    if biased:
        log.warning(
            "kvquant: in %d of %d layers keys have biases, up to %.0f times what a channel varies "
            "by. Rows of %d bits without a plan change what such a model predicts: make a plan "
            '(kvquant calibrate), or take k_format="int8"',
            *(len(biased), len(offsets), max(biased), min(bits)),
        )


def largest_offset(projection: torch.nn.Module) -> float:
    """The largest bias of a key projection, over the deviation of its channel.

    The input comes from a norm, so its elements vary by about 1, and a channel by the length of its
    row of the weight. 0 where there is no bias, or the weight is no plain matrix.
    """
    weight: Any = getattr(projection, "weight", None)
    bias: Any = getattr(projection, "bias", None)
    if not (_is_plain(weight) and _is_plain(bias)):
        return 0.0
    if weight.ndim != 2 or weight.shape[0] != len(bias):
        return 0.0
    deviations = torch.linalg.vector_norm(weight.detach().float(), dim=1)
    return float((bias.detach().float().abs() / deviations.clamp_min(1e-6)).max())


def _is_plain(one: Any) -> bool:
    """Whether it is a parameter of floating point that is on this rank, with its values."""
    if not isinstance(one, torch.nn.Parameter) or type(one.data) is not torch.Tensor:
        return False
    return one.is_floating_point() and not one.is_meta
