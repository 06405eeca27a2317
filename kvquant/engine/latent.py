"""Steps of a layer with multi-head latent attention (MLA), whose rows lie in an engine's pages.

contract.py holds, with one exception: the engine attends with the tokens of prompts. It expands
latents to keys and values for them. `latents_at` reads past latents from the pages.

    pages     [num_pages, page_size, row_bytes], uint8, the rows of a page without gaps. A token has
              one row, which holds its latent and its RoPE part
    latent    [num_tokens or more, latent_dim], after its norm
    rope      [num_tokens or more, rope_dim], after RoPE
    q_latent  [num_tokens or more, num_heads, latent_dim]: W_UK^T q of each head
    q_rope    [num_tokens or more, num_heads, rope_dim]: the RoPE part
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import NamedTuple

import torch

from ..cache.warmup import new_queries, new_rows, present_in
from ..ops import mla
from ..ops.append import write_rows
from ..ops.append_checks import check_call
from ..rows.basis import LayerBasis
from ..rows.call import AppendCall, AppendSide, LatentCall
from ..rows.kind import LATENT
from ..rows.latent import LatentFormat
from ..rows.segment import latent_segment
from ..rows.slots import Slots
from .step import Step, dequantize_past, describe_step
from .warmup import LayerCalls, grown


class LatentRows(NamedTuple):
    """What a layer's attention needs besides the pages.

    Attributes:
        fmt: the format of the rows.
        sm_scale: factor on the scores: the model's for keys before absorption.
        basis: of the rows, on the device: k for the latents, v for the RoPE parts; None without
            a plan.
        prompts_from_rows: as in LatentSettings.
    """

    fmt: LatentFormat
    sm_scale: float
    basis: LayerBasis | None = None
    prompts_from_rows: bool = False


def check_kernels(fmt: LatentFormat, dtype: torch.dtype) -> None:
    """Raise UnsupportedError unless CUDA kernels read these rows for a model of this dtype."""
    mla.check_kernels([fmt], "fp16" if dtype == torch.float16 else "bf16")


def append_latents(
    layer: LatentRows,
    latent: torch.Tensor,
    rope: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write the rows of new tokens; raises as kvquant.append_rows. Negative slots write nothing."""
    latent, rope = latent[: len(slots), None], rope[: len(slots), None]
    (latent, rope), encodings = LATENT.to_write(latent, rope, layer.basis)
    parts = zip((latent, rope), _parts(layer, pages), layer.fmt.parts, encodings, strict=True)
    k, v = (AppendSide(x, rows, fmt, None, encoding) for x, rows, fmt, encoding in parts)
    call = AppendCall(k, v, Slots(slots))
    write_rows(call, check=partial(check_call, call))


def attend_to_latents(
    layer: LatentRows,
    step: Step,
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pages: torch.Tensor,
) -> torch.Tensor:
    """Attend with the queries of a step's decoding sequences, after append_latents.

    The result [step.num_tokens, num_heads, latent_dim] is each head's weighted sum of latents, for
    W_UV. It raises as kvquant.mla_decode_attention.
    """
    lens, table = step.seq_lens[: step.decodes], step.block_table[: step.decodes]
    rows = latent_segment(pages[:, None], lens, layer.fmt, block_table=table)
    queries = step.padded(q_latent), step.padded(q_rope)
    call = LatentCall(*queries, [rows], layer.sm_scale, q_lens=step.q_lens)
    return step.unpadded(mla.attend_latents(call, layer.basis, lens)[0])


def latents_at(
    layer: LatentRows, pages: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The dequantized latents and RoPE parts of tokens in the pages.

    Args:
        slots: [tokens], int64, contiguous: page * page_size + place in the page.
        out: contiguous memory of tokens * (latent_dim + rope_dim) elements or more, of any
            dtype.

    Returns:
        [tokens, 1, latent_dim] and [tokens, 1, rope_dim], views of out.
    """
    sizes = [len(slots) * fmt.head_dim for fmt in layer.fmt.parts]
    found = [part.view(len(slots), 1, -1) for part in out.view(-1)[: sum(sizes)].split(sizes)]
    bases = layer.basis or (None, None)
    for part, rows, fmt, basis in zip(
        found, _parts(layer, pages), layer.fmt.parts, bases, strict=True
    ):
        dequantize_past(rows, fmt, basis, slots, part)
    return found[0], found[1]


def _parts(layer: LatentRows, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return LATENT.k_and_v([pages[:, None]], layer.fmt.latent)


class LatentCalls(LayerCalls[LatentRows]):
    """The calls of a layer with latent attention."""

    def _kind_of_rows(self) -> Hashable:
        fmt, _, basis, from_rows = self.layer
        return fmt, present_in(basis), from_rows

    def __call__(self) -> None:
        basis = self.layer.basis
        layer = self.layer._replace(basis=basis and basis.to("meta"))
        shape = self._max_pages, self.page_size, layer.fmt.row_bytes
        pages = torch.empty(shape, dtype=torch.uint8, device="meta")
        for tokens in grown(1, self.max_num_tokens, 2):
            latent, rope = new_rows((tokens,), *layer.fmt.parts, self.dtype)
            slots = torch.empty(tokens, dtype=torch.int64, device="meta")
            append_latents(layer, latent, rope, pages, slots)
            latents_at(layer, pages, slots, latent.new_empty(tokens * layer.fmt.head_dim))
        for counts in self._decoding():
            tokens = sum(counts)
            rows = new_rows((tokens,), *layer.fmt.parts, self.dtype)
            q_latent, q_rope = (new_queries((tokens, self.num_q_heads), x) for x in rows)
            step = describe_step(self._new_tokens(counts, 1))
            attend_to_latents(layer, step, q_latent, q_rope, pages)
