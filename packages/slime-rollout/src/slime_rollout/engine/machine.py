"""Which addresses are this machine's own."""

from __future__ import annotations

import contextlib
import socket
import urllib.parse
from collections.abc import Iterable

from slime_rollout.engine.errors import WeightSyncError


def is_this_machine(url: str) -> bool:
    """Whether a server at ``url`` runs here. One whose name is not known anywhere does not."""
    host = urllib.parse.urlsplit(url).hostname
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def on_other_machines(urls: Iterable[str]) -> list[str]:
    """Those of some addresses that are not this machine's."""
    return [url for url in urls if not is_this_machine(url)]


def require_this_machine(urls: Iterable[str]) -> None:
    """Check that engines see this machine's shared memory and files.

    Raises:
        WeightSyncError: One runs elsewhere.
    """
    if far := on_other_machines(urls):
        raise WeightSyncError(
            f"weights were to go through this machine's shared memory, or a checkpoint on it, and {', '.join(far)} run "
            "elsewhere; run them here, or give --update-weight-transport nccl, gloo, or disk, deltas there with "
            "--update-weight-receivers"
        )


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    """A socket can be bound to this machine's own addresses alone; a datagram socket for that disturbs nobody."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind(address)
        return True
    return False
