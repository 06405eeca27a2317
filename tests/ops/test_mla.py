"""Attention over latent rows, against its formula in float64; compiles two dozen decode kernels."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from attend import attend_latents
from fake_cuda import FakeDriver, install
from mla_cases import raw_rows
from refusals import refused
from slow_cases import mark_slow

from kvquant import (
    LatentFormat,
    append_rows,
    debug,
    dequantize_pages,
    dequantize_rows,
    mla_decode_attention,
    quantize_rows,
)
from kvquant.errors import ConfigError, ShapeError, UnsupportedError
from kvquant.ops import mla
from kvquant.rows.call import LatentPrefix
from kvquant.rows.segment import latent_segment

SCALE = 192**-0.5
LENGTHS = (0, 1, 17, 700, 3)
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 8e-4}


class Case(NamedTuple):
    """Queries, rows whose unused bytes are NaN, and lengths."""

    q_latent: torch.Tensor
    q_rope: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor


def make_case(
    fmt: LatentFormat, heads: int, q_len: int | None = None, dtype: torch.dtype = torch.float32
) -> Case:
    lens = torch.tensor(LENGTHS, dtype=torch.int32)
    shape = (len(LENGTHS), *([] if q_len is None else [q_len]), heads)
    x = torch.randn(len(LENGTHS), max(LENGTHS), fmt.head_dim)
    rows = torch.full((*x.shape[:2], fmt.row_bytes), 0xFF, dtype=torch.uint8)  # NaN in any format
    for b, length in enumerate(LENGTHS):
        rows[b, :length] = quantize_rows(x[b, :length], fmt)
    q_latent, q_rope = torch.randn(*shape, fmt.latent_dim), torch.randn(*shape, fmt.rope_dim)
    return Case((q_latent / 4).to(dtype), q_rope.to(dtype), rows, lens)


def expected(case: Case, fmt: LatentFormat, q_lens: torch.Tensor | None = None) -> torch.Tensor:
    """[batch, q_len, heads, latent_dim + 1], float64: out and lse by the formula."""
    q_latent, q_rope = case.q_latent.double(), case.q_rope.double()
    if q_latent.ndim == 3:
        q_latent, q_rope = q_latent[:, None], q_rope[:, None]
    batch, q_len, heads, dim = q_latent.shape
    found = torch.zeros(batch, q_len, heads, dim + 1, dtype=torch.float64)
    found[..., -1] = -math.inf
    for b, length in enumerate(case.seq_lens.tolist()):
        values = dequantize_rows(case.rows[b, :length], fmt).double()
        latent, rope = values.split([fmt.latent_dim, fmt.rope_dim], -1)
        count = q_len if q_lens is None else int(q_lens[b])
        for i in range(count):
            seen = length - count + i + 1
            if seen <= 0:
                continue
            scores = q_latent[b, i] @ latent[:seen].T + q_rope[b, i] @ rope[:seen].T
            scores = scores * SCALE
            found[b, i, :, :-1] = scores.softmax(-1) @ latent[:seen]
            found[b, i, :, -1] = scores.logsumexp(-1)
    return found if case.q_latent.ndim == 4 else found[:, 0]


def assert_near(out: torch.Tensor, lse: torch.Tensor, wanted: torch.Tensor, bound: float) -> None:
    error = (out.double() - wanted[..., :-1]).norm() / wanted[..., :-1].norm()
    assert error <= bound
    torch.testing.assert_close(lse.double(), wanted[..., -1], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "dims", "heads", "q_len", "dtype"),
    [
        ("int4-g8+fp8-g4", (512, 64), 16, None, torch.bfloat16),
        ("bf16", (512, 64), 16, None, torch.float16),
        ("fp8", (512, 64), 24, None, torch.float32),  # two blocks of heads
        ("int3+int2", (512, 64), 4, None, torch.float32),
        ("int8-g4+int8-g8", (256, 32), 4, 3, torch.float32),  # groups of 4, 4 tokens a block
    ],
)
def test_the_kernel_attends_as_the_formula_says(
    name: str, dims: tuple[int, int], heads: int, q_len: int | None, dtype: torch.dtype
) -> None:
    fmt = LatentFormat.parse(name, *dims)
    case = make_case(fmt, heads, q_len, dtype)
    wanted = expected(case, fmt)
    for num_splits in (None, 3):
        out, lse = mla_decode_attention(
            *case, fmt=name, sm_scale=SCALE, return_lse=True, num_splits=num_splits
        )
        assert out.dtype == dtype and out.shape == case.q_latent.shape
        assert lse.dtype == torch.float32
        assert_near(out, lse, wanted, BOUNDS[dtype])
        assert not out[0].any() and bool((lse[0] == -math.inf).all())


@pytest.mark.parametrize(
    "rows",
    mark_slow(
        [
            *((name, (512, 64)) for name in ("int4-g8+fp8-g4", "int4-g8+int8-g4", "fp8")),
            *((name, (512, 32)) for name in ("int8-g4", "int3", "bf16")),
            *((name, (256, 64)) for name in ("int4-g8+fp8-g4", "fp8-g4+fp16", "bf16")),
            *((name, (256, 32)) for name in ("int4-g8+int8-g4", "int2+int3", "fp8")),
        ],
        [("int4-g8+int8-g4", (512, 64)), ("fp8", (256, 32))],
    ),
    ids=str,
)
def test_one_to_four_queries_of_each_format_and_size(rows: tuple[str, tuple[int, int]]) -> None:
    """Heads times queries are always 12, so that one CPU kernel of each format serves all."""
    name, dims = rows
    if name == "fp8" and dims != (512, 64):
        with pytest.raises(ConfigError, match="fp8 is FlashMLA's layout, of 512 latents and 64"):
            LatentFormat.parse(name, *dims)
        return
    fmt = LatentFormat.parse(name, *dims)
    for q_len in (1, 2, 3, 4):
        case = make_case(fmt, 12 // q_len, q_len)
        q_lens = torch.tensor([q_len, 1, 2, 4, 3], dtype=torch.int32).clamp(max=q_len)
        case.q_latent[torch.arange(q_len) >= q_lens[:, None]] = math.nan
        options: Any = {"fmt": fmt, "sm_scale": SCALE, "q_lens": q_lens, "return_lse": True}
        out, lse = mla_decode_attention(*case, **options)
        assert_near(out, lse, expected(case, fmt, q_lens), 1e-5)


# 12 columns a block, here and below: a kernel takes seconds to compile
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e8])
def test_rows_of_flash_mla_may_have_scales_of_any_size(scale: float) -> None:
    fmt = LatentFormat.parse("fp8")
    case = make_case(fmt, 12)
    x = torch.randn(5, 700, 576)
    x[..., :512] *= scale
    for b, length in enumerate(LENGTHS):
        case.rows[b, :length] = raw_rows(x[b, :length])
    case = case._replace(q_latent=case.q_latent / scale)
    out, lse = mla_decode_attention(*case, fmt=fmt, sm_scale=SCALE, return_lse=True)
    assert_near(out, lse, expected(case, fmt), 1e-5)


def test_queries_see_up_to_their_own_token_in_pages_too() -> None:
    fmt = LatentFormat.parse("int8-g4+int8-g8", 256, 32)
    case = make_case(fmt, 4, 3)
    q_lens = torch.tensor([0, 3, 2, 3, 1], dtype=torch.int32)
    wanted = expected(case, fmt, q_lens)
    options = {"fmt": fmt, "sm_scale": SCALE, "q_lens": q_lens, "return_lse": True}
    out, lse = mla_decode_attention(*case, **options)  # type: ignore[call-overload]
    assert_near(out, lse, wanted, 1e-5)
    in_float64 = mla_decode_attention(*case, **options, backend="reference")  # type: ignore[call-overload]
    assert_near(in_float64[0], in_float64[1], wanted, 1e-6)

    page_size, pages = 16, -(-max(LENGTHS) // 16)
    order = torch.randperm(len(LENGTHS) * pages)
    pool = torch.full((len(order), page_size, fmt.row_bytes), 0xFF, dtype=torch.uint8)
    padded = torch.nn.functional.pad(
        case.rows, (0, 0, 0, pages * page_size - max(LENGTHS)), value=255
    )
    pool[order] = padded.view(-1, page_size, fmt.row_bytes)
    table = order.view(len(LENGTHS), pages).int()
    table[torch.arange(pages) >= (case.seq_lens[:, None] + 15) // 16] = -7  # not read
    paged = case._replace(rows=pool)
    for backend in ("cpu", "reference"):
        found = mla_decode_attention(*paged, **options, block_table=table, backend=backend)  # type: ignore[call-overload]
        same = (out, lse) if backend == "cpu" else in_float64
        assert all(torch.equal(a, b) for a, b in zip(found, same, strict=True))


def test_a_row_with_nan_makes_all_results_nan() -> None:
    fmt = LatentFormat.parse("int8-g4+int8-g8", 256, 32)
    for element in (3, 287):  # of the latent, of the RoPE part
        case = make_case(fmt, 4, 3)
        x = torch.zeros(fmt.head_dim)
        x[element] = torch.nan
        case.rows[3, 5] = quantize_rows(x, fmt, check=False)
        out = mla_decode_attention(*case, fmt=fmt, sm_scale=SCALE)
        assert out[3].isnan().all() and not out[[0, 1, 2, 4]].isnan().any()


@pytest.mark.parametrize("q_len", [None, 2])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_prefix_is_seen_by_the_sequences_that_share_it(backend: str, q_len: int | None) -> None:
    """As if it stood before their own rows; padding sees nothing."""
    fmt = LatentFormat.parse("int8-g4+int8-g8", 256, 32)
    case = make_case(fmt, 12 // (q_len or 1), q_len)
    shares = torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32)
    q_lens = None if q_len is None else torch.tensor([0, 1, 2, 2, 0], dtype=torch.int32)
    first = quantize_rows(torch.randn(1, 40, fmt.head_dim), fmt)
    first[0, 33:] = 0xFF  # NaN
    whole = torch.full((5, 733, fmt.row_bytes), 0xFF, dtype=torch.uint8)
    for b, length in enumerate(LENGTHS):
        own = [first[0, :33]] * int(shares[b]) + [case.rows[b, :length]]
        whole[b, : length + 33 * int(shares[b])] = torch.cat(own)
    lens = case.seq_lens + 33 * shares
    wanted = expected(case._replace(rows=whole, seq_lens=lens), fmt, q_lens)
    if q_lens is not None:
        case.q_latent[torch.arange(2) >= q_lens[:, None]] = math.nan
    prefix_lens = torch.tensor([33], dtype=torch.int32)
    prefix = LatentPrefix(latent_segment(first[:, None], prefix_lens, fmt), shares)
    segments = [latent_segment(case.rows[:, None], case.seq_lens, fmt)]
    call: Any = {"prefix": prefix, "q_lens": q_lens, "sm_scale": SCALE, "return_lse": True}
    call["backend"] = backend
    queries = case.q_latent, case.q_rope
    out, lse = attend_latents(*queries, segments, **call)
    assert_near(out, lse, wanted, 1e-5)
    if q_len is not None:
        none = case.q_latent[:, :0], case.q_rope[:, :0]
        out, _ = attend_latents(*none, segments, **{**call, "q_lens": None})
        assert out.shape == none[0].shape
    for changed, error, message in (
        (prefix._replace(shares=shares[:4]), ShapeError, r"shares is \[4\]: it must be \[5\]"),
        (prefix._replace(shares=shares.long()), ConfigError, "shares is torch.int64: use int32"),
        (prefix._replace(rows=segments[0]), ShapeError, "the batch must be the same"),
    ):
        with pytest.raises(error, match=message):
            attend_latents(*queries, segments, **{**call, "prefix": changed})
    prefix_lens[0] = 41
    with pytest.raises(ShapeError, match="seq_lens of sequence 0 is 41"):
        attend_latents(*queries, segments, **call)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name", mark_slow(["int4-g8+int8-g4", "fp8", "bf16"], ["int4-g8+int8-g4", "fp8"])
)
def test_an_engine_writes_pages_of_its_own_and_reads_them_back(name: str, device: str) -> None:
    """Two views of one tensor [pages, tokens, bytes]: what kvquant/ops/README.md tells."""
    fmt = LatentFormat.parse(name)
    pool = torch.full((9, 64, fmt.row_bytes), 0xFF, dtype=torch.uint8, device=device)
    latents, ropes = pool[:, None].split([part.row_bytes for part in fmt.parts], dim=-1)
    latent, rope = (torch.randn(100, 1, n, device=device).bfloat16() for n in (512, 64))
    slots = torch.arange(100, device=device) + 200  # pages 3 and 4
    append_rows(latent, rope, latents, ropes, slots, *fmt.parts)
    x = torch.cat([latent, rope], -1)
    wanted = quantize_rows(x[:, 0], fmt)
    assert torch.equal(pool.view(-1, fmt.row_bytes)[200:300], wanted)
    assert bool((pool.view(-1, fmt.row_bytes)[:200] == 0xFF).all())

    asked = torch.tensor([299, -1, 200], device=device)
    found = dequantize_pages(pool[:, None], fmt, asked, torch.float32)
    assert torch.equal(found[:, 0][[0, 2]], dequantize_rows(wanted[[-1, 0]], fmt))
    assert found.shape == (3, 1, 576) and not found[1].any()
    compiled = torch.compile(dequantize_pages, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(pool[:, None], fmt, asked, torch.float32), found)
    if device == "cuda":  # as of rows of heads: a slot that does not exist gives zeros
        beyond = dequantize_pages(pool[:, None], fmt, asked + 400, torch.bfloat16)
        assert not beyond[0].any() and not beyond[2].any()

    table = torch.tensor([[3, 4]], dtype=torch.int32, device=device)
    lens = torch.tensor([108], dtype=torch.int32, device=device)
    pool[3, :8] = pool[3, 8:16]  # tokens of an earlier step
    q_latent, q_rope = (torch.randn(1, 12, n, device=device).bfloat16() for n in (512, 64))
    options: Any = {"fmt": fmt, "sm_scale": SCALE, "block_table": table}
    out = mla_decode_attention(q_latent, q_rope, pool, lens, **options)
    exact = mla_decode_attention(
        q_latent.float(), q_rope.float(), pool, lens, **options, backend="reference"
    )
    assert float((out.float() - exact).norm() / exact.norm()) < BOUNDS[torch.bfloat16]
    for part, rows in zip(fmt.parts, (latents, ropes), strict=True):  # a part alone
        alone = dequantize_pages(rows, part, asked, torch.float32)
        assert torch.equal(alone, found.split([512, 64], -1)[part == fmt.rope])


def test_torch_compile_takes_the_call_as_one_op() -> None:
    fmt = LatentFormat.parse("int8-g4+int8-g8", 256, 32)
    case = make_case(fmt, 4, 3)
    lens = torch.tensor([0, 3, 2, 3, 1], dtype=torch.int32)

    def attend(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        return mla_decode_attention(*case, fmt=fmt, sm_scale=SCALE, q_lens=lens, return_lse=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(case), attend(case), strict=True):
        assert torch.equal(found, wanted)
    args = [[case.rows[:, None]], [case.seq_lens], [str(fmt)], [None], [None], [0], [None], lens]
    torch.library.opcheck(
        torch.ops.kvquant.attend_latents.default,
        (case.q_latent, case.q_rope, *args, None, SCALE, True, None, None),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_one_compiled_function_serves_rows_of_other_formats() -> None:
    compiled = torch.compile(mla_decode_attention, fullgraph=True, backend="aot_eager")
    for name in ("int4-g8+fp8-g4", "int8-g4", "fp8"):
        fmt = LatentFormat.parse(name)
        case = make_case(fmt, 2)
        options: Any = {"fmt": fmt, "sm_scale": SCALE, "backend": "reference"}
        assert torch.equal(compiled(*case, **options), mla_decode_attention(*case, **options))


LATENTS = LatentFormat.parse("int8-g4")
GIVEN: dict[str, Any] = {"fmt": LATENTS, "sm_scale": SCALE}
GIVEN |= {"q_latent": torch.zeros(5, 4, 512).bfloat16(), "q_rope": torch.zeros(5, 4, 64).bfloat16()}
GIVEN |= {"rows": torch.zeros(5, 700, LATENTS.row_bytes, dtype=torch.uint8)}
GIVEN |= {"seq_lens": torch.zeros(5, dtype=torch.int32)}
LATENT, ROPE, ROWS, LENS = (GIVEN[name] for name in ("q_latent", "q_rope", "rows", "seq_lens"))
REFUSED: list[tuple[dict[str, Any], str]] = [  # what differs from GIVEN; the error, and its words
    ({"q_latent": LATENT[..., :256]}, "ShapeError: they must be [batch, num_heads, 512"),
    ({"q_rope": ROPE[:, :3]}, "ShapeError: q_rope [5, 3, 64]: they must be"),
    ({"q_rope": ROPE[0, 0]}, "ShapeError: they must be"),
    ({"q_rope": ROPE[:, None]}, "ShapeError: they must be"),
    ({"q_rope": ROPE.half()}, "ConfigError: q_rope torch.float16"),
    ({"q_latent": LATENT[:3], "q_rope": ROPE[:3]}, "ShapeError: batch must"),
    ({"rows": ROWS[:, None]}, "ShapeError: [batch, capac"),
    ({"rows": ROWS[..., 1:]}, f"ShapeError: the {LATENTS.row_bytes} bytes of a"),
    ({"rows": ROWS.float()}, "ConfigError: rows are uint8"),
    ({"seq_lens": LENS[:4]}, "ShapeError: seq_lens is [4]"),
    ({"seq_lens": LENS.long()}, "ConfigError: seq_lens is torch.int64"),
    ({"q_lens": LENS}, "ShapeError: q_lens"),
    ({"q_lens": [1] * 5}, "ConfigError: q_lens is"),
    ({"block_table": [[0]] * 5}, "ConfigError: block_table is"),
    ({"fmt": "int6"}, "ConfigError: format 'int6' does not exist"),
    ({"fmt": 4}, "ConfigError: the format is 4: give a name"),
    ({"sm_scale": None}, "ConfigError: sm_scale is None: give the model's"),
    ({"sm_scale": math.inf}, "ConfigError: sm_scale is inf"),
    ({"num_splits": 0}, "ConfigError: num_splits 0 is not possible"),
]
ON_CPU: list[tuple[dict[str, Any], str]] = [
    ({"seq_lens": LENS + 701}, "ShapeError: room for 0 to 700 rows"),
    ({"backend": "cuda"}, "DeviceError: takes CUDA tensors"),
]


@pytest.mark.parametrize(
    ("change", "text"), REFUSED + ON_CPU, ids=[text for _, text in REFUSED + ON_CPU]
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], text: str) -> None:
    with refused(text):
        mla_decode_attention(**GIVEN | change)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The CPU as a GPU whose driver takes notes."""
    monkeypatch.setattr(mla, "kernels_for", lambda tensor, backend: backend or "cuda")
    return install(monkeypatch)


@pytest.mark.extra("cuda")
def test_calls_on_cuda_are_checked(gpu: FakeDriver) -> None:
    mla_decode_attention(**GIVEN)
    launched = len(gpu.launched)
    for change, text in REFUSED:
        with refused(text):
            mla_decode_attention(**GIVEN | change)
    segments = [latent_segment(ROWS[:, None], LENS, LATENTS)] * 3
    with pytest.raises(UnsupportedError, match="no CUDA kernel attends several queries"):
        attend_latents(LATENT[:, None], ROPE[:, None], segments, sm_scale=SCALE, q_lens=LENS)
    assert len(gpu.launched) == launched


def on_gpu(case: Case) -> Case:
    return Case(*(x.cuda() for x in case))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("q_len", [None, 3])
@pytest.mark.parametrize("name", ["int4-g8+fp8-g4", "int8-g4+int8-g4"])
def test_a_gpu_gives_what_the_formula_gives(
    name: str, q_len: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    fmt = LatentFormat.parse(name)
    case = make_case(fmt, 16, q_len, dtype)
    q_lens = None if q_len is None else torch.tensor([0, 1, 3, 2, 3], dtype=torch.int32)
    wanted = expected(case, fmt, q_lens)
    there = on_gpu(case)
    options: Any = {"fmt": fmt, "sm_scale": SCALE, "return_lse": True}
    if q_lens is not None:
        options["q_lens"] = q_lens.cuda()
    plain = mla_decode_attention(*there, **options)
    compiled = torch.compile(mla_decode_attention, fullgraph=True, backend="aot_eager")
    traced = compiled(*there, **options)
    monkeypatch.setattr(debug, "enabled", True)
    for out, lse in (plain, traced, mla_decode_attention(*there, **options)):
        assert_near(out.cpu(), lse.cpu(), wanted, BOUNDS[dtype])
    with pytest.raises(ShapeError, match="room for 0 to 700 rows"):
        mla_decode_attention(*there._replace(seq_lens=there.seq_lens + 1), **options)
