"""The task generation: where the texts of a cache diverge from those of the 16-bit cache.

A greedy text diverges where the likeliest token leads the second by less than the cache's error.
Sampled texts use the same Gumbel numbers with every cache (one for each token of the vocabulary at
each step), so they diverge only where the distributions differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvquant.errors import ConfigError

from .decoding import Caches, Choice, Reading
from .statistics import least_error, standard_error

if TYPE_CHECKING:
    from kvquant.cache.contiguous import KVCache
    from kvquant.hf.model import CachedModel

WAYS = ("greedy", "sampled")  # of choosing the next token
BOTH = "all"  # answers in the texts of all WAYS
AGREEMENT = (32, 128, 512, 2048)  # numbers of tokens after which texts are compared


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: of the softmax; None for the likeliest token.
        seed: of the random numbers, the same for all caches.
        first: the number of the batch's first prompt. Each prompt has its own random numbers.
    """

    temperature: float | None = None
    seed: int = 0
    first: int = 0


def free_run(
    model: CachedModel,
    tokens: torch.Tensor,
    num_tokens: int,
    choices: Sequence[Choice],
    reading: Reading,
    ways: Sequence[Sampling],
) -> Iterator[list[list[list[int]]]]:
    """Generate texts from each cache, in several ways.

    Args:
        model: decodes.
        tokens: [prompts, tokens] token ids, int64: prompts of one length.
        num_tokens: of each text.
        choices: the quantized caches.
        reading: how prompts come into caches.
        ways: how each token is chosen.

    Yields:
        [ways][prompts][num_tokens] token ids, for the 16-bit cache and then for each choice.
    """
    caches = Caches(model, tokens, num_tokens, reading, choices)
    yield [
        _continued(model, caches.original(), caches.logits, num_tokens, sampling)
        for sampling in ways
    ]
    for choice in choices:
        yield [
            _continued(model, *caches.copy_and_logits(choice), num_tokens, sampling)
            for sampling in ways
        ]


def _continued(
    model: CachedModel, cache: KVCache, logits: torch.Tensor, num_tokens: int, sampling: Sampling
) -> list[list[int]]:
    choose = chooser(sampling, len(logits))
    found = model.generate(cache, logits, num_tokens, eos_token_id=(), choose=choose)
    rows: list[list[int]] = found.tolist()
    return rows


def chooser(sampling: Sampling, batch: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that maps the logits of each step, [batch, vocabulary], to tokens [batch]."""
    drawn = [
        torch.Generator("cpu").manual_seed((sampling.seed << 20) + sampling.first + row)
        for row in range(batch)
    ]

    def choose(logits: torch.Tensor) -> torch.Tensor:
        scores = logits.float()
        if sampling.temperature is not None:
            width, real = scores.shape[1], torch.float64
            numbers = [torch.rand(width, generator=one, dtype=real, device="cpu") for one in drawn]
            noise = torch.stack(numbers)
            gumbel = -(-noise.clamp(1e-300).log()).log()
            scores = scores / sampling.temperature + gumbel.to(scores)
        return scores.argmax(-1)

    return choose


def ended(text: Sequence[int], ends: Sequence[int]) -> list[int]:
    """A text whose tokens after the first end token are replaced by that token.

    Example:
        >>> ended([5, 6, 2, 7], [2])
        [5, 6, 2, 2]
    """
    place = next((at for at, token in enumerate(text) if token in ends), len(text))
    return [*text[:place], *([text[place]] * (len(text) - place) if place < len(text) else [])]


def first_divergence(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The index of the first token that differs; None if the texts are equal.

    Example:
        >>> first_divergence([5, 6, 7], [5, 6, 8])
        2
    """
    differs = (at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return next(differs, None)


def summary(exact: Sequence[Sequence[int]], given: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Compare the texts of a cache with those of the 16-bit cache.

    "first_divergence": for each prompt the index of the first token that differs, or None.
    "agreement": for numbers of tokens the share of prompts whose texts are equal up to there, and
    its standard error. "prompts": their number.
    """
    parted = [first_divergence(*both) for both in zip(exact, given, strict=True)]
    length = len(exact[0])
    agreement = {}
    for count in [*(one for one in AGREEMENT if one < length), length]:
        same = [float(one is None or one >= count) for one in parted]
        found = standard_error(same)
        if found is not None:
            found = max(found, least_error(round(len(same) - sum(same)), len(same)))
        agreement[str(count)] = {"share": sum(same) / len(same), "error": found}
    return {"first_divergence": parted, "agreement": agreement, "prompts": len(parted)}


def answer_of(text: str, pattern: str) -> str:
    """The last match of a regular expression or its first group, or ""; ConfigError if invalid."""
    try:
        found = list(re.finditer(pattern, text))
    except re.error as error:
        raise ConfigError(
            f"the pattern {pattern!r} of answers is no regular expression: {error}"
        ) from error
    if not found:
        return ""
    one = found[-1]
    return (one.group(1) if one.re.groups else one.group()) or ""
