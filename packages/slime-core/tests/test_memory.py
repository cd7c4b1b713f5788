"""The moves of a half's memory, against a table of all of them."""

import itertools

import pytest

from slime_core.memory import Held, MemoryState, MemoryStateError

NOTHING, WEIGHTS, EVERYTHING = Held
MOVES = {
    ("sleep", False): {EVERYTHING: NOTHING, WEIGHTS: NOTHING},
    ("sleep", True): {EVERYTHING: WEIGHTS},
    ("wake", False): {NOTHING: EVERYTHING, WEIGHTS: EVERYTHING},
    ("wake", True): {NOTHING: WEIGHTS},
}


def move(state, verb, half):
    with state.sleeping(half) if verb == "sleep" else state.waking(half):
        pass


def at(held):
    state = MemoryState("the trainer")
    if held is not EVERYTHING:
        move(state, "sleep", held is WEIGHTS)
    return state


@pytest.mark.parametrize(("start", "call"), itertools.product(Held, MOVES))
def test_every_move_goes_where_the_table_says_or_is_refused(start, call):
    state = at(start)
    assert state.held is start
    if start in MOVES[call]:
        move(state, *call)
        assert state.held is MOVES[call][start]
        return
    refused = f"^{call[0]} would leave the trainer with .* holds .* already$"
    with pytest.raises(MemoryStateError, match=refused) as error:
        move(state, *call)
    assert str(start) in str(error.value) and state.held is start


@pytest.mark.parametrize(("held", "least"), itertools.product(Held, (WEIGHTS, EVERYTHING)))
def test_a_call_in_the_wrong_state_names_both(held, least):
    state = at(held)
    if held >= least:
        return state.require("train", least)
    with pytest.raises(MemoryStateError) as error:
        state.require("train", least)
    wake = "wake()" if least is EVERYTHING else "wake(weights_only=True)"
    assert str(error.value) == f"train needs {least}, and the trainer holds {held}; call {wake} first"
    assert len({str(value) for value in Held}) == 3


def test_nothing_may_follow_a_move_that_failed():
    state = MemoryState("the trainer")
    with pytest.raises(OSError, match="disk"), state.sleeping():
        raise OSError("disk is full")
    for call in (lambda: state.held, lambda: state.require("train", WEIGHTS), lambda: move(state, "wake", False)):
        with pytest.raises(MemoryStateError, match="the trainer did not get through its last sleep or wake"):
            call()
