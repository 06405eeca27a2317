"""KVCache: what a token's row is, when it is written, and that a refused call changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from relative_l2 import relative_l2
from torch._dynamo.testing import CompileCounter
from torch_operations import Operations
from variant_cases import by_hand

from kvquant import KVCache, RowFormat, debug, dequantize_rows, quantize_rows
from kvquant.cache import layer as layers
from kvquant.cache import memory
from kvquant.errors import ConfigError, NonFiniteError, ShapeError

BATCH, HEADS, DIM, MAX = 3, 2, 64, 40
ROWS = {"k_format": "int4-g4", "v_format": "int8"}


def make(**options: Any) -> KVCache:
    """A small cache: 2 layers, 3 sinks, 5 recent tokens, 32 packed ones."""
    options = {"sink_len": 3, "recent_len": 5, **ROWS, **options}
    return KVCache(options.pop("num_layers", 2), BATCH, HEADS, DIM, MAX, **options)


def tokens(count: int, *, dim: int = DIM) -> torch.Tensor:
    return torch.randn(BATCH, HEADS, count, dim)


def everything(cache: KVCache) -> list[torch.Tensor]:
    """Copies of all bytes of a cache."""
    tensors = [tensor for layer in cache.layers for tensor in layer.tensors().values()]
    return [tensor.clone() for tensor in [cache.start_positions, *tensors]]


def unchanged(cache: KVCache, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(everything(cache), before, strict=True))


def expected(
    x: torch.Tensor, fmt: str, sink_len: int, recent_len: int, exact: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """What tokens x [heads, tokens, dim] of one sequence, never cropped, come back as."""
    row_format = RowFormat.parse(fmt, x.shape[-1])
    if not sink_len and not recent_len:
        return dequantize_rows(quantize_rows(x, row_format), row_format)
    x = x.to(exact)
    packed = dequantize_rows(quantize_rows(x, row_format), row_format)
    last = max(x.shape[1] - recent_len, sink_len)
    return torch.cat([x[:, :sink_len].float(), packed[:, sink_len:last], x[:, last:].float()], 1)


@pytest.mark.parametrize("sink_len", [0, 3, 60])
@pytest.mark.parametrize("recent_len", [0, 1, 5, 60])
@pytest.mark.parametrize("exact_format", ["bf16", "fp16"])
def test_tokens_come_back_exact_at_both_ends_and_quantized_between(
    sink_len: int, recent_len: int, exact_format: str
) -> None:
    """Of formats that differ by layer, and between K and V."""
    v_formats = [RowFormat.parse(name, 96) for name in ("fp8-g2", "int3", "int2")]
    options: dict[str, Any] = {"k_format": ["int4", RowFormat.parse("int8-g4", DIM), "bf16"]}
    options |= {"sink_len": sink_len, "recent_len": recent_len, "exact_format": exact_format}
    cache = make(num_layers=3, v_format=v_formats, **options)
    k, v = tokens(MAX), tokens(MAX, dim=96)
    exact = torch.bfloat16 if exact_format == "bf16" else torch.float16
    for layer, formats in enumerate([("int4", "fp8-g2"), ("int8-g4", "int3"), ("bf16", "int2")]):
        at = cache.layers[layer]
        assert (str(at.k_format), str(at.v_format)) == formats
        cache.append(layer, k, v, [MAX, 7, 0])
        for x, fmt, got in zip((k, v), formats, cache.dequantized(layer), strict=True):
            assert got.shape == (BATCH, HEADS, MAX, x.shape[-1])
            for b, count in enumerate((MAX, 7, 0)):
                values = expected(x[b, :, :count], fmt, sink_len, recent_len, exact)
                assert torch.equal(got[b, :, :count], values)
                assert not got[b, :, count:].any()
    assert cache.seq_lens.tolist() == [MAX, 7, 0]
    assert cache.seq_lens.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_input_of_any_float_dtype_and_stride_is_taken(dtype: torch.dtype) -> None:
    k, v = tokens(20).to(dtype), tokens(20).to(dtype)
    cache, other = make(), make()
    cache.append(0, k, v)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v.float())]
    other.append(0, *strided)  # of two dtypes
    assert unchanged(other, everything(cache))
    grad = make()
    grad.append(0, k.clone().requires_grad_(), v.clone().requires_grad_())
    assert unchanged(grad, everything(cache))


def test_padding_behind_new_lens_may_hold_anything() -> None:
    k, v = tokens(9), tokens(9)
    counts = [9, 4, 0]
    clean, dirty = make(), make()
    clean.append(0, k, v, counts)
    for b, count in enumerate(counts):
        k[b, :, count:], v[b, :, count:] = torch.nan, torch.inf
    dirty.append(0, k, v, torch.tensor(counts))
    assert unchanged(dirty, everything(clean))


@pytest.mark.parametrize("lengths", [(3, 5), (0, 0), (3, 0), (0, 5), (60, 60)], ids=str)
def test_attend_sees_all_tokens(lengths: tuple[int, int]) -> None:
    cache = make(sink_len=lengths[0], recent_len=lengths[1])
    q = torch.randn(BATCH, 4, DIM)
    for counts in ([0, 0, 0], [2, 0, 9], [1, 1, 1], [9, 4, 0], [5, 9, 9]):
        cache.append(0, tokens(9), tokens(9), counts)
        result = cache.attend(0, q, return_lse=True, sm_scale=0.2)
        lens = cache.layers[0].seq_lens.tolist()
        out, lse = by_hand(q[:, None], *cache.dequantized(0), lens, [1] * BATCH, scale=0.2)
        for b, found in enumerate(result[0]):
            assert relative_l2(found, out[b, 0]) < 1e-5
        torch.testing.assert_close(result[1].double(), lse[:, 0], rtol=1e-5, atol=1e-5)


def test_lengths_may_be_numbers_of_numpy() -> None:
    number: Any = np.int64
    cache = KVCache(*map(number, (1, BATCH, HEADS, DIM, MAX)), sink_len=number(3))
    assert type(cache.max_seq_len) is type(cache.sink_len) is int
    cache.append(number(0), tokens(9), tokens(9), number([9, 4, 2]))
    cache.crop(number(5))
    assert cache.seq_lens.tolist() == [5, 4, 2]


def test_select_keeps_sequences_in_place() -> None:
    cache = make()
    cache.append(0, tokens(20), tokens(20))
    cache.start_positions[:] = torch.tensor([5, 6, 7])
    cache.bad_rows[0] = 3
    wanted, changes = cache.fork([2, 0, 0, 1]), cache.changes
    cache.select([2, 0, 0, 1])
    assert cache.batch == 4 and cache.start_positions.tolist() == [7, 5, 5, 6]
    assert unchanged(cache, everything(wanted)) and cache.changes == changes + 1
    assert cache.bad_rows.tolist()[0] == 3  # what check has to tell is not forgotten


def held(cache: KVCache) -> list[torch.Tensor]:
    tensors = [tensor for layer in cache.layers for tensor in layer.tensors().values()]
    return [cache.start_positions, cache.bad_rows, cache.overflow_tokens, *tensors]


@pytest.mark.parametrize("lengths", [(3, 5), (0, 0), (60, 60)], ids=str)
def test_nbytes_is_what_the_storages_hold(lengths: tuple[int, int]) -> None:
    cache = make(sink_len=lengths[0], recent_len=lengths[1], k_format=["int4-g4", "fp8"])

    def true_bytes() -> int:
        storages = [tensor.untyped_storage() for tensor in held(cache)]
        return sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}.values())

    assert cache.nbytes == true_bytes()
    cache.append(0, tokens(20), tokens(20))
    cache.reorder([1, 1, 0])
    cache.crop(0)
    assert cache.nbytes == true_bytes()
    sinks = min(lengths[0], MAX)
    recent = min(lengths[1], MAX - sinks)
    rows = {"int4-g4": 48, "fp8": 68, "int8": 68, "bf16": 128}
    per_token = [rows["int4-g4"] + rows["int8"], rows["fp8"] + rows["int8"]]
    packed = (64 if recent < MAX - sinks else 0) * sum(per_token)  # see rows/spacing.py
    rollback = min(64, MAX - sinks - recent) if recent else 0
    exact = 2 * (sinks + recent + rollback) * 2 * rows["bf16"]
    assert cache.nbytes == BATCH * HEADS * (packed + exact) + BATCH * (8 + 2 * 4 * 5) + 3 * 4


@pytest.mark.parametrize("lengths", [(3, 5), (0, 0), (3, 0), (0, 5)], ids=str)
@pytest.mark.parametrize("exact_format", ["bf16", "fp16"])
@pytest.mark.parametrize("limit", [65504.0, 65408.0, -65504.0, -65280.0])
def test_a_value_that_is_taken_never_turns_into_nan(
    limit: float, exact_format: str, lengths: tuple[int, int]
) -> None:
    """Float32 65504 is 65536 in bf16: refused at once, or held for good."""
    cache = make(sink_len=lengths[0], recent_len=lengths[1], exact_format=exact_format)
    k = tokens(20)
    k[0, 1, 4, 5] = limit
    try:
        cache.append(0, k, k)
    except NonFiniteError:
        assert exact_format == "bf16"
        assert abs(limit) > 65280
        return
    cache.append(0, tokens(20), tokens(20))
    assert bool(cache.dequantized(0)[0].isfinite().all())


MOVES: dict[str, Callable[[KVCache], object]] = {
    "reorder": lambda cache: cache.reorder([2, 0, 0]),
    "fork": lambda cache: cache.fork([1, 1]),
    "repeat": lambda cache: cache.repeat(2),
    "crop": lambda cache: cache.crop(28),
    "dequantized": lambda cache: cache.dequantized(0),
    "reset": lambda cache: cache.reset(),
}


def test_sequences_move_at_the_cost_of_their_tokens() -> None:
    """Not of the room that there is: a beam search moves them in every step."""
    work: dict[int, dict[str, int]] = {}
    for room in (10_000, 1_000_000):
        cache = KVCache(2, BATCH, HEADS, DIM, room, sink_len=2, recent_len=4, windows=[None, 9])
        for layer in (0, 1):
            cache.append(layer, tokens(30), tokens(30))
        assert cache.nbytes > room * BATCH * HEADS * 2 * 40  # there is as much memory
        work[room] = {}
        for name, call in MOVES.items():
            with Operations() as counted:
                call(cache)
            work[room][name] = sum(counted.sizes)
    assert work[10_000] == work[1_000_000]
    rows = 2 * BATCH * HEADS * (30 * 40 + 70 * 128 + 30 * 40 + 68 * 128)  # both layers and sides
    assert work[10_000]["reorder"] < 4 * rows and work[10_000]["crop"] < 200


@pytest.mark.parametrize("window", [None, 9])
def test_moved_sequences_are_whole(window: int | None) -> None:
    """Whatever is not copied is not read: also in a ring that went round, and after a crop."""
    cache = KVCache(1, BATCH, HEADS, DIM, 700, sink_len=2, recent_len=4, windows=[window])
    cache.append(0, tokens(640), tokens(640), [640, 30, 0])
    cache.start_positions.copy_(torch.tensor([5, 6, 7]))
    for crop in (None, [640, 30, 0], [630, 20, 0]):
        if crop:
            cache.crop(crop)
        q = torch.randn(BATCH, 4, DIM)
        whole, values = cache.attend(0, q), cache.dequantized(0)
        for index in ([2, 1, 0], [0, 0, 0], [1, 2, 2]):
            other = cache.fork(index)
            assert torch.equal(other.attend(0, q[index]), whole[index])
            for mine, theirs in zip(other.dequantized(0), values, strict=True):
                assert torch.equal(mine, theirs[index][:, :, : mine.shape[2]])
            assert other.start_positions.tolist() == [5 + place for place in index]
            again = cache.fork()
            again.reorder(index)
            for one in (other, again):
                one.append(0, tokens(3), tokens(3))
            assert torch.equal(again.layers[0].seq_lens, other.layers[0].seq_lens)
    cache.crop([640 - 10, 20, 0])
    cache.append(0, tokens(60), tokens(60))
    assert cache.fork().seq_lens.tolist() == cache.seq_lens.tolist()


def test_large_rooms_are_free_until_they_are_used() -> None:
    with Operations() as counted:
        cache = KVCache(2, 1, HEADS, DIM, 1 << 20)
    assert sum(counted.sizes) < 1e6 < 1e8 < cache.nbytes
    assert not cache.layers[1].k_packed[0, 1, -100:].any()


def test_the_largest_length_is_not_passed() -> None:
    """Lengths are int32, and their sums are not."""
    most = 2**31 - 1
    cache = KVCache(1, 1, 1, DIM, most, sink_len=0, recent_len=0, windows=[1])
    layer = cache.layers[0]
    layer.begin(torch.tensor([most - 1]), torch.tensor([most - 1]))
    x = torch.randn(1, 1, 2, DIM)
    with pytest.raises(ShapeError, match=f"sequence 0 would grow to {most + 1} tokens"):
        cache.append(0, x, x)
    cache.append(0, x[:, :, :1], x[:, :, :1])
    for count in (1, 2):
        with pytest.raises(ShapeError, match=f"would grow to {most + count} tokens"):
            cache.append(0, x[:, :, :count], x[:, :, :count])
    assert cache.seq_lens.tolist() == [most] and cache.positions.tolist() == [most]
    assert bool(cache.attend(0, torch.ones(1, 1, DIM)).any())
    assert cache.fork([0]).seq_lens.tolist() == [most]
    cache.crop(most - 1)
    cache.append(0, x[:, :, 1:], x[:, :, 1:])


NO_TOKENS: dict[str, Callable[[KVCache], object]] = {
    "appended to another layer": lambda cache: None,
    "a fork": lambda cache: cache.fork([0, 2]),
    "grown": lambda cache: cache.grow(2 * MAX),
    "reset": lambda cache: filled(cache).reset(),
    "cropped": lambda cache: filled(cache).crop(0),
    "no new tokens": lambda cache: cache.append(1, tokens(0), tokens(0)),
}


def filled(cache: KVCache) -> KVCache:
    cache.append(1, tokens(9), tokens(9))
    return cache


@pytest.mark.parametrize("how", NO_TOKENS)
@pytest.mark.parametrize("windows", [None, [None, 7]], ids=["whole", "window"])
def test_attention_to_a_layer_without_tokens_is_refused(how: str, windows: Any) -> None:
    cache = make(windows=windows)
    cache.append(0, tokens(4), tokens(4))
    made = NO_TOKENS[how](cache)
    cache = made if isinstance(made, KVCache) else cache
    for q in (torch.ones(cache.batch, 4, DIM), torch.ones(cache.batch, 2, 4, DIM)):
        with pytest.raises(ShapeError, match="layer 1 holds no tokens: append to it first"):
            cache.attend(1, q)
    cache.step(1, torch.ones(cache.batch, 4, DIM), *torch.ones(2, cache.batch, HEADS, 1, DIM))
    assert cache.attend(1, torch.ones(cache.batch, 4, DIM)).any()


def test_what_is_recorded_may_attend_before_tokens_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is captured, or compiled, while the cache is empty."""
    cache, q = make(), torch.ones(BATCH, 4, DIM)
    with monkeypatch.context() as patch:
        patch.setattr(debug, "is_recorded", lambda tensor: True)
        assert not cache.attend(0, q).any()
    counter = CompileCounter()
    compiled = torch.compile(lambda q: cache.attend(0, q), fullgraph=True, backend=counter)
    assert not compiled(q).any()
    for _ in range(2):
        cache.append(0, tokens(3), tokens(3))
        assert torch.equal(compiled(q), cache.attend(0, q))
    assert counter.frame_count == 1


def test_more_than_the_memory_is_refused_before_any_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system would give it, and end the process when it is used."""
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 29)
    taken = []
    monkeypatch.setattr(layers, "zero_rows", lambda *of: taken.append(of))
    sizes: list[tuple[int, int, int, int, int]]
    sizes = [(4, 2, 2, 64, 1 << 22), (1, 1, 1, 64, 1 << 24), (9, 1 << 22, 1, 64, 0)]
    for shape in sizes:
        with pytest.raises(ConfigError, match=r"a cache of .* GiB, more than there is: use a sma"):
            KVCache(*shape)
    assert not taken
