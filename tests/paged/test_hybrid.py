"""Layers with windows, beside layers that see all tokens: pages, bytes, prefixes, files (10 s)."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from invariants import check_invariants
from paged_cases import (
    DIM,
    HEADS,
    PAGE,
    RECENT,
    SINKS,
    begin,
    extend,
    make,
    new_rows,
    poison,
    same,
    values,
)

from kvquant import PagedKVCache, RowFormat
from kvquant.errors import CheckpointError, ConfigError, OutOfPagesError, ShapeError
from kvquant.io.inspect import describe
from kvquant.io.sequences import load_sequences, save_sequences
from kvquant.paged.batch import PagedBatch
from kvquant.paged.state import SPARE
from kvquant.paged.window_pages import held_pages

WINDOWS = [None, 20, 40]
HYBRID: dict[str, Any] = {"windows": WINDOWS, "num_layers": 3}
HYBRID |= {"max_seq_len": 400, "num_pages": 60}
GOLDEN = Path(__file__).parents[1] / "data" / "sequences-windows.safetensors"


def frames(cache: PagedKVCache) -> list[int]:
    """Pages in use, of each group."""
    state = cache.state
    sizes = [len(group.sides[0].layers[0]) for group in cache.rows.groups]
    free = [(of or state.pool).num_free for of in state.groups]
    return [size - count for size, count in zip(sizes, free, strict=True)]


def whole(cache: PagedKVCache, name: str) -> list[torch.Tensor]:
    """K and V of a sequence in the layer that sees all tokens."""
    return list(cache.dequantized(name, cache.windows.index(None)))


# Pages and bytes


def test_windows_hold_few_pages_of_a_long_sequence() -> None:
    batch = PagedBatch(make(**HYBRID), 2, 400)
    cache = batch.cache
    assert [group.layers for group in cache.rows.groups] == [[0], [2], [1]]
    begin(batch, "a", 390)
    assert frames(cache) == [24, *(-(-(w + SPARE) // PAGE) + 1 for w in (40, 20))]
    cache.fork("a", "b")
    for _ in range(3):
        extend(batch, ["a", "b"])
    most = [2 * held_pages(w, PAGE, SPARE) for w in (40, 20)]
    assert all(used <= held for used, held in zip(frames(cache)[1:], most, strict=True))
    cache.free("a")
    cache.free("b")
    assert frames(cache) == [0, 0, 0]


def test_a_layout_as_of_gemma_takes_the_bytes_of_the_formula() -> None:
    """5 of 6 layers see the last 64 tokens: a sixteenth of Gemma 3's 1,024."""
    window, slots, chunk = 64, 3, 64
    windows = [*[window] * 5, None]
    options: dict[str, Any] = {"num_layers": 6, "max_seq_len": 2048, "max_num_seqs": slots}
    options |= {"num_pages": slots * 2048 // PAGE, "v_format": "int4-g4", "chunk_len": chunk}
    cache, plain = make(**options, windows=windows), make(**options)
    row = RowFormat.parse("int4-g4", DIM).row_bytes
    of_page = 2 * HEADS * PAGE * row  # of a layer, K and V
    in_window = slots * (-(-(window + SPARE) // PAGE) + 3) + chunk // PAGE
    pages = options["num_pages"] * of_page + 5 * in_window * of_page
    in_slots = slots * 6 * 2 * HEADS * 2 * DIM * (SINKS + RECENT + SINKS + min(16, RECENT))
    assert cache.nbytes == pages + in_slots + cache.bad_rows.nbytes
    assert plain.nbytes == 6 * options["num_pages"] * of_page + in_slots + cache.bad_rows.nbytes
    assert plain.nbytes > 3.5 * cache.nbytes


SHAPES = {  # layers, KV heads, head_dim, window, and of how many layers one sees all
    "Gemma 3 4B": (34, 4, 256, 1024, 6),
    "Gemma 3 12B": (48, 8, 256, 1024, 6),
    "Gemma 3 27B": (62, 16, 128, 1024, 6),
    "gpt-oss 20B": (24, 8, 64, 128, 2),
    "gpt-oss 120B": (36, 8, 64, 128, 2),
}


@pytest.mark.parametrize("model", SHAPES)
def test_the_table_of_the_page_is_what_caches_take(model: str) -> None:
    """16 sequences, each written to its end; for_memory divides by the same sizes."""
    (layers, heads, dim, window, every), lines = SHAPES[model], []
    windows = [None if (i + 1) % every == 0 else window for i in range(layers)]
    sizes = layers, windows.count(None), heads, dim, window
    first = f"{model} | {', '.join(f'{size:,}' for size in sizes)}"
    for length in (8192, 32768):
        pages, both = 16 * -(-(length - 132) // 64), list[float]()
        for given in (None, windows):
            options: dict[str, Any] = {"max_num_seqs": 1, "max_seq_len": length, "windows": given}
            one = PagedKVCache(layers, heads, dim, 1, **options)
            both.append(one._bytes_of(pages, 16) / 2**30)
        gib = " | ".join(f"{size:.1f} GiB" for size in both)
        lines.append(f"| {first} | {length:,} | {gib} | {both[0] / both[1]:.1f} |")
        first = "|"
    page = (Path(__file__).parents[2] / "kvquant" / "paged" / "README.md").read_text()
    assert "\n".join(lines) in page


@pytest.mark.parametrize("count", [1, 2, 3, 17])
def test_steps_of_chunk_len_tokens_always_find_pages(count: int) -> None:
    """With all slots in use and any lengths, also where pages are kept to be found again."""
    torch.manual_seed(count)
    chunk = 4 * count
    cache = make(windows=[20, None], num_pages=500, max_seq_len=2000, chunk_len=chunk)
    assert len(cache.rows.groups[1].sides[0].layers[0]) == 4 * (8 + 1) + -(-chunk // PAGE)
    batch = PagedBatch(cache, 4, chunk)
    for i in range(4):
        cache.allocate(i)
        for _ in range(5 * i + 1):
            extend(batch, [i], [chunk // 2])
    for _ in range(60):
        extend(batch, range(4), count, range(4 * count))
    check_invariants(cache)


def test_a_prompt_longer_than_its_chunk_is_refused_and_nothing_changes() -> None:
    options = HYBRID | {"windows": [None, 20, 20], "chunk_len": 130, "max_num_seqs": 1}
    batch = PagedBatch(make(**options), 1, 400)
    cache = batch.cache
    cache.allocate("a", room=390)
    assert not cache.can_append(["a"], 399)
    message = "in layers with a window of 20: free, .* or append fewer tokens in one step"
    with pytest.raises(OutOfPagesError, match=message):
        extend(batch, ["a"], 399)
    assert cache.length("a") == 0 and frames(cache) == [0, 0]
    for _ in range(3):
        extend(batch, ["a"], 130)


# Prefixes, forks, drafts


def test_a_prefix_is_found_as_far_as_all_windows_have_its_last_tokens() -> None:
    tokens = list(range(300))
    options = HYBRID | {"num_pages": 100, "max_num_seqs": 2, "chunk_len": 130}
    batch = PagedBatch(make(**options), 2, 400)
    cache = batch.cache
    begin(batch, "a", 150, tokens[:150])
    extend(batch, ["a"], 140, tokens[150:290])
    full = (290 - SINKS - RECENT) // PAGE * PAGE + SINKS
    assert cache.match_prefix(tokens) == full
    short = tokens[:150]
    assert cache.match_prefix(short) == (150 - 1 - SINKS) // PAGE * PAGE + SINKS, "kept frames"
    present = cache.allocate("b", tokens)
    poison(cache)
    check_invariants(cache)
    extend(batch, ["b"], 300 - present, tokens[present:])
    k, _ = whole(cache, "b")
    assert torch.equal(k[:, :present], whole(cache, "a")[0][:, :present])
    for layer, window in ((1, 20), (2, 40)):
        assert cache.dequantized("b", layer)[0].shape[1] == window
    cache.free("b")
    cache.allocate("c")
    for start in range(1000, 1380, 20):  # which takes the frames that were kept
        extend(batch, ["c"], [20], range(start, start + 20))
    assert cache.match_prefix(short) == 0
    assert cache.match_prefix(tokens) >= full, "a sees its window"
    check_invariants(cache)


def test_a_prompt_is_found_again_where_its_first_writer_is_past_it() -> None:
    """Two sequences write the same pages; one goes on and leaves them, the other ends there."""
    tokens = list(range(100))
    options = HYBRID | {"windows": [None, 20, 20], "max_num_seqs": 2, "chunk_len": 1}
    batch = PagedBatch(make(**options | {"max_seq_len": 600}), 2, 400)
    cache = batch.cache
    for name in "ab":
        cache.allocate(name)
    extend(batch, ["a"], [100], tokens)
    for _ in range(80):  # then the first frames are taken for the next pages
        extend(batch, ["a"], [5], range(5))
    assert cache.match_prefix(tokens) == 0
    extend(batch, ["b"], [100], tokens)
    expected = values(cache, "b")
    present = cache.match_prefix(tokens)
    assert present == (100 - SINKS - RECENT) // PAGE * PAGE + SINKS
    cache.free("b")
    check_invariants(cache)
    assert cache.allocate("c", tokens) == present
    found = whole(cache, "c")
    assert torch.equal(found[0][:, SINKS:], expected[0][:, SINKS:present])


def test_drafts_are_taken_back_at_windows() -> None:
    ours, theirs = (PagedBatch(make(**HYBRID), 1, 300) for _ in range(2))
    rows = new_rows(201)
    for batch in (ours, theirs):
        batch.cache.allocate("a")
        extend(batch, ["a"], 201, rows=rows)
    for _ in range(40):
        extend(ours, ["a"], 4)
        ours.cache.truncate("a", ours.cache.length("a") - 3)
        ours.cache.truncate("a", ours.cache.length("a") - 1)
        rows = new_rows(2)
        for batch in (ours, theirs):
            extend(batch, ["a"], 2, rows=rows)
        poison(ours.cache)
        check_invariants(ours.cache)
        assert same(values(ours.cache, "a"), values(theirs.cache, "a"))
    ours.cache.truncate("a", 281 - SPARE)
    message = r"layers see the last 40, its first 10 pages are dropped there. Keep (\d+) or more"
    with pytest.raises(ShapeError, match=message) as error:
        ours.cache.truncate("a", 150)
    least = int(re.findall(message, str(error.value))[0])
    ours.cache.truncate("a", least)
    poison(ours.cache)
    with ours.extend(["a"], 0):
        for layer in range(3):
            out = ours.attend(layer, torch.randn(1, 2 * HEADS, DIM))
            assert not out.isnan().any()


def test_a_page_that_only_the_writer_sees_is_copied_before_it_is_given_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other sequence is past the shared page, so that the copy's source is free after it."""
    batch = PagedBatch(make(**HYBRID | {"rollback_len": 0}), 2, 300)
    cache = batch.cache
    begin(batch, "a", 60)
    cache.fork("a", "b")
    extend(batch, ["b"], 200)
    before = values(cache, "a")
    cache.truncate("a", 30)

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(batch._staged, "send", fail)
        batch.extend(["a"], 90).__enter__()
    cache.free("a")
    poison(cache)
    check_invariants(cache)
    assert not any(x.isnan().any() for x in [*values(cache, "b"), *before])
    cache.allocate("c")
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(cache, "insert_prefixes", fail)  # the rows are written by then
        extend(batch, ["c"], 20)
    poison(cache)
    check_invariants(cache)
    assert not any(x.isnan().any() for x in values(cache, "c"))
    extend(batch, ["b", "c"], 20)
    check_invariants(cache)


@pytest.mark.parametrize("fails", [False, True])
def test_a_swap_after_a_step_that_could_not_be_ended_keeps_its_pages(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a page that the step copied nobody sees the source; its place may come to a swap."""
    cache = make(windows=[None, 20], sink_len=0, recent_len=0, num_pages=40)
    batch = PagedBatch(cache, 2, 100)
    begin(batch, "c", 30)
    expected = values(cache, "c")
    cache.swap_out("c")
    begin(batch, "e", 5)
    begin(batch, "a", 5)
    cache.fork("a", "b")

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        if fails:
            patched.setattr(cache, "insert_prefixes", fail)
        with suppress(MemoryError):
            extend(batch, ["a", "b"], 1)
    cache.free("b")
    cache.free("a")
    cache.swap_in("c")
    check_invariants(cache)
    begin(batch, "d", 50)
    poison(cache)
    assert same(values(cache, "c"), expected)


# Attention, swaps, files


def filled(**options: Any) -> PagedBatch:
    """Two sequences that share a prefix, and one that is short."""
    batch = PagedBatch(make(**HYBRID | options), 3, 300)
    begin(batch, "a", 200, range(200))
    batch.cache.fork("a", "b")
    extend(batch, ["b"], 70, range(70))
    begin(batch, 7, 2)
    return batch


def test_files_hold_the_pages_that_windows_see(tmp_path: Path) -> None:
    batch = filled()
    path = save_sequences(batch.cache, ["a", 7, "b"], tmp_path / "saved.safetensors")
    plain = filled(windows=None)
    large = save_sequences(plain.cache, ["a", 7, "b"], tmp_path / "plain.safetensors")
    assert path.stat().st_size < 0.7 * large.stat().st_size
    other = PagedBatch(make(**HYBRID), 3, 300)
    begin(other, "c", 30)
    poison(other.cache)
    assert load_sequences(other.cache, path) == ["a", 7, "b"]
    poison(other.cache)
    check_invariants(other.cache)
    for name in ("a", 7, "b"):
        assert same(values(other.cache, name), values(batch.cache, name))
    assert other.cache.match_prefix(range(200)) == batch.cache.match_prefix(range(200)) > 150
    found = describe(path)
    assert found["version"] == 1 and [x["window"] for x in found["layers"]] == [None, 20, 40]


def golden() -> PagedKVCache:
    """What the golden file holds."""
    rows = (torch.arange(140)[:, None] + torch.arange(64) / 4 - 8.0).expand(2, 2, 140, 64)
    batch = PagedBatch(make(**HYBRID), 2, 200)
    batch.cache.allocate("a")
    extend(batch, ["a"], [140], range(140), rows=rows.transpose(1, 2).bfloat16())
    return batch.cache


def test_the_golden_file_still_loads() -> None:
    fresh, loaded = golden(), make(**HYBRID)
    assert load_sequences(loaded, GOLDEN) == ["a"]
    check_invariants(loaded)
    assert same(values(loaded, "a"), values(fresh, "a"))
    assert loaded.state.tokens("a") == list(range(140))


ONLY_WINDOWS = [40, 20]


def test_after_a_check_no_window_keeps_rows_to_be_found() -> None:
    batch = PagedBatch(make(num_pages=20, max_seq_len=900, windows=ONLY_WINDOWS), 1, 300)
    cache = batch.cache
    begin(batch, "a", 250, range(250))
    assert cache.match_prefix(range(250)) > 0
    rows = new_rows(30)
    rows[0, 3] = torch.nan
    extend(batch, ["a"], 30, rows=rows)
    with pytest.raises(Exception, match="rows of K"):
        cache.check()
    check_invariants(cache)
    assert cache.match_prefix(range(250)) == 0
    for _ in range(2):
        extend(batch, ["a"], 150)
    with pytest.raises(ZeroDivisionError), batch.extend(["a"], 60):
        raise ZeroDivisionError
    cache.free("a")
    check_invariants(cache)
    assert cache.num_free_pages == 20


def test_a_failed_step_keeps_no_frames_of_the_pages_that_it_copied() -> None:
    options = {"windows": [None, 8], "sink_len": 0, "recent_len": 0, "chunk_len": PAGE}
    batch = PagedBatch(make(num_layers=2, **options), 2, 64)
    begin(batch, "a", PAGE + 1)
    batch.cache.fork("a", "b")
    with pytest.raises(ZeroDivisionError), batch.extend(["b"]):  # which copies the last page
        _ = 1 // 0
    for name in ("a", "b"):
        batch.cache.free(name)
    (window,) = batch.cache.state.pool.windows
    assert window.num_free == window.num_frames


def test_a_file_without_windows_is_read_into_a_cache_with_them(tmp_path: Path) -> None:
    path = tmp_path / "saved.safetensors"
    whole = PagedBatch(make(max_seq_len=200), 2, 190)
    begin(whole, "b", 190, range(190))
    save_sequences(whole.cache, ["b"], path)
    batch = PagedBatch(make(windows=[20, 40], max_seq_len=200), 2, 90, shared_prefix=True)
    load_sequences(batch.cache, path)
    poison(batch.cache)
    check_invariants(batch.cache)
    found, expected = values(batch.cache, "b"), values(whole.cache, "b")
    windows = [20, 20, 40, 40]
    assert same(found, [x[:, -w:] for x, w in zip(expected, windows, strict=True)])
    assert batch.cache.allocate("c", range(190)) == whole.cache.match_prefix(range(190)) > 0
    extend(batch, ["b"], 10)
    check_invariants(batch.cache)


def test_windows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="windows has a length of 3 for 2 layers"):
        make(windows=[1, 2, 3])
    with pytest.raises(ConfigError, match="chunk_len 0 is not possible"):
        make(windows=ONLY_WINDOWS, chunk_len=0)
    batch = PagedBatch(make(windows=ONLY_WINDOWS), 2, 90)
    begin(batch, "a", 60)
    path = save_sequences(batch.cache, ["a"], tmp_path / "saved.safetensors")
    for windows in (None, [40, 21], [None, 20]):
        with pytest.raises(CheckpointError, match=r"windows is \[40, 20\] in the file and"):
            load_sequences(make(windows=windows), path)
