"""QuantizedCache: a KVCache in the form that transformers' models take as their cache.

A model hands each layer's new keys and values to a cache and then calls an attention function by
name. Both are ours: this cache passes keys and values on, rounded to its 16-bit format and marked;
the function in attention.py attends to marked ones, and appends them. Each layer of the KVCache is
appended once in a call of the model, in order, or the call is refused.

Layers that no KVCache holds (states, other numbers of KV heads) are transformers' own objects in
the same list, in the model's order; attention that is theirs is SDPA, with the mask that
transformers makes. A layer with a state beside its attention is both.

transformers counts padded columns; rows hold none (padding.py). What a call of the model is checked
for is known on the host, but for two things in a step of one token: that the mask shows the tokens
there are, and position_ids. These are compared on the device, as a GPU would have to be waited for.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionLayer,
)

from .. import debug
from ..cache.checks import Formats, whole_numbers
from ..cache.contiguous import KVCache
from ..cache.latent import LatentFormats, LatentKVCache
from ..errors import ConfigError, ShapeError, UnsupportedModelError, shown
from ..io.plan import CachePlan
from ..rows.arguments import check_flag, check_kind, check_size, name_of_kind
from ..rows.quantize import EXACT_DTYPES, exact_codec
from .argument import ARGUMENT
from .attention import Handed
from .compile.tracing import outside_of_graphs, tracing
from .dequantized import append_and_dequantize, check_columns
from .masks import ATTENTION, calls
from .models.configs import (
    CacheLayers,
    Turn,
    cache_layers,
    layer_devices,
    layers_of_rank,
    new_cache,
)
from .models.decoders import check_decoder
from .models.hook import DecoderHook, Shown
from .models.latent import check_latents
from .models.positions import check_scale, check_turn
from .padding import Columns, Padding
from .switch import DEQUANTIZE, attending

DRAFTS = 16  # tokens
# Layers that attend to the keys of another one bring them to their own device first. Where they are
# there already, torch 2.11 traces another tensor, without our mark on it; 2.13 the same one.
_LOSES_MARKS = torch.torch_version.TorchVersion(torch.__version__) < "2.13"
SPACE = 256  # tokens that a cache which grows has room for at first, besides those that come
# a cache is shown the new tokens only, so a longer text that begins otherwise cannot be told
_ANOTHER = (
    "A cache belongs to one text, of which generate gets all ids, those in the cache and the new "
    "ones. For another text call reset(), or make another cache. A pipeline reads the texts of a "
    "list one after another into one cache: give it batch_size=len(texts), or one text with a "
    "cache of its own at a time"
)
_MASK = (
    "the attention_mask of a step shows other tokens than the cache has and the new one: give it "
    "as it was, with a 1 for each new token. Read a padded prompt several tokens at a time; crop "
    "the cache to hide tokens at its end"
)
_POSITIONS = (
    "the cache's sequences go on from other positions than those that the model counts, or is "
    "given. For generate pad prompts on the left (tokenizer.padding_side = 'left'), and go on with "
    "the ids and the attention_mask of the whole text; reset() begins another one. In a loop of "
    "your own give it position_ids=cache.kv.positions[:, None] + torch.arange(new_tokens), or read "
    "and decode by CachedModel"
)
# of transformers' QuantizedCache
_THEIRS = "backend", "config", "nbits", "axis_key", "axis_value", "q_group_size", "residual_length"
_PLACED = (
    "as this model does not show position_ids to attention, make the cache of the model, "
    "QuantizedCache(model), or QuantizedCache(..., placed=True) then"
)


class QuantizedCache(Cache):
    """The cache that model.generate, pipelines and models take.

        from kvquant import QuantizedCache  # registers "kvquant" in transformers
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kvquant")
        model.generate(**inputs, **QuantizedCache(model).argument)

    The rows are a KVCache, made when the first tokens come: for the sequences, the device and the
    16-bit dtype of their keys. It grows as they do, to twice its room at a time. Of a model whose
    layers lie on several devices (device_map) each layer's rows lie where the layer does.

    Prompts may be padded, on the left (generate) or on the right: give their attention_mask. The
    padding is not stored, and each sequence gets what it would get alone. get_seq_length counts
    columns, with padding, as transformers does; kv.seq_lens counts tokens. In a step of one token
    each sequence gets one. On CUDA nothing is read in a step: call check() at times. It raises what
    came with NaN, and what a mask or position_ids in a step have contradicted.

    It is for inference: no gradient flows through a cache, and backward through a step raises. A
    call of the model that fails in attention is taken back; one that fails elsewhere is taken back
    by the next, which raises. Until then layers hold different lengths, which kv.check() tells;
    crop(0) keeps what all layers have. One that fails after the attention of the last layer leaves
    its tokens, as in transformers' own caches: crop them.

    Of a model with multi-head latent attention (DeepSeek V2, V3) it is a LatentKVCache, whose rows
    are as fmt says, or a plan.

    A layer that no KVCache holds (linear attention, other numbers of KV heads) is kept as
    transformers keeps it, in 16 bit, and so is a state beside attention: describe() tells which and
    why. What has reached them is not taken back when a call fails: reset() then. They are not in
    kv, so not in its files.

    Models count the positions of all sequences alike, from 0: where those of the cache are others
    (padding, sequences cropped apart, start_positions), give position_ids, as generate does. Phi-3
    models drop a cache themselves where their prompt gets longer than
    original_max_position_embeddings, and go on with transformers' own.

    A cache belongs to one text. transformers hands it the new tokens only: another text is told
    where it ends before the cache does or begins anew, and taken for the same one where it is
    longer. Call reset() between texts. transformers has a QuantizedCache of its own (backend=,
    nbits=): take this one by `from kvquant import QuantizedCache`.

    Args:
        source: a model of transformers that attends by "kvquant" (with dequantize in any way), or
            its config, or a KVCache (of load_cache, or CachedModel.new_cache), which has its own
            formats and lengths, and grows as well. A KVCache whose sequences are padded, when it
            is saved, goes on with ids that are padded on the left to the longest.
        k_format, v_format, sink_len, recent_len: as of KVCache.
        plan: of `kvquant calibrate`, for this model: it says the formats.
        fmt: of latent rows, in place of k_format and v_format; as of LatentKVCache.
        exact_format: "bf16" or "fp16", the 16-bit rows; what fits the dtype of the keys when None.
        max_seq_len: tokens that a sequence has room for, from the beginning: more are refused, and
            no memory is allocated later. It grows when None. A KVCache gets this room at once;
            kv.max_seq_len is what it has.
        placed: the caller gives the model position_ids, those of the cache, in every call; they are
            not looked at then. It is needed where a model does not show them to attention (Llama 4,
            Granite 4 hybrids, Persimmon) and the cache is not told the model.
        drafts: up to 16 tokens behind others in one call are drafted ones: each attends to the rows
            of the cache, its own among them, as it would alone (KVCache.step). Else, and where
            they are more, they are a chunk of a prompt, whose tokens meet each other in 16 bit.
        dequantize: the model gets the keys and values of the whole text in 16 bit, one layer's at a
            time, and attends to them in its own way: for models that do not attend through
            transformers' attention interface (Falcon, BLOOM, MPT), and for other attention
            implementations than "kvquant". It saves memory, and steps take longer than with a
            16-bit cache. Padding is kept like tokens, and layers with a window keep all tokens.
        model: that will call, where source is a KVCache: generate can then draft with it (prompt
            lookup, an assistant), and placed is needed by no model.

    Attributes:
        kv: the KVCache; None before the first tokens come.

    Raises:
        ConfigError: source is none of these, or a model that attends otherwise; an option is not
            possible.
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

    layers: list[Any]  # ours, and transformers' own

    def __init__(
        self,
        source: Any = None,
        *theirs: NoReturn,
        k_format: Formats | None = None,
        v_format: Formats | None = None,
        plan: CachePlan | None = None,
        fmt: LatentFormats | None = None,
        sink_len: int | None = None,
        recent_len: int | None = None,
        exact_format: str | None = None,
        max_seq_len: int | None = None,
        placed: bool = False,
        drafts: bool = True,
        dequantize: bool = False,
        model: Any = None,
        **others: NoReturn,
    ) -> None:
        _check_names(theirs, others)
        for name, flag in (("placed", placed), ("drafts", drafts), ("dequantize", dequantize)):
            check_flag(name, flag)
        self.kv: KVCache | None = None
        self._new_lens: torch.Tensor | None = None  # see tell
        self._is_told = False
        self._make: Callable[..., KVCache] | None = None
        self._max_seq_len, self._exact_format = max_seq_len, exact_format
        self._is_placed, self._drafts, self._dequantizes = placed, drafts, dequantize
        self._layers: CacheLayers | None = None  # of the model
        self._configs = _Configs()  # of the model and its layers, as calls have shown them
        self._places: dict[int, int] | None = None  # of the cache, by the model's layer
        self._devices: list[torch.device] | None = None  # of the places, see layer_devices
        self.shown = Shown()  # what the model's decoder was given in this call
        self._decoder: weakref.ref[torch.nn.Module] | None = None  # of the model, if that is known
        self._hook: DecoderHook | None = None  # there
        self.awaits_whole_text = False  # in the next call: generate drafts
        self._turn: Turn | None = None
        self._scaled_from: int | None = None
        self._due = 0  # the place that comes next; those before it were appended in this call
        self._new_columns = 0  # of this call
        self._is_asked = False  # for the sizes of masks, at the beginning of each call
        self.awaits_mask = False  # until "kvquant" makes it, for which it was asked
        self._is_begun = False  # a call that was asked for them, until all layers have appended
        self._waiting: str | None = None  # the layer that was handed its keys and did not attend
        self._latents: Handed | None = None  # what it handed, where these are latents
        self._past = Columns(0, [])  # before this call
        self._has_empty = True  # a sequence has no token yet, nor got one in the last whole call
        self.padding: Padding | None = None  # of this call
        self._starts: list[int] = []  # the position of each sequence's first token
        self._starts_before: list[int] | None = None  # where this call has told others
        # of the KVCache, when it was last known to be as here
        self._marks: tuple[int, ...] | None = None
        self._wrong: torch.Tensor | None = None  # [2], found in steps: masks, positions
        self._kept: dict[int, str] = {}  # the layers that are transformers' own, and why
        self._step_lens: tuple[int, ...] = () if dequantize else (1,)  # of KVCache
        self._stateful: list[int] = []  # these, and those with a state of transformers beside rows
        self._is_torn = False  # these have got what was taken back of the others
        # of one token, by their local_size and use_vmap, as made last outside of graphs
        self.step_masks: dict[tuple[int | None, bool], torch.Tensor] = {}
        self._is_ahead = False  # graphs have appended what is not counted here
        self._has_run = False  # all layers have attended in a call outside of graphs
        super().__init__(layers=[])
        options: dict[str, Any] = {
            "k_format": k_format,
            "v_format": v_format,
            "plan": plan,
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
            self._hold(source)
            self.layers = [QuantizedLayer(self, at, at) for at in range(source.num_layers)]
            if model is not None:
                check_kind("model", model, torch.nn.Module, "give the model that calls the cache")
                check_decoder(model)
                if not dequantize:
                    _check_attends(model)
                self._know(model)
            return
        if model is not None:
            raise ConfigError("model is for a source that is a KVCache: give the model as source")
        config = _config_of(source)
        longest = 0 if dequantize else max_seq_len  # chunks are the mask's, of transformers
        layers = layers_of_rank(source, cache_layers(config, longest=longest))
        if isinstance(source, torch.nn.Module):
            check_decoder(source)
            if not dequantize:
                _check_attends(source)
        if dequantize and not layers.are_latent:
            options["windows"] = [None] * len(layers.places)
        make: Callable[..., KVCache] = partial(new_cache, config, **options)
        dtype: Any = None
        if isinstance(source, torch.nn.Module):
            self._devices, dtype = layer_devices(source, layers.places), source.dtype
            self._know(source)
            if dequantize:
                _check_uses_cache(source)
        exact = exact_format or exact_codec(dtype)
        self._outline = make(layers, 1, 0, exact_format=exact)  # or it is not possible
        self._make = make
        is_hybrid = bool(layers.others or layers.states)
        self.fit(layers, DynamicCache(config=config).layers if is_hybrid else ())

    def _know(self, model: Any) -> None:
        """Know the model that calls."""
        decoder = model.get_decoder()
        self._decoder, self._hook = weakref.ref(decoder), DecoderHook(decoder)

    def fit(self, layers: CacheLayers, others: Sequence[Any] = ()) -> None:
        """Hold these layers of a model.

        Args:
            layers: which those of the KVCache are.
            others: all layers of the model as transformers keeps them; needed for layers.others and
                layers.states.

        Raises:
            ShapeError: the KVCache is not one for these layers.
            UnsupportedModelError: the model has others, which are not given.
        """
        if not others:
            layers.check_whole()
        if self.kv is not None:
            _check_layers(self.kv, layers.of_rank(self.kv.num_kv_heads))
        self._layers = layers
        self._places = {layer: at for at, layer in enumerate(layers.places)}
        self._turn, self._scaled_from = layers.turn, layers.scaled_from
        self._kept = dict(layers.others)
        self._stateful = sorted([*layers.others, *layers.states])
        # those between that own no keys are there to be counted
        self.layers = [
            self._layer_of(layer, others) for layer in range(max([*layers.places, *self._kept]) + 1)
        ]

    def _layer_of(self, layer: int, others: Sequence[Any]) -> Any:
        """A layer of the model, for transformers to look at; the arguments are those of fit."""
        assert self._layers is not None and self._places is not None
        if layer in self._kept:
            return others[layer]
        at = self._places.get(layer)
        if layer in self._layers.states:
            return QuantizedLayerWithState(self, layer, at, others[layer].number_of_states)
        return QuantizedLayer(self, layer, at)

    def tell(self, layers: CacheLayers, new_lens: torch.Tensor | None) -> None:
        """Say in place of the model and its mask what it is, and which new columns hold tokens.

        Args:
            layers: of the model.
            new_lens: [batch], on the CPU: of the next call, how many columns, the first ones, hold
                tokens of each sequence; all when None.
        """
        self.fit(layers)
        self._new_lens, self._is_told = new_lens, True

    def check_model(self, config: Any) -> None:
        """Raise unless the rows are those of the model that calls, once there are some.

        Args:
            config: of the model, or of a layer; each is looked at once.

        Raises:
            ShapeError: the model has other layers, KV heads or head_dims.
            UnsupportedModelError: it has layers that a KVCache does not hold, and there is no more.
        """
        if self.kv is None or self._is_told or any(config is known for known in self._configs):
            return
        longest = self.kv.max_seq_len if self._make is None else self._max_seq_len
        layers = cache_layers(config, longest=longest)
        if self._layers is None:
            self.fit(layers)
        else:
            _check_layers(self.kv, layers.of_rank(self.kv.num_kv_heads))
        self._configs.append(config)

    @property
    def argument(self) -> dict[str, Any]:
        """The cache under the name that transformers has for it: {"cache": self}, before 5.24
        {"past_key_values": self}."""
        return {ARGUMENT: self}

    def keeps(self, layer: int | None) -> bool:
        """Whether a layer of the model is transformers' own, or attends to the keys of one."""
        if layer not in self._kept and self._layers is not None and layer is not None:
            layer = self._layers.shared.get(layer)
        return layer in self._kept

    @property
    def keeps_attention(self) -> bool:
        """Whether a layer that is transformers' own attends, and so needs a mask."""
        return any(isinstance(self.layers[at], CacheLayerMixin) for at in self._kept)

    @torch.inference_mode(False)  # else the copy's tensors could not be changed outside
    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedCache:
        """A cache for the same model, which goes on by itself."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        other._decoder, other._hook = self._decoder, self._hook
        return other

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which count changes of their KVCache anew; what is loaded from a
        pickle does not know the model."""
        is_known = self.kv is not None and not self._is_changed
        here = {"_decoder": None, "_hook": None, "awaits_whole_text": False}
        return vars(self) | here | {"_marks": () if is_known else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Be a copy; layers that were copied are its own."""
        vars(self).update(state)
        if self.kv is not None and self._marks is not None:
            self._marks = _marks_of(self.kv)
        for layer in self.layers:
            if isinstance(layer, QuantizedLayer) and "_cache" not in vars(layer):
                layer.bind(self)

    def describe(self) -> str:
        """What each layer of the model is kept as, and why, a line each.

        Example:
            >>> from transformers import LlamaConfig
            >>> from kvquant import QuantizedCache
            >>> config = LlamaConfig(num_hidden_layers=2)
            >>> print(QuantizedCache(config, v_format="int8").describe())
            layer 0: K int4-g4, V int8
            layer 1: K int4-g4, V int8
        """
        count = len(self.layers) if self._layers is None else self._layers.count
        return "\n".join(f"layer {layer}: {self._text_of(layer)}" for layer in range(count))

    def _text_of(self, layer: int) -> str:
        """What a layer of the model is kept as."""
        if layer in self._kept:
            kept = type(self.layers[layer]).__name__
            return f"{kept} of transformers, as it {self._kept[layer]}"
        at = layer if self._places is None else self._places.get(layer)
        if at is None:
            is_shared = self._layers is not None and layer in self._layers.shared
            if is_shared and self.keeps(layer):
                return "the keys of another layer, of transformers"
            return "the rows of another layer" if is_shared else "nothing, it has no attention"
        kv = self._outline if self.kv is None else self.kv
        held = kv.layers[at]
        text = f"K {held.k_format}, V {held.v_format}"
        if isinstance(kv, LatentKVCache):
            text = f"latent rows {kv.formats[at]}"
        text += f", the last {held.window} tokens" if held.window else ""
        text += ", dequantized in each call" if self._dequantizes else ""
        has_state = isinstance(self.layers[layer], QuantizedLayerWithState)
        return text + (", beside a state of transformers" if has_state else "")

    @property
    def num_places(self) -> int:
        """Layers that own keys and values."""
        if self._places is not None:
            return len(self._places)
        assert self.kv is not None
        return self.kv.num_layers

    def hand(
        self, layer: int, at: int | None, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass a layer's new tokens on in 16-bit precision; the attention function appends them.

        Args:
            layer: of the model.
            at: its place in the KVCache; None if it has none.
            keys, values: [batch, num_kv_heads, columns, head_dim]; or latents and RoPE parts.

        Returns:
            Keys and values, marked; latents unmarked, as the model makes others of them. With
            dequantize those of all tokens.

        Raises:
            UnsupportedModelError: the layer before did not attend to its tokens; or it has latents
                and gives none.
            ShapeError: it is not this layer's turn, or the tokens are of another batch or shape.
        """
        is_traced = False
        if self.awaits_mask:  # it was made for another attention, which is about to run
            outside_of_graphs(self._refuse_mask, str(layer))
        if torch.compiler.is_compiling():
            is_traced, tracing.asked = self._is_traced(keys.shape[2]), None
            if not is_traced:
                found: tuple[torch.Tensor, torch.Tensor] = outside_of_graphs(
                    self.hand, layer, at, keys, values
                )
                return found
            self.check_attended()
        else:
            self._begin_layer(layer, at, keys)
        if not at:
            self._make_room(keys)
        assert self.kv is not None and at is not None
        if isinstance(self.kv, LatentKVCache):
            try:
                check_latents(layer, keys, values, self.kv.formats[at])
            except UnsupportedModelError:
                self.take_back()
                raise
        self._waiting = None if self._dequantizes else str(layer)
        padding = None
        if not is_traced and self.padding is not None:
            padding = self.padding.on(keys.device)
        handed = Handed(self, self.kv, at, layer, padding, is_traced)
        exact = EXACT_DTYPES[self.kv.exact_format]
        keys, values = _rounded(keys, exact), _rounded(values, exact)
        if self._dequantizes:
            try:
                if not at:
                    self._check_goes_on()
                is_step = keys.shape[2] == 1 or self.takes_drafts()
                return append_and_dequantize(handed, keys, values, is_step)
            except BaseException:
                self.take_back()
                raise
        if isinstance(self.kv, LatentKVCache):
            handed.latents = keys, values
            if is_traced:
                tracing.latents = handed
            else:
                self._latents = handed
            return keys, values
        keys.kvquant_keys = handed  # type: ignore[attr-defined]  # a mark on it
        values.kvquant_values = handed  # type: ignore[attr-defined]  # a mark on it
        return keys, values

    def _begin_layer(self, layer: int, at: int | None, keys: torch.Tensor) -> None:
        """Raise unless it is a layer's turn; the first one begins a call that made no masks."""
        if not self._dequantizes:
            calls.cache, calls.asked = weakref.ref(self), None
        self.check_attended()
        if self._is_torn:
            raise ShapeError(
                "a call of the model has failed, and its layers that are transformers' own cannot "
                "forget what came: reset() the cache and read the text again"
            )
        # a model, or a call, that makes no masks; of one layer it may be the same call once more
        is_new = not at and self._due == self.num_places > 1
        if not self._is_asked or is_new:
            self.begin(keys.shape[2])
        if at != self._due:
            due = "none" if self._due == self.num_places else f"place {self._due}"
            self.take_back()
            raise ShapeError(
                f"layer {layer} of the model comes where {due} of the cache's {self.num_places} is "
                "due: each is appended once in a call of the model, so give a cache of its layers "
                "(QuantizedCache(model)). If a call has failed before, what it appended is taken "
                "back now: call again"
            )
        if not at:
            self._new_columns = keys.shape[2]

    def _is_traced(self, columns: int) -> bool:
        """Whether a call of so many columns, which torch.compile traces, becomes part of a graph;
        else it runs outside."""
        if not self._is_step(columns) or not self.is_compileable:
            return False
        is_open = 0 < self._due < self.num_places
        # len: torch 2.11 traces no bool() of a subclass of list
        is_known = self._is_told or (len(self._configs) > 0 and self._has_run)
        return self.kv is not None and is_known and not is_open

    def _make_room(self, keys: torch.Tensor) -> None:
        """Make the KVCache for the first tokens, or let it grow for more."""
        batch, new = keys.shape[0], keys.shape[2]
        is_other = self.kv is not None and self.kv.batch != batch
        is_due = self.kv is None or (is_other and not self._past.length)
        if is_due and self._make is not None and self._layers is not None:
            exact = self._exact_format or exact_codec(keys.dtype)
            size = self._max_seq_len or new + SPACE
            layers = self._layers.of_rank(keys.shape[1])
            if self._dequantizes:  # configs of such models have other names for them
                layers = replace(layers, num_kv_heads=keys.shape[1])
            device = self._devices or keys.device
            kv = self._make(layers, batch, size, exact_format=exact, device=device)
            kv.step_lens = self._step_lens
            self._hold(kv)
        assert self.kv is not None
        if self.kv.batch != batch:
            raise ShapeError(
                f"the model runs {batch} sequences, the cache has {self.kv.batch}: make it for "
                "batch * num_beams, or batch * num_return_sequences"
            )
        if not self._is_static and self._past.length + new > self.kv.max_seq_len:
            self.kv.grow(max(self._past.length + new, 2 * self.kv.max_seq_len))

    @torch.inference_mode(False)  # else the flags could not be changed outside
    def _hold(self, kv: KVCache) -> None:
        """Take a KVCache, with what it has; the only place where lengths are read."""
        self.kv = kv
        lens, self._starts = torch.stack([kv.seq_lens.long(), kv.start_positions]).tolist()
        if self._dequantizes:
            check_columns(kv, lens)
        self._past, self._marks, self._is_ahead = Columns.of_lens(lens), _marks_of(kv), False
        self._starts_before, self._has_empty = None, self._past.has_empty
        if self._wrong is None or self._wrong.device != kv.device:
            self._wrong = torch.zeros(2, dtype=torch.bool, device=kv.device)
        if self.is_compileable:
            _keep_in_place(kv, self._wrong)

    def begin(self, columns: int) -> None:
        """A new call of this many columns, if the one before is complete; else hand tells what is
        due."""
        self._refresh()
        if self._due:
            return
        if self.kv is None:
            self.padding = None
            return
        lens, self.padding = self._new_lens, None
        if lens is not None and int(lens.min()) < columns:
            self.padding = Padding.behind(lens, columns, self.kv.device)

    def _refresh(self) -> None:
        """Count what complete calls have appended; or all anew, where the owner of the KVCache has
        changed it between calls."""
        self._settle()
        if not self._due and self._is_changed:
            assert self.kv is not None
            self._hold(self.kv)

    @property
    def _is_changed(self) -> bool:
        """Whether somebody else has changed the KVCache; while a layer appends it is too."""
        return self.kv is not None and _marks_of(self.kv) != self._marks

    def _settle(self) -> None:
        """Count what complete calls have appended among the past."""
        if self._due and self._due == self.num_places:
            self._past = self._past.with_more(self._new_columns, self.padding)
            self._due, self.padding, self._starts_before = 0, None, None
            self._has_empty = self._past.has_empty
        if self._is_ahead:
            assert self.kv is not None
            steps = int(self.kv.layers[0].seq_lens[0]) - self._past.lens[0]
            self._past, self._is_ahead = self._past.with_more(steps, None), False

    def take_mask(self, mask: torch.Tensor, columns: int) -> None:
        """Take from the mask of a call which columns hold tokens.

        Args:
            mask: [batch, past and new columns] bool.
            columns: the new ones.

        Raises:
            ConfigError: it does not show the tokens that the cache has; in a step on CUDA check
                raises that.
        """
        if torch.compiler.is_compiling():
            self._check_mask(mask)
            return
        past = self._past
        if self._is_told or self._due:  # due: a call has failed, hand tells it
            return
        if self.awaits_whole_text and mask.shape[1] == columns:  # made before the hook cuts the ids
            columns = self._check_new(columns - past.length)
        if mask.shape[1] < past.length + columns:
            if mask.shape[1] == columns > 1 and not past.is_empty:
                self._refuse_anew()
            raise ConfigError(
                f"attention_mask has {mask.shape[1]} columns, of {past.length} in the cache and "
                f"{columns} new ones: give it for all of them. {_ANOTHER}"
            )
        if self.kv is not None and mask.shape[0] != self.kv.batch and past.length:
            return  # hand tells it
        mask = mask[:, : past.length + columns]
        if self._is_step(columns):
            self._check_mask(mask)
            return
        on_host = mask.cpu()
        kept = on_host[:, : past.length].sum(1).tolist()
        if past.length and kept != past.lens:
            raise ConfigError(
                f"attention_mask shows {kept} tokens in the columns that the cache holds already, "
                f"and it has {past.lens}: give ids and mask of the whole text, padded as before"
            )
        on_host = on_host[:, past.length :]
        if not bool(on_host.all()):
            self.padding = Padding(mask[:, past.length :], on_host)

    def _is_step(self, columns: int) -> bool:
        """Whether so many new columns are a token of each sequence, behind others: of these nothing
        is read on the host. A column of a prompt may be padding until each sequence has begun."""
        return columns == 1 and not self._has_empty

    def _check_mask(self, mask: torch.Tensor) -> None:
        """Raise unless the mask of a step shows the tokens of the cache and one more."""
        assert self.kv is not None
        lens = self.kv.layers[0].seq_lens
        tokens = mask.sum(1, dtype=torch.int32).to(lens.device)
        self._check((tokens != lens + 1).any(), 0)

    def _check(self, is_wrong: torch.Tensor, what: int) -> None:
        """Raise what is wrong in a step, at once or, where it would have to be read, in check."""
        if not debug.may_read(is_wrong):
            assert self._wrong is not None
            self._wrong[what] |= is_wrong
        elif bool(is_wrong):
            raise ConfigError((_MASK, _POSITIONS)[what])

    def check(self) -> None:
        """Raise what could not be raised in a step on CUDA; see KVCache.check.

        Raises:
            ConfigError: a step's mask showed other tokens than the cache has, or its position_ids
                were others than the cache's.
            UnsupportedModelError: a layer was handed its keys in the last call, and did not attend
                to them by kvquant's attention.
            NonFiniteError, ShapeError: as KVCache.check.
        """
        self.check_attended()
        if self.kv is None or self._wrong is None:
            return
        self.kv.check()
        for is_wrong, message in zip(self._wrong.tolist(), (_MASK, _POSITIONS), strict=True):
            if is_wrong:
                self._wrong.zero_()
                raise ConfigError(message)

    def check_positions(self, positions: Any, is_traced: bool) -> None:
        """Raise unless the positions of a call's tokens are those of the cache.

        Args:
            positions: [batch or 1, columns], if the model tells attention; else those that its
                decoder was given, if any. With an axis more they are those of images, others than
                the tokens' numbers.
            is_traced: of Handed.

        Raises:
            ConfigError: sequences go on from others than the model counts; or a text is read from
                its beginning, and the cache holds tokens already.
            UnsupportedModelError: where a model turns keys, or scales queries, by the positions,
                those of other tokens would be wrong.
        """
        assert self.kv is not None
        columns = 1 if is_traced else self._new_columns
        told: torch.Tensor | None = None
        if not is_traced and positions is not None:
            self._hook = None  # attention is shown them: none is needed
        elif not is_traced:
            positions, self.shown = self.shown.positions, Shown()
        is_told = isinstance(positions, torch.Tensor) and positions.ndim <= 2
        if is_told and positions.shape[-1] == columns:
            own = positions.expand(self.kv.batch, columns)
            padding = None if is_traced else self.padding
            told = own[:, 0] if padding is None else padding.on(own.device).first(own)
        if is_traced:
            self._check_traced(told)
            return
        past, starts = self._past, self._starts
        if told is not None and columns > 1 and not past.is_empty:
            self._check_not_anew(told.tolist())
        if not self._is_placed:
            starts = self._starts_by(told)
        known = starts, past.lens, self._counts()
        if self._turn is not None:
            check_turn(self._turn, *known, columns)
        if self._scaled_from is not None:
            check_scale(self._scaled_from, *known, past.length)
        if starts != self._starts:
            self._starts_before = self._starts
            self._start_at(starts)

    def _check_traced(self, told: torch.Tensor | None) -> None:
        """Compare the positions of a step in a graph with those behind the cache's tokens."""
        if self._is_placed:
            return
        if told is not None:
            self._check_next(told)
        elif any(self._starts) or any(self._past.pads) or self.padding is not None:
            raise ConfigError(f"{_POSITIONS}; {_PLACED}")

    def _check_goes_on(self) -> None:
        """Raise if a call does not go on behind the cache's tokens, as far as it tells."""
        call, self.shown = self.shown, Shown()
        past, new = self._past.length, self._new_columns
        if not past:
            return
        begins = None if call.columns is None else call.columns - new
        told = call.positions
        if begins is None and told is not None and told.ndim <= 2:  # nothing is padded
            if new > 1 or debug.may_read(told):
                begins = int(told[..., 0].max())
        if begins == 0 or (new > 1 and not call.is_kept):
            self._refuse_anew()
        if begins is not None and begins < past:
            self._refuse_shorter()

    def _check_not_anew(self, told: list[int]) -> None:
        """Raise if a text is read from its beginning behind tokens; told: see _starts_by."""
        known = zip(told, self._past.lens, self._counts(), strict=True)
        behind = [first for first, held, count in known if held and count]
        if behind and not any(behind):
            self._refuse_anew()

    def _refuse_anew(self) -> NoReturn:
        raise ConfigError(
            f"a text is read from its beginning, and the cache holds {self._past.length} tokens "
            f"already. {_ANOTHER}. If generate does this in a text of its own, either it drafts "
            "(prompt_lookup_num_tokens, assistant_model) with a cache that does not know the "
            "model: make it by QuantizedCache(model), or QuantizedCache(kv, model=model). Or it "
            "has use_cache=False, be it from the model's generation_config: give use_cache=True"
        )

    def _refuse_shorter(self) -> NoReturn:
        raise ConfigError(
            f"the text that came ends where the tokens of the cache do, or before: the cache holds "
            f"{self._past.length}, and the text brings nothing new or is another one. {_ANOTHER}"
        )

    def _starts_by(self, told: torch.Tensor | None) -> list[int]:
        """The position of each sequence's first token, as this call tells it.

        Args:
            told: [batch], of the first new token of each sequence.

        Raises:
            ConfigError: sequences go on from other positions than the model takes.
        """
        past, starts = self._past, self._starts
        if told is not None and self._is_step(self._new_columns):
            self._check_next(told)
            return starts
        came, counts = None if told is None else told.tolist(), self._counts()
        if came is None and starts == past.pads:  # the model counts columns
            return starts
        if came is not None and past.has_empty:
            # models count the padding before a sequence, or not: its first token tells; what a call
            # that was cropped told does not count
            held = zip(starts, came, past.lens, counts, strict=True)
            starts = [first if count and not n else start for start, first, n, count in held]
        wanted = [start + n for start, n in zip(starts, past.lens, strict=True)]
        if came is None:
            raise ConfigError(f"{_POSITIONS}; {_PLACED} ({wanted} are next)")
        each = zip(came, wanted, counts, strict=True)
        came = [first if count else own for first, own, count in each]
        if all(first < own for first, own in zip(came, wanted, strict=True)):
            self._refuse_shorter()
        if came != wanted:
            raise ConfigError(f"{_POSITIONS} ({came} came, {wanted} are next)")
        return starts

    def _start_at(self, starts: list[int]) -> None:
        """Let each sequence's first token have this position."""
        assert self.kv is not None
        self._starts = starts
        self.kv.start_positions.copy_(torch.tensor(starts, device="cpu"))

    def _forget_starts(self) -> None:
        """Begin again where sequences began before this call, which is taken back."""
        if self._starts_before is not None:
            self._start_at(self._starts_before)
            self._starts_before = None

    def _check_next(self, told: torch.Tensor) -> None:
        """Raise unless a step's positions, [batch], are those behind the cache's tokens."""
        assert self.kv is not None
        now = self.kv.start_positions + self.kv.layers[0].seq_lens
        self._check((told.to(now.device) != now).any(), 1)

    def _counts(self) -> list[int]:
        """Tokens of each sequence in this call."""
        if self.padding is not None:
            return self.padding.counts
        return [self._new_columns] * len(self._starts)

    def takes_drafts(self) -> bool:
        """Whether the new tokens attend to rows only, as one new token does: a few behind others,
        as drafted ones are. The model then finds what it finds one by one."""
        is_few = self._drafts and self._new_columns <= DRAFTS and self.padding is None
        return is_few and not self._past.has_empty

    def append(self, handed: Handed, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append what was handed to a layer, packed; the next one is due then."""
        lens = None if handed.padding is None else handed.padding.lens
        handed.kv.append(handed.at, keys, values, lens)
        self._appended(handed)

    def step(
        self,
        handed: Handed,
        queries: tuple[torch.Tensor, ...],
        rows: tuple[torch.Tensor, torch.Tensor],
        **options: Any,
    ) -> torch.Tensor:
        """Append the token, or the drafted ones, that were handed to a layer, and attend by
        KVCache.step; queries, rows and options are those that it takes."""
        kv, at = handed.kv, handed.at
        step: Callable[..., torch.Tensor] = kv.step
        attend: Callable[..., torch.Tensor] = kv.attend
        if handed.padding is None:
            out = step(at, *queries, *rows, **options)
        else:
            kv.append(at, *rows, handed.padding.lens)
            out = attend(at, *queries, **options)
        self._appended(handed)
        return out

    @property
    def latents(self) -> Handed | None:
        """What the layer that attends next has handed, where these are latents; None once nobody
        has them any more, as where its call has failed."""
        handed = self._latents
        return None if handed is None or handed.latents is None else handed

    def _appended(self, handed: Handed) -> None:
        handed.appended, self._waiting, self._latents = True, None, None
        if not handed.is_traced:
            self._due, self._marks = handed.at + 1, _marks_of(handed.kv)
            if self._due == self.num_places:
                self._is_begun, self._has_run = False, True
                known = zip(self._past.lens, self._counts(), strict=True)
                self._has_empty = any(not held + count for held, count in known)
        elif handed.at + 1 < self.num_places:
            pass
        elif self._due:  # the call before is not counted yet: what a graph counts is part of it
            self._is_ahead = True
        else:
            self._new_columns, self._due, self._is_begun = 1, self.num_places, False

    @property
    def is_waiting(self) -> bool:
        """Whether a layer was handed its keys and has not attended yet."""
        return self._waiting is not None

    @property
    def is_open(self) -> bool:
        """Whether a call of the model has begun whose layers have not all appended yet."""
        return self.is_waiting or self._is_begun or 0 < self._due < self.num_places

    def end_call(self) -> None:
        """Forget that a call has begun, which was refused before its first layer."""
        if not torch.compiler.is_compiling():  # there nothing has run
            self._is_asked = self._is_begun = False

    def take_back(self) -> None:
        """Drop what this call of the model has appended so far, and begin anew; what is recorded
        has not run."""
        self._waiting, self._latents, self._is_begun = None, None, False
        self._is_torn = bool(self._stateful)
        if self.kv is None or debug.is_recorded(self.kv.start_positions):
            return
        # other marks: the first layer has appended, and what came behind that has failed
        if self._due or _marks_of(self.kv) != self._marks:
            with suppress(ShapeError):  # windows that are overwritten: the next call says so
                self.kv.crop(self._past.lens)
                self._forget_starts()
                self._due, self._marks = 0, _marks_of(self.kv)
                self._has_empty = self._past.has_empty

    def check_attended(self) -> None:
        """Raise if a layer was handed its keys but did not attend through "kvquant"."""
        if self._waiting is not None:
            self._refuse_attention(self._waiting)

    def _refuse_mask(self, layer: str) -> NoReturn:
        self._settle()  # in a graph nobody has: the call before is complete, and stays
        self._refuse_attention(layer)

    def _refuse_attention(self, layer: str) -> NoReturn:
        self.awaits_mask = False
        self.take_back()
        raise UnsupportedModelError(
            f"layer {layer} got keys from a KVCache and did not attend to them by "
            f"kvquant's attention. Call model.set_attn_implementation({ATTENTION!r}) first; a "
            "model that is set to it computes attention by itself, not through transformers' "
            f"attention interface, so no KVCache attends for it: {DEQUANTIZE}. If the layer "
            "has failed before it attended (for lack of memory, say), that is taken back now: "
            "call again"
        )

    def check_complete(self) -> None:
        """Raise unless every layer of the cache was appended in the call that has ended."""
        self.check_attended()
        if self._due != self.num_places:
            raise ShapeError(
                f"the model has appended to {self._due} layers of the cache's {self.num_places}: "
                "make the cache by QuantizedCache(model), or CachedModel.new_cache"
            )

    @property
    def lens(self) -> list[int]:
        """Tokens of each sequence, those of a call that runs not among them."""
        return self._past.lens

    @property
    def columns(self) -> int:
        """Columns of the past and of this call; in a graph, those that there is room for."""
        if torch.compiler.is_compiling():
            return self.max_columns
        return self._past.length + self._new_columns

    def length_of(self, at: int | None) -> int:
        """Columns of a layer, those of this call among them once they are appended."""
        if torch.compiler.is_compiling() and self._is_traced(1):
            assert self.kv is not None
            columns: Any = self.kv.layers[at or 0].seq_lens.max()  # as in a StaticCache
            return columns  # type: ignore[no-any-return]  # their type says int
        is_between = not torch.compiler.is_compiling() and self._due in (0, self.num_places)
        if self._is_ahead or (is_between and self._is_changed):
            self._refresh()
        is_new = (at or 0) < self._due
        return self._past.length + (self._new_columns if is_new else 0)

    def mask_sizes(self, columns: int) -> tuple[int, int]:
        """Columns to attend to, and where they start; asked before a mask is made."""
        if torch.compiler.is_compiling():
            if self._is_traced(columns):
                tracing.asked = self
                self.awaits_mask = True
                return self.max_columns, 0
            found: tuple[int, int] = outside_of_graphs(self.mask_sizes, columns)
            return found
        tracing.asked = None  # of a call that was refused while it was traced
        self._check_new(columns)
        self.begin(columns)
        if columns == 1:
            self._check_room()
        self._is_asked = self._is_begun = True
        if not self._dequantizes:  # else the masks are transformers' own
            calls.asked, self.awaits_mask = weakref.ref(self), True
        return self._past.length + columns, 0

    def _check_new(self, columns: int) -> int:
        """The new columns of a call; ConfigError if it brings none."""
        if columns < 1:
            self._refresh()
            self._refuse_shorter()
        return columns

    def held_of(self, whole: int) -> int:
        """Columns that the cache holds of a text of so many; ConfigError if these are all."""
        self._refresh()
        return whole - self._check_new(whole - self._past.length)

    def _check_room(self) -> None:
        """Raise if a step finds no room; in a graph nobody would notice before check."""
        kv, past = self.kv, self._past
        if kv is None or not self._is_static or past.length < kv.max_seq_len:
            return
        longest = max(past.lens)
        if not self._due and longest >= kv.max_seq_len:
            raise ShapeError(
                f"sequence {past.lens.index(longest)} would grow to {longest + 1} tokens, "
                f"max_seq_len is {kv.max_seq_len}: crop it, or make a larger cache"
            )

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As Cache: the columns that a layer attends to, and where they start."""
        sizes = self.mask_sizes(query_length)
        if layer_idx in self._kept and isinstance(self.layers[layer_idx], CacheLayerMixin):
            sizes = self.layers[layer_idx].get_mask_sizes(query_length)
        return sizes

    @property
    def is_compileable(self) -> bool:
        """Whether torch.compile takes a step as one graph, which serves all steps; generate looks
        at it. The cache has its room from the beginning, on one device, and the model does not turn
        keys or scale queries by the length of the text; before torch 2.13 none of its layers
        attends to the keys of another one."""
        depends = self._turn is not None or self._scaled_from is not None
        depends = depends or self._dequantizes or (_LOSES_MARKS and self._shares_keys())
        return self._is_static and not (self._stateful or depends or self.is_spread)

    def _shares_keys(self) -> bool:
        return self._layers is not None and len(self._layers.shared) > 0

    @property
    def is_spread(self) -> bool:
        """Whether layers lie on several devices."""
        return len(set(self._devices or ())) > 1 if self.kv is None else self.kv.is_spread

    @property
    def _is_static(self) -> bool:
        """Whether the cache never grows."""
        return self._max_seq_len is not None

    @property
    def max_columns(self) -> int:
        """Columns that there is room for; -1 for a cache that grows."""
        if self._is_static and self.kv is not None:
            return self.kv.max_seq_len
        return self._max_seq_len or -1

    def reset(self) -> None:
        """Forget all tokens. The memory stays, for as many sequences."""
        for layer in self._stateful:
            self.layers[layer].reset()
            _forget_tensors(self.layers[layer])
        self._is_torn = False
        self._due, self._waiting, self.padding, self._is_begun = 0, None, None, False
        self._latents = None
        self.awaits_mask = self.awaits_whole_text = False
        if self.kv is not None:
            self.kv.reset()
            self._hold(self.kv)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put sequence beam_idx[b] at place b."""
        self._refresh()
        if self.kv is not None:
            self.kv.reorder(beam_idx)  # refuses what does not fit
        self._take_states(beam_idx)
        if self.kv is not None:
            self._taken(beam_idx)

    def activate_past_recording(self) -> None:
        """Expect drafts: transformers says so before it tries some. Kernels for steps of several
        tokens are compiled with those of the prompt then. Of a text whose beginning is here the
        next call gives all ids, see models/hook.py."""
        super().activate_past_recording()  # type: ignore[no-untyped-call]  # transformers has no types
        decoder = None if self._decoder is None else self._decoder()
        self.awaits_whole_text = self.length_of(0) > 0 and decoder is not None
        if decoder is not None and self.awaits_whole_text and self._hook is None:
            self._hook = DecoderHook(decoder)
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
        past = self._past.without_last(-tokens_to_remove)
        is_due = self.kv is not None and bool(tokens_to_remove or self._due)
        if self.kv is not None and is_due and self._stateful:  # states cannot be put back
            for at, rows in enumerate(self.kv.layers):
                rows.check_crop(at, torch.tensor(past.lens, device="cpu"))
        for layer in self._stateful:  # crop(0) too ends what they have recorded
            self.layers[layer].crop(tokens_to_remove)
        if self.kv is None or not is_due:
            return
        self.kv.crop(past.lens)
        self._forget_starts()
        self._past, self._due, self._is_begun = past, 0, False
        self._has_empty = past.has_empty
        self._waiting = self._latents = None
        self._marks = _marks_of(self.kv)

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
                _in_place.discard(self.kv)
                _keep_in_place(self.kv)

    def _taken(self, index: torch.Tensor) -> None:
        """Follow sequences to their places."""
        self._starts_before = None
        if any(self._past.pads) or any(self._starts):
            places = whole_numbers("index", index).tolist()
            self._past = self._past.take(places)
            self._starts = [self._starts[place] for place in places]
        else:  # all are alike: places need not be read
            self._starts = [0] * len(index)
            self._past = Columns(self._past.length, self._starts)
        self._has_empty = self._past.has_empty
        assert self.kv is not None
        self._marks = _marks_of(self.kv)

    def _take_states(self, index: torch.Tensor) -> None:
        """Let layers of transformers follow: what their states have in place of batch_select."""
        for layer in self._stateful:
            self.layers[layer].reorder_cache(index)


class QuantizedLayer(CacheLayerMixin):
    """A layer of the model, for transformers to look at; QuantizedCache does the work.

    Args:
        cache: which it is of.
        layer: of the model.
        at: its place in the KVCache; None if it attends to the keys of another layer.
    """

    is_sliding = False
    is_croppable = True  # by the whole cache; with a window too, which keeps SPARE tokens more

    def __init__(self, cache: QuantizedCache, layer: int, at: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers has no types
        self.layer, self.at = layer, at
        self.bind(cache)

    def bind(self, cache: QuantizedCache) -> None:
        """Be a layer of this cache. A cycle of references would keep its memory until Python's
        collector comes, which does not see how much that is."""
        self._cache = weakref.ref(cache)

    @property
    def cache(self) -> QuantizedCache:
        """Which it is of."""
        cache = self._cache()
        if cache is None:
            raise ReferenceError("the cache of this layer is gone: keep the QuantizedCache")
        return cache

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles of the cache, which bind it again."""
        return {name: value for name, value in vars(self).items() if name != "_cache"}

    @property
    def is_initialized(self) -> bool:
        """Whether the memory is there."""
        return self.cache.kv is not None

    @is_initialized.setter
    def is_initialized(self, _: Any) -> None: ...

    @property
    def batch_size(self) -> int:
        """Sequences; there is none before the first ones."""
        if self.cache.kv is None:
            raise AttributeError("no sequence has come yet")
        return self.cache.kv.batch

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
        """Nothing to do: the first call makes the memory."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass new tokens on; see QuantizedCache.hand."""
        return self.cache.hand(self.layer, self.at, key_states, value_states)

    def get_seq_length(self) -> int:
        """Columns, padding among them."""
        return self.cache.length_of(self.at)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns to attend to, and where they start."""
        return self.cache.mask_sizes(query_length)

    def get_max_length(self) -> int:
        """Columns that there is room for; -1 if it grows."""
        return self.cache.max_columns


class QuantizedLayerWithState(QuantizedLayer, LinearAttentionLayer):
    """A layer with attention, whose rows a QuantizedCache keeps, and a state, which is kept as
    transformers does (Falcon-H1, Zaya). What is done with sequences is done with the state alone.

    Args:
        cache, layer, at: as of QuantizedLayer.
        states: their number.
    """

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


class _Configs(list[Any]):
    """Configs, which a copy of the cache knows as the same ones."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Configs:
        return _Configs(self)


def _forget_tensors(layer: Any) -> None:
    """Let a layer of transformers that was reset make its tensors anew: the next text may have
    more sequences, and before transformers 5.18 zeros would stay in front of its keys."""
    if isinstance(layer, DynamicLayer):
        layer.is_initialized = False
    for name in ("is_conv_states_initialized", "is_recurrent_states_initialized"):
        if hasattr(layer, name):
            setattr(layer, name, dict.fromkeys(getattr(layer, name), False))


def _marks_of(kv: KVCache) -> tuple[int, int]:
    """What differs once somebody else has changed lengths or positions; nothing is read."""
    return kv.changes, kv.start_positions._version


def _keep_in_place(kv: KVCache, *others: torch.Tensor) -> None:
    """Let CUDA graphs that torch.compile makes read tensors where they lie, not copy them."""
    if kv in _in_place:
        return
    _in_place.add(kv)
    tensors = [*others, kv.start_positions, kv.bad_rows, kv.overflow_tokens]
    for layer in kv.layers:
        tensors += layer.tensors().values()
        for side in layer.basis or ():
            tensors += [one for one in vars(side).values() if isinstance(one, torch.Tensor)]
            tensors += [one for one in side.encoding if isinstance(one, torch.Tensor)]
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)


_in_place: weakref.WeakSet[KVCache] = weakref.WeakSet()


def _rounded(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To 16 bit, in the dtype that it has; a new tensor, whose mark does not outlive the call."""
    if states.dtype == dtype:
        return states.view_as(states)
    return states.to(dtype).to(states.dtype)


def _check_names(theirs: tuple[object, ...], others: dict[str, Any]) -> None:
    """Raise for arguments that are not of this QuantizedCache: ConfigError if they are those of
    transformers', else TypeError, as Python does."""
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


def _config_of(source: Any) -> Any:
    """The config of a model, or the config that was given.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(source, torch.nn.Module) and hasattr(source, "config"):
        return source.config
    if isinstance(source, QuantizedCache):
        raise ConfigError("source is a QuantizedCache: give its kv, or copy.deepcopy it")
    if not hasattr(source, "get_text_config"):
        raise ConfigError(
            f"source is {name_of_kind(source)}: give a model of transformers, its config or a "
            "KVCache"
        )
    return source


def _check_attends(model: Any) -> None:
    """Raise unless a model attends by "kvquant".

    Raises:
        ConfigError: it attends otherwise.
        UnsupportedModelError: it cannot attend by "kvquant".
    """
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


def _check_uses_cache(model: Any) -> None:
    """Raise ConfigError if a model's generate would give a cache the whole text in each step."""
    if getattr(getattr(model, "generation_config", None), "use_cache", None) is False:
        raise ConfigError(
            f"this {type(model).__name__} has use_cache=False in its generation_config, with which "
            "generate gives the whole text in each step: set model.generation_config.use_cache = "
            "True"
        )


def _check_layers(kv: KVCache, layers: CacheLayers) -> None:
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
