"""Packs vLLM for a GPU machine where it cannot be installed; setup.sh unpacks it there.

    python tests/vllm/on_gpu/build.py .vllm-gpu     # where there is a network: 3 minutes
    . tests/vllm/on_gpu/setup.sh .vllm-gpu          # on the GPU machine

The machine has Python 3.12, torch 2.11 for CUDA 13, Triton 3.6, transformers 5.17 and what they
bring. The folder gets one file of 34 MB: vLLM's wheel without what Hopper GPUs and these tests do
not need, and the packages that the machine lacks. vLLM's compiled operators and FlashAttention 3
use torch's stable interface, so torch 2.11 loads them, though the wheel asks for 2.13. Machine
code for other GPUs than sm_90 is overwritten with zeros, which pack to nothing. Not there:
FlashAttention 2, FlashMLA, DeepGEMM, FlashInfer, and grammars for structured output
(sitecustomize.py stands in for their packages). If a package asks for another one that neither the
pack nor the machine has, nothing is packed and it is named.

`kvquant` itself is the checkout; the pack has its entry point, by which vLLM finds the plugin.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from fnmatch import fnmatch
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
VLLM = "vllm==0.32.0"
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
# What they ask for and the machine has, in whatever version.
ON_MACHINE = """
aiohttp annotated-doc anyio attrs click cloudpickle einops filelock h11 httpx huggingface-hub idna
ninja numba numpy opencv-python-headless pillow prometheus-client protobuf psutil py-cpuinfo pyyaml
regex requests safetensors sentencepiece setuptools six tiktoken tokenizers torch torchaudio
torchvision tqdm transformers typing-extensions
""".split()
# What they ask for and no engine or server imports that these tests start
# (test_engines_start_without_what_the_pack_leaves_out).
NOT_NEEDED = """
anthropic apache-tvm-ffi fastsafetensors flashinfer-python humming-kernels instanttensor llguidance
lm-format-enforcer mcp mistral-common nvidia-cudnn-frontend nvidia-cutlass-dsl nvtx
opentelemetry-api opentelemetry-exporter-otlp opentelemetry-sdk
opentelemetry-semantic-conventions-ai outlines-core pynvvideocodec quack-kernels supervisor tilelang
tokenspeed-mla torchcodec xgrammar
""".split()
MACHINE = {  # for the conditions of what is asked for
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "implementation_name": "cpython",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "extra": "",
}
COMPILED = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/cumem_allocator.abi3.so",  # sleep mode
    "vllm/fs_io_C.abi3.so",
    "vllm/spinloop.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
)
LEFT_OUT = (
    "vllm/benchmarks/*",
    # models in folders of their own that no other module imports
    *(f"vllm/models/{name}/*" for name in ("deepseek_v32", "deepseek_v41", "dots3_note", "hy_v4")),
    *(f"vllm/models/{name}/*" for name in ("glm5next", "inkling", "kimi_k3", "qwen4_exp")),
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/third_party/tml_fa4/*",
    "vllm/vllm_flash_attn/cute/*",
)
# of CUDA's containers of machine code ("fatbin") and of an entry: magic, version, size of the head,
# size of the rest; kind, version, size of the head, size of the code. An entry's GPU is at byte 28.
CONTAINER, ENTRY, MACHINE_CODE, GPU = struct.Struct("<IHHQ"), struct.Struct("<HHIQ"), 2, 90
MAGIC = 0xBA55ED50
PACK = "xz --x86 --lzma2=preset=9 -T2"


def main() -> None:
    """Download, choose and pack."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        site = work / "site"
        download(work, [VLLM, *PACKAGES])
        for wheel in sorted(work.glob("*.whl")):
            unpack(wheel, site)
        if lacks := lacking(site):
            sys.exit("The pack would lack what its packages ask for:\n" + "\n".join(lacks))
        add_entry_point(site)
        (site / "sitecustomize.py").write_bytes((HERE / "sitecustomize.py").read_bytes())
        packed = (folder / "vllm.tar.xz").resolve()
        command = ["tar", "-C", str(site), "-I", PACK, "-cf", str(packed), "."]
        subprocess.run(command, check=True)
    print(f"{packed}: {packed.stat().st_size / 1e6:.1f} MB")


def download(folder: Path, names: list[str]) -> None:
    """Fetch wheels for Python 3.12 on x86-64 Linux, and not what they ask for."""
    tags = [f"manylinux_2_{n}_x86_64" for n in (5, 12, 17, 24, 26, 27, 28, 31, 34)]
    tags += ["manylinux1_x86_64", "manylinux2014_x86_64"]
    wanted = ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:"]
    wanted += ["--abi", "cp312", "--abi", "abi3", "--abi", "none", "--no-deps", "-d", str(folder)]
    wanted += [part for tag in tags for part in ("--platform", tag)]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", *wanted, *names], check=True)


def unpack(wheel: Path, site: Path) -> None:
    """Write a package to the folder; of vLLM what is_kept says."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if wheel.name.startswith("vllm-") and not is_kept(name):
                continue
            path = Path(archive.extract(name, site))
            if name in COMPILED:
                path.write_bytes(without_other_gpus(path.read_bytes()))


def is_kept(name: str) -> bool:
    """Whether a file of vLLM's wheel is packed."""
    if any(fnmatch(name, pattern) for pattern in LEFT_OUT):
        return False
    return name.endswith(".py") or name in COMPILED or ".dist-info/" in name


def lacking(site: Path) -> list[str]:
    """What packages in a folder ask for, and neither the folder nor the machine has. Extras are not
    looked at."""
    packed = {canonicalize_name(one.name): one.version for one in distributions(path=[str(site)])}
    lacks = []
    for package in distributions(path=[str(site)]):
        for line in package.requires or []:
            asked = Requirement(line)
            name = canonicalize_name(asked.name)
            if asked.marker is not None and not asked.marker.evaluate(MACHINE):
                continue
            if name in ON_MACHINE or name in NOT_NEEDED:
                continue
            if name not in packed or not asked.specifier.contains(packed[name], prereleases=True):
                has = packed.get(name, "none")
                lacks.append(f"{package.name} {package.version} asks for {line}, there is {has}")
    return sorted(lacks)


def without_other_gpus(library: bytes) -> bytes:
    """A shared library whose machine code for other GPUs, and PTX, is zeros."""
    left, at = bytearray(library), -1
    while (at := library.find(struct.pack("<I", MAGIC), at + 1)) >= 0:
        _, version, head, size = CONTAINER.unpack_from(library, at)
        if (version, head) != (1, CONTAINER.size) or at + head + size > len(library):
            continue  # these four bytes mean something else
        entry, end = at + head, at + head + size
        while entry < end:
            kind, _, head, size = ENTRY.unpack_from(library, entry)
            (gpu,) = struct.unpack_from("<I", library, entry + 28)
            if (kind, gpu) != (MACHINE_CODE, GPU):
                left[entry + head : entry + head + size] = bytes(size)
            entry += head + size
    return bytes(left)


def add_entry_point(site: Path) -> None:
    """What an installed kvquant tells vLLM, by pyproject.toml."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    group = "vllm.general_plugins"
    found = re.search(rf'^\[project.entry-points."{group}"\]\n(\w+) = "(.*)"$', project, re.M)
    assert found is not None, group
    folder = site / "kvquant_cache-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: kvquant-cache\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(f"[{group}]\n{found[1]} = {found[2]}\n")


if __name__ == "__main__":
    main()
