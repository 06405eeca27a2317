"""The whole of calibration: observe one part of a text, measure fidelity on a held part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvquant.errors import ConfigError
from kvquant.layout import BITS, EXACT_CODECS, GROUPS, RowFormat

from .collect import ObservableModel, Statistics, collect
from .fidelity import SCHEMES, DecodingModel, Fidelity, Scheme, measure

HELD_SHARE = 4  # the last quarter of a text is held for scoring
OBSERVED_FORMATS = tuple(
    str(RowFormat(codec, groups, 128))
    for codec in BITS
    for groups in ((1,) if codec in EXACT_CODECS else GROUPS)
)


class CalibratedModel(ObservableModel, DecodingModel, Protocol):
    """A model that can be observed and that decodes; kvquant.model.CachedModel is one."""


@dataclass(frozen=True)
class Sizes:
    """How much text to read.

    Attributes:
        observed: tokens for the statistics, at most; in windows of context tokens.
        windows: passages that are scored, as one batch.
        context: tokens of a passage's prompt.
        scored: tokens of a passage that are decoded and compared.
    """

    observed: int = 32768
    windows: int = 8
    context: int = 1024
    scored: int = 64

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < 1:
                raise ConfigError(f"{name} {size} is not possible: use 1 or more")


def calibrate(
    model: CalibratedModel,
    tokens: Sequence[int],
    held: Sequence[int] | None = None,
    *,
    sizes: Sizes | None = None,
    schemes: Sequence[Scheme] = SCHEMES,
    progress: Callable[[str, int], None] | None = None,
) -> tuple[Statistics, list[Fidelity]]:
    """Observe keys and values, and measure what every scheme keeps of the predictions.

    Args:
        model: reads and decodes.
        tokens: the text.
        held: the text to score on, not observed; the last quarter of tokens when None.
        sizes: how much to read; Sizes() when None.
        schemes: caches to compare.
        progress: called with "observe" or "score" and the share done since, in hundredths of it.

    Returns:
        The statistics, and one Fidelity per scheme.

    Raises:
        ConfigError: a text is too short for the sizes.
    """
    sizes = sizes or Sizes()
    if held is None:
        cut = len(tokens) - len(tokens) // HELD_SHARE
        tokens, held = tokens[:cut], tokens[cut:]
    length = sizes.context + sizes.scored + 1
    scored = spread(held, sizes.windows, length)
    observed = spread(
        tokens, max(1, min(sizes.observed, len(tokens)) // sizes.context), sizes.context
    )

    def report(stage: str, total: int) -> Callable[[int], None]:
        done = 0

        def step(amount: int) -> None:
            nonlocal done
            before, done = done, done + amount
            if progress:
                progress(stage, 100 * done // total - 100 * before // total)

        return step

    statistics = collect(
        model, observed, OBSERVED_FORMATS, progress=report("observe", observed.numel())
    )
    found = measure(
        model, scored, sizes.context, schemes, progress=report("score", len(schemes) + 1)
    )
    return statistics, found


def spread(tokens: Sequence[int], count: int, length: int) -> torch.Tensor:
    """Take windows from a text, evenly spaced and not overlapping.

    Returns:
        [count, length], int64.

    Raises:
        ConfigError: the text is too short.
    """
    if len(tokens) < count * length:
        raise ConfigError(
            f"{len(tokens)} tokens are too few for {count} windows of {length}: give a longer "
            "text, or fewer or shorter windows"
        )
    all_tokens = torch.as_tensor(tokens, dtype=torch.int64)
    stride = (len(tokens) - length) // max(count - 1, 1)
    starts = torch.arange(count) * stride
    return all_tokens[starts[:, None] + torch.arange(length)]
