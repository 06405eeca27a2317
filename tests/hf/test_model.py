"""CachedModel: its arguments, calls that raise, texts that end, tokens that the caller chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvquant import KVCache, debug, load_cache, save_cache
from kvquant.cache import contiguous
from kvquant.cache import layer as layers
from kvquant.errors import ConfigError, NonFiniteError, ShapeError, UnsupportedModelError

transformers = pytest.importorskip("transformers")
from hf_cases import FP16, SHARING, TOLERANCE, RoundedCache, random_module, tiny, tokens  # noqa: E402

from kvquant.hf import model as models  # noqa: E402
from kvquant.hf.hybrid import HybridModel  # noqa: E402
from kvquant.hf.model import CachedModel  # noqa: E402
from kvquant.hf.models.positions import positions_of  # noqa: E402

LONG = [4.0] * 32
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 32,
    "long_factor": LONG,
}


@pytest.fixture(scope="module")
def model() -> CachedModel:
    return tiny("Llama")


def lengths(cache: KVCache) -> list[list[int]]:
    return [at.seq_lens.tolist() for at in cache.layers]


def test_the_last_places_of_a_cache_are_taken(model: CachedModel) -> None:
    cache = model.new_cache(2, 12)
    logits = model.prefill(cache, tokens(2, 8), torch.tensor([7, 8], dtype=torch.int32))
    assert model.generate(cache, logits, 1).shape == (2, 1) and lengths(cache) == [[7, 8]] * 2
    assert model.generate(cache, logits, 5).shape == (2, 5)


def test_tokens_of_32_bit_are_taken(model: CachedModel) -> None:
    one, two = (model.new_cache(2, 32, **FP16) for _ in range(2))
    given, expected = model.prefill(one, tokens(2, 4).int()), model.prefill(two, tokens(2, 4))
    assert torch.equal(given, expected)
    assert torch.equal(model.step(one, tokens(2).int()), model.step(two, tokens(2)))


def test_tokens_on_another_device_are_not_read(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = model.new_cache(2, 32)
    monkeypatch.setattr(debug, "may_read", lambda tensor: False)  # as on CUDA
    with pytest.raises(IndexError):
        model.step(cache, torch.tensor([1, 256]))
    assert lengths(cache) == [[0, 0]] * 2


def test_what_is_no_model_is_refused() -> None:
    for wrong in ("meta-llama/Llama-3.2-1B", torch.nn.Linear(2, 2), None):
        with pytest.raises(ConfigError, match=r"give a causal language model of transformers, or"):
            CachedModel(wrong)


# Calls that raise change nothing


@pytest.mark.parametrize("past", [0, 40])
@pytest.mark.parametrize("chunk", [5, 12, 100])
def test_a_prompt_that_fails_leaves_windows_as_they_were(
    chunk: int, past: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its last layer, and between chunks: also where rings have been overwritten."""
    monkeypatch.setattr(layers, "SPARE", 8)
    monkeypatch.setattr(contiguous, "SPARE", 8)
    model = tiny("Mistral", sliding_window=16)
    cache, text = model.new_cache(2, 160, recent_len=4), tokens(2, 100)
    if past:
        model.prefill(cache, text[:, :past], [past, past - 9])
    wanted, calls = cache.fork(), list[int]()

    def fail(done: int) -> None:
        calls.append(done)
        if len(calls) == min(3, 100 // chunk):
            raise KeyboardInterrupt

    def fail_in_layer(*_: Any) -> None:
        raise MemoryError

    with pytest.raises(KeyboardInterrupt):
        model.prefill(cache, text, append=True, chunk=chunk, progress=fail)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(cache.layers[-1], "append", fail_in_layer)
        model.prefill(cache, text, append=True, chunk=chunk)
    q = torch.ones(2, model.config.num_attention_heads, cache.head_dim)
    for one in (cache, wanted):
        model.prefill(one, text[:, :3], append=True)
    assert lengths(cache) == lengths(wanted)
    for index in range(2):
        assert torch.equal(cache.attend(index, q), wanted.attend(index, q))


def test_generate_that_fails_adds_nothing(model: CachedModel) -> None:
    cache, steps = model.new_cache(1, 64), []
    logits = model.prefill(cache, tokens(1, 8))

    def fail(*_: Any) -> None:
        steps.append(0)
        if len(steps) == 4:
            raise KeyboardInterrupt

    hook = model.model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model.generate(cache, logits, 9)
    hook.remove()
    assert lengths(cache) == [[8]] * 2


def test_layers_of_unequal_lengths_are_told_and_stay(model: CachedModel) -> None:
    cache = model.new_cache(1, 32)
    rows = torch.zeros(1, 2, 3, 64)
    cache.append(0, rows, rows)
    calls: list[Callable[[], Any]] = [
        lambda: model.prefill(cache, tokens(1, 4)),
        lambda: model.step(cache, tokens(1)),
        lambda: model.generate(cache, torch.zeros(1, 256), 2),
    ]
    for call in calls:
        with pytest.raises(ShapeError, match="layers hold different lengths"):
            call()
        assert lengths(cache) == [[3], [0]]


# Positions


def test_rows_of_a_learned_table_that_no_token_gets_are_no_positions() -> None:
    opt = random_module("opt", {"max_position_embeddings": 16})  # and two rows that none gets
    assert positions_of(opt) == 16


def test_positions_beyond_a_learned_table_are_refused_before_anything_is_appended() -> None:
    model = tiny(
        "GPT2",
        max_position_embeddings=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    cache, text = model.new_cache(2, 32), tokens(2, 20)
    with pytest.raises(ShapeError, match="20 positions are needed, and the model has learned 16"):
        model.prefill(cache, text, [3, 20], chunk=4)
    assert lengths(cache) == [[0, 0]] * 2
    logits = model.prefill(cache, text[:, :14])
    with pytest.raises(ShapeError, match="17 positions are needed"):
        model.generate(cache, logits, 4)
    model.generate(cache, logits, 3)
    with pytest.raises(ShapeError, match="17 positions are needed"):
        model.step(cache, text[:, 0])
    assert lengths(cache) == [[16, 16]] * 2
    cache.crop(2)
    cache.start_positions += 14
    with pytest.raises(ShapeError, match="17 positions are needed"):
        model.step(cache, text[:, 0])
    for call in (model.plain, lambda given: model.observe(given, lambda *shown: None)):
        with pytest.raises(ShapeError, match="20 positions are needed"):
            call(text)


def test_keys_that_are_turned_by_the_length_of_the_text_are_all_turned_alike() -> None:
    model = tiny("Llama", rope_parameters=LONGROPE)
    text, past, message = tokens(2, 60), RoundedCache(), r"rope_type 'longrope'.* 32 positions"
    expected = [model.plain(text[:, :50], past)]
    expected += [model.plain(column[:, None], past) for column in text[:, 50:54].unbind(1)]
    cache = model.new_cache(2, 64, **FP16)
    given = [model.prefill(cache, text[:, :50], chunk=7)]
    given += [model.step(cache, column) for column in text[:, 50:54].unbind(1)]
    for got, wanted in zip(given, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)
    model.prefill(cache, text[:, :5], append=True, chunk=2)  # on the same side
    cache = model.new_cache(2, 64, **FP16)
    model.prefill(cache, text[:, :30], chunk=7)
    model.step(cache, text[:, 0])
    calls: list[Callable[[], Any]] = [
        lambda: model.prefill(cache, text[:, :9], append=True),
        lambda: model.generate(cache, torch.zeros(2, 256), 9),
        lambda: model.prefill(model.new_cache(2, 64), text, [60, 20]),
    ]
    for call in calls:
        with pytest.raises(UnsupportedModelError, match=message):
            call()
    assert lengths(cache) == [[31, 31]] * 2


def test_keys_that_are_turned_with_every_token_end_where_that_begins() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = tiny("Llama", rope_parameters=rope, max_position_embeddings=32)
    cache, text = model.new_cache(1, 64, **FP16), tokens(1, 60)
    given = model.prefill(cache, text[:, :50], chunk=7)  # in one
    torch.testing.assert_close(
        given, model.plain(text[:, :50], RoundedCache()), atol=TOLERANCE, rtol=0
    )
    with pytest.raises(UnsupportedModelError, match="and no token after it"):
        model.step(cache, text[:, 50])
    cache.crop(0)
    model.prefill(cache, text[:, :31])
    model.step(cache, text[:, 31])
    with pytest.raises(UnsupportedModelError, match="beyond 32 positions"):
        model.step(cache, text[:, 32])


LLAMA4: dict[str, Any] = {
    "no_rope_layers": [0, 0],
    "floor_scale": 24,
    "attn_scale": 0.5,
    "num_local_experts": 1,
    "intermediate_size_mlp": 96,
}


def test_queries_that_are_scaled_by_their_position_are_scaled_in_every_layer() -> None:
    """Llama 4 asks a layer's cache in the layer; the layers before it have appended already."""
    model = tiny("Llama4Text", **LLAMA4 | {"floor_scale": 8})
    cache, past, text = model.new_cache(2, 40, **FP16), RoundedCache(), tokens(2, 33)
    given = [model.prefill(cache, text[:, :30], chunk=10)]
    given += [model.step(cache, column) for column in text[:, 30:].unbind(1)]
    for got, part in zip(given, [text[:, :30], *text[:, 30:].split(1, dim=1)], strict=True):
        torch.testing.assert_close(got, model.plain(part, past), atol=TOLERANCE, rtol=0)


def test_queries_are_not_scaled_by_the_position_of_another_sequence() -> None:
    model = tiny("Llama4Text", **LLAMA4)
    cache, text = model.new_cache(2, 40, **FP16), tokens(2, 30)
    with pytest.raises(UnsupportedModelError, match="scales queries from position 23 on"):
        model.step(cache, model.prefill(cache, text, [30, 9], chunk=9).argmax(-1))
    cache.reset()
    model.prefill(cache, text[:, :22], [22, 9], chunk=9)
    alone = model.new_cache(1, 40, **FP16)
    model.prefill(alone, text[1:, :9])
    torch.testing.assert_close(
        model.step(cache, text[:, 9])[1:], model.step(alone, text[1:, 9]), atol=TOLERANCE, rtol=0
    )
    with pytest.raises(UnsupportedModelError, match="counts the positions of all sequences alike"):
        model.step(cache, text[:, 10])
    assert lengths(cache) == [[23, 10]] * 2


# Layers


def test_caches_of_layers_of_unlike_head_dim_are_saved_and_forked(tmp_path: Any) -> None:
    model = tiny("Gemma4Text", **SHARING | {"global_head_dim": 512})
    cache, text = model.new_cache(2, 40, recent_len=4), tokens(2, 20)
    assert [(str(at.k_format), at.k_format.head_dim) for at in cache.layers] == [
        ("int8-g8", 64),
        ("int8-g8", 512),
    ]
    model.prefill(cache, text)
    with pytest.raises(ConfigError, match=r"type CachedModel: .* config_dict of a CachedModel"):
        save_cache(cache, tmp_path / "c.safetensors", model=model)  # type: ignore[arg-type]
    save_cache(cache, tmp_path / "c.safetensors", model=model.config_dict)
    copies = [cache.fork(), load_cache(tmp_path / "c.safetensors", model=model.config_dict)]
    expected = model.step(cache, text[:, 0])
    for copy in copies:
        assert torch.equal(model.step(copy, text[:, 0]), expected)


def test_rows_that_are_bad_are_told_before_a_prompt_or_a_step(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debug, "may_read", lambda tensor: False)  # as on CUDA
    rows = torch.full((1, 2, 3, 64), torch.nan)
    calls: list[Callable[[KVCache], Any]] = [
        lambda cache: model.step(cache, tokens(1)),
        lambda cache: model.prefill(cache, tokens(1, 8), append=True),
    ]
    for call in calls:
        cache = model.new_cache(1, 64)
        for index in range(2):
            cache.append(index, rows, rows)
        with pytest.raises(NonFiniteError, match="12 rows of K and 12 of V"):
            call(cache)
        assert lengths(cache) == [[3], [3]]
    assert cache.bad_rows.tolist() == [0, 0]


FREE: dict[str, Any] = {"eos_token_id": ()}  # no text ends


def read(model: CachedModel, batch: int = 2, **options: Any) -> tuple[KVCache, torch.Tensor]:
    """A cache of prompts of unequal lengths, and the logits after them."""
    cache = model.new_cache(batch, 160, **({"sink_len": 2, "recent_len": 4} | options))
    text = tokens(batch, 12)
    return cache, model.prefill(cache, text, [12, 7, 9][:batch])


def end_of_first(texts: torch.Tensor) -> tuple[int, int]:
    """A token that comes early in the first text and late or never in the second, and its place."""
    first, second = texts.tolist()
    for place, token in enumerate(first[:8]):
        if token not in first[:place] and token not in second[:-8]:
            return token, place
    raise AssertionError("give another prompt: no token ends the first text early")


def free_texts(model: CachedModel, count: int, **options: Any) -> torch.Tensor:
    return model.generate(*read(model, **options), count, **FREE)


def assert_same_text(one: KVCache, other: KVCache, sequence: int) -> None:
    """The caches go on alike in this sequence, bit for bit."""
    q = torch.ones(one.batch, 4, one.head_dim)
    for index, (mine, theirs) in enumerate(zip(one.layers, other.layers, strict=True)):
        for name in ("seq_lens", "packed_lens"):
            assert getattr(mine, name)[sequence] == getattr(theirs, name)[sequence]
        found, wanted = one.attend(index, q), other.attend(index, q)
        assert torch.equal(found[sequence], wanted[sequence])


@pytest.mark.parametrize("rollback_len", [4, 64])
def test_a_text_that_ends_first_leaves_what_it_has_alone(
    rollback_len: int, model: CachedModel
) -> None:
    """Behind its end 30 more steps come, after which a crop alone would leave tokens packed."""
    options = {"rollback_len": rollback_len, "recent_len": 8}
    free = free_texts(model, 40, **options)
    end, place = end_of_first(free)
    cache, logits = read(model, **options)
    found = model.generate(cache, logits, 40, eos_token_id=end)
    count = found.shape[1]
    assert count > place + 20
    assert torch.equal(found[1], free[1, :count])
    assert torch.equal(found[0, : place + 1], free[0, : place + 1])
    assert set(found[0, place:].tolist()) == {end}
    assert cache.seq_lens.tolist() == [12 + place, 7 + count - 1]
    wanted, logits = read(model, **options)
    model.generate(wanted, logits, place + 1, **FREE)
    assert_same_text(cache, wanted, 0)


def test_windows_forget_what_came_behind_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layers, contiguous, models):
        monkeypatch.setattr(module, "SPARE", 8)
    model = tiny("Mistral", sliding_window=16)
    end, place = end_of_first(free_texts(model, 50))
    cache, logits = read(model)
    found = model.generate(cache, logits, 50, eos_token_id=end)
    wanted, logits = read(model)
    model.generate(wanted, logits, place + 1, **FREE)
    assert cache.seq_lens.tolist() == [12 + place, 7 + found.shape[1] - 1]
    assert_same_text(cache, wanted, 0)


def test_the_model_says_which_tokens_end_a_text(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = free_texts(model, 12)
    starts = free[:, 0].tolist()
    assert starts[0] != starts[1]
    for ends, count in ((starts, 1), (None, 12)):
        monkeypatch.setattr(model.model.generation_config, "eos_token_id", ends)
        cache, logits = read(model)
        assert torch.equal(model.generate(cache, logits, 12), free[:, :count])
        assert cache.seq_lens.tolist() == [11 + count, 6 + count]
    monkeypatch.setattr(model.model.generation_config, "eos_token_id", starts[0])
    assert model.end_tokens == [starts[0]]
    found = model.generate(*read(model), 12)
    assert set(found[0].tolist()) == {starts[0]} and found.shape[1] > 1


def test_a_hybrid_fills_texts_up_that_have_ended() -> None:
    sizes = {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32}
    model = HybridModel(random_module("falcon_h1", sizes))

    def continued(**options: Any) -> tuple[KVCache, torch.Tensor]:
        cache = model.new_cache(2, 64)
        return cache, model.generate(cache, model.prefill(cache, tokens(2, 6) % 97), 12, **options)

    _, free = continued(**FREE)
    first, second = free.tolist()
    assert first[0] != second[0]
    cache, found = continued(eos_token_id=first[0])
    count = found.shape[1]
    assert found[1].tolist() == second[:count] and set(found[0].tolist()) == {first[0]}
    assert cache.seq_lens.tolist() == [6 + count - 1] * 2


# Tokens that the caller chooses


def test_tokens_are_those_that_are_chosen(model: CachedModel) -> None:
    cache, logits = read(model)
    lens: list[int] = []

    def second(scores: torch.Tensor) -> torch.Tensor:
        lens.append(int(cache.seq_lens[0]))
        return scores.topk(2).indices[:, 1]

    found = model.generate(cache, logits, 6, **FREE, choose=second)
    assert lens == [12, 13, 14, 15, 16, 17]  # each before the next step
    wanted, scores = read(model)
    for column in found.T:
        assert torch.equal(column, second(scores))
        scores = model.step(wanted, column)
    assert not torch.equal(found, free_texts(model, 6))
