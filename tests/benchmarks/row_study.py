"""What studies of rows share: a model observed, and the KL of rows that no cache has.

Passages are read in one pass, whose later tokens read such rows. It is single_pass.py of
kvquant.calibration with any functions in place of a plan: each scored token attends to what they
make of the keys and values of all tokens up to itself, so none of these is in 16 bit.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import torch
from bench_recall import sheets

from kvquant.calibration.bases import candidates
from kvquant.calibration.basis_search import (
    BASE_FORMAT,
    CLIPS,
    WIDE_CLIPS,
    Weights,
    error_weights,
    stored_rows,
)
from kvquant.calibration.calibrate import observe
from kvquant.calibration.fidelity import divergence
from kvquant.calibration.moments import Moments
from kvquant.calibration.windows import Sizes, observed_windows, spread
from kvquant.cli.console import COUNT, FILE, NEW_FILE, SOURCE
from kvquant.hf.model import CachedModel
from kvquant.hf.single_pass import Passages as Pass
from kvquant.ops.quantize import dequantize_rows
from kvquant.rows.basis import Basis
from kvquant.rows.format import RowFormat
from kvquant.rows.quantize import EXACT_DTYPES

Place = tuple[int, str]  # layer, "k" or "v"
Reader = Callable[[torch.Tensor], torch.Tensor]  # rows [batch, heads, tokens, dim]: what is read


class Passages:
    """Passages of a text.

    Args:
        model: reads.
        windows: [passages, tokens], int64.
        context: first tokens of each, behind which all are scored.
        batch: passages at a time.
    """

    def __init__(
        self, model: CachedModel, windows: torch.Tensor, context: int, batch: int = 4
    ) -> None:
        self.model, self.context = model, context
        self.tokens = windows.numel() - len(windows) * context
        self.parts = windows.split(batch)
        exact = EXACT_DTYPES[model.exact_format]
        self._passes = [Pass(model.model, part, context, exact) for part in self.parts]
        self._expected = [self._predicted(part, {}) for part in self._passes]

    def kl(self, readers: Mapping[Place, Reader]) -> list[float]:
        """The KL of each passage, nats a token; sides without a reader stay in 16 bit."""
        found: list[float] = []
        for part, expected in zip(self._passes, self._expected, strict=True):
            found += divergence(expected, self._predicted(part, readers)).mean(1).tolist()
        return found

    def _predicted(self, part: Pass, readers: Mapping[Place, Reader]) -> torch.Tensor:
        def store(layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
            pair = ((layer, "k"), k), ((layer, "v"), v)
            return tuple(readers[at](x) if at in readers else x for at, x in pair)

        given: Any = store
        return part.predict(given).float().log_softmax(-1)


def compared(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Means of passages, how many times less ours is, and its standard error, passage by passage.

    Example:
        >>> compared([1.0, 2.0], [2.0, 4.0])
        {'kl': 1.5, 'of': 3.0, 'times_less': 2.0, 'error': 0.0}
    """
    mean, other = statistics.fmean(ours), statistics.fmean(theirs)
    ratio = other / mean
    rests = [b - ratio * a for a, b in zip(ours, theirs, strict=True)]
    error = statistics.stdev(rests) / math.sqrt(len(rests)) / mean if len(rests) > 1 else 0.0
    return {"kl": mean, "of": other, "times_less": ratio, "error": error}


@dataclass
class Subject:
    """A model, what was observed of it, and passages that were not.

    Attributes:
        name: of the model.
        model: reads.
        moments, weights: of the observed text.
        rows: [1, heads, tokens, dim] of each side, of a part of that text that moments did not see.
        observed: [windows, tokens], int64: what the moments saw.
        passages: of another text.
    """

    name: str
    model: CachedModel
    moments: Moments
    weights: Weights
    rows: dict[Place, torch.Tensor]
    observed: torch.Tensor
    passages: Passages


@dataclass(frozen=True)
class Amounts:
    """How much is read.

    Attributes:
        observed, length: tokens for the moments, in windows of so many.
        fitted: rows for choosing.
        passages, context, scored: passages, and tokens of each.
    """

    observed: int = 16384
    length: int = 2048
    fitted: int = 2048
    passages: int = 8
    context: int = 512
    scored: int = 256


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command's function the folder of a model, its texts and Amounts, as prepare takes
    them, and a file that keeps what it found."""
    for name, default in reversed(vars(Amounts()).items()):
        command = click.option(f"--{name}", type=COUNT, default=default, show_default=True)(command)
    command = click.option("--json", "json_file", type=NEW_FILE, help="Keep the figures.")(command)
    command = click.option("--held", type=FILE, help="To score.")(command)
    command = click.option("--text", type=FILE, help="To observe; sheets when None.")(command)
    return click.argument("folder", type=SOURCE)(command)


def study(
    folder: Path,
    text: Path | None,
    held: Path | None,
    json_file: Path | None,
    sizes: Mapping[str, int],
    measure: Callable[[Subject], Mapping[str, Any]],
) -> None:
    """Observe a model, measure it, say how long it took, and keep the figures."""
    start, amounts = time.monotonic(), Amounts(**sizes)
    subject = prepare(folder, text, held, amounts)
    found = measure(subject)
    click.echo(f"{time.monotonic() - start:.0f} s")
    keep(json_file, subject.name, {"amounts": vars(amounts), **found})


def keep(path: Path | None, model: str, figures: Mapping[str, Any]) -> None:
    """Put the figures of a model into a file, beside those of others."""
    if path is None:
        return
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    models = found.get("models", {}) | {model: figures}
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    whole = {"machine": {"date": date, "torch": torch.__version__}, "models": models}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def prepare(folder: Path, text: Path | None, held: Path | None, amounts: Amounts) -> Subject:
    """Observe a model.

    Args:
        folder: of the model.
        text, held: to observe and to score; sheets of facts of bench_recall.py where one is None.
        amounts: how much of them.
    """
    model = CachedModel.from_pretrained(folder, dtype=torch.float32)
    size = amounts.context + amounts.scored
    if text is None or held is None:
        both = sheets(model, size - 128, amounts.observed + amounts.passages * size)
        tokens, scored = both[: amounts.observed], both[amounts.observed :]
    else:
        tokens, scored = (model.encode(one.read_text(encoding="utf-8")) for one in (text, held))
    sizes = Sizes(observed=amounts.observed, length=amounts.length)
    observed, fitted = observed_windows(tokens, sizes, model.max_positions)
    moments = observe(model, observed, "", None)
    rows: dict[Place, torch.Tensor] = {}

    def take(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float
    ) -> None:
        for side, x in (("k", k), ("v", v)):
            rows[layer, side] = x[:1, :, : amounts.fitted].float()

    model.observe(fitted[:1], take)
    passages = Passages(model, spread(scored, amounts.passages, size), amounts.context)
    weights = error_weights(model, moments)
    return Subject(folder.name, model, moments, weights, rows, observed, passages)


def error_of(
    subject: Subject,
    place: Place,
    read: Reader,
    shares: torch.Tensor | None = None,
    rows: int | None = None,
) -> torch.Tensor:
    """[heads]: the weighted squared error of the rows for choosing.

    Args:
        subject, place: of which model and side.
        read: what is read of them.
        shares: [heads, tokens], what the error of each token counts; all alike when None.
        rows: how many to take; all when None.
    """
    layer, side = place
    x = subject.rows[place][:, :, :rows]
    error = (read(x) - x)[0]
    squares = ((error @ subject.weights[layer][side].float()) * error).sum(-1)
    return (squares if shares is None else squares * shares).sum(-1).double()


def reader(basis: Basis, fmt: RowFormat) -> Reader:
    """What is read of rows that are stored in a basis and a format."""
    return lambda x: basis.decode(dequantize_rows(stored_rows(x, basis, fmt), fmt))


def best_basis(
    subject: Subject,
    place: Place,
    options: Mapping[str, Basis],
    shares: torch.Tensor | None = None,
) -> str:
    """The name of the basis of least error, as basis_search.choose finds it."""
    fmt = RowFormat.parse(BASE_FORMAT, subject.rows[place].shape[-1])
    errors = {
        name: float(error_of(subject, place, reader(basis, fmt), shares).sum())
        for name, basis in options.items()
    }
    return min(errors, key=lambda name: errors[name])


def plan_basis(subject: Subject, place: Place) -> Basis:
    """The basis that calibrate chooses."""
    layer, side = place
    options = candidates(subject.moments.layers[layer], subject.weights[layer], side)
    return options[best_basis(subject, place, options)]


def clipped(
    subject: Subject,
    place: Place,
    basis: Basis,
    fmt: RowFormat,
    shares: torch.Tensor | None = None,
) -> Basis:
    """The basis with the clip ratio of least error for each head."""
    ratios = CLIPS.get(fmt.bits, WIDE_CLIPS)
    ones = torch.ones(len(basis.offset))
    errors = [
        error_of(subject, place, reader(basis.with_clip(ratio * ones), fmt), shares)
        for ratio in ratios
    ]
    return basis.with_clip(torch.tensor(ratios)[torch.stack(errors).argmin(0)])
