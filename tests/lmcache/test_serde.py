"""The serde of LMCache on its own base classes and objects; only where LMCache is installed."""

from __future__ import annotations

import select
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from example_plan import example_plan
from refusals import assert_refused

from kvquant import CachePlan, CheckpointError, ConfigError, ShapeError, UnsupportedError
from kvquant.ops.quantize import dequantize_rows, quantize_calibrated, quantize_rows
from kvquant.rows.format import RowFormat

pytestmark = pytest.mark.filterwarnings("default")  # LMCache's own
pytest.importorskip("lmcache")
serde = pytest.importorskip("kvquant.lmcache.serde")  # which ignores the warnings of its import

LAYERS, TOKENS, HEADS, DIM = 3, 40, 4, 64


def memory(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> Any:
    """An object of LMCache, full of NaN."""
    from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

    sizes = [torch.Size(shape) for shape in shapes]
    size = sum(shape.numel() for shape in sizes) * dtype.itemsize
    raw = torch.full((size,), 255, dtype=torch.uint8)
    known = MemoryObjMetadata(
        sizes[0], dtype, 0, size, 1, shapes=sizes, dtypes=[dtype] * len(sizes)
    )
    return TensorMemoryObj(raw, known, None)


def key(rank: int = 0, ranks: int = 1) -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(b"chunk", "model", ObjectKey.ComputeKVRank(ranks, rank, ranks, rank))


def layout(shapes: Sequence[Sequence[int]]) -> Any:
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    sizes = [torch.Size(shape) for shape in shapes]
    return MemoryLayoutDesc(sizes, [torch.bfloat16] * len(sizes))


def new_values() -> torch.Tensor:
    """[2, layers, tokens, heads, dim], bfloat16, with an offset of keys."""
    values = torch.randn(2, LAYERS, TOKENS, HEADS, DIM)
    values[0, ..., 7] += 40
    return values.bfloat16()


def there_and_back(one: Any, values: torch.Tensor, at: Any) -> torch.Tensor:
    """The same values, with heads and their elements in one axis or in two."""
    shape = [*values.shape[:3], values[0, 0, 0].numel()] if values.ndim > 3 else [*values.shape]
    src, dst = memory([shape], torch.bfloat16), memory([shape], torch.bfloat16)
    src.tensor.copy_(values.reshape(shape))
    size = one.estimate_serialized_size(layout([shape]))
    stored = memory([[size]], torch.uint8)
    assert one.serialize(src, stored, at) == size
    one.deserialize(stored, dst, at)
    found: torch.Tensor = dst.tensor.view_as(values)
    return found


def test_lmcache_makes_it_by_its_name_and_waits_for_it() -> None:
    from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor

    given = {"k_format": "int3", "v_format": "int2", "head_dim": DIM}
    one = create_serde_processor(SerdeConfig("kvquant", given))
    shapes = [(2, LAYERS, TOKENS, HEADS * DIM), (2, 1, TOKENS, 2 * DIM)]  # two groups of layers
    src, dst = memory(shapes, torch.bfloat16), memory(shapes, torch.bfloat16)
    for group in range(2):
        src.get_tensor(group).view(torch.bfloat16).copy_(
            torch.randn(shapes[group]).view(src.get_tensor(group).shape)
        )
    formats = [RowFormat.parse(name, DIM) for name in ("int3", "int2")]
    size = one.estimate_serialized_size(layout(shapes))
    tokens = TOKENS * (LAYERS * HEADS + 2)
    assert size == 32 + tokens * sum(fmt.row_bytes for fmt in formats)
    stored = memory([[size]], torch.uint8)
    waits = select.poll()
    waits.register(one.get_serialize_event_fd(), select.POLLIN)
    task = one.submit_serialize([src], [stored], [key()])
    assert waits.poll(60_000)
    assert one.query_serialize_result(task) is True
    assert stored.get_size() == size
    task = one.submit_deserialize([stored], [dst], [key()])
    one.close()  # when all is done
    assert one.query_deserialize_result(task) is True
    for group, shape in enumerate(shapes):
        for side, fmt in enumerate(formats):
            given_rows, found = (
                x.get_tensor(group).view(torch.bfloat16).view(shape)[side].unflatten(-1, (-1, DIM))
                for x in (src, dst)
            )
            wanted = dequantize_rows(quantize_rows(given_rows, fmt), fmt, torch.bfloat16)
            assert torch.equal(found, wanted)


@pytest.fixture
def plan(tmp_path: Path) -> CachePlan:
    """Of 3 layers, whose last is kept in 16 bit; no two heads are alike."""
    path, made = tmp_path / "plan.safetensors", example_plan(LAYERS, HEADS, DIM)
    made.tensors["k.matrix"].mul_(torch.arange(1, HEADS + 1)[None, :, None, None])
    made.save(path)
    return CachePlan.load(path)


def test_a_plan_gives_each_layer_its_formats_and_each_rank_its_bases(
    plan: CachePlan, tmp_path: Path
) -> None:
    one, values = serde.RowSerde(plan=plan), new_values()
    plan.save(tmp_path / "again.safetensors")
    assert serde.RowSerde(plan=tmp_path / "again.safetensors")._tag == one._tag
    found = there_and_back(one, values, key())
    for layer, (bases, names) in enumerate(zip(plan.layers, plan.formats, strict=True)):
        for side, (basis, name) in enumerate(zip(bases, names, strict=True)):
            x, fmt = values[side, layer].transpose(0, 1)[None], RowFormat.parse(name, DIM)
            x = basis.encode(x)
            rows = quantize_calibrated(x, fmt, clip=basis.clip, feedback=basis.feedback)
            wanted = basis.decode(dequantize_rows(rows, fmt)).bfloat16()[0].transpose(0, 1)
            assert torch.equal(found[side, layer], wanted), f"layer {layer}, side {side}"
    for rank in range(2):
        share = slice(2 * rank, 2 * rank + 2)
        part = there_and_back(one, values[..., share, :].contiguous(), key(rank, 2))
        assert torch.equal(part, found[..., share, :])
    plain = serde.RowSerde(DIM, "int4")
    error = [
        (x - values)[0, 1].float().norm() for x in (found, there_and_back(plain, values, key()))
    ]
    assert error[0] < 0.5 * error[1]


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_k_and_v_of_a_head_side_by_side_as_vllm_has_them(order: str, plan: CachePlan) -> None:
    """LMCache itself makes objects of pages [num_pages, heads, page_size, 2 * head_dim], or with
    heads behind tokens."""
    from lmcache.v1.multiprocess.transfer_context.base import gather_paged_kv_to_cpu

    values, page = new_values(), 8
    order_of_pages = torch.randperm(TOKENS // page)
    pages = values.movedim(0, -2).flatten(-2).unflatten(1, (-1, page))[:, order_of_pages.argsort()]
    if order == "HND":
        pages = pages.transpose(2, 3)
    given = {f"layer {i}": x.contiguous() for i, x in enumerate(pages)}
    (gathered,) = gather_paged_kv_to_cpu(
        given, order_of_pages.tolist(), TOKENS // page, layout_hints={"kv_layout": order}
    )
    assert gathered.shape == (LAYERS, TOKENS, HEADS * 2 * DIM)
    one = serde.RowSerde(plan=plan)
    found = there_and_back(one, gathered, key()).unflatten(-1, (HEADS, 2, DIM)).movedim(-2, 0)
    assert torch.equal(found, there_and_back(one, values, key()))  # in two planes


@pytest.mark.parametrize("planned", [False, True], ids=["plain", "plan"])
@pytest.mark.parametrize(
    "shape", [(LAYERS, 0, HEADS * 2 * DIM), (2, LAYERS, 0, HEADS * DIM)], ids=["heads", "planes"]
)
def test_an_object_without_tokens(shape: tuple[int, ...], planned: bool, plan: CachePlan) -> None:
    one = serde.RowSerde(plan=plan) if planned else serde.RowSerde(DIM, "int8", "int4")
    assert one.estimate_serialized_size(layout([shape])) == serde.TAG
    stored, empty = memory([[serde.TAG]], torch.uint8), memory([shape], torch.bfloat16)
    assert one.serialize(empty, stored, key()) == serde.TAG
    one.deserialize(stored, empty, key())
    stored.tensor[0] ^= 1
    with pytest.raises(CheckpointError, match="other formats or another plan"):
        one.deserialize(stored, empty, key())


def test_what_other_formats_or_another_plan_stored_is_refused(plan: CachePlan) -> None:
    shape = (2, LAYERS, TOKENS, HEADS * DIM)
    made = [serde.RowSerde(DIM, "int4"), serde.RowSerde(plan=plan, k_format="int4")]
    made.append(serde.RowSerde(plan=plan.with_formats("int4").without_v_bases()))
    for one in made:
        size = one.estimate_serialized_size(layout([shape]))
        stored = memory([[size]], torch.uint8)
        one.serialize(memory([shape], torch.bfloat16), stored, key())
        for other in made:
            dst = memory([shape], torch.bfloat16)
            if other is one:
                other.deserialize(stored, dst, key())
                continue
            with pytest.raises((CheckpointError, ShapeError), match=r"other formats|must have"):
                other.deserialize(stored, dst, key())


def test_settings_that_are_not_possible() -> None:
    known: dict[str, Any] = {"head_dim": 64, "k_format": "int8"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "lacks head_dim: give that of the model"),
        ({"k_format": "int8"}, "lacks head_dim"),
        ({"head_dim": 64, "k_fromat": "int8"}, "it may have .'k_format', 'v_format'"),
        ({"head_dim": 64, "k_format": "int5"}, "format 'int5' does not exist"),
        (known | {"v_format": ""}, "format '' does not exist"),
        ({"plan": "auto"}, "'auto' needs the model, which is not here: give the path of a plan's"),
        ({"plan": False}, "the serde lacks head_dim"),
        (known | {"max_workers": 0}, "max_workers 0 is not possible"),
    ]
    calls = ((partial(serde.create_serde, given), message) for given, message in cases)
    assert_refused(ConfigError, *calls)


def test_objects_that_are_not_possible(plan: CachePlan) -> None:
    plain, planned = serde.RowSerde(DIM, "int8"), serde.RowSerde(plan=plan)
    message = r"it must be \[layers, tokens, KV heads \* 2 \* 64\] or \[2, layers, tokens, KV"
    for shape in ((3, 40, 576), (3, 3, 40, 64), (2, 3, 40, 96), (128,)):  # 576: latent attention
        with pytest.raises(ShapeError, match=rf"{shape[-1]}\]: {message}"):
            plain.estimate_serialized_size(layout([shape]))
    with pytest.raises(UnsupportedError, match=r"has \[2\] layers, the plan 3"):
        planned.estimate_serialized_size(layout([(2, 2, 40, HEADS * DIM)]))
    src = memory([(2, LAYERS, TOKENS, DIM)], torch.bfloat16)
    with pytest.raises(ShapeError, match=r"the buffer is 100 of torch.uint8: it must have"):
        planned.serialize(src, memory([[100]], torch.uint8), key())
    stored = memory([[100_000]], torch.uint8)
    with pytest.raises(UnsupportedError, match="has 1 KV heads on rank 1 of 2, the plan 4 on all"):
        planned.serialize(src, stored, key(1, 2))
