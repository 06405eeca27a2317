"""How far a model's call on a cache is, as a state machine. tests/hf/test_call.py has its table.

    idle        no call runs
    begun       the model has asked for the sizes of masks, or its first layer has come
    handed      a layer has handed its tokens to the cache and has not attended to them yet
    appended    the layers before the place that is due have appended, and others have not
    complete    all have appended; their tokens are counted when somebody asks or a call begins
    torn        a call was taken back, but layers that are transformers' own cannot forget

In a graph of torch.compile a layer goes from where the call was to handed and back, and the last
one completes the call: what else would change from layer to layer would be part of the graph.
"""

from __future__ import annotations

from ..errors import ShapeError, UnsupportedModelError
from .padding import Padding
from .switch import DEQUANTIZE

ATTENTION = "kvquant"  # the name of our attention function, and of our masks, in transformers
IDLE, BEGUN, HANDED, APPENDED, COMPLETE, TORN = STATES = (
    "idle",
    "begun",
    "handed",
    "appended",
    "complete",
    "torn",
)


class Call:
    """A call of a model whose layers append to a cache one after another.

    Attributes:
        due: the place of the cache that comes next; those before it have appended.
        columns: new ones of each sequence, in this call or the one that is complete.
        padding: which of these hold no tokens, if any do not.
        was_asked: it began when the model asked for the sizes of masks.
        awaits_mask: it has asked, and our function has not made the mask yet.
        is_ahead: graphs have appended tokens behind a complete call, not counted here.
        has_run: a call was complete that was no graph.
    """

    def __init__(self) -> None:
        self._state = IDLE
        self._layer: str | None = None  # that has handed its tokens
        self.due = self.columns = 0
        self.padding: Padding | None = None
        self.was_asked = self.awaits_mask = self.is_ahead = self.has_run = False

    @property
    def state(self) -> str:
        """One of STATES."""
        return self._state if self._layer is None else HANDED

    @property
    def is_open(self) -> bool:
        """Whether a call has begun whose layers have not all appended yet."""
        return self._layer is not None or self._state in (BEGUN, APPENDED)

    @property
    def is_between(self) -> bool:
        """Whether some layers have appended what others have not."""
        return self._state == APPENDED

    @property
    def is_complete(self) -> bool:
        """Whether all layers have appended what is not counted yet."""
        return self._state == COMPLETE

    def comes_first(self, at: int | None, places: int) -> bool:
        """Whether a layer begins a call that asked for no masks; of one layer that has asked it
        may be the same call once more.

        Args:
            at: its place; None if it has none.
            places: of the cache.
        """
        is_again = places == 1 and self.was_asked
        return self._state == IDLE or (self.is_complete and not at and not is_again)

    def begin(self, *, was_asked: bool) -> None:
        """A call begins, unless one is open that has failed: its next layer raises that."""
        if self._layer is None and self._state in (IDLE, BEGUN, COMPLETE):
            self._state, self.due, self.was_asked = BEGUN, 0, was_asked
            self.padding = None

    def check_turn(self, layer: int, at: int | None, places: int) -> None:
        """Raise unless a layer of the model may hand the tokens of its place.

        Raises:
            UnsupportedModelError: the layer before has not attended.
            ShapeError: it is not this layer's turn, or reset() has to come first.
        """
        self.check_ready()
        if at != self.due:
            due = "none" if self.due == places else f"layer {self.due}"
            raise ShapeError(
                f"layer {layer} of the model came, and the cache waits for {due} of its {places} "
                "layers: the model called a layer twice, or skipped one. Give "
                "QuantizedCache(model). If a call has failed before, its tokens are taken back "
                "now: call again"
            )

    def check_ready(self) -> None:
        """Raise unless the next layer may come, whichever it is: all that a graph looks at."""
        self.check_attended()
        if self._state == TORN:
            raise ShapeError(
                "a call of the model has failed, and its layers that are transformers' own cannot "
                "forget what came: reset() the cache and read the text again"
            )

    def hand(self, layer: int) -> None:
        """A layer of the model hands its tokens, to attend to them next."""
        self._layer = str(layer)

    def check_attended(self) -> None:
        """Raise UnsupportedModelError if a layer has handed its tokens and not attended to them."""
        if self._layer is not None:
            refuse_attention(self._layer)

    def check_handed(self) -> None:
        """Raise UnsupportedModelError unless a layer may append what it has handed."""
        if self._layer is None:
            raise UnsupportedModelError(
                "no layer has handed tokens that it has not attended to, so these are of a call "
                "that is over: attend once in a call (without gradient checkpointing)"
            )

    def append(self, places: int) -> None:
        """The layer that has handed its tokens has appended them, so the next one is due."""
        self._layer, self._state, self.due = None, APPENDED, self.due + 1
        if self.due == places:
            self._state, self.has_run = COMPLETE, True

    def append_in_graph(self, at: int, places: int) -> None:
        """As append, in a graph, which appends a token of each sequence."""
        self._layer = None
        if at + 1 < places:
            pass
        elif self.is_complete:  # not counted yet: what a graph counts is part of it
            self.is_ahead = True
        else:
            self._state, self.due, self.columns = COMPLETE, places, 1

    def count(self) -> None:
        """The tokens of a complete call are counted."""
        if self.is_complete:
            self._state, self.due, self.padding = IDLE, 0, None

    def end(self) -> None:
        """A call that has begun was refused before its first layer."""
        if self._state == BEGUN:
            self._state = IDLE

    def fail(self, *, is_torn: bool) -> None:
        """A call has failed. What it has appended stays until it is forgotten.

        Args:
            is_torn: layers that are transformers' own may have what the others forget.
        """
        self._layer, self.awaits_mask = None, False
        self.end()
        if is_torn:
            self._state = TORN

    def forget(self) -> None:
        """No layer has anything of the call any more; what is torn stays so."""
        self._layer, self.due = None, 0
        self._state = TORN if self._state == TORN else IDLE

    def reset(self) -> None:
        """No layer has any token, transformers' own neither."""
        self._layer, self._state, self.due, self.padding = None, IDLE, 0, None
        self.awaits_mask = False


def refuse_attention(layer: str) -> None:
    """Raise UnsupportedModelError for a layer that handed its tokens and did not attend to them."""
    raise UnsupportedModelError(
        f"layer {layer} got keys from a KVCache and did not attend to them by kvquant's "
        f"attention. Call model.set_attn_implementation({ATTENTION!r}) first; a model that is set "
        "to it computes attention by itself, not through transformers' attention interface, so no "
        f"KVCache attends for it: {DEQUANTIZE}. If the layer has failed before it attended (for "
        "lack of memory, say), that is taken back now: call again"
    )
