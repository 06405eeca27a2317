"""MLA decode kernels, that for few heads above all: in the simulator, as machine code, launched."""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from attend import attend_latents
from fake_cuda import FakeDriver, arguments_of, loaded_specs
from in_simulator import in_simulator
from made_up_codec import INT5
from mla_calls import (
    AIM,
    FORMATS,
    OF_MANY,
    RAW,
    WIDE,
    attend,
    compare_by,
    compare_many_heads,
    in_shape,
    needs_warpgroups,
    simulate,
    simulate_wide,
)
from mla_cases import LIMITS, MlaCase, make_mla

from kvquant import LatentFormat, LatentPagedBatch, LatentPagedKVCache, debug
from kvquant.cache import layer
from kvquant.errors import ConfigError, UnsupportedError
from kvquant.kernels.cuda.mla import launch as launching
from kvquant.kernels.cuda.mla.mma.plan import APART, APART_REGISTERS, shapes_of, teams_of
from kvquant.kernels.cuda.mla.mma.spec import MlaSpec
from kvquant.kernels.cuda.mla.spec import MlaCombineSpec
from kvquant.kernels.cuda.mla.wgmma.spec import WideMlaSpec
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.kernels.cuda.runtime.compile import compile_spec
from kvquant.kernels.cuda.runtime.launch import GPU, GPUS
from kvquant.ops import append as append_ops
from kvquant.ops import mla as mla_ops
from kvquant.ops import slots as slot_ops
from kvquant.rows.call import LatentPrefix
from kvquant.rows.codec import CODECS
from kvquant.rows.segment import latent_segment

needs_numba_cuda = pytest.mark.extra("cuda")
SIZES = (512, 32), (256, 64), (256, 32)  # other ones, latents and RoPE elements
HALF: dict[str, Any] = {"dims": (256, 64)}  # half the latents: the same lines in half the time
OF_SIZES = "int4-g4+bf16", "int4-g8+fp16", "int8-g4+bf16", "bf16"


# In the simulator


@pytest.mark.slow
@in_simulator
def test_rows_of_every_format() -> None:
    # int4 rows of 368 bytes
    simulate(make_mla(AIM, 16, (33, 0, 1)))
    # 16-bit rows, in two stages
    simulate(make_mla("bf16", 16, (70,)), stages=2)
    simulate(make_mla("fp16", 16, (40,), dtype=torch.float16), stages=2)
    simulate(make_mla("bf16", 16, (70,), scale=1e5, q_scale=1e-5), stages=2)
    # rows of 8 bits
    for name in ("int8-g4+bf16", "fp8-g4+fp16"):
        simulate(make_mla(name, 16, (70,)))
    simulate(make_mla("int8-g8+int8-g4", 16, (70,), dtype=torch.float16))
    # a made-up codec
    with mock.patch.dict(CODECS, {INT5.name: INT5}):
        for tokens in (70, 100):
            case = make_mla("int5-g8+int5-g4", 3, (tokens,), scale=1e3, q_scale=1e-3)
            simulate(case)
            simulate_wide(case)
    # those of FlashMLA, and with scales of any size
    simulate(make_mla("fp8", 16, (70,)))
    simulate(make_mla("fp8", 5, (40, 3), page_size=64, q_lens=(2, 1), scale=30.0), 2)
    for options in RAW:
        simulate(make_mla("fp8", 3, (100,), raw_scales=True, **options))
    simulate(make_mla("fp8", 3, (100,), raw_scales=True, scale=1e-30))
    simulate(make_mla("fp8", 20, (100,), raw_scales=True, **RAW[4]), blocks=2, teams=2)
    # rows of 4 bits
    simulate(make_mla("int4-g4+bf16", 16, (40,)))
    simulate(make_mla(AIM, 16, (70,), dtype=torch.float16))
    simulate(make_mla("int4-g4+fp16", 16, (50,), dims=(256, 32)))
    # other sizes
    for dims in SIZES:
        for name in OF_SIZES:
            simulate(make_mla(name, 5, (50, 3), dims=dims, page_size=16, q_lens=(2, 1)))
    simulate(make_mla("int4-g8+fp8-g4", 20, (70,), dims=(256, 64)), blocks=2, teams=2)
    simulate(make_mla("int8-g4+int8-g4", 3, (70,), dims=(256, 64), exact="bf16", recent=(9,)))


@pytest.mark.slow
@in_simulator
def test_places_queries_and_shapes() -> None:
    # pages, splits and teams
    simulate(make_mla(AIM, 3, (150, 0, 1, 64), page_size=64, **HALF), 3, backwards=True)
    simulate(make_mla(AIM, 5, (150, 20), page_size=16, **HALF), 2, teams=2)
    simulate(make_mla("bf16", 5, (90,), page_size=16, **HALF), 2, stages=2)
    simulate(make_mla(AIM, 5, (500,), **HALF), 2, teams=3, stages=4)
    # parts for two and four groups of threads, for one, and for none
    simulate(make_mla("fp8", 3, (600, 33, 0)), 20)
    simulate(make_mla("fp8", 3, (1240, 33, 0)), 40, backwards=True)
    # small pages: each row is looked up, by 4 lanes (23 units of copies) or 8 (a 16-bit row)
    simulate(make_mla(AIM, 3, (70, 0, 1), page_size=1), 2, teams=2)
    simulate(make_mla("bf16", 5, (66,), page_size=2), 2, stages=2)
    simulate(make_mla("fp8", 5, (40, 3), page_size=8, q_lens=(2, 1)))
    simulate_wide(make_mla(AIM, 6, (70, 2), page_size=1), 2)
    simulate(make_mla(AIM, 3, (300,), page_size=256, **HALF))
    # several queries
    simulate(make_mla(AIM, 8, (50, 1, 0), q_lens=(2, 2, 1), **HALF))
    simulate(make_mla(AIM, 6, (66, 3), q_lens=(4, 0), **HALF), 2, blocks=2)
    simulate(make_mla("int8-g4+bf16", 5, (66,), page_size=32, q_lens=(3,), **HALF), 3)
    # a ring of packed rows
    case = make_mla("int4-g8+fp8-g4", 3, (40, 20))
    (packed,) = case.segments
    starts = torch.tensor([7, 30], dtype=torch.int32)
    rows = torch.stack([row.roll(int(n), 1) for row, n in zip(packed.k_rows, starts, strict=True)])
    case.segments = [latent_segment(rows, packed.seq_lens, packed.k_format, starts)]  # type: ignore[arg-type]
    simulate(case)
    # more heads than an MMA has columns
    simulate(make_mla("int8-g4+bf16", 32, (40, 3), **HALF), blocks=2, teams=2)
    simulate(make_mla(AIM, 20, (40,), **HALF), backwards=True)
    simulate(make_mla("bf16", 40, (40,), **HALF), stages=2, blocks=2)
    # lengths beyond the room
    simulate(make_mla(AIM, 16, (64,), overlong=True))
    simulate(make_mla("bf16", 16, (64,), page_size=64, overlong=True), stages=2)
    # teams go around their rings
    simulate(make_mla("int8-g4", 5, (720, 380)), 1, teams=3, stages=3)
    # tiny, large and peaked numbers
    simulate(make_mla(AIM, 16, (70,), scale=1e-4, q_scale=100.0))
    simulate(make_mla(AIM, 16, (70,), scale=1e3, q_scale=1e-3))
    simulate(make_mla(AIM, 16, (200,), q_scale=20.0))


@needs_numba_cuda
@in_simulator
def test_sinks_packed_and_recent_rows() -> None:
    recent: dict[str, Any] = {"sinks": 2, "recent": (9, 5, 4), "dims": (256, 32)}
    simulate(make_mla("int8-g4", 3, (30, 0, 3), exact="bf16", **recent))


@in_simulator
def test_a_second_segment_without_rows() -> None:
    case = make_mla("int8-g4", 3, (30, 3), exact="bf16", recent=(0, 0), dims=(256, 32))
    simulate(case, 2)


@pytest.mark.slow
@in_simulator
def test_segments_in_the_simulator() -> None:
    # several segments
    given: dict[str, Any] = {"exact": "bf16", "sinks": 4, "recent": (33, 40, 7, 0), **HALF}
    simulate(make_mla("int8-g4", 16, (90, 40, 5, 70), **given), 3, stages=2)
    simulate(make_mla("fp8", 5, (70, 9), exact="fp16", recent=(40, 9)), stages=2, teams=2)
    simulate(make_mla(AIM, 5, (70, 2), exact="bf16", sinks=3, page_size=16, **HALF), stages=2)
    simulate(make_mla(AIM, 3, (60, 0, 3), exact="bf16", sinks=2, recent=(20, 5, 9), **HALF))
    case = make_mla("int4-g4+fp16", 5, (70, 9), exact="fp16", recent=(40, 9), dims=(256, 32))
    simulate(case, 2, backwards=True)
    # 16-bit rows in sequence slots beside pages; with sinks only there is no ring
    options: dict[str, Any] = {"exact": "bf16", "page_size": 16, "in_slots": True}
    simulate(make_mla(AIM, 3, (40, 0, 3), sinks=2, recent=(20, 5, 9), **options))
    simulate(make_mla(AIM, 3, (20, 1), sinks=2, q_lens=(2, 1), **options))
    # several queries: a query's own token, or those before it, may stand in either segment
    for sinks, recent, q_lens in ((3, (6, 1, 0), (3, 3, 2)), (0, (2, 3, 1), (4, 1, 0))):
        lens = (60, 4, 37)
        given = {"sinks": sinks, "recent": recent, "q_lens": q_lens, **HALF}
        simulate(make_mla(AIM, 5, lens, exact="bf16", **given), 2, stages=2, blocks=2)
    case = make_mla(AIM, 5, (60, 1), exact="bf16", sinks=5, q_lens=(3, 2), **HALF)
    case.segments.reverse()  # the first one has the sinks
    simulate(case, stages=2)


@pytest.mark.slow
@in_simulator
def test_a_shared_prefix_is_attended_to_as_on_the_cpu() -> None:
    """Beside sequences that do not share it, places that are not in use and padding, all NaN; its
    columns are read by the kernels for few heads and for many."""
    cases: tuple[tuple[str, tuple[int, int], int, int, dict[str, Any]], ...] = (
        ("int8-g4", (256, 32), 3, 0, {}),
        (AIM, (512, 64), 6, 0, OF_MANY),
        ("int8-g4", (256, 32), 3, 2, {}),
    )
    for fmt, dims, heads, recent_len, how in cases:
        options: dict[str, Any] = {"fmt": fmt, "latent_dim": dims[0], "rope_dim": dims[1]}
        options |= {"sink_len": 1, "recent_len": recent_len, "page_size": 16, "max_seq_len": 96}
        cache = LatentPagedKVCache(1, 20, max_num_seqs=3, **options)
        for stack in stacks_of(cache):
            stack.fill_(0xFF)  # NaN
        plain = LatentPagedBatch(cache, 4, 40, shared_prefix=False)
        batch = LatentPagedBatch(cache, 4, 40, shared_prefix=True)
        for name, count in (("z", 5), ("a", 40)):
            cache.allocate(name)
            with plain.extend([name], count):
                plain.append(0, *(torch.randn(count, 1, dim).bfloat16() for dim in dims))
        cache.fork("a", "b")
        for counts in ((1, 1, 1), (2, 1, 3)):
            q_len = max(counts)
            axes = (heads,) if q_len == 1 else (q_len, heads)
            q = [torch.randn(4, *axes, dim).bfloat16() for dim in dims]
            new = [torch.randn(sum(counts), 1, dim).bfloat16() for dim in dims]
            for x in q:
                x[3] = torch.nan
                for place, count in enumerate(counts if q_len > 1 else ()):
                    x[place, count:] = torch.nan
            call: dict[str, Any] = {"sm_scale": 0.07, "return_lse": True}
            with batch.extend(["b", "z", "a"], counts):
                batch.append(0, *new)
                assert int(batch._staged.tensors["prefix_lens"]) == 32
                whole = batch._segments_of(0, 4).whole
                lens = batch.new_lens if q_len > 1 else None
                exact: Any = [x.float() for x in q]
                wanted: Any = attend_latents(
                    exact[0], exact[1], whole, q_lens=lens, **call, backend="reference"
                )
                with (
                    mock.patch.multiple(launching, **how) if how else nullcontext(),
                    in_shape(stacks_of(cache), batch._staged.tensors, q, stages=2),
                    as_on_cuda(),
                ):
                    found = batch.attend(0, q[0], q[1], **call, num_splits=2)
            out, lse = (x.double() for x in wanted)
            assert float((found[0].double() - out).norm() / out.norm()) < LIMITS[torch.bfloat16]
            rtol, atol = WIDE if how else (1e-4, 1e-3)
            torch.testing.assert_close(found[1].double(), lse, rtol=rtol, atol=atol)
            assert not found[0][lse == -math.inf].any()


def stacks_of(cache: LatentPagedKVCache) -> list[torch.Tensor]:
    """All rows of a cache."""
    return [stack for side in (*cache.rows.pages, *cache.rows.exact) for stack in side.stacks]


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Let caches on the CPU call the kernels of CUDA."""
    with (
        mock.patch.object(debug, "may_read", lambda values: False),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.object(layer.LayerCache, "_counts", lambda self, new_lens, new_tokens: new_lens),
        mock.patch.object(append_ops, "kernels_for", lambda *_: "cuda"),
        mock.patch.object(slot_ops, "kernels_for", lambda *_: "cuda"),
        mock.patch.object(mla_ops, "kernels_for", lambda *_: "cuda"),
    ):
        yield


# As machine code


def fitted(text: str, arch: str) -> MlaSpec:
    """A kernel as a launch chooses it: latent+rope [sizes] [paged|ring|slots] [causal] [wide]
    [short] [overlaps]."""
    name, *words = text.split()
    sizes = next((word.split("/") for word in words if "/" in word), ("512", "64"))
    formats = LatentFormat.parse(name, *map(int, sizes)).parts
    blocks = 2 if "wide" in words else 1
    place = next((word for word in words if word in ("paged", "ring", "slots")), "linear")
    spec = MlaSpec(*formats, place=place, causal="causal" in words, blocks=blocks)
    spec = replace(spec, overlaps="overlaps" in words, on_hopper=arch == "sm_90")
    teams, capacity = (2, 200) if "short" in words else (3, 8192)
    return next(shapes_of(spec, GPUS[arch], teams, capacity))


SOME = (
    (AIM, "sm_80"),
    ("fp8", "sm_89"),
    ("int4-g4+bf16 512/32 paged causal wide", "sm_89"),
    ("int8-g4+bf16 256/64", "sm_80"),
    (f"{AIM} paged causal wide", "sm_90"),
    (f"{AIM} paged", "sm_90"),
    (f"{AIM} short overlaps", "sm_90"),
    ("bf16 ring short overlaps", "sm_90"),
    ("bf16 slots causal", "sm_90"),
    ("bf16 ring causal", "sm_100"),
)
OF_NIBBLES, OF_PLACES = ("int4-g8+fp8-g4", "int4-g8+int8-g4"), ("paged", "ring", "slots")
PLACES = [(place, columns) for place in OF_PLACES for columns in ("", " wide")]
ALL = [
    (f"{name}{words}", arch)
    for arch in ("sm_80", "sm_89", "sm_90", "sm_100")
    for name in FORMATS
    for words in ("", *(f" {place} causal{columns}" for place, columns in PLACES), " paged")
] + [
    (f"{name} {latent}/{rope}{words}", arch)
    for arch in ("sm_80", "sm_89", "sm_90", "sm_100")
    for name in OF_SIZES
    for latent, rope in SIZES
    for words in ("", " paged causal wide", " slots causal")
]


# those that keep two registers of a lane in memory
SPILLED = {
    *((f"{name} {place} causal wide", "sm_90") for name in OF_NIBBLES for place in OF_PLACES),
    ("fp8-g4+fp16 paged causal wide", "sm_90"),
    ("int4-g8+int8-g4 paged causal wide", "sm_89"),
    ("int8-g8+int8-g4 paged causal wide", "sm_89"),
    ("int8-g8+int8-g4 ring causal wide", "sm_100"),
}


@pytest.mark.slow
@needs_numba_cuda
@pytest.mark.parametrize(
    ("text", "arch"), ALL if os.environ.get("KVQUANT_CUBINS") == "all" else SOME
)
def test_machine_code_spills_nothing(text: str, arch: str) -> None:
    spec = fitted(text, arch)
    cubin = compile_spec(spec, arch)
    shape = spec.teams, spec.stages, spec.shared_bytes
    print(f"{text:34} {arch:6} {cubin.report} {shape}")
    assert cubin.report.stack_bytes <= (8 if (text, arch) in SPILLED else 0)
    is_apart = (spec.teams, spec.stages, spec.blocks) == (*APART, 1) and not spec.causal
    assert cubin.report.registers <= (APART_REGISTERS if is_apart and arch == "sm_90" else 255)


@pytest.mark.slow
@needs_numba_cuda
@pytest.mark.skipif(shutil.which("nvdisasm") is None, reason="put CUDA's nvdisasm on the PATH")
@pytest.mark.parametrize("text", ["int4-g8+int8-g4", "int4-g8+int8-g4 causal wide", "int8-g4"])
def test_instructions_of_a_tile(text: str, tmp_path: Path) -> None:
    """Of a warp: without the mask and larger references, which most tiles jump over."""
    spec = fitted(text, "sm_90")
    (tmp_path / "cubin").write_bytes(compile_spec(spec, "sm_90").code)
    command = "nvdisasm", "-c", str(tmp_path / "cubin")
    code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    loops = re.finditer(r"^(\.L\w+):$.*?BRA `\(\1\)", code, re.M | re.S)
    tile = max((loop[0] for loop in loops), key=len)
    tile = re.sub(r"(BRA `\((\.L\w+)\))(?:(?!LDGSTS).)*?^\2:", r"\1", tile, flags=re.M | re.S)
    names = Counter(re.findall(r"\*/\s+(?:@\S+ )?([A-Z]\w+)", tile))
    print(f"{text:34} {names.total()} {names.most_common(12)}")
    shifts = 2 + 2 * bool(spec.rope.header_bytes) + 2  # of both parts' scores, of V
    latents = 8 * spec.latent_steps  # a half K, a half V
    assert names["HMMA"] == spec.blocks * (latents + spec.rope_steps + shifts)


# Launches


def test_splits_are_launches_and_one_that_combines_them(cuda: FakeDriver) -> None:
    case = make_mla(AIM, 16, (700, 30), page_size=64, q_lens=(2, 1))
    attend(case)
    note, second = cuda.launched
    spec, _ = loaded_specs()
    assert (spec.blocks, spec.run, spec.place, spec.causal) == (2, 32, "paged", True)
    assert spec.teams == 1 and note.grid == (1, 2, 12) and note.shared == spec.shared_bytes
    assert spec.overlapped and second.overlaps and not note.overlaps
    assert second.grid == (64, 1, 1) and second.block == (128, 1, 1)
    attend(case, num_splits=1, return_lse=False)
    assert [note.grid for note in cuda.launched[2:]] == [(1, 2, 1)]
    given = arguments_of(spec, cuda.launched[2].arguments)
    assert not (given["part_out"] or given["part_lse"] or given["lse"])


def test_a_block_table_of_any_strides_is_read_packed(cuda: FakeDriver) -> None:
    """And leaves no stride for ordinary ones of its shape."""
    case = make_mla(AIM, 16, (700, 30, 5), page_size=64)
    (segment,) = case.segments
    table = segment.block_table
    assert table is not None and table.stride(0) == table.shape[1] == 12
    for given in (table.t().contiguous().t(), table):
        attend(replace(case, segments=[segment._replace(block_table=given)]))
        arguments = arguments_of(loaded_specs()[0], cuda.launched[-2].arguments)
        assert arguments["table_stride"] == 12


def test_single_rows_of_wider_memory_are_read(cuda: FakeDriver) -> None:
    case = make_mla(AIM, 16, (1,))
    (segment,) = case.segments
    rows = torch.zeros(1, 1, 1, 400, dtype=torch.uint8)[..., : segment.k_rows.shape[-1]]
    attend(replace(case, segments=[segment._replace(k_rows=rows)]))
    assert arguments_of(loaded_specs()[0], cuda.launched[-1].arguments)["stride_outer"] == 0


def test_segments_that_no_kernel_reads_are_refused(cuda: FakeDriver) -> None:
    case = make_mla(AIM, 16, (70, 3))
    attend(case)
    with pytest.raises(UnsupportedError, match="1025 segments are too many: at most 1024"):
        attend(replace(case, segments=case.segments * 1025))


def test_queries_that_cannot_be_read_are_copied(cuda: FakeDriver) -> None:
    case = make_mla("bf16", 4, (40, 3))
    wide = torch.zeros(2, 1, 4, 513, dtype=torch.bfloat16)
    for q in (wide[..., 1:], wide[..., :512]):
        attend(replace(case, q_latent=q))
        given = arguments_of(loaded_specs()[0], cuda.launched[-1].arguments)
        assert given["q_latent"] != q.data_ptr() and given["q_latent"] % 16 == 0
        assert given["latent_stride_head"] == 512 * 2
    heads_first = torch.zeros(2, 4, 1, 512, dtype=torch.bfloat16).transpose(1, 2)
    attend(replace(case, q_latent=heads_first))
    given = arguments_of(loaded_specs()[0], cuda.launched[-1].arguments)
    assert given["q_latent"] == heads_first.data_ptr()


def test_segments_are_launched_apart_and_combined_at_once(cuda: FakeDriver) -> None:
    """Two launches leave their splits to one."""
    case = make_mla(AIM, 16, (900, 30), exact="bf16", sinks=4, recent=(60, 9), q_lens=(2, 1))
    attend(case, num_splits=3)
    assert [note.grid for note in cuda.launched] == [(1, 2, 3), (1, 2, 3), (64, 1, 1)]
    assert [spec.place for spec in loaded_specs()[:2]] == ["linear", "ring"]
    assert [note.overlaps for note in cuda.launched] == [False, True, True]


def test_a_shared_prefix_is_a_launch_whose_columns_are_all_queries(cuda: FakeDriver) -> None:
    case = make_mla(
        AIM, 16, (900, 30, 5), exact="bf16", sinks=4, recent=(60, 9, 1), q_lens=(2, 1, 1)
    )
    shares = torch.tensor([1, 0, 1], dtype=torch.int32)
    (prefix, *_) = make_mla(AIM, 1, (3000,), page_size=64).segments
    attend(case, prefix=LatentPrefix(prefix, shares), num_splits=2)
    first, packed, exact, combine = cuda.launched
    assert [note.grid for note in (first, packed, exact)] == [(2, 1, 2), (1, 3, 2), (1, 3, 2)]
    assert combine.grid == (96, 1, 1) and combine.overlaps
    # kernels for many heads take all of an SM, and begin when it is free
    assert exact.overlaps and not first.overlaps and not packed.overlaps
    specs = {type(spec): spec for spec in loaded_specs()}
    assert specs.keys() == {WideMlaSpec, MlaSpec, MlaCombineSpec} and specs[MlaCombineSpec].shared
    apart = torch.zeros(3, 4, 16, 512, dtype=torch.bfloat16)[:, :2]  # not as one sequence's
    attend(replace(case, q_latent=apart), prefix=LatentPrefix(prefix, shares), num_splits=2)
    copied = arguments_of(specs[WideMlaSpec], cuda.launched[4].arguments)
    assert copied["q_latent"] != apart.data_ptr()
    done = len(cuda.launched)
    table = torch.zeros(1, 0, dtype=torch.int32)
    attend(case, prefix=LatentPrefix(prefix._replace(block_table=table), shares), num_splits=2)
    assert len(cuda.launched) - done == 3, "a prefix without room is none"


def test_nothing_to_attend_to(cuda: FakeDriver) -> None:
    case = make_mla(AIM, 4, (3, 4))
    for empty in (
        replace(case, q_latent=case.q_latent[:0], q_rope=case.q_rope[:0]),
        of_rows(case, case.segments[0].k_rows[:, 0, :0]),
    ):
        out, lse = attend(empty)
        assert out.shape == empty.q_latent.shape and not out.any()
        assert bool((lse == -math.inf).all())
    assert not cuda.launched


def of_rows(case: MlaCase, rows: torch.Tensor) -> MlaCase:
    """The same call of other rows."""
    (one,) = case.segments
    changed = latent_segment(rows[:, None], one.seq_lens, one.k_format)  # type: ignore[arg-type]
    return replace(case, segments=[changed])


def test_what_has_no_kernel_is_refused(cuda: FakeDriver) -> None:
    case = make_mla(AIM, 4, (40,))
    with pytest.raises(ConfigError, match="rows of 368 bytes must follow one another"):
        attend(of_rows(case, torch.zeros(1, 45, 384, dtype=torch.uint8)[..., :368]))
    with pytest.raises(ConfigError, match=r"q_latent is torch\.float32: on CUDA use bfloat16"):
        attend(replace(case, q_latent=case.q_latent.float(), q_rope=case.q_rope.float()))
    with pytest.raises(ConfigError, match=r"sm_scale 0\.0 is not possible on CUDA: use a positive"):
        attend(replace(case, sm_scale=0.0))
    for name, rope_dim, message in (
        ("int8", 64, "int8 latents of 512 elements have .* use int4-g4, int4-g8, int8-g4, int8-g8"),
        ("int8-g4+fp8-g8", 64, "fp8-g8 RoPE parts of 64 .* use int8-g4, fp8-g4, bf16 or fp16 for"),
        ("int8-g4+int4", 64, "int4 RoPE parts of 64 .* use int8-g4, fp8-g4, bf16 or fp16 for"),
        ("int8-g4+fp8-g4", 32, "fp8-g4 RoPE parts of 32 elements .* MLA: use bf16 or fp16 for th"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            MlaSpec(*LatentFormat.parse(name, 512, rope_dim).parts)
    with pytest.raises(UnsupportedError, match="bf16 rows with float16 queries"):
        attend(make_mla("bf16", 4, (4,), dtype=torch.float16))
    case = make_mla(AIM, 4, (9,), exact="fp16", recent=(4,), q_lens=(2,))
    with pytest.raises(UnsupportedError, match="several queries a sequence, or with any of"):
        attend(replace(case, segments=case.segments * 2))
    assert not cuda.launched


def test_fewer_teams_for_fewer_tokens() -> None:
    """Of an SM, by the tokens of all sequences."""
    h200, small = GPUS["sm_90"], GPUS["sm_89"]
    spec = MlaSpec(*LatentFormat.parse("int8-g4", 512, 64).parts)

    def shape(units: int, capacity: int, gpu: GPU = h200, blocks: int = 1) -> tuple[int, int]:
        teams = teams_of(blocks, units, capacity, gpu.sm_count)
        found = next(shapes_of(replace(spec, blocks=blocks), gpu, teams, capacity))
        per_sm = gpu.blocks_per_sm(found.warps, APART_REGISTERS, found.shared_bytes)
        return found.teams, found.teams * per_sm

    assert shape(1, 8192)[0] == 1
    for units, capacity in ((1, 32768), (8, 2048), (64, 1024), (1, 131072)):
        assert shape(units, capacity)[0] == 2
    for units, capacity in ((16, 8192), (48, 8192), (64, 8192), (1, 1 << 19)):
        assert shape(units, capacity) == (1, 3)
    assert shape(64, 8192, small) == (1, 1)
    assert next(shapes_of(replace(spec, causal=True), h200, 3, 8192)).teams == 2
    assert [shape(units, 8192, blocks=2)[0] for units in (1, 4, 8)] == [1, 1, 2]


@pytest.mark.parametrize("name", [AIM, "fp8", "bf16"])
def test_a_rehearsal_cuts_work_as_a_call_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would note another kernel that combines the parts."""
    fmt, room = LatentFormat.parse(name, 512, 64), launching.Room(0, GPUS["sm_90"], None, 1024)
    for batch, capacity in itertools.product((1, 3, 16, 48, 64), (64, 2048, 8192, 32768)):
        rows = torch.empty(batch, 1, capacity, fmt.row_bytes, dtype=torch.uint8, device="meta")
        lens = torch.empty(batch, dtype=torch.int32, device="meta")
        found = []
        for registers in (150, APART_REGISTERS, None):

            def kernel_of(*_: object, registers: int | None = registers) -> Any:
                if registers is None:
                    raise runtime.Rehearsed
                return SimpleNamespace(registers=registers)

            monkeypatch.setattr(launching, "kernel_of", kernel_of)
            of_call = latent_segment(rows, lens, fmt), batch, 16, False, "bf16", room, True
            found.append(launching._fitted(*of_call))
        assert found[0] == found[1] == found[2]


def test_every_format_fits_every_gpu() -> None:
    for arch, gpu in GPUS.items():
        for name in FORMATS:
            for words in ("", " wide", *(f" {one}/{other}" for one, other in SIZES)):
                if "/" in words and name not in OF_SIZES:
                    continue
                assert fitted(name + words, arch).shared_bytes <= gpu.shared_per_block


# On a GPU


def compare_on_gpu(case: MlaCase, **options: Any) -> None:
    """Compare the kernel for few heads with float64, however many there are."""
    limits = {"NARROW": dict.fromkeys(launching.NARROW, 2 * (1 << 30,))}
    assert compare_by(limits, case, **options) == {MlaSpec}


# kernel, heads, lengths and pages
KERNELS = [
    pytest.param(compare_on_gpu, 16, (1000, 0, 1, 33, 700), (0, 1, 8, 64), id="few heads"),
    pytest.param(
        compare_many_heads, 64, (2500, 0, 1, 64, 700), (0, 1, 64), marks=needs_warpgroups, id="many"
    ),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("compare", "heads", "lens", "pages"), KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(
    name: str, dtype: torch.dtype, compare: Any, heads: int, lens: Any, pages: Sequence[int]
) -> None:
    if dtype == torch.float16 and ("bf16" in name or name == "fp8"):
        pytest.skip("refused")
    for page_size in pages:
        compare(make_mla(name, heads, lens, page_size=page_size, dtype=dtype, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dims", SIZES, ids=str)
@pytest.mark.parametrize("name", OF_SIZES)
def test_other_sizes(name: str, dims: tuple[int, int]) -> None:
    lens = (1000, 0, 1, 33, 700)
    for heads, page_size in ((16, 0), (40, 64)):
        case = make_mla(name, heads, lens, dims=dims, page_size=page_size, device="cuda")
        compare_on_gpu(case)
    q_lens, recent = (3, 1, 1, 2, 3), (128, 0, 1, 20, 60)
    options: dict[str, Any] = {"exact": "bf16", "sinks": 4, "recent": recent, "q_lens": q_lens}
    compare_on_gpu(make_mla(name, 8, lens, dims=dims, device="cuda", **options))


@pytest.mark.gpu
@pytest.mark.parametrize("q_lens", [None, (2, 1, 0, 2), (4, 4, 3, 1)], ids=str)
def test_segments(q_lens: tuple[int, ...] | None) -> None:
    lens, recent = (5000, 900, 70, 3), (128, 60, 128, 1)
    for name, exact in ((AIM, "bf16"), ("int8-g4", "bf16"), ("fp8-g4+fp16", "fp16")):
        for num_splits in (None, 1, 5):
            options: dict[str, Any] = {"exact": exact, "recent": recent, "q_lens": q_lens}
            case = make_mla(name, 16, lens, sinks=4, device="cuda", **options)
            compare_on_gpu(case, num_splits=num_splits)
    case = make_mla(AIM, 128, lens, exact="fp16", recent=recent, q_lens=q_lens, device="cuda")
    compare_on_gpu(case)
    case = make_mla(
        AIM, 20, lens, exact="bf16", sinks=4, page_size=64, q_lens=q_lens, device="cuda"
    )
    compare_on_gpu(case)
    for kept in (recent, None):
        options = {"exact": "bf16", "recent": kept, "q_lens": q_lens, "in_slots": True}
        compare_on_gpu(make_mla(AIM, 16, lens, sinks=4, page_size=64, device="cuda", **options))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, pytest.param(128, marks=needs_warpgroups)])
def test_a_graph_is_replayed_with_other_lengths(heads: int) -> None:
    """By the kernel for few heads, and by that for many."""
    most = (900, 64) if heads == 16 else (2500, 1024)
    case = make_mla(AIM, heads, most, page_size=64, device="cuda")
    runtime._launches.clear()
    with mock.patch.object(runtime, "_kernels", {}):  # what this call takes
        attend(case, num_splits=2)
        kinds = {type(spec) for spec in loaded_specs()}
    assert (WideMlaSpec in kinds) == (heads == 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(case, num_splits=2)
    other = make_mla(AIM, heads, most, page_size=64, device="cuda")
    for lens in (most, (5, 0), (most[0] - 3, 33), (most[0], 1)):
        case.segments[0].seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        replay, replay_lse = out.clone(), lse.clone()
        other.segments[0].seq_lens.copy_(case.segments[0].seq_lens)
        direct, direct_lse = attend(other, num_splits=2)
        assert torch.equal(replay, direct) and torch.equal(replay_lse, direct_lse)
