"""What pages show of public models: each cell is of its model, cache, window, context and place."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from public_tables import (
    AGAIN,
    CODERS,
    NONE,
    OWN,
    PUBLIC,
    WINDOW,
    behind_code,
    humaneval,
    overview,
    overview_about,
)

CONTEXTS = 1024, 4096, 16384
PEER = "KIVI-4, residual of 128"
CACHES = [*OWN, PEER]
ASKED = {"measure": "humaneval", "problems": 600}


def scored(model: str, cache: str, context: int, window: list[int] | None = None) -> dict[str, Any]:
    """A row of KL. The digits of its KL are those of model, cache, window and context; its bits
    are those of model and window."""
    of_model, of_window = [*PUBLIC].index(model), (None, WINDOW, NONE).index(window)
    digits = of_model, CACHES.index(cache), of_window, CONTEXTS.index(context)
    key: dict[str, Any] = {"measure": "kl", "passages": 16, "scored": 64, "device": "cuda"}
    key |= {"cache": cache, "context": context} | ({} if window is None else {"window": window})
    kl = float(f"0.{''.join(map(str, digits))}")
    return {"key": key, "kl": kl, "top1": 0.9, "packed_bits": 10.0 * of_model + of_window}


def answered(cache: str, place: str, at: int, passed: str, *window: list[int]) -> dict[str, Any]:
    """A row of HumanEval, of 600 problems: right ("1") or not, in turn."""
    key = ASKED | {"cache": cache, "place": place, "sample": at}
    return {
        "key": key | ({"window": window[0]} if window else {}),
        "passed": passed * (600 // len(passed)),
    }


def public() -> dict[str, list[dict[str, Any]]]:
    rows = {
        model: [
            *(scored(model, one, at, w) for one in OWN for at in CONTEXTS for w in (WINDOW, NONE)),
            *(scored(model, PEER, at) for at in CONTEXTS[:2]),
        ]
        for model in PUBLIC
    }
    for model, found in rows.items():  # a check on another device
        found.append(scored(model, "default", 4096, WINDOW) | {"kl": 0.9})
        found[-1]["key"]["device"] = "cpu"
    for model, alone in zip(CODERS, ("1010", "1000"), strict=True):
        rows[model] += [
            answered("16 bit", "alone", 0, "1101"),
            answered(AGAIN, "alone", 0, "1111"),
            answered("default", "alone", 0, alone, WINDOW),
            answered("default", "alone", 0, "0000", NONE),
            # behind code 16 bit has one sample of transformers' cache, and two of kvquant's
            answered("16 bit", "behind", 0, "1010"),
            *(answered(AGAIN, "behind", at, one) for at, one in enumerate(("0000", "1111"))),
            *(answered("default", "behind", at, "0101", WINDOW) for at in range(3)),
            *(answered("plan int4", "behind", at, "1110", WINDOW) for at in range(2)),
        ]
    return rows


def test_the_overview_has_both_windows_one_context_and_answers_alone() -> None:
    head, default, *others = overview(public())
    assert head[2:-2] == [*PUBLIC] and head[-1] == "HumanEval, 1.5B: lost / won"
    kl = ["0.0011, 0.0021", *(f"**0.{at}011**, **0.{at}021**" for at in (1, 2, 3))]
    assert default == ["the default", "31.00, 32.00", *kl, "300 / 150", "300 / 0"]
    kl = [f"**0.{at}701**" for at in range(4)]
    assert others[-1] == ["KIVI-4", "30.00", *kl, "-", "-"]
    about = overview_about(public())
    assert about.startswith("KL: 1,024 tokens") and "behind 4,096 others" in about
    assert about.endswith("of 600 problems 16 bit solved 450 and 450")


def test_humaneval_is_compared_in_its_place_and_with_its_16_bit_answers() -> None:
    head, *lines = humaneval(public())
    assert head[1:4] == [f"{CODERS[0]}: {one}" for one in ("KL", "alone", "behind code")]
    cells = {cache: [one.partition(":")[0] for one in found] for cache, *found in lines}
    assert cells["16 bit again"][1:3] == ["0 / 150 of 600", "300 / 0 of 600"]
    # of sample 0 with transformers' cache, of sample 1 with kvquant's, of sample 2 with none
    assert cells["the default"][:3] == ["**0.2010**", "300 / 150 of 600", "600 / 300 of 1,200"]
    assert cells["the default, no window"][:3] == ["**0.2020**", "450 / 0 of 600", "-"]
    # problems lose 1 and -1/2 in turn: 25 points and 1.645 standard errors of 3.06. With a plan
    # they lose 0, -1/2, 0 and 1/2: no points, and 1.645 standard errors of 1.44
    bounds = "30.0 and 30.0", "2.4 and 2.4"
    found = behind_code(public())
    assert all(f"at most {one}" in found for one in bounds)
