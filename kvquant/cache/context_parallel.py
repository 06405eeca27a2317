"""ContextParallelCache: long sequences spread over ranks, each of which holds and reads its part.

A token goes to a rank by its place in the sequence, in blocks:

    rank of token i    (i // block_len) % world_size

So ranks hold equally many tokens, and need no messages to decide. A step attends on each rank to
its tokens, and merges the outputs of all ranks by their lse. GPUs of one host write into one
another's memory and merge in one kernel; other ranks merge after an all-gather.

Source: FlashDecoding's split of a sequence (https://arxiv.org/abs/2311.01282), here over ranks;
vLLM has it as decode context parallel.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, overload

import torch
import torch.distributed as dist

from .. import debug
from ..errors import ConfigError, KVQuantError, ShapeError, UnsupportedError, shown
from ..ops.attention import State, attend
from ..ops.merge import merge_by_kernels
from ..rows.arguments import check_kind, check_size, check_tensors
from ..rows.call import AttentionCall
from ..rows.variant import AttentionVariant, names_of
from .checks import Counts, check_layer, check_options, lens_to_keep, whole_numbers
from .contiguous import KVCache
from .copying import NoShallowCopy
from .latent import LatentKVCache

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack

    from ..kernels.cuda.ranks.launch import Exchange
    from ..rows.options import No, RankOptions, Yes

BLOCK_LEN = 256  # tokens
ALIGNMENT = 16  # bytes, of what a rank gives: kernels read as many at a time
log = logging.getLogger("kvquant")
_POSSIBLE = {"soft_cap", "sink_logits"}  # of a variant: what needs no positions


class ContextParallelCache(NoShallowCopy):
    """A KVCache whose sequences are spread over the ranks of torch.distributed.

    Every rank calls the same methods with the same tokens and queries, and keeps its share: a block
    of tokens, then none for as many blocks as there are other ranks. Each rank's first and last
    tokens (sink_len, recent_len) are in 16 bit. On CUDA the host reads nothing in a step: with
    NCCL one CUDA graph serves every step. A rank that raises must end the others, as torchrun does.

    Args:
        cache: of this rank, empty, without windows; alike on all ranks. It needs room for
            `tokens_of(longest sequence, 0, world_size, block_len)` tokens.
        group: the ranks; all of them when None.
        block_len: tokens in a row that a rank gets.

    Attributes:
        cache: as above. save_cache writes the share of this rank.
        rank, world_size: in the group.

    Raises:
        ConfigError: torch.distributed is not initialized, the cache is no KVCache, not empty, or
            not alike on all ranks.
        UnsupportedError: the cache has windows, or holds latent rows.

    Example (of each rank, started by `torchrun --nproc-per-node 2`):
        dist.init_process_group()
        room = ContextParallelCache.tokens_of(1_000_000, 0, dist.get_world_size())
        cache = ContextParallelCache(KVCache(32, 1, 8, 128, room))
        for layer in range(32):
            cache.append(layer, k[layer], v[layer])  # the prompt, on each rank
        out = cache.step(0, q, k_new, v_new)  # the same on all ranks
    """

    def __init__(
        self, cache: KVCache, group: dist.ProcessGroup | None = None, *, block_len: int = BLOCK_LEN
    ) -> None:
        check_kind("cache", cache, KVCache, "give the KVCache of this rank")
        if isinstance(cache, LatentKVCache):
            raise UnsupportedError("latent rows are not spread over ranks: give a KVCache")
        self.block_len = check_size("block_len", block_len, at_least=1)
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialized: start the ranks by torchrun, and call "
                "torch.distributed.init_process_group()"
            )
        self.cache, self.group = cache, group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        alike = repr(cache).rpartition(", on ")[0], self.block_len
        facts = alike, cache.is_spread, bool(cache.seq_lens.any())
        found = [facts] * self.world_size  # what one rank refuses, all refuse: none waits for it
        dist.all_gather_object(found, facts, group)
        if len({one for one, *_ in found}) > 1:
            raise ConfigError(f"ranks have other caches, or block_len: {found}: make them alike")
        if any(is_spread for _, is_spread, _ in found):
            raise UnsupportedError("a cache lies on several devices: give one on the rank's own")
        if any(is_filled for *_, is_filled in found):
            raise ConfigError("a cache holds tokens already: give empty ones, and append to them")
        if any(cache.windows):
            raise UnsupportedError(
                "a cache with windows is not spread over ranks: a window is short enough for one"
            )
        shape = cache.num_layers, cache.batch
        # by layer: in a step some have the new token already
        self._totals = torch.zeros(shape, dtype=torch.int64, device=cache.device)
        self._may_hold = [False] * cache.num_layers  # tokens on any rank, as far as the host knows
        # how many of a token a rank keeps, by its place in as many blocks as there are ranks, or
        # in as many tokens as there is room for
        most = min(self.block_len, cache.max_seq_len) * self.world_size
        places = torch.arange(most, device=cache.device)
        self._share = (places // self.block_len == self.rank).int()
        self._exchange: Exchange | None = None  # of GPUs that write into one another's memory
        if cache.device.type == "cuda" and self.world_size > 1:
            from ..kernels.cuda.ranks.launch import Exchange

            made = Exchange.between(group, cache.layers[0].v_format.head_dim, cache.device)
            if isinstance(made, str):
                log.warning(
                    "ranks exchange outputs by torch.distributed, which is slower: %s", made
                )
            else:
                self._exchange = made

    @staticmethod
    def tokens_of(tokens: int, rank: int, world_size: int, block_len: int = BLOCK_LEN) -> int:
        """How many of a sequence's tokens a rank holds; rank 0 has the most.

        Raises:
            ConfigError: no such rank, or a size that is not possible.

        Example:
            >>> from kvquant import ContextParallelCache
            >>> [ContextParallelCache.tokens_of(1000, rank, 3, block_len=100) for rank in range(3)]
            [400, 300, 300]
        """
        tokens = check_size("tokens", tokens)
        block_len = check_size("block_len", block_len, at_least=1)
        world_size = check_size("world_size", world_size, at_least=1)
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank is {shown(rank)}: give one of 0 to {world_size - 1}")
        rounds, rest = divmod(tokens, block_len * world_size)
        return rounds * block_len + min(max(rest - rank * block_len, 0), block_len)

    @property
    def seq_lens(self) -> torch.Tensor:
        """[batch] int64: tokens of each sequence that all layers have, on all ranks together."""
        return self._totals.amin(0)

    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, new_lens: Counts | None = None
    ) -> None:
        """Append k and v [batch, num_kv_heads, new_tokens, head_dim]; this rank keeps its share.

        Arguments are those of KVCache.append, the same on all ranks. It raises as KVCache.append
        for this rank's tokens.
        """
        check_layer(layer, self.cache.num_layers)
        check_tensors(k=k, v=v)
        counts = self.cache.layers[layer].check_new(k, v, new_lens)
        totals, new = self._totals[layer], k.shape[2]
        if new == 1 and counts is None:
            share = self._share[totals % len(self._share)]
        else:
            steps = torch.arange(new, device=totals.device)
            places = totals[:, None] + steps
            is_mine = (places // self.block_len) % self.world_size == self.rank
            if counts is not None:
                counts = counts.clamp(0, new)  # those on CUDA are not read
                is_mine &= steps < counts[:, None]
            share = is_mine.sum(1, dtype=torch.int32)
            if new > 1:  # mine to the front, in their order
                most = min(new, (new // (self.block_len * self.world_size) + 1) * self.block_len)
                order = is_mine.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
                k, v = (
                    x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
                    for x in (k, v)
                )
        self.cache.append(layer, k, v, share)  # refuses what it cannot take
        totals += new if counts is None else counts
        self._may_hold[layer] |= new > 0

    @overload
    def attend(self, layer: int, q: Tensor, **options: Unpack[RankOptions[No]]) -> Tensor: ...
    @overload
    def attend(self, layer: int, q: Tensor, **options: Unpack[RankOptions[Yes]]) -> State: ...
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        *,
        variant: AttentionVariant | None = None,
        sm_scale: float | None = None,
        return_lse: bool = False,
        backend: str | None = None,
    ) -> torch.Tensor | State:
        """Attend with q [batch, num_q_heads, head_dim] to all tokens, those of other ranks too.

        Each rank rounds out to the dtype of q twice: before and after the merge.

        Args:
            layer: index of the layer.
            q: [batch, num_q_heads, head_dim], the same on all ranks.
            variant: soft_cap and sink_logits only.
            sm_scale, return_lse, backend: as in decode_attention.

        Returns:
            As decode_attention; the same on all ranks.

        Raises:
            As KVCache.attend; ShapeError where all ranks together hold no tokens of the layer.
            UnsupportedError: another variant, or several queries of a sequence: their positions
                are not those that a rank counts.
        """
        self._check_query(layer, q, variant)
        at = self.cache.layers[layer]
        known = not debug.is_recorded(at.seq_lens) and at.longest is not None  # no graph appends
        if known and not self._may_hold[layer]:
            raise ShapeError(f"layer {layer} holds no tokens: append to it first")
        if variant is not None and self.rank:
            variant = variant._replace(sink_logits=None)  # it is counted once
        of_rank = at.segments(), sm_scale, None, True
        call = AttentionCall(q, *of_rank, variant=variant, backend=backend)
        # KVCache.attend would refuse where this rank has no tokens
        out, lse = attend(call, at.basis, at.seq_lens)
        assert lse is not None
        if self._exchange is not None and backend is None and self._exchange.takes(out):
            self._exchange.merge(out, lse)
        else:
            out, lse = merge_by_kernels(*self._gathered(out, lse), out.dtype, backend)
        return (out, lse) if return_lse else out

    def _gathered(self, out: torch.Tensor, lse: torch.Tensor) -> State:
        """The out and lse of all ranks in order, by one all-gather of their bytes."""
        parts = [x.contiguous().view(-1).view(torch.uint8) for x in (out, lse.float())]
        of_out, of_lse = map(len, parts)
        own = torch.cat([*parts, parts[0][: -(of_out + of_lse) % ALIGNMENT]])
        found = own.new_empty(self.world_size * len(own))
        dist.all_gather_into_tensor(found, own, self.group)
        found = found.view(self.world_size, -1)
        outs = found[:, :of_out].view(out.dtype).unflatten(1, out.shape)
        return outs, found[:, of_out : of_out + of_lse].view(torch.float32).unflatten(1, lse.shape)

    def step(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        variant: AttentionVariant | None = None,
        sm_scale: float | None = None,
        backend: str | None = None,
    ) -> torch.Tensor:
        """Append k and v [batch, num_kv_heads, 1, head_dim], and attend with q [batch, heads, dim].

        Args:
            layer, q, variant, sm_scale, backend: as in attend.
            k, v: [batch, num_kv_heads, 1, head_dim].

        Returns:
            [batch, num_q_heads, head_dim], the same on all ranks.

        Raises:
            As append and attend; nothing is appended then, but where a rank's share has NaN.
        """
        self._check_query(layer, q, variant)
        check_options(q, sm_scale, False, None, backend)
        check_tensors(k=k, v=v)
        self.cache.layers[layer].check_step(q, k, v)
        self.append(layer, k, v)
        return self.attend(layer, q, variant=variant, sm_scale=sm_scale, backend=backend)

    def _check_query(self, layer: int, q: torch.Tensor, variant: AttentionVariant | None) -> None:
        check_layer(layer, self.cache.num_layers)
        check_tensors(q=q)
        if q.ndim != 3:
            raise UnsupportedError(
                f"q is {list(q.shape)}: sequences on several ranks attend with one query each, "
                "[batch, num_q_heads, head_dim]"
            )
        if others := sorted(set(names_of(variant)) - _POSSIBLE):
            raise UnsupportedError(
                f"a variant with {', '.join(others)} needs positions, which ranks do not know: use "
                f"{' and '.join(sorted(_POSSIBLE))} only"
            )
        at = self.cache.layers[layer]
        at.check_query(q)
        at.check_variant(q, variant)

    def check(self) -> None:
        """Raise what an append since the last check could not do, on any rank; all ranks call it.

        Raises:
            As KVCache.check: this rank's error, or one that names the ranks that have some.
            ConfigError: ranks got different numbers of tokens.
        """
        error: KVQuantError | None = None
        try:
            self.cache.check()
        except KVQuantError as raised:
            error = raised
        found: list[tuple[str | None, list[list[int]]]] = [(None, [])] * self.world_size
        own = None if error is None else str(error), self._totals.tolist()
        dist.all_gather_object(found, own, self.group)
        if error is not None:
            raise error
        for rank, (message, _) in enumerate(found):
            if message is not None:
                raise ConfigError(f"rank {rank}: {message}")
        if any(totals != own[1] for _, totals in found):
            raise ConfigError(
                "ranks were given other numbers of tokens, of the first layer "
                f"{[totals[0] for _, totals in found]}: give all of them the same"
            )

    def crop(self, seq_lens: int | Counts) -> None:
        """Drop the last tokens of each sequence, on all ranks; seq_lens counts all ranks together.

        Raises:
            ShapeError: as KVCache.crop.
        """
        kept = lens_to_keep(seq_lens, self.seq_lens.cpu())
        mine = [
            self.tokens_of(n, self.rank, self.world_size, self.block_len) for n in kept.tolist()
        ]
        self.cache.crop(mine)
        self._may_hold = [held and bool(kept.any()) for held in self._may_hold]
        self._totals.copy_(torch.minimum(self._totals, kept.to(self._totals.device)))

    def reorder(self, index: Counts) -> None:
        """Put sequence index[b] at place b on all ranks: see KVCache.reorder."""
        self.cache.reorder(index)
        places = whole_numbers("index", index).to(self._totals.device)
        self._totals.copy_(self._totals.index_select(1, places))

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        self.cache.reset()
        self._totals.zero_()
        self._may_hold = [False] * self.cache.num_layers
