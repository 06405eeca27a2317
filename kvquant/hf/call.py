"""How far a model's call on a cache is, as a state machine. tests/hf/test_call.py has its table.

    idle        no call runs
    begun       the model has asked for the sizes of masks, or its first layer has come
    handed      a layer has handed its tokens to the cache and has not attended to them yet
    appended    some layers have appended their tokens
    complete    all have appended; the next reader or call counts their tokens
    torn        a call was undone, but transformers' own layers cannot forget it

In a torch.compile graph a layer goes to handed and back, and the last layer completes the call.
Other state may not change from layer to layer: it would become part of the graph.
"""

from __future__ import annotations

from ..errors import ShapeError, UnsupportedModelError
from .padding import Padding
from .switch import DEQUANTIZE

ATTENTION = "kvquant"  # the name of our attention function, and of our masks, in transformers
STATES = "idle", "begun", "handed", "appended", "complete", "torn"
IDLE, BEGUN, HANDED, APPENDED, COMPLETE, TORN = STATES


class Call:
    """A call of a model whose layers append to a cache one after another.

    Attributes:
        due: the place of the cache that comes next; earlier ones have appended.
        columns: new ones of each sequence.
        padding: which of them hold no tokens, if any.
        was_asked: the call began when the model asked for the sizes of masks.
        awaits_mask: the model has asked, and our function has not made the mask yet.
        is_ahead: graphs have appended uncounted tokens after a complete call.
        has_run: a call outside of graphs was complete.
    """

    def __init__(self) -> None:
        self._state = IDLE
        self._layer: str | None = None  # that has handed its tokens
        self.due = self.columns = 0
        self.padding: Padding | None = None
        self.was_asked = self.awaits_mask = self.is_ahead = self.has_run = False

    @property
    def state(self) -> str:
        return self._state if self._layer is None else HANDED

    @property
    def is_open(self) -> bool:
        """Whether a call has begun and some layer has not appended yet."""
        return self._layer is not None or self._state in (BEGUN, APPENDED)

    @property
    def is_between(self) -> bool:
        """Whether some layers have appended and others have not."""
        return self._state == APPENDED

    @property
    def is_complete(self) -> bool:
        """Whether all layers have appended tokens that nobody has counted yet."""
        return self._state == COMPLETE

    def comes_first(self, at: int | None, places: int) -> bool:
        """Whether a layer begins a call that asked for no masks; with one layer it may be a
        repeat."""
        is_again = places == 1 and self.was_asked
        return self._state == IDLE or (self.is_complete and not at and not is_again)

    def begin(self, *, was_asked: bool) -> None:
        """Begin a call. If an open one has failed, its next layer raises."""
        if self._layer is None and self._state in (IDLE, BEGUN, COMPLETE):
            self._state, self.due, self.was_asked = BEGUN, 0, was_asked
            self.padding = None

    def is_next(self, at: int | None) -> bool:
        """Whether a call waits for this place, and nothing is to be begun or refused."""
        return at == self.due and self._state == APPENDED and self._layer is None

    def check_turn(self, layer: int, at: int | None, places: int) -> None:
        """Raise unless a layer may hand over its tokens: its turn, and the layer before has
        attended."""
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
        """Raise unless some layer may come next: all that a graph checks."""
        self.check_attended()
        if self._state == TORN:
            raise ShapeError(
                "a call of the model has failed, and its layers that are transformers' own cannot "
                "forget what came: reset() the cache and read the text again"
            )

    def hand(self, layer: int) -> None:
        self._layer = str(layer)

    def check_attended(self) -> None:
        """Raise UnsupportedModelError if a layer has not attended to the tokens that it handed
        over."""
        if self._layer is not None:
            refuse_attention(self._layer)

    def check_handed(self) -> None:
        """Raise UnsupportedModelError unless a layer may append what it has handed over."""
        if self._layer is None:
            raise UnsupportedModelError(
                "no layer has handed tokens that it has not attended to, so these are of a call "
                "that is over: attend once in a call (without gradient checkpointing)"
            )

    def append(self, places: int) -> bool:
        """Append a layer's tokens: the next layer is due. Returns whether the call is complete."""
        self._layer, self._state, self.due = None, APPENDED, self.due + 1
        if self.due < places:
            return False
        self._state, self.has_run = COMPLETE, True
        return True

    def append_in_graph(self, at: int, places: int) -> None:
        """As append, in a graph: one token of each sequence."""
        self._layer = None
        if at + 1 < places:
            pass
        elif self.is_complete:  # not counted yet: what a graph counts is part of it
            self.is_ahead = True
        else:
            self._state, self.due, self.columns = COMPLETE, places, 1

    def count(self) -> None:
        if self.is_complete:
            self._state, self.due, self.padding = IDLE, 0, None

    def end(self) -> None:
        """End a call that raised before its first layer."""
        if self._state == BEGUN:
            self._state = IDLE

    def fail(self, *, is_torn: bool) -> None:
        """Fail a call; if is_torn, transformers' own layers may keep what the others forget."""
        self._layer, self.awaits_mask = None, False
        self.end()
        if is_torn:
            self._state = TORN

    def forget(self) -> None:
        """Forget the call in all layers; a torn one stays torn."""
        self._layer, self.due = None, 0
        self._state = TORN if self._state == TORN else IDLE

    def reset(self) -> None:
        self._layer, self._state, self.due, self.padding = None, IDLE, 0, None
        self.awaits_mask = False


def refuse_attention(layer: str) -> None:
    """Raise UnsupportedModelError for a layer that did not attend to its tokens."""
    raise UnsupportedModelError(
        f"layer {layer} got keys from a KVCache and did not attend to them by kvquant's "
        f"attention. Call model.set_attn_implementation({ATTENTION!r}) first; a model that is set "
        "to it computes attention by itself, not through transformers' attention interface, so no "
        f"KVCache attends for it: {DEQUANTIZE}. If the layer has failed before it attended (for "
        "lack of memory, say), that is taken back now: call again"
    )
