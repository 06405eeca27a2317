"""Custom ops that torch.compile takes, and pages that CUDA takes."""

from __future__ import annotations

import pytest
import torch

from kvquant.errors import ConfigError
from kvquant.ops.dispatch import check_cuda_pages, torch_op
from kvquant.rows.format import RowFormat


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
