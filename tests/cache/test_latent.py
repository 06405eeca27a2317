"""LatentKVCache: rows side by side, and the bookkeeping of KVCache over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from example_plan import example_plan
from latent_plans import latent_plan, random_basis
from refusals import refused
from relative_l2 import relative_l2
from variant_cases import by_hand

from kvquant import (
    Basis,
    ContextParallelCache,
    KVCache,
    LatentFormat,
    LatentKVCache,
    LatentPagedKVCache,
    PagedKVCache,
    debug,
    dequantize_rows,
    load_cache,
    mla_decode_attention,
    quantize_rows,
    save_cache,
)
from kvquant.cache.latent import LatentLayerCache
from kvquant.errors import (
    CheckpointError,
    ConfigError,
    KVQuantError,
    NonFiniteError,
    ShapeError,
    UnsupportedError,
)
from kvquant.io.export import export_cache
from kvquant.io.inspect import describe
from kvquant.io.plan import CachePlan
from kvquant.ops import mla
from kvquant.ops.mla import check_kernels
from kvquant.rows.basis import LayerBasis

SCALE = 80**-0.5
DIMS = {"latent_dim": 256, "rope_dim": 32}
FORMAT = "int8-g4+int8-g8"


def make_cache(**options: Any) -> LatentKVCache:
    given: Any = {"fmt": FORMAT, "sink_len": 2, "recent_len": 16, **DIMS, **options}
    return LatentKVCache(2, 3, 96, **given)


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 1, count, 256), torch.randn(3, 1, count, 32)


def queries(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, *shape, 256), torch.randn(3, *shape, 32)


def layer_of(cache: KVCache) -> LatentLayerCache:
    layer = cache.layers[0]
    assert isinstance(layer, LatentLayerCache)
    return layer


def test_packed_rows_are_those_of_quantize_rows_in_one_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = make_cache(recent_len=0, sink_len=0)
    latent, rope = tokens(50)
    cache.append(0, latent[:, :, :20], rope[:, :, :20])
    monkeypatch.setattr(debug, "enabled", True)  # looks whether rows share memory
    cache.append(0, latent[:, :, 20:], rope[:, :, 20:])
    fmt = LatentFormat.parse(FORMAT, 256, 32)
    rows = quantize_rows(torch.cat([latent, rope], dim=-1), fmt)
    layer = layer_of(cache)
    assert torch.equal(layer.packed[:, :, :50], rows)
    assert layer.k_packed.untyped_storage().data_ptr() == layer.packed.data_ptr()
    assert cache.nbytes >= 2 * 3 * 96 * fmt.row_bytes
    q_latent, q_rope = queries(4)
    out = cache.attend(0, q_latent, q_rope, sm_scale=SCALE)
    wanted = mla_decode_attention(
        q_latent, q_rope, rows[:, 0], layer.seq_lens, fmt=fmt, sm_scale=SCALE
    )
    assert torch.equal(out, wanted)


def test_attention_sees_sinks_packed_and_recent_tokens() -> None:
    cache = make_cache()
    latent, rope = tokens(70)
    lens = torch.tensor([70, 41, 5])
    cache.append(0, latent, rope, lens)
    q_latent, q_rope = queries(4)
    out, lse = cache.attend(0, q_latent, q_rope, sm_scale=SCALE, return_lse=True)
    values = [part.squeeze(1).double() for part in cache.dequantized(0)]
    exact = [part.squeeze(1).bfloat16().double() for part in (latent, rope)]
    for b, length in enumerate(lens.tolist()):
        recent = slice(max(length - 16, 0), length)
        assert torch.equal(values[0][b, recent], exact[0][b, recent])
    q, keys = torch.cat([q_latent, q_rope], -1)[:, None], torch.cat(cache.dequantized(0), -1)
    wanted = by_hand(q, keys, keys[..., :256], lens.tolist(), [1] * 3, scale=SCALE)
    torch.testing.assert_close(out.double(), wanted[0][:, 0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse.double(), wanted[1][:, 0], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "sm_scale", "message"),
    [
        (torch.float32, SCALE, "q_latent is torch.float32: on CUDA use bfloat16 or float16"),
        (torch.bfloat16, -1.0, "sm_scale -1.0 is not possible on CUDA: use a positive number"),
        (torch.float16, SCALE, "bf16 rows with float16 queries have no CUDA kernel"),
        (torch.bfloat16, None, "give the model's, latents do not tell it"),
    ],
)
def test_a_step_that_no_kernel_takes_appends_nothing(
    dtype: torch.dtype, sm_scale: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla, "kernels_for", lambda tensor, backend: backend or "cuda")
    cache = LatentKVCache(1, 2, 64, fmt="int8-g4")
    queries = torch.randn(2, 4, 512).to(dtype), torch.randn(2, 4, 64).to(dtype)
    rows = torch.randn(2, 1, 1, 512), torch.randn(2, 1, 1, 64)
    with pytest.raises(KVQuantError, match=message):
        cache.step(0, *queries, *rows, sm_scale=sm_scale)
    assert not cache.seq_lens.any()


def test_what_does_not_fit_is_refused() -> None:
    cache = make_cache()
    with pytest.raises(ConfigError, match="fmt lists 1 formats for 2 layers"):
        make_cache(fmt=["bf16"])
    with pytest.raises(ConfigError, match="format 'int5' does not exist"):
        make_cache(fmt="int5")
    with pytest.raises(UnsupportedError, match="latent rows are not spread over ranks"):
        ContextParallelCache(LatentKVCache(1, 1, 16))
    with pytest.raises(UnsupportedError, match=r"int8-g2 latents .* MLA: use int4-g4, int4-g8"):
        check_kernels([LatentFormat.parse("int8-g2")])
    check_kernels([LatentFormat.parse(name) for name in ("bf16", "fp16", "fp8", "int4-g8+fp8-g4")])
    assert "256 latents and 32 RoPE elements in int8-g4+int8-g8" in repr(cache)
    assert dequantize_rows(layer_of(cache).packed[0, 0, :1], cache.formats[0]).shape == (1, 288)


def test_flash_mla_rows_hold_no_infinite_value(tmp_path: Path) -> None:
    """240 * 2**120 is the largest: the next code, 256, would be 2**128."""
    cache = LatentKVCache(1, 1, 64, fmt="fp8", sink_len=0, recent_len=0)
    largest = torch.full((1, 1, 3, 512), -240 * 2.0**120).bfloat16()
    rope = torch.ones(1, 1, 3, 64)
    cache.append(0, largest, rope)
    assert torch.equal(cache.dequantized(0)[0], largest.float())
    with pytest.raises(NonFiniteError, match=r"rows hold finite values up to 3\.1901"):
        cache.append(0, largest * 1.01, rope)
    load_cache(save_cache(cache, tmp_path / "good.safetensors"))
    scale = describe(tmp_path / "good.safetensors")["layers"][0]["k"]["scale"]
    assert scale["min"] == scale["max"] == 2.0**120
    with pytest.raises(UnsupportedError, match="the cache holds latent rows: use bf16"):
        export_cache(cache, tmp_path / "raw.safetensors", "fbgemm")
    for scale, message in ((2.0**121, "a value is infinite"), (-1.0, "no positive number")):
        cache.layers[0].k_packed[0, 0, 1, 516:520].view(torch.float32).fill_(scale)
        with pytest.raises(CheckpointError, match=f"sequence 0, token 1, .*{message}"):
            save_cache(cache, tmp_path / "bad.safetensors")
    with pytest.raises(NonFiniteError, match="is too large for fp16: export to bf16"):
        export_cache(
            load_cache(tmp_path / "good.safetensors"), tmp_path / "raw.safetensors", "fp16"
        )


@pytest.mark.parametrize("name", [None, "matrix"])
def test_torch_compile_takes_a_step_whole(name: str | None) -> None:
    bases = [BASES[name]] * 2 if name else None
    cache, other = (make_cache(bases=bases) for _ in range(2))

    def step(
        cache: LatentKVCache, q: tuple[torch.Tensor, ...], x: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        return cache.step(0, q[0], q[1], x[0], x[1], sm_scale=SCALE)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        q, x = queries(4), tokens(1)
        found, wanted = compiled(cache, q, x), step(other, q, x)
        torch.testing.assert_close(found, wanted)
        assert name or torch.equal(found, wanted)
    assert name or torch.equal(layer_of(cache).packed, layer_of(other).packed)


def test_more_queries_than_tokens_are_refused() -> None:
    """Axes in Hugging Face's order, seen where that many tokens are not there; no others."""
    cache = make_cache()
    latent, rope = queries(1, 16)
    q = latent.transpose(1, 2), rope.transpose(1, 2)
    assert q[0].shape == (3, 16, 1, 256)
    with pytest.raises(ShapeError, match="layer 0 holds no tokens: append to it first"):
        cache.attend(0, *q, sm_scale=SCALE)
    cache.append(0, *tokens(15))
    with pytest.raises(ShapeError, match=r"\[3, 16, 1, 256\].*holds 15.* q\.transpose\(1, 2\)"):
        cache.attend(0, *q, sm_scale=SCALE)
    lens = torch.tensor([1, 15, 3], dtype=torch.int32)
    assert cache.attend(0, *q, lens, sm_scale=SCALE).shape == (3, 16, 1, 256)
    cache.append(0, *tokens(1), [0, 1, 0])
    assert cache.attend(0, *q, sm_scale=SCALE).shape == (3, 16, 1, 256)
    assert cache.attend(0, *queries(1, 16), sm_scale=SCALE).shape == (3, 1, 16, 256)


# Bases


BASES = {
    "matrix": random_basis(),
    "offset": LayerBasis(Basis(torch.ones(1, 256)), Basis(torch.zeros(1, 32))),
}


@pytest.mark.parametrize("recent_len", [0, 16])
@pytest.mark.parametrize("name", BASES)
def test_results_in_a_basis_are_those_without(name: str, recent_len: int) -> None:
    """In 16-bit rows, whose rounding (2**-9 of an element) is all that differs."""
    latent, rope = tokens(60)
    lens, later = torch.tensor([60, 0, 7]), tokens(3)
    found: list[list[torch.Tensor]] = [[], []]
    torch.manual_seed(2)
    one, few = queries(4), queries(3, 4)
    for bases, outs in zip((None, [BASES[name]] * 2), found, strict=True):
        cache = make_cache(fmt="bf16", recent_len=recent_len, bases=bases)
        cache.append(0, latent, rope, lens)
        outs += cache.attend(0, *one, sm_scale=SCALE, return_lse=True)
        outs += cache.step(0, *few, *later, sm_scale=SCALE, return_lse=True)
        outs += cache.dequantized(0)
    for given, wanted in zip(*found, strict=True):
        assert torch.equal(given.isinf(), wanted.isinf())  # a sequence without tokens
        is_some = ~wanted.isinf()
        error = (given[is_some] - wanted[is_some]).norm() / wanted[is_some].norm()
        assert float(error) < 2**-7
    assert not found[1][0][1].any()  # zeros, not the offset


def test_queries_that_come_in_the_basis_get_results_in_it() -> None:
    """Of attend and step: what a model does whose weights hold the basis."""
    basis = BASES["matrix"]
    caches = [make_cache(bases=[basis] * 2) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 1, 31, 288, generator=generator)
    q = torch.randn(3, 4, 288, generator=generator)
    for cache in caches:
        cache.append(0, rows[:, :, :30, :256], rows[:, :, :30, 256:])
    turned = basis.k.transform_query(q[..., :256]), basis.v.transform_query(q[..., 256:])
    new = rows[:, :, 30:, :256], rows[:, :, 30:, 256:]
    options: dict[str, Any] = {"sm_scale": SCALE, "return_lse": True}
    wanted = [caches[0].step(0, q[..., :256], q[..., 256:], *new, **options)]
    wanted += [caches[0].attend(0, q[..., :256], q[..., 256:], **options)]
    found = [caches[1].step(0, *turned, *new, in_basis=True, **options)]
    found += [caches[1].attend(0, *turned, in_basis=True, **options)]
    missing = basis.k.missing_score(q[..., :256]) + basis.v.missing_score(q[..., 256:])
    for (out, lse), (stored, part) in zip(wanted, found, strict=True):
        torch.testing.assert_close(basis.k.restore(stored), out)
        torch.testing.assert_close(part + SCALE * missing, lse)


def test_caches_keep_their_bases(tmp_path: Path) -> None:
    plan = latent_plan()
    cache = LatentKVCache.from_plan(plan, 3, 96, sink_len=2, recent_len=16)
    assert cache.formats == [LatentFormat.parse(name, 256, 32) for name in ("int4-g8", "bf16")]
    end = "int4-g8 or bf16, max_seq_len 96, bf16 sinks and recent tokens: 2 and 16, bases, on cpu)"
    assert repr(cache).endswith(end)
    latent, rope = tokens(60)
    for layer in range(2):
        cache.append(layer, latent, rope, torch.tensor([60, 0, 25]))
    torch.manual_seed(1)
    query, more = queries(4), tokens(1)
    wanted = cache.attend(0, *query, sm_scale=SCALE)
    others = [cache.fork(), cache.like(3, "cpu"), cache.repeat(1)]
    for mine, theirs in zip(cache.bases or (), others[1].bases or (), strict=True):
        assert all(torch.equal(x.offset, y.offset) for x, y in zip(mine, theirs, strict=True))
    save_cache(cache, tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors", plan=plan)
    grown = cache.fork()
    grown.grow(128)
    for other in (others[0], others[2], loaded, grown):
        assert isinstance(other, LatentKVCache)
        assert torch.equal(other.attend(0, *query, sm_scale=SCALE), wanted)
        clone = other.fork()
        clone.append(0, *more)
        rows, before = layer_of(clone).k_packed[0], layer_of(cache).k_packed[0]
        assert torch.equal(rows[:, :58], before[:, :58])  # those of 60 tokens, but for two sinks
    back, other = torch.tensor([2, 0, 1]), others[0]
    assert isinstance(other, LatentKVCache)
    other.reorder(back)
    turned = other.attend(0, query[0][back], query[1][back], sm_scale=SCALE)
    assert relative_l2(turned, wanted[back]) < 1e-5  # products of queries in other places
    with pytest.raises(CheckpointError, match="in the bases of a plan: load it with"):
        load_cache(tmp_path / "cache.safetensors")
    with pytest.raises(CheckpointError, match=r"of another plan \(layer 0 differs\)"):
        load_cache(tmp_path / "cache.safetensors", plan=_moved(plan))


def _moved(plan: CachePlan) -> CachePlan:
    tensors = {**plan.tensors, "k.offset": plan.tensors["k.offset"] + 1}
    return CachePlan(plan.facts, tensors)


@pytest.mark.parametrize(
    ("heads", "latents", "sizes"),
    [(KVCache, LatentKVCache, (1, 64)), (PagedKVCache, LatentPagedKVCache, (4,))],
    ids=["contiguous", "paged"],
)
def test_bases_and_plans_that_do_not_fit_are_refused(heads: Any, latents: Any, sizes: Any) -> None:
    other, plan = example_plan(), latent_plan()
    fed = Basis(torch.zeros(1, 256), feedback=torch.eye(256)[None])
    feeding = [LayerBasis(fed, Basis(torch.zeros(1, 32)))] * 2
    wrong: list[tuple[Any, Any, dict[str, Any], str]] = [
        (heads, plan, {}, "ConfigError: plan is of latent rows, and this cache has keys"),
        (heads, plan, {}, "ConfigError: use LatentKVCache.from_plan or LatentPagedKVCache.from"),
        (latents, other, {}, "ConfigError: plan is of keys and values of heads, and this"),
        (latents, other, {}, "ConfigError: use KVCache.from_plan or PagedKVCache.from_plan"),
        (latents, plan, {"fmt": "int8", "latent_dim": 512}, "ConfigError: fmt, latent_dim with a"),
        (latents, plan, {"windows": [8, 8]}, "ConfigError: latent rows have no windows"),
        (heads, None, {"bases": other.layers * 2}, "ConfigError: 6 bases for 2 layers"),
        (heads, None, {"bases": 3}, "ConfigError: bases is 3: give a LayerBasis for each layer"),
        (latents, None, {"bases": [random_basis(512)] * 2}, "ShapeError: basis of layer 0 is for"),
        (latents, None, {"bases": [random_basis()]}, "ConfigError: 1 bases for 2 layers"),
        (latents, None, {"bases": feeding}, "UnsupportedError: basis of layer 0 rounds"),
    ]
    for kind, chosen, options, text in wrong:
        with refused(text):
            if chosen is not None:
                kind.from_plan(chosen, *sizes, **options)
            elif kind is latents:
                kind(2, *sizes, **DIMS, **options)
            else:
                kind(*(2, 1, 2, 64, 64) if kind is KVCache else (2, 2, 64, 4), **options)


# On a GPU: what the same calls give on the CPU


LATENTS = {  # formats and dims; the RoPE part of fp16 rows in fp16, for queries of float16
    "int4-g8+fp8-g4": ("bf16", 512, 64),
    "int8-g4": ("bf16", 512, 64),
    "fp8": ("bf16", 512, 64),
    "int4-g8": ("bf16", 256, 32),
    "fp16": ("fp16", 512, 64),
}


BOUNDS = {torch.bfloat16: 3e-3, torch.float16: 8e-4}


@pytest.mark.gpu
@pytest.mark.parametrize("name", LATENTS)
def test_a_gpu_holds_the_same_rows_and_attends_to_them(name: str) -> None:
    exact, *dims = LATENTS[name]
    dtype = torch.float16 if exact == "fp16" else torch.bfloat16
    options: Any = {"fmt": name, "latent_dim": dims[0], "rope_dim": dims[1], "rollback_len": 8}
    options |= {"exact_format": exact, "sink_len": 4, "recent_len": 40}
    caches: list[Any] = [LatentKVCache(1, 3, 400, device=at, **options) for at in ("cpu", "cuda")]
    for step, lens in enumerate(([1, 1, 1], [60, 2, 33], [190, 200, 0], [3, 1, 2], [4, 4, 4])):
        new = [torch.randn(3, 1, max(lens), dim).to(dtype) for dim in dims]
        axes = (3, max(lens), 5) if step > 2 else (3, 16)
        q = [torch.randn(*axes, dim).to(dtype) for dim in dims]
        results = []
        for cache in caches:
            cache.append(0, *(x.to(cache.device) for x in new), lens)
            at, counts = cache.device, torch.tensor(lens, dtype=torch.int32)
            given = [x.to(at, torch.float32 if at.type == "cpu" else dtype) for x in q]
            how: Any = {"sm_scale": SCALE, "in_step": step > 2, "return_lse": True}
            how |= {"backend": "reference"} if at.type == "cpu" else {}
            q_lens = counts.to(at) if step > 2 else None
            results.append([x.double().cpu() for x in cache.attend(0, *given, q_lens, **how)])
        (wanted, wanted_lse), (out, lse) = results
        assert float((out - wanted).norm() / wanted.norm()) < BOUNDS[dtype]
        torch.testing.assert_close(lse, wanted_lse, atol=1e-3, rtol=1e-4)
        if step == 3:
            for cache in caches:
                cache.crop(torch.tensor([180, 3, 30]))
                cache.reorder([2, 0, 1])
                cache.grow(600)
        for one, other in zip(
            *(cache.fork([1, 2, 0]).dequantized(0) for cache in caches), strict=True
        ):
            assert torch.equal(one, other.cpu())
    caches[1].check()
