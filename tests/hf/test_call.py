"""The state machine of a model's call on a cache: its whole transition table."""

from collections.abc import Callable

import pytest

pytest.importorskip("transformers")
from kvquant.errors import KVQuantError
from kvquant.hf.call import APPENDED, BEGUN, COMPLETE, HANDED, IDLE, STATES, TORN, Call

PLACES = 3


def hand(call: Call, at: int | None, in_graph: bool = False) -> None:
    if in_graph:
        call.check_ready()
    else:
        call.check_turn(9, at, PLACES)
    call.hand(9)


def append(call: Call, at_in_graph: int | None) -> None:
    call.check_handed()
    if at_in_graph is None:
        call.append(PLACES)
    else:
        call.append_in_graph(at_in_graph, PLACES)


EVENTS: dict[str, Callable[[Call], None]] = {
    "ask": lambda call: call.begin(was_asked=True),
    "hand first": lambda call: hand(call, 0),
    "hand second": lambda call: hand(call, 1),
    "append": lambda call: append(call, None),
    "hand in graph": lambda call: hand(call, None, in_graph=True),
    "append in graph": lambda call: append(call, 0),
    "end graph": lambda call: append(call, PLACES - 1),
    "count": lambda call: call.count(),
    "end": lambda call: call.end(),
    "fail": lambda call: call.fail(is_torn=False),
    "tear": lambda call: call.fail(is_torn=True),
    "forget": lambda call: call.forget(),
    "reset": lambda call: call.reset(),
}
# how each state is reached: "handed" by the first layer, "appended" by it alone
WAYS: dict[str, list[str]] = {
    IDLE: [],
    BEGUN: ["ask"],
    HANDED: ["ask", "hand first"],
    APPENDED: ["ask", "hand first", "append"],
    COMPLETE: ["hand in graph", "end graph"],
    TORN: ["ask", "tear"],
}
TURN = "layer 9 of the model came, and the cache waits for {} of its 3 layers"
LATE, OUT, TORN_ERROR = "did not attend", TURN.format("layer 1"), "reset\\(\\) the cache"
NOT_YET, ALL = TURN.format("layer 0"), TURN.format("none")
UNHANDED = "no layer has handed tokens"
# state -> the next one by each event of EVENTS, in order; other texts are of the error, which
# leaves the state as it was
TABLE: dict[str, list[str]] = {
    #           ask       first       second     append    in graph
    IDLE: [BEGUN, HANDED, NOT_YET, UNHANDED, HANDED],
    BEGUN: [BEGUN, HANDED, NOT_YET, UNHANDED, HANDED],
    HANDED: [HANDED, LATE, LATE, APPENDED, LATE],
    APPENDED: [APPENDED, OUT, HANDED, UNHANDED, HANDED],
    COMPLETE: [BEGUN, ALL, ALL, UNHANDED, HANDED],
    TORN: [TORN, TORN_ERROR, TORN_ERROR, UNHANDED, TORN_ERROR],
}
#        append in graph, end graph, count, end, fail, tear, forget, reset
ENDS: dict[str, list[str]] = {
    IDLE: [UNHANDED, UNHANDED, IDLE, IDLE, IDLE, TORN, IDLE, IDLE],
    BEGUN: [UNHANDED, UNHANDED, BEGUN, IDLE, IDLE, TORN, IDLE, IDLE],
    HANDED: [BEGUN, COMPLETE, HANDED, HANDED, IDLE, TORN, IDLE, IDLE],
    APPENDED: [UNHANDED, UNHANDED, APPENDED, APPENDED, APPENDED, TORN, IDLE, IDLE],
    COMPLETE: [UNHANDED, UNHANDED, IDLE, COMPLETE, COMPLETE, TORN, IDLE, IDLE],
    TORN: [UNHANDED, UNHANDED, TORN, TORN, TORN, TORN, TORN, IDLE],
}
ROWS = [
    (state, event, after)
    for state in STATES
    for event, after in zip(EVENTS, TABLE[state] + ENDS[state], strict=True)
]


@pytest.mark.parametrize(("state", "event", "after"), ROWS)
def test_each_event_in_each_state(state: str, event: str, after: str) -> None:
    call = Call()
    for step in WAYS[state]:
        EVENTS[step](call)
    assert call.state == state
    if after in STATES:
        EVENTS[event](call)
        assert call.state == after
    else:
        with pytest.raises(KVQuantError, match=after):
            EVENTS[event](call)
        assert call.state == state
    assert call.is_open == (call.state in (BEGUN, HANDED, APPENDED))
