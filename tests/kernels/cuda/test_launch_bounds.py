"""What the checks at load guarantee to the kernels, of files whose checksums were made to fit.

On a GPU no value is read back, so a kernel takes lengths, starts, pages, sequence slots and slots
as they are. Whatever a file says: if it is loaded, all of them lie within the tensors.
"""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import forged
import pytest
import torch
from invariants import check_invariants
from slow_cases import mark_slow

from kvquant import KVCache, PagedBatch, PagedKVCache, RowFormat, load_cache, load_sequences
from kvquant.errors import CheckpointError, OutOfPagesError, ShapeError
from kvquant.ops.slots import place_tokens
from kvquant.rows.segment import check_segment_values
from kvquant.rows.slots import Slots

FORMATS = ("int4", "int8", "fp8", "bf16", "fp16")
HUGE = 2**31 - 1
PAGE = 16
OF_FILES = {"version": 1, "writer": "", "model": None, "creation": {}, "transforms": []}


def check_slots(slots: Slots, packed_rows: int, exact_rows: int) -> None:
    """Every slot is a row that there is, or negative: none."""
    for found, rows in zip(slots, (packed_rows, exact_rows, packed_rows), strict=True):
        assert found is None or not found.numel() or int(found.max()) < rows


def check_cache(cache: KVCache) -> None:
    """Everything that kernels read, now and for the next tokens."""
    for layer in cache.layers:
        segments = layer.segments()
        check_segment_values(segments)
        assert int(layer.seq_lens.min()) >= 0 and int(layer.packed_lens.min()) >= 0
        overflow = torch.zeros(1, dtype=torch.int32)
        slots = place_tokens(layer.lens, layer.sizes, None, 3, overflow).slots
        sizes = layer.sizes
        rows = cache.batch * sizes.packed_len, cache.batch * (sizes.sink_len + sizes.ring_len)
        check_slots(slots, *rows)


def write(path: Path, manifest: dict[str, Any], rows: dict[str, list[int]]) -> None:
    """A file of zeros that hangs together, with a manifest."""
    tensors = {name: torch.zeros(shape, dtype=torch.uint8) for name, shape in rows.items()}
    forged.write(path, manifest, tensors)


def draw_cache(rng: random.Random, path: Path) -> None:
    """A cache that may be: lengths, windows and formats as they come, sometimes too large."""
    heads, exact = rng.choice((1, 2)), rng.choice(("bf16", "fp16"))
    sink_len = rng.choice((0, 0, 1, 2, 5, HUGE))
    recent_len = rng.choice((0, 0, 1, 3, 8, 700, HUGE))
    most = rng.choice((0, 1, 5, 9, 20, 600, 1200))
    seq_lens = [rng.choice((0, 1, most, max(most - 1, 0), rng.randrange(most + 1))) for _ in "ab"]
    layers, rows = [], dict[str, list[int]]()
    for i in range(rng.choice((1, 2))):
        window = rng.choice((None, None, 1, 3, 8, 530, HUGE))
        sinks = sink_len if window is None else 0
        packed_lens = []
        for n in seq_lens:
            high = max(n - sinks, 0)
            low = max(high - min(recent_len, window or recent_len), 0)
            packed_lens.append(rng.choice((low, high, rng.randint(low, high))))
        if rng.random() < 0.05:
            packed_lens[0] += rng.choice((-1, 1))
        entry: dict[str, Any] = {"packed_lens": packed_lens}
        counts = dict.fromkeys(("sinks", "packed", "recent"), 0)
        for n, packed in zip(seq_lens, packed_lens, strict=True):
            last = min(n, sinks) + packed
            first = min(n, sinks) if window is None else min(max(n - window, 0), last)
            counts["sinks"] += min(n, sinks)
            counts["packed"] += last - first
            counts["recent"] += n - last
        for side in "kv":
            fmt, fmt16 = RowFormat.parse(rng.choice(FORMATS), 64), RowFormat(exact, 1, 64)
            entry[side] = {"format": str(fmt), "head_dim": 64}
            for kind, count in counts.items():
                row_bytes = (fmt if kind == "packed" else fmt16).row_bytes
                if count > 0:
                    rows[f"layers.{i}.{side}_{kind}"] = [count, heads, row_bytes]
        layers.append(entry if window is None else entry | {"window": window})
    starts = [rng.choice((0, 5, -3, 2**40)) for _ in seq_lens]
    manifest: dict[str, Any] = {"format": "kvquant.cache", **OF_FILES, "num_kv_heads": heads}
    manifest |= {"head_dim": 64, "max_seq_len": most, "exact_format": exact, "layers": layers}
    manifest |= {"sink_len": sink_len, "recent_len": recent_len, "seq_lens": seq_lens}
    manifest["start_positions"] = starts
    manifest["positions"] = [n + start for n, start in zip(seq_lens, starts, strict=True)]
    if rng.random() < 0.3:
        name = rng.choice(("max_seq_len", "sink_len", "recent_len", "num_kv_heads"))
        manifest[name] = rng.choice((0, 1, 2, 7, 30, 2000, HUGE))
    write(path, manifest, rows)


@pytest.mark.parametrize("draws", mark_slow([80, 400], [80]))
def test_caches_that_are_loaded_are_in_bounds(draws: int, tmp_path: Path) -> None:
    rng, path, taken = random.Random(0), tmp_path / "x.safetensors", 0
    for _ in range(draws):
        draw_cache(rng, path)
        for max_seq_len in (None, 10, 700):
            try:
                cache = load_cache(path, max_seq_len=max_seq_len)
            except CheckpointError:
                continue
            check_cache(cache)
            taken += 1
            for n in (1, 3):  # and they stay so
                try:
                    for layer in range(cache.num_layers):
                        x = torch.zeros(cache.batch, cache.num_kv_heads, n, 64)
                        cache.append(layer, x, x)
                except ShapeError:  # no room
                    break
                check_cache(cache)
            with suppress(ShapeError):  # a window may have lost what came before
                cache.crop(cache.max_seq_len // 2)
            check_cache(cache)
    assert taken > 0.75 * draws


def draw_sequences(rng: random.Random, path: Path) -> tuple[int, int, str]:
    """Sequences that share pages as they come, also where they must not."""
    sink_len, recent_len = rng.choice((0, 0, 1, 3, 20)), rng.choice((0, 0, 1, 5, 40))
    exact, heads, num_pages = rng.choice(("bf16", "fp16")), 1, 0
    sequences, tables = list[dict[str, Any]](), list[list[int]]()
    for i in range(rng.choice((1, 2, 3, 4))):
        length = rng.choice((0, 1, 16, 17, 33, 48, 64, rng.randrange(80)))
        high = max(length - sink_len, 0)
        packed = rng.randint(max(high - recent_len, 0), high)
        needed, table = -(-packed // PAGE), list[int]()
        if tables and rng.random() < 0.7:
            shared = rng.choice(tables)
            table = shared[: rng.randint(0, min(len(shared), needed))]
        while len(table) < needed:
            table.append(num_pages)
            num_pages += 1
        if table and rng.random() < 0.1:
            table[rng.randrange(len(table))] = rng.choice((0, num_pages, HUGE))
        tables.append(table)
        known = rng.choice((0, length, rng.randint(0, length)))
        tokens = [t % 5 if rng.random() < 0.97 else 9 for t in range(known)]
        sequence: dict[str, Any] = {"id": f"s{i}", "length": length, "packed_len": packed}
        sequences.append(sequence | {"pages": table, "tokens": tokens})
    fmt = RowFormat.parse("int8", 64)
    rows = {}
    exact_rows = sum(sequence["length"] - sequence["packed_len"] for sequence in sequences)
    for side in "kv":
        if num_pages:
            rows[f"layers.0.{side}_pages"] = [num_pages, heads, PAGE, fmt.row_bytes]
        if exact_rows:
            rows[f"layers.0.{side}_exact"] = [exact_rows, heads, 128]
    manifest: dict[str, Any] = {"format": "kvquant.sequences", **OF_FILES, "num_kv_heads": heads}
    manifest |= {"page_size": PAGE, "sink_len": sink_len, "recent_len": recent_len}
    manifest |= {"exact_format": exact, "sequences": sequences}
    manifest["layers"] = [{side: {"format": "int8", "head_dim": 64} for side in "kv"}]
    write(path, manifest, rows)
    return sink_len, recent_len, exact


@pytest.mark.parametrize("draws", mark_slow([150, 400], [150]))
def test_sequences_that_are_loaded_are_in_bounds(draws: int, tmp_path: Path) -> None:
    rng, path, taken = random.Random(0), tmp_path / "x.safetensors", 0
    for _ in range(draws):
        sink_len, recent_len, exact = draw_sequences(rng, path)
        sizes: dict[str, Any] = {"max_num_seqs": 5, "max_seq_len": 90, "page_size": PAGE}
        sizes |= {"sink_len": sink_len, "recent_len": recent_len, "exact_format": exact}
        cache = PagedKVCache(1, 1, 64, 20, k_format="int8", v_format="int8", **sizes)
        try:
            ids = load_sequences(cache, path)
        except CheckpointError:
            continue
        except OutOfPagesError:
            pytest.fail("more pages than there can be")
        check_invariants(cache)
        batch = PagedBatch(cache, 5, 10)
        rows, x = cache.rows.layers[0], torch.zeros(10, 1, 64)
        for n in (0, 1, 2):
            with batch.extend(ids, n):
                slots = Slots(*(batch._staged.tensors[name] for name in Slots._fields))
                pages, seq_slots = rows.k_pages.shape, rows.k_exact.shape
                check_slots(slots, pages[0] * PAGE, seq_slots[0] * seq_slots[2])
                if n:
                    batch.append(0, x, x)
                check_segment_values(batch._make_segments(0, len(ids)).whole)
        check_invariants(cache)
        taken += 1
    assert taken > draws / 2
