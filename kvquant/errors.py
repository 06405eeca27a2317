"""The exceptions that kvquant raises.

KVQuantError
├── ConfigError       (ValueError)           a format, a size or an option that does not exist
├── ShapeError        (ValueError)           tensors that do not fit one another, a format or cache
├── AccuracyError     (ValueError)           K rows of so few bits ruin the model's texts
├── NonFiniteError    (ValueError)           NaN, Inf or values beyond what the format can hold
├── CheckpointError   (ValueError)           a file that is damaged, foreign or of another model
├── UnsupportedError  (NotImplementedError)  what this version or this machine cannot do
│   └── UnsupportedModelError                a model that cannot decode from a KVCache
├── DeviceError       (RuntimeError)         tensors on the wrong device, or no backend for theirs
└── OutOfPagesError   (RuntimeError)         a paged cache has too few pages or sequence slots
"""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

DISTRIBUTION = "kvquant-cache"  # as pip knows it: kvquant on PyPI is another project
_INNER = {"kvquant", "numba", "torch", "contextlib"}  # packages in which no warning is of use


def shown(value: object, length: int = 80) -> str:
    """The first characters of a value's repr, for messages."""
    try:
        return repr(value)[:length]
    except Exception:  # such as Python's for integers of more than 4,300 digits
        return f"a value of type {type(value).__name__}"


def warn(message: str) -> None:
    """Warn of something at the line of whoever called kvquant, not inside of it or of numba."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _INNER:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def missing_extra(what: str, extra: str, error: ImportError) -> UnsupportedError:
    """An error that says how to install pyproject's `extra` for `what`."""
    checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    place = [f"{DISTRIBUTION}[{extra}]"]  # pip takes the version that is installed
    if os.path.isfile(os.path.join(checkout, "pyproject.toml")):
        place = ["-e", f"{checkout}[{extra}]"]
    command = shlex.join([sys.executable, "-m", "pip", "install", *place])
    return UnsupportedError(f"{what} ({error}): install the extra {extra!r}: {command}")


def refuse(kind: type[KVQuantError], problems: Iterable[str]) -> None:
    """Raise the first problem, if there is one; later ones may rest on what it says."""
    for problem in problems:
        raise kind(problem)


class KVQuantError(Exception):
    """Base of every error that kvquant raises on purpose."""


class ConfigError(KVQuantError, ValueError):
    """A format, a size or an option that does not exist."""


class ShapeError(KVQuantError, ValueError):
    """Tensors that do not fit one another, a format or the cache."""


class NonFiniteError(KVQuantError, ValueError):
    """NaN, Inf or values beyond what the format can hold."""


class AccuracyError(KVQuantError, ValueError):
    """K rows of so few bits ruin the model's texts. Nothing was changed: give a plan, or
    accept_loss=True."""


class CheckpointError(KVQuantError, ValueError):
    """A file that is damaged, foreign or of another model."""


class UnsupportedError(KVQuantError, NotImplementedError):
    """What this version or this machine cannot do."""


class UnsupportedModelError(UnsupportedError):
    """A model that cannot decode from a KVCache."""


class DeviceError(KVQuantError, RuntimeError):
    """Tensors on the wrong device, or no backend for theirs."""


class OutOfPagesError(KVQuantError, RuntimeError):
    """More pages or sequence slots are needed than can be taken; nothing was changed."""
