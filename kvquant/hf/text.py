"""A text in a KVCache, as the calls of one model continue it.

CachedText knows on the host what the rows hold, how far the model's call is (call.py), and which
layers the rows are of. `hand` marks keys and values with a Handed for attention.py: transformers
passes on nothing but tensors. Two readers get no mark and ask `running` for the cache of the call:
the function that makes masks, and attention to keys that a model makes of latents.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin

from .. import debug
from ..cache.checks import whole_numbers
from ..cache.contiguous import KVCache
from ..errors import ConfigError, ShapeError, UnsupportedModelError
from .call import Call, refuse_attention
from .compile.tracing import LOSES_MARKS, keep_in_place, outside_of_graphs
from .models.configs import CacheLayers, cache_layers
from .models.hook import DecoderHook, Shown
from .padding import Columns, Padding
from .sources import check_columns, check_layers

DRAFTS = 16  # tokens
ANOTHER = (
    "A cache belongs to one text, of which generate gets all ids, those in the cache and the new "
    "ones. Call cache.reset() before another text, or make another cache. A pipeline reads the "
    "texts of a list one after another into one cache: give it batch_size=len(texts), or one text "
    "with a cache of its own at a time"
)


@dataclass(eq=False)
class Handed:
    """Keys and values of a layer in one call of the model, on their way to attention.

    Attributes:
        to: the text that they go to.
        kv: its KVCache.
        at: the place there.
        layer: of the model.
        padding: which columns hold no tokens, if any.
        appended: they are in the cache, so the next reader is another layer.
        seen: for a chunk: all keys and values of the first attention, and their number (_seen);
            empty if it read the chunk alone.
        mask: of the first attention, if any.
        reads_rows: append before attention, which then reads rows only.
        is_traced: this is part of a graph (compile/tracing.py).
    """

    to: CachedText
    kv: KVCache
    at: int
    layer: int
    padding: Padding | None
    is_traced: bool = False
    appended: bool = False
    reads_rows: bool = False
    seen: tuple[Any, ...] | None = None
    mask: torch.Tensor | None = None
    _latents: tuple[Callable[[], torch.Tensor | None], ...] = ()
    _traced: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def latents(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Latents and RoPE parts, if these are not keys and values; only while the call runs."""
        if self.is_traced or not self._latents:
            return self._traced
        latents, ropes = self._latents[0](), self._latents[1]()
        return None if latents is None or ropes is None else (latents, ropes)

    @latents.setter
    def latents(self, rows: tuple[torch.Tensor, torch.Tensor]) -> None:
        if self.is_traced:  # a graph has no weak references; it ends with the call
            self._traced = rows
        else:
            self._latents = weakref.ref(rows[0]), weakref.ref(rows[1])


class CachedText:
    """The text in a KVCache, and the call of a model that continues it.

    Attributes:
        kv: the KVCache; None before the first tokens come.
        call: how far the model's call is.
        past: the columns before this call.
        has_empty: a sequence still has no token after the last complete call; graphs read it.
        starts: the position of each sequence's first token.
        wrong: [2], on the device: what steps have found, see continuation.WRONG.
        layers_held: of the model; of the KVCache until the model is known.
        is_told: CachedModel gives model and mask itself (tell).
        asked: columns of CachedModel's call.
        is_placed: the caller gives position_ids that the cache does not check.
        shown: the decoder's arguments in this call.
        hook: of the decoder, until attention is known to get positions.
        latents: of the layer that attends next, if it hands over latents.
        step_masks: of one token, by their local_size and use_vmap, made last outside of graphs.
        ids: [batch, columns] of the first columns, as generate got or chose them (ids.py), or None.
        has_beams: this call of generate has moved sequences.
    """

    layers: list[Any]  # ours, and transformers' own
    layers_held: CacheLayers

    def __init__(self, *, placed: bool, drafts: bool, dequantize: bool) -> None:
        self.kv: KVCache | None = None
        self.call = Call()
        self.past = Columns(0, [])
        self.has_empty = True
        self.starts: list[int] = []
        self._starts_before: list[int] | None = None  # where this call has told others
        self._marks: tuple[int, ...] | None = None  # of the KVCache, when it was as here
        self.wrong: torch.Tensor | None = None
        self._knows_model = False
        self._configs = _Configs()  # of the model and its layers, as calls have shown them
        self._make: Callable[..., KVCache] | None = None  # where it is made of a model
        self._max_seq_len: int | None = None
        self._devices: list[torch.device] | None = None  # of the places, see layer_devices
        self._new_lens: torch.Tensor | None = None  # see tell
        self.is_told = False
        self.asked: int | None = None
        self.is_placed, self._drafts, self._dequantizes = placed, drafts, dequantize
        self.shown = Shown()
        self.hook: DecoderHook | None = None
        self.awaits_whole_text = False  # in the next call: generate drafts
        self.names_positions = False  # the model does, so that generate gives it position_ids
        self.latents: Handed | None = None
        self.step_masks: dict[tuple[int | None, bool], torch.Tensor] = {}
        self.ids: torch.Tensor | None = None
        self.has_beams = False

    def fit(self, layers: CacheLayers) -> None:
        """Hold these layers of a model; ShapeError if the KVCache is not one for them."""
        if self.kv is not None:
            check_layers(self.kv, layers.of_rank(self.kv.num_kv_heads))
        self.layers_held, self._knows_model = layers, True

    def tell(self, layers: CacheLayers, new_lens: torch.Tensor | None) -> None:
        """State the model's layers, and which new columns hold tokens, in place of model and mask.

        Args:
            layers: of the model.
            new_lens: [batch], on the CPU: the first so many new columns hold tokens; all when None.
        """
        self.fit(layers)
        self._new_lens, self.is_told = new_lens, True

    def check_model(self, config: Any) -> None:
        """Raise unless the rows, if any, are those of the calling model or layer; looks once a
        config."""
        if self.kv is None or self.is_told or any(config is known for known in self._configs):
            return
        longest = self.kv.max_seq_len if self._make is None else self._max_seq_len
        layers = cache_layers(config, longest=longest)
        if self._knows_model:
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
        self.kv, self.ids = kv, None
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
        is_other = self._dequantizes or keeps or self.is_spread
        return self._max_seq_len is not None and not is_other

    @property
    def is_spread(self) -> bool:
        return len(set(self._devices or ())) > 1 if self.kv is None else self.kv.is_spread

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
        if self.asked not in (None, columns):
            raise UnsupportedModelError(
                f"the model was given {self.asked} columns of ids, and its layers get {columns}: "
                "its forward puts others beside them (virtual tokens, an image), which each step "
                "would append again. CachedModel serves models whose layers get the tokens alone"
            )
        self._refresh()
        self.call.begin(was_asked=was_asked)
        lens = self._new_lens
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
        # len: torch 2.11 traces no bool() of a subclass of list
        is_known = self.is_told or (len(self._configs) > 0 and self.call.has_run)
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
        self.call.append(self.num_places)
        self._mark()
        if self.call.is_complete:
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

    def _taken(self, index: torch.Tensor) -> None:
        """Follow sequences to their places."""
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


class Running:
    """The cache of the model's running call, for readers without a mark.

    Each thread has its own note. A graph of torch.compile cannot guard that, so a traced call (one
    at a time) keeps its note in the plain attribute `traced`; the reader removes it, because a
    graph keeps what it refers to.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self.traced: CachedText | None = None

    def note(self, cache: CachedText) -> None:
        if torch.compiler.is_compiling():
            self.traced = cache
        else:
            self._of_thread.cache = weakref.ref(cache)

    def forget(self) -> None:
        """Note that a call without a QuantizedCache runs."""
        self._of_thread.cache = None

    def take(self) -> CachedText | None:
        """The cache of the running call, if any; a graph can take it once."""
        if torch.compiler.is_compiling():
            cache, self.traced = self.traced, None
            return cache
        found = getattr(self._of_thread, "cache", None)
        return None if found is None else found()


running = Running()


class _Configs(list[Any]):
    """Configs, which a copy of the cache knows as the same ones."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Configs:
        return _Configs(self)


def _marks_of(kv: KVCache) -> tuple[int, int]:
    """What differs once somebody else has changed lengths or positions; nothing is read."""
    return kv.changes, kv.start_positions._version
