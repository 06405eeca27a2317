"""SGLang's engine on the CPU, unmodified, with kvquant's rows in its memory pool. Answers are
compared by the log probabilities of their tokens with those of transformers in float32, whose
attention is given the same rows (engine_reference.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sglang_engines import CHUNK, SIZES, answers, check_answers, random_model, run_engine
from transformers import AutoTokenizer, Gemma2Config, Gemma3TextConfig, GptOssConfig

from kvquant.cli.demo import MODEL

INT4 = {"k_format": "int4-g4", "v_format": "int4-g4"}
LENGTHS = (150, 40, 7)  # of prompts, each in one chunk
MORE = 20  # tokens behind a prompt that is in the radix cache
LONG = (
    340  # tokens of a prompt that comes in two chunks, of which the second reads the first's rows
)
SAMPLED = {"max_new_tokens": 8, "n": 3, "temperature": 1.0}
GREEDY = {"max_new_tokens": 12}


@pytest.fixture(scope="module")
def ids() -> list[int]:
    words = (Path(MODEL).parent / "unseen.txt").read_text(encoding="utf-8")
    found: list[int] = AutoTokenizer.from_pretrained(MODEL).encode(words[:12000])
    return found


@pytest.fixture(scope="module")
def rounds(ids: list[int]) -> list[dict[str, Any]]:
    """Prompts of mixed lengths; one behind the first of them; one in chunks; three samples of one;
    and two others, of which the first is taken back. Two rounds that are not said to have a
    beginning in common must have none: later tokens of a prompt would attend to rows."""
    prompts = [ids[300 * i : 300 * i + length] for i, length in enumerate(LENGTHS)]
    return [
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


@pytest.fixture(scope="module")
def demo(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """An engine with int4-g4 rows in pages of one token."""
    return answers(INT4, rounds, MODEL, page_size=1)


def test_answers_are_those_of_the_same_rows(
    rounds: list[dict[str, Any]], demo: dict[str, Any]
) -> None:
    """Continuous batching with overlapping steps; the first token comes from 16-bit prompts."""
    assert demo["overlaps"]
    given = demo["rounds"][0]
    assert all(one["found"] == 0 and len(one["tokens"]) == 12 for one in given)
    check_answers(INT4, rounds[0]["prompts"], given, MODEL)


def test_radix_cache_and_chunks_find_rows(
    rounds: list[dict[str, Any]], demo: dict[str, Any]
) -> None:
    behind, chunked = demo["rounds"][1:3]
    assert behind[0]["found"] == LENGTHS[0] and chunked[0]["found"] == 0
    assert LONG > CHUNK
    check_answers(INT4, rounds[1]["prompts"] + rounds[2]["prompts"], behind + chunked, MODEL)


def test_three_samples(rounds: list[dict[str, Any]], demo: dict[str, Any]) -> None:
    given = demo["rounds"][3]
    assert len({tuple(one["tokens"]) for one in given}) == 3
    check_answers(INT4, rounds[3]["prompts"] * 3, given, MODEL)


def test_a_request_is_taken_back(rounds: list[dict[str, Any]], demo: dict[str, Any]) -> None:
    """The other one goes on, and its rows are its own."""
    gone, other = demo["rounds"][4]
    assert gone["end"] == "abort" and len(gone["tokens"]) < 40
    assert other["end"] == "length" and len(other["tokens"]) == 40
    check_answers(INT4, rounds[4]["prompts"][1:], [other], MODEL)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan of the demo model, made without text, in 5 seconds."""
    from click.testing import CliRunner

    from kvquant.cli.main import main

    path = str(tmp_path_factory.mktemp("plan") / "plan.safetensors")
    sizes = ["--observed", "256", "--length", "128", "--rounding", "nearest"]
    given = [str(MODEL), "--zero-data", *sizes, "--format", "int4-g4", "-o", path]
    done = CliRunner().invoke(main, ["calibrate", *given], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return path


def test_plan_two_formats_pages_of_16_and_a_full_pool(
    plan: str, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the pool is full requests lose their place, and are read again as prompts. All tokens
    attend to rows, so nobody sees it. SGLang's switch for tests takes places now and then: when the
    pool is full depends on how fast requests come."""
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "20")
    rows = {"plan": plan, "k_format": "int8", "v_format": "int4-g4", "prompts": "rows"}
    prompts = [ids[100 * i : 100 * i + length] for i, length in enumerate((90, 60, 33, 1))]
    # SGLang keeps room for all tokens of requests that ignore the end, and for few of others
    sampling = {"max_new_tokens": 100, "ignore_eos": False}
    asked = [{"prompts": prompts, "sampling": sampling}]
    found = answers(
        rows, asked, MODEL, page_size=16, max_total_tokens=400, schedule_conservativeness=0.01
    )
    given = found["rounds"][0]
    assert found["memory"]["token_capacity"] == 400
    assert sum(one["retractions"] for one in given) > 0
    check_answers(rows, prompts, given, MODEL)


RANDOM = [7 * i * i % 253 + 3 for i in range(1000)]
VARIANTS: list[dict[str, Any]] = [
    {"prompts": [RANDOM[:150], RANDOM[200:240]], "sampling": {"max_new_tokens": 40}},
    {"prompts": [RANDOM[:150] + RANDOM[700:720]], "sampling": GREEDY},
    {"prompts": [RANDOM[300 : 300 + LONG]], "sampling": GREEDY},
]


def check_variant(config: Any, folder: Path, rows: dict[str, Any], **options: Any) -> None:
    model = random_model(folder, config)
    found = answers(rows, VARIANTS, model, **options)["rounds"]
    page_size = options["page_size"]
    assert found[1][0]["found"] == 150 // page_size * page_size
    prompts = [prompt for one in VARIANTS for prompt in one["prompts"]]
    check_answers(rows, prompts, [one for several in found for one in several], model)


def test_soft_caps_and_windows(tmp_path: Path) -> None:
    """Gemma 2, of which SGLang keeps all tokens of all layers in one pool."""
    given: dict[str, Any] = {
        "query_pre_attn_scalar": 64,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": None,  # else SGLang caps logits by a kernel in Triton
        "hidden_act": "gelu_pytorch_tanh",  # which SGLang reads, and transformers calls otherwise
    }
    config = Gemma2Config(**SIZES, **given)
    check_variant(config, tmp_path, {"k_format": "int8", "v_format": "int8"}, page_size=1)


def test_sinks_and_a_pool_of_two_parts(tmp_path: Path) -> None:
    """gpt-oss: SGLang frees what no window sees, and gives layers with windows slots of their own,
    half as many."""
    config = GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    options = {"page_size": 16, "max_total_tokens": 1024, "swa_full_tokens_ratio": 0.5}
    check_variant(config, tmp_path, {"k_format": "bf16", "v_format": "bf16"}, **options)


@pytest.mark.slow
def test_gemma_3_and_pages_of_64(tmp_path: Path) -> None:
    layers = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(**SIZES, query_pre_attn_scalar=64, layer_types=layers)
    check_variant(config, tmp_path, {"k_format": "fp16", "v_format": "fp16"}, page_size=64)


@pytest.mark.slow
def test_an_engine_that_is_refused_does_not_start() -> None:
    done = run_engine({"k_format": "int5"}, [], MODEL)
    assert done.returncode and "format 'int5' does not exist" in done.stderr
