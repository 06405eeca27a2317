"""Retrieval sheets as token ids: contexts of an exact length, and the questions to them.

A writer tokenizes each line alone, as after a line break, so it knows the position of every fact.
Tokens of a text, the filler, bring a context to its length. A given number of facts stands among
the filler's sentences; as many facts as fit follow the filler. So all contexts of a task fit one
batch, and the distance of a fact to the end of its context is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from kvquant.errors import ConfigError

from .retrieval import TASKS, Question, Sheet

BREAK = "\n"
LEAST = 3  # a sheet has at least so many lines
TRIAL = 16  # lines of a sheet that is tokenized to estimate how many lines fit
SLOT = "KVQUANTSLOT"  # stands for a chat's text while its template is applied


@dataclass(frozen=True)
class Asked:
    """A question as token ids.

    Attributes:
        question: what follows the context.
        answer: the right answer, which follows the question.
        distance: tokens from the end of the last line with the answer to the context's end.
        lines: how many lines hold the answer. A chain of three lines has two steps.
    """

    question: list[int]
    answer: list[int]
    distance: int
    lines: int = 1


@dataclass(frozen=True)
class Prompt:
    """A context and the questions to it.

    Attributes:
        context: token ids.
        asked: the questions.
        facts: lines with facts in the context.
    """

    context: list[int]
    asked: list[Asked]
    facts: int = 0


def has_chat(tokenizer: Any, chat: bool | None) -> bool:
    """Whether to apply the chat template; ConfigError if chat is True and there is none."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has_template:
        raise ConfigError("this tokenizer has no chat template: leave --chat out")
    return has_template if chat is None else chat


def in_chat(tokenizer: Any, text: str) -> str:
    """A user's text in the chat template, up to where the model answers."""
    found: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,  # of templates that know it: answers come at once
    )
    return found


class Writer:
    """Makes prompts of one length of retrieval tasks.

    Args:
        tokenizer: one of transformers; None is an error.
        length: tokens of a context.
        filler: token ids of a text, which brings contexts to their length.
        window: how many last tokens hold no answer: the most that a cache keeps in 16 bit.
        sinks: how many first tokens hold no answer.
        num_questions: questions to a context, at most.
        chat: whether to apply the tokenizer's chat template; when None, if it has one.

    Raises:
        ConfigError: there is no tokenizer, it lacks letters, digits or a chat template, or length
            has no room beyond the window.
    """

    def __init__(
        self,
        tokenizer: Any,
        length: int,
        filler: Sequence[int],
        *,
        window: int,
        sinks: int,
        num_questions: int = 8,
        chat: bool | None = None,
    ) -> None:
        if tokenizer is None:
            raise ConfigError(
                "retrieval needs the model's tokenizer, and the folder has none: save it there, or "
                "leave retrieval out of --tasks"
            )
        if not filler:
            raise ConfigError("the text is empty: give a longer --text")
        self.is_chat = has_chat(tokenizer, chat)
        self._tokenizer, self._length, self._filler = tokenizer, length, list(filler)
        self._window, self._sinks, self._num_questions = window, sinks, num_questions
        self._anchor = self._plain(BREAK)
        self._check_characters()
        self._stops = {one for one in set(filler) if self._ends_sentence(one)}
        before = self._after = ""
        if self.is_chat:  # what the template puts before and after the user's text
            text = in_chat(tokenizer, SLOT)
            if text.count(SLOT) != 1:
                raise ConfigError(
                    f"this tokenizer's chat template repeats the user's text {text.count(SLOT)} "
                    "times: give --no-chat"
                )
            before, _, self._after = text.partition(SLOT)
        self._before = self._plain(before)
        if not self.is_chat and getattr(tokenizer, "bos_token_id", None) is not None:
            first = tokenizer("a")["input_ids"][:1]
            self._before = first if first == [tokenizer.bos_token_id] else []

    def write(self, task: str, seed: str, facts: int = 0) -> Prompt:
        """Make a prompt of a task; the same seed makes the same prompt.

        Args:
            task: of TASKS.
            seed: chooses facts, places and questions.
            facts: lines of facts among the sentences of the filler; 0 for as many as fit, after it.

        Raises:
            ConfigError: so many facts leave less than half of the context to the filler, make no
                question, or the sheet needs to stand alone; or not even LEAST facts fit beyond the
                window.
        """
        make, count = TASKS[task], facts or self._count_of(task)
        while True:
            sheet = make(Random(seed), count)
            if facts and sheet.is_alone:
                raise ConfigError(f"{task} counts the words of a text, too: give 0 --facts")
            lines = self._lines(sheet.lines)
            tail = [token for one in self._lines(sheet.examples) for token in one]
            used = sum(map(len, lines))
            missing = self._length - len(self._before) - used - len(tail)
            found = None
            if missing >= (self._length // 2 if facts else 0):
                found = self._fitted(sheet, lines, tail, missing, seed, among=bool(facts))
            if found is not None:
                return found
            if facts or count <= LEAST:
                if not sheet.questions:
                    raise ConfigError(f"{facts} facts give {task} no question: give more --facts")
                what = f"{facts} facts of the task {task}" if facts else f"the task {task}"
                raise ConfigError(
                    f"{self._length} tokens have no room for {what} and a 16-bit window "
                    f"of {self._window}: give a longer --length, or caches with a smaller recent"
                )
            # too long: leave out the lines that do not fit; all facts in the window: a few lines
            fewer = -missing * count // used if missing < 0 else count // 32
            count = max(count - max(fewer, 1), LEAST)

    def _count_of(self, task: str) -> int:
        """Estimate how many lines fit a context. The estimate is rather too high."""
        trial = TASKS[task](Random(0), TRIAL)
        tokens = sum(map(len, self._lines(trial.lines)))
        return max(LEAST + 1, round(1.05 * TRIAL * self._length / tokens))

    def _fitted(
        self,
        sheet: Sheet,
        lines: list[list[int]],
        tail: list[int],
        missing: int,
        seed: str,
        *,
        among: bool,
    ) -> Prompt | None:
        """Make a prompt of a sheet; None if no question is about facts before the 16-bit window."""
        fill = (self._filler * (1 + missing // len(self._filler)))[:missing]
        cuts = [missing] * len(lines)
        if among:
            # what stands behind it lies in the window
            most = max(missing - self._window + len(tail), 0)
            ends = [at for at, one in enumerate(fill[:most], 1) if one in self._stops]
            places = ends or range(1, most)
            if not places:
                return None
            cuts = sorted(Random(f"{seed} places").choices(places, k=len(lines)))
        context, starts, done = [*self._before], [], 0
        for cut, line in zip([*cuts, missing], [*lines, tail], strict=True):
            context += fill[done:cut]
            if cut - done > len(self._anchor):  # what stands behind the filler begins a line
                context[len(context) - len(self._anchor) :] = self._anchor
            starts.append(len(context))
            context += line
            done = cut
        ends = [start + len(line) for start, line in zip(starts[:-1], lines, strict=True)]

        def distance(one: Question) -> int:
            is_exact = min(starts[at] for at in one.lines) < self._sinks
            return -1 if is_exact else self._length - max(ends[at] for at in one.lines)

        far = [one for one in sheet.questions if distance(one) >= self._window]
        if not far:
            return None
        chosen = Random(f"{seed} questions").sample(far, min(self._num_questions, len(far)))
        asked = [self._asked(one, distance(one)) for one in chosen]
        return Prompt(context, asked, facts=len(lines))

    def _asked(self, one: Question, distance: int) -> Asked:
        # an instruct model's answer is the line that a base model completes: with a question before
        # it, or in words of their own, small models fail what they know
        question = f"{self._after}{one.begun}"
        whole = f"{question} {one.answer}"
        known, found = self._lines([question, whole], ends=False)
        same = 0
        while same < min(len(known), len(found) - 1) and known[same] == found[same]:
            same += 1
        return Asked(found[:same], found[same:], distance, lines=len(one.lines))

    def _lines(self, texts: Sequence[str], *, ends: bool = True) -> list[list[int]]:
        """The tokens of each text, as a line that follows another line."""
        if not texts:  # tokenizers refuse an empty list
            return []
        anchor, count = self._anchor, len(self._anchor)
        whole = [f"{BREAK}{one}{BREAK if ends else ''}" for one in texts]
        # one call for all: a call for each line takes ten times as long
        ids: list[list[int]] = self._tokenizer(whole, add_special_tokens=False)["input_ids"]
        return [one[count:] if one[:count] == anchor else one for one in ids]

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _ends_sentence(self, token: int) -> bool:
        text = str(self._tokenizer.decode([token])).rstrip(" ")
        return text.endswith((".", "?", "!", BREAK))

    def _check_characters(self) -> None:
        sample = 'The code of the blue fox is 0123456789, x1 = x2. {"name": "refund"}'
        if "".join(self._tokenizer.decode(self._plain(sample)).split()) != "".join(sample.split()):
            raise ConfigError(
                "this tokenizer does not give back letters, digits, commas and JSON, of which the "
                "retrieval tasks are made: leave retrieval out of --tasks"
            )
