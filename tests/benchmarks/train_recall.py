"""Train a small Llama that finds facts in its context: a model that a bad cache makes fail.

    python tests/benchmarks/train_recall.py FOLDER [--seconds 300] [--length 2048] [--start FOLDER]

It learns the retrieval tasks of `kvquant evaluate` on a GPU, from sheets made by the same code and
other seeds, at mixed lengths. The tokenizer is that of examples/llama-demo-5m. Afterwards

    kvquant evaluate FOLDER --cache int4-g4 --cache int8 --tasks retrieval --length 1024
"""

from __future__ import annotations

import argparse
import itertools
import math
import queue
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvquant.evaluation.evaluate import HELD_OUT
from kvquant.evaluation.prompts import Writer
from kvquant.evaluation.retrieval import TASKS

TOKENIZER = Path(__file__).parents[2] / "examples" / "llama-demo-5m"
# how often a task is drawn, of those that are learned late
WEIGHTS = {"keys": 3, "values": 3, "overwritten": 3, "variables": 3}
ROOM = 20  # tokens of a question and its answer; they are a third of a sheet
KEPT = 200  # batches to draw from where the workers have no new one: sheets take longer to write
TOKENS = 65536  # of a batch
LEAST = 128  # tokens of the shortest sheets


class QuickWriter(Writer):
    """Calls the tokenizer's Rust directly: ten times as fast."""

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.backend_tokenizer.encode(
            text, add_special_tokens=False
        ).ids
        return ids


class Sheets(torch.utils.data.IterableDataset[Any]):
    """Batches of sheets with answered questions: tokens, and targets of the answers alone."""

    def __init__(self, tokenizer: Any, length: int, seed: int, warm: float) -> None:
        self.tokenizer, self.length, self.seed, self.warm = tokenizer, length, seed, warm

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        torch.set_num_threads(1)
        worker = torch.utils.data.get_worker_info()
        which = 0 if worker is None else worker.id
        tokenizer = self.tokenizer
        tasks = [task for task in TASKS for _ in range(WEIGHTS.get(task, 1))]
        filler = tokenizer(HELD_OUT.read_text(encoding="utf-8"))["input_ids"]
        ending = tokenizer("\n", add_special_tokens=False)["input_ids"]
        rng = random.Random(f"{self.seed} {which}")
        writers: dict[int, QuickWriter] = {}
        start = time.monotonic()
        for number in itertools.count():
            # short sheets first: what looks a key up is learned there
            reach = min(1.0, (time.monotonic() - start) / self.warm) if self.warm else 1.0
            longest = LEAST * (self.length / LEAST) ** reach
            steps = [size for size in _sizes(self.length) if size <= longest]
            length = rng.choice(steps)
            if length not in writers:
                count = length // (3 * ROOM)
                size = length - count * ROOM
                writers[length] = QuickWriter(
                    tokenizer, size, filler, window=0, sinks=0, num_questions=count
                )
            seeds = (f"{self.seed} {which} {number} {at}" for at in range(TOKENS // length))
            rows = [
                _row(writers[length], rng.choice(tasks), seed, ending, length) for seed in seeds
            ]
            tokens = torch.tensor([row for row, _ in rows])
            yield tokens, torch.where(torch.tensor([mask for _, mask in rows]), tokens, -100)


def _sizes(length: int) -> list[int]:
    """Lengths from the shortest to the longest, each twice the one before."""
    return [LEAST << at for at in range(int(math.log2(length / LEAST)) + 1)]


def _row(
    writer: Writer, task: str, seed: str, ending: list[int], length: int
) -> tuple[list[int], list[bool]]:
    """A sheet with answers, and which tokens are of answers."""
    prompt = writer.write(task, seed)
    row, mask = [*prompt.context], [False] * len(prompt.context)
    for one in prompt.asked:
        row += [*one.question, *one.answer, *ending]
        mask += [False] * len(one.question) + [True] * len(one.answer) + [False] * len(ending)
    missing = max(length - len(row), 0)
    return (row + ending[-1:] * missing)[:length], (mask + [False] * missing)[:length]


def made_model(tokenizer: Any, width: int, layers: int, length: int) -> Any:
    """A Llama with a head of 128 for each 64 of width, 4 query heads on a KV head."""
    heads = max(4, width // 64)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        head_dim=128,
        max_position_embeddings=2 * length,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def batches(given: Iterator[Any], seed: int) -> Iterator[Any]:
    """New batches, and earlier ones while there is no new one."""
    arrived: queue.Queue[Any] = queue.Queue(maxsize=4)

    def fill() -> None:
        for one in given:
            arrived.put(one)

    threading.Thread(target=fill, daemon=True).start()
    kept: list[Any] = []
    rng = random.Random(seed)
    while True:
        try:
            kept = [*kept, arrived.get(block=not kept)][-KEPT:]
            yield kept[-1]
        except queue.Empty:
            yield rng.choice(kept)


def train(model: Any, data: Iterator[Any], seconds: float, rate: float) -> None:
    """Train in place; the learning rate falls with time."""
    device = model.device
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    start, shown, losses = time.monotonic(), 0.0, list[torch.Tensor]()
    for tokens, targets in data:
        share = (time.monotonic() - start) / seconds
        if share >= 1:
            break
        warm = min(1.0, (len(losses) + 1) / 200)
        for group in optimizer.param_groups:
            group["lr"] = rate * warm * (0.51 + 0.49 * math.cos(math.pi * share))
        with torch.autocast(device.type, torch.bfloat16):
            hidden = model.model(tokens.to(device), use_cache=False).last_hidden_state[:, :-1]
            wanted = targets[:, 1:].to(device)
            chosen = wanted >= 0
            logits = model.lm_head(hidden[chosen])
        loss = torch.nn.functional.cross_entropy(logits.float(), wanted[chosen])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if share > shown:
            shown += 0.05
            recent = float(torch.stack(losses[-50:]).mean())
            length = tokens.shape[1]
            print(
                f"{100 * share:3.0f} %: step {len(losses)}, loss {recent:.4f}, {length} tokens",
                flush=True,
            )


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--start", type=Path, help="a folder whose weights are trained further")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-3, help="of learning")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    warm = given.seconds / 2
    if given.start is None:
        tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        model = made_model(tokenizer, given.width, given.layers, given.length).to(device)
    else:
        tokenizer = AutoTokenizer.from_pretrained(given.start)
        loaded: Any = LlamaForCausalLM.from_pretrained(given.start, dtype=torch.float32)
        model = loaded.to(device)
        model.config.max_position_embeddings = 2 * given.length
        warm = 0.0
    print(f"{sum(one.numel() for one in model.parameters()) / 1e6:.1f} million parameters")
    data = torch.utils.data.DataLoader(
        Sheets(tokenizer, given.length, given.seed, warm),
        batch_size=None,
        num_workers=given.workers,
        prefetch_factor=4 if given.workers else None,
    )
    train(model, batches(iter(data), given.seed), given.seconds, given.rate)
    model.to(torch.bfloat16).save_pretrained(given.folder)
    tokenizer.save_pretrained(given.folder)


if __name__ == "__main__":
    main()
