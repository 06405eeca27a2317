"""The arguments of both decode kernels of MLA, and the kernel that combines their parts."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.spec import Spec, Table

MOST_PARTS, MOST_AHEAD = 1024, 16
# groups of threads that combine the parts of a column: 8 would be 1,024 threads of some 94
# registers, more than an SM has
MOST_GROUPS = 4

MLA: Table = (
    ("q_latent", "P"),  # [batch, q_len, num_heads, latent_dim], bfloat16 or float16
    ("q_rope", "P"),  # [batch, q_len, num_heads, rope_dim], as q_latent
    ("out", "P"),  # as q_latent, contiguous
    ("lse", "P"),  # [batch, q_len, num_heads], float32, base e; 0: not wanted
    ("part_out", "P"),  # float32 [parts, batch, q_len, num_heads, latent_dim]
    ("part_lse", "P"),  # float32 [parts, batch, q_len, num_heads], base 2
    ("rows", "P"),
    ("seq_lens", "P"),  # int32 [batch]: rows of each sequence
    ("index", "P"),  # int32: starts [batch] (slots: or 0), or a block table [batch, max_pages]
    ("seq_slots", "P"),  # slots: int32 [batch]: which sequence of the rows each one reads
    ("other_lens", "P"),  # int32 [batch]: rows in the other segment; 0: there is none
    ("q_lens", "P"),  # int32 [batch]: queries of each sequence; 0: q_len of all
    ("latent_stride_batch", "Q"),  # bytes
    ("latent_stride_query", "Q"),
    ("latent_stride_head", "Q"),
    ("rope_stride_batch", "Q"),
    ("rope_stride_query", "Q"),
    ("rope_stride_head", "Q"),
    ("stride_outer", "Q"),  # bytes from a sequence, or a page, to the next
    ("capacity", "i"),  # rows that a sequence has room for; longer lengths count as this
    ("sinks", "i"),  # of these the first ones, which are no part of the ring
    ("ring_len", "i"),  # the others
    ("page_shift", "i"),  # log2 of the page size
    ("table_stride", "i"),  # entries from a sequence's part of the block table to the next
    ("other_capacity", "i"),
    ("is_second", "i"),  # whether the other segment is the first one
    ("second_sinks", "i"),  # sinks of the second one: they come before the first one
    ("first_part", "i"),  # the parts of a launch, its splits, are counted from this one on
    ("parts", "i"),  # of all segments
    ("num_heads", "i"),
    ("q_len", "i"),
    ("score_scale", "f"),  # sm_scale * log2(e)
)
COMBINE: Table = (
    ("out", "P"),  # as of MLA, as are all
    ("lse", "P"),
    ("part_out", "P"),
    ("part_lse", "P"),
    ("shares", "P"),  # int32 [batch]: whether a sequence shares the prefix; 0: there is none
    ("q_lens", "P"),
    ("parts", "I"),
    ("prefix_parts", "I"),  # the first ones, which are of the prefix
    ("num_heads", "I"),
    ("q_len", "I"),
)


@dataclass(frozen=True)
class MlaCombineSpec(Spec):
    """The kernel that combines parts.

    Attributes:
        latent_dim: elements of a column's output.
        query: "bf16" or "fp16", the codec of out.
        ahead: parts whose loads are on their way together.
        groups: of threads, each of which adds some of the parts.
        shared: whether the first parts are of a prefix.
    """

    latent_dim: int
    query: str = "bf16"
    ahead: int = 2
    groups: int = 1
    shared: bool = False
    overlaps: bool = False

    arguments = COMBINE
    kernel = "mla.combine.make_combine_kernel"

    @property
    def warps(self) -> int:  # type: ignore[override]
        """Warps of a block: four elements a thread."""
        return self.groups * self.latent_dim // 128

    @property
    def outputs_at(self) -> int:
        """Byte of the groups' outputs in shared memory, after weights of parts."""
        return 8 * (MOST_PARTS + MOST_AHEAD)

    @property
    def shared_bytes(self) -> int:
        return self.outputs_at + (4 * self.latent_dim * self.groups if self.groups > 1 else 0)
