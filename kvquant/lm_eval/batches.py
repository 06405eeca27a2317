"""Requests of the harness as tokens, and those that are decoded together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

Tokens = tuple[int, ...]
Line = tuple[Tokens, list[tuple[int, int]]]
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
    def lines(self) -> list[Line]:
        """Lines of fed tokens, the longest first."""
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


def rounds_of(batch: Sequence[Context]) -> Iterator[list[Line]]:
    """A line of each context, then the next one of each; contexts without more repeat the first."""
    lines = [one.lines for one in batch]
    for at in range(max(map(len, lines))):
        yield [own[at] if at < len(own) else own[0] for own in lines]


def tensors_of(lines: Sequence[Line]) -> tuple[torch.Tensor, torch.Tensor]:
    """A round as evaluation's score takes it; padding of lines and requests is not read.

    Returns:
        Tokens to feed, [batch, tokens], and those whose probability the requests want after each,
        [batch, tokens, requests].
    """
    width = max(len(fed) for fed, _ in lines)
    most = max(len(asked) for _, asked in lines)
    tokens = [[*fed, *[fed[-1]] * (width - len(fed))] for fed, _ in lines]
    wanted = torch.zeros(len(lines), width, most, dtype=torch.int64, device="cpu")
    for row, (fed, asked) in zip(wanted, lines, strict=True):
        for choice, (_, last) in enumerate(asked):
            row[: len(fed), choice] = torch.tensor([*fed[1:], last], device="cpu")
    return torch.tensor(tokens, device="cpu"), wanted
