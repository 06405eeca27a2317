"""KVCache.append where values are not read: on a GPU, in graphs, under torch.compile (10 s)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import install
from slow_cases import mark_slow
from small_caches import BATCH, DIM, HEADS, MAX, assert_same, make, tokens
from torch_operations import Operations

from kvquant import KVCache, debug
from kvquant.cache import layer
from kvquant.errors import ConfigError, NonFiniteError, ShapeError
from kvquant.ops import append as append_ops
from kvquant.rows.basis import Basis, LayerBasis


def bases() -> list[LayerBasis]:
    offset = torch.randn(HEADS, DIM)
    return [LayerBasis(Basis(offset), Basis(-offset))] * 2


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU as a GPU whose values are not read."""
    monkeypatch.setattr(debug, "may_read", lambda values: False)


def test_nothing_is_read_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the meta device have no values: reading one raises."""
    appended: list[Any] = []
    monkeypatch.setattr(layer, "write_rows", lambda call, **options: appended.append(call.slots))
    monkeypatch.setattr("kvquant.cache.contiguous.check_holds", lambda device: None)
    placed = SimpleNamespace(place_tokens=lambda *given: None)
    monkeypatch.setattr("kvquant.ops.slots._launcher", lambda room: placed)
    cache = make("meta")
    lens = torch.zeros(BATCH, dtype=torch.int64, device="meta")
    for new_lens in (None, lens, lens.int(), None):
        cache.append(0, *tokens(6, "meta"), new_lens)
    assert [slots.packed.shape for slots in appended] == [(6 * BATCH,)] * 4
    with pytest.raises(NotImplementedError, match="meta tensor"):
        cache.append(0, *tokens(1, "meta"))
    cache.append(1, *tokens(1, "meta"))


def test_lengths_are_read_when_the_room_may_be_too_small(unread: None) -> None:
    cache = make()
    for _ in range(4):  # the host knows of 24 tokens
        cache.append(0, *tokens(6), torch.tensor([6, 2, 0]))
    with pytest.raises(ShapeError, match="sequence 0 would grow to 25 tokens"):
        cache.append(0, *tokens(1))
    cache.append(0, *tokens(9), torch.tensor([0, 9, 9]))
    assert cache.layers[0].seq_lens.tolist() == [24, 17, 9]
    cache.crop(0)
    cache.append(0, *tokens(MAX))
    assert cache.layers[0].seq_lens.tolist() == [24, 24, 24]


@pytest.mark.parametrize("with_basis", [False, True], ids=["plain", "basis"])
def test_values_that_are_not_read_are_counted(unread: None, with_basis: bool) -> None:
    cache = make(bases=bases() if with_basis else None)
    k, v = tokens(9)
    k[1, 0, 2, 63], v[0, 1, 8, 0], v[2, 1, 8, 5] = torch.nan, torch.inf, -torch.inf
    cache.append(0, k, v, torch.tensor([9, 9, 8]))
    assert cache.bad_rows.tolist() == [1, 1], "what stands behind new_lens does not count"
    k_found, v_found = cache.dequantized(0)
    assert bool(k_found[1, 0, 2].isnan().any() and v_found[0, 1, 8].isnan().any())
    assert not bool(k_found[1, 1].isnan().any() or v_found[2].isnan().any())
    with pytest.raises(NonFiniteError, match="1 rows of K and 1 of V came with NaN"):
        cache.check()
    assert cache.bad_rows.tolist() == [0, 0]
    cache.crop(cache.seq_lens)  # of layer 1, which got no tokens
    cache.check()  # once is enough
    cache.append(1, k, v)
    cache.reset()
    cache.check()


def test_a_check_tells_layers_that_hold_different_lengths() -> None:
    cache = make()
    cache.append(0, *tokens(9), [9, 3, 0])
    cache.append(1, *tokens(9), [9, 2, 0])
    message = "of sequence 1 layer 0 has 3 tokens and layer 1 2. Append each token once"
    for _ in range(2):
        with pytest.raises(ShapeError, match=message):
            cache.check()
    cache.crop(cache.seq_lens)
    cache.check()
    assert [at.seq_lens.tolist() for at in cache.layers] == [[9, 2, 0]] * 2
    cache.append(1, *tokens(1))
    with pytest.raises(ShapeError, match="of sequence 0 layer 0 has 9 tokens and layer 1 10"):
        cache.check()


def test_transformers_is_told_what_it_takes() -> None:
    cache: Any = make()
    with pytest.raises(AttributeError, match=r"'is_compileable'\. Give it to a trans.* as kv"):
        _ = cache.is_compileable
    with pytest.raises(AttributeError, match="'KVCache' object has no attribute 'atend'"):
        _ = cache.atend
    assert not hasattr(cache, "get_seq_length")


def test_a_check_reads_once_and_writes_only_what_was_counted(unread: None) -> None:
    noted, cache = Operations(), make()
    for index in range(2):
        cache.append(index, *tokens(4))
    with noted:
        cache.check()
    assert noted.names == ["cat"]
    cache.bad_rows += 1
    with noted, pytest.raises(NonFiniteError):
        cache.check()
    assert noted.names[1:] == ["cat", "zero_", "zero_"]


def test_new_lens_that_are_not_read_are_kept_to_what_can_be(unread: None) -> None:
    cache = make()
    cache.append(0, *tokens(4), torch.tensor([-1, 9, 2]))
    assert cache.layers[0].seq_lens.tolist() == [0, 4, 2]
    wrong: list[Any] = [torch.ones(BATCH), torch.ones(BATCH, dtype=torch.bool)]
    for new_lens in wrong:
        with pytest.raises(ConfigError, match=r"new_lens is torch.*: use int32 or int64"):
            cache.append(0, *tokens(4), new_lens)
    with pytest.raises(ShapeError, match=r"new_lens is \[2\]: it must be \[3\]"):
        cache.append(0, *tokens(4), torch.ones(2, dtype=torch.int64))


def test_tokens_without_room_are_left_out_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, other = make(), make()
    k, v = tokens(MAX)
    with monkeypatch.context() as patch:
        patch.setattr(debug, "is_recorded", lambda tensor: True)
        with pytest.raises(ConfigError, match=r"new_lens lies on the host, .* tensor on cpu"):
            cache.append(0, k, v, [1, 2, 3])
        cache.append(0, k[:, :, :20], v[:, :, :20], torch.tensor([20, 13, 0]))
        cache.append(0, k[:, :, :10], v[:, :, :10], torch.tensor([10, 10, 10]))
    assert cache.layers[0].seq_lens.tolist() == [24, 23, 10]
    assert cache.overflow_tokens.tolist() == [6]
    with pytest.raises(ShapeError, match=r"6 tokens .* found no room, max_seq_len is 24"):
        cache.check()
    other.append(0, k[:, :, :20], v[:, :, :20], [20, 13, 0])
    other.append(0, k[:, :, :10], v[:, :, :10], [4, 10, 10])
    assert_same(cache, other)
    with pytest.raises(ShapeError, match="sequence 0 would grow to 25"):
        cache.append(0, k[:, :, :1], v[:, :, :1])


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's own graphs
@pytest.mark.parametrize("kind", mark_slow(["plain", "basis", "window"], ["basis", "window"]))
def test_compiled_steps_are_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "SPARE", 2)  # so that a ring closes
    chosen, q = bases() if kind == "basis" else None, torch.randn(BATCH, 2 * HEADS, DIM)
    windows = [8, None] if kind == "window" else None
    cache, other = (make(bases=chosen, windows=windows) for _ in range(2))
    for one in (cache, other):
        one.append(0, *tokens(0))
        one.append(1, *tokens(0))

    def step(one: KVCache, k: torch.Tensor, v: torch.Tensor, new_lens: torch.Tensor) -> Any:
        found = []
        for index in range(2):
            one.append(index, k, v, new_lens)
            found.append(one.attend(index, q))
        return found

    compiled = torch.compile(lambda *new: step(cache, *new), fullgraph=True, backend="aot_eager")
    for count in range(12):
        new = *tokens(2), torch.tensor([2, count % 2, 0])
        torch.testing.assert_close(compiled(*new), step(other, *new))
        assert_same(cache, other)
    compiled(*tokens(2), torch.tensor([1, 0, 0]))
    assert cache.seq_lens.tolist() == [24, 6, 0] and cache.overflow_tokens.tolist() == [2]


@pytest.mark.parametrize("with_basis", [False, True], ids=["plain", "basis"])
def test_the_rows_of_a_layer_take_one_launch(
    unread: None, with_basis: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = install(monkeypatch)
    monkeypatch.setattr(append_ops, "kernels_for", lambda *_: "cuda")
    cache = make(bases=bases() if with_basis else None)
    for count in (1, 9, 1):
        cache.append(0, *tokens(count), torch.ones(BATCH, dtype=torch.int32))
    assert len(cuda.launched) == 3


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(2, 5), (0, 0), (0, 5), (MAX, 0)], ids=str)
@pytest.mark.parametrize("with_basis", [False, True], ids=["plain", "basis"])
@pytest.mark.parametrize("few_bits", [False, True], ids=["", "few bits"])
def test_rows_are_those_of_the_cpu(
    few_bits: bool, lengths: tuple[int, int], with_basis: bool
) -> None:
    chosen = bases() if with_basis else None
    options: dict[str, Any] = {"sink_len": lengths[0], "recent_len": lengths[1]}
    if few_bits:
        options |= {"k_format": "int3", "v_format": "int2"}
    options["bases"] = chosen
    cache, other = make("cuda", **options), make(**options)
    for new_lens in ([3, 0, 1], None, [1, 9, 0], [1, 1, 1], [0, 1, 0]):
        k, v = tokens(max(new_lens or [2]))
        for index in range(2):
            other.append(index, k, v, new_lens)
            cache.append(index, k.cuda(), v.cuda(), new_lens)
    cache.check()
    assert_same(cache, other)


@pytest.mark.gpu
def test_the_host_does_not_wait() -> None:
    cache = make("cuda")
    new_lens, (k, v) = torch.tensor([2, 0, 1], device="cuda"), tokens(2, "cuda")
    cache.append(0, k, v)  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        for lens in (None, new_lens, new_lens.int(), [1, 2, 0]):
            cache.append(0, k, v, lens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.layers[0].seq_lens.tolist() == [9, 6, 6]


@pytest.mark.gpu
@pytest.mark.parametrize("with_basis", [False, True], ids=["plain", "basis"])
def test_a_captured_step_is_replayed_with_growing_lengths(with_basis: bool) -> None:
    chosen = bases() if with_basis else None
    cache, other = make("cuda", bases=chosen), make(bases=chosen)
    k, v = tokens(1, "cuda")
    q = torch.randn(BATCH, 2 * HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    new_lens = torch.ones(BATCH, dtype=torch.int32, device="cuda")

    def step() -> list[torch.Tensor]:
        found = []
        for index in range(2):
            cache.append(index, k, v, new_lens)
            out = cache.attend(index, q)
            assert isinstance(out, torch.Tensor)
            found.append(out)
        return found

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiled
        step()
    torch.cuda.synchronize()
    cache.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    assert cache.seq_lens.tolist() == [0] * BATCH, "captured, not run"
    for count in range(MAX):
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        new_lens.copy_(torch.tensor([1, 1, count % 2]))
        graph.replay()
        for index, out in enumerate(outs):
            other.append(index, k.cpu(), v.cpu(), new_lens.cpu())
            expected = other.attend(index, q.float().cpu())
            assert isinstance(expected, torch.Tensor)
            torch.testing.assert_close(out.float().cpu(), expected, atol=0.03, rtol=0.03)
    assert_same(cache, other)
    cache.check()
    graph.replay()
    with pytest.raises(ShapeError, match=r"4 tokens .* found no room"):
        cache.check()
    with pytest.raises(ShapeError, match="would grow to 25"):
        cache.append(0, k, v)
