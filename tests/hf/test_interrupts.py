"""Ctrl-C at any line of a model's call: the cache holds what it says, and the text goes on."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pytest
import torch

pytest.importorskip("transformers")
from hf_cases import FP16, TOLERANCE, by_kvquant, caching, tiny, tokens
from interrupts import interrupted
from slow_cases import mark_slow

from kvquant.errors import KVQuantError
from kvquant.hf import attention, cache, call, continuation, masks
from kvquant.hf.cache import QuantizedCache

COUNTS = {str(one.__file__) for one in (call, cache)}
ALL = COUNTS | {str(one.__file__) for one in (attention, continuation, masks)}


CASES = [("counts", 1, 2), ("counts", 5, 2), ("all", 1, 2), ("all", 5, 2), ("all", 1, 1)]


@torch.no_grad()
@pytest.mark.parametrize("case", mark_slow(CASES, CASES[:1]), ids=str)
def test_a_text_goes_on_behind_an_interrupt_at_any_line(case: tuple[str, int, int]) -> None:
    files, new, layers = case
    model = by_kvquant(tiny("Llama", num_hidden_layers=layers).model)
    ids, number = tokens(2, 15), 0
    wanted = model(ids, use_cache=False).logits

    def read(past: QuantizedCache, first: int, end: int) -> None:
        found = model(ids[:, first:end], **caching(past)).logits
        torch.testing.assert_close(found, wanted[:, first:end], atol=TOLERANCE, rtol=0)

    while True:
        past, number = QuantizedCache(model, **FP16), number + 1
        read(past, 0, 8)
        call = partial(model, ids[:, 8 : 8 + new], **caching(past))
        if not interrupted(call, COUNTS if files == "counts" else ALL, number):
            break
        with suppress(KVQuantError):  # told once, if there is something to take back
            read(past, past.get_seq_length(), 14)
        held = past.get_seq_length()
        assert held in (8, 8 + new, 14)
        read(past, held, 15)
        past.check()
        assert past.kv is not None and past.kv.seq_lens.tolist() == [15, 15]
    assert number > 100
