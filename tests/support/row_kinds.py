"""The kinds of rows of a paged cache, for tests that ask the same of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import latent_pages
import paged_cases
import torch
from latent_plans import random_basis
from paged_plans import PLANS, make_paged

from kvquant import LatentPagedBatch, PagedBatch


@dataclass(frozen=True)
class RowKind:
    """One kind.

    Attributes:
        make: a small cache; options as of latent_pages.make and paged_cases.make, and device.
        batch: its batches.
        queries: of such axes, a tuple of what attend takes: float32 on the CPU, bfloat16 on CUDA.
        options: of attend, as step.
    """

    make: Callable[..., Any]
    batch: Callable[..., Any]
    queries: Callable[..., tuple[torch.Tensor, ...]]
    options: dict[str, Any] = field(default_factory=dict)

    def attend(self, batch: Any, layer: int, q: tuple[torch.Tensor, ...], **options: Any) -> Any:
        return batch.attend(layer, *q, **self.options, **options)


def _queries(*shape: int, device: str | torch.device = "cpu") -> tuple[torch.Tensor]:
    dtype = torch.float32 if str(device) == "cpu" else torch.bfloat16
    return (torch.randn(*shape, paged_cases.DIM).to(device, dtype),)


def _in_a_basis(device: str = "cpu", **options: Any) -> Any:
    return latent_pages.make(device, bases=[random_basis()] * latent_pages.LAYERS, **options)


_OF_LATENTS = LatentPagedBatch, latent_pages.queries, {"sm_scale": latent_pages.SCALE}
KINDS = {
    "heads": RowKind(paged_cases.make, PagedBatch, _queries),
    "latents": RowKind(latent_pages.make, *_OF_LATENTS),
    "latents in a basis": RowKind(_in_a_basis, *_OF_LATENTS),
}


def planned(name: str) -> RowKind:
    """Heads in the bases of a plan."""
    return RowKind(partial(make_paged, PLANS[name]), PagedBatch, _queries)
