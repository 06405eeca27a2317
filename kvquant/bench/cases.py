"""What `kvquant bench` measures: cases, their inputs in memory, and the check of their results."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from ..errors import ConfigError, KVQuantError
from ..ops.attention import attend
from ..ops.mla import attend_latents
from ..ops.quantize import quantize_rows
from ..rows.call import AttentionCall, LatentCall
from ..rows.codec import one_of
from ..rows.format import RowFormat
from ..rows.latent import AnyFormat, LatentFormat
from ..rows.quantize import exact_codec
from ..rows.reference import reference_over_segments
from ..rows.segment import PAGE_SIZES, Segment, latent_segment
from ..rows.spacing import spaced_len
from ..rows.variant import AttentionVariant

FORMATS = ("int4-g4", "int4", "int8-g4", "fp8", "bf16")


class Shape(NamedTuple):
    """Heads, tokens and sequences of a case; lens: of each sequence, where they differ; q_len:
    queries of a sequence; variant: a field of AttentionVariant."""

    num_q_heads: int
    num_kv_heads: int
    seq_len: int
    batch: int
    lens: tuple[int, ...] = ()
    q_len: int = 1
    variant: str = ""


class Table(NamedTuple):
    """Shapes that are measured together, in which formats unless others are given."""

    formats: tuple[str, ...]
    shapes: tuple[Shape, ...]
    dtype: torch.dtype = torch.bfloat16


def uneven(batch: int, long: int, tokens: int, others: int) -> tuple[int, ...]:
    """Lengths of a batch: some long sequences, spread among others."""
    places = {i * batch // long for i in range(long)}
    return tuple(tokens if b in places else others for b in range(batch))


def log_uniform(batch: int, least: int, most: int) -> tuple[int, ...]:
    """Random lengths, the same in every run: as many below twice a length as above half of it."""
    draw = random.Random(0).random
    return tuple(round(least * (most / least) ** draw()) for _ in range(batch))


SHAPES = (
    *(Shape(8, 1, 8192, batch) for batch in (1, 8, 32, 64, 128, 256, 512)),
    *(Shape(32, 8, seq_len, b) for seq_len in (1024, 8192, 32768) for b in (1, 8, 32, 64)),
)
QUICK = tuple(Shape(8, 1, 8192, batch) for batch in (1, 64, 256))
TELLING = Shape(8, 1, 8192, 256)  # where all formats are compared
ROOM = 32768  # tokens that each sequence of a ragged batch has room for
RAGGED = (
    *(uneven(b, n, ROOM, rest) for b, n, rest in ((32, 1, 512), (32, 4, 512), (64, 1, 1024))),
    uneven(8, 1, ROOM, 512),
    *(log_uniform(batch, 128, ROOM) for batch in (8, 64, 256)),
    (512,) * 32,  # equal lengths, far below the room and near it: nothing is uneven
    (8192,) * 32,
)
LATENTS = (
    *((64, 8192, 16), (64, 1024, 16), (64, 8192, 32), (64, 8192, 64), (64, 8192, 128)),
    *((16, 8192, 16), (1, 32768, 16), (1, 131072, 16)),
)
DRAFTED = (2, 16), (4, 16), (2, 128)  # queries and heads, of 64 sequences of 8,192 tokens (MTP)
LATENT_SCALE = 192**-0.5  # K before absorption has 128 + 64 elements
QUERIES = (1, 2, 4, 8)
VARIANTS = "soft_cap", "sink_logits", "alibi_slopes", "window"  # of one query
TABLES = {
    "ragged": Table(FORMATS[:1], tuple(Shape(32, 8, ROOM, len(lens), lens) for lens in RAGGED)),
    "wide": Table(FORMATS[:1], tuple(Shape(q, 1, 8192, 64) for q in (8, 16, 32, 64, 71))),
    "short": Table(
        ("fp16", *FORMATS[:1]),
        tuple(
            Shape(32, 32, seq_len, batch)
            for seq_len, batch in ((128, 1), (512, 1), (1536, 1), (128, 64), (128, 256))
        ),
        torch.float16,
    ),
    "queries": Table(
        FORMATS[:1],
        tuple(
            Shape(q, kv, 8192, 64, (), q_len) for q, kv in ((32, 8), (8, 1)) for q_len in QUERIES
        ),
    ),
    "variants": Table(
        FORMATS[:1],
        (
            *(Shape(32, 8, 8192, 64, variant=name) for name in ("", *VARIANTS)),
            *(Shape(32, 8, 8192, 64, q_len=4, variant=name) for name in ("", "tree_mask")),
        ),
    ),
    "mla": Table(
        ("int4-g8+int8-g4", "int4-g8+fp8-g4", "int4-g8", "int8-g4", "fp8-g4", "fp8", "bf16"),
        (
            *(Shape(heads, 1, seq_len, batch) for batch, seq_len, heads in LATENTS),
            *(Shape(heads, 1, 8192, 64, q_len=q_len) for q_len, heads in DRAFTED),
        ),
    ),
}
# relative L2; 16-bit outputs are rounded
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 8e-4}
BLOCK = 32768  # tokens that are quantized; longer sequences repeat them


@dataclass(frozen=True)
class Case:
    """One call of decode attention.

    Attributes:
        k_format, v_format: the packed rows; a LatentFormat, and that of its latents, for MLA.
        batch: sequences.
        num_q_heads, num_kv_heads: heads.
        seq_len: tokens of a sequence, the 16-bit ones among them; with lens what each has room for.
        dtype: of q, of the output and of 16-bit sinks and recent tokens.
        page_size: tokens of a page; 0 for rows without a block table.
        sink_len, recent_len: first and last tokens in 16 bit.
        lens: tokens of each sequence, if not seq_len of all.
        q_len: queries of each sequence, those of its last tokens.
        variant: the field of AttentionVariant that is in use, one of VARIANTS, or with several
            queries tree_mask.

    Raises:
        ConfigError: the sizes do not fit one another.
    """

    k_format: AnyFormat
    v_format: RowFormat
    batch: int
    num_q_heads: int
    num_kv_heads: int
    seq_len: int
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 0
    sink_len: int = 0
    recent_len: int = 0
    lens: tuple[int, ...] = ()
    q_len: int = 1
    variant: str = ""

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"--q-heads {self.num_q_heads} is not a multiple of --kv-heads {self.num_kv_heads}"
            )
        if self.q_len > 1 and (self.lens or self.q_len > self.seq_len):
            raise ConfigError(f"{self.q_len} queries: of sequences of one length, as many or more")
        if self.is_latent and self.variant:
            raise ConfigError(
                f"latent rows are attended to without variants, not with {self.variant}"
            )
        of_these = VARIANTS if self.q_len == 1 else ("tree_mask",)
        if self.variant and (self.lens or self.variant not in of_these):
            raise ConfigError(
                f"{self.variant} with {self.q_len} queries: use {' or '.join(of_these)}, of "
                "sequences of one length"
            )
        if self.page_size and self.page_size not in PAGE_SIZES:
            raise ConfigError(
                f"--page-size {self.page_size}: use {one_of(PAGE_SIZES)}, or 0 for none"
            )
        if min(self.packed_lens) < 1:
            raise ConfigError(
                f"--exact {self.sink_len} {self.recent_len} leaves nothing of --seq-len "
                f"{min(self.all_lens)} to pack: use fewer exact tokens or more of all"
            )

    @property
    def all_lens(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return self.lens or (self.seq_len,) * self.batch

    @property
    def packed_lens(self) -> tuple[int, ...]:
        """Tokens of each sequence in packed rows."""
        return tuple(length - self.sink_len - self.recent_len for length in self.all_lens)

    @property
    def packed_room(self) -> int:
        """Packed rows that a sequence has room for."""
        return self.seq_len - self.sink_len - self.recent_len

    @property
    def is_latent(self) -> bool:
        """Whether rows are latent: K, and in its first bytes V, of all heads."""
        return isinstance(self.k_format, LatentFormat)

    @property
    def sm_scale(self) -> float | None:
        """Factor on the scores; None for that of the head_dim."""
        return LATENT_SCALE if self.is_latent else None

    @property
    def head_dim(self) -> int:
        """Elements of a head of K."""
        return self.k_format.head_dim

    @property
    def name(self) -> str:
        """Formats, and what is not plain."""
        name = _format_name(self.k_format, self.v_format)
        if self.page_size:
            name += f" paged {self.page_size}"
        if self.sink_len or self.recent_len:
            name += f" {self.sink_len}+{self.recent_len}"
        return name

    @property
    def heads(self) -> str:
        """Query and KV heads: "8:1"."""
        return f"{self.num_q_heads}:{self.num_kv_heads}"

    @property
    def kind(self) -> str:
        """The variant, and queries if several: "plain", "window 4096", "tree mask, 4 queries"."""
        kind = self.variant.replace("_", " ") or "plain"
        if self.variant == "window":
            kind += f" {self.window}"
        return kind if self.q_len == 1 else f"{kind}, {self.q_len} queries"

    @property
    def title(self) -> str:
        """The case in words, as messages name it."""
        kind = "" if self.kind == "plain" else f", {self.kind}"
        return f"{self.name}, batch {self.batch}, {self.heads} heads, T {self.seq_len}{kind}"

    @property
    def window(self) -> int | None:
        """Tokens that a query sees where there is a window: half of them."""
        return -(-self.seq_len // 2) if self.variant == "window" else None

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that a call reads."""
        sides = 1 if self.is_latent else 2
        exact = 2 * sides * self.head_dim * (self.sink_len + self.recent_len) * self.batch
        seen = max((self.window or self.seq_len) - self.recent_len, 0)
        row_bytes = self.k_format.row_bytes + (0 if self.is_latent else self.v_format.row_bytes)
        packed = row_bytes * sum(min(length, seen) for length in self.packed_lens)
        return self.num_kv_heads * (packed + exact)

    @property
    def exact(self) -> Case:
        """The same attention on a plain 16-bit cache."""
        name, dim = exact_codec(self.dtype), self.head_dim
        k, v = parse_latents(name) if self.is_latent else parse_formats(name, dim)
        return replace(self, k_format=k, v_format=v, page_size=0, sink_len=0, recent_len=0)

    @property
    def even(self) -> Case:
        """The same tokens spread evenly, without more room than they need."""
        return replace(self, seq_len=math.ceil(sum(self.all_lens) / self.batch), lens=())

    @property
    def lengths(self) -> str:
        """Sequences and their tokens in words: "1 x 32768, 31 x 512", or "64 of 130 to 32011"."""
        counts = Counter(self.all_lens)
        if len(counts) > 2:
            return f"{self.batch} of {min(counts)} to {max(counts)}"
        return ", ".join(f"{n} x {length}" for length, n in sorted(counts.items(), reverse=True))


def list_cases(
    formats: Sequence[str] = (),
    *,
    batches: Sequence[int] = (),
    seq_lens: Sequence[int] = (),
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int = 128,
    dtype: torch.dtype | None = None,
    page_sizes: Sequence[int] = (),
    exact: Sequence[tuple[int, int]] = (),
    quick: bool = False,
    table: str = "",
) -> list[Case]:
    """Make the cases that are asked for.

    Without batches, lengths and heads these are the default shapes, with INT4 in 4 groups if no
    formats are given, and the other formats at one of them. Else all combinations are made.

    Args:
        formats: names; "int8-g4/int4-g4" for K and V apart. Where shapes are given but no formats:
            FORMATS.
        batches: 64 if some shape but no batch is given.
        seq_lens: tokens; 8192 if some shape but no length is given.
        num_q_heads, num_kv_heads: 32 and 8 if some shape but no heads are given.
        head_dim: elements of a head.
        dtype: of q; bfloat16 unless the table says otherwise.
        page_sizes: 0 for no pages.
        exact: pairs of 16-bit first and last tokens.
        quick: make fewer default cases.
        table: one of TABLES, in place of sizes.

    Raises:
        ConfigError: a format does not exist, or sizes do not fit one another.
    """
    if table:
        wanted = TABLES[table]
        pairs = [(name, shape) for shape in wanted.shapes for name in formats or wanted.formats]
        dtype = dtype or wanted.dtype
    elif batches or seq_lens or num_q_heads or num_kv_heads:
        heads = (num_q_heads or 32, num_kv_heads or 8)
        sizes = product(seq_lens or (8192,), batches or (64,))
        shapes = [Shape(*heads, seq_len, batch) for seq_len, batch in sizes]
        pairs = [(name, shape) for shape in shapes for name in formats or FORMATS]
    else:
        shapes = list(QUICK if quick else SHAPES)
        pairs = [(name, shape) for shape in shapes for name in formats or FORMATS[:1]]
        if not formats and not quick:
            pairs += [(name, TELLING) for name in FORMATS[1:]]
    dtype = dtype or torch.bfloat16
    parse: Callable[[str], tuple[AnyFormat, RowFormat]]
    parse = parse_latents if table == "mla" else partial(parse_formats, head_dim=head_dim)
    cases = []
    for (name, shape), page_size, few in product(pairs, page_sizes or (0,), exact or ((0, 0),)):
        (k, v), (q, kv, seq_len, batch, lens, q_len, variant) = parse(name), shape
        numbers = batch, q, kv, seq_len, dtype, page_size, *few
        cases.append(Case(k, v, *numbers, lens, q_len, variant))
    return cases


def parse_formats(name: str, head_dim: int) -> tuple[RowFormat, RowFormat]:
    """K's and V's format from "int4-g4" or "int8-g4/int4-g4"."""
    k, slash, v = name.partition("/")
    return RowFormat.parse(k, head_dim), RowFormat.parse(v if slash else k, head_dim)


def parse_latents(name: str) -> tuple[LatentFormat, RowFormat]:
    """The format of latent rows, 512 elements and 64 of RoPE, and that of their latents."""
    fmt = LatentFormat.parse(name)
    return fmt, fmt.latent


def _format_name(k: AnyFormat, v: RowFormat) -> str:
    return str(k) if k == v or isinstance(k, LatentFormat) else f"{k}/{v}"


@dataclass(frozen=True)
class Inputs:
    """A query [batch, num_q_heads, head_dim], or several [batch, q_len, num_q_heads, head_dim], and
    the segments that they attend to; for latent rows also the two parts of q."""

    q: torch.Tensor
    segments: tuple[Segment, ...]
    variant: AttentionVariant | None = None
    parts: tuple[torch.Tensor, torch.Tensor] | None = None

    def attend(self) -> torch.Tensor:
        """What is timed."""
        if self.parts is None:
            call = AttentionCall(self.q, self.segments, variant=self.variant)
            return attend(call)[0]
        of_latents = LatentCall(*self.parts, self.segments, LATENT_SCALE)
        return attend_latents(of_latents)[0]


def make_inputs(case: Case, copies: int, device: torch.device) -> list[Inputs]:
    """Make several inputs of a case, each in memory of its own.

    Queries and rows are random. The sequences hold the same tokens, each as many as its length;
    with a block table their pages lie in random order among those of all inputs.
    """
    # the meta device has no values, and no generator
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)
    count = copies * case.batch
    several = (case.q_len,) if case.q_len > 1 else ()
    shape = (count, *several, case.num_q_heads, case.head_dim)
    queries = torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(
        case.dtype
    )

    def make_rows(fmt: AnyFormat, room: int, page_size: int) -> torch.Tensor:
        return _random_rows(fmt, case.num_kv_heads, room, page_size, count, device, generator)

    room = case.packed_room
    if not case.page_size:  # as a cache has it
        formats = [case.k_format] if case.is_latent else [case.k_format, case.v_format]
        room = spaced_len(room, [fmt.row_bytes for fmt in formats])
    k, table = make_rows(case.k_format, room, case.page_size), None
    if case.page_size:
        pages = torch.randperm(len(k), device=device, generator=generator)
        table = pages.to(torch.int32).view(count, -1)
    lens = torch.tensor(case.packed_lens * copies, dtype=torch.int32, device=device)
    if isinstance(case.k_format, LatentFormat):
        whole = [latent_segment(k, lens, case.k_format, block_table=table)]
    else:
        v = make_rows(case.v_format, room, case.page_size)
        whole = [Segment(k, v, lens, case.k_format, case.v_format, None, table)]
    if few := case.sink_len + case.recent_len:
        fmt, exact = case.exact.k_format, case.exact.v_format
        lens = torch.full_like(lens, few)
        starts = torch.full_like(lens, case.recent_len // 3)  # a ring, which starts anywhere
        k = make_rows(fmt, few, 0)
        if isinstance(fmt, LatentFormat):
            whole.append(latent_segment(k, lens, fmt, starts, sinks=case.sink_len))
        else:
            v = make_rows(exact, few, 0)
            whole.append(Segment(k, v, lens, fmt, exact, starts, None, case.sink_len))
    found = []
    for first in range(0, count, case.batch):
        q = queries[first : first + case.batch]
        segments = tuple(take_sequences(segment, first, case.batch) for segment in whole)
        variant = make_variant(case, device, generator)
        dim = case.v_format.head_dim
        # apart, as a model has them
        parts = (q[..., :dim].contiguous(), q[..., dim:].contiguous()) if case.is_latent else None
        found.append(Inputs(q, segments, variant, parts))
    return found


def make_variant(
    case: Case, device: torch.device, generator: torch.Generator | None
) -> AttentionVariant | None:
    """The variant of a case, which changes results by more than the check allows."""
    if not case.variant:
        return None

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32, device=device, generator=generator)

    heads = case.num_q_heads
    value: Any
    if case.variant == "soft_cap":
        value = 1.0  # scores have size 1
    elif case.variant == "sink_logits":  # about as much as all tokens together
        value = random(heads) + math.log(case.seq_len)
    elif case.variant == "alibi_slopes":
        value = 2 ** (-8 / heads * torch.arange(1, heads + 1, dtype=torch.float32, device=device))
    elif case.variant == "window":
        value = case.window
    else:  # a root, and all others are its children
        tree = torch.eye(case.q_len, dtype=torch.bool, device=device)
        tree[:, 0] = True
        value = tree.expand(case.batch, -1, -1).contiguous()
    return AttentionVariant(**{case.variant: value})


def rehearse_case(case: Case) -> None:
    """Attend without values, for a rehearsal: see kvquant/rehearsal.py."""
    for one in (case, *([case.even] if case.lens else [])):
        (inputs,) = make_inputs(one, 1, torch.device("meta"))
        inputs.attend()


def take_sequences(segment: Segment, first: int, count: int) -> Segment:
    """Some sequences of a segment, sharing its memory."""

    def take(x: torch.Tensor) -> torch.Tensor:
        return x[first : first + count]

    table, starts = segment.block_table, segment.starts
    return Segment(
        take(segment.k_rows) if table is None else segment.k_rows,
        take(segment.v_rows) if table is None else segment.v_rows,
        take(segment.seq_lens),
        segment.k_format,
        segment.v_format,
        None if starts is None else take(starts),
        None if table is None else take(table),
        segment.sinks,
    )


def take_biases(variant: AttentionVariant, sequence: int) -> AttentionVariant:
    """A variant of one sequence of a batch."""
    tree = variant.tree_mask
    return variant if tree is None else variant._replace(tree_mask=tree[sequence : sequence + 1])


def _random_rows(
    fmt: AnyFormat,
    num_kv_heads: int,
    length: int,
    page_size: int,
    sequences: int,
    device: torch.device,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """[sequences, num_kv_heads, length, row_bytes], or [pages, num_kv_heads, page_size, ...]."""
    if page_size:
        length = -(-length // page_size) * page_size
    tokens = min(length, BLOCK)
    shape = (num_kv_heads, tokens, fmt.head_dim)
    values = torch.randn(shape, dtype=torch.float32, device=device, generator=generator)
    rows = quantize_rows(values, fmt, check=generator is not None)
    rows = rows.repeat(1, -(-length // tokens), 1)[:, :length]
    if not page_size:
        return rows.repeat(sequences, 1, 1, 1)
    pages = rows.reshape(num_kv_heads, -1, page_size, fmt.row_bytes).transpose(0, 1)
    return pages.repeat(sequences, 1, 1, 1)


def check(case: Case, inputs: Inputs) -> float:
    """Compare the first, the last, a longest and a shortest sequence with the float64 reference.

    Returns:
        The greatest of their relative L2 errors.

    Raises:
        KVQuantError: it is over the limit of the output's dtype.
    """
    out, variant = inputs.attend(), inputs.variant
    errors = []
    lens = case.all_lens
    for b in {0, case.batch - 1, lens.index(max(lens)), lens.index(min(lens))}:
        segments = [take_sequences(segment, b, 1) for segment in inputs.segments]
        own = variant and take_biases(variant, b)
        q = inputs.q[b : b + 1]
        expected, _ = reference_over_segments(q, segments, case.sm_scale, variant=own)
        errors.append(float((out[b : b + 1] - expected).norm() / expected.norm()))
    limit = MAX_ERROR[case.dtype]
    for error in errors:
        if not error <= limit:  # NaN too
            raise KVQuantError(
                f"{case.title}: relative error {error:.1e} is over {limit}: not timed"
            )
    return max(errors)
