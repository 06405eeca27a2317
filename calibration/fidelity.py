"""Decode a text from quantized caches and compare with the 16-bit cache.

Perplexity of a prompt that is read at once does not see the cache: its tokens attend to exact keys
and values. Here the fused call decodes every scored token alone, and reads all earlier ones from
the cache. The text is given (teacher forcing), so all formats answer the same questions:

    prompt   read once with exact attention; its 16-bit keys and values go into every cache
    scored   fed one by one; each prediction is compared with that of the 16-bit cache

So two formats differ in the rows that decoding reads, and in nothing else: the model, its dtype and
the kernel are those of the 16-bit cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvquant.cache.checks import Devices
from kvquant.cache.contiguous import KVCache
from kvquant.cache.latent import LatentKVCache
from kvquant.cache.layer import rooms_of
from kvquant.cache.warmup import Calls, warm_up_cache
from kvquant.errors import ShapeError
from kvquant.io.plan import CachePlan, Plan, as_plan
from kvquant.rows.defaults import DEFAULT
from kvquant.rows.quantize import EXACT_DTYPES

if TYPE_CHECKING:
    from kvquant.hf.model import CachedModel


@dataclass(frozen=True)
class Scheme:
    """A cache's formats and its 16-bit window; "default" is the default of caches."""

    # If is_latent, k_format is the format of latents and v_format that of RoPE parts.

    k_format: str
    v_format: str
    sink_len: int = 0
    recent_len: int = 0
    is_latent: bool = field(default=False, repr=False, compare=False)

    def __str__(self) -> str:
        same = self.k_format == self.v_format
        name = self.k_format if same else f"K {self.k_format}, V {self.v_format}"
        if self.is_latent and not (same and self.k_format in (*EXACT_DTYPES, DEFAULT)):
            # "int4-g8" alone would mean RoPE parts in 16 bit
            name = f"{self.k_format}+{self.v_format}"
        return with_window(name, self.sink_len, self.recent_len)


@dataclass(frozen=True, init=False)
class Planned:
    """A cache by a plan.

    Attributes:
        plan: of the model; it may be given as the path of its file.
        name: for the table.
        sink_len, recent_len: as in KVCache.
    """

    plan: CachePlan
    name: str
    sink_len: int
    recent_len: int

    def __init__(
        self, plan: Plan, name: str = "plan", sink_len: int = 0, recent_len: int = 0
    ) -> None:
        vars(self).update(plan=as_plan(plan), name=name, sink_len=sink_len, recent_len=recent_len)

    def __str__(self) -> str:
        return with_window(self.name, self.sink_len, self.recent_len)


def with_window(name: str, sink_len: int, recent_len: int) -> str:
    """The name of a cache, and how many tokens it keeps in 16 bit, if any.

    Example:
        >>> with_window("int8", 4, 128)
        'int8 + 4 sinks, 128 recent'
    """
    exact = f" + {sink_len} sinks, {recent_len} recent"
    return name + exact if sink_len or recent_len else name


@dataclass(frozen=True)
class Fidelity:
    """What a scheme costs and what it keeps.

    Attributes:
        bits: bits per element of K and V, headers and 16-bit rows included.
        kl: mean KL divergence of the predictions from those of the 16-bit cache, nats per token.
        top1: share of tokens with the same likeliest next token, 0 to 1.
        perplexity: of the text under the predictions.
        kl_error, top1_error: standard errors of both; None of a single passage.
        kl_passages: the KL of each passage, for paired comparisons.
    """

    bits: float
    kl: float
    top1: float
    perplexity: float
    kl_error: float | None = None
    top1_error: float | None = None
    kl_passages: tuple[float, ...] = ()

    @classmethod
    def of(cls, bits: float, parts: torch.Tensor, scored: int) -> Fidelity:
        """Make it from compare_passages' parts, with so many scored tokens a passage."""
        kl, top1, nll = parts.mean(1).tolist()
        errors, each = standard_errors(parts, scored), tuple(parts[0].tolist())
        return cls(bits, kl, top1, perplexity_of(nll), *errors, each)


def read_prompt(model: CachedModel, prompt: torch.Tensor, new_tokens: int) -> KVCache:
    """Read a prompt [batch, tokens], int64, into a 16-bit cache with room for new_tokens."""
    exact = Scheme(model.exact_format, model.exact_format)
    options = options_of(exact, is_latent=model.has_latents)
    cache = model.new_cache(len(prompt), prompt.shape[1] + new_tokens, **options)
    model.prefill(cache, prompt)
    return cache


def quantized_copy(model: CachedModel, exact: KVCache, scheme: Scheme | Planned) -> KVCache:
    """Append the tokens of a 16-bit cache to a new one of a scheme, with the same capacity.

    Args:
        model: of both.
        exact: a cache of 16-bit rows, whose sequences have one length.
        scheme: of the copy.

    Raises:
        NonFiniteError: keys or values that a format cannot hold.
    """
    cache = _empty_copy(model, exact, scheme, exact.devices)
    if cache.is_cold:
        length = int(exact.seq_lens.max())
        calls = _calls(model, exact, scheme, length)
        warm_up_cache(cache, ("copy", exact.exact_format, model.dtype, length), calls)
    for layer, (copy, origin) in enumerate(zip(cache.layers, exact.layers, strict=True)):
        gone = origin.seq_lens - origin.held_lens  # out of the layer's window
        copy.begin(gone, gone, gone)
        cache.append(layer, *exact.dequantized(layer, EXACT_DTYPES[exact.exact_format]))
    cache.check()
    return cache


def warm_up_copies(model: CachedModel, exact: KVCache, schemes: Iterable[Scheme | Planned]) -> None:
    """On CUDA compile the kernels of all schemes' copies and steps together."""
    length, wanted = int(exact.seq_lens.max()), tuple(schemes)
    calls = [one for scheme in wanted for one in _calls(model, exact, scheme, length)]
    # a plan in the key would stay in memory, so the key has names. Of two plans with one name
    # quantized_copy compiles the kernels of the second
    names = tuple(map(str, wanted))
    warm_up_cache(exact, ("copies", exact.exact_format, model.dtype, length, names), calls)


def _calls(
    model: CachedModel, exact: KVCache, scheme: Scheme | Planned, length: int
) -> list[Calls]:
    """The calls of a quantized_copy: its rows have the 16-bit cache's dtype, steps the model's."""
    make = partial(_empty_copy, model, exact, scheme, torch.device("meta"))
    copied = Calls(make, EXACT_DTYPES[exact.exact_format], prompts=(length,), steps=())
    return [copied, Calls(make, model.dtype)]


def _empty_copy(
    model: CachedModel, exact: KVCache, scheme: Scheme | Planned, device: Devices
) -> KVCache:
    """An empty cache of a scheme, with the capacity and the step_variant of `exact`."""
    options = options_of(scheme, is_latent=isinstance(exact, LatentKVCache))
    cache = model.new_cache(exact.batch, exact.max_seq_len, device=device, **options)
    cache.step_variant = exact.step_variant
    return cache


def options_of(scheme: Scheme | Planned, *, is_latent: bool) -> dict[str, Any]:
    """A scheme as options of new_cache."""
    lengths: dict[str, Any] = {"sink_len": scheme.sink_len, "recent_len": scheme.recent_len}
    if isinstance(scheme, Planned):
        return {"plan": scheme.plan, **lengths}
    lengths["accept_loss"] = True  # losses are what is measured
    given = {"k_format": scheme.k_format, "v_format": scheme.v_format}
    if is_latent:
        given = {"fmt": DEFAULT if DEFAULT in given.values() else "+".join(given.values())}
    return {name: fmt for name, fmt in given.items() if fmt != DEFAULT} | lengths


def sized_cache(model: CachedModel, scheme: Scheme | Planned, max_seq_len: int) -> KVCache:
    """A cache of a scheme for one sequence, on the meta device: it has a size, and no memory."""
    options = options_of(scheme, is_latent=model.has_latents)
    return model.new_cache(1, max_seq_len, device="meta", **options)


def stored_bits(cache: KVCache, exact: KVCache) -> float:
    """Bits per element of a cache, headers included, by the size of a 16-bit cache like it."""
    return 16 * _rows_of_tokens(cache) / _rows_of_tokens(exact)


def _rows_of_tokens(cache: KVCache) -> int:
    """Bytes of a sequence's rows if it is full, of a KV head; without what else a cache has."""
    total = 0
    for at in cache.layers:
        kept = at.sink_len, at.recent_len, at.window, at.split.rollback_len
        rooms = rooms_of(at.max_seq_len, *kept)
        total += rooms.bytes_of(at.k_format, at.v_format, cache.exact_format)
    return total


def predict(model: CachedModel, cache: KVCache, tokens: torch.Tensor) -> torch.Tensor:
    """Feed tokens [batch, tokens]: log probabilities [tokens, batch, vocabulary], float32."""
    step = model.stepper(cache, tokens.shape[1])
    return torch.stack([step(column).float().log_softmax(-1) for column in tokens.unbind(1)])


def scored_tokens(windows: torch.Tensor, context: int) -> int:
    """Tokens after the prompt that have a successor; ShapeError if there are none."""
    scored = windows.shape[1] - context - 1
    if context < 1 or scored < 1:
        raise ShapeError(
            f"windows of {windows.shape[1]} tokens have no room for a prompt of {context}, a "
            "scored token and its successor"
        )
    return scored


class Reference:
    """Passages decoded from the 16-bit cache, the reference of other caches.

    Args:
        model: decodes.
        windows: [batch, context + scored + 1], int64: prompt, scored tokens, the last one's
            successor.
        context: tokens of the prompt.

    Attributes:
        exact_format: of the 16-bit cache.
        num_tokens: scored tokens.
        perplexity: of the text under the 16-bit cache's predictions.

    Raises:
        ShapeError: windows hold no scored token after the prompt.
    """

    def __init__(self, model: CachedModel, windows: torch.Tensor, context: int) -> None:
        scored = scored_tokens(windows, context)
        self.model, self.num_tokens = model, len(windows) * scored
        self.exact_format = model.exact_format
        self._fed = windows[:, context:-1]
        self._exact = read_prompt(model, windows[:, :context], scored)
        self._expected = predict(model, self._exact, self._fed)
        self._targets = windows[:, context + 1 :].t()[..., None].to(self._expected.device)
        self._exact.crop(context)
        _, _, nll = compare(self._expected, self._expected, self._targets)
        self.perplexity = perplexity_of(nll)

    def measure(self, scheme: Scheme | Planned) -> Fidelity:
        """Decode the passages from a cache of a scheme."""
        cache = quantized_copy(self.model, self._exact, scheme)
        # held: the next plan's share them on the GPU
        self._bases = [at.basis for at in cache.layers]
        given = predict(self.model, cache, self._fed)
        parts = compare_passages(self._expected, given, self._targets)
        bits = stored_bits(cache, self._exact)
        return Fidelity.of(bits, parts, len(self._expected))


def compare(
    expected: torch.Tensor, given: torch.Tensor, targets: torch.Tensor
) -> tuple[float, float, float]:
    """Compare predictions.

    Args:
        expected: [tokens, batch, vocabulary], log probabilities of the 16-bit cache.
        given: log probabilities of another cache, of the same shape.
        targets: [tokens, batch, 1], int64: the tokens that came.

    Returns:
        Mean KL(expected || given) in nats, share of equal likeliest tokens, and mean negative log
        likelihood of the targets under given, in nats.
    """
    kl, top1, nll = compare_passages(expected, given, targets).mean(1).tolist()
    return kl, top1, nll


def perplexity_of(nll: float) -> float:
    """exp of a mean negative log likelihood; Inf if that overflows a float."""
    return float(torch.tensor(nll, dtype=torch.float64, device="cpu").exp())


def compare_passages(
    expected: torch.Tensor, given: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """As compare, of each passage: [3, batch], float64 on the CPU."""
    kl = torch.zeros(expected.shape[1], dtype=torch.float64, device=expected.device)
    for p, q in zip(expected, given, strict=True):  # by token, to spare memory
        kl += divergence(p, q)
    top1 = (expected.argmax(-1) == given.argmax(-1)).double().mean(0)
    nll = -given.gather(-1, targets).double().mean((0, 2))
    return torch.stack([kl / len(expected), top1, nll]).cpu()


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) in nats of log probabilities [..., vocabulary]: [...], float64."""
    # what is impossible by both adds nothing, and is no NaN
    return (p.exp() * (p - q).masked_fill(p == -torch.inf, 0.0)).sum(-1).double()


def standard_errors(parts: torch.Tensor, scored: int) -> tuple[float | None, float | None]:
    """The standard errors of KL and of top-1; None for a single passage.

    Each passage counts as one observation, as its tokens are alike: the standard deviation of the
    passages' means over the root of their number. The floor of top-1's error is that of as many
    independent tokens plus one hit and one miss: eight equal tokens of eight are 100 %, with an
    error of 11.

    Args:
        parts: [3, passages], of compare_passages.
        scored: tokens of each passage.
    """
    passages = parts.shape[1]
    if passages < 2:
        return None, None
    kl, top1, _ = (parts.std(1) / math.sqrt(passages)).tolist()
    count = passages * scored
    share = (count * float(parts[1].mean()) + 1) / (count + 2)
    return kl, max(top1, math.sqrt(share * (1 - share) / count))
