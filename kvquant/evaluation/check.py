"""kvquant check: which caches are safe for a model, and how many bytes they take.

Each cache is compared with the 16-bit cache on the same passages, with the 16-bit window of KVCache
and without it, as engines keep rows.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvquant.calibration.fidelity import Fidelity, Planned, Scheme, options_of
from kvquant.calibration.single_pass import BATCH, reference_of
from kvquant.calibration.verdict import CLOSE, RUIN, SAFE_WORD, judge
from kvquant.calibration.windows import LEAST_PASSAGES, LEAST_SCORED, spread
from kvquant.errors import ConfigError, NonFiniteError
from kvquant.hf.models.configs import CacheLayers, cache_layers, new_cache
from kvquant.io.plan import CachePlan
from kvquant.io.plan_store import RUINED, SAFE, SAFE_FOR_LONG
from kvquant.report.page import Section, Table, text
from kvquant.rows.defaults import RECENT, SINKS, default_format
from kvquant.rows.format import RowFormat, mean_bits
from kvquant.rows.quantize import exact_codec
from kvquant.text import Column, number, size_text

from .caches import parse_cache
from .evaluate import HELD_OUT

LEFT = "cache", "rows", "verdict"
VERDICTS = "cache", "rows", "bits", "KL", "error", "same token", "verdict"
LENGTHS = 4096, 32768  # tokens of the sequences whose bytes are told
CONTEXT, SCORED, SAMPLES = 1024, 64, 8
# a shorter prompt would have more tokens in 16 bit than in packed rows, which alone lose anything
LEAST_CONTEXT = 2 * (SINKS + RECENT)
ENOUGH = max(LEAST_PASSAGES, -(-LEAST_SCORED // SCORED))  # passages
LADDER = "int8", "default", "int4-g4", "int4"
LATENT_LADDER = "int8-g4+int8-g4", "default", "int4-g4"
Choice = Scheme | Planned
Progress = Callable[[str, int], None]  # the cache that is measured, and what was done since
UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


@dataclass(frozen=True)
class Rung:
    """A cache of the ladder.

    Attributes:
        name: of its row in the table.
        windowed, bare: with the 16-bit window, and without it: the default then has other formats.
        arguments: of QuantizedCache and KVCache, as Python.
        settings: for vLLM.
    """

    name: str
    windowed: Choice
    bare: Choice
    arguments: str
    settings: dict[str, str]


def check(
    model: Any,
    *,
    plan: CachePlan | None = None,
    plan_name: str = "auto",
    memory: int | None = None,
    text: str | None = None,
    samples: int = SAMPLES,
    progress: Progress = lambda name, share: None,
) -> dict[str, Any]:
    """Say which caches are safe for a model.

    Args:
        model: a CachedModel, or what CachedModel.from_pretrained takes: check loads it on the CPU
            in float32.
        plan: a plan of the model to compare, too.
        plan_name: the plan in the printed lines: "auto", or its path.
        memory: bytes for caches; the result then says how many sequences fit.
        text: to compare predictions on; a packaged one when None.
        samples: passages of the text; of fewer than 4 every verdict is "too close to tell".
        progress: called with the name of a cache, and hundredths of all work since the last call.

    Returns:
        Plain data: "rows" has, for each cache, its "formats", "bits" per element of packed rows,
        "bytes" of a sequence by its length, "sequences" in memory, and "window" and "none" (without
        it) with "kl", "kl_error" (nats per token), "top1" (0 to 1) and "verdict".

    Raises:
        ConfigError: the text is too short for the samples, or the model has too few positions for a
            prompt that is longer than the 16-bit window.
        UnsupportedModelError: no cache of kvquant serves the model.

    Example:
        >>> from kvquant.cli.demo import MODEL  # a folder with a model
        >>> from kvquant.evaluation.check import check
        >>> found = check(MODEL, samples=4)
        >>> {row["cache"]: row["window"]["verdict"] for row in found["rows"]}["default"]
        'safe'
    """
    from kvquant.hf.hybrid import load_decoder
    from kvquant.hf.switch import linears

    began = time.perf_counter()
    if isinstance(model, (str, Path)):
        model = load_decoder(model, dtype=torch.float32)
    context = min(CONTEXT, (model.max_positions or 2 * CONTEXT) - SCORED - 1)
    if context < LEAST_CONTEXT:
        raise ConfigError(
            f"{model.max_positions} positions are too few for a verdict, which needs "
            f"{LEAST_CONTEXT + SCORED + 1}: {SINKS + RECENT} tokens of a prompt stay in 16 bit. "
            "Take a smaller window: kvquant evaluate MODEL --cache int8,sinks=0,recent=0"
        )
    tokens = model.encode(HELD_OUT.read_text(encoding="utf-8") if text is None else text)
    size = context + SCORED + 1
    if len(tokens) < samples * size:
        raise ConfigError(
            f"{samples} samples need {samples * size:,} tokens, and the text has {len(tokens):,}: "
            f"give up to {len(tokens) // size} samples, or a longer text"
        )
    found = check_size(model.config, plan=plan, plan_name=plan_name, memory=memory)
    layers = cache_layers(model.config)
    ladder = ladder_of(layers, plan, plan_name)
    batches = -(-samples // BATCH)
    each = batches * len(layers.places)
    stage, done, end = "16 bit", 0, batches * len(linears(model.model)) + each
    total = end + 2 * len(ladder) * each

    def tick(least: int = 0) -> None:
        nonlocal done
        before, done = done, max(min(done + 1, end), least)
        progress(stage, 100 * done // total - 100 * before // total)

    windows = spread(tokens, samples, size)
    reference = reference_of(model, windows, context, layers, tick=tick)
    for row, rung in zip(found["rows"], ladder, strict=True):
        for place, choice in (("window", rung.windowed), ("none", rung.bare)):
            stage, end = rung.name, end + each
            tick(end - each)  # however many ticks came before
            row[place] = _facts(partial(reference.measure, choice), samples)
    tick(total)
    measured = {"context": context, "scored": samples * SCORED, "passages": samples}
    return {**found, **measured, "seconds": time.perf_counter() - began}


def check_size(
    config: Any,
    *,
    plan: CachePlan | None = None,
    plan_name: str = "auto",
    memory: int | None = None,
) -> dict[str, Any]:
    """Say how many bytes the caches of a model take, by its config alone; see check."""
    layers = cache_layers(config)
    exact = exact_codec(config.get_text_config(decoder=True).dtype)

    def sized(choice: Choice) -> dict[str, Any]:
        options = options_of(choice, is_latent=layers.are_latent)
        options.pop("accept_loss", None)  # no model is there to lose anything
        options |= {"exact_format": exact, "device": "meta"}
        made = {str(n): new_cache(config, layers, 1, n, **options).nbytes for n in LENGTHS}
        fit = None if memory is None else {n: memory // size for n, size in made.items()}
        return {"bytes": made, "sequences": fit}

    rows = [
        {
            "cache": rung.name,
            "formats": str(rung.windowed).partition(" +")[0],
            "formats_without_window": str(rung.bare),
            "bits": _packed_bits(layers, rung.windowed),
            "bits_without_window": _packed_bits(layers, rung.bare),
            "lines": _lines(rung, layers),
            **sized(rung.windowed),
        }
        for rung in ladder_of(layers, plan, plan_name)
    ]
    whole = sized(Scheme(exact, exact, is_latent=layers.are_latent))
    return {"exact": {"cache": "16 bit", "bits": 16.0, **whole}, "rows": rows, "memory": memory}


def ladder_of(layers: CacheLayers, plan: CachePlan | None, plan_name: str = "auto") -> list[Rung]:
    """The caches to compare, from the most bits to the fewest."""
    found = []
    dims = layers.k_dims[0], layers.v_dims[0]
    for name in LATENT_LADDER if layers.are_latent else LADDER:
        windowed, bare = _schemes(name, dims, layers.are_latent)
        pair = {"k_format": windowed.k_format, "v_format": windowed.v_format}
        settings = {"k_format": bare.k_format, "v_format": bare.v_format}
        settings = {} if name == "default" else settings
        if layers.are_latent:
            pair = {"fmt": f"{windowed.k_format}+{windowed.v_format}"}
            settings = {"format": pair["fmt"]}  # engines have no default for latent rows
        given = "" if name == "default" else "".join(f", {k}={v!r}" for k, v in pair.items())
        found.append(Rung(name, windowed, bare, given, settings))
    if plan is not None:
        given = f", plan={plan_name!r}"
        with_window = Planned(plan, "plan", SINKS, RECENT)
        found.append(Rung("plan", with_window, Planned(plan), given, {"plan": plan_name}))
    return found


def _schemes(name: str, dims: tuple[int, int], latent: bool) -> tuple[Scheme, Scheme]:
    """A cache with the window and without it, by its name in the ladder."""
    from kvquant.cache.latent import DEFAULT_FORMAT

    found = []
    for window in ((SINKS, RECENT), (0, 0)):
        text = name
        if name == "default":
            sides = (default_format(s, d, *window) for s, d in zip("kv", dims, strict=True))
            text = DEFAULT_FORMAT if latent else "/".join(sides)
        one = parse_cache(f"{text},sinks={window[0]},recent={window[1]}", latent=latent)
        assert isinstance(one, Scheme)
        found.append(one)
    return found[0], found[1]


def _packed_bits(layers: CacheLayers, choice: Choice) -> float:
    """Bits per element of packed rows, headers included."""
    if isinstance(choice, Planned):
        return choice.plan.bits
    rows = [RowFormat.parse(choice.k_format, dim) for dim in layers.k_dims]
    return mean_bits([*rows, *(RowFormat.parse(choice.v_format, dim) for dim in layers.v_dims)])


def _lines(rung: Rung, layers: CacheLayers) -> dict[str, str]:
    """What to paste for a cache."""
    settings = json.dumps({"kvquant": rung.settings})
    sizes = f"{len(layers.places)}, batch, {layers.num_kv_heads}, {layers.k_dims[0]}, max_seq_len"
    lines = {"QuantizedCache": f"cache = QuantizedCache(model{rung.arguments})"}
    if rung.name == "plan":
        lines["your own loop"] = (
            f"cache = CachedModel(model).new_cache(batch, max_seq_len{rung.arguments})"
        )
    elif not layers.are_latent:
        lines["your own loop"] = f"cache = KVCache({sizes}{rung.arguments})"
    serve = "vllm serve MODEL --attention-backend CUSTOM --additional-config"
    lines["vLLM"] = f"{serve} \\\n        '{settings}'"
    return lines


def _facts(measure: Callable[[], Fidelity], passages: int) -> dict[str, Any]:
    """What a cache loses, and the verdict."""
    try:
        found = measure()
    except NonFiniteError as error:
        return {"kl": None, "kl_error": None, "top1": None, "verdict": RUIN, "why": str(error)}
    facts = {name: getattr(found, name) for name in ("kl", "kl_error", "top1")}
    return {**facts, "verdict": verdict(found.kl, found.kl_error, passages)}


def verdict(kl: float, error: float | None, passages: int) -> str:
    """The verdict on a KL, in nats per token; CLOSE of fewer than ENOUGH passages.

    Example:
        >>> verdict(0.001, 0.0002, 8)
        'safe'
    """
    return CLOSE if passages < ENOUGH else judge(kl, error)


def best(found: dict[str, Any], place: str) -> dict[str, Any] | None:
    """The safe cache of the fewest bits, with a window (place "window") or without ("none")."""
    safe = [row for row in found["rows"] if row.get(place, {}).get("verdict") == SAFE_WORD]
    bits = "bits" if place == "window" else "bits_without_window"
    return min(safe, key=lambda row: row[bits], default=None)


def parse_memory(text: str) -> int:
    """Bytes of a text with a unit, or ConfigError.

    Example:
        >>> parse_memory("24GiB")
        25769803776
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMGTkmgt]i?[Bb])", text.strip())
    if not found:
        raise ConfigError(f"memory {text!r:.40} is no size with a unit: write it as 24GiB or 80GB")
    return int(float(found[1]) * UNITS[found[2].lower()])


def render(found: dict[str, Any]) -> str:
    """The tables and the lines to paste, for a terminal."""
    exact, rows = found["exact"], found["rows"]
    columns = [Column("cache", left=True), Column("bits")]
    for length in LENGTHS:
        columns.append(Column(f"a sequence\nof {length:,}"))
        if found["memory"] is not None:
            columns.append(Column(f"sequences\nin {size_text(found['memory'])}"))
    cells = []
    for row in (exact, *rows):
        line = [row["cache"], f"{row['bits']:.2f}"]
        for length in LENGTHS:
            line.append(size_text(row["bytes"][str(length)]))
            if found["memory"] is not None:
                line.append(f"{row['sequences'][str(length)]:,}")
        cells.append(line)
    head = (
        f"Bits of an element in packed rows, and bytes of a sequence with its first {SINKS} and "
        f"last {RECENT} tokens in 16 bit:"
    )
    sizes = Section("", tables=[Table("", [columns, *cells], head)])
    if "passages" not in found:
        return text([sizes])
    told: list[Section | str] = [sizes]
    for place, head in (
        ("window", "With these tokens in 16 bit, as in KVCache and QuantizedCache by default:"),
        ("none", "Without 16-bit tokens, as in vLLM and SGLang:"),
    ):
        titles = [Column(t, left=t in LEFT) for t in VERDICTS]
        steps, chosen = [], best(found, place)
        if chosen is not None:
            wanted = ("vLLM",) if place == "none" else ("QuantizedCache", "your own loop")
            steps = [
                (f"{chosen['cache']} is safe. In {name}", chosen["lines"][name])
                for name in wanted
                if name in chosen["lines"]
            ]
        verdicts = Table("", [titles, *(_row(row, place) for row in rows)], head)
        told += [Section("", tables=[verdicts]), Section("", steps=steps)]
        if chosen is None and all(row[place]["verdict"] != CLOSE for row in rows):
            told.append("Nothing here is safe. Make a plan: kvquant calibrate MODEL")
    if any(row[place]["verdict"] == CLOSE for row in rows for place in ("window", "none")):
        told.append(
            f"Too close to tell: give {max(found['passages'] + 1, ENOUGH)} --samples or more, and "
            "a longer --text if that one is too short"
        )
    told.append(
        "KL: how far the predictions of the next token are from those with the 16-bit cache, in "
        f"nats a token; 0 is no change. Safe: up to {SAFE}; for answers of a thousand tokens or "
        f"more, up to {SAFE_FOR_LONG}. Do not use: from {RUINED} on. Measured on "
        f"{found['scored']} tokens after {found['context']} others, in {found['seconds']:.0f} s."
    )
    return text(told)


def _row(row: dict[str, Any], place: str) -> Sequence[str]:
    facts = row[place]
    suffix = "" if place == "window" else "_without_window"
    head = row["cache"], row[f"formats{suffix}"], f"{row[f'bits{suffix}']:.2f}"
    kl, error = facts["kl"] and max(facts["kl"], 0.0), facts["kl_error"]
    figures = number(kl, ".5f"), number(error, ".5f"), number(facts["top1"], ".1%")
    return *head, *figures, facts["verdict"]
