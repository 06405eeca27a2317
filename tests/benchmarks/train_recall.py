"""Train a small decoder that finds facts in its context: a model that a bad cache makes fail.

    python tests/benchmarks/train_recall.py FOLDER [--kind plain] [--seconds 300] [--length 2048]
    python tests/benchmarks/train_recall.py FOLDER --start FOLDER ...    # goes on from its weights

It learns the retrieval tasks of `kvquant evaluate` on a GPU, from sheets made by the same code and
other seeds, at mixed lengths. Short sheets and short chains of variables come first. The tokenizer
is that of examples/llama-demo-5m. The kinds differ in what they cache:

    plain     a Llama: 4 query heads on a KV head of 128
    biased    a Qwen2 of this shape. Its key biases start with outliers like those of real Qwen2
              models, on channels that turn slowly with the position, and have no weight decay
    sinks     a gpt-oss of this shape with one expert and no sliding window: sink logits
    latent    a DeepSeek V3 without experts: latents and RoPE parts

Afterwards

    kvquant evaluate FOLDER --cache int4-g4 --cache int8 --tasks retrieval --length 1024
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import queue
import random
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    Qwen2Config,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from kvquant.errors import ConfigError
from kvquant.evaluation.evaluate import HELD_OUT
from kvquant.evaluation.prompts import Writer
from kvquant.evaluation.retrieval import TASKS, variables

TOKENIZER = Path(__file__).parents[2] / "examples" / "llama-demo-5m"
KINDS = ("plain", "biased", "sinks", "latent")
# how often a task is drawn, of those that are learned late
WEIGHTS = {"keys": 3, "values": 3, "overwritten": 3, "variables": 3}
ROOM = 20  # tokens of a question and its answer; they are a third of a sheet
KEPT = 200  # batches to draw from where the workers have no new one: sheets take longer to write
TOKENS = 65536  # of a batch
LEAST = 128  # tokens of the shortest sheets
SHORTEST, LONGEST = 2, 7  # lines of chains: one step, and as many as evaluate has
OUTLIERS, LARGE, SMALL = 4, (15.0, 60.0), 0.7  # key biases of a head: how many, how large; others
TRIES = 100  # drawn tasks that have no room in a sheet
CHUNK = 8192  # tokens whose logits are computed together


class Sheets(torch.utils.data.IterableDataset[Any]):
    """Batches of sheets with answered questions: tokens, and 1 for each token of an answer, else 0.

    Args:
        tokenizer: of the model.
        length: tokens of the longest sheets; shorter ones are its halves.
        seed: of all that is drawn.
        warm: seconds until sheets of this length are drawn.
        lines, grow: lines of the longest chains at first; seconds until they have LONGEST.
        tokens: of a batch.
        tasks: to draw from; those of evaluate when empty.
        filler: a text, for the front of contexts.
    """

    def __init__(
        self,
        tokenizer: Any,
        length: int,
        seed: int,
        *,
        warm: float = 0.0,
        lines: int = LONGEST,
        grow: float = 0.0,
        tokens: int = TOKENS,
        tasks: Sequence[str] = (),
        filler: str = "",
    ) -> None:
        self.tokenizer, self.length, self.seed = tokenizer, length, seed
        self.warm, self.lines, self.grow, self.tokens = warm, lines, grow, tokens
        self.tasks = tasks or [task for task in TASKS for _ in range(WEIGHTS.get(task, 1))]
        self.filler = filler or HELD_OUT.read_text(encoding="utf-8")

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        torch.set_num_threads(1)
        worker = torch.utils.data.get_worker_info()
        which = 0 if worker is None else worker.id
        tokenizer = self.tokenizer
        filler = tokenizer.backend_tokenizer.encode(self.filler, add_special_tokens=False).ids
        ending = tokenizer("\n", add_special_tokens=False)["input_ids"]
        rng = random.Random(f"{self.seed} {which}")
        writers: dict[int, Writer] = {}
        start = time.monotonic()
        for number in itertools.count():
            # short sheets first: what looks a key up is learned there
            seconds = time.monotonic() - start
            longest = LEAST * (self.length / LEAST) ** _share(seconds, self.warm)
            length = rng.choice([size for size in _sizes(self.length) if size <= longest])
            if length not in writers:
                count = length // (3 * ROOM)
                size = length - count * ROOM
                writers[length] = Writer(
                    tokenizer, size, filler, window=0, sinks=0, num_questions=count
                )
            most = round(self.lines + (LONGEST - self.lines) * _share(seconds, self.grow))
            rows: list[tuple[list[int], list[float]]] = []
            for at in itertools.count():
                if len(rows) == self.tokens // length:
                    break
                task = rng.choice(self.tasks)
                if task == "variables":
                    task = chains(rng.randint(SHORTEST, most))
                seed = f"{self.seed} {which} {number} {at}"
                try:
                    rows.append(_row(writers[length], task, seed, ending, length))
                except ConfigError:  # the shortest sheets have no room for tasks with long lines
                    if at > TRIES and not rows:
                        raise
            yield torch.tensor([row for row, _ in rows]), torch.tensor([mask for _, mask in rows])


def _share(seconds: float, of: float) -> float:
    return min(1.0, seconds / of) if of else 1.0


def _sizes(length: int) -> list[int]:
    """Lengths from the shortest to the longest, each twice the one before."""
    return [LEAST << at for at in range(int(math.log2(length / LEAST)) + 1)]


def chains(longest: int) -> str:
    """The name of a task: chains of up to so many lines. The longest ones are those of evaluate."""
    if longest == LONGEST:
        return "variables"
    name = f"chains of {longest} lines"
    TASKS[name] = partial(variables, sizes=(SHORTEST, longest))
    return name


def _row(
    writer: Writer, task: str, seed: str, ending: list[int], length: int
) -> tuple[list[int], list[float]]:
    """A sheet with answers, and which tokens are of answers."""
    prompt = writer.write(task, seed)
    row, mask = [*prompt.context], [0.0] * len(prompt.context)
    for one in prompt.asked:
        row += [*one.question, *one.answer, *ending]
        mask += [0.0] * len(one.question) + [1.0] * len(one.answer) + [0.0] * len(ending)
    missing = max(length - len(row), 0)
    return (row + ending[-1:] * missing)[:length], (mask + [0.0] * missing)[:length]


def config_of(
    kind: str, tokenizer: Any, width: int, layers: int, length: int, *, theta: float = 10000.0
) -> Any:
    """A decoder with a head of 128 for each 128 of width, 4 query heads or more on a KV head.

    Narrow ones have a head for each 64 of width.
    """
    heads = max(4, width // (64 if width < 1024 else 128))
    rope = {"rope_type": "default", "rope_theta": theta}
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "head_dim": 128,
        "max_position_embeddings": 2 * length,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
        "rope_parameters": rope,
    }
    if kind == "plain":
        return LlamaConfig(**sizes)
    if kind == "biased":
        return Qwen2Config(**sizes)
    if kind == "sinks":
        sizes |= {"num_local_experts": 1, "num_experts_per_tok": 1}
        sizes |= {"layer_types": ["full_attention"] * layers}
        return GptOssConfig(**sizes)
    if kind == "latent":
        sizes |= {"num_key_value_heads": heads, "first_k_dense_replace": layers}
        del sizes["head_dim"]
        parts: dict[str, Any] = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
        return DeepseekV3Config(**sizes, **parts, q_lora_rank=None, kv_lora_rank=256)
    raise ValueError(f"{kind!r} is no kind of model: there are {', '.join(KINDS)}")


def made_model(
    kind: str, tokenizer: Any, width: int, layers: int, length: int, *, theta: float = 10000.0
) -> Any:
    """A random model of a kind."""
    config = config_of(kind, tokenizer, width, layers, length, theta=theta)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            if kind == "biased":
                bias = layer.self_attn.k_proj.bias
                bias.copy_(torch.cat([outliers(128) for _ in range(len(bias) // 128)]))
            if kind == "sinks":
                layer.self_attn.sinks.normal_(mean=1.0)
    return model


def prepare(model: Any, device: str) -> Any:
    """The same model, to be trained on a device."""
    for module in model.modules():
        if isinstance(module, GptOssExperts):
            module.forward = partial(only_expert, module)  # type: ignore[method-assign]
    model.to(device).train()
    model.set_attn_implementation("causal")
    print(f"{sum(one.numel() for one in model.parameters()) / 1e6:.1f} million parameters")
    return model


def only_expert(experts: GptOssExperts, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
    """What GptOssExperts computes with one expert, whose weight is 1.

    The original gathers the tokens of each expert, and the host waits for the GPU in each layer.
    """
    both = hidden @ experts.gate_up_proj[0] + experts.gate_up_proj_bias
    gated: torch.Tensor = experts._apply_gate(both)
    return gated @ experts.down_proj[0] + experts.down_proj_bias


def outliers(head_dim: int) -> torch.Tensor:
    """Key biases of a head: a few large ones among the channels that turn most slowly."""
    biases = SMALL * torch.randn(head_dim)
    slow = torch.arange(head_dim).view(2, -1)[:, -8:].flatten()  # of both halves of RoPE
    places = slow[torch.randperm(len(slow))[:OUTLIERS]]
    sizes = torch.empty(OUTLIERS).uniform_(*(math.log(one) for one in LARGE)).exp()
    biases[places] = sizes * (2.0 * torch.randint(2, (OUTLIERS,)) - 1)
    return biases


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of whole sequences, by a fused kernel: without a mask, which a compiled
    model would make, and with sink logits, which SDPA has not.

    A sink logit is that of a token before all others. Its value is 0, and its key is 0 but for a
    channel of its own, which no other key uses.
    """
    if s_aux is not None:
        batch, heads, dim = len(query), query.shape[1], query.shape[-1]
        key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
        # one token more, and 8 channels more: kernels want a multiple of 8
        query, key, value = (torch.nn.functional.pad(x, (0, 8, 1, 0)) for x in (query, key, value))
        own = torch.zeros_like(query[0, 0, 0])
        own[dim] = 1.0
        sinks = (s_aux / scaling).to(key)[:, None, None] * own
        key = torch.cat([sinks.expand(batch, -1, -1, -1), key[:, :, 1:]], 2)
        query = query + own
    found = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=key.shape[1] < query.shape[1]
    )
    if s_aux is not None:
        found = found[:, :, 1:, :dim]
    return found.transpose(1, 2).contiguous(), None


AttentionInterface.register("causal", attend)


def batches(given: Iterator[Any], seed: int) -> Iterator[Any]:
    """New batches, and earlier ones while there is no new one."""
    arrived: queue.Queue[Any] = queue.Queue(maxsize=4)

    def fill() -> None:
        try:
            for one in given:
                arrived.put(one)
        except Exception as error:  # of a worker: training does not go on without it
            arrived.put(error)

    threading.Thread(target=fill, daemon=True).start()
    kept: list[Any] = []
    rng = random.Random(seed)
    while True:
        try:
            one = arrived.get(block=not kept)
        except queue.Empty:
            yield rng.choice(kept)
            continue
        if isinstance(one, Exception):
            raise one
        kept = [*kept, one][-KEPT:]
        yield one


def optimizer_of(model: Any, betas: tuple[float, float], decay: float) -> torch.optim.AdamW:
    """AdamW whose weight decay leaves out biases, sink logits and norms."""
    weights = [one for one in model.parameters() if one.ndim > 1]
    others = [one for one in model.parameters() if one.ndim < 2]
    groups = [{"params": weights, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=betas, fused=True)


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    data: Iterator[tuple[torch.Tensor, torch.Tensor]],
    seconds: float,
    rates: tuple[float, float],
    *,
    warm: int = 200,
) -> None:
    """Train in place.

    Args:
        model: of transformers.
        optimizer: of its parameters.
        data: batches of tokens and of what each token counts in the loss, [rows, tokens].
        seconds: no step begins later.
        rates: of learning, at the beginning and in the end; half a cosine leads from one to the
            other.
        warm: steps until the rate is reached.
    """
    device = model.device
    start, shown, losses = time.monotonic(), 0.0, list[torch.Tensor]()
    for tokens, counts in data:
        spent = time.monotonic() - start
        share = spent / seconds
        if share >= 1:
            break
        first, last = rates
        rate = last + (first - last) * (0.5 + 0.5 * math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (len(losses) + 1) / warm)
        tokens, counts = tokens.to(device), counts.to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model, tokens, counts)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if share > shown:
            shown += 0.05
            recent = float(torch.stack(losses[-50:]).mean())
            print(
                f"{100 * share:3.0f} %: step {len(losses)}, loss {recent:.4f}, "
                f"{tokens.shape[1]} tokens, {len(losses) * tokens.numel() / spent:,.0f} a second",
                flush=True,
            )


def loss_of(model: Any, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The mean over tokens of what predicting them costs, in nats, each times what it counts."""
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
    chosen = counts[:, 1:] > 0
    weights = counts[:, 1:][chosen]
    parts = zip(hidden[chosen].split(CHUNK), tokens[:, 1:][chosen].split(CHUNK), strict=True)
    costs = [
        torch.nn.functional.cross_entropy(model.lm_head(x).float(), wanted, reduction="none")
        for x, wanted in parts
    ]
    return (torch.cat(costs) * weights).sum() / weights.sum()


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="plain")
    parser.add_argument("--start", type=Path, help="a folder whose weights are trained further")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lines", type=int, default=SHORTEST, help="of the first chains, at most")
    parser.add_argument("--rate", type=float, default=1e-3, help="of learning")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    # each of many workers would tokenize its sheets on all cores
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.manual_seed(given.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    warm = given.seconds / 2
    model: Any
    if given.start is None:
        tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        model = made_model(given.kind, tokenizer, given.width, given.layers, given.length)
    else:
        tokenizer = AutoTokenizer.from_pretrained(given.start)
        model = AutoModelForCausalLM.from_pretrained(given.start, dtype=torch.float32)
        model.config.max_position_embeddings = 2 * given.length
        warm = 0.0
    prepare(model, device)
    data = torch.utils.data.DataLoader(
        Sheets(
            tokenizer,
            given.length,
            given.seed,
            warm=warm,
            lines=given.lines,
            grow=given.seconds / 2,
            tokens=TOKENS,
        ),
        batch_size=None,
        num_workers=given.workers,
        prefetch_factor=4 if given.workers else None,
    )
    optimizer = optimizer_of(model, (0.9, 0.98), 0.01)
    rates = given.rate, 0.02 * given.rate
    train(model, optimizer, batches(iter(data), given.seed), given.seconds, rates)
    model.to(torch.bfloat16).save_pretrained(given.folder, max_shard_size="15MB")
    tokenizer.save_pretrained(given.folder)


if __name__ == "__main__":
    main()
