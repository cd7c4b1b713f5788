"""A rollout's calls of its data source: what is custom in it may hang, or return nonsense."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from slime_core.errors import DataError, SlimeError
from slime_core.types import Group
from slime_rollout.config import RolloutConfig
from slime_rollout.data import AccountedSource, checked_groups
from slime_rollout.errors import HookTimeoutError
from slime_rollout.threads import call_within


class SourceCalls:
    """Calls a data source; a custom one, or one with a custom filter, within ``--hook-timeout``.

    The event loop waits: nothing else may change ledger and buffer during a call. A call that hangs goes on changing
    them in its thread, so from then on neither the source nor its state can be used.

    Args:
        source: The data source.
        config: Names its hooks, and their time limit.
    """

    def __init__(self, source: AccountedSource, config: RolloutConfig) -> None:
        self.source = source
        self._limit = config.selection.hook_timeout
        given = {
            "--data-source-path": config.data.data_source_path,
            "--buffer-filter-path": config.data.buffer_filter_path,
        }
        self._hooks = " with ".join(f"{flag} {path}" for flag, path in given.items() if path is not None)
        self._problem = ""

    @property
    def hangs(self) -> bool:
        """Whether a call has not returned."""
        return bool(self._problem)

    def check(self) -> None:
        """Make sure that the source can be used.

        Raises:
            HookTimeoutError: A call has not returned.
        """
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
        """The next groups.

        Raises:
            HookTimeoutError: It took too long.
            DataError: It raised, or returned something else; or as `AccountedSource`.
        """
        groups = self._call("get_samples", self.source.get_samples, count)
        return checked_groups(groups, count, f"{self._hooks}: ") if self._hooks else groups

    def add_samples(self, groups: list[Group]) -> None:
        """Give groups back.

        Raises:
            HookTimeoutError: It took too long.
            DataError: It raised; or as `RolloutDataSourceWithBuffer`.
        """
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
