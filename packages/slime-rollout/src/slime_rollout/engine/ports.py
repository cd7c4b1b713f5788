"""TCP ports. No torch, no aiohttp."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

from slime_rollout.engine.errors import PortInUseError

_LOWEST, _USUAL_EPHEMERAL = 15000, 32768
_FEWEST = 1000
_ATTEMPTS = 200
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def check_port_free(port: int, host: str = "127.0.0.1", *, flag: str | None = None) -> None:
    """Check that a server could listen on a port.

    Args:
        port: TCP port.
        host: Address to listen on.
        flag: The flag that gave the port, for the message.

    Raises:
        PortInUseError: It is taken, or the address is not this machine's.
    """
    given = f"{flag} {port}" if flag else f"port {port}"
    try:
        with bound(host, port):
            pass
    except OSError as error:
        raise PortInUseError(
            f"{given} cannot be used on {host} ({error.strerror or error}); "
            "give another one, or none to have a free one chosen"
        ) from error


def free_port(host: str = "127.0.0.1", *, without: frozenset[int] | set[int] = frozenset()) -> int:
    """A free port, below those that the kernel gives to outgoing connections where it leaves room for that.

    Outgoing connections come and go by the hundred, and one may take a port before the server listens.

    Args:
        host: Address to listen on.
        without: Ports not to return: those promised to a server that is not yet listening.

    Raises:
        PortInUseError: None was found.
    """
    below = _upper_end()
    for _ in range(_ATTEMPTS):
        port = random.SystemRandom().randrange(_LOWEST, below)
        if port in without:
            continue
        with contextlib.suppress(PortInUseError):
            check_port_free(port, host)
            return port
    raise PortInUseError(f"no free port between {_LOWEST} and {below} on {host} in {_ATTEMPTS} attempts")


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[None]:
    """Hold a port as far as shows whether a server could listen there.

    The socket does not listen itself: a process that another thread starts meanwhile has it, too, until it executes its
    program, and to others the port would look taken that long. Sockets that are only bound do not exclude each other.

    Raises:
        OSError: Somebody listens there, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        yield


def _upper_end() -> int:
    """The end of our range: some machines give nearly all ports to outgoing connections."""
    try:
        first = int(_PORT_RANGE.read_text().split()[0])
    except OSError:
        return _USUAL_EPHEMERAL
    return first if first >= _LOWEST + _FEWEST else _USUAL_EPHEMERAL
