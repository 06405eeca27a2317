"""Hooks, which a newer engine may call with more arguments than kvquant knows.

A hook takes every argument, drops unknown ones that are neutral, and refuses the others. Neutral
are None and the default, of the same type, of the engine's own method; 0 and False, too, where that
default is False or missing.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from inspect import Parameter, signature
from types import FunctionType
from typing import Any, TypeVar, cast

from ..errors import UnsupportedError, shown

Called = TypeVar("Called", bound=Callable[..., Any])
# an engine's package: its name, the first version that was tried, and the one behind the last, as
# in pyproject.toml
ENGINES = {
    "vllm": ("vLLM", "0.32", "0.34"),
    "sglang": ("SGLang", "0.5.23", "0.5.24"),
    "lmcache": ("LMCache", "0.5.6", "0.6"),
}


def check_version(package: str) -> None:
    """Raise UnsupportedError unless the installed version of the engine was tried."""
    _, first, end = ENGINES[package]
    if not _numbers(first) <= _numbers(import_module(package).__version__) < _numbers(end):
        raise _refusal(package, f"was not tried: kvquant serves {first} to before {end}")


def hook(package: str, *more: str) -> Callable[[Called], Called]:
    """Make hooks of a function, or of those methods of a class that the engine's base classes have.

    Args:
        package: of the engine, a key of ENGINES.
        more: names of further methods that the engine calls.

    Raises:
        UnsupportedError: the installed engine passes other arguments by position than a method
            takes.
    """

    def decorate(called: Called) -> Called:
        if not isinstance(called, type):
            return cast(Called, _taking_more(package, called, None))
        for name, ours in [*vars(called).items()]:
            kind, theirs = type(ours), engine_method(called, name)
            if kind in (FunctionType, classmethod, staticmethod) and (theirs or name in more):
                made = _taking_more(package, getattr(ours, "__func__", ours), theirs)
                setattr(called, name, made if kind is FunctionType else kind(made))
        return called

    return decorate


def engine_method(cls: type, name: str) -> Any:
    """The engine's function that a method of kvquant's class overrides; None for none."""
    for base in cls.__mro__[1:-1]:  # the last one is object
        if name in vars(base) and not base.__module__.startswith("kvquant."):
            return getattr(vars(base)[name], "__func__", vars(base)[name])
    return None


def check_further(package: str, called: str, more: dict[Any, Any], given: Any = None) -> None:
    """Raise UnsupportedError unless arguments that kvquant does not know are neutral."""
    for name, value in more.items():
        default = given[name].default if given and name in given else Parameter.empty
        plain = isinstance(value, bool | int | float | str)  # "==" of a tensor is no bool
        same = value is default or (plain and type(value) is type(default) and value == default)
        off = plain and value == 0 and (default is False or default is Parameter.empty)
        if not (value is None or same or off):  # with default None, 0 may be an index
            raise _refusal(
                package,
                f"calls {called} with {name}={shown(value)}, which kvquant does not serve: turn "
                "off what asks for it, or serve without kvquant",
            )


def _taking_more(package: str, ours: Any, theirs: Any) -> Any:
    """A function of kvquant that takes more arguments, in place of the engine's."""
    known = signature(ours).parameters
    if any(one.kind == Parameter.VAR_KEYWORD for one in known.values()):
        return ours  # hands all on to the engine's own method, or refuses every call
    given = signature(theirs).parameters if theirs else {}
    places, names = _places(known), _places(given)
    takes, gives = (one[one[:1] in (["self"], ["cls"]) :] for one in (places, names))
    needed = [name for name in takes[len(gives) :] if known[name].default is Parameter.empty]
    if theirs and (needed or gives[: len(takes)] != takes[: len(gives)]):
        raise _refusal(package, f"gives {ours.__qualname__} {gives}, and kvquant takes {takes}")
    gives += [f"argument {place}" for place in range(len(gives) + 1, 99)]

    @wraps(ours)
    def call(*args: Any, **named: Any) -> Any:
        if len(args) > len(places) or not named.keys() <= known.keys():
            more = dict(zip(gives[len(takes) :], args[len(places) :], strict=False))
            more |= {name: named.pop(name) for name in [*named] if name not in known}
            check_further(package, ours.__qualname__, more, given)
        return ours(*args[: len(places)], **named)

    return call


def _places(parameters: Mapping[str, Parameter]) -> list[str]:
    last = Parameter.POSITIONAL_OR_KEYWORD
    return [name for name, one in parameters.items() if one.kind <= last]


def _numbers(version: str) -> list[int]:
    """The numbers of "0.33.1.dev3+cpu", [0, 33, 1]; none of "dev"."""
    return [int(one) for one in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])]


def _refusal(package: str, why: str) -> UnsupportedError:
    name, first, end = ENGINES[package]
    command = [sys.executable, "-m", "pip", "install", f"{package}>={first},<{end}"]
    return UnsupportedError(
        f"{name} {import_module(package).__version__} {why}. To install a version that was tried: "
        f"{shlex.join(command)}"
    )
