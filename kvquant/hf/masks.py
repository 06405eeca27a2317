"""What a model's attention mask says to a KVCache: causal, a window, or what it cannot compute.

transformers makes masks by a function that is registered under the name of the attention. In a call
with a QuantizedCache ours makes none: it tells from the code of the function that a model wants
which mask that would be, and hands on a mark. Attention reads the mark.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from ..errors import UnsupportedModelError

if TYPE_CHECKING:
    from .cache import QuantizedCache

ATTENTION = "kvquant"


class Calls(threading.local):
    """What this thread knows of the model's call that runs.

    Attributes:
        asked: the cache that was asked for the sizes of the mask that is made next.
        cache: the cache of the call; None where a mask was made for no QuantizedCache.
    """

    asked: weakref.ref[QuantizedCache] | None = None
    cache: weakref.ref[QuantizedCache] | None = None


calls = Calls()


class MaskMark:
    """What a mask of a call with a QuantizedCache shows.

    Attributes:
        window: tokens that each token sees, the last ones.
        problem: why no KVCache can compute it, else None.
    """

    def __init__(self, window: int | None = None, problem: str | None = None) -> None:
        self.window, self.problem = window, problem


def window_of(attention_mask: torch.Tensor | None, name: str) -> int | None:
    """The window of a mask, or None; UnsupportedModelError for one that is not possible."""
    if attention_mask is None:
        return None
    mark: MaskMark | None = getattr(attention_mask, "kvquant_mask", None)
    if mark is None:
        raise UnsupportedModelError(f"{name} got an attention mask that is not the causal one")
    if mark.problem is not None:
        raise UnsupportedModelError(f"{name} {mark.problem}")
    return mark.window


# it compares code; and a graph ends anyway where the length of a cache is read
@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no type for it
def _mask(
    *,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **sizes: Any,
) -> torch.Tensor | None:
    """The mask of a call with a QuantizedCache as a mark; else that of SDPA.

    Where the cache has layers that are transformers' own it is SDPA's mask, marked: they share it.

    Returns:
        None for the causal one, which attention computes by itself.
    """
    calls.cache, calls.asked = calls.asked, None
    cache = None if calls.cache is None else calls.cache()
    sizes["allow_is_bidirectional_skip"] = False  # None means causal here
    if cache is None or cache.keeps_attention:
        sizes["allow_is_causal_skip"] = cache is None and sizes.get("allow_is_causal_skip", True)
        mask: torch.Tensor | None = sdpa_mask(
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            use_vmap=use_vmap,
            **sizes,
        )
    if cache is None:
        return mask
    if attention_mask is not None:
        cache.take_mask(attention_mask.expand(sizes["batch_size"], -1), sizes["q_length"])
    mark = MaskMark(problem="has a mask that is neither causal nor a sliding window")
    if use_vmap:
        pass  # functions of the caller's own
    elif local_size is None and mask_function is causal_mask_function:
        mark = MaskMark()
    elif local_size is not None and is_window(mask_function, local_size):
        mark = MaskMark(local_size)
    elif local_size is not None and is_chunk(mask_function, local_size):
        if sizes["kv_offset"] + sizes["kv_length"] <= local_size:
            mark = MaskMark()
        else:
            mark.problem = (
                f"attends to chunks of {local_size} tokens: KVCache has sliding windows only"
            )
    if not cache.keeps_attention:
        if mark.window is None and mark.problem is None:
            return None
        # an element a row: what a model makes of it, but its last rows, has lost the mark: refused
        shape = sizes["batch_size"], 1, sizes["q_length"], sizes["kv_length"]
        rows = torch.empty(shape[2], 1, dtype=torch.bool, device=sizes.get("device"))
        mask = rows.expand(shape)
    assert mask is not None
    mask.kvquant_mask = mark  # type: ignore[attr-defined]  # a mark on it
    return mask


def is_window(mask_function: Callable[..., Any], window: int) -> bool:
    """Whether a mask shows each token the last `window` ones, itself included, and no others."""
    return _same(mask_function, sliding_window_causal_mask_function(window))


def is_chunk(mask_function: Callable[..., Any], size: int) -> bool:
    """Whether a mask shows each token those before it in its chunk of `size`."""
    return _same(mask_function, chunked_causal_mask_function(size, torch.zeros(())))


def _same(one: Any, other: Any) -> bool:
    """Whether two functions run the same code with the same values around it.

    Tensors count as equal: the one there is, left padding, is zeros where nothing is hidden.
    """
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        around = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (one, other)]
        return one.__code__ is other.__code__ and _same(*around)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return True
    return type(one) is type(other) and bool(one == other)


AttentionMaskInterface.register(ATTENTION, _mask)
