"""What the fidelity benchmark has measured: a file that another run goes on from, and its table."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

from kvquant.errors import ConfigError
from kvquant.io.atomic import save_text
from kvquant.text import Column, render_table

COLUMNS = (
    Column("cache", left=True),
    *map(Column, ("bits", "KL nats/token", "+-", "top-1 %", "perplexity")),
)
Figures = dict[str, float]  # "bits", "kl", "top1" and "nll" of one passage


class Record:
    """What was measured, in memory and in a file.

    Args:
        path: the file; none when None. What it holds is taken over.
        settings: what figures depend on, but for the model, the context and the cache.

    Raises:
        ConfigError: the file is of other settings, or no file of this program.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self.path = path
        self.data: dict[str, Any] = {"settings": settings, "caches": {}, "plans": {}}
        self.failed: dict[str, dict[str, str]] = {}  # tried again the next time
        if path is None or not path.exists():
            return
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
            same = old["settings"] == settings
            self.data |= {key: dict(old[key]) for key in ("caches", "plans")}
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path} is not a file of this program: give another name") from None
        if not same:
            raise ConfigError(
                f"{path} was measured with other settings, {old['settings']}, not {settings}: "
                "give another name, or the same options"
            )

    def parts(self, run: str, cache: str) -> list[Figures]:
        """The figures of each passage that is done."""
        parts: list[Figures] = self.data["caches"].get(run, {}).get(cache, [])
        return parts

    def check_plan(self, run: str, cache: str, digest: str) -> None:
        """Forget the figures of a cache if they are those of another plan of its name."""
        if self.data["plans"].setdefault(run, {}).setdefault(cache, digest) != digest:
            self.data["plans"][run][cache] = digest
            self.data["caches"][run].pop(cache, None)

    def add(self, run: str, cache: str, figures: list[Figures] | str) -> None:
        """Take in the figures of the next passages, or why there are none."""
        if isinstance(figures, str):
            self.failed.setdefault(run, {})[cache] = figures
        else:
            self.data["caches"].setdefault(run, {}).setdefault(cache, []).extend(figures)
        if self.path:
            save_text(self.path, json.dumps(self.data, indent=1) + "\n")

    def table(self, run: str) -> str:
        """The means of a run, and below them what could not run and why."""
        rows = [_row(cache, parts) for cache, parts in self.data["caches"][run].items()]
        lines = [render_table(COLUMNS, rows)]
        for cache, reason in self.failed.get(run, {}).items():
            lines.append(f"{cache}: cannot run here ({reason})")
        return "\n".join(lines)


def _row(cache: str, parts: list[Figures]) -> list[str]:
    mean = {key: statistics.fmean(part[key] for part in parts) for key in parts[0]}
    error = "-"
    if len(parts) > 1:
        deviation = statistics.stdev(part["kl"] for part in parts)
        error = f"{deviation / math.sqrt(len(parts)):.5f}"
    return [
        cache,
        f"{mean['bits']:.2f}",
        f"{mean['kl']:.5f}",
        error,
        f"{100 * mean['top1']:.2f}",
        f"{math.exp(mean['nll']):.3f}",
    ]
