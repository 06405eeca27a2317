"""KL of rows in vLLM's engine, beside that of QuantizedCache in transformers.

    python tests/benchmarks/bench_window.py FOLDER --format default --format int4-g4

Both predict the same tokens of the same passages: a logits processor makes vLLM go on with the
text. KL is in nats a token, of vLLM to vLLM's own attention, and of QuantizedCache to DynamicCache.
QuantizedCache has vLLM's first page as its sinks. States are

    plain           a prompt in one chunk
    preempted       a prompt 32 tokens shorter: after 32 steps vLLM preempts all sequences, forgets
                    their pages and reads them again. The tokens after that are compared with plain
    prefix hit      a next turn: vLLM's prefix cache has 90 % of the prompt
    slots taken     the same again, after other sequences have taken all 16-bit slots
    chunks          a prompt in chunks of 256 tokens

On the CPU all but rows is in float32. There QuantizedCache rounds the keys of a prompt to bfloat16
before its tokens attend to them, and vLLM does not. This is a part of why vLLM loses less there:
with exact_format="fp16" the ratio of Coder-0.5B and a whole prompt was .62 and not .51. On a GPU
all is in bfloat16, vLLM's first model runner serves, and "16 bit" tells what rounding does. Each
row of results/vllm-kl.json is written at once, and another call, also for another model, goes on.
vLLM must be installed.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "0"}  # before vLLM is imported
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import click
import torch
from bench_vllm import INT4, machine
from public_models import RESULTS, Row, Rows
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from vllm_engines import TEXT, counter, engine
from vllm_texts import as_tokens

from kvquant import QuantizedCache
from kvquant.calibration.windows import spread
from kvquant.cli.console import COUNT, NEW_FILE
from kvquant.evaluation.evaluate import hash_of

PAGE, LEAD, CHUNK = 64, 32, 256  # tokens of a page; before a preemption; of a chunk
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
FORMATS: dict[str, Row | None] = {
    "16 bit": None,
    "default": {},
    "int4-g4": {**INT4, "accept_loss": True},
    "plan": {"plan": "auto"},
}
TURNS = "plain", "prefix hit", "slots taken"
PARTS = {"turns": ("preempted", *TURNS), "chunks": ("chunks",)}
LogProbs = dict[str, torch.Tensor]  # by states, each [passages, new tokens, vocabulary]


def turns(first: int, new: int) -> dict[str, int]:
    """Tokens of the prompts of TURNS: full pages of the turn before are 90 % of a prompt."""
    found = {"plain": first}
    for name in TURNS[1:]:
        before = [*found.values()][-1] + new
        found[name] = max(-(-((before - 1) // PAGE * PAGE) * 10 // 9), before + 1)
    return found


def turn_of(state: str) -> str:
    """The turn whose tokens a state has, of TURNS."""
    return state if state in TURNS else "plain"


def serve(
    options: Row, part: str, texts: list[list[int]], starts: Mapping[str, int], new: int, path: Path
) -> Row:
    """Save what an engine predicts, LogProbs, at the path; facts of the run.

    Args:
        options: of vllm_engines.engine.
        part: of PARTS.
        texts: passages of one length.
        starts: tokens of the prompts of each turn.
        new: tokens that are predicted behind each.
        path: of the new file.
    """
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    found: LogProbs = {}
    hits: dict[str, float] = {}

    class Forced(AdapterLogitsProcessor):  # type: ignore[misc]
        """Keeps log-probabilities, and leaves only the passage's next token."""

        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            return params.extra_args and partial(self.force, params.extra_args)

        def force(self, given: Row, output: list[int], logits: torch.Tensor) -> torch.Tensor:
            text, at = given["text"], given["first"] + len(output)
            if at >= given["start"]:
                new_rows = torch.full((len(texts), new, len(logits)), torch.nan)
                rows = found.setdefault(given["state"], new_rows)
                rows[text, at - given["start"]] = logits.float().log_softmax(-1)
            only = torch.full_like(logits, -torch.inf)
            only[texts[text][at]] = 0
            return only

    with engine(logits_processors=[Forced], **options) as llm:

        def run(prompts: list[list[int]], tokens: int, preempts_at: int = 0, **given: Any) -> float:
            """Serve prompts at once; the share of their tokens that were in the prefix cache."""
            steps = cached = 0
            for i, prompt in enumerate(as_tokens(prompts)):
                extra = {**given, "text": i} if given else None
                params = SamplingParams(
                    temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra
                )
                llm.llm_engine.add_request(f"{given.get('state')} {i}", prompt, params)
            while llm.llm_engine.has_unfinished_requests():
                done = [one for one in llm.llm_engine.step() if one.finished]
                cached += sum(one.num_cached_tokens for one in done)
                steps += 1
                if steps == preempts_at:
                    llm.reset_prefix_cache(reset_running_requests=True)
            return cached / sum(map(len, prompts))

        for state in PARTS[part]:
            start, lead = starts[turn_of(state)], LEAD if state == "preempted" else 0
            if state == "slots taken":
                run([text[PAGE + LEAD :: -1] for text in texts], 2)
            prompts = [text[: start - lead] for text in texts]
            given = {"state": state, "first": start - lead, "start": start}
            hits[state] = run(prompts, lead + new, lead, **given)
            if lead:
                llm.reset_prefix_cache()
        preempted = counter(llm, "num_preemptions")
    torch.save(found, path)
    return {"hits": hits, "preemptions": preempted}


class Bench:
    """A model in vLLM and in transformers, and what both predict exactly."""

    def __init__(self, model: Path, passages: int, first: int, new: int, scratch: Path) -> None:
        tokens = AutoTokenizer.from_pretrained(model).encode(TEXT.read_text(encoding="utf-8"))
        self.model, self.new, self.scratch, self.starts = model, new, scratch, turns(first, new)
        self.texts = spread(tokens, passages, max(self.starts.values()) + new)
        net: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=DTYPE, attn_implementation="kvquant"
        )
        self.net = net.to(DEVICE).eval()

    @cached_property
    def exact(self) -> tuple[LogProbs, LogProbs]:
        """Of vLLM and of transformers."""
        past = {"past_key_values": DynamicCache(config=self.net.config)}
        return self.serve(None, "turns")[0], self.predict(past, "turns")

    def serve(self, rows: Row | None, part: str) -> tuple[LogProbs, Row]:
        """What vLLM predicts, and facts of the run."""
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
            "attention_backend": "CUSTOM" if DEVICE == "cuda" and rows is not None else None,
        }
        path = self.scratch / "served.pt"
        given = options, part, self.texts.tolist(), self.starts, self.new, path
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            facts = pool.submit(serve, *given).result()  # kvquant has one setting a process
        return torch.load(path), facts

    @torch.inference_mode()
    def predict(self, past: Row, part: str) -> LogProbs:
        """What transformers predicts with a cache, an argument of the model's call."""
        texts, at, found = self.texts.to(DEVICE), 0, {}
        chunk = CHUNK if part == "chunks" else texts.shape[1]
        for state in PARTS[part]:
            if state == "preempted":
                continue
            start, rows = self.starts[turn_of(state)], []
            for end in [*range(at + chunk, start, chunk), *range(start, start + self.new)]:
                logits = self.net(texts[:, at:end], **past, logits_to_keep=1).logits[:, -1]
                rows.append(logits.float().log_softmax(-1).cpu())
                at = end
            found[state] = torch.stack(rows[-self.new :], 1)
        return found

    def measure(self, fmt: str, recent: int, part: str) -> Row:
        """KL of each passage, by states: of vLLM and of transformers."""
        rows = FORMATS[fmt]
        if rows is None:
            told, facts = self.serve(None, part)
            return {"vllm": kl(self.exact[0], told), "apart": kl(*self.exact), **facts}
        told, facts = self.serve({**rows, "recent_len": recent}, part)
        sinks = PAGE if recent else 0
        cache = QuantizedCache(self.net, **rows, recent_len=recent, sink_len=sinks)
        theirs = kl(self.exact[1], self.predict(cache.argument, part))
        return {"vllm": kl(self.exact[0], told), "transformers": theirs, **facts}


def kl(exact: LogProbs, told: LogProbs) -> dict[str, list[float]]:
    """The mean of each passage, by states."""
    found = {}
    for state, given in told.items():
        pairs = zip(exact[turn_of(state)].double(), given.double(), strict=True)
        found[state] = [float((a.exp() * (a - b)).sum(-1).mean()) for a, b in pairs]
    return found


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Of the means of pairs, and its standard error."""
    a, b = torch.tensor([ours, theirs]).double()
    found = a.mean() / b.mean()
    return float(found), float((a - found * b).std() / (b.mean() * len(a) ** 0.5))


def show(row: Row) -> None:
    """Print the mean KL of a row's states."""
    theirs = row.get("transformers", {})
    for state, kls in row["vllm"].items():
        words = f"{row['key']['format']:8} {row['key']['recent_len']:4} {state:12} {mean(kls):.6f}"
        if other := theirs.get(state, theirs.get("plain")):
            found, error = ratio(kls, other)
            words += f" {mean(other):.6f}, ratio {found:.3f} \u00b1 {error:.3f}"
        click.echo(words)


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--format", "formats", type=click.Choice([*FORMATS]), multiple=True)
@click.option("--recent", "recents", type=click.IntRange(0), multiple=True, default=(128, 0))
@click.option("--passages", type=click.IntRange(2), default=6, show_default=True)
@click.option("--first", type=COUNT, default=1000, show_default=True, help="Prompt's tokens.")
@click.option("--new-tokens", type=COUNT, default=64, show_default=True)
@click.option("--json", "file", type=NEW_FILE, default=RESULTS / "vllm-kl.json")
def main(
    model: Path,
    formats: tuple[str, ...],
    recents: tuple[int, ...],
    passages: int,
    first: int,
    new_tokens: int,
    file: Path,
) -> None:
    """Measure the KL of vLLM and of transformers with the same rows."""
    rows = Rows(file, machine())
    with TemporaryDirectory() as scratch:
        bench = Bench(model, passages, first, new_tokens, Path(scratch))
        key: Row = {"model": model.name, "dtype": str(DTYPE)}
        key |= {"passages": passages, "new_tokens": new_tokens}
        key |= {"starts": list(bench.starts.values()), "text": hash_of(TEXT.read_text())}
        for recent, fmt, part in product(recents, formats or FORMATS, PARTS):
            one = {**key, "format": fmt, "recent_len": recent, "part": part}
            show(rows.measure(one, partial(bench.measure, fmt, recent, part)))


if __name__ == "__main__":
    main()
