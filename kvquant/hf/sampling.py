"""How `CachedModel.generate` chooses the next token: the likeliest one, or one drawn by a seed.

transformers' own warpers set the scores of the tokens that are left out to -inf. A token is drawn
where the cumulated probabilities pass a random number. Each sequence has its own random numbers,
which come from the CPU. So a text depends on the seed and on its place, not on the device and not
on the other texts of its batch.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from transformers.generation import logits_process

from ..errors import ConfigError, NonFiniteError, shown
from ..rows.arguments import check_size, is_whole

_SEEDS, _PLACES = 2**40, 2**20  # a seed and a place together must be below 2**64


class Sampler:
    """Chooses the next token of each sequence of a batch.

    Args:
        batch: sequences.
        temperature: what scores are divided by before the softmax, above 0. The likeliest token is
            chosen when None.
        top_k: how many tokens, the likeliest ones, are drawn from; all when None.
        top_p: tokens are drawn from the smallest set of likeliest ones whose probabilities add up
            to this, above 0 and at most 1; from all when None.
        seed: of the random numbers, from 0 and below 2**40. torch's global generator gives one when
            None, so torch.manual_seed makes that reproducible.

    Raises:
        ConfigError: a value that is not possible, or top_k, top_p or seed without temperature.
    """

    def __init__(
        self,
        batch: int,
        temperature: float | None,
        top_k: int | None,
        top_p: float | None,
        seed: int | None,
    ) -> None:
        self._warpers: list[Any] = []  # of transformers
        self._drawn: list[torch.Generator] = []  # one for each sequence; none: greedy
        self._is_bad: torch.Tensor | None = None  # [batch]
        if temperature is None:
            for name, value in {"top_k": top_k, "top_p": top_p, "seed": seed}.items():
                if value is not None:
                    raise ConfigError(
                        f"{name} is {shown(value)}, but without temperature the likeliest token is "
                        f"chosen: give temperature=1.0 to sample, or leave {name} out"
                    )
            return
        heat = _number("temperature", temperature, math.inf, "leave it out to decode greedily")
        self._warpers.append(logits_process.TemperatureLogitsWarper(heat))
        if top_k is not None:
            top_k = check_size("top_k", top_k, at_least=1)
            self._warpers.append(logits_process.TopKLogitsWarper(top_k))
        if top_p is not None:
            share = _number("top_p", top_p, 1, "leave it out to draw from all tokens")
            self._warpers.append(logits_process.TopPLogitsWarper(share))
        if seed is None:
            seed = int(torch.randint(_SEEDS, (), device="cpu"))
        if not is_whole(seed) or not 0 <= seed < _SEEDS:
            raise ConfigError(
                f"seed {shown(seed)} is not possible: use a whole number from 0 and below 2**40"
            )
        first = int(seed) * _PLACES  # so that no two seeds share a text's numbers
        self._drawn = [torch.Generator("cpu").manual_seed(first + b) for b in range(batch)]

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose a token of each sequence.

        Args:
            logits: [batch, vocabulary].

        Returns:
            [batch] int64, where the logits lie.
        """
        if not self._drawn:
            return logits.argmax(-1)
        scores = logits.float()
        scores = scores - scores.amax(-1, keepdim=True)  # a small temperature overflows to -inf
        for warp in self._warpers:
            scores = warp(None, scores)  # looks at scores only, not at the text
        passed = scores.softmax(-1).double().cumsum(-1)
        real = torch.float64  # in which no number below 1 times a sum is that sum
        numbers = [torch.rand((1,), generator=one, dtype=real, device="cpu") for one in self._drawn]
        drawn = torch.stack(numbers).to(passed.device) * passed[:, -1:]
        # right: of equal sums the last, so never a token of probability 0
        chosen = torch.searchsorted(passed, drawn, right=True)[:, 0]
        is_bad = ~passed[:, -1].isfinite()
        self._is_bad = is_bad if self._is_bad is None else self._is_bad | is_bad
        return chosen.clamp(max=logits.shape[1] - 1)  # NaN has no place; check raises for it

    def check(self) -> None:
        """Raise NonFiniteError if a token was drawn from scores with NaN or +Inf."""
        if self._is_bad is not None and bool(self._is_bad.any()):
            texts = self._is_bad.nonzero()[:, 0].tolist()
            raise NonFiniteError(
                f"the model's logits for the sequences {texts} hold NaN or Inf, so no token can be "
                "drawn: run the model in bfloat16 or float32"
            )


def _number(name: str, value: float, most: float, how: str) -> float:
    """A number above 0, as a float.

    Raises:
        ConfigError: it is no number (True is none), not finite, not above 0, or over most.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 < value <= most or math.isinf(value):
        bounds = "above 0" if math.isinf(most) else f"above 0 and at most {most}"
        raise ConfigError(f"{name} {shown(value)} is not possible: use a number {bounds}, or {how}")
    return float(value)
