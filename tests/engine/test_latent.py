"""Steps of a layer with latent attention on hand-made pages, against float64. Without vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fake_cuda import CPU, FakeDriver, install_for_caches, loaded_specs
from hypothesis import example, given, settings
from hypothesis import strategies as st
from latent_plans import latent_plan, random_basis
from relative_l2 import relative_l2

from kvquant import ConfigError, LatentFormat, UnsupportedError
from kvquant.engine.contract import NewTokens
from kvquant.engine.latent import (
    LatentCalls,
    LatentRows,
    append_latents,
    attend_to_latents,
    latents_at,
)
from kvquant.engine.settings import LatentSettings
from kvquant.engine.step import describe_step
from kvquant.io.plan import CachePlan
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.kernels.cuda.runtime.warmup import kernels_of
from kvquant.ops import mla, rows_at, transform

LATENT, ROPE, HEADS, PAGE, SCALE = 512, 64, 16, 16, 192**-0.5
LENS = [70, 1, 33, 16]  # tokens of sequences before a step
DEVICES = [
    pytest.param("cpu", torch.float32, 2e-5),
    pytest.param("cuda", torch.bfloat16, 6.3e-3, marks=pytest.mark.gpu),
]


class Pages:
    """Pages in which sequences have tokens; all unused memory is NaN."""

    def __init__(self, layer: LatentRows, device: str, dtype: torch.dtype) -> None:
        self.layer, self.dtype, self.device = layer, dtype, torch.device(device)
        used = [-(-(length + 4) // PAGE) for length in LENS]
        shape = sum(used) + 2, PAGE, layer.fmt.row_bytes
        self.pages = torch.full(shape, 255, dtype=torch.uint8, device=device)
        order = torch.randperm(shape[0], dtype=torch.int32)[: sum(used)].split(used)
        self.table = torch.full((len(LENS), max(used)), -1, dtype=torch.int32)
        for row, places in zip(self.table, order, strict=True):
            row[: len(places)] = places
        self.table = self.table.to(device)
        self.lens = [0] * len(LENS)
        self.append(LENS)

    def slots(self, first: Sequence[int], end: Sequence[int]) -> torch.Tensor:
        found = []
        for i, (begin, stop) in enumerate(zip(first, end, strict=True)):
            token = torch.arange(begin, stop, device=self.device)
            found.append(self.table[i, token // PAGE].long() * PAGE + token % PAGE)
        return torch.cat(found)

    def append(self, counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """New tokens of each sequence, and one of no slot: latents and RoPE parts."""
        after = [length + count for length, count in zip(self.lens, counts, strict=True)]
        latent, rope = (
            torch.randn(sum(counts) + 1, dim, device=self.device).to(self.dtype)
            for dim in (LATENT, ROPE)
        )
        none = torch.tensor([-1], device=self.device)
        slots = torch.cat([self.slots(self.lens, after), none])
        append_latents(self.layer, latent, rope, self.pages, slots)
        self.lens = after
        return latent[:-1], rope[:-1]

    def values(self, sequence: int) -> torch.Tensor:
        """Keys of a sequence, [tokens, LATENT + ROPE], float32."""
        ends = [length if i == sequence else 0 for i, length in enumerate(self.lens)]
        slots = self.slots([0] * len(ends), ends)
        out = torch.empty(len(slots) * (LATENT + ROPE), device=self.device)
        return torch.cat(latents_at(self.layer, self.pages, slots, out), -1)[:, 0]


def layer(name: str, device: str = "cpu", *, in_basis: bool = False) -> LatentRows:
    basis = random_basis(LATENT, ROPE).to(device) if in_basis else None
    return LatentRows(LatentFormat.parse(name), SCALE, basis)


@pytest.mark.parametrize(("device", "dtype", "most"), DEVICES)
@pytest.mark.parametrize("in_basis", [False, True], ids=["as they came", "in a basis"])
@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [3, 3, 3, 3], [1, 4, 2, 0]], ids=str)
@pytest.mark.parametrize("name", ["fp8", "int4-g8+int8-g4"])
def test_decoding_sequences_attend_to_their_rows(
    name: str, counts: list[int], in_basis: bool, device: str, dtype: torch.dtype, most: float
) -> None:
    held = Pages(layer(name, device, in_basis=in_basis), device, dtype)
    held.append(counts)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    lens = torch.tensor(held.lens, dtype=torch.int32)
    new = NewTokens(held.table, lens.to(device), starts, lens, sum(counts), 4)
    q_latent, q_rope = (
        torch.randn(sum(counts) + 2, HEADS, dim, device=device).to(dtype) for dim in (LATENT, ROPE)
    )
    found = attend_to_latents(held.layer, describe_step(new), q_latent, q_rope, held.pages)
    assert found.shape == (sum(counts), HEADS, LATENT) and found.dtype == dtype
    q = torch.cat([q_latent, q_rope], -1)
    check_each(found, held, q[: sum(counts)], counts, most)


def check_each(
    found: torch.Tensor, held: Pages, q: torch.Tensor, counts: Sequence[int], most: float
) -> None:
    """Each sequence's queries have attended to its own rows: float64 beside found."""
    for i, (out, queries) in enumerate(zip(*(x.split(counts) for x in (found, q)), strict=True)):
        keys, count = held.values(i).double(), len(queries)
        scores = torch.einsum("qhd,kd->hqk", queries.double(), keys) * SCALE
        seen = torch.arange(len(keys)) <= torch.arange(len(keys) - count, len(keys))[:, None]
        scores = scores.masked_fill(~seen.to(q.device), -torch.inf)
        wanted = torch.einsum("hqk,kd->qhd", scores.softmax(-1), keys[:, :LATENT])
        assert not count or relative_l2(out.double(), wanted) < most, f"sequence {i}"


# new tokens of each sequence, and tokens that a graph pads
STEPS = st.tuples(st.lists(st.integers(0, 4), min_size=4, max_size=4), st.integers(0, 5))


@settings(max_examples=25)
@given(case=STEPS)
@example(case=([2, 1, 0, 1], 4))  # as many with the padding as two of each sequence
@example(case=([1, 0, 1, 1], 1))  # an idle sequence before others
@example(case=([1, 1, 1, 1], 3))  # padding for which there is no sequence
@example(case=([0, 0, 0, 0], 3))  # nothing but padding
def test_each_query_sees_its_own_sequence(case: tuple[list[int], int]) -> None:
    """Any number of tokens of each sequence, idle ones too, and any padding behind them."""
    counts, padding = case
    held = Pages(layer("int8-g4"), "cpu", torch.float32)
    held.append(counts)
    tokens, starts = sum(counts), torch.tensor([0, *counts]).cumsum(0).int()
    lens = torch.tensor(held.lens, dtype=torch.int32)
    step = describe_step(NewTokens(held.table, lens, starts, lens, tokens + padding, 4))
    q = torch.randn(tokens + padding, HEADS, LATENT + ROPE)
    q[tokens:] = torch.nan  # nothing reads the padding
    found = attend_to_latents(held.layer, step, q[..., :LATENT], q[..., LATENT:], held.pages)
    assert found.shape == (tokens + padding, HEADS, LATENT)
    check_each(found[:tokens], held, q[:tokens], counts, 2e-5)


@pytest.mark.parametrize(("device", "dtype", "most"), DEVICES)
@pytest.mark.parametrize("in_basis", [False, True], ids=["as they came", "in a basis"])
def test_latents_come_back_as_they_were(
    in_basis: bool, device: str, dtype: torch.dtype, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvquant.engine.step.BLOCK", 4)  # fewer than tokens
    held = Pages(layer("int8-g4", device, in_basis=in_basis), device, dtype)
    latent, rope = held.append([3, 1, 2, 4])
    after = held.lens
    slots = held.slots([length - n for length, n in zip(after, [3, 1, 2, 4], strict=True)], after)
    out = torch.full((11 * (LATENT + ROPE),), torch.nan, device=device, dtype=dtype)
    for found, wanted in zip(
        latents_at(held.layer, held.pages, slots, out), (latent, rope), strict=True
    ):
        assert found.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
        assert relative_l2(found[:, 0].float(), wanted.float()) < 0.02  # of int8
    assert relative_l2(held.values(0)[-3:], latents_of(latent, rope)[:3]) < 0.02


def latents_of(latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    return torch.cat([latent, rope], -1).float()


@pytest.mark.extra("cuda")
@pytest.mark.parametrize("in_basis", [False, True], ids=["as they came", "in a basis"])
@pytest.mark.parametrize("name", ["fp8", "int8-g4", "int4-g8+int8-g4"])
def test_what_is_launched_was_told(
    name: str, in_basis: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver: FakeDriver = install_for_caches(monkeypatch)
    monkeypatch.setattr(mla, "kernels_for", lambda *_: "cuda")
    monkeypatch.setattr(rows_at, "kernels_for", lambda *_: "cuda")
    monkeypatch.setattr(mla, "takes_one_launch", lambda x, backend: x.dtype in transform.DTYPES)
    one = layer(name, in_basis=in_basis)
    calls = LatentCalls(one, HEADS, torch.bfloat16, PAGE, 4096, 24, 2048, most_queries=4)
    told = kernels_of([calls], runtime.gpu_of(CPU))
    assert not driver.launched and not loaded_specs(), "a rehearsal launches nothing"
    pages = torch.zeros(300, PAGE, one.fmt.row_bytes, dtype=torch.uint8)
    for counts in ([1], [1] * 7, [1] * 24, [4] * 3, [4] * 24, [1, 3, 2], [2, 2]):
        tokens, starts = sum(counts), torch.tensor([0, *counts]).cumsum(0).int()
        table = torch.zeros(len(counts), 4096 // PAGE, dtype=torch.int32)
        lens = starts.diff() + 50
        step = describe_step(NewTokens(table, lens, starts, lens, tokens, 4))
        q_latent, q_rope = (
            torch.zeros(tokens, HEADS, dim, dtype=torch.bfloat16) for dim in (LATENT, ROPE)
        )
        attend_to_latents(one, step, q_latent, q_rope, pages)
        assert {*loaded_specs()} <= {*told}, counts
    for tokens in (1, 5, 30, 700, 2000):
        latent, rope = (torch.zeros(tokens, dim, dtype=torch.bfloat16) for dim in (LATENT, ROPE))
        append_latents(one, latent, rope, pages, torch.arange(tokens))
        out = latent.new_empty(tokens * (LATENT + ROPE))
        latents_at(one, pages, torch.arange(tokens), out)
        assert {*loaded_specs()} <= {*told}, tokens
    assert loaded_specs() and len(told) < 3 * len({*loaded_specs()})


def test_settings_of_a_plan(tmp_path: Any) -> None:
    path = tmp_path / "plan.safetensors"
    plan = latent_plan(2, fmt=("int4-g8", "bf16"))
    plan.save(path)
    with pytest.raises(ConfigError, match=r"pairs of formats, and .*give format beside the plan"):
        LatentSettings.parse({"plan": str(path)})
    with pytest.raises(ConfigError, match=r'keeps layers \[1\] in 16 bit.*give {"format": "bf16"}'):
        LatentSettings.parse({"plan": str(path), "format": "int4-g8+int8-g4"})
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
