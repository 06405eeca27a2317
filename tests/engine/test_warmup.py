"""What steps of an engine will launch, told before they do. No GPU and no vLLM are needed."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from engine_pages import LATENT, LATENT_HEADS, ROPE
from fake_cuda import CPU, FakeDriver, install_for_steps, loaded_specs, note_compiled
from latent_plans import random_basis

from kvquant import AttentionVariant, Basis, LatentFormat, UnsupportedError
from kvquant.engine import warmup
from kvquant.engine.contract import LayerRows, NewTokens
from kvquant.engine.latent import (
    LatentCalls,
    LatentRows,
    append_latents,
    attend_to_latents,
    latents_at,
)
from kvquant.engine.settings import Settings
from kvquant.engine.step import Step, append, attend, describe_step
from kvquant.engine.warmup import LayerCalls, StepCalls, warm_up_layers
from kvquant.engine.window import Window, WindowRows
from kvquant.kernels.cuda.runtime import compile as compiling
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.kernels.cuda.runtime import warmup as compiled_ahead
from kvquant.kernels.cuda.runtime.warmup import kernels_of
from kvquant.rows.basis import LayerBasis
from kvquant.rows.slots import Split

pytestmark = pytest.mark.extra("cuda")
HEADS, Q_HEADS, DIM, PAGE, LONGEST = 2, 8, 128, 32, 4096
MATRIX = Basis(torch.ones(HEADS, DIM), torch.eye(DIM).expand(HEADS, DIM, DIM))
ROUNDED = Basis(torch.ones(HEADS, DIM), feedback=torch.zeros(HEADS, DIM, DIM))
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "basis": {"basis": LayerBasis(MATRIX, MATRIX)},
    "feedback": {"basis": LayerBasis(ROUNDED, ROUNDED)},
    "gpt-oss": {"variant": AttentionVariant(sink_logits=torch.zeros(Q_HEADS), window=64)},
}
# new tokens of each sequence, and tokens before, as vLLM may schedule them
STEPS = [([1] * n, 50) for n in (1, 2, 3, 7, 12, 17, 24)]
STEPS += [([4] * n, 50) for n in (1, 3, 24)]
STEPS += [([1, 4, 2], 50), ([3, 3], 50), ([1] * 9 + [30], 50)]
STEPS += [([n], past) for n in (5, 19, 40, 64, 65, 700, 2000) for past in (0, 9, 1500)]


def calls(layer: LayerRows, **options: Any) -> StepCalls:
    given = {"num_q_heads": Q_HEADS, "dtype": torch.bfloat16, "page_size": PAGE}
    given |= {"max_model_len": LONGEST, "max_num_seqs": 24, "max_num_tokens": 2048}
    return StepCalls(layer, **{**given, "most_queries": 4, **options})


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The CPU as a GPU, for whole steps."""
    return install_for_steps(monkeypatch)


@pytest.mark.parametrize(
    ("formats", "recent_len"),
    [
        *((pair, 0) for pair in (("int4-g4", "int4-g4"), ("int8", "int4-g4"), ("int3", "int2"))),
        *((pair, 40) for pair in (("int4-g4", "int4-g4"), ("int8", "int4"))),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_launched_was_told(
    name: str, formats: tuple[str, str], recent_len: int, cuda: FakeDriver
) -> None:
    """Also beside tokens in 16 bit."""
    layer = LayerRows(Settings(*formats).layout(HEADS, DIM, DIM), 0.1, **LAYERS[name])
    layout = layer.layout
    pages = torch.zeros(200, layout.num_kv_heads, PAGE, layout.token_bytes, dtype=torch.uint8)
    check_told(calls(layer, recent_len=recent_len), pages, cuda)


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("formats", [("int8", "int8"), ("int8", "int4-g4"), ("int4", "int2")])
def test_what_is_launched_with_k_and_v_apart_was_told(
    formats: tuple[str, str], page: int, cuda: FakeDriver
) -> None:
    """SGLang keeps K and V apart. CUDA reads no small pages without padding."""
    layout = Settings(*formats).layout(HEADS, DIM, DIM)
    shape = 200, HEADS, page
    pages = tuple(torch.zeros(*shape, n, dtype=torch.uint8) for n in layout.row_bytes(page))
    check_told(calls(LayerRows(layout, 0.1), page_size=page, is_apart=True), pages, cuda)


def check_told(planned: StepCalls, pages: Any, cuda: FakeDriver) -> None:
    layer = planned.layer
    window: Window | None = None
    if planned.recent_len:
        split = Split(PAGE, planned.recent_len, PAGE, planned.most_queries - 1)
        window = Window(split, 24, 200, 24, 2048, -(-LONGEST // PAGE), "cpu")
        layer = layer._replace(window=WindowRows.of(window, layer.layout, torch.bfloat16))

    def run(step: Step, tokens: int) -> None:
        q = torch.zeros(tokens, Q_HEADS, DIM, dtype=torch.bfloat16)
        k, v = torch.zeros(2, tokens, HEADS, DIM, dtype=torch.bfloat16)
        append(layer, k, v, pages, torch.arange(tokens))
        attend(layer, step, q, k, v, pages, torch.empty_like(q))

    check_launches(planned, run, cuda, 2, window)


@pytest.mark.parametrize("in_basis", [False, True], ids=["as they came", "in a basis"])
@pytest.mark.parametrize("name", ["fp8", "int8-g4", "int4-g8+int8-g4"])
def test_what_is_launched_for_latents_was_told(name: str, in_basis: bool, cuda: FakeDriver) -> None:
    basis = random_basis(LATENT, ROPE) if in_basis else None
    layer = LatentRows(LatentFormat.parse(name), 0.1, basis)
    pages = torch.zeros(200, PAGE, layer.fmt.row_bytes, dtype=torch.uint8)

    def run(step: Step, tokens: int) -> None:
        latent, rope = (torch.zeros(tokens, dim, dtype=torch.bfloat16) for dim in (LATENT, ROPE))
        append_latents(layer, latent, rope, pages, torch.arange(tokens))
        latents_at(layer, pages, torch.arange(tokens), latent.new_empty(tokens * (LATENT + ROPE)))
        if not step.chunks:  # with the tokens of prompts the engine attends
            q_latent, q_rope = (
                x[:, None].repeat_interleave(LATENT_HEADS, 1) for x in (latent, rope)
            )
            attend_to_latents(layer, step, q_latent, q_rope, pages)

    sizes = torch.bfloat16, PAGE, LONGEST, 24, 2048
    check_launches(LatentCalls(layer, LATENT_HEADS, *sizes, most_queries=4), run, cuda, 3)


def check_launches(
    planned: LayerCalls[Any],
    run: Callable[[Step, int], None],
    cuda: FakeDriver,
    most: int,
    window: Window | None = None,
) -> None:
    """Make steps. kernels_of must have named each kernel that they launch, and less than `most`
    times as many."""
    told = kernels_of([planned], runtime.gpu_of(CPU))
    assert not cuda.launched and not loaded_specs(), "a rehearsal launches nothing"
    for counts, past in STEPS:
        tokens, starts = sum(counts), torch.tensor([0, *counts]).cumsum(0).int()
        table = torch.zeros(len(counts), LONGEST // planned.page_size, dtype=torch.int32)
        lens = starts.diff() + past
        new = NewTokens(table, lens, starts, lens, tokens, most_queries=4)
        run(describe_step(new, window), tokens)
        assert {*loaded_specs()} <= {*told}, (counts, past)
    assert loaded_specs() and len(told) < most * len({*loaded_specs()})


GPU = torch.device("cuda", 0)


def int8_calls(scale: float = 0.1, name: str = "int8", **options: Any) -> StepCalls:
    return calls(LayerRows(Settings(name, name).layout(HEADS, DIM, DIM), scale), **options)


@pytest.fixture
def compiled(cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that were compiled, of each call; the log hears of each."""
    monkeypatch.setattr(warmup, "_begun", {})
    return note_compiled(monkeypatch)


def test_layers_of_a_kind_are_compiled_once(compiled: list[Any]) -> None:
    layers = [int8_calls(scale) for scale in (0.1, 0.2)]
    warm_up_layers(torch.device("cpu"), layers)
    assert not compiled
    warm_up_layers(GPU, layers)
    warm_up_layers(GPU, layers)
    wanted = kernels_of(layers[:1], runtime.gpu_of(CPU))
    assert compiled == [wanted]
    warm_up_layers(GPU, [int8_calls(num_q_heads=16)])
    assert len(compiled) == 2 and compiled[1]


def test_an_engine_begins_to_compile_before_it_waits_for_that(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()

    def compile_all(specs: Any, *_: Any) -> None:
        assert may_go_on.wait(60)
        compiled.append(specs)
        raise UnsupportedError("what fails here fails again")

    def missing(specs: Any, arch: str) -> list[Any]:
        return [spec for spec in specs if spec not in chain(*compiled)]

    monkeypatch.setattr(compiled_ahead, "missing", missing)
    monkeypatch.setattr(compiled_ahead, "compile_all", compile_all)
    one = int8_calls()
    warmup.begin_warm_up(torch.device("cpu"), one)
    assert not warmup._begun
    for _ in range(2):
        warmup.begin_warm_up(GPU, one)
    assert len(warmup._begun) == 1 and not compiled
    may_go_on.set()
    warm_up_layers(GPU, [one])  # nothing is left to do, or it would raise
    assert compiled == [kernels_of([one], runtime.gpu_of(CPU))]
    with pytest.raises(UnsupportedError, match="fails again"):
        warm_up_layers(GPU, [int8_calls(name="int4")])


def test_the_log_tells_how_far_compiling_is(
    compiled: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvquant"):
        warm_up_layers(GPU, [int8_calls()])
    told = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"kvquant: compiling \d+ kernels for sm_90, once", told[0])
    assert len(told) > 5 and told[-2] == "kvquant: compiling kernels: 100 %"
    assert re.fullmatch(r"kvquant: waited \d+\.\d s for kernels", told[-1])


@pytest.mark.parametrize("names", [("int3", "int3"), ("int4-g4", "int3")])
def test_rows_without_a_kernel_are_refused_at_the_start(
    names: tuple[str, str], cuda: FakeDriver
) -> None:
    layout = Settings(*names).layout(HEADS, 80, 80)
    with pytest.raises(UnsupportedError, match="int3 rows of head_dim 80 are not served here"):
        warm_up_layers(torch.device("cuda", 0), [calls(LayerRows(layout, 0.1))])


def test_without_the_compilers_an_engine_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UnsupportedError("the CUDA kernels need numba-cuda")

    monkeypatch.setattr(compiling, "require_extra", missing)
    with pytest.raises(UnsupportedError, match="need numba-cuda"):
        warm_up_layers(torch.device("cuda", 0), [])
    warm_up_layers(torch.device("cpu"), [])
