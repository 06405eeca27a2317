"""What a model's config says of its layers: which ones a KVCache holds, and in which shape.

kvquant reads transformers' configs by attribute and imports nothing from there. A layer that
attends to an earlier one's keys and values has no place in the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from ...cache.checks import row_formats
from ...cache.contiguous import KVCache
from ...cache.latent import DEFAULT_FORMAT as DEFAULT_LATENT_FORMAT
from ...cache.latent import LatentFormats, LatentKVCache
from ...errors import ConfigError, UnsupportedModelError, refuse
from ...io.plan import ModelPlan, Plan, as_plan
from ...rows.arguments import check_size, name_of_kind
from ...rows.codec import one_of
from ...rows.defaults import RECENT, SINKS
from ...rows.format import HEAD_DIMS
from ...rows.kind import LATENT
from ...rows.latent import LATENT_DIMS, ROPE_DIMS
from ...rows.quantize import exact_codec

# of config.layer_types: what they keep are the keys and values of tokens, and nothing else
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_WITH_STATE = {"hybrid", "hybrid_sliding"}  # attention, and a state beside it
_NOTHING = {"moe", "mlp"}  # layers without attention, which transformers counts too
_WITHOUT_KEYS = _NOTHING | {"linear_attention", "mamba", "conv", "recurrent"}
_DOUBLED = {"mimo_v2_flash"}  # layers with a window have twice the KV heads, by code alone
_KEYS = "k_proj", "qkv_proj", "query_key_value", "kv_b_proj"  # linear layers that make keys
_OF_HEADS = "k_format", "v_format", "windows"  # options that latent rows have not
_SIZES = "num_layers", "num_kv_heads", "head_dim", "latent_dim", "rope_dim"  # which a model has
# behind a colon, where a model is refused as a whole
SERVED = (
    "kvquant serves decoders (causal language models) in which some layers at least attend to keys "
    "and values of tokens. kvquant/hf/README.md lists families"
)


@dataclass(frozen=True)
class Turn:
    """Rotary embeddings that depend on the text's length: packed keys cannot rotate again.

    Attributes:
        kind: rope_type.
        positions: in longer texts the angles of all tokens change.
        again: they change with every further token ("dynamic"), not once ("longrope").
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
        are_latent: a LatentKVCache keeps one latent row a token, the latent as K and the RoPE part
            as V of one KV head.
        windows: how many last tokens attention sees, for each place; None for all.
        count: all layers of the model.
        turn: rotary embeddings that depend on the text's length, if any.
        scaled_from: the position from which the model scales queries by their distance, counted
            from the longest sequence; None for never.
        others: the model's layers that no KVCache holds, and why.
        states: the layers of places that have a state beside their attention (Mamba, convolution).
        shared: layers that attend to the keys and values of another one, and that one.
        rank, ranks: which of so many ranks has these heads, see of_rank; 0 and 1 for all heads.
            Each rank has all latent rows, and a share of the query heads.
    """

    places: tuple[int, ...]
    num_kv_heads: int
    k_dims: tuple[int, ...]
    v_dims: tuple[int, ...]
    windows: tuple[int | None, ...]
    count: int
    turn: Turn | None = None
    scaled_from: int | None = None
    others: Mapping[int, str] = field(default_factory=dict)
    states: tuple[int, ...] = ()
    shared: Mapping[int, int] = field(default_factory=dict)
    are_latent: bool = False
    rank: int = 0
    ranks: int = 1

    @classmethod
    def of_cache(cls, kv: KVCache) -> CacheLayers:
        """Those of a KVCache whose model is not known: each has rows."""
        dims = [(at.k_format.head_dim, at.v_format.head_dim) for at in kv.layers]
        k_dims, v_dims = zip(*dims, strict=True)
        places, windows = tuple(range(kv.num_layers)), tuple(kv.windows)
        return cls(places, kv.num_kv_heads, k_dims, v_dims, windows, len(places))

    @cached_property
    def at(self) -> dict[int, int]:
        """The place in the cache by the model's layer."""
        return {layer: at for at, layer in enumerate(self.places)}

    @property
    def kept(self) -> list[int]:
        """The model's layers for which transformers keeps something: others and states."""
        return sorted([*self.others, *self.states])

    def of_rank(self, num_kv_heads: int) -> CacheLayers:
        """These layers with num_kv_heads, if that is one rank's share; else unchanged."""
        # transformers gives each rank consecutive heads, and neighbouring ranks one copy of a
        # model.
        ranks, rest = divmod(self.num_kv_heads, num_kv_heads)
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if rest or ranks < 2 or world % ranks:
            return self
        rank = torch.distributed.get_rank() % ranks
        return replace(self, num_kv_heads=num_kv_heads, rank=rank, ranks=ranks)

    def check_whole(self) -> None:
        """Raise UnsupportedModelError unless a KVCache alone serves the model."""
        states = {layer: "has a state beside its attention" for layer in self.states}
        for layer, reason in sorted((states | dict(self.others)).items()):
            raise UnsupportedModelError(
                f"layer {layer} {reason}: a KVCache alone does not serve such a model. "
                "QuantizedCache(model) keeps these layers as transformers does, and no file has "
                "them: read the text again"
            )


def check_has_attention(config: Any) -> None:
    """Raise UnsupportedModelError for a model with an encoder, or without attention."""
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    refuse(UnsupportedModelError, (f"{why}: {SERVED}" for why in _without_attention(config)))


def _without_attention(config: Any) -> Iterator[str]:
    """Why a KVCache holds nothing of a text model."""
    kind = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        yield f"{kind} models have an encoder before the decoder"
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int) or count < 1:
        yield f"the config of this {kind} model does not tell its layers"
        return
    kinds = list(getattr(config, "layer_types", None) or [None] * count)
    by_layer = getattr(config, "per_layer_config", None) or [config] * count
    if all(one in _WITHOUT_KEYS for one in kinds):
        yield f"no layer of this {kind} model attends, layer 0 is {kinds[0]!r}"
    if not any(_number(one, "num_attention_heads", at) for at, one in enumerate(by_layer)):
        yield (
            f"this {kind} model has no attention heads (num_attention_heads), so no keys and values"
        )


def cache_layers(config: Any, *, longest: int | None = 0) -> CacheLayers:
    """The layers that a KVCache holds, and those that it does not.

    Args:
        config: of the text model, or of a model with others beside it.
        longest: the most tokens of a sequence, or None. A cache holds a layer that attends to
            chunks if a sequence fits into one.

    Raises:
        UnsupportedModelError: a KVCache holds none of the model's layers.
    """
    check_has_attention(config)
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    count: int = config.num_hidden_layers
    kinds = list(getattr(config, "layer_types", None) or [None] * count)
    crossing = getattr(config, "cross_attention_layers", None) or ()
    # a config whose layers differ refuses to be asked for what differs
    by_layer = getattr(config, "per_layer_config", None) or [config] * count
    windows = layer_windows(config)
    shapes: dict[int, tuple[int, int, int]] = {}
    others: dict[int, str] = {}
    shared = _shared_layers(config, kinds)
    for layer in range(count):
        if layer in shared or kinds[layer] in _NOTHING:
            continue
        found: tuple[int, int, int] | str = "attends to an image or an encoder, not to tokens"
        if layer not in crossing:
            found = _shape(by_layer[layer], layer, kinds[layer], windows[layer], longest)
        if isinstance(found, str):
            others[layer] = found
        else:
            shapes[layer] = found
    if not shapes:
        layer, reason = next(iter(others.items()), (0, "keeps nothing"))
        kind = getattr(config, "model_type", type(config).__name__)
        raise UnsupportedModelError(
            f"a KVCache holds no layer of this {kind} model: layer {layer} {reason}"
        )
    heads = _most_heads(shapes, windows)
    for layer, (own, _, _) in list(shapes.items()):
        if own != heads:
            others[layer] = f"has {own} KV heads, where a KVCache has one number for all, {heads}"
            del shapes[layer]
    _, k_dims, v_dims = zip(*shapes.values(), strict=True)
    return CacheLayers(
        tuple(shapes),
        heads,
        k_dims,
        v_dims,
        windows=tuple(windows[layer] for layer in shapes),
        count=count,
        turn=_turn(config),
        scaled_from=_scaled_from(config),
        others=dict(sorted(others.items())),
        states=tuple(layer for layer in shapes if kinds[layer] in _WITH_STATE),
        shared=shared,
        are_latent=bool(getattr(config, "kv_lora_rank", None)),
    )


def layers_of_rank(model: Any, layers: CacheLayers) -> CacheLayers:
    """The layers with this rank's heads; UnsupportedModelError if ranks split a KV head."""
    ranks = getattr(model, "tp_size", None) or 1
    styles = (getattr(model, "tp_plan", None) or {}).items()
    are_cut = any(name.split(".")[-1] in _KEYS and style == "colwise" for name, style in styles)
    if ranks == 1 or not are_cut:
        return layers
    if layers.are_latent:
        return replace(layers, ranks=ranks)
    if layers.num_kv_heads % ranks:
        raise UnsupportedModelError(
            f"the model has {layers.num_kv_heads} KV heads, and its tp_plan cuts their keys into "
            f"{ranks} parts: run it on a number of ranks that divides the heads"
        )
    return layers.of_rank(layers.num_kv_heads // ranks)


def layer_devices(model: Any, places: Sequence[int]) -> list[torch.device] | None:
    """The device of each of these layers, for a model with a device_map; None if it has one device.

    Attention modules of the model have a layer_idx.
    """
    text = model.config.get_text_config(decoder=True)
    found: dict[int, torch.device] = {}
    for module in model.modules():
        layer, own = getattr(module, "layer_idx", None), getattr(module, "config", text)
        if not isinstance(layer, int) or layer in found:
            continue
        is_text = getattr(own, "model_type", None) == text.model_type  # not of images
        if is_text and (device := _device_of(module)) is not None:
            found[layer] = device
    devices = [found[layer] for layer in places if layer in found]
    is_known = len(devices) == len(places)
    return devices if is_known and {getattr(model, "device", None)} != set(devices) else None


def input_device(model: Any) -> torch.device:
    """Where a model takes tokens: at its embeddings, or where accelerate moves them."""
    embeddings = model.get_input_embeddings()
    found = _device_of(embeddings) if isinstance(embeddings, torch.nn.Module) else None
    device: torch.device = found or model.device
    return device


def _device_of(module: torch.nn.Module) -> torch.device | None:
    """The device of a module's first weight, or the one that accelerate's hook moves it to."""
    for part in module.modules():
        for weight in part.parameters(recurse=False):
            if not weight.is_meta:
                return weight.device
            hook = getattr(part, "_hf_hook", None)
            for one in getattr(hook, "hooks", (hook,)):
                if (device := getattr(one, "execution_device", None)) is not None:
                    return torch.device(device)
    return None


def new_cache(
    config: Any,
    layers: CacheLayers,
    batch: int,
    max_seq_len: int,
    *,
    plan: Plan | None = None,
    fmt: LatentFormats | None = None,
    is_probed: bool = False,
    **options: Any,
) -> KVCache:
    """An empty KVCache of a model's layers, or a LatentKVCache for latent rows; errors as
    CachedModel's.

    Args:
        config: the whole one of the model.
        layers: cache_layers(config).
        batch, max_seq_len, options: as in KVCache.
        plan: for this model.
        fmt: of latent rows, as in LatentKVCache; not with a plan.
        is_probed: models/probe.py looks at the model, so the cache does not.
    """
    kind = LatentKVCache if layers.are_latent else KVCache
    sizes = {"batch": batch, "max_seq_len": max_seq_len}
    cache: KVCache = _made(kind, config, layers, plan, fmt, sizes | options)
    text = config.get_text_config(decoder=True)
    q_heads = getattr(text, "num_attention_heads", None)
    cache.num_q_heads = q_heads and q_heads // layers.ranks
    if is_probed:
        cache.compared = None
    return cache


def new_paged_cache(
    kind: Any,
    model: Any,
    num_pages: int,
    max_seq_len: int,
    *,
    plan: ModelPlan = None,
    fmt: LatentFormats | None = None,
    **options: Any,
) -> Any:
    """An empty cache of this kind (paged, or latent paged); see PagedKVCache.for_model."""
    config: Any = getattr(model, "config", None) if isinstance(model, torch.nn.Module) else model
    if not hasattr(config, "get_text_config"):
        raise ConfigError(
            f"model is {name_of_kind(model)}: give a model of transformers, or its config"
        )
    layers = cache_layers(config, longest=max_seq_len)
    layers.check_whole()
    if layers.are_latent != (kind.row_kind is LATENT):
        kept = "latent rows" if layers.are_latent else "keys and values of heads"
        prefix = "Latent" * layers.are_latent
        raise ConfigError(
            f"this {config.model_type} model keeps {kept}: use {prefix}PagedKVCache with "
            f"{prefix}PagedBatch"
        )
    dtype = getattr(model, "dtype", None) or config.get_text_config(decoder=True).dtype
    own = {"exact_format": exact_codec(dtype), "max_seq_len": max_seq_len, "num_pages": num_pages}
    if model is not config:
        layers = layers_of_rank(model, layers)
        devices = set(layer_devices(model, layers.places) or [model.device])
        if len(devices) > 1 and "device" not in options:
            raise UnsupportedModelError(
                f"the model's layers are on {len(devices)} devices, and a paged cache is on one: "
                "load the model on one device"
            )
        own["device"] = devices.pop()
    from ..plans import plan_of_model

    found = plan_of_model(plan, model, {**options, "fmt": fmt})
    return _made(kind, config, layers, found, fmt, own | options)


def _made(
    kind: Any,
    config: Any,
    layers: CacheLayers,
    plan: Plan | None,
    fmt: LatentFormats | None,
    options: dict[str, Any],
) -> Any:
    """A cache of a class that fits the layers' rows, made of a plan or of formats."""
    model_type = config.get_text_config(decoder=True).model_type
    if plan is not None:
        plan = as_plan(plan)
    for names, why in (
        (_SIZES, "the cache has the model's sizes"),
        (
            _OF_HEADS if layers.are_latent else (),
            f"this {model_type} model keeps a latent row a token, not keys and values of heads: "
            "give its format as fmt ('int8-g4')",
        ),
    ):
        if given := [name for name in names if name in options]:
            raise ConfigError(f"{' and '.join(given)} cannot be given: {why}")
    if fmt is not None and (plan is not None or not layers.are_latent):
        raise ConfigError(
            "fmt with a plan: a plan says formats, use plan.with_formats"
            if layers.are_latent
            else f"fmt is the format of latent rows, and this {model_type} model keeps keys and "
            "values of heads: give k_format and v_format"
        )
    if not layers.are_latent:
        options = {"windows": list(layers.windows)} | options
    if plan is not None:
        plan.check_model(config.to_dict())
        if plan.places != list(layers.places):
            raise UnsupportedModelError(
                f"the plan has layers {plan.places} of the model, its KVCache needs "
                f"{list(layers.places)}"
            )
        if layers.ranks > 1 and not layers.are_latent:
            first = layers.rank * layers.num_kv_heads
            plan = plan.of_heads(range(first, first + layers.num_kv_heads))
        return kind.from_plan(plan, **options)
    sizes: dict[str, Any] = {"num_layers": len(layers.places)}
    if layers.are_latent:
        if fmt is None:  # RoPE parts are bf16, which kernels on CUDA do not read with float16 q
            fmt = DEFAULT_LATENT_FORMAT + "+fp16" * (options.get("exact_format") == "fp16")
        sizes |= {"fmt": fmt, "latent_dim": layers.k_dims[0], "rope_dim": layers.v_dims[0]}
        return kind(**sizes, **options)
    sinks = check_size("sink_len", options.get("sink_len", SINKS))
    window = sinks, check_size("recent_len", options.get("recent_len", RECENT))
    for name, dims in (("k_format", layers.k_dims), ("v_format", layers.v_dims)):
        options[name] = row_formats(name, options.get(name), dims, window)
    sizes |= {"num_kv_heads": layers.num_kv_heads, "head_dim": max(layers.k_dims)}
    return kind(**sizes, **options)


def layer_windows(config: Any) -> list[int | None]:
    """The window of every layer in tokens, as in transformers; None for full or no attention."""
    by_layer = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    windows = [getattr(layer, "sliding_window", None) for layer in by_layer]
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(windows)
    return [
        window if kind in ("sliding_attention", "hybrid_sliding") else None
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


def _shared_layers(config: Any, kinds: list[str | None]) -> dict[int, int]:
    """Layers that attend to the keys of another: the last earlier one of their kind that has
    keys."""
    modes, count = getattr(config, "kv_sharing_modes", None), len(kinds)
    if modes is None:  # before transformers 5.18
        own = count - (getattr(config, "num_kv_shared_layers", None) or 0)
        modes = ["reuse" if layer >= own else "" for layer in range(count)]
    shared: dict[int, int] = {}
    last: dict[str | None, int] = {}
    for layer, (kind, mode) in enumerate(zip(kinds, modes, strict=True)):
        if str(mode).startswith("reuse"):
            shared[layer] = last.get(kind, -1)  # none: the model says so
        else:
            last[kind] = layer
    return shared


def _most_heads(shapes: Mapping[int, tuple[int, int, int]], windows: list[int | None]) -> int:
    """The number of KV heads of most layers that keep all tokens, or of most where none does."""
    counts = Counter(heads for layer, (heads, _, _) in shapes.items() if not windows[layer])
    counts = counts or Counter(heads for heads, _, _ in shapes.values())
    return counts.most_common(1)[0][0]


def _shape(
    config: Any, layer: int, layer_kind: str | None, window: int | None, longest: int | None
) -> tuple[int, int, int] | str:
    """KV heads, elements of a key and of a value (of latent rows 1, latent_dim, rope_dim); or why a
    KVCache does not hold the layer."""
    chunk = getattr(config, "attention_chunk_size", None)
    if layer_kind == "chunked_attention" and chunk and (longest is None or longest > chunk):
        return f"attends to chunks of {chunk} tokens: with max_seq_len up to that it is packed"
    if layer_kind is not None and layer_kind not in _ATTENTION | _WITH_STATE:
        return f"is {layer_kind!r}, which keeps other than keys and values"
    q_heads = _number(config, "num_attention_heads", layer)
    if not q_heads:
        return "has no attention heads, so no keys and values"
    if getattr(config, "kv_lora_rank", None):
        return _latent_shape(config, layer, window)
    heads = _number(config, "num_key_value_heads", layer) or q_heads
    if getattr(config, "multi_query", False):  # Falcon: all query heads read one KV head
        heads = q_heads if getattr(config, "new_decoder_architecture", False) else 1
    k_dim = _number(config, "head_dim", layer) or _number(config, "attention_head_dim", layer)
    if layer_kind == "full_attention":  # before transformers 5.17, which has layers' own configs
        k_dim = _number(config, "global_head_dim", layer) or k_dim
        if getattr(config, "attention_k_eq_v", False):
            heads = _number(config, "num_global_key_value_heads", layer) or heads
    if window and getattr(config, "model_type", None) in _DOUBLED:
        heads *= 2
    k_dim = k_dim or (_number(config, "hidden_size", layer) or 0) // q_heads
    v_dim = _number(config, "v_head_dim", layer) or k_dim
    for dim in (k_dim, v_dim):
        if dim not in HEAD_DIMS:
            allowed = one_of(HEAD_DIMS)
            return f"has rows that no format has: head_dim {dim} is not supported: use {allowed}"
    return heads, k_dim, v_dim


def _latent_shape(config: Any, layer: int, window: int | None) -> tuple[int, int, int] | str:
    """As _shape, of latent rows."""
    if getattr(config, "index_topk", None):
        return (
            "attends to tokens that an indexer chooses (DeepSeek sparse attention), with keys of "
            "its own beside the latent rows"
        )
    if window:
        return "has latent rows and a sliding window, which they have not"
    latent_dim = _number(config, "kv_lora_rank", layer)
    rope_dim = _number(config, "qk_rope_head_dim", layer)
    if latent_dim not in LATENT_DIMS or rope_dim not in ROPE_DIMS:
        return (
            f"has latent rows that no format has, of {latent_dim} latents and {rope_dim} RoPE "
            f"elements: use {one_of(LATENT_DIMS)} and {one_of(ROPE_DIMS)}"
        )
    return 1, latent_dim, rope_dim


def _number(config: Any, name: str, layer: int) -> int | None:
    """A number of one layer; some configs list it for each."""
    value = getattr(config, name, None)
    if isinstance(value, (list, tuple)):
        value = value[layer] if layer < len(value) else None
    return value if isinstance(value, int) else None
