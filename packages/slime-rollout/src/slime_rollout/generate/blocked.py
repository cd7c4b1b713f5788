"""A watch over the event loop that custom generate functions share: one that blocks it stops all of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from slime_rollout.generate.context import GenerateGroup
from slime_rollout.generate.custom import CustomGenerate

logger = logging.getLogger(__name__)

SECONDS = 5.0
THREAD = "slime-block-watch"
_PING_SECONDS = 1.0


class BlockWatch:
    """Logs, once, that a custom generate function keeps the event loop from everything else.

    Args:
        generate: How groups are generated; nothing is watched if that is not a function of the user's.
    """

    def __init__(self, generate: GenerateGroup) -> None:
        self._generate = generate if isinstance(generate, CustomGenerate) else None

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Watch the running event loop within the block. Another thread asks it for a sign of life every second."""
        if self._generate is None:
            yield
            return
        over = threading.Event()
        given = self._generate, asyncio.get_running_loop(), threading.get_ident(), over
        threading.Thread(target=self._watch, args=given, name=THREAD, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _watch(
        self, generate: CustomGenerate, loop: asyncio.AbstractEventLoop, thread: int, over: threading.Event
    ) -> None:
        while not over.wait(_PING_SECONDS):
            answered = threading.Event()
            with contextlib.suppress(RuntimeError):  # closed
                loop.call_soon_threadsafe(answered.set)
            while not answered.wait(SECONDS):
                if over.is_set() or self._generate is None:
                    return
                if (frame := _frame_in(generate, sys._current_frames().get(thread))) is not None:
                    self._generate = None  # told
                    _tell(generate, frame)
                    return


def _frame_in(generate: CustomGenerate, innermost: FrameType | None) -> FrameType | None:
    """Where a thread is in the function: in its file, or else wherever; ``None`` if it is not in the function at all.

    Others may block the loop, such as a data source, which has its own time limit.
    """
    frame, is_in_it = innermost, False
    while frame is not None:
        if frame.f_code.co_filename == generate.file:
            return frame
        is_in_it = is_in_it or generate.is_call(frame)
        frame = frame.f_back
    return innermost if is_in_it else None


def _tell(generate: CustomGenerate, frame: FrameType) -> None:
    logger.warning(
        "%s has kept the event loop for more than %g s (%s, line %d), and nothing else is generated meanwhile; "
        "await what takes time (asyncio.to_thread, asyncio.sleep)",
        generate.name,
        SECONDS,
        frame.f_code.co_filename,
        frame.f_lineno,
    )
