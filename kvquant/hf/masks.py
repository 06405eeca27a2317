"""What a model's attention mask means for a KVCache: causal, a window, or not computable.

transformers calls the mask function registered for an attention. In a call with a QuantizedCache
ours makes no mask: it recognizes the wanted one by its function's code and returns a mark, which
attention reads. For unknown code the values of the mask decide (Gemma 3 and 4 without images).
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from ..errors import UnsupportedModelError
from .cache import QuantizedCache
from .call import ATTENTION
from .compile.tracing import outside_of_graphs
from .continuation import take_mask
from .handed import running
from .switch import DEQUANTIZE

BLOCK = 512  # tokens, whose masks are compared at a time: each has a byte for each token before it


class MaskMark(NamedTuple):
    """What a mask of a call with a QuantizedCache shows.

    Attributes:
        window: how many last tokens each token sees; None for all.
        chunk: from this token on it shows less, by chunks of this size; None for never.
        problem: why no KVCache can compute it, else None.
    """

    window: int | None = None
    chunk: int | None = None
    problem: str | None = None


class _Mask(torch.Tensor):
    """A mask whose mark goes with it to another device, as where a model lies on several."""

    kvquant_mask: MaskMark

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **(kwargs or {}))
        if function in (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu):
            mask = args[0]  # or another tensor, which goes to where a mask is
            if isinstance(mask, _Mask) and found.dtype == mask.dtype:
                return _with_mark(found, mask.kvquant_mask)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mask:
        return _with_mark(self.clone(), self.kvquant_mask)


def _with_mark(mask: torch.Tensor, mark: MaskMark) -> _Mask:
    """A mask, the same memory, with a mark."""
    marked = mask.as_subclass(_Mask)
    marked.kvquant_mask = mark
    return marked


def window_of(attention_mask: torch.Tensor | None, name: str, cache: QuantizedCache) -> int | None:
    """The window of a layer's mask, or None; UnsupportedModelError if a KVCache cannot compute
    it."""
    if attention_mask is None:
        return None
    mark: MaskMark | None = getattr(attention_mask, "kvquant_mask", None)
    if mark is None:
        raise UnsupportedModelError(
            f"{name} got an attention mask that is not the causal one. {DEQUANTIZE}"
        )
    if mark.problem is not None:
        raise UnsupportedModelError(f"{name} {mark.problem}. {DEQUANTIZE}")
    if mark.chunk is not None and cache.columns > mark.chunk:
        raise UnsupportedModelError(
            f"{name} attends to chunks of {mark.chunk} tokens: KVCache has sliding windows only"
        )
    return mark.window


def _mask(
    *,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any = None,
    **sizes: Any,
) -> torch.Tensor | None:
    """The mask of a call with a QuantizedCache as a mark; else that of SDPA."""
    # A cache whose layers are in part transformers' own gets SDPA's mask with a mark: they share
    # it.
    given: dict[str, Any] = {"mask_function": mask_function, "attention_mask": attention_mask}
    given |= {"local_size": local_size, "use_vmap": use_vmap, "config": config}
    cache = _asked(sizes["q_length"])
    if cache is None and torch.compiler.is_compiling():
        outside: torch.Tensor | None = outside_of_graphs(_mask, **given, **sizes)
        return outside
    sizes["allow_is_bidirectional_skip"] = False  # None means causal here
    if cache is None:
        return sdpa_mask(**given, **sizes)
    cache.call.awaits_mask = False
    kind = local_size, use_vmap
    try:
        if attention_mask is not None:
            take_mask(cache, attention_mask.expand(sizes["batch_size"], -1), sizes["q_length"])
        if torch.compiler.is_compiling():  # it cannot compare the code of functions
            return cache.step_masks[kind]
        if config is not None:
            cache.check_model(config)
    except BaseException:
        cache.end_call()
        raise
    mark, *others = _marks_of(cache, given, sizes)
    if cache.keeps_attention:
        sizes["allow_is_causal_skip"] = False
        mask = sdpa_mask(**given, **sizes)
        assert mask is not None
        return _with_mark(mask, mark)
    # [1, 1, columns, 1]: of what a model makes of it, but its last rows, the mark is lost
    device = sizes.get("device")
    mask = torch.empty(1, 1, sizes["q_length"], 1, dtype=torch.bool, device=device)
    # a step may ask for the mask of a prompt by its plain function
    for key, shown in [(kind, mark), *(((one.window, False), one) for one in others)]:
        step_mask = torch.empty(1, 1, 1, 1, dtype=torch.bool, device=device)  # plain: for graphs
        cache.step_masks[key] = step_mask
        step_mask.kvquant_mask = shown  # type: ignore[attr-defined]  # a mark on it
    return _with_mark(mask, mark)


def _asked(columns: int) -> QuantizedCache | None:
    """The cache for whose sizes transformers makes this mask, of so many columns."""
    is_traced = torch.compiler.is_compiling()
    if not is_traced and running.traced is not None:  # a graph has ended in between
        running.traced.mask_sizes(columns)
    cache: QuantizedCache | None = running.take()
    if is_traced or (cache is not None and cache.call.awaits_mask):
        return cache
    running.forget()
    return None


def _marks_of(
    cache: QuantizedCache, given: dict[str, Any], sizes: dict[str, Any]
) -> tuple[MaskMark, ...]:
    """What a mask shows. For unknown code: each mask whose values this one has in this call."""
    mask_function, local_size = given["mask_function"], given["local_size"]
    if not given["use_vmap"]:  # else it has functions of the caller's own
        if local_size is None and mask_function is causal_mask_function:
            return (MaskMark(),)
        if local_size is not None and is_window(mask_function, local_size):
            return (MaskMark(window=local_size),)
        if local_size is not None and is_chunk(mask_function, local_size):
            return (MaskMark(chunk=local_size),)
    windows = cache.layers_held.windows
    marks = [MaskMark(one) for one in {None: 0, **dict.fromkeys(windows)} if _is(one, given, sizes)]
    problem = "has a mask that is neither causal nor a sliding window, as with tokens of an image"
    return (marks[0], *marks) if marks else (MaskMark(problem=f"{problem} that see later ones"),)


def _is(window: int | None, given: dict[str, Any], sizes: dict[str, Any]) -> bool:
    """Whether a mask shows in this call what that of a window does, or the causal one for None."""
    plain = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    wanted = given | {"mask_function": plain, "use_vmap": False}
    sizes = sizes | {"allow_is_causal_skip": False}
    first, columns = sizes.get("q_offset", 0), sizes["q_length"]
    for begin in range(0, columns, BLOCK):
        part = {"q_length": min(BLOCK, columns - begin), "q_offset": first + begin}
        one, other = (sdpa_mask(**each, **(sizes | part)) for each in (given, wanted))
        assert one is not None and other is not None  # no skip is allowed
        if not torch.equal(one, other):
            return False
    return True


def is_window(mask_function: Callable[..., Any], window: int) -> bool:
    """Whether a mask shows each token the last `window` ones, itself included, and no others."""
    return _same(mask_function, sliding_window_causal_mask_function(window))


def is_chunk(mask_function: Callable[..., Any], size: int) -> bool:
    """Whether a mask shows each token those before it in its chunk of `size`."""
    return _same(mask_function, chunked_causal_mask_function(size, torch.zeros(())))


def _same(one: Any, other: Any) -> bool:
    """Whether two functions run the same code with the same values around it."""
    # Tensors count as equal: the only one is left padding, zeros where nothing is hidden.
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        around = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (one, other)]
        return one.__code__ is other.__code__ and _same(*around)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return True
    return type(one) is type(other) and bool(one == other)


AttentionMaskInterface.register(ATTENTION, _mask)
