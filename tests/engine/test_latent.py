"""Steps of a layer with latent attention on hand-made pages, against float64. Without vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_pages import DEVICES, LATENT, LATENT_SCALE, ROPE, LatentPages
from latent_plans import latent_plan, random_basis
from relative_l2 import relative_l2

from kvquant import ConfigError, LatentFormat, UnsupportedError
from kvquant.engine.latent import LatentRows, latents_at
from kvquant.engine.settings import LatentSettings
from kvquant.engine.step import describe_step
from kvquant.io.plan import CachePlan

LENS = [70, 1, 33, 16]  # tokens of sequences before a step


def pages(name: str, device: str, dtype: torch.dtype, *, in_basis: bool) -> LatentPages:
    basis = random_basis(LATENT, ROPE).to(device) if in_basis else None
    layer = LatentRows(LatentFormat.parse(name), LATENT_SCALE, basis)
    return LatentPages(layer, LENS, 4, device, dtype)


@pytest.mark.parametrize(("device", "dtype", "most"), DEVICES)
@pytest.mark.parametrize("in_basis", [False, True], ids=["as they came", "in a basis"])
@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [3, 3, 3, 3], [1, 4, 2, 0]], ids=str)
@pytest.mark.parametrize("name", ["fp8", "int4-g8+int8-g4"])
def test_decoding_sequences_attend_to_their_rows(
    name: str, counts: list[int], in_basis: bool, device: str, dtype: torch.dtype, most: float
) -> None:
    held = pages(name, device, dtype, in_basis=in_basis)
    held.append(counts)
    q = held.queries(sum(counts) + 2)
    found = held.attended(describe_step(held.new_tokens(counts, most_queries=4)), q)
    assert found.shape == (sum(counts), q.shape[1], LATENT) and found.dtype == dtype
    for i, (out, queries) in enumerate(
        zip(found.split(counts), q[: sum(counts)].split(counts), strict=True)
    ):
        wanted = held.exact(queries, i)
        assert not len(out) or relative_l2(out.cpu().double(), wanted) < most, f"sequence {i}"


@pytest.mark.parametrize(("device", "dtype", "most"), DEVICES)
@pytest.mark.parametrize("in_basis", [False, True], ids=["as they came", "in a basis"])
def test_latents_come_back_as_they_were(
    in_basis: bool, device: str, dtype: torch.dtype, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvquant.engine.step.BLOCK", 4)  # fewer than tokens
    held, counts = pages("int8-g4", device, dtype, in_basis=in_basis), [3, 1, 2, 4]
    slots = held.slots(counts)
    given = held.append(counts)
    out = torch.full((11 * (LATENT + ROPE),), torch.nan, device=device, dtype=dtype)
    for found, wanted in zip(latents_at(held.layer, held.pages, slots, out), given, strict=True):
        assert found.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
        assert relative_l2(found[:, 0].float(), wanted[:-1].float()) < 0.02  # of int8
    assert relative_l2(held.values(0)[-3:], torch.cat(given, -1)[:3].float()) < 0.02


def test_settings_of_a_plan(tmp_path: Any) -> None:
    path = tmp_path / "plan.safetensors"
    plan = latent_plan(2, fmt=("int4-g8", "bf16"))
    plan.save(path)
    for given in ({}, {"format": "int4-g8+int8-g4"}):
        with pytest.raises(
            ConfigError, match=r'2 pairs of formats.*give format.*{"format": "bf16"'
        ):
            LatentSettings.parse({"plan": str(path), **given})
    layers = plan.facts["layers"]
    layers[-1] = layers[0]
    CachePlan(plan.facts, plan.tensors).save(path)
    settings = LatentSettings.parse({"plan": str(path), "format": "int4-g8+int8-g4"})
    assert str(settings.layout(256, 32)) == "int4-g8+int8-g4"
    assert str(LatentSettings.parse({"plan": str(path)}).layout(256, 32)) == "int4-g8"
    basis = settings.basis(1)
    assert basis is not None and torch.equal(basis.k.offset, plan.layers[1].k.offset)
    assert LatentSettings.parse({"format": "fp8"}).basis(0) is None
    with pytest.raises(UnsupportedError, match="the plan has no layer 2"):
        settings.basis(2)
