"""SGLang's engine on the CPU, unmodified, with kvquant's rows in its memory pool. Answers are
compared by the log probabilities of their tokens with those of transformers in float32, whose
attention is given the same rows (engine_reference.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from example_plan import example_plan
from sglang_engines import CHUNK, SIZES, answers, check, run_engine
from tiny_models import biased_model
from transformers import (
    AutoConfig,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
)
from vllm_engines import make_plan, random_model, with_layer_formats

from kvquant.cli.demo import MODEL

INT4 = {"k_format": "int4-g4", "v_format": "int4-g4", "recent_len": 0}
LENGTHS = (150, 40, 7)  # of prompts, each in one chunk
MORE = 20  # tokens behind a prompt that is in the radix cache
LONG = 340  # tokens of a prompt in two chunks, of which the second reads the first's rows
SAMPLED = {"max_new_tokens": 8, "n": 3, "temperature": 1.0}
GREEDY = {"max_new_tokens": 12}


@pytest.fixture(scope="module")
def ids() -> list[int]:
    words = (Path(MODEL).parent / "unseen.txt").read_text(encoding="utf-8")
    found: list[int] = AutoTokenizer.from_pretrained(MODEL).encode(words[:12000])
    return found


def test_answers_are_those_of_the_same_rows(ids: list[int], tmp_path: Path) -> None:
    """Continuous batching with overlapping steps, in pages of one token, with a plan whose layers
    have three pairs of formats, one of them 16 bit: prompts of mixed lengths; one behind the first
    of them, which the radix cache has; one in chunks; three samples of one; and two others, of
    which the first is taken back."""
    # Two rounds that are not said to have a beginning in common must have none: later tokens of a
    # prompt would attend to rows.
    prompts = [ids[300 * i : 300 * i + length] for i, length in enumerate(LENGTHS)]
    rounds: list[dict[str, Any]] = [
        {"prompts": prompts, "sampling": GREEDY},
        {"prompts": [prompts[0] + prompts[1][:MORE]], "sampling": GREEDY},
        {"prompts": [ids[1000 : 1000 + LONG]], "sampling": GREEDY},
        {"prompts": [ids[1600:1640]], "sampling": SAMPLED},
        {
            "prompts": [ids[1400:1450], ids[1500:1520]],
            "sampling": {"max_new_tokens": 40},
            "abort": True,
        },
    ]
    names = ["int8 int4-g4", "bf16 bf16", "int8 int4-g4", "int8-g4 int8"]
    rows = {"plan": make_plan(tmp_path / "plan.safetensors", names, observed=256)}
    demo = answers(rows, rounds, MODEL, page_size=1)
    assert demo["overlaps"]
    first, behind, chunked, sampled, (gone, other) = demo["rounds"]
    assert all(one["found"] == 0 and len(one["tokens"]) == 12 for one in first)
    assert behind[0]["found"] == LENGTHS[0] and chunked[0]["found"] == 0
    assert LONG > CHUNK
    assert len({tuple(one["tokens"]) for one in sampled}) == 3
    assert gone["end"] == "abort" and len(gone["tokens"]) < 40
    assert other["end"] == "length" and len(other["tokens"]) == 40
    texts = demo["texts"]
    check(rows, rounds[:3], texts[:3], MODEL)
    check(rows, 3 * rounds[3:4], texts[3:4], MODEL)
    check(rows, [{"prompts": rounds[4]["prompts"][1:]}], [texts[4][1:]], MODEL)


def test_rows_that_ruin_a_model_are_refused_before_it_is_loaded(tmp_path: Path) -> None:
    biased_model().model.save_pretrained(tmp_path / "model")
    env = {"KVQUANT_CACHE_DIR": str(tmp_path / "cache")}
    done = run_engine(INT4, [], tmp_path / "model", env, page_size=16)
    assert done.returncode and ", in _admit" in done.stderr, done.stderr[-6000:]
    assert "AccuracyError: K rows of int4-g4 without a plan" in done.stderr
    assert len([*(tmp_path / "cache" / "probes").glob("[!.]*")]) == 1, "kept for the next start"


RANDOM = [7 * i * i % 253 + 3 for i in range(1000)]
VARIANTS: list[dict[str, Any]] = [
    {"prompts": [RANDOM[:150], RANDOM[200:240]], "sampling": {"max_new_tokens": 40}},
    {"prompts": [RANDOM[:150] + RANDOM[700:720]], "sampling": GREEDY},
    {"prompts": [RANDOM[300 : 300 + LONG]], "sampling": GREEDY},
]


def check_variant(config: Any, folder: Path, rows: dict[str, Any], **options: Any) -> None:
    model, page_size = random_model(folder, config), options["page_size"]
    found = answers(rows, VARIANTS, model, **options)
    assert found["texts"][1][0].found == 150 // page_size * page_size
    check(rows, VARIANTS, found["texts"], model)


def test_soft_caps_windows_and_a_full_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 2, of which SGLang keeps all tokens of all layers in one pool. Where it is full, some
    requests lose their place, and are read again as prompts. All tokens attend to rows, so nobody
    sees it. SGLang's switch for tests takes places now and then: when the pool is full depends on
    how fast requests come."""
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "20")
    given: dict[str, Any] = {
        "query_pre_attn_scalar": 64,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": None,  # else SGLang caps logits by a kernel in Triton
        "hidden_act": "gelu_pytorch_tanh",  # which SGLang reads, and transformers calls otherwise
    }
    model = random_model(tmp_path, Gemma2Config(**SIZES, **given))
    rows = {**INT4, "prompts": "rows"}
    prompts = [RANDOM[100 * i : 100 * i + length] for i, length in enumerate((90, 60, 33, 1))]
    # SGLang keeps room for all tokens of requests that ignore the end, and for few of others
    sampling = {"max_new_tokens": 100, "ignore_eos": False}
    asked = [{"prompts": prompts, "sampling": sampling}]
    found = answers(
        rows, asked, model, page_size=16, max_total_tokens=400, schedule_conservativeness=0.01
    )
    assert found["memory"]["token_capacity"] == 400
    assert sum(one["retractions"] for one in found["rounds"][0]) > 0
    check(rows, asked, found["texts"], model)


def test_sinks_and_a_pool_of_two_parts(tmp_path: Path) -> None:
    """gpt-oss: SGLang frees what no window sees, and gives layers with windows slots of their own,
    half as many. A plan gives each layer rows of its own, and leaves the last one in 16 bit."""
    config = GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    options = {"page_size": 16, "max_total_tokens": 1024, "swa_full_tokens_ratio": 0.5}
    random_model(tmp_path, config)
    made = example_plan(4, config=AutoConfig.from_pretrained(tmp_path).to_dict())
    names = ["int8 int8", "int8-g4 int4-g4", "int8 int8", "bf16 bf16"]
    plan = with_layer_formats(made, names, tmp_path / "plan.safetensors")
    check_variant(config, tmp_path, {"plan": plan}, **options)


@pytest.mark.slow
def test_gemma_3_and_pages_of_64(tmp_path: Path) -> None:
    layers = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(**SIZES, query_pre_attn_scalar=64, layer_types=layers)
    check_variant(config, tmp_path, {"k_format": "fp16", "v_format": "fp16"}, page_size=64)


@pytest.mark.slow
def test_an_engine_that_is_refused_does_not_start() -> None:
    done = run_engine({"k_format": "int5"}, [], MODEL)
    assert done.returncode and "format 'int5' does not exist" in done.stderr
