"""Cases of `kvquant bench`: formats and sizes, their inputs, and the check of the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from ..errors import ConfigError, KVQuantError
from ..ops.attention import attend
from ..ops.mla import attend_latents
from ..ops.quantize import quantize_rows
from ..rows.call import AttentionCall, LatentCall
from ..rows.format import HEAD_DIMS, RowFormat
from ..rows.latent import AnyFormat, LatentFormat, parse_any
from ..rows.quantize import exact_codec
from ..rows.reference import reference_over_segments
from ..rows.segment import Segment, latent_segment
from ..rows.spacing import spaced_len

LATENT_DIM = 576  # of a latent row with 512 latents and 64 RoPE elements
LATENT_SCALE = 192**-0.5  # K before absorption has 128 + 64 elements
# relative L2; 16-bit outputs are rounded
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 8e-4}
BLOCK = 32768  # tokens that are quantized; longer sequences repeat them


@dataclass(frozen=True)
class Case:
    """A call of decode attention: one query of each sequence, rows of one format.

    Attributes:
        k_format, v_format: of the rows; of latent rows (MLA) a LatentFormat, and its latents'
            format.
        batch: sequences.
        num_q_heads, num_kv_heads: heads.
        seq_len: tokens of each sequence.
        dtype: of q and of the output.
    """

    k_format: AnyFormat
    v_format: RowFormat
    batch: int
    num_q_heads: int
    num_kv_heads: int
    seq_len: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"--q-heads {self.num_q_heads} is not a multiple of --kv-heads {self.num_kv_heads}"
            )

    @property
    def is_latent(self) -> bool:
        """Whether a row is latent: K, and in its first bytes V, of all heads."""
        return isinstance(self.k_format, LatentFormat)

    @property
    def head_dim(self) -> int:
        return self.k_format.head_dim

    @property
    def name(self) -> str:
        """The formats: "int4-g4", "int8-g4/int4-g4", "int8-g4+bf16"."""
        alike = self.k_format == self.v_format or self.is_latent
        return str(self.k_format) if alike else f"{self.k_format}/{self.v_format}"

    @property
    def heads(self) -> str:
        """Query and KV heads: "8:1"."""
        return f"{self.num_q_heads}:{self.num_kv_heads}"

    @property
    def title(self) -> str:
        """The case in words, for messages."""
        return f"{self.name}, batch {self.batch}, {self.heads} heads, T {self.seq_len}"

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that a call reads."""
        row_bytes = self.k_format.row_bytes + (0 if self.is_latent else self.v_format.row_bytes)
        return self.batch * self.num_kv_heads * self.seq_len * row_bytes

    @property
    def exact(self) -> Case:
        """The same attention on a plain 16-bit cache."""
        k, v = parse_formats(exact_codec(self.dtype), self.head_dim)
        return replace(self, k_format=k, v_format=v)


def list_cases(
    formats: Sequence[str],
    *,
    batches: Sequence[int] = (),
    seq_lens: Sequence[int] = (),
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int = 128,
    dtype: torch.dtype | None = None,
) -> list[Case]:
    """Make all combinations of formats, batches and lengths, or raise ConfigError.

    Args:
        formats: names, as parse_formats takes them.
        batches: 64 if empty.
        seq_lens: tokens; 8192 if empty.
        num_q_heads, num_kv_heads: 32 and 8 by default; latent rows have one KV head.
        head_dim: elements of a row of K.
        dtype: of q; bfloat16 by default.
    """
    cases = []
    for seq_len, batch, name in product(seq_lens or (8192,), batches or (64,), formats):
        k, v = parse_formats(name, head_dim)
        heads = num_q_heads or 32, 1 if isinstance(k, LatentFormat) else num_kv_heads or 8
        cases.append(Case(k, v, batch, *heads, seq_len, dtype or torch.bfloat16))
    return cases


def parse_formats(name: str, head_dim: int) -> tuple[AnyFormat, RowFormat]:
    """K's and V's format of "int4-g4" or "int8-g4/int4-g4"; a latent row's and its latents' format.

    "int8-g4+bf16" has head_dim 576 (512 latents and 64 RoPE elements); 544, 320 or 288 are latent,
    too.
    """
    if head_dim in HEAD_DIMS and "+" not in name:
        k, _, v = name.partition("/")
        return RowFormat.parse(k, head_dim), RowFormat.parse(v or k, head_dim)
    fmt = parse_any(name, LATENT_DIM if head_dim in HEAD_DIMS else head_dim)
    return fmt, fmt.latent if isinstance(fmt, LatentFormat) else fmt


@dataclass(frozen=True)
class Inputs:
    """A query [batch, num_q_heads, head_dim] and its rows; of latent rows the query's two parts."""

    q: torch.Tensor
    segments: tuple[Segment, ...]
    parts: tuple[torch.Tensor, torch.Tensor] | None = None

    def attend(self) -> torch.Tensor:
        if self.parts is None:
            return attend(AttentionCall(self.q, self.segments))[0]
        return attend_latents(LatentCall(*self.parts, self.segments, LATENT_SCALE))[0]


def make_inputs(case: Case, copies: int, device: torch.device) -> list[Inputs]:
    """Several random inputs of a case, each in its own memory; all sequences are the same."""
    # the meta device has no values, and no generator
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)
    count = copies * case.batch
    shape = count, case.num_q_heads, case.head_dim
    queries = torch.randn(shape, dtype=torch.float32, device=device, generator=generator)
    queries = queries.to(case.dtype)
    formats = [case.k_format] if case.is_latent else [case.k_format, case.v_format]
    room = spaced_len(case.seq_len, [fmt.row_bytes for fmt in formats])  # as a cache has it
    tokens = min(room, BLOCK)
    rows = []
    for fmt in formats:
        shape = case.num_kv_heads, tokens, fmt.head_dim
        values = torch.randn(shape, dtype=torch.float32, device=device, generator=generator)
        of_one = quantize_rows(values, fmt, check=generator is not None)
        of_one = of_one.repeat(1, -(-room // tokens), 1)[:, :room]
        rows.append(of_one.repeat(count, 1, 1, 1))
    lens = torch.full((count,), case.seq_len, dtype=torch.int32, device=device)
    if isinstance(case.k_format, LatentFormat):
        whole = latent_segment(rows[0], lens, case.k_format)
    else:
        whole = Segment(rows[0], rows[1], lens, case.k_format, case.v_format)
    found = []
    for first in range(0, count, case.batch):
        q, dim = queries[first : first + case.batch], case.v_format.head_dim
        # apart, as a model has them
        parts = (q[..., :dim].contiguous(), q[..., dim:].contiguous()) if case.is_latent else None
        found.append(Inputs(q, (take_sequences(whole, first, case.batch),), parts))
    return found


def take_sequences(segment: Segment, first: int, count: int) -> Segment:
    """Some sequences of a segment, in the same memory."""
    names = "k_rows", "v_rows", "seq_lens"
    return segment._replace(**{one: getattr(segment, one)[first : first + count] for one in names})


def rehearse_case(case: Case) -> None:
    """Rehearse the case's attention; see kvquant/rehearsal.py."""
    (inputs,) = make_inputs(case, 1, torch.device("meta"))
    inputs.attend()


def check(case: Case, inputs: Inputs) -> float:
    """The greater relative L2 error of first and last sequence; KVQuantError if over the limit."""
    out, limit = inputs.attend(), MAX_ERROR[case.dtype]
    errors = []
    for b in sorted({0, case.batch - 1}):
        segments = [take_sequences(segment, b, 1) for segment in inputs.segments]
        sm_scale = LATENT_SCALE if case.is_latent else None
        expected, _ = reference_over_segments(inputs.q[b : b + 1], segments, sm_scale)
        errors.append(float((out[b : b + 1] - expected).norm() / expected.norm()))
        if not errors[-1] <= limit:  # NaN too
            raise KVQuantError(
                f"{case.title}: the kernel's result differs from the reference by {errors[-1]:.1e} "
                f"(relative L2), the limit is {limit}: not timed. Please report this case"
            )
    return max(errors)
