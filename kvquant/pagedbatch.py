"""PagedBatch: steps of several sequences of a paged cache, from tensors at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .append import append_rows
from .attention import State, attend_segments
from .cachechecks import check_size
from .cascade import attend_shared
from .errors import ConfigError, ShapeError
from .paged import PagedKVCache, for_each
from .pagedstate import Step
from .pagepool import SequenceId
from .segments import Segment
from .sharedprefix import SharedPrefix, find_prefix, pays
from .slots import Slots
from .staging import StagedTensors
from .transforms import Rope


class PagedBatch:
    """Places of a batch, given to other sequences or lengths before each step.

    append and attend read lengths, pages and slots from tensors on the device, so a CUDA graph that
    has captured them is replayed for every step. Unused places have length 0, and unused tokens no
    slots: capture in an empty step, with q, k and v of the size that is to be replayed.

        with batch.extend([]), torch.cuda.graph(graph):
            ...  # in every layer batch.append, batch.attend
        with batch.extend(ids, tokens=tokens):
            graph.replay()

    Args:
        cache: the cache.
        max_batch: sequences of a step.
        max_tokens: new tokens of a step; max_batch when None.
        shared_prefix: whether pages that sequences have in common are read once for all of them
            (cascade.py). None: in each step in which this pays; a CUDA graph that has captured
            attend decides for all later steps.

    Raises:
        ConfigError: a size that is not possible.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        max_batch: int,
        max_tokens: int | None = None,
        *,
        shared_prefix: bool | None = None,
    ) -> None:
        self.cache = cache
        self.max_batch = check_size("max_batch", max_batch, at_least=1)
        max_tokens = max_batch if max_tokens is None else max_tokens
        self.max_tokens = check_size("max_tokens", max_tokens, at_least=1)
        counts, slots = (torch.int32, (max_batch,)), (torch.int64, (max_tokens,))
        self._staged = StagedTensors(
            {
                "packed": slots,
                "exact": slots,
                "leaving": slots,
                "positions": slots,
                "block_table": (torch.int32, (max_batch, cache.state.tables.shape[1])),
                "packed_lens": counts,
                "exact_lens": counts,
                "starts": counts,
                "seats": counts,
                "members": (torch.int64, (max_batch,)),
                "prefix_lens": (torch.int32, (1,)),
                "prefix_table": (torch.int32, (1, cache.state.tables.shape[1])),
            },
            cache.device,
        )
        for name in (*Slots._fields, "members"):
            self._staged.tensors[name].fill_(-1)
        self._always_shares = shared_prefix
        self._shares = bool(shared_prefix)  # in this step
        self._ratio = 0  # query heads on a KV head, once attend has seen them
        self._slots: dict[int, Slots] = {}
        self._segments: dict[tuple[int, int], list[Segment]] = {}
        self._num_ids = self._num_tokens = 0

    @property
    def positions(self) -> torch.Tensor:
        """[max_tokens] int64, of each new token in its sequence; 0 where there is none.

        At a fixed address, for the rotary embedding of a captured step.
        """
        return self._staged.tensors["positions"]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors on the device."""
        return self._staged.nbytes

    def extend(
        self,
        ids: Sequence[SequenceId],
        counts: int | Sequence[int] = 1,
        tokens: Sequence[int] | None = None,
    ) -> _OpenStep:
        """Begin a step: grow sequences by new tokens, whose rows are written inside a with block.

        At the end of the block full pages count as written, and new sequences may find them. If the
        block raises, the sequences are cut back to what certainly stands in all layers: their old
        length or, if tokens were to leave the recent window, the tokens packed before.

        Args:
            ids: the sequences; they take the first places of the batch in this order.
            counts: new tokens of each, or of all.
            tokens: the ids of all new tokens, sequence after sequence; None if they are not known,
                then no page is found by others from here on.

        Returns:
            The step, for `with`; the tensors are set already.

        Raises:
            OutOfPagesError: there are not enough pages for all.
            ShapeError: more sequences or tokens than the batch has places for, counts that do not
                fit, or a sequence would outgrow max_seq_len.
            ConfigError: a sequence does not live or is given twice, or the last step was not ended.
        """
        counts = for_each(ids, counts)
        if len(ids) > self.max_batch or sum(counts) > self.max_tokens:
            raise ShapeError(
                f"{len(ids)} sequences and {sum(counts)} tokens: the batch has places for "
                f"{self.max_batch} and {self.max_tokens}"
            )
        step = self.cache.begin_step(ids, counts, tokens)
        self._num_ids, self._num_tokens = len(ids), len(step.slots.packed)
        self._set(step)
        return _OpenStep(self.cache)

    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, *, rope: Rope | None = None
    ) -> None:
        """Write the rows of the step's new tokens in a layer.

        Args:
            layer: index of the layer.
            k: [num_tokens, num_kv_heads, head_dim], bfloat16 or float16 (on the CPU float32 too),
                sequence after sequence; what comes after the tokens of the step is not read.
            v: likewise.
            rope: the rotary embedding of K, if K comes without it.

        Raises:
            ShapeError, ConfigError, DeviceError: as append_rows, or fewer rows than new tokens.
        """
        self.cache.check_layer(layer)
        compiling = torch.compiler.is_compiling()  # one graph for all steps: nothing of this one
        if not (compiling or self._num_tokens <= k.shape[0] <= self.max_tokens):
            raise ShapeError(
                f"k has {k.shape[0]} tokens, the step {self._num_tokens} and the batch places for "
                f"{self.max_tokens}"
            )
        slots = None if compiling else self._slots.get(k.shape[0])
        if slots is None:
            slots = self._make_slots(k.shape[0])
            if not compiling and k.shape[0] <= self.max_batch:  # prompts have any length
                self._slots[k.shape[0]] = slots
        rows, has_exact = self.cache.rows.layers[layer], slots.exact is not None
        append_rows(
            k,
            v,
            rows.k_pages,
            rows.v_pages,
            slots,
            rows.k_format,
            rows.v_format,
            exact_k=rows.k_exact if has_exact else None,
            exact_v=rows.v_exact if has_exact else None,
            exact_format=self.cache.exact_format,
            rope=rope,
            bad=self.cache.bad_rows,
        )

    def attend(self, layer: int, q: torch.Tensor, **options: Any) -> torch.Tensor | State:
        """Attend one token of each sequence to all its tokens of a layer, the new ones included.

        Args:
            layer: index of the layer; append the step's K and V to it first.
            q: [batch, num_q_heads, head_dim], a row for each sequence at least.
            options: sm_scale, return_lse, num_splits, backend, as in decode_attention.

        Returns:
            As decode_attention; zeros for places without a sequence.

        Raises:
            As decode_attention, or ShapeError if there are fewer rows than sequences.
        """
        segments = self._segments_of(layer, q.shape[0])
        if not torch.compiler.is_compiling():
            self._ratio = q.shape[1] // segments[0].k_rows.shape[1]
            if q.is_cuda and torch.cuda.is_current_stream_capturing():
                self._keep_sharing(self._shares)
        if not self._shares:
            return attend_segments(q, segments, **options)
        tensors = self._staged.tensors
        members = tensors["members"][: q.shape[0]]
        prefix = segments[0]._replace(
            seq_lens=tensors["prefix_lens"], block_table=tensors["prefix_table"]
        )
        return attend_shared(q, prefix, segments, members=members, **options)

    def _segments_of(self, layer: int, batch: int) -> list[Segment]:
        """The rows of a layer behind a prefix that is read once, for the first places of the batch.

        Raises:
            ShapeError: batch is less than the sequences of the step, or more than max_batch.
            ConfigError: the layer does not exist.
        """
        if torch.compiler.is_compiling():
            return self._make_segments(layer, batch)
        if not self._num_ids <= batch <= self.max_batch:
            raise ShapeError(
                f"q has {batch} rows, the step {self._num_ids} sequences and the batch places for "
                f"{self.max_batch}"
            )
        found = self._segments.get((layer, batch))
        if found is None:
            found = self._segments[layer, batch] = self._make_segments(layer, batch)
        return found

    def _make_segments(self, layer: int, batch: int) -> list[Segment]:
        self.cache.check_layer(layer)
        names = "block_table", "packed_lens", "exact_lens", "starts", "seats"
        tensors = [self._staged.tensors[name][:batch] for name in names]
        return self.cache.rows.segments(layer, *tensors)

    def _make_slots(self, num_tokens: int) -> Slots:
        """The slots of the first tokens of a step."""
        packed, exact, leaving = (self._staged.tensors[name][:num_tokens] for name in Slots._fields)
        has_exact = self.cache.state.split.exact_len > 0
        return Slots(packed, exact, leaving) if has_exact else Slots(packed)

    def _set(self, step: Step) -> None:
        """Set all tensors to a step, by one copy."""
        state, arrays = self.cache.state, self._staged.next_arrays()
        for name, numbers in step.slots._asdict().items():
            arrays[name][: len(numbers)] = numbers
            arrays[name][len(numbers) :] = 0 if name == "positions" else -1
        count, seats = len(step.ids), step.seats
        lengths, packed_lens = state.lengths[seats], state.packed_lens[seats]
        tables = arrays["block_table"][:count]
        state.tables.take(seats, 0, out=tables, mode="clip")
        exact_lens, starts = lengths - packed_lens, packed_lens % max(state.split.recent_len, 1)
        prefix = self._find_prefix(tables, packed_lens)
        arrays["members"][:] = -1
        arrays["prefix_lens"][0] = 0
        if prefix is not None:
            pages, members = prefix
            shared = len(pages) * state.split.page_size
            arrays["members"][: len(members)] = members
            arrays["prefix_lens"][0] = shared
            arrays["prefix_table"][0, : len(pages)] = pages
            # to these it is as if they began behind the prefix
            packed_lens[members] -= shared
            tables[members, : -len(pages)] = tables[members, len(pages) :]
        for name, values in (
            ("packed_lens", packed_lens),
            ("exact_lens", exact_lens),
            ("starts", starts),
            ("seats", seats),
        ):
            arrays[name][:count] = values
            arrays[name][count:] = 0
        self._staged.send()

    def _find_prefix(
        self, tables: NDArray[np.integer], packed_lens: NDArray[np.integer]
    ) -> SharedPrefix | None:
        """The pages to read once in this step; decides whether it does so."""
        if self._always_shares is False:
            return None
        found = find_prefix(tables, packed_lens, self.cache.state.split.page_size)
        if self._always_shares is None:
            heads = self.cache.num_kv_heads, self._ratio
            self._shares = (
                found is not None
                and self._ratio > 0
                and pays(
                    len(found.members), len(found.pages) * self.cache.state.split.page_size, *heads
                )
            )
        return found if self._shares else None

    def _keep_sharing(self, shares: bool) -> None:
        """Let all later steps be as a captured one.

        Raises:
            ConfigError: another graph was captured otherwise.
        """
        if self._always_shares not in (None, shares):
            raise ConfigError(
                "one CUDA graph reads shared pages once, another one does not: give each a "
                "PagedBatch of its own, or say shared_prefix=True or False"
            )
        self._always_shares = shares


class _OpenStep:
    """A step whose rows are being written."""

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        error: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._cache.end_step(written=error is None)
