"""What tests/sglang/on_gpu/build.py packs of SGLang, without a network."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_pack import add_kvquant
from stand_ins import StandIn

ON_GPU = Path(__file__).parent / "on_gpu"


def load(name: str) -> Any:
    """A file of that folder."""
    spec = spec_from_file_location(f"sglang_on_gpu_{name}", ON_GPU / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


PACK = load("build").PACK


@pytest.mark.parametrize(
    ("name", "is_kept"),
    [
        ("sglang/srt/models/llama.py", True),
        ("sglang/srt/rust_extensions/_server.cpython-312-x86_64-linux-gnu.so", False),
        ("sglang/kernels/jit/csrc/elementwise/kvcache.cuh", True),
        ("sglang/multimodal_gen/registry.py", False),
        ("sgl_kernel/elementwise.py", True),
        ("sgl_kernel/sm90/common_ops.abi3.so", False),
        ("sglang_kernel-0.4.10.dist-info/METADATA", True),
        ("orjson/orjson.cpython-312-x86_64-linux-gnu.so", True),
    ],
)
def test_what_is_packed(name: str, is_kept: bool) -> None:
    assert PACK.is_kept(name) == is_kept


def test_what_stands_in_for_a_file_is_there() -> None:
    assert all(path.is_file() for path in PACK.files.values())


def test_llama_takes_two_products() -> None:
    module = load("cutedsl_dual_gemm")
    assert module.MAX_DUAL_GEMM_DECODE_TOKENS == 0
    assert not module.can_use_dual_gemm(0, 4096, 14336, module.DualGemmQuantMode.UNQUANT)


def test_the_operator_that_graphs_call() -> None:
    load("load_utils")._load_architecture_specific_ops()
    x = torch.arange(6.0).view(2, 3)
    same = torch.ops.sgl_kernel.weak_ref_tensor(x)
    assert same.data_ptr() == x.data_ptr() and torch.equal(same, x)
    with pytest.raises(AttributeError, match="rmsnorm"):
        torch.ops.sgl_kernel.rmsnorm(x)


def test_a_stand_in_has_classes_that_do_nothing() -> None:
    made = StandIn("xgrammar").Grammar
    assert made.__module__ == "xgrammar" and isinstance(made(), made)
    with pytest.raises(TypeError, match="takes no arguments"):
        made("a text")


def test_the_pack_has_what_kvquant_asks_for(tmp_path: Path) -> None:
    add_kvquant(tmp_path, PACK.group)
    assert [line.partition(" asks for ")[2] for line in PACK.lacking(tmp_path)] == [
        "msgspec>=0.19, there is none",
        "platformdirs>=4, there is none",
    ]
    assert {"msgspec", "platformdirs"} <= {*PACK.wheels}
