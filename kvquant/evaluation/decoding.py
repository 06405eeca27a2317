"""Prompts in caches: read once in 16 bit, quantized into each cache, and decoded from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch

from kvquant.calibration.fidelity import (
    Planned,
    Scheme,
    options_of,
    quantized_copy,
)
from kvquant.errors import ConfigError

from .prompts import Asked, Prompt

if TYPE_CHECKING:
    from kvquant.cache.contiguous import KVCache
    from kvquant.hf.model import CachedModel

Choice: TypeAlias = Scheme | Planned


@dataclass(frozen=True)
class Reading:
    """How prompts come into caches.

    Attributes:
        chunk: tokens of a prompt that are computed at a time; CachedModel.prefill's when None.
        from_rows: whether each cache reads the prompt itself, so that later chunks attend to its
            packed rows, as a server's do. Else the prompt is read once with exact attention.
    """

    chunk: int | None = None
    from_rows: bool = False

    def __post_init__(self) -> None:
        if self.from_rows and self.chunk is None:
            raise ConfigError(
                "prompts from rows need --chunk, fewer tokens than a prompt: what is computed at "
                "once does not read rows"
            )


class Caches:
    """The caches of one batch of prompts, one after another: the 16-bit one, then the others.

    Args:
        model: decodes.
        tokens: [batch, tokens], prompts of one length.
        new_tokens: how many will be decoded behind them.
        reading: how they are read.
    """

    def __init__(
        self, model: CachedModel, tokens: torch.Tensor, new_tokens: int, reading: Reading
    ) -> None:
        self.model, self._tokens, self._reading = model, tokens, reading
        self.length = tokens.shape[1]
        self._exact = Scheme(model.exact_format, model.exact_format)
        self.exact, self.logits = self._read(self._exact, self.length + new_tokens)

    @contextmanager
    def decoding(self) -> Iterator[KVCache]:
        """The 16-bit cache to decode from; afterwards it holds the prompts alone again."""
        cache = self.original()
        yield cache
        if cache is self.exact:
            cache.crop(self.length)

    def original(self) -> KVCache:
        """The 16-bit cache, which must be cropped to the prompts after use; a copy where there are
        layers that forget, which cannot be cropped by many tokens."""
        return self.copy(self._exact) if self.model.windows() else self.exact

    def copy(self, choice: Choice) -> KVCache:
        """A cache of the prompts."""
        return self.copy_and_logits(choice)[0]

    def copy_and_logits(self, choice: Choice) -> tuple[KVCache, torch.Tensor]:
        """A cache of the prompts, and the logits behind them: with from_rows its own."""
        if self._reading.from_rows:
            return self._read(choice, self.exact.max_seq_len)
        return quantized_copy(self.model, self.exact, choice), self.logits

    def _read(self, choice: Choice, max_seq_len: int) -> tuple[KVCache, torch.Tensor]:
        options = options_of(choice, is_latent=self.model.has_latents)
        cache = self.model.new_cache(len(self._tokens), max_seq_len, **options)
        logits = self.model.prefill(cache, self._tokens, chunk=self._reading.chunk)
        return cache, logits


def ask_all(
    model: CachedModel,
    prompts: Sequence[Prompt],
    choices: Sequence[Choice],
    reading: Reading,
) -> Iterator[list[list[bool]]]:
    """Ask the questions of prompts of one length.

    Questions are decoded token by token, and answers too: an answer is right if each of its tokens
    is the likeliest one behind the question and the answer so far, which is what greedy decoding
    would have written.

    Yields:
        [prompts][questions], right or not: of the 16-bit cache, then of each choice.
    """
    longest = max(len(one.question) + len(one.answer) for each in prompts for one in each.asked)
    tokens = torch.tensor([one.context for one in prompts], device="cpu")
    caches = Caches(model, tokens, longest, reading)
    yield _answers(model, prompts, caches.original)
    for choice in choices:
        yield _answers(model, prompts, partial(caches.copy, choice))


def _answers(
    model: CachedModel, prompts: Sequence[Prompt], make: Callable[[], KVCache]
) -> list[list[bool]]:
    """What a cache answers; make as in score."""
    most = max(len(one.asked) for one in prompts)
    rounds, masks = [], []
    for at in range(most):
        # a prompt with fewer questions repeats its first one, which is not counted twice
        fed, is_answer = _fed([one.asked[at if at < len(one.asked) else 0] for one in prompts])
        rounds.append((fed[:, :-1], fed[:, 1:, None]))
        masks.append(is_answer[:, 1:])
    found: list[list[bool]] = [[] for _ in prompts]
    for at, (_, likeliest) in enumerate(score(model, make, rounds)):
        right = (likeliest[..., 0] | ~masks[at]).all(1).tolist()
        for own, one, prompt in zip(found, right, prompts, strict=True):
            if at < len(prompt.asked):
                own.append(one)
    return found


def score(
    model: CachedModel,
    make: Callable[[], KVCache],
    rounds: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Decode given tokens behind prompts, one by one; each round begins behind the prompts alone.

    What make gave last holds the prompts alone in the end, unless cropping cannot bring that about.

    Args:
        model: decodes.
        make: a cache of the prompts; called once more for each round that cropping cannot undo.
        rounds: tokens that are fed, [batch, tokens], and tokens whose probability is asked for
            after each of them, [batch, tokens, choices].

    Yields:
        Of each round the log probabilities of the choices, [batch, tokens, choices] float32, and
        whether each is the likeliest token; both on the CPU.
    """
    cache = make()
    length = int(cache.seq_lens.max())
    num_tokens = sum(fed.shape[1] for fed, _ in rounds)
    step = model.stepper(cache, num_tokens)
    for at, (fed, choices) in enumerate(rounds, 1):
        found, likeliest = [], []
        for tokens, wanted in zip(fed.unbind(1), choices.unbind(1), strict=True):
            scores = step(tokens).float().log_softmax(-1)
            wanted = wanted.to(scores.device)
            found.append(scores.gather(-1, wanted))
            likeliest.append(scores.argmax(-1, keepdim=True) == wanted)
        cache.check()
        if fed.shape[1] <= cache.rollback_len or not (cache.recent_len or model.windows()):
            cache.crop(length)
        elif at < len(rounds):
            del cache, step  # before there is another one
            cache = make()
            step = model.stepper(cache, num_tokens)
        yield torch.stack(found, 1).cpu(), torch.stack(likeliest, 1).cpu()


def _fed(asked: Sequence[Asked]) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, tokens]: questions and answers, and whether a token is part of an answer."""
    rows = [[*one.question, *one.answer] for one in asked]
    width = max(map(len, rows))
    fed = torch.tensor([row + [row[-1]] * (width - len(row)) for row in rows], device="cpu")
    place = torch.arange(width, device="cpu")
    starts = torch.tensor([len(one.question) for one in asked], device="cpu")[:, None]
    ends = torch.tensor([len(row) for row in rows], device="cpu")[:, None]
    return fed, (place >= starts) & (place < ends)
