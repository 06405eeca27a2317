"""What a QuantizedCache may be made of: a model that attends by "kvquant", its config, or a fitting
KVCache. Everything else raises, with what to give."""

from __future__ import annotations

from typing import Any

import torch

from ..cache.contiguous import KVCache
from ..cache.latent import LatentKVCache
from ..errors import ConfigError, ShapeError, shown
from ..rows.arguments import name_of_kind
from .call import ATTENTION
from .models.configs import CacheLayers
from .models.decoders import check_decoder
from .switch import attending

# of transformers' QuantizedCache
_THEIRS = "backend", "config", "nbits", "axis_key", "axis_value", "q_group_size", "residual_length"


def check_names(theirs: tuple[object, ...], others: dict[str, Any]) -> None:
    """Raise for unknown arguments: ConfigError for transformers' own, else TypeError."""
    named = [name for name in others if name in _THEIRS]
    if theirs or named:
        came = " and ".join(named) or f"{1 + len(theirs)} arguments without a name"
        raise ConfigError(
            f"{came} came as to transformers' QuantizedCache, and this is kvquant's: give a model, "
            "QuantizedCache(model, k_format='int8', v_format='int4-g4'). The other one is `from "
            "transformers import QuantizedCache`"
        )
    for name in others:
        raise TypeError(f"QuantizedCache got an unexpected keyword argument {name!r}")


def config_of(source: Any) -> Any:
    """The config of a model, or the given config; ConfigError if it is neither."""
    if isinstance(source, torch.nn.Module) and hasattr(source, "config"):
        return source.config
    if hasattr(source, "kv"):
        raise ConfigError("source is a QuantizedCache: give its kv, or copy.deepcopy it")
    if not hasattr(source, "get_text_config"):
        raise ConfigError(
            f"source is {name_of_kind(source)}: give a model of transformers, its config or a "
            "KVCache"
        )
    return source


def check_caller(model: Any, *, dequantize: bool) -> None:
    """Raise unless a model can call a QuantizedCache; with dequantize any attention may.

    Raises:
        ConfigError: the model does not attend by "kvquant".
        UnsupportedModelError: the model is no decoder, or cannot attend by "kvquant".
    """
    check_decoder(model)
    if dequantize:
        return
    config: Any = model.config
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else None
    found = getattr(text, "_attn_implementation", None)
    if found != ATTENTION:
        with attending(model, ATTENTION):  # else the line below is no help
            pass
        raise ConfigError(
            f"this {type(model).__name__} attends by {shown(found)}, and only {ATTENTION!r} "
            f"reads a KVCache: load it by from_pretrained(..., attn_implementation="
            f"{ATTENTION!r}), or call model.set_attn_implementation({ATTENTION!r})"
        )


def check_layers(kv: KVCache, layers: CacheLayers) -> None:
    """Raise ShapeError unless a KVCache is one for these layers."""
    if isinstance(kv, LatentKVCache) != layers.are_latent:
        kept = "latent rows", "keys and values of heads"
        has, needs = kept if isinstance(kv, LatentKVCache) else kept[::-1]
        raise ShapeError(
            f"the cache has {has}, and the model keeps {needs}: make the cache by "
            "QuantizedCache(model), or CachedModel.new_cache"
        )
    dims = [(at.k_format.head_dim, at.v_format.head_dim) for at in kv.layers]
    wanted = list(zip(layers.k_dims, layers.v_dims, strict=True))
    number, found = len(layers.places), (kv.num_layers, kv.num_kv_heads)
    if found != (number, layers.num_kv_heads) or dims != wanted:
        raise ShapeError(
            f"the cache has {found[0]} layers of {found[1]} KV heads, and of (K, V) elements "
            f"{sorted(set(dims))}; the model's keys and values are of {number} layers, "
            f"{layers.num_kv_heads} KV heads and {sorted(set(wanted))} elements: make the "
            "cache by QuantizedCache(model), or CachedModel.new_cache"
        )


def check_columns(kv: KVCache, lens: list[int]) -> None:
    """Raise ConfigError unless a cache's rows are all columns, as dequantize=True needs them."""
    windows = [window for window in kv.windows if window]
    if windows:
        raise ConfigError(
            f"the cache keeps the last {windows[0]} tokens of a layer, and dequantize=True needs "
            "all of them: make it by QuantizedCache(model, dequantize=True)"
        )
    if len(set(lens)) > 1:
        raise ConfigError(
            f"the cache holds {lens} tokens, and with dequantize=True all sequences have as many, "
            "padding among them: make it by QuantizedCache(model, dequantize=True)"
        )
