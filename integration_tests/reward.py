"""A reward that a tiny random model can learn in a few steps."""

from __future__ import annotations

import asyncio
from typing import Any

from slime_core.types import Sample


def every_eighth_token(args: Any, sample: Sample) -> float:
    """The share of response tokens whose id is a multiple of eight: 1/8 by chance."""
    tokens = sample.response_tokens
    return sum(token % 8 == 0 for token in tokens) / max(len(tokens), 1)


async def patiently(args: Any, sample: Sample) -> float:
    """The same after a while, for runs that go on, and take little time from others, while a test waits."""
    await asyncio.sleep(4.0)
    return every_eighth_token(args, sample)
