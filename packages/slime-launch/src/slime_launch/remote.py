"""Objects in Ray actors, called by their methods and not by names: a wrong method or argument is an error of mypy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from slime_launch.calls import Call, Worker

Target = TypeVar("Target")
Given = ParamSpec("Given")
Result = TypeVar("Result")


class Remote(Generic[Target]):
    """A typed handle of an actor, or of an object in it.

    ``through`` is the actor's method that calls a method of that object, given its name and arguments.
    """

    def __init__(self, worker: Worker, through: Callable[..., Any] | None = None) -> None:
        self.worker = worker
        self._through: tuple[str, ...] = () if through is None else (through.__name__,)

    def begin(
        self, method: Callable[Concatenate[Target, Given], Any], /, *args: Given.args, **kwargs: Given.kwargs
    ) -> Any:
        """Call a method without waiting; returns a reference for :func:`~slime_launch.calls.gather`."""
        name, *first = *self._through, method.__name__
        return self.worker.start_call(name, *first, *args, **kwargs)

    def start(
        self, method: Callable[Concatenate[Target, Given], Result], /, *args: Given.args, **kwargs: Given.kwargs
    ) -> Call[Result]:
        """Call a method without waiting."""
        return Call({self.begin(method, *args, **kwargs): self.worker})

    def call(
        self, method: Callable[Concatenate[Target, Given], Result], /, *args: Given.args, **kwargs: Given.kwargs
    ) -> Result:
        """Call a method and wait for its result; errors as of :class:`Call`."""
        return self.start(method, *args, **kwargs).wait()[0]


def start_on_all(
    remotes: Sequence[Remote[Target]],
    method: Callable[Concatenate[Target, Given], Result],
    /,
    *args: Given.args,
    **kwargs: Given.kwargs,
) -> Call[Result]:
    """Call a method of each without waiting; the results are in their order."""
    return Call({remote.begin(method, *args, **kwargs): remote.worker for remote in remotes})


class Question(Generic[Target, Result]):
    """A call that is repeated and never waited for; its method must return at once."""

    def __init__(self, remotes: Sequence[Remote[Target]], method: Callable[[Target], Result]) -> None:
        self._remotes = list(remotes)
        self._method = method
        self._call: Call[Result] | None = None
        self._answers: list[Result] = []

    def answers(self) -> list[Result]:
        """The last answers of all together, in their order; none before the first. Asks again.

        Errors as of :class:`Call`.
        """
        if self._call is None:
            calls = {remote.begin(self._method): remote.worker for remote in self._remotes}
            self._call = Call(calls, awaited=False)
        if self._call.done(0):
            self._answers = self._call.results()
            self._call = None
        return self._answers
