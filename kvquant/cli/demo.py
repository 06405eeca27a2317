"""The demo: a language model reads a text, its cache is quantized, and decoding goes on from it.

Several passages of the text are one batch. For each cache format the same prompt is quantized, the
passages' next tokens are decoded one by one from the quantized cache and compared with the 16-bit
cache, and the first passage is continued freely. Then steps of all formats are timed in turn,
together with the model as transformers runs it (DynamicCache, SDPA), until their ratios are stable.
"""

from __future__ import annotations

import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..cache.contiguous import KVCache
from ..calibration.fidelity import Scheme, compare, predict, quantized_copy, read_prompt
from ..calibration.text_report import KL_NOTICE
from ..errors import ConfigError, UnsupportedModelError
from ..hf.model import CachedModel
from ..text import Column, render_table, terminal_width
from .console import read_text

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODEL = EXAMPLES / "llama-demo-5m"
TEXT = EXAMPLES / "unseen.txt"
SCHEMES = (
    Scheme("bf16", "bf16"),
    Scheme("int8", "int8"),
    Scheme("fp8", "fp8"),
    Scheme("int4-g4", "int4-g4"),
    Scheme("int4", "int4"),
    Scheme("int4-g4", "int4-g4", sink_len=4, recent_len=128),
)
STAGES = len(SCHEMES) + 5  # calls of report
ROUNDS = 20  # timed steps of each; then as many again until the ratios are stable
MOST_ROUNDS = 200
MOST_SECONDS = 40.0  # of timing; an idle machine takes a few
STABLE = 0.05  # how far the ratios of the first and of the second half of all rounds may differ
BUSY = 0.2  # of a step's time: a wider spread of its middle half tells of other work
PASSAGES = 4
WORDS_SHOWN = 40  # of the prompt, before the continuations
COLUMNS = (
    Column("cache", left=True),
    *map(Column, ("bits", "MiB", "smaller", "KL", "top-1 %", "ms/step", "±", "speed")),
)
WARNING = (
    "Warning: this machine is busy with other work, so times and speeds are not reliable. Run "
    "`kvquant demo` again when it is idle; bits and KL hold all the same."
)
Report = Callable[[str], None]


def run_demo(
    model_folder: Path | None = None,
    text_file: Path | None = None,
    *,
    context: int = 3072,
    scored: int = 128,
    continued: int = 40,
    report: Report = lambda stage: None,
) -> dict[str, Any]:
    """Run the demo.

    Args:
        model_folder: a model, as of CachedModel.from_pretrained; the bundled one when None.
        text_file: what it reads; the bundled text when None.
        context: tokens of each passage's prompt; fewer for a short text.
        scored: tokens of each passage that are decoded and compared.
        continued: tokens of the free continuation.
        report: called with the name of each stage when it begins.

    Returns:
        Plain data: "model", "text", "passages", "context", "scored", "prompt" (the first passage's)
        and "caches", each with "name", "bits", "nbytes", "kl", "top1", "perplexity", "ms_per_step",
        "ms_spread" (half the distance from the first to the third quartile) and, but for
        transformers' own, "continuation". "rounds" is how often each was timed, "is_stable" whether
        the ratios were then the same in both halves of the rounds.

    Raises:
        ConfigError: the bundled files are not there, or the text is too short.
        UnsupportedModelError: the model keeps latent rows.
    """
    for asked, path in ((model_folder, MODEL), (text_file, TEXT)):
        if asked is None and not path.exists():
            raise ConfigError(
                f"{path} is not there: the bundled model and text come with a checkout of the "
                "repository; elsewhere give --model MODEL and --text FILE"
            )
    model_folder, text_file = model_folder or MODEL, text_file or TEXT
    report("loading the model")
    model = CachedModel.from_pretrained(model_folder)
    if model.has_latents:
        raise UnsupportedModelError(
            f"{model_folder} keeps latent rows: the demo compares formats of K and V; `kvquant "
            "quantize` makes a cache of such a model"
        )
    windows, context = _passages(model, text_file, context, scored)
    prompt, fed = windows[:, :context], windows[:, context:-1]
    targets = windows[:, context + 1 :].t()[..., None]

    report("reading the text")
    room = max(scored + ROUNDS, continued)
    exact = read_prompt(model, prompt, room)
    expected = predict(model, exact, fed)
    exact.crop(context)
    steps: list[Callable[[], object]] = []
    rewinds: list[Callable[[], object]] = []  # take back what one turn of rounds adds
    caches = []
    for dtype in (torch.float32, torch.bfloat16):
        name = f"transformers, {str(dtype).removeprefix('torch.')}"
        report(name)
        plain = _Plain(CachedModel.from_pretrained(model_folder, dtype=dtype))
        plain(prompt)
        given = torch.stack([plain(column).log_softmax(-1) for column in fed[..., None].unbind(1)])
        steps.append(partial(plain, windows[:, -1:]))
        rewinds.append(partial(plain.past.crop, -ROUNDS))
        caches.append(_row(name, compare(expected, given, targets)) | {"of": plain})
    for scheme in SCHEMES:
        report(f"a cache of {scheme}")
        cache = quantized_copy(model, exact, scheme)
        text = _continue(model, cache, int(windows[0, context]), continued)
        row = _row(str(scheme), compare(expected, predict(model, cache, fed), targets))
        caches.append(row | {"of": cache, "continuation": text})
        steps.append(partial(model.step, cache, windows[:, -1]))
        rewinds.append(partial(cache.crop, context + scored))

    report("timing")
    times = _time(steps, lambda: [rewind() for rewind in rewinds])
    for row, taken in zip(caches, times, strict=True):
        row["ms_per_step"], row["ms_spread"] = statistics.median(taken), _spread(taken)
        row["nbytes"] = row.pop("of").nbytes
    elements = exact.nbytes / 2
    for row in caches:
        row["bits"] = 8 * row["nbytes"] / elements
    return {
        "model": model_folder.name,
        "text": text_file.name,
        "passages": len(windows),
        "context": context,
        "scored": scored,
        "prompt": model.decode(prompt[0]),
        "rounds": len(times[0]),
        "is_stable": _is_stable(times),
        "caches": caches,
    }


def render_demo(result: dict[str, Any], width: int | None = None) -> str:
    """The result as text: the table, then the continuations one after the other.

    Args:
        result: from run_demo.
        width: columns to fit in; the terminal's, up to 100, when None.
    """
    width = width or min(terminal_width(), 100)
    caches = result["caches"]
    plain = [row for row in caches if row["name"].startswith("transformers")]
    fastest = min(row["ms_per_step"] for row in plain)
    sixteen = next(row["nbytes"] for row in caches if row["name"] == "bf16")
    rows = [
        [
            row["name"],
            f"{row['bits']:.2f}",
            f"{row['nbytes'] / 2**20:.2f}",
            f"{sixteen / row['nbytes']:.2f}x",
            f"{row['kl']:.5f}",
            f"{100 * row['top1']:.1f}",
            f"{row['ms_per_step']:.2f}",
            f"{row['ms_spread']:.2f}",
            f"{fastest / row['ms_per_step']:.2f}x",
        ]
        for row in caches
    ]
    about = (
        f"{result['model']} reads {result['passages']} passages of {result['context']} tokens from "
        f"{result['text']} and decodes {result['scored']} tokens of each, one by one, from its "
        "cache. Bits: per element, headers included. KL (nats per token) and top-1: predictions "
        f"against the 16-bit cache's, over {result['passages'] * result['scored']} tokens. "
        "ms/step: a decode step of the whole model for all passages, the median of "
        f"{result['rounds']} that took turns; half of them lie within ±. Speed: against the faster "
        "of transformers' own caches (DynamicCache, SDPA)."
    )
    parts = [textwrap.fill(about, width), render_table(COLUMNS, rows, width)]
    if not result["is_stable"]:
        parts.append(textwrap.fill(WARNING, width))
    words = " ".join(result["prompt"].split()[-WORDS_SHOWN:])
    parts.append(textwrap.fill(f"The first passage ends: … {words}", width))
    continued = [row for row in caches if "continuation" in row]
    parts.append("and is continued, likeliest token by likeliest token, from a cache of")
    for row in continued:
        text = " ".join(row["continuation"].split())
        indent = " " * 4
        parts.append(
            f"  {row['name']}\n"
            + textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)
        )
    parts.append(textwrap.fill(advice(caches), width))
    return "\n\n".join(parts)


def advice(caches: Sequence[dict[str, Any]]) -> str:
    """One sentence on what to take, by the KL of int8 and of 4 bits with a 16-bit window.

    Args:
        caches: as run_demo returns them.
    """
    rows = {row["name"]: row for row in caches}

    def told(row: dict[str, Any]) -> str:
        smaller = rows["bf16"]["nbytes"] / row["nbytes"]
        return f"{row['name']} ({smaller:.1f} times smaller, KL {row['kl']:.4f})"

    safe, small = rows["int8"], rows[str(SCHEMES[-1])]
    if small["kl"] <= KL_NOTICE:
        return (
            f"What to take: {told(safe)} to change least, or {told(small)} to save memory; with a "
            "plan of `kvquant calibrate` 4 bits lose less."
        )
    if safe["kl"] <= KL_NOTICE:
        return (
            f"What to take: {told(safe)}; do not take {told(small)}, unless a plan of `kvquant "
            "calibrate` mends it."
        )
    return (
        f"What to take: none of these, since even {told(safe)} changes this model's predictions; "
        "try a plan of `kvquant calibrate`."
    )


class _Plain:
    """A model with transformers' own cache."""

    def __init__(self, model: CachedModel) -> None:
        self.model, self.past = model, model.new_plain_cache()

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model.plain(tokens, self.past).float()

    @property
    def nbytes(self) -> int:
        """Bytes of its keys and values."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.past.layers)


def _passages(
    model: CachedModel, text_file: Path, context: int, scored: int
) -> tuple[torch.Tensor, int]:
    """Cut the text into [passages, context + scored + 1] tokens; context may have to be smaller."""
    tokens = torch.tensor(model.encode(read_text(text_file)))
    limit = len(tokens) if model.max_positions is None else model.max_positions - ROUNDS
    context = min(context, min(limit, len(tokens)) - scored - 1)
    if context < 1 and limit < len(tokens):
        raise ConfigError(
            f"this model has {model.max_positions} positions: the demo needs a model with more "
            f"than {scored + 1 + ROUNDS}"
        )
    if context < 1:
        raise ConfigError(
            f"{text_file} has {len(tokens)} tokens: give a text with more than {scored + 1}"
        )
    length = context + scored + 1
    count = min(PASSAGES, len(tokens) // length)
    return tokens[: count * length].view(count, length), context


def _continue(model: CachedModel, cache: KVCache, token: int, num_tokens: int) -> str:
    """Continue the first sequence after one more token of the text, from a copy of its cache."""
    first = cache.fork([0])
    logits = model.step(first, torch.tensor([token]))
    tokens = model.generate(first, logits, num_tokens)[0]
    return model.decode([token, *tokens.tolist()])


def _row(name: str, compared: tuple[float, float, float]) -> dict[str, Any]:
    kl, top1, nll = compared
    return {"name": name, "kl": kl, "top1": top1, "perplexity": float(torch.tensor(nll).exp())}


def _time(steps: Sequence[Callable[[], object]], rewind: Callable[[], object]) -> list[list[float]]:
    """Milliseconds of each step, run in turn so that all meet the same machine.

    Args:
        steps: each adds a token to a cache.
        rewind: takes these tokens back, so that later rounds read as many.
    """
    taken: list[list[float]] = [[] for _ in steps]
    end = time.perf_counter() + MOST_SECONDS
    while True:
        for _ in range(ROUNDS):
            for times, step in zip(taken, steps, strict=True):
                start = time.perf_counter()
                step()
                times.append(1e3 * (time.perf_counter() - start))
        if _is_stable(taken) or len(taken[0]) >= MOST_ROUNDS or time.perf_counter() > end:
            return taken
        rewind()


def _is_stable(taken: Sequence[Sequence[float]]) -> bool:
    """Whether both halves of the rounds give the same ratios, and single steps much the same time.

    Args:
        taken: milliseconds of the same rounds, for each step.
    """
    half = len(taken[0]) // 2
    if not half:
        return False
    first, second = (
        [statistics.median(part) for part in parts]
        for parts in (
            [times[:half] for times in taken],
            [times[half:] for times in taken],
        )
    )
    ratios = [one / other for one, other in zip(first, second, strict=True)]
    spreads = [_spread(times) / statistics.median(times) for times in taken]
    return max(ratios) <= (1 + STABLE) * min(ratios) and max(spreads) <= BUSY


def _spread(times: Sequence[float]) -> float:
    """Half the distance from the first to the third quartile."""
    if len(times) < 2:
        return 0.0
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return (third - first) / 2
