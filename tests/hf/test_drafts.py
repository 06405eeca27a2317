"""Conversations: a second turn with prompt lookup or an assistant, and another text, which generate
knows by comparing the ids that come with those of the cache.

A DynamicCache of transformers 5.24 keeps the text of the first turn twice there, so nothing is
compared with that one: logits are those of the whole text alone, and what is kept is what a cache
keeps whose second turn did not draft.
"""

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
from hf_cases import (  # noqa: E402
    FAMILIES,
    FP16,
    GREEDY,
    TOLERANCE,
    WITH_LOGITS,
    by_kvquant,
    caching,
    random_module,
    tiny,
    tokens,
)

from kvquant.hf.argument import ARGUMENT  # noqa: E402
from kvquant.hf.cache import QuantizedCache  # noqa: E402

KINDS = FAMILIES | {"Persimmon": {"num_attention_heads": 2}}  # attention is not shown positions
OPTIONS = GREEDY | WITH_LOGITS | {"max_new_tokens": 8}
LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 3}


def first_turn(model: Any, past: QuantizedCache, pads: int = 0) -> dict[str, torch.Tensor]:
    """Read a prompt and answer it; the text with 8 more tokens, and its mask."""
    ids = torch.cat([torch.full((1, pads), 7), tokens(1, 8).repeat(1, 2)], dim=1)
    mask = (torch.arange(ids.shape[1]) >= pads).long()[None]
    given = {"input_ids": ids, "attention_mask": mask}
    answer = model.generate(**given, **caching(past), **OPTIONS).sequences
    ids = torch.cat([answer, tokens(1, 8)], dim=1)
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) >= pads).long()[None]}


def columns_read(model: Any) -> tuple[list[int], Any]:
    """Notes how many columns each call of the model computes."""
    counts: list[int] = []
    layer = model.get_decoder().layers[0].self_attn

    def note(_: Any, args: Any, given: dict[str, Any]) -> None:
        states = given["hidden_states"] if "hidden_states" in given else args[0]
        counts.append(states.shape[-2])

    return counts, layer.register_forward_pre_hook(note, with_kwargs=True)


def check_logits(model: Any, found: Any, pads: int) -> None:
    """The logits of a turn are those of its whole text alone."""
    past = QuantizedCache(model, **FP16)
    alone = model(found.sequences[:, pads:-1], **caching(past)).logits[0]
    ours = torch.cat(found.logits)
    torch.testing.assert_close(ours, alone[-len(ours) :], atol=TOLERANCE, rtol=0)


def state(past: QuantizedCache) -> list[Any]:
    """All counts that a cache keeps, on the host and of each layer."""
    kv = past.kv
    assert kv is not None
    past.check()
    counts = [
        {name: one.tolist() for name, one in layer.tensors().items() if one.dtype == torch.int32}
        for layer in kv.layers
    ]
    return [past.get_seq_length(), kv.start_positions.tolist(), counts]


LOOKED_UP, ASSISTED = "prompt_lookup_num_tokens", "assistant_model"
TURNS: list[tuple[str, str, int, int | None]]
TURNS = [(family, LOOKED_UP, 5, 64) for family in KINDS]
TURNS += [("Llama", LOOKED_UP, 0, None), ("Llama", ASSISTED, 0, 64), ("Mistral", ASSISTED, 5, None)]


@pytest.mark.parametrize(("family", "drafts", "pads", "room"), TURNS)
def test_a_second_turn_with_drafts_reads_what_is_new(
    family: str, drafts: str, pads: int, room: int | None
) -> None:
    model = by_kvquant(tiny(family, **KINDS[family]).model)
    past = QuantizedCache(model, **FP16, max_seq_len=room)
    text = first_turn(model, past, pads)
    other = copy.deepcopy(past)
    options = {drafts: 3 if drafts == LOOKED_UP else tiny("Llama").model}
    counts, handle = columns_read(model)
    found = model.generate(**text, **caching(past), **OPTIONS, **options)
    handle.remove()
    held = pads + 16 + 7
    drafted = counts[0] - (text["input_ids"].shape[1] - held)
    assert 0 <= drafted <= 20 and past.get_seq_length() == pads + 16 + 8 + 8 + 7
    check_logits(model, found, pads)
    plain = model.generate(**text, **caching(other), **OPTIONS)
    check_logits(model, plain, pads)
    if torch.equal(plain.sequences, found.sequences):  # but for a tie
        assert state(past) == state(other)


def test_turns_with_and_without_drafts_may_follow_each_other(llama: Any) -> None:
    past = QuantizedCache(llama, k_format="int8", v_format="int8", sink_len=2, recent_len=6)
    text = first_turn(llama, past)["input_ids"]
    for more in (LOOKUP, LOOKUP, {}, LOOKUP):
        text = llama.generate(text, **caching(past), **OPTIONS, **more).sequences
        assert past.get_seq_length() == text.shape[1] - 1 and not past.call.is_open
        assert past.kv is not None and past.kv.seq_lens.tolist() == [text.shape[1] - 1]
        text = torch.cat([text, tokens(1, 3)], dim=1)
    past.check()
    past.reset()
    first_turn(llama, past)


def test_a_cache_of_a_file_drafts_where_it_knows_the_model(llama: Any, tmp_path: Path) -> None:
    past = QuantizedCache(llama, **FP16)
    text = first_turn(llama, past)
    assert past.kv is not None
    save_cache(past.kv, tmp_path / "cache.safetensors")
    caches = [QuantizedCache(load_cache(tmp_path / "cache.safetensors"), model=llama)]
    caches.append(copy.deepcopy(caches[0]))
    for one in caches:
        found = llama.generate(**text, **caching(one), **OPTIONS, **LOOKUP)
        check_logits(llama, found, 0)
        assert one.get_seq_length() == 16 + 8 + 8 + 7
    one = QuantizedCache(load_cache(tmp_path / "cache.safetensors"))
    with pytest.raises(ConfigError, match=r"23 tokens .* drafts .*QuantizedCache\(kv, model=model"):
        llama.generate(**text, **caching(one), **OPTIONS, **LOOKUP)
    assert one.kv is not None and one.kv.seq_lens.tolist() == [23]
    with pytest.raises(ConfigError, match="give the model as source"):
        QuantizedCache(llama, model=llama)


@pytest.mark.parametrize("room", [None, 64], ids=["growing", "static"])
def test_second_turns_that_cannot_draft_are_told(llama: Any, room: int | None) -> None:
    past = QuantizedCache(llama, **FP16, max_seq_len=room)
    text = first_turn(llama, past)
    short = {name: given[:, :9] for name, given in text.items()}
    with pytest.raises(ConfigError, match="brings nothing new or is another one"):
        llama.generate(**short, **caching(past), **OPTIONS, **LOOKUP)
    with pytest.raises(ConfigError, match=r"hidden states of .* the cache holds 23 of them"):
        llama.generate(**text, **caching(past), **OPTIONS, **LOOKUP, output_hidden_states=True)
    assert past.get_seq_length() == 23 and not past.call.is_open
    found = llama.generate(**text, **caching(past), **OPTIONS, **LOOKUP)
    check_logits(llama, found, 0)


@pytest.mark.parametrize("kind", ["falcon", "bloom", "llama", "lfm2"])
def test_models_that_attend_by_themselves_and_hybrids_draft_in_a_second_turn(kind: str) -> None:
    """BLOOM is told no positions, and takes its ids without their name."""
    own = random_module(kind, {"layer_types": ["conv", "full_attention"]} if kind == "lfm2" else {})
    if own._is_stateful:
        pytest.skip("older transformers drafts for no hybrid")
    if kind == "lfm2":
        own.set_attn_implementation("kvquant")
    past = QuantizedCache(own, **FP16, dequantize=kind != "lfm2")
    ids = (tokens(1, 8) % 90).repeat(1, 2)
    answer = own.generate(ids, **caching(past), **OPTIONS).sequences
    text = torch.cat([answer, ids[:, :5]], dim=1)
    found = own.generate(text, **caching(past), **OPTIONS, **LOOKUP)
    assert past.get_seq_length() == found.sequences.shape[1] - 1
    alone = own(found.sequences[:, :-1], use_cache=False).logits[0, -8:]
    torch.testing.assert_close(torch.cat(found.logits), alone, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_a_step_is_no_whole_text(kind: str) -> None:
    """On CUDA generate activates past recording between a prompt and its steps."""
    own, ids = random_module(kind, {}), tokens(1, 8) % 90
    past = QuantizedCache(own, **FP16, dequantize=True)
    own(ids[:, :7], **caching(past))
    past.activate_past_recording()
    found = own(ids[:, 7:], **caching(past)).logits
    assert past.get_seq_length() == 8
    wanted = own(ids, use_cache=False).logits[:, -1:]
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("masked", [False, True])
def test_what_follows_an_assistant_that_failed_is_no_whole_text(llama: Any, masked: bool) -> None:
    past, assistant = QuantizedCache(llama, **FP16), tiny("Llama").model
    text = first_turn(llama, past)["input_ids"]
    held, more = past.get_seq_length(), tokens(1, 60)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    assistant.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        llama.generate(text, **caching(past), **OPTIONS, assistant_model=assistant)
    assert past.get_seq_length() == held
    mask = {"attention_mask": torch.ones(1, held + 60, dtype=torch.int64)} if masked else {}
    found = llama(more, **caching(past), **mask).logits
    wanted = llama(torch.cat([text[:, :held], more], dim=1), use_cache=False).logits[:, held:]
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)
    assert past.get_seq_length() == held + 60


def test_a_model_that_names_no_positions_goes_on_with_drafts() -> None:
    """generate asks the model, not its decoder, whether to give position_ids."""

    class Own(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]  # has no types
        def forward(self, input_ids: Any = None, attention_mask: Any = None, **given: Any) -> Any:
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, **given)

    plain = tiny("Llama").model
    own = by_kvquant(Own(plain.config).eval())
    own.load_state_dict(plain.state_dict())
    past = QuantizedCache(own, **FP16)
    hooks = past.hook, QuantizedCache(by_kvquant(plain), **FP16).hook
    assert [one is not None and one.names_positions for one in hooks] == [False, True]
    turn = first_turn(own, past)
    found = own.generate(**turn, **caching(past), **OPTIONS, **LOOKUP).sequences
    wanted = QuantizedCache(own, **FP16)
    first_turn(own, wanted)
    own.generate(**turn, **caching(wanted), **OPTIONS)
    assert past.get_seq_length() == wanted.get_seq_length() == found.shape[1] - 1


SHORT = GREEDY | {"max_new_tokens": 6}
OTHER = r"another text came: .*cache\.reset\(\) before another text"


def text_of(batch: int, columns: int) -> torch.Tensor:
    """Ids other than those of padding."""
    return tokens(batch, columns) % 250 + 1


def changed(text: torch.Tensor, row: int, column: int) -> torch.Tensor:
    found = text.clone()
    found[row, column] = found[row, column] % 250 + 2
    return found


def begun(model: Any, batch: int, columns: int, **options: Any) -> tuple[QuantizedCache, Any]:
    """A cache behind the answers to prompts, and these with their prompts."""
    past = QuantizedCache(model, **FP16)
    return past, model.generate(text_of(batch, columns), **caching(past), **SHORT | options)


def goes_on(model: Any, past: QuantizedCache, text: Any, row: int, column: int, **more: Any) -> Any:
    """Answer a text, after another one, changed in one place, which must be told."""
    given = caching(past) | SHORT | more
    with pytest.raises(ConfigError, match=rf"in column {column} of sequence {row}"):
        model.generate(changed(text, row, column), **given)
    return model.generate(text, **given)


ANOTHER: list[dict[str, Any]] = [{}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 5}]
ANOTHER += [{"max_seq_len": 96}, {"dequantize": True}, {"return_dict_in_generate": True}]


@pytest.mark.parametrize("options", ANOTHER, ids=lambda options: next(iter(options), ""))
def test_another_text_raises_and_changes_nothing(options: dict[str, Any], llama: Any) -> None:
    of_cache = {name: options[name] for name in ("max_seq_len", "dequantize") if name in options}
    given = SHORT | {name: one for name, one in options.items() if name not in of_cache}
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
    other = torch.cat([llama.generate(text, **caching(past), **SHORT)] * 2, dim=1)
    other[1, 3] = 9
    wanted = (
        r"holds 13 tokens, in column 3 of sequence 1 token 7, and token 9 came there\. A cache.*"
        r"In a conversation give the ids that generate returned"
    )
    with pytest.raises(ConfigError, match=wanted):
        llama.generate(other, **caching(past), **SHORT)


def test_padding_is_not_compared(llama: Any) -> None:
    """A later turn may pad by another token, on the left and between turns."""
    past, text = QuantizedCache(llama, **FP16), text_of(2, 10)
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[1, :4] = 0
    found = llama.generate(text, attention_mask=mask, **caching(past), **SHORT)
    turn = torch.cat([found, text_of(2, 4)], dim=1)
    turn[1, :4] = 99
    mask = torch.cat([mask, torch.ones(2, 10, dtype=torch.int64)], dim=1)
    mask[0, 16:18] = 0
    found = goes_on(llama, past, turn, 1, 4, attention_mask=mask)
    turn = torch.cat([found, text_of(2, 2)], dim=1)
    turn[0, 16:18] = 98
    mask = torch.nn.functional.pad(mask, (0, 8), value=1)
    goes_on(llama, past, turn, 0, 18, attention_mask=mask)


def test_new_ids_alone_go_on_with_what_is_known(llama: Any) -> None:
    past, first = begun(llama, 1, 8)
    new = torch.cat([first[:, past.get_seq_length() :], text_of(1, 3)], dim=1)
    mask = torch.ones(1, past.get_seq_length() + new.shape[1], dtype=torch.int64)
    answer = llama.generate(new, attention_mask=mask, **caching(past), **SHORT)
    whole = torch.cat([first[:, :-1], answer, text_of(1, 2)], dim=1)
    for column in (3, 15, whole.shape[1] - 4):
        with pytest.raises(ConfigError, match=rf"in column {column} of"):
            llama.generate(changed(whole, 0, column), **caching(past), **SHORT)
    llama.generate(whole, **caching(past), **SHORT)


def test_answers_of_one_prompt_are_texts_of_their_own(llama: Any) -> None:
    past, found = begun(llama, 2, 8, do_sample=True, num_return_sequences=2)
    goes_on(llama, past, torch.cat([found, text_of(4, 3)], dim=1), 3, 10)


def test_beams_are_not_the_answer(llama: Any) -> None:
    """The cache holds the beams that ran last: behind the prompt each differs from the answer."""
    past, found = begun(llama, 2, 8, num_beams=3)
    turn, beams = torch.cat([found, text_of(2, 3)], dim=1), SHORT | {"num_beams": 3}
    with pytest.raises(ConfigError, match=r"in column 8 of sequence 0 a token of another beam"):
        llama.generate(turn, **caching(past), **beams)
    past.crop(8 - past.get_seq_length())  # the prompt alone
    with pytest.raises(ConfigError, match=r"in column 7 of sequence 3 token"):
        llama.generate(changed(turn, 1, 7), **caching(past), **beams)
    llama.generate(turn, **caching(past), **beams)


def test_sequences_that_were_put_elsewhere_are_compared_there(llama: Any) -> None:
    past, found = begun(llama, 3, 8)
    for index in (torch.tensor([2, 0, 0]), torch.tensor([True, False, True])):
        past.batch_select_indices(index)
        found = found[index]
        with pytest.raises(ConfigError, match=OTHER):
            llama.generate(torch.cat([found.flip(0), found], 1), **caching(past), **SHORT)
    found = llama.generate(torch.cat([found, text_of(2, 2)], 1), **caching(past), **SHORT)
    past.batch_repeat_interleave(2)
    found = torch.cat([found.repeat_interleave(2, 0), text_of(4, 2)], dim=1)
    goes_on(llama, past, found, 3, 0)


def test_what_is_cropped_is_not_compared(llama: Any) -> None:
    """Nor is what a loop of one's own has put behind it."""
    past, found = begun(llama, 1, 8)
    past.crop(-3)
    turn = torch.cat([found[:, :10], text_of(1, 8) + 3], dim=1)
    llama(turn[:, 10:14], **caching(past))
    goes_on(llama, past, turn, 0, 9)


def test_a_call_that_failed_leaves_what_is_known(llama: Any) -> None:
    past, found = begun(llama, 1, 8)
    turn = torch.cat([found, text_of(1, 4)], dim=1)

    def fail(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if ids.shape[1] > 20:
            raise KeyboardInterrupt
        return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.raises(KeyboardInterrupt):
        llama.generate(turn, **caching(past), **SHORT, stopping_criteria=[fail])
    held = past.get_seq_length()
    assert held == 20
    long = torch.cat([turn, text_of(1, 9)], dim=1)
    with pytest.raises(ConfigError, match=r"in column 17 of"):
        llama.generate(changed(long, 0, 17), **caching(past), **SHORT)


def test_copies_and_pickles_know_their_ids(llama: Any) -> None:
    past, _ = begun(llama, 1, 8)
    for one in (copy.deepcopy(past), pickle.loads(pickle.dumps(past))):
        with pytest.raises(ConfigError, match=OTHER):
            llama.generate(text_of(1, 30) + 2, **caching(one), **SHORT)


def test_what_cannot_be_known_is_taken_for_the_text(llama: Any, tmp_path: Path) -> None:
    """What a file, a loop of one's own or embeddings have brought. From then on it is known."""
    (past, _), prompt = begun(llama, 1, 8), text_of(1, 8)
    assert past.kv is not None
    save_cache(past.kv, tmp_path / "cache.safetensors")
    own, embedded = QuantizedCache(llama, **FP16), QuantizedCache(llama, **FP16)
    llama(prompt, **caching(own))
    states = llama.get_input_embeddings()(prompt)
    llama.generate(inputs_embeds=states, **caching(embedded), **SHORT)
    for one in (QuantizedCache(load_cache(tmp_path / "cache.safetensors")), own, embedded):
        found = llama.generate(text_of(1, 30) + 1, **caching(one), **SHORT)
        with pytest.raises(ConfigError, match=OTHER):
            llama.generate(torch.cat([found + 1, found], dim=1), **caching(one), **SHORT)
        llama.generate(torch.cat([found, prompt], dim=1), **caching(one), **SHORT)


def test_generate_without_our_cache_is_that_of_transformers(llama: Any) -> None:
    names = inspect.signature(llama.generate).parameters
    assert next(iter(names)) == "inputs" and "generation_config" in names
    ids, past = text_of(1, 8), transformers.DynamicCache()
    found = llama.generate(ids, **caching(past), **SHORT)
    assert torch.equal(llama.generate(input_ids=ids, **SHORT), found)
    with pytest.raises(ValueError, match="not_an_option"):
        llama.generate(ids, not_an_option=1, **SHORT)
