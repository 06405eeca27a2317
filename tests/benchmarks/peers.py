"""Decode attention of other projects beside ours, each result checked first: the tables of peers.

    python tests/benchmarks/peers.py [--shape 8:1x8192x64 ...] [--project NAME ...] [--json FILE]

Times are of single calls, replayed from a CUDA graph with the L2 cache overwritten, by the timer of
`kvquant bench`. Where a project has several kernels for a case, all are tried, and the fastest
counts. What a project plans once for the lengths of a step is not in its times. Shapes with heads
such as 16:mla are of latent rows (MLA): 512 elements and 64 of RoPE, which all heads share.

Every result is compared with float64 attention to the values that the cache stands for: those that
a project's own cache dequantizes to, where it can say so, else (BitDecoding) the 16-bit ones, at a
limit that 4 bits stay below. What is not installed is named, with how to install it. A peer that
fails is named with its error, and the others go on. After an error that ends CUDA in this process
the others fail, too: measure that project by itself (--project).

The calls of the other projects are those of FlashInfer 0.7.2.post1, vLLM 0.32.0 (FlashAttention 3
and FlashMLA), FBGEMM GenAI 1.6.0, MSLK 1.1.0 and BitDecoding e829b5a.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import itertools
import math
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from kvquant import (
    LatentFormat,
    RowFormat,
    __version__,
    decode_attention,
    dequantize_rows,
    mla_decode_attention,
    quantize_rows,
)
from kvquant.bench.cases import LATENT_SCALE
from kvquant.bench.measure import BACKENDS, render_machine
from kvquant.bench.timer import GIVE_UP, Call, GraphTimer, describe_machine
from kvquant.cli.console import compile_kernels, write_json
from kvquant.kernels.cuda.runtime.launch import gpu_of
from kvquant.kernels.cuda.runtime.warmup import kernels_of
from kvquant.text import Column, render_table

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
# relative L2, where outputs, probabilities and scaled queries have 16 bits, each of which adds 0.1
# to 0.2 %; where queries and probabilities may be FP8, each of which adds 2.6 % of scores of size 1
# to 1.7; where K and V have 4 bits, each of which adds 10 %; where the kernel makes BF16 of 4 bits,
# code times scale plus shift, which cancels some of the digits
ROUNDED, IN_FP8, IN_4_BIT, FROM_4_BIT = 5e-3, 8e-2, 0.2, 1e-2
BLOCK = 1 << 27  # elements that are quantized at a time
WORKSPACE = 512 << 20  # bytes, of FlashInfer
PAGE = 64  # tokens, where a project has pages
SPLITS = (2, 4, 8, 16)  # of FBGEMM, which has to be given them, and of MSLK
LATENT, ROPE = 512, 64  # elements of a latent row
SHAPES = [f"8:1x8192x{batch}" for batch in (1, 8, 32, 64, 128, 256, 512)]
SHAPES += [f"32:8x{tokens}x{batch}" for tokens in (1024, 8192, 32768) for batch in (1, 8, 32, 64)]
SHAPES += [f"{heads}:mlax{tokens}x64" for tokens in (1024, 8192) for heads in (16, 128)]
SHAPE = r"(\d+):(\d+|mla)x(\d+)x(\d+)"
COLUMNS = (
    *map(Column, ("heads", "T", "batch")),
    Column("project", left=True),
    Column("cache", left=True),
    *map(Column, ("us", "GB/s", "error")),
    Column("fastest of its kernels", left=True),
)


class Inputs(NamedTuple):
    """Inputs of a shape.

    Attributes:
        q: [batch, num_q_heads, head_dim], bfloat16.
        k, v: [batch, num_kv_heads, T, head_dim], bfloat16; of MLA v is the first elements of k.
        lens: [batch], int32: T of each sequence.
        scale: factor on the scores.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lens: torch.Tensor
    scale: float


@dataclass(frozen=True)
class Ready:
    """A project's kernels, ready to be called on a cache of its own.

    Attributes:
        calls: by the names of kernels; each gives [batch, num_q_heads, head_dim of V], of which
            axes may be split.
        k, v: the values that the cache stands for, as in Inputs, of the first and last sequence.
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
        package: that it comes with, whose version is kept.
        install: how to install it.
        prepare: takes Inputs; raises ValueError for a shape that the project does not take.
        is_latent: whether it takes shapes of MLA, or the others.
    """

    project: str
    cache: str
    module: str
    package: str
    install: str
    prepare: Callable[[Inputs], Ready]
    is_latent: bool = False


def prepare_ours(name: str, at: Inputs) -> Ready:
    """Rows of ours."""
    fmt = RowFormat.parse(name, at.q.shape[-1])
    k, v = (pack(rows, fmt) for rows in (at.k, at.v))
    call = partial(decode_attention, at.q, k, v, at.lens, k_format=fmt, v_format=fmt)
    return ready_of_rows({"decode_attention": call}, fmt, k, v)


def ready_of_rows(
    calls: Mapping[str, Call], fmt: RowFormat, k: torch.Tensor, v: torch.Tensor
) -> Ready:
    """With rows of ours."""
    k_values, v_values = (dequantize_rows(ends(rows), fmt) for rows in (k, v))
    return Ready(calls, k_values, v_values, k.nbytes + v.nbytes)


def pack(rows: torch.Tensor, fmt: RowFormat | LatentFormat) -> torch.Tensor:
    """quantize_rows of some sequences at a time: on CUDA it needs memory for several copies."""
    some = max(BLOCK // rows[0].numel(), 1)
    return torch.cat([quantize_rows(part, fmt, check=False) for part in rows.split(some)])


def ends(sequences: torch.Tensor) -> torch.Tensor:
    """The first and the last of a batch, which are checked."""
    return torch.stack([sequences[0], sequences[-1]])


def prepare_our_latents(name: str, at: Inputs) -> Ready:
    """Latent rows of ours."""
    fmt = LatentFormat.parse(name)
    rows = pack(at.k, fmt)
    parts = (part.contiguous() for part in at.q.split([LATENT, ROPE], -1))
    call = partial(mla_decode_attention, *parts, rows[:, 0], at.lens, fmt=fmt, sm_scale=at.scale)
    k = dequantize_rows(ends(rows), fmt)
    return Ready({"mla_decode_attention": call}, k, k[..., :LATENT], rows.nbytes)


def prepare_torch(at: Inputs) -> Ready:
    """scaled_dot_product_attention, by all backends, query heads as they are or as queries."""
    attention = F.scaled_dot_product_attention
    folded = at.q.view(*at.k.shape[:2], -1, at.q.shape[-1])
    calls: dict[str, Call] = {}
    for name, backend in BACKENDS.items():
        if name == "math" and at.q.is_cuda:
            continue  # the slowest, and it copies K and V to float32
        calls[f"{name}, enable_gqa"] = sdpa_kernel(backend)(
            partial(attention, at.q[:, :, None], at.k, at.v, enable_gqa=True)
        )
        calls[f"{name}, folded"] = sdpa_kernel(backend)(partial(attention, folded, at.k, at.v))
    return ready_of(calls, BF16, at, at.k.nbytes + at.v.nbytes)


def to_pages(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, num_kv_heads, T, head_dim] to [pages, num_kv_heads, PAGE, head_dim], and which of
    them each sequence has: [batch, pages], int32."""
    batch, heads, tokens, width = rows.shape
    if tokens % PAGE:
        raise ValueError(f"T is no multiple of the {PAGE} tokens of a page")
    pages = rows.view(batch, heads, tokens // PAGE, PAGE, width).transpose(1, 2)
    table = torch.arange(rows.shape[0] * tokens // PAGE, dtype=torch.int32, device=rows.device)
    return pages.reshape(-1, heads, PAGE, width), table.view(batch, -1)


def ready_of(calls: Mapping[str, Call], dtype: torch.dtype, at: Inputs, nbytes: int) -> Ready:
    """With a cache of plain values of a type, which queries and probabilities may have, too."""
    limit = IN_FP8 if dtype == FP8 else ROUNDED
    return Ready(calls, ends(at.k).to(dtype), ends(at.v).to(dtype), nbytes, limit)


def make_workspace(at: Inputs) -> torch.Tensor:
    """Memory for FlashInfer."""
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=at.q.device)


def prepare_flashinfer(dtype: torch.dtype, at: Inputs) -> Ready:
    """The kernels of the wrapper; CUDA cores too, which it takes by default."""
    make = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
    batch, num_q_heads, head_dim = at.q.shape
    (k, table), (v, _) = (to_pages(rows.to(dtype)) for rows in (at.k, at.v))
    starts = torch.arange(batch + 1, dtype=torch.int32) * table.shape[1]
    last = torch.full((batch,), PAGE, dtype=torch.int32)
    kernels: dict[str, dict[str, Any]] = {
        "fa2": {"backend": "fa2", "use_tensor_cores": True},
        "fa3": {"backend": "fa3", "use_tensor_cores": True},
        "CUDA cores": {},
    }
    if dtype == FP8:
        del kernels["fa3"]  # it needs queries of the cache's type
    calls: dict[str, Call] = {}
    for name, options in kernels.items():
        with told(f"FlashInfer, {name}"):
            wrapper = make(make_workspace(at), "HND", **options)
            sizes = num_q_heads, at.k.shape[1], head_dim, PAGE
            types = {"q_data_type": at.q.dtype, "kv_data_type": dtype}
            wrapper.plan(starts, table.flatten(), last, *sizes, **types)
            calls[name] = partial(wrapper.run, at.q, (k, v))
    return ready_of(calls, dtype, at, k.nbytes + v.nbytes)


def prepare_flashinfer_latents(dtype: torch.dtype, at: Inputs) -> Ready:
    """The MLA wrapper's kernels for Hopper and for any GPU; FP8 rows have one scale in all."""
    mla = importlib.import_module("flashinfer.mla")
    batch, num_heads, _ = at.q.shape
    pages, table = to_pages(at.k.to(dtype))
    first = torch.arange(batch + 1, dtype=torch.int32)
    lists = first, first * table.shape[1], table.flatten().cpu(), at.lens.cpu()
    plan = {
        "metadata": mla.MLAPlanMetadata.csr(*lists),
        "num_heads": num_heads,
        "head_dim_ckv": LATENT,
        "head_dim_kpe": ROPE,
        "page_size": PAGE,
        "causal": False,
        "sm_scale": at.scale,
        "q_data_type": at.q.dtype,
        "kv_data_type": dtype,
    }
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if dtype == FP8 else {}
    calls: dict[str, Call] = {}
    for name in ("fa3", "fa2"):
        with told(f"FlashInfer MLA, {name}"):
            wrapper = mla.BatchMLAPagedAttentionWrapper(make_workspace(at), backend=name)
            wrapper.plan(**plan)
            calls[name] = partial(wrapper.run, query=at.q, kv_cache=pages[:, 0], **scales)
    return ready_of(calls, dtype, at, pages.nbytes)


def prepare_xqa(dtype: torch.dtype, at: Inputs) -> Ready:
    """FlashInfer's XQA, which computes in FP8 where the cache is FP8."""
    attention = importlib.import_module("flashinfer.decode").xqa_batch_decode_with_kv_cache
    (k, table), (v, _) = (to_pages(rows.to(dtype)) for rows in (at.k, at.v))
    lens = at.lens.to(torch.uint32)
    call = partial(
        attention,
        *(at.q, (k, v), make_workspace(at), table, lens, at.k.shape[2]),
        bmm1_scale=at.scale,
        kv_layout="HND",
    )
    return ready_of({"xqa": call}, dtype, at, k.nbytes + v.nbytes)


def prepare_flash_attention(dtype: torch.dtype, at: Inputs) -> Ready:
    """FlashAttention 3 as vLLM builds and calls it, on rows and on pages."""
    module = importlib.import_module(FLASH_ATTENTION)
    batch, num_q_heads, head_dim = at.q.shape
    tokens, num_kv_heads = at.k.shape[2], at.k.shape[1]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=at.q.device)
    sides = [rows.to(dtype) for rows in (at.k, at.v)]
    (k_pages, table), (v_pages, _) = map(to_pages, sides)
    sizes = batch, 1, tokens, num_q_heads, num_kv_heads, head_dim, at.lens, dtype
    calls: dict[str, Call] = {}
    for name, (k, v), options in (
        ("rows", sides, {}),
        ("pages", (k_pages, v_pages), {"block_table": table}),
    ):
        page = {"page_size": PAGE} if options else {}
        with told(f"FlashAttention 3, {name}"):
            splits = module.get_scheduler_metadata(*sizes, cu_seqlens_q=starts, causal=True, **page)
            calls[name] = partial(
                module.flash_attn_varlen_func,
                *(at.q.to(dtype), k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()),
                *(1, starts, tokens),
                seqused_k=at.lens,
                softmax_scale=at.scale,
                causal=True,
                scheduler_metadata=splits,
                fa_version=3,
                **options,
            )
    return ready_of(calls, dtype, at, sum(side.nbytes for side in sides))


def prepare_flashmla(dtype: torch.dtype, at: Inputs) -> Ready:
    """FlashMLA on all tokens; in FP8, with one scale in all, by what vLLM adds to it."""
    module = importlib.import_module(FLASH_MLA)
    pages, table = to_pages(at.k.to(dtype))
    args = at.q[:, None].to(dtype), pages.view(-1, PAGE, 1, LATENT + ROPE)
    if dtype == FP8:
        importlib.import_module("vllm._flashmla_extension_C")
        added = torch.ops._flashmla_extension_C
        plan = added.get_mla_decoding_metadata_dense_fp8(at.lens, at.q.shape[1], 1)
        one = torch.ones(1, device=at.q.device)
        call = partial(
            added.fwd_kvcache_mla_fp8,
            *(*args, LATENT, at.lens, table, at.scale, False, *plan, one, one),
        )
    else:
        plan, _ = module.get_mla_metadata()
        call = partial(
            module.flash_mla_with_kvcache,
            *(*args, table, at.lens, LATENT, plan),
            softmax_scale=at.scale,
        )
    calls = {"dense": partial(first_of, call)}
    return ready_of(calls, dtype, at, pages.nbytes)


def prepare_flashmla_rows(at: Inputs) -> Ready:
    """FlashMLA on its own FP8 rows, which ours called fp8 are, byte for byte: its kernel for chosen
    tokens, of which all are chosen."""
    module = importlib.import_module(FLASH_MLA)
    if at.q.shape[1] not in (64, 128):
        raise ValueError("it takes 64 or 128 heads")
    fmt = LatentFormat.parse("fp8")
    rows = pack(at.k, fmt)
    batch, tokens = rows.shape[0], rows.shape[2]
    chosen = torch.arange(batch * tokens, dtype=torch.int32, device=rows.device)
    plan, _ = module.get_mla_metadata()
    call = partial(
        module.flash_mla_with_kvcache,
        *(at.q[:, None], rows.view(-1, PAGE, 1, fmt.row_bytes), None, None, LATENT, plan),
        softmax_scale=at.scale,
        is_fp8_kvcache=True,
        indices=chosen.view(batch, 1, tokens),
    )
    k = dequantize_rows(ends(rows), fmt)
    return Ready({"sparse": partial(first_of, call)}, k, k[..., :LATENT], rows.nbytes)


def prepare_fbgemm(name: str, at: Inputs) -> Ready:
    """gqa_attn_splitk on tensor cores or not; INT4 rows of ours are its rows, byte for byte.

    Its kernel for 4 groups on CUDA cores reads memory that is not there, which ends the process.
    """
    importlib.import_module("fbgemm_gpu.experimental.gen_ai")
    _, num_kv_heads, tokens, head_dim = at.k.shape
    if num_kv_heads > 1 or at.q.shape[1] > 8 or head_dim != 128 or tokens > 16384:
        raise ValueError("it takes one KV head, 8 query heads, head_dim 128, 16,384 tokens")
    fmt = RowFormat.parse(name, head_dim)
    k, v = (pack(rows, fmt) for rows in (at.k, at.v))
    # [batch, T, one KV head, row]
    stored = [rows[:, 0, :, None] for rows in ((at.k, at.v) if fmt.is_exact else (k, v))]
    calls: dict[str, Call] = {}
    kinds = ("tensor", "CUDA")[: 1 if fmt.groups > 1 else 2]
    for cores, splits in itertools.product(kinds, SPLITS):
        call = partial(
            torch.ops.fbgemm.gqa_attn_splitk,
            *(at.q[:, None], *stored, at.lens - 1, at.scale, splits),
            kv_cache_quant_num_groups=fmt.groups,
            use_tensor_cores=cores == "tensor",
        )
        calls[f"{cores} cores, {splits} splits"] = partial(first_of, call)
    ready = ready_of_rows(calls, fmt, k, v)
    return ready if fmt.is_exact else replace(ready, limit=FROM_4_BIT)


def prepare_mslk(name: str, at: Inputs) -> Ready:
    """The Triton split-K kernel with its own number of splits, and with others; INT4 rows of ours
    are its rows, as 32-bit words."""
    fmha = importlib.import_module("mslk.attention.fmha")
    op = importlib.import_module("mslk.attention.fmha.triton_splitk").FwOp
    (batch, num_q_heads, head_dim), (num_kv_heads, tokens) = at.q.shape, at.k.shape[1:3]
    fmt, ratio = RowFormat.parse(name, head_dim), num_q_heads // num_kv_heads
    k, v = (pack(rows, fmt) for rows in (at.k, at.v))
    # [1, tokens of all sequences, KV heads, query heads of each, which share the words, words]
    stored = [
        rows.transpose(1, 2).contiguous().view(torch.int32).view(1, -1, num_kv_heads, 1, words)
        for rows, words in ((rows, fmt.row_bytes // 4) for rows in (k, v))
    ]
    lens = fmha.attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        [1] * batch, tokens, [tokens] * batch, device=at.q.device
    )
    q = at.q.view(1, batch, num_kv_heads, ratio, head_dim)
    sides = [rows.expand(-1, -1, -1, ratio, -1) for rows in stored]
    given = fmha.common.Inputs(q, *sides, attn_bias=lens, scale=at.scale)
    calls: dict[str, Call] = {}
    for splits in (None, *SPLITS):
        chosen = type("Chosen", (op,), {"NUM_GROUPS": fmt.groups, "SPLIT_K": splits})
        call = partial(chosen.apply, given, False)  # type: ignore[attr-defined]
        calls[f"{splits or 'its own'} splits"] = partial(first_of, call)
    return replace(ready_of_rows(calls, fmt, k, v), limit=FROM_4_BIT)


def first_of(call: Callable[[], Any]) -> object:
    """The first of a call's results."""
    return call()[0]


def prepare_bitdecoding(at: Inputs) -> Ready:
    """K per channel, V per token, four INT4 codes a word, 128 values a scale: the only groups that
    it launches kernels for."""
    bit_decode = importlib.import_module("bit_decode")
    group_size = 128
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
    starts = torch.arange(batch + 1, dtype=torch.int32, device=k.device) * tokens
    options = ("k-channel", group_size, 4)
    bit_decode.kvcache_pack_int(
        k, k_pack, k_params, v, v_pack, v_params, None, starts, tokens, *options
    )
    q = at.q[:, None].to(FP16)
    call = partial(bit_decode.fwd_kvcache_int, q, *parts, None, at.scale, *options)
    nbytes = sum(part.nbytes for part in parts)
    return Ready({"fwd_kvcache_int": call}, ends(at.k), ends(at.v), nbytes, IN_4_BIT)


FLASHINFER = "flashinfer-python", "pip install flashinfer-python"
VLLM = "vllm", "pip install vllm"
FBGEMM = "fbgemm-gpu-genai", "pip install fbgemm-gpu-genai, of the version for your torch"
MSLK = "mslk-cuda", "pip install mslk-cuda; with MSLK_PYTHON_ONLY=1 its Python files are enough"
BIT_DECODING = "bit_decode", "see github.com/DD-DuDa/BitDecoding"
FLASH_ATTENTION = "vllm.vllm_flash_attn.flash_attn_interface"
FLASH_MLA = "vllm.third_party.flashmla.flash_mla_interface"
OURS = ("int4-g4", "int4", "int8-g4", "fp8", "bf16")
OUR_LATENTS = ("int4-g8+int8-g4", "int8-g4", "fp8", "bf16")
KINDS = (("BF16", BF16), ("FP8", FP8))
INT4 = (("INT4, 1 group", "int4"), ("INT4, 4 groups", "int4-g4"))
PEERS = (
    *(Peer("kvquant", one, "kvquant", "kvquant", "", partial(prepare_ours, one)) for one in OURS),
    Peer("torch", "BF16", "torch", "torch", "", prepare_torch),
    *(
        Peer(project, name, module, *package, partial(prepare, dtype))
        for project, module, package, prepare in (
            ("FlashInfer", "flashinfer", FLASHINFER, prepare_flashinfer),
            ("FlashInfer XQA", "flashinfer", FLASHINFER, prepare_xqa),
            ("FlashAttention 3", FLASH_ATTENTION, VLLM, prepare_flash_attention),
        )
        for name, dtype in KINDS
    ),
    *(
        Peer("FBGEMM", cache, "fbgemm_gpu", *FBGEMM, partial(prepare_fbgemm, name))
        for cache, name in (("BF16", "bf16"), *INT4)
    ),
    *(Peer("MSLK", cache, "mslk", *MSLK, partial(prepare_mslk, name)) for cache, name in INT4),
    Peer("BitDecoding", "INT4, 128 a group", "bit_decode", *BIT_DECODING, prepare_bitdecoding),
    *(
        Peer("kvquant", one, "kvquant", "kvquant", "", partial(prepare_our_latents, one), True)
        for one in OUR_LATENTS
    ),
    *(
        Peer(project, name, module, *package, partial(prepare, dtype), True)
        for project, module, package, prepare in (
            ("FlashInfer", "flashinfer", FLASHINFER, prepare_flashinfer_latents),
            ("FlashMLA", FLASH_MLA, VLLM, prepare_flashmla),
        )
        for name, dtype in KINDS
    ),
    Peer("FlashMLA", "FP8, 4 scales", FLASH_MLA, *VLLM, prepare_flashmla_rows, True),
)
PROJECTS = tuple(dict.fromkeys(peer.project for peer in PEERS))
FAILED: dict[str, str] = {}  # kernels that did not run or were not right, and their last errors


@contextmanager
def told(what: str) -> Iterator[None]:
    """A kernel that cannot run is named, and the others go on."""
    try:
        yield
    except Exception as error:  # of whatever kind a project has
        FAILED[what] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        print(f"{what}: {FAILED[what]}", flush=True)


def make_inputs(shape: str, device: torch.device) -> Inputs:
    """Random inputs of a shape, "q heads:KV headsxTxbatch", "heads:mlaxTxbatch"."""
    found = re.fullmatch(SHAPE, shape)
    assert found
    q_heads, tokens, batch = (int(found[i]) for i in (1, 3, 4))
    is_latent = found[2] == "mla"
    # on the meta device values need no generator
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)
    make = partial(torch.randn, device=device, dtype=BF16, generator=generator)
    lens = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    if is_latent:
        k = make(batch, 1, tokens, LATENT + ROPE)
        q = make(batch, q_heads, LATENT + ROPE)
        return Inputs(q, k, k[..., :LATENT], lens, LATENT_SCALE)
    k, v = (make(batch, int(found[2]), tokens, 128) for _ in range(2))
    return Inputs(make(batch, q_heads, 128), k, v, lens, 128**-0.5)


def takers(shape: str, peers: Sequence[Peer]) -> list[Peer]:
    """Those of some peers that take shapes of this kind."""
    return [peer for peer in peers if peer.is_latent == (":mla" in shape)]


def rehearse(peer: Peer, shape: str) -> None:
    """Call our kernels without values, for kernels_of."""
    for call in peer.prepare(make_inputs(shape, torch.device("meta"))).calls.values():
        call()


def error_of(out: torch.Tensor, at: Inputs, ready: Ready) -> float:
    """The greater relative L2 error of the first and the last sequence, against float64."""
    out = out.reshape(*at.q.shape[:2], ready.v.shape[-1])
    errors = []
    for b, k, v in zip((0, -1), ready.k.double(), ready.v.double(), strict=True):
        q = at.q[b].double().view(len(k), -1, k.shape[-1])
        scores = q @ k.transpose(-1, -2) * at.scale
        expected = (scores.softmax(-1) @ v).view_as(out[b])
        errors.append(float((out[b] - expected).norm() / expected.norm()))
    return max(errors)


def measure(peer: Peer, at: Inputs, timer: GraphTimer) -> dict[str, Any] | None:
    """Check and time a peer's kernels; the fastest counts, None if none runs."""
    ready = peer.prepare(at)
    found: dict[str, Any] | None = None
    best = math.inf
    for name, call in ready.calls.items():
        with told(f"{peer.project}, {peer.cache}, {name}"):
            out = call()
            assert isinstance(out, torch.Tensor)
            error = error_of(out, at, ready)
            if not error <= ready.limit:
                raise AssertionError(f"relative error {error:.1e} is over {ready.limit}: not timed")
            us = timer.alone(call, GIVE_UP * best)
            if us < best:
                best = us
                found = {"us": us, "gb_per_s": ready.nbytes / us / 1e3, "error": error}
                found["kernel"] = name
    return found


def version_of(package: str) -> str:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def commit() -> str:
    """Of kvquant's checkout; empty where git does not tell it."""
    command = ["git", "describe", "--always", "--dirty"]
    with suppress(OSError):
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True
        ).stdout.strip()
    return ""


def main() -> None:
    """Time all that is installed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape",
        action="append",
        help="q heads:KV headsxTxbatch, as 8:1x8192x64 or 16:mlax8192x64",
    )
    parser.add_argument("--project", action="append", choices=PROJECTS)
    parser.add_argument("--json", type=Path, help="written anew after each shape")
    parser.add_argument("--commit", help="of kvquant, for --json, where git does not tell it")
    given = parser.parse_args()
    for shape in given.shape or ():
        if not re.fullmatch(SHAPE, shape):
            parser.error(f"{shape!r} is no shape: write 8:1x8192x64 or 16:mlax8192x64")
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here")
    timer = GraphTimer()
    machine = describe_machine(timer, __version__)
    print(render_machine(machine))
    installed = []
    for peer in PEERS:
        if peer.project not in (given.project or PROJECTS):
            continue
        try:
            importlib.import_module(peer.module)
            installed.append(peer)
        except Exception as error:  # of whatever kind, where an installation does not fit
            print(f"{peer.project}, {peer.cache}: not measured ({error}): {peer.install}")
    shapes = given.shape or SHAPES
    ours = [
        partial(rehearse, peer, shape)
        for shape in shapes
        for peer in takers(shape, installed)
        if peer.project == "kvquant"
    ]
    gpu = gpu_of(timer.device.index)
    compile_kernels(kernels_of(ours, gpu), gpu.arch)
    figures, rows = [], []
    facts = {
        "machine": asdict(machine),
        "commit": given.commit or commit(),
        "versions": {one.package: version_of(one.package) for one in installed if one.install},
    }
    for shape in shapes:
        if not (here := takers(shape, installed)):
            continue
        at = make_inputs(shape, timer.device)
        heads, tokens, batch = shape.rsplit("x", 2)
        for peer in here:
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
        write_json(given.json, facts | {"failed": FAILED, "peers": figures})
    if rows:
        print("\n" + render_table(COLUMNS, rows))


if __name__ == "__main__":
    main()
