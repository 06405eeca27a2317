"""Memory that there is, and calls that would take more."""

from __future__ import annotations

import pytest
import torch

from kvquant.cache import memory
from kvquant.errors import ConfigError


def test_a_machine_has_memory() -> None:
    available = memory.available_memory()
    assert available is None or 0 < available < 2**50


def test_only_a_cpu_is_asked_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 30)
    memory.check_room(1 << 30, torch.device("cpu"), "a cache", "use less")
    memory.check_room(1 << 40, torch.device("cuda"), "a cache", "use less")
    for device, nbytes in (("cpu", (1 << 30) + 1), ("cuda", (1 << 62) + 1)):
        with pytest.raises(ConfigError, match=r"a cache takes .* GiB, more than there is: use le"):
            memory.check_room(nbytes, torch.device(device), "a cache", "use less")
    monkeypatch.setattr(memory, "available_memory", lambda: None)  # it cannot be told
    memory.check_room(1 << 40, torch.device("cpu"), "a cache", "use less")
