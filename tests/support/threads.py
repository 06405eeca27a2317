"""Run a function in several threads at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Thread
from typing import Any


def run_in_threads(work: Callable[[Any], object], given: Iterable[Any]) -> None:
    """Call work(one) for each one given, each in a thread of its own; raises what one raised."""
    errors: list[BaseException] = []

    def run(one: Any) -> None:
        try:
            work(one)
        except BaseException as error:  # a thread's error would be lost
            errors.append(error)

    threads = [Thread(target=run, args=(one,), daemon=True) for one in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a thread does not end"
    if errors:
        raise errors[0]
