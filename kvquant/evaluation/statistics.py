"""Paired differences to the 16-bit cache, with standard errors.

Questions to one prompt are alike, so a prompt counts as one observation. If no answer differs, that
error would be 0. So its floor is the error of as many independent questions with one more
difference: two caches that answer 20 questions alike differ by 0 ± 4.8 points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FAILS = 0.5  # a task is no test of caches if the 16-bit cache has a smaller share of right answers


@dataclass(frozen=True)
class Paired:
    """Answers of a cache beside those of the 16-bit cache.

    Attributes:
        exact, given: shares of right answers with the 16-bit cache and with this one, 0 to 1.
        drop: exact - given.
        error: the standard error of drop.
        lost, won: answers that only the 16-bit cache, or only the other one, has right.
        answers, prompts: their numbers.
    """

    exact: float
    given: float
    drop: float
    error: float
    lost: int
    won: int
    answers: int
    prompts: int


def paired(exact: Sequence[Sequence[bool]], given: Sequence[Sequence[bool]]) -> Paired:
    """Compare answers, [prompts][questions] of each cache.

    Example:
        >>> paired([[True, True], [True, False]], [[True, True], [False, False]]).drop
        0.25
    """
    pairs = [list(zip(*both, strict=True)) for both in zip(exact, given, strict=True)]
    flat = [pair for one in pairs for pair in one]
    count = len(flat)
    lost = sum(a and not b for a, b in flat)
    won = sum(b and not a for a, b in flat)
    right, ours = sum(a for a, _ in flat) / count, sum(b for _, b in flat) / count
    drop, size = right - ours, count / len(pairs)
    # what each prompt adds to the mean of all questions; some prompts have more of them
    shares = [(sum(a - b for a, b in one) - drop * len(one)) / size for one in pairs]
    error = max(standard_error(shares) or 0.0, least_error(lost + won, count))
    return Paired(right, ours, drop, error, lost, won, count, len(pairs))


def share_of(answers: Sequence[Sequence[bool]]) -> float:
    """The share of right answers, of [prompts][questions].

    Example:
        >>> share_of([[True, False], [True, True]])
        0.75
    """
    return sum(map(sum, answers)) / sum(map(len, answers))


def chosen(
    answers: Sequence[Sequence[bool]], kinds: Sequence[Sequence[int]], kind: int
) -> list[list[bool]]:
    """The answers to questions of one kind, of the prompts with any.

    Example:
        >>> chosen([[True, False], [True]], [[3, 4], [4]], 4)
        [[False], [True]]
    """
    pairs = [list(zip(*both, strict=True)) for both in zip(answers, kinds, strict=True)]
    return [found for one in pairs if (found := [given for given, each in one if each == kind])]


def least_error(differing: int, count: int) -> float:
    """The floor of standard errors: that of count independent pairs, if one more pair differed.

    Example:
        >>> round(100 * least_error(0, 20), 1)  # points
        4.8
    """
    return math.sqrt((differing + 1) / (count + 2) / count)


def standard_error(means: Sequence[float]) -> float | None:
    """Of the mean of independent values; None of a single one."""
    count = len(means)
    if count < 2:
        return None
    mean = sum(means) / count
    return math.sqrt(sum((one - mean) ** 2 for one in means) / (count - 1) / count)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values stays below."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
