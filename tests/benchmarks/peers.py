"""Decode attention of other projects beside ours, each result checked first: the tables of peers.

    python tests/benchmarks/peers.py [--shape 8:1x8192x64 ...] [--json FILE]

Times are of single calls, replayed from a CUDA graph with the L2 cache overwritten, by the timer of
`kvquant bench`; where a project has several kernels for a case, all are tried and the fastest
counts. What is not installed is named, with how to install it. Every result is compared with
float64 attention to the values that the cache stands for: those that a project's own cache
dequantizes to, where it can say so, else (BitDecoding) the 16-bit ones, at a limit that 4 bits stay
below.

What has run: the checks, with kvquant and torch, on a CPU (tests/bench/test_peers.py). What has
not: anything on a GPU. The calls of the other projects are written after the sources of FlashInfer
fb28d72, flash-attention 0251105, FBGEMM (gen_ai, the op as of 1.9) and BitDecoding e829b5a, which
could not be installed: a peer that fails is named with its error, and the others go on.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from kvquant import RowFormat, __version__, decode_attention, dequantize_rows, quantize_rows
from kvquant.bench.gpu import BACKENDS
from kvquant.bench.report import render_machine
from kvquant.bench.timer import Call, GraphTimer, describe_machine
from kvquant.text import Column, render_table

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
ROUNDED, IN_FP8, IN_4_BIT = 3e-3, 5e-2, 0.2  # relative L2 of 16-bit outputs; 4 bits err by 0.1
PAGE = 64  # tokens, where a project has pages
SPLITS = (1, 2, 4, 8, 16)  # of FBGEMM, which is told
SHAPES = [f"8:1x8192x{batch}" for batch in (1, 8, 32, 64, 128, 256, 512)]
SHAPES += [f"32:8x{tokens}x{batch}" for tokens in (1024, 8192, 32768) for batch in (1, 8, 32, 64)]
SHAPE = r"(\d+):(\d+)x(\d+)x(\d+)"
COLUMNS = (
    *map(Column, ("heads", "T", "batch")),
    Column("project", left=True),
    Column("cache", left=True),
    *map(Column, ("us", "GB/s", "error")),
    Column("fastest of its kernels", left=True),
)


class Inputs(NamedTuple):
    """Inputs of a shape: q [batch, num_q_heads, head_dim]; k, v [batch, num_kv_heads, T, head_dim],
    bfloat16; lens [batch], int32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lens: torch.Tensor


@dataclass(frozen=True)
class Ready:
    """A project's kernels, ready to be called on a cache of its own.

    Attributes:
        calls: by the names of kernels; each gives what can be viewed as [batch, num_q_heads,
            head_dim].
        k, v: the values that the cache stands for, as in Inputs.
        nbytes: of the cache.
        limit: relative L2 error.
    """

    calls: Mapping[str, Call]
    k: torch.Tensor
    v: torch.Tensor
    nbytes: int
    limit: float = ROUNDED


@dataclass(frozen=True)
class Peer:
    """A project with one kind of cache.

    Attributes:
        project, cache: their names.
        module: to import; what is not found is not installed.
        install: how to install it.
        prepare: takes Inputs; raises ValueError for a shape that the project does not take.
    """

    project: str
    cache: str
    module: str
    install: str
    prepare: Callable[[Inputs], Ready]


def prepare_ours(name: str, at: Inputs) -> Ready:
    """Rows of ours."""
    fmt = RowFormat.parse(name, at.q.shape[-1])
    k, v = quantize_rows(at.k, fmt), quantize_rows(at.v, fmt)
    call = partial(decode_attention, at.q, k, v, at.lens, k_format=fmt, v_format=fmt)
    calls = {"decode_attention": call}
    return Ready(calls, dequantize_rows(k, fmt), dequantize_rows(v, fmt), k.nbytes + v.nbytes)


def prepare_torch(at: Inputs) -> Ready:
    """scaled_dot_product_attention, by all backends, query heads as they are or as queries."""
    attention = F.scaled_dot_product_attention
    folded = at.q.view(*at.k.shape[:2], -1, at.q.shape[-1])
    calls: dict[str, Call] = {}
    for name, backend in BACKENDS.items():
        calls[f"{name}, enable_gqa"] = sdpa_kernel(backend)(
            partial(attention, at.q[:, :, None], at.k, at.v, enable_gqa=True)
        )
        calls[f"{name}, folded"] = sdpa_kernel(backend)(partial(attention, folded, at.k, at.v))
    return Ready(calls, at.k, at.v, at.k.nbytes + at.v.nbytes)


def to_pages(rows: torch.Tensor) -> torch.Tensor:
    """[batch, num_kv_heads, T, head_dim] to [pages, num_kv_heads, PAGE, head_dim]."""
    batch, heads, tokens, width = rows.shape
    if tokens % PAGE:
        raise ValueError(f"T is no multiple of the {PAGE} tokens of a page")
    pages = rows.view(batch, heads, tokens // PAGE, PAGE, width).transpose(1, 2)
    return pages.reshape(-1, heads, PAGE, width)


def prepare_flashinfer(dtype: torch.dtype, at: Inputs) -> Ready:
    """The kernels of the wrapper; CUDA cores too, which it takes by default."""
    make = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
    batch, num_q_heads, head_dim = at.q.shape
    k, v = (to_pages(rows.to(dtype)) for rows in (at.k, at.v))
    pages = len(k) // batch
    starts, table = (torch.arange(n, dtype=torch.int32) for n in (batch + 1, len(k)))
    last = torch.full((batch,), PAGE, dtype=torch.int32)
    calls: dict[str, Call] = {}
    for name, options in (
        ("fa2", {"backend": "fa2", "use_tensor_cores": True}),
        ("fa3", {"backend": "fa3", "use_tensor_cores": True}),
        ("CUDA cores", {}),
    ):
        with told(name):
            workspace = torch.zeros(512 << 20, dtype=torch.uint8, device=at.q.device)
            wrapper = make(workspace, "HND", **options)
            sizes = num_q_heads, at.k.shape[1], head_dim, PAGE
            types = {"q_data_type": at.q.dtype, "kv_data_type": dtype}
            wrapper.plan(starts * pages, table.to(at.q.device), last, *sizes, **types)
            calls[name] = partial(wrapper.run, at.q, (k, v))
    return Ready(calls, at.k.to(dtype), at.v.to(dtype), k.nbytes + v.nbytes)


def prepare_xqa(dtype: torch.dtype, at: Inputs) -> Ready:
    """FlashInfer's XQA, which computes in FP8 where the cache is FP8."""
    attention = importlib.import_module("flashinfer.decode").xqa_batch_decode_with_kv_cache
    batch, _, head_dim = at.q.shape
    k, v = (to_pages(rows.to(dtype)) for rows in (at.k, at.v))
    table = torch.arange(len(k), dtype=torch.int32, device=at.q.device).view(batch, -1)
    workspace = torch.zeros(512 << 20, dtype=torch.uint8, device=at.q.device)
    lens = at.lens.to(torch.uint32)
    call = partial(
        attention,
        *(at.q, (k, v), workspace, table, lens, at.k.shape[2]),
        bmm1_scale=head_dim**-0.5,
        kv_layout="HND",
    )
    limit = IN_FP8 if dtype == FP8 else ROUNDED
    return Ready({"xqa": call}, at.k.to(dtype), at.v.to(dtype), k.nbytes + v.nbytes, limit)


def prepare_flash_attention(module: str, at: Inputs) -> Ready:
    """flash_attn_with_kvcache of FlashAttention 2 or 3, which choose their splits."""
    k, v = (rows.transpose(1, 2).contiguous() for rows in (at.k, at.v))
    attention = importlib.import_module(module).flash_attn_with_kvcache
    call = partial(attention, at.q[:, None], k, v, cache_seqlens=at.lens)
    return Ready({"flash_attn_with_kvcache": call}, at.k, at.v, k.nbytes + v.nbytes)


def prepare_fbgemm(name: str, at: Inputs) -> Ready:
    """gqa_attn_splitk on tensor cores; INT4 rows of ours are its rows, byte for byte."""
    importlib.import_module("fbgemm_gpu.experimental.gen_ai")
    _, num_kv_heads, tokens, head_dim = at.k.shape
    if num_kv_heads > 1 or at.q.shape[1] > 8 or head_dim != 128 or tokens > 16384:
        raise ValueError("it takes one KV head, 8 query heads, head_dim 128, 16,384 tokens")
    fmt = RowFormat.parse(name, head_dim)
    k, v = (quantize_rows(rows, fmt) for rows in (at.k, at.v))
    # [batch, T, one KV head, row]
    stored = [rows[:, 0, :, None] for rows in ((at.k, at.v) if fmt.is_exact else (k, v))]
    calls: dict[str, Call] = {}
    for splits in SPLITS:
        call = partial(
            torch.ops.fbgemm.gqa_attn_splitk,
            *(at.q[:, None], *stored, at.lens - 1, head_dim**-0.5, splits),
            kv_cache_quant_num_groups=fmt.groups,
        )
        calls[f"{splits} splits"] = partial(first_of, call)
    return Ready(calls, dequantize_rows(k, fmt), dequantize_rows(v, fmt), k.nbytes + v.nbytes)


def first_of(call: Callable[[], Any]) -> object:
    """The first of a call's results."""
    return call()[0]


def prepare_bitdecoding(group_size: int, at: Inputs) -> Ready:
    """K per channel, V per token, four INT4 codes a word."""
    bit_decode = importlib.import_module("bit_decode")
    batch, num_kv_heads, tokens, head_dim = at.k.shape
    if tokens % 128:
        raise ValueError("T is no multiple of 128")
    k, v = (rows.transpose(1, 2).to(FP16).contiguous() for rows in (at.k, at.v))
    empty = partial(torch.zeros, device=k.device)
    k_pack = empty((batch, tokens // 4, num_kv_heads, head_dim), dtype=torch.uint16)
    k_params = empty((batch, tokens // group_size, num_kv_heads, head_dim), dtype=torch.float32)
    v_pack = empty((batch, tokens, num_kv_heads, head_dim // 4), dtype=torch.uint16)
    v_params = empty((batch, head_dim // group_size, num_kv_heads, tokens), dtype=torch.float32)
    parts = (k_pack, k_params, v_pack, v_params)
    ends = torch.arange(batch + 1, dtype=torch.int32, device=k.device) * tokens
    options = ("k-channel", group_size, 4)
    bit_decode.kvcache_pack_int(
        k, k_pack, k_params, v, v_pack, v_params, None, ends, tokens, *options
    )
    q = at.q[:, None].to(FP16)
    call = partial(bit_decode.fwd_kvcache_int, q, *parts, None, head_dim**-0.5, *options)
    return Ready({"fwd_kvcache_int": call}, at.k, at.v, sum(one.nbytes for one in parts), IN_4_BIT)


FLASHINFER = "pip install flashinfer-python"
FBGEMM = "pip install fbgemm-gpu-genai, of the version for your torch"
BIT_DECODING = "clone github.com/DD-DuDa/BitDecoding with its submodules, python setup.py install"
PEERS = (
    *(
        Peer("kvquant", name, "kvquant", "", partial(prepare_ours, name))
        for name in ("int4-g4", "int4", "int8-g4", "fp8", "bf16")
    ),
    Peer("torch", "BF16", "torch", "", prepare_torch),
    *(
        Peer(project, name, "flashinfer", FLASHINFER, partial(prepare, dtype))
        for project, prepare in (
            ("FlashInfer", prepare_flashinfer),
            ("FlashInfer XQA", prepare_xqa),
        )
        for name, dtype in (("BF16", BF16), ("FP8", FP8))
    ),
    *(
        Peer(project, "BF16", module, how, partial(prepare_flash_attention, module))
        for project, module, how in (
            ("FlashAttention 2", "flash_attn", "pip install flash-attn --no-build-isolation"),
            (
                "FlashAttention 3",
                "flash_attn_interface",
                "clone github.com/Dao-AILab/flash-attention, python hopper/setup.py install",
            ),
        )
    ),
    *(
        Peer("FBGEMM", cache, "fbgemm_gpu", FBGEMM, partial(prepare_fbgemm, name))
        for cache, name in (("BF16", "bf16"), ("INT4, 4 groups", "int4-g4"))
    ),
    *(
        Peer(
            "BitDecoding",
            f"INT4, {size} a group",
            "bit_decode",
            BIT_DECODING,
            partial(prepare_bitdecoding, size),
        )
        for size in (128, 32)
    ),
)


@contextmanager
def told(what: str) -> Iterator[None]:
    """A kernel that cannot run is named, and the others go on."""
    try:
        yield
    except Exception as error:  # of whatever kind a project has
        print(f"{what}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")


def make_inputs(shape: str, device: torch.device) -> Inputs:
    """Random inputs of a shape, "q heads:KV headsxTxbatch"."""
    q_heads, kv_heads, tokens, batch = map(int, re.findall(r"\d+", shape))
    generator = torch.Generator(device).manual_seed(0)
    make = partial(torch.randn, device=device, dtype=BF16, generator=generator)
    k, v = (make(batch, kv_heads, tokens, 128) for _ in range(2))
    lens = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    return Inputs(make(batch, q_heads, 128), k, v, lens)


def error_of(out: torch.Tensor, at: Inputs, ready: Ready) -> float:
    """The greater relative L2 error of the first and the last sequence, against float64."""
    out = out.view(at.q.shape)
    errors = []
    for b in (0, len(out) - 1):
        k, v = (rows[b].double() for rows in (ready.k, ready.v))
        q = at.q[b].double().view(len(k), -1, k.shape[-1])
        scores = q @ k.transpose(-1, -2) * k.shape[-1] ** -0.5
        expected = (scores.softmax(-1) @ v).view(at.q.shape[1:])
        errors.append(float((out[b] - expected).norm() / expected.norm()))
    return max(errors)


def measure(peer: Peer, at: Inputs, timer: GraphTimer) -> dict[str, Any] | None:
    """Check and time a peer's kernels; the fastest counts, None if none runs."""
    ready = peer.prepare(at)
    found: dict[str, Any] | None = None
    for name, call in ready.calls.items():
        with told(f"{peer.project}, {peer.cache}, {name}"):
            out = call()
            assert isinstance(out, torch.Tensor)
            error = error_of(out, at, ready)
            if not error <= ready.limit:
                raise AssertionError(f"relative error {error:.1e} is over {ready.limit}: not timed")
            us = timer.alone(call)
            if found is None or us < found["us"]:
                found = {"us": us, "gb_per_s": ready.nbytes / us / 1e3, "error": error}
                found["kernel"] = name
    return found


def main() -> None:
    """Time all that is installed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", help="q heads:KV headsxTxbatch, as 8:1x8192x64")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    for shape in given.shape or ():
        if not re.fullmatch(SHAPE, shape):
            parser.error(f"{shape!r} is no shape: write 8:1x8192x64")
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here")
    timer = GraphTimer()
    machine = describe_machine(timer, __version__)
    print(render_machine(machine))
    installed = []
    for peer in PEERS:
        try:
            importlib.import_module(peer.module)
            installed.append(peer)
        except Exception as error:  # of whatever kind, where an installation does not fit
            print(f"{peer.project}, {peer.cache}: not measured ({error}): {peer.install}")
    figures, rows = [], []
    for shape in given.shape or SHAPES:
        at = make_inputs(shape, timer.device)
        heads, tokens, batch = shape.split("x")
        for peer in installed:
            found = None
            with told(f"{shape}, {peer.project}, {peer.cache}"):
                found = measure(peer, at, timer)
            if found:
                figures.append(
                    {"shape": shape, "project": peer.project, "cache": peer.cache} | found
                )
                cells = [f"{found['us']:.1f}", f"{found['gb_per_s']:.0f}", f"{found['error']:.1e}"]
                row = [heads, tokens, batch, peer.project, peer.cache, *cells, found["kernel"]]
                rows.append(row)
                print(*row, sep="  ", flush=True)
    if rows:
        print("\n" + render_table(COLUMNS, rows))
    if given.json:
        given.json.write_text(json.dumps({"machine": vars(machine), "peers": figures}, indent=1))


if __name__ == "__main__":
    main()
