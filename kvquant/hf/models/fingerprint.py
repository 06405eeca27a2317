"""Fingerprints of weights: which model it is, down to the fine-tune.

Fine-tunes share a config, so a fingerprint samples every tensor of weights. It does not depend on
storage: a dtype that keeps bfloat16 values, the order, the number of files, the device.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ...errors import UnsupportedModelError
from ...io.model_id import HALF, WEIGHTS
from ...io.model_source import is_gguf
from .loading import empty_model, load, located, stored_tensors

log = logging.getLogger("kvquant")
BLOCKS, BLOCK = 64, 64  # samples of a tensor: blocks of elements, that few pages of a file are read
FOLDED = "kvquant_folded"  # on a model with a plan's bases of V folded in: its fingerprint before
LEAST = 2.0**-14  # magnitudes below count as 0: float16 holds bfloat16's values from here on


def fingerprint(model: torch.nn.Module) -> str:
    """Name the weights of a loaded model.

    Two models have one fingerprint if their layers have tensors of the same shapes and 4,096
    elements, evenly spread, of each are the same bfloat16 numbers. Tied tensors count once. Each
    call takes about 0.1 s and follows weights that change, except by CachedModel.fold_values: that
    leaves the model's results as they were.

    Args:
        model: any module. All ranks of a spread model call this and get the whole's fingerprint.

    Returns:
        64 hexadecimal digits.

    Raises:
        UnsupportedModelError: weights are not in memory (device_map has offloaded them).

    Example:
        >>> import torch
        >>> from kvquant.hf.models.fingerprint import fingerprint
        >>> layer = torch.nn.Linear(8, 8)
        >>> before = fingerprint(layer)
        >>> fingerprint(layer.to(torch.bfloat16)) == before
        True
        >>> with torch.no_grad():
        ...     _ = layer.bias.add_(1)
        >>> fingerprint(layer) == before
        False
    """
    before: str | None = getattr(model, FOLDED, None)
    return before or _combined(model.state_dict(keep_vars=True).items())


def identified(model: Any) -> dict[str, Any]:
    """Config and fingerprint of a loaded model; a warning, and no fingerprint, if offloaded."""
    config: dict[str, Any] = model.config.to_dict()
    try:
        half = {HALF: True} if model.dtype == torch.float16 else {}
        return {**config, WEIGHTS: fingerprint(model), **half}
    except UnsupportedModelError as error:
        log.warning("kvquant: plans and files cannot be compared with these weights: %s", error)
        return config


def fingerprint_of(source: str | Path) -> str:
    """Name the weights of a model that is not loaded: as `fingerprint` of the loaded model.

    kvquant reads only samples of a folder. It loads a GGUF file in bfloat16: this takes seconds per
    GB, and 2 bytes a weight.

    Args:
        source: a folder with safetensors files, a GGUF file, or a name on the hub.

    Raises:
        ConfigError: as CachedModel.from_pretrained.
        UnsupportedModelError: transformers makes other weights from the folder's (it fuses experts,
            for example): load the model.

    Example:
        >>> from kvquant import CachedModel
        >>> from kvquant.cli.demo import MODEL  # a folder with a model
        >>> from kvquant.hf.models.fingerprint import fingerprint, fingerprint_of
        >>> fingerprint_of(MODEL) == fingerprint(CachedModel.from_pretrained(MODEL).model)
        True
    """
    source = located(source)
    if is_gguf(source):
        return fingerprint(load(source, torch.bfloat16)[0])
    stored = stored_tensors(source)
    model = empty_model(source)
    wanted = model.state_dict(keep_vars=True)
    prefix = f"{model.base_model_prefix}."
    found: dict[str, torch.Tensor] = {}
    for name in wanted:
        known = name if name in stored else name.removeprefix(prefix)
        if known in stored:
            found[name] = stored[known]
    tied = {id(wanted[name]) for name in found}
    missing = [name for name, tensor in wanted.items() if id(tensor) not in tied]
    if missing:
        raise UnsupportedModelError(
            f"{source} stores no {missing[0]}, which transformers makes of other tensors when it "
            "loads the model: load the model, and take kvquant.hf.models.fingerprint.fingerprint"
        )
    return _combined(found.items())


def _combined(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The digest of a set of tensors: equal ones of one layer (tied ones) count once."""
    each = {_digest(name, x) for name, x in tensors if isinstance(x, torch.Tensor)}
    return hashlib.sha256(b"".join(sorted(each))).hexdigest()


def _digest(name: str, tensor: torch.Tensor) -> bytes:
    """Digest of a tensor: the numbers in its name (layer, expert), its shape and samples."""
    # Words of the name are left out: versions of transformers and wrappers change them.
    if tensor.is_meta:
        raise UnsupportedModelError(
            f"{name} is not in memory (offloaded by device_map): load the model whole"
        )
    whole = getattr(tensor, "full_tensor", None)  # of a DTensor
    flat = (tensor if whole is None else whole()).detach().reshape(-1)
    if len(flat) > BLOCKS * BLOCK:
        starts = torch.arange(BLOCKS, device=flat.device) * (len(flat) - BLOCK) // (BLOCKS - 1)
        flat = flat[(starts[:, None] + torch.arange(BLOCK, device=flat.device)).flatten()]
    if flat.is_floating_point():
        rounded = flat.to(torch.bfloat16).float()
        flat = torch.where(rounded.abs() < LEAST, 0.0, rounded)
    place = f"{re.findall('[0-9]+', name)} {list(tensor.shape)} "
    return hashlib.sha256(place.encode() + flat.cpu().numpy().tobytes()).digest()
