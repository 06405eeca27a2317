"""Whether to use a plan, in plain words."""

from __future__ import annotations

from kvquant.layout import EXACT_CODECS
from kvquant.plan import CachePlan

from .report import KL_LIMIT, KL_NOTICE


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
    within = ""
    if limit["max_kl"] is not None:
        within = f", {'within' if limit['met'] else 'over'} the limit of {limit['max_kl']:g}"
    sentence = (
        f"The cache is {16 / bits:.1f} times smaller than in 16 bit ({bits:.2f} bits per element), "
        f"and the model predicts the same next token in {percent(measured['top1'])} of cases "
        f"(KL {number(kl)} nats per token{within})."
    )
    further = []
    if not limit["met"]:
        kind, mark = "bad", "Limit not met."
        further.append(_blame(plan))
    elif not kl <= KL_LIMIT:
        kind, mark = "bad", "Do not decode from this cache."
        further.append(_blame(plan))
    elif kl > KL_NOTICE:
        kind, mark = "notice", "Noticeable loss."
    else:
        kind, mark = "good", "Fit for use."
    further.append(_without(plan))
    return kind, mark, sentence, [text for text in further if text]


def _blame(plan: CachePlan) -> str:
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
    plain = [row for row in plan.facts["comparison"] if not row["plan"]]
    if not plain:
        return ""
    row = min(plain, key=lambda row: (abs(row["bits"] - plan.bits), row["bits"]))
    return (
        f"Without a plan, {row['format']} in all layers ({row['bits']:.2f} bits): "
        f"{percent(row['top1'])} of cases, KL {number(row['kl'])}."
    )


def number(value: float) -> str:
    """Two to three digits that matter: 0.0066, 0.12, 2.32; less than a millionth is 0."""
    if value != value:
        return "NaN"
    if abs(value) < 1e-6:
        return "0"
    return f"{value:.2g}" if abs(value) < 1 else f"{value:.2f}"


def percent(share: float) -> str:
    """95.4 %; not rounded up to 100."""
    return "over 99.9 %" if 0.9995 <= share < 1 else f"{100 * share:.1f} %"
