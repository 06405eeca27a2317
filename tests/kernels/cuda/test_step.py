"""The append kernel of a decode step: its launches without a GPU, machine code, and steps on a GPU
(-m gpu). In the simulator: test_append_simulated.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from append_cases import Case, append, differences, launch_append, make_call, results
from fake_cuda import FakeDriver, arguments_of, loaded_specs

from kvquant import KVCache
from kvquant.kernels.cuda.append import launch as appending
from kvquant.kernels.cuda.append.spec import StepSpec
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.rows.basis import Basis, LayerBasis, Queries
from kvquant.rows.quantize import feedback_matrix

MATRICES = Case(matrix="kv", tokens=8, heads=8)


def make_queries(case: Case, ratio: int = 4) -> Queries:
    q = torch.zeros(case.tokens, ratio * case.heads, case.head_dim, dtype=torch.bfloat16)
    return Queries(q, torch.eye(case.head_dim).expand(case.heads, -1, -1))


def test_a_step_is_one_launch(cuda: FakeDriver) -> None:
    given = make_call(MATRICES)
    found = launch_append(**given, queries=make_queries(MATRICES))
    (launched,), (spec,) = cuda.launched, loaded_specs()
    assert launched.grid == (1, 8, 6) and launched.block[0] == 256 and not launched.overlaps
    assert isinstance(spec, StepSpec) and (spec.k_matrix, spec.v_matrix) == (True, True)
    assert (spec.query, spec.groups) == ("bf16", 1)
    arguments = arguments_of(spec, launched.arguments)
    assert found is not None and arguments["step.q_out"] == found.data_ptr()
    assert (arguments["step.ratio"], arguments["step.q_matrix_stride"]) == (4, 0)


@pytest.mark.parametrize(
    ("tokens", "grid"), [(16, (2, 8, 6)), (64, (4, 8, 6)), (128, (4, 8, 6)), (161, None)]
)
def test_blocks_take_more_tokens_where_there_are_more(
    tokens: int, grid: tuple[int, ...] | None, cuda: FakeDriver
) -> None:
    case = Case(matrix="kv", tokens=tokens, heads=8)
    launch_append(**make_call(case), queries=make_queries(case))
    if grid is not None:
        assert [one.grid for one in cuda.launched] == [grid]
    else:  # a product of each side, two appends, and the product of the queries
        assert len(cuda.launched) == 5


def test_rows_of_512_elements_are_multiplied_before_they_are_appended(cuda: FakeDriver) -> None:
    """Their part of a matrix, 256 floats a lane, has no room in registers."""
    case = Case(matrix="kv", tokens=1, heads=8, head_dim=512)
    launch_append(**make_call(case), queries=make_queries(case))
    assert len(cuda.launched) == 5 and not any(isinstance(x, StepSpec) for x in loaded_specs())


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"feedback": "kv"}, 1),
        ({"feedback": "v", "matrix": ""}, 1),
        ({"rotary_dim": 64}, 4),  # after RoPE torch multiplies K
        ({"head_dim": 192, "feedback": "k"}, 4),
    ],
    ids=str,
)
def test_what_a_step_does_not_serve_is_launched_apart(
    changes: dict[str, Any], count: int, cuda: FakeDriver
) -> None:
    given: dict[str, Any] = {"matrix": "kv", "heads": 2, **changes}
    case = Case(**given)
    launch_append(**make_call(case))
    assert len(cuda.launched) + case.rotary_dim // 64 == count


@pytest.mark.parametrize("capability", [(9, 0), (8, 9)])
def test_it_overlaps_the_launch_that_finds_the_slots(
    capability: tuple[int, int], cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    given, plain = make_call(MATRICES), make_call(Case(heads=8))
    launch_append(**given, overlaps=True)
    launch_append(**plain, overlaps=True)
    odd = make_call(Case(heads=8, layout="odd"))  # a copy is made before: that must be over
    launch_append(**odd, overlaps=True)
    is_newer = capability >= (9, 0)
    assert [one.overlaps for one in cuda.launched] == [is_newer, is_newer, False]
    assert [spec.overlaps for spec in loaded_specs()] == [is_newer] * 2, (
        "the odd one has its kernel"
    )


# On a GPU

HEADS, DIM, TOKENS = 8, 128, 300


def make_basis(kind: str, feedback: bool) -> LayerBasis:
    torch.manual_seed(0)
    matrix = torch.eye(DIM) + 0.05 * torch.randn(HEADS, DIM, DIM) if kind == "matrix" else None
    roots = torch.randn(HEADS, DIM, DIM).double()
    rounding = feedback_matrix(roots @ roots.mT + torch.eye(DIM)).float() if feedback else None
    clip = torch.linspace(0.9, 1.0, HEADS)
    basis = Basis(torch.randn(HEADS, DIM), matrix, clip, rounding)
    return LayerBasis(basis, basis).to("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [1, 8, 64, 200])
@pytest.mark.parametrize(
    ("kind", "feedback"),
    [("none", False), ("matrix", False), ("none", True), ("matrix", True)],
)
def test_steps_are_append_and_attend(
    kind: str, feedback: bool, batch: int, dtype: torch.dtype
) -> None:
    bases = [make_basis(kind, feedback)]
    exact = "fp16" if dtype == torch.float16 else "bf16"
    one = KVCache(1, batch, HEADS, DIM, 512, device="cuda", exact_format=exact, bases=bases)
    k, v = torch.randn(2, batch, HEADS, TOKENS, DIM, device="cuda", dtype=dtype)
    one.append(0, k, v)
    other = one.fork()
    graph = torch.cuda.CUDAGraph()
    q = torch.randn(batch, 4 * HEADS, DIM, device="cuda", dtype=dtype)
    k, v = torch.randn(2, batch, HEADS, 1, DIM, device="cuda", dtype=dtype)
    for _ in range(2):
        out = one.step(0, q, k, v)
        other.append(0, k, v)
        assert torch.equal(out, other.attend(0, q))
    with torch.cuda.graph(graph):
        out = one.step(0, q, k, v)
    for _ in range(3):
        for x in (q, k, v):
            x.normal_()
        graph.replay()
        other.append(0, k, v)
        assert torch.equal(out, other.attend(0, q))
    for mine, wanted in zip(one._tensors(), other._tensors(), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4-g4", "int4", "int3", "int2", "int8-g2"])
@pytest.mark.parametrize("feedback", ["", "kv"])
def test_a_step_and_a_prompt_give_the_same_bytes(
    name: str, feedback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    case = Case(k=name, matrix="kv", feedback=feedback, offset="kv", heads=4, tokens=37)
    call = make_call(case, "cuda")
    for side in "kv":  # a matrix whose products depend on the order of the sums
        transform = call[f"{side}_transform"]
        matrix = torch.randn(4, 128, 128, device="cuda")
        call[f"{side}_transform"] = transform._replace(matrix=matrix)
    rows = []
    for limit in (100, 0):
        monkeypatch.setattr(appending, "BLOCKS_PER_SM", limit)
        monkeypatch.setattr(appending, "WITH_FEEDBACK", limit)
        monkeypatch.setattr(runtime, "_launches", {})
        own = call | {name: call[name].clone() for name in ("k_rows", "v_rows", "bad")}
        append(**own)
        rows.append(results(own))
    assert not differences(*rows)
