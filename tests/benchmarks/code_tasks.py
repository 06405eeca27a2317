"""Retrieval tasks of code: which number a function returns, or a constant has, among similar ones.

Definitions stand between passages of real source code. Names have two words, and other names share
each of them. Definitions of the last quarter of a context are not asked for.

    functions    def area_of_blue_fox(): return 4711     asked by: assert area_of_blue_fox() ==
    constants    BLUE_FOX_SIZE = 4711                    asked by: print(BLUE_FOX_SIZE)  # prints
"""

from __future__ import annotations

from functools import partial
from random import Random

from kvquant.evaluation.retrieval import TASKS, Question, Sheet, two_words

PASSAGE, WIDEST = 6, 100  # lines of source code before each definition; letters of a line
KINDS = {  # a definition, and the beginning of the line that asks for it
    "functions": (
        "def area_of_{0}_{1}(): return {2}",
        "assert area_of_{0}_{1}() ==",
    ),
    "constants": (
        "{0}_{1}_SIZE = {2}",
        "print({0}_{1}_SIZE)  # prints",
    ),
}


def definitions(rng: Random, count: int, kind: str, source: list[str]) -> Sheet:
    """So many definitions of a kind, each behind some lines of the source code."""
    definition, begun = KINDS[kind]
    lines, questions = [], []
    for at, key in enumerate(two_words(rng, count)):
        words = (key.upper() if kind == "constants" else key).split()
        number = str(rng.randrange(1000, 10000))
        start = rng.randrange(max(len(source) - PASSAGE, 1))
        passage = [*source[start : start + PASSAGE], definition.format(*words, number)]
        lines.append("\n".join(passage))
        questions.append(Question(begun.format(*words), number, (at,)))
    return Sheet(lines, questions[: max(3 * count // 4, 1)])


def add(source: str) -> None:
    """Add these tasks to those that can be evaluated, with passages of this source code."""
    lines = [one for one in source.splitlines() if one.strip() and len(one) <= WIDEST]
    for kind in KINDS:
        TASKS[kind] = partial(definitions, kind=kind, source=lines)
