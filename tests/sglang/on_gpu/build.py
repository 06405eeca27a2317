"""Packs SGLang for a GPU machine where it cannot be installed (gpu_pack.py).

    python tests/sglang/on_gpu/build.py .sglang-gpu     # where there is a network: 3 minutes
    . tests/sglang/on_gpu/setup.sh .sglang-gpu          # on the GPU machine

The folder gets one file. SGLang's own compiled operators (sglang-kernel) do not load on that
machine, because they need torch 2.14. load_utils.py stands in for them, and layers use torch's
operators. SGLang compiles the operator that stores K and V in 16 bit when it runs, by the machine's
nvcc. Without this operator SGLang uses torch's. The pack lacks FlashInfer, FlashAttention 3 and 4,
the server in Rust, and grammars for structured output (stand_ins.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from gpu_pack import Pack

# What SGLang imports and the machine lacks.
PACKAGES = """
annotated-types apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 dill distro fastapi==0.136.3 gguf
interegular ipython jiter loguru msgspec openai==2.8.0 openai-harmony==0.0.4 orjson
partial-json-parser platformdirs pybase64 pydantic==2.14.4 pydantic-core==2.50.5 python-multipart
pyzmq setproctitle sniffio starlette==1.10.0 traitlets typing-inspection uvicorn watchfiles
""".split()
# Packages that these require. No engine that the tests start imports them.
NOT_NEEDED = """
anthropic blobfile cuda-python datasets decorator deepseek-recipe easydict
flash-attn-4 flashinfer-python humming-kernels ipython-pygments-lexers jedi kernels llguidance
matplotlib-inline mistral-common modelscope nvidia-cutlass-dsl nvidia-mathdx nvshmem4py-cu13
outlines pexpect prompt-toolkit psutil py-spy quack-kernels sgl-deep-ep sgl-deep-gemm sgl-flash-mla
smg-grpc-servicer soundfile stack-data tilelang tml-renderers torch-memory-saver torchcodec xgrammar
zstandard
""".split()
HERE, DUAL_GEMM = Path(__file__).parent, "cutedsl_dual_gemm.py"
PACK = Pack(
    name="sglang",
    engine=["sglang", "sgl_kernel"],
    wheels=["sglang==0.5.23", "sglang-kernel==0.4.10", *PACKAGES],
    not_needed=NOT_NEEDED,
    left_out=["sglang/multimodal_gen/*", "sglang/test/*", "sglang/benchmark/*", "triton_kernels/*"],
    kept=["sglang/kernels/jit/csrc/*", "sglang/kernels/jit/include/*"],
    compiled=[],
    files={
        "sgl_kernel/load_utils.py": HERE / "load_utils.py",
        f"sglang/kernels/ops/gemm/{DUAL_GEMM}": HERE / DUAL_GEMM,
    },
    group="sglang.srt.plugins",
)

if __name__ == "__main__":
    PACK.build()
