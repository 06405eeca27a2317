"""The demo: a model reads passages, its cache is quantized, and decoding goes on from there.

All caches are compared with the 16-bit cache on the same tokens. Then steps of all caches are timed
in turn, together with the model as transformers runs it (DynamicCache, SDPA).
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..cache.contiguous import KVCache
from ..calibration.fidelity import Scheme, compare, predict, quantized_copy, read_prompt
from ..errors import ConfigError, KVQuantError, UnsupportedModelError
from ..evaluation.evaluate import HELD_OUT
from ..hf.model import CachedModel
from ..io.plan_store import SAFE
from ..report.page import Section, Table, text
from ..rows.defaults import DEFAULT, RECENT, SINKS
from .console import read_text

MODEL = Path(__file__).resolve().parents[2] / "examples" / "llama-demo-5m"
TEXT = HELD_OUT
DEFAULT_CACHE, SMALL = (Scheme(fmt, fmt, SINKS, RECENT) for fmt in (DEFAULT, "int4-g4"))
SCHEMES = DEFAULT_CACHE, SMALL, *(Scheme(fmt, fmt) for fmt in ("int8", "int4-g4", "int4"))
STAGES = len(SCHEMES) + 5  # calls of report
# context and scored, of the bundled model and of others
SIZES = {True: (3072, 128), False: (1024, 64)}
ROUNDS, MOST_ROUNDS = 20, 200  # timed steps of each cache: as many again until times are stable
MOST_SECONDS = 40.0  # of timing; an idle machine takes a few
BUSY = 0.1  # of a step's time: a wider spread of the middle half means that other work runs
PASSAGES = 4
WORDS_SHOWN = 40  # of the prompt, before the continuations
TITLES = "bits", "MiB", "smaller", "KL", "top-1 %", "ms", "±", "speed"
WARNING = (
    "Warning: this machine is busy with other work, so times and speeds are not reliable. Run "
    "`kvquant demo` again when it is idle; bits and KL hold all the same."
)
Report = Callable[[str], None]
Start = Callable[[], Callable[[], object]]


def run_demo(
    source: Path | None = None,
    text_file: Path | None = None,
    *,
    context: int | None = None,
    scored: int | None = None,
    continued: int = 40,
    report: Report = lambda stage: None,
) -> dict[str, Any]:
    """Run the demo.

    Args:
        source: a model, as of CachedModel.from_pretrained; the bundled one when None.
        text_file: what it reads; the packaged text when None.
        context: tokens of each passage's prompt; SIZES when None, and fewer for a short text.
        scored: tokens of each passage to decode and compare; SIZES when None.
        continued: tokens of the free continuation.
        report: called with the name of each stage when it begins.

    Returns:
        Plain data. "caches" has a row for each cache; "ms_spread" is half the distance between the
        quartiles of its times. "left_out" has the caches that the model cannot have, and why.
        "rounds" counts timings of each step, "is_stable" says whether times are reliable.
    """
    if source is None and not MODEL.exists():
        raise ConfigError(
            f"{MODEL} is not there: the bundled model comes with a checkout of the repository; "
            "elsewhere name a model: kvquant demo MODEL"
        )
    sizes = SIZES[source is None]
    context, scored = context or sizes[0], scored or sizes[1]
    source, text_file = source or MODEL, text_file or TEXT
    report("loading the model")
    model = CachedModel.from_pretrained(source)
    if model.has_latents:
        raise UnsupportedModelError(
            f"{source} keeps latent rows: the demo compares formats of K and V; `kvquant check "
            f"{source}` compares those of latent rows"
        )
    windows, context = _passages(model, text_file, context, scored)
    prompt, fed = windows[:, :context], windows[:, context:-1]
    targets = windows[:, context + 1 :].t()[..., None]

    report("reading the text")
    exact = read_prompt(model, prompt, max(scored + ROUNDS, continued))
    expected = predict(model, exact.fork(), fed)
    report("transformers")
    past, last = model.new_plain_cache(), windows[:, -1]
    model.plain(prompt, past)
    columns = fed[..., None].unbind(1)
    given = torch.stack([model.plain(one, past).float().log_softmax(-1) for one in columns])
    starts: list[Start] = [lambda: partial(model.plain, last[:, None], copy.deepcopy(past))]
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in past.layers)
    row = _row("transformers", compare(expected, given, targets))
    caches = [row | {"nbytes": nbytes, "bits": 32.0}]
    left_out, default = {}, ""
    for scheme in (Scheme(model.exact_format, model.exact_format), *SCHEMES):
        name = _name(scheme)
        report(f"a cache of {name}")
        try:
            cache = quantized_copy(model, exact, scheme)
        except KVQuantError as error:
            left_out[name] = str(error)
            continue
        if scheme is DEFAULT_CACHE:
            default = f"K {cache.layers[0].k_format}, V {cache.layers[0].v_format}"
        words = _continue(model, cache, int(windows[0, context]), continued)
        row = _row(name, compare(expected, predict(model, cache, fed), targets))
        bits = 16 * cache.nbytes / exact.nbytes
        caches.append(row | {"nbytes": cache.nbytes, "bits": bits, "continuation": words})
        starts.append(partial(lambda one: partial(model.step, one.fork(), last), cache))

    report("timing")
    times = _time(starts)
    for row, taken in zip(caches, times, strict=True):
        row["ms_per_step"], row["ms_spread"] = statistics.median(taken), _spread(taken)
    return {
        "model": source.name,
        "text": text_file.name,
        "passages": len(windows),
        "context": context,
        "scored": scored,
        "prompt": model.decode(prompt[0]),
        "default": default,
        "rounds": len(times[0]),
        "is_stable": _is_stable(times),
        "caches": caches,
        "left_out": left_out,
    }


def render_demo(result: dict[str, Any]) -> str:
    """The result of run_demo as text: the table, the continuations, and the advice."""
    caches = result["caches"]
    plain, sixteen = caches[:2]
    rows = [
        [
            row["name"],
            f"{row['bits']:.2f}",
            f"{row['nbytes'] / 2**20:.2f}",
            f"{sixteen['nbytes'] / row['nbytes']:.2f}x",
            f"{row['kl']:.5f}",
            f"{100 * row['top1']:.1f}",
            f"{row['ms_per_step']:.2f}",
            f"{row['ms_spread']:.2f}",
            f"{plain['ms_per_step'] / row['ms_per_step']:.2f}x",
        ]
        for row in caches
    ]
    about = (
        f"{result['model']} reads {result['passages']} passages of {result['context']} tokens from "
        f"{result['text']}, then decodes {result['scored']} tokens of each, one by one, from a "
        "cache:"
    )
    legend = (
        f"Default: {result['default']}. Window: the first {SINKS} and last {RECENT} tokens stay in "
        "16 bit; the longer the context, the less they weigh. Bits, MiB, smaller (than bf16): "
        "everything that the cache allocates.",
        "KL (nats per token, 0 is no change) and top-1: predictions against those with the 16-bit "
        f"cache, over {result['passages'] * result['scored']} tokens.",
        "ms: a decode step of the whole model for all passages in float32, the median of "
        f"{result['rounds']} that took turns; half of them lie within ±. Speed: against "
        "transformers' own cache (DynamicCache, SDPA), which keeps float32.",
    )
    words = " ".join(result["prompt"].split()[-WORDS_SHOWN:])
    continued = [
        f"{row['name']}: {' '.join(row['continuation'].split())}"
        for row in caches
        if "continuation" in row
    ]
    return text(
        [
            Section("", about, tables=[Table("", [["cache", *TITLES], *rows])]),
            *legend,
            *(f"Without {name}: {why}" for name, why in result["left_out"].items()),
            *([] if result["is_stable"] else [WARNING]),
            f"The first passage ends: … {words}",
            "and is continued, likeliest token by likeliest token, from a cache of",
            *continued,
            advice(caches),
        ]
    )


def advice(caches: Sequence[dict[str, Any]]) -> str:
    """One sentence on what to take, by the KL of the default and of 4 bits, both with a window."""
    good, bad = list[str](), list[str]()
    for row in caches:
        if row["name"] in (_name(DEFAULT_CACHE), _name(SMALL)):
            smaller = caches[1]["nbytes"] / row["nbytes"]
            told = f"{row['name']} ({smaller:.1f} times smaller, KL {row['kl']:.4f})"
            (good if row["kl"] <= SAFE else bad).append(told)
    taken = ", or ".join(good) or "none of these"
    refused = f"; do not take {' or '.join(bad)}" if bad else ""
    return (
        f"What to take: {taken}{refused}; `kvquant check MODEL` gives a verdict, and with a plan "
        '(plan="auto") 4 bits lose less.'
    )


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


def _name(scheme: Scheme) -> str:
    return str(scheme).replace(f"{SINKS} sinks, {RECENT} recent", "window")


def _row(name: str, compared: tuple[float, float, float]) -> dict[str, Any]:
    kl, top1, nll = compared
    return {"name": name, "kl": kl, "top1": top1, "perplexity": float(torch.tensor(nll).exp())}


def _time(starts: Sequence[Start]) -> list[list[float]]:
    """Milliseconds of each step, in turn; after ROUNDS steps from fresh copies of the caches."""
    taken: list[list[float]] = [[] for _ in starts]
    end = time.perf_counter() + MOST_SECONDS
    while True:
        steps = [start() for start in starts]
        for _ in range(ROUNDS):
            for times, step in zip(taken, steps, strict=True):
                start = time.perf_counter()
                step()
                times.append(1e3 * (time.perf_counter() - start))
        if _is_stable(taken) or len(taken[0]) >= MOST_ROUNDS or time.perf_counter() > end:
            return taken


def _is_stable(taken: Sequence[Sequence[float]]) -> bool:
    return all(_spread(times) <= BUSY * statistics.median(times) for times in taken)


def _spread(times: Sequence[float]) -> float:
    """Half the distance from the first to the third quartile."""
    if len(times) < 2:
        return 0.0
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return (third - first) / 2
