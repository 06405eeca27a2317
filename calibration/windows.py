"""Which tokens calibration reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from kvquant.cache.checks import Counts, whole_numbers
from kvquant.errors import ConfigError
from kvquant.rows.arguments import check_size

Text: TypeAlias = Counts  # the ids of its tokens

LEAST_OBSERVED, LEAST_SCORED, LEAST_PASSAGES = 4096, 256, 4  # tokens, tokens and passages
TEXTS = Path(__file__).with_name("texts")  # encyclopedia, code and dialogue: see SOURCES.txt
GOLDEN = (5**0.5 - 1) / 2  # multiples of it, modulo 1, are spread evenly, however many there are
FIT_SHARE = 8  # of the observed windows, one in so many is kept for choosing


@dataclass(frozen=True)
class Sizes:
    """How much text to read.

    Attributes:
        observed: tokens for the statistics, at most.
        length: tokens of a window of them, at most.
        windows: passages that are scored, as one batch.
        context: tokens of a passage's prompt.
        scored: tokens of a passage that are decoded and compared.
    """

    observed: int = 8192
    length: int = 1024
    windows: int = 8
    context: int = 1024
    scored: int = 64

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            check_size(name, size, at_least=1)


def packaged_texts() -> tuple[str, str]:
    """The packaged texts to observe and to score."""
    observed, held = (
        (TEXTS / f"{name}.txt").read_text(encoding="utf-8") for name in ("observed", "held")
    )
    return observed, held


def too_little(observed: int, sizes: Sizes, *, is_scored: bool) -> str:
    """A sentence if there is too little text for a good plan or for a verdict; else ""."""
    found = []
    if observed < LEAST_OBSERVED:
        found.append(f"{observed} tokens are observed, a good plan needs {LEAST_OBSERVED}")
    scored = sizes.windows * sizes.scored
    if is_scored and (scored < LEAST_SCORED or sizes.windows < LEAST_PASSAGES):
        found.append(
            f"{scored} tokens of {sizes.windows} passages are scored, a verdict needs "
            f"{LEAST_SCORED} of {LEAST_PASSAGES}"
        )
    return "; ".join(found)


def token_ids(name: str, tokens: Text) -> torch.Tensor:
    """A text's tokens as int64 on the CPU; ConfigError for other numbers or several texts."""
    if not isinstance(tokens, (torch.Tensor, np.ndarray, Sequence)) or isinstance(tokens, str):
        raise ConfigError(f"{name} is of type {type(tokens).__name__}: give the ids of a text")
    ids = whole_numbers(name, tokens)
    if ids.ndim != 1:
        raise ConfigError(f"{name} is {list(ids.shape)}: give the ids of one text, [tokens]")
    return ids


def observed_windows(
    tokens: Text, sizes: Sizes, max_positions: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows for the moments, and those for choosing; the same one if there is only one."""
    length = min(sizes.length, sizes.observed, max(len(tokens) // 2, 1))
    length = min(length, max_positions or length)
    count = max(min(sizes.observed, len(tokens)) // length, 1)
    windows = spread(tokens, count, length)
    if count == 1:
        return windows, windows
    is_calibrated = torch.arange(count, device="cpu") % FIT_SHARE == 1
    return windows[~is_calibrated], windows[is_calibrated]


def spread(tokens: Text, count: int, length: int) -> torch.Tensor:
    """Windows [count, length], int64, evenly spaced, apart; ConfigError for a short text."""
    if len(tokens) < count * length:
        most = len(tokens) // length
        raise ConfigError(
            f"{len(tokens)} tokens are too few for {count} windows of {length}: give a longer text "
            "or shorter windows (--context, --scored)"
            + (f", or {most} of them (--windows {most})" if most else "")
        )
    all_tokens = torch.as_tensor(tokens, dtype=torch.int64, device="cpu")
    stride = (len(tokens) - length) // max(count - 1, 1)
    starts = torch.arange(count, device="cpu") * stride
    return all_tokens[starts[:, None] + torch.arange(length, device="cpu")]


def begin_of(number: int) -> float:
    """Where a window begins, as a share of the model's positions: 0 for the first, then spread.

    RoPE turns a key by its position: a plan of the first positions alone loses more in long
    contexts.
    """
    return number * GOLDEN % 1


def random_tokens(config: Mapping[str, Any], count: int) -> list[int]:
    """The same random tokens of a config's vocabulary each time."""
    generator = torch.Generator().manual_seed(0)
    config = config.get("text_config") or config
    most = int(config["vocab_size"])
    drawn = torch.randint(most, (count,), generator=generator, device="cpu")
    return [int(token) for token in drawn]
