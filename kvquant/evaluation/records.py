"""What a run has measured so far, kept on the disk: an interrupted run goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvquant.io.atomic import save_text


class Records:
    """Results by the name of the work that gave them.

    Args:
        path: of the file; nothing is kept when None.
        settings: of the run, plain data. What another run with other settings left is not used.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path, self._settings = path, json.loads(json.dumps(settings))
        self._found: dict[str, Any] = {}
        if path is not None and path.exists():
            try:
                kept = json.loads(path.read_text(encoding="utf-8"))
                if kept["settings"] == self._settings:
                    self._found = dict(kept["found"])
            except (ValueError, KeyError, TypeError):
                pass  # of a run that another version began: measured again

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """The result of this name: measured, unless an earlier run did."""
        if name not in self._found:
            self._found[name] = json.loads(json.dumps(measure()))
            if self._path is not None:
                kept = {"settings": self._settings, "found": self._found}
                save_text(self._path, json.dumps(kept))
        return self._found[name]
