"""At the peak two caches are there: the 16-bit one and another one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from families import CHANGES
from hf_cases import random_module, tiny

from kvquant import KVCache
from kvquant.cache.layer import SPARE
from kvquant.calibration.fidelity import Scheme, options_of
from kvquant.cli.demo import MODEL
from kvquant.errors import ConfigError
from kvquant.evaluation import evaluate as module
from kvquant.evaluation.decoding import Caches, Reading, ask_all
from kvquant.evaluation.divergence import diverge
from kvquant.evaluation.evaluate import Example, Sizes, Task, evaluate
from kvquant.evaluation.generation import Sampling, free_run
from kvquant.evaluation.prompts import Asked, Prompt
from kvquant.hf.hybrid import decoder_of
from kvquant.hf.model import CachedModel

CHOICES = [Scheme("int8", "int8", 4, 16), Scheme("int4-g4", "int4-g4")]
LENGTH = 48


class Live:
    """The caches that are there, and the most bytes of them at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._caches: list[weakref.ref[KVCache]] = []
        self.peak, self.most, self.largest = 0, 0, 0
        make = KVCache.__init__

        def noted(cache: KVCache, *args: Any, **options: Any) -> None:
            make(cache, *args, **options)
            if cache.device.type != "meta":
                self._caches.append(weakref.ref(cache))
                there = [one for ref in self._caches if (one := ref()) is not None]
                self.peak = max(self.peak, sum(one.nbytes for one in there))
                self.most = max(self.most, len(there))

        monkeypatch.setattr(KVCache, "__init__", noted)


def run_freely(model: CachedModel, new_tokens: int, reading: Reading) -> None:
    tokens = torch.arange(LENGTH)[None] % 90
    list(free_run(model, tokens, new_tokens, CHOICES, reading, [Sampling()] * 2))


def score(model: CachedModel, new_tokens: int, reading: Reading) -> None:
    windows = torch.arange(LENGTH + new_tokens)[None] % 90
    list(diverge(model, windows, LENGTH, CHOICES, reading))


def go_far(model: CachedModel, new_tokens: int, reading: Reading) -> None:
    """Layers with a window have then forgotten what the prompt's end saw, so that the prompt is
    read again; its first cache is gone by then."""
    tokens = torch.arange(LENGTH)[None] % 90
    more = torch.arange(new_tokens)[None] % 90
    caches = Caches(model, tokens, new_tokens, reading)
    before = [x.clone() for x in caches.exact.dequantized(0)]
    model.prefill(caches.original(), more, append=True)
    assert all(map(torch.equal, before, caches.original().dequantized(0)))
    for choice in CHOICES:
        assert caches.copy(choice).seq_lens.tolist() == [LENGTH]


def ask(model: CachedModel, new_tokens: int, reading: Reading) -> None:
    asked = Asked([5] * new_tokens, [6, 7], LENGTH)  # beyond what a crop takes back exactly
    prompts = [Prompt([*range(5, 5 + LENGTH)], [asked, asked, asked])]
    list(ask_all(model, prompts, CHOICES, reading))


MODELS: dict[str, Callable[[], CachedModel]] = {
    "whole": lambda: tiny("Llama"),
    "windowed": lambda: tiny("Mistral", sliding_window=16, max_position_embeddings=2048),
    "hybrid": lambda: decoder_of(random_module("qwen3_next", CHANGES["qwen3_next"])),
}
FROM_ROWS = Reading(chunk=16, from_rows=True)


@pytest.mark.parametrize(
    ("kind", "reading", "task", "new_tokens"),
    [
        ("whole", Reading(), run_freely, 8),
        ("whole", FROM_ROWS, run_freely, 8),
        ("whole", Reading(), score, 8),
        ("whole", Reading(), ask, 70),
        ("windowed", Reading(), run_freely, 8),
        ("windowed", Reading(), ask, 70),
        ("windowed", Reading(), go_far, SPARE + 2),
        ("hybrid", Reading(), run_freely, 8),
        ("hybrid", FROM_ROWS, score, 8),
        pytest.param("hybrid", Reading(), ask, 70, marks=pytest.mark.slow),
    ],
)
def test_two_caches_are_there_at_a_time(
    kind: str, reading: Reading, task: Any, new_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS[kind]()
    live = Live(monkeypatch)
    task(model, new_tokens, reading)
    size = LENGTH + new_tokens + (2 if task is ask else 0)
    exact, *others = (
        model.new_cache(1, size, **options_of(one, is_latent=False)).nbytes
        for one in (Scheme(model.exact_format, model.exact_format), *CHOICES)
    )
    assert live.most == 2
    assert live.peak <= exact + max(others)


def test_the_memory_that_is_asked_for_is_what_caches_take(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CachedModel.from_pretrained(MODEL)
    live = Live(monkeypatch)
    sizes = Sizes((160,), 2, 1, (0,), passages=2, scored=8, new_tokens=64, batch=2)
    found = evaluate(
        model, ["int8", "int4,recent=0"], task=Task(kinds=("kl", "generation")), sizes=sizes
    )
    assert live.most == 2
    assert 0.9 * found["cache_bytes"] < live.peak <= found["cache_bytes"]


def test_long_prompts_of_a_user_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CachedModel.from_pretrained(MODEL)
    few = Sizes(new_tokens=8)
    kind = Task(kinds=("generation",))
    prompts = [Example([5] * 200), Example([5] * 400)]
    found = evaluate(model, ["int8"], task=kind, sizes=few, examples=prompts)
    cache = model.new_cache(1, 408, k_format="bf16", v_format="bf16", sink_len=0, recent_len=0)
    assert cache.nbytes < found["cache_bytes"] < 2.2 * cache.nbytes

    monkeypatch.setattr(module, "free_bytes", lambda device: found["cache_bytes"] - 1)
    with pytest.raises(ConfigError, match=r"two caches, 16 bit and packed, need .* shorter --pro"):
        evaluate(model, ["int8"], task=kind, sizes=few, examples=prompts)
