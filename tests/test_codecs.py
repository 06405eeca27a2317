"""A codec that is new in the table is served by every place, or refused there by its name.

Two kinds of made-up codecs are put into the table. One is made of what is known: 5 bits in bytes.
Its rows are quantized, read, attended to and saved as those of any other codec, without a line of
code for it. The others have a word that no place knows, and no place may take it for another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from example_plan import example_plan
from made_up_codec import INT5

from kvquant import (
    KVCache,
    LatentFormat,
    LatentKVCache,
    LatentPagedKVCache,
    PagedKVCache,
    append_rows,
    decode_attention,
    dequantize_pages,
    dequantize_rows,
    load_cache,
    mla_decode_attention,
    quantize_rows,
    reference_attention,
    save_cache,
)
from kvquant.bench.cases import check, list_cases, make_inputs
from kvquant.cache import checks
from kvquant.cache.warmup import Calls
from kvquant.engine.settings import Settings
from kvquant.errors import KVQuantError, UnsupportedError
from kvquant.io import inspect
from kvquant.io.container import check_values
from kvquant.io.export import export_cache
from kvquant.io.parts import Part
from kvquant.io.row_stats import describe_side
from kvquant.kernels.cuda.append.spec import AppendSpec, FeedbackSide, FeedbackSpec, Side, StepSpec
from kvquant.kernels.cuda.decode.spec import DecodeSpec
from kvquant.kernels.cuda.decode.spec import Path as SegmentPath
from kvquant.kernels.cuda.dequantize.launch import DequantizeSpec
from kvquant.kernels.cuda.mla.mma.spec import MlaSpec
from kvquant.kernels.cuda.mla.wgmma.spec import WideMlaSpec
from kvquant.kernels.cuda.prefix.spec import PrefixSpec
from kvquant.kernels.cuda.runtime.launch import GPUS
from kvquant.kernels.cuda.runtime.spec import Spec
from kvquant.kernels.cuda.runtime.warmup import kernels_of
from kvquant.ops.quantize import quantize_calibrated
from kvquant.paged import cache as paged_cache
from kvquant.paged import latent as paged_latent
from kvquant.rows import format as formats
from kvquant.rows import latent
from kvquant.rows.codec import CODECS, FP16_MAX, Codec
from kvquant.rows.format import RowFormat
from kvquant.rows.quantize import dequantize, feedback_matrix, pack, parameters, quantize, unpack

ROOT = Path(__file__).parents[1]
DIM, TOKENS = 64, 20
STRANGE = [
    Codec("int6", 6, "thirds", "integers", "pairs", FP16_MAX, 63.0),
    Codec("nf4", 4, "nibbles", "quantiles", "pairs", FP16_MAX, 1.0),
    Codec("mx8", 8, "bytes", "e4m3", "exponents", FP16_MAX, 448.0),
]
FEW_BITS = "int3", "int2"  # without a CUDA kernel of latents
SERVED_CODECS = INT5.name, *FEW_BITS
Place = Callable[[str, Path], None]


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The table with the made-up codecs."""
    for codec in (INT5, *STRANGE):
        monkeypatch.setitem(CODECS, codec.name, codec)
    yield
    formats._parse.cache_clear()
    latent._parse.cache_clear()


def values(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape)


def made(name: str, dim: int = DIM) -> tuple[torch.Tensor, RowFormat, torch.Tensor]:
    """Values [1, 2, TOKENS, dim], a format and rows of it: of the values, or zeros."""
    fmt, x = RowFormat.parse(name, dim), values(1, 2, TOKENS, dim)
    if name in SERVED_CODECS:
        return x, fmt, quantize(x, fmt)[0]
    return x, fmt, torch.zeros(1, 2, TOKENS, fmt.row_bytes, dtype=torch.uint8)


def quantize_by_the_reference(name: str, _folder: Path) -> None:
    x = values(1, 2, TOKENS, DIM)
    fmt = RowFormat.parse(name, DIM)
    rows, _ = quantize(x, fmt)
    codes = unpack(rows[..., 4:], fmt)
    assert int(codes.max()) == fmt.facts.levels and int(codes.min()) == 0
    assert pack(codes, fmt).equal(rows[..., 4:])
    scale = parameters(rows, fmt)[0]
    assert bool(((dequantize(rows, fmt) - x).abs() <= scale * 0.501).all())


def dequantize_by_the_reference(name: str, _folder: Path) -> None:
    _, fmt, rows = made(name)
    dequantize(rows, fmt)


def round_with_feedback(name: str, _folder: Path) -> None:
    x, fmt, rows = made(name)
    matrix = feedback_matrix(torch.eye(DIM).expand(2, DIM, DIM))
    for backend in ("cpu", "reference"):  # errors that do not count change nothing
        found = quantize_calibrated(x, fmt, feedback=matrix, backend=backend)
        assert found.equal(rows)


def quantize_on_the_cpu(name: str, _folder: Path) -> None:
    x, fmt, rows = made(name)
    assert quantize_rows(x, fmt, backend="cpu").equal(rows)


def dequantize_on_the_cpu(name: str, _folder: Path) -> None:
    _, fmt, rows = made(name)
    assert dequantize_rows(rows, fmt, backend="cpu").equal(dequantize(rows, fmt))


def attend_on_the_cpu(name: str, _folder: Path) -> None:
    _, fmt, rows = made(name)
    q, lens = values(1, 4, DIM), torch.tensor([TOKENS], dtype=torch.int32)
    found, wanted = (
        attend(q, rows, rows, lens, k_format=fmt, v_format=fmt)
        for attend in (partial(decode_attention, backend="cpu"), reference_attention)
    )
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()


def attend_by_the_reference(name: str, _folder: Path) -> None:
    _, fmt, rows = made(name)
    q, lens = values(1, 4, DIM), torch.tensor([TOKENS], dtype=torch.int32)
    decode_attention(q, rows, rows, lens, k_format=fmt, v_format=fmt, backend="reference")


def append_to_pages(name: str, _folder: Path) -> None:
    x, fmt, rows = made(name)
    for backend in ("cpu", "reference"):
        pages = torch.zeros(2, 2, 2, 16, fmt.row_bytes, dtype=torch.uint8)
        new = x[0].transpose(0, 1)
        slots = torch.arange(TOKENS)
        append_rows(new, new.clone(), pages[0], pages[1], slots, fmt, fmt, backend=backend)
        found = dequantize_pages(pages[0], fmt, slots, torch.float32, backend=backend)
        assert found.equal(dequantize(rows, fmt)[0].transpose(0, 1))


def dequantize_an_engines_pages(name: str, _folder: Path) -> None:
    layout = Settings.parse({"k_format": name, "v_format": name}).layout(2, DIM, DIM)
    pages = torch.zeros(1, layout.num_kv_heads, 16, layout.token_bytes, dtype=torch.uint8)
    for rows in layout.views(pages):
        dequantize_pages(rows, layout.k_format, torch.arange(16), torch.float32)


def attend_to_latents(name: str, _folder: Path) -> None:
    latent = RowFormat(name, CODECS[name].groups[-1], 512)
    fmt = LatentFormat(latent, RowFormat.parse("bf16", 64))
    rows = quantize_rows(values(1, TOKENS, 576), fmt, backend="cpu")
    q, lens = (values(1, 4, 512), values(1, 4, 64)), torch.tensor([TOKENS], dtype=torch.int32)
    found, wanted = (
        mla_decode_attention(*q, rows, lens, fmt=fmt, sm_scale=0.1, backend=backend)
        for backend in ("cpu", "reference")
    )
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()


def save_and_load(name: str, folder: Path) -> None:
    cache = KVCache(1, 1, 2, DIM, 64, k_format=name, v_format=name, recent_len=0)
    k, v = values(2, 1, 2, TOKENS, DIM)
    cache.append(0, k, v)
    save_cache(cache, folder / "cache.safetensors")
    assert f" {name} " in inspect.render(inspect.describe(folder / "cache.safetensors"))
    q = values(1, 4, DIM)
    again = load_cache(folder / "cache.safetensors", max_seq_len=64)
    assert again.attend(0, q).equal(cache.attend(0, q))
    export_cache(again, folder / "values.safetensors", "bf16")


def check_what_a_file_holds(name: str, _folder: Path) -> None:
    _, fmt, rows = made(name)
    check_values(rows[0].transpose(0, 1), Part(0, "k", "packed", fmt, 2, (TOKENS,), (0,)))


def describe_what_a_file_holds(name: str, _folder: Path) -> None:
    _, fmt, rows = made(name)
    tokens = {"packed": TOKENS, "sinks": 0, "recent": 0}
    found = describe_side(fmt, 2, tokens, rows.numel(), rows[0].transpose(0, 1))
    assert found["step"] > 0


def export_to_others(name: str, folder: Path) -> None:
    cache = KVCache(1, 1, 2, 128, 64, k_format=name, v_format=name)
    export_cache(cache, folder / "rows.safetensors", "fbgemm")


def round_by_a_plan(name: str, _folder: Path) -> None:
    plan = example_plan().with_formats(name)
    x, _, _ = made(name)
    ratio = torch.full((2,), 0.9)
    matrix = feedback_matrix(torch.eye(DIM).expand(2, DIM, DIM))
    rows = quantize_calibrated(x, plan.k_formats[0], clip=ratio, feedback=matrix, backend="cpu")
    limit = {"int2": 0.6, "int3": 0.3}.get(name, 0.1)
    assert (dequantize(rows, plan.k_formats[0]) - x).norm() < limit * x.norm()


def bench_a_case(name: str, _folder: Path) -> None:
    (case,) = list_cases(
        [name], batches=[1], seq_lens=[40], num_q_heads=4, num_kv_heads=2, head_dim=DIM
    )
    (inputs,) = make_inputs(case, 1, torch.device("cpu"))
    assert check(case, inputs) < 0.02


SERVED: list[Place] = [
    quantize_by_the_reference,
    dequantize_by_the_reference,
    round_with_feedback,
    quantize_on_the_cpu,
    dequantize_on_the_cpu,
    attend_on_the_cpu,
    attend_by_the_reference,
    append_to_pages,
    dequantize_an_engines_pages,
    attend_to_latents,
    save_and_load,
    check_what_a_file_holds,
    describe_what_a_file_holds,
    round_by_a_plan,
    bench_a_case,
]


@pytest.mark.parametrize("name", SERVED_CODECS)
@pytest.mark.parametrize("place", SERVED, ids=lambda place: place.__name__)
def test_a_codec_of_known_words_is_served(place: Place, name: str, tmp_path: Path) -> None:
    place(name, tmp_path)


@pytest.mark.parametrize("codec", STRANGE, ids=lambda codec: codec.name)
@pytest.mark.parametrize("place", [*SERVED, export_to_others], ids=lambda place: place.__name__)
def test_a_codec_of_a_strange_word_is_refused_by_name(
    place: Place, codec: Codec, tmp_path: Path
) -> None:
    if place is check_what_a_file_holds and codec.name == "int6":
        place(codec.name, tmp_path)  # it looks at scales and shifts, which are those of integers
        return
    with pytest.raises(KVQuantError, match=codec.name):
        place(codec.name, tmp_path)


def test_other_programs_take_known_codecs_only(tmp_path: Path) -> None:
    cache = KVCache(1, 1, 2, 128, 64, k_format=INT5.name, v_format=INT5.name)
    with pytest.raises(UnsupportedError, match=f"K in {INT5.name} .* fbgemm takes"):
        export_cache(cache, tmp_path / "rows.safetensors", "fbgemm")


def latent_spec(name: str, rope: str = "bf16") -> MlaSpec:
    return MlaSpec(RowFormat.parse(name, 512), RowFormat.parse(rope, 64), teams=1, stages=2)


def most(fmt: RowFormat) -> str:
    """The name of the codec with as many groups as it may have."""
    return str(RowFormat(fmt.codec, fmt.facts.groups[-1], 64))


KERNELS: dict[str, Callable[[RowFormat], Spec]] = {
    "decode": lambda fmt: DecodeSpec(SegmentPath(fmt, fmt)),
    "append": lambda fmt: AppendSpec(Side(fmt), Side(fmt), exact="bf16"),
    "step": lambda fmt: StepSpec(Side(fmt), Side(fmt), exact="bf16"),
    "feedback": lambda fmt: FeedbackSpec((FeedbackSide(fmt, share=4),)),
    "dequantize": DequantizeSpec,
    "prefix": lambda fmt: PrefixSpec(fmt, fmt),
    "latents": lambda fmt: latent_spec(most(fmt)),
    "RoPE parts": lambda fmt: latent_spec("int4-g8", most(fmt).replace("-g8", "-g4")),
    "latents of many heads": lambda fmt: WideMlaSpec.of(latent_spec(most(fmt))),
}


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there was a GPU."""
    for module in (checks, paged_cache, paged_latent):
        monkeypatch.setattr(module, "check_device", lambda device, **_: torch.device(device))


def refused(message: str, *makers: Callable[..., object]) -> None:
    """Assert that caches are served on the CPU and refused on a GPU, before they take memory."""
    for make in makers:
        make(device="cpu")
        with pytest.raises(UnsupportedError, match=message):
            make(device="cuda")


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("name", FEW_BITS)
def test_latents_on_cuda_refuse_codecs_without_kernels(name: str) -> None:
    refused(
        f"{name} (latents|RoPE parts) .* no CUDA kernel of MLA: use .* or backend='reference'",
        partial(LatentKVCache, 1, 1, 64, fmt=name),
        partial(LatentPagedKVCache, 1, num_pages=4, max_seq_len=64, fmt=f"int4-g8+{name}"),
    )


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("head_dim", [80, 112])
def test_caches_on_cuda_refuse_rows_that_do_not_lie_at_words(head_dim: int) -> None:
    length = {80: 34, 112: 46}[head_dim]
    refused(
        f"no CUDA kernel: int3 rows of head_dim {head_dim} .* {length} bytes, .* on the CPU",
        partial(KVCache, 1, 1, 2, head_dim, 64, k_format="int4", v_format="int3"),
        partial(PagedKVCache, 1, 2, head_dim, num_pages=4, max_seq_len=64, k_format="int3"),
    )


@pytest.mark.extra("cuda")
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_cuda_kernel_serves_or_refuses_a_codec(kernel: str) -> None:
    make = KERNELS[kernel]
    assert callable(make(RowFormat.parse(INT5.name, 128)).build())
    of_latents = kernel in ("latents", "RoPE parts", "latents of many heads")
    for name in () if of_latents else FEW_BITS:
        assert callable(make(RowFormat.parse(name, 128)).build())
    for name in (*(FEW_BITS if of_latents else ()), *(codec.name for codec in STRANGE)):
        with pytest.raises(UnsupportedError, match=name):
            make(RowFormat.parse(name, 128)).build()


def test_kernels_are_made_ready_for_known_codecs_only() -> None:
    served = [CODECS[name] for name in SERVED_CODECS]
    for codec in (*served, *STRANGE):
        make = partial(KVCache, 1, 1, 2, 128, 64, k_format=codec.name, v_format=codec.name)
        meta = partial(make, recent_len=0, device="meta")
        calls = [Calls(meta, torch.bfloat16, 4, (TOKENS,))]
        try:
            found = kernels_of(calls, GPUS["sm_90"])
        except UnsupportedError as error:
            assert codec.name in str(error) and codec not in served
        else:
            kinds = {type(spec) for spec in found if codec.name in repr(spec)}
            assert kinds == ({AppendSpec, DecodeSpec} if codec in served else set())


# what is about one codec by its name: layouts of other projects, and rows without a kernel
BY_NAME = {
    "calibration/calibrate.py": 1,
    "kernels/cuda/mla/mma/spec.py": 1,
    "kernels/cuda/mla/wgmma/spec.py": 1,
    "kvquant/io/export.py": 5,
    "kvquant/rows/latent.py": 2,
}


def test_no_place_tells_codecs_apart_by_name() -> None:
    found = {
        str(path.relative_to(ROOT)): count
        for room in ("kvquant", "kernels", "calibration")
        for path in sorted((ROOT / room).rglob("*.py"))
        if (count := len(re.findall(r"\.codec (?:[=!]=|in|not in) ", path.read_text("utf-8"))))
    }
    assert found == BY_NAME, "read a fact of the codec, or pick by its words: kvquant/rows/codec.py"


def test_a_codec_with_two_of_the_words_of_a_choice_is_refused() -> None:
    half_scales = Codec("e5", 8, "bytes", "fp16", "pairs", FP16_MAX, 1.0)
    choice = partial(Codec.pick, bf16=1, fp16=2, pairs=3)
    assert [choice(CODECS[name]) for name in ("bf16", "fp16", "int4")] == [1, 2, 3]
    with pytest.raises(UnsupportedError, match=r"e5 rows .* code for fp16 and for pairs"):
        choice(half_scales)
