"""The caller's settings of torch (defaults, modes, autocast) change nothing, and stay the same."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from attend import attend_shared
from invariants import check_invariants
from paged_cases import SINKS, make
from torch_settings import SETTINGS, settings

from kvquant import (
    KVCache,
    RowFormat,
    Slots,
    append_rows,
    decode_attention,
    dequantize_pages,
    dequantize_rows,
    load_cache,
    merge_states,
    quantize_rows,
    reference_attention,
    save_cache,
    slots_of,
)
from kvquant.errors import NonFiniteError
from kvquant.io.inspect import describe
from kvquant.io.sequences import load_sequences, save_sequences
from kvquant.paged.batch import PagedBatch
from kvquant.paged.cache import PagedKVCache
from kvquant.rows.basis import Basis, LayerBasis
from kvquant.rows.quantize import feedback_matrix
from kvquant.rows.rotation import Rope
from kvquant.rows.segment import Segment

BATCH, HEADS, DIM = 2, 2, 64
Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")


def draw(*shape: int, seed: int) -> torch.Tensor:
    """Numbers that no setting changes."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=CPU)


def bases() -> list[LayerBasis]:
    matrix = torch.eye(DIM, dtype=torch.float32, device=CPU) + 0.1 * draw(HEADS, DIM, DIM, seed=1)
    feedback = feedback_matrix(matrix.double() @ matrix.double().mT).float()
    clip = torch.full((HEADS,), 0.9, dtype=torch.float32, device=CPU)
    offset = draw(HEADS, DIM, seed=2)
    turned = Basis(offset, matrix, clip, feedback)
    return [LayerBasis(Basis(offset), Basis(offset)), LayerBasis(turned, turned)]


def play(folder: Path, found: Tensors, matrices: list[LayerBasis] | None) -> None:
    """All that a cache does, and the calls below it; what comes is put into found."""

    def keep(name: str, *tensors: torch.Tensor) -> None:
        for i, tensor in enumerate(tensors):
            assert not tensor.requires_grad, name
            found[f"{name} {i}"] = tensor.clone()

    options: dict[str, Any] = {"v_format": "int8", "sink_len": 1, "recent_len": 3, "device": "cpu"}
    options |= {"exact_format": "fp16", "bases": matrices}
    options["windows"] = None if matrices else [None, 5]
    cache = KVCache(2, BATCH, HEADS, DIM, 24, **options)
    q = draw(BATCH, 4, DIM, seed=3).requires_grad_()

    def attend(name: str, one: KVCache = cache) -> None:
        for backend in ("cpu", "reference"):
            for layer, dtype in enumerate((torch.float32, torch.float16)):
                states = one.attend(layer, q, return_lse=True, backend=backend)
                keep(f"{name} {backend} {layer}", *states, *one.dequantized(layer, dtype))

    def append(one: KVCache, count: int, seed: int, lens: list[int] | None = None) -> None:
        for layer in (0, 1):
            k, v = draw(2, BATCH, HEADS, count, DIM, seed=seed + layer).requires_grad_()
            one.append(layer, k, v.bfloat16() if seed % 2 else v, lens)

    append(cache, 9, 10)
    append(cache, 4, 21, [4, 0])
    append(cache, 1, 30)
    attend("grown")
    keep("lengths", cache.seq_lens, cache.positions)
    save_cache(cache, folder / "cache.safetensors")
    # the bases of a loaded cache come from a plan, which has files of its own
    loaded = cache.fork() if matrices else load_cache(folder / "cache.safetensors")
    append(loaded, 3, 40)
    attend("loaded", loaded)
    loaded.crop([16, 12])
    loaded.reorder([1, 0])
    attend("cropped", loaded)
    attend("repeated", loaded.fork([1]).repeat(2))
    loaded.crop(14)
    append(loaded, 2, 50)
    attend("again", loaded)
    loaded.reset()
    loaded.check()
    append(loaded, 2, 60)
    attend("anew", loaded)


def play_calls(found: Tensors) -> None:
    """The calls that need no cache."""
    x = draw(BATCH, HEADS, 6, DIM, seed=4).requires_grad_()
    q = draw(BATCH, 4, DIM, seed=5).requires_grad_()
    lens = torch.tensor([6, 2], dtype=torch.int32, device=CPU)
    formats = {name: RowFormat.parse(name, DIM) for name in ("int4-g4", "int8", "fp8", "bf16")}
    results: list[torch.Tensor] = []
    for fmt in formats.values():
        for backend in ("cpu", "reference"):
            rows = quantize_rows(x, fmt, backend=backend)
            results += [rows, dequantize_rows(rows, fmt, backend=backend)]
    int4, int8 = formats["int4-g4"], formats["int8"]
    k, v = quantize_rows(x, int4), quantize_rows(x, int8)
    for attend in (decode_attention, reference_attention):
        out, lse = attend(q, k, v, lens, k_format=int4, v_format=int8, return_lse=True)
        with torch.enable_grad():
            trained = out.clone().requires_grad_(), lse.clone().requires_grad_()
        results += [out, lse, *merge_states((out, lse), trained)]
    own = Segment(k, v, lens, int4, int8)
    prefix = Segment(k[:1], v[:1], lens[:1], int4, int8)
    members = torch.tensor([1, -1], device=CPU)
    results += attend_shared(q, prefix, [own], members=members, return_lse=True)
    found_slots = slots_of(lens, lens - lens, None, 3, 8, sink_len=2, recent_len=4)
    results += [slots for slots in found_slots if slots is not None]
    moved = Basis(torch.ones(HEADS, DIM, dtype=torch.float32, device=CPU))
    slots = torch.arange(6, device=CPU)
    for backend in ("cpu", "reference"):
        for given in (None, moved, bases()[1].k):
            pages = torch.zeros(2, 1, HEADS, 6, int4.row_bytes, dtype=torch.uint8, device=CPU)
            bad = torch.zeros(2, dtype=torch.int32, device=CPU)
            new = x[0].transpose(0, 1).clone()
            options: Any = {"k_transform": given, "bad": bad, "backend": backend}
            spoiled = new * float("nan")
            append_rows(new, spoiled, pages[0], pages[1], Slots(slots), int4, int4, **options)
            results += [*pages, bad, dequantize_pages(pages[0], int4, slots, torch.float16)]
    for i, result in enumerate(results):
        assert not result.requires_grad
        found[f"call {i}"] = result.clone()


def play_pages(folder: Path, tensors: Tensors, matrices: list[LayerBasis] | None) -> None:
    """All that a paged cache does."""
    found: list[torch.Tensor] = []

    def new() -> PagedKVCache:
        return make(num_pages=30, max_num_seqs=6, device="cpu", bases=matrices)

    cache = new()
    batch = PagedBatch(cache, 4, 120, shared_prefix=True)

    def step(at: PagedBatch, ids: list[str], count: int, seed: int, bad: bool = False) -> None:
        tokens = [token for _ in ids for token in range(seed, seed + count)]
        with at.extend(ids, count, tokens):
            for layer in range(2):
                k, v = draw(2, len(tokens), HEADS, DIM, seed=seed + layer).requires_grad_()
                if bad:
                    k = k.detach().clone()
                    k[2, 0, 3] = float("nan")
                angles = draw(len(tokens), DIM // 2, seed=3)
                rope = Rope(angles.cos(), angles.sin()) if seed % 2 else None
                at.append(layer, k, v.bfloat16().to(k.dtype), rope=rope)
                q = draw(4, 4, DIM, seed=layer).requires_grad_()
                found.extend(at.attend(layer, q, return_lse=True))
                found.extend(at.cache.dequantized(ids[0], layer, torch.float16))

    cache.allocate("a", range(60))
    step(batch, ["a"], 60, 0)
    present = cache.allocate("b", range(60))
    assert present > SINKS
    step(batch, ["b"], 60 - present, present)
    cache.fork("a", "c")
    step(batch, ["a", "b", "c"], 3, 7)
    cache.truncate("c", 40)
    cache.swap_out("a")
    step(batch, ["c", "b"], 1, 8)
    cache.swap_in("a")
    path = save_sequences(cache, ["a", "b", "c"], folder / "saved.safetensors")
    assert describe(path)["pages"] > 0
    other = PagedBatch(new(), 4, 120)
    load_sequences(other.cache, path)
    step(other, ["a", "b"], 5, 9)
    cache.allocate("bad")
    step(batch, ["bad"], 30, 11, bad=True)
    with pytest.raises(NonFiniteError, match="rows of K"):
        cache.check()
    cache.fork("bad", "too")
    cache.free("bad")
    for at in (cache, other.cache):
        check_invariants(at)
    for i, tensor in enumerate([*found, cache.bad_rows]):
        assert not tensor.requires_grad
        tensors[f"pages {i}"] = tensor.clone()


def play_all(folder: Path, found: tuple[Tensors, Tensors, Tensors]) -> None:
    for play_one in (play, play_pages):
        play_one(folder, found[0], None)
        play_one(folder, found[1], bases())
    play_calls(found[2])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensors, Tensors, Tensors]:
    """What comes without any setting."""
    found: tuple[Tensors, Tensors, Tensors] = ({}, {}, {})
    play_all(tmp_path_factory.mktemp("plain"), found)
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_results_are_those_without_the_setting(
    name: str, plain: tuple[Tensors, Tensors, Tensors], tmp_path: Path
) -> None:
    found: tuple[Tensors, Tensors, Tensors] = ({}, {}, {})
    with SETTINGS[name]():
        before = settings()
        play_all(tmp_path, found)
        assert settings() == before
    for mine, expected in zip(found, plain, strict=True):
        assert mine.keys() == expected.keys()
        for key, tensor in mine.items():
            assert tensor.dtype == expected[key].dtype and tensor.device == CPU, key
            assert torch.equal(tensor, expected[key]) or tensor.is_floating_point(), key
            torch.testing.assert_close(tensor, expected[key], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("inside", ["made", "used"])
def test_caches_cross_the_border_of_inference_mode(inside: str) -> None:
    """Torch refuses changes, outside, of tensors that were made inside."""
    modes = [torch.inference_mode, contextlib.nullcontext]
    made_in, used_in = modes if inside == "made" else reversed(modes)
    k, v = draw(2, BATCH, HEADS, 9, DIM, seed=6)
    found = []
    for make_in, use_in in ((contextlib.nullcontext, contextlib.nullcontext), (made_in, used_in)):
        with make_in():
            cache = KVCache(1, BATCH, HEADS, DIM, 24, recent_len=3, bases=bases()[:1])
            cache.append(0, k, v)
        with use_in():
            cache.append(0, k, v, [3, 5])
            cache.crop([8, 11])
            cache.reorder([1, 0])
            other = cache.fork()
        with make_in():
            other.append(0, k, v)
            cache.reset()
            found.append((*other.attend(0, k[:, :, 0], return_lse=True), other.seq_lens))
            cache.check()
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)
