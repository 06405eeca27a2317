"""What tests/vllm/on_gpu/build.py packs of vLLM: nothing is missing that an engine or a server
imports (half a minute, where vLLM is installed)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "examples" / "llama-demo-5m")
ON_GPU = ROOT / "tests" / "vllm" / "on_gpu"


def load() -> Any:
    """build.py, whose name a package of the index has, too."""
    spec = spec_from_file_location("vllm_on_gpu_build", ON_GPU / "build.py")
    assert spec is not None and spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


PACK = load().PACK


ROWS = {
    "attention_backend": "CUSTOM",
    "additional_config": {"kvquant": {"k_format": "int4-g4", "v_format": "int4-g4"}},
}
DRAFTS = {"method": "draft_model", "model": MODEL, "num_speculative_tokens": 3}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 16 << 20},
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("serve", ROWS),
    ("start", {**ROWS, "speculative_config": DRAFTS, "kv_transfer_config": OFFLOADING}),
    ("start", {**ROWS, "env": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}),
    ("start", {"attention_backend": "FLASH_ATTN", "kv_cache_dtype": "fp8"}),
    ("start", {"attention_backend": "TRITON_ATTN"}),
]
# what an engine imports later than `start` does, and what it imports for other models
MODULES = """
vllm.compilation.backends vllm.device_allocator.cumem vllm.entrypoints.cli.main
vllm.entrypoints.openai.api_server vllm.model_executor.layers.quantization.auto_gptq
vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors
vllm.model_executor.model_loader.dummy_loader vllm.model_executor.models.gemma3
vllm.model_executor.models.gpt_oss vllm.model_executor.warmup.kernel_warmup
vllm.v1.engine.async_llm vllm.v1.engine.core vllm.v1.executor.multiproc_executor
vllm.v1.executor.uniproc_executor vllm.v1.spec_decode.ngram_proposer
vllm.v1.structured_output.backend_xgrammar vllm.v1.worker.gpu.model_runner
vllm.v1.worker.gpu_model_runner vllm.v1.worker.gpu_worker
vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector
""".split()
WITHOUT = """
import importlib.util, json, runpy, sys
import stand_ins
from fnmatch import fnmatch
from importlib.machinery import PathFinder

hidden, left_out, script, cases, modules = map(json.loads, sys.argv[1:])

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        file = name.replace(".", "/") + "/"
        if name.partition(".")[0] in hidden or any(fnmatch(file, one) for one in left_out):
            return None
        return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
sys.argv = [script, json.dumps(cases)]
runpy.run_path(script, run_name="__main__")
for name in modules:
    importlib.import_module(name)
if importlib.util.find_spec("torchvision") is None:  # the machine has it
    stand_ins.stand_in_for("torchvision")
importlib.import_module("vllm.model_executor.warmup.minimax_m3_msa_warmup")  # of all models
"""


def test_engines_start_without_what_the_pack_leaves_out(tmp_path: Path) -> None:
    """As test_cuda_platform.py starts them."""
    pytest.importorskip("vllm")
    there = packages_distributions()
    hidden = [
        name
        for name, of in there.items()
        if {canonicalize_name(x) for x in of} & {*PACK.not_needed}
    ]
    assert {"mistral_common", "xgrammar", "anthropic", "mcp"} <= {*hidden}
    assert not {"loguru", "model_hosting_container_standards"} & {*hidden}
    script = ROOT / "tests" / "support" / "vllm_on_cuda.py"
    cases = [(name, {"model": MODEL, **options}) for name, options in CASES]
    given = [json.dumps(one) for one in (hidden, PACK.left_out, str(script), cases, MODULES)]
    path = [str(ROOT / "tests" / "support" / "gpu_site"), *filter(None, sys.path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", WITHOUT, *given]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found = [
        json.loads(x.partition("FOUND ")[2]) for x in done.stdout.splitlines() if "FOUND " in x
    ]
    assert len(found) == len(cases)
    assert isinstance(found[0], int) and found[0] > 20, found[0]  # routes
    assert all(isinstance(one, dict) for one in found[1:]), found
