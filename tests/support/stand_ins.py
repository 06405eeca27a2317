"""Modules that stand in for packages which are not installed. Engines import these packages for
features that nobody asks for. A sitecustomize.py, which Python imports first in every process,
names the packages."""

from __future__ import annotations

import importlib.util
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


class StandIn(types.ModuleType):
    """A module that has a class of any name, which takes no arguments."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        pydantic = classmethod(lambda *_: {"type": "any"})  # models of requests have such fields
        members = {"__get_pydantic_core_schema__": pydantic}
        return type(name, (), {"__module__": self.__name__, **members})


class Finder(MetaPathFinder, Loader):
    """Finds packages of these names and all their modules, after all other finders. To
    importlib.util.find_spec it says that they are not installed."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self.names:
            return None
        asker = sys._getframe()
        while asker.f_back is not None:
            asker = asker.f_back
            if asker.f_code is importlib.util.find_spec.__code__:
                return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""


def stand_in_for(*names: str) -> None:
    """Let these packages be importable where they are not installed."""
    sys.meta_path.append(Finder(names))


def restore_row_stack() -> None:
    """Give numpy 2.5 the function that numba-cuda 0.30.4 still asks it for."""
    import numpy

    if not hasattr(numpy, "row_stack"):
        numpy.row_stack = numpy.vstack
