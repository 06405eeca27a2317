"""A cache as text: K[/V][,sinks=N][,recent=N], or a plan's file in place of the formats.

default                              the formats that a cache has by default, and its 16-bit window
int4-g4                              K and V in int4-g4; the first 4 and last 128 tokens in 16 bit
int8/int4-g4,sinks=0,recent=64       K in int8, V in int4-g4; the last 64 tokens in 16 bit
int4-g8+int8-g4                      latents and RoPE parts (multi-head latent attention)
auto                                 the plan that is kept for the model, or a new one
plan.safetensors,recent=0            a plan's formats and transforms; the first 4 tokens in 16 bit
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvquant.calibration.fidelity import Planned, Scheme
from kvquant.errors import ConfigError
from kvquant.hf.plans import plan_of_model
from kvquant.io.plan import AUTO
from kvquant.rows.defaults import DEFAULT, RECENT, SINKS
from kvquant.rows.format import NAMES, nearest

OPTIONS = {"sinks": SINKS, "recent": RECENT}  # tokens in 16 bit: what KVCache keeps by default
GRAMMAR = "K[/V][,sinks=N][,recent=N], or PLAN.safetensors or auto in place of K/V"


def parse_cache(text: str, *, latent: bool = False, model: Any = None) -> Scheme | Planned:
    """Read the text of a cache: a Planned for a plan's file or "auto", else a Scheme.

    Args:
        text: in the grammar at the top of this file.
        latent: whether the model caches latents and RoPE parts in place of K and V. A single format
            is then that of the latents, and RoPE parts stay in 16 bit.
        model: a CachedModel, for "auto".

    Raises:
        ConfigError: the text does not follow the grammar, names no known format, or is for the
            other kind of model.
        CheckpointError: the file is no plan.

    Example:
        >>> parse_cache("int8/int4-g4,recent=64")
        Scheme(k_format='int8', v_format='int4-g4', sink_len=4, recent_len=64)
    """
    what, *options = (part.strip() for part in text.split(","))
    given: dict[str, int] = {}
    for option in options:
        name, _, value = option.partition("=")
        if name not in OPTIONS or not (value.isascii() and value.isdecimal()):
            raise ConfigError(f"cache {text!r:.80}: {option!r:.40} is no option: write {GRAMMAR}")
        if name in given:
            raise ConfigError(f"cache {text!r:.80} has {name}= twice: write it once")
        given[name] = int(value)
    sinks, recent = (OPTIONS | given).values()
    if what == AUTO and (plan := plan_of_model(AUTO, model)) is not None:
        return Planned(plan, AUTO, sinks, recent)
    if what == AUTO:  # whose plan costs too much
        layer = model.new_cache(1, 1, sink_len=sinks, recent_len=recent).layers[0]
        return Scheme(str(layer.k_format), str(layer.v_format), sinks, recent, latent)
    if what.endswith(".safetensors"):
        return Planned(what, Path(what).stem, sinks, recent)
    separator, other = ("+", "/") if latent else ("/", "+")
    if other in what:
        kind = "latents and RoPE parts (LATENTS+ROPE)" if latent else "K and V of heads (K/V)"
        raise ConfigError(f"cache {text!r:.80}: this model keeps {kind}, not {what!r:.40}")
    formats = what.split(separator)
    for one in formats:
        if one not in (*NAMES, DEFAULT):
            raise ConfigError(
                f"cache {text!r:.80}: {one!r:.40} is no format: write {GRAMMAR}, with formats of "
                f"{', '.join(NAMES)}{nearest(one)}"
            )
    if len(formats) > 2:
        raise ConfigError(f"cache {text!r:.80} has {len(formats)} formats: write {GRAMMAR}")
    second = formats[-1] if len(formats) == 2 or not latent or what == DEFAULT else "bf16"
    return Scheme(formats[0], second, sinks, recent, latent)
