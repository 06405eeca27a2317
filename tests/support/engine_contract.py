"""How an engine calls kvquant's hooks: by its base classes, and by its own sources."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from kvquant.engine.hooks import engine_method

BY_PLACE = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
OTHERS = "__init__", "forward", "build"  # names that much else has: called of these objects only
OBJECTS = re.compile(r"(impl|builder|attn_backend)$")


class Hook(NamedTuple):
    """A method that an engine calls.

    Attributes:
        name: of the class and of the method.
        ours: the function.
        theirs: the engine's, which it stands for; None for none.
    """

    name: str
    ours: Any
    theirs: Any

    @property
    def takes(self) -> list[str]:
        """Arguments by position, without self."""
        return _by_place(self.ours)

    @property
    def takes_all(self) -> bool:
        kinds = {one.kind for one in inspect.signature(self.ours).parameters.values()}
        return inspect.Parameter.VAR_KEYWORD in kinds

    def further(self) -> set[str]:
        """Parameters of the engine's method that ours lacks."""
        if self.takes_all or self.theirs is None:
            return set()
        return {*_named(self.theirs)} - {*_named(self.ours)}


def _named(function: Any) -> list[str]:
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    found = inspect.signature(function).parameters.items()
    return [name for name, one in found if one.kind not in kinds and name not in ("self", "cls")]


def _by_place(function: Any) -> list[str]:
    found = inspect.signature(function).parameters
    return [name for name in _named(function) if found[name].kind in BY_PLACE]


def hooks_of(package: str, *modules: ModuleType, more: tuple[str, ...] = ()) -> list[Hook]:
    """The methods of kvquant's classes that an engine calls.

    Args:
        package: of the engine.
        modules: of kvquant.
        more: names of methods that the engine's base classes lack.
    """
    found = []
    for module in modules:
        for cls in vars(module).values():
            if not isinstance(cls, type) or cls.__module__ != module.__name__ or is_dataclass(cls):
                continue
            for name, value in vars(cls).items():
                theirs = engine_method(cls, name)
                of = str(getattr(theirs, "__module__", "")).partition(".")[0]
                if isinstance(value, FunctionType | classmethod | staticmethod) and (
                    of == package or name in more
                ):
                    ours = getattr(value, "__func__", value)
                    found.append(Hook(f"{cls.__name__}.{name}", ours, theirs))
    return found


class Call(NamedTuple):
    """A call in an engine's sources.

    Attributes:
        place: file and line.
        name: of the method.
        places: arguments by position, how many.
        named: names of the others.
    """

    place: str
    name: str
    places: int
    named: frozenset[str]


def calls_of(package: str, names: set[str], folders: tuple[str, ...] = ("",)) -> Iterator[Call]:
    """The calls of methods with these names, where all arguments are written out.

    Args:
        package: of the engine; it is not imported.
        names: of methods.
        folders: of the package, that are read.
    """
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    wanted = re.compile("|".join(rf"\.{name}\(" for name in sorted(names)))
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not wanted.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            of, name = ast.unparse(node.func.value), node.func.attr
            if name not in names or of.startswith("super("):
                continue
            if name in OTHERS and not OBJECTS.search(of):
                continue
            named = [one.arg for one in node.keywords]
            if any(isinstance(one, ast.Starred) for one in node.args) or None in named:
                continue
            place = f"{path.relative_to(root)}:{node.lineno}"
            yield Call(place, name, len(node.args), frozenset(filter(None, named)))


def fits(call: Call, hook: Hook, neutral: tuple[str, ...]) -> bool:
    """Whether a hook serves a call.

    Args:
        call: of the engine.
        hook: of the same name.
        neutral: further arguments that the engine gives a neutral value, unless it is asked for
            what kvquant does not serve.
    """
    places = [*hook.takes, *neutral]
    needed = {
        name
        for name, one in inspect.signature(hook.ours).parameters.items()
        if one.default is inspect.Parameter.empty and name in _named(hook.ours)
    }
    given = {*places[: call.places], *call.named}
    return hook.takes_all or (
        call.places <= len(places)
        and call.named <= {*_named(hook.ours), *neutral}
        and needed <= given
    )
