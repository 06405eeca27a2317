"""What a model's config says of its layers: which of them a KVCache holds, and in which shape; and
the KVCache for them.

Configs of transformers are read by attribute; nothing is imported from there. A layer that attends
to the keys and values of an earlier one owns none: the cache has no place for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..cache.checks import DEFAULT_FORMAT, row_formats
from ..cache.contiguous import KVCache
from ..errors import ConfigError, UnsupportedModelError
from ..io.plan import CachePlan
from ..rows.format import RowFormat

# of config.layer_types: what they keep are the keys and values of tokens, and nothing else
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True)
class Turn:
    """Rotary embeddings whose angles depend on how long the text is.

    Keys in a cache have been turned, and cannot follow.

    Attributes:
        kind: rope_type.
        positions: in texts of more of them the angles are others, of all tokens.
        again: they change with every token more ("dynamic"), not once ("longrope").
    """

    kind: str
    positions: int
    again: bool


@dataclass(frozen=True)
class CacheLayers:
    """The layers of a model that own keys and values, as a KVCache takes them.

    Attributes:
        places: the model's layer at each place of the cache.
        num_kv_heads: of each of them.
        k_dims, v_dims: elements of a row of K and of V, for each place.
        windows: the tokens that attention sees, the last ones, for each place; None for all.
        turn: where all keys would have to be turned anew, if anywhere.
        scaled_from: the position from which on queries are scaled by how far they are, counted by
            the model from the longest sequence for all of them; None where they are not.
    """

    places: tuple[int, ...]
    num_kv_heads: int
    k_dims: tuple[int, ...]
    v_dims: tuple[int, ...]
    windows: tuple[int | None, ...]
    turn: Turn | None = None
    scaled_from: int | None = None


def cache_layers(config: Any) -> CacheLayers:
    """The layers that a KVCache holds.

    Args:
        config: of the text model, or of a model with others beside it.

    Raises:
        UnsupportedModelError: the model, or one of its layers, has what no KVCache holds.
    """
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    kind = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{kind} models have an encoder before the decoder: a KVCache serves decoders alone"
        )
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int) or count < 1:
        raise UnsupportedModelError(f"the config of this {kind} model does not tell its layers")
    kinds = list(getattr(config, "layer_types", None) or [None] * count)
    for layer, name in enumerate(kinds):
        if name is not None and name not in _ATTENTION:
            raise UnsupportedModelError(
                f"layer {layer} is {name!r}: KVCache holds attention layers only"
            )
    if crossing := getattr(config, "cross_attention_layers", None):
        raise UnsupportedModelError(
            f"layer {min(crossing)} of this {kind} model attends to an image or an encoder: "
            "KVCache holds the keys and values of tokens"
        )
    places = [layer for layer in range(count) if not _is_shared(config, layer, count)]
    # a config whose layers differ refuses to be asked for what differs
    by_layer = getattr(config, "per_layer_config", None) or [config] * count
    shapes = [_shape(by_layer[layer], layer, kind, kinds[layer]) for layer in places]
    windows = layer_windows(config)
    heads = shapes[0][0]
    for layer, (own, _, _) in zip(places, shapes, strict=True):
        if own != heads:
            raise UnsupportedModelError(
                f"layers differ in their KV heads, layer {places[0]} has {heads} and layer {layer} "
                f"{own}: a KVCache has one number for all"
            )
    _, k_dims, v_dims = zip(*shapes, strict=True)
    held = tuple(windows[layer] for layer in places)
    of_text = _turn(config), _scaled_from(config)
    return CacheLayers(tuple(places), heads, k_dims, v_dims, held, *of_text)


def new_cache(
    config: Any,
    layers: CacheLayers,
    batch: int,
    max_seq_len: int,
    *,
    plan: CachePlan | None = None,
    **options: Any,
) -> KVCache:
    """An empty KVCache of a model's layers.

    Args:
        config: the whole one of the model.
        layers: cache_layers(config).
        batch, max_seq_len, options: as in KVCache.
        plan: for this model.

    Raises:
        ConfigError: an option is not possible.
        CheckpointError: the plan was made for another model.
        UnsupportedModelError: the plan has not all layers.
    """
    options = {"windows": list(layers.windows)} | options
    if plan is not None:
        plan.check_model(config.to_dict())
        if plan.places != list(layers.places):
            raise UnsupportedModelError(
                f"the plan has layers {plan.places} of the model, its KVCache needs "
                f"{list(layers.places)}"
            )
        cache = KVCache.from_plan(plan, batch, max_seq_len, **options)
    else:
        for name, dims in (("k_format", layers.k_dims), ("v_format", layers.v_dims)):
            options[name] = row_formats(name, options.get(name, DEFAULT_FORMAT), dims)
        shape = len(layers.places), batch, layers.num_kv_heads, max(layers.k_dims), max_seq_len
        cache = KVCache(*shape, **options)
    text = config.get_text_config(decoder=True)
    cache.num_q_heads = getattr(text, "num_attention_heads", None)
    return cache


def layer_windows(config: Any) -> list[int | None]:
    """The sliding window of every layer of a text model, as transformers' own cache has them.

    Returns:
        In tokens; None where attention sees all of them, and for layers that are not attention.
    """
    by_layer = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    windows = [getattr(layer, "sliding_window", None) for layer in by_layer]
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(windows)
    return [
        window if kind == "sliding_attention" else None
        for kind, window in zip(kinds, windows, strict=True)
    ]


def _turn(config: Any) -> Turn | None:
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [one for one in rope.values() if one]
    for one in kinds:  # of all layers, or of each kind of them
        kind = str(one.get("rope_type"))
        if "dynamic" in kind:
            return Turn(kind, config.max_position_embeddings, True)
        if kind == "longrope":
            positions = one.get("original_max_position_embeddings")
            return Turn(kind, positions or config.max_position_embeddings, False)
    return None


def _scaled_from(config: Any) -> int | None:
    """As Llama 4 does it, in layers without rotary embeddings."""
    if not getattr(config, "attn_temperature_tuning", False) or all(config.no_rope_layers):
        return None
    return int(config.floor_scale) - 1


def _is_shared(config: Any, layer: int, count: int) -> bool:
    """Whether a layer attends to the keys and values of another one."""
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is None:  # before transformers 5.18
        return layer >= count - (getattr(config, "num_kv_shared_layers", None) or 0)
    return str(modes[layer]).startswith("reuse")


def _shape(config: Any, layer: int, kind: str, layer_kind: str | None) -> tuple[int, int, int]:
    """KV heads of a layer, elements of a key and of a value."""
    q_heads = _number(config, "num_attention_heads", layer)
    if not q_heads:
        raise UnsupportedModelError(
            f"{kind} models have no attention heads, so no keys and values: KVCache holds "
            "attention layers only"
        )
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(
            f"{kind} models have multi-head latent attention: their cache is one latent row for "
            "all heads, a KVCache holds keys and values of each head"
        )
    heads = _number(config, "num_key_value_heads", layer) or q_heads
    k_dim = _number(config, "head_dim", layer)
    if layer_kind == "full_attention":  # before transformers 5.17, which has layers' own configs
        k_dim = _number(config, "global_head_dim", layer) or k_dim
        if getattr(config, "attention_k_eq_v", False):
            heads = _number(config, "num_global_key_value_heads", layer) or heads
    k_dim = k_dim or (_number(config, "hidden_size", layer) or 0) // q_heads
    v_dim = _number(config, "v_head_dim", layer) or k_dim
    for dim in (k_dim, v_dim):
        try:
            RowFormat("bf16", 1, dim)
        except ConfigError as error:
            raise UnsupportedModelError(f"layer {layer} of this {kind} model: {error}") from None
    return heads, k_dim, v_dim


def _number(config: Any, name: str, layer: int) -> int | None:
    """A number of one layer; some configs list it for each."""
    value = getattr(config, name, None)
    if isinstance(value, (list, tuple)):
        value = value[layer] if layer < len(value) else None
    return value if isinstance(value, int) else None
