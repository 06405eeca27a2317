"""QuantizedCache: a KVCache in the form that transformers' models take as their cache.

A model hands each layer's new keys and values to a cache and then calls an attention function by
name. This cache rounds them to its 16-bit format and marks them; attention.py attends to marked
ones and appends them. A call of the model appends once to each layer, in order, or raises
(call.py). transformers' own layers (states, other numbers of KV heads) stand in the same list. The
host counts what the rows hold, and reads lengths only where somebody else has changed them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils._pytree import tree_leaves
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
from ..cache.copying import NoShallowCopy
from ..cache.latent import LatentFormats, LatentKVCache
from ..errors import ConfigError, ShapeError, UnsupportedModelError
from ..io.plan import ModelPlan
from ..rows.arguments import check_flag, check_kind, check_size
from ..rows.quantize import EXACT_DTYPES, exact_codec
from .argument import ARGUMENT
from .call import Call, refuse_attention
from .compile.tracing import LOSES_MARKS, keep_in_new_place, keep_in_place, outside_of_graphs
from .continuation import WRONG, check_goes_on
from .dequantized import append_and_dequantize
from .handed import ANOTHER, Handed, running
from .models.configs import CacheLayers, cache_layers, layer_devices, layers_of_rank, new_cache
from .models.hook import DecoderHook
from .models.latent import check_latents
from .models.probe import check_accuracy
from .padding import Columns, Padding
from .plans import plan_of_model
from .sources import check_caller, check_columns, check_layers, check_names, config_of

DRAFTS = 16  # tokens
SPACE = 256  # tokens that a cache which grows has room for at first, besides those that come


class Told(NamedTuple):
    """What a loop of kvquant's own says of a call, in place of the model's arguments and mask.

    Attributes:
        columns: new ones of each sequence; None if not known.
        lens: [batch], on the CPU: the first so many of them hold tokens; None for all.
    """

    columns: int | None = None
    lens: torch.Tensor | None = None


class QuantizedCache(NoShallowCopy, Cache):
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

    layers: list[Any]  # ours, and transformers' own
    layers_held: CacheLayers

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
        Cache.__init__(self, layers=[])
        self.kv: KVCache | None = None
        self.call = Call()  # how far the model's call is
        self.past = Columns(0, [])  # before this call
        # a sequence still has no token after the last complete call; graphs read it
        self.has_empty = True
        self.starts: list[int] = []  # the position of each sequence's first token
        self._starts_before: list[int] | None = None  # where this call has told others
        self._marks: tuple[int, ...] | None = None  # of the KVCache, when it was as here
        self.wrong: torch.Tensor | None = None  # [2], what steps have found: continuation.WRONG
        self._configs: list[Any] = []  # of the model and its layers, as calls have shown them
        self._make: partial[KVCache] | None = None  # where it is made of a model
        self._outline: KVCache  # as kv, but for the room before the first tokens
        self._max_seq_len: int | None = None
        self.told: Told | None = None  # its layers are known then
        self.is_placed, self._drafts, self._dequantizes = placed, drafts, dequantize
        self._step_lens: tuple[int, ...] = () if dequantize else (1,)  # of KVCache
        self.hook: DecoderHook | None = None  # where the model is known
        self.latents: Handed | None = None  # of the layer that attends next
        # of one token, by local_size and use_vmap, made last outside of graphs
        self.step_masks: dict[tuple[int | None, bool], torch.Tensor] = {}
        # [batch, columns] of the first columns, as generate got or chose them (ids.py)
        self.ids: torch.Tensor | None = None
        self.has_beams = False  # this call of generate has moved sequences
        options: dict[str, Any] = {
            "k_format": k_format,
            "v_format": v_format,
            "plan": plan or None,
            "fmt": fmt,
            "sink_len": sink_len,
            "recent_len": recent_len,
            "exact_format": exact_format,
        }
        options = {name: value for name, value in options.items() if value is not None}
        if max_seq_len is not None:
            self._max_seq_len = check_size("max_seq_len", max_seq_len, at_least=1)
        if isinstance(source, KVCache):
            if options:
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
                self.hook = DecoderHook.of(model)
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
        if isinstance(source, torch.nn.Module):
            if devices := layer_devices(source, layers.places):
                options["device"] = devices
            self.hook = DecoderHook.of(source)
        self._make = partial(new_cache, config, **options)
        dtype = source.dtype if isinstance(source, torch.nn.Module) else None
        self._outline = self._made(layers, 1, 0, dtype)  # or it is not possible
        if "plan" not in options and isinstance(source, torch.nn.Module) and not accept_loss:
            check_accuracy(source, self._outline, layers)
        self._configs.append(config.get_text_config(decoder=True))
        is_hybrid = bool(layers.others or layers.states)
        self.fit(layers, DynamicCache(config=config).layers if is_hybrid else ())

    def _made(
        self, layers: CacheLayers, batch: int, max_seq_len: int, dtype: Any, device: Any = "cpu"
    ) -> KVCache:
        """A KVCache of a model's layers, for keys of this dtype and device if none was given."""
        assert self._make is not None
        known = {"exact_format": exact_codec(dtype), "device": device} | self._make.keywords
        return self._make(layers, batch, max_seq_len, **known)

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
        if self.kv is not None:
            check_layers(self.kv, layers.of_rank(self.kv.num_kv_heads))
        self.layers_held = layers
        # those between that own no keys are there to be counted
        count = max([*layers.places, *layers.others]) + 1
        self.layers = [QuantizedLayer(self, at, layers.at.get(at)) for at in range(count)]
        for at in layers.others:
            self.layers[at] = others[at]
        for at in layers.states:
            if isinstance(others[at], QuantizedLayer):  # of another cache of the same rows
                self.layers[at] = others[at]
                others[at].bind(self)
                continue
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
        memo |= {id(self): other} | {id(config): config for config in self._configs}
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        other.hook = None if self.hook is None else self.hook.copied()
        return other

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: changes count anew, and a loaded pickle has no model."""
        is_known = self.kv is not None and not self._is_changed
        return vars(self) | {"hook": None, "_marks": () if is_known else None}

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
        is_known = self.told is not None or len(self._configs) > 0
        return is_known and (turn is None or turn.again)

    def __repr__(self) -> str:
        kinds = "; ".join(dict.fromkeys(text for _, text in self._texts()))
        kv, held = self._outline, "no tokens yet"
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
        kv = self._outline
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
                if not self._dequantizes:
                    running.note(self)
                if not self.call.is_next(at):
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
        exact, is_read = EXACT_DTYPES[kv.exact_format], self._dequantizes or handed.is_traced
        if keys.shape[2] > 1 or is_read or not kv.layers[handed.at].rounds_first:
            keys, values = _rounded(keys, exact), _rounded(values, exact)
        else:  # a token, of which only rows are read
            keys, values = keys.view_as(keys), values.view_as(values)
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
            size = self._max_seq_len or new + SPACE
            layers = self.layers_held.of_rank(keys.shape[1])
            if self._dequantizes:  # configs of such models have other names for them
                layers = replace(layers, num_kv_heads=keys.shape[1])
            kv = self._made(layers, batch, size, keys.dtype, keys.device)
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
        kept = self.layers[layer_idx] if layer_idx in self.layers_held.others else None
        return kept.get_mask_sizes(query_length) if isinstance(kept, CacheLayerMixin) else sizes

    def reset(self) -> None:
        """Forget all tokens, and keep the memory for as many sequences."""
        for layer in self.layers_held.kept:
            self.layers[layer].reset()
            _forget_tensors(self.layers[layer])
        self.call.reset()
        self.latents = None
        if self.hook is not None:
            self.hook.awaits_whole_text = False
        if self.kv is not None:
            self.kv.reset()
            self._hold(self.kv)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put sequence beam_idx[b] at place b."""
        self._take(beam_idx, KVCache.reorder)
        self.has_beams = True

    def activate_past_recording(self) -> None:
        """Expect drafts, which transformers announces, and compile their kernels, too."""
        super().activate_past_recording()  # type: ignore[no-untyped-call]  # transformers has no types
        if self.hook is not None:
            self.hook.awaits_whole_text = self.length_of(0) > 0 and self.hook.listen()
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
        if isinstance(indices, torch.Tensor) and indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]  # as torch indexes
        self._take(indices, KVCache.select)
        if self.kv is not None and self.is_compileable:  # tensors lie elsewhere
            keep_in_new_place(self.kv)

    def _take(self, index: torch.Tensor, move: Callable[..., None]) -> None:
        """Let rows, by a method of KVCache, and all that is known of them follow sequences."""
        if self.kv is None:
            return
        self._refresh()
        move(self.kv, index)  # refuses what does not fit
        for layer in self.layers_held.kept:  # what states have in place of batch_select
            self.layers[layer].reorder_cache(index)
        self._starts_before = None
        if self.ids is not None:
            self.ids = self.ids[torch.as_tensor(index, device=self.ids.device)]
        if any(self.past.pads) or any(self.starts):
            places = whole_numbers("index", index).tolist()
            self.starts = [self.starts[place] for place in places]
            self._count(self.past.take(places))
        else:  # all are alike: places need not be read
            self.starts = [0] * len(index)
            self._count(Columns(self.past.length, self.starts))

    def check_model(self, config: Any) -> None:
        """Raise unless the rows, if any, are those of the calling model or layer; looks once a
        config."""
        is_known = self.told is not None or any(config is known for known in self._configs)
        if self.kv is None or is_known:
            return
        longest = self.kv.max_seq_len if self._make is None else self._max_seq_len
        layers = cache_layers(config, longest=longest)
        if self._configs:
            check_layers(self.kv, layers.of_rank(self.kv.num_kv_heads))
        else:
            self.fit(layers)
        self._configs.append(config)

    def keeps(self, layer: int | None) -> bool:
        """Whether a layer is transformers' own, or attends to the keys of one."""
        held = self.layers_held
        return layer is not None and held.shared.get(layer, layer) in held.others

    @property
    def keeps_attention(self) -> bool:
        """Whether a layer of transformers' own attends, and so needs a mask."""
        return any(isinstance(self.layers[at], CacheLayerMixin) for at in self.layers_held.others)

    @property
    def num_places(self) -> int:
        return len(self.layers_held.places)

    @torch.inference_mode(False)  # else the flags could not be changed outside
    def _hold(self, kv: KVCache) -> None:
        """Take a KVCache, with what it has; the only place where lengths are read."""
        self.kv, self._outline, self.ids = kv, kv, None
        lens, self.starts = torch.stack([kv.seq_lens.long(), kv.start_positions]).tolist()
        if self._dequantizes:
            check_columns(kv, lens)
        self.call.is_ahead, self._starts_before = False, None
        self._count(Columns.of_lens(lens))
        if self.wrong is None or self.wrong.device != kv.device:
            self.wrong = torch.zeros(2, dtype=torch.bool, device=kv.device)
        if self.is_compileable:
            keep_in_place(kv, self.wrong)

    @property
    def is_compileable(self) -> bool:
        """Whether torch.compile takes steps as one graph; generate reads it."""
        # So a cache has its room from the beginning, on one device, and the model turns no keys and
        # scales no queries by the length of the text. Before torch 2.13 no layer attends to another
        # one's keys.
        layers = self.layers_held
        depends = layers.turn is not None or layers.scaled_from is not None
        if depends or (LOSES_MARKS and len(layers.shared) > 0):
            return False
        keeps = len(layers.others) + len(layers.states) > 0
        is_other = self._dequantizes or keeps or self._outline.is_spread
        return self._max_seq_len is not None and not is_other

    @property
    def max_columns(self) -> int:
        """Columns that there is room for; -1 for a cache that grows."""
        if self._max_seq_len is None or self.kv is None:
            return self._max_seq_len or -1
        return self.kv.max_seq_len

    def _count(self, past: Columns) -> None:
        """Know that the rows hold these columns."""
        self.past, self.has_empty = past, past.has_empty
        self._mark()

    def _mark(self) -> None:
        self._marks = None if self.kv is None else _marks_of(self.kv)

    @property
    def _is_changed(self) -> bool:
        """Whether another owner has changed the KVCache; True while a layer appends."""
        return self.kv is not None and _marks_of(self.kv) != self._marks

    def _begin(self, columns: int, *, was_asked: bool) -> None:
        """Begin a call of this many columns, if none is open."""
        asked, lens = self.told or Told()
        if asked not in (None, columns):
            raise UnsupportedModelError(
                f"the model was given {asked} columns of ids, and its layers get {columns}: "
                "its forward puts others beside them (virtual tokens, an image), which each step "
                "would append again. CachedModel serves models whose layers get the tokens alone"
            )
        self._refresh()
        self.call.begin(was_asked=was_asked)
        if lens is not None and self.kv is not None and int(lens.min()) < columns:
            self.call.padding = Padding.behind(lens, columns, self.kv.device)

    def _refresh(self) -> None:
        """Count what complete calls appended; recount if the KVCache changed between calls."""
        self._settle()
        if not self.call.due and self._is_changed:
            assert self.kv is not None
            self._hold(self.kv)

    def _settle(self) -> None:
        """Count what complete calls have appended among the past."""
        if self.call.is_complete:
            marks, self._marks = self._marks, None  # Ctrl-C in between: all is counted anew
            past = self._past_and_call
            self.call.count()
            self.past, self.has_empty, self._starts_before = past, past.has_empty, None
            self._marks = marks
        if self.call.is_ahead:
            assert self.kv is not None
            steps = int(self.kv.layers[0].seq_lens[0]) - self.past.lens[0]
            self.past, self.call.is_ahead = self.past.with_more(steps, None), False

    @property
    def _past_and_call(self) -> Columns:
        """The columns once those of this call are counted."""
        return self.past.with_more(self.call.columns, self.call.padding)

    def is_step(self, columns: int) -> bool:
        """Whether so many new columns are a token of each sequence after others."""
        # The host reads nothing of these. Until each sequence has begun, a column may be padding.
        return columns == 1 and not self.has_empty

    def is_traced(self, columns: int) -> bool:
        """Whether torch.compile makes a call of so many columns part of a graph."""
        if not self.is_step(columns) or not self.is_compileable:
            return False
        is_known = self.told is not None or self.call.has_run
        return self.kv is not None and is_known and not self.call.is_between

    def takes_drafts(self) -> bool:
        """Whether the new tokens are drafted ones, which attend to rows only, as one token does."""
        is_few = self._drafts and self.call.columns <= DRAFTS and self.call.padding is None
        return is_few and not self.past.has_empty

    @property
    def counts(self) -> list[int]:
        padding = self.call.padding
        return [self.call.columns] * len(self.starts) if padding is None else padding.counts

    @property
    def columns(self) -> int:
        """Columns of the past and of this call; in a graph, those that there is room for."""
        if torch.compiler.is_compiling():
            return self.max_columns
        return self.past.length + self.call.columns

    def length_of(self, at: int | None) -> int:
        """Columns of a layer, with those of this call once appended."""
        if torch.compiler.is_compiling() and self.is_traced(1):
            assert self.kv is not None
            columns: Any = self.kv.layers[at or 0].seq_lens.max()  # as in a StaticCache
            return columns  # type: ignore[no-any-return]  # their type says int
        is_between = torch.compiler.is_compiling() or self.call.is_between
        if self.call.is_ahead or (not is_between and self._is_changed):
            self._refresh()
        return self.past.length + (self.call.columns if (at or 0) < self.call.due else 0)

    def append(self, handed: Handed, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append a layer's tokens, packed; the next layer is due."""
        self.call.check_handed()
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
        """Append a layer's one token, or drafted ones, and attend by KVCache.step."""
        self.call.check_handed()
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

    def _appended(self, handed: Handed) -> None:
        handed.appended, self.latents = True, None
        if handed.is_traced:
            self.call.append_in_graph(handed.at, self.num_places)
            return
        if self.call.append(len(self.layers_held.places)):
            self._mark()
            self.has_empty = self._past_and_call.has_empty

    def take_latents(self, layer: Any) -> Handed | None:
        """The latents that this layer attends to; None once nobody holds them, as after a failed
        call."""
        handed = self.latents
        is_its = handed is not None and handed.layer == layer and handed.latents is not None
        return handed if is_its else None

    def take_back(self) -> None:
        """Drop what this call has appended, and begin anew; a recorded call has not run."""
        self.latents = None
        self.call.fail(is_torn=bool(self.layers_held.kept))
        if self.kv is None or debug.is_recorded(self.kv.start_positions):
            return
        # changed: the first layer has appended, and what came behind that has failed
        if self.call.due or self._is_changed:
            with suppress(ShapeError):  # windows that are overwritten: the next call says so
                self.kv.crop(self.past.lens)
                self._forgotten(self.past)

    def _forgotten(self, past: Columns) -> None:
        """The rows were cropped to these columns, and no layer has anything of a call."""
        if self._starts_before is not None:
            self.begin_at(self._starts_before)
            self._starts_before = None
        self.call.forget()
        self.latents = None
        self.ids = None if self.ids is None else self.ids[:, : past.length]
        self._count(past)

    def begin_at(self, starts: list[int]) -> None:
        """Set the position of each sequence's first token, until the call is undone."""
        assert self.kv is not None
        if starts != self.starts:
            self._starts_before, self.starts = self.starts, starts
            self.kv.start_positions.copy_(torch.tensor(starts, device="cpu"))

    def check_attended(self) -> None:
        """Raise if a layer did not attend to its keys by "kvquant"."""
        try:
            self.call.check_attended()
        except BaseException:
            self.take_back()
            raise

    def refuse_mask(self, layer: str) -> None:
        """Raise for a layer with the mask of another attention."""
        running.traced = None  # noted for our mask function, which this call has not reached
        self._settle()  # in a graph nobody has: the call before is complete, and stays
        self.take_back()
        refuse_attention(layer)

    def check_complete(self) -> None:
        """Raise unless the call that has ended appended to every layer."""
        self.check_attended()
        if not self.call.is_complete:
            raise ShapeError(
                f"the model has appended to {self.call.due} layers of the cache's "
                f"{self.num_places}: make the cache by QuantizedCache(model), or "
                "CachedModel.new_cache"
            )

    def end_call(self) -> None:
        """Forget a call that raised before its first layer."""
        if not torch.compiler.is_compiling():  # there nothing has run
            self.call.end()

    def mask_sizes(self, columns: int) -> tuple[int, int]:
        """Columns to attend to, and where they start; the model asks before it makes a mask."""
        if torch.compiler.is_compiling():
            if self.is_traced(columns):
                running.note(self)
                self.call.awaits_mask = True
                return self.max_columns, 0
            found: tuple[int, int] = outside_of_graphs(self.mask_sizes, columns)
            return found
        running.traced = None  # of a call that was refused while it was traced
        self.check_new(columns)
        self._begin(columns, was_asked=True)
        if columns == 1:
            self._check_room()
        if not self._dequantizes:  # else the masks are transformers' own
            running.note(self)
            self.call.awaits_mask = True
        return self.past.length + columns, 0

    def check_new(self, columns: int) -> int:
        """The new columns of a call; ConfigError if it brings none."""
        if columns < 1:
            self._refresh()
            if self.past.is_empty:
                raise ConfigError(
                    "the prompt is empty: give the id of one token or more, such as bos_token_id"
                )
            self.refuse_shorter()
        return columns

    def held_of(self, whole: int) -> int:
        """Columns that the cache holds of a text of so many; ConfigError if these are all."""
        self._refresh()
        return whole - self.check_new(whole - self.past.length)

    def _check_room(self) -> None:
        """Raise if a step finds no room; in a graph nobody would notice before check."""
        room, lens = self.max_columns, self.past.lens
        if self.kv is None or room < 0 or self.past.length < room or self.call.is_between:
            return
        longest = max(lens)
        if longest >= room:
            raise ShapeError(
                f"sequence {lens.index(longest)} would grow to {longest + 1} tokens, "
                f"max_seq_len is {room}: crop it, or make a larger cache"
            )

    def refuse_anew(self) -> NoReturn:
        """Raise ConfigError for a text that begins anew."""
        raise ConfigError(
            f"a text is read from its beginning, and the cache holds {self.past.length} tokens "
            f"already. {ANOTHER}. If generate does this in a text of its own, either it drafts "
            "(prompt_lookup_num_tokens, assistant_model) with a cache that does not know the "
            "model: make it by QuantizedCache(model), or QuantizedCache(kv, model=model). Or it "
            "has use_cache=False, be it from the model's generation_config: give use_cache=True"
        )

    def refuse_shorter(self) -> NoReturn:
        raise ConfigError(
            f"the text that came ends where the tokens of the cache do, or before: the cache holds "
            f"{self.past.length}, and the text brings nothing new or is another one. {ANOTHER}"
        )


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


def _marks_of(kv: KVCache) -> tuple[int, int]:
    """What differs once somebody else has changed lengths or positions; nothing is read."""
    return kv.changes, kv.start_positions._version
