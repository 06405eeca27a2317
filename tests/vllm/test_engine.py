"""The demo model in vLLM's engine, on the CPU, with rows in vLLM's pages (4 minutes)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    GptOssConfig,
    HrmTextConfig,
    Llama4TextConfig,
    LlamaConfig,
)
from vllm_engines import (
    BF16,
    CONTEXT,
    INT4,
    LENGTHS,
    MODEL,
    MOST_MOVE,
    SIZES,
    TOKENS,
    begun_of,
    counter,
    engine,
    generate,
    held_out_windows,
    logits_of,
    random_model,
    window_prompts,
)
from vllm_texts import Text, abort_second, check_alike, check_same_rows

from kvquant import CachedModel, CachePlan, ConfigError, UnsupportedError
from kvquant.calibration.fidelity import Planned, Reference, Scheme

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own


@pytest.fixture(autouse=True)
def _poisoned_memory() -> None:
    """Not here: vLLM reads what it has not written, and throws it away."""


def test_16_bit_rows_give_what_vllms_own_attention_gives(
    own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, wanted = own
    told: list[Any] = []  # what a GPU would have compiled
    note = "kvquant.vllm.backend.warm_up_layers"
    monkeypatch.setattr(note, lambda device, calls: told.extend(calls))
    with engine(BF16) as llm:
        for calls in told:
            sizes = calls.page_size, calls.max_model_len, calls.max_num_seqs, calls.most_queries
            assert sizes == (32, 1024, 16, 1) and calls.num_q_heads == 4
        assert len(told) == 4
        assert {calls.kind for calls in begun_of(llm, monkeypatch)} == {
            replace(calls, page_size=16).kind for calls in told
        }
        check_alike(generate(llm, prompts, TOKENS), wanted, MOST_MOVE)
        # the prompts are there still: all but what stands in their last pages is found
        again = generate(llm, prompts, TOKENS)
        assert counter(llm, "prefix_cache_hits") >= sum((n - 1) // 32 * 32 for n in LENGTHS)
        check_alike(again, wanted, MOST_MOVE)


@pytest.mark.parametrize("chunk", [48, 150], ids=["from rows", "from dequantized rows"])
def test_prompts_in_chunks_and_preempted_requests_are_the_same(own: Any, chunk: int) -> None:
    prompts, wanted = own
    small = {"max_model_len": 352, "num_gpu_blocks_override": 12}  # 384 tokens
    with engine(BF16, max_num_batched_tokens=chunk, **small) as llm:
        check_alike(generate(llm, prompts[-3:], TOKENS), wanted[-3:], MOST_MOVE)
        check_alike(generate(llm, prompts, TOKENS), wanted, MOST_MOVE)
        assert counter(llm, "num_preemptions") > 0


def test_prompts_that_attend_to_rows_do_not_show_how_they_were_read(own: Any) -> None:
    """Not the prefixes that are there already, not preemption, not chunks; in 16 bit they show."""
    ids = own[0][-1]["prompt_token_ids"]
    prompts = [{"prompt_token_ids": ids[9 * i :][: 60 + 20 * (i % 4)]} for i in range(16)]
    rows, tokens = {**INT4, "prompts": "rows"}, 32
    with engine(rows) as llm:
        wanted = generate(llm, prompts, tokens)
        check_same_rows(generate(llm, prompts, tokens), wanted)
        assert counter(llm, "prefix_cache_hits") > 800
    small = {"max_model_len": 352, "num_gpu_blocks_override": 12, "max_num_batched_tokens": 100}
    with engine(rows, **small) as llm:
        check_same_rows(generate(llm, prompts, tokens), wanted)
        assert counter(llm, "num_preemptions") > 2


def test_int4_requests_together_are_those_one_at_a_time(own: Any) -> None:
    prompts, _ = own
    sampled = {"temperature": 1.0, "ignore_eos": True}
    with engine(INT4, enable_prefix_caching=False) as llm:
        together = generate(llm, prompts, TOKENS)
        alone = [generate(llm, [one], TOKENS)[0] for one in prompts[1::2]]
        check_same_rows(alone, together[1::2])
        three = generate(llm, prompts[12:13], TOKENS, n=3, seed=7, **sampled)
        ones = [generate(llm, prompts[12:13], TOKENS, seed=7 + i, **sampled)[0] for i in range(3)]
        check_same_rows(three, ones, sampled=True)
        assert three[0].ids != three[1].ids
        _abort_one(llm, prompts[10:14], together[10:14])
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    with engine(INT4, enable_prefix_caching=False, speculative_config=drafts) as llm:
        check_same_rows(generate(llm, prompts, TOKENS), together)
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0


def test_pages_saved_by_one_engine_are_loaded_by_another(own: Any, tmp_path: Path) -> None:
    """A connector moves the bytes of pages and need not know what they are."""
    from vllm.config import KVTransferConfig

    storage = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    prompts = [prompt for prompt, n in zip(own[0], LENGTHS, strict=True) if n in (150, 200, 300)]
    with engine(INT4, kv_transfer_config=storage) as llm:
        generate(llm, prompts, TOKENS)
        # of prompts that are in its own pages the last tokens alone attend, to rows
        wanted = generate(llm, prompts, TOKENS)
    with engine(INT4, kv_transfer_config=storage) as llm:
        found = generate(llm, prompts, TOKENS)
        assert counter(llm, "prefix_cache_hits") == 0
        assert counter(llm, "external_prefix_cache_hits") == 128 + 192 + 288
    check_same_rows(found, wanted)


def _abort_one(llm: Any, prompts: list[Any], wanted: list[Text]) -> None:
    """Abort the second of four requests in the middle: the others do not notice."""
    aborted, others = abort_second(llm, prompts, TOKENS, logprobs=5)
    assert 0 < len(aborted.ids) < TOKENS
    check_same_rows(others, [wanted[i] for i in (0, 2, 3)], least_sure=0.2)
    assert counter(llm, "kv_cache_usage_perc") == 0


def test_predictions_are_as_good_as_calibrate_says(
    plan: str, of_own_attention: dict[str, Any]
) -> None:
    """The same passages and plan by the function that calibrate measures with: it reads a context
    in 16 bit, as the first chunk of a prompt is read here, and what follows attends to rows."""
    reference = Reference(CachedModel.from_pretrained(MODEL), held_out_windows(), CONTEXT)
    schemes: dict[str, Any] = {"int8": Scheme("int8", "int8"), "int4": Scheme("int4-g4", "int4-g4")}
    schemes |= {"plan": Planned(CachePlan.load(plan))}
    int8 = {"k_format": "int8", "v_format": "int8"}
    given = {"int8": int8, "int4": INT4, "plan": {"plan": plan}}
    kl, rooms = {}, {}
    exact = of_own_attention["logits"].log_softmax(-1)
    for name, rows in given.items():
        with engine(rows, max_num_batched_tokens=CONTEXT) as llm:
            found = logits_of(llm, *window_prompts()).log_softmax(-1)
            rooms[name] = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        told = reference.measure(schemes[name])
        assert told.kl_error is not None and told.top1_error is not None
        kl[name] = float((exact.exp() * (exact - found)).sum(-1).mean())
        top1 = float((exact.argmax(-1) == found.argmax(-1)).float().mean())
        # it compares with a 16-bit cache, whose own KL is 6e-6
        assert abs(kl[name] - told.kl) < 2 * told.kl_error + 1e-5, (name, kl[name], told)
        assert abs(top1 - told.top1) < 2 * told.top1_error + 0.005, (name, top1, told)
    # a plan serves all positions of the model: at the first ones it gains less than it could
    assert kl["int8"] < 0.02 * kl["int4"] and kl["plan"] < 0.9 * kl["int4"]
    assert rooms["int4"] == rooms["plan"]
    assert rooms["int4"] / of_own_attention["pages"] == pytest.approx(
        2 * 3.2, rel=0.001
    )  # float32 pages


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SIZES, sliding_window=32, attn_logit_softcapping=2.0),
        GptOssConfig(**SIZES, sliding_window=32, num_local_experts=1, num_experts_per_tok=1),
    ],
    ids=["soft caps", "sink logits"],
)
def test_what_models_change_in_attention(
    config: Any, tmp_path: Path, relative_l2: Callable[[torch.Tensor, torch.Tensor], float]
) -> None:
    """Every second layer has a window, too."""
    model, found = random_model(tmp_path, config), []
    # in chunks of 100, 100 and 60 tokens: the second one's past is dequantized, the last one
    # attends to rows
    prompt = {"prompt_token_ids": [7 * i * i % 256 for i in range(260)]}
    options = {"max_num_batched_tokens": 100, "skip_tokenizer_init": True}
    for rows in (None, {"k_format": "fp16", "v_format": "fp16"}):
        with engine(rows, model=model, **options) as llm:
            found.append(logits_of(llm, [prompt], 200, detokenize=False)[0])
    for part in (slice(0, 140), slice(140, 200)):
        assert relative_l2(found[1][part], found[0][part]) < 0.003


def test_layers_that_attend_within_local_chunks(
    tmp_path: Path,
    relative_l2: Callable[[torch.Tensor, torch.Tensor], float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first of two layers, as in Llama 4; prompts and what is generated cross its chunks."""
    given: dict[str, Any] = {**SIZES, "attention_chunk_size": 64, "no_rope_layers": [1, 0]}
    given |= {"use_qk_norm": False, "attn_temperature_tuning": False}
    given |= {"intermediate_size_mlp": 64, "moe_layers": [], "interleave_moe_layer_step": 3}
    config = Llama4TextConfig(**given)
    told: list[Any] = []  # what a GPU would have compiled
    note = "kvquant.vllm.backend.warm_up_layers"
    monkeypatch.setattr(note, lambda device, calls: told.extend(calls))
    model, found = random_model(tmp_path, config), []
    # the last chunk of the first one, of 60 tokens, attends to rows, and begins another local chunk
    prompts = [{"prompt_token_ids": [7 * i * i % 256 for i in range(n)]} for n in (260, 64, 63)]
    options = {"max_num_batched_tokens": 100, "skip_tokenizer_init": True}
    for rows in (
        None,
        {"k_format": "fp16", "v_format": "fp16"},
        {"k_format": "fp16", "v_format": "fp16", "prompts": "rows"},
    ):
        with engine(rows, model=model, **options) as llm:
            logits = logits_of(llm, prompts[:1], 200, detokenize=False)[0]
            found.append((logits, generate(llm, prompts, 70, detokenize=False)))
    assert sorted({calls.max_model_len for calls in told}) == [64, 1024]
    for logits, done in found[1:]:
        for part in (slice(0, 140), slice(140, 200)):
            assert relative_l2(logits[part], found[0][0][part]) < 0.003
        # a model with random weights is seldom sure; rows of fp16 move it less
        check_alike(done, found[0][1], 0.01, least_sure=0.25)


def test_a_second_engine_in_a_process_is_told_of_the_firsts_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM remembers a backend without regard to additional_config."""
    from vllm.v1.attention import selector

    with engine(INT4):
        pass
    monkeypatch.setattr(selector._cached_get_attn_backend, "cache_clear", lambda: None)
    with engine(INT4):
        pass
    firsts = '{"k_format": "int4-g4", "v_format": "int4-g4"}'
    message = rf"\"kvquant\": '{firsts}': start one process for each setting"
    for rows in ({"k_format": "int8", "v_format": "int8"}, None):
        with pytest.raises(ConfigError, match=message), engine(rows):
            pass


def test_layers_that_are_not_causal_are_refused_at_start_up(tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 256, "num_key_value_heads": 4, "num_layers_per_stack": 1}
    config = HrmTextConfig(**sizes, H_cycles=1, L_cycles=1, architectures=["HrmTextForCausalLM"])
    config.save_pretrained(tmp_path)
    given = {"model": str(tmp_path), "skip_tokenizer_init": True, "load_format": "dummy"}
    with pytest.raises(UnsupportedError, match=r"attn: tokens of a prompt attend to later ones"):
        with engine(INT4, **given):
            pass


def test_layers_that_cannot_be_held_are_refused_by_name(tmp_path: Path) -> None:
    model = random_model(tmp_path, LlamaConfig(**{**SIZES, "head_dim": 32}))
    given = {"model": model, "skip_tokenizer_init": True}
    with pytest.raises(UnsupportedError) as caught, engine(INT4, **given):
        pass
    for layer in range(2):
        assert f"model.layers.{layer}.self_attn.attn: head_dim 32 is that" in str(caught.value)
    assert "serve the model without" in str(caught.value)
