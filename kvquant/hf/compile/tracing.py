"""What torch.compile makes of a model's call with a QuantizedCache.

A step of one token of each sequence with a cache that has its room from the beginning is traced, as
one graph for all steps: nothing of the host that differs from step to step is read in it. All else
runs outside of graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..attention import Handed
    from ..cache import QuantizedCache

_WHY = (
    "with a QuantizedCache torch.compile takes steps of one token of each sequence only, behind a "
    "prompt that the same cache has read uncompiled, and caches for which is_compileable is true: "
    "those made with max_seq_len="
)
_takes_reason = "reason" in inspect.signature(torch.compiler.disable).parameters  # not in torch 2.6
_reason: dict[str, Any] = {"reason": _WHY} if _takes_reason else {}


class Tracing:
    """What one function of a model's call leaves for the next while both are traced.

    It stands for the thread's own notes (masks.Calls), which a graph cannot guard.

    Attributes:
        asked: the cache that was asked for the sizes of the mask that is made next.
        latents: what the layer that attends next has handed, where these are latents.
    """

    asked: QuantizedCache | None = None
    latents: Handed | None = None


tracing = Tracing()


@torch.compiler.disable(**_reason)  # type: ignore[untyped-decorator]  # torch has no type for it
def outside_of_graphs(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function as without torch.compile: the graph ends before, and another begins after."""
    return call(*args, **options)
