"""Compares what engines answer with transformers in float32: the code that vllm_answers.py and
sglang_compared.py share."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from vllm_log import what_failed

TOKENS, TOP = 48, 20  # generated tokens of a text; likeliest tokens of a step that an engine gives
CONTEXT, SCORED, WINDOWS = 256, 512, 4  # tokens of prompts whose predictions are compared
CHUNK = 256  # tokens of a step
LIMIT = 1500  # seconds of an engine
KINDS = "generated", "again", "sampled", "beside_aborted", "prompts"
# The highest KL that the demo model's answers may have by rows: of generated texts, and of prompts.
# It is twice what vLLM gave on one H200 on 2026-11-25.
SAME_CHUNK, MANY_CHUNKS = (0.011, 0.002), (0.013, 0.022)
MOST = {
    "int8": (0.0005, 0.0005),
    "default": (0.002, 0.001),  # vLLM gave 0.0009 of texts on 2026-11-30
    "int4": SAME_CHUNK,
    "int4-rows": MANY_CHUNKS,
    "int4-short-chunks": MANY_CHUNKS,
    "plan": (0.006, 0.002),
    "plan-by-layer": SAME_CHUNK,
}
BY_LAYER = ["int8 int4", "int4-g4 int4-g4", "int4-g4 int4-g4", "int8 int8"]  # formats of K and V
Found = dict[str, Any]
# rows, without tokens in 16 bit, which the reference does not have
INT4, BF16, INT8 = (
    {"k_format": x, "v_format": x, "recent_len": 0} for x in ("int4-g4", "bf16", "int8")
)


class Reference:
    """The model in transformers, in float32, with attention that knows soft caps."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        options: Any = {"dtype": torch.float32, "attn_implementation": "eager"}
        found: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
        self.model = found.to(self.device).eval()

    @torch.no_grad()
    def log_probs(self, ids: list[int]) -> torch.Tensor:
        """[tokens, vocabulary], float64."""
        logits = self.model(torch.tensor([ids], device=self.device)).logits[0]
        return torch.as_tensor(logits.double().log_softmax(-1))

    def divergence(self, prompt: list[int], text: Any) -> tuple[float, float]:
        """The mean KL of a generated text, and the share of its tokens that are the likeliest here,
        too. KL counts the likeliest tokens one by one, and all others as one."""
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
        """The mean KL of an engine's last SCORED predictions for a prompt."""
        assert len(logits) in (len(ids), len(ids) - 1), (len(logits), len(ids))
        exact = self.log_probs(ids)[: len(logits)][-SCORED:]
        told = logits[-SCORED:].to(self.device).double().log_softmax(-1)
        return float((exact.exp() * (exact - told)).sum(-1).mean())


def make_model(kind: str, folder: Path) -> str:
    """The folder of the demo model, or of a small random one with other attention."""
    from transformers import DeepseekV3Config, Gemma2Config, Gemma3TextConfig, GptOssConfig
    from vllm_engines import MODEL, SIZES, random_model

    if kind == "demo":
        return str(MODEL)
    sizes: Found = {**SIZES, "num_hidden_layers": 4, "max_position_embeddings": 2048}
    windows: Found = {**sizes, "sliding_window": 100, "query_pre_attn_scalar": 64}
    config: Any
    dtype = torch.float32  # of the saved weights; the engine converts them to bfloat16
    if kind == "gemma2":  # windows in every second layer, soft caps
        windows |= {"attn_logit_softcapping": 5.0, "final_logit_softcapping": None}
        windows["hidden_act"] = "gelu_pytorch_tanh"  # SGLang's name for it
        config = Gemma2Config(**windows)
    elif kind == "gemma3":  # windows in three of four layers, K and q are normed
        kinds = ["sliding_attention"] * 3 + ["full_attention"]
        config = Gemma3TextConfig(**windows, layer_types=kinds)
    elif kind == "deepseek":  # latent attention, of the sizes of DeepSeek V3's heads, no experts
        sizes |= {"num_attention_heads": 16, "num_key_value_heads": 16, "initializer_range": 0.1}
        config = DeepseekV3Config(**sizes, first_k_dense_replace=4, q_lora_rank=None)
    elif kind == "gpt-oss":  # windows in every second layer, sink logits
        # SGLang reads swiglu_limit, which transformers before 5.19 does not set
        windows |= {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0}
        config = GptOssConfig(**windows)
        dtype = torch.bfloat16  # SGLang takes that of its linear layers from the config
    else:
        raise ValueError(f"there is no model {kind!r}")
    return random_model(folder / kind, config, dtype)


def prompts_of(ids: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts to continue, and longer ones to score, from the tokens of a text."""
    from vllm_engines import LENGTHS

    from kvquant.calibration.windows import spread

    step = (len(ids) - max(LENGTHS)) // len(LENGTHS)
    short = [ids[i * step :][:length] for i, length in enumerate(LENGTHS)]
    return short, spread(ids, WINDOWS, CONTEXT + SCORED).tolist()


def random_ids() -> list[int]:
    """Tokens for a model with random weights: without 255, the last, which SGLang gives as 0."""
    return torch.randint(255, (8192,), generator=torch.Generator().manual_seed(0)).tolist()


def mean(pairs: list[list[float]]) -> float:
    """The mean KL."""
    return sum(kl for kl, _ in pairs) / len(pairs)


def is_as_good(ours: list[list[float]], theirs: list[list[float]]) -> bool:
    """Whether our KL is at most three paired standard errors above theirs. A run compares some 25
    pairs. With fewer than 8 texts the standard error is hardly known, so our KL may be a quarter of
    theirs higher still."""
    more = torch.tensor([a[0] - b[0] for a, b in zip(ours, theirs, strict=True)]).double()
    allowed = 3 * more.std() / len(more) ** 0.5 + 1e-6
    if len(more) < 8:
        allowed += mean(theirs) / 4
    return bool(more.mean() <= allowed)


def too_far(
    found: Mapping[str, Found],
    pairs: Sequence[tuple[str, str]],
    others: Sequence[str],
    most: Mapping[str, tuple[float, float]],
) -> list[str]:
    """A line for each engine whose answers are too far from transformers, or whose prefix cache,
    samples or aborted request are not as they should be.

    Args:
        found: answers by the names of engines; "hits" may be None.
        pairs: an engine with bf16 rows, and one with its own attention. The second must not be
            better (`is_as_good`).
        others: models with two engines: NAME-int8 with int8 rows, NAME-own with its own attention.
        most: the highest KL of other engines, as MOST has it.
    """
    wrong = []
    for ours, theirs in pairs:
        if ours in found and theirs in found:
            for kind in KINDS:
                a, b = found[ours].get(kind), found[theirs].get(kind)
                if a and b and not is_as_good(a, b):
                    wrong.append(f"{ours}: KL of {kind} {mean(a):.6f}, {theirs} {mean(b):.6f}")
    # bfloat16 alone moves these models by .01 and less
    for name in others:
        both = found.get(f"{name}-int8"), found.get(f"{name}-own")
        for kind in KINDS:
            if both[0] is None or both[1] is None:
                continue
            kl, own = mean(both[0][kind]), mean(both[1][kind])
            if not kl < 1.3 * own + 0.002:
                wrong.append(f"{name}-int8: KL of {kind} {kl:.6f}, own {own:.6f}")
    for name, (of_text, of_prompts) in most.items():
        for kind in KINDS:
            limit = of_prompts if kind == "prompts" else 1.5 * of_text
            if kind in found.get(name, {}):
                kl = mean(found[name][kind])
                if not kl < limit:
                    wrong.append(f"{name}: KL of {kind} {kl:.6f}, not below {limit}")
    for name, one in found.items():
        if one["hits"] is not None and one["hits"] <= 800:
            wrong.append(f"{name}: {one['hits']} tokens were found in the prefix cache")
        if not 0 < one["aborted"] < TOKENS:
            wrong.append(f"{name}: the aborted request has {one['aborted']} tokens")
        if one["sampled_texts"] <= 8:
            wrong.append(f"{name}: {one['sampled_texts']} of 12 samples differ")
    return wrong


def run(
    names: list[str], folder: Path, side_by_side: int, tell: Callable[[Found, str], str]
) -> dict[str, Found]:
    """Start engines, each by the script that runs. Gives the answers of those that did not fail."""
    folder.mkdir(parents=True, exist_ok=True)

    def start(name: str) -> tuple[str, Found | None]:
        log = folder / f"{name}.log"
        command = [sys.executable, sys.argv[0], "--alone", str(folder), name]
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
        told = tell(one, log.read_text(errors="replace"))
        print(f"{name}: KL {kls}, {told}, all {one['seconds']:.0f} s", flush=True)
        return name, one

    with ThreadPoolExecutor(side_by_side) as pool:
        done = list(pool.map(start, names))
    return {name: one for name, one in done if one is not None}


def run_script(name: str, folder: Path, *arguments: str) -> int:
    """Run one of the two scripts in a process of its own, which must find no fault; how many
    engines it has compared."""
    script = Path(__file__).with_name(name)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(script), str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert done.stdout.endswith("ALL AS WANTED\n")
    return done.stdout.count(": KL ")


def arguments(given: Sequence[str], cases: Mapping[str, Any]) -> argparse.Namespace:
    """The arguments of the command line. Names may stand before and after options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--side-by-side", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="in this process")
    found = parser.parse_intermixed_args(given)
    if unknown := [name for name in found.names if name not in cases]:
        parser.error(f"no engine is called {', '.join(unknown)}; there are {', '.join(cases)}")
    found.names = found.names or list(cases)
    return found


def main(
    cases: Mapping[str, Any],
    answers: Callable[[str, Path], Found],
    faults: Callable[[dict[str, Found]], list[str]],
    tell: Callable[[Found, str], str],
) -> int:
    """Run the engines that the command line names, and print what is wrong.

    The call writes the mean KL of each engine and kind of answers, in nats a token, to
    FOLDER/compared.json.

    Args:
        cases: by their names.
        answers: starts the engine of a case in this process, and gives its answers.
        faults: gives a line for each fault of the answers.
        tell: gives the text about an engine's answers and log that its line has.
    """
    given = arguments(sys.argv[1:], cases)
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
        os._exit(0)  # whatever the engine has left
    everything = run(names, given.folder, given.side_by_side, tell)
    kept = given.folder / "compared.json"  # it also has the engines of earlier calls
    engines = json.loads(kept.read_text())["engines"] if kept.exists() else {}
    engines |= {
        name: {kind: mean(one[kind]) for kind in KINDS if kind in one}
        for name, one in everything.items()
    }
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    facts = {"device": device, "torch": torch.__version__}
    kept.write_text(json.dumps({**facts, "engines": engines}, indent=1) + "\n")
    wrong = [f"{name} did not run" for name in names if name not in everything]
    wrong += faults(everything)
    print("\n".join(f"FAULT {line}" for line in wrong) or "ALL AS WANTED", flush=True)
    return bool(wrong)
