"""What engines of vLLM answer, compared with transformers in float32 on the same tokens.

    python tests/support/vllm_answers.py FOLDER [--side-by-side 3] [NAME ...]

Runs the engines of CASES that are named, or all: each in a process of its own, some side by side. A
line tells what an engine answers, FOLDER/NAME.json all of it. The last lines tell what is wrong,
see `faults`. On a GPU models are in bfloat16, with torch.compile and CUDA graphs, by vLLM's second
model runner unless a case says otherwise. On the CPU the same cases run eagerly, by the first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from vllm_log import what_failed

TOKENS, TOP = 48, 20  # that are generated; likeliest ones whose log-probabilities are given
CONTEXT, SCORED, WINDOWS = 256, 512, 4  # tokens of prompts whose predictions are compared
CHUNK = 256  # tokens of a step
INT4, BF16 = {"k_format": "int4-g4"}, {"k_format": "bf16"}
EAGER = {"enforce_eager": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
SMALL = {"max_model_len": 384, "num_gpu_blocks_override": 14, "max_num_batched_tokens": 100}
LIMIT = 1500  # seconds of an engine

# name: rows, None for vLLM's own attention; options of vllm.LLM; what else, see `Case`
CASES: dict[str, dict[str, Any]] = {
    "own": {},
    "own-eager": {**EAGER},  # torch.compile rounds elsewhere
    "bf16": {"rows": BF16},
    "bf16-preempted": {"rows": BF16, **SMALL, **EAGER},
    "int8": {"rows": {"k_format": "int8"}, **EAGER},
    "int4": {"rows": INT4},
    "int4-eager-first-runner": {"rows": INT4, "runner": "0", **EAGER},
    "int4-rows": {"rows": {**INT4, "prompts": "rows"}, **EAGER},
    "int4-short-chunks": {"rows": INT4, "max_num_batched_tokens": 64, **EAGER},
    "plan": {"rows": {"plan": ""}},
    "int4-ngram": {"rows": INT4, "speculative_config": NGRAM},
    "bf16-draft": {"rows": BF16, "speculative_config": {}, **EAGER},
    "int4-draft": {"rows": INT4, "speculative_config": {}},
    "gemma3-own": {"model": "gemma3", **EAGER},
    "gemma3": {"model": "gemma3", "rows": BF16},
    "gemma3-int8": {"model": "gemma3", "rows": {"k_format": "int8"}, **EAGER},
    "gpt-oss-own": {"model": "gpt-oss", **EAGER},
    "gpt-oss": {"model": "gpt-oss", "rows": BF16},
    "gpt-oss-int8": {"model": "gpt-oss", "rows": {"k_format": "int8"}, **EAGER},
    "deepseek-own": {"model": "deepseek", **EAGER},
    "deepseek": {"model": "deepseek", "rows": {"format": "bf16"}},
    "deepseek-int8": {"model": "deepseek", "rows": {"format": "int8-g4"}, **EAGER},
    "deepseek-fp8-ngram": {
        "model": "deepseek",
        "rows": {"format": "fp8"},
        "speculative_config": NGRAM,
    },
}


def make_model(kind: str, folder: Path) -> str:
    """The demo model, or a small one with random weights that changes attention; its folder."""
    from transformers import DeepseekV3Config, Gemma3TextConfig, GptOssConfig
    from vllm_engines import MODEL, SIZES, random_model

    if kind == "demo":
        return str(MODEL)
    sizes = {**SIZES, "num_hidden_layers": 4, "max_position_embeddings": 2048}
    config: Any
    if kind == "gemma3":  # windows in three of four layers, K and q are normed
        kinds = ["sliding_attention"] * 3 + ["full_attention"]
        config = Gemma3TextConfig(
            **sizes, sliding_window=100, layer_types=kinds, query_pre_attn_scalar=64
        )
    elif kind == "deepseek":  # latent attention, of the sizes of DeepSeek V3's heads, no experts
        sizes |= {"num_attention_heads": 16, "num_key_value_heads": 16, "initializer_range": 0.1}
        config = DeepseekV3Config(**sizes, first_k_dense_replace=4, q_lora_rank=None)
    else:  # windows in every second layer, sink logits
        sizes |= {"num_local_experts": 1, "num_experts_per_tok": 1}
        config = GptOssConfig(**sizes, sliding_window=100)
    return random_model(folder / kind, config, without_experts=True)


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
        rows = {**rows, "plan": make_plan(folder / f"{name}.safetensors")}
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


class Reference:
    """Transformers in float32."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        found: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = found.to(self.device).eval()

    @torch.no_grad()
    def log_probs(self, ids: list[int]) -> torch.Tensor:
        """[tokens, vocabulary], float64."""
        logits = self.model(torch.tensor([ids], device=self.device)).logits[0]
        return torch.as_tensor(logits.double().log_softmax(-1))

    def divergence(self, prompt: list[int], text: Any) -> tuple[float, float]:
        """Of a generated text: mean KL of the likeliest tokens and the rest, and the share of
        tokens that are the likeliest here too."""
        ids = prompt + text.ids
        exact = self.log_probs(ids[:-1])[len(prompt) - 1 :]
        total, same = 0.0, 0
        for row, token, known in zip(exact, text.ids, text.known, strict=True):
            part = row[torch.tensor([*known], device=self.device)]
            told = torch.tensor([*known.values()], device=self.device).double()
            rest = [(1 - x.exp().sum()).clamp_min(1e-9) for x in (part, told)]
            kl = (part.exp() * (part - told)).sum() + rest[0] * (rest[0] / rest[1]).log()
            total += float(kl)
            same += int(row.argmax()) == token
        return total / len(text.ids), same / len(text.ids)

    def divergence_of_prompt(self, ids: list[int], logits: torch.Tensor) -> float:
        """Mean KL of the last SCORED of the predictions that an engine computed."""
        assert len(logits) in (len(ids), len(ids) - 1), (len(logits), len(ids))
        exact = self.log_probs(ids)[: len(logits)][-SCORED:]
        told = logits[-SCORED:].to(self.device).double().log_softmax(-1)
        return float((exact.exp() * (exact - told)).sum(-1).mean())


def prompts_of(kind: str, llm: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts to continue, and longer ones."""
    from vllm_engines import LENGTHS, held_out

    from kvquant.calibration.windows import spread

    if kind == "demo":
        ids = held_out(llm.get_tokenizer())
    else:
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(256, (8192,), generator=random).tolist()
    step = (len(ids) - max(LENGTHS)) // len(LENGTHS)
    short = [ids[i * step :][:length] for i, length in enumerate(LENGTHS)]
    return short, spread(ids, WINDOWS, CONTEXT + SCORED).tolist()


def answers(name: str, folder: Path) -> dict[str, Any]:
    """What an engine of CASES answers."""
    case = CASES[name]
    if torch.cuda.is_available():
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = case.get("runner", "1")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm_engines import all_logits_of, counter, engine, generate
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
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        found["runner"] = [one.__module__ for one in type(runner).__mro__]
        found["graphs"] = str(config.compilation_config.cudagraph_mode)
        found["blocks"] = config.cache_config.num_gpu_blocks
        found["groups"] = len(
            llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
        )
        reference = Reference(options["model"])
        short, long = prompts_of(kind, llm)
        prompts = [{"prompt_token_ids": ids} for ids in short]
        how: dict[str, Any] = {"logprobs": TOP, "detokenize": False}

        def divergences(texts: list[Any], of: list[list[int]]) -> list[tuple[float, float]]:
            return [reference.divergence(ids, text) for ids, text in zip(of, texts, strict=True)]

        first = generate(llm, prompts, TOKENS, **how)
        found["generated"] = divergences(first, short)
        found["preempted"] = counter(llm, "num_preemptions")
        hits = counter(llm, "prefix_cache_hits")
        found["again"] = divergences(generate(llm, prompts, TOKENS, **how), short)
        found["hits"] = [hits, counter(llm, "prefix_cache_hits")]
        # vLLM's generators on the CPU cannot go back, as for prompts in chunks they have to
        seed = 7 if torch.cuda.is_available() else None
        three = generate(llm, prompts[9:13], TOKENS, n=3, seed=seed, temperature=1.0, **how)
        found["sampled"] = divergences(three, [ids for ids in short[9:13] for _ in range(3)])
        found["sampled_texts"] = len({tuple(text.ids) for text in three})
        aborted, others = abort_second(llm, prompts[10:14], TOKENS, **how)
        found["aborted"] = len(aborted.ids)
        found["beside_aborted"] = divergences(others, [short[10], short[12], short[13]])
        found["usage"] = counter(llm, "kv_cache_usage_perc")
        drafted = "num_draft_tokens", "num_accepted_tokens"
        found["drafted"] = [counter(llm, f"spec_decode_{one}") for one in drafted]
        if options.get("max_model_len", 1024) > CONTEXT + SCORED:
            llm.reset_prefix_cache()
            given = [{"prompt_token_ids": ids} for ids in long]
            logits = all_logits_of(llm, given, detokenize=False)
            found["prompts"] = [
                (reference.divergence_of_prompt(ids, one), 1.0)
                for ids, one in zip(long, logits, strict=True)
            ]
    found["seconds"] = time.perf_counter() - begun
    return found


KINDS = "generated", "again", "sampled", "beside_aborted", "prompts"


def mean(pairs: list[list[float]]) -> float:
    """KL."""
    return sum(kl for kl, _ in pairs) / len(pairs)


def is_as_good(ours: list[list[float]], theirs: list[list[float]]) -> bool:
    """Whether our KL is at most three paired standard errors above theirs: some 25 are compared."""
    more = torch.tensor([a[0] - b[0] for a, b in zip(ours, theirs, strict=True)]).double()
    return bool(more.mean() <= 3 * more.std() / len(more) ** 0.5 + 1e-6)


def faults(found: dict[str, dict[str, Any]]) -> list[str]:
    """What is wrong with answers, by the names of their engines; those that did not run are told
    elsewhere."""
    wrong: list[str] = []

    def check(holds: bool, told: str) -> None:
        if not holds:
            wrong.append(told)

    for ours, theirs in (
        ("bf16", "own"),
        ("bf16-draft", "own-eager"),
        ("bf16-preempted", "own-eager"),
        ("gemma3", "gemma3-own"),
        ("gpt-oss", "gpt-oss-own"),
        ("deepseek", "deepseek-own"),
    ):
        if ours in found and theirs in found:
            for kind in KINDS:
                a, b = found[ours].get(kind), found[theirs].get(kind)
                if a and b:
                    told = f"{ours}: KL of {kind} {mean(a):.6f}, {theirs} {mean(b):.6f}"
                    check(is_as_good(a, b), told)
    # bfloat16 alone moves these models by .01 and less
    for name in ("gemma3", "gpt-oss", "deepseek"):
        both = found.get(f"{name}-int8"), found.get(f"{name}-own")
        for kind in KINDS:
            if both[0] is None or both[1] is None:
                continue
            kl, own = mean(both[0][kind]), mean(both[1][kind])
            check(kl < 1.3 * own + 0.002, f"{name}-int8: KL of {kind} {kl:.6f}, own {own:.6f}")
    # KL, at most: of what is generated, and of prompts; twice what one H200 gave on 2026-11-25
    most = {
        "int8": (0.0005, 0.0005),
        "int4": (0.011, 0.002),
        "int4-eager-first-runner": (0.011, 0.002),
        "int4-ngram": (0.011, 0.002),
        "int4-draft": (0.011, 0.002),
        "int4-rows": (0.013, 0.022),
        "int4-short-chunks": (0.013, 0.022),
        "plan": (0.006, 0.002),
    }
    for name, (of_text, of_prompts) in most.items():
        for kind in KINDS:
            limit = of_prompts if kind == "prompts" else 1.5 * of_text
            if kind in found.get(name, {}):
                kl = mean(found[name][kind])
                check(kl < limit, f"{name}: KL of {kind} {kl:.6f}, not below {limit}")
    for name, one in found.items():
        case = CASES[name]
        hits = one["hits"][1] - one["hits"][0]
        if "num_gpu_blocks_override" in case:
            check(one["preempted"] > 0, f"{name}: no request was preempted")
        elif torch.cuda.is_available() or case.get("model") != "deepseek":  # vLLM has none there
            check(hits > 800, f"{name}: {hits} tokens were found in the prefix cache")
        check(
            0 < one["aborted"] < TOKENS, f"{name}: the aborted request has {one['aborted']} tokens"
        )
        check(one["usage"] == 0, f"{name}: pages are held in the end")
        check(one["sampled_texts"] > 8, f"{name}: {one['sampled_texts']} of 12 samples differ")
        if "speculative_config" in case:
            drafted, accepted = one["drafted"]
            check(0 < accepted < drafted, f"{name}: of {drafted} drafts {accepted} were right")
        if case.get("model") not in (None, "deepseek"):
            check(one["groups"] > 1, f"{name}: one group of layers")
        if torch.cuda.is_available():
            second = any("worker.gpu.model_runner" in part for part in one["runner"])
            check(second == (case.get("runner") != "0"), f"{name}: runner {one['runner'][0]}")
            has_graphs = "FULL" in one["graphs"]
            check(has_graphs != case.get("enforce_eager", False), f"{name}: {one['graphs']}")
    return wrong


def run(names: list[str], folder: Path, side_by_side: int) -> dict[str, dict[str, Any]]:
    """Start engines; what those answered that did not fail."""
    folder.mkdir(parents=True, exist_ok=True)

    def start(name: str) -> tuple[str, dict[str, Any] | None]:
        log = folder / f"{name}.log"
        command = [sys.executable, __file__, "--alone", str(folder), name]
        with log.open("w") as file:
            try:
                subprocess.run(command, stdout=file, stderr=file, timeout=LIMIT, check=False)
            except subprocess.TimeoutExpired:
                print(f"{name}: more than {LIMIT} s", flush=True)
        path = folder / f"{name}.json"
        if not path.exists():
            print(f"FAILED {name}\n{what_failed(log)}", flush=True)
            return name, None
        one = json.loads(path.read_text())
        kls = {kind: round(mean(one[kind]), 6) for kind in KINDS if kind in one}
        facts = {key: one[key] for key in ("preempted", "hits", "drafted", "groups", "graphs")}
        waited = sum(map(float, re.findall(r"waited (\S+) s for kernels", log.read_text())))
        times = f"up {one['seconds_to_start']:.0f} s, {waited:.1f} s of it for kernels of ours"
        print(f"{name}: KL {kls}, {facts}, {times}, all {one['seconds']:.0f} s", flush=True)
        return name, one

    with ThreadPoolExecutor(side_by_side) as pool:
        done = list(pool.map(start, names))
    return {name: one for name, one in done if one is not None}


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """What the command line says; names may stand before and after options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--side-by-side", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="in this process")
    found = parser.parse_intermixed_args(given)
    if unknown := [name for name in found.names if name not in CASES]:
        parser.error(f"no engine is called {', '.join(unknown)}; there are {', '.join(CASES)}")
    found.names = found.names or list(CASES)
    return found


def main() -> int:
    given = arguments(sys.argv[1:])
    names = given.names
    if given.alone:
        (name,) = names
        try:
            found = answers(name, given.folder)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        (given.folder / f"{name}.json").write_text(json.dumps(found))
        os._exit(0)  # whatever vLLM has left
    found = run(names, given.folder, given.side_by_side)
    wrong = [f"{name} did not run" for name in names if name not in found] + faults(found)
    print("\n".join(f"FAULT {line}" for line in wrong) or "ALL AS WANTED", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
