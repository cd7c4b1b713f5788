"""A rollout's calls of its data source: what is the user's in it may hang, or return nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from slime_core.errors import DataError, SlimeError
from slime_core.types import Group, Sample
from slime_rollout.config import RolloutConfig
from slime_rollout.data import RolloutDataSource
from slime_rollout.errors import HookTimeoutError
from slime_rollout.hooks.limits import call_within


class SourceCalls:
    """Calls a data source; one of the user's, or with a filter of the user's, within ``--hook-timeout``.

    The event loop waits: ledger and buffer are the source's own, and nothing else may change them during a call. One
    that does not come back goes on with them in its thread, so from then on the source is of no use, nor its state.

    Args:
        source: What is called.
        config: Whose functions run in it, and how long they may take.
    """

    def __init__(self, source: RolloutDataSource, config: RolloutConfig) -> None:
        self.source = source
        self._limit = config.hook_timeout
        given = {"--data-source-path": config.data_source_path, "--buffer-filter-path": config.buffer_filter_path}
        self._hooks = " with ".join(f"{flag} {path}" for flag, path in given.items() if path is not None)
        self._problem = ""

    @property
    def hangs(self) -> bool:
        """Whether a call has not come back."""
        return bool(self._problem)

    def check(self) -> None:
        """Make sure that the source can be used.

        Raises:
            HookTimeoutError: A call has not come back.
        """
        if self._problem:
            raise HookTimeoutError(self._problem)

    def get_samples(self, count: int) -> list[Group]:
        """So many groups.

        Raises:
            HookTimeoutError: It took too long.
            DataError: It raised, or returned something else; or see `RolloutDataSource`.
        """
        groups = self._call("get_samples", self.source.get_samples, count)
        return checked_groups(groups, count, f"{self._hooks}: ") if self._hooks else groups

    def add_samples(self, groups: list[Group]) -> None:
        """Give groups back.

        Raises:
            HookTimeoutError: It took too long.
            DataError: It raised; or see `RolloutDataSourceWithBuffer`.
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


def checked_groups(groups: Any, count: int, where: str = "") -> list[Group]:
    """What ``get_samples(count)`` returned, if it is what it must be.

    Raises:
        DataError: It is not.
    """
    if not (
        isinstance(groups, list)
        and len(groups) == count
        and all(isinstance(group, list) and group and all(isinstance(one, Sample) for one in group) for group in groups)
    ):
        raise DataError(
            f"{where}get_samples({count}) returned {str(groups)[:100]}; return a list of {count} groups of samples"
        )
    return list(groups)
