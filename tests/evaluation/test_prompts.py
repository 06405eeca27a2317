"""Sheets of facts, whose answers a solver that knows only the text finds, and sheets as tokens:
exact lengths, known distances, questions and answers as in the text."""

from __future__ import annotations

import json
import re
from collections import Counter
from random import Random
from typing import Any

import pytest

from kvquant.evaluation.retrieval import TASKS, Question, Sheet

transformers = pytest.importorskip("transformers")
from refusals import assert_refused  # noqa: E402

from kvquant.cli.demo import MODEL  # noqa: E402
from kvquant.errors import ConfigError  # noqa: E402
from kvquant.evaluation.evaluate import HELD_OUT  # noqa: E402
from kvquant.evaluation.prompts import Writer  # noqa: E402

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODEL)


def writer(tokenizer: Any, length: int = 500, **options: Any) -> Writer:
    filler = tokenizer(HELD_OUT.read_text(encoding="utf-8")[:4000])["input_ids"]
    return Writer(tokenizer, length, filler, **{"window": 128, "sinks": 4} | options)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_prompts_have_their_length_and_their_answers(
    tokenizer: Any, task: str, chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CHAT if chat else None)
    made = writer(tokenizer, num_questions=3)
    prompt = made.write(task, "0")
    assert prompt == made.write(task, "0") != made.write(task, "1")
    assert len(prompt.context) == 500 and 1 <= len(prompt.asked) <= 3
    context = tokenizer.decode(prompt.context)
    assert context.startswith("<user>") == chat
    for one in prompt.asked:
        assert one.distance >= 128
        text = tokenizer.decode(one.question)
        assert ("<assistant>" in text) == chat and "\n" not in text.strip()
        answer = tokenizer.decode(one.answer).strip()
        assert tokenizer.decode([*one.question, *one.answer]).endswith(answer)
        if task in ("keys", "phonebook"):  # it stands in the context, that far from its end
            assert answer in context
            assert answer not in tokenizer.decode(prompt.context[-one.distance :])


@pytest.mark.parametrize("task", [one for one in TASKS if one != "frequent"])
def test_few_facts_stand_among_sentences(tokenizer: Any, task: str) -> None:
    made = writer(tokenizer)
    prompt = made.write(task, "0", 4)
    assert (len(prompt.context), prompt.facts) == (500, 4) and prompt == made.write(task, "0", 4)
    sheet = TASKS[task](Random("0"), 4)
    lines = tokenizer.decode(prompt.context).split("\n")
    places = [lines.index(line) for line in sheet.lines]
    assert places == sorted(places)
    # the filler before, between and behind them: they do not stand in one block
    assert places[0] > 0 and places[-1] - places[0] > 3
    for one in prompt.asked:
        assert one.distance >= 128


def test_many_facts_leave_half_to_the_text(tokenizer: Any) -> None:
    made = writer(tokenizer)
    assert made.write("keys", "0").facts > 16
    assert_refused(
        ConfigError,
        (lambda: made.write("keys", "0", 64), "500 tokens have no room for 64 facts of the task k"),
        (lambda: made.write("values", "0", 2), "2 facts give values no question: give more --fac"),
        (lambda: made.write("frequent", "0", 4), "frequent counts the words of a text, too: give"),
    )


def test_facts_of_a_wide_window_lie_before_it(tokenizer: Any) -> None:
    """All of them: where the window takes more than the text has, no place is left."""
    made = writer(tokenizer, 250, window=100, sinks=0)
    assert made.write("keys", "0", 4).facts == 4
    for window in range(100, 250, 10):
        try:
            prompt = writer(tokenizer, 250, window=window, sinks=0).write("keys", "0", 4)
        except ConfigError as error:
            assert "no room for 4 facts" in str(error)
        else:
            assert len(prompt.asked) == 4, window


def test_an_instruct_model_begins_its_answer_as_a_base_model(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chat in (None, CHAT):
        monkeypatch.setattr(tokenizer, "chat_template", chat)
        (one, *_) = writer(tokenizer).write("keys", "0", 4).asked
        text = tokenizer.decode(one.question)
        assert re.search(r"The code of the \w+ \w+ is *$", text), text
    assert re.search(r"<assistant>The code of the", text), text


def test_a_poor_estimate_of_the_lines_costs_few_tries(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, counts = writer(tokenizer, 1000), list[int]()
    wanted, keys = made.write("keys", "0"), TASKS["keys"]

    def noted(rng: Random, count: int) -> Sheet:
        counts.append(count)
        return keys(rng, count)

    monkeypatch.setitem(TASKS, "keys", noted)
    monkeypatch.setattr(made, "_count_of", lambda task: 4 * wanted.facts)
    found = made.write("keys", "0")
    assert len(counts) <= 6 and sorted(set(counts), reverse=True) == counts
    assert len(found.context) == 1000 and found.facts >= 0.9 * wanted.facts


def test_what_cannot_be_written_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(
        ConfigError,
        (lambda: Writer(None, 500, [1], window=0, sinks=0), "needs the model's tokenizer"),
        (lambda: writer(tokenizer, chat=True), "no chat template"),
        (lambda: writer(tokenizer, 150).write("keys", "0"), "no room for the task keys"),
        (lambda: Writer(tokenizer, 500, [], window=0, sinks=0), "the text is empty"),
    )
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "chat_template", "<assistant>")
        with pytest.raises(ConfigError, match="repeats the user's text 0 times"):
            writer(tokenizer)
    monkeypatch.setattr(type(tokenizer), "decode", lambda *_, **__: "The code of")
    with pytest.raises(ConfigError, match="does not give back letters, digits"):
        writer(tokenizer)


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
