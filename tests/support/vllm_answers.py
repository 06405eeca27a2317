"""Compares what vLLM's engines answer with transformers in float32 on the same tokens.

    python tests/support/vllm_answers.py FOLDER [--side-by-side 3] [NAME ...]

Runs the engines of CASES that the command names, or all, each in a process of its own. The
number after --side-by-side is how many run at a time. The script prints a line about each engine,
and writes all its answers to FOLDER/NAME.json. The last lines say what is wrong (`faults`).

On a GPU models are in bfloat16, with torch.compile, CUDA graphs and vLLM's second model runner
unless a case says otherwise. On the CPU the same cases run eagerly, by the first model runner.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from compared_answers import (
    BF16,
    BY_LAYER,
    CHUNK,
    CONTEXT,
    INT4,
    INT8,
    MOST,
    SAME_CHUNK,
    SCORED,
    TOKENS,
    TOP,
    Reference,
    main,
    make_model,
    prompts_of,
    random_ids,
    too_far,
)
from vllm_engines import NGRAM

FP8, EAGER, WINDOW = {"format": "fp8"}, {"enforce_eager": True}, {"recent_len": 128}
TWO_RANKS = {"tensor_parallel_size": 2}
SMALL = {"max_model_len": 384, "num_gpu_blocks_override": 14, "max_num_batched_tokens": 100}
OTHERS = "gemma3", "gpt-oss", "deepseek"  # models
# as MOST, with tokens in 16 bit: twice what one H200 gave on 2026-11-29
WINDOWED = dict.fromkeys(
    ("int4-window", "int4-window-ngram", "int4-window-two-ranks"), (0.0011, 0.0009)
)
WINDOWED["int4-window-short-chunks"] = 0.0011, 0.0018

# name: rows, None for vLLM's own attention; options of vllm.LLM; what else, see `Case`
CASES: dict[str, dict[str, Any]] = {
    "own": {},
    "own-eager": {**EAGER},  # torch.compile rounds elsewhere
    "bf16": {"rows": BF16},
    "bf16-preempted": {"rows": BF16, **SMALL, **EAGER},
    "int8": {"rows": INT8, **EAGER},
    "default": {"rows": {"recent_len": 0}},
    "int4": {"rows": INT4},
    "int4-eager-first-runner": {"rows": INT4, "runner": "0", **EAGER},
    "int4-rows": {"rows": {**INT4, "prompts": "rows"}, **EAGER},
    "int4-short-chunks": {"rows": INT4, "max_num_batched_tokens": 64, **EAGER},
    "plan": {"rows": {"plan": [], "recent_len": 0}},
    "plan-by-layer": {"rows": {"plan": BY_LAYER, "recent_len": 0}},
    "int4-ngram": {"rows": INT4, "speculative_config": NGRAM},
    "bf16-window": {"rows": {**BF16, **WINDOW}},
    "bf16-window-preempted": {"rows": {**BF16, **WINDOW}, **SMALL, **EAGER},
    "int4-window": {"rows": {**INT4, **WINDOW}},
    "int4-window-short-chunks": {"rows": {**INT4, **WINDOW}, "max_num_batched_tokens": 64},
    "int4-window-ngram": {"rows": {**INT4, **WINDOW}, "speculative_config": NGRAM},
    "own-two-ranks": {**TWO_RANKS},
    "bf16-two-ranks": {"rows": BF16, **TWO_RANKS},
    "int4-two-ranks": {"rows": INT4, **TWO_RANKS},
    "int4-window-two-ranks": {"rows": {**INT4, **WINDOW}, **TWO_RANKS},
    "bf16-draft": {"rows": BF16, "speculative_config": {}, **EAGER},
    "int4-draft": {"rows": INT4, "speculative_config": {}},
    "gemma3-own": {"model": "gemma3", **EAGER},
    "gemma3": {"model": "gemma3", "rows": BF16},
    "gemma3-int8": {"model": "gemma3", "rows": INT8, **EAGER},
    "gpt-oss-own": {"model": "gpt-oss", **EAGER},
    "gpt-oss": {"model": "gpt-oss", "rows": BF16},
    "gpt-oss-int8": {"model": "gpt-oss", "rows": INT8, **EAGER},
    "deepseek-own": {"model": "deepseek", **EAGER},
    "deepseek": {"model": "deepseek", "rows": {"format": "bf16"}},
    "deepseek-int8": {"model": "deepseek", "rows": {"format": "int8-g4"}, **EAGER},
    "deepseek-fp8-ngram": {"model": "deepseek", "rows": FP8, "speculative_config": NGRAM},
}
if torch.cuda.device_count() == 1:
    CASES = {name: case for name, case in CASES.items() if "tensor_parallel_size" not in case}


def leave_experts_out() -> None:
    """Let vLLM's gpt-oss have no experts: those of our model give zeros, and some machines lack
    vLLM's compiled operators for them."""
    from vllm.model_executor.models import gpt_oss

    class NoExperts(torch.nn.Module):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x)

    load = gpt_oss.GptOssForCausalLM.load_weights

    def load_others(self: Any, weights: Any) -> Any:
        return load(self, ((name, x) for name, x in weights if ".mlp." not in name))

    gpt_oss.TransformerBlock.mlp_cls = NoExperts
    gpt_oss.GptOssForCausalLM.load_weights = load_others


def define_operators() -> None:
    """Name what vLLM's CUDA build has compiled, and layers ask for but do not call here."""
    for name in ("gelu_tanh_and_mul", "gelu_and_mul"):
        if not hasattr(torch.ops._C, name):
            library = torch.library.Library("_C", "FRAGMENT")
            library.define(f"{name}(Tensor! result, Tensor input) -> ()")


def options_of(name: str, folder: Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The rows and the options of vllm.LLM of a case."""
    from vllm_engines import make_plan, noisy_draft_model

    case = {"model": "demo", "rows": None, **CASES[name]}
    rows, kind = case.pop("rows"), case.pop("model")
    case.pop("runner", None)
    if rows is not None and "plan" in rows:
        rows = {**rows, "plan": make_plan(folder / f"{name}.safetensors", rows["plan"])}
    if case.get("speculative_config") == {}:
        case["speculative_config"] = noisy_draft_model(folder / f"{name}-model")
    given = {
        "model": make_model(kind, folder / name),
        "dtype": "bfloat16",
        "max_num_batched_tokens": CHUNK,
        "max_logprobs": TOP,
        **case,
    }
    if kind != "demo":
        given["skip_tokenizer_init"] = True
    if torch.cuda.is_available():
        define_operators()
        given = {"enforce_eager": False, "gpu_memory_utilization": 0.1, **given}
        own = "TRITON_MLA" if kind == "deepseek" else "TRITON_ATTN"
        given["attention_backend"] = own if rows is None else "CUSTOM"
        if not given["enforce_eager"]:
            given["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    else:
        given["enforce_eager"] = True
        if kind == "deepseek":  # vLLM's own RoPE of the CPU is wrong for queries of three axes
            given["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
            given["max_num_batched_tokens"] = 1024  # no chunks there: others are never scheduled
    return rows, given


def answers(name: str, folder: Path) -> dict[str, Any]:
    """What an engine of CASES answers."""
    case = CASES[name]
    if torch.cuda.is_available():
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = case.get("runner", "1")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # of ranks: CUDA is in use
    from vllm_engines import all_logits_of, counter, engine, generate, held_out
    from vllm_texts import abort_second

    kind = case.get("model", "demo")
    if kind == "gpt-oss":
        leave_experts_out()
    rows, options = options_of(name, folder)
    begun = time.perf_counter()
    found: dict[str, Any] = {"name": name}
    with engine(rows, **options) as llm:
        found["seconds_to_start"] = time.perf_counter() - begun
        config = llm.llm_engine.vllm_config
        worker = getattr(llm.llm_engine.model_executor, "driver_worker", None)
        if worker is not None:
            found["runner"] = [one.__module__ for one in type(worker.worker.model_runner).__mro__]
        found["graphs"] = str(config.compilation_config.cudagraph_mode)
        found["blocks"] = config.cache_config.num_gpu_blocks
        found["groups"] = len(
            llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
        )
        reference = Reference(options["model"])
        short, long = prompts_of(held_out(llm.get_tokenizer()) if kind == "demo" else random_ids())
        how: dict[str, Any] = {"logprobs": TOP, "detokenize": False}

        def divergences(texts: list[Any], of: list[list[int]]) -> list[tuple[float, float]]:
            return [reference.divergence(ids, text) for ids, text in zip(of, texts, strict=True)]

        first = generate(llm, short, TOKENS, **how)
        found["generated"] = divergences(first, short)
        found["preempted"] = counter(llm, "num_preemptions")
        found["hits"] = -counter(llm, "prefix_cache_hits")
        found["again"] = divergences(generate(llm, short, TOKENS, **how), short)
        found["hits"] += counter(llm, "prefix_cache_hits")
        on_gpu = torch.cuda.is_available()
        if "num_gpu_blocks_override" in case or (kind == "deepseek" and not on_gpu):
            found["hits"] = None  # pages are too few, or vLLM has no prefix cache there
        # vLLM's generators on the CPU cannot go back, as for prompts in chunks they have to
        seed = 7 if torch.cuda.is_available() else None
        three = generate(llm, short[9:13], TOKENS, n=3, seed=seed, temperature=1.0, **how)
        found["sampled"] = divergences(three, [ids for ids in short[9:13] for _ in range(3)])
        found["sampled_texts"] = len({tuple(text.ids) for text in three})
        aborted, others = abort_second(llm, short[10:14], TOKENS, **how)
        found["aborted"] = len(aborted.ids)
        found["beside_aborted"] = divergences(others, [short[10], short[12], short[13]])
        found["usage"] = counter(llm, "kv_cache_usage_perc")
        drafted = "num_draft_tokens", "num_accepted_tokens"
        found["drafted"] = [counter(llm, f"spec_decode_{one}") for one in drafted]
        # logits of prompts cannot be taken from ranks, which are processes of their own
        if worker is not None and options.get("max_model_len", 1024) > CONTEXT + SCORED:
            llm.reset_prefix_cache()
            logits = all_logits_of(llm, long, detokenize=False)
            found["prompts"] = [
                (reference.divergence_of_prompt(ids, one), 1.0)
                for ids, one in zip(long, logits, strict=True)
            ]
    found["seconds"] = time.perf_counter() - begun
    return found


def faults(found: dict[str, dict[str, Any]]) -> list[str]:
    """What is wrong with answers, by the names of their engines; those that did not run are told
    elsewhere."""

    def check(holds: bool, told: str) -> None:
        if not holds:
            wrong.append(told)

    pairs = [("bf16", "own"), ("bf16-draft", "own-eager"), ("bf16-preempted", "own-eager")]
    pairs += [("bf16-window", "own"), ("bf16-window-preempted", "own-eager")]
    pairs += [(name, f"{name}-own") for name in OTHERS]
    pairs += [("bf16-two-ranks", "own-two-ranks")]
    alike = ("int4-eager-first-runner", "int4-ngram", "int4-draft", "int4-two-ranks")
    most = MOST | WINDOWED | dict.fromkeys(alike, SAME_CHUNK)
    wrong = too_far(found, pairs, OTHERS, most)
    for name, one in found.items():
        case = CASES[name]
        if "num_gpu_blocks_override" in case:
            check(one["preempted"] > 0, f"{name}: no request was preempted")
        check(one["usage"] == 0, f"{name}: pages are held in the end")
        if "speculative_config" in case:
            drafted, accepted = one["drafted"]
            check(0 < accepted < drafted, f"{name}: of {drafted} drafts {accepted} were right")
        if case.get("model") not in (None, "deepseek"):
            check(one["groups"] > 1, f"{name}: one group of layers")
        if torch.cuda.is_available():
            if "runner" in one:
                second = any("worker.gpu.model_runner" in part for part in one["runner"])
                check(second == (case.get("runner") != "0"), f"{name}: runner {one['runner'][0]}")
            has_graphs = "FULL" in one["graphs"]
            check(has_graphs != case.get("enforce_eager", False), f"{name}: {one['graphs']}")
    return wrong


def tell(one: dict[str, Any], log: str) -> str:
    """The text about an engine that its line has."""
    facts = {key: one[key] for key in ("preempted", "hits", "drafted", "groups", "graphs")}
    waited = sum(map(float, re.findall(r"waited (\S+) s for kernels", log)))
    return f"{facts}, up {one['seconds_to_start']:.0f} s, {waited:.1f} s of it for kernels of ours"


if __name__ == "__main__":
    sys.exit(main(CASES, answers, faults, tell))
