"""Compares what SGLang's engines answer with transformers in float32 on the same tokens.

    python tests/support/sglang_compared.py FOLDER [--side-by-side 3] [NAME ...]

Runs the engines of CASES that the command names, or all, each in a process of its own. The
number after --side-by-side is how many run at a time. The script prints a line about each engine,
and writes all its answers to FOLDER/NAME.json. The last lines say what is wrong (`faults`).

Models are in bfloat16. On a GPU engines have CUDA graphs unless a case says otherwise. On the CPU
the same cases run without graphs.
"""

from __future__ import annotations

import json
import os
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
    TOKENS,
    TOP,
    Found,
    Reference,
    main,
    make_model,
    prompts_of,
    random_ids,
    too_far,
)
from vllm_texts import Text

EAGER = {"disable_cuda_graph": True}
WINDOW = {"recent_len": 128}
TWO_RANKS = {"tp_size": 2, "disable_custom_all_reduce": True}  # its kernel may not be there
PROMPTS = {"cuda_graph_backend_prefill": "breakable"}  # of prompts, too, without attention
# SGLang's switch for tests: it takes a request's slots in the pool away now and then
RETRACTED = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}
OTHERS = "gemma2", "gemma3", "gpt-oss"  # models

# by name: rows (without them SGLang's own attention), options of sglang.Engine; see `answers`
CASES: dict[str, Found] = {
    "own": {},
    "own-eager": {**EAGER},
    "own-graphs-of-prompts": {**PROMPTS},
    "bf16": {"rows": BF16},
    "bf16-graphs-of-prompts": {"rows": BF16, "page_size": 16, **PROMPTS},
    "bf16-pages": {"rows": BF16, "page_size": 64},
    "bf16-retracted": {"rows": BF16, "env": RETRACTED, **EAGER},
    "int8": {"rows": INT8, **EAGER},
    "default": {"rows": {"recent_len": 0}, "page_size": 16},
    "int4": {"rows": INT4, "page_size": 64},
    "int4-tokens": {"rows": INT4},  # pages of one token
    "int4-rows": {"rows": {**INT4, "prompts": "rows"}, "page_size": 16, **EAGER},
    "int4-short-chunks": {"rows": INT4, "chunked_prefill_size": 64, **EAGER},
    "plan": {"rows": {"plan": []}, "page_size": 16},
    "plan-by-layer": {"rows": {"plan": BY_LAYER}, "page_size": 16},
    "bf16-window": {"rows": {**BF16, **WINDOW}, "page_size": 16},
    "int4-window": {"rows": {**INT4, **WINDOW}, "page_size": 16},
    "own-two-ranks": {**TWO_RANKS},
    "bf16-two-ranks": {"rows": BF16, **TWO_RANKS},
    "int4-two-ranks": {"rows": INT4, "page_size": 64, **TWO_RANKS},
    "gemma2-own": {"model": "gemma2", **EAGER},
    "gemma2": {"model": "gemma2", "rows": BF16},
    "gemma2-int8": {"model": "gemma2", "rows": INT8, "page_size": 16, **EAGER},
    "gemma3-own": {"model": "gemma3", **EAGER},
    "gemma3": {"model": "gemma3", "rows": BF16, "page_size": 64},
    "gemma3-int8": {"model": "gemma3", "rows": INT8, **EAGER},
    "gpt-oss-own": {"model": "gpt-oss", **EAGER},
    "gpt-oss": {"model": "gpt-oss", "rows": BF16, "page_size": 16},
    "gpt-oss-int8": {"model": "gpt-oss", "rows": INT8, **EAGER},
}
if torch.cuda.device_count() < 2:
    CASES = {name: case for name, case in CASES.items() if "tp_size" not in case}


def answers(name: str, folder: Path) -> Found:
    """What an engine of CASES answers. A case may have "model", "rows", "env" and options."""
    from sglang_engines import has_graphs, run_engine
    from transformers import AutoTokenizer
    from vllm_engines import held_out, make_plan

    case = {"model": "demo", "rows": None, "env": {}, **CASES[name]}
    kind, rows, env = (case.pop(key) for key in ("model", "rows", "env"))
    if rows is not None and "plan" in rows:
        rows = {**rows, "plan": make_plan(folder / f"{name}.safetensors", rows["plan"])}
    model = make_model(kind, folder / name)
    ids = held_out(AutoTokenizer.from_pretrained(model)) if kind == "demo" else random_ids()
    short, long = prompts_of(ids)
    on_gpu = torch.cuda.is_available()
    options: Found = {
        "dtype": "bfloat16",
        "chunked_prefill_size": CHUNK,
        "max_total_tokens": 8192,
        "sampling_backend": "pytorch",
        "log_level": "info",
        "page_size": 1,
        **case,
    }
    if on_gpu:
        own = "triton"
        graphs = {"cuda_graph_max_bs_decode": 16, "cuda_graph_backend_prefill": "disabled"}
        options = {"device": "cuda", **graphs, **options}
        env = {**env, "KVQUANT_WITHOUT_EXPERTS": "1"}
    else:
        own = "torch_native"
        options = {key: x for key, x in options.items() if "cuda_graph" not in key}
    options["attention_backend"] = own if rows is None else "kvquant"
    greedy = {"max_new_tokens": TOKENS}
    rounds: list[Found] = [
        {"prompts": short, "sampling": greedy, "top": TOP},
        {"prompts": short, "sampling": greedy, "top": TOP},
        {"prompts": short[9:13], "sampling": {**greedy, "n": 3, "temperature": 1.0}, "top": TOP},
        {"prompts": short[10:14], "sampling": greedy, "top": TOP, "abort": True},
    ]
    alone = {"sampling": {"max_new_tokens": 1}, "top": TOP, "from": CONTEXT}
    rounds += [{"prompts": [one], **alone} for one in long]  # others would change its chunks
    begun = time.perf_counter()
    done = run_engine(rows, rounds, model, env=env, **options)
    print(done.stderr, flush=True)  # in the log of this engine
    if done.returncode:
        raise RuntimeError(f"the engine ended with {done.returncode}\n{done.stdout[-2000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    first, again, three, aborted, *prompts = told["rounds"]
    reference = Reference(model)

    def divergences(given: list[Found], of: list[list[int]], side: str = "known") -> Any:
        found = []
        for answer, prompt in zip(given, of, strict=True):
            tokens = [token for token, _ in answer[side]]
            before = prompt if side == "known" else prompt[: -len(tokens)]
            assert side == "known" or before + tokens == prompt
            text = Text(tokens, [dict(map(tuple, pairs)) for _, pairs in answer[side]])
            found.append(reference.divergence(before, text))
        return found

    return {
        "name": name,
        "generated": divergences(first, short),
        "again": divergences(again, short),
        "sampled": divergences(three, [one for one in short[9:13] for _ in range(3)]),
        "beside_aborted": divergences(aborted[1:], short[11:14]),
        "prompts": [
            pair
            for given, prompt in zip(prompts, long, strict=True)
            for pair in divergences(given, [prompt], "scored")
        ],
        "hits": sum(one["found"] for one in again),
        "retractions": sum(one["retractions"] for one in first),
        "sampled_texts": len({tuple(one["tokens"]) for one in three}),
        "aborted": len(aborted[0]["tokens"]),
        "graphs": has_graphs(done.stderr),
        "capacity": told["memory"]["token_capacity"],
        "seconds_to_start": told["seconds_to_start"],
        "seconds": time.perf_counter() - begun,
    }


def faults(found: dict[str, Found]) -> list[str]:
    """A line for each fault of the answers. `main` reports engines that did not run."""
    pairs = [("bf16", "own"), ("bf16-pages", "own"), ("bf16-retracted", "own-eager")]
    pairs += [("bf16-window", "own"), ("bf16-graphs-of-prompts", "own-graphs-of-prompts")]
    pairs += [("bf16-two-ranks", "own-two-ranks")]
    pairs += [(name, f"{name}-own") for name in OTHERS]
    alike = dict.fromkeys(("int4-tokens", "int4-two-ranks"), SAME_CHUNK)
    wrong = too_far(found, pairs, OTHERS, MOST | alike)

    def check(holds: bool, told: str) -> None:
        if not holds:
            wrong.append(told)

    for name, one in found.items():
        case = CASES[name]
        if "env" in case:
            check(one["retractions"] > 0, f"{name}: no request was retracted")
        if torch.cuda.is_available():
            wanted = not case.get("disable_cuda_graph", False)
            check(one["graphs"] == wanted, f"{name}: CUDA graphs {one['graphs']}")
    return wrong


def tell(one: Found, log: str) -> str:
    """The text about an engine that its line has."""
    facts = {key: one[key] for key in ("hits", "retractions", "graphs", "capacity")}
    return f"{facts}, up {one['seconds_to_start']:.0f} s"


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.exit(main(CASES, answers, faults, tell))
