"""One set of names for the backends of all operations, and custom ops that torch.compile takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvquant.errors import ConfigError, DeviceError, KVQuantError
from kvquant.ops.dispatch import check_cuda_pages, kernels_for, torch_op
from kvquant.rows.format import RowFormat

ON_CPU = torch.empty(0, dtype=torch.uint8, device="cpu")
ON_META = torch.empty(0, dtype=torch.uint8, device="meta")


@pytest.mark.parametrize(
    ("tensor", "backend", "expected"),
    [(ON_CPU, None, "cpu"), (ON_CPU, "cpu", "cpu")]
    + [(tensor, "reference", "reference") for tensor in (ON_CPU, ON_META)],
)
def test_a_backend_serves_its_device_and_the_reference_any(
    tensor: torch.Tensor, backend: str | None, expected: str
) -> None:
    assert kernels_for(tensor, backend) == expected


@pytest.mark.parametrize(
    ("tensor", "backend", "error", "message"),
    [
        (
            ON_CPU,
            "cuda",
            DeviceError,
            "'cuda' takes CUDA tensors, not cpu: leave it out, or use 'reference'",
        ),
        (ON_META, "cpu", DeviceError, "'cpu' takes CPU tensors, not meta"),
        (ON_META, None, DeviceError, "no kernel serves meta: move .* backend='reference'"),
        (ON_CPU, "torch", ConfigError, "'torch' does not exist: use cpu, cuda or reference"),
        (ON_CPU, 1, ConfigError, "backend 1 does not exist"),
    ],
)
def test_the_reference_is_never_chosen_unasked(
    tensor: torch.Tensor, backend: Any, error: type[KVQuantError], message: str
) -> None:
    with pytest.raises(error, match=message):
        kernels_for(tensor, backend)


def test_an_op_is_one_node_of_a_compiled_graph() -> None:
    def double(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * 2)

    called: list[torch.Size] = []
    schema = "(Tensor x, Tensor(a!) out) -> ()"
    op = torch_op("test_double", schema, double, lambda x, out: called.append(x.shape))
    assert op is torch.ops.kvquant.test_double

    def call(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        op(x, out)
        return out + 1

    x = torch.arange(6, dtype=torch.float32, device="cpu").view(2, 3)
    out = torch.zeros(2, 3, dtype=torch.float32, device="cpu")
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, out), x * 2 + 1)
    assert torch.equal(out, x * 2)
    assert called and called[0] == x.shape


def test_pages_of_few_rows_begin_at_multiples_of_16_bytes_on_cuda() -> None:
    """68 bytes a row of INT4: four of them are a multiple of 16."""
    formats = [RowFormat.parse(name, 128) for name in ("int4-g4", "int4")]
    check_cuda_pages(formats, 4)
    check_cuda_pages(formats[:1], 1)
    with pytest.raises(ConfigError, match=r"pages of 2 rows of int4 .* page_size 4"):
        check_cuda_pages(formats, 2)
