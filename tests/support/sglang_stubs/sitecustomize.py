"""torchvision's names for SGLang, which imports them and needs none of them for text.

Builds of torchvision on PyPI do not load beside torch's CPU build. Python imports this file at its
start, where PYTHONPATH names the folder. Who asks whether torchvision is there gets no for an
answer: transformers would use it.
"""

import importlib.util
import sys
import types
from collections.abc import MutableSequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec


class Stub(types.ModuleType):
    """A module of any classes."""

    __path__: MutableSequence[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Stubs(MetaPathFinder, Loader):
    """Finds torchvision, for imports."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        asker = sys._getframe()
        while asker.f_back is not None:
            asker = asker.f_back
            if asker.f_code is importlib.util.find_spec.__code__:
                return None
        is_named = name.split(".")[0] == "torchvision"
        return ModuleSpec(name, self, is_package=True) if is_named else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""


sys.meta_path.append(Stubs())
