"""PagedBatch: steps of several sequences of a paged cache, from tensors at fixed addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, overload

import numpy as np
import torch

from .. import debug
from ..cache.checks import check_options
from ..cache.copying import NotCopied
from ..errors import ConfigError, ShapeError
from ..ops.append import bind_append, write_rows
from ..ops.append_checks import check_new, check_new_types, check_tokens
from ..ops.attention import State, Transformed, attend
from ..ops.shared_prefix import attend_shared, has_kernel, is_shareable
from ..ops.transform import queries_of
from ..rows.arguments import (
    FLOATS,
    address,
    check_flag,
    check_kind,
    check_size,
    check_tensor,
    check_tensors,
)
from ..rows.basis import Queries
from ..rows.bound import Bound, kind_of
from ..rows.call import AppendCall, AppendSide, AttentionCall
from ..rows.indptr import check_indptr, check_indptr_values
from ..rows.kind import LATENT
from ..rows.rotation import Rope
from ..rows.segment import FixedSegments, Segment, check_segments
from ..rows.slots import Slots
from ..rows.variant import (
    AttentionVariant,
    check_variant,
    check_variant_values,
    moved,
    names_of,
    within,
)
from .cache import PagedKVCache
from .latent import LatentPagedKVCache
from .pool import SequenceId
from .shared_prefix import Numbers, find_prefix, pays
from .staged_tensors import StagedTensors
from .state import Step, for_each, listed
from .warmup import warm_up_batch, warm_up_ragged

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack

    from ..rows.options import No, PagedAttendOptions, PagedStepOptions, Yes


class _Parts(NamedTuple):
    """The rows of a layer for some places of the batch, whole or after a shared prefix."""

    whole: Sequence[Segment]
    prefix: Segment | None  # None where none is ever read once
    own: Sequence[Segment]


# the rows that queries attend to, queries of each sequence (None: one), and whether a graph or
# compiled code keeps the call
Seen: TypeAlias = tuple[_Parts, "torch.Tensor | None", bool]


class StepBatch(NotCopied):
    """Places of a batch and the tensors of its steps, for batches of both kinds of rows."""

    @torch.inference_mode(False)  # else what is made inside it could not be changed outside
    def __init__(
        self,
        cache: PagedKVCache,
        max_batch: int,
        max_tokens: int | None = None,
        *,
        shared_prefix: bool | None = None,
    ) -> None:
        self._check_cache(cache)
        self.sides, self.query = cache.row_kind.sides, cache.row_kind.query  # in messages
        if shared_prefix is not None:
            check_flag("shared_prefix", shared_prefix)
        self.cache, self.shared_prefix = cache, shared_prefix
        self.max_batch = check_size("max_batch", max_batch, at_least=1)
        max_tokens = max_batch if max_tokens is None else max_tokens
        self.max_tokens = check_size("max_tokens", max_tokens, at_least=1)
        counts, slots = (torch.int32, (max_batch,)), (torch.int64, (max_tokens,))
        tables = torch.int32, (max_batch, cache.state.tables.shape[1])
        others = {
            _in_group(name, group): spec
            for group in range(1, len(cache.rows.groups))
            for name, spec in (("packed", slots), ("evicted", slots), ("block_table", tables))
        }
        shared = {
            "members": (torch.int64, (max_batch,)),
            "prefix_lens": (torch.int32, (1,)),
            "prefix_table": (torch.int32, (1, tables[1][1])),
            "shares": counts,
            "own_table": tables,
            "own_lens": counts,
        }
        self._staged = StagedTensors(
            {
                "packed": slots,
                "exact": slots,
                "evicted": slots,
                "positions": slots,
                "block_table": tables,
                "seq_lens": counts,
                "new_lens": counts,
                "q_indptr": (torch.int32, (max_batch + 1,)),
                "packed_lens": counts,
                "exact_lens": counts,
                "starts": counts,
                "seq_slots": counts,
                **others,
                **(shared if shared_prefix is not False else {}),
            },
            cache.device,
        )
        nowhere = [name for name in others if not name.startswith("block_table")]
        for name in (*Slots._fields, *nowhere, *([] if shared_prefix is False else ["members"])):
            self._staged.tensors[name].fill_(-1)
        self._is_open = False  # whether a step is: what compiled code can look at
        self._on_cuda = cache.device.type == "cuda"
        self._is_cold = self._on_cuda  # nothing was appended yet
        self.step_variant: AttentionVariant | None = None
        self._is_ragged_cold = self._on_cuda  # no ragged queries came yet
        # the fewest rows of q, rows of k, and queries of a sequence that graphs have
        self._captured = [max_batch, self.max_tokens, self.max_tokens]
        self._appended: set[int] = set()  # the layers that were appended to in this step
        self._in_graphs: set[int] = set()  # and those that a captured graph appends to
        self._is_compiled = False  # whether compiled code has appended in this step
        self._num_members = 0  # sequences of this step whose prefix is read once
        self._ratio = 0  # queries on a KV head of a sequence, once attend has seen them
        self._slots: dict[tuple[int, int], Slots] = {}  # by groups and tokens
        self._segments: dict[tuple[int, int], _Parts] = {}
        self._num_ids = self._num_tokens = self._most_new = self._longest = 0
        self._bound = [Bound() for _ in range(cache.num_layers)]

    @staticmethod
    def _check_cache(cache: PagedKVCache) -> None:
        """Raise ConfigError unless this kind of batch serves a cache."""
        raise NotImplementedError

    @property
    def positions(self) -> torch.Tensor:
        """[max_tokens] int64: the position of each new token, else 0; fixed address."""
        return self._staged.tensors["positions"]

    @property
    def block_table(self) -> torch.Tensor:
        """[max_batch, max_pages] int32, the pages of each sequence's packed rows; fixed address.

        With windows, those of the layers that see the most.
        """
        return self._staged.tensors["block_table"]

    @property
    def seq_lens(self) -> torch.Tensor:
        """[max_batch] int32, the tokens of each sequence, the new ones included; fixed address."""
        return self._staged.tensors["seq_lens"]

    @property
    def new_lens(self) -> torch.Tensor:
        """[max_batch] int32, the new tokens of each sequence; fixed address."""
        return self._staged.tensors["new_lens"]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors on the device."""
        return self._staged.nbytes

    def extend(
        self,
        ids: Sequence[SequenceId],
        counts: int | Sequence[int] = 1,
        tokens: Sequence[int] | None = None,
    ) -> _Step:
        """Make a step that grows sequences by new tokens; write their rows inside its with block.

        The step begins at `with`; if you never enter the block, nothing happens. At its end full
        pages count as written, and new sequences may find them. If the block raises, or leaves a
        layer out, the sequences with new tokens have failed: free(id) them; all other calls refuse
        them.

        Args:
            ids: the sequences; they take the first places of the batch in this order.
            counts: new tokens of each, or of all.
            tokens: the ids of all new tokens, sequence after sequence; None if unknown: then
                new sequences cannot share these pages.

        Raises:
            Raised at `with`, and the sequences are as they were:
            OutOfPagesError: there are not enough pages for all.
            ShapeError: more sequences or tokens than places, counts that do not fit, or a
                sequence would outgrow max_seq_len.
            ConfigError: a sequence does not live or is given twice, or a step is open; at the
                end of the block, a layer without an append.
        """
        return _Step(self, ids, counts, tokens)

    def _begin(
        self, ids: Sequence[SequenceId], counts: int | Sequence[int], tokens: Sequence[int] | None
    ) -> None:
        """Grow the sequences of a step, and set the tensors."""
        if self._on_cuda and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "a step cannot begin while a graph is captured: write `with batch.extend([]), "
                "torch.cuda.graph(graph):`, in this order"
            )
        ids = listed(ids)
        counts = for_each(ids, counts)
        total, most_new = sum(counts), max(counts, default=0)
        if len(ids) > self.max_batch or total > self.max_tokens:
            raise ShapeError(
                f"{len(ids)} sequences and {total} tokens: the batch has places for "
                f"{self.max_batch} and {self.max_tokens}"
            )
        most = self._captured
        if len(ids) > most[0] or total > most[1] or most_new > most[2]:
            raise ShapeError(
                f"{len(ids)} sequences and {total} tokens, {most_new} of one: a CUDA graph "
                f"of this batch has captured {most[0]} and {most[1]}, {most[2]} of one. Use "
                "another PagedBatch for larger steps"
            )
        step = self.cache.begin_step(ids, counts, tokens)
        try:
            self._set(step)
        except BaseException:
            self.cache.end_step(written=False)
            raise
        self._num_ids, self._num_tokens = len(ids), len(step.slots[0].packed)
        self._most_new, self._appended, self._is_compiled = most_new, set(), False
        self._is_open = True

    def _append(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: Rope | None,
        queries: Queries | None,
        variant: AttentionVariant | None = None,
    ) -> torch.Tensor | None:
        """Append; queries go to write_rows, which gives the result; variant is of a step."""
        self.cache.check_layer(layer)
        compiling = torch.compiler.is_compiling()  # one graph for all steps: nothing of this one
        if rope is None and queries is None and not compiling:
            write = self._bound[layer].find(k, v)
            if write and self._num_tokens <= k.shape[0] and layer not in self._appended:
                self._check_open()
                if not self._on_cuda:  # where memory that is not there ends the process
                    address(k), address(v)
                write.at((self.cache.bad_rows.data_ptr(), k.data_ptr(), v.data_ptr()))
                self._appended.add(layer)
                return None
        if not isinstance(k, torch.Tensor) or k.ndim != 3:
            k_name, v_name = self.sides
            axes = "[num_tokens, num_kv_heads, head_dim]"
            self._refuse(k_name, k, axes, **{v_name: v})
        if not (compiling or self._num_tokens <= k.shape[0] <= self.max_tokens):
            how = ""
            if (k.shape[0], k.shape[1]) == (self.cache.num_kv_heads, self._num_tokens):
                how = ". Tokens come first: give {}.transpose(0, 1) and {}.transpose(0, 1)"
            raise ShapeError(
                f"{self.sides[0]} has {k.shape[0]} tokens, the step {self._num_tokens} and the "
                f"batch places for {self.max_tokens}{how.format(*self.sides)}"
            )
        is_fixed = self._is_fixed(compiling)
        if self._is_cold and not compiling:
            self._is_cold = False
            if variant is not None:
                self.step_variant = moved(variant, "meta")
            warm_up_batch(self, k, rope, self._num_ids)
        self._check_open()
        if compiling:
            self._is_compiled = True
        elif is_fixed:
            self._captured[1] = min(self._captured[1], k.shape[0])
        elif self._num_tokens and layer in self._appended:
            raise ConfigError(
                f"layer {layer} was appended to in this step: give all its tokens in one call"
            )
        group = self.cache.rows.layers[layer].group
        slots = None if compiling else self._slots.get((group, k.shape[0]))
        if slots is None:
            slots = self._make_slots(group, k.shape[0])
            if not compiling and k.shape[0] <= self.max_batch:  # prompts have any length
                self._slots[group, k.shape[0]] = slots
        rows, has_exact = self.cache.rows.layers[layer], slots.exact is not None
        exact_k, exact_v = (rows.k_exact, rows.v_exact) if has_exact else (None, None)
        try:
            if v.ndim != 3:
                check_new(k, v, self.sides)  # says what is wrong
            formats = rows.k_format, rows.v_format
            for name, x, fmt in zip(self.sides, (k, v), formats, strict=True):
                if x.shape[-1] != fmt.head_dim:
                    raise ShapeError(
                        f"{name} is {list(x.shape)}: rows of the cache have {fmt.head_dim} elements"
                    )
            k_side = AppendSide(k, rows.k_pages, rows.k_format, exact_k)
            v_side = AppendSide(v, rows.v_pages, rows.v_format, exact_v)
            options = self.cache.exact_format, rope, self.cache.bad_rows
            call, kind = AppendCall(k_side, v_side, slots, *options), self.cache.row_kind
            if rows.basis is not None:
                if kind is LATENT:
                    check_tokens(call, self.sides)  # before torch transforms them
                (new_k, new_v), (of_k, of_v) = kind.to_write(k, v, rows.basis)
                k_side = k_side._replace(x=new_k, transform=of_k)
                call = call._replace(k=k_side, v=v_side._replace(x=new_v, transform=of_v))
            check = partial(check_tokens, call, self.sides)
            multiplied = write_rows(call, check=check, queries=queries)
        except Exception:  # types are looked at only now: it takes time
            check_new_types(k, v, rope, self.sides)
            raise
        if not compiling:
            (self._in_graphs if is_fixed else self._appended).add(layer)
            as_given = call.k.x is k and call.v.x is v
            if rope is None and as_given and k.shape[0] <= self.max_batch:
                found = bind_append(call)
                self._bound[layer].keep(kind_of(k, v), found and found[1])
        return multiplied

    def _reads_once(self, fixed: bool) -> bool:
        """Whether a call reads a shared prefix once; `fixed` if other steps keep it."""
        return bool(self.shared_prefix) or (self._num_members > 0 and not fixed)

    def _seen_by(
        self,
        layer: int,
        q: torch.Tensor,
        q_indptr: torch.Tensor | None = None,
        variant: AttentionVariant | None = None,
        in_step: bool = False,
    ) -> Seen:
        """What queries attend to, if they fit the step; with in_step the tokens come next."""
        compiling = torch.compiler.is_compiling()
        fixed = self._is_fixed(compiling)
        if not isinstance(q, torch.Tensor) or q.ndim not in (3, 4):
            axes = "[batch, num_q_heads, head_dim] or [batch, q_len, num_q_heads, head_dim]"
            self._refuse(self.query, q, axes)
        batch, num_q_heads, q_lens, q_len = q.shape[0], q.shape[-2], None, 1
        is_own = False  # whether q_indptr is the batch's, or its first entries
        if q_indptr is not None:
            check_indptr(q, q_indptr)
            batch = q_indptr.shape[0] - 1
            group = self.cache.rows.layers[layer].group
            own = self._staged.tensors["q_indptr"]
            is_own = q_indptr is own
            if not (is_own or compiling) and q_indptr.is_contiguous():
                is_own = q_indptr.data_ptr() == own.data_ptr()
            if not is_own and self.cache.state.groups[group] is not None:
                raise ConfigError(
                    f"layer {layer} has a window, whose pages serve the step's new tokens alone: "
                    "give the batch's own q_indptr (batch.q_indptr)"
                )
            if not compiling and not self._num_ids <= batch <= self.max_batch:
                raise ShapeError(
                    f"q_indptr is [batch + 1] {list(q_indptr.shape)}, the step has {self._num_ids} "
                    f"sequences and the batch places for {self.max_batch}"
                )
        elif q.ndim == 4:
            q_lens, q_len = self.new_lens[:batch], q.shape[1]
        parts = self._segments_of(layer, batch, compiling)
        self._check_open()
        if q_indptr is not None and self._is_ragged_cold and not compiling:
            self._is_ragged_cold = False
            warm_up_ragged(self, q, variant)
        if not compiling:
            if not fixed:
                self._check_appended(layer, in_step=in_step)
            if q_lens is not None and q_len < self._most_new:
                raise ShapeError(
                    f"{self.query} is {list(q.shape)}, and a sequence of the step has "
                    f"{self._most_new} new tokens: give [batch, q_len, num_q_heads, head_dim] with "
                    "a query for each, or [batch, num_q_heads, head_dim] for the last one"
                )
            if is_own and q.shape[0] < self._num_tokens:
                raise ShapeError(
                    f"{self.query} is {list(q.shape)}, and the step has {self._num_tokens} new "
                    "tokens: with the batch's own q_indptr give a row for each"
                )
        if q_indptr is not None:
            if fixed and not compiling:
                self._captured[0] = min(self._captured[0], batch)
                self._captured[1] = min(self._captured[1], q.shape[0])
        elif not fixed:
            self._ratio = q_len * num_q_heads // self.cache.num_kv_heads
        elif not compiling:
            self._captured[0] = min(self._captured[0], batch)
            if q_lens is not None:
                self._captured[2] = min(self._captured[2], q_len)
        return parts, q_lens, fixed

    def pays(self, batch: int, num_members: int, tokens: int, ratio: int) -> bool:
        """Whether one read of a prefix saves time; ratio is a sequence's queries on a KV head."""
        raise NotImplementedError

    def _check_open(self) -> None:
        if not self._is_open:
            raise ConfigError(
                "no step of this batch is open: append and attend inside `with batch.extend(...):`"
            )

    def _check_appended(self, layer: int, *, in_step: bool) -> None:
        """Raise unless a layer has, or with in_step gets next, this step's tokens."""
        if not in_step and self._lacks(layer):
            raise ConfigError(
                f"layer {layer} was not appended to in this step: append its new tokens to it "
                "first, their queries see them"
            )
        if self._num_ids and not self._longest:
            raise ShapeError(f"layer {layer} holds no tokens of these sequences: append some first")

    def _lacks(self, layer: int) -> bool:
        """Whether this step has not appended to a layer, as far as the host knows."""
        may_have = layer in self._appended or layer in self._in_graphs or self._is_compiled
        return self._num_tokens > 0 and not may_have

    def check_complete(self) -> None:
        """Raise ConfigError if the host knows of a layer without an append in this step."""
        missing = [layer for layer in range(self.cache.num_layers) if self._lacks(layer)]
        if missing:
            raise ConfigError(
                f"the step ends, and layers {missing!s:.80} were not appended to: append "
                "to every layer inside its block. Its sequences have failed: free them"
            )

    @staticmethod
    def _refuse(name: str, x: torch.Tensor, axes: str, **others: torch.Tensor) -> NoReturn:
        """Raise the error about new rows or a query."""
        check_tensors(**{name: x}, **others)
        hint = ""
        if x.ndim == 4 and not name.startswith("q"):
            hint = ", the tokens of all sequences one after another: give "
            hint += f"{name}.transpose(1, 2).flatten(0, 1)"
        raise ShapeError(f"{name} is {list(x.shape)}: it must be {axes}{hint}")

    def _takes(self, q: torch.Tensor) -> bool:
        """Whether there are kernels for queries of this dtype, which check_options has checked."""
        return not (self._on_cuda and q.dtype is torch.float32)

    def _is_fixed(self, compiling: bool) -> bool:
        """Whether a CUDA graph or compiled code keeps this call for other steps.

        compiling is torch.compiler.is_compiling() of the caller: after an error in another function
        Dynamo may compile this one alone, and it would be True here.
        """
        return compiling or (self._on_cuda and torch.cuda.is_current_stream_capturing())

    def _segments_of(self, layer: int, batch: int, compiling: bool = False) -> _Parts:
        """The rows of a layer for the first places of the batch; raises for others."""
        if compiling:
            return self._make_segments(layer, batch)
        if not self._num_ids <= batch <= self.max_batch:
            raise ShapeError(
                f"{self.query} has {batch} rows, the step {self._num_ids} sequences and the batch "
                f"places for {self.max_batch}"
            )
        found = self._segments.get((layer, batch))
        if found is None:
            made = self._make_segments(layer, batch)
            found = _Parts(FixedSegments(made.whole), made.prefix, FixedSegments(made.own))
            self._segments[layer, batch] = found
        return found

    def _make_segments(self, layer: int, batch: int) -> _Parts:
        self.cache.check_layer(layer)
        staged, group = self._staged.tensors, self.cache.rows.layers[layer].group
        table = _in_group("block_table", group)
        names = table, "packed_lens", "exact_lens", "starts", "seq_slots"
        whole = self.cache.rows.segments(layer, *(staged[name][:batch] for name in names))
        if self.shared_prefix is False:
            return _Parts(whole, None, whole)
        packed, *others = whole
        prefix = packed._replace(seq_lens=staged["prefix_lens"], block_table=staged["prefix_table"])
        own = packed._replace(
            seq_lens=staged["own_lens"][:batch], block_table=staged["own_table"][:batch]
        )
        return _Parts(whole, prefix, [own, *others])

    def _make_slots(self, group: int, num_tokens: int) -> Slots:
        """The slots of a step's first tokens in the layers of a group."""
        names = _in_group("packed", group), "exact", _in_group("evicted", group)
        packed, exact, evicted = (self._staged.tensors[name][:num_tokens] for name in names)
        has_exact = self.cache.state.split.exact_len > 0
        return Slots(packed, exact, evicted) if has_exact else Slots(packed)

    def _set(self, step: Step) -> None:
        state, arrays = self.cache.state, self._staged.next_arrays()
        numbers_of = step.slots[0]._asdict()
        for group, slots in enumerate(step.slots[1:], 1):
            numbers_of[_in_group("packed", group)] = slots.packed
            numbers_of[_in_group("evicted", group)] = slots.evicted
        for name, numbers in numbers_of.items():
            arrays[name][: len(numbers)] = numbers
            arrays[name][len(numbers) :] = 0 if name == "positions" else -1
        count, seq_slots = len(step.ids), step.seq_slots
        lengths, packed_lens = state.lengths[seq_slots], state.packed_lens[seq_slots]
        self._longest = int(lengths.max(initial=0))
        # tables are as wide as the longest sequence there may be: only what is in use is copied
        used = state.split.num_pages(packed_lens)
        for group, of in enumerate(state.groups):
            table = arrays[_in_group("block_table", group)]
            _copy_pages(table, np.arange(count), state.tables, seq_slots, used)
            if of is not None:
                width = int(used.max(initial=0))
                table[:count, :width] = of.frames[table[:count, :width]].clip(min=0)
        if self.shared_prefix is not False and state.groups[0] is None:  # else nobody reads it
            self._share(step, used, arrays)
        for name, values in (
            ("seq_lens", lengths),
            ("new_lens", step.counts),
            ("packed_lens", packed_lens),
            ("exact_lens", lengths - packed_lens),
            ("starts", state.split.ring_row(packed_lens)),
            ("seq_slots", seq_slots),
        ):
            arrays[name][:count] = values
            arrays[name][count:] = 0
        indptr = arrays["q_indptr"]
        indptr[1 : count + 1] = np.cumsum(step.counts)
        indptr[count + 1 :] = indptr[count]
        self._staged.send()

    def _share(self, step: Step, used: Numbers, arrays: Mapping[str, Numbers]) -> None:
        """Find the pages that this step reads once, and set the tensors for them."""
        state, seq_slots = self.cache.state, step.seq_slots
        count, page_size = len(seq_slots), state.split.page_size
        packed_lens = state.packed_lens[seq_slots]
        prefix = None
        longest = int(packed_lens.max(initial=0))
        if self.shared_prefix or self.pays(count, count, longest, self._ratio):
            prefix = find_prefix(arrays["block_table"][:count], packed_lens, page_size)
        if prefix is not None and self.shared_prefix is None:
            shared = len(prefix.pages) * page_size
            if not self.pays(count, len(prefix.members), shared, self._ratio):
                prefix = None
        self._num_members = 0 if prefix is None else len(prefix.members)
        arrays["members"][:] = -1
        arrays["shares"][:] = arrays["prefix_lens"][0] = 0
        if prefix is None and not self.shared_prefix:
            return  # nothing of the rest is read
        own_tables, own_lens = arrays["own_table"], arrays["own_lens"]
        _copy_pages(own_tables, np.arange(count), state.tables, seq_slots, used)
        own_lens[:count], own_lens[count:] = packed_lens, 0
        if prefix is not None:
            pages, members = prefix
            shared = len(pages)
            arrays["members"][: len(members)] = members
            arrays["shares"][members] = 1
            arrays["prefix_lens"][0] = shared * page_size
            arrays["prefix_table"][0, :shared] = pages
            own_lens[members] -= shared * page_size
            rest = used[members] - shared
            _copy_pages(own_tables, members, state.tables, seq_slots[members], rest, first=shared)


def _in_group(name: str, group: int) -> str:
    """The name of a group's tensor; the first group has the plain one."""
    return f"{name}_{group}" if group else name


def _copy_pages(
    target: Numbers,
    places: Numbers,
    tables: Numbers,
    seq_slots: Numbers,
    counts: Numbers,
    first: int = 0,
) -> None:
    """Copy so many pages of each sequence slot, from `first` on, to the start of each place."""
    width = int(counts.max(initial=0))
    if len(seq_slots) * width <= 4 * int(counts.sum()) + 4096:
        target[places, :width] = tables[seq_slots, first : first + width]
        return
    for place, seq_slot, count in zip(
        places.tolist(), seq_slots.tolist(), counts.tolist(), strict=True
    ):
        target[place, :count] = tables[seq_slot, first : first + count]


class _Step:
    """A step, open inside its with block; see StepBatch.extend."""

    def __init__(self, batch: StepBatch, *given: Any) -> None:
        self._batch, self._given = batch, given

    def __enter__(self) -> None:
        self._batch._begin(*self._given)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        batch, written = self._batch, False
        batch._is_open = False
        if error is not None:
            with suppress(ConfigError):  # of an interrupt in a call: it is the one to raise
                batch.cache.end_step(written=False)
            return
        try:
            batch.check_complete()
            written = True
        finally:
            batch.cache.end_step(written=written)


class PagedBatch(StepBatch):
    """Places of a batch, given to other sequences or lengths before each step.

    append and attend read lengths, pages and slots from tensors on the device, so one CUDA graph
    serves every step. Unused places have length 0 and no slots: capture in an empty step, with q, k
    and v of the size to replay.

        with batch.extend([]), torch.cuda.graph(graph):
            ...  # in every layer batch.append, batch.attend
        with batch.extend(ids, tokens=tokens):
            graph.replay()

    A step with new tokens appends to every layer once; Python code that skips or repeats a layer
    raises. Replays and compiled code are not checked.

    Args:
        cache: the cache.
        max_batch: sequences of a step.
        max_tokens: new tokens of a step; max_batch when None.
        shared_prefix: whether to read pages that sequences share once for all of them. None: where
            that saves time, but never in captured or compiled code.

    Attributes:
        step_variant: the AttentionVariant of later steps, for which the first append compiles
            kernels on CUDA; only shapes and dtypes count. None for plain attention. The first step
            sets it.

    Raises:
        ConfigError: a size that is not possible.

    Example:
        >>> import torch
        >>> from kvquant import PagedBatch, PagedKVCache
        >>> paged = PagedKVCache(1, 8, 128, num_pages=8, max_seq_len=256)
        >>> batch = PagedBatch(paged, max_batch=2, max_tokens=64)
        >>> present = [paged.allocate(name) for name in ("a", "b")]
        >>> with batch.extend(["a", "b"], [3, 5]):  # 3 new tokens of a, then 5 of b
        ...     batch.append(0, torch.randn(8, 8, 128), torch.randn(8, 8, 128))
        >>> with batch.extend(["a", "b"], [1, 1]):
        ...     batch.append(0, torch.randn(2, 8, 128), torch.randn(2, 8, 128))
        ...     out = batch.attend(0, torch.randn(2, 32, 128))  # of one query for each sequence
        >>> out.shape
        torch.Size([2, 32, 128])
        >>> with batch.extend(["a", "b"], [4, 2]):  # drafted tokens, say: a query for each
        ...     batch.append(0, torch.randn(6, 8, 128), torch.randn(6, 8, 128))
        ...     out = batch.attend(0, torch.randn(2, 4, 32, 128))
        >>> out.shape
        torch.Size([2, 4, 32, 128])
        >>> with batch.extend(["a", "b"], [1, 40]):  # a decode step of a, a chunk of b's prompt
        ...     k, v = torch.randn(2, 41, 8, 128)  # [num_tokens, num_kv_heads, head_dim] each
        ...     q = torch.randn(41, 32, 128)  # of the same tokens
        ...     out = batch.step(0, q, k, v, q_indptr=batch.q_indptr)
        >>> out.shape
        torch.Size([41, 32, 128])
    """

    @property
    def q_indptr(self) -> torch.Tensor:
        """[max_batch + 1] int32: where each place's new tokens begin; fixed address."""
        return self._staged.tensors["q_indptr"]

    @staticmethod
    def _check_cache(cache: PagedKVCache) -> None:
        """Raise ConfigError unless this kind of batch serves a cache."""
        check_kind("cache", cache, PagedKVCache, "give a PagedKVCache")
        if isinstance(cache, LatentPagedKVCache):
            raise ConfigError("cache has latent rows: make a LatentPagedBatch of it")

    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, *, rope: Rope | None = None
    ) -> None:
        """Append the step's tokens, k and v of [num_tokens, num_kv_heads, head_dim], to a layer.

        Tokens of all sequences follow one another, before heads. Tensors with heads first raise,
        but not if num_tokens equals num_kv_heads: the shapes are equal.

        Args:
            layer: index of the layer.
            k: [num_tokens, num_kv_heads, head_dim], bfloat16 or float16 (on the CPU float32 too),
                sequence after sequence; what comes after the tokens of the step is not read.
            v: as k.
            rope: the rotary embedding of K, if K comes without it.

        Raises:
            ShapeError, ConfigError, DeviceError: as append_rows; fewer rows than new tokens, a
                call outside of a step, or a layer's second append in a step.
        """
        self._append(layer, k, v, rope, None)

    @overload
    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[PagedStepOptions[No]]
    ) -> Tensor: ...
    @overload
    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[PagedStepOptions[Yes]]
    ) -> State: ...
    def step(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        q_indptr: torch.Tensor | None = None,
        rope: Rope | None = None,
        variant: AttentionVariant | None = None,
        sm_scale: float | None = None,
        return_lse: bool = False,
        num_splits: int | None = None,
        backend: str | None = None,
    ) -> torch.Tensor | State:
        """Append k and v [num_tokens, heads, dim], and attend with q of each sequence.

        The result is that of append and attend, bit for bit. With a plan, on CUDA and with one new
        token of each sequence, step is faster.

        Args:
            layer: index of the layer.
            q: [batch, num_q_heads, head_dim] or [batch, q_len, num_q_heads, head_dim], or with
                q_indptr [num_tokens, num_q_heads, head_dim], as in attend.
            k, v: [num_tokens, num_kv_heads, head_dim], as in append.
            q_indptr: as in attend.
            rope: as in append, of k; q comes with its rotary embedding.
            variant, sm_scale, return_lse, num_splits, backend: as in attend.

        Returns:
            As attend.

        Raises:
            As append and attend; nothing is appended if q, the variant or an option is invalid.

        Example:
            >>> import torch
            >>> from kvquant import PagedBatch, PagedKVCache
            >>> paged = PagedKVCache(1, 8, 128, num_pages=8, max_seq_len=256)
            >>> batch = PagedBatch(paged, max_batch=2, max_tokens=64)
            >>> present = [paged.allocate(name) for name in ("a", "b")]
            >>> k, v = torch.randn(2, 5, 8, 128)  # [num_tokens, num_kv_heads, head_dim] each
            >>> q = torch.randn(2, 4, 32, 128)  # [batch, q_len, num_q_heads, head_dim]
            >>> with batch.extend(["a", "b"], [4, 1]):  # 4 new tokens of a, then one of b
            ...     out = batch.step(0, q, k, v)  # 4 queries of a, one of b and 3 rows of padding
            >>> out.shape
            torch.Size([2, 4, 32, 128])
        """
        self.cache.check_layer(layer)
        check_tensors(q=q, k=k, v=v)
        if q_indptr is not None:
            check_indptr(q, q_indptr)
        is_plain = variant is None and sm_scale is None and num_splits is None and backend is None
        if not (is_plain and type(return_lse) is bool and self._takes(q)):
            check_options(q, sm_scale, return_lse, num_splits, backend)
            if variant is not None and names_of(variant):
                check_variant(q, variant)
        check_tensor("q", q, FLOATS)
        seen = self._seen_by(layer, q, q_indptr, variant, in_step=True)
        at = self.cache.rows.layers[layer]
        is_right = q.shape[-1] == at.k_format.head_dim and q.device == at.k_pages.device
        if not is_right or q.shape[-2] % self.cache.num_kv_heads:
            check_segments(q, seen[0].whole, seen[1], q_indptr)  # says what is wrong
        if q_indptr is not None and debug.may_read(q_indptr):
            check_indptr_values(q, q_indptr, padded=True)
        if variant is not None and names_of(variant) and debug.may_read(q):
            check_variant_values(q, seen[1], variant)
        basis, given = at.basis, None
        one_each = q.ndim == 3 and len(q) == len(k)
        if basis is not None and one_each and not q.shape[1] % self.cache.num_kv_heads:
            given = queries_of(q, basis, sm_scale, backend)
        found = self._append(layer, k, v, rope, None if given is None else given[0], variant)
        transformed = None if found is None or given is None else (found, given[1])
        options = sm_scale, num_splits, return_lse, backend
        return self._attend(layer, q, q_indptr, seen, transformed, variant, *options)

    @overload
    def attend(
        self, layer: int, q: Tensor, **options: Unpack[PagedAttendOptions[No]]
    ) -> Tensor: ...
    @overload
    def attend(
        self, layer: int, q: Tensor, **options: Unpack[PagedAttendOptions[Yes]]
    ) -> State: ...
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        *,
        q_indptr: torch.Tensor | None = None,
        variant: AttentionVariant | None = None,
        sm_scale: float | None = None,
        return_lse: bool = False,
        num_splits: int | None = None,
        backend: str | None = None,
    ) -> torch.Tensor | State:
        """Attend with q of each sequence: its last token's, or those of its new tokens.

        One query belongs to the last token of a sequence; several are those of the step's new
        tokens, each of which sees the tokens up to its own. An early one may read packed rows of
        tokens that were still in 16 bit at its own step.

        Ragged queries (chunks of prompts beside decode steps) follow one another as the tokens of
        append do: give `q_indptr=batch.q_indptr`.

        Args:
            layer: index of the layer; append the step's K and V to it first.
            q: [batch, num_q_heads, head_dim], at least a row for each sequence: the query of its
                last token. Or [batch, q_len, num_q_heads, head_dim]: those of its new tokens, then
                padding. Or with q_indptr [total, num_q_heads, head_dim].
            q_indptr: [batch + 1 to max_batch + 1], int32, as in decode_attention;
                `batch.q_indptr` has that of the step's new tokens. A CUDA graph serves any counts
                up to the rows of q. A layer with a window takes batch.q_indptr, or its first
                entries, only.
            variant: see AttentionVariant; a layer's own window is applied without one. Ragged
                queries, windows and ALiBi read a shared prefix for each sequence; a soft cap, score
                offsets or a tree too, unless shared_prefix is True.
            sm_scale, return_lse, num_splits, backend: as in decode_attention.

        Returns:
            As decode_attention; zeros for places without a sequence, and rows without a query.

        Raises:
            As decode_attention.
            ShapeError: fewer rows than sequences or new tokens, or no sequence has a token.
            ConfigError: outside of a step, or before the append.
        """
        options = sm_scale, num_splits, return_lse, backend
        seen = self._seen_by(layer, q, q_indptr, variant)
        return self._attend(layer, q, q_indptr, seen, None, variant, *options)

    def _attend(
        self,
        layer: int,
        q: torch.Tensor,
        q_indptr: torch.Tensor | None,
        seen: Seen,
        transformed: Transformed | None,
        variant: AttentionVariant | None,
        sm_scale: float | None,
        num_splits: int | None,
        return_lse: bool,
        backend: str | None,
    ) -> torch.Tensor | State:
        """Attend; transformed is q in the layer's basis, if an append has computed it."""
        parts, q_lens, fixed = seen
        tensors, members = self._staged.tensors, None
        window = self.cache.windows[layer]
        if window is not None:
            variant = within(variant, window)
        elif q_indptr is None and self._reads_once(fixed):
            if self.shared_prefix:
                members = tensors["members"][: q.shape[0]] if is_shareable(variant) else None
            elif set(names_of(variant)) <= {"sink_logits"}:  # it pays by the plain kernels' times
                members = tensors["members"][: self._num_members]
        basis, seq_lens = self.cache.rows.layers[layer].basis, self.seq_lens
        segments, stored = parts.whole if members is None else parts.own, (basis, seq_lens)
        options = sm_scale, num_splits, return_lse, q_lens, variant, backend, q_indptr
        call = AttentionCall(q, segments, *options, padded=True)
        if members is None:
            out, lse = attend(call, *stored, transformed)
        else:
            assert parts.prefix is not None
            out, lse = attend_shared(call, parts.prefix, members, *stored, transformed)
        return out if lse is None else (out, lse)

    def pays(self, batch: int, num_members: int, tokens: int, ratio: int) -> bool:
        """As StepBatch.pays."""
        if not all(has_kernel(at.k_format, at.v_format) for at in self.cache.rows.layers):
            return False  # the decode kernel unpacks a prefix for each 8 queries, here or there
        return pays(num_members, tokens, self.cache.num_kv_heads, ratio)
