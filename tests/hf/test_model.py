"""CachedModel: its arguments, and calls that raise (3 s)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvquant import KVCache, QuantizedCache, debug, load_cache, save_cache
from kvquant.cache import contiguous
from kvquant.cache import layer as layers
from kvquant.errors import (
    ConfigError,
    KVQuantError,
    NonFiniteError,
    ShapeError,
    UnsupportedModelError,
)

transformers = pytest.importorskip("transformers")
from hf_cases import (  # noqa: E402
    FP16,
    GEMMA3N,
    SHARING,
    TOLERANCE,
    RoundedCache,
    random_module,
    tiny,
    tokens,
)

from kvquant.hf.model import CachedModel  # noqa: E402
from kvquant.hf.models.configs import cache_layers  # noqa: E402
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


Refused = tuple[Callable[[CachedModel, KVCache], Any], type[KVQuantError], str]
TAKEN = torch.tensor([[1, 2], [3, 4]])
WHOLE, OF_1_TO_20 = r"lens is .*: use whole numbers", r"give \[2\] of 1 to 20"
INT64, OUTSIDE = "give token ids as int64", "is not in the vocabulary"
LOGITS = torch.zeros(2, 256)
TOKENIZER = "needs .*tokenizer=Auto.*from_pretrained"


def called(name: str, *given: Any, **options: Any) -> Callable[[CachedModel, KVCache], Any]:
    """A method of a model, on a cache with two sequences of 8 tokens and room for 32."""
    return lambda model, cache: getattr(model, name)(cache, *given, **options)


def with_tokens(wrong: Any, error: type[KVQuantError], words: str) -> list[Refused]:
    """Tokens that no call takes."""
    return [
        (called("prefill", wrong, append=True), error, words),
        (lambda model, _: model.plain(wrong), error, words),
        (lambda model, _: model.observe(wrong, lambda *shown: None), error, words),
    ]


CALLS: list[Refused] = [
    *(
        (called("prefill", tokens(2, 20), lens, append=True), ConfigError, WHOLE)
        for lens in ([3.9, 7.2], torch.ones(2, dtype=torch.bool), [True, False])
    ),
    (called("prefill", tokens(2, 20), [0, 4], append=True), ShapeError, OF_1_TO_20),
    (called("prefill", tokens(2, 20), [21, 4], append=True), ShapeError, OF_1_TO_20),
    (called("prefill", tokens(2, 40), append=True), ShapeError, "48 tokens do not fit"),
    (called("prefill", TAKEN), ConfigError, r"tokens already .*append=True.*reset\(\)"),
    (called("prefill", TAKEN, append=1), ConfigError, "append is 1: use True or False"),
    *(
        (called("prefill", TAKEN, append=True, chunk=chunk), ConfigError, "chunk .* is not pos")
        for chunk in (0, 2.5, True)
    ),
    *with_tokens(torch.ones(2, 4), ConfigError, r"torch\.float32: give token ids as int64"),
    *with_tokens(torch.ones(2, 4, dtype=torch.bool), ConfigError, INT64),
    *with_tokens(torch.tensor([[1, 2], [3, 256]]), ConfigError, r"token 256 .* ids are 0 to 255"),
    *with_tokens(torch.tensor([[1, 2], [3, -1]]), ConfigError, f"token -1 {OUTSIDE}"),
    *with_tokens([[1, 2], [3, 4]], ConfigError, "tokens are list: give a tensor"),
    *(
        (called("prefill", tokens(*shape), append=True), ShapeError, r"give \[2, 1 or more\]")
        for shape in ((3, 4), (2, 4, 1), (2, 0))
    ),
    (called("step", tokens(2, 1)), ShapeError, r"give \[2\]"),
    (called("step", torch.ones(2)), ConfigError, INT64),
    (called("step", torch.tensor([1, 256])), ConfigError, OUTSIDE),
    *(
        (called("generate", LOGITS, count), ConfigError, "num_tokens .* is not possible: use a w")
        for count in (0, -3, 2.5, True, "4")
    ),
    (called("generate", LOGITS, 26), ShapeError, "33 tokens do not fit into a cache with max_seq"),
    (called("generate", LOGITS[:1], 2), ShapeError, r"logits are \[1, 256\]: give \[2, vocab"),
    (called("generate", [[0.0]], 2), ConfigError, "logits is of type list: give a tensor"),
    *(
        (called("generate", LOGITS, 5, **{name: value}), ConfigError, words)
        for name, value, words in (
            ("eos_token_id", [2, 256], f"eos_token_id 256 {OUTSIDE}"),
            ("eos_token_id", -1, f"eos_token_id -1 {OUTSIDE}"),
            ("eos_token_id", "</s>", "eos_token_id is '</s>': use whole numbers"),
            ("eos_token_id", True, "eos_token_id is torch.bool: use whole numbers"),
            ("choose", [], "choose is of type list: give a function of a tensor"),
            ("choose", lambda x: x[:, 0], "tokens are torch.float32: give token ids as int64"),
            ("choose", lambda x: x.argmax(-1) + 256, OUTSIDE),
        )
    ),
    (lambda model, _: model.stepper("x", 2), ConfigError, "cache is of type str"),  # type: ignore[arg-type]
    (lambda model, _: model.stepper("x", 20), ConfigError, "cache is of type str"),  # type: ignore[arg-type]
    (lambda model, _: model.encode("Nero"), ConfigError, f"encode {TOKENIZER}"),
    (lambda model, _: model.decode([1, 2]), ConfigError, f"decode {TOKENIZER}"),
    (
        lambda model, _: model.generate(model.new_cache(2, 32), LOGITS, 3),
        ConfigError,
        r"holds \[0, 0\] tokens .*so the logits cannot be",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), CALLS, ids=[words for *_, words in CALLS])
def test_refused_calls_change_nothing(
    call: Callable[[CachedModel, KVCache], Any],
    error: type[KVQuantError],
    words: str,
    model: CachedModel,
) -> None:
    cache = model.new_cache(2, 32)
    model.prefill(cache, tokens(2, 8))
    with pytest.raises(error, match=words):
        call(model, cache)
    assert lengths(cache) == [[8, 8]] * 2


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


LLAMA4 = {
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


def test_the_cache_of_transformers_is_no_cache_of_a_loop(model: CachedModel) -> None:
    model.model.set_attn_implementation("kvquant")
    cache: Any = QuantizedCache(model.model)
    with pytest.raises(ConfigError, match=r"type QuantizedCache: give a KVCache, of new_cache or"):
        model.prefill(cache, torch.ones(1, 3, dtype=torch.int64))
    with pytest.raises(ConfigError, match="or the kv of a QuantizedCache"):
        model.step(cache, torch.ones(1, dtype=torch.int64))


def test_models_whose_layers_no_cache_holds_are_refused_in_one_line() -> None:
    for changes, message in (
        (
            SHARING | {"global_head_dim": 320},
            "layer 1 has rows that no format has: head_dim 320 is not supported: use 64, 80",
        ),
        (
            SHARING
            | {"global_head_dim": 64, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
            "layer 0 has 2 KV heads, where a KVCache has one number for all, 1",
        ),
    ):
        with pytest.raises(UnsupportedModelError, match=message) as told:
            tiny("Gemma4Text", **changes).new_cache(1, 8)
        assert "\n" not in str(told.value)


def test_windows_are_those_of_all_layers() -> None:
    model = tiny("Gemma3nText", **GEMMA3N)
    assert model.windows() == {0: 16, 2: 16}
    assert cache_layers(model.config).shared == {2: 0, 3: 1}
