"""Python imports this first in every process that has what build.py packed.

numba-cuda 0.30.4 asks numpy for row_stack, which 2.5 no longer has. vLLM imports the packages of
grammars, for structured output, where nobody asks for any: they are modules here whose classes can
be named.
"""

from __future__ import annotations

import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import numpy

ABSENT = "xgrammar", "llguidance"
if not hasattr(numpy, "row_stack"):
    numpy.row_stack = numpy.vstack


class Absent(types.ModuleType):
    """A module that has any class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__module__": self.__name__})


class Finder(MetaPathFinder, Loader):
    """Finds such modules, after all other finders."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_absent = name.partition(".")[0] in ABSENT
        return ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        made = Absent(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(Finder())
