"""What the commands share on a terminal: kinds of options, early checks, progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from .errors import ConfigError, KVQuantError

MAX = 2**31 - 1  # lengths are int32
COUNT = click.IntRange(min=1, max=MAX)
WHOLE = click.IntRange(min=0, max=MAX)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)


@contextmanager
def progress(length: int, label: str) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr where that is a terminal; gives its update(amount, stage)."""
    if not sys.stderr.isatty():
        yield lambda amount, stage=None: None
        return
    with click.progressbar(
        length=length, label=label, file=sys.stderr, item_show_func=lambda stage: stage or ""
    ) as bar:
        yield bar.update


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn torch's errors about sizes that cannot be had into one that says what to do."""
    words = ("can't allocate", "out of memory", "not enough memory", "overflow")
    try:
        yield
    except KVQuantError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(word in str(error) for word in words):
            raise
        raise ConfigError(
            "these sizes take more memory than there is: use a smaller --seq-len or --batch"
        ) from None


def check_output(path: Path | None, *inputs: Path | None) -> None:
    """Raise before a long run whose result could not be written, or would replace an input."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path} cannot be written: {path.parent} is not a folder")
    if any(given and given.resolve() == path.resolve() for given in inputs):
        raise ConfigError(f"{path} is read: give another name to write to")


def read_text(path: Path) -> str:
    """The text of a UTF-8 file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from None


def warn_of_length(max_positions: int | None, what: str, length: int) -> None:
    """Say on stderr if a text is longer than a model was made for."""
    if max_positions is not None and length > max_positions:
        click.echo(
            f"Warning: {what} has {length} tokens, the model was made for {max_positions}", err=True
        )
