"""Drafts and conversations: a second turn with prompt lookup or an assistant.

A DynamicCache of transformers 5.24 keeps the text of the first turn twice there, so nothing is
compared with that one: logits are those of the whole text alone, and what is kept is what a cache
keeps whose second turn did not draft.
"""

from __future__ import annotations

import copy
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


def test_what_is_no_decoder_is_refused_as_the_model_of_a_kv_cache() -> None:
    model = tiny("Llama")
    rows = model.new_cache(1, 32, **FP16)
    with pytest.raises(ConfigError, match=r"model is .*: give the model that calls the cache"):
        QuantizedCache(rows, model=model.model.config)
