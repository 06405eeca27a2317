"""Run a Hugging Face decoder on a KVCache: with observation.py, all that imports transformers.

A model hands each layer's new keys and values to a cache and then calls an attention function by
name. Both are ours here: TransformersCache passes the keys on, marked with their layer, and the
function registered as "kvquant" attends and appends.

    one new token      append it, then KVCache.attend: the fused call, nothing is dequantized
    a chunk of them    attend to the layer's dequantized past and causally to the chunk, then append

So a prompt is quantized as it goes, and one layer at a time has a 16-bit copy. Keys and values are
rounded to the cache's 16-bit format first. A layer's mask tells whether its sliding window is that
of the cache (windows_of). What cannot be computed (caps, sink logits, other masks) is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.nn.functional import scaled_dot_product_attention

from .cache import KVCache
from .cachechecks import MAX_LENGTH
from .errors import ConfigError, UnsupportedError, UnsupportedModelError
from .quant import EXACT_DTYPES

try:
    import transformers
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
    from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
    from transformers.modeling_utils import AttentionInterface

    if not hasattr(CacheLayerMixin, "get_max_length"):
        raise ImportError(f"this is transformers {transformers.__version__}")
except ImportError as error:
    raise UnsupportedError(
        "Hugging Face models need transformers 5.14 or newer: install kvquant with its hf extra, "
        f"pip install -e '.[hf]' in the checkout ({error})"
    ) from error

ATTENTION = "kvquant"
# what models pass that does not change the result here: positions are in the keys already
HARMLESS = {"position_ids", "cache_position", "use_cache", "is_causal", "output_attentions"}


class TransformersCache(Cache):
    """A KVCache in the form that transformers' models take as past_key_values.

    The model must run with the attention implementation "kvquant", as attend_by sets it. On CUDA
    call cache.check() at times (CachedModel does it): it raises what came with NaN.

    Args:
        cache: where the tokens go.
        new_lens: [batch]: how many of the next call's tokens, the first ones, belong to each
            sequence; all when None.
    """

    def __init__(self, cache: KVCache, new_lens: torch.Tensor | None = None) -> None:
        self.cache = cache
        self.views = [_LayerView(cache, i, new_lens) for i in range(cache.num_layers)]
        super().__init__(layers=list(self.views))

    def check_attended(self) -> None:
        """Raise if a layer handed over keys but did not attend through the registered function."""
        for view in self.views:
            view.check_attended()

    def reset(self) -> None:
        """Forget all tokens."""
        self.cache.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put sequence beam_idx[b] at place b."""
        self.cache.reorder(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens of each sequence.

        Args:
            tokens_to_remove: their number as a negative one, as transformers gives it.
        """
        if tokens_to_remove > 0:
            raise ConfigError(
                f"crop({tokens_to_remove}) is not possible, as in transformers: give the number of "
                "tokens to remove as a negative one"
            )
        self.cache.crop((self.cache.seq_lens + tokens_to_remove).clamp(min=0))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Not possible in place."""
        raise UnsupportedError("a KVCache does not grow: make a new one by KVCache.repeat")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Not possible in place."""
        raise UnsupportedError("a KVCache does not shrink: make a new one by KVCache.fork")


class _LayerView(CacheLayerMixin):
    """One layer of a KVCache, as transformers sees it."""

    is_sliding = False
    is_croppable = False  # packed rows do not become 16-bit rows again

    def __init__(self, cache: KVCache, index: int, new_lens: torch.Tensor | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers has no types
        self.cache, self.index, self.new_lens = cache, index, new_lens
        self.is_initialized = True
        self.waiting = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass the new tokens on in 16-bit precision; the attention function appends them."""
        self.check_attended()
        self.waiting = True
        exact = EXACT_DTYPES[self.cache.exact_format]
        keys = key_states.to(exact).to(key_states.dtype)
        values = value_states.to(exact).to(value_states.dtype)
        if keys is key_states:  # a view, so that the mark does not outlive this call
            keys = keys.view_as(keys)
        keys.kvquant_layer = self  # type: ignore[attr-defined]
        return keys, values

    def check_attended(self) -> None:
        """Raise if keys were handed over and not attended to."""
        if self.waiting:
            raise UnsupportedModelError(
                f"layer {self.index} did not attend through transformers' attention interface: "
                "this model computes attention by itself and cannot use a KVCache"
            )

    def get_seq_length(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.cache.layers[self.index].seq_lens.max())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens to attend to, and where they start."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Tokens that there is room for."""
        return self.cache.max_seq_len


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' attention functions do, and append the new tokens.

    Args:
        query: [batch, num_q_heads, new_tokens, head_dim].
        key: [batch, num_kv_heads, new_tokens, head_dim], from TransformersCache.update.
        value: likewise.

    Returns:
        [batch, new_tokens, num_q_heads, head_dim], and None for the weights.
    """
    view: _LayerView | None = getattr(key, "kvquant_layer", None)
    place = view.index if view else getattr(module, "layer_idx", "?")
    name = f"layer {place} ({type(module).__name__})"
    if view is None:
        raise UnsupportedModelError(
            f"{name} attends to keys that did not come from a KVCache of its own: run the model by "
            "CachedModel; layers that share or reshape cached keys are not supported"
        )
    if dropout:
        raise UnsupportedModelError(f"{name} has dropout {dropout}: call model.eval()")
    if options.get("is_causal") is False:
        raise UnsupportedModelError(f"{name} is not causal")
    cache, new_tokens = view.cache, query.shape[2]
    window = _window_of(attention_mask, name)
    _check_window(view, window, options.pop("sliding_window", None), new_tokens, name)
    for option, given in options.items():
        if option not in HARMLESS and given is not None and given is not False:
            raise UnsupportedModelError(f"{name} asks for {option}, which no KVCache can compute")

    view.waiting = False
    if new_tokens == 1:
        cache.append(view.index, key, value, view.new_lens)
        last = query[:, :, 0]
        if last.is_cuda and last.dtype == torch.float32:  # the kernel there takes 16-bit queries
            last = last.bfloat16()  # of any size, where fp16 ends at 65504
        out = cache.attend(view.index, last, sm_scale=scaling)
        assert isinstance(out, torch.Tensor)
        return out[:, None].to(query.dtype), None
    out = _attend_chunk(cache, view.index, query, key, value, scaling)
    cache.append(view.index, key, value, view.new_lens)
    return out.transpose(1, 2), None


def _attend_chunk(
    cache: KVCache,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Attend to the dequantized past and causally to the chunk itself: [batch, heads, new, dim]."""
    past_lens, window = cache.layers[layer].held_lens, cache.layers[layer].window
    gqa, new = query.shape[1] != key.shape[1], query.shape[2]
    if not int(past_lens.max()) and (window is None or new <= window):
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa
        )
    past_key, past_value = cache.dequantized(layer, query.dtype)
    # places in the sequence, from the first token held
    past = torch.arange(past_key.shape[2], device=query.device).expand(len(past_lens), -1)
    own = past_lens[:, None] + torch.arange(new, device=query.device)
    places = torch.cat([past.where(past < past_lens[:, None], MAX_LENGTH), own], 1)[:, None, None]
    seen = places <= own[:, None, :, None]  # [batch, 1, new, past and new]
    if window is not None:
        seen &= places > own[:, None, :, None] - window
    return scaled_dot_product_attention(
        query,
        torch.cat([past_key, key], dim=2),
        torch.cat([past_value, value], dim=2),
        attn_mask=seen,
        scale=scaling,
        enable_gqa=gqa,
    )


def _window_of(attention_mask: torch.Tensor | None, name: str) -> int | None:
    """The window that _check_mask has seen, or None; UnsupportedModelError for another mask."""
    window: int | None = getattr(attention_mask, "kvquant_window", None)
    if attention_mask is not None and window is None:
        raise UnsupportedModelError(f"{name} got an attention mask that is not the causal one")
    return window


def _check_window(
    view: _LayerView, window: int | None, option: int | None, new_tokens: int, name: str
) -> None:
    """Raise unless a layer of the cache sees what the model's does.

    Args:
        view: the layer.
        window: of the mask that the model's layer got.
        option: the window that the layer told the attention function, if any.
        new_tokens: of this call.
        name: of the model's layer.
    """
    own = view.cache.layers[view.index].window
    if own == window and option in (None, window):
        return
    given = [w for w in (own, window, option) if w is not None]
    if view.get_seq_length() + new_tokens > min(given):
        wanted, has = (f"the last {w} tokens" if w else "all tokens" for w in (window, own))
        told = "" if option in (None, window) else f" (and speaks of {option})"
        raise UnsupportedModelError(
            f"{name} attends to {wanted}{told}, its layer of the cache to {has}: make the cache by "
            "CachedModel.new_cache, or with windows=huggingface.windows_of(model.config)"
        )


def _check_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any = None,
    **_: Any,
) -> torch.Tensor | None:
    """Refuse every mask but the causal one and sliding windows, which the attention function knows.

    Returns:
        None, or a mark with the window.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UnsupportedModelError(
            "attention_mask hides tokens: put padding after the tokens, and give the lengths to "
            "CachedModel.prefill"
        )
    if use_vmap or (local_size is None and mask_function is not causal_mask_function):
        raise UnsupportedModelError("this model's attention mask is not the causal one")
    if local_size is None:
        return None
    if not _is_window(mask_function, local_size, int(q_offset) + q_length):
        kinds = getattr(config, "layer_types", None) or []
        layers = [i for i, kind in enumerate(kinds) if kind != "full_attention"]
        if kv_length > local_size:
            raise UnsupportedModelError(
                f"layers {layers or 'of this model'} attend to chunks of {local_size} tokens: "
                "KVCache has sliding windows only"
            )
        return None
    mark = torch.empty(0)
    mark.kvquant_window = local_size  # type: ignore[attr-defined]
    return mark


def _is_window(mask_function: Callable[..., Any], window: int, longest: int) -> bool:
    """Whether a mask shows each token the last `window` ones, itself included, and no others."""
    q = torch.arange(max(longest, 2 * window) + 2)[:, None]
    kv = q + torch.tensor([-window, 1 - window, 0, 1])
    zero = torch.zeros_like(kv)
    seen = torch.as_tensor(mask_function(zero, zero, q.expand_as(kv), kv))
    return bool((seen == ((kv > q - window) & (kv <= q)))[kv >= 0].all())


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _check_mask)


def load(folder: str | Path, dtype: torch.dtype) -> tuple[Any, Any, torch.dtype | None]:
    """Load the model and the tokenizer of a local folder.

    Returns:
        Model, tokenizer, and the dtype that the model was saved in.

    Raises:
        ConfigError: no such folder, or no model that transformers can load in it.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"{folder} is not a model's folder: it has no config.json")
    options = {"local_files_only": True}
    with _no_progress_bar():
        try:
            saved = transformers.AutoConfig.from_pretrained(str(folder), **options).dtype
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=dtype, attn_implementation="sdpa", **options
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), **options)
            tokenizer.model_max_length = sys.maxsize  # or it warns of texts that are cut later
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"{folder} could not be loaded: {reason}") from error
    return model, tokenizer, saved


def plain_cache() -> Any:
    """transformers' own 16- or 32-bit cache."""
    return DynamicCache()


def windows_of(config: Any) -> list[int | None]:
    """The sliding window of each layer of a model, as transformers' own cache has them.

    Args:
        config: of the text model.

    Returns:
        For KVCache: None where attention sees all tokens.
    """
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(windows)
    return [
        window if kind == "sliding_attention" else None
        for kind, window in zip(kinds, windows, strict=True)
    ]


def attend_by(model: Any, implementation: str) -> None:
    """Choose a model's attention implementation.

    Raises:
        UnsupportedModelError: the model does not use transformers' attention interface.
    """
    if model.config._attn_implementation != implementation:
        model.set_attn_implementation(implementation)
    if model.config._attn_implementation != implementation:
        raise UnsupportedModelError(
            f"{type(model).__name__} computes attention by itself, not through transformers' "
            "attention interface: it cannot use a KVCache"
        )


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
