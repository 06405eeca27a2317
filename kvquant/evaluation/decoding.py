"""Reads prompts in 16 bit, quantizes them into each cache, and decodes from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from kvquant.cache.layer import SPARE
from kvquant.calibration.fidelity import Planned, Scheme, options_of, quantized_copy, warm_up_copies
from kvquant.errors import ConfigError
from kvquant.hf.hybrid import HybridModel
from kvquant.rows.quantize import EXACT_DTYPES

from .prompts import Prompt

if TYPE_CHECKING:
    from kvquant.cache.contiguous import KVCache
    from kvquant.hf.model import CachedModel

AT_ONCE = 64  # tokens whose logits are there together
Line: TypeAlias = tuple[Sequence[int], Sequence[int]]  # tokens to decode, choices for the next one


class Simulated(Protocol):
    """A cache that kvquant does not have, given by the values that attention would read from it.

    apply gives these values for the prompt's tokens between the first sink_len and the last
    recent_len, and evaluate rounds them to 16 bit. All other tokens, also later ones, stay in 16
    bit. kvquant's own caches pack tokens that leave the recent window.

    Attributes:
        sink_len, recent_len: how many of the prompt's first and last tokens stay in 16 bit.
        bits: of an element of the other tokens, with all parameters such as scales.
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
        """The values that attention would read, of the shapes and dtypes of keys and values.

        Args:
            layer: as in KVCache.
            keys, values: [batch, num_kv_heads, tokens, head_dim], 16 bit, K after RoPE.
        """


Choice: TypeAlias = Scheme | Planned | Simulated


@dataclass(frozen=True)
class Reading:
    """How prompts come into caches.

    Attributes:
        chunk: how many tokens of a prompt the model reads at a time; as CachedModel.prefill when
            None.
        from_rows: if true, the model reads each prompt anew for each cache, and later chunks attend
            to packed rows, as in a server. If false, the model reads each prompt once, with exact
            attention, and each cache quantizes its 16-bit rows.
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
    """Raise ConfigError if a Simulated cache cannot be evaluated with this model."""
    why = "latent rows" if model.has_latents else "sliding windows" if model.windows() else ""
    if why:
        raise ConfigError(f"the model has {why}: only caches of kvquant can be evaluated")
    if reading.from_rows:
        raise ConfigError("prompts from rows: only caches of kvquant read them")


class Caches:
    """The caches of one batch of prompts: the 16-bit one first, then the others one by one.

    The object keeps the 16-bit cache. Drop any other cache before you ask for the next: then no
    more than two exist at a time.

    Args:
        model: decodes.
        tokens: [batch, tokens] token ids of prompts of one length, int64.
        new_tokens: how many tokens will follow the prompts.
        reading: how prompts come into caches.
        choices: later arguments of `copy`, whose kernels compile together.
    """

    def __init__(
        self,
        model: CachedModel,
        tokens: torch.Tensor,
        new_tokens: int,
        reading: Reading,
        choices: Sequence[Choice] = (),
    ) -> None:
        self.model, self._tokens, self._reading = model, tokens, reading
        self.length = tokens.shape[1]
        self._exact = Scheme(model.exact_format, model.exact_format)
        self.exact, self.logits = self._read(self._exact, self.length + new_tokens)
        if not reading.from_rows:
            packed = [one for one in choices if isinstance(one, Scheme | Planned)]
            warm_up_copies(model, self.exact, packed)

    def original(self) -> KVCache:
        """The 16-bit cache of the prompts alone, without later tokens."""
        added = int(self.exact.seq_lens.max()) - self.length
        if added > SPARE and self.model.windows():  # layers that forget cannot be cropped so far
            size = self.exact.max_seq_len
            del self.exact  # before there is another one
            self.exact, _ = self._read(self._exact, size)
        elif added:
            self.exact.crop(self.length)
        return self.exact

    def copy(self, choice: Choice) -> KVCache:
        """A cache of this kind, filled with the prompts."""
        return self.copy_and_logits(choice)[0]

    def copy_and_logits(self, choice: Choice) -> tuple[KVCache, torch.Tensor]:
        """A cache of this kind, filled with the prompts, and the logits after them.

        The logits are those of the exact attention; with Reading.from_rows, those of this cache.
        """
        self.original()
        if not isinstance(choice, Scheme | Planned):
            return self._with_states(self._simulated(choice)), self.logits
        if self._reading.from_rows:
            return self._read(choice, self.exact.max_seq_len)
        return self._with_states(quantized_copy(self.model, self.exact, choice)), self.logits

    def _with_states(self, cache: KVCache) -> KVCache:
        """The cache; a model with states beside it gets copies of those at the prompts' end."""
        if isinstance(self.model, HybridModel):
            self.model.copy_states(self.exact, cache)
        return cache

    def _simulated(self, choice: Simulated) -> KVCache:
        """A 16-bit cache that holds the values that choice gives."""
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
    model: CachedModel, prompts: Sequence[Prompt], choices: Sequence[Choice], reading: Reading
) -> Iterator[list[list[bool]]]:
    """Ask the questions of prompts of one length.

    The model decodes questions and right answers. An answer counts as right if greedy decoding
    would have written it: each of its tokens is the likeliest one after all before it.

    Yields:
        [prompts][questions], right or not: of the 16-bit cache, then of each choice.
    """
    longest = max(len(one.question) + len(one.answer) for each in prompts for one in each.asked)
    tokens = torch.tensor([one.context for one in prompts], device="cpu")
    caches = Caches(model, tokens, longest, reading, choices)
    yield _answers(model, prompts, caches.original)
    for choice in choices:
        yield _answers(model, prompts, partial(caches.copy, choice))


def _answers(
    model: CachedModel, prompts: Sequence[Prompt], make: Callable[[], KVCache]
) -> list[list[bool]]:
    """[prompts][questions], right or not; make as in score."""
    lines: list[list[Line]] = [
        [((*one.question, *one.answer[:-1]), one.answer[-1:]) for one in prompt.asked]
        for prompt in prompts
    ]
    return [
        [
            bool(likeliest[max(len(one.question) - 1, 0) :, 0].all())
            for one, (_, likeliest) in zip(prompt.asked, found, strict=True)
        ]
        for prompt, found in zip(prompts, score_lines(model, make, lines), strict=True)
    ]


def score_lines(
    model: CachedModel, make: Callable[[], KVCache], lines: Sequence[Sequence[Line]]
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Decode lines of tokens, each behind its prompt, those of several prompts together.

    Args:
        model, make: as in score.
        lines: of each prompt.

    Returns:
        As score, of each prompt and line: [tokens, choices]. After each token the choices are the
        line's next token; after its last token, those of the line.
    """
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in lines]
    rounds = []
    for at in range(max(map(len, lines))):
        # a prompt with fewer lines repeats its first one, which is not counted twice
        fed, choices = zip(*(own[at if at < len(own) else 0] for own in lines), strict=True)
        width, most = max(map(len, fed)), max(map(len, choices))
        wanted = torch.zeros(len(lines), width, most, dtype=torch.int64, device="cpu")
        for row, tokens, lasts in zip(wanted, fed, choices, strict=True):
            for choice, last in enumerate(lasts):
                row[: len(tokens), choice] = torch.tensor([*tokens[1:], last], device="cpu")
        padded = [[*tokens, *[tokens[-1]] * (width - len(tokens))] for tokens in fed]
        rounds.append((torch.tensor(padded, device="cpu"), wanted))
    for at, (scores, likeliest) in enumerate(score(model, make, rounds)):
        for b, own in enumerate(lines):
            if at < len(own):
                part = b, slice(len(own[at][0])), slice(len(own[at][1]))
                found[b].append((scores[part], likeliest[part]))
    return found


def score(
    model: CachedModel,
    make: Callable[[], KVCache],
    rounds: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Decode given tokens after prompts; each round begins at the prompts' end.

    After the last round its cache holds the prompts alone again, if cropping can undo the round.

    Args:
        model: decodes.
        make: gives a cache of the prompts, anew after a round that cropping cannot undo.
        rounds: pairs of the tokens to decode, [batch, tokens], and the choices for the token after
            each of them, [batch, tokens, choices]; token ids, int64.

    Yields:
        For each round the log probabilities of the choices, [batch, tokens, choices] float32, and
        whether each choice is the likeliest token, bool; both on the CPU.
    """
    cache = make()
    length = int(cache.seq_lens.max())
    num_tokens = sum(fed.shape[1] for fed, _ in rounds)
    width, read = _reader(model, cache, num_tokens)
    for at, (fed, choices) in enumerate(rounds, 1):
        found, likeliest = [], []
        for tokens, wanted in zip(fed.split(width, 1), choices.split(width, 1), strict=True):
            scores = read(tokens).float().log_softmax(-1)
            wanted = wanted.to(scores.device)
            found.append(scores.gather(-1, wanted))
            likeliest.append(scores.argmax(-1, keepdim=True) == wanted)
        cache.check()
        if fed.shape[1] <= cache.rollback_len or not (cache.recent_len or model.windows()):
            cache.crop(length)
        elif at < len(rounds):
            del cache, read  # before there is another one
            cache = make()
            width, read = _reader(model, cache, num_tokens)
        yield torch.cat(found, 1).cpu(), torch.cat(likeliest, 1).cpu()


def _reader(
    model: CachedModel, cache: KVCache, num_tokens: int
) -> tuple[int, Callable[[torch.Tensor], torch.Tensor]]:
    """How many tokens a call reads, and what gives their logits [batch, tokens, vocabulary]."""
    # On a CPU each call reads the model's weights, which takes most of the time. Tokens of one call
    # read one another in 16 bit, so a call takes few beside the recent window; without a window,
    # one. Layers with a state take one token a call, too: those of Jamba forget it in longer calls.
    formats = [fmt for layer in cache.layers for fmt in (layer.k_format, layer.v_format)]
    is_exact = all(one.row_bytes >= 2 * one.head_dim for one in formats)
    width = AT_ONCE if is_exact else min(AT_ONCE, cache.recent_len // 4)
    if width and cache.device.type == "cpu" and not isinstance(model, HybridModel):
        return width, lambda fed: model.call(model.past_of(cache), fed, [*range(fed.shape[1])])
    step = model.stepper(cache, num_tokens)
    return 1, lambda fed: step(fed[:, 0])[:, None]
