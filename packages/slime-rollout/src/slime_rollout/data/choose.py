"""The data source that the flags choose, and its calls: what is custom in it may hang, or return nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, cast

from slime_core.errors import ConfigError, DataError, SlimeError
from slime_core.hooks import HookArgs
from slime_core.interfaces import DataSource
from slime_core.types import Group, Sample
from slime_core.user_functions import load_function
from slime_rollout.config import RolloutConfig
from slime_rollout.data.chat import PromptEncoder
from slime_rollout.data.dataset import PromptDataset, RowEncoder
from slime_rollout.data.group_state import groups_from_plain, plain_groups
from slime_rollout.data.source import (
    AccountedSource,
    BufferFilter,
    NoPrompts,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
)
from slime_rollout.data.stream import StreamingPrompts
from slime_rollout.errors import HookTimeoutError
from slime_rollout.threads import call_within

_SOURCE, _FILTER = "--data-source-path", "--buffer-filter-path"
_FILTER_ARGUMENTS = ("args", "buffer", "num_samples")
_PROTOCOL = {
    "get_samples": ("num_samples",),
    "add_samples": ("groups",),
    "state_dict": (),
    "load_state_dict": ("state",),
}
_FIRST_PART = 2**40  # numbers of a custom source stay below
_SETTINGS = {"samples_per_prompt": 1, "shuffle": False, "seed": 0, "args": None}


def load_source(config: RolloutConfig, encoder: PromptEncoder, hook_args: HookArgs) -> AccountedSource:
    """The prompts to train on, in memory or as a stream, in the data source that the flags choose; or none.

    Raises `ConfigError` if the data source cannot be used, `DataError` if a prompt file breaks its format; of one that
    is streamed, only what opening it shows.
    """
    if not config.data.prompt_paths:
        return NoPrompts()
    encoding = RowEncoder(config, encoder, config.data.num_data_workers)
    with contextlib.ExitStack() as stack:
        stack.callback(encoding.close)
        dataset: PromptDataset | StreamingPrompts
        if config.data.streaming_data:
            dataset = StreamingPrompts(config, encoder, encoding=encoding)
        else:
            parts = [PromptDataset.load(path, config, encoder, encoding=encoding) for path in config.data.prompt_paths]
            dataset = PromptDataset.join(parts, config.data.prompt_data_weights)
        source = make_data_source(config, dataset, hook_args)
        if config.data.streaming_data:
            stack.pop_all()
    return source


def find_data_source(config: RolloutConfig) -> Callable[..., AccountedSource]:
    """The class of ``--data-source-path``, with the function of ``--buffer-filter-path``.

    By default a source without a buffer, or with one where settings make groups come back. It is called with
    ``(dataset, samples_per_prompt=…, shuffle=…, seed=…, args=…)``. Raises `ConfigError` if a path names nothing that
    can be used, or a function that does not take the arguments it will get.
    """
    gives_back = config.selection.gives_back or config.rollout_function is not None
    kind: type[Any] = RolloutDataSourceWithBuffer if gives_back else RolloutDataSource
    if config.data.data_source_path is not None:
        kind = _load_class(config.data.data_source_path)
    if config.data.buffer_filter_path is not None:
        choose = _load_filter(config.data.buffer_filter_path, kind)
        return functools.partial(cast(type[RolloutDataSourceWithBuffer], kind), filter=choose)
    if issubclass(kind, RolloutDataSource):
        return cast(Callable[..., AccountedSource], kind)
    return functools.partial(_make_custom, kind)


def make_data_source(
    config: RolloutConfig, dataset: PromptDataset | StreamingPrompts, hook_args: HookArgs
) -> AccountedSource:
    """The data source of a run, custom or ours, found as :func:`find_data_source` does."""
    return find_data_source(config)(
        dataset,
        samples_per_prompt=config.selection.n_samples_per_prompt,
        shuffle=config.data.rollout_shuffle,
        seed=config.data.rollout_seed,
        args=hook_args,
    )


def _load_filter(path: str, kind: type[Any]) -> BufferFilter:
    if not issubclass(kind, RolloutDataSourceWithBuffer):
        raise ConfigError(
            f"{_FILTER} {path}: {kind.__name__} has no buffer to choose from; give "
            f"{_SOURCE} slime_rollout.data.RolloutDataSourceWithBuffer, or a class derived from it"
        )
    function = load_function(path, _FILTER)
    _check_plain(function, f"{_FILTER} {path}")
    if _mismatch(function, _FILTER_ARGUMENTS) and not _mismatch(function, ("args", "rollout_id", "buffer", "num")):
        return lambda args, buffer, num_samples: function(args, None, buffer, num_samples)  # as upstream calls it
    return cast(BufferFilter, load_function(path, _FILTER, arguments=_FILTER_ARGUMENTS))


def _load_class(path: str) -> type[Any]:
    given = f"{_SOURCE} {path}"
    kind = cast(Any, load_function(path, _SOURCE))
    missing = [name for name in _PROTOCOL if not callable(getattr(kind, name, None))]
    if not isinstance(kind, type) or missing:
        raise ConfigError(
            f"{given} is not a class with {', '.join(missing or _PROTOCOL)}; write one that has all of "
            f"{', '.join(_PROTOCOL)}, or derive it from slime_rollout.data.RolloutDataSource or "
            "RolloutDataSourceWithBuffer"
        )
    settings: dict[str, Any] = dict(_SETTINGS)
    if issubclass(kind, RolloutDataSourceWithBuffer):
        settings["filter"] = None
        _check_call(kind.buffer_filter, f"{given}: buffer_filter", ("self", *_FILTER_ARGUMENTS))
        _check_plain(kind.buffer_filter, f"{given}: buffer_filter")
    if issubclass(kind, RolloutDataSource) or _mismatch(kind, ("args",)):
        _check_call(kind, f"{given}: the class", ("dataset",), **settings)
    for name, arguments in _PROTOCOL.items():
        _check_call(getattr(kind, name), f"{given}: {name}", ("self", *arguments))
    return cast(type[Any], kind)


def _make_custom(kind: type[Any], dataset: PromptDataset | StreamingPrompts, **settings: Any) -> CustomSource:
    """A source that does not derive from ours: made as ours are, or of the flags alone as upstream's."""
    is_ours = _mismatch(kind, ("dataset",), **_SETTINGS) is None
    return CustomSource(kind(dataset, **settings) if is_ours else kind(settings["args"]))


def _check_call(function: Callable[..., Any], given: str, positional: tuple[str, ...], **named: Any) -> None:
    if (error := _mismatch(function, positional, **named)) is not None:
        call = ", ".join((*positional, *(f"{name}=…" for name in named)))
        raise ConfigError(f"{given} takes {inspect.signature(function)}; it is called with ({call}): {error}")


def _mismatch(function: Callable[..., Any], positional: tuple[str, ...], **named: Any) -> TypeError | None:
    """Why a function cannot be called like this."""
    try:
        inspect.signature(function).bind(*positional, **named)
    except TypeError as error:
        return error
    return None


def _check_plain(function: Callable[..., Any], given: str) -> None:
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{given} is async; choosing from the buffer waits for nothing: write a plain function")


class CustomSource(AccountedSource):
    """An account of a custom data source that does not derive from ours, but has the protocol's methods.

    It numbers its samples itself, below 2^40, and keeps what it is given back. What it handed out in a rollout that
    failed is handed out again without asking it.
    """

    def __init__(self, source: DataSource) -> None:
        super().__init__()
        self.source = source
        self._next_part = _FIRST_PART
        self._drawn: list[Group] = []

    def add_samples(self, groups: list[Group]) -> None:
        """As for `RolloutDataSourceWithBuffer`: the source keeps them."""
        groups = [group for group in groups if group]
        self.ledger.put_back(groups)
        self.source.add_samples(groups)

    def fresh_index(self) -> int:
        """As for `AccountedSource`."""
        self._next_part += 1
        return self._next_part - 1

    def begin(self) -> Callable[[], None]:
        """As for `AccountedSource`; undone, what the source gave since is kept here and comes first."""
        ledger, unfinished = self.ledger.copy(), list(self._unfinished)
        self._drawn = []

        def undo() -> None:
            ledger.hand_out(self._drawn)
            ledger.put_back(self._drawn)
            self.ledger, self._unfinished = ledger, deque(unfinished + self._drawn)

        return undo

    def check_ledger(self, in_flight: Iterable[Group] = ()) -> str | None:
        """As for `AccountedSource`; what the source keeps is taken to be there."""
        return self.ledger.problem(None, in_flight)

    def state_dict(self) -> dict[str, Any]:
        """The source's state and the account's."""
        return {
            "source": self.source.state_dict(),
            "next_part": self._next_part,
            "ledger": self.ledger.state_dict(),
            "given_back": self.ledger.given_back(),
            "unfinished": plain_groups(chain(self.ledger.out_groups(), self._unfinished)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was saved; a `DataError` if that is another class's."""
        if missing := {"source", "next_part", "ledger", "given_back", "unfinished"} - state.keys():
            raise DataError(
                f"the saved data position lacks {', '.join(sorted(missing))}; continue with the same "
                "--data-source-path, or start a new run"
            )
        unfinished = groups_from_plain(state["unfinished"])
        self.source.load_state_dict(state["source"])
        self._next_part = state["next_part"]
        self.ledger.load_state_dict(state["ledger"], unfinished, given_back=state["given_back"])
        self._unfinished = deque(unfinished)

    def _next_groups(self, num_groups: int) -> list[Group]:
        if num_groups == 0:
            return []
        where = f"--data-source-path: {type(self.source).__name__}."
        groups = checked_groups(self.source.get_samples(num_groups), num_groups, where)
        self._drawn += groups
        return groups


def checked_groups(groups: Any, count: int, where: str = "") -> list[Group]:
    """The value of ``get_samples(count)``; a `DataError` unless it is a list of so many groups."""
    if not (
        isinstance(groups, list)
        and len(groups) == count
        and all(isinstance(group, list) and group and all(isinstance(one, Sample) for one in group) for group in groups)
    ):
        raise DataError(
            f"{where}get_samples({count}) returned {str(groups)[:100]}; return a list of {count} groups of samples"
        )
    return list(groups)


class SourceCalls:
    """Calls a data source; a custom one, or one with a custom filter, within ``--hook-timeout``.

    The event loop waits: nothing else may change ledger and buffer during a call. A call that hangs goes on changing
    them in its thread, so from then on neither the source nor its state can be used.
    """

    def __init__(self, source: AccountedSource, config: RolloutConfig) -> None:
        self.source = source
        self._limit = config.selection.hook_timeout
        given = {_SOURCE: config.data.data_source_path, _FILTER: config.data.buffer_filter_path}
        self._hooks = " with ".join(f"{flag} {path}" for flag, path in given.items() if path is not None)
        self._problem = ""

    @property
    def hangs(self) -> bool:
        """Whether a call has not returned."""
        return bool(self._problem)

    def check(self) -> None:
        """Raise HookTimeoutError if a call has not returned."""
        if self._problem:
            raise HookTimeoutError(self._problem)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """If the block raises, the source is as it was before; unless a call hangs, which may still change it."""
        undo = self.source.begin()
        try:
            yield
        except BaseException:
            if not self.hangs:
                undo()
            raise

    def get_samples(self, count: int) -> list[Group]:
        """The next groups; a `HookTimeoutError` if that takes too long, and a `DataError` if it goes wrong."""
        groups = self._call("get_samples", self.source.get_samples, count)
        return checked_groups(groups, count, f"{self._hooks}: ") if self._hooks else groups

    def add_samples(self, groups: list[Group]) -> None:
        """Give groups back; errors are as for :meth:`get_samples`."""
        self._call("add_samples", self.source.add_samples, groups)

    def _call(self, name: str, function: Callable[..., Any], argument: Any) -> Any:
        self.check()
        if not self._hooks:
            return function(argument)
        try:
            return call_within(self._limit, f"{self._hooks}: {name}", function, argument)
        except HookTimeoutError as error:
            self._problem = str(error)
            raise
        except SlimeError:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # nobody else would see the last one
            raise DataError(f"{self._hooks}: {name} raised {type(error).__name__}: {error}") from error
