"""Prompts are read once in 16 bit and quantized into each cache; tasks decode from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from kvquant.cache.layer import SPARE
from kvquant.calibration.fidelity import (
    Planned,
    Scheme,
    options_of,
    quantized_copy,
)
from kvquant.errors import ConfigError
from kvquant.rows.quantize import EXACT_DTYPES

from .models import WithStates
from .prompts import Asked, Prompt

if TYPE_CHECKING:
    from kvquant.cache.contiguous import KVCache
    from kvquant.hf.model import CachedModel


class Simulated(Protocol):
    """A cache of another kind, by what attention would read from it.

    The prompt's tokens between the first sink_len and the last recent_len are read as apply gives
    them, rounded to 16 bit. All others are read in 16 bit, and so is what is decoded behind the
    prompt. A cache of kvquant's has as much in 16 bit while nothing leaves its recent window.

    Attributes:
        sink_len, recent_len: tokens of the prompt in 16 bit, as in KVCache.
        bits: of an element of the others, all parameters included.
    """

    @property
    def sink_len(self) -> int: ...
    @property
    def recent_len(self) -> int: ...
    @property
    def bits(self) -> float: ...

    def apply(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is read of a layer's K and V.

        Args:
            layer: as in KVCache.
            keys, values: [batch, num_kv_heads, tokens, head_dim], 16 bit, K after RoPE.

        Returns:
            Both, of the same shapes and dtypes.
        """


Choice: TypeAlias = Scheme | Planned | Simulated


@dataclass(frozen=True)
class Reading:
    """How prompts come into caches.

    Attributes:
        chunk: how many tokens of a prompt the model computes at a time; when None, as many as
            CachedModel.prefill takes.
        from_rows: if true, the model reads each prompt once for each cache, and later chunks attend
            to packed rows, as in a server. If false, it reads each prompt once, with exact
            attention, and the 16-bit rows are quantized into each cache.
    """

    chunk: int | None = None
    from_rows: bool = False

    def __post_init__(self) -> None:
        if self.from_rows and self.chunk is None:
            raise ConfigError(
                "prompts from rows need --chunk, with fewer tokens than a prompt has: only a chunk "
                "that follows another one reads packed rows"
            )


def check_simulated(model: CachedModel, reading: Reading) -> None:
    """Raise ConfigError if caches of another kind cannot be evaluated."""
    why = "latent rows" if model.has_latents else "sliding windows" if model.windows() else ""
    if why:
        raise ConfigError(f"the model has {why}: only caches of kvquant can be evaluated")
    if reading.from_rows:
        raise ConfigError("prompts from rows: only caches of kvquant read them")


class Caches:
    """The caches of one batch of prompts, one after another: the 16-bit one, then the others.

    It holds the 16-bit one. Whoever gets another one drops it before the next, so that no more than
    these two are there at a time.

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

    def original(self) -> KVCache:
        """The 16-bit cache, with the prompts alone in it; what was decoded behind them goes."""
        added = int(self.exact.seq_lens.max()) - self.length
        if added > SPARE and self.model.windows():  # layers that forget cannot be cropped so far
            size = self.exact.max_seq_len
            del self.exact  # before there is another one
            self.exact, _ = self._read(self._exact, size)
        elif added:
            self.exact.crop(self.length)
        return self.exact

    def copy(self, choice: Choice) -> KVCache:
        """A cache of the prompts."""
        return self.copy_and_logits(choice)[0]

    def copy_and_logits(self, choice: Choice) -> tuple[KVCache, torch.Tensor]:
        """A cache of the prompts, and the logits behind them: with from_rows its own."""
        self.original()
        if not isinstance(choice, Scheme | Planned):
            return self._with_states(self._simulated(choice)), self.logits
        if self._reading.from_rows:
            return self._read(choice, self.exact.max_seq_len)
        return self._with_states(quantized_copy(self.model, self.exact, choice)), self.logits

    def _with_states(self, cache: KVCache) -> KVCache:
        """A copy of the prompts' rows, with what the model keeps beside them, if anything."""
        if isinstance(self.model, WithStates):
            self.model.copy_states(self.exact, cache)
        return cache

    def _simulated(self, choice: Simulated) -> KVCache:
        """A 16-bit cache that holds what a cache of another kind would give."""
        options = options_of(self._exact, is_latent=False)
        cache = self.model.new_cache(self.exact.batch, self.exact.max_seq_len, **options)
        packed = slice(choice.sink_len, self.length - choice.recent_len)
        dtype = EXACT_DTYPES[self.model.exact_format]
        for layer in range(self.exact.num_layers):
            keys, values = self.exact.dequantized(layer, dtype)
            found = choice.apply(layer, keys[:, :, packed], values[:, :, packed])
            keys[:, :, packed], values[:, :, packed] = found
            cache.append(layer, keys, values)
        cache.check()
        return cache

    def _read(self, choice: Scheme | Planned, max_seq_len: int) -> tuple[KVCache, torch.Tensor]:
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
