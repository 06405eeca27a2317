"""What type checkers know of public calls; `make check` reads this file, here it only runs."""

from __future__ import annotations

import pytest
import torch
from example_plan import example_plan
from latent_plans import latent_plan
from typing_extensions import assert_type

from kvquant import (
    KVCache,
    LatentPagedBatch,
    LatentPagedKVCache,
    PagedBatch,
    PagedKVCache,
    RowFormat,
    decode_attention,
    quantize_rows,
    reference_attention,
)

State = tuple[torch.Tensor, torch.Tensor]


def test_return_lse_says_what_comes() -> None:
    fmt, lens = RowFormat.parse("int4-g4", 64), torch.ones(1, dtype=torch.int32)
    q, rows = torch.ones(1, 2, 64), quantize_rows(torch.ones(1, 1, 1, 64), fmt)
    cache = KVCache(1, 1, 1, 64, 8)
    cache.append(0, torch.ones(1, 1, 3, 64), torch.ones(1, 1, 3, 64))
    for attend in (decode_attention, reference_attention):
        out = attend(q, rows, rows, lens, k_format=fmt, v_format=fmt)
        assert isinstance(out, torch.Tensor)
    given = q, rows, rows, lens
    assert_type(decode_attention(*given, k_format=fmt, v_format=fmt), torch.Tensor)
    assert_type(decode_attention(*given, k_format=fmt, v_format=fmt, return_lse=True), State)
    assert_type(reference_attention(*given, k_format=fmt, v_format=fmt), torch.Tensor)
    assert_type(reference_attention(*given, k_format=fmt, v_format=fmt, return_lse=True), State)
    assert_type(cache.attend(0, q, backend="reference"), torch.Tensor)
    assert_type(cache.attend(0, q, return_lse=True), State)
    many, q_lens = torch.ones(1, 3, 2, 64), lens
    assert_type(cache.attend(0, many, q_lens), torch.Tensor)
    assert_type(cache.attend(0, many, q_lens, return_lse=True), State)
    paged = PagedKVCache(1, 1, 64, 2, page_size=16)
    batch = PagedBatch(paged, 1, 1)
    paged.allocate("a")
    with batch.extend(["a"], 1):
        batch.append(0, torch.ones(1, 1, 64), torch.ones(1, 1, 64))
        assert_type(batch.attend(0, q), torch.Tensor)
        assert_type(batch.attend(0, q, return_lse=True), State)
    latents = LatentPagedKVCache(1, 2)
    absorbed = LatentPagedBatch(latents, 1)
    latents.allocate("a")
    with absorbed.extend(["a"], 1):
        x, rope = torch.ones(1, 1, 512), torch.ones(1, 1, 64)
        assert_type(absorbed.step(0, x, rope, x, rope, sm_scale=1.0), torch.Tensor)
        assert_type(absorbed.attend(0, x, rope, sm_scale=1.0, return_lse=True), State)


def test_options_are_known_by_name() -> None:
    plan = example_plan()
    KVCache.from_plan(plan, 1, 64, sink_len=0, windows=None)
    PagedKVCache.from_plan(plan, 8, page_size=16, windows=None)
    with pytest.raises(TypeError, match="sink_length"):
        KVCache.from_plan(plan, 1, 64, sink_length=0)  # type: ignore[call-arg]  # what is tested
    with pytest.raises(TypeError, match="window_len"):
        PagedKVCache.from_plan(plan, 8, window_len=None)  # type: ignore[call-arg]  # the same
    LatentPagedKVCache.from_plan(latent_plan(), 8, page_size=16)
