"""The results of a run so far, kept in a file: an interrupted run continues from there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kvquant.io.atomic import save_text


class Records:
    """Results and their times, by name.

    The first word of a name is its task; the other words name the part of the task.

    Args:
        path: of the file; None for memory alone.
        settings: of the run, plain data. Records of other settings are overwritten.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path, self._settings = path, json.loads(json.dumps(settings))
        self._measured: dict[str, dict[str, list[Any]]] = {}
        if path is not None and path.exists():
            try:
                kept = json.loads(path.read_text(encoding="utf-8"))
                if kept["settings"] == self._settings:
                    self._measured = dict(kept["measured"])
            except (ValueError, KeyError, TypeError):
                pass  # a file of another version: everything is measured again

    def get(self, name: str, measure: Callable[[], Iterable[Any]]) -> list[Any]:
        """The results of this name, one for each cache; measure makes missing ones."""
        if name not in self._measured:
            results, seconds = [], []
            start = time.perf_counter()
            for one in measure():
                end = time.perf_counter()
                results.append(one)
                seconds.append(end - start)
                start = end
            found = {"results": results, "seconds": seconds}
            self._measured[name] = json.loads(json.dumps(found))
            if self._path is not None:
                kept = {"settings": self._settings, "measured": self._measured}
                save_text(self._path, json.dumps(kept))
        return self._measured[name]["results"]

    def seconds(self) -> dict[str, list[float]]:
        """The seconds that each task took with each cache."""
        found: dict[str, list[float]] = {}
        for name, one in self._measured.items():
            task = name.split()[0]
            pairs = zip_longest(found.get(task, []), one["seconds"], fillvalue=0.0)
            found[task] = [sum(pair) for pair in pairs]  # trials have the 16-bit cache alone
        return found
