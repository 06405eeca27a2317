"""Packs vLLM for a GPU machine where it cannot be installed (gpu_pack.py).

    python tests/vllm/on_gpu/build.py .vllm-gpu     # where there is a network: 3 minutes
    . tests/vllm/on_gpu/setup.sh .vllm-gpu          # on the GPU machine

The folder gets one file of 34 MB. vLLM's compiled operators and FlashAttention 3 use torch's stable
interface, so torch 2.11 loads them, though the wheel asks for 2.13. The pack lacks FlashAttention
2, FlashMLA, DeepGEMM, FlashInfer, and grammars for structured output (stand_ins.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from gpu_pack import Pack

# What vLLM imports and the machine lacks; make test-vllm runs with these versions.
PACKAGES = """
annotated-types astor blake3 cachetools cbor2 compressed-tensors==0.17.0 depyf==0.20.0 dill distro
fastapi==0.136.3 httpcore2 httpx2 ijson jiter jmespath jsonschema jsonschema-specifications
lark==1.2.2 loguru model-hosting-container-standards==0.1.16 msgspec openai==3.54.0
oss-harmony==0.0.11 partial-json-parser platformdirs prometheus-fastapi-instrumentator==8.1.0
pybase64 pydantic==2.14.4 pydantic-core==2.50.5 pydantic-settings python-dotenv python-json-logger
python-multipart pyzmq referencing rpds-py setproctitle sniffio starlette==1.10.0 truststore
typing-inspection uvicorn watchfiles
""".split()
# Packages that these require. No engine or server that the tests start imports them
# (test_cuda_platform.py).
NOT_NEEDED = """
anthropic apache-tvm-ffi fastsafetensors flashinfer-python humming-kernels instanttensor llguidance
lm-format-enforcer mcp mistral-common nvidia-cudnn-frontend nvidia-cutlass-dsl nvtx
opentelemetry-api opentelemetry-exporter-otlp opentelemetry-sdk
opentelemetry-semantic-conventions-ai outlines-core pynvvideocodec quack-kernels supervisor tilelang
tokenspeed-mla torchcodec xgrammar
""".split()
PACK = Pack(
    name="vllm",
    engine=["vllm"],
    wheels=["vllm==0.32.0", *PACKAGES],
    not_needed=NOT_NEEDED,
    left_out=[
        "vllm/benchmarks/*",
        # models in folders of their own that no other module imports
        *(f"vllm/models/{x}/*" for x in ("deepseek_v32", "deepseek_v41", "dots3_note", "hy_v4")),
        *(f"vllm/models/{x}/*" for x in ("glm5next", "inkling", "kimi_k3", "qwen4_exp")),
        "vllm/third_party/deep_gemm/*",
        "vllm/third_party/fmha_sm100/*",
        "vllm/third_party/tml_fa4/*",
        "vllm/vllm_flash_attn/cute/*",
    ],
    kept=[],
    compiled=[
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/_moe_C_stable_libtorch.abi3.so",
        "vllm/cumem_allocator.abi3.so",  # sleep mode
        "vllm/fs_io_C.abi3.so",
        "vllm/spinloop.abi3.so",
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    ],
    files={},
    group="vllm.general_plugins",
)

if __name__ == "__main__":
    PACK.build()
