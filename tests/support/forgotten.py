"""Modules that a test imports anew: monkeypatch puts the old ones back afterwards."""

from __future__ import annotations

import sys

import pytest


def forget(monkeypatch: pytest.MonkeyPatch, *prefixes: str) -> None:
    """Take every module whose name begins so out of sys.modules and out of its package.

    import sets a module as an attribute of its package. If that attribute were not put back with
    sys.modules, later tests that patch "package.module.NAME" would patch the other module.
    """
    for name in [*sys.modules]:
        if name.startswith(prefixes):
            package, _, child = name.rpartition(".")
            if hasattr(sys.modules.get(package), child):
                monkeypatch.setattr(sys.modules[package], child, sys.modules[name])
            monkeypatch.delitem(sys.modules, name)
