"""Retrieval sheets: facts among similar ones, made from a seed, for any tokenizer.

Each task makes a sheet: lines of text that hold facts, and questions about them. A bad cache
confuses a fact with similar ones first, so a key has two words, and other keys share each of them.
For small models 4 facts or fewer share no word, and copy asks for one. Definitions follow RULER
(arXiv 2404.06654), Zoology (arXiv 2312.04927) and the phone book of arXiv 2402.01032:

    single       one fact in a text
    keys         the code of a key of two words, among many such keys
    values       the three codes of one key, in the order of the text
    overwritten  the last code of a key. Half of the keys get a second code, among first codes:
                 so reading the last lines alone does not help
    variables    the number at the end of a chain x1 = 417, x5 = x1, ... of 3 to 7 lines, which
                 stand among the lines of other chains
    phonebook    the number of seven digits of a name of two words
    copy         the four words that follow three given ones in a text of random words
    frequent     the most frequent word of a text
    tools        a tool call in JSON, whose two arguments stand in one of many records

To add a retrieval task, write its function and name it in TASKS below; CHOSEN in evaluate.py names
the default ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from .words import ADJECTIVES, NOUNS


@dataclass(frozen=True)
class Question:
    """A question about a sheet.

    Attributes:
        begun: the beginning of a line, which a model completes with a space and the answer.
        answer: the right answer: letters, digits, commas, spaces and, of tool calls, JSON.
        lines: indices of the sheet's lines that hold the answer.
    """

    begun: str
    answer: str
    lines: tuple[int, ...]


@dataclass(frozen=True)
class Sheet:
    """Lines with facts, and questions to them.

    Attributes:
        lines: of the context, in order.
        questions: to choose from; the writer skips those whose lines lie in the 16-bit window.
        examples: answered questions for the end of the context, which show how to answer.
        is_alone: whether filler among the lines would change the answers.
    """

    lines: list[str]
    questions: list[Question]
    examples: tuple[str, ...] = ()
    is_alone: bool = False


DISTINCT = 4


def two_words(rng: Random, count: int) -> list[str]:
    """Different keys of two words from few; DISTINCT keys or fewer share no word."""
    if count <= DISTINCT:
        pairs = zip(rng.sample(ADJECTIVES, count), rng.sample(NOUNS, count), strict=True)
        return [" ".join(pair) for pair in pairs]
    side = 2
    while side * side < count:
        side += 1
    lefts, rights = (_words(rng, pool, side) for pool in (ADJECTIVES, NOUNS))
    return rng.sample([f"{left} {right}" for left in lefts for right in rights], count)


def _words(rng: Random, pool: Sequence[str], count: int) -> list[str]:
    """Different words of a pool. If the pool has too few, some words get a number: fox2."""
    rounds = range(2, 2 + count // len(pool))
    return rng.sample([*pool, *(f"{one}{i}" for i in rounds for one in pool)], count)


def _with_example(lines: list[str], questions: list[Question]) -> Sheet:
    """A sheet that answers its last question as an example, if another question is left to ask."""
    if len(questions) < 2:
        return Sheet(lines, questions)
    *asked, shown = questions
    return Sheet(lines, asked, (f"{shown.begun} {shown.answer}.",))


def _digits(rng: Random, count: int) -> str:
    return "".join(str(rng.randrange(10)) for _ in range(count))


def _code(key: str, code: str) -> str:
    return f"The code of the {key} is {code}."


def _code_question(key: str, code: str, at: int) -> Question:
    return Question(f"The code of the {key} is", code, (at,))


def single(rng: Random, count: int) -> Sheet:
    """One fact among sentences that say nothing."""
    lines = [f"The {one} lies beside the {rng.choice(NOUNS)}." for one in two_words(rng, count)]
    key, code, at = f"secret {rng.choice(NOUNS)}", _digits(rng, 4), rng.randrange(count)
    lines[at] = _code(key, code)
    return Sheet(lines, [_code_question(key, code, at)])


def keys(rng: Random, count: int) -> Sheet:
    """A code for each key."""
    pairs = [(key, _digits(rng, 4)) for key in two_words(rng, count)]
    questions = [_code_question(key, code, at) for at, (key, code) in enumerate(pairs)]
    return Sheet([_code(*pair) for pair in pairs], questions)


def values(rng: Random, count: int) -> Sheet:
    """Three codes for some keys; their lines stand anywhere."""
    names, told = two_words(rng, count), max(count // 5, 1)  # a fifth of them three times
    owners = [*names[:told] * 3, *names[told:]][:count]
    rng.shuffle(owners)
    places: dict[str, list[int]] = {}
    codes = [_digits(rng, 3) for _ in owners]
    for at, key in enumerate(owners):
        places.setdefault(key, []).append(at)
    lines = [_code(key, code) for key, code in zip(owners, codes, strict=True)]
    questions = [
        Question(
            f"In order, the codes of the {key} are",
            ", ".join(codes[at] for at in found),
            tuple(found),
        )
        for key, found in places.items()
        if len(found) == 3
    ]
    return _with_example(lines, questions)


def overwritten(rng: Random, count: int) -> Sheet:
    """Half of the keys have two lines with codes, and the last code counts."""
    names = two_words(rng, max(2 * count // 3, 1))
    told = [*names, *names[: count - len(names)]]
    rng.shuffle(told)
    codes = [_digits(rng, 4) for _ in told]
    last = {key: at for at, key in enumerate(told)}
    questions = [_code_question(key, codes[at], at) for key, at in last.items()]
    lines = [_code(key, code) for key, code in zip(told, codes, strict=True)]
    return Sheet(lines, questions)


MIXED = 4  # chains whose steps stand among one another


def variables(rng: Random, count: int, sizes: tuple[int, int] = (3, 7)) -> Sheet:
    """Chains of assignments, of sizes[0] to sizes[1] lines; each comes after the one it reads."""
    names = [f"x{i}" for i in rng.sample(range(10, 10 + 10 * count), count)]
    chains: list[list[str]] = []
    while names:
        chains.append([names.pop() for _ in range(min(rng.randint(*sizes), len(names)))])
    order: list[list[str]] = []  # whose next step each line is
    for at in range(0, count, MIXED):
        mixed = [chain for chain in chains[at : at + MIXED] for _ in chain]
        order += rng.sample(mixed, len(mixed))
    lines: list[str] = []
    numbers: dict[str, str] = {}
    places: dict[str, list[int]] = {}
    for at, chain in enumerate(order):
        last = chain[-1]
        done = places.setdefault(last, [])
        given = chain[len(done) - 1] if done else numbers.setdefault(last, _digits(rng, 3))
        lines.append(f"{chain[len(done)]} = {given}")
        done.append(at)
    questions = [
        Question(f"Written out, {last} has the number", numbers[last], tuple(found))
        for last, found in places.items()
        if len(found) >= sizes[0]  # the last chain may be shorter
    ]
    return _with_example(lines, questions)


def phonebook(rng: Random, count: int) -> Sheet:
    """Names and numbers."""
    lines, questions = [], []
    for at, name in enumerate(two_words(rng, count)):
        number = f"{_digits(rng, 3)}{_digits(rng, 4)}"
        lines.append(f"{name.title()}: {number}")
        questions.append(Question(f"{name.title()}:", number, (at,)))
    return Sheet(lines, questions)


GIVEN, FOLLOWING = 3, 4  # words of `copy`


def copy(rng: Random, count: int) -> Sheet:
    """Random words, eight to a line; see the module. With DISTINCT lines it asks for one word."""
    is_easy, size = count <= DISTINCT, 8 * count
    told = 1 if is_easy else FOLLOWING
    all_words = rng.sample(NOUNS, size) if is_easy else [rng.choice(NOUNS) for _ in range(size)]
    lines = [" ".join(all_words[at : at + 8]) for at in range(0, size, 8)]
    given = Counter(zip(all_words, all_words[1:], all_words[2:], strict=False))
    questions = []
    for at, line in enumerate(lines):
        words = line.split()
        begun, answer = " ".join(words[:GIVEN]), " ".join(words[GIVEN : GIVEN + told])
        if given[words[0], words[1], words[2]] == 1:
            questions.append(Question(begun, answer, (at,)))
    return Sheet(lines, questions)


def frequent(rng: Random, count: int) -> Sheet:
    """Words with counts as 1/rank; the last third of the lines alone gives another answer."""
    ranked = rng.sample(NOUNS, len(NOUNS))
    weights = [1 / (rank + 1) for rank in range(len(ranked))]
    told = max(2 * count // 3, 1)
    words = rng.choices(ranked, weights, k=8 * told)
    words += rng.choices(ranked[1:], weights[1:], k=8 * (count - told))
    most = Counter(words).most_common(2)
    if most[0][0] != ranked[0] or most[0][1] == most[1][1]:  # of few words: make it so
        words[: 4 * told] = [ranked[0]] * (4 * told)
    lines = [" ".join(words[8 * at : 8 * at + 8]) for at in range(count)]
    begun = "Of all words above the most frequent one is"
    return Sheet(lines, [Question(begun, ranked[0], (told - 1,))], is_alone=True)


def tools(rng: Random, count: int) -> Sheet:
    """Records of customers; a tool takes two numbers of one of them."""
    records = [(name.title(), _digits(rng, 6), _digits(rng, 4)) for name in two_words(rng, count)]
    calls = [
        f'{{"name": "refund", "arguments": {{"account": "{account}", "order": "{order}"}}}}'
        for _, account, order in records
    ]
    questions = [
        Question(f"The refund of {name}:", call, (at,))
        for at, ((name, _, _), call) in enumerate(zip(records, calls, strict=True))
    ]
    lines = [
        f"Customer {name}: account {account}, order {order}." for name, account, order in records
    ]
    return _with_example(lines, questions)


TASKS: dict[str, Callable[[Random, int], Sheet]] = {
    task.__name__: task
    for task in (single, keys, values, overwritten, variables, phonebook, copy, frequent, tools)
}
