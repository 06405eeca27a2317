"""Whether to use a plan, and what to do next."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping
from typing import Any

from kvquant.io.plan import AUTO, CachePlan
from kvquant.io.plan_store import RUINED, SAFE
from kvquant.report.page import Verdict
from kvquant.rows.codec import EXACT_CODECS
from kvquant.text import count_text

from .windows import LEAST_PASSAGES, LEAST_SCORED

SAFE_WORD, SMALL, RUIN, CLOSE = "safe", "small loss", "do not use", "too close to tell"
MARKS = {
    SAFE_WORD: ("good", "Fit for use."),
    SMALL: ("notice", "Noticeable loss."),
    CLOSE: ("notice", "Too close to tell."),
    RUIN: ("bad", "Do not decode from this cache."),
}
MOST_BITS = 16.0  # of an element


def judge(kl: float, error: float | None) -> str:
    """The verdict on a KL, in nats per token: safe up to SAFE, not to be used from RUINED on.

    Args:
        kl: of all passages.
        error: its standard error; None of a single passage.

    Example:
        >>> judge(0.001, 0.0002)
        'safe'
        >>> judge(0.64, 0.01)
        'do not use'
        >>> judge(0.001, None)
        'too close to tell'
    """
    if error is None:
        return CLOSE
    if not kl < RUINED - 2 * error:  # NaN too
        return RUIN if not kl < RUINED + 2 * error else CLOSE
    if kl <= SAFE - 2 * error:
        return SAFE_WORD
    return SMALL if kl > SAFE + 2 * error else CLOSE


def verdict(plan: CachePlan) -> Verdict:
    """Whether to use a plan, by its KL with the 16-bit window if measured, else without."""
    bare, limit = plan.facts["measured"], plan.facts["limit"]
    if bare is None:
        words = f"{plan.bits:.2f} bits per element; what they cost was not measured: give --text."
        return Verdict("notice", "Not measured.", words)
    windowed = plan.facts.get("windowed")
    used = windowed or bare
    figures = f"KL {plus_minus(used['kl'], used['kl_error'])} nats per token"
    if windowed:
        sinks, recent = used["sink_len"], used["recent_len"]
        figures += f" with the first {sinks} and last {recent} tokens in 16 bit"
    if limit["max_kl"] is not None:
        figures += f", {'within' if limit['met'] else 'over'} the limit of {limit['max_kl']:g}"
    if windowed:
        figures += f"; without them KL {plus_minus(bare['kl'], bare['kl_error'])}"
    top1 = plus_minus(100 * used["top1"], used["top1_error"] and 100 * used["top1_error"])
    sentence = (
        f"The cache is {16 / plan.bits:.1f} times smaller than in 16 bit ({plan.bits:.2f} bits per "
        f"element), and the model predicts the same next token in {top1} % of cases ({figures})."
    )
    kind, mark = MARKS[judge(used["kl"], used["kl_error"])]
    further = [_worst_layers(plan)] if kind == "bad" or not limit["met"] else []
    if not limit["met"]:
        kind, mark = "bad", "Limit not met."
    elif kind != "bad" and (too_few := _too_few(bare)):
        kind, mark = "notice", "Too little text for a verdict."
        further.append(too_few)
    return Verdict(kind, mark, sentence, [words for words in [*further, _gain(plan)] if words])


def next_steps(
    plan: CachePlan, file: str, *, on_page: bool = False, is_auto: bool = False
) -> list[tuple[str, str]]:
    """What to do with a plan, and the line of Python or of the command that does it.

    Args:
        plan: of calibration.
        file: its name. Commands that make another plan write another file.
        on_page: leave out the step that makes the page.
        is_auto: whether "auto" takes the plan.
    """
    kind, measured = verdict(plan).kind, plan.facts["measured"]
    if file.startswith("-"):  # commands would take it for an option
        file = f"./{file}"
    stem, again = file.removesuffix(".safetensors"), "kvquant calibrate MODEL --text FILE"
    steps = []
    max_kl, budget = plan.facts["limit"]["max_kl"], plan.facts["limit"]["budget"]
    # a limit alone, or a budget of all bits, has had what it wanted
    if kind == "bad" and (max_kl is None or (budget or MOST_BITS) < MOST_BITS):
        more = f"--budget {min(MOST_BITS, math.floor(max(plan.bits, budget or 0.0)) + 1):g}"
        more += "" if max_kl is None else f" --max-kl {max_kl:g}"
        other = shlex.quote(f"{stem}-more-bits.safetensors")
        steps.append(("allow more bits", f"{again} {more} -o {other}"))
    if kind != "bad":
        if measured is None or _too_few(measured):
            other = shlex.quote(f"{stem}-measured.safetensors")
            steps.append(("measure one that you make with the same options", f"{again} -o {other}"))
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


def _too_few(measured: Mapping[str, Any]) -> str:
    scored, passages = measured["scored"], measured["passages"]
    if scored >= LEAST_SCORED and passages >= LEAST_PASSAGES:
        return ""
    return (
        f"Only {count_text(scored, 'token')} of {count_text(passages, 'passage')} were scored: "
        f"{LEAST_SCORED} or more of {LEAST_PASSAGES} passages or more are needed (--windows, "
        "--scored, a longer text)."
    )


def _worst_layers(plan: CachePlan) -> str:
    """The layers that cost most in the formats that they were given."""
    costs: dict[int, float] = {}
    for row in plan.facts["sensitivity"]:  # of K, of V, or of both
        chosen = zip((row["k_format"], row["v_format"]), plan.formats[row["layer"]], strict=True)
        if all(given in (own, *EXACT_CODECS) for given, own in chosen):
            costs[row["layer"]] = costs.get(row["layer"], 0.0) + row["kl"]
    worst = plan.facts["blamed"] or sorted(costs, key=lambda at: costs[at], reverse=True)
    named = ", ".join(f"layer {plan.places[layer]}" for layer in worst[:3])
    return f"Most of it comes from {named}." if named else ""


def _gain(plan: CachePlan) -> str:
    """What the plan brings beside plain rows of about as many bits."""
    measured, rows = plan.facts["measured"], plan.facts["comparison"]
    plain = min(
        (row for row in rows if not row["plan"]),
        key=lambda row: (abs(row["bits"] - plan.bits), row["bits"]),
        default=None,
    )
    if plain is None:
        return ""
    is_sure = plain["kl"] - measured["kl"] > 2 * paired_error(plain, measured)
    return (
        f"Plain {plain['format']} rows ({plain['bits']:.2f} bits), without 16-bit tokens: KL "
        f"{plus_minus(plain['kl'], plain['kl_error'])}. "
        + ("The plan is better." if is_sure else "The plan brings no certain gain.")
    )


def paired_error(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Standard error of the difference of two KLs, by passage; of one passage, of both together."""
    first, second = one["kl_passages"], other["kl_passages"]
    if len(first) < 2 or len(second) < 2:
        return math.hypot(*(figures["kl_error"] or 0.0 for figures in (one, other)))
    differences = [a - b for a, b in zip(first, second, strict=True)]
    error: float = statistics.stdev(differences) / math.sqrt(len(differences))
    return error


def plus_minus(value: float, error: float | None) -> str:
    """A figure and its standard error: 0.0066 ± 0.0004."""
    text = f"{max(value, 0.0):.3g}" if value >= 10 else f"{max(value, 0.0):.2g}"
    return text if not error else f"{text} ± {float(f'{error:.1g}'):g}"  # 10, not 1e+01
