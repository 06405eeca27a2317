"""Choosing formats by what they cost (1 s)."""

import pytest

from kvquant.calibration.format_search import Costs, Side, allocate, worst_layers

BITS = {"int4": 4.25, "int4-g4": 5.0, "int8": 8.25}


def costs(k: list[float], v: list[float]) -> Costs:
    kl: dict[Side, dict[str, float]] = {}
    for side, each in (("k", k), ("v", v)):
        for layer, cost in enumerate(each):
            kl[layer, side] = {"int4": cost, "int4-g4": cost / 2, "int8": cost / 200}
    return Costs(kl, BITS)


def test_the_cheapest_is_enough_where_it_keeps_the_limit() -> None:
    assert set(allocate(costs([1, 1], [1, 1]), max_kl=4).values()) == {"int4"}


def test_the_layer_that_costs_most_gets_bits_first() -> None:
    found = allocate(costs([1, 9], [1, 3]), max_kl=9.6)
    assert found[1, "k"] != "int4"
    assert [found[0, "k"], found[0, "v"], found[1, "v"]] == ["int4"] * 3


@pytest.mark.parametrize("max_kl", [8.0, 3.0, 0.5, 0.08])
def test_limits_are_kept_with_fewer_bits_the_looser_they_are(max_kl: float) -> None:
    given = costs([1, 5, 2], [0.5, 1, 1])
    found = allocate(given, max_kl=max_kl)
    assert given.total(found) <= max_kl
    tighter = allocate(given, max_kl=max_kl / 2)
    assert given.mean_bits(tighter) >= given.mean_bits(found)


def test_sides_may_have_formats_of_their_own() -> None:
    """As latents and RoPE parts, of which neither keeps the bits of the other."""
    kl: dict[Side, dict[str, float]] = {
        (0, "k"): {"int4": 4.0, "int8": 0.1},
        (0, "v"): {"int8": 1.0, "bf16": 0.0},
    }
    v_bits = {"int8": 8.25, "bf16": 16.0}
    given = Costs(kl, {"int4": 4.25, "int8": 8.25}, v_bits=v_bits, v_width=1 / 8, k_first=False)
    assert allocate(given, max_kl=5) == {(0, "k"): "int4", (0, "v"): "int8"}
    assert allocate(given, max_kl=4) == {(0, "k"): "int4", (0, "v"): "bf16"}
    assert allocate(given, max_kl=0.1) == {(0, "k"): "int8", (0, "v"): "bf16"}


@pytest.mark.parametrize("budget", [4.25, 4.6, 5.0, 6.5, 9.0])
def test_budgets_are_kept_and_used(budget: float) -> None:
    given = costs([1, 5, 2], [0.5, 1, 1])
    found = allocate(given, budget=budget)
    assert given.mean_bits(found) <= budget
    assert given.total(found) <= given.total(allocate(given, budget=4.25))
    if budget >= 8.25:
        assert set(found.values()) == {"int8"}


def test_rows_of_values_count_by_their_own_width() -> None:
    given = costs([1, 5, 2], [0.5, 1, 1])
    v_bits = {"int4": 4.5, "int4-g4": 6.0, "int8": 8.5}  # rows of half the width
    given = Costs(given.kl, BITS, v_bits, 0.5)
    for budget in (4.5, 5.0, 6.5, 9.0):
        found = allocate(given, budget=budget)
        taken = sum(BITS[name] for (_, side), name in found.items() if side == "k")
        taken += sum(v_bits[name] / 2 for (_, side), name in found.items() if side == "v")
        assert given.mean_bits(found) == pytest.approx(taken / 4.5) and taken / 4.5 <= budget + 1e-9
    assert set(found.values()) == {"int8"}


def test_keys_keep_the_bits_of_values_unless_values_cost_more() -> None:
    for budget in (4.5, 5.0, 6.0):
        found = allocate(costs([2, 2], [1.9, 1.9]), budget=budget)
        assert all(BITS[found[layer, "k"]] >= BITS[found[layer, "v"]] for layer in (0, 1))
    found = allocate(costs([0.1, 0.1], [3, 3]), budget=4.63)
    assert BITS[found[0, "v"]] > BITS[found[0, "k"]]


def test_out_of_reach_gives_the_best_and_names_the_worst_layers() -> None:
    given = costs([1, 50, 1], [1, 2, 1])
    found = allocate(given, max_kl=1e-6)
    assert set(found.values()) == {"int8"}
    assert worst_layers(given, found) == [1]
    even = costs([1, 1, 1, 1, 1, 1, 1], [1] * 7)
    assert len(worst_layers(even, allocate(even, max_kl=1e-9))) == 3
