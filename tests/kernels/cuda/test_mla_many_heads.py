"""The MLA decode kernel for many heads: in the simulator, as machine code, launched, on a GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from fake_cuda import CPU, FakeDriver, loaded_specs
from in_simulator import SIMULATED, in_simulator
from machine_code import (
    SHARE_OF_REGISTERS,
    SPILLS,
    WARPGROUP_ORDER,
    WARPGROUP_PRODUCT,
    count_instructions,
    parts_of,
)
from mla_calls import (
    AIM,
    RAW,
    WIDE,
    attend,
    compare_by,
    compare_many_heads,
    needs_warpgroups,
    simulate_wide,
)
from mla_cases import make_mla

from kvquant import LatentFormat
from kvquant.kernels.cuda.mla import launch as launching
from kvquant.kernels.cuda.mla.mma.spec import MlaSpec
from kvquant.kernels.cuda.mla.wgmma.spec import WideMlaSpec
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.kernels.cuda.runtime.compile import compile_spec
from kvquant.kernels.cuda.runtime.launch import GPUS

if SIMULATED:
    from memory import Fault

    from kvquant.kernels.cuda.mla.wgmma import kernel as wide_kernel
    from kvquant.kernels.cuda.mla.wgmma import rows as wide_rows
    from kvquant.kernels.cuda.mla.wgmma import scores as wide_scores
    from kvquant.kernels.cuda.mla.wgmma import spec as wide_spec
    from kvquant.kernels.cuda.mla.wgmma import values as wide_values

needs_numba_cuda = pytest.mark.extra("cuda")


# In the simulator


@pytest.mark.slow
@in_simulator
def test_rows_queries_segments_and_numbers() -> None:
    simulate_wide(make_mla(AIM, 64, (70,)))
    simulate_wide(make_mla("bf16", 40, (200, 0), page_size=16), 2, backwards=True)
    # each kind of rows
    for name in ("int4-g8+fp16", "int8-g4+bf16", "int8-g8+int8-g4", "fp8-g4+fp8-g4", "fp8"):
        simulate_wide(make_mla(name, 8, (70,)))
    simulate_wide(make_mla("fp16", 8, (70,), dtype=torch.float16))
    simulate_wide(make_mla("int4-g4+fp16", 8, (70,), dtype=torch.float16))
    # queries, segments and places
    simulate_wide(make_mla(AIM, 30, (130, 3), q_lens=(3, 2)), 2)
    recent: dict[str, Any] = {"exact": "bf16", "sinks": 3, "recent": (40, 9)}
    simulate_wide(make_mla("int8-g4", 6, (90, 20), q_lens=(2, 1), **recent))
    simulate_wide(make_mla(AIM, 6, (90, 20), page_size=64, in_slots=True, **recent), 2)
    simulate_wide(make_mla(AIM, 6, (64,), overlong=True))
    # tiny, large and peaked numbers
    for name in (AIM, "int8-g4+bf16", "fp8", "bf16"):
        for scale, q_scale in ((1e-4, 100.0), (1e3, 1e-3), (1.5, 20.0)):
            simulate_wide(make_mla(name, 4, (130,), scale=scale, q_scale=q_scale))
    # RoPE elements much larger than latents
    for name in (AIM, "int8-g4+bf16"):
        simulate_wide(make_mla(name, 4, (70,), rope_scale=1000.0))
    # FlashMLA's scales of any size
    for options in RAW:
        simulate_wide(make_mla("fp8", 3, (100,), raw_scales=True, **options))


@pytest.mark.slow
@in_simulator
def test_a_barrier_or_a_fence_of_many_heads_that_is_left_out_is_found() -> None:
    """The simulator would see a race in this kernel: it sees those that each of them prevents."""
    of_stages = {name: 2 for name in ("FULL", "READY", "FREE")}
    for name, count in (of_stages | dict.fromkeys(("OWN", "END", "DONE"), 1)).items():
        first = getattr(wide_spec, name)
        with ExitStack() as stack, pytest.raises(Fault, match="a race: "):
            for module in (wide_rows, wide_scores, wide_values):
                for kind in {"barrier", "arrive"} & vars(module).keys():
                    left_out = without(getattr(module, kind), range(first, first + count))
                    stack.enter_context(mock.patch.object(module, kind, left_out))
            simulate_wide(make_mla(AIM, 4, (200,)))
    for module in (wide_kernel, wide_rows, wide_scores):
        with (
            mock.patch.object(module, "fence_shared", lambda: None),
            pytest.raises(Fault, match=r"without fence\.proxy\.async"),
        ):
            simulate_wide(make_mla(AIM, 4, (200,)))


def without(meet: Any, barriers: range) -> Any:
    """The instruction `meet`, but not at these barriers."""
    return lambda barrier, threads: None if barrier in barriers else meet(barrier, threads)


# As machine code


WIDE_SOME = f"{AIM}; bf16 slots causal; int8-g4 paged causal"
PACKED = f"{AIM} int4-g8+int8-g4 int4-g8 int4-g4 int8-g4 int8-g8+int8-g4 int8-g4+fp8-g4 fp8-g4+fp16"
WIDE_ALL = "; ".join(
    f"{name}{words}"
    for name in ("bf16", "fp16", *PACKED.split(), "fp8")
    for words in ("", " paged", " paged causal", " ring causal", " slots causal")
)
MOST_SPILLED = 40  # bytes of a lane of the rows: those of int4-g8 with RoPE elements in bf16


@pytest.mark.slow
@needs_numba_cuda
@pytest.mark.parametrize(
    "text", (WIDE_ALL if os.environ.get("KVQUANT_CUBINS") == "all" else WIDE_SOME).split("; ")
)
def test_products_of_many_heads_are_two_chains(text: str) -> None:
    """Between their begin and their end ptxas waits for nothing: it would, if it lacked registers.
    It keeps some in memory of the warpgroup that expands rows, and of no other."""
    name, *words = text.split()
    place = next((word for word in words if word in ("paged", "ring", "slots")), "linear")
    spec = WideMlaSpec(*LatentFormat.parse(name).parts, place=place, causal="causal" in words)
    cubin = compile_spec(spec, "sm_90")
    print(f"{text:34} {cubin.report}")
    assert cubin.report.stack_bytes <= (0 if spec.latent.is_exact else MOST_SPILLED)
    assert cubin.report.registers * spec.threads == 65536
    assert count_instructions(cubin.code, WARPGROUP_PRODUCT) == 9 * 4 + 4 * 2
    assert count_instructions(cubin.code, WARPGROUP_ORDER) == 4
    begun, *of_groups = parts_of(cubin.code, SHARE_OF_REGISTERS)
    assert len(of_groups) == 3 and not spilled(begun)
    assert sum(bool(spilled(one)) for one in of_groups) <= 1
    assert not any(spilled(one) for one in of_groups if WARPGROUP_PRODUCT in one)


def spilled(numbers: Sequence[int]) -> int:
    """How many of some instructions keep a register in memory, or bring it back."""
    return sum(numbers.count(one) for one in SPILLS)


# Launches


@pytest.mark.parametrize(
    ("name", "heads", "tokens", "dims", "capability", "is_wide"),
    [
        (AIM, 128, 4000, (512, 64), (9, 0), True),
        (AIM, 17, 4000, (512, 64), (9, 0), True),
        (AIM, 16, 4000, (512, 64), (9, 0), False),
        ("bf16", 1, 4000, (512, 64), (9, 0), True),
        ("fp8", 33, 4000, (512, 64), (9, 0), True),
        ("fp8", 32, 4000, (512, 64), (9, 0), False),
        (AIM, 128, 500, (512, 64), (9, 0), False),
        (AIM, 128, 4000, (512, 64), (10, 0), False),
        (AIM, 128, 4000, (512, 64), (8, 0), False),
        ("int4-g4+fp16", 128, 4000, (256, 32), (9, 0), False),
    ],
)
def test_many_heads_have_a_kernel_of_their_own_on_hopper(
    cuda: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    heads: int,
    tokens: int,
    dims: tuple[int, int],
    capability: tuple[int, int],
    is_wide: bool,
) -> None:
    arch = "sm_{}{}".format(*capability)
    monkeypatch.setattr(runtime, "_gpus", {CPU: GPUS[arch]})
    attend(make_mla(name, heads, (tokens,), dims=dims), num_splits=1)
    (spec,) = loaded_specs()
    assert isinstance(spec, WideMlaSpec if is_wide else MlaSpec)
    (note,) = cuda.launched
    columns = 64 if isinstance(spec, WideMlaSpec) else spec.block_columns
    assert note.grid == (-(-heads // columns), 1, 1)


def test_many_tokens_of_nibbles_take_the_kernel_for_few_heads_up_to_32_columns(
    cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "MANY", 30)  # tokens an SM
    cases = (4000, 32, MlaSpec), (3900, 32, WideMlaSpec), (4000, 33, WideMlaSpec)
    for tokens, heads, kind in cases:
        runtime._launches.clear()
        attend(make_mla(AIM, heads, (tokens,)), num_splits=1)
        assert type(loaded_specs()[-1]) is kind


def test_many_heads_of_few_sequences_take_fewer_splits_in_place_of_the_other_kernel(
    cuda: FakeDriver,
) -> None:
    """On 132 SMs; of single sequences, too, and up to where too few blocks would be left."""
    for (batch, tokens, heads), grid in {
        (1, 131072, 64): (1, 1, 128),
        (1, 131072, 128): (2, 1, 64),
        (1, 32768, 128): (2, 1, 64),
        (2, 32768, 128): (2, 2, 32),
        (4, 32768, 64): (1, 4, 32),
        (8, 8192, 64): (1, 8, 16),
        (1, 40000, 64): (1, 1, 70),
        (1, 32768, 64): (1, 1, 64),
        (1, 25000, 64): None,
        (4, 500, 64): None,
    }.items():
        case = make_mla(AIM, heads, (1,) * batch, page_size=64)
        (segment,) = case.segments
        table = torch.zeros(batch, tokens // 64, dtype=torch.int32)
        attend(replace(case, segments=[segment._replace(block_table=table)]))
        cuda.launched.pop()  # that combines
        note = cuda.launched.pop()
        assert (note.block == (512, 1, 1)) == (grid is not None), (batch, tokens, heads)
        assert grid is None or note.grid == grid


# On a GPU


@pytest.mark.gpu
@needs_warpgroups
@pytest.mark.parametrize("heads", [5, 17, 64, 100, 128])
def test_numbers_of_many_heads(heads: int) -> None:
    for name in (AIM, "bf16"):
        for num_splits in (None, 1, 3):
            case = make_mla(name, heads, (4000, 5), page_size=16, device="cuda")
            compare_many_heads(case, num_splits=num_splits)


@pytest.mark.gpu
@needs_warpgroups
@pytest.mark.parametrize("q_lens", [None, (2, 1, 0, 2), (4, 4, 3, 1)], ids=str)
def test_queries_and_segments_for_many_heads(q_lens: tuple[int, ...] | None) -> None:
    lens = (5000, 900, 70, 3)
    for heads, name in ((64, AIM), (128, "int8-g4"), (48, "bf16")):
        compare_many_heads(make_mla(name, heads, lens, q_lens=q_lens, device="cuda"))
    options: dict[str, Any] = {"exact": "bf16", "recent": (128, 60, 128, 1), "q_lens": q_lens}
    compare_many_heads(make_mla(AIM, 64, lens, sinks=4, device="cuda", **options))
    options |= {"page_size": 64, "in_slots": True}
    compare_many_heads(make_mla(AIM, 64, lens, sinks=4, device="cuda", **options))


@pytest.mark.gpu
@needs_warpgroups
@pytest.mark.parametrize("q_lens", [None, (2, 1, 0, 2)], ids=str)
def test_long_rows_of_many_heads_beside_a_short_ring(q_lens: tuple[int, ...] | None) -> None:
    """The launcher takes both kernels by itself, and combines their parts."""
    lens, recent = (5000, 900, 70, 3), (128, 60, 128, 1)
    case = make_mla(AIM, 128, lens, exact="bf16", recent=recent, q_lens=q_lens, device="cuda")
    assert compare_by({}, case, *WIDE) == {MlaSpec, WideMlaSpec}
