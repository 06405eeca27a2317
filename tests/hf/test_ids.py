"""Another text without reset(): generate compares the ids that come with those of the cache."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from kvquant import load_cache, save_cache
from kvquant.errors import ConfigError

transformers = pytest.importorskip("transformers")
from hf_cases import FP16, GREEDY, caching, tokens  # noqa: E402

from kvquant.hf.argument import ARGUMENT  # noqa: E402
from kvquant.hf.cache import QuantizedCache  # noqa: E402

OPTIONS = GREEDY | {"max_new_tokens": 6}
OTHER = r"another text came: .*cache\.reset\(\) before another text"


def text_of(batch: int, columns: int) -> torch.Tensor:
    """Ids other than those of padding."""
    return tokens(batch, columns) % 250 + 1


def changed(text: torch.Tensor, row: int, column: int) -> torch.Tensor:
    found = text.clone()
    found[row, column] = found[row, column] % 250 + 2
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 5},
        {"max_seq_len": 96},
        {"dequantize": True},
        {"return_dict_in_generate": True},
    ],
    ids=lambda options: next(iter(options), ""),
)
def test_another_text_raises_and_changes_nothing(options: dict[str, Any], llama: Any) -> None:
    of_cache = {name: options[name] for name in ("max_seq_len", "dequantize") if name in options}
    given = OPTIONS | {name: one for name, one in options.items() if name not in of_cache}
    past = QuantizedCache(llama, **FP16, **of_cache)
    found = llama.generate(text_of(1, 12), **caching(past), **given)
    turn = torch.cat([getattr(found, "sequences", found), text_of(1, 9)], dim=1)
    held = past.get_seq_length()
    assert held == 17
    for column in (0, 11, 12, held - 1):  # of the prompt, of the answer
        with pytest.raises(
            ConfigError, match=rf"holds 17 tokens, in column {column} of .*{OTHER[21:]}"
        ):
            llama.generate(changed(turn, 0, column), **caching(past), **given)
        assert past.get_seq_length() == held
    if "prefill_chunk_size" in options and ARGUMENT == "past_key_values":
        # an older transformers reads the chunks of a later turn from the first token on again
        with pytest.raises(ConfigError, match="a text is read from its beginning"):
            llama.generate(turn, **caching(past), **given)
        assert past.get_seq_length() == held
        return
    other = copy.deepcopy(past)
    found = llama.generate(turn, **caching(past), **given)  # the same text goes on
    again = llama.generate(changed(turn, 0, held), **caching(other), **given)  # is not held yet
    assert past.get_seq_length() == other.get_seq_length() == turn.shape[1] + 5
    with pytest.raises(ConfigError, match=OTHER):
        third = torch.cat([getattr(again, "sequences", again), text_of(1, 3)], dim=1)
        llama.generate(third, **caching(past), **given)
    past.reset()
    llama.generate(text_of(1, 40), **caching(past), **given)


def test_the_error_tells_what_the_cache_holds(llama: Any) -> None:
    past, text = QuantizedCache(llama), torch.full((2, 8), 7)
    other = torch.cat([llama.generate(text, **caching(past), **OPTIONS)] * 2, dim=1)
    other[1, 3] = 9
    wanted = (
        r"holds 13 tokens, in column 3 of sequence 1 token 7, and token 9 came there\. A cache.*"
        r"In a conversation give the ids that generate returned"
    )
    with pytest.raises(ConfigError, match=wanted):
        llama.generate(other, **caching(past), **OPTIONS)


def test_padding_is_not_compared(llama: Any) -> None:
    """A later turn may pad by another token, on the left and between turns."""
    past, text = QuantizedCache(llama, **FP16), text_of(2, 10)
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[1, :4] = 0
    found = llama.generate(text, attention_mask=mask, **caching(past), **OPTIONS)
    turn = torch.cat([found, text_of(2, 4)], dim=1)
    turn[1, :4] = 99
    mask = torch.cat([mask, torch.ones(2, 10, dtype=torch.int64)], dim=1)
    mask[0, 16:18] = 0
    with pytest.raises(ConfigError, match=r"in column 4 of sequence 1"):
        llama.generate(changed(turn, 1, 4), attention_mask=mask, **caching(past), **OPTIONS)
    found = llama.generate(turn, attention_mask=mask, **caching(past), **OPTIONS)
    turn, mask = (
        torch.cat([found, text_of(2, 2)], dim=1),
        torch.nn.functional.pad(mask, (0, 8), value=1),
    )
    turn[0, 16:18] = 98
    with pytest.raises(ConfigError, match=r"in column 18 of sequence 0"):
        llama.generate(changed(turn, 0, 18), attention_mask=mask, **caching(past), **OPTIONS)
    llama.generate(turn, attention_mask=mask, **caching(past), **OPTIONS)


def test_new_ids_alone_go_on_with_what_is_known(llama: Any) -> None:
    past, text = QuantizedCache(llama, **FP16), text_of(1, 8)
    first = llama.generate(text, **caching(past), **OPTIONS)
    new = torch.cat([first[:, past.get_seq_length() :], text_of(1, 3)], dim=1)
    mask = torch.ones(1, past.get_seq_length() + new.shape[1], dtype=torch.int64)
    answer = llama.generate(new, attention_mask=mask, **caching(past), **OPTIONS)
    whole = torch.cat([first[:, :-1], answer, text_of(1, 2)], dim=1)
    for column in (3, 15, whole.shape[1] - 4):
        with pytest.raises(ConfigError, match=rf"in column {column} of"):
            llama.generate(changed(whole, 0, column), **caching(past), **OPTIONS)
    llama.generate(whole, **caching(past), **OPTIONS)


def test_answers_of_one_prompt_are_texts_of_their_own(llama: Any) -> None:
    past, text = QuantizedCache(llama, **FP16), text_of(2, 8)
    sampled = OPTIONS | {"do_sample": True, "num_return_sequences": 2}
    found = llama.generate(text, **caching(past), **sampled)
    turn = torch.cat([found, text_of(4, 3)], dim=1)
    with pytest.raises(ConfigError, match=r"in column 10 of sequence 3"):
        llama.generate(changed(turn, 3, 10), **caching(past), **OPTIONS)
    llama.generate(turn, **caching(past), **OPTIONS)


def test_beams_are_not_the_answer(llama: Any) -> None:
    """The cache holds the beams that ran last: behind the prompt each differs from the answer."""
    past, text = QuantizedCache(llama, **FP16), text_of(2, 8)
    beams = OPTIONS | {"num_beams": 3}
    found = llama.generate(text, **caching(past), **beams)
    turn = torch.cat([found, text_of(2, 3)], dim=1)
    with pytest.raises(ConfigError, match=r"in column 8 of sequence 0 a token of another beam"):
        llama.generate(turn, **caching(past), **beams)
    past.crop(8 - past.get_seq_length())  # the prompt alone
    with pytest.raises(ConfigError, match=r"in column 7 of sequence 3 token"):
        llama.generate(changed(turn, 1, 7), **caching(past), **beams)
    llama.generate(turn, **caching(past), **beams)


def test_sequences_that_were_put_elsewhere_are_compared_there(llama: Any) -> None:
    past, text = QuantizedCache(llama, **FP16), text_of(3, 8)
    found = llama.generate(text, **caching(past), **OPTIONS)
    for index in (torch.tensor([2, 0, 0]), torch.tensor([True, False, True])):
        past.batch_select_indices(index)
        found = found[index]
        with pytest.raises(ConfigError, match=OTHER):
            llama.generate(torch.cat([found.flip(0), found], 1), **caching(past), **OPTIONS)
    found = llama.generate(torch.cat([found, text_of(2, 2)], 1), **caching(past), **OPTIONS)
    past.batch_repeat_interleave(2)
    found = torch.cat([found.repeat_interleave(2, 0), text_of(4, 2)], dim=1)
    with pytest.raises(ConfigError, match=r"in column 0 of sequence 3"):
        llama.generate(changed(found, 3, 0), **caching(past), **OPTIONS)
    llama.generate(found, **caching(past), **OPTIONS)


def test_what_is_cropped_is_not_compared(llama: Any) -> None:
    """Nor is what a loop of one's own has put behind it."""
    past, text = QuantizedCache(llama, **FP16), text_of(1, 8)
    found = llama.generate(text, **caching(past), **OPTIONS)
    past.crop(-3)
    turn = torch.cat([found[:, :10], text_of(1, 8) + 3], dim=1)
    llama(turn[:, 10:14], **caching(past))
    with pytest.raises(ConfigError, match=r"in column 9 of sequence 0"):
        llama.generate(changed(turn, 0, 9), **caching(past), **OPTIONS)
    llama.generate(turn, **caching(past), **OPTIONS)


def test_a_call_that_failed_leaves_what_is_known(llama: Any) -> None:
    past, text = QuantizedCache(llama, **FP16), text_of(1, 8)
    found = llama.generate(text, **caching(past), **OPTIONS)
    turn = torch.cat([found, text_of(1, 4)], dim=1)

    def fail(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if ids.shape[1] > 20:
            raise KeyboardInterrupt
        return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.raises(KeyboardInterrupt):
        llama.generate(turn, **caching(past), **OPTIONS, stopping_criteria=[fail])
    held = past.get_seq_length()
    assert held == 20
    long = torch.cat([turn, text_of(1, 9)], dim=1)
    with pytest.raises(ConfigError, match=r"in column 17 of"):
        llama.generate(changed(long, 0, 17), **caching(past), **OPTIONS)


def test_copies_and_pickles_know_their_ids(llama: Any) -> None:
    past, text = QuantizedCache(llama, **FP16), text_of(1, 8)
    llama.generate(text, **caching(past), **OPTIONS)
    for one in (copy.deepcopy(past), pickle.loads(pickle.dumps(past))):
        with pytest.raises(ConfigError, match=OTHER):
            llama.generate(text_of(1, 30) + 2, **caching(one), **OPTIONS)


def test_what_cannot_be_known_is_taken_for_the_text(llama: Any, tmp_path: Path) -> None:
    """What a file, a loop of one's own or embeddings have brought. From then on it is known."""
    prompt = text_of(1, 8)
    past = QuantizedCache(llama, **FP16)
    llama.generate(prompt, **caching(past), **OPTIONS)
    assert past.kv is not None
    save_cache(past.kv, tmp_path / "cache.safetensors")
    own, embedded = QuantizedCache(llama, **FP16), QuantizedCache(llama, **FP16)
    llama(prompt, **caching(own))
    states = llama.get_input_embeddings()(prompt)
    llama.generate(inputs_embeds=states, **caching(embedded), **OPTIONS)
    for one in (QuantizedCache(load_cache(tmp_path / "cache.safetensors")), own, embedded):
        found = llama.generate(text_of(1, 30) + 1, **caching(one), **OPTIONS)
        with pytest.raises(ConfigError, match=OTHER):
            llama.generate(torch.cat([found + 1, found], dim=1), **caching(one), **OPTIONS)
        llama.generate(torch.cat([found, prompt], dim=1), **caching(one), **OPTIONS)


def test_generate_without_our_cache_is_that_of_transformers(llama: Any) -> None:
    names = inspect.signature(llama.generate).parameters
    assert next(iter(names)) == "inputs" and "generation_config" in names
    ids, past = text_of(1, 8), transformers.DynamicCache()
    found = llama.generate(ids, **caching(past), **OPTIONS)
    assert torch.equal(llama.generate(input_ids=ids, **OPTIONS), found)
    with pytest.raises(ValueError, match="not_an_option"):
        llama.generate(ids, not_an_option=1, **OPTIONS)
