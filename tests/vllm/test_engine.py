"""The demo model in vLLM's engine, on the CPU, with rows in vLLM's pages: its answers are compared
with those of transformers in float32, whose attention is given the same rows (2 minutes)."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_reference import check_answers
from example_plan import example_plan
from safetensors.torch import load_file, save_file
from tiny_models import biased_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    HrmTextConfig,
    Llama4TextConfig,
    LlamaConfig,
)
from vllm_engines import (
    CONTEXT,
    INT4,
    MODEL,
    NGRAM,
    SCORED,
    SIZES,
    TOKENS,
    begun_of,
    counter,
    engine,
    generate,
    held_out_windows,
    logits_of,
    mixed_prompts,
    noisy_draft_model,
    random_model,
    random_prompts,
    with_layer_formats,
)
from vllm_texts import abort_second

from kvquant import AccuracyError, CachedModel, CachePlan, ConfigError, UnsupportedError
from kvquant.calibration.fidelity import Planned, Reference, Scheme
from kvquant.engine import settings
from kvquant.engine.settings import Settings
from kvquant.engine.step import FEW, Step, describe_step

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own
FP16 = {"k_format": "fp16", "v_format": "fp16"}


def test_answers_are_those_of_the_same_rows(
    tmp_path: Path, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Continuous batching; prefixes that are there; and pages that another engine has stored. A
    connector moves the bytes of pages and need not know what they are."""
    from vllm.config import KVTransferConfig

    rows = {"k_format": "int8", "v_format": "int4-g4"}
    prompts = mixed_prompts()
    storage = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    with engine(rows, kv_transfer_config=storage) as llm:
        for calls in told:
            sizes = calls.page_size, calls.max_model_len, calls.max_num_seqs, calls.most_queries
            assert sizes == (32, 1024, 16, 1) and calls.num_q_heads == 4
        assert len(told) == 4
        assert {calls.kind for calls in begun_of(llm, monkeypatch)} == {
            replace(calls, page_size=16).kind for calls in told
        }
        texts = generate(llm, prompts, TOKENS)
        # they are there still: all but what stands in their last pages is found. The connector
        # miscounts prompts that end a token after a page
        again = [prompt for prompt in prompts if len(prompt) % 32 != 1]
        texts += generate(llm, again, TOKENS)
        hits = sum((len(prompt) - 1) // 32 * 32 for prompt in again)
        assert counter(llm, "prefix_cache_hits") == hits
    with engine(rows, kv_transfer_config=storage) as llm:
        stored = [prompt for prompt in again if len(prompt) > 128]
        texts += generate(llm, stored, TOKENS)
        assert counter(llm, "prefix_cache_hits") == 0
        assert counter(llm, "external_prefix_cache_hits") == 128 + 192 + 288
    check_answers(Settings.parse(rows), prompts + again + stored, texts, MODEL)


def test_layers_have_formats_of_their_own(
    plan: str, tmp_path: Path, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And pages as large as their rows; with chunks, preemption, prefixes, drafts, and pages that
    another engine has stored, or the host."""
    from vllm.config import KVTransferConfig

    names = ["int8 int4", "int4-g4 int4-g4", "int4-g4 int4-g4", "int8 int8"]
    made = with_layer_formats(CachePlan.load(plan), names, tmp_path / "plan.safetensors")
    rows = {"plan": made, "prompts": "rows"}
    sizes, prompts = [132 + 68, 2 * 80, 2 * 80, 2 * 132], mixed_prompts()
    rooms = told_rooms(monkeypatch)
    with engine(rows, speculative_config=NGRAM) as llm:
        assert [calls.layer.layout.token_bytes for calls in told] == [200, 160, 160, 264]
        assert {calls.kind for calls in begun_of(llm, monkeypatch)} == {
            replace(calls, page_size=16).kind for calls in told
        }
        config = llm.llm_engine.vllm_config
        pages = config.cache_config.num_gpu_blocks
        assert pages == (64 << 20) // (32 * sum(sizes))
        assert rooms == {f"{32 * pages:,} tokens in {pages:,} pages, 6.12 bits an element"}
        layers = config.compilation_config.static_forward_context.values()
        assert [layer.kv_cache.shape[3] for layer in layers] == sizes
    small = {"max_model_len": 352, "num_gpu_blocks_override": 12, "max_num_batched_tokens": 100}
    storage = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    with engine(rows, **small, speculative_config=NGRAM) as llm:
        texts = generate(llm, prompts, 2 * TOKENS)
        assert counter(llm, "num_preemptions") > 2
    long = [prompt for prompt in prompts if len(prompt) > 128 and len(prompt) % 32 != 1]
    for hits in (0, 128 + 192 + 288):
        with engine(rows, kv_transfer_config=storage) as llm:
            texts += generate(llm, long, TOKENS)
            assert counter(llm, "external_prefix_cache_hits") == hits
    host = {"spec_name": "HostSpec", "spec_module_path": "host_offloading"}
    offloading = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": 64 << 20, **host},
    )
    with engine(rows, kv_transfer_config=offloading) as llm:
        for _ in range(2):
            texts += generate(llm, long, TOKENS)
            generate(llm, prompts[:1], TOKENS)  # pages are on their way
            assert llm.reset_prefix_cache()
        assert counter(llm, "external_prefix_cache_hits") >= 128 + 192 + 256
    check_answers(Settings.parse(rows), prompts + 4 * long, texts, MODEL, most=0.15)


def told_rooms(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What engines tell of their rows' room from now on, each in a line of its own."""
    from kvquant.vllm import backend

    rooms: set[str] = set()
    monkeypatch.setattr(backend, "tell_settings", lambda *given: rooms.add(given[2]))
    return rooms


def test_pages_of_a_hybrid_are_as_large_as_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvquant.vllm import backend

    lines: list[str] = []
    logger, rooms = backend.logger, told_rooms(monkeypatch)
    monkeypatch.setattr(logger, "info_once", lambda text, *given: lines.append(text % given))
    config = Gemma2Config(**SIZES, sliding_window=32)
    model, path = random_model(tmp_path / "model", config), str(tmp_path / "plan.safetensors")
    given = AutoConfig.from_pretrained(model).to_dict()
    example_plan(2, config=given).with_layer_formats({(0, "v"): "int4"}).save(path)
    rows, prompts = {"plan": path}, random_prompts(200)
    with engine(rows, model=model, skip_tokenizer_init=True) as llm:
        texts = generate(llm, prompts, TOKENS, detokenize=False)
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        assert [layer.kv_cache.shape[3] for layer in layers] == [256, 256]
        pages = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    told = "kvquant: pages of 1 layers are as large as the model's largest: 72 % of their bytes"
    assert [line.startswith(told) for line in lines] == [True]
    # tokens take pages of both layers, those of the first only in its window
    assert rooms == {f"{pages:,} pages, 10.2 bits an element"}, "8 * (72 + 256) / 256"
    check_answers(Settings.parse(rows), prompts, texts, model)


def test_rows_that_ruin_a_model_stop_an_engine(
    tmp_path: Path, probe: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start probes it, a start with weights that are not there does not."""
    biased_model().model.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("KVQUANT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(settings, "_made_figure", probe)
    monkeypatch.setattr(logging.getLogger("kvquant"), "handlers", [caplog.handler])
    given: dict[str, Any] = {"model": str(tmp_path / "model"), "skip_tokenizer_init": True}
    given |= {"max_model_len": 128, "num_gpu_blocks_override": 12}
    with (
        pytest.raises(AccuracyError, match=r"K rows of int4-g4 .* are ruined"),
        engine(INT4, **given),
    ):
        pass
    assert "probing K rows" in caplog.text and "V rows int4-g4" not in caplog.text, "no weights yet"
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"load_format": "dummy"}, "was not probed: its weights are random"),
        ({"accept_loss": True}, {}, "from 0.12 on texts are ruined"),
    ]
    for more, options, warning in cases:
        caplog.clear()
        with engine({**INT4, **more}, **given, **options):
            rows = "K rows int4-g4, V rows int4-g4: 384 tokens in 12 pages, 6 bits an element"
            assert rows in caplog.text and warning in caplog.text
            assert "probing K rows" not in caplog.text


def test_prompts_that_attend_to_rows_do_not_show_how_they_were_read() -> None:
    """Not chunks, preemption, prefixes, drafts, other samples, nor a request that is taken back."""
    rows, prompts = {**INT4, "prompts": "rows"}, mixed_prompts()
    small = {"max_model_len": 352, "num_gpu_blocks_override": 12, "max_num_batched_tokens": 100}
    with engine(rows, **small, speculative_config=NGRAM) as llm:
        texts = generate(llm, prompts, 2 * TOKENS)
        assert counter(llm, "num_preemptions") > 2
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
        three = generate(llm, prompts[12:13], TOKENS, n=3, temperature=1.0)
        assert len({tuple(text.ids) for text in three}) > 1
        aborted, others = abort_second(llm, prompts[10:14], TOKENS, logprobs=5)
        assert 0 < len(aborted.ids) < TOKENS
        assert counter(llm, "kv_cache_usage_perc") == 0
    given = prompts + 3 * prompts[12:13] + [prompts[i] for i in (10, 12, 13)]
    check_answers(Settings.parse(rows), given, texts + three + others, MODEL, most=0.15)


def test_predictions_are_as_good_as_calibrate_says(plan: str) -> None:
    """The same passages and plan by the function that calibrate measures with: it reads a context
    in 16 bit, as the first chunk of a prompt is read here, and what follows attends to rows."""
    windows = held_out_windows()
    reference = Reference(CachedModel.from_pretrained(MODEL), windows, CONTEXT)
    plain = reference.measure(Scheme("int4-g4", "int4-g4"))
    told = reference.measure(Planned(CachePlan.load(plan)))
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        exact = model(windows[:, :-2]).logits[:, -SCORED:].log_softmax(-1)
    prompts = [window[:-1].tolist() for window in windows]
    with engine({"plan": plan, "recent_len": 0}, max_num_batched_tokens=CONTEXT) as llm:
        found = logits_of(llm, prompts, SCORED).log_softmax(-1)  # without the last token's
        pages = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    assert told.kl_error is not None and told.top1_error is not None
    kl = float((exact.exp() * (exact - found)).sum(-1).mean())
    top1 = float((exact.argmax(-1) == found.argmax(-1)).float().mean())
    # it compares with a 16-bit cache, whose own KL is 6e-6
    assert abs(kl - told.kl) < 2 * told.kl_error + 1e-5, (kl, told)
    assert abs(top1 - told.top1) < 2 * told.top1_error + 0.005, (top1, told)
    # a plan serves all positions of the model: at the first ones it gains less than it could
    assert kl < 0.9 * plain.kl
    assert pages == (64 << 20) // (32 * 4 * 2 * 80)  # tokens, layers, K and V of one head


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SIZES, sliding_window=32, attn_logit_softcapping=2.0),
        GptOssConfig(**SIZES, sliding_window=32, num_local_experts=1, num_experts_per_tok=1),
        Llama4TextConfig(
            **SIZES,
            attention_chunk_size=64,
            no_rope_layers=[1, 0],
            use_qk_norm=False,
            attn_temperature_tuning=False,
            intermediate_size_mlp=64,
            moe_layers=[],
            interleave_moe_layer_step=3,
        ),
    ],
    ids=["soft caps", "sink logits", "local chunks"],
)
def test_what_models_change_in_attention(config: Any, tmp_path: Path, told: list[Any]) -> None:
    """Every second layer has a window, or local chunks, too, which prompts and texts cross."""
    model, prompts = random_model(tmp_path, config), random_prompts(260, 64, 63)
    # in chunks of 100, 100 and 60 tokens: the second one's past is dequantized, the last one
    # attends to rows
    options = {"max_num_batched_tokens": 100, "skip_tokenizer_init": True}
    with engine(FP16, model=model, **options) as llm:
        texts = [generate(llm, [one], 70, detokenize=False)[0] for one in prompts]
    check_answers(Settings.parse(FP16), prompts, texts, model, chunk=100)
    local = {getattr(config, "attention_chunk_size", None) or 1024, 1024}
    assert {calls.max_model_len for calls in told} == local


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
    firsts = '{"k_format": "int4-g4", "recent_len": 0, "v_format": "int4-g4"}'
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


def weights() -> dict[str, torch.Tensor]:
    return {k: x for path in MODEL.glob("*.safetensors") for k, x in load_file(path).items()}


def eagle(folder: Path) -> dict[str, Any]:
    """An EAGLE head: the demo model's first layer, which sees tokens alone. Its drafts are bad."""
    folder.mkdir()
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": 1, "architectures": ["EagleLlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    first = "model.layers.0."
    own = {k.removeprefix("model."): x for k, x in weights().items() if k.startswith(first)}
    del own["layers.0.input_layernorm.weight"]
    one = torch.eye(config["hidden_size"])
    own["fc.weight"] = torch.cat([one, 0 * one], 1).to(own["layers.0.mlp.up_proj.weight"].dtype)
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    return {"method": "eagle", "model": str(folder), "num_speculative_tokens": 3}


def bases_of(llm: Any) -> dict[str, Any]:
    """Of each layer the fingerprints of its bases, or None."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    bases = {name: layer.impl.rows.basis for name, layer in layers.items()}
    return {
        name: None if basis is None else [side.fingerprint for side in basis]
        for name, basis in bases.items()
    }


@pytest.mark.parametrize(
    ("make", "layers", "least"),
    [(noisy_draft_model, 4, 0.5), (eagle, 1, 0)],
    ids=["model", "eagle"],
)
def test_drafts_change_no_output_and_have_no_basis(
    make: Any, layers: int, least: float, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is of the model that is served: its layers 0 to 3 are not those of a draft model, and
    EAGLE's is layer 4. Prompts come in chunks of up to 100 tokens, whose past is dequantized, and
    drafts beside them."""
    pasts: list[int] = []

    def note(*given: Any) -> Step:
        step = describe_step(*given)
        for chunk in step.chunks:  # the draft model has a token more than vLLM says on the CPU
            assert int(step.seq_lens[chunk.sequence]) == chunk.past + chunk.end - chunk.first
            pasts.extend([chunk.past] * (chunk.end - chunk.first > FEW))
        return step

    monkeypatch.setattr("kvquant.vllm.backend.describe_step", note)
    rows, prompts = {"plan": plan, "prompts": "rows"}, mixed_prompts()
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 100}
    with engine(rows, speculative_config=make(tmp_path / "drafts"), **options) as llm:
        texts, found = generate(llm, prompts, TOKENS), bases_of(llm)
        drafted = counter(llm, "spec_decode_num_draft_tokens")
        accepted = counter(llm, "spec_decode_num_accepted_tokens")
    check_answers(Settings.parse(rows), prompts, texts, MODEL, most=0.15)
    assert least * drafted < accepted < drafted
    assert max(pasts) > FEW and (0 in pasts or make is eagle)
    known = [[side.fingerprint for side in layer] for layer in CachePlan.load(plan).layers]
    assert [*found.values()] == [*known, *[None] * layers]
