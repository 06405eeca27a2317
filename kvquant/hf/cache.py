"""Run a Hugging Face decoder on a KVCache: the cache and the attention that transformers calls.

A model hands each layer's new keys and values to a cache and then calls an attention function by
name. Both are ours here: TransformersCache passes keys and values on, marked, and the function
registered as "kvquant" attends to marked ones, and appends them.

    one new token      append it, then KVCache.attend: the fused call, nothing is dequantized
    a few, drafted     the same, where generate tries tokens of an assistant or a lookup
    a chunk of them    attend to the layer's dequantized past and causally to the chunk, then append

So a prompt is quantized as it goes, and one layer at a time has a 16-bit copy. Keys and values are
rounded to the cache's 16-bit format first. A layer that gets the marked keys of another one attends
to the same rows and values as that one did, with all queries or with the last ones only (Gemma 4 in
generate), and appends nothing; the 16-bit copy then lives as long as those keys. Each layer of the
cache is appended once in a call of the model, in order, or the call is refused.

A layer's mask tells whether its sliding window is that of the cache (windows_of). Soft caps and
sink logits are an AttentionVariant. What cannot be computed (other masks, weights) is refused. A
call without a TransformersCache is computed by transformers' own SDPA, so a model may stay set to
"kvquant".
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import Any, NoReturn

import torch

from ..cache.contiguous import KVCache
from ..errors import ConfigError, ShapeError, UnsupportedError, UnsupportedModelError
from ..ops.causal import causal_attention
from ..rows.quantize import EXACT_DTYPES
from ..rows.variant import PLAIN, AttentionVariant
from .configs import CacheLayers, Turn, cache_layers

try:
    import transformers
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
    from transformers.masking_utils import (
        AttentionMaskInterface,
        causal_mask_function,
        chunked_causal_mask_function,
        sdpa_mask,
        sliding_window_causal_mask_function,
    )
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    if not hasattr(CacheLayerMixin, "get_max_length"):
        raise ImportError(f"this is transformers {transformers.__version__}")
except ImportError as error:
    raise UnsupportedError(
        "Hugging Face models need transformers 5.14 or newer: install kvquant with its hf extra, "
        f"pip install -e '.[hf]' in the checkout ({error})"
    ) from error

DRAFTS = 16  # tokens
ATTENTION = "kvquant"
SET = f"model.set_attn_implementation({ATTENTION!r})"
# what models pass that does not change the result here: positions are in the keys already, and
# windows are looked at apart
HARMLESS = {
    "cache_position",
    "is_causal",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "sliding_window",
    "use_cache",
}


VARIANT = {
    "softcap",
    "s_aux",
}  # what the names of AttentionVariant's soft_cap, sink_logits are there


class TransformersCache(Cache):
    """A KVCache in the form that transformers' models take as past_key_values.

        model.set_attn_implementation("kvquant")
        model.generate(**inputs, past_key_values=TransformersCache(cache))

    `cache` needs as many sequences as run at a time: for beams, and for several answers to a
    prompt, batch * num_beams or batch * num_return_sequences. Sequences that are padded on the left
    are not possible: generate with prompts of one length at a time, or read prompts of any lengths
    by CachedModel.prefill. On CUDA call cache.check() at times (CachedModel does it): it raises
    what came with NaN.

    It is for inference: no gradient flows through a cache, and backward through a step raises. A
    call of the model that fails in attention is taken back; one that fails elsewhere is taken back
    by the next, which raises. Until then layers hold different lengths, which cache.check() tells;
    cache.crop(cache.seq_lens) keeps what all layers have. One that fails after the attention of the
    last layer leaves its tokens, as in transformers' own caches: crop them.

    Models count the positions of all sequences alike, from 0: where those of the cache are others
    (prompts read with lens, sequences cropped apart, start_positions), give position_ids. Phi-3
    models drop a cache themselves where their prompt gets longer than
    original_max_position_embeddings, and go on with transformers' own.

    Args:
        cache: where the tokens go.
        new_lens: [batch]: how many of the next call's tokens, the first ones, belong to each
            sequence; all when None.
        layers: of the model; taken from its config when None.
        placed: the caller gives the model position_ids, those of the cache, in every call; they are
            not looked at then. Some models do not show them to attention (Persimmon, Qwen2-VL).
        drafts: up to 16 tokens behind others in one call are drafted ones: each attends to the rows
            of the cache, its own among them, as it would alone (KVCache.step). Else, and where
            they are more, they are a chunk of a prompt, whose tokens meet each other in 16 bit.

    Raises:
        ConfigError: cache is no KVCache.
        ShapeError: the cache is not of the model's layers and heads, or its layers hold different
            lengths.
        NonFiniteError: as KVCache.check.

    Example:
        >>> import torch
        >>> from kvquant import CachedModel, TransformersCache
        >>> from kvquant.cli.demo import MODEL  # a folder with a model
        >>> model = CachedModel.from_pretrained(MODEL)
        >>> model.model.set_attn_implementation("kvquant")
        >>> past = TransformersCache(model.new_cache(batch=1, max_seq_len=64))
        >>> text = torch.tensor([model.encode("The city of Manila")])
        >>> more = model.model.generate(text, past_key_values=past, max_new_tokens=5)
        >>> more.shape[1] - text.shape[1]
        5
    """

    def __init__(
        self,
        cache: KVCache,
        new_lens: torch.Tensor | None = None,
        *,
        layers: CacheLayers | None = None,
        placed: bool = False,
        drafts: bool = True,
    ) -> None:
        if not isinstance(cache, KVCache):
            raise ConfigError(f"cache is {type(cache).__name__}: give a KVCache")
        cache.check()
        self.cache, self.new_lens, self._is_placed = cache, new_lens, placed
        self._drafts = drafts
        self._places: dict[int, int] | None = None  # of the cache, by the model's layer
        self._turn: Turn | None = None
        self._scaled_from: int | None = None
        self._due = 0  # the place that comes next; those before it were appended in this call
        self._new_tokens = 0  # of this call
        self._is_asked = False  # for the sizes of masks, at the beginning of each call
        self._waiting: str | None = None  # the layer that was handed its keys and did not attend
        if layers is not None:
            self.fit(layers)
        super().__init__(layers=[_LayerView(cache, at) for at in range(cache.num_layers)])

    def fit(self, layers: CacheLayers) -> None:
        """Raise ShapeError unless the cache is one for these layers."""
        cache, number = self.cache, len(layers.places)
        dims = [(at.k_format.head_dim, at.v_format.head_dim) for at in cache.layers]
        wanted = list(zip(layers.k_dims, layers.v_dims, strict=True))
        found = cache.num_layers, cache.num_kv_heads
        if found != (number, layers.num_kv_heads) or dims != wanted:
            raise ShapeError(
                f"the cache has {found[0]} layers of {found[1]} KV heads, and of (K, V) elements "
                f"{sorted(set(dims))}; the model's keys and values are of {number} layers, "
                f"{layers.num_kv_heads} KV heads and {sorted(set(wanted))} elements: make the "
                "cache by CachedModel.new_cache"
            )
        self._places = {layer: at for at, layer in enumerate(layers.places)}
        self._turn, self._scaled_from = layers.turn, layers.scaled_from

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass a layer's new tokens on in 16-bit precision; the attention function appends them.

        Returns:
            Keys and values, marked.

        Raises:
            UnsupportedModelError: the layer before did not attend to its tokens.
            ShapeError: it is not this layer's turn, or the tokens are of another batch or shape.
        """
        _call.cache, _call.asked = weakref.ref(self), None
        self.check_attended()
        if not self._is_asked:  # a model that makes no masks
            self._begin()
        at = layer_idx if self._places is None else self._places.get(layer_idx, -1)
        if at != self._due:
            due = "none" if self._due == self.cache.num_layers else f"place {self._due}"
            self.take_back()
            raise ShapeError(
                f"layer {layer_idx} of the model comes where {due} of the cache's "
                f"{self.cache.num_layers} is due: each is appended once in a call of the model, so "
                "give a cache of its layers (CachedModel.new_cache). If a call has failed before, "
                "what it appended is taken back now: call again"
            )
        if not at:
            self._check_batch(key_states)
            self._new_tokens = key_states.shape[2]
        self._waiting = str(layer_idx)
        handed = _Handed(self, at, layer_idx)
        keys, values = self._exact(key_states), self._exact(value_states)
        keys.kvquant_keys = handed  # type: ignore[attr-defined]
        values.kvquant_values = handed  # type: ignore[attr-defined]
        return keys, values

    def _exact(self, states: torch.Tensor) -> torch.Tensor:
        """Rounded to 16 bit; a new tensor, so that its mark does not outlive this call."""
        rounded = states.to(EXACT_DTYPES[self.cache.exact_format]).to(states.dtype)
        return states.view_as(states) if rounded is states else rounded

    def _check_batch(self, keys: torch.Tensor) -> None:
        if keys.shape[0] != self.cache.batch:
            raise ShapeError(
                f"the model runs {keys.shape[0]} sequences, the cache has {self.cache.batch}: make "
                "it for batch * num_beams, or batch * num_return_sequences"
            )

    def check_begin(self, new_tokens: int, positions: Any) -> None:
        """Raise if a text is read from its beginning, and the cache holds tokens already.

        Args:
            new_tokens: of each sequence in the call, padding included.
            positions: [..., new_tokens], of the new tokens, if the model tells them.
        """
        if new_tokens == 1 or not isinstance(positions, torch.Tensor):
            return
        if (held := self.get_seq_length()) and not bool(positions[..., 0].any()):
            raise ConfigError(
                f"a text is read from its beginning, and the cache holds {held} tokens already. To "
                "begin anew call reset(). If generate does this it has use_cache=False, be it from "
                "the model's generation_config: give use_cache=True"
            )

    # one break of a graph, as the length of a cache is read
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def check_positions(self, positions: Any) -> None:
        """Raise if sequences go on from different positions, and the model counts them alike.

        Args:
            positions: [..., new_tokens], of the new tokens, if the model tells them.
        """
        if self._is_placed:
            return
        wanted = (self.cache.start_positions + self.cache.layers[0].seq_lens).cpu()
        if bool((wanted == self.get_seq_length()).all()):
            return
        is_told = isinstance(positions, torch.Tensor)
        if is_told and bool((positions[..., 0].cpu() == wanted).all()):
            return
        raise ConfigError(
            f"the cache's sequences go on from positions {wanted.tolist()}, and the model counts "
            "all of them from the longest: give it position_ids=cache.positions[:, None] + "
            "torch.arange(new_tokens), or read and decode by CachedModel"
            + ("" if is_told else "; with position_ids, make TransformersCache(cache, placed=True)")
        )

    def check_turn(self, new_tokens: int) -> None:
        """Raise if a call's keys, or those of the past, would have to be turned otherwise.

        Args:
            new_tokens: of each sequence in the call, padding included.
        """
        if self._turn is None:
            return
        limit, held = self._turn.positions, self.cache.seq_lens.cpu()
        counts = new_tokens if self.new_lens is None else self.new_lens.cpu()
        before = self.cache.start_positions.cpu() + held
        if not bool((before + new_tokens > limit).any()):
            return
        fits = (before + counts > limit) & ((held == 0) | (before > limit))
        if self._turn.again:
            fits &= held == 0
        if not bool(fits.all()):
            raise UnsupportedModelError(
                f"this model turns keys by the length of the text (rope_type {self._turn.kind!r}), "
                f"those in the cache too, if it has more than {limit} positions: stay below, or "
                "read a longer prompt in one call, without shorter ones beside it"
                + (", and no token after it" if self._turn.again else "")
            )

    def check_scale(self, new_tokens: int) -> None:
        """Raise if a call's queries would be scaled by the positions of another sequence.

        Args:
            new_tokens: of each sequence in the call, padding included.
        """
        if self._scaled_from is None:
            return
        held = self.cache.seq_lens.cpu()
        counts = torch.full_like(held, new_tokens) if self.new_lens is None else self.new_lens.cpu()
        before, counted = self.cache.start_positions.cpu() + held, held.max()
        is_far = torch.maximum(before, counted) + counts > self._scaled_from
        if bool(((before != counted) & (counts > 0) & is_far).any()):
            raise UnsupportedModelError(
                f"this model scales queries from position {self._scaled_from} on and counts the "
                "positions of all sequences alike: stay below, or read and decode sequences of one "
                "length at a time, from position 0"
            )

    def takes_drafts(self, at: int, new_tokens: int) -> bool:
        """Whether a layer's new tokens attend to rows only, as one new token does: a few behind
        others, as drafted ones are. The model then finds what it finds one by one."""
        layer = self.cache.layers[at]
        is_few = self._drafts and new_tokens <= DRAFTS and self.new_lens is None
        if not is_few or layer.longest == 0:
            return False
        return layer.longest is not None or bool(layer.seq_lens.any())  # a graph leaves it None

    def append(self, handed: _Handed, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append what was handed to a layer; the next one is due then."""
        self.cache.append(handed.at, keys, values, self.new_lens)
        handed.appended, self._waiting = True, None
        self._due = handed.at + 1

    def step(
        self,
        handed: _Handed,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sm_scale: float | None,
        variant: AttentionVariant | None,
    ) -> torch.Tensor:
        """Append the token, or the drafted ones, that were handed to a layer, and attend by
        KVCache.step."""
        if self.new_lens is None:
            given = query, keys, values
            out = self.cache.step(handed.at, *given, variant=variant, sm_scale=sm_scale)
        else:
            self.cache.append(handed.at, keys, values, self.new_lens)
            out = self.cache.attend(handed.at, query, variant=variant, sm_scale=sm_scale)
        handed.appended, self._waiting = True, None
        self._due = handed.at + 1
        return out

    def _begin(self) -> None:
        """A new call, if the one before is complete; else update tells what is due."""
        if self._due == self.cache.num_layers:
            self._due = 0

    @property
    def is_calibrated(self) -> bool:
        """Whether the cache is known to be one for the model's layers."""
        return self._places is not None

    @property
    def is_waiting(self) -> bool:
        """Whether a layer was handed its keys and has not attended yet."""
        return self._waiting is not None

    def take_back(self) -> None:
        """Drop what this call of the model has appended so far, and begin anew."""
        self._waiting = None
        if self._due:
            counts = self._new_tokens if self.new_lens is None else self.new_lens.cpu()
            with suppress(ShapeError):  # windows that are overwritten: the next call says so
                self.cache.crop(self.cache.layers[0].seq_lens.cpu() - counts)
                self._due = 0

    def check_attended(self) -> None:
        """Raise if a layer was handed its keys but did not attend through "kvquant"."""
        waiting = self._waiting
        if waiting is not None:
            self.take_back()
            raise UnsupportedModelError(
                f"layer {waiting} got keys from a KVCache and did not attend to them by "
                f"kvquant's attention. Call {SET} first; a model that is set to it computes "
                "attention by itself, not through transformers' attention interface, and cannot "
                "use a KVCache"
            )

    def check_complete(self) -> None:
        """Raise unless every layer of the cache was appended in the call that has ended."""
        self.check_attended()
        if self._due != self.cache.num_layers:
            raise ShapeError(
                f"the model has appended to {self._due} layers of the cache's "
                f"{self.cache.num_layers}: make the cache by CachedModel.new_cache"
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest sequence in a layer, which has those of this call once appended."""
        at = layer_idx if self._places is None else self._places.get(layer_idx, 0)
        return int(self.cache.layers[at].seq_lens.max())

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Tokens to attend to, and where they start; asked before a mask is made."""
        _call.asked, self._is_asked = weakref.ref(self), True
        self._begin()
        return self.get_seq_length() + query_length, 0

    def reset(self) -> None:
        """Forget all tokens."""
        self.cache.reset()
        self._due, self._waiting = 0, None

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
        self._due, self._waiting = 0, None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Not possible in place."""
        raise UnsupportedError("a KVCache does not grow: make a new one by KVCache.repeat")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Not possible in place."""
        raise UnsupportedError("a KVCache does not shrink: make a new one by KVCache.fork")

    def _no_state(self, *_: Any, **__: Any) -> NoReturn:
        """Not possible: asked by layers of linear attention, convolutions and indexers."""
        raise UnsupportedModelError(
            "a layer keeps a state that is no keys and values (linear attention, convolution or "
            "an index): KVCache holds attention layers only"
        )

    get_conv_state = update_conv_state = has_previous_state = _no_state
    get_recurrent_state = update_recurrent_state = update_indexer = _no_state


class _LayerView(CacheLayerMixin):
    """One layer of a KVCache, for transformers to look at; TransformersCache does the work."""

    is_sliding = False
    is_croppable = False  # by the whole cache only

    def __init__(self, cache: KVCache, at: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers has no types
        self.cache, self.at = cache, at
        self.batch_size = cache.batch
        self.is_initialized = True

    @property
    def keys(self) -> NoReturn:
        """Not possible: a KVCache attends, it does not give out what it holds."""
        raise UnsupportedModelError(
            "the model reads the keys of a cache by itself (as cross-attention does), which a "
            "KVCache does not give out"
        )

    @keys.setter
    def keys(self, _: Any) -> None: ...

    values = keys

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory is there."""

    def update(self, *_: Any, **__: Any) -> NoReturn:
        """Not possible: the whole cache knows whose turn it is."""
        raise UnsupportedError("call update of the TransformersCache")

    def get_seq_length(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.cache.layers[self.at].seq_lens.max())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens to attend to, and where they start."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Tokens that there is room for."""
        return self.cache.max_seq_len


class _Handed:
    """Keys and values of a layer in one call of the model, on their way to attention.

    Attributes:
        to: the cache that they go to.
        at: the place there.
        layer: of the model.
        appended: they are in the cache, so what gets them now is another layer.
        seen: with the first attention, in a chunk: all keys and values that it met, and their
            number (_seen); empty if it met the chunk alone.
        mask: that the first attention got, if any.
        reads_rows: they are appended before attention, which reads the rows only.
    """

    def __init__(self, to: TransformersCache, at: int, layer: int) -> None:
        self.to, self.at, self.layer = to, at, layer
        self.appended = self.reads_rows = False
        self.seen: tuple[Any, ...] | None = None
        self.mask: torch.Tensor | None = None


class _Call(threading.local):
    """What this thread knows of the model's call that runs.

    Attributes:
        asked: the cache that was asked for the sizes of the mask that is made next.
        cache: the cache of the call; None where a mask was made for no TransformersCache.
    """

    asked: weakref.ref[TransformersCache] | None = None
    cache: weakref.ref[TransformersCache] | None = None


_call = _Call()


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
        value: as key.

    Returns:
        [batch, new_tokens, num_q_heads, head_dim], and None for the weights.
    """
    handed = getattr(key, "kvquant_keys", None)
    layer = getattr(module, "layer_idx", getattr(handed, "layer", None))
    name = f"layer {layer} ({type(module).__name__})"
    if options.get("output_attentions"):
        raise UnsupportedModelError(
            f"{name} is asked for its attention weights, which kvquant's attention does not have: "
            "leave output_attentions out, or set another attention implementation"
        )
    if not isinstance(handed, _Handed):
        plain = _plain_attention(module, name, attention_mask, options)
        found: tuple[torch.Tensor, None] = plain(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options
        )
        return found
    try:
        _check_keys(handed, name, query, key, value)
        _check_call(handed, module, name, key.shape[1], query.shape[2], dropout, options)
        window = _window_of(_whole_mask(handed, attention_mask, query.shape[2]), name)
        _check_window(handed, window, options.get("sliding_window"), query.shape[2], name)
        return _attend(handed, query, key, value, scaling, _variant_of(options)), None
    except BaseException:
        handed.to.take_back()
        raise


def _check_keys(
    handed: _Handed, name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Raise unless a layer attends to keys and values as they were handed to it, and with those."""
    if getattr(value, "kvquant_values", None) is not handed:
        raise UnsupportedModelError(
            f"{name} attends to other values than it gave to the cache (split, scaled or "
            "repeated): a KVCache holds keys and values as attention meets them"
        )
    asked, new = query.shape[2], key.shape[2]
    if asked != new and not (handed.appended and asked < new):
        raise UnsupportedModelError(f"{name} attends with other tokens than those of its keys")


def _check_call(
    handed: _Handed,
    module: torch.nn.Module,
    name: str,
    heads: int,
    new_tokens: int,
    dropout: float,
    options: dict[str, Any],
) -> None:
    """Raise unless a layer asks for what a KVCache can compute, and the cache is one for it."""
    config = getattr(module, "config", None)
    if config is not None and not handed.to.is_calibrated:
        handed.to.fit(cache_layers(config))
    if not handed.at and not handed.appended:
        handed.to.check_begin(new_tokens, options.get("position_ids"))
        handed.to.check_positions(options.get("position_ids"))
        handed.to.check_turn(new_tokens)
        handed.to.check_scale(new_tokens)
    if heads != handed.to.cache.num_kv_heads:
        raise UnsupportedModelError(
            f"{name} has {heads} KV heads, its cache {handed.to.cache.num_kv_heads}: a KVCache has "
            "one number for all layers"
        )
    if dropout:
        raise UnsupportedModelError(f"{name} has dropout {dropout}: call model.eval()")
    if not _is_causal(module, options):
        raise UnsupportedModelError(f"{name} is not causal")
    for option, given in options.items():
        if option not in HARMLESS | VARIANT and given is not None and given is not False:
            raise UnsupportedModelError(f"{name} asks for {option}, which no KVCache can compute")


def _is_causal(module: torch.nn.Module, options: dict[str, Any]) -> bool:
    """As SDPA of transformers takes it."""
    told = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if told is None else told)


def _plain_attention(
    module: torch.nn.Module,
    name: str,
    attention_mask: torch.Tensor | None,
    options: dict[str, Any],
) -> Callable[..., Any]:
    """transformers' SDPA, for a call without a TransformersCache.

    Raises:
        UnsupportedModelError: there is one, or SDPA cannot compute what the layer asks for.
    """
    cache = None if _call.cache is None else _call.cache()
    is_ours = cache is not None and (cache.is_waiting or _is_causal(module, options))
    if is_ours or hasattr(attention_mask, "kvquant_mask"):
        if cache:
            cache.take_back()
        raise UnsupportedModelError(
            f"{name} attends to other keys than those it gave to the cache, made of them "
            "(multi-head latent attention, repeated or scaled heads) or of none (as gradient "
            "checkpointing does): a KVCache holds keys and values as attention meets them"
        )
    for option in VARIANT:
        if options.get(option) is not None:
            raise UnsupportedModelError(
                f"{name} asks for {option}, which kvquant's attention computes with a KVCache "
                'only: without one call model.set_attn_implementation("eager")'
            )
    attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return attend


def _attend(
    handed: _Handed,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    variant: AttentionVariant | None,
) -> torch.Tensor:
    """Attend to the past and the new tokens, which are appended by the first that attends."""
    cache = handed.to.cache
    asked, new = query.shape[2], key.shape[2]
    if not handed.appended:
        handed.reads_rows = new == 1 or handed.to.takes_drafts(handed.at, new)
    if handed.reads_rows:
        given = query.transpose(1, 2)
        if given.is_cuda and given.dtype == torch.float32:  # the kernel there takes 16-bit queries
            given = given.bfloat16()  # of any size, where fp16 ends at 65504
        given = given[:, 0] if asked == 1 else given
        if handed.appended:
            out = cache.attend(handed.at, given, variant=variant, in_step=True, sm_scale=scaling)
        else:
            out = handed.to.step(handed, given, key, value, scaling, variant)
        out = out[:, None] if asked == 1 else out
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            out = _NoGradient.apply(out, query, key, value)  # type: ignore[no-untyped-call]
        return out.to(query.dtype)
    if handed.seen is None:
        handed.seen = _seen(cache, handed.at, key, value)
    keys, values, lens = handed.seen or (key, value, [new] * len(key))
    window = cache.layers[handed.at].window
    if window is not None:
        variant = (variant or PLAIN)._replace(window=window)
    out = causal_attention(query, keys, values, lens, scaling, variant)
    if not handed.appended:
        handed.to.append(handed, key, value)
    return out.transpose(1, 2).contiguous()  # as transformers' own: some models view it


class _NoGradient(torch.autograd.Function):
    """What comes out of the packed rows: backward raises, where it would leave attention out."""

    @staticmethod
    def forward(_: Any, out: torch.Tensor, *of: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(_: Any, *gradients: Any) -> NoReturn:
        raise UnsupportedError(
            "no gradient flows through the rows of a KVCache: decode under torch.no_grad(), or "
            "train without a TransformersCache"
        )


def _seen(
    cache: KVCache, at: int, key: torch.Tensor, value: torch.Tensor
) -> tuple[()] | tuple[torch.Tensor, torch.Tensor, list[int]]:
    """What a chunk attends to, before it is appended.

    Returns:
        Keys and values of each sequence's dequantized past, or of its window, the chunk right
        behind them; how many these are. Empty where there is no past.
    """
    layer, new = cache.layers[at], key.shape[2]
    past_lens = layer.held_lens.tolist()
    if not any(past_lens):
        return ()
    keys, values = layer.dequantized(key.dtype, room=new)
    for b, past in enumerate(past_lens):
        keys[b, :, past : past + new], values[b, :, past : past + new] = key[b], value[b]
    return keys, values, [past + new for past in past_lens]


def _variant_of(options: dict[str, Any]) -> AttentionVariant | None:
    """What a layer changes in attention, from what it gives its attention function."""
    cap, sinks = options.get("softcap"), options.get("s_aux")
    if cap is None and sinks is None:
        return None
    return AttentionVariant(cap, None if sinks is None else sinks.detach().float())


class _MaskMark:
    """What a mask of a call with a TransformersCache shows.

    Attributes:
        window: tokens that each token sees, the last ones.
        problem: why no KVCache can compute it, else None.
    """

    def __init__(self, window: int | None = None, problem: str | None = None) -> None:
        self.window, self.problem = window, problem


def _whole_mask(
    handed: _Handed, attention_mask: torch.Tensor | None, asked: int
) -> torch.Tensor | None:
    """The mask that the first attention got, where a layer that shares keys got its last rows."""
    mask, whole = attention_mask, handed.mask
    if not handed.appended:
        handed.mask = mask
    elif mask is not None and whole is not None and not hasattr(mask, "kvquant_mask"):
        is_part = mask.shape[2:] == (asked, whole.shape[3])
        if is_part and mask.data_ptr() == whole.data_ptr() + whole.shape[2] - asked:
            return whole
    return mask


def _window_of(attention_mask: torch.Tensor | None, name: str) -> int | None:
    """The window of a mask, or None; UnsupportedModelError for one that is not possible."""
    if attention_mask is None:
        return None
    mark: _MaskMark | None = getattr(attention_mask, "kvquant_mask", None)
    if mark is None:
        raise UnsupportedModelError(f"{name} got an attention mask that is not the causal one")
    if mark.problem is not None:
        raise UnsupportedModelError(f"{name} {mark.problem}")
    return mark.window


def _check_window(
    handed: _Handed, window: int | None, option: int | None, new_tokens: int, name: str
) -> None:
    """Raise unless a layer of the cache sees what the model's does.

    Args:
        handed: the keys, of the layer of the cache.
        window: of the mask that the model's layer got.
        option: the window that the layer gave the attention function, if any.
        new_tokens: of this call.
        name: of the model's layer.
    """
    at = handed.to.cache.layers[handed.at]
    if at.window == window and option in (None, window):
        return
    given = [w for w in (at.window, window, option) if w is not None]
    tokens = int(at.seq_lens.max()) + (0 if handed.appended else new_tokens)
    if tokens > min(given):
        wanted, has = (f"the last {w} tokens" if w else "all tokens" for w in (window, at.window))
        told = "" if option in (None, window) else f" (and speaks of {option})"
        raise UnsupportedModelError(
            f"{name} attends to {wanted}{told}, its layer of the cache to {has}: make the cache by "
            "CachedModel.new_cache, or with windows=kvquant.hf.cache.windows_of(model.config)"
        )


# it compares code; and a graph ends anyway where the length of a cache is read
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _mask(
    *,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **sizes: Any,
) -> torch.Tensor | None:
    """The mask of a call with a TransformersCache as a mark; else that of SDPA.

    Returns:
        None for the causal one, which attention computes by itself.
    """
    _call.cache, _call.asked = _call.asked, None
    if _call.cache is None or _call.cache() is None:
        sizes["allow_is_bidirectional_skip"] = False  # None means causal here
        mask: torch.Tensor | None = sdpa_mask(
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            use_vmap=use_vmap,
            **sizes,
        )
        return mask
    mark = _MaskMark(problem="has a mask that is neither causal nor a sliding window")
    if attention_mask is not None and not bool(attention_mask.all()):
        mark.problem = (
            "got an attention_mask that hides tokens, and a KVCache has no padding before them: "
            "generate with prompts of one length at a time, or put padding after the tokens and "
            "give their lens to CachedModel.prefill"
        )
    elif use_vmap:
        pass  # functions of the caller's own
    elif local_size is None and mask_function is causal_mask_function:
        return None
    elif local_size is not None and _is_window(mask_function, local_size):
        mark = _MaskMark(local_size)
    elif local_size is not None and _is_chunk(mask_function, local_size):
        if sizes["kv_length"] <= local_size:
            return None
        mark.problem = f"attends to chunks of {local_size} tokens: KVCache has sliding windows only"
    # an element a row: what a model makes of it, but its last rows, has lost the mark: refused
    shape = sizes["batch_size"], 1, sizes["q_length"], sizes["kv_length"]
    rows = torch.empty(shape[2], 1, dtype=torch.bool, device=sizes.get("device"))
    marked = rows.expand(shape)
    marked.kvquant_mask = mark  # type: ignore[attr-defined]
    return marked


def _is_window(mask_function: Callable[..., Any], window: int) -> bool:
    """Whether a mask shows each token the last `window` ones, itself included, and no others."""
    return _same(mask_function, sliding_window_causal_mask_function(window))


def _is_chunk(mask_function: Callable[..., Any], size: int) -> bool:
    """Whether a mask shows each token those before it in its chunk of `size`."""
    return _same(mask_function, chunked_causal_mask_function(size, torch.zeros(())))


def _same(one: Any, other: Any) -> bool:
    """Whether two functions run the same code with the same values around it.

    Tensors count as equal: the one there is, left padding, is zeros where nothing is hidden.
    """
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        around = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (one, other)]
        return one.__code__ is other.__code__ and _same(*around)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return True
    return type(one) is type(other) and bool(one == other)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)


def plain_cache() -> Any:
    """transformers' own 16- or 32-bit cache."""
    return DynamicCache()


def windows_of(config: Any) -> list[int | None]:
    """The sliding window of each layer of a KVCache for a model, as transformers' own cache has it.

    Args:
        config: of the text model.

    Returns:
        For KVCache: None where attention sees all tokens.
    """
    return list(cache_layers(config).windows)
