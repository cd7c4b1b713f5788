"""Calls of objects in actors, by the methods of their class."""

from __future__ import annotations

from pathlib import Path

from slime_launch.calls import Host, Watch, Worker
from slime_launch.remote import Remote


class Held:
    def add(self, one: int, other: int) -> int:
        return one + other


def test_a_call_reaches_the_actor_or_what_it_holds():
    host = object.__new__(Host)
    host.held = Held()
    calls = []

    class Started(Worker):
        def start_call(self, method, *args, **kwargs):
            calls.append((method, *args))
            return getattr(host, method)(*args, **kwargs)

    worker = Started("a worker", None, Path("log"), Watch())
    assert Remote[Held](worker, Host.call_held).begin(Held.add, 1, other=2) == 3
    host.held = None
    assert Remote[Host](worker).begin(Host.call_held, "__repr__") == "None"
    assert calls == [("call_held", "add", 1), ("call_held", "__repr__")]
