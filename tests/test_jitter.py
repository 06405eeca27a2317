"""`pytest --jitter` reaches every way to a product (10 s); workers of pytest-xdist have whole
files, and `--every` leaves out tests."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from jitter import replace_kernels
from torch.nn.functional import conv1d, linear, scaled_dot_product_attention

# of two square matrices a and b, and a third one c
WAYS: dict[str, Callable[[Any, Any, Any], torch.Tensor]] = {
    "@": lambda a, b, c: a @ b,
    "@ of a vector": lambda a, b, c: a @ b[0],
    "@ of batches": lambda a, b, c: a.expand(2, -1, -1) @ b.expand(2, -1, -1),
    "Tensor.matmul": lambda a, b, c: a.matmul(b),
    "matmul, out": lambda a, b, c: torch.matmul(a, b, out=torch.zeros_like(a)),
    "mm": lambda a, b, c: torch.mm(a, b),
    "bmm": lambda a, b, c: torch.bmm(a[None], b[None]),
    "einsum": lambda a, b, c: torch.einsum("ij,jk->ik", a, b),
    "addmm": lambda a, b, c: torch.addmm(c, a, b),
    "addmm_": lambda a, b, c: c.clone().addmm_(a, b),
    "addmv": lambda a, b, c: torch.addmv(c[0], a, b[0]),
    "baddbmm": lambda a, b, c: torch.baddbmm(c[None], a[None], b[None]),
    "addbmm": lambda a, b, c: torch.addbmm(c, a[None], b[None]),
    "_addmm_activation": lambda a, b, c: torch._addmm_activation(c[0], a, b),
    "linear": lambda a, b, c: linear(a, b),
    "linear of 3 axes": lambda a, b, c: linear(a[None], b),
    "linear with a bias": lambda a, b, c: linear(a, b, c[0]),
    "linear of 3 axes with a bias": lambda a, b, c: linear(a[None], b, c[0]),
    "convolution": lambda a, b, c: conv1d(a, b[:, :, None]),
    "SDPA": lambda a, b, c: scaled_dot_product_attention(
        a[None, None], b[None, None], c[None, None]
    ),
    "causal SDPA of 3 axes": lambda a, b, c: scaled_dot_product_attention(
        a[None], b[None], c[None], is_causal=True
    ),
    "SDPA with a mask": lambda a, b, c: scaled_dot_product_attention(
        a[None, None], b[None, None], c[None, None], attn_mask=c > -1
    ),
}
# torch computes SDPA of 3 axes in float32: of 16-bit results few see what moves there
CASES = [
    (way, dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for way in WAYS
    if dtype == torch.float32 or way != "causal SDPA of 3 axes"
]
SIZE = 64


@pytest.fixture(autouse=True)
def _exact_products(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--jitter") is not None:
        pytest.skip("torch takes one replacement of a kernel, and --jitter made it")


@contextmanager
def jitter(seed: int) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that its kernels are replaced
        library = replace_kernels(seed)
    try:
        yield
    finally:
        library._destroy()


def matrices(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(SIZE, SIZE).to(dtype) for _ in range(3)]


@torch.no_grad()
@pytest.mark.parametrize(("way", "dtype"), CASES)
def test_each_way_to_a_product_moves_by_a_rounding(way: str, dtype: torch.dtype) -> None:
    given = matrices(dtype)
    before = WAYS[way](*given)
    with jitter(5):
        found, again = WAYS[way](*given), WAYS[way](*given)
    with jitter(6):
        other = WAYS[way](*given)
    assert torch.equal(found, again) and torch.equal(WAYS[way](*given), before)
    assert not torch.equal(found, before) and not torch.equal(found, other)
    # a unit in the last place is eps of an element at most; of float32 see FLOAT32, and SDPA's
    # softmax of scores up to 40 moves by as much
    limit = 2e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, before, rtol=limit, atol=limit)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own code
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["@", "bmm", "einsum", "addmm", "linear of 3 axes", "SDPA"])
def test_products_that_inductor_calls_move(way: str, dtype: torch.dtype) -> None:
    given = matrices(dtype)
    compiled = torch.compile(lambda *given: WAYS[way](*given) + 1, fullgraph=True)
    before = compiled(*given)
    with jitter(5):
        assert not torch.equal(compiled(*given), before)
    torch._dynamo.reset()


@pytest.mark.parametrize("part", range(4))
def test_a_worker_has_whole_files(
    part: int, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    given = getattr(request.config, "workerinput", {}).get("mainargv", [])
    if "--dist" not in given:
        pytest.skip("asks of make's workers")
    seen = tmp_path_factory.getbasetemp().parent / "workers"  # the folder of all workers
    with seen.open("a", encoding="utf-8") as file:
        print(os.environ["PYTEST_XDIST_WORKER"], file=file)
    assert len({*seen.read_text(encoding="utf-8").split()}) == 1


def test_every_leaves_each_third_test(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list(request.session.items)
    items = [*given]
    monkeypatch.setattr(request.config.option, "every", 3)
    request.config.hook.pytest_collection_modifyitems(
        session=request.session, config=request.config, items=items
    )
    assert {*items} == {*given[::3]} and len(items) == len(given[::3])
