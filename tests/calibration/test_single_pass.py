"""Fidelity computed in one pass is that of decoding (8 s)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from kvquant.calibration.calibrate import calibrate
from kvquant.calibration.fidelity import Planned, Reference, Scheme
from kvquant.calibration.single_pass import PassReference
from kvquant.calibration.windows import Sizes, spread
from kvquant.errors import NonFiniteError
from kvquant.io.plan import CachePlan

pytest.importorskip("transformers")
from tiny_models import tiny_model

from kvquant.hf.model import CachedModel

EXAMPLES = Path(__file__).parents[2] / "examples"
CONTEXT = 96


@pytest.fixture(scope="module")
def windows(text: list[int]) -> torch.Tensor:
    return spread(text, 8, CONTEXT + 13)


@pytest.fixture(scope="module")
def plan(model: CachedModel) -> CachePlan:
    found = calibrate(model, None, sizes=Sizes(observed=256, length=64), zero_data=True)
    return found


@pytest.mark.parametrize("keeps_context", [True, False], ids=["kept", "read again"])
def test_both_tell_the_same(
    model: CachedModel, windows: torch.Tensor, plan: CachePlan, keeps_context: bool
) -> None:
    """KL within three standard errors, and perplexity within that of independent roundings.

    The two multiply matrices of other shapes, whose products differ in the last bits, so that some
    codes differ. In the worst case all do: the difference of two independent KLs has a deviation of
    sqrt(2) standard errors, and a KL of 0 is more than three away. Rows with a KL of k move a
    token's log-probability by sqrt(2 k) (the second order of KL), so the mean over n tokens by
    sqrt(2 k / n), in each of both.
    """
    decoded = Reference(model, windows, CONTEXT)
    passed = PassReference(
        model, windows, CONTEXT, [0, 1, 2, 3], why="a test", keeps_context=keeps_context
    )
    assert passed.num_tokens == decoded.num_tokens == 96 and passed.why == "a test"
    assert passed.exact_format == decoded.exact_format
    for scheme in (Scheme("int4", "int4"), Planned(plan), Scheme("int3", "int3", 4, 32)):
        ours, theirs = passed.measure(scheme), decoded.measure(scheme)
        error = theirs.kl_error
        assert error is not None and 0 < error < theirs.kl / 3, scheme  # they tell something
        assert abs(ours.kl - theirs.kl) < 3 * error, scheme
        assert sum(ours.kl_passages) / 8 == pytest.approx(ours.kl)
        spread_of_both = math.sqrt((ours.kl + theirs.kl) * 2 / decoded.num_tokens)
        assert abs(math.log(ours.perplexity / theirs.perplexity)) < 3 * spread_of_both, scheme
        assert abs(math.log(passed.perplexity / decoded.perplexity)) < error
    # its 16-bit rows are those of the reference: nothing differs
    assert passed.measure(Scheme("bf16", "bf16")).kl == pytest.approx(0, abs=1e-9)


def test_bits_are_those_of_the_caches_that_decode(
    model: CachedModel, windows: torch.Tensor, plan: CachePlan
) -> None:
    decoded = Reference(model, windows[:1], CONTEXT)
    passed = PassReference(model, windows[:1], CONTEXT, [0, 1, 2, 3], keeps_context=True)
    for scheme in (Scheme("int4", "int8"), Planned(plan), Planned(plan, "it", 4, 32)):
        theirs = decoded.measure(scheme).bits
        assert math.isclose(passed.measure(scheme).bits, theirs, rel_tol=0.01)


def test_the_window_is_that_of_each_token(model: CachedModel, windows: torch.Tensor) -> None:
    """As wide as the passage it leaves nothing rounded, and none is that of no window."""
    passed = PassReference(model, windows, CONTEXT, [0, 1, 2, 3], keeps_context=True)
    whole = passed.measure(Scheme("int4", "int4", 0, windows.shape[1]))
    some, none = (passed.measure(Scheme("int4", "int4", *at)) for at in ((4, 32), (0, 0)))
    assert abs(whole.kl) < none.kl / 1000  # sums of float32 in another order
    assert 0 < some.kl < none.kl


@pytest.mark.parametrize("window", [(0, 0), (4, 24)], ids=str)
def test_layers_with_a_sliding_window(window: tuple[int, int]) -> None:
    """Tokens read few keys there, in the cache and in the pass: KLs agree within their error."""
    kinds = ["sliding_attention", "full_attention"]
    model = tiny_model("Gemma3Text", sliding_window=32, layer_types=kinds)
    windows = torch.randint(256, (6, CONTEXT + 25), generator=torch.Generator().manual_seed(0))
    decoded = Reference(model, windows, CONTEXT).measure(Scheme("int3", "int3", *window))
    assert decoded.kl_error is not None
    for keeps_context in (True, False):
        passed = PassReference(model, windows, CONTEXT, [0, 1], keeps_context=keeps_context)
        ours = passed.measure(Scheme("int3", "int3", *window))
        assert abs(ours.kl - decoded.kl) < decoded.kl_error + 0.02 * decoded.kl, keeps_context


def test_layers_that_no_cache_holds_stay_exact(model: CachedModel, windows: torch.Tensor) -> None:
    none = PassReference(model, windows, CONTEXT, []).measure(Scheme("int4", "int4"))
    some = PassReference(model, windows, CONTEXT, [2]).measure(Scheme("int4", "int4"))
    every = PassReference(model, windows, CONTEXT, [0, 1, 2, 3]).measure(Scheme("int4", "int4"))
    assert none.kl == 0 < some.kl < every.kl


def test_bits_are_those_of_the_rows_of_this_model() -> None:
    narrow = tiny_model("Llama")  # rows of 64 elements: 4 bits and a header of half a bit
    windows = torch.arange(2 * 12).view(2, 12)
    passed = PassReference(narrow, windows, 8, [0, 1])
    assert passed.measure(Scheme("int4", "int4")).bits == 4.5
    assert passed.measure(Scheme("bf16", "int8-g2")).bits == 12.5


@pytest.mark.parametrize("planned", [False, True], ids=["scheme", "plan"])
def test_what_rows_cannot_hold_is_refused(
    model: CachedModel, windows: torch.Tensor, plan: CachePlan, planned: bool
) -> None:
    scheme = Planned(plan) if planned else Scheme("int4", "int4")
    reference = PassReference(model, windows, CONTEXT, [0])
    weight = model.model.model.layers[0].self_attn.v_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(1e6)
    try:
        with pytest.raises(NonFiniteError):
            reference.measure(scheme)
    finally:
        with torch.no_grad():
            weight.copy_(kept)
