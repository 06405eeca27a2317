"""What --model_args says: pretrained=MODEL,k_format=int4-g4,recent_len=0 and so on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..calibration.fidelity import Planned
from ..errors import ConfigError, DeviceError, refuse, shown
from ..evaluation.caches import OPTIONS, parse_cache
from ..hf.model import CachedModel
from ..io.plan import AUTO
from ..rows.arguments import check_size
from ..rows.defaults import DEFAULT

DTYPES = ("float32", "bfloat16", "float16")
DEFAULTS: dict[str, Any] = {
    "pretrained": None,
    "k_format": None,
    "v_format": None,
    "plan": None,
    "sink_len": OPTIONS["sinks"],
    "recent_len": OPTIONS["recent"],
    "device": "cpu",
    "dtype": DTYPES[0],
    "batch_size": 1,
    "max_length": None,
}


def _problems(told: Mapping[str, Any]) -> Iterator[str]:
    """What is not possible, of names and words."""
    known = ", ".join(DEFAULTS)
    if unknown := ", ".join(sorted(map(str, told.keys() - DEFAULTS.keys()))):
        yield f"model_args of kvquant have no {unknown}: there are {known}"
    if told["pretrained"] is None:
        yield (
            "model_args name no model: give pretrained=MODEL, a folder, a GGUF file or a name on "
            "the Hugging Face hub"
        )
    if empty := [name for name, value in told.items() if value == ""]:
        yield f"{' and '.join(empty)} is empty: give a value, or leave it out"
    if told["plan"] is not None and (told["k_format"], told["v_format"]) != (None, None):
        yield "the plan says the formats: leave k_format and v_format out"
    if told["dtype"] not in DTYPES:
        yield f"dtype is {shown(told['dtype'])}: use one of {', '.join(DTYPES)}"


def read_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Load the model that model_args names, and read the settings of its cache.

    Args:
        given: some of DEFAULTS: the harness's texts and numbers from the command line.

    Returns:
        The arguments of KvquantLM.

    Raises:
        ConfigError: unknown names, or values that are not possible.
        KVQuantError: else as CachedModel.from_pretrained and parse_cache.
    """
    told = {**DEFAULTS, **given}
    told["plan"] = None if told["plan"] is False else told["plan"]
    refuse(ConfigError, _problems(told))
    size, most = told["batch_size"], told["max_length"]
    size = int(size) if str(size).isdecimal() else size  # --batch_size gives a text
    sizes: dict[str, Any] = {"batch_size": check_size("batch_size", size, at_least=1)}
    if most is not None:
        sizes["max_length"] = check_size("max_length", most, at_least=1)
    window = [check_size(name, told[name]) for name in ("sink_len", "recent_len")]
    dtype = getattr(torch, told["dtype"])
    try:
        model = CachedModel.from_pretrained(
            str(told["pretrained"]), dtype=dtype, device=str(told["device"])
        )
    except DeviceError as error:
        raise DeviceError(
            f"{error}. lm_eval asks for cuda:0 unless --device names another"
        ) from error
    names = [told[name] for name in ("k_format", "v_format")]
    formats = [DEFAULT if name is None else str(name) for name in names]
    if told["plan"] is not None:
        path = str(told["plan"])
        if path != AUTO:
            return {"model": model, "cache": Planned(path, Path(path).stem, *window), **sizes}
        formats = [path]
    elif model.has_latents:  # k_format alone is of the latents, as of --cache
        formats = formats[: 1 + (told["v_format"] is not None)]
    text = ("+" if model.has_latents else "/").join(formats) + ",sinks={},recent={}".format(*window)
    cache = parse_cache(text, latent=model.has_latents, model=model)
    return {"model": model, "cache": cache, **sizes}
