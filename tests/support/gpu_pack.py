"""Packs an engine for a GPU machine where it cannot be installed; unpack.sh unpacks it there.

The machine has Python 3.12, torch 2.11 for CUDA 13, Triton 3.6, transformers 5.17, and the packages
that these require. A pack is one file. It holds the engine's wheels, without what Hopper GPUs and
our tests do not need, and the packages that the machine lacks. If a package requires another one
that neither the pack nor the machine has, the script names that one and packs nothing.

On the machine `kvquant` is that of the checkout. The pack has kvquant's entry point, by which the
engine finds kvquant.
"""

from __future__ import annotations

import argparse
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatch
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SUPPORT = Path(__file__).parent
SITE = SUPPORT / "gpu_site" / "sitecustomize.py", SUPPORT / "stand_ins.py"  # of every pack
# Packages that others require and the machine has. Their versions are not checked.
ON_MACHINE = """
aiohttp annotated-doc anyio attrs build click cloudpickle einops filelock h11 httpx huggingface-hub
idna ninja numba numpy nvidia-ml-py opencv-python-headless packaging pillow prometheus-client
protobuf psutil py-cpuinfo pygments python-dateutil pyyaml regex requests rich safetensors scipy
sentencepiece setuptools six tiktoken timm tokenizers torch torchaudio torchvision tqdm transformers
typing-extensions uvloop xxhash
""".split()
MACHINE = {  # for the markers of requirements
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "implementation_name": "cpython",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "extra": "",
}
# CUDA keeps machine code in containers ("fatbin") of entries. The head of a container is magic,
# version, size of the head, size of the rest. That of an entry is kind, version, size of the head,
# size of the code; its GPU is at byte 28.
CONTAINER, ENTRY, MACHINE_CODE, GPU = struct.Struct("<IHHQ"), struct.Struct("<HHIQ"), 2, 90
MAGIC = 0xBA55ED50
COMMAND = "xz --x86 --lzma2=preset=9 -T2"


class Pack(NamedTuple):
    """What is packed.

    name: the file is NAME.tar.xz.
    engine: top folders of the engine's wheels. From these the pack takes Python files, and those of
        `kept` and `compiled`. From other packages it takes all files.
    wheels: packages that pip downloads, without their requirements.
    not_needed: required packages that the pack may lack. No engine that our tests start imports
        them.
    left_out: patterns of the engine's files that the pack lacks.
    kept: patterns of the engine's files that the pack takes beside Python files.
    compiled: shared libraries of the engine that the pack takes. Zeros replace their machine code
        for GPUs other than sm_90: zeros compress to nearly nothing.
    files: further files by their paths in the pack. Such a file may replace one of a wheel.
    group: the group of kvquant's entry point in pyproject.toml.
    """

    name: str
    engine: Sequence[str]
    wheels: Sequence[str]
    not_needed: Collection[str]
    left_out: Sequence[str]
    kept: Sequence[str]
    compiled: Collection[str]
    files: Mapping[str, Path]
    group: str

    def build(self) -> None:
        """Download, choose and pack into the folder that the command line names."""
        parser = argparse.ArgumentParser()
        parser.add_argument("folder", type=Path)
        folder = parser.parse_args().folder
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as name:
            work = Path(name)
            site = work / "site"
            download(work, self.wheels)
            for wheel in sorted(work.glob("*.whl")):
                self.unpack(wheel, site)
            add_kvquant(site, self.group)
            if lacks := self.lacking(site):
                sys.exit("The pack would lack what its packages ask for:\n" + "\n".join(lacks))
            for file in SITE:
                shutil.copy(file, site)
            for place, file in self.files.items():
                shutil.copyfile(file, site / place)
            packed = (folder / f"{self.name}.tar.xz").resolve()
            command = ["tar", "-C", str(site), "-I", COMMAND, "-cf", str(packed), "."]
            subprocess.run(command, check=True)
        print(f"{packed}: {packed.stat().st_size / 1e6:.1f} MB")

    def unpack(self, wheel: Path, site: Path) -> None:
        """Write a package to the folder."""
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if not self.is_kept(name):
                    continue
                path = Path(archive.extract(name, site))
                if name in self.compiled:
                    path.write_bytes(without_other_gpus(path.read_bytes()))

    def is_kept(self, name: str) -> bool:
        """Whether a file of a wheel is packed."""
        if any(fnmatch(name, pattern) for pattern in self.left_out):
            return False
        if name.partition("/")[0] not in self.engine or name.endswith(".py"):
            return True
        return name in self.compiled or any(fnmatch(name, pattern) for pattern in self.kept)

    def lacking(self, site: Path) -> list[str]:
        """Requirements of the packages in a folder that neither the folder nor the machine meets.
        Extras are left out."""
        packed = {canonicalize_name(x.name): x.version for x in distributions(path=[str(site)])}
        lacks = []
        for package in distributions(path=[str(site)]):
            for line in package.requires or []:
                asked = Requirement(line)
                name = canonicalize_name(asked.name)
                if asked.marker is not None and not asked.marker.evaluate(MACHINE):
                    continue
                if name in ON_MACHINE or name in self.not_needed:
                    continue
                if name not in packed or not asked.specifier.contains(packed[name], True):
                    has = packed.get(name, "none")
                    lacks.append(
                        f"{package.name} {package.version} asks for {line}, there is {has}"
                    )
        return sorted(lacks)


def download(folder: Path, names: Sequence[str]) -> None:
    """Fetch wheels for Python 3.12 on x86-64 Linux, without their requirements."""
    tags = [f"manylinux_2_{n}_x86_64" for n in (5, 12, 17, 24, 26, 27, 28, 31, 34)]
    tags += ["manylinux1_x86_64", "manylinux2014_x86_64"]
    wanted = ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:"]
    wanted += ["--abi", "cp312", "--abi", "abi3", "--abi", "none", "--no-deps", "-d", str(folder)]
    wanted += [part for tag in tags for part in ("--platform", tag)]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", *wanted, *names], check=True)


def without_other_gpus(library: bytes) -> bytes:
    """A shared library with zeros in place of PTX and of machine code for other GPUs."""
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


def add_kvquant(site: Path, group: str) -> None:
    """Write the entry point and requirements that an installed kvquant has, by pyproject.toml."""
    text = (SUPPORT.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    point = re.search(rf'^\[project.entry-points."{group}"\]\n(\w+) = "(.*)"$', text, re.M)
    asked = re.search(r"^dependencies = \[\n(.*?)^\]$", text, re.M | re.S)
    assert point is not None and asked is not None, group
    folder = site / "kvquant_cache-0.dist-info"
    folder.mkdir(parents=True)
    lines = ["Name: kvquant-cache", "Version: 0"]
    lines += [f"Requires-Dist: {one}" for one in re.findall(r'^ *"(.*?)",', asked[1], re.M)]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    (folder / "entry_points.txt").write_text(f"[{group}]\n{point[1]} = {point[2]}\n")
