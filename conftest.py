"""What all tests share: fewer random examples where `scripts/test` asks for them, longer limits of long tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

# `--full`, and pytest alone, take hypothesis' own number. Where tests run once more, one is enough.
settings.register_profile("few", settings.get_profile("ci"), max_examples=10)
settings.register_profile("one", settings.get_profile("ci"), max_examples=1)

FULL_FACTOR = 4.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests marked `full` more time: they compute for minutes, beside others that do, and a limit ends a process.

    Args:
        items: Whose limits, meant for a quiet machine, are changed.
    """
    for item in items:
        limit = item.get_closest_marker("timeout")
        if item.get_closest_marker("full") and limit is not None:
            item.add_marker(pytest.mark.timeout(FULL_FACTOR * limit.args[0]), append=False)
