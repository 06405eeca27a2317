"""Whether to use a plan, in plain words, and what to do next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any

from kvquant.io.plan import AUTO, CachePlan
from kvquant.rows.codec import EXACT_CODECS
from kvquant.text import count_text

from .text_report import KL_LIMIT, KL_NOTICE, nearest_plain
from .windows import LEAST_PASSAGES, LEAST_SCORED

MOST_BITS = 16.0  # of an element


def verdict(plan: CachePlan) -> tuple[str, str, str, list[str]]:
    """Say whether to use the plan.

    Returns:
        "good", "notice" or "bad"; the word for it; one sentence; and further sentences.
    """
    measured, limit = plan.facts["measured"], plan.facts["limit"]
    if measured is None:
        words = f"{plan.bits:.2f} bits per element; what they cost was not measured."
        return "notice", "Not measured.", words, []
    kl, bits = measured["kl"], plan.bits
    most = kl + 2 * (measured.get("kl_error") or 0.0)
    within = ""
    if limit["max_kl"] is not None:
        within = f", {'within' if limit['met'] else 'over'} the limit of {limit['max_kl']:g}"
        if limit["met"] and most > limit["max_kl"]:
            within += " by less than two standard errors"
    windowed = plan.facts.get("windowed")
    figures = f"KL {kl_text(measured)} nats per token{within}"
    if windowed:
        kept = (
            f"the first {windowed['sink_len']} and last {windowed['recent_len']} tokens in 16 bit"
        )
        figures = f"KL {kl_text(windowed)} nats per token with {kept}; without them {figures}"
    sentence = (
        f"The cache is {16 / bits:.1f} times smaller than in 16 bit ({bits:.2f} bits per element), "
        f"and the model predicts the same next token in {top1_text(windowed or measured, plan)} of "
        f"cases ({figures})."
    )
    further = []
    if not limit["met"]:
        kind, mark = "bad", "Limit not met."
        further.append(_worst_layers(plan))
    elif not kl <= KL_LIMIT:
        kind, mark = "bad", "Do not decode from this cache."
        further.append(_worst_layers(plan))
    elif too_few := _too_few(measured):
        kind, mark = "notice", "Too little text for a verdict."
        further.append(too_few)
    elif not most <= KL_NOTICE:  # NaN too
        kind, mark = "notice", "Noticeable loss."
    else:
        kind, mark = "good", "Fit for use."
    further.append(_without(plan))
    return kind, mark, sentence, [text for text in further if text]


def next_steps(
    plan: CachePlan, file: str, *, on_page: bool = False, is_auto: bool = False
) -> list[tuple[str, str]]:
    """What to do with a plan, and the line of Python or of the command that does it.

    A command that makes another plan writes another file: this one stays.

    Args:
        plan: what calibration found.
        file: its name.
        on_page: its reader sees the page of `kvquant report`, so no step makes it.
        is_auto: whether "auto" takes the plan.
    """
    kind, measured = verdict(plan)[0], plan.facts["measured"]
    if file.startswith("-"):  # commands would take it for an option
        file = f"./{file}"
    stem, again = file.removesuffix(".safetensors"), "kvquant calibrate MODEL --text FILE"
    steps = []
    max_kl, budget = plan.facts["limit"]["max_kl"], plan.facts["limit"]["budget"]
    # a limit alone, or a budget of all bits, has had what it wanted
    is_free = max_kl is not None and (budget is None or budget >= MOST_BITS)
    if kind == "bad" and not is_free:
        more = f"--budget {min(MOST_BITS, math.floor(max(plan.bits, budget or 0.0)) + 1):g}"
        if max_kl is not None:
            more += f" --max-kl {max_kl:g}"
        other = shlex.quote(f"{stem}-more-bits.safetensors")
        steps.append(("allow more bits", f"{again} {more} -o {other}"))
    elif measured is None or _too_few(measured):
        other = shlex.quote(f"{stem}-measured.safetensors")
        steps.append(("make one that is measured", f"{again}{_goal(plan)} -o {other}"))
    if kind != "bad":
        plan_of = f"plan={(AUTO if is_auto else file)!r}"
        if not (measured or {}).get("in_one_pass"):  # else no KVCache serves the model
            line = f"cache = model.new_cache(1, 4096, {plan_of})"
            steps.append(("use it in your own loop (model is a CachedModel)", line))
        line = f"cache = QuantizedCache(model, {plan_of})"
        steps.append(("use it in generate (model is of transformers)", line))
    if not on_page:
        page = f"kvquant report {shlex.quote(file)} -o {shlex.quote(f'{stem}.html')}"
        steps.append(("see it", page))
    return steps


def _goal(plan: CachePlan) -> str:
    """The options of `kvquant calibrate` that ask for a plan's formats."""
    limit = plan.facts["limit"]
    options = [
        f" --{name.replace('_', '-')} {limit[name]:g}"
        for name in ("budget", "max_kl")
        if limit[name] is not None
    ]
    layers = zip(plan.formats, plan.facts["layers"], strict=True)
    pairs = {pair for pair, entry in layers if not entry["kept"]}
    if not options and len(pairs) == 1:  # one format was given for all layers
        k, v = pairs.pop()
        joined = plan.is_latent and v not in EXACT_CODECS  # RoPE parts are in 16 bit by default
        options = [f" --format {k}+{v}" if joined else f" --format {k}"]
    return "".join(options)


def _too_few(measured: Mapping[str, Any]) -> str:
    """A sentence if there is too little behind the figures."""
    scored, passages = measured["scored"], measured.get("passages")
    if scored >= LEAST_SCORED and (passages is None or passages >= LEAST_PASSAGES):
        return ""
    text = count_text(scored, "token")
    text += f" of {count_text(passages, 'passage')}" if passages is not None else ""
    return (
        f"Only {text} were scored: {LEAST_SCORED} or more of {LEAST_PASSAGES} passages or more are "
        "needed (--windows, --scored, a longer text)."
    )


def _worst_layers(plan: CachePlan) -> str:
    """The layers that cost most in the formats that they were given."""
    costs: dict[int, float] = {}
    for row in plan.facts["sensitivity"]:  # of K, of V, or of both
        layer, pair = row["layer"], (row["k_format"], row["v_format"])
        chosen = zip(pair, plan.formats[layer], strict=True)
        if all(given in (own, *EXACT_CODECS) for given, own in chosen):
            costs[layer] = costs.get(layer, 0.0) + row["kl"]
    worst = sorted(plan.facts["blamed"] or costs, key=lambda at: costs.get(at, 0.0), reverse=True)
    if not worst:
        return ""
    places = plan.places
    words = [
        f"layer {places[layer]}" + (f" (alone KL {number(costs[layer])})" if layer in costs else "")
        for layer in worst[:3]
    ]
    return f"Most of it comes from {', '.join(words)}."


def _without(plan: CachePlan) -> str:
    """What the plain format of about as many bits does."""
    row = nearest_plain(plan)
    if row is None:
        return ""
    return (
        f"Without a plan, {row['format']} in all layers ({row['bits']:.2f} bits): "
        f"{top1_text(row, plan)} of cases, KL {kl_text(row)}."
    )


def kl_text(figures: Mapping[str, Any]) -> str:
    """The KL of measured figures with its standard error: 0.0066 ± 0.0004."""
    kl, error = figures["kl"], figures.get("kl_error")
    if not error or not math.isfinite(error) or kl < 1e-6:
        return number(kl)
    digits = max(2, -math.floor(math.log10(error)))  # one of the error
    return f"{kl:.{digits}f} ± {error:.{digits}f}"


def top1_text(figures: Mapping[str, Any], plan: CachePlan) -> str:
    """The top-1 of measured figures with its standard error: 95.4 ± 0.9 %."""
    return percent(figures["top1"], top1_error(figures, plan))


def top1_error(figures: Mapping[str, Any], plan: CachePlan) -> float | None:
    """The standard error of top-1; of plans that have none, that of as many independent tokens."""
    error: float | None = figures.get("top1_error")
    if error is None and plan.facts["measured"]:
        scored = plan.facts["measured"]["scored"]
        share = (scored * figures["top1"] + 1) / (scored + 2)
        error = math.sqrt(share * (1 - share) / max(scored, 1))
    return error


def number(value: float) -> str:
    """Two to three digits that matter: 0.0066, 0.12, 2.32; less than a millionth is 0."""
    if value != value:
        return "NaN"
    if abs(value) < 1e-6:
        return "0"
    return f"{value:.2g}" if abs(value) < 1 else f"{value:.2f}"


def percent(share: float, error: float | None = None) -> str:
    """As many digits as the standard error allows: 95.4 ± 0.9 %, 100 ± 11 %."""
    if error is None:
        return "over 99.9 %" if 0.9995 <= share < 1 else f"{100 * share:.1f} %"
    digits = 0 if error >= 0.02 else 1 if error >= 0.001 else 2
    return f"{100 * share:.{digits}f} ± {100 * error:.{digits}f} %"
