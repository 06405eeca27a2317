"""LatentPagedKVCache: whole latent rows in pages, and the bookkeeping of PagedKVCache over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_cases import captured
from invariants import check_invariants
from latent_pages import (
    DIMS,
    FORMATS,
    LAYERS,
    SCALE,
    assert_attends,
    compare,
    from_plan,
    make,
    new_rows,
    queries,
)
from latent_plans import latent_plan, random_basis
from paged_cases import begin, changing_steps, extend, seen
from relative_l2 import relative_l2

from kvquant import (
    LatentFormat,
    LatentKVCache,
    LatentPagedBatch,
    PagedBatch,
    PagedKVCache,
    debug,
    quantize_rows,
)
from kvquant.errors import ConfigError, NonFiniteError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = [(3, 5), (0, 0), (3, 0), (0, 5)]  # sinks and recent tokens


def test_a_page_holds_the_bytes_of_quantize_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = LatentPagedBatch(make(sink_len=0, recent_len=0), 4, 100)
    first = begin(batch, "a", 20)
    monkeypatch.setattr(debug, "enabled", True)  # looks whether rows share memory
    rows = [torch.cat(x) for x in zip(first, extend(batch, ["a"], 12), strict=True)]
    wanted = quantize_rows(torch.cat(rows, -1), LatentFormat.parse(FORMATS["cpu"], 256, 32))
    cache = batch.cache
    table = list(cache.state.pool.block_table("a"))
    (pages,) = cache.rows.pages
    assert torch.equal(pages.layers[1][table].flatten(0, 2), wanted[:, 0])
    assert cache.rows.layers[1].k_pages.data_ptr() == pages.layers[1].data_ptr()
    row_bytes = cache.formats[0].row_bytes
    assert cache.rows.nbytes == LAYERS * 12 * 16 * row_bytes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_attention_is_that_over_the_dequantized_rows(lengths: tuple[int, int], device: str) -> None:
    """Of one query and several, of unequal lengths, with places that are not in use."""
    cache = make(device, sink_len=lengths[0], recent_len=lengths[1])
    batch = LatentPagedBatch(cache, 4, 100)
    counts = {"a": 60, "b": 2, "c": 17}
    new = {name: begin(batch, name, count) for name, count in counts.items()}
    for layer in range(LAYERS):
        latents, ropes = cache.dequantized("a", layer)
        assert torch.equal(latents[0, :2].cpu(), new["a"][0][:2, 0].cpu().float()) == (
            lengths[0] > 0
        )
        assert latents.shape == (1, 60, 256) and ropes.shape == (1, 60, 32)
    for given in ([1, 1, 1], [3, 1, 4], [2, 0, 1]):
        with batch.extend(list("cab"), given):  # places are not the sequence slots
            for layer in range(LAYERS):
                batch.append(layer, *new_rows(sum(given), device))
                assert_attends(batch, layer, "cab", given, queries(4, 6, device=device))
                pair = queries(4, 4, 6, device=device)
                assert_attends(batch, layer, "cab", given, pair)
    cache.check()
    check_invariants(cache)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", ["int8-g4", "fp8", "bf16"])
def test_rows_with_nan_count_in_either_part(fmt: str, device: str) -> None:
    dims = {"latent_dim": 512, "rope_dim": 64}
    batch = LatentPagedBatch(make(device, fmt=fmt, **dims), 4, 100)
    cache = batch.cache
    for name, part, token in (("a", None, 0), ("b", 0, 30), ("c", 1, 30), ("d", 1, 1)):
        rows = [torch.randn(40, 1, dim).bfloat16().to(device) for dim in dims.values()]
        if part is not None:
            rows[part][token, 0, 5] = torch.inf
        cache.allocate(name)
        extend(batch, [name], 40, range(40), rows=(rows[0], rows[1]))
    cache.swap_out("c")
    assert cache.bad_rows.tolist() == [2, 4]  # of both layers
    with pytest.raises(NonFiniteError):
        cache.check()
    cache.check()
    assert cache.match_prefix(range(40)) == 0
    for name in "bcd":
        cache.free(name)
    check_invariants(cache)


@pytest.mark.parametrize("device", DEVICES)
def test_a_plan_has_the_bases_of_rows(device: str) -> None:
    plan = latent_plan(fmt=("int8-g4", "bf16"))
    batch = LatentPagedBatch(from_plan(plan, device), 4, 100)
    contiguous = LatentKVCache.from_plan(plan, 1, 100, sink_len=3, recent_len=5, device=device)
    for name, count in (("a", 40), ("b", 3)):
        new = begin(batch, name, count)
        if name == "a":
            for layer in range(LAYERS):
                contiguous.append(layer, *(x.transpose(0, 1)[None] for x in new))
    assert "int8-g4 or bf16, bases" in repr(batch.cache)
    for layer in range(LAYERS):
        wanted = contiguous.dequantized(layer)
        for ours, theirs in zip(batch.cache.dequantized("a", layer), wanted, strict=True):
            torch.testing.assert_close(ours, theirs[0], atol=0.05, rtol=0)  # a step of a code
    for given in ([1, 1], [3, 2]):
        shape = (4, 6) if given == [1, 1] else (4, 3, 6)
        limit = 1e-5 if device == "cpu" else 6e-3  # of queries that are rounded again
        with batch.extend(["a", "b"], given):
            for layer in range(LAYERS):
                batch.append(layer, *new_rows(sum(given), device))
                pair = queries(*shape, device=device)
                assert_attends(batch, layer, "ab", given, pair, limit)
    batch.cache.check()


def test_flash_mla_reads_the_pages_of_a_cache() -> None:
    """Rows of its layout, whose bytes are tested in rows/test_latent.py, without 16-bit ones."""
    options: dict[str, Any] = {"page_size": 64, "num_pages": 9, "max_seq_len": 200}
    options |= {"latent_dim": 512, "rope_dim": 64, "sink_len": 0, "recent_len": 0}
    batch = LatentPagedBatch(make(fmt="fp8", **options), 2, 100)
    batch.cache.allocate("a")
    rows = [torch.randn(100, 1, n).bfloat16() for n in (512, 64)]
    extend(batch, ["a"], 100, rows=rows)
    pages = batch.cache.pages(1)
    assert pages.shape == (9, 64, 1, 656) and pages.is_contiguous()
    assert pages.data_ptr() == batch.cache.rows.pages[0].layers[1].data_ptr(), "a view"
    with batch.extend(["a"], 0):
        found = pages[batch.block_table[0, :2].long()].flatten(0, 2)
    assert torch.equal(
        found[:100], quantize_rows(torch.cat(rows, -1)[:, 0], batch.cache.formats[1])
    )
    with pytest.raises(ConfigError, match="layer 2"):
        batch.cache.pages(2)


def test_what_does_not_fit_is_refused() -> None:
    cache = make(rollback_len=1)
    batch = LatentPagedBatch(cache, 4, 100)
    begin(batch, "a", 20)
    before = seen(cache)
    with pytest.raises(ConfigError, match="cache has latent rows: make a LatentPagedBatch"):
        PagedBatch(cache, 4)
    heads = PagedKVCache(1, 1, 64, 4)
    for other in (heads, LatentKVCache(1, 1, 16)):
        with pytest.raises(ConfigError, match="give a LatentPagedKVCache"):
            LatentPagedBatch(other, 4)  # type: ignore[arg-type]
    turned = LatentPagedBatch(make(bases=[random_basis()] * LAYERS), 4, 100)
    turned.cache.allocate("a")
    latent, rope = new_rows(3)
    with pytest.raises(ConfigError, match=r"rope is torch.float16: use"), turned.extend(["a"], 3):
        turned.append(0, latent, rope.half())
    assert seen(cache) == before
    assert "256 latents and 32 RoPE elements in int8-g4+int8-g8, 12 pages" in repr(cache)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["int8-g4", "int4-g8+fp8-g4", "fp8", "bf16"])
@pytest.mark.parametrize("heads", [16, 128])
def test_a_gpu_attends_to_pages_of_64_tokens(heads: int, fmt: str) -> None:
    """Of the sizes that models have, with more tokens than a block has at a time."""
    dims = {"latent_dim": 512, "rope_dim": 64}
    options: dict[str, Any] = {"page_size": 64, "num_pages": 60, "max_seq_len": 1500, **dims}
    cache = make("cuda", fmt=fmt, sink_len=4, recent_len=128, **options)
    batch = LatentPagedBatch(cache, 4, 1500)
    for name, count in (("a", 1400), ("b", 130), ("c", 3)):
        rows = [torch.randn(count, 1, dim).bfloat16().cuda() for dim in dims.values()]
        cache.allocate(name)
        extend(batch, [name], count, rows=(rows[0], rows[1]))
    for counts in ([1, 1, 1], [3, 1, 2]):
        total = sum(counts)
        rows = [torch.randn(total, 1, dim).bfloat16().cuda() for dim in dims.values()]
        shape = (4, heads) if max(counts) == 1 else (4, 3, heads)
        q = [torch.randn(*shape, dim).bfloat16().cuda() for dim in dims.values()]
        with batch.extend(list("abc"), counts):
            for layer in range(LAYERS):
                batch.append(layer, *rows)
                assert_attends(batch, layer, "abc", counts, (q[0], q[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("in_basis", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_one_graph_serves_steps_of_other_sequences_lengths_and_pages(
    lengths: tuple[int, int], in_basis: bool
) -> None:
    """What no token is in is NaN, and places that are not in use have queries of NaN."""
    options: dict[str, Any] = {"bases": [random_basis()] * LAYERS if in_basis else None}
    options |= {"sink_len": lengths[0], "recent_len": lengths[1], "num_pages": 30}
    cache = make("cuda", **options)
    limit = 6e-3 if in_basis else None  # of queries and outputs that are rounded again
    prefill, batch = LatentPagedBatch(cache, 4, 100), LatentPagedBatch(cache, 4)
    given = [torch.full((4, 6, n), torch.nan).bfloat16().cuda() for n in DIMS.values()]
    given += [torch.full((4, 1, n), torch.nan).bfloat16().cuda() for n in DIMS.values()]

    def layers() -> list[torch.Tensor]:
        found = []
        for layer in range(LAYERS):
            q_latent, q_rope, latent, rope = given
            out = batch.step(layer, q_latent, q_rope, latent, rope, sm_scale=SCALE)
            found.append(out)
        return found

    with batch.extend([]):
        graph, outs = captured(layers)
    for name, count in (("a", 20), ("b", 3), ("c", 0), ("d", 61)):
        cache.allocate(name)
        extend(prefill, [name], count)
    for ids in changing_steps([cache], 30):
        for x in given:
            x.copy_(torch.randn(x.shape))
            x[len(ids) :] = torch.nan
        with batch.extend(ids):
            graph.replay()
        for layer in range(LAYERS):
            pair = given[0][: len(ids)], given[1][: len(ids)]
            compare(cache, layer, ids, [1] * len(ids), pair, outs[layer][: len(ids)], limit=limit)
            assert not outs[layer][len(ids) :].any()
    assert cache.bad_rows.tolist() == [0, 0]
    check_invariants(cache)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["int4-g8+int8-g4", "fp8", "bf16"])
@pytest.mark.parametrize("heads", [16, 128])
def test_a_gpu_shares_a_prefix_of_thousands_of_tokens(heads: int, fmt: str) -> None:
    """Of the sizes that models have: the kernel for many heads attends to the prefix."""
    dims = {"latent_dim": 512, "rope_dim": 64}
    options: dict[str, Any] = {"page_size": 64, "num_pages": 200, "max_seq_len": 4096, **dims}
    cache = make("cuda", fmt=fmt, sink_len=4, recent_len=128, max_num_seqs=12, **options)
    batches = [LatentPagedBatch(cache, 12, 3000, shared_prefix=one) for one in (True, False)]

    def rows(count: int) -> list[torch.Tensor]:
        return [torch.randn(count, 1, dim).bfloat16().cuda() for dim in dims.values()]

    for name, count in ((0, 3000), ("z", 700)):
        cache.allocate(name)
        with batches[0].extend([name], count):
            for layer in range(LAYERS):
                batches[0].append(layer, *rows(count))
    for name in range(1, 11):
        cache.fork(0, name)
    ids = [*range(5), "z", *range(5, 11)]
    for q_len in (1, 3):
        new = rows(q_len * len(ids))
        with batches[0].extend(ids, q_len):
            for layer in range(LAYERS):
                batches[0].append(layer, *new)
        shape = (len(ids), heads) if q_len == 1 else (len(ids), q_len, heads)
        q = [torch.randn(*shape, dim).bfloat16().cuda() for dim in dims.values()]
        found = []
        for batch in batches:
            with batch.extend(ids, 0):
                if q_len > 1:  # as if the tokens were new in this step
                    batch.new_lens.fill_(q_len)
                found.append(batch.attend(1, q[0], q[1], sm_scale=SCALE, return_lse=True))
        assert int(batches[0]._staged.tensors["prefix_lens"]) >= 2816
        (ours, our_lse), (theirs, their_lse) = found
        assert bool(ours.any()) and relative_l2(ours, theirs) < 4e-3
        torch.testing.assert_close(our_lse, their_lse, atol=5e-3, rtol=1e-3)
