"""What a cache will launch, told before it does. No GPU is needed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from example_plan import example_plan
from fake_cuda import CPU, FakeDriver, install_for_steps, loaded_specs, note_compiled
from latent_plans import random_basis

from kvquant import AttentionVariant, KVCache, LatentKVCache
from kvquant.cache import warmup
from kvquant.cache.warmup import Calls
from kvquant.errors import ShapeError
from kvquant.kernels.cuda.append.spec import AppendSpec
from kvquant.kernels.cuda.decode.spec import DecodeSpec
from kvquant.kernels.cuda.decode.wide.spec import WideSpec
from kvquant.kernels.cuda.mla.mma.spec import MlaSpec
from kvquant.kernels.cuda.mla.wgmma.spec import WideMlaSpec
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.kernels.cuda.runtime.warmup import kernels_of
from kvquant.rows.basis import Basis, LayerBasis
from kvquant.rows.variant import names_of

BATCH, HEADS, DIM, MAX = 2, 2, 64, 2048
PLAIN: dict[str, Any] = {"num_layers": 2, "num_kv_heads": HEADS, "head_dim": DIM}
IDENTITY = Basis(torch.zeros(1, 64))  # of RoPE parts
TURNED = Basis(torch.zeros(1, 512), torch.eye(512)[None])  # of latents
ROUNDED = Basis(torch.ones(HEADS, DIM), feedback=torch.zeros(HEADS, DIM, DIM))
MAKERS = {
    "plain": partial(KVCache, **PLAIN),
    "formats": partial(KVCache, **PLAIN, k_format=["int8", "fp8"], v_format="int4"),
    "exact": partial(KVCache, **PLAIN, k_format="bf16", v_format="bf16", sink_len=0, recent_len=0),
    "window": partial(KVCache, **PLAIN, windows=[256, None]),
    "plan": partial(KVCache.from_plan, example_plan(3, HEADS, DIM)),
    "feedback": partial(KVCache, **PLAIN, bases=[LayerBasis(ROUNDED, ROUNDED)] * 2),
    "fp16": partial(KVCache, **PLAIN, exact_format="fp16"),
}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The CPU as a GPU, for whole steps."""
    return install_for_steps(monkeypatch)


def rows(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.zeros(2, BATCH, HEADS, count, DIM, dtype=dtype)
    return k, v


def told_and_launched(
    make: Callable[..., Any], heads: int, cuda: FakeDriver, dtype: torch.dtype = torch.bfloat16
) -> tuple[set[Any], Any]:
    """Play a prompt, a step and one of three tokens in every layer: the specs, and the cache."""
    counts: dict[str, Any] = {"prompts": (700,), "steps": (1, 3)}
    calls = Calls(partial(make, device="meta"), dtype, heads, **counts)
    told = {*kernels_of([calls], runtime.gpu_of(CPU))}
    assert not cuda.launched and not loaded_specs(), "a rehearsal launches nothing"
    cache = make()
    for layer, at in enumerate(cache.layers):
        dims = at.k_format.head_dim, at.v_format.head_dim
        for count in (700, 1, 3):
            shape = BATCH, cache.num_kv_heads, count
            k, v = (torch.zeros(*shape, n, dtype=dtype) for n in dims)
            axes = (BATCH, heads) if count == 1 else (BATCH, count, heads)
            q = [torch.zeros(*axes, n, dtype=dtype) for n in dims][: 1 + cache.latent]
            if count == 700:
                cache.append(layer, k, v)
            else:
                cache.step(layer, *q, k, v, sm_scale=1.0)
    pays = {spec for spec in told if isinstance(spec, WideSpec)}  # only with larger batches
    assert len(cuda.launched) >= 6 and {*loaded_specs()} == told - pays
    return told, cache


@pytest.mark.extra("cuda")
@pytest.mark.parametrize("ratio", [4, 16])
@pytest.mark.parametrize("name", MAKERS)
def test_what_is_launched_was_told(name: str, ratio: int, cuda: FakeDriver) -> None:
    dtype = torch.float16 if name == "fp16" else torch.bfloat16
    make = partial(MAKERS[name], batch=BATCH, max_seq_len=MAX)
    told_and_launched(make, ratio * HEADS, cuda, dtype)


@pytest.mark.extra("cuda")
@pytest.mark.parametrize(
    "variant",
    [
        AttentionVariant(soft_cap=30.0),
        AttentionVariant(sink_logits=torch.zeros(4 * HEADS), window=64),
        AttentionVariant(alibi_slopes=torch.zeros(4 * HEADS)),
    ],
    ids=["soft cap", "sinks and window", "slopes"],
)
def test_steps_with_a_variant_are_told(variant: AttentionVariant, cuda: FakeDriver) -> None:
    def make(device: str = "cpu") -> KVCache:
        cache = KVCache(**PLAIN, batch=BATCH, max_seq_len=MAX, device=device)
        cache.num_q_heads, cache.step_variant = 4 * HEADS, variant
        return cache.like(BATCH, device)

    calls = Calls(partial(make, "meta"), torch.bfloat16, prompts=(700,))
    told = kernels_of([calls], runtime.gpu_of(CPU))
    cache, q = make(), torch.zeros(BATCH, 4 * HEADS, DIM, dtype=torch.bfloat16)
    cache.append(0, *rows(700, torch.bfloat16))
    cache.step(0, q, *rows(1, torch.bfloat16), variant=variant)
    assert {*loaded_specs()} == {*told}
    (decode,) = (spec for spec in told if isinstance(spec, DecodeSpec))
    assert decode.variant == names_of(variant)


LATENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {"recent_len": 0, "sink_len": 0},
    "fp8": {"fmt": "fp8"},
    "fp8 bases": {"fmt": "fp8", "bases": [random_basis(512, 64)] * 2},
    "bases": {"bases": [random_basis(512, 64)] * 2},
    "one basis": {"bases": [LayerBasis(TURNED, IDENTITY)] * 2},
}


@pytest.mark.extra("cuda")
@pytest.mark.parametrize(("heads", "room"), [(16, MAX), (128, MAX), (128, 70_000)])
@pytest.mark.parametrize("options", LATENTS.values(), ids=LATENTS)
def test_what_a_cache_of_latents_launches_was_told(
    heads: int, room: int, options: dict[str, Any], cuda: FakeDriver
) -> None:
    make = partial(LatentKVCache, 2, BATCH, room, **options)
    told, cache = told_and_launched(make, heads, cuda)
    assert any(isinstance(spec, WideMlaSpec) for spec in told) == (room > MAX)

    def make_varied() -> LatentKVCache:
        made = make(device="meta")
        made.step_variant = AttentionVariant(soft_cap=3.0)  # which a step of latents refuses
        return made

    calls = Calls(make_varied, torch.bfloat16, heads, prompts=(700,), steps=(1, 3))
    varied = kernels_of([calls], runtime.gpu_of(CPU))
    attending = {spec for spec in told if isinstance(spec, (MlaSpec, WideMlaSpec))}
    assert attending and attending <= {*varied}
    guessed = kernels_of([Calls(partial(make, device="meta"), torch.bfloat16)], runtime.gpu_of(CPU))
    plain = {spec for spec in told if isinstance(spec, (MlaSpec, WideMlaSpec)) and not spec.causal}
    assert plain <= {*guessed}, "where nobody said how many heads there are"
    cache.num_q_heads = heads
    for one in (cache, cache.like(BATCH, "cpu")):
        assert warmup.likely_q_heads(one) == (heads,)


@pytest.mark.extra("cuda")
@pytest.mark.parametrize("name", MAKERS)
def test_a_prompt_that_fills_the_cache_is_rehearsed(name: str, cuda: FakeDriver) -> None:
    dtype = torch.float16 if name == "fp16" else torch.bfloat16
    make, gpu = partial(MAKERS[name], batch=BATCH, max_seq_len=700), runtime.gpu_of(CPU)
    told = kernels_of([Calls(partial(make, device="meta"), dtype, prompts=(700,))], gpu)
    cache = make()
    for layer in range(cache.num_layers):
        cache.append(layer, *rows(700, dtype))
    cache.crop(690)
    for layer in range(cache.num_layers):
        cache.step(layer, torch.zeros(BATCH, HEADS, DIM, dtype=dtype), *rows(1, dtype))
    assert loaded_specs() and {*loaded_specs()} <= {*told}


def test_a_prompt_without_room_is_left_to_the_append(cuda: FakeDriver) -> None:
    make, gpu = partial(KVCache, **PLAIN, batch=BATCH, max_seq_len=699), runtime.gpu_of(CPU)
    kernels_of([Calls(partial(make, device="meta"), torch.bfloat16, prompts=(700,))], gpu)
    with pytest.raises(ShapeError, match="would grow to 700 tokens"):
        make().append(0, *rows(700, torch.bfloat16))


def test_calls_that_are_not_possible_need_no_kernels(cuda: FakeDriver) -> None:
    make = partial(KVCache, 1, BATCH, HEADS, DIM, MAX, device="meta")
    assert kernels_of([Calls(make, torch.int32)], runtime.gpu_of(CPU)) == []
    told = kernels_of([Calls(make, torch.bfloat16, 3, prompts=(4,))], runtime.gpu_of(CPU))
    assert not any(isinstance(spec, DecodeSpec) for spec in told)
    assert any(isinstance(spec, AppendSpec) for spec in told)


@pytest.mark.extra("cuda")
def test_the_first_append_compiles_what_steps_will_need_too(
    cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = note_compiled(monkeypatch)

    def make_cold() -> KVCache:
        cache = KVCache(1, BATCH, HEADS, DIM, MAX)
        gpu = torch.device("cuda", 0)
        cache._counters = {gpu: cache.counters_of(0)}
        cache.devices, cache.is_cold = [gpu], True
        return cache

    cache, other = make_cold(), make_cold()
    with caplog.at_level(logging.WARNING, "kvquant"):
        cache.append(0, *rows(5, torch.bfloat16))
        cache.append(0, *rows(6, torch.bfloat16))
        other.append(0, *rows(5, torch.bfloat16))
    (specs,) = compiled
    assert [type(spec).__name__ for spec in specs] == ["SlotSpec", "AppendSpec", "DecodeSpec"]
    assert len(caplog.records) == 1 and "compiling 3 kernels for sm_90" in caplog.text
    q = torch.zeros(BATCH, HEADS, DIM, dtype=torch.bfloat16)
    make_cold().step(0, q, *rows(1, torch.bfloat16))
    assert len(compiled) == 2 and {*loaded_specs()} <= {*specs, *compiled[1]}
    with pytest.raises(ValueError, match="k is"):
        make_cold().append(0, torch.zeros(3), torch.zeros(3))
    assert len(compiled) == 2
    drafting = make_cold()
    drafting.step_lens = 1, 2, 5
    drafting.append(0, *rows(5, torch.bfloat16))
    drafting.step(0, q[:, None].expand(-1, 5, -1, -1), *rows(5, torch.bfloat16))
    assert {*loaded_specs()} <= {spec for some in compiled for spec in some}
    assert len(compiled) == 3 and any(getattr(spec, "causal", False) for spec in compiled[2])
    made = make_cold()
    made.append(0, *rows(5, torch.bfloat16))
    monkeypatch.setattr(KVCache, "_taken", lambda self, chosen: make_cold())
    made.select([0] * BATCH)
    assert made.is_cold, "another batch has other kernels"
    silent = make_cold()
    silent.step_lens = ()
    silent.append(0, *rows(5, torch.bfloat16))
    assert not any(isinstance(spec, DecodeSpec) for spec in compiled[3])
