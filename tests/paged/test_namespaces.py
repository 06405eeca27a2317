"""Equal token ids in two namespaces, as under two adapters: each finds its own rows (20 s)."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import latent_pages
import pytest
import torch
from invariants import check_invariants
from paged_cases import SINKS, extend, make, same

from kvquant import LatentPagedBatch
from kvquant.paged.batch import PagedBatch

PROMPT, WINDOWS = list(range(60)), {"windows": [None, 20]}
SIZES: dict[str, Any] = {"num_pages": 24, "max_num_seqs": 6}
Batch = PagedBatch | LatentPagedBatch


def of_heads(**options: Any) -> PagedBatch:
    return PagedBatch(make(**SIZES, **options), 6, 300, shared_prefix=True)


def of_latents(**options: Any) -> LatentPagedBatch:
    return LatentPagedBatch(latent_pages.make(**SIZES, **options), 6, 300, shared_prefix=True)


KINDS: dict[str, Callable[[], Batch]] = {
    "heads": of_heads,
    "windows": lambda: of_heads(**WINDOWS),
    "without 16-bit rows": lambda: of_heads(sink_len=0, recent_len=0),
    "latents": of_latents,
}


@pytest.fixture(params=KINDS)
def batch(request: pytest.FixtureRequest) -> Batch:
    return KINDS[request.param]()


def begin(batch: Batch, name: str, namespace: str | None) -> Any:
    """A sequence of the prompt, none of which is present in its namespace; its rows."""
    assert batch.cache.match_prefix(PROMPT, namespace=namespace) == 0
    assert batch.cache.allocate(name, PROMPT, namespace=namespace) == 0
    return extend(batch, [name], 60, PROMPT)


def first(batch: Batch, name: str, count: int) -> list[torch.Tensor]:
    """K and V of the first tokens of a sequence, in the layers that see all."""
    layers = [layer for layer, window in enumerate(batch.cache.windows) if window is None]
    return [x[:, :count] for layer in layers for x in batch.cache.dequantized(name, layer)]


def found(batch: Batch, namespace: str | None) -> int:
    return batch.cache.match_prefix([*PROMPT, -1], namespace=namespace)


def test_equal_ids_find_the_rows_of_their_own_namespace(batch: Batch) -> None:
    cache = batch.cache
    begin(batch, "a", "one")
    begin(batch, "b", "two")
    begin(batch, "c", None)
    check_invariants(cache)
    for name, namespace in (("a", "one"), ("b", "two"), ("c", None)):
        present = cache.allocate(f"{name}2", PROMPT, namespace=namespace)
        assert present == found(batch, namespace) > 0
        assert cache.namespace(f"{name}2") == namespace
        assert same(first(batch, f"{name}2", present), first(batch, name, present))
    assert not same(first(batch, "a2", 48), first(batch, "b2", 48))
    for name in ("a", "a2"):
        cache.free(name)
    assert cache.allocate("d", PROMPT, namespace="three") == 0
    check_invariants(cache)


def test_a_fork_whose_sinks_are_written_anew_keeps_the_namespace() -> None:
    batch = of_heads()
    batch.cache.allocate("a", PROMPT, namespace="one")
    extend(batch, ["a"], SINKS - 1, PROMPT[: SINKS - 1])
    batch.cache.fork("a", "b")
    extend(batch, ["a", "b"], 60, [*PROMPT, *PROMPT[::-1]])
    for text in (PROMPT, PROMPT[::-1]):
        text = [*PROMPT[: SINKS - 1], *text, 0]
        assert batch.cache.match_prefix(text, namespace="one") == 51
        assert batch.cache.match_prefix(text) == 0
    check_invariants(batch.cache)


def test_more_namespaces_than_places_for_sinks() -> None:
    batch = of_heads()
    for number in range(20):
        begin(batch, "a", f"adapter {number}")
        batch.cache.free("a")
        check_invariants(batch.cache)
    assert [found(batch, f"adapter {number}") > 0 for number in (0, 19)] == [False, True]


class Adapter(str, enum.Enum):
    FIRST = "first"


def test_any_text_is_a_namespace() -> None:
    batch = of_heads()
    begin(batch, "a", "")
    begin(batch, "b", None)
    begin(batch, "c", Adapter.FIRST)
    assert batch.cache.namespace("a") == "" and batch.cache.namespace("b") is None
    assert found(batch, "first") == found(batch, Adapter.FIRST) == 51
    assert type(batch.cache.namespace("c")) is str
