"""Paired differences and their errors; a limit that holds, is exceeded, or cannot be known; results
that are kept for a run that continues."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kvquant.evaluation.records import Records
from kvquant.evaluation.report import against_limit, render, verdicts
from kvquant.evaluation.statistics import paired, quantile, standard_error


def test_a_difference_is_paired_and_prompts_are_observations() -> None:
    exact = [[True] * 10 for _ in range(40)]
    given = [[True] * 10 if at % 4 else [False] * 10 for at in range(40)]
    found = paired(exact, given)
    assert (found.exact, found.given, found.drop) == (1.0, 0.75, 0.25)
    assert (found.lost, found.won, found.answers, found.prompts) == (100, 0, 400, 40)
    drops = [0.0 if at % 4 else 1.0 for at in range(40)]
    assert found.error == standard_error(drops) == pytest.approx(math.sqrt(0.1875 / 39))


def test_prompts_of_many_questions_count_more() -> None:
    found = paired([[True] * 8, [True]] * 4, [[True] * 8, [False]] * 4)
    assert found.drop == pytest.approx(1 / 9)
    # each prompt adds (lost - drop * questions) / (questions of a prompt on average)
    shares = [(0 - 8 / 9) / 4.5, (1 - 1 / 9) / 4.5] * 4
    assert found.error == pytest.approx(standard_error(shares))


def test_equal_answers_are_no_proof() -> None:
    found = paired([[True] * 4] * 5, [[True] * 4] * 5)
    assert found.drop == 0 and found.error == pytest.approx(math.sqrt(1 / 22 / 20))
    assert paired([[True]], [[False]]).error == pytest.approx(math.sqrt(2 / 3))


def test_what_is_won_counts_against_what_is_lost() -> None:
    found = paired([[True, False]] * 9, [[False, True]] * 9)
    assert (found.drop, found.lost, found.won) == (0, 9, 9) and found.error > 0.2


def test_quantiles_and_errors_of_few() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.999) == 3.0 and quantile([5.0], 0.5) == 5.0
    assert standard_error([1.0]) is None and standard_error([1.0, 1.0]) == 0


def found_of(exact: list[list[bool]], given: list[list[bool]], **changes: Any) -> dict[str, Any]:
    pair = asdict(paired(exact, given))
    task = {"exact": pair["exact"], "fails": pair["exact"] < 0.5, "facts": 16, "caches": [pair]}
    costs = [
        {"cache": name, "recent_len": 0, "bits": bits, "bytes_a_token": 1.0, "tokens_per_gib": 1}
        for name, bits in (("16 bit", 16.0), ("int4", 4.25))
    ]
    return {
        "caches": costs,
        "retrieval": {"512": {"keys": task | {"least_distance": 200}}},
    } | changes


YES, NO = [[True] * 10] * 100, [[False] * 10] * 100


def test_a_limit_is_met_exceeded_or_not_known() -> None:
    assert against_limit(found_of(YES, YES), 1.0) == ("met", [])
    verdict, (reason,) = against_limit(found_of(YES, NO), 1.0)
    assert verdict == "exceeded" and "int4 loses 100.0" in reason and "keys, 512" in reason
    few = [[True] * 10] * 2
    verdict, (reason,) = against_limit(found_of(few, few), 1.0)
    assert verdict == "unknown" and reason.startswith("not enough samples: int4")
    # a drop within two errors of the limit does not exceed it
    half = [[True] * 10] * 97 + [[False] * 10] * 3
    assert against_limit(found_of(YES, half), 1.0)[0] == "unknown"
    assert against_limit(found_of(YES, half), 6.0)[0] == "met"


def test_a_sentence_says_what_a_cache_costs() -> None:
    kl: dict[str, Any] = {"kl": 0.2, "kl_error": 0.01, "kl_tail": 1.0, "top1": 0.8}
    kl |= {"top1_error": 0.1, "by_position": [0.1, 0.3], "tokens": 1000, "passages": 9}
    (told,) = verdicts(found_of(YES, NO, kl={"512": [kl]}))
    assert told == (
        "int4: KL 0.2000 after 512 tokens: do not use; of 1000 answers 1000 lost and 0 won "
        "(-100.0 ± 3.2 points): answers are lost."
    )
    (told,) = verdicts(found_of(YES, YES))
    assert told.startswith("int4: of 1000 answers 0 lost and 0 won (+0.0 ± 0.1 points): ")
    assert told.endswith("no clear loss (one below 0.2 points would not show).")
    assert not [*verdicts(found_of(NO, NO))]  # no test
    assert "no clear loss" in " ".join(render(found_of(YES, YES)).split())
    (told,) = verdicts(found_of(YES, YES, kl={"512": [kl | {"passages": 3}]}))
    assert "after 512 tokens: too few passages for a verdict, give 4 --samples or more; " in told


def test_answers_that_16_bit_fails_test_no_cache() -> None:
    pairs = [asdict(paired(NO, NO))]
    answers = {"exact": 0.0, "fails": True, "caches": pairs}
    agreement = {"8": {"share": 1.0, "error": 0.0}}
    texts = [{"first_divergence": [None], "agreement": agreement, "prompts": 1}]
    task = {"greedy": texts, "sampled": texts, "greedy_answers": answers}
    found = found_of(YES, YES, retrieval={}, generation={"0": task})
    assert against_limit(found, 100.0)[0] == "unknown"
    text = render(found)
    assert "fails greedy answers (0 % right) after the prompts" in " ".join(text.split())
    assert "sampled answers" not in text and "Right answers in sampled" not in text
    assert text.count("not a test\n") == 1 and "0.0 ±" not in text


def test_each_cache_has_its_own_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def measure(*steps: float) -> Iterator[float]:
        for step in steps:
            now[0] += step
            yield step

    path = tmp_path / "state"
    kept = Records(path, {"seed": 0})
    assert kept.get("keys 512 0", lambda: measure(4.0, 1.0, 2.0)) == [4.0, 1.0, 2.0]
    kept.get("keys 512 4", lambda: measure(5.0, 1.0, 1.0))
    kept.get("kl 512 0", lambda: measure(0.5, 0.25, 0.125))
    times = {"keys": [9.0, 2.0, 3.0], "kl": [0.5, 0.25, 0.125]}
    assert kept.seconds() == times
    again = Records(path, {"seed": 0})
    assert again.get("keys 512 0", lambda: measure(9.0)) == [4.0, 1.0, 2.0]  # not measured again
    assert again.seconds() == times
    assert Records(path, {"seed": 1}).seconds() == {}


@pytest.mark.parametrize("text", ["", "[]", '{"settings": {}}', '{"settings": {}, "measured": 3}'])
def test_a_file_that_is_no_record_is_not_used(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state"
    path.write_text(text)
    assert Records(path, {}).get("kl 1 0", lambda: [7]) == [7]
