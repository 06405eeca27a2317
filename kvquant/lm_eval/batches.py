"""Requests of the harness as tokens, and those that are decoded together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

Tokens = tuple[int, ...]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Context:
    """A context without its last token, and all that is decoded after it.

    Attributes:
        tokens: of the context, without the last one.
        fed: the last token and a continuation without its own last token -> number and last token
            of the requests that feed these.
    """

    tokens: Tokens
    fed: dict[Tokens, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def lines(self) -> list[tuple[Tokens, list[tuple[int, int]]]]:
        """What is fed, the longest first."""
        return sorted(self.fed.items(), key=lambda line: -len(line[0]))


@dataclass(frozen=True)
class Text:
    """A text to generate.

    Attributes:
        request: its number.
        tokens: of the context.
        until: texts that end it.
        num_tokens: at most.
        temperature: of sampling; None for the likeliest tokens.
    """

    request: int
    tokens: Tokens
    until: tuple[str, ...]
    num_tokens: int
    temperature: float | None

    @property
    def kind(self) -> Hashable:
        """Equal for texts that can be generated together."""
        return len(self.tokens), self.until, self.num_tokens, self.temperature


def batches(
    items: Iterable[Item], size: int, kind: Callable[[Item], Hashable]
) -> Iterator[list[Item]]:
    """Items of one kind together, at most so many, in order.

    Example:
        >>> [*batches([5, 7, 2, 9], 2, lambda number: number % 2)]
        [[5, 7], [9], [2]]
    """
    kinds: dict[Hashable, list[Item]] = {}
    for item in items:
        kinds.setdefault(kind(item), []).append(item)
    for alike in kinds.values():
        for start in range(0, len(alike), size):
            yield alike[start : start + size]
