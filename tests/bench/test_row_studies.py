"""Studies of rows in small: graded rows, bases and formats beside the plan's (40 s)."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import bench_bases
import bench_formats
import bench_graded
from bench_formats import drawn, every_choice, exhaustive
from graded_rows import ERRORS, Graded, bytes_of, choices, made, rounded, searched, with_spans
from row_study import Amounts, Subject, best_basis, compared, error_of, plan_basis, prepare, reader

from kvquant.calibration.bases import candidates
from kvquant.calibration.format_search import Costs, Side, allocate
from kvquant.calibration.single_pass import PassReference
from kvquant.cli.demo import MODEL
from kvquant.rows.format import RowFormat
from kvquant.rows.quantize import round_with_feedback

TEXT = MODEL.parent / "unseen.txt"
SMALL = Amounts(observed=1024, length=256, fitted=128, passages=2, context=64, scored=32)
OPTIONS = [f"--{name}={value}" for name, value in vars(SMALL).items()]


@pytest.fixture(scope="module")
def subject() -> Subject:
    return prepare(MODEL, TEXT, TEXT, SMALL)


def run(command: Any, path: Path, *options: str) -> Any:
    given = [str(MODEL), f"--text={TEXT}", f"--held={TEXT}", f"--json={path}", *OPTIONS, *options]
    done = CliRunner().invoke(command, given, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(path.read_text())["models"][MODEL.name]


def test_passages_are_those_of_a_pass_reference(subject: Subject) -> None:
    """A reader of a format reads what PassReference has a Scheme read."""
    from kvquant.calibration.fidelity import Scheme
    from kvquant.ops.quantize import dequantize_rows, quantize_rows

    fmt = RowFormat.parse("int3", 128)
    readers = {at: lambda x: dequantize_rows(quantize_rows(x, fmt), fmt) for at in subject.rows}
    windows = torch.cat(subject.passages.parts)
    windows = torch.cat([windows, windows[:, -1:]], 1)  # a successor, of which nothing is read
    reference = PassReference(subject.model, windows, SMALL.context, [0, 1, 2, 3])
    theirs = reference.measure(Scheme("int3", "int3"))
    ours = subject.passages.kl(readers)
    assert len(ours) == 2 and subject.passages.tokens == 64
    assert sum(ours) / 2 == pytest.approx(theirs.kl, rel=1e-4)
    assert subject.passages.kl({}) == pytest.approx([0, 0], abs=1e-9)


def test_bases_are_those_that_calibration_would_choose(subject: Subject) -> None:
    place = 1, "v"
    options = candidates(subject.moments.layers[1], subject.weights[1], "v")
    fmt = RowFormat.parse("int4", 128)
    errors = {n: float(error_of(subject, place, reader(b, fmt)).sum()) for n, b in options.items()}
    name = best_basis(subject, place, options)
    assert errors[name] == min(errors.values()) and name.endswith("+feedback")
    assert torch.equal(plan_basis(subject, place).offset, options[name].offset)
    heavy = torch.zeros(1, 128)
    heavy[0, 5] = 1  # of one token alone
    x = subject.rows[place]
    whole = error_of(subject, place, lambda x: x + 1)
    assert (
        0
        < float(error_of(subject, place, lambda x: x + 1, heavy))
        == pytest.approx(float(whole) / x.shape[2], rel=1e-4)
    )


def test_elements_are_rounded_as_the_rows_of_kvquant() -> None:
    y = torch.randn(2, 2, 10, 128)
    feedback = torch.tril(0.1 * torch.randn(2, 128, 128), -1) + torch.eye(128)
    low, step = y.amin(-1, keepdim=True), (y.amax(-1, keepdim=True) - y.amin(-1, keepdim=True)) / 7
    params = torch.stack([step, low], -1)
    expected = round_with_feedback(y, params, feedback, 7) * step + low
    low, step = low.expand(y.shape), step.expand(y.shape)
    given = rounded(y, low, step, torch.full((128,), 7.0), feedback)
    # a sum that is rounded otherwise moves a code now and then, and with it the rest of its row
    assert float(((given - expected).abs() < 1e-5).float().mean()) > 0.8
    levels = torch.tensor([0.0, 1, 3, 15]).repeat_interleave(32)
    graded = rounded(y, low, step, levels, feedback)
    codes = (graded - low) / step
    assert bool((codes <= levels + 1e-3).all()) and bool((codes[..., 96:] > 3).any())


def test_choices_of_bits_fill_the_bytes_of_a_format() -> None:
    found = [*choices(4, "row", 128, 36)]
    assert (2, 2, 2, 2) in found and (4, 2, 2, 0) in found and (3, 2, 2, 2) not in found
    assert all(bytes_of(one, "row", 128) == 36 for one in found)
    assert (5, 2, 0, 0) in choices(4, "groups", 128, 36)
    assert bytes_of((5, 2, 0, 0), "groups", 128) == 36
    assert all(ERRORS[a] > ERRORS[b] for a, b in zip([*ERRORS], [*ERRORS][1:], strict=False))


@pytest.mark.parametrize("kind", ["sorted", "mixed", "random"])
def test_graded_rows_of_a_steep_spectrum_have_less_error(kind: str) -> None:
    draws = torch.randn(1, 128, 128, dtype=torch.float64), torch.randn(1, 128, 128).double()
    scales = torch.logspace(0, -2, 128, dtype=torch.float64)
    weights, covariance = (d @ (scales[:, None].square() * d.mT) for d in draws)
    x = (torch.randn(1, 1, 256, 128).double() * scales @ draws[1].mT).float() + 3
    offset = torch.full((1, 128), 3.0)

    def error(one: Graded) -> float:
        wrong = (one.read(x) - x)[0].double()
        return float(((wrong @ weights) * wrong).sum())

    given = weights, covariance, offset, kind, 1.0, 4, "row", 36
    found = [searched(with_spans(one, x), error) for one in made(*given)]
    assert {one.row_bytes for one in found} == {36} and len(found) == 3
    alike = replace(found[0], bits=(2,) * 4, spans=torch.full((1, 4), 0.6))
    assert min(map(error, found)) < error(alike) / 1.5
    zero = found[0].read(offset.expand(1, 1, 2, 128))
    assert torch.allclose(zero, offset.expand(1, 1, 2, 128), atol=1e-3)


def test_all_choices_are_tried() -> None:
    """Three layers of like costs, each of which falls by the same share from bit to bit."""
    bits = {"int2": 2.25, "int3": 3.25, "int4": 4.25}
    kl: dict[Side, dict[str, float]] = {
        (layer, side): {name: cost / 4**at for at, name in enumerate(bits)}
        for layer, pair in enumerate([(3.0, 1.0), (2.5, 2.0), (1.0, 1.5)])
        for side, cost in zip("kv", pair, strict=True)
    }
    costs = Costs(kl, bits)
    # K keeps the bits of V in two layers: 6 pairs each; in the third, where V costs more, all 9
    assert len(every_choice(costs)) == 6 * 6 * 9
    for budget in (2.25, 2.6, 3.25, 4.0):
        ours, best = allocate(costs, budget=budget), exhaustive(costs, budget)
        assert costs.mean_bits(best) <= budget + 1e-9
        assert costs.total(best) <= costs.total(ours) * (1 + 1e-9)
        uniform = dict.fromkeys(kl, "int3" if budget >= 3.25 else "int2")
        assert costs.total(best) <= costs.total(uniform)
    near = drawn(costs, 3.25, 5)
    assert len(near) == 5 and all(3.0 < costs.mean_bits(one) <= 3.25 for one in near)


def test_ratios_are_of_means_and_their_errors_of_pairs() -> None:
    found = compared([1.0, 1.0, 1.0], [2.0, 3.0, 1.0])
    assert found["times_less"] == 2 and found["error"] == pytest.approx(1 / 3**0.5)


@pytest.mark.slow
def test_studies_write_what_they_found(tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    graded = run(bench_graded.main, path)
    assert [one["format"] for one in graded["rows"]] == ["int3", "int2"]
    for one, most in zip(graded["rows"], (52, 36), strict=True):
        assert set(one["kl"]) == {"K", "V", "chosen"} and len(one["sides"]) == 8
        assert all(0 < side["row_bytes"] <= most for side in one["sides"])
    assert all(one["k"] >= 1 for one in graded["bounds"])
    bases = run(bench_bases.main, path)
    kinds = [one["basis"] for one in bases["bases"] if one["side"] == "v"]
    assert kinds == ["plan", "weighted", "centred", "oscar"] * 2
    assert all(one["times_less"] > 0 for one in bases["bases"])
    found = run(bench_formats.main, path, "--sample=2", "--budget=3.25")["budgets"]["3.25"]
    assert found["exhaustive"]["predicted"] <= found["allocate"]["predicted"] * (1 + 1e-9)
    assert found["uniform"]["bits"] == 3.25 and set(found["uniform"]["formats"]) == {"int3 int3"}
    assert [*json.loads(path.read_text())["models"]] == [MODEL.name]
