"""What tests/sglang/on_gpu/build.py packs of SGLang, without a network."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from gpu_pack import add_kvquant

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


def test_the_pack_has_what_kvquant_asks_for(tmp_path: Path) -> None:
    add_kvquant(tmp_path, PACK.group)
    assert [line.partition(" asks for ")[2] for line in PACK.lacking(tmp_path)] == [
        "msgspec>=0.19, there is none",
        "platformdirs>=4, there is none",
    ]
    assert {"msgspec", "platformdirs"} <= {*PACK.wheels}
