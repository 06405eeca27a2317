"""What torch.compile makes of a model's call with a QuantizedCache.

One traced graph serves all steps of one token of each sequence, with a cache that has its room from
the beginning: it reads nothing of the host that differs between steps. All else runs outside.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...cache.contiguous import KVCache

# Layers that attend to the keys of another one bring them to their own device first. Where they are
# there already, torch 2.11 traces another tensor, without our mark on it; 2.13 the same one.
LOSES_MARKS = torch.torch_version.TorchVersion(torch.__version__) < "2.13"
_WHY = (
    "with a QuantizedCache torch.compile takes steps of one token of each sequence only, behind a "
    "prompt that the same cache has read uncompiled, and caches for which is_compileable is true: "
    "those made with max_seq_len="
)
_takes_reason = "reason" in inspect.signature(torch.compiler.disable).parameters  # not in torch 2.6
_reason: dict[str, Any] = {"reason": _WHY} if _takes_reason else {}
_in_place: weakref.WeakSet[KVCache] = weakref.WeakSet()


@torch.compiler.disable(**_reason)  # type: ignore[untyped-decorator]  # torch has no type for it
def outside_of_graphs(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function without torch.compile, between two graphs."""
    return call(*args, **options)


def keep_in_place(kv: KVCache, *others: torch.Tensor) -> None:
    """Let torch.compile's CUDA graphs read tensors in place, without copies."""
    if kv in _in_place:
        return
    _in_place.add(kv)
    tensors = [*others, kv.start_positions, kv.bad_rows, kv.overflow_tokens]
    for layer in kv.layers:
        tensors += layer.tensors().values()
        for side in layer.basis or ():
            tensors += [one for one in vars(side).values() if isinstance(one, torch.Tensor)]
            tensors += [one for one in side.encoding if isinstance(one, torch.Tensor)]
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)


def keep_in_new_place(kv: KVCache) -> None:
    """As keep_in_place, after tensors of a KVCache have moved."""
    _in_place.discard(kv)
    keep_in_place(kv)
