"""What an engine gives to attention over quantized rows, and what it gets: the contract.

The engine has pages, sequences, and a model that runs in steps. Rows lie in the engine's pages, so
whatever moves pages (prefix caches, swapping, connectors) moves rows.

    when                     the engine gives                      and gets
    ─────────────────────────────────────────────────────────────────────────────────────────────
    it makes its pages       Settings, KV heads, head dims         Settings.layout: a PageLayout
    it has loaded its model  LayerRows of each layer, StepCalls    warmup.warm_up_layers: compiled
    a step begins            NewTokens                             step.describe_step: a Step
    a layer has K and V      K, V, pages, slots                    step.append: rows in the pages
    then, in that layer      queries, K, V, pages, the Step        step.attend: the output

The tokens of a step follow one another, those of a sequence together, decoding sequences first.
Prompts begin at the first sequence with more new tokens than `most_queries`, or with several and no
past:

    sequence    0    1    2                3                   starts    0 1 2 6 9
    token       a    b    c0  c1  c2  c3   d0  d1  d2

    q       [num_tokens or more, num_q_heads, head_dim], the model's dtype, after RoPE
    k       [num_tokens or more, num_kv_heads, head_dim], as q
    v       [num_tokens or more, num_kv_heads, head_dim of V], as q
    out     [num_tokens or more, num_q_heads, head_dim of V], as q: written by attend
    pages   [num_pages, num_kv_heads, page_size, layout.token_bytes or more], uint8, the bytes of a
            head in a page contiguous; or K's and V's apart, [num_pages, num_kv_heads, page_size,
            row bytes or more] each, rows contiguous. New pages may hold anything
    slots   [num_tokens], int64: page * page_size + place in the page, where a token's rows go; a
            negative one writes nothing

All tensors are on the layer's device, if not said to be on the CPU. kvquant reads nothing back
from the device. A CUDA graph may hold append and attend for a Step without prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

from ..errors import ShapeError
from ..rows.basis import LayerBasis
from ..rows.format import RowFormat
from ..rows.variant import AttentionVariant, moved
from .window import WindowRows

UNIT = 16  # bytes that pages, and what is in them, are aligned to on CUDA
Pages: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"


class PageLayout(NamedTuple):
    """Where the rows of K and V lie in pages [num_pages, num_kv_heads, page_size, token_bytes].

    The bytes of a head in a page are two planes without gaps: the K rows of the page's tokens, then
    their V rows. What is left of longer pages is not used. In pages of 16 tokens or more both
    planes start at multiples of 16. A part of a page belongs to a part of the heads, as vLLM
    assumes between unlike tensor parallelism.

    Attributes:
        k_format: format of K.
        v_format: format of V.
        num_kv_heads: of the layer, on this rank.
    """

    k_format: RowFormat
    v_format: RowFormat
    num_kv_heads: int

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's K and V in a head."""
        return self.k_format.row_bytes + self.v_format.row_bytes

    @property
    def elements(self) -> int:
        """Of a token's K and V in all heads."""
        return self.num_kv_heads * (self.k_format.head_dim + self.v_format.head_dim)

    def row_bytes(self, page_size: int) -> tuple[int, int]:
        """Bytes from a row of K, and of V, to the next where K and V have pages of their own.

        Rows of pages of fewer than 16 tokens are padded, so that planes start at multiples of 16.
        """
        unit = max(UNIT // page_size, 1)
        k, v = (-(-fmt.row_bytes // unit) * unit for fmt in (self.k_format, self.v_format))
        return k, v

    def views(self, pages: Pages) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V rows of pages, [num_pages, num_kv_heads, page_size, row bytes] each, without a
        copy.

        Raises:
            ShapeError: the pages are neither of the two kinds that the module describes.
        """
        k_bytes, v_bytes = self.k_format.row_bytes, self.v_format.row_bytes
        if not isinstance(pages, torch.Tensor):
            k_pages, v_pages = pages
            return k_pages[..., :k_bytes], v_pages[..., :v_bytes]
        num_pages, heads, size, token_bytes = pages.shape
        *of_pages, of_token, of_byte = pages.stride()
        fits = (heads, of_token, of_byte) == (self.num_kv_heads, token_bytes, 1)
        if not fits or token_bytes < self.token_bytes:
            raise ShapeError(
                f"pages are {list(pages.shape)} with strides {list(pages.stride())}: they must be "
                f"[num_pages, {self.num_kv_heads}, page_size, {self.token_bytes} or more] for "
                f"{self.k_format} and {self.v_format}, the last two axes contiguous"
            )
        shape, v_start = (num_pages, heads, size), pages.storage_offset() + size * k_bytes
        return (  # each layer does this in each step: here torch is called twice
            pages.as_strided((*shape, k_bytes), (*of_pages, k_bytes, 1)),
            pages.as_strided((*shape, v_bytes), (*of_pages, v_bytes, 1), v_start),
        )


class Lengths(NamedTuple):
    """Lengths of sequences, one after another, that attend causally.

    Attributes:
        queries: of each sequence, its last tokens.
        keys: of each sequence.
        query_starts, key_starts: [num_seqs + 1], int32: where each begins.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    query_starts: torch.Tensor
    key_starts: torch.Tensor


# of an engine: takes q, k, v [tokens, heads, head_dim], their Lengths, and out, which it writes
CausalAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Lengths, torch.Tensor], object
]


class LayerRows(NamedTuple):
    """What a layer's attention needs besides the pages.

    Attributes:
        layout: of its pages.
        sm_scale: factor on q·k.
        basis: of its rows, on the device; None for none.
        variant: what the model changes in attention; None for nothing.
        prompts_from_rows: as of Settings.
        causal: the engine's 16-bit kernel for prompts, with the layer's scale and variant; None
            for torch's.
        window: first and last tokens in 16 bit; None for none.
    """

    layout: PageLayout
    sm_scale: float
    basis: LayerBasis | None = None
    variant: AttentionVariant | None = None
    prompts_from_rows: bool = False
    causal: CausalAttention | None = None
    window: WindowRows | None = None

    def to(self, device: torch.device | str) -> LayerRows:
        """A copy on another device, without the engine's kernel and tokens in 16 bit."""
        basis = self.basis and self.basis.to(device)
        variant = None if self.variant is None else moved(self.variant, device)
        return self._replace(basis=basis, variant=variant, causal=None, window=None)


class NewTokens(NamedTuple):
    """The tokens of a step, as the engine knows them.

    Attributes:
        block_table: [num_seqs or more, max_pages], int32: the pages of each sequence, in the order
            of its tokens.
        seq_lens: [num_seqs or more], int32: tokens of each, the new ones included.
        starts: [num_seqs + 1], integers on the CPU: where the new tokens of each sequence begin.
        lens: [num_seqs], integers on the CPU: as seq_lens. For a decoding sequence an upper bound
            is enough.
        num_tokens: of the step, with the padding of a CUDA graph.
        most_queries: new tokens of a decoding sequence, at most: 1, and its drafted tokens.
        prefilling: [num_seqs], bool, on the CPU: whether each sequence reads a prompt. None: it
            does with more than most_queries new tokens, or with several and no past.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor
    lens: torch.Tensor
    num_tokens: int
    most_queries: int = 1
    prefilling: torch.Tensor | None = None

    def check(self) -> None:
        """Raise ShapeError unless sizes, dtypes and devices fit one another."""
        table, seq_lens, starts, lens, num_tokens, *_ = self
        seqs = len(starts) - 1
        if not (
            {starts.device.type, lens.device.type} == {"cpu"}
            and lens.shape == (seqs,)
            and (table.ndim, seq_lens.ndim) == (2, 1)
            and min(len(table), len(seq_lens)) >= seqs
            and {table.dtype, seq_lens.dtype} == {torch.int32}
            and num_tokens >= int(starts[-1])
        ):
            each = zip(self._fields, (table, seq_lens, starts, lens), strict=False)
            came = "; ".join(f"{name} {list(x.shape)}, {x.dtype} on {x.device}" for name, x in each)
            raise ShapeError(
                f"the tokens of a step do not fit one another: {came}; num_tokens {num_tokens}. Of "
                f"{seqs} sequences, as starts have, give block_table [{seqs} or more, max_pages] "
                f"and seq_lens [{seqs} or more], int32, lens [{seqs}] and starts on the CPU, and "
                "the last of starts, or more, as num_tokens"
            )
