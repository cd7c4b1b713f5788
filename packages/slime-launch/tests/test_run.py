"""How the parts of a run are stopped. What a run does with real parts is in `integration_tests`."""

import contextlib

import pytest

from slime_launch.errors import Stopped
from slime_launch.run import stop_all


def test_what_cannot_be_stopped_hides_neither_the_cause_nor_the_rest(capsys):
    stopped = []

    def fail():
        raise ValueError("the actor is gone")

    with pytest.raises(Stopped), contextlib.ExitStack() as stack:
        stack.callback(stopped.append, "first")
        stack.callback(fail)
        stack.callback(stopped.append, "last")
        try:
            raise Stopped(2)
        except BaseException:
            stop_all(stack)
            raise
    assert stopped == ["last", "first"]
    text = "slime-launch: could not stop everything in order: ValueError: the actor is gone\n"
    assert capsys.readouterr().err == text
