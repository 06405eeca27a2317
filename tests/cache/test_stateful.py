"""KVCache and LatentKVCache under any calls, against a naive model: lists of tokens; 10 s."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from slow_cases import mark_slow

from kvquant import KVCache, LatentFormat, LatentKVCache, RowFormat, dequantize_rows, quantize_rows
from kvquant.errors import ShapeError

MAX = 17
LATENTS = LatentFormat.parse("int8-g4+int8-g8", 256, 32)
KINDS = {  # heads, and the formats of K and V, or of latents and RoPE parts
    "heads": (2, (RowFormat.parse("int3", 64), RowFormat.parse("fp8", 64))),
    "latents": (1, LATENTS.parts),
}

seeds = st.integers(0, 2**32)


@dataclass(frozen=True)
class Token:
    """K or V of a token, [heads, dim] float32: as it came (16 bit), and as its row decodes."""

    exact: torch.Tensor
    rounded: torch.Tensor


@dataclass
class Tokens:
    """Those of a sequence: K and V, and the first behind the sinks whose 16-bit row is kept."""

    pairs: list[tuple[Token, Token]] = field(default_factory=list)
    kept: int = 0

    def __len__(self) -> int:
        return len(self.pairs)

    def copy(self) -> Tokens:
        return Tokens(list(self.pairs), self.kept)


@dataclass
class Model:
    """What a cache should hold."""

    sequences: list[Tokens]
    starts: list[int]


class CacheMachine(RuleBasedStateMachine):
    """Several caches (forks of forks), each beside its model; a rule works on one of them."""

    kind = ""

    @initialize(
        lengths=st.sampled_from([(2, 3), (0, 0), (2, 0), (0, 3), (0, 1), (30, 30)]),
        rollback_len=st.sampled_from([0, 1, 4, 64]),
        batch=st.integers(1, 3),
        max_seq_len=st.sampled_from([0, 4, MAX]),
    )
    def start(
        self, lengths: tuple[int, int], rollback_len: int, batch: int, max_seq_len: int
    ) -> None:
        self.sink_len, self.recent_len = lengths
        self.rollback_len = rollback_len
        kept: Any = {"sink_len": self.sink_len, "recent_len": self.recent_len}
        kept["rollback_len"] = rollback_len
        self.heads, self.formats = KINDS[self.kind]
        if self.kind == "latents":
            sizes: Any = {"fmt": LATENTS, "latent_dim": 256, "rope_dim": 32}
            cache: KVCache = LatentKVCache(2, batch, max_seq_len, **sizes, **kept)
        else:
            k, v = self.formats
            cache = KVCache(2, batch, 2, 64, max_seq_len, k_format=k, v_format=v, **kept)
        cache.start_positions[:] = torch.arange(batch) * 10
        self.pairs = [
            (cache, Model([Tokens() for _ in range(batch)], [10 * b for b in range(batch)]))
        ]

    def pick(self, seed: int) -> tuple[KVCache, Model]:
        return self.pairs[seed % len(self.pairs)]

    @rule(seed=seeds, count=st.integers(0, 7), data=st.data())
    def append(self, seed: int, count: int, data: st.DataObject) -> None:
        cache, model = self.pick(seed)
        room = [min(count, cache.max_seq_len - len(tokens)) for tokens in model.sequences]
        lens = [data.draw(st.integers(0, most)) for most in room]
        generator = torch.Generator().manual_seed(seed)
        axes = cache.batch, self.heads, count
        k, v = (
            torch.randn(*axes, fmt.head_dim, generator=generator).bfloat16() for fmt in self.formats
        )
        for layer in range(2):
            cache.append(layer, k, v, lens)
        k_rounded, v_rounded = (
            dequantize_rows(quantize_rows(x, fmt), fmt)
            for x, fmt in zip((k, v), self.formats, strict=True)
        )
        for b, tokens in enumerate(model.sequences):
            for t in range(lens[b]):
                k_token = Token(k[b, :, t].float(), k_rounded[b, :, t])
                tokens.pairs.append((k_token, Token(v[b, :, t].float(), v_rounded[b, :, t])))
            in_ring = self.recent_len + self.rollback_len
            tokens.kept = max(tokens.kept, len(tokens) - self.sink_len - in_ring)

    def first_recent(self, tokens: Tokens) -> int:
        """The first token after the sinks that is read in 16 bit."""
        recent = max(tokens.kept, len(tokens) - self.sink_len - self.recent_len)
        return self.sink_len + recent if self.recent_len else len(tokens)

    @rule(seed=seeds, over=st.integers(1, 3))
    def append_too_much(self, seed: int, over: int) -> None:
        cache, model = self.pick(seed)
        count = cache.max_seq_len - max(len(tokens) for tokens in model.sequences) + over
        k, v = (torch.ones(cache.batch, self.heads, count, fmt.head_dim) for fmt in self.formats)
        with pytest.raises(ShapeError, match="would grow to"):
            cache.append(seed % 2, k, v)

    @rule(seed=seeds, data=st.data())
    def crop(self, seed: int, data: st.DataObject) -> None:
        cache, model = self.pick(seed)
        keep = [data.draw(st.integers(0, len(tokens))) for tokens in model.sequences]
        cache.crop(keep)
        self.cut(model, keep)

    @rule(seed=seeds, keep=st.integers(0, MAX))
    def crop_all(self, seed: int, keep: int) -> None:
        cache, model = self.pick(seed)
        cache.crop(keep)
        self.cut(model, [keep] * cache.batch)

    def cut(self, model: Model, keep: list[int]) -> None:
        for tokens, length in zip(model.sequences, keep, strict=True):
            del tokens.pairs[length:]
            tokens.kept = min(tokens.kept, max(len(tokens) - self.sink_len, 0))

    @rule(seed=seeds, data=st.data())
    def reorder(self, seed: int, data: st.DataObject) -> None:
        cache, model = self.pick(seed)
        places = st.lists(
            st.integers(0, cache.batch - 1), min_size=cache.batch, max_size=cache.batch
        )
        index = data.draw(places)
        cache.reorder(index)
        model.sequences = [model.sequences[i].copy() for i in index]
        model.starts = [model.starts[i] for i in index]

    @rule(seed=seeds, data=st.data())
    def select(self, seed: int, data: st.DataObject) -> None:
        cache, model = self.pick(seed)
        index = data.draw(st.lists(st.integers(0, cache.batch - 1), min_size=1, max_size=4))
        cache.select(index)
        taken = self.taken(model, index)
        model.sequences, model.starts = taken.sequences, taken.starts

    @precondition(lambda self: len(self.pairs) < 4)
    @rule(seed=seeds, data=st.data())
    def fork(self, seed: int, data: st.DataObject) -> None:
        cache, model = self.pick(seed)
        index = data.draw(st.lists(st.integers(0, cache.batch - 1), min_size=1, max_size=4))
        self.pairs.append((cache.fork(index), self.taken(model, index)))

    @precondition(lambda self: len(self.pairs) < 4)
    @rule(seed=seeds, times=st.integers(1, 2))
    def repeat(self, seed: int, times: int) -> None:
        cache, model = self.pick(seed)
        index = [b for b in range(cache.batch) for _ in range(times)]
        self.pairs.append((cache.repeat(times), self.taken(model, index)))

    @rule(seed=seeds, more=st.integers(0, 9))
    def grow(self, seed: int, more: int) -> None:
        cache, _ = self.pick(seed)
        cache.grow(cache.max_seq_len + more)

    @rule(seed=seeds)
    def reset(self, seed: int) -> None:
        if seed % 3:
            return
        cache, model = self.pick(seed)
        cache.reset()
        model.sequences, model.starts = [Tokens() for _ in model.sequences], [0] * len(model.starts)

    @staticmethod
    def taken(model: Model, index: list[int]) -> Model:
        return Model([model.sequences[i].copy() for i in index], [model.starts[i] for i in index])

    @invariant()
    def caches_hold_what_their_models_say(self) -> None:
        for cache, model in getattr(self, "pairs", []):
            lens = [len(tokens) for tokens in model.sequences]
            assert cache.seq_lens.tolist() == lens
            assert cache.start_positions.tolist() == model.starts
            assert cache.positions.tolist() == [
                n + start for n, start in zip(lens, model.starts, strict=True)
            ]
            for layer in range(2):
                for i, got in enumerate(cache.dequantized(layer)):
                    assert got.shape == (len(lens), self.heads, max(lens), self.formats[i].head_dim)
                    for b, tokens in enumerate(model.sequences):
                        if tokens.pairs:
                            packed = range(self.sink_len, self.first_recent(tokens))
                            values = [
                                pair[i].rounded if t in packed else pair[i].exact
                                for t, pair in enumerate(tokens.pairs)
                            ]
                            assert torch.equal(got[b, :, : len(tokens)], torch.stack(values, 1))
                        assert not got[b, :, len(tokens) :].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("examples", mark_slow([8, 40], [8]))
def test_any_calls_keep_what_the_model_holds(examples: int, kind: str) -> None:
    CacheMachine.kind = kind
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=examples, stateful_step_count=25)
    )
