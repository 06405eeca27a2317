"""PagedKVCache: packed rows in pages that sequences share, 16-bit rows in sequence slots."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from ..cache.checks import (
    Formats,
    check_bad_rows,
    check_bases,
    check_holds,
    check_layer,
    check_windows,
    formats_of,
    planned_options,
)
from ..cache.copying import NotCopied
from ..cache.memory import check_room
from ..errors import ConfigError, KVQuantError, shown
from ..ops.dispatch import check_cuda_codecs, check_cuda_pages
from ..rows.arguments import check_device, check_flag, check_size
from ..rows.basis import LayerBasis
from ..rows.codec import check_exact_format, one_of
from ..rows.format import RowFormat
from ..rows.kind import KEY_VALUE, LATENT, KeyValue
from ..rows.quantize import check_dtype
from ..rows.segment import PAGE_SIZES
from ..rows.slots import Split
from .pool import SequenceId
from .prefix_tree import whole_number
from .state import (
    PagedState,
    Step,
    for_each,
    group_sizes,
    listed,
    pages_of,
    plain_id,
    plain_namespace,
)
from .storage import PagedRows
from .swap import Swapped, SwapSpace

SEQ_SLOTS = 16  # 304 MiB of 16-bit rows with 32 layers of 8 KV heads of 128
DRAFTS = 16  # tokens of a step that can be taken back, without rollback_len
CHUNK = 2048  # new tokens of a step, for which layers with a window have pages
MAX_SEQ_LEN = 32768

if TYPE_CHECKING:
    from typing_extensions import Self, TypedDict, Unpack

    from ..io.plan import ModelPlan, Plan

    class PlanOptions(TypedDict, total=False):
        """Options of PagedKVCache that a plan does not decide."""

        max_num_seqs: int
        max_seq_len: int
        page_size: int
        sink_len: int
        recent_len: int
        exact_format: str
        rollback_len: int | None
        device: torch.device | str
        windows: Sequence[int | None] | None
        chunk_len: int


class PagedKVCache(NotCopied):
    """Keys and values of many sequences that come, fork, end and share their beginnings.

    The cache allocates all memory when it is made. Packed rows lie in pages that sequences share; a
    shared last page is copied before a write. 16-bit rows (sinks and recent window) lie in a
    sequence slot for each sequence. Rows are quantized as in KVCache. PagedBatch appends and
    attends:

        present = cache.allocate("a", tokens)  # so many are known from other sequences
        with batch.extend(["a"], len(tokens) - present, tokens[present:]):
            ...  # in every layer batch.append, and batch.attend for one token each

    Ids are strings or whole numbers. A call that raises has changed nothing. A step whose block
    raises leaves its sequences failed: free them. After an interrupt (Ctrl-C) of a call of the
    cache, make another cache. One thread uses a cache, with one CUDA stream for all calls.

    Args:
        num_layers: layers with attention.
        num_kv_heads: KV heads of each layer.
        head_dim: elements of a row of K and of V; formats given as RowFormat may have their own.
        num_pages: pages of packed tokens, in every layer that sees all tokens, or the most.
        max_num_seqs: sequences that may live at a time. Each has 16-bit room for sink_len +
            recent_len tokens in every layer; as many prefixes keep their sinks.
        max_seq_len: tokens that a sequence may have.
        page_size: tokens of a page: 1, 2, 4, 8, 16, 32, 64, 128 or 256.
        k_format: format of the packed K rows: a name, a RowFormat, or one of these per layer.
            None is "int8-g4" for head_dim 64, 128 or 256 with the default window; see
            rows/defaults.py for others.
        v_format: of V, as k_format; None is "int4-g4" there, for any k_format.
        sink_len: first tokens of each sequence to keep in 16 bit.
        recent_len: last tokens of each sequence to keep in 16 bit.
        exact_format: "bf16" or "fp16" for the 16-bit rows; take the model's.
        rollback_len: how many tokens truncate can take back exactly, by two more copies in each
            step; 0 for none. None: a sequence's last step, if it had 2 to 16 tokens (drafts) and at
            most recent_len.
        device: where all tensors lie. On "meta" a cache takes no memory and no sequences, but
            has its nbytes.
        bases: the transform of each layer's rows, as in KVCache; see from_plan.
        windows: how many of the last tokens each layer attends to; None for all. Layers of one
            window have pages of their own for max_num_seqs sequences and a step of chunk_len
            tokens, at most num_pages. They keep the last window + 64 + recent_len tokens.
        chunk_len: new tokens of all sequences in a step that layers with a window have pages
            for; give a longer prompt in several steps.

    Attributes:
        rows: the tensors.
        state: slots, lengths and pages of the sequences.
        bad_rows: [2] int32, on the device: rows of K and of V that became NaN: see check.

    Raises:
        ConfigError: a size or a format that does not exist.

    Example:
        >>> import torch
        >>> from kvquant import PagedBatch, PagedKVCache
        >>> paged = PagedKVCache(1, 8, 128, num_pages=8, max_seq_len=256)
        >>> batch = PagedBatch(paged, max_batch=2, max_tokens=64)
        >>> paged.allocate("a")  # tokens whose rows are there already
        0
        >>> with batch.extend(["a"], [20]):
        ...     batch.append(0, torch.randn(20, 8, 128), torch.randn(20, 8, 128))
        >>> paged.fork("a", "b")
        >>> paged.length("b")
        20
    """

    row_kind: ClassVar[KeyValue] = KEY_VALUE

    @torch.inference_mode(False)  # else what is made inside it could not be changed outside
    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        *,
        max_num_seqs: int = SEQ_SLOTS,
        max_seq_len: int = MAX_SEQ_LEN,
        page_size: int = 64,
        k_format: Formats | None = None,
        v_format: Formats | None = None,
        sink_len: int = 4,
        recent_len: int = 128,
        exact_format: str = "bf16",
        rollback_len: int | None = None,
        device: torch.device | str = "cpu",
        bases: Sequence[LayerBasis] | None = None,
        windows: Sequence[int | None] | None = None,
        chunk_len: int = CHUNK,
    ) -> None:
        num_layers = check_size("num_layers", num_layers, at_least=1)
        self.num_kv_heads = check_size("num_kv_heads", num_kv_heads, at_least=1)
        head_dim = check_size("head_dim", head_dim, at_least=1)
        num_pages = check_size("num_pages", num_pages, at_least=1)
        max_num_seqs = check_size("max_num_seqs", max_num_seqs, at_least=1)
        max_seq_len = check_size("max_seq_len", max_seq_len, at_least=1)
        page_size = check_size("page_size", page_size)
        if page_size not in PAGE_SIZES:
            raise ConfigError(
                f"page_size {shown(page_size)} does not exist: use {one_of(PAGE_SIZES)}"
            )
        check_exact_format(exact_format)
        self.sink_len = check_size("sink_len", sink_len)
        self.recent_len = check_size("recent_len", recent_len)
        split = Split.of(self.sink_len, self.recent_len, page_size, max_seq_len)
        self.rollback_len, most = rollback_len, min(DRAFTS, self.recent_len)
        if rollback_len is not None:
            self.rollback_len = most = check_size("rollback_len", rollback_len)
        if most > self.recent_len > 0:
            raise ConfigError(
                f"rollback_len {shown(rollback_len)} is over recent_len {self.recent_len}: tokens "
                "of a longer step are packed when they come. Use a smaller one, or a larger "
                "recent_len"
            )
        kept = min(most, split.recent_len)  # without recent rows none are changed
        self.exact_format = exact_format
        self.device = check_device(device, or_meta=True)
        shape = num_layers, head_dim, self.sink_len, self.recent_len
        k_formats, v_formats = formats_of(self.row_kind, k_format, v_format, *shape)
        if self.device.type == "cuda":
            check_cuda_codecs([*k_formats, *v_formats])
            check_cuda_pages([*k_formats, *v_formats], page_size)
        checked = check_bases(self.row_kind, bases, self.num_kv_heads, k_formats, v_formats)
        sides = k_formats, v_formats, [basis and basis.to(self.device) for basis in checked]
        self.windows = list(check_windows(windows, num_layers))
        self.chunk_len = check_size("chunk_len", chunk_len, at_least=1)
        groups = group_sizes(self.windows, num_pages, max_num_seqs, split, self.chunk_len)
        # the host has a table for each sequence slot, and lists of pages and sequence slots
        tables = max_num_seqs * pages_of(split, max_seq_len)
        bookkeeping = 300 * (num_pages + max_num_seqs) + 4 * tables
        bookkeeping += 100 * tables * (None not in self.windows)  # see PagedState
        what = f"the bookkeeping of {num_pages} pages and {max_num_seqs} sequence slots"
        check_room(bookkeeping, torch.device("cpu"), what, "use fewer, or a smaller max_seq_len")
        in_groups = [
            ([i for i, window in enumerate(self.windows) if window == size.window], size.num_pages)
            for size in groups
        ]
        sizes = self.num_kv_heads, in_groups, max_num_seqs
        self.rows = PagedRows(self.row_kind, *sides, exact_format, *sizes, split, kept, self.device)
        self.state = PagedState(
            groups, max_num_seqs, max_seq_len, split, kept, drafts_only=rollback_len is None
        )
        self.bad_rows = torch.zeros(2, dtype=torch.int32, device=self.device)
        self.swap_space = SwapSpace(self.state, self.rows)
        self._step: Step | None = None  # whose rows are being written
        self.changing = _Change()

    @classmethod
    def from_plan(cls, plan: Plan, num_pages: int, **options: Unpack[PlanOptions]) -> Self:
        """Make an empty cache whose formats and bases are those of a plan.

        Args:
            plan: a plan, or the path of its file, of the model whose keys and values will come
                (CachePlan.check_model compares). Layer i is the model's layer plan.places[i].
            num_pages: as in the class.
            options: others of the class. A plan has no windows, nor has LatentPagedKVCache.

        Raises:
            ConfigError: a size that is not possible, an option that the plan decides, or a plan
                of latent rows (for LatentPagedKVCache: of keys and values of heads).
            UnsupportedError: as LatentPagedKVCache.
        """
        return cls(num_pages=num_pages, **planned_options(cls.row_kind, plan, cast(Any, options)))

    @classmethod
    def for_model(
        cls,
        model: Any,
        num_pages: int,
        *,
        max_seq_len: int = MAX_SEQ_LEN,
        plan: ModelPlan = None,
        accept_loss: bool = False,
        **options: Any,
    ) -> Self:
        """Make an empty cache with the layers, KV heads and windows of a model of transformers.

        The layers with keys and values of their own follow in the model's order. On a rank of a
        model with a tp_plan the cache has the rank's heads.

        Args:
            model: the model, or its config.
            num_pages, max_seq_len: as in the class.
            plan, accept_loss: as of QuantizedCache.
            options: the other options of the class, except sizes. device and exact_format are the
                model's unless given.

        Raises:
            AccuracyError, CheckpointError: as of QuantizedCache.
            ConfigError: model is no model of transformers and no config, it needs the other class
                (LatentPagedKVCache for latent attention), or an option is not possible.
            UnsupportedModelError: a layer keeps something else than keys and values of tokens, or
                layers differ in their KV heads or their devices.

        Example:
            >>> import transformers
            >>> from kvquant import PagedKVCache
            >>> config = transformers.Gemma3TextConfig(num_hidden_layers=6, sliding_window=512)
            >>> paged = PagedKVCache.for_model(config, num_pages=64, max_num_seqs=4)
            >>> paged.num_kv_heads, paged.windows
            (4, [512, 512, 512, 512, 512, None])
        """
        from ..hf.models.configs import new_paged_cache
        from ..hf.models.probe import check_paged

        check_flag("accept_loss", accept_loss)
        made: Self = new_paged_cache(cls, model, num_pages, max_seq_len, plan=plan, **options)
        if not accept_loss:
            check_paged(model, made)
        return made

    @classmethod
    def for_memory(
        cls,
        nbytes: int,
        *shape: int,
        model: Any = None,
        plan: ModelPlan = None,
        seq_len: int | None = None,
        **options: Any,
    ) -> Self:
        """Make an empty cache whose tensors take at most so many bytes.

        Sequence slots come first: max_num_seqs, or with seq_len as many as sequences of that
        length. Then pages of layers with a window; other layers get the rest. See `token_capacity`.

        Args:
            nbytes: bytes of cache.nbytes. PagedBatch, model and attention take more.
            shape: num_layers, num_kv_heads and head_dim (LatentPagedKVCache: num_layers); nothing
                with a model or a plan.
            model: as in for_model.
            plan: as in for_model with a model, else as in from_plan.
            seq_len: tokens of each sequence; not with max_num_seqs.
            options: the others of PagedKVCache, for_model or from_plan, except num_pages.

        Raises:
            ConfigError: not even one page and the sequence slots fit, or an option is not possible.

        Example:
            >>> from kvquant import PagedKVCache
            >>> paged = PagedKVCache.for_memory(2**26, 4, 8, 128, seq_len=2048)
            >>> paged.num_free_seq_slots, paged.num_free_pages, paged.token_capacity
            (4, 124, 8464)
        """
        nbytes = whole_number("nbytes", nbytes)
        plan = None if plan is False else plan
        source = "plan" if model is None else "model"
        if shape and (model, plan) != (None, None):
            raise ConfigError(f"a {source} has a shape of its own: give it without {list(shape)}")
        if not shape and model is None and plan is None:
            raise ConfigError(
                "the cache has no shape: after nbytes give num_layers, num_kv_heads and head_dim "
                "(num_layers alone for latent rows), or give model= or plan="
            )
        if "num_pages" in options:
            raise ConfigError("num_pages follows from nbytes: leave it out")
        make: Callable[..., Any] = partial(cls, *shape)
        if model is not None:
            make = partial(cls.for_model, model, plan=plan)
        elif plan is not None:
            make = partial(cls.from_plan, plan)
        one = make(num_pages=1, **options | {"max_num_seqs": 1})
        given, rows = options.get("max_num_seqs", SEQ_SLOTS), one.rows
        max_num_seqs = check_size("max_num_seqs", given, at_least=1)
        if seq_len is not None:
            seq_len = check_size("seq_len", seq_len, at_least=1)
            if "max_num_seqs" in options or seq_len > one.max_seq_len:
                raise ConfigError(
                    f"seq_len is {seq_len}, which says how many sequence slots there are: give no "
                    f"max_num_seqs with it, and at most max_seq_len, {one.max_seq_len}"
                )
            pages = rows.split.num_pages(rows.split.packed_len(seq_len))
            # there is one page, whoever needs it
            max_num_seqs = _most(lambda n: one._bytes_of(max(n * pages, 1), n) <= nbytes)
        num_pages = _most(lambda n: one._bytes_of(n, max(max_num_seqs, 1)) <= nbytes)
        if max_num_seqs < 1 or num_pages < 1:
            raise ConfigError(
                f"{nbytes} bytes are too few: a page takes {rows.page_bytes}, and each of "
                f"{max(max_num_seqs, 1)} sequence slots {rows.slot_bytes}. Give more, or a smaller "
                "max_num_seqs, seq_len or recent_len"
            )
        layers = range(one.num_layers)
        made: Self = one.like(layers, num_pages, max_num_seqs, one.device)
        return made

    def _bytes_of(self, num_pages: int, max_num_seqs: int) -> int:
        """Bytes of a cache like this one with so many pages and sequence slots."""
        rows = self.rows
        sizes = group_sizes(self.windows, num_pages, max_num_seqs, rows.split, self.chunk_len)
        each = zip(sizes, rows.groups, strict=True)
        pages = sum(size.num_pages * group.page_bytes for size, group in each)
        return self.bad_rows.nbytes + max_num_seqs * rows.slot_bytes + pages

    def __repr__(self) -> str:
        rows = self.row_kind.described(self.num_kv_heads, *self._formats(range(self.num_layers)))
        return (
            f"{type(self).__name__}({self.num_layers} layers, {rows:.80}"
            f"{', bases' * bool(self.bases)}, {self._num_pages} pages of "
            f"{self.state.split.page_size} tokens, {len(self.state.lengths)} sequence slots, room "
            f"for {self.token_capacity} tokens, {len(self.ids)} sequences, {self.device})"
        )

    def _formats(self, layers: Sequence[int]) -> tuple[list[RowFormat], list[RowFormat]]:
        """Of K and of V, of these layers."""
        kinds = [self.rows.layers[layer] for layer in layers]
        return [at.k_format for at in kinds], [at.v_format for at in kinds]

    @property
    def bases(self) -> list[LayerBasis] | None:
        """The transforms of each layer's rows; None for none."""
        return [rows.basis for rows in self.rows.layers if rows.basis is not None] or None

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.rows.layers)

    @property
    def max_seq_len(self) -> int:
        """Tokens that a sequence may have."""
        return self.state.max_seq_len

    @property
    def ids(self) -> list[SequenceId]:
        """The sequences that are not swapped out."""
        return [i for i in self.state.ids if not isinstance(i, Swapped)]

    @property
    def swapped_ids(self) -> list[SequenceId]:
        """The sequences that are swapped out."""
        return list(self.swap_space.swapped)

    @property
    def num_free_pages(self) -> int:
        """Pages to take, also cached but not reserved ones, in the layers that see the most."""
        self._let_go()
        return self.state.num_free_pages

    @property
    def num_free_seq_slots(self) -> int:
        """Sequences that can be begun."""
        self._let_go()
        return self.state.num_free_seq_slots

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor of the cache."""
        return self.rows.nbytes + self.bad_rows.nbytes

    @property
    def token_capacity(self) -> int:
        """Tokens that fit, if all sequence slots are in use and no prefix is shared."""
        split = self.state.split
        of_slot = split.sink_len + split.recent_len
        return self._num_pages * split.page_size + len(self.state.lengths) * of_slot

    @property
    def _num_pages(self) -> int:
        return len(self.rows.groups[0].sides[0].layers[0])

    def length(self, sequence_id: SequenceId) -> int:
        """Tokens of a sequence, swapped out or not."""
        swapped = self.swap_space.find(sequence_id)
        return (
            swapped.length if swapped else int(self.state.lengths[self.state.seq_slot(sequence_id)])
        )

    def namespace(self, sequence_id: SequenceId) -> str | None:
        """The namespace of a sequence, swapped out or not; None if it has none."""
        swapped = self.swap_space.find(sequence_id)
        if swapped is not None:
            return swapped.namespace
        self.state.seq_slot(sequence_id)
        return self.state.pool.namespace(sequence_id)

    def match_prefix(self, tokens: Sequence[int], *, namespace: str | None = None) -> int:
        """How many of the tokens allocate would find in a namespace."""
        return self.state.match_prefix(tokens, plain_namespace(namespace))

    def allocate(
        self,
        sequence_id: SequenceId,
        tokens: Sequence[int] = (),
        *,
        room: int | None = None,
        namespace: str | None = None,
    ) -> int:
        """Begin a sequence with the rows that the cache has for a prefix of its tokens, if any.

        With room the sequence begins only if there are pages for so many tokens, and reserves them
        until it is freed or swapped out. Room has no page for a copy of one that a fork shares.

        allocate finds whole pages and the sinks; the recent window fills with the next tokens. The
        last of the tokens is never present, because its output is needed.

        Equal tokens stand for equal rows. Give a namespace where rows depend on more (a LoRA
        adapter, images, embeddings), or where no tenant may learn from `present` or from latency
        what others asked.

        Args:
            sequence_id: a new id.
            tokens: the token ids that the sequence will begin with.
            room: tokens to reserve pages for: len(tokens) and the answer. Layers with a window
                reserve what a sequence holds between steps. None reserves nothing.
            namespace: a string, such as the adapter's name and a hash of the images, that
                limits which rows sequences find. Forks, swaps and files keep it. None is that of
                all sequences without one.

        Returns:
            How many of the tokens are present, the length of the sequence; extend it by the others.

        Raises:
            OutOfPagesError: no sequence slot is free, or too few pages that others have not
                reserved.
            ShapeError: room is over max_seq_len.
            ConfigError: the id is in use, tokens or room are not whole numbers, or namespace is
                neither a string nor None.

        Example:
            >>> import torch
            >>> from kvquant import PagedBatch, PagedKVCache
            >>> paged = PagedKVCache(1, 8, 128, num_pages=8, max_seq_len=512)
            >>> batch, prompt = PagedBatch(paged, max_batch=2, max_tokens=256), list(range(250))
            >>> paged.allocate("a", prompt, namespace="adapter 1")
            0
            >>> with batch.extend(["a"], [250], prompt):
            ...     batch.append(0, torch.randn(250, 8, 128), torch.randn(250, 8, 128))
            >>> paged.allocate("b", prompt, namespace="adapter 1")
            68
            >>> paged.allocate("c", prompt, namespace="adapter 2")
            0
        """
        check_holds(self.device)
        sequence_id, namespace = self.checked_id(sequence_id), plain_namespace(namespace)
        room = 0 if room is None else check_size("room", room)
        with self.changing:
            with self.swap_space.hinting():
                seq_slot, present, place = self.state.allocate(sequence_id, tokens, room, namespace)
            with self.state.or_free([sequence_id]):
                if place is not None:
                    self.rows.restore_sinks(place, seq_slot)
        return present

    def fork(self, parent_id: SequenceId, child_id: SequenceId) -> None:
        """Begin a sequence with the tokens of another: pages are shared, 16-bit rows copied.

        Raises:
            OutOfPagesError: no sequence slot is free, or layers with windows would have too few
                pages for what allocate reserved.
            ConfigError: the parent does not live, or the child's id is in use.
        """
        child_id = self.checked_id(child_id)
        self.prepare([parent_id])
        with self.changing:
            with self.swap_space.hinting():
                seq_slots = self.state.fork(parent_id, child_id)
            with self.state.or_free([child_id]):
                self.rows.copy_seq_slot(*seq_slots)

    def truncate(self, sequence_id: SequenceId, length: int) -> None:
        """Keep the first tokens of a sequence.

        Removing up to rollback_len tokens (by default the last step, if it had 2 to 16 tokens)
        restores the sequence exactly. After more, or after a swap or a file, packed rows stay
        packed.

        Raises:
            ShapeError: a length below 0 or over the present one, or pages that a window would show
                are gone.
            ConfigError: the sequence does not live, or length is not a whole number.
        """
        self.prepare([sequence_id])
        with self.changing:
            tokens = self.state.truncate(sequence_id, length)
            self.rows.copy_originals(tokens, back=True)
            self.state.unpack(sequence_id, tokens)

    def free(self, sequence_id: SequenceId) -> None:
        """End a sequence, also a swapped out or failed one; its full pages can be found until
        others need them.

        Raises:
            ConfigError: there is no such sequence.
        """
        self._check_closed()
        self.state.failed = {other for other in self.state.failed if other != sequence_id}
        if self.swap_space.find(sequence_id) is not None:
            del self.swap_space.swapped[sequence_id]
            return
        self.prepare([sequence_id])
        with self.changing:
            self.state.free(sequence_id)

    def forget_prefixes(self) -> None:
        """Let no new sequence begin with rows that the cache holds now; sequences keep theirs.

        Call it when the model would compute other rows for the same tokens: after new weights, say.
        """
        self._check_closed()
        with self.changing:
            self.state.forget_all()
            for swapped in self.swap_space.swapped.values():
                swapped.tokens.clear()

    def can_append(self, ids: Sequence[SequenceId], counts: int | Sequence[int] = 1) -> bool:
        """Whether there are pages for PagedBatch.extend with these sequences and counts.

        Raises:
            ShapeError: a count is negative, or a sequence would outgrow max_seq_len.
            ConfigError: a sequence does not live, or is given twice.
        """
        ids = listed(ids)
        self._let_go()
        self.swap_space.check_here(ids)
        return self.state.can_append(ids, for_each(ids, counts))

    def swap_out(self, sequence_id: SequenceId) -> None:
        """Move a sequence to host memory (pinned, on CUDA), on a stream beside the current one.

        The host does not wait. When a later call finds the copy done, it frees the sequence slot
        and the pages that no other sequence has.

        Raises:
            ConfigError: the sequence does not live.
        """
        self.prepare([sequence_id])
        with self.changing:
            self.swap_space.swap_out(sequence_id)
        self._let_go()

    def swap_in(self, sequence_id: SequenceId) -> None:
        """Bring a sequence back; the device waits for its rows before it uses them.

        Raises:
            OutOfPagesError: there are not enough pages, or no sequence slot.
            ConfigError: the sequence is not swapped out.
        """
        self._check_closed()
        self._let_go()
        with self.changing:
            self.swap_space.swap_in(sequence_id)

    def finish_swaps(self) -> None:
        """Let the host wait until swapped out sequences have left their pages and slots."""
        with self.changing:
            self.swap_space.finish()

    def dequantized(
        self, sequence_id: SequenceId, layer: int, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the values of a sequence in token order; the host waits.

        A layer with a window gives the tokens in it. In a step, after append, the new tokens are
        included, so a prompt can attend to rows that were present.

        Returns:
            K [num_kv_heads, length, head_dim] and V of that shape, dtype; length is at most the
            window.

        Raises:
            ConfigError: the sequence does not live, or the layer does not exist.
        """
        self.check_layer(layer)
        check_dtype(dtype)
        self._await([sequence_id])
        state, seq_slot = self.state, self.state.seq_slot(sequence_id)
        lens = int(state.lengths[seq_slot]), int(state.packed_lens[seq_slot])
        group, window = self.rows.layers[layer].group, self.windows[layer]
        dropped = state.dropped(sequence_id)[group]
        table = state.places(group, state.pool.block_table(sequence_id)[dropped:])
        k, v = self.rows.dequantized(layer, table, seq_slot, *lens, dtype, dropped)
        return (k, v) if window is None else (k[:, -window:], v[:, -window:])

    def begin_step(
        self, ids: Sequence[SequenceId], counts: Sequence[int], tokens: Sequence[int] | None
    ) -> Step:
        """Grow sequences for PagedBatch.extend, which then writes their rows."""
        self.prepare(ids)
        with self.changing:
            try:
                with self.swap_space.hinting():
                    step = self.state.extend(ids, counts, tokens)
                if step.copies:
                    self.rows.copy_pages(self._in_groups(step.copies))
                self.rows.copy_originals(step.leaving)
            except KVQuantError:  # refused: nothing has changed
                raise
            except Exception:  # such as a lack of memory, after lengths have grown
                self._fail(ids, counts)
                raise
            self._step = step
        return step

    def _in_groups(self, copies: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        sources, targets = zip(*copies, strict=True) if copies else ((), ())
        places = self.state.places
        return [
            list(zip(places(group, sources), places(group, targets), strict=True))
            for group in range(len(self.rows.groups))
        ]

    def end_step(self, *, written: bool) -> None:
        """Let others find the filled pages; if rows are missing, mark what has grown as failed."""
        with self.changing:
            step, self._step = self._step, None
            assert step is not None
            if not written:
                self._fail(step.ids, step.counts)
                return
            self.insert_prefixes(self.state.to_insert(step))
            self.state.drop_pages(step)

    def _fail(self, ids: Iterable[SequenceId], counts: Iterable[int]) -> None:
        self.state.failed.update(i for i, new in zip(ids, counts, strict=True) if new)
        self.state.pool.settle()  # else sources of copies keep their frames until the next step

    def insert_prefixes(self, ids: Sequence[SequenceId]) -> None:
        """Let others find the full pages of sequences, whose rows are written."""
        to_keep = self.state.insert(ids)
        try:
            while to_keep:
                self.rows.keep_sinks(*to_keep[-1])
                to_keep.pop()
        finally:
            for _, place in to_keep:  # what could not be kept
                self.state.pool.lose(place)

    def prepare(self, ids: Sequence[SequenceId]) -> None:
        """Prepare to change sequences; ConfigError if one does not live or a step is open."""
        self._check_closed()
        self._await(ids)

    def _await(self, ids: Sequence[SequenceId]) -> None:
        """Prepare to read sequences; ConfigError if one does not live."""
        check_holds(self.device)
        self.changing.check()
        self._let_go()
        self.swap_space.check_here(ids)
        arrived = self.swap_space.await_rows(ids)
        if arrived:
            with self.changing:
                self.insert_prefixes(arrived)

    def check(self) -> None:
        """Raise if rows appended since the last check decode to NaN, as KVCache.check.

        It waits for the GPU once, and resets the counter. Sequences with these rows output NaN:
        free them. check forgets all prefixes (forget_prefixes), so no later sequence gets the rows;
        inside a step it only raises.

        Raises:
            NonFiniteError: rows had values that their formats cannot hold, in any layer.
        """
        check_holds(self.device)
        counts = self.bad_rows.tolist()
        if any(counts) and self._step is None:
            self.bad_rows.zero_()
            self.forget_prefixes()
        check_bad_rows(counts, "free the sequences whose outputs are NaN")

    def like(
        self, layers: Sequence[int], num_pages: int, max_num_seqs: int, device: torch.device | str
    ) -> Self:
        """An empty cache like this one, with layers like these and other sizes, on a device."""
        bases, formats = self.bases, self._formats(layers)
        of_heads = {"windows": [self.windows[at] for at in layers], "chunk_len": self.chunk_len}
        kind: Any = type(self)
        made: Self = kind(
            num_layers=len(layers),
            num_pages=num_pages,
            max_num_seqs=max_num_seqs,
            max_seq_len=self.max_seq_len,
            page_size=self.rows.split.page_size,
            sink_len=self.sink_len,
            recent_len=self.recent_len,
            exact_format=self.exact_format,
            rollback_len=self.rollback_len,
            device=device,
            bases=bases and [bases[layer] for layer in layers],
            **self.row_kind.options(self.num_kv_heads, formats[0][0].head_dim, *formats),
            **({} if self.row_kind is LATENT else of_heads),
        )
        return made

    def check_layer(self, layer: int) -> None:
        """Raise ConfigError unless there is this layer."""
        check_layer(layer, self.num_layers)

    def _check_closed(self) -> None:
        if self._step is not None:
            raise ConfigError(
                "a step is open, leave its block first: `with batch.extend(...)`. If an interrupt "
                "(Ctrl-C) has left it open, make another cache"
            )

    def _let_go(self) -> None:
        """Free pages and sequence slots of sequences whose swap is done."""
        if self.swap_space.swapping_out:
            with self.changing:
                self.swap_space.reclaim()

    def checked_id(self, sequence_id: SequenceId) -> SequenceId:
        """A new sequence's id as the cache keeps it; ConfigError if it is invalid or in use."""
        self._check_closed()
        self._let_go()
        new_id = plain_id(sequence_id)
        if new_id is None or new_id in self.swap_space.swapped:
            raise ConfigError(
                f"{shown(sequence_id)} cannot be the id of a new sequence: give a string or a "
                "whole number of up to 1024 bits that no other has, swapped out ones included"
            )
        return new_id


def _most(fits: Callable[[int], bool]) -> int:
    """The largest whole number that fits, if all smaller ones do; 0 if none does."""
    end = 1
    while fits(end):
        end *= 2
    return bisect.bisect_left(range(1, end), True, key=lambda n: not fits(n))


class _Change:
    """A with block that changes bookkeeping; after an interrupt in it the cache is unusable."""

    def __init__(self) -> None:
        self._is_torn = False

    def check(self) -> None:
        if self._is_torn:
            raise ConfigError(
                "an interrupt (Ctrl-C) has stopped a call that changed this cache: make another one"
            )

    __enter__ = check

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._is_torn = error is not None and not issubclass(error, Exception)
