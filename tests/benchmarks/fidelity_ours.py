"""kvquant's caches for the fidelity benchmark: plain formats, and what plans make of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from kvquant.cache.contiguous import KVCache
from kvquant.calibration.fidelity import (
    FORMATS,
    Planned,
    Scheme,
    predict,
    quantized_copy,
    stored_bits,
)
from kvquant.hf.model import CachedModel
from kvquant.io.plan import CachePlan

PLAN_FORMATS = ("int2", "int3", "int4", "int4-g4", "int8")  # those that a plan was made for
ENDS = (4, 128)  # first and last tokens in 16 bit


class Candidate(Protocol):
    """A cache to measure."""

    @property
    def name(self) -> str:
        """For the table."""

    def predict(
        self, model: CachedModel, exact: KVCache, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, float]:
        """Decode tokens [batch, tokens] after those of a 16-bit cache: log probabilities, bits."""


@dataclass(frozen=True)
class Ours:
    """A KVCache.

    Attributes:
        scheme: how it keeps its tokens.
        digest: of the plan's file, if it has one.
    """

    scheme: Scheme | Planned
    digest: str = ""

    @property
    def name(self) -> str:
        """See Candidate."""
        return str(self.scheme)

    def predict(
        self, model: CachedModel, exact: KVCache, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, float]:
        """See Candidate; bits are those of all the memory, which is full at the end."""
        cache = quantized_copy(model, exact, self.scheme)
        return predict(model, cache, tokens), stored_bits(cache, exact)


PLAIN = (
    *(Ours(Scheme(name, name)) for name in FORMATS if name != "bf16"),
    *(Ours(Scheme(name, name, *ENDS)) for name in ("int8", "int4-g4", "int4")),
)


def plan_candidates(path: Path) -> list[Ours]:
    """The caches of a plan: as it is and with one format for all layers, without and with ends."""
    plan, digest = CachePlan.load(path), hashlib.sha256(path.read_bytes()).hexdigest()
    kinds = {f"plan {path.stem}": plan}
    for name in (one for one in PLAN_FORMATS if one in plan.facts["candidates"]):
        uniform = plan.with_formats(name)
        if uniform.formats not in [one.formats for one in kinds.values()]:
            kinds[f"plan {path.stem}, {name}"] = uniform
    return [
        Ours(Planned(one, name, *ends), digest)
        for ends in ((0, 0), ENDS)
        for name, one in kinds.items()
    ]
