"""QuantizedCache: a KVCache in the form that transformers' models take as their cache.

A model hands each layer's new keys and values to a cache and then calls an attention function by
name. This cache rounds them to its 16-bit format and marks them; attention.py attends to marked
ones and appends them. A call of the model appends once to each layer, in order, or raises (text.py,
call.py). transformers' own layers (states, other numbers of KV heads) stand in the same list.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionLayer,
)

from ..cache.checks import Formats
from ..cache.contiguous import KVCache
from ..cache.copying import NoShallowCopy
from ..cache.latent import LatentFormats, LatentKVCache
from ..errors import ConfigError, ShapeError, UnsupportedModelError
from ..io.plan import ModelPlan
from ..rows.arguments import check_flag, check_kind, check_size
from ..rows.quantize import EXACT_DTYPES, exact_codec
from .argument import ARGUMENT
from .compile.tracing import keep_in_new_place, outside_of_graphs
from .continuation import WRONG, check_goes_on
from .dequantized import append_and_dequantize
from .models.configs import CacheLayers, cache_layers, layer_devices, layers_of_rank, new_cache
from .models.hook import DecoderHook
from .models.latent import check_latents
from .models.probe import check_accuracy
from .plans import plan_of_model
from .sources import check_caller, check_names, config_of
from .text import DRAFTS, CachedText, Handed, running

SPACE = 256  # tokens that a cache which grows has room for at first, besides those that come


class QuantizedCache(CachedText, NoShallowCopy, Cache):
    """The cache that model.generate, pipelines and models take.

        from kvquant import QuantizedCache  # registers "kvquant" in transformers
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kvquant")
        model.generate(**inputs, **QuantizedCache(model).argument)

    Rows: the first tokens make a KVCache for their sequences, device and 16-bit dtype. It doubles
    its room when it is full. With a device_map each layer's rows lie on its device. A model with
    multi-head latent attention (DeepSeek V2, V3) gets a LatentKVCache. transformers keeps layers
    that no KVCache holds (linear attention, other numbers of KV heads) and states beside attention,
    in 16 bit and outside of kv and its files: see describe().

    Padding may stand on the left (generate) or on the right: give attention_mask. The cache stores
    no padding. get_seq_length counts columns, as transformers does; kv.seq_lens counts tokens.

    Errors: on CUDA a step of one token reads nothing, so call check() at times: it raises for NaN,
    and for a mask or position_ids that contradict the cache. A call that fails in attention is
    undone at once; one that fails elsewhere is undone by crop(0), or by the next call, which
    raises. Layers that transformers keeps cannot forget: call reset(). A call that fails after
    attention in the last layer leaves its tokens: crop them. backward raises.

    Positions count from 0, alike for all sequences. If they differ (padding, sequences cropped
    apart), give position_ids, as generate does. With LongRoPE (Phi-3) a text may not cross
    original_max_position_embeddings; read a longer prompt in one call.

    A cache belongs to one text: call reset() before another. generate raises for a shorter text,
    and for other ids than its own. If a file or your own loop filled the cache, a longer different
    text goes unnoticed and gives wrong output.

    transformers has another QuantizedCache (backend=, nbits=): import this one from kvquant.

    Args:
        source: a model of transformers that attends by "kvquant" (with dequantize in any way), its
            config, or a KVCache (of load_cache, or CachedModel.new_cache) with formats and lengths
            of its own. After a KVCache of unequal lengths pad ids on the left to the longest.
        k_format, v_format, sink_len, recent_len: as of KVCache.
        plan: of `kvquant calibrate`, for this model, or the path of its file: it sets the formats.
            "auto" takes the kept plan of the model's weights, or makes and keeps one in about a
            minute; source must be the model. False is no plan.
        fmt: of latent rows, in place of k_format and v_format; as of LatentKVCache.
        exact_format: "bf16" or "fp16", of 16-bit rows; None for what fits the dtype of the keys.
        max_seq_len: room for tokens of a sequence, from the beginning; more raise. None: the cache
            grows.
        placed: you give position_ids in every call, and the cache does not check them. Models that
            hide them from attention (Llama 4, Granite 4 hybrids, Persimmon) need this if the cache
            does not know the model.
        drafts: up to 16 tokens in one call after others are drafted ones: each attends to the rows
            as it would alone (KVCache.step). Other calls of several tokens are chunks of a prompt,
            whose tokens meet each other in 16 bit.
        dequantize: give the model 16-bit keys and values of the whole text, one layer at a time,
            for its own attention: for models outside of transformers' attention interface (Falcon,
            BLOOM, MPT). This saves memory; steps take longer than with a 16-bit cache. Padding
            takes rows, and layers with a window keep all tokens.
        model: the calling model, if source is a KVCache: generate can then draft with it, and no
            model needs placed.
        accept_loss: make the cache even if K rows of 4 bits or fewer, without a plan, ruin the
            model: kvquant/hf/README.md, "A probe of K rows".

    Attributes:
        kv: the KVCache; None before the first tokens come.

    Raises:
        ConfigError: source is none of these, or a model with other attention; or an option is not
            possible.
        AccuracyError: K rows of 4 bits or fewer, without a plan, ruin the model's texts.
        CheckpointError: the plan was made for another model.
        UnsupportedModelError: the model is no decoder, or a KVCache holds none of its layers.
        ShapeError: the layers of a KVCache hold different lengths.
        NonFiniteError: as KVCache.check.

    Example:
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from kvquant import QuantizedCache
        >>> from kvquant.cli.demo import MODEL  # a folder with a model
        >>> model = AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="kvquant")
        >>> text = AutoTokenizer.from_pretrained(MODEL)("The city of Manila", return_tensors="pt")
        >>> cache = QuantizedCache(model, k_format="int8", v_format="int4-g4")
        >>> more = model.generate(**text, **cache.argument, max_new_tokens=5)
        >>> more.shape[1] - text.input_ids.shape[1]
        5
    """

    def __init__(
        self,
        source: Any = None,
        *theirs: NoReturn,
        k_format: Formats | None = None,
        v_format: Formats | None = None,
        plan: ModelPlan = None,
        fmt: LatentFormats | None = None,
        sink_len: int | None = None,
        recent_len: int | None = None,
        exact_format: str | None = None,
        max_seq_len: int | None = None,
        placed: bool = False,
        drafts: bool = True,
        dequantize: bool = False,
        model: Any = None,
        accept_loss: bool = False,
        **others: NoReturn,
    ) -> None:
        check_names(theirs, others)
        flags = {"placed": placed, "drafts": drafts, "dequantize": dequantize}
        for name, flag in (flags | {"accept_loss": accept_loss}).items():
            check_flag(name, flag)
        CachedText.__init__(self, placed=placed, drafts=drafts, dequantize=dequantize)
        Cache.__init__(self, layers=[])
        self._exact_format = exact_format
        self._decoder: weakref.ref[torch.nn.Module] | None = None  # of the model, if that is known
        self._step_lens: tuple[int, ...] = () if dequantize else (1,)  # of KVCache
        options: dict[str, Any] = {
            "k_format": k_format,
            "v_format": v_format,
            "plan": plan or None,
            "fmt": fmt,
            "sink_len": sink_len,
            "recent_len": recent_len,
        }
        options = {name: value for name, value in options.items() if value is not None}
        if max_seq_len is not None:
            self._max_seq_len = check_size("max_seq_len", max_seq_len, at_least=1)
        if isinstance(source, KVCache):
            if options or exact_format is not None:
                raise ConfigError(
                    "source is a KVCache, which has formats and lengths of its own: give none "
                    "with it, or give a model"
                )
            source.check()
            if self._max_seq_len is not None and self._max_seq_len != source.max_seq_len:
                source.grow(self._max_seq_len)
            self.layers_held = CacheLayers.of_cache(source)
            self._hold(source)
            self.layers = [QuantizedLayer(self, at, at) for at in range(source.num_layers)]
            if model is not None:
                check_kind("model", model, torch.nn.Module, "give the model that calls the cache")
                check_caller(model, dequantize=dequantize)
                self._know(model)
            return
        if model is not None:
            raise ConfigError("model is for a source that is a KVCache: give the model as source")
        config = config_of(source)
        longest = 0 if dequantize else max_seq_len  # chunks are the mask's, of transformers
        layers = layers_of_rank(source, cache_layers(config, longest=longest))
        if isinstance(source, torch.nn.Module):
            check_caller(source, dequantize=dequantize)
        if dequantize and not layers.are_latent:
            options["windows"] = [None] * len(layers.places)
        options["is_probed"] = isinstance(source, torch.nn.Module)
        if (found := plan_of_model(options.pop("plan", None), source, options)) is not None:
            options["plan"] = found
        make: Callable[..., KVCache] = partial(new_cache, config, **options)
        dtype: Any = None
        if isinstance(source, torch.nn.Module):
            self._devices, dtype = layer_devices(source, layers.places), source.dtype
            self._know(source)
        exact = exact_format or exact_codec(dtype)
        self._outline = make(layers, 1, 0, exact_format=exact)  # or it is not possible
        self._make = make
        if "plan" not in options and isinstance(source, torch.nn.Module) and not accept_loss:
            check_accuracy(source, self._outline, layers)
        is_hybrid = bool(layers.others or layers.states)
        self.fit(layers, DynamicCache(config=config).layers if is_hybrid else ())

    def _know(self, model: Any) -> None:
        decoder = model.get_decoder()
        self._decoder, self.hook = weakref.ref(decoder), DecoderHook(decoder)
        self.names_positions = "position_ids" in inspect.signature(model.forward).parameters

    def fit(self, layers: CacheLayers, others: Sequence[Any] = ()) -> None:
        """Hold these layers of a model.

        Args:
            layers: which those of the KVCache are.
            others: all layers as transformers keeps them; needed for layers.others and
                layers.states.

        Raises:
            ShapeError: the KVCache is not one for these layers.
            UnsupportedModelError: others are needed and not given.
        """
        if not others:
            layers.check_whole()
        super().fit(layers)
        # those between that own no keys are there to be counted
        count = max([*layers.places, *layers.others]) + 1
        self.layers = [QuantizedLayer(self, at, layers.at.get(at)) for at in range(count)]
        for at in layers.others:
            self.layers[at] = others[at]
        for at in layers.states:
            states = others[at].number_of_states
            self.layers[at] = QuantizedLayerWithState(self, at, layers.at[at], states)

    @property
    def argument(self) -> dict[str, Any]:
        """{"cache": self}, before transformers 5.24 {"past_key_values": self}."""
        return {ARGUMENT: self}

    @torch.inference_mode(False)  # else the copy's tensors could not be changed outside
    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedCache:
        """A copy for the same model, with a life of its own."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        other._decoder, other.hook = self._decoder, self.hook
        return other

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: changes count anew, and a loaded pickle has no model."""
        is_known = self.kv is not None and not self._is_changed
        here = {"_decoder": None, "hook": None, "awaits_whole_text": False}
        return vars(self) | here | {"_marks": () if is_known else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.kv is not None and self._marks is not None:
            self._mark()
        for layer in self.layers:
            if isinstance(layer, QuantizedLayer) and "_cache" not in vars(layer):
                layer.bind(self)

    def __bool__(self) -> bool:
        """False for a model with LongRoPE (Phi-3), or while the model is unknown.

        transformers replaces a true cache by a 16-bit one when a text crosses the switch. This
        cache serves a longer prompt, and raises UnsupportedModelError if a text would cross.
        """
        turn = self.layers_held.turn
        return self._knows_model and (turn is None or turn.again)

    def __repr__(self) -> str:
        kinds = "; ".join(dict.fromkeys(text for _, text in self._texts()))
        kv = self._outline if self.kv is None else self.kv
        held = "no tokens yet"
        if self.kv is not None:
            held = f"batch {kv.batch}, {self.length_of(0)} tokens, room for {kv.max_seq_len}"
        return (
            f"QuantizedCache of {self.layers_held.count} layers: {kinds:.200}\n"
            f"  the first {kv.sink_len} and last {kv.recent_len} tokens in {kv.exact_format}\n"
            f"  {held}, {self.nbytes:,} bytes on {kv.device}"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, transformers' layers included; 0 before the first tokens."""
        states = tree_leaves([vars(self.layers[at]) for at in self.layers_held.kept])
        kept = sum(one.nbytes for one in states if isinstance(one, torch.Tensor))
        return kept + (0 if self.kv is None else self.kv.nbytes)

    def describe(self) -> str:
        """The format of each layer of the model, and why; equal neighbours share a line.

        Example:
            >>> from transformers import LlamaConfig
            >>> from kvquant import QuantizedCache
            >>> config = LlamaConfig(num_hidden_layers=2)
            >>> print(QuantizedCache(config, v_format="int8").describe())
            layers 0-1: K int8-g4, V int8
        """
        return "\n".join(f"{layers}: {text}" for layers, text in self._texts())

    def _texts(self) -> Iterator[tuple[str, str]]:
        """Neighbouring layers that are kept alike, and their description."""
        for text, group in groupby(range(self.layers_held.count), self._text_of):
            first, *others = group
            yield f"layers {first}-{others[-1]}" if others else f"layer {first}", text

    def _text_of(self, layer: int) -> str:
        """The description of a layer."""
        layers = self.layers_held
        if layer in layers.others:
            kept = type(self.layers[layer]).__name__
            return f"{kept} of transformers, as it {layers.others[layer]}"
        at = layers.at.get(layer)
        if at is None and layer in layers.shared:
            kept = "keys of another layer, of transformers"
            return f"the {kept if self.keeps(layer) else 'rows of another layer'}"
        if at is None:
            return "nothing, it has no attention"
        kv = self._outline if self.kv is None else self.kv
        held = kv.layers[at]
        text = f"K {held.k_format}, V {held.v_format}"
        if isinstance(kv, LatentKVCache):
            text = f"latent rows {kv.formats[at]}"
        text += f", the last {held.window} tokens" if held.window else ""
        text += ", dequantized in each call" if self._dequantizes else ""
        has_state = isinstance(self.layers[layer], QuantizedLayerWithState)
        return text + (", beside a state of transformers" if has_state else "")

    def hand(
        self, layer: int, at: int | None, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass on a layer's new tokens in 16-bit precision; the attention function appends them.

        Args:
            layer: of the model.
            at: its place in the KVCache; None if it has none.
            keys, values: [batch, num_kv_heads, columns, head_dim]; or latents and RoPE parts.

        Returns:
            Marked keys and values, or unmarked latents; with dequantize those of all tokens.

        Raises:
            UnsupportedModelError: the layer before did not attend; or this one gives no latents.
            ShapeError: it is not this layer's turn, or its tokens have another batch or shape.
        """
        if self.call.awaits_mask:  # it was made for another attention, which is about to run
            outside_of_graphs(self.refuse_mask, str(layer))
        is_traced = torch.compiler.is_compiling()
        if is_traced:
            is_part, running.traced = self.is_traced(keys.shape[2]), None
            if not is_part:
                found: tuple[torch.Tensor, torch.Tensor] = outside_of_graphs(
                    self.hand, layer, at, keys, values
                )
                return found
        try:
            if is_traced:
                self.call.check_ready()
            else:
                self._begin_layer(layer, at, keys.shape[2])
            if not at:
                self._make_room(keys)
        except (ShapeError, UnsupportedModelError):
            self.take_back()
            raise
        assert self.kv is not None and at is not None
        self.call.hand(layer)
        padding = None if is_traced else self.call.padding
        padding = None if padding is None else padding.on(keys.device)
        handed = Handed(self, self.kv, at, layer, padding, is_traced)
        try:
            return self._pass_on(handed, keys, values)
        except BaseException:
            self.take_back()
            raise

    def _begin_layer(self, layer: int, at: int | None, columns: int) -> None:
        """Raise unless it is a layer's turn; the first one begins a call that made no masks."""
        if not self._dequantizes:
            running.note(self)
        self.call.check_attended()
        if self.call.comes_first(at, self.num_places):
            self._begin(columns, was_asked=False)
        self.call.check_turn(layer, at, self.num_places)
        if not at:
            self.call.columns = columns

    def _pass_on(
        self, handed: Handed, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Round what was handed and mark it; see hand."""
        kv = handed.kv
        if isinstance(kv, LatentKVCache):
            check_latents(handed.layer, keys, values, kv.formats[handed.at])
        exact = EXACT_DTYPES[kv.exact_format]
        keys, values = _rounded(keys, exact), _rounded(values, exact)
        if self._dequantizes:
            if not handed.at:
                check_goes_on(self)
            is_step = keys.shape[2] == 1 or self.takes_drafts()
            return append_and_dequantize(handed, keys, values, is_step)
        if isinstance(kv, LatentKVCache):  # the model makes other tensors of them
            handed.latents, self.latents = (keys, values), handed
            if handed.is_traced:
                running.note(self)
            return keys, values
        keys.kvquant_keys = handed  # type: ignore[attr-defined]  # a mark on it
        values.kvquant_values = handed  # type: ignore[attr-defined]  # a mark on it
        return keys, values

    def _make_room(self, keys: torch.Tensor) -> None:
        """Make the KVCache for the first tokens, or let it grow for more."""
        batch, new = keys.shape[0], keys.shape[2]
        is_other = self.kv is not None and self.kv.batch != batch
        is_due = self.kv is None or (is_other and not self.past.length)
        if is_due and self._make is not None:
            exact = self._exact_format or exact_codec(keys.dtype)
            size = self._max_seq_len or new + SPACE
            layers = self.layers_held.of_rank(keys.shape[1])
            if self._dequantizes:  # configs of such models have other names for them
                layers = replace(layers, num_kv_heads=keys.shape[1])
            device = self._devices or keys.device
            kv = self._make(layers, batch, size, exact_format=exact, device=device)
            kv.step_lens = self._step_lens
            self._hold(kv)
        assert self.kv is not None
        if self.kv.batch != batch:
            repeats, rest = divmod(batch, self.kv.batch)
            how = f"call cache.batch_repeat_interleave({repeats}) first"
            raise ShapeError(
                f"the model runs {batch} sequences, the cache has {self.kv.batch}: "
                + (f"the cache is for {self.kv.batch} at a time" if rest else how)
                + " (num_beams and num_return_sequences repeat each sequence)"
            )
        if self._max_seq_len is None and self.past.length + new > self.kv.max_seq_len:
            self.kv.grow(max(self.past.length + new, 2 * self.kv.max_seq_len))

    def check(self) -> None:
        """Raise errors of steps on CUDA, which read nothing; see KVCache.check.

        Raises:
            ConfigError: a step's mask or position_ids contradicted the cache.
            UnsupportedModelError: a layer got its keys in the last call, and did not attend to them
                by kvquant's attention.
            NonFiniteError, ShapeError: as KVCache.check.
        """
        self.check_attended()
        if self.kv is None or self.wrong is None:
            return
        self.kv.check()
        for is_wrong, message in zip(self.wrong.tolist(), WRONG, strict=True):
            if is_wrong:
                self.wrong.zero_()
                raise ConfigError(message)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As Cache: the columns that a layer attends to, and where they start."""
        sizes = self.mask_sizes(query_length)
        if layer_idx in self.layers_held.others and isinstance(
            self.layers[layer_idx], CacheLayerMixin
        ):
            sizes = self.layers[layer_idx].get_mask_sizes(query_length)
        return sizes

    def reset(self) -> None:
        """Forget all tokens, and keep the memory for as many sequences."""
        for layer in self.layers_held.kept:
            self.layers[layer].reset()
            _forget_tensors(self.layers[layer])
        self.call.reset()
        self.latents, self.awaits_whole_text = None, False
        if self.kv is not None:
            self.kv.reset()
            self._hold(self.kv)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put sequence beam_idx[b] at place b."""
        self._refresh()
        if self.kv is not None:
            self.kv.reorder(beam_idx)  # refuses what does not fit
        self.has_beams = True
        self._take_states(beam_idx)
        if self.kv is not None:
            self._taken(beam_idx)

    def activate_past_recording(self) -> None:
        """Expect drafts, which transformers announces, and compile their kernels, too."""
        super().activate_past_recording()  # type: ignore[no-untyped-call]  # transformers has no types
        decoder = None if self._decoder is None else self._decoder()
        self.awaits_whole_text = self.length_of(0) > 0 and decoder is not None
        if decoder is not None and self.awaits_whole_text and self.hook is None:
            self.hook = DecoderHook(decoder)
        if self._drafts and not self._dequantizes:
            self._step_lens = tuple(range(1, DRAFTS + 1))
            if self.kv is not None:
                self.kv.step_lens = self._step_lens

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last columns, padding among them.

        Args:
            tokens_to_remove: their number as a negative one, as transformers gives it.

        Raises:
            ShapeError: as KVCache.crop, for layers with a window.
            RuntimeError: by transformers, for its own layers that cannot forget.
        """
        if tokens_to_remove > 0:
            raise ConfigError(
                f"crop({tokens_to_remove}) is not possible, as in transformers: give the number of "
                "tokens to remove as a negative one"
            )
        self._refresh()
        past = self.past.without_last(-tokens_to_remove)
        is_due = self.kv is not None and bool(tokens_to_remove or self.call.due)
        if self.kv is not None and is_due and self.layers_held.kept:  # states cannot be put back
            for at, rows in enumerate(self.kv.layers):
                rows.check_crop(at, torch.tensor(past.lens, device="cpu"))
        for layer in self.layers_held.kept:  # crop(0) too ends what they have recorded
            self.layers[layer].crop(tokens_to_remove)
        if self.kv is None or not is_due:
            return
        self.kv.crop(past.lens)
        self._forgotten(past)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence, its copies side by side."""
        if self.kv is not None:
            places = torch.arange(self.kv.batch, device="cpu")
            self.batch_select_indices(places.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences at these places."""
        if self.kv is not None:
            if isinstance(indices, torch.Tensor) and indices.dtype == torch.bool:
                indices = indices.nonzero()[:, 0]  # as torch indexes
            self._refresh()
            self.kv.select(indices)
            self._take_states(indices)
            self._taken(indices)
            if self.is_compileable:  # tensors lie elsewhere
                keep_in_new_place(self.kv)

    def _take_states(self, index: torch.Tensor) -> None:
        """Let layers of transformers follow: what their states have in place of batch_select."""
        for layer in self.layers_held.kept:
            self.layers[layer].reorder_cache(index)


class QuantizedLayer(CacheLayerMixin):
    """A layer of the model, for transformers; `at` is None for another layer's keys."""

    is_sliding = False
    is_croppable = True  # by the whole cache; with a window too, which keeps SPARE tokens more

    def __init__(self, cache: QuantizedCache, layer: int, at: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers has no types
        self.layer, self.at = layer, at
        self.bind(cache)

    def bind(self, cache: QuantizedCache) -> None:
        """Belong to this cache, by a weak reference: a cycle would hold its memory for long."""
        self._cache = weakref.ref(cache)

    @property
    def cache(self) -> QuantizedCache:
        cache = self._cache()
        if cache is None:
            raise ReferenceError("the cache of this layer is gone: keep the QuantizedCache")
        return cache

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles of the cache, which bind the layer again."""
        return {name: value for name, value in vars(self).items() if name != "_cache"}

    @property
    def is_initialized(self) -> bool:
        return self.cache.kv is not None

    @is_initialized.setter
    def is_initialized(self, _: Any) -> None: ...

    @property
    def batch_size(self) -> int:
        """Sequences; 0 before the first ones."""
        if self.cache.kv is None:
            raise AttributeError("no sequence has come yet")
        return self.cache.kv.batch

    @property
    def keys(self) -> NoReturn:
        """Raise: a KVCache attends, and gives out no keys."""
        raise UnsupportedModelError(
            "the model reads the keys of a cache by itself (as cross-attention does), which a "
            "KVCache does not give out"
        )

    @keys.setter
    def keys(self, _: Any) -> None: ...

    values = keys

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the first call makes the memory."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.hand(self.layer, self.at, key_states, value_states)

    def get_seq_length(self) -> int:
        """Columns, padding included."""
        return self.cache.length_of(self.at)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.mask_sizes(query_length)

    def get_max_length(self) -> int:
        """Columns that there is room for; -1 if it grows."""
        return self.cache.max_columns


class QuantizedLayerWithState(QuantizedLayer, LinearAttentionLayer):
    """A layer with rows in a QuantizedCache and a state of transformers' (Falcon-H1, Zaya)."""

    is_compileable = False
    is_croppable = getattr(LinearAttentionLayer, "is_croppable", False)  # not in older ones

    def __init__(self, cache: QuantizedCache, layer: int, at: int | None, states: int) -> None:
        QuantizedLayer.__init__(self, cache, layer, at)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    reset = LinearAttentionLayer.reset
    reorder_cache = LinearAttentionLayer.reorder_cache
    crop = LinearAttentionLayer.crop
    offload = LinearAttentionLayer.offload
    prefetch = LinearAttentionLayer.prefetch
    lazy_initialization = LinearAttentionLayer.lazy_initialization  # type: ignore[assignment]  # of states


def _forget_tensors(layer: Any) -> None:
    """Let a reset layer of transformers make new tensors."""
    # The next text may have more sequences, and before transformers 5.18 zeros would precede its
    # keys.
    if isinstance(layer, DynamicLayer):
        layer.is_initialized = False
    for name in ("is_conv_states_initialized", "is_recurrent_states_initialized"):
        if hasattr(layer, name):
            setattr(layer, name, dict.fromkeys(getattr(layer, name), False))


def _rounded(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to 16 bit in the same dtype, as later calls read 16-bit rows; a new tensor."""
    if states.dtype == dtype:
        return states.view_as(states)
    return states.to(dtype).to(states.dtype)
