"""The append and the dequantize kernel: launches without a GPU, and bytes on one (-m gpu)."""

from __future__ import annotations

import random

import pytest
import torch
from append_cases import (
    DTYPES,
    LATENTS,
    Case,
    append,
    check_on_gpu,
    differences,
    expected,
    expected_values,
    latent_case,
    launch_append,
    make_call,
    make_pages,
    results,
)
from attend import launch_attention
from fake_cuda import (
    CPU,
    FakeDriver,
    arguments_of,
    loaded_specs,
    make_query,
    make_segment,
    note_devices,
)

from kvquant import RowFormat, quantize_rows
from kvquant.errors import ConfigError, UnsupportedError
from kvquant.kernels.cuda.dequantize import launch as dequantizing
from kvquant.kernels.cuda.device.row_layout import divisor, lanes_of, unit_of
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.ops.append import append_rows
from kvquant.ops.rows_at import dequantize_pages
from kvquant.rows.basis import Encoding
from kvquant.rows.format import ROW_DIMS

FORMATS = "int2 int3 int4 int4-g2 int4-g4 int4-g8 int8 int8-g4 fp8 fp8-g4 bf16 fp16".split()


@pytest.mark.parametrize("number", [1, 2, 3, 5, 7, 16, 48, 641, 2**16 + 1, 2**31 - 1])
def test_slots_are_divided_exactly(number: int) -> None:
    factor, shift = divisor(number)
    assert factor < 2**32 and shift < 64
    chosen = random.Random(0)
    for _ in range(2000):
        multiple = chosen.randrange(2**31 // number) * number
        for n in (multiple - 1, multiple, multiple + 1, chosen.randrange(2**31)):
            if 0 <= n < 2**31:
                assert n * factor < 2**64 and n * factor >> shift == n // number


def test_every_format_has_units_that_its_rows_and_codes_are_aligned_to() -> None:
    for head_dim in ROW_DIMS:
        assert 16 * lanes_of(RowFormat("bf16", 1, head_dim)) >= head_dim
        for name in FORMATS:
            fmt = RowFormat.parse(name, head_dim)
            if (name, head_dim) in (("int3", 80), ("int3", 112)):
                with pytest.raises(UnsupportedError, match="rows must be a multiple of 4 long"):
                    lanes_of(fmt)
                continue
            unit = unit_of(fmt)
            assert unit in (4, 8, 16) and not fmt.row_bytes % unit and not fmt.header_bytes % unit


def test_a_step_is_cut_by_heads_and_a_prompt_walks_over_them() -> None:
    assert runtime.grid_of(64, 8, 2, 16, 132) == (4, 8, 2)
    assert runtime.grid_of(32768, 8, 2, 16, 132) == (2048, 2, 2)
    assert runtime.grid_of(1 << 20, 8, 1, 16, 132) == (65536, 1, 1)


def test_nothing_to_append_is_no_launch(cuda: FakeDriver) -> None:
    call = make_call(Case(tokens=0))
    launch_append(**call)
    assert not cuda.launched


def test_a_call_is_checked_once(cuda: FakeDriver) -> None:
    checked = []
    for _ in range(3):
        launch_append(**make_call(Case()), check=lambda: checked.append("append"))
        pages, fmt, slots = make_pages(Case())
        out = torch.zeros(6, 1, 128)
        dequantizing.dequantize(pages, fmt, slots, out, lambda: checked.append("dequantize"))
    assert checked == ["append", "dequantize"]
    launch_append(
        **make_call(Case()) | {"bad": torch.zeros(3, dtype=torch.int32)},
        check=lambda: checked.append("append"),
    )
    assert checked[2:] == ["append"]


def test_cached_launches_do_not_pile_up(cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "MOST_LAUNCHES", 5)
    for tokens in range(1, 20):
        launch_append(**make_call(Case(tokens=tokens)))
        assert len(runtime._launches) <= 5


def test_fp8_is_converted_by_instructions_where_there_are_any(
    cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    launch_append(**make_call(Case(k="int4", v="fp8")))
    assert loaded_specs()[-1].converts_fp8 is False
    launch_append(**make_call(Case(k="int4")))
    assert loaded_specs()[-1].converts_fp8 is True  # not asked for: the same kernel on all GPUs


def test_older_gpus_are_refused(cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    for case in (Case(), Case(feedback="k")):
        with pytest.raises(UnsupportedError, match=r"compute capability 8.0 .* has 7.5"):
            launch_append(**make_call(case))
    with pytest.raises(UnsupportedError, match=r"compute capability 8.0 .* has 7.5"):
        launch_attention(make_query(), [make_segment()], 1.0, None)


@pytest.mark.parametrize("side", ["k_rows", "v_rows", "exact_k"])
def test_rows_that_are_not_aligned_are_refused(cuda: FakeDriver, side: str) -> None:
    call = make_call(Case(exact="bf16"))
    rows = call[side]
    pool = torch.zeros(rows.numel() + 16, dtype=torch.uint8)
    call[side] = pool[4 : 4 + rows.numel()].view(rows.shape)
    with pytest.raises(ConfigError, match=rf"{side}: rows of .* must be aligned to 16 bytes"):
        launch_append(**call)
    assert not cuda.launched


def test_strides_of_axes_with_one_element_do_not_matter(cuda: FakeDriver) -> None:
    call = make_call(Case(heads=1))
    rows = call["k_rows"]
    call["k_rows"] = rows.as_strided(rows.shape, (rows.stride(0), 7, *rows.stride()[2:]))
    launch_append(**call)
    (spec,) = loaded_specs()
    assert arguments_of(spec, cuda.launched[0].arguments)["k.stride_head"] == 0


def test_too_many_slots_are_refused(cuda: FakeDriver) -> None:
    call = make_call(Case())
    call["k_rows"] = call["k_rows"][:1].expand(1 << 27, -1, -1, -1)
    with pytest.raises(UnsupportedError, match="2147483648 slots: the CUDA kernel takes fewer"):
        launch_append(**call)


def test_of_latent_rows_the_append_kernel_takes_the_parts_alone(cuda: FakeDriver) -> None:
    case = Case(**latent_case("int4-g8", exact="bf16"))
    call = make_call(case)
    launch_append(**call)
    (spec,) = loaded_specs()
    assert (spec.lanes, spec.rows) == (32, 1)
    given = arguments_of(spec, cuda.launched[0].arguments)
    assert given["k.rows"] + 288 == given["v.rows"] == call["v_rows"].data_ptr()
    assert given["k.stride_row"] == given["v.stride_row"] == 288 + 64
    assert given["k.exact_rows"] + 1024 == given["v.exact_rows"]
    assert given["k.exact_stride_row"] == 1024 + 64
    call = make_call(Case(**latent_case("fp8")))
    matrix = Encoding(matrix=torch.zeros(1, 512, 512))
    with pytest.raises(UnsupportedError, match="rows of 512 elements, of latent rows"):
        launch_append(**call | {"k_transform": matrix})
    pages, slots = call["k_rows"], call["slots"].packed
    with pytest.raises(UnsupportedError, match="rows of 512 elements, of latent rows"):
        dequantizing.dequantize(pages, call["k_format"], slots, torch.zeros(14, 1, 512))
    assert len(cuda.launched) == 1


def test_a_launch_goes_to_the_device_of_its_tensors(
    cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = note_devices(monkeypatch)
    launch_append(**make_call(Case()))
    launch_append(**make_call(Case(feedback="kv", tokens=200)))
    pages, fmt, slots = make_pages(Case())
    dequantizing.dequantize(pages, fmt, slots, torch.zeros(6, 1, 128))
    assert entered == [CPU] * 3 and len(cuda.launched) == 3


# On a GPU

LARGE: dict[str, Case] = {  # beside the cases of the simulator
    f"{k}, {source}": Case(k=k, source=source, tokens=77, heads=3, hostile=True, exact=exact)
    for k in FORMATS
    for source, exact in (("bf16", ""), ("fp16", "bf16"))
}
LARGE |= {
    f"latents, {name}, {exact or 'packed alone'}": Case(
        **latent_case(name, exact=exact, tokens=77, hostile=True)
    )
    for name in LATENTS
    for exact in ("", "bf16", "fp16")
}
LARGE |= {
    "tokens left out": Case(tokens=100, heads=2, skip=True),
    "offset": Case(offset="kv", tokens=100, heads=8, hostile=True),
    "a long prompt": Case(tokens=5000, heads=4, page_size=64),
    "both sides": Case(feedback="kv", clip="kv", tokens=77, heads=3, v="int8", hostile=True),
    "a prompt": Case(feedback="kv", clip="k", tokens=3000, heads=8, k="int8", v="int4-g4"),
    "16-bit rows, feedback": Case(
        feedback="kv", clip="kv", exact="bf16", tokens=101, heads=8, hostile=True, skip=True
    ),
    "16-bit rows of a prompt": Case(
        feedback="kv", exact="fp16", tokens=2001, heads=8, k="int4", offset="kv"
    ),
    "matrices": Case(
        matrix="kv", feedback="k", clip="kv", offset="kv", exact="bf16", tokens=50, heads=8
    ),
    "clip alone": Case(clip="kv", exact="bf16", tokens=101, heads=8, v="int8-g4", hostile=True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_bytes_are_those_of_the_meaning(name: str) -> None:
    check_on_gpu(LARGE[name])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [*FORMATS, "int2 80", "int3 96", "int3 192", "int4 80", "int8-g8 96", "fp8 192", "bf16 256"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_those_of_the_meaning(name: str, dtype: str) -> None:
    fmt, _, head_dim = name.partition(" ")
    case = Case(k=fmt, head_dim=int(head_dim or 128), tokens=101, heads=3, hostile=True, skip=True)
    pages, row_format, slots = make_pages(case, "cuda")
    wanted = expected_values(pages, row_format, slots, DTYPES[dtype])
    got = dequantize_pages(pages, row_format, slots, DTYPES[dtype])
    torch.testing.assert_close(got.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case(exact="bf16", tokens=32, heads=4),
        Case(feedback="kv", clip="k", matrix="v", exact="bf16", tokens=64, heads=4, skip=True),
    ],
    ids=["plain", "feedback"],
)
def test_a_graph_is_replayed_with_other_slots_and_rows(case: Case) -> None:
    call = make_call(case, "cuda")
    append(**make_call(case, "cuda"))  # compiled
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append(**call)
    for step in range(3):
        order = torch.randperm(case.tokens, device="cuda")
        for slots in call["slots"]:
            slots.copy_(slots[order])
        call["k"].copy_(torch.randn_like(call["k"]) * (step + 1))
        call["v"].copy_(torch.randn_like(call["v"]))
        wanted = expected(call)
        graph.replay()
        problem = differences(results(call), wanted)
        assert not problem, f"step {step}: {problem}"


@pytest.mark.gpu
def test_another_stream_is_used() -> None:
    call, stream = make_call(Case(tokens=40, heads=2), "cuda"), torch.cuda.Stream()
    wanted = expected(call)
    rare, x = call["k"].clone(), call["k"]
    x.zero_()
    append(**make_call(Case(tokens=40, heads=2), "cuda"))  # compiled
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.copy_(rare)
        append(**call)
    stream.synchronize()
    problem = differences(results(call), wanted)
    assert not problem, problem


@pytest.mark.gpu
@pytest.mark.parametrize("feedback", ["", "kv"])
def test_slots_that_do_not_exist_are_left_out(feedback: str) -> None:
    call = make_call(Case(feedback=feedback, tokens=8), "cuda")
    before = call["k_rows"].clone()
    far = torch.tensor([-1, -(2**40), 2**31, 2**40, 10**6, -5, 2**62, -(2**63)], device="cuda")
    launch_append(**call | {"slots": call["slots"]._replace(packed=far)})
    torch.cuda.synchronize()
    assert torch.equal(call["k_rows"], before)


@pytest.mark.gpu
def test_addresses_have_64_bits() -> None:
    fmt = RowFormat.parse("int4-g4", 128)
    pages = (5 << 30) // (16 * 80)
    rows = torch.empty(pages, 1, 16, 80, dtype=torch.uint8, device="cuda")
    x = torch.randn(3, 1, 128, device="cuda", dtype=torch.bfloat16)
    slots = torch.tensor([16 * pages - 1, 16 * (pages // 2), 3], device="cuda")
    append_rows(x, x, rows, torch.empty_like(rows), slots, fmt, fmt)
    wanted = quantize_rows(x.cpu(), fmt)
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(rows[slot // 16, 0, slot % 16].cpu(), wanted[i, 0])
    got = dequantize_pages(rows, fmt, slots, torch.float32)
    assert torch.equal(
        got.cpu(), dequantize_pages(rows, fmt, slots, torch.float32, backend="reference").cpu()
    )
