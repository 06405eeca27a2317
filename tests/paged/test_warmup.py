"""What steps of a paged batch will launch, told before they do. No GPU is needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from example_plan import example_plan
from fake_cuda import CPU, FakeDriver, install_for_steps, loaded_specs, note_compiled
from latent_plans import random_basis

from kvquant import AttentionVariant, LatentPagedBatch, LatentPagedKVCache, PagedBatch, PagedKVCache
from kvquant.kernels.cuda.decode.spec import DecodeSpec
from kvquant.kernels.cuda.mla.spec import MlaCombineSpec
from kvquant.kernels.cuda.prefix.spec import CombineSpec, PrefixSpec, fit, worth_splits
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.kernels.cuda.runtime.warmup import kernels_of
from kvquant.ops import shared_prefix as sharing
from kvquant.paged.shared_prefix import pays
from kvquant.paged.warmup import BatchCalls, likely_batches
from kvquant.rows.rotation import Rope

HEADS, DIM, BATCH, TOKENS = 2, 64, 4, 40
GIVEN: dict[str, Any] = {"num_pages": 64, "max_num_seqs": BATCH, "max_seq_len": 512}
PLAIN: dict[str, Any] = {"num_layers": 3, "num_kv_heads": HEADS, "head_dim": DIM, **GIVEN}
LATENT: dict[str, Any] = {"num_layers": 2, **GIVEN}
MAKERS: dict[str, Callable[..., PagedKVCache]] = {
    "plain": partial(PagedKVCache, **PLAIN),
    "formats": partial(PagedKVCache, **PLAIN, k_format=["int8", "fp8", "int8"], page_size=16),
    "windows": partial(PagedKVCache, **PLAIN, windows=[64, None, 64]),
    "plan": partial(PagedKVCache.from_plan, example_plan(3, HEADS, DIM), **GIVEN),
}
LATENTS: dict[str, Callable[..., PagedKVCache]] = {
    "latents": partial(LatentPagedKVCache, **LATENT),
    "packed latents": partial(LatentPagedKVCache, **LATENT, recent_len=0, sink_len=0),
    "fp8 latents": partial(LatentPagedKVCache, **LATENT, fmt="fp8"),
    "latents in bases": partial(LatentPagedKVCache, **LATENT, bases=[random_basis(512, 64)] * 2),
}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The CPU as a GPU, for whole steps."""
    return install_for_steps(monkeypatch)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The specs that are compiled ahead, of each call."""
    return note_compiled(monkeypatch)


def batch_of(cache: PagedKVCache, *sizes: int, **options: Any) -> Any:
    kind: Any = LatentPagedBatch if isinstance(cache, LatentPagedKVCache) else PagedBatch
    return kind(cache, *sizes, **options)


def run(
    batch: Any, rope: Rope | None = None, heads: int = 2 * HEADS, *, forks: bool = False
) -> None:
    """A prompt of one sequence, and a step of all, which may be its forks."""
    cache, ids, at = batch.cache, range(BATCH), batch.cache.rows.layers[0]
    dims = at.k_format.head_dim, at.v_format.head_dim
    is_latent = isinstance(cache, LatentPagedKVCache)
    for name in ids[:1] if forks else ids:
        cache.allocate(name)
    for count, of in ((batch.max_tokens, ids[:1]), (1, ids)):
        total = count * len(of)
        rows = [torch.zeros(total, cache.num_kv_heads, n, dtype=torch.bfloat16) for n in dims]
        q = [torch.zeros(BATCH, heads, n, dtype=torch.bfloat16) for n in dims][: 1 + is_latent]
        own = rope and rope._replace(cos=rope.cos[:total], sin=rope.sin[:total])
        options = {} if is_latent else {"rope": own}
        with batch.extend(of, count):
            for layer in range(cache.num_layers):
                if count > 1:
                    batch.append(layer, *rows, **options)
                else:
                    batch.step(layer, *q, *rows, sm_scale=0.1, **options)
        for child in ids[1:] if forks and count > 1 else ():
            cache.fork(0, child)


@pytest.mark.extra("cuda")
@pytest.mark.parametrize("has_rope", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_what_is_launched_was_told(name: str, has_rope: bool, cuda: FakeDriver) -> None:
    rope = Rope(*torch.zeros(2, TOKENS, DIM // 4)) if has_rope else None
    cache = MAKERS[name]()
    rotary_dim = (DIM // 2, False) if has_rope else None
    calls = BatchCalls(PagedBatch, cache, torch.bfloat16, TOKENS, (BATCH,), rotary_dim)
    told = kernels_of([calls], runtime.gpu_of(CPU))
    assert not cuda.launched and not cache.ids
    run(PagedBatch(cache, BATCH, TOKENS), rope)
    assert cuda.launched and {*loaded_specs()} == {*told}


@pytest.mark.extra("cuda")
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("name", LATENTS)
def test_what_is_launched_of_latents_was_told(name: str, heads: int, cuda: FakeDriver) -> None:
    """Nobody said how many heads there are."""
    cache = LATENTS[name]()
    calls = BatchCalls(
        LatentPagedBatch, cache, torch.bfloat16, TOKENS, (BATCH,), shared_prefix=None
    )
    told = kernels_of([calls], runtime.gpu_of(CPU))
    assert not cuda.launched and not cache.ids
    run(batch_of(cache, BATCH, TOKENS), heads=heads)
    assert cuda.launched and {*loaded_specs()} <= {*told}


@pytest.mark.extra("cuda")
def test_the_first_append_compiles_what_steps_will_need_too(
    cuda: FakeDriver, compiled: list[Any]
) -> None:
    batch = PagedBatch(MAKERS["plain"](), BATCH, TOKENS)
    batch.cache.device, batch._is_cold = torch.device("cuda", 0), True
    run(batch)
    assert [type(spec).__name__ for spec in chain(*compiled)] == ["AppendSpec", "DecodeSpec"]
    assert {*loaded_specs()} <= {*chain(*compiled)} and not batch._is_cold


@pytest.mark.extra("cuda")
@pytest.mark.parametrize("by_step", [False, True])
def test_steps_with_a_variant_are_told(
    by_step: bool, cuda: FakeDriver, compiled: list[Any]
) -> None:
    """Where the first call is a step, the step tells the variant itself."""
    batch = PagedBatch(MAKERS["plain"](), BATCH, TOKENS)
    batch.cache.device, batch._is_cold = torch.device("cuda", 0), True
    batch._is_ragged_cold = True
    variant = AttentionVariant(soft_cap=30.0)
    k, v = torch.zeros(2, BATCH, HEADS, DIM, dtype=torch.bfloat16)
    q = torch.zeros(BATCH, 2 * HEADS, DIM, dtype=torch.bfloat16)
    batch.step_variant = None if by_step else variant
    for name in range(BATCH):
        batch.cache.allocate(name)
    for indptr in (None, batch.q_indptr):
        with batch.extend(range(BATCH)):
            for layer in range(3):
                if not by_step and indptr is None:
                    batch.append(layer, k, v)
                else:
                    batch.step(layer, q, k, v, variant=variant, q_indptr=indptr)
    decodes = [spec for spec in chain(*compiled) if isinstance(spec, DecodeSpec)]
    assert decodes and {spec.variant for spec in decodes} == {("soft_cap",)}
    assert {spec.ragged for spec in decodes} == {False, True}
    assert loaded_specs() and {*loaded_specs()} <= {*chain(*compiled)}


@pytest.mark.extra("cuda")
@pytest.mark.parametrize("name", MAKERS)
def test_the_first_ragged_queries_compile_what_all_steps_will_need(
    name: str, cuda: FakeDriver, compiled: list[Any]
) -> None:
    """Also where a sequence has more queries than in the first step."""
    cache, most = MAKERS[name](), 40 * BATCH
    batch = PagedBatch(cache, BATCH, most)
    cache.device, batch._is_ragged_cold = torch.device("cuda", 0), True
    for place in range(BATCH):
        cache.allocate(place)
    for counts in ([1] * BATCH, [2] * BATCH, [0] * (BATCH - 1) + [40], [40] * BATCH):
        with batch.extend(range(BATCH), counts):
            total, kind = sum(counts), torch.bfloat16
            k, v = torch.zeros(2, total, HEADS, DIM, dtype=kind)
            q = torch.zeros(total, 2 * HEADS, DIM, dtype=kind)
            for layer in range(cache.num_layers):
                batch.step(layer, q, k, v, q_indptr=batch.q_indptr)
        assert not batch._is_ragged_cold
    ragged = {spec for spec in loaded_specs() if getattr(spec, "ragged", False)}
    assert len(ragged) > 1 and {*loaded_specs()} <= {*chain(*compiled)}


@pytest.mark.extra("cuda")
@pytest.mark.parametrize(
    ("name", "heads"), [*((name, 2 * HEADS) for name in MAKERS), ("latents", 16), ("latents", 128)]
)
def test_steps_that_read_a_prefix_once_are_told(
    name: str, heads: int, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "is_rehearsed", lambda out: True)  # on the CPU as on CUDA
    cache = (MAKERS | LATENTS)[name]()
    batch = batch_of(cache, BATCH, 200, shared_prefix=True)
    calls = BatchCalls(type(batch), cache, torch.bfloat16, 200, (BATCH,), shared_prefix=True)
    told = kernels_of([calls], runtime.gpu_of(CPU))
    run(batch, heads=heads, forks=True)
    launched = loaded_specs()
    assert {*launched} <= {*told}
    if name in MAKERS:
        assert {type(spec) for spec in launched} >= {PrefixSpec, CombineSpec}
    else:
        assert any(spec.shared for spec in launched if isinstance(spec, MlaCombineSpec))


@pytest.mark.extra("cuda")
@pytest.mark.parametrize("shared", [False, None, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_kernels_of_fewer_sequences_are_told(arch: str, shared: bool | None) -> None:
    """A batch of few is cut into more parts, which another kernel combines."""
    cache = LatentPagedKVCache(1, 64, max_num_seqs=48, max_seq_len=16384)
    batch, given = LatentPagedBatch(cache, 48, 512), (LatentPagedBatch, cache, torch.bfloat16, 512)
    told, needed = (
        {*kernels_of([BatchCalls(*given, batches, shared_prefix=shared)], runtime.GPUS[arch])}
        for batches in (likely_batches(batch, 3), tuple(range(1, 49)))
    )
    assert needed == told
    assert len(told) > len({spec for spec in told if not isinstance(spec, MlaCombineSpec)}) + 1


@pytest.mark.extra("cuda")
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90"])
@pytest.mark.parametrize("shared", [None, True, False])
@pytest.mark.parametrize("max_seq_len, head_dim, heads", [(512, 64, 2), (16384, 128, 8)])
def test_every_size_of_block_is_told(
    max_seq_len: int, head_dim: int, heads: int, shared: bool | None, arch: str
) -> None:
    """All steps of up to 70 sequences, and up to 8 query heads on a KV head."""
    most, gpu = 70, runtime.GPUS[arch]
    cache = PagedKVCache(
        1, heads, head_dim, num_pages=8, max_num_seqs=most, max_seq_len=max_seq_len
    )
    calls = BatchCalls(PagedBatch, cache, torch.bfloat16, 40, (most,), shared_prefix=shared)
    told = kernels_of([calls], gpu)
    layer = cache.rows.layers[0]
    formats = PrefixSpec(layer.k_format, layer.v_format)
    units = heads * worth_splits(max_seq_len)
    rows = {
        members * ratio
        for members in range(2, most + 1)
        for ratio in range(1, 9)
        if shared or (shared is None and pays(members, max_seq_len, heads, ratio))
    }
    needed = {fit(formats, count, gpu.shared_per_block, units, gpu.sm_count) for count in rows}
    assert needed == {spec for spec in told if isinstance(spec, PrefixSpec)}
    assert len(needed) <= 3 and sum(isinstance(spec, CombineSpec) for spec in told) == bool(needed)
    assert bool(needed) == (shared is not False and (shared is True or max_seq_len > 512))
