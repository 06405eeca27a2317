"""Sheets of facts: every answer follows from the lines, by a solver that knows only the text."""

from __future__ import annotations

import json
import re
from collections import Counter
from random import Random

import pytest

from kvquant.evaluation.retrieval import TASKS, Question, Sheet

SIZES = (4, 30, 200)


def told(lines: list[str]) -> dict[str, list[str]]:
    """The codes of each key, in order."""
    found: dict[str, list[str]] = {}
    for line in lines:
        if match := re.fullmatch(r"The code of the (.+) is (\d+)\.", line):
            found.setdefault(match[1], []).append(match[2])
    return found


def key_of(question: Question) -> str:
    match = re.search(r"codes? of the (.+?)(?: is| are)$", question.begun)
    assert match is not None
    return match[1]


def solve(task: str, sheet: Sheet, question: Question) -> str:
    """The answer by the text alone."""
    if task in ("single", "keys", "overwritten"):
        return told(sheet.lines)[key_of(question)][-1]
    if task == "values":
        return ", ".join(told(sheet.lines)[key_of(question)])
    if task == "variables":
        given = dict(line.split(" = ") for line in sheet.lines)
        name = question.begun.split()[2].strip(",")
        while name in given:
            name = given[name]
        return name
    if task == "phonebook":
        return dict(line.split(": ") for line in sheet.lines)[question.begun.rstrip(":")]
    if task == "copy":
        line = next(one for one in sheet.lines if one.startswith(question.begun))
        return " ".join(
            line.removeprefix(question.begun).split()[: 4 if len(sheet.lines) > 4 else 1]
        )
    if task == "tools":  # the form that the question shows, filled with what the record says
        name = question.begun.removeprefix("The refund of ").rstrip(":")
        line = next(one for one in sheet.lines if f" {name}: " in one)
        account, order = re.findall(r"\d+", line.rpartition(": ")[2])
        form = {"name": "refund", "arguments": {}}
        form["arguments"] = {"account": account, "order": order}
        return json.dumps(form)
    assert task == "frequent"
    (first, most), (_, less) = Counter(" ".join(sheet.lines).split()).most_common(2)
    assert most > less
    assert first not in " ".join(sheet.lines[question.lines[0] + 1 :]).split()
    return first


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("task", TASKS)
def test_answers_follow_from_the_lines(task: str, count: int) -> None:
    for seed in range(3):
        sheet = TASKS[task](Random(seed), count)
        assert len(sheet.lines) == count
        assert sheet == TASKS[task](Random(seed), count) != TASKS[task](Random(seed + 9), count)
        assert sheet.questions or count == 4
        for question in sheet.questions:
            assert question.answer == solve(task, sheet, question)
            letters = r"[a-z0-9, {}\":]+" if task == "tools" else r"[a-z0-9, ]+"
            assert re.fullmatch(letters, question.answer)
        lines = {line for question in sheet.questions for line in question.lines}
        assert all(0 <= line < count for line in lines)
        assert not any(
            one.begun in example for one in sheet.questions for example in sheet.examples
        )


def test_lines_that_hold_an_answer_are_named() -> None:
    """Without them the answer is not there any more."""
    for task in ("single", "keys", "values", "overwritten", "phonebook"):
        sheet = TASKS[task](Random(1), 30)
        for question in sheet.questions[:5]:
            left = [line for at, line in enumerate(sheet.lines) if at not in question.lines]
            try:
                assert solve(task, Sheet(left, []), question) != question.answer
            except KeyError:
                assert task != "overwritten" or len(question.lines) == 1


def test_few_keys_share_no_word() -> None:
    copied = " ".join(TASKS["copy"](Random(0), 4).lines).split()
    assert len(copied) == len(set(copied)) == 32
    for task in ("keys", "overwritten"):
        words = [one for key in told(TASKS[task](Random(0), 4).lines) for one in key.split()]
        assert len(words) == len(set(words))


def test_neither_word_of_a_key_suffices() -> None:
    sheet = TASKS["keys"](Random(0), 64)
    for side in (0, 1):
        words = Counter(key.split()[side] for key in told(sheet.lines))
        assert len(words) == 8 and set(words.values()) == {8}


def test_recency_alone_does_not_tell_overwritten_keys() -> None:
    """Updates stand among first codes: the last third of the lines has both."""
    lines = TASKS["overwritten"](Random(0), 60).lines
    seen = set(told(lines[:40]))
    again = [key in seen for key in told(lines[40:])]
    assert 3 < sum(again) < len(again) - 3


def test_chains_have_two_to_six_steps_and_decoys() -> None:
    sheet = TASKS["variables"](Random(0), 200)
    steps = Counter(len(one.lines) - 1 for one in sheet.questions)
    assert set(steps) == {2, 3, 4, 5, 6}
    between = [one.lines[-1] - one.lines[0] - len(one.lines) + 1 for one in sheet.questions]
    assert sum(between) / len(between) > 6  # lines of other chains
