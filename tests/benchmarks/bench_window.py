"""KL of rows in vLLM's engine, beside that of QuantizedCache in transformers; a JSON for a model.

    python tests/benchmarks/bench_window.py FOLDER --format default --format int4-g4

Both read the same passages of a text and predict the same tokens of it: a logits processor makes
vLLM go on with the text. KL is in nats a token, of vLLM to vLLM's own attention, and of
QuantizedCache to DynamicCache. QuantizedCache has vLLM's first page as its sinks. States are

    plain           a prompt in one chunk
    preempted       a prompt that is 32 tokens shorter. After 32 steps vLLM preempts all sequences,
                    forgets their pages, and reads them again. The tokens after that are compared
    prefix hit      a prompt of which vLLM's prefix cache has 90 %, from the request before
    slots taken     the same a turn later, when other sequences have taken all 16-bit slots
    chunks          a prompt in chunks of 256 tokens

The comparison of preempted ones has no preemption. That of prefix hits is one cache, which goes on.
On the CPU all is in float32, but for rows. On a GPU all is in bfloat16, and vLLM's first model
runner serves; then "16 bit" tells what rounding alone does. Each row of the JSON is written at
once, and another call goes on. vLLM must be installed.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "0"}  # before vLLM is imported
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import click
import torch
from bench_vllm import machine
from public_models import RESULTS, Row, Rows
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from vllm_engines import TEXT, engine
from vllm_texts import as_tokens

from kvquant import QuantizedCache
from kvquant.calibration.windows import spread
from kvquant.cli.console import COUNT, NEW_FILE
from kvquant.evaluation.evaluate import hash_of

PAGE, LEAD, CHUNK = 64, 32, 256  # tokens of a page; before a preemption; of a chunk
ON_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
STATES = {"plain": 0, "preempted": 0, "prefix hit": 1, "slots taken": 2, "chunks": 0}  # turns
FORMATS: dict[str, Row | None] = {
    "16 bit": None,
    "default": {},
    "int4-g4": {"k_format": "int4-g4", "v_format": "int4-g4", "accept_loss": True},
    "plan": {"plan": "auto"},
}
PARTS = {"turns": ("preempted", "plain", "prefix hit", "slots taken"), "chunks": ("chunks",)}
LogProbs = dict[str, torch.Tensor]  # by states, each [passages, new tokens, vocabulary]


def turns(first: int, new: int) -> list[int]:
    """Tokens of the prompts of three turns: full pages of the turn before are 90 % of a prompt."""
    starts = [first]
    for _ in range(2):
        before = starts[-1] + new
        starts.append(max(-(-((before - 1) // PAGE * PAGE) * 10 // 9), before + 1))
    return starts


def served(
    options: Row, part: str, texts: list[list[int]], starts: list[int], new: int, path: Path
) -> Row:
    """Save at the path what an engine predicts, LogProbs; facts of the run.

    Args:
        options: of vllm_engines.engine.
        part: a key of PARTS.
        texts: passages, all of the same length.
        starts: tokens of prompts, of each turn.
        new: tokens of each turn that are predicted.
        path: of the new file.
    """
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    found: LogProbs = {}

    class Forced(AdapterLogitsProcessor):
        """Keeps log-probabilities, and leaves only the passage's next token."""

        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            given = params.extra_args
            return given and partial(self.force, given)

        def force(self, given: Row, output: list[int], logits: torch.Tensor) -> torch.Tensor:
            at = given["first"] + len(output)
            if at >= given["start"]:
                rows = found.setdefault(
                    given["state"], torch.full((len(texts), new, len(logits)), torch.nan)
                )
                rows[given["text"], at - given["start"]] = logits.float().log_softmax(-1)
            only = torch.full_like(logits, -torch.inf)
            only[texts[given["text"]][at]] = 0
            return only

    with engine(logits_processors=[Forced], **options) as llm:
        runs, hits, vllm = 0, {}, llm.llm_engine

        def run(prompts: list[list[int]], params: list[Any], preempts_at: int = 0) -> float:
            """Serve prompts at once; the share of their tokens that were in the prefix cache."""
            nonlocal runs
            runs, steps, cached = runs + 1, 0, 0
            for i, (prompt, one) in enumerate(zip(as_tokens(prompts), params, strict=True)):
                vllm.add_request(f"{runs} {i}", prompt, one)
            while vllm.has_unfinished_requests():
                cached += sum(one.num_cached_tokens for one in vllm.step() if one.finished)
                steps += 1
                if steps == preempts_at:
                    llm.reset_prefix_cache(reset_running_requests=True)
            return cached / sum(map(len, prompts))

        def options_of(tokens: int, **given: Any) -> Any:
            return SamplingParams(
                max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, **given
            )

        for state in PARTS[part]:
            start = starts[STATES[state]]
            lead = LEAD if state == "preempted" else 0
            if state == "slots taken":
                other = options_of(2)
                run([text[PAGE + LEAD :: -1] for text in texts], [other] * len(texts))
            given = {"state": state, "first": start - lead, "start": start}
            params = [
                options_of(lead + new, extra_args={**given, "text": i}) for i in range(len(texts))
            ]
            hits[state] = run([text[: start - lead] for text in texts], params, lead)
            if state == "preempted":
                llm.reset_prefix_cache()
        preempted = [x.value for x in llm.get_metrics() if x.name == "vllm:num_preemptions"]
    torch.save(found, path)
    return {"hits": hits, "preemptions": sum(preempted)}


@torch.inference_mode()
def predicted(net: Any, past: Row, part: str, texts: torch.Tensor, starts: list[int], new: int) -> LogProbs:
    """What a model of transformers predicts with a cache, an argument of its call."""
    chunk, at, found = CHUNK if part == "chunks" else texts.shape[1], 0, {}
    for state in PARTS[part]:
        if state == "preempted":
            continue
        start, rows = starts[STATES[state]], []
        for end in [*range(at + chunk, start, chunk), *range(start, start + new)]:
            logits = net(texts[:, at:end], **past, logits_to_keep=1).logits[:, -1]
            rows.append(logits.float().log_softmax(-1).cpu())
            at = end
        found[state] = torch.stack(rows[-new:], 1)
    return found


class Bench:
    """A model's engine and transformers, each with its exact predictions, which are made once."""

    def __init__(self, model: Path, passages: int, first: int, new: int, scratch: Path) -> None:
        tokens = AutoTokenizer.from_pretrained(model).encode(TEXT.read_text(encoding="utf-8"))
        self.model, self.new, self.scratch, self.starts = model, new, scratch, turns(first, new)
        self.texts = spread(tokens, passages, self.starts[-1] + new)

    @cached_property
    def net(self) -> Any:
        net: Any = AutoModelForCausalLM.from_pretrained(
            self.model, dtype=DTYPE, attn_implementation="kvquant"
        )
        return net.to("cuda" if ON_GPU else "cpu").eval()

    def serve(self, rows: Row | None, part: str) -> tuple[LogProbs, Row]:
        """What vLLM predicts; facts of the run."""
        options: Row = {
            "model": str(self.model),
            "rows": rows,
            "dtype": str(DTYPE).removeprefix("torch."),
            "block_size": PAGE,
            "max_model_len": self.texts.shape[1] + PAGE,
            "max_num_seqs": len(self.texts),
            "max_num_batched_tokens": self.texts.numel(),
            "long_prefill_token_threshold": CHUNK if part == "chunks" else 0,
            "kv_cache_memory_bytes": 2 << 30,
            "async_scheduling": False,
        }
        if ON_GPU and rows is not None:
            options["attention_backend"] = "CUSTOM"
        path = self.scratch / "served.pt"
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn) as pool:  # kvquant has one setting a process
            facts = pool.submit(
                served, options, part, self.texts.tolist(), self.starts, self.new, path
            ).result()
        return torch.load(path), facts

    def predict(self, past: Row, part: str) -> LogProbs:
        """What transformers predicts."""
        texts = self.texts.to(self.net.device)
        return predicted(self.net, past, part, texts, self.starts, self.new)

    @cached_property
    def exact(self) -> tuple[LogProbs, LogProbs]:
        """Of vLLM and of transformers."""
        past = {"past_key_values": DynamicCache(config=self.net.config)}
        return self.serve(None, "turns")[0], self.predict(past, "turns")

    def measure(self, fmt: str, recent: int, part: str) -> Row:
        """KL of each passage, by states: of vLLM and of transformers."""
        rows = FORMATS[fmt]
        windowed = None if rows is None else {**rows, "recent_len": recent}
        told, facts = self.serve(windowed, part)
        found = {"vllm": kl(self.exact[0], told), **facts}
        if windowed is not None:
            cache = QuantizedCache(self.net, **windowed, sink_len=PAGE if recent else 0)
            found["transformers"] = kl(self.exact[1], self.predict(cache.argument, part))
        return found


def kl(exact: LogProbs, told: LogProbs) -> dict[str, list[float]]:
    """The mean of each passage, by states."""
    plain = [state for state in PARTS["turns"] if state != "preempted"]
    found = {}
    for state, ours in told.items():
        of = exact[plain[STATES[state]]]
        found[state] = [
            float((a.double().exp() * (a.double() - b.double())).sum(-1).mean())
            for a, b in zip(of, ours, strict=True)
        ]
    return found


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Of the means of pairs, and its standard error."""
    a, b = torch.tensor([ours, theirs]).double()
    found = a.mean() / b.mean()
    error = (a - found * b).std() / (b.mean() * len(a) ** 0.5)
    return float(found), float(error)


def show(row: Row) -> None:
    """Print the KL of a row."""
    key, theirs = row["key"], row.get("transformers", {})
    for state, ours in row["vllm"].items():
        words = f"{key['format']:8} {key['recent_len']:4} {state:12} {sum(ours) / len(ours):.6f}"
        other = theirs.get("plain" if state == "preempted" else state)
        if other:
            found, error = ratio(ours, other)
            words += f"  {sum(other) / len(other):.6f}  ratio {found:.3f} \u00b1 {error:.3f}"
        click.echo(words)


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--format", "formats", type=click.Choice([*FORMATS]), multiple=True)
@click.option("--recent", "recents", type=click.IntRange(0), multiple=True, default=(128, 0))
@click.option("--part", "parts", type=click.Choice([*PARTS]), multiple=True, default=[*PARTS])
@click.option("--passages", type=click.IntRange(2), default=6, show_default=True)
@click.option("--first", type=COUNT, default=1000, show_default=True, help="Prompt's tokens.")
@click.option("--new-tokens", type=COUNT, default=64, show_default=True)
@click.option("--seconds", default=3600.0, show_default=True, help="No engine begins later.")
@click.option("--json", "json_file", type=NEW_FILE, help="In place of results/window-NAME.json.")
def main(
    model: Path,
    formats: tuple[str, ...],
    recents: tuple[int, ...],
    parts: tuple[str, ...],
    passages: int,
    first: int,
    new_tokens: int,
    seconds: float,
    json_file: Path | None,
) -> None:
    """Measure KL in vLLM and in transformers, by the same rows."""
    ends = time.monotonic() + seconds
    rows = Rows(json_file or RESULTS / f"window-{model.name}.json", {"model": model.name, **machine()})
    key: Row = {"passages": passages, "starts": turns(first, new_tokens), "new_tokens": new_tokens}
    key |= {"text": hash_of(TEXT.read_text(encoding="utf-8")), "dtype": str(DTYPE)}
    with TemporaryDirectory() as scratch:
        bench = Bench(model, passages, first, new_tokens, Path(scratch))
        for recent in recents:
            for fmt in formats or FORMATS:
                for part in parts:
                    one = {**key, "format": fmt, "recent_len": recent, "part": part}
                    if time.monotonic() > ends and rows.find(one) is None:
                        continue
                    show(rows.measure(one, partial(bench.measure, fmt, recent, part)))


if __name__ == "__main__":
    main()
