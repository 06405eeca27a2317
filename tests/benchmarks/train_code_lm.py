"""Train a decoder of about 160 million parameters on the Python sources of installed packages.

Two commands train it on one H100 or H200, in at most 9 minutes each. The second goes on where the
first one stopped, with longer contexts:

    python tests/benchmarks/train_code_lm.py FOLDER --length 1024 --length 2048 --seconds 510
    python tests/benchmarks/train_code_lm.py FOLDER --resume --length 8192 --rate 7e-4 \\
        --last 3e-5 --seconds 510

At commit d73287f9 this script also trained on several GPUs at once (torchrun).

Of each batch 15 % are sheets of facts: those of train_recall.py, and sheets of Python code
(code_tasks.py). 10 % are documents that come a second time, after other ones. The rest is source
code. FOLDER gets:

    model.safetensors, tokenizer.json, ...    bfloat16, for `kvquant evaluate` and bench_code.py
    test.txt, valid.txt                       sources that the model does not train on: those of the
                                              first --held package, and of the other --held ones
    tokens.npy, training.pt                   for --resume: all tokens, weights and the optimizer

A model learns recall sooner beside source code than from sheets alone. So train the other kinds of
models of train_recall.py (--kind) here, too, such as `--kind sinks --width 512 --layers 4`. If you
train several models, only the first run needs to read the sources: give its FOLDER to the later
ones as `--sources`.

The last lines printed tell whether the model uses its context. They are the held-out loss of the
first and of the last 1,024 tokens, and the share of answers' tokens that the model predicts in each
task. Do not test caches with a model that gains nothing from its context.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import code_tasks
import numpy as np
import torch
from bench_recall import ASKED
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from train_recall import (
    CHUNK,
    KINDS,
    TOKENS,
    WEIGHTS,
    Sheets,
    batches,
    made_model,
    optimizer_of,
    train,
)
from train_recall import prepare as prepare_model
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvquant.errors import ConfigError
from kvquant.evaluation.retrieval import TASKS

SITE = Path(torch.__file__).parents[1]
HELD = ("sklearn", "scipy")
# the files that prepare writes
SOURCES = ("tokenizer.json", "tokenizer_config.json", "tokens.npy", "test.txt", "valid.txt")
END = "<|endoftext|>"  # behind each document; Qwen2's tokenizers add it where it is not there
VOCABULARY = 16384
SAMPLE = 2500  # files that the tokenizer is made from
SIZES = range(1000, 300000)  # letters of a file
KEPT = 1_200_000  # letters of test.txt and valid.txt, each
SHEETS, COPIES = 0.15, 0.1  # shares of rows
ANSWER = 4.0  # what a token of an answer counts in the loss; one of source code counts 1
EDGE, PASSAGES = 1024, 8  # of the held-out loss: tokens, and how many passages
THETA = 500000.0  # of RoPE
CHECKED = 1 << 20  # a seed of sheets that are not trained on


def read_sources(site: Path, held: tuple[str, ...]) -> dict[str, list[str]]:
    """The texts of Python files: "train", "test" (of the first package held out), "valid".

    Raises:
        SystemExit: a package that is to be held out is not there.
    """
    packages = sorted(one.parent for one in site.glob("*/__init__.py"))
    names = [one.name for one in packages]
    missing = [one for one in held if one not in names]
    if missing or len(held) < 2:
        raise SystemExit(
            f"hold out two packages or more (--held); {', '.join(missing) or 'one'} is not enough. "
            f"There are {', '.join(names)}"
        )
    found: dict[str, list[str]] = {"train": [], "test": [], "valid": []}
    for package in packages:
        part = "train"
        if package.name in held:
            part = "valid" if held.index(package.name) else "test"
        for path in sorted(package.rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) in SIZES:
                found[part].append(text)
    for texts in found.values():
        random.Random(0).shuffle(texts)
    return found


def made_tokenizer(texts: list[str], size: int) -> Any:
    """Byte-level BPE; each digit is a token."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)


def tokens_of(tokenizer: Any, texts: list[str]) -> np.ndarray[Any, Any]:
    """[tokens] uint16: the texts, an end behind each."""
    end = tokenizer.eos_token_id
    parts = []
    for at in range(0, len(texts), 1000):  # tokenized on all cores
        encoded = tokenizer.backend_tokenizer.encode_batch(texts[at : at + 1000])
        parts += [np.array([*one.ids, end], dtype=np.uint16) for one in encoded]
    return np.concatenate(parts)


class Rows(torch.utils.data.IterableDataset[Any]):
    """Batches of source code, copied documents and sheets: tokens, and what each counts.

    Args:
        path: of the tokens.
        tokenizer: of the model.
        length: tokens of a row.
        seed: of all that is drawn.
        warm: seconds until sheets are as long as rows; until then a row has several.
        filler: a text for the front of sheets.
        tokens: of a batch.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Any,
        length: int,
        seed: int,
        *,
        warm: float = 0.0,
        filler: str,
        tokens: int = TOKENS,
    ) -> None:
        self.path, self.length, self.seed, self.count = path, length, seed, tokens // length
        tasks = [task for task in TASKS for _ in range(WEIGHTS.get(task, 1))]
        tasks += 2 * [*code_tasks.KINDS]
        self.sheets = Sheets(
            tokenizer,
            length,
            seed,
            warm=warm,
            lines=3,
            grow=warm,
            tokens=length,
            tasks=tasks,
            filler=filler,
        )
        self.end = tokenizer.eos_token_id

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        rng = random.Random(f"{self.seed} {0 if worker is None else worker.id}")
        tokens = np.load(self.path, mmap_mode="r")
        sheets = iter(self.sheets)
        while True:
            rows, counts = [], []
            for _ in range(self.count):
                kind, count = rng.random(), torch.ones(self.length)
                if kind < SHEETS:
                    row, answers = (one.flatten() for one in next(sheets))
                    count = ANSWER * answers
                elif kind < SHEETS + COPIES:
                    row = torch.tensor(self._copied(tokens, rng))
                else:
                    row = torch.tensor(self._drawn(tokens, self.length, rng))
                rows.append(row)
                counts.append(count)
            yield torch.stack(rows).long(), torch.stack(counts)

    def _drawn(
        self, tokens: np.ndarray[Any, Any], length: int, rng: random.Random
    ) -> np.ndarray[Any, Any]:
        start = rng.randrange(len(tokens) - length)
        return tokens[start : start + length].astype(np.int64)

    def _copied(self, tokens: np.ndarray[Any, Any], rng: random.Random) -> np.ndarray[Any, Any]:
        """A document or a part of it, other ones, and the same again."""
        one = self._drawn(tokens, rng.randrange(self.length // 16, self.length // 4), rng)
        ends = np.flatnonzero(one == self.end)
        if len(ends) and ends[-1] > len(one) // 2:
            one = one[: ends[-1] + 1]
        others = self._drawn(tokens, self.length - 2 * len(one), rng)
        return np.concatenate([one, others, one])


def held_out_loss(model: Any, tokenizer: Any, text: str, length: int) -> dict[str, float]:
    """Nats a token: of all, of the first tokens and of the last ones of a context."""
    tokens = torch.from_numpy(tokens_of(tokenizer, [text]).astype(np.int64))
    count = min(PASSAGES, len(tokens) // length)
    losses = []
    with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16):
        for row in tokens[: count * length].view(count, length).to(model.device):
            hidden = model.model(input_ids=row[None], use_cache=False).last_hidden_state[0, :-1]
            parts = zip(hidden.split(CHUNK), row[1:].split(CHUNK), strict=True)
            costs = [
                torch.nn.functional.cross_entropy(
                    model.lm_head(x).float(), wanted, reduction="none"
                )
                for x, wanted in parts
            ]
            losses.append(torch.cat(costs))
    each, edge = torch.stack(losses), min(EDGE, length // 4)
    return {
        "all": float(each.mean()),
        "first": float(each[:, :edge].mean()),
        "last": float(each[:, -edge:].mean()),
    }


def predicted(model: Any, sheets: Sheets, count: int) -> float:
    """The share of tokens of answers that are the likeliest ones, in so many batches of sheets."""
    right = []
    with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16):
        for tokens, answers in itertools.islice(sheets, count):
            hidden = model.model(input_ids=tokens.to(model.device), use_cache=False)
            before = hidden.last_hidden_state[:, :-1][answers[:, 1:] > 0]
            right.append(
                model.lm_head(before).argmax(-1).cpu() == tokens[:, 1:][answers[:, 1:] > 0]
            )
    return float(torch.cat(right).float().mean())


def prepare(folder: Path, site: Path, held: tuple[str, ...], size: int) -> None:
    """Write the tokenizer, the tokens and the texts that are held out."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = read_sources(site, held)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # on one core this takes minutes
    tokenizer = made_tokenizer(sources["train"][:SAMPLE], size)
    tokenizer.save_pretrained(folder)
    tokens = tokens_of(tokenizer, sources["train"])
    np.save(folder / "tokens.npy", tokens)
    for part in ("test", "valid"):
        (folder / f"{part}.txt").write_text("\n".join(sources[part])[:KEPT], encoding="utf-8")
    letters = sum(map(len, sources["train"]))
    print(f"{len(tokens) / 1e6:.1f} million tokens, {letters / len(tokens):.2f} letters a token")


def copy_sources(other: Path, folder: Path) -> None:
    """Take the tokenizer, the tokens and the texts that another run has written."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in SOURCES:
        shutil.copy(other / one, folder)


def main() -> None:
    """Prepare or go on, train and save."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="plain", help="as of train_recall.py")
    parser.add_argument("--resume", action="store_true", help="go on from what FOLDER has")
    parser.add_argument("--seconds", type=float, default=510.0, help="until weights are saved")
    parser.add_argument("--length", type=int, action="append", help="in turn, of equal time")
    parser.add_argument("--rate", type=float, default=1e-3, help="of learning")
    parser.add_argument("--last", type=float, default=7e-4, help="rate of learning in the end")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a batch")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--packages", type=Path, default=SITE, help="a folder of packages")
    parser.add_argument("--sources", type=Path, help="what another run has read: its FOLDER")
    parser.add_argument("--held", action="append", help="a package that is not trained on")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    folder, lengths = given.folder, given.length or [1024, 2048]
    if given.sources is not None and (given.resume or given.sources.resolve() == folder.resolve()):
        raise SystemExit("--sources copies into a new FOLDER: leave it out where FOLDER has them")
    if given.tokens < max(lengths):
        raise SystemExit(f"{given.tokens} --tokens are less than a row")
    torch.manual_seed(given.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if given.sources is not None:
        copy_sources(given.sources, folder)
    elif not given.resume:
        prepare(folder, given.packages, tuple(given.held or HELD), given.vocabulary)
        told(begin, "the sources are read")
    # otherwise each of many workers tokenizes its sheets on all cores
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = made_model(given.kind, tokenizer, given.width, given.layers, max(lengths), theta=THETA)
    prepare_model(model, device)
    optimizer = optimizer_of(model, (0.9, 0.95), 0.1)
    if given.resume:
        state = torch.load(folder / "training.pt", map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    valid = (folder / "valid.txt").read_text(encoding="utf-8")
    code_tasks.add(valid)  # its lines are read in sheets, and are not predicted
    # compiled by torch 2.11, a bias of an expert gets a gradient of a wrong shape
    if device == "cuda" and given.kind != "sinks":
        for layer in model.model.layers:  # one graph serves all: it compiles in seconds
            layer.compile(dynamic=False)
    seconds = given.seconds - (time.monotonic() - begin)
    edges = np.linspace(given.rate, given.last, len(lengths) + 1).tolist()
    for (at, length), rates in zip(enumerate(lengths), itertools.pairwise(edges), strict=True):
        rows = Rows(
            folder / "tokens.npy",
            tokenizer,
            length,
            given.seed + at + 100 * given.resume,
            warm=seconds / len(lengths) / 2,
            filler=valid,
            tokens=given.tokens,
        )
        loader = torch.utils.data.DataLoader(
            rows,
            batch_size=None,
            num_workers=given.workers,
            prefetch_factor=4 if given.workers else None,
        )
        data = batches(iter(loader), given.seed)
        warm = 50 if at or given.resume else 200
        train(model, optimizer, data, seconds / len(lengths), rates, warm=warm)
        told(begin, f"trained at {length} tokens")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / "training.pt")
    model.to(torch.bfloat16).save_pretrained(folder)
    told(begin, "saved")
    model.eval()
    test = (folder / "test.txt").read_text(encoding="utf-8")
    loss = held_out_loss(model, tokenizer, test, max(lengths))
    print(
        f"held-out loss {loss['all']:.3f} nats a token: {loss['first']:.3f} at the beginning of "
        f"{max(lengths)} tokens, {loss['last']:.3f} at the end"
    )
    for task in (*code_tasks.KINDS, *ASKED):
        sheets = Sheets(
            tokenizer, max(lengths), CHECKED, tokens=max(lengths), tasks=[task], filler=valid
        )
        try:
            print(f"{100 * predicted(model, sheets, PASSAGES):.1f} % of answers' tokens: {task}")
        except ConfigError:
            print(f"{max(lengths)} tokens have no room for {task}")


def told(begin: float, what: str) -> None:
    """Print how long it took."""
    print(f"{time.monotonic() - begin:.0f} s: {what}", flush=True)


if __name__ == "__main__":
    main()
