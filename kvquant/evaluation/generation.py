"""Free-running generation: where texts part from the 16-bit cache's, and if answers stay right.

Greedy texts part at the first token whose margin is smaller than the error of the cache. Sampled
ones use the same random numbers for every cache (a Gumbel number for each token of the vocabulary
at each step), so they part only where the distributions differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvquant.errors import ConfigError

from .decoding import Caches, Choice, Reading
from .statistics import standard_error

if TYPE_CHECKING:
    from kvquant.cache.contiguous import KVCache
    from kvquant.hf.model import CachedModel

AGREEMENT = (32, 128, 512, 2048)  # tokens after which texts are compared
NGRAM, DRAFTED = 3, 10  # of prompt lookup: the last tokens that are searched, tokens drafted


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: of the softmax; None: the likeliest token.
        seed: of the random numbers, the same for all caches.
        first: the number of the first prompt: each has random numbers of its own.
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
    sampling: Sampling,
) -> Iterator[list[list[int]]]:
    """Continue prompts of one length from each cache.

    Yields:
        [prompts][num_tokens] token ids: of the 16-bit cache, then of each choice.
    """
    caches = Caches(model, tokens, num_tokens, reading)
    with caches.decoding() as cache:
        yield _continued(model, cache, caches.logits, num_tokens, sampling)
    for choice in choices:
        cache, logits = caches.copy_and_logits(choice)
        yield _continued(model, cache, logits, num_tokens, sampling)
        del cache


def _continued(
    model: CachedModel, cache: KVCache, logits: torch.Tensor, num_tokens: int, sampling: Sampling
) -> list[list[int]]:
    found = [*decode(model, cache, logits, num_tokens, sampling)]
    cache.check()
    rows: list[list[int]] = torch.stack(found, 1).tolist()
    return rows


def decode(
    model: CachedModel, cache: KVCache, logits: torch.Tensor, num_tokens: int, sampling: Sampling
) -> Iterator[torch.Tensor]:
    """Continue texts, token by token; whoever reads them checks the cache when they end.

    Args:
        model: decodes.
        cache: the past of each text.
        logits: [batch, vocabulary], behind it.
        num_tokens: at most; reading may end before.
        sampling: how each token is chosen.

    Yields:
        [batch] int64: the next token of each text. The last one is not in the cache.
    """
    drawn = [
        torch.Generator("cpu").manual_seed((sampling.seed << 20) + sampling.first + row)
        for row in range(len(logits))
    ]
    step = model.stepper(cache, num_tokens - 1)
    for left in reversed(range(num_tokens)):
        scores = logits.float()
        if sampling.temperature is not None:
            width, real = scores.shape[1], torch.float64
            numbers = [torch.rand(width, generator=one, dtype=real, device="cpu") for one in drawn]
            noise = torch.stack(numbers)
            gumbel = -(-noise.clamp(1e-300).log()).log()
            scores = scores / sampling.temperature + gumbel.to(scores)
        tokens = scores.argmax(-1)
        yield tokens
        if left:
            logits = step(tokens)


def ends_of(model: CachedModel) -> list[int]:
    """The tokens that end a text, as the model's generation_config has them."""
    ends = getattr(model.model.generation_config, "eos_token_id", None)
    return [ends] if isinstance(ends, int) else list(ends or ())


def ended(text: Sequence[int], ends: Sequence[int]) -> list[int]:
    """A text whose tokens behind the first end are ends as well.

    Example:
        >>> ended([5, 6, 2, 7], [2])
        [5, 6, 2, 2]
    """
    place = next((at for at, token in enumerate(text) if token in ends), len(text))
    return [*text[:place], *([text[place]] * (len(text) - place) if place < len(text) else [])]


def first_divergence(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The place of the first differing token; None where there is none.

    Example:
        >>> first_divergence([5, 6, 7], [5, 6, 8])
        2
    """
    differs = (at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return next(differs, None)


def summary(exact: Sequence[Sequence[int]], given: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How texts of a cache agree with those of the 16-bit cache.

    Returns:
        "first_divergence": of each prompt, None where texts are equal; "agreement": after so many
        tokens the share of prompts whose texts are equal up to there, with its standard error.
    """
    parted = [first_divergence(*both) for both in zip(exact, given, strict=True)]
    length = len(exact[0])
    agreement = {}
    for count in [*(one for one in AGREEMENT if one < length), length]:
        same = [float(one is None or one >= count) for one in parted]
        agreement[str(count)] = {"share": sum(same) / len(same), "error": standard_error(same)}
    return {"first_divergence": parted, "agreement": agreement, "prompts": len(parted)}


def accepted(context: Sequence[int], text: Sequence[int]) -> float:
    """Tokens that a step of greedy decoding with prompt lookup adds, on average.

    The last NGRAM tokens are searched in all before them; the DRAFTED tokens behind the first place
    are the draft, as in transformers. What the model accepts of it is what it would have written:
    the text.

    Example:
        >>> accepted([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1, 2])
        4.0
    """
    known, done, steps = list(context), 0, 0
    while done < len(text):
        draft = _draft(known)
        same = 0
        while same < len(draft) and done + same < len(text) and draft[same] == text[done + same]:
            same += 1
        new = min(same + 1, len(text) - done)  # the model adds a token of its own
        known += text[done : done + new]
        done, steps = done + new, steps + 1
    return len(text) / max(steps, 1)


def _draft(known: list[int]) -> list[int]:
    last = known[-NGRAM:]
    for start in range(len(known) - NGRAM):
        if known[start : start + NGRAM] == last:
            return known[start + NGRAM : start + NGRAM + DRAFTED]
    return []


def answer_of(text: str, pattern: str) -> str:
    """What a regular expression finds last in a text: its first group, or all of it.

    Raises:
        ConfigError: it is no regular expression.
    """
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
