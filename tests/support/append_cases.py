"""What the tests of the append and the dequantize kernel share: calls, and what they must give."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from devices import moved

from kvquant import RowFormat, quantize_rows
from kvquant.engine.contract import PageLayout
from kvquant.kernels.cuda.append import launch
from kvquant.ops.append import write_rows
from kvquant.ops.append_checks import check_call
from kvquant.ops.rows_at import dequantize_pages
from kvquant.rows.basis import Encoding
from kvquant.rows.call import AppendCall, AppendSide
from kvquant.rows.quantize import feedback_matrix
from kvquant.rows.rotation import Rope
from kvquant.rows.slots import Slots

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
UNTOUCHED = 0xA5  # bytes of rows before the call


@dataclass
class Case:
    """A call of append.

    Attributes:
        k, v: formats; v is that of k if empty.
        v_head_dim: head_dim if 0.
        source: dtype of the new rows.
        layout: of the new rows: "dense", "heads" (a head's tokens follow one another), "fused" (a
            part of a wider tensor) or "odd" (not aligned to 16 bytes).
        pages: of the packed rows: "dense", "tokens" (a token's heads follow one another),
            "planes" (as an engine's PageLayout has them), or "latent": the rows of K and of V side
            by side, packed and 16-bit ones.
        exact: codec of 16-bit rows, or "" for none.
        offset, matrix, clip, feedback: "", "k", "v" or "kv".
        rotary_dim: 0 for no RoPE.
        hostile: whether rows with NaN, Inf and other rare numbers are among the new ones.
        bad: whether rows that cannot be held are counted.
        skip: leave every third token out.
        queries: query heads on a KV head, which are multiplied by a matrix in the same call.
    """

    k: str = "int4-g4"
    v: str = ""
    head_dim: int = 128
    v_head_dim: int = 0
    tokens: int = 6
    heads: int = 1
    page_size: int = 16
    source: str = "bf16"
    layout: str = "dense"
    pages: str = "dense"
    exact: str = ""
    offset: str = ""
    matrix: str = ""
    clip: str = ""
    feedback: str = ""
    rotary_dim: int = 0
    interleaved: bool = False
    hostile: bool = False
    bad: bool = True
    skip: bool = False
    queries: int = 0


LATENTS = {  # latent and RoPE part: their formats and dims
    "bf16": ("bf16", "bf16", 512, 64),
    "fp16": ("fp16", "fp16", 256, 32),
    "int8-g4": ("int8-g4", "bf16", 512, 64),
    "int4-g8": ("int4-g8", "bf16", 512, 32),
    "int4-g8+fp8-g4": ("int4-g8", "fp8-g4", 512, 64),
    "int8-g8+int4-g4": ("int8-g8", "int4-g4", 256, 32),
    "fp8": ("fp8_ds_mla", "bf16", 512, 64),
}


def latent_case(name: str, **options: Any) -> dict[str, Any]:
    """What differs from the defaults of Case where rows are latents."""
    k, v, head_dim, v_head_dim = LATENTS[name]
    dims = {"head_dim": head_dim, "v_head_dim": v_head_dim}
    return {"k": k, "v": v, **dims, "pages": "latent", "tokens": 14, "hostile": True, **options}


def angles(num_tokens: int, rotary_dim: int) -> Rope:
    theta = 7 * torch.rand(num_tokens, rotary_dim // 2)
    return Rope(theta.cos(), theta.sin())


def append(*, backend: str | None = None, **arguments: Any) -> None:
    """append_rows, for any Encoding: kernels serve more of them than there are kinds of a Basis."""
    call = record(**arguments)
    write_rows(call, backend=backend, check=functools.partial(check_call, call))


def record(
    k: torch.Tensor,
    v: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slots: Slots,
    k_format: RowFormat,
    v_format: RowFormat,
    *,
    exact_k: torch.Tensor | None = None,
    exact_v: torch.Tensor | None = None,
    exact_format: str = "bf16",
    k_transform: Encoding | None = None,
    v_transform: Encoding | None = None,
    rope: Rope | None = None,
    bad: torch.Tensor | None = None,
) -> AppendCall:
    """The arguments of append_rows as a record."""
    k_side = AppendSide(k, k_rows, k_format, exact_k, k_transform or Encoding())
    v_side = AppendSide(v, v_rows, v_format, exact_v, v_transform or Encoding())
    return AppendCall(k_side, v_side, slots, exact_format, rope, bad)


def launch_append(
    *, check: Any = None, overlaps: bool = False, queries: Any = None, **arguments: Any
) -> torch.Tensor | None:
    """The launcher of kernels/cuda/append, of the arguments of append_rows."""
    return launch.append(record(**arguments), check, overlaps=overlaps, queries=queries)


def make_call(case: Case, device: str = "cpu") -> dict[str, Any]:
    """The arguments of append, on a device."""
    torch.manual_seed(0)
    v_dim = case.v_head_dim or case.head_dim
    formats = RowFormat.parse(case.k, case.head_dim), RowFormat.parse(case.v or case.k, v_dim)
    num_pages = -(-2 * case.tokens // case.page_size) + 1
    new = [_new_rows(case, fmt.head_dim, device) for fmt in formats]
    lengths = [fmt.row_bytes for fmt in formats]
    shape = num_pages, case.heads, case.page_size
    if case.pages == "planes":
        layout = PageLayout(*formats, case.heads)
        whole = torch.full((*shape, layout.token_bytes), UNTOUCHED, dtype=torch.uint8)
        rows = [*layout.views(whole.to(device))]
    else:
        rows = _beside(case, shape, lengths, device)
    num_slots = num_pages * case.page_size
    order = torch.randperm(num_slots)
    packed = order[: case.tokens].clone()
    call: dict[str, Any] = {"k_format": formats[0], "v_format": formats[1]}
    call |= {"exact_format": case.exact or "bf16"}
    slots = Slots(packed)
    if case.exact:
        shape = 2, case.heads, case.tokens + 3
        exact = torch.randperm(2 * (case.tokens + 3))[: case.tokens]
        evicted = order[case.tokens : 2 * case.tokens].clone()
        kinds = torch.arange(case.tokens) % 4  # packed; exact; leaving; leaving, but also packed
        exact[kinds == 0] = -1
        evicted[kinds <= 1] = -1
        packed[kinds == 2] = -1
        slots = Slots(packed, exact, evicted)
        lengths = [2 * fmt.head_dim for fmt in formats]
        pages = "latent" if case.pages == "latent" else "dense"
        pair = _beside(replace(case, pages=pages), shape, lengths, device)
        for name, fmt, storage in zip("kv", formats, pair, strict=True):
            values = torch.randn(*shape, fmt.head_dim) * 2
            if case.hostile:
                values[0, :, :, 5] = torch.nan
                values[1] = torch.nan  # rows that were counted when they came
            storage.copy_(values.to(DTYPES[case.exact]).view(torch.uint8))
            call[f"exact_{name}"] = storage
    if case.skip:
        for tensor in slots:
            if tensor is not None:
                tensor[2::3] = -1
    for name, fmt in zip("kv", formats, strict=True):
        offset = None
        if name in case.offset:
            offset = torch.randn(case.heads, fmt.head_dim).to(device)
        rounding = _rounding(case, name, fmt.head_dim, device)
        call[f"{name}_transform"] = Encoding(offset, *rounding)
    if case.rotary_dim:
        cos, sin, _ = angles(case.tokens, case.rotary_dim)
        call["rope"] = Rope(cos.to(device), sin.to(device), case.interleaved)
    call |= {"k": new[0], "v": new[1], "k_rows": rows[0], "v_rows": rows[1]}
    call["slots"] = moved(slots, device)
    call["bad"] = torch.tensor([3, 4], dtype=torch.int32, device=device) if case.bad else None
    return call


def _rounding(
    case: Case, name: str, dim: int, device: str
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Matrix (exact in any order of summation), clip ratios and feedback."""
    matrix = clip = feedback = None
    if name in case.matrix:
        eyes = torch.stack([torch.eye(dim)[torch.randperm(dim)] for _ in range(case.heads)])
        matrix = (eyes * -2).to(device)
    if name in case.clip:
        clip = torch.linspace(0.8, 1.0, case.heads + 1)[: case.heads].to(device)
    if name in case.feedback:
        roots = torch.randn(case.heads, dim, dim).double()
        weights = roots @ roots.mT + 0.1 * torch.eye(dim)
        feedback = feedback_matrix(weights).float().to(device)
    return matrix, clip, feedback


def _new_rows(case: Case, head_dim: int, device: str) -> torch.Tensor:
    shape = case.tokens, case.heads, head_dim
    x = torch.randn(shape) * torch.logspace(-3, 2, case.tokens)[:, None, None] + 0.5
    if case.hostile:
        plant(x)
    x = x.to(DTYPES[case.source]).to(device)
    if case.layout == "heads":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if case.layout == "dense":
        return x
    extra = 16 if case.layout == "fused" else 1
    wide = torch.zeros(case.tokens, case.heads, head_dim + extra, dtype=x.dtype, device=device)
    wide[..., extra:] = x
    return wide[..., extra:]


def plant(x: torch.Tensor) -> None:
    """Put rare numbers into the rows of a tensor [tokens, heads, head_dim], one kind a token."""
    rare: Sequence[Any] = (
        lambda row: row[:, 3].fill_(torch.nan),
        lambda row: row[:, -1].fill_(torch.inf),
        lambda row: row[:, 17].fill_(-torch.inf),
        lambda row: row.fill_(1.375),  # a constant row
        lambda row: row.zero_().neg_(),  # -0.0
        lambda row: row[:, ::2].zero_(),
        lambda row: row.mul_(1e-3).add_(6e4),  # a large shift
        lambda row: row[:, 5].fill_(65504.0),
        lambda row: row[:, 6].fill_(-7e4),  # over what fp16 holds
        lambda row: row[:, 7].fill_(3e38),
        lambda row: row.mul_(1e-6),  # scales are subnormal numbers of fp16
        lambda row: row.mul_(1e-9),
        lambda row: row.mul_(1e-40),  # subnormal
        lambda row: row[:, :8].fill_(-1e-45),
    )
    for token, change in zip(range(len(x)), rare, strict=False):
        change(x[token])


def make_pages(case: Case, device: str = "cpu") -> tuple[torch.Tensor, RowFormat, torch.Tensor]:
    """Rows of any bytes in pages, their format, and slots of which some are none."""
    torch.manual_seed(0)
    fmt = RowFormat.parse(case.k, case.head_dim)
    num_pages = -(-2 * case.tokens // case.page_size) + 1
    pages = _pages(case, (num_pages, case.heads, case.page_size, fmt.row_bytes))
    values = torch.randn(*pages.shape[:3], fmt.head_dim) * 3 + 1
    pages.copy_(quantize_rows(values, fmt))
    if case.hostile:  # any bytes are numbers, NaN or Inf
        pages[::2] = torch.randint(256, pages[::2].shape).to(torch.uint8)
    slots = torch.randperm(num_pages * case.page_size)[: case.tokens]
    if case.skip:
        slots[2::3] = -1
    return pages.to(device), fmt, slots.to(device)


def expected_values(
    pages: torch.Tensor, fmt: RowFormat, slots: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """What dequantize_pages must give, by the meaning in torch, on the CPU."""
    return dequantize_pages(pages.cpu(), fmt, slots.cpu(), dtype, backend="reference")


def _beside(
    case: Case, shape: tuple[int, ...], lengths: Sequence[int], device: str
) -> list[torch.Tensor]:
    """The rows of K and of V, so many bytes long."""
    if case.pages != "latent":
        return [_pages(case, (*shape, length)).to(device) for length in lengths]
    whole = torch.full((*shape, sum(lengths)), UNTOUCHED, dtype=torch.uint8, device=device)
    return list(whole.split(list(lengths), dim=-1))


def _pages(case: Case, shape: tuple[int, ...]) -> torch.Tensor:
    pages, heads, page_size, row_bytes = shape
    if case.pages == "dense":
        return torch.full(shape, UNTOUCHED, dtype=torch.uint8)
    made = torch.full((pages, page_size, heads, row_bytes), UNTOUCHED, dtype=torch.uint8)
    return made.transpose(1, 2)


def expected(call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the call must leave in its tensors, by the meaning in torch, on the CPU."""
    on_cpu = {name: moved(value, "cpu") for name, value in call.items()}
    append(**on_cpu, backend="reference")
    return results(on_cpu)


def results(call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that a call writes, on the CPU."""
    names = ("k_rows", "v_rows", "exact_k", "exact_v", "bad")
    return {name: call[name].cpu() for name in names if call.get(name) is not None}


def differences(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> str:
    """Where results differ, in words; "" if nowhere."""
    for name, tensor in wanted.items():
        if not torch.equal(got[name], tensor):
            place = (got[name] != tensor).nonzero()[0].tolist()
            count = int((got[name] != tensor).sum())
            pair = int(got[name][tuple(place)]), int(tensor[tuple(place)])
            return f"{name}{place} is {pair[0]}, not {pair[1]}; {count} differ"
    return ""


def check_on_gpu(case: Case) -> None:
    """Assert that the bytes are those of the meaning."""
    call = make_call(case, "cuda")
    wanted = expected(call)
    append(**call)
    problem = differences(results(call), wanted)
    assert not problem, problem
