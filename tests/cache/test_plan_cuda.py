"""Plans on a GPU: the command that makes one, caches, and decoding, beside the CPU; minutes
while the kernels are compiled for the first time."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_cases import DIM, HEADS, RECENT, SINKS
from paged_plans import PLAN_LAYERS, make_plan
from relative_l2 import relative_l2

from kvquant import KVCache, load_cache, save_cache
from kvquant.io.plan import CachePlan

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def on_device(model: Any, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """A copy of a CachedModel."""
    exact = "fp16" if dtype == torch.float16 else model.exact_format
    return type(model)(copy.deepcopy(model.model).to(device, dtype), exact_format=exact)


def zero_data_plan(model: Any) -> CachePlan:
    from kvquant.calibration.calibrate import calibrate
    from kvquant.calibration.windows import Sizes

    plan = calibrate(model, None, sizes=Sizes(observed=1024, length=128), zero_data=True)
    assert plan is not None
    return plan


@pytest.mark.extra("hf")
def test_the_plan_of_the_gpu_is_that_of_the_cpu() -> None:
    from tiny_models import tiny_model

    plans = [zero_data_plan(on_device(tiny_model("Qwen2"), device)) for device in ("cpu", DEVICE)]
    ours, theirs = (plan.tensors for plan in plans)
    assert plans[1].formats == plans[0].formats
    for side in "kv":
        assert relative_l2(theirs[f"{side}.offset"], ours[f"{side}.offset"]) < 1e-4
        # the best matrix is free up to signs of its columns, which the solvers choose
        grams = [x[f"{side}.matrix"] @ x[f"{side}.matrix"].mT for x in (theirs, ours)]
        assert relative_l2(*grams) < 0.05


@pytest.mark.parametrize(
    ("basis", "feedback"),
    [("none", False), ("matrix", False), ("none", True), ("matrix", True)],
    ids=["offset", "matrix", "offset-feedback", "matrix-feedback"],
)
def test_a_cache_of_a_plan_holds_and_attends_as_on_the_cpu(
    basis: str, feedback: bool, tmp_path: Path
) -> None:
    plan = make_plan(basis, feedback=feedback)
    ours, theirs = (
        KVCache.from_plan(plan, 2, 100, sink_len=SINKS, recent_len=RECENT, device=device)
        for device in ("cpu", DEVICE)
    )
    for count in (40, 1, 7, 1, 1):
        rows = torch.randn(PLAN_LAYERS, 2, 2, HEADS, count, DIM).bfloat16()
        for cache in (ours, theirs):
            for layer, (k, v) in enumerate(rows.to(cache.device)):
                cache.append(layer, k, v, [count, (count + 1) // 2])
    q = torch.randn(2, 2 * HEADS, DIM).bfloat16()
    for layer in range(PLAN_LAYERS):
        for one, other in zip(ours.dequantized(layer), theirs.dequantized(layer), strict=True):
            assert relative_l2(other.cpu(), one) < 5e-3
        expected, given = (
            cache.attend(layer, x, return_lse=True)
            for cache, x in ((ours, q.float()), (theirs, q.to(DEVICE)))
        )
        assert relative_l2(given[0].cpu(), expected[0]) < 1.2e-2
        torch.testing.assert_close(given[1].cpu(), expected[1], atol=0.03, rtol=0)
    save_cache(theirs, tmp_path / "cache.safetensors")
    again = load_cache(tmp_path / "cache.safetensors", plan=plan)
    for layer in range(PLAN_LAYERS):
        for name in ("k_packed", "v_packed", "k_sinks", "v_sinks"):
            length = int(theirs.layers[layer].packed_lens.min()) if "packed" in name else SINKS
            saved, read = (getattr(one.layers[layer], name) for one in (theirs, again))
            assert torch.equal(saved[:, :, :length].cpu(), read[:, :, :length]), name


@pytest.mark.extra("hf")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_model_decodes_with_a_plan_as_on_the_cpu(dtype: torch.dtype) -> None:
    from tiny_models import tiny_model

    on_cpu = tiny_model("Llama")
    plan = zero_data_plan(on_cpu).with_formats("int8")  # with 4 bits one tie more is seen
    on_gpu = on_device(on_cpu, DEVICE, dtype)
    on_cpu.exact_format = on_gpu.exact_format
    tokens = torch.randint(0, 256, (2, 80))
    logits = []
    for one in (on_cpu, on_gpu):
        cache = one.new_cache(2, 80, plan=plan, sink_len=4, recent_len=16)
        steps = [one.prefill(cache, tokens[:, :60], chunk=24)]
        steps += [one.step(cache, column) for column in tokens[:, 60:].unbind(1)]
        logits.append(torch.stack(steps).float().cpu())
        assert cache.seq_lens.tolist() == [80, 80]
    assert relative_l2(logits[1], logits[0]) < 0.03
