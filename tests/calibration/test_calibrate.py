"""The whole of calibration, on the bundled model and on small random ones (25 s)."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import assert_refused
from relative_l2 import relative_l2
from slow_cases import mark_slow

transformers = pytest.importorskip("transformers")
from fake_cuda import CPU, install, loaded_specs  # noqa: E402
from tiny_models import tiny_model  # noqa: E402

from kvquant.calibration import basis_search  # noqa: E402
from kvquant.calibration import calibrate as calibrating  # noqa: E402
from kvquant.calibration.basis_search import choose  # noqa: E402
from kvquant.calibration.calibrate import Goal, _Rows, calibrate, observe  # noqa: E402
from kvquant.calibration.report import notes, sections  # noqa: E402
from kvquant.calibration.verdict import verdict  # noqa: E402
from kvquant.calibration.windows import Sizes, observed_windows, random_tokens, spread  # noqa: E402
from kvquant.errors import (  # noqa: E402
    CheckpointError,
    ConfigError,
    NonFiniteError,
    UnsupportedError,
)
from kvquant.hf.model import CachedModel  # noqa: E402
from kvquant.io.plan import CachePlan  # noqa: E402
from kvquant.kernels.cuda.runtime.launch import gpu_of  # noqa: E402
from kvquant.kernels.cuda.runtime.warmup import kernels_of  # noqa: E402
from kvquant.ops import quantize  # noqa: E402
from kvquant.rows.format import RowFormat  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = Sizes(observed=1536, length=512, windows=4, context=160, scored=12)
SMALL = Sizes(observed=256, length=64, windows=2, context=64, scored=4)
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": None},
    "Gemma": {},
    "Phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "GPTNeoX": {"num_key_value_heads": 4},
}
BIASED = ("Qwen2", "Phi", "GPTNeoX")


@pytest.fixture(scope="module")
def plan(model: CachedModel, text: list[int]) -> CachePlan:
    found = calibrate(model, text, sizes=SIZES)
    return found


def tiny(kind: str) -> CachedModel:
    return tiny_model(kind, **FAMILIES[kind])


def test_a_plan_keeps_predictions_better_at_the_same_bits(plan: CachePlan) -> None:
    kl = {(row["format"], row["plan"]): row["kl"] for row in plan.facts["comparison"]}
    assert kl["int4", True] < 0.6 * kl["int4", False]
    assert {*kl} == {("int4", True), ("int4", False), ("int8", False)}  # what was asked for, int8
    assert kl["int8", False] < 0.1 * kl["int4", True]
    assert plan.bits == 4.25 and plan.formats == [("int4", "int4")] * 4
    assert plan.facts["measured"]["kl"] == pytest.approx(kl["int4", True], rel=1e-3)
    told = plan.facts["measured"]
    assert (told["scored"], told["passages"]) == (48, 4)
    assert 0 < told["kl_error"] < told["kl"]
    assert 0 < told["top1_error"] < 0.2
    assert all(row["kl_error"] > 0 and row["top1_error"] > 0 for row in plan.facts["comparison"])
    kinds = {name.split(".")[1] for name in plan.tensors}
    assert kinds <= {"offset", "matrix", "feedback", "clip"} and "steps" not in plan.facts


@pytest.mark.extra("cuda")
def test_kernels_of_the_search_are_told_before_rows_are_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three windows, two at a time: the last one alone has few rows, and another kernel."""
    model, windows = tiny("Llama"), torch.randint(97, (3, 2200))
    moments = observe(model, windows)
    formats = {name: (RowFormat.parse(name, 64),) * 2 for name in ("int4", "int8", "fp8")}
    told: list[Any] = []
    install(monkeypatch)
    monkeypatch.setattr(quantize, "kernels_for", lambda *_: "cuda")
    monkeypatch.setattr(
        "kvquant.kernels.cuda.runtime.warmup.warm_up",
        lambda device, calls: told.extend(kernels_of(calls, gpu_of(CPU))),
    )
    choose(model, windows, moments, formats)
    assert loaded_specs() and {*loaded_specs()} <= {*told}
    assert len(told) == 2 * (1 + 2), "int4 as it is and clipped, int8 clipped; fp8 has none"
    assert {spec.sides[0].share for spec in told} == {1, 4}


def test_every_step_lowers_the_weighted_error(
    model: CachedModel, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    windows, fitted = observed_windows(torch.tensor(text), SIZES, None)
    formats = {name: (RowFormat.parse(name, 128),) * 2 for name in calibrating.CANDIDATES}
    seen: list[list[torch.Tensor]] = []  # of K and V of each layer: the errors of each step

    def chosen(meter: Any, bases: Any, own: Any, base: str) -> Any:
        found = choose_one(meter, bases, own, base)
        steps = [*map(bases.get, ("plain", "offset", "matrix")), found.basis]
        seen.append([*(meter.share(basis, own[base]) for basis in steps), found.errors[base]])
        return found

    choose_one = basis_search._chosen
    monkeypatch.setattr(basis_search, "_chosen", chosen)
    found = choose(model, fitted, observe(model, windows), formats)
    for at, side in enumerate("kv"):
        means = [float(torch.stack(each).mean()) for each in zip(*seen[at::2], strict=True)]
        assert len(means) == 5 and means[1:] == sorted(means[1:], reverse=True), side
        assert means[-1] < 0.9 * means[0]
        errors = [
            torch.stack([one[side].errors[name] for one in found.values()]) for name in formats
        ]
        assert [tuple(error.shape) for error in errors] == [(4, 1)] * len(formats)
        by_format = [float(error.mean()) for error in errors]
        assert by_format == sorted(by_format, reverse=True)


@pytest.mark.slow
def test_a_model_in_16_bit_gives_nearly_the_same_plan(
    plan: CachePlan, model: CachedModel, text: list[int]
) -> None:
    half = CachedModel.from_pretrained(EXAMPLES / "llama-demo-5m", dtype=torch.bfloat16)
    assert half.exact_format == "bf16"
    found = calibrate(half, text, sizes=SIZES)
    assert found.facts["settings"]["dtype"] == "bfloat16"
    assert plan.facts["settings"]["dtype"] == "float32"
    for name in ("k.offset", "v.offset"):
        assert relative_l2(found.tensors[name], plan.tensors[name]) < 0.02, name
    for ours, theirs in zip(plan.facts["comparison"], found.facts["comparison"], strict=True):
        assert 0.4 * ours["kl"] < theirs["kl"] < 2.5 * ours["kl"] + 1e-3  # of 48 tokens
    found.check_model(model.config_dict)


@pytest.mark.slow
def test_formats_are_chosen_to_keep_a_limit(
    plan: CachePlan, model: CachedModel, text: list[int]
) -> None:
    """With the window that the cache will have."""
    limit = plan.facts["windowed"]["kl"] / 2
    found = calibrate(model, text, sizes=SIZES, goal=Goal(max_kl=limit))
    assert found.facts["limit"]["met"]
    assert found.facts["windowed"]["kl"] <= limit < found.facts["measured"]["kl"]
    assert 2.25 < found.bits < 8.25


@pytest.mark.parametrize("goal", [Goal(budget=3.25), Goal(format="int3")], ids=str)
def test_formats_that_the_cache_has_no_kernel_for_are_refused_before_work(
    goal: Goal, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("Llama")

    def refuse(batch: int, max_seq_len: int, **options: Any) -> None:
        raise UnsupportedError(f"no CUDA kernel: {options['k_format']}, {options['v_format']}")

    monkeypatch.setattr(model, "new_cache", refuse)
    monkeypatch.setattr(model, "observe", None)
    with pytest.raises(UnsupportedError, match=r"no CUDA kernel: int[23], int[23]"):
        calibrate(model, random_tokens(model.config_dict, 600), sizes=SIZES, goal=goal)


@pytest.mark.parametrize(("dim", "few"), [(80, {"int2"}), (128, {"int2", "int3"})])
def test_rows_that_gpus_do_not_read_are_not_chosen(dim: int, few: set[str]) -> None:
    """INT3 of 80 elements takes 34 bytes."""
    rows = _Rows(dim, dim, False, "bf16", 6.0, are_chosen=True)
    assert {*rows.offered[0]} & {"int2", "int3"} == {*rows.compared} & {"int2", "int3"} == few


@pytest.mark.slow
def test_a_budget_below_int4_chooses_among_all_bits(model: CachedModel, text: list[int]) -> None:
    """As few as 2: with the window that the cache will have, and a warning without one."""
    found = calibrate(model, text, sizes=SIZES, goal=Goal(budget=2.75))
    assert 2.25 < found.bits <= 2.75
    formats = {name for pair in found.formats for name in pair}
    assert "int2" in formats and len(formats) > 1
    kl = {(row["format"], row["plan"]): row["kl"] for row in found.facts["comparison"]}
    assert kl["int4", True] < kl["int3", True] < kl["int2", True] < kl["int2", False]
    assert kl["int3", True] < found.facts["measured"]["kl"] < kl["int2", True]
    windowed = found.facts["windowed"]
    assert (windowed["sink_len"], windowed["recent_len"]) == (4, 128)
    assert windowed["kl"] < 0.5 * found.facts["measured"]["kl"] and windowed["bits"] > found.bits
    other = calibrate(model, text, sizes=SIZES, goal=Goal(budget=2.75), window=(0, 0))
    assert other.facts["windowed"] is None and other.formats != found.formats
    assert other.facts["measured"]["kl"] < found.facts["measured"]["kl"]  # each in its own place
    alone = [[row["kl"] for row in one.facts["sensitivity"]] for one in (found, other)]
    assert 2 * sum(alone[0]) < sum(alone[1])
    assert "128 recent" in repr(sections(found))  # the page may break the line
    for name, least in (("int2", 0.55), ("int3", 0.7), ("int4", 0.85)):
        shares = torch.cat([found.tensors[f"{side}.clip.{name}"].flatten() for side in "kv"])
        assert least <= float(shares.min()) and float(shares.max()) <= 1
    assert float(found.tensors["k.clip.int2"].mean()) < float(found.tensors["k.clip.int4"].mean())
    assert notes(found) == []
    bare = CachePlan({**found.facts, "windowed": None}, found.tensors)
    (told,) = notes(bare)
    assert "rows of 2 bits" in told and "--recent-len 128" in told


@pytest.mark.slow
def test_the_bits_of_int4_bring_more_where_layers_share_them(
    plan: CachePlan, model: CachedModel, text: list[int]
) -> None:
    found = calibrate(model, text, sizes=SIZES, goal=Goal(budget=4.25))
    formats = {name for pair in found.formats for name in pair}
    assert found.bits <= 4.25 == plan.bits and formats & {"int2", "int3"}
    assert found.facts["windowed"]["kl"] < 0.6 * plan.facts["windowed"]["kl"]


@pytest.mark.slow
def test_a_plan_without_data_comes_close(
    plan: CachePlan, model: CachedModel, text: list[int]
) -> None:
    held = text[-(len(text) // 4) :]
    found = calibrate(model, None, held, sizes=SIZES, zero_data=True)
    assert found.facts["zero_data"]
    assert found.facts["measured"]["kl"] < 2 * plan.facts["measured"]["kl"]
    bare = calibrate(model, None, sizes=SIZES, zero_data=True)
    assert bare is not None and bare.facts["measured"] is None


@pytest.mark.parametrize("kind", mark_slow(FAMILIES, ["Llama", "Qwen2"]))
def test_every_family_is_calibrated(kind: str) -> None:
    model = tiny(kind)
    tokens = random_tokens(model.config_dict, 600)
    assert set(model.output_weights()) == {0, 1}
    found = calibrate(model, tokens, sizes=SMALL)
    kl = {(row["format"], row["plan"]): row["kl"] for row in found.facts["comparison"]}
    assert 0 < kl["int8", False] < kl["int4", False]
    # random weights leave nothing to gain but large biases, which some of them have
    assert kl["int4", True] < (0.2 if kind in BIASED else 1.5) * kl["int4", False]
    with pytest.raises(CheckpointError, match="was made for a"):
        other = tiny("Llama" if kind != "Llama" else "Qwen2")
        other.new_cache(1, 10, plan=found)


def test_layers_that_rows_cannot_hold_are_kept_in_16_bit() -> None:
    model = tiny("Qwen2")
    with torch.no_grad():
        model.model.model.layers[1].self_attn.k_proj.bias[3] = 9e4
    tokens = random_tokens(model.config_dict, 600)
    found = calibrate(model, tokens, sizes=SMALL)
    assert found.formats == [("int4", "int4"), ("bf16", "bf16")]
    assert "its keys go up to" in found.facts["layers"][1]["kept"]
    assert found.facts["sensitivity"] == []
    assert found.facts["measured"]["kl"] < 0.2
    with torch.no_grad():
        model.model.model.layers[0].self_attn.v_proj.bias[0] = torch.nan
    with pytest.raises(NonFiniteError, match="layer 0 attends with NaN or Inf"):
        calibrate(model, tokens, sizes=SMALL)


def test_a_budget_counts_the_layers_that_stay_in_16_bit(tmp_path: Path) -> None:
    model = tiny("Llama")
    make = partial(calibrate, model, random_tokens(model.config_dict, 600), sizes=SMALL)
    layers = model.model.model.layers
    with torch.no_grad():
        layers[1].self_attn.v_proj.weight.mul_(1e6)
    found = make(goal=Goal(budget=11.0))
    assert found.formats[1] == ("bf16", "bf16")
    assert 10.25 < found.bits <= 11.0
    found = make(goal=Goal(budget=10.0))
    assert 9.25 <= found.bits <= 10.0  # the other layer has few bits
    with pytest.raises(ConfigError, match="a budget of 10 bits asks for rows of 2 and 3 bits"):
        calibrate(model, None, sizes=SMALL, goal=Goal(budget=10.0), zero_data=True)
    with pytest.raises(ConfigError, match=r"a budget of 9.0 bits is below 9.25"):
        make(goal=Goal(budget=9.0))
    with torch.no_grad():
        layers[0].self_attn.v_proj.weight.mul_(1e6)
    found = make(goal=Goal(max_kl=1.0))
    assert found.bits == 16 and found.facts["limit"]["met"]
    missed = {"max_kl": 0.25, "budget": None, "met": False}
    measured = {**found.facts["measured"], "kl": 0.5}
    facts = {**found.facts, "measured": measured, "limit": missed}
    CachePlan(facts, found.tensors).save(tmp_path / "plan.safetensors")
    said = verdict(CachePlan.load(tmp_path / "plan.safetensors"))
    assert said.mark == "Limit not met." and not any("comes from" in one for one in said.further)


def test_a_text_of_one_token_has_a_plan() -> None:
    model = tiny("Qwen2")
    sizes = Sizes(observed=256, length=64, windows=2, context=20, scored=4)
    found = calibrate(model, [7] * 600, sizes=sizes)
    assert found.facts["measured"]["kl"] < 0.01


def test_windows_are_spread_over_positions_and_progress_over_layers(
    model: CachedModel, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[int] = []
    windows = spread(text, 5, 64)
    observe(model, windows, lambda stage, share: shares.append(share))
    assert sum(shares) == 100 and max(shares) <= 7  # layer by layer
    begins: list[float] = []
    monkeypatch.setattr(CachedModel, "observe", lambda *given: begins.append(given[3]))
    observe(model, windows)
    assert begins[0] == 0 and len({*begins}) == 5 and all(0 <= begin < 1 for begin in begins)


@pytest.mark.parametrize(("count", "length"), [(1, 100), (3, 20), (10, 10), (7, 14)])
def test_windows_are_spread_over_the_text_without_overlap(count: int, length: int) -> None:
    windows = spread(range(100), count, length)
    assert windows.shape == (count, length)
    assert windows[0, 0] == 0
    assert len(set(windows.flatten().tolist())) == count * length
    assert bool((windows.diff(dim=1) == 1).all())


def test_choosing_has_windows_of_its_own() -> None:
    observed, fitted = observed_windows(range(4000), Sizes(observed=2000, length=100), None)
    assert len(observed) + len(fitted) == 20
    assert not set(observed.flatten().tolist()) & set(fitted.flatten().tolist())
    observed, fitted = observed_windows(range(50), Sizes(), 40)
    assert observed.tolist() and fitted.shape == (1, 25)


FORMATS_OR = "give a format, or --max-kl and --budget to have formats chosen"
NOT_A_SIZE, NOT_A_NUMBER = "windows .* is not possible: use a whole number", "use a number, or None"


def test_impossible_goals_and_sizes_are_refused() -> None:
    sizes: tuple[Any, ...] = (0, 1.5, "8", True, float("nan"))
    texts: tuple[Any, ...] = ("0.1", True)
    assert_refused(
        ConfigError,
        (lambda: Goal(format="banana"), "format 'banana' does not exist"),
        *((partial(Sizes, windows=n), NOT_A_SIZE) for n in sizes),
        *((partial(Goal, max_kl=n), "cannot be kept") for n in (0.0, float("nan"))),
        (lambda: Goal(budget=float("inf")), "not possible"),
        *((partial(Goal, max_kl=n), NOT_A_NUMBER) for n in texts),
        (lambda: Goal(budget="5"), NOT_A_NUMBER),  # type: ignore[arg-type]
        (lambda: Goal(format=4), "format is of type int"),  # type: ignore[arg-type]
        (lambda: Goal(max_kl=1, format="int4"), FORMATS_OR),
    )


def test_what_cannot_be_calibrated_is_refused(model: CachedModel) -> None:
    no_data, ones = {"zero_data": True, "goal": Goal(max_kl=0.1)}, [1] * 900
    one_text = r"tokens is \[1, 600\]: give the ids of one text, \[tokens\]"
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([1.5] * 600, {}, "tokens is torch.float32: use whole numbers"),
        ("word " * 600, {}, "tokens is of type str: give the ids of a text"),
        (iter([1]), {}, "tokens is of type list_iterator: give the ids of a text"),
        (torch.ones(1, 600).long(), {}, one_text),
        ([], {"held": ones}, "tokens is empty"),
        (ones, {"held": []}, "held is empty"),
        (None, no_data, "a KL is measured on a text"),
        (ones, {"rounding": "best"}, "rounding 'best' does not exist: use feedback or"),
        (ones, {"goal": {"max_kl": 1}}, "goal is of type dict: give a Goal, or None"),
        (ones, {"sizes": {}}, "sizes is of type dict: give a Sizes, or None"),
        ([1] * 4000, {"sizes": None}, "1000 tokens are too few for 8 windows of 1089: give"),
        ([1] * 10000, {"sizes": None}, r"or shorter windows \(--context, --scored\), or 2 of them"),
        (ones, {"model": object()}, "model is of type object: give a CachedModel, a model of"),
    ]
    for text, options, message in cases:
        given = {"model": model, "tokens": text, "sizes": SIZES} | options
        assert_refused(ConfigError, (partial(calibrate, **given), message))


def test_a_budget_of_few_bits_takes_the_packaged_text(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is chosen by what it costs on a text: that text is there, or given."""
    monkeypatch.setattr(CachedModel, "observe", lambda *_: 1 / 0)
    texts: list[dict[str, Any]] = [{}, {"zero_data": True, "held": [1] * 900}]
    texts += [{"zero_data": True, "tokens": [1] * 2800}]
    for given in texts:
        with pytest.raises(ZeroDivisionError):
            calibrate(model, goal=Goal(budget=3.0), sizes=SIZES, **given)
