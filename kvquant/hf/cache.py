"""TransformersCache: a KVCache in the form that transformers' models take as past_key_values.

A model hands each layer's new keys and values to a cache and then calls an attention function by
name. Both are ours: this cache passes keys and values on, rounded to its 16-bit format and marked;
the function in attention.py attends to marked ones, and appends them. Each layer of the cache is
appended once in a call of the model, in order, or the call is refused.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ..cache.contiguous import KVCache
from ..errors import ConfigError, ShapeError, UnsupportedError, UnsupportedModelError
from ..rows.quantize import EXACT_DTYPES
from ..rows.variant import AttentionVariant
from .attention import Handed
from .configs import CacheLayers, Turn
from .masks import ATTENTION, calls

DRAFTS = 16  # tokens


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
        calls.cache, calls.asked = weakref.ref(self), None
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
        handed = Handed(self, at, layer_idx)
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

    def append(self, handed: Handed, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append what was handed to a layer; the next one is due then."""
        self.cache.append(handed.at, keys, values, self.new_lens)
        handed.appended, self._waiting = True, None
        self._due = handed.at + 1

    def step(
        self,
        handed: Handed,
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
                f"kvquant's attention. Call model.set_attn_implementation({ATTENTION!r}) first; a "
                "model that is set to it computes attention by itself, not through transformers' "
                "attention interface, and cannot use a KVCache"
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
        calls.asked, self._is_asked = weakref.ref(self), True
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
