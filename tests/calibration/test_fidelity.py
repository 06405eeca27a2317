"""Fidelity of quantized caches, on the bundled model; in one pass it is that of decoding (16 s)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

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

from kvquant.cache.contiguous import KVCache
from kvquant.calibration.fidelity import (
    compare,
    compare_passages,
    perplexity_of,
    predict,
    quantized_copy,
    read_prompt,
    standard_errors,
    stored_bits,
    warm_up_copies,
)
from kvquant.errors import ShapeError
from kvquant.hf.model import CachedModel
from kvquant.kernels.cuda.runtime.launch import GPUS
from kvquant.kernels.cuda.runtime.warmup import kernels_of

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_comparison_is_kl_agreement_and_likelihood() -> None:
    p = torch.tensor([[[0.5, 0.5, 0.0001]], [[0.2, 0.7, 0.1]]]).log()
    q = torch.tensor([[[0.25, 0.75, 0.0001]], [[0.2, 0.7, 0.1]]]).log()
    p[0, 0, 0] += 1e-3  # the likeliest
    kl, top1, nll = compare(p, q, torch.tensor([[[1]], [[0]]]))
    expected = 0.5 * torch.tensor([2.0, 2 / 3]).log().sum() / 2
    assert kl == pytest.approx(float(expected), abs=1e-3)
    assert top1 == 0.5
    assert nll == pytest.approx(-float(torch.tensor([0.75, 0.2]).log().mean()))


def test_passages_are_the_observations_of_standard_errors() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(2, 10, 6, 7).log_softmax(-1)  # 10 tokens of 6 passages
    targets = torch.randint(7, (10, 6, 1))
    parts = compare_passages(p, q, targets)
    for passage in range(6):
        alone = compare(p[:, [passage]], q[:, [passage]], targets[:, [passage]])
        assert parts[:, passage].tolist() == pytest.approx(alone)
    assert compare(p, q, targets) == pytest.approx(parts.mean(1).tolist())
    kl_error, top1_error = standard_errors(parts, 10)
    assert kl_error == pytest.approx(float(parts[0].std()) / 6**0.5)
    assert top1_error is not None and top1_error >= float(parts[1].std()) / 6**0.5
    assert standard_errors(parts[:, :1], 10) == (None, None)


@pytest.mark.extra("cuda")
def test_kernels_of_schemes_are_told_before_they_are_measured(
    model: CachedModel, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, told = read_prompt(model, torch.tensor([text[:30]]), 9), list[Any]()
    monkeypatch.setattr(
        "kvquant.kernels.cuda.runtime.warmup.warm_up",
        lambda device, calls, kind: told.extend(kernels_of(calls, GPUS["sm_90"])),
    )
    warm_up_copies(model, exact, [Scheme("int8", "int4"), Scheme("fp8", "fp8", 4, 128)])
    kinds = [
        (spec.first.k_format.codec, bool(spec.second)) for spec in told if "first" in vars(spec)
    ]
    assert kinds == [("int8", False), ("bf16", False)], "few tokens: all of them are recent"
    sources = {(spec.k.fmt.codec, spec.source) for spec in told if "source" in vars(spec)}
    assert sources == {(codec, source) for codec in ("int8", "fp8") for source in ("bf16", "fp32")}


def test_alike_tokens_of_a_passage_are_not_counted_twice() -> None:
    """Twice the tokens that say the same leave the standard error of the passages as it is."""
    parts = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.2, 0.9, 0.5, 0.6], [1.0, 1.0, 1.0, 1.0]])
    assert standard_errors(parts, 50) == standard_errors(parts, 5000)


@pytest.mark.parametrize(("count", "least"), [(2, 0.1), (64, 0.0035), (2500, 0.00009)])
def test_equal_tokens_have_an_error_that_falls_with_their_number(count: int, least: float) -> None:
    parts = torch.tensor([[0.0] * 4, [1.0] * 4, [1.0] * 4])
    kl_error, top1_error = standard_errors(parts, count)
    assert kl_error == 0.0
    assert top1_error is not None and least < top1_error < 1.2 / (4 * count)


@pytest.mark.parametrize("windows", [None, [64, None]])
def test_bits_are_those_of_the_elements_that_a_cache_keeps(
    windows: list[int | None] | None,
) -> None:
    def make(fmt: str) -> KVCache:
        lens: dict[str, Any] = {"sink_len": 0, "recent_len": 0}
        return KVCache(2, 1, 1, 128, 8192, k_format=fmt, v_format=fmt, windows=windows, **lens)

    exact = make("bf16")
    found = [stored_bits(make(fmt), exact) for fmt in ("bf16", "int8", "int4-g4", "int4")]
    assert found[0] == 16.0
    assert found[1:] == pytest.approx([8.25, 5.0, 4.25], rel=1e-3)


def test_better_formats_keep_the_predictions_better(model: CachedModel, text: list[int]) -> None:
    schemes = [
        Scheme("bf16", "bf16"),
        Scheme("int8", "int8"),
        Scheme("int4-g4", "int4-g4"),
        Scheme("int4", "int4"),
        Scheme("int4", "int4", sink_len=4, recent_len=64),
        Scheme("bf16", "int4"),
    ]
    windows = spread(text, 4, 200 + 24 + 1)
    exact, int8, int4_g4, int4, ended, half = map(Reference(model, windows, 200).measure, schemes)
    assert exact.kl == 0.0 and exact.top1 == 1.0
    assert 0 < int8.kl < 1e-3 < int4_g4.kl < int4.kl < 0.1
    assert ended.kl < int4.kl / 3
    assert half.kl < int4.kl
    assert int8.top1 > 0.95
    assert int4.perplexity == pytest.approx(exact.perplexity, rel=0.2)
    assert [one.bits for one in (exact, int8, int4_g4, int4)] == [16.0, 8.25, 5.0, 4.25]


def test_the_past_is_read_from_the_quantized_cache(model: CachedModel, text: list[int]) -> None:
    window = torch.tensor([text[:120]])
    exact = read_prompt(model, window[:, :100], 20)
    expected = predict(model, exact, window[:, 100:])
    exact.crop(100)
    damaged = quantized_copy(model, exact, Scheme("int8", "int8"))
    for layer in damaged.layers:
        layer.k_packed[:, :, 10:90] = 0
    given = predict(model, damaged, window[:, 100:])
    kl, _, _ = compare(expected, given, torch.zeros(20, 1, 1, dtype=torch.int64))
    assert kl > 0.05


def test_a_token_that_both_think_impossible_adds_nothing() -> None:
    torch.manual_seed(0)
    expected, given = torch.randn(2, 3, 2, 5).log_softmax(-1)
    targets = torch.zeros(3, 2, 1, dtype=torch.int64)
    never = torch.full((3, 2, 1), -torch.inf)
    first, second = (torch.cat([x, never], -1) for x in (expected, given))
    found = compare_passages(first, second, targets)
    assert torch.equal(found, compare_passages(expected, given, targets))
    # what one thinks possible and the other one not is an infinite loss
    found = compare_passages(first, torch.cat([never, given], -1), targets)
    assert found[0].tolist() == [torch.inf] * 2


def test_a_perplexity_beyond_all_numbers_is_infinite() -> None:
    assert perplexity_of(1e3) == torch.inf and perplexity_of(2.0) == pytest.approx(math.e**2)
    assert perplexity_of(300.0) == pytest.approx(math.exp(300.0))


def test_windows_without_room_are_refused(model: CachedModel) -> None:
    with pytest.raises(ShapeError, match="no room for a prompt of 10"):
        Reference(model, torch.zeros(1, 11, dtype=torch.int64), 10)


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
