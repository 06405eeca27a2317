"""Pages of an engine in which sequences have tokens, and exact attention to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from variant_cases import by_hand

from kvquant import AttentionVariant
from kvquant.engine.contract import LayerRows, NewTokens
from kvquant.engine.latent import LatentRows, append_latents, attend_to_latents, latents_at
from kvquant.engine.step import Step, append, attend
from kvquant.rows.segment import Segment
from kvquant.rows.variant import PLAIN

PAGE = 16
HEADS, Q_HEADS, DIM, SCALE = 2, 8, 64, 0.11  # of a layer with keys and values
LATENT, ROPE, LATENT_HEADS, LATENT_SCALE = 512, 64, 16, 192**-0.5
# where a step runs: the dtype of the model there, and the error that it brings; bfloat16 is rounded
# to up to three times, 2.1e-3 each: weights of a prompt, a part or what is in a basis, the result
DEVICES = [
    pytest.param("cpu", torch.float32, 2e-5),
    pytest.param("cuda", torch.bfloat16, 6.3e-3, marks=pytest.mark.gpu),
]


class SequencePages:
    """Pages of a layer in which sequences have tokens; all unused memory is NaN.

    Attributes:
        shape: gives that of a page.
        make: gives what so many tokens are.
        write: appends them at slots.
        queries: gives queries of so many tokens.
        attended: gives the output for queries that attend to rows alone.
        exact: attends with the last tokens of a sequence, float64 on the CPU.
    """

    shape: Any
    make: Any
    write: Any
    queries: Any
    attended: Any
    exact: Any

    def __init__(
        self,
        layer: Any,
        past_lens: Sequence[int],
        room: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.layer, self.dtype, self.device = layer, dtype, torch.device(device)
        used = [-(-(past + room) // PAGE) for past in past_lens]
        num_pages = sum(used) + 3
        self.pages = torch.full((num_pages, *self.shape()), 255, dtype=torch.uint8, device=device)
        order = torch.randperm(num_pages, dtype=torch.int32)[: sum(used)].split(used)
        table = torch.full((len(used), max(used)), -1, dtype=torch.int32)
        for row, places in zip(table, order, strict=True):
            row[: len(places)] = places
        self.table = table.to(device)
        self.lens = torch.zeros_like(self.table[:, 0])
        self.append(past_lens)

    def slots(self, counts: Sequence[int]) -> torch.Tensor:
        """Of new tokens of each sequence."""
        return torch.cat([self.slots_of(i, int(self.lens[i]), n) for i, n in enumerate(counts)])

    def slots_of(self, sequence: int, first: int, count: int) -> torch.Tensor:
        token = torch.arange(first, first + count, device=self.device)
        return self.table[sequence, token // PAGE].long() * PAGE + token % PAGE

    def append(self, counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens of each sequence: what they are, and one of no slot."""
        one, other = self.make(sum(counts) + 1)
        none = torch.tensor([-1], device=self.device)
        self.write(one, other, torch.cat([self.slots(counts), none]))
        self.lens += torch.tensor(counts, dtype=torch.int32, device=self.device)
        return one, other

    def new_tokens(
        self, counts: Sequence[int], padding: int = 0, most_queries: int = 1
    ) -> NewTokens:
        """A step of tokens that were appended."""
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        return NewTokens(
            self.table, self.lens, starts, self.lens.cpu(), sum(counts) + padding, most_queries
        )


class KeyValuePages(SequencePages):
    layer: LayerRows

    def shape(self) -> tuple[int, ...]:
        return self.layer.layout.num_kv_heads, PAGE, self.layer.layout.token_bytes

    def make(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = torch.randn(2, tokens, HEADS, DIM, device=self.device)
        k += 3 * torch.arange(DIM, device=self.device).cos()  # an offset
        return k.to(self.dtype), v.to(self.dtype)

    def write(self, one: torch.Tensor, other: torch.Tensor, slots: torch.Tensor) -> None:
        append(self.layer, one, other, self.pages, slots)

    def queries(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, Q_HEADS, DIM, device=self.device).to(self.dtype)

    def attended(self, step: Step, q: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(q, torch.nan)
        attend(self.layer, step, q, q[:, :HEADS], q[:, :HEADS], self.pages, out)
        return out

    def exact(self, q: torch.Tensor, sequence: int) -> torch.Tensor:
        return exact(q, *self.values(sequence))

    def values(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a sequence, [tokens, heads, dim], as the rows have them."""
        k_format, v_format, _ = self.layer.layout
        rows = self.layer.layout.views(self.pages)
        segment = Segment(*rows, self.lens, k_format, v_format, block_table=self.table)
        found = list(segment.dequantized(sequence))
        for i, basis in enumerate(self.layer.basis or ()):
            found[i] = basis.decode(found[i][None])[0]
        return found[0].transpose(0, 1), found[1].transpose(0, 1)


class LatentPages(SequencePages):
    layer: LatentRows

    def shape(self) -> tuple[int, ...]:
        return PAGE, self.layer.fmt.row_bytes

    def make(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.randn(tokens, LATENT + ROPE, device=self.device).to(self.dtype)
        return made[:, :LATENT], made[:, LATENT:]

    def write(self, one: torch.Tensor, other: torch.Tensor, slots: torch.Tensor) -> None:
        append_latents(self.layer, one, other, self.pages, slots)

    def queries(self, tokens: int) -> torch.Tensor:
        size = tokens, LATENT_HEADS, LATENT + ROPE
        return torch.randn(size, device=self.device).to(self.dtype)

    def attended(self, step: Step, q: torch.Tensor) -> torch.Tensor:
        return attend_to_latents(self.layer, step, q[..., :LATENT], q[..., LATENT:], self.pages)

    def exact(self, q: torch.Tensor, sequence: int) -> torch.Tensor:
        keys = self.values(sequence)[:, None]
        return exact(q, keys, keys[..., :LATENT], scale=LATENT_SCALE)

    def values(self, sequence: int) -> torch.Tensor:
        """Keys of a sequence, [tokens, LATENT + ROPE]."""
        slots = self.slots_of(sequence, 0, int(self.lens[sequence]))
        out = torch.empty(len(slots) * (LATENT + ROPE), device=self.device)
        return torch.cat(latents_at(self.layer, self.pages, slots, out), -1)[:, 0]


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: AttentionVariant = PLAIN,
    scale: float = SCALE,
) -> torch.Tensor:
    """Attend with the last tokens, float64 on the CPU."""
    k, v = (x.cpu().transpose(0, 1)[None] for x in (k, v))
    return by_hand(q.cpu()[None], k, v, [k.shape[2]], [len(q)], variant, scale)[0][0]
