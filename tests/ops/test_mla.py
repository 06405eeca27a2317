"""Attention over latent rows, against its formula in float64; compiles two dozen decode kernels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attend import attend_latents
from fake_cuda import FakeDriver, install
from mla_calls import compare
from mla_cases import MlaCase, make_mla
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
from kvquant.errors import ShapeError, UnsupportedError
from kvquant.ops import mla
from kvquant.rows.segment import latent_segment

SCALE = 192**-0.5
LENGTHS = (0, 1, 17, 700, 3)
SMALL: dict[str, Any] = {"dims": (256, 32)}  # 12 columns a block: a kernel takes seconds to compile
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 8e-4}


def arguments(case: MlaCase) -> dict[str, Any]:
    """Of the public call: queries without an axis of them where there is one."""
    (one,) = case.segments
    q = case.q_latent, case.q_rope
    given: dict[str, Any] = {
        "q_latent": q[0],
        "q_rope": q[1],
        "rows": one.k_rows[:, 0],
        "seq_lens": one.seq_lens,
    }
    if case.q_lens is None:
        given |= {"q_latent": q[0][:, 0], "q_rope": q[1][:, 0]}
    given |= {"fmt": one.k_format, "sm_scale": case.sm_scale, "q_lens": case.q_lens}
    return {**given, "block_table": one.block_table, "return_lse": True}


def assert_near(found: tuple[torch.Tensor, torch.Tensor], case: MlaCase, bound: float) -> None:
    out, lse = (x.view(wanted.shape) for x, wanted in zip(found, (case.out, case.lse), strict=True))
    assert out.dtype == case.q_latent.dtype and lse.dtype == torch.float32
    assert float((out.double() - case.out).norm() / case.out.norm()) <= bound
    torch.testing.assert_close(lse.double(), case.lse, atol=1e-4, rtol=1e-5)
    assert not out[case.lse == -math.inf].any()


@pytest.mark.parametrize(
    ("name", "heads", "options"),
    [
        ("int4-g8+fp8-g4", 16, {"dtype": torch.bfloat16}),
        ("bf16", 16, {"dtype": torch.float16}),
        ("fp8", 24, {}),  # two blocks of heads
        ("int3+int2", 4, {}),
        ("int8-g4+int8-g8", 4, {**SMALL, "q_lens": (3, 3, 3, 3, 3)}),  # 4 tokens a block
        ("int8-g4+int8-g8", 4, {**SMALL, "q_lens": (0, 3, 2, 3, 1), "page_size": 16}),
        ("fp8", 12, {"raw_scales": True, "scale": 1e-4, "q_scale": 1e4}),
        ("fp8", 12, {"raw_scales": True, "scale": 1e8, "q_scale": 1e-8}),
    ],
)
def test_the_kernel_attends_as_the_formula_says(
    name: str, heads: int, options: dict[str, Any]
) -> None:
    case = make_mla(name, heads, LENGTHS, **{"dtype": torch.float32, **options})
    for num_splits in (None, 3):
        found = mla_decode_attention(**arguments(case), num_splits=num_splits)
        assert_near(found, case, BOUNDS[case.q_latent.dtype])
    if case.q_latent.dtype == torch.float32:
        assert_near(mla_decode_attention(**arguments(case), backend="reference"), case, 1e-6)


@pytest.mark.parametrize(
    "rows",
    mark_slow(
        [
            *((name, (512, 64)) for name in ("int4-g8+fp8-g4", "int4-g8+int8-g4", "fp8")),
            *((name, (512, 32)) for name in ("int8-g4", "int3", "bf16")),
            *((name, (256, 64)) for name in ("int4-g8+fp8-g4", "fp8-g4+fp16", "bf16")),
            *((name, (256, 32)) for name in ("int4-g8+int8-g4", "int2+int3")),
        ],
        [("int4-g8+int8-g4", (512, 64))],
    ),
    ids=str,
)
def test_one_to_four_queries_of_each_format_and_size(rows: tuple[str, tuple[int, int]]) -> None:
    """Heads times queries are always 12, so that one CPU kernel of each format serves all."""
    name, dims = rows
    for q_len in (1, 2, 3, 4):
        q_lens = [min(n, q_len) for n in (q_len, 1, 2, 4, 3)]
        given: dict[str, Any] = {"q_lens": q_lens, "dims": dims, "dtype": torch.float32}
        case = make_mla(name, 12 // q_len, LENGTHS, **given)
        assert_near(mla_decode_attention(**arguments(case)), case, 1e-5)


def test_a_row_with_nan_makes_all_results_nan() -> None:
    fmt = LatentFormat.parse("int8-g4+int8-g8", 256, 32)
    for element in (3, 287):  # of the latent, of the RoPE part
        case = make_mla(str(fmt), 4, LENGTHS, q_lens=(3,) * 5, **SMALL)
        x = torch.zeros(fmt.head_dim)
        x[element] = torch.nan
        case.segments[0].k_rows[3, 0, 5] = quantize_rows(x, fmt, check=False)
        out, _ = mla_decode_attention(**arguments(case))
        assert out[3].isnan().all() and not out[[0, 1, 2, 4]].isnan().any()


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
    case = make_mla("int8-g4+int8-g8", 4, LENGTHS, q_lens=(0, 3, 2, 3, 1), **SMALL)
    given = arguments(case)
    fmt, rows, lens, q_lens = (given[name] for name in ("fmt", "rows", "seq_lens", "q_lens"))

    def attend(q_latent: torch.Tensor, q_rope: torch.Tensor) -> Any:
        return mla_decode_attention(**{**given, "q_latent": q_latent, "q_rope": q_rope})

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    queries = case.q_latent.nan_to_num(), case.q_rope.nan_to_num()
    assert all(map(torch.equal, compiled(*queries), attend(*queries)))
    args = [[rows[:, None]], [lens], [str(fmt)], [None], [None], [0], [None], q_lens]
    torch.library.opcheck(
        torch.ops.kvquant.attend_latents.default,
        (*queries, *args, None, SCALE, True, None, None),
        test_utils=("test_schema", "test_faketensor"),
    )


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
    ({"q_rope": ROPE.half()}, "ConfigError: q_rope is torch.float16: use"),
    ({"q_latent": LATENT[:3], "q_rope": ROPE[:3]}, "ShapeError: batch must"),
    ({"rows": ROWS[:, None]}, "ShapeError: [batch, capac"),
    ({"rows": ROWS[..., 1:]}, f"ShapeError: the {LATENTS.row_bytes} bytes of a"),
    ({"rows": ROWS.float()}, "ConfigError: use uint8"),
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("q_lens", [None, (0, 1, 3, 2, 3)], ids=str)
@pytest.mark.parametrize("name", ["int4-g8+fp8-g4", "int8-g4+int8-g4"])
def test_a_gpu_gives_what_the_formula_gives(
    name: str, q_lens: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_mla(name, 16, LENGTHS, q_lens=q_lens, dtype=dtype, device="cuda")
    given = arguments(case)
    compiled: Any = torch.compile(mla_decode_attention, fullgraph=True, backend="aot_eager")
    plain, traced = mla_decode_attention(**given), compiled(**given)
    monkeypatch.setattr(debug, "enabled", True)
    for found in (plain, traced, mla_decode_attention(**given)):
        out, lse = (x.view(y.shape) for x, y in zip(found, (case.out, case.lse), strict=True))
        compare(case, out, lse)
    with pytest.raises(ShapeError, match="room for 0 to 705 rows"):
        mla_decode_attention(**given | {"seq_lens": given["seq_lens"] + 6})
