"""Padded batches: each sequence gets what it would get alone."""

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from kvquant import KVCache, debug, load_cache, save_cache
from kvquant.errors import ConfigError, ShapeError, UnsupportedModelError

transformers = pytest.importorskip("transformers")
from hf_cases import (  # noqa: E402
    FAMILIES,
    GREEDY,
    TOLERANCE,
    WITH_LOGITS,
    assert_answers,
    by_kvquant,
    caching,
    tiny,
    tokens,
)
from slow_cases import mark_slow  # noqa: E402

from kvquant.hf import attention as hf_attention  # noqa: E402
from kvquant.hf.cache import QuantizedCache  # noqa: E402
from kvquant.hf.model import CachedModel  # noqa: E402

OPTIONS = GREEDY | {"max_new_tokens": 8}
LENS = [24, 9, 17]
ROWS: dict[str, Any] = {"k_format": "fp16", "v_format": "fp16", "exact_format": "fp16"}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return by_kvquant(tiny(request.param, **FAMILIES[request.param]).model)


def padded(texts: list[torch.Tensor], *, left: bool) -> dict[str, torch.Tensor]:
    """Ids with 7 where there is padding, and the mask."""
    length = max(map(len, texts))
    ids = torch.full((len(texts), length), 7)
    mask = torch.zeros_like(ids)
    for b, text in enumerate(texts):
        place = slice(length - len(text), length) if left else slice(len(text))
        ids[b, place], mask[b, place] = text, 1
    return {"input_ids": ids, "attention_mask": mask}


def prompts() -> list[torch.Tensor]:
    return [row[:n] for row, n in zip(tokens(3, 24), LENS, strict=True)]


def read(model: Any, text: Any, **options: Any) -> tuple[QuantizedCache, KVCache]:
    """A cache that holds a text, given as ids or as the arguments of a call, and its rows."""
    past, call = QuantizedCache(model, **ROWS), text if isinstance(text, dict) else {}
    model(**(call or {"input_ids": text}), **options, **caching(past))
    assert past.kv is not None
    return past, past.kv


def assert_alone(model: Any, found: Any, texts: Any) -> None:
    """The logits are those of the last tokens of each text alone, from its beginning."""
    for given, text in zip(found, texts, strict=True):
        wanted = model(text[None], **caching(QuantizedCache(model, **ROWS))).logits[0]
        torch.testing.assert_close(given, wanted[-len(given) :], atol=TOLERANCE, rtol=0)


# sequences of a prompt, options, columns of padding before every prompt, and max_seq_len
WAYS: dict[str, tuple[int, dict[str, Any], int, int | None]] = {
    "greedy": (1, {}, 0, None),
    "sampling": (1, {"do_sample": True}, 0, None),
    "beams": (3, {"num_beams": 3}, 0, None),
    "several answers": (2, {"do_sample": True, "num_return_sequences": 2}, 0, None),
    "chunks of 7": (1, {"prefill_chunk_size": 7}, 0, None),
    "chunks of 4": (1, {"prefill_chunk_size": 4}, 6, None),
    "chunks of 1": (1, {"prefill_chunk_size": 1}, 6, 40),
    "a chunk of all": (1, {"prefill_chunk_size": 30}, 6, None),
    "chunks of 1, growing": (1, {"prefill_chunk_size": 1}, 0, None),
}


@pytest.mark.parametrize("case", mark_slow(WAYS, [*WAYS][:-1]))
def test_generate_with_left_padding_gives_what_each_prompt_alone_gets(
    model: Any, case: str
) -> None:
    """Chunks of a prompt may be of any size, and of padding alone."""
    times, options, more, room = WAYS[case]
    past, batch = QuantizedCache(model, **ROWS, max_seq_len=room), padded(prompts(), left=True)
    batch = {name: torch.nn.functional.pad(x, (more, 0)) for name, x in batch.items()}
    given = model.generate(**batch, **caching(past), **OPTIONS | options, **WITH_LOGITS)
    past.check()
    assert past.kv is not None and past.get_seq_length() == 31 + more
    assert past.kv.seq_lens.view(3, times)[:, 0].tolist() == [n + 7 for n in LENS]
    mask = batch["attention_mask"].repeat_interleave(len(given.sequences) // 3, dim=0)
    assert_answers(model, given, mask)


def test_logits_of_padded_texts_are_those_of_each_alone(model: Any) -> None:
    """On either side, in two parts and then token by token, with the positions that generate
    gives; what stands in padding's columns is finite."""
    more = tokens(3, 5)
    for left in (True, False):
        call = padded(prompts(), left=left)
        mask, past, found = call["attention_mask"], QuantizedCache(model, **ROWS), []
        ids = torch.cat([call["input_ids"], more], dim=1)
        for begin, end in ((0, 11), (11, 24), (24, 25), (25, 27), (27, 29)):
            if end > 24:
                mask = torch.cat([mask, torch.ones(3, end - begin, dtype=mask.dtype)], dim=1)
            places = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, begin:]
            out = model(
                ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=places,
                **caching(past),
            )
            assert past.get_seq_length() == end
            found.append(out.logits)
        given = torch.cat(found, dim=1)
        assert bool(given.isfinite().all())
        ours, texts = (one[its.bool()] for one, its in zip(given, mask, strict=True)), prompts()
        assert_alone(model, ours, map(torch.cat, zip(texts, more, strict=True)))


def test_models_may_count_the_padding_before_a_text(llama: Any) -> None:
    """As they do without position_ids: distances are the same."""
    (past, kv), more = read(llama, padded(prompts(), left=True)), tokens(3, 2)
    assert kv.start_positions.tolist() == [24 - n for n in LENS]
    given = torch.cat([llama(more[:, i : i + 1], **caching(past)).logits for i in range(2)], dim=1)
    assert_alone(llama, given, map(torch.cat, zip(prompts(), more, strict=True)))


@pytest.mark.parametrize("is_copy", [False, True], ids=["", "copy"])
def test_positions_that_attention_is_not_shown_are_seen_at_the_decoder(is_copy: bool) -> None:
    own = by_kvquant(tiny("Persimmon", num_attention_heads=2).model)
    past = QuantizedCache(own, **ROWS)
    past = copy.deepcopy(past) if is_copy else past
    batch = padded(prompts(), left=True)
    found = own.generate(**batch, **caching(past), **OPTIONS, **WITH_LOGITS)
    assert_answers(own, found, batch["attention_mask"])
    with pytest.raises(ConfigError, match="go on from other positions"):
        own(tokens(3, 1), **caching(past), position_ids=torch.full((3, 1), 31))
    assert past.kv is not None and past.kv.seq_lens.tolist() == [n + 7 for n in LENS]


def test_the_hook_on_the_decoder_goes_where_it_is_not_needed(llama: Any) -> None:
    persimmon = by_kvquant(tiny("Persimmon", num_attention_heads=2).model)
    for own, is_needed in ((llama, False), (persimmon, True)):
        hooks = own.get_decoder()._forward_pre_hooks
        past, unused = QuantizedCache(own), QuantizedCache(own)
        assert len(hooks) == 2
        own(tokens(1, 4), **caching(past))
        assert len(hooks) == 1 + is_needed and unused.get_seq_length() == 0
        del past, unused
        gc.collect()
        assert not hooks


def test_a_hook_that_goes_while_a_call_begins_does_nothing() -> None:
    """torch has taken the hooks of the call by then, and gives this one no keywords."""
    own = by_kvquant(tiny("Persimmon", num_attention_heads=2).model)
    caches = [QuantizedCache(own)]

    def drop(*call: object) -> None:
        caches.clear()
        gc.collect()

    own.get_decoder().register_forward_pre_hook(drop, prepend=True)
    found = own(tokens(1, 4)).logits
    assert not caches and torch.equal(found, own(tokens(1, 4)).logits)


def test_a_padded_conversation_goes_on(model: Any) -> None:
    """A second turn of other lengths behind the first answers, and one that lay in a file."""
    first = padded(prompts(), left=True)
    turns = [row[:n] for row, n in zip(tokens(3, 40)[:, 30:], (4, 10, 1), strict=True)]
    second, past = padded(turns, left=True), QuantizedCache(model, **ROWS)
    answers = model.generate(**first, **caching(past), **OPTIONS)
    ids = torch.cat([answers, second["input_ids"]], dim=1)
    ones = torch.ones(3, 8, dtype=torch.int64)
    mask = torch.cat([first["attention_mask"], ones, second["attention_mask"]], dim=1)
    given = model.generate(ids, attention_mask=mask, **caching(past), **OPTIONS, **WITH_LOGITS)
    assert_answers(model, given, mask)


def test_a_padded_cache_goes_on_from_a_file(llama: Any, tmp_path: Path) -> None:
    call, past = padded(prompts(), left=True), QuantizedCache(llama, k_format="int4", recent_len=8)
    answers = llama.generate(**call, **caching(past), **OPTIONS)
    assert past.kv is not None
    save_cache(past.kv, tmp_path / "cache.safetensors")
    loaded = QuantizedCache(load_cache(tmp_path / "cache.safetensors", max_seq_len=60))
    assert loaded.get_seq_length() == 31
    mask = torch.cat([call["attention_mask"], torch.ones(3, 8, dtype=torch.int64)], dim=1)
    found = [
        llama.generate(answers, attention_mask=mask, **caching(one), **OPTIONS).tolist()
        for one in (past, loaded)
    ]
    assert found[0] == found[1]


def test_masks_that_do_not_fit_the_cache_are_refused(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = padded(prompts(), left=True)
    (past, kv), mask = read(llama, call), call["attention_mask"]

    def run(columns: int, mask: torch.Tensor) -> None:
        llama(tokens(3, columns), attention_mask=mask, **caching(past))

    def behind(*new: int) -> torch.Tensor:
        return torch.cat([mask, torch.tensor([new]).T], dim=1)

    with pytest.raises(ConfigError, match=r"has 24 columns, of 24 in the cache and 1 new"):
        run(1, mask)
    with pytest.raises(ConfigError, match=r"shows \[24, 24, 24\] tokens .* has \[24, 9, 17\]"):
        run(2, torch.ones(3, 26))
    for one in (torch.ones(3, 25), behind(1, 1, 0)):
        with pytest.raises(ConfigError, match="mask of a step shows other tokens"):
            run(1, one)
    assert kv.seq_lens.tolist() == LENS
    run(1, behind(1, 1, 1))
    past.check()
    monkeypatch.setattr(debug, "may_read", lambda tensor: False)  # as on CUDA
    mask = behind(1, 1, 1)
    run(1, behind(0, 1, 1))
    with pytest.raises(ConfigError, match="mask of a step shows other tokens"):
        past.check()
    past.check()


def test_columns_are_counted_and_cropped_with_their_padding(llama: Any) -> None:
    past, kv = read(llama, padded(prompts(), left=False))
    assert kv.seq_lens.tolist() == LENS
    with pytest.raises(ConfigError, match=r"crop\(15\) is not possible, as in transformers"):
        past.crop(15)
    past.crop(0)
    past.crop(-10)  # of the columns
    assert past.get_seq_length() == 14 and kv.seq_lens.tolist() == [14, 9, 14]
    past.batch_select_indices(torch.tensor([1, 0]))
    past.batch_repeat_interleave(2)
    assert past.kv is kv and kv.seq_lens.tolist() == [9, 9, 14, 14]
    past.reorder_cache(torch.tensor([2, 0, 1, 3]))
    past.crop(-4)
    assert past.get_seq_length() == 10 and kv.seq_lens.tolist() == [10, 9, 9, 10]
    past.crop(-11)
    assert kv.seq_lens.tolist() == [0] * 4


def test_padding_read_without_positions_does_not_go_on_with_others(llama: Any) -> None:
    text = padded(prompts(), left=True)
    past, _ = read(llama, {name: given[:, :-1] for name, given in text.items()})
    with pytest.raises(ConfigError, match="go on from other positions"):
        llama.generate(**text, **caching(past), **OPTIONS)


def test_what_the_owner_of_the_rows_changes_is_seen(llama: Any) -> None:
    for is_crop in (True, False):
        past, kv = read(llama, tokens(3, 24))
        if is_crop:
            kv.crop([24, 10, 10])  # the longest one stays
        else:
            kv.start_positions.add_(torch.tensor([0, 0, 3]))
        with pytest.raises(ConfigError, match="go on from other positions"):
            llama(tokens(3, 1), **caching(past))


@pytest.mark.parametrize("dequantize", [False, True], ids=["kernel", "dequantize"])
def test_generate_begins_anew_where_the_owner_has_reset_the_rows(
    llama: Any, dequantize: bool
) -> None:
    options = ROWS | {"dequantize": dequantize}
    past, text = QuantizedCache(llama, **options), tokens(3, 40)
    llama.generate(tokens(3, 24), **caching(past), **OPTIONS)
    assert past.kv is not None
    past.kv.reset()
    assert past.get_seq_length() == 0
    wanted = llama.generate(text, **caching(QuantizedCache(llama, **options)), **OPTIONS)
    assert torch.equal(llama.generate(text, **caching(past), **OPTIONS), wanted)
    assert past.kv.seq_lens.tolist() == [47] * 3


def test_generate_goes_on_from_what_another_has_read_into_the_rows(llama: Any) -> None:
    own, text = CachedModel(llama), tokens(3, 30)
    kv = own.new_cache(3, 64, **ROWS)
    past = QuantizedCache(kv)
    own.prefill(kv, text[:, :20])
    assert past.get_seq_length() == 20
    wanted = llama.generate(text, **caching(QuantizedCache(llama, **ROWS)), **OPTIONS)
    assert torch.equal(llama.generate(text, **caching(past), **OPTIONS), wanted)


def test_sequences_follow_what_the_owner_has_cropped(llama: Any) -> None:
    for follow, given, columns in (
        ("batch_select_indices", torch.arange(3), 10),
        ("reorder_cache", torch.arange(3), 10),
        ("batch_repeat_interleave", 1, 10),
        ("crop", -2, 8),
    ):
        text = tokens(3, 24)
        past, kv = read(llama, text)
        kv.crop([10, 10, 10])
        getattr(past, follow)(given)
        assert past.get_seq_length() == columns, follow
        found = llama(text[:, columns : columns + 4], **caching(past)).logits
        assert_alone(llama, found, text[:, : columns + 4])


def test_an_empty_cache_takes_any_beginning(llama: Any) -> None:
    """Whatever positions were told by a call that has failed, or that was cropped to nothing."""
    past = QuantizedCache(llama, **ROWS, max_seq_len=32)
    long = padded([tokens(40)[:n] for n in (40, 36)], left=True)
    with pytest.raises(ShapeError, match="max_seq_len is 32"):
        llama(**long, **caching(past))
    llama(**padded(prompts()[:2], left=True), **caching(past))
    assert past.kv is not None and past.kv.seq_lens.tolist() == LENS[:2]
    past.crop(-24)
    llama(tokens(2, 12), **caching(past))
    assert past.kv.seq_lens.tolist() == [12, 12]
    assert past.kv.start_positions.tolist() == [0, 0]


def test_a_call_without_the_cache_leaves_it_alone(llama: Any) -> None:
    text = tokens(3, 24)
    past, kv = read(llama, text)
    mask = torch.zeros(3, 1, 24, 24).masked_fill(~torch.ones(24, 24).tril().bool(), -torch.inf)
    found = llama(text, attention_mask=mask, use_cache=False).logits  # no mask is made
    assert torch.allclose(found, llama(text, use_cache=False).logits, atol=1e-4)
    assert past.get_seq_length() == 24 and kv.seq_lens.tolist() == [24] * 3


def test_a_mask_of_the_callers_own_leaves_the_tokens_before(llama: Any) -> None:
    past, text = QuantizedCache(llama, **ROWS), tokens(3, 40)
    for part in (text[:, :18], text[:, 18:20]):
        llama(part, **caching(past))
    with pytest.raises(UnsupportedModelError, match="not the causal one"):
        llama(text[:, 20:22], attention_mask=torch.zeros(3, 1, 2, 22), **caching(past))
    assert past.get_seq_length() == 20
    llama(text[:, 20:22], **caching(past))
    assert past.kv is not None and past.kv.seq_lens.tolist() == [22] * 3


def test_the_first_token_tells_its_position(llama: Any) -> None:
    _, kv = read(llama, tokens(2, 1), position_ids=torch.full((2, 1), 5))
    assert kv.start_positions.tolist() == [5, 5]


def mostly_padding(model: Any) -> tuple[QuantizedCache, KVCache]:
    """A batch of which one sequence has lost its tokens, and has its padding left."""
    call = padded([tokens(12)[:n] for n in (12, 3)], left=True)
    places = (call["attention_mask"].cumsum(1) - 1).clamp(min=0)
    past, kv = read(model, call, position_ids=places)
    past.crop(-3)
    assert kv.seq_lens.tolist() == [9, 0]
    return past, kv


@pytest.mark.parametrize("case", ["positions", "attention", "behind a layer"])
def test_a_call_that_fails_leaves_no_position_behind(
    llama: Any, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk says that the second sequence begins at 5; it is refused, be it for another
    reason. A step that says so of 0 comes then."""
    (past, kv), text = mostly_padding(llama), tokens(2, 8)
    places = torch.stack([torch.arange(9, 13), torch.arange(5, 9)])
    error: type[Exception] = ZeroDivisionError
    with monkeypatch.context() as patch:
        if case == "positions":
            places[0] += 1
            error = ConfigError
        elif case == "attention":
            patch.setattr(hf_attention, "causal_attention", lambda *_: 1 / 0)
        else:
            patch.setattr(llama.model.layers[0].mlp, "forward", lambda _: 1 / 0)
        with pytest.raises(error):
            llama(text[:, :4], position_ids=places, **caching(past))
    if case == "behind a layer":
        past.crop(0)
    assert past.get_seq_length() == 9 and kv.start_positions.tolist() == [0, 0]
    for column in (0, 1):
        places = torch.tensor([[9 + column], [column]])
        found = llama(text[:, column : column + 1], position_ids=places, **caching(past)).logits
    past.check()
    assert kv.seq_lens.tolist() == [11, 2]
    assert_alone(llama, found, (torch.cat([tokens(12)[:9], text[0, :2]]), text[1, :2]))


def test_columns_of_padding_are_no_tokens(llama: Any) -> None:
    """A cache that was cropped to its padding takes a text from its beginning."""
    text, call = tokens(2, 9), padded([tokens(14)[:3], tokens(14)[:2]], left=True)
    call = {name: torch.nn.functional.pad(given, (11, 0)) for name, given in call.items()}
    past, kv = read(llama, call)
    past.crop(-3)
    assert kv.seq_lens.tolist() == [0, 0] and past.get_seq_length() == 11
    with pytest.raises(ConfigError, match=r"has 9 columns, of 11 in the cache and 9 new ones"):
        llama(text, attention_mask=torch.ones(2, 9), **caching(past))
    found = llama(text, position_ids=torch.arange(9)[None], **caching(past)).logits
    assert kv.seq_lens.tolist() == [9, 9] and past.get_seq_length() == 20
    assert_alone(llama, found, text)


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("is_pickled", [False, True], ids=["copied", "pickled"])
def test_a_copy_knows_its_padding(llama: Any, left: bool, is_pickled: bool) -> None:
    """Of a cache whose memory had another text before."""
    past, call = QuantizedCache(llama, **ROWS), padded([tokens(8)[:6], tokens(8)[:4]], left=left)
    sides = (2, 0) if left else (0, 2)  # more than the longest needs
    call = {name: torch.nn.functional.pad(given, sides) for name, given in call.items()}
    places = (call["attention_mask"].cumsum(1) - 1).clamp(min=0)
    for _ in range(2):
        past.reset()
        llama(**call, position_ids=places, **caching(past))
    other = pickle.loads(pickle.dumps(past)) if is_pickled else copy.deepcopy(past)
    more, mask = tokens(2, 2), torch.nn.functional.pad(call["attention_mask"], (0, 2), value=1)
    places = torch.tensor([[6, 7], [4, 5]])
    found = [
        llama(more, attention_mask=mask, position_ids=places, **caching(one)).logits
        for one in (past, other)
    ]
    assert torch.equal(*found)
    for one in (past, other):
        assert one.kv is not None and one.kv.seq_lens.tolist() == [8, 6]
        assert one.get_seq_length() == 10


def test_a_copy_sees_what_the_owner_of_the_rows_had_changed(llama: Any) -> None:
    past, kv = read(llama, tokens(2, 9))
    kv.crop([9, 5])
    other = copy.deepcopy(past)
    assert other.get_seq_length() == 9 and other.past.lens == [9, 5]


def test_a_cache_of_inference_mode_and_a_copy_go_on_outside(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    past, text, mask = QuantizedCache(llama, **ROWS), tokens(2, 13), torch.ones(2, 13).long()
    with torch.inference_mode():
        llama(text[:, :9], **caching(past))
        other = copy.deepcopy(past)
    found = [llama(text[:, 9:12], **caching(one)).logits for one in (past, other)]
    assert torch.equal(*found)
    monkeypatch.setattr(debug, "may_read", lambda tensor: False)  # as on CUDA
    llama(text[:, 12:], attention_mask=mask, **caching(past))
    past.check()
