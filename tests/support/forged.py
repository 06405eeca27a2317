"""Files of kvquant as a hostile writer would change them: sealed anew, with checksums that fit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

GONE = object()  # in place of a value: the key goes
Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def manifest_of(path: Path) -> dict[str, Any]:
    """The manifest of a file."""
    with safe_open(path, framework="pt") as file:
        manifest: dict[str, Any] = json.loads(file.metadata()["kvquant_file"])
    return manifest


def sha256(tensor: torch.Tensor) -> str:
    """The SHA-256 of a tensor's bytes, in hexadecimal digits."""
    return hashlib.sha256(
        tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def write(path: Path, top: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write a file of this manifest and these tensors; without "sha256" it gets those of them."""
    top = {"sha256": {name: sha256(tensor) for name, tensor in tensors.items()}} | top
    text = json.dumps(top)
    seal = hashlib.sha256(text.encode()).hexdigest()
    save_file(tensors, path, {"kvquant_file": text, "kvquant_file_sha256": seal})


def forge(path: Path, edit: Edit, *, digests: bool = True) -> None:
    """Change the manifest and the tensors of a file.

    Args:
        path: of the file.
        edit: what to do with them.
        digests: whether the tensors' checksums are made to fit; else they stay as they were.
    """
    top, tensors = manifest_of(path), load_file(path)
    if digests:
        del top["sha256"]
    edit(top, tensors)
    write(path, top, tensors)


def put(place: str, value: Any, top: dict[str, Any]) -> None:
    """Put a value at a place of a manifest: keys and indices with dots, names of tensors with /."""
    *keys, last = (key.replace("/", ".") for key in place.split("."))
    at: Any = top
    for name in keys:
        at = at[int(name) if isinstance(at, list) else name]
    key: Any = int(last) if isinstance(at, list) else last
    if value is GONE:
        del at[key]
    else:
        at[key] = value
