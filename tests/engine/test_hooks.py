"""Hooks: arguments that a newer engine adds, and versions of engines."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from inspect import Parameter
from types import ModuleType
from typing import Any

import pytest
import torch

from kvquant import UnsupportedError
from kvquant.engine import hooks
from kvquant.engine.hooks import check_version, hook


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An engine of version 2.1, where 2 to before 3 were tried."""
    module = ModuleType("made_up_engine")
    vars(module)["__version__"] = "2.1"
    monkeypatch.setitem(sys.modules, "made_up_engine", module)
    monkeypatch.setitem(hooks.ENGINES, "made_up_engine", ("Engine", "2", "3"))
    return module


class Base:
    """The engine's."""

    def update(self, key: object, value: object, skip: bool = False, causal: bool = True) -> object:
        raise NotImplementedError

    @classmethod
    def kind(cls, spec: object, name: str = "auto") -> object:
        raise NotImplementedError

    @staticmethod
    def size(spec: object = None, least: int = 16) -> object:
        raise NotImplementedError


@hook("made_up_engine", "extra")
class Ours(Base):
    """Methods that the engine calls, and one that it does not."""

    def update(self, key: object, value: object) -> object:  # type: ignore[override]
        return key, value

    @classmethod
    def kind(cls, spec: object) -> object:  # type: ignore[override]
        return cls, spec

    @staticmethod
    def size(spec: object = None) -> object:  # type: ignore[override]
        return spec

    def extra(self) -> object:
        return "extra"

    def own(self) -> object:
        return "own"


OURS: Any = Ours()


def test_neutral_arguments_pass_and_others_raise() -> None:
    assert OURS.update(1, value=2) == (1, 2)
    for more in ((), (False,), (None,), (0, True), (False, None)):
        assert OURS.update(1, 2, *more) == (1, 2)
    neutral: tuple[dict[str, Any], ...] = (
        {"skip": False},
        {"causal": True},
        {"new": None},
        {"new": 0, "skip": None},
    )
    for named in neutral:
        assert OURS.update(1, 2, **named) == (1, 2)
    assert OURS.update(1, 2, False, True, None, False) == (1, 2)  # the last ones not even declared
    refused: list[tuple[tuple[bool | int, ...], dict[str, Any], str]] = [
        ((True,), {}, "skip=True"),
        ((False, False), {}, "causal=False"),
        ((), {"causal": 0}, "causal=0"),
        ((False, True, 7), {}, "argument 5=7"),
        ((), {"new": torch.zeros(2)}, "new=tensor"),
        ((), {"new": ""}, "new=''"),
    ]
    for given, named, words in refused:
        told = f"Engine 2.1 calls Ours.update with {words}"
        with pytest.raises(UnsupportedError, match=told) as caught:
            OURS.update(1, 2, *given, **named)
        assert "pip install 'made_up_engine>=2,<3'" in str(caught.value)


def test_every_kind_of_method_is_a_hook() -> None:
    assert OURS.kind(3, "auto") == (Ours, 3) and Ours.kind(3, name=None) == (Ours, 3)  # type: ignore[call-arg]
    assert OURS.size(3, 16) == 3 and OURS.size(None, least=16) is None
    assert OURS.extra(None, new=False) == "extra"
    with pytest.raises(UnsupportedError, match=r"Ours\.kind with name='other'"):
        OURS.kind(3, "other")
    with pytest.raises(UnsupportedError, match=r"Ours\.size with least=0"):
        OURS.size(3, 0)
    with pytest.raises(TypeError):
        OURS.own(None)
    with pytest.raises(TypeError):
        OURS.update(1)


@pytest.mark.parametrize(
    ("default", "value"), [(None, 0), (None, False), (True, 1), (True, False), (1.0, True), (1, 0)]
)
def test_a_value_of_another_type_or_an_index_is_not_neutral(default: Any, value: Any) -> None:
    given = {"layer": Parameter("layer", Parameter.KEYWORD_ONLY, default=default)}
    hooks.check_further("made_up_engine", "update", {"layer": default}, given)
    hooks.check_further("made_up_engine", "update", {"layer": None}, given)
    with pytest.raises(UnsupportedError, match=f"layer={value}"):
        hooks.check_further("made_up_engine", "update", {"layer": value}, given)


def test_functions_are_hooks() -> None:
    called: Any = hook("made_up_engine")(lambda given, *, kind="a": (given, kind))
    assert called(1, None, kind="b", new=False) == (1, "b")
    with pytest.raises(UnsupportedError, match="with new=1"):
        called(1, new=1)


def test_what_takes_all_hands_all_on() -> None:
    @hook("made_up_engine")
    class Handing(Base):
        def update(self, *args: Any, **named: Any) -> object:
            return args, named

    assert Handing().update(1, 2, True) == ((1, 2, True), {})


def test_other_arguments_by_position_are_refused_when_classes_are_made() -> None:
    def made(update: Any) -> Any:
        return hook("made_up_engine")(type("Made", (Base,), {"update": update}))

    made(lambda self, key, value, skip=False: None)
    made(lambda self, key, value, skip=False, causal=True, new=None: None)
    for update in (
        lambda self, value, key: None,
        lambda self, key, place, value: None,
        lambda self, key, value, skip, causal, new: None,
    ):
        with pytest.raises(UnsupportedError, match=r"Engine 2\.1 gives .* and kvquant takes"):
            made(update)


@pytest.mark.parametrize(
    "version", ["2", "2.0.0rc1", "2.9.dev3+cpu", "1.99", "3", "3.0.0", "dev", ""]
)
def test_versions_that_were_tried(version: str, engine: ModuleType) -> None:
    vars(engine)["__version__"] = version
    told = r"was not tried: kvquant serves 2 to before 3\. To"
    refused = pytest.raises(UnsupportedError, match=told)
    with nullcontext() if version.startswith("2") else refused:
        check_version("made_up_engine")
