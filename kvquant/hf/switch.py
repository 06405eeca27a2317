"""Run a model with another attention implementation during a call.

Afterwards the user's model attends, and trains, as before. Threads that want the same
implementation run side by side; a thread that wants another waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..errors import ConfigError, UnsupportedModelError

# what to do where "kvquant" cannot attend
DEQUANTIZE = (
    "QuantizedCache(model, dequantize=True) serves such a model by 16-bit copies of its packed "
    "rows, of one layer at a time"
)


def plain_implementation(model: Any) -> str:
    """transformers' exact attention for a model: "sdpa", or "eager" for soft caps and sink
    logits."""
    config = model.config.get_text_config(decoder=True)
    # before transformers 5.21 models with caps asked for SDPA, which leaves them out
    has_caps = getattr(config, "attn_logit_softcapping", None) is not None
    return "sdpa" if getattr(model, "_supports_sdpa", True) and not has_caps else "eager"


@contextmanager
def attending(model: Any, implementation: str) -> Iterator[None]:
    """Let a model attend by an implementation inside the block, in evaluation mode.

    Raises:
        UnsupportedModelError: the model does not attend through transformers' interface.
        ConfigError: the block is inside one of another implementation.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    with _making:
        if model not in _switches:
            _switches[model] = _Switch(model)
        switch = _switches[model]
    switch.enter(model, implementation)
    try:
        yield
    finally:
        switch.leave()


def linears(model: Any) -> list[torch.nn.Linear]:
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


@contextmanager
def hooked(hooks: Iterable[Any]) -> Iterator[None]:
    """Keep these hooks on modules inside the block."""
    with ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.remove)
        yield


class _Switch:
    """The attention implementation of one model, while someone is inside."""

    def __init__(self, model: Any) -> None:
        found = {}  # the model itself is not kept, it may go
        todo = [module.config for module in model.modules() if hasattr(module, "config")]
        while todo:
            config = todo.pop()
            if id(config) not in found and hasattr(config, "_attn_implementation"):
                found[id(config)] = config
                todo += [getattr(config, name, None) for name in config.sub_configs]
        self._configs = list(found.values())
        self._named: dict[str, list[Any]] = {}  # the configs that name an implementation, once set
        self._inside: list[int] = []  # threads
        self._implementation = ""
        self._before: list[tuple[Any, Any]] = []
        self._training: list[Any] = []
        self._changed = threading.Condition()

    def enter(self, model: Any, implementation: str) -> None:
        """Set the implementation, unless it is set."""
        thread = threading.get_ident()
        with self._changed:
            if thread in self._inside and implementation != self._implementation:
                raise ConfigError(
                    f"the model runs with attention {self._implementation!r} around this call, "
                    f"which needs {implementation!r}: call it after that one"
                )
            self._changed.wait_for(
                lambda: not self._inside or implementation == self._implementation
            )
            if not self._inside:
                self._set(model, implementation)
            self._inside.append(thread)

    def leave(self) -> None:
        """Set everything back when the last one leaves."""
        with self._changed:
            self._inside.remove(threading.get_ident())
            if not self._inside:
                self._restore()
                self._changed.notify_all()

    def _set(self, model: Any, implementation: str) -> None:
        self._before = [(config, config._attn_implementation) for config in self._configs]
        if model.training:
            self._training = [module for module in model.modules() if module.training]
            model.eval()
        try:
            if implementation not in self._named:
                self._named[implementation] = self._name(model, implementation)
            for config in self._named[implementation]:
                config._attn_implementation_internal = implementation
        except BaseException:
            self._restore()
            raise
        self._implementation = implementation

    def _name(self, model: Any, implementation: str) -> list[Any]:
        """The configs in which transformers names the implementation; it looks at every module."""
        try:
            model.set_attn_implementation(implementation)
        except (AttributeError, ValueError) as error:
            told = str(error).partition("\n")[0]
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot attend by {implementation!r}: {told}"
            ) from error
        if model.config._attn_implementation != implementation:
            raise UnsupportedModelError(
                f"{type(model).__name__} computes attention by itself, not through transformers' "
                f"attention interface, so no KVCache attends for it: {DEQUANTIZE}"
            )
        return [one for one in self._configs if one._attn_implementation == implementation]

    def _restore(self) -> None:
        for config, implementation in self._before:
            config._attn_implementation_internal = implementation
        for module in self._training:
            module.training = True
        self._training = []


_switches: WeakKeyDictionary[Any, _Switch] = WeakKeyDictionary()
_making = threading.Lock()
