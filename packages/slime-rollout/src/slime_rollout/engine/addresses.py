"""Addresses: where a run's models are (for user hooks), this machine's own addresses, and free TCP ports."""

from __future__ import annotations

import contextlib
import random
import socket
import urllib.parse
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError
from slime_core.former_names import renamed
from slime_rollout.engine import PortInUseError

LOOPBACK = "127.0.0.1"
_LOWEST_PORT, _USUAL_EPHEMERAL = 15000, 32768
_FEWEST_PORTS = 1000
_ATTEMPTS = 200
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def router_args(router_url: str, model_urls: Mapping[str, str]) -> dict[str, Any]:
    """Addresses for hooks, in ``args``: the router of the trained model, and those of all models by name."""
    host, port = _host_and_port(router_url)
    routers = {name: _host_and_port(url) for name, url in model_urls.items()}
    return {"sglang_router_ip": host, "sglang_router_port": port, "sglang_model_routers": routers}


def get_model_url(args: Any, name: str | None = None, endpoint: str = "/generate") -> str:
    """The address of a model's router, with ``endpoint`` appended; a `ConfigError` for an unknown model.

    ``name`` is the model's in ``--sglang-config``, or ``default`` without that file; the trained one unless given.
    """
    if name is None:
        return address(args.sglang_router_ip, args.sglang_router_port) + endpoint
    routers: Mapping[str, list[Any]] = getattr(args, "sglang_model_routers", {})
    if name not in routers:
        raise ConfigError(f"no model is called {name}; there are: {', '.join(sorted(routers)) or 'none'}")
    return address(*routers[name]) + endpoint


def auth_headers(args: Any) -> dict[str, str]:
    """Headers that requests to a run's router must have, for those that do not use slime's functions.

    ``args.sglang_api_key`` is the key alone, as clients of OpenAI's API take it; ``None`` if there is none.
    """
    from slime_rollout.http import key_headers  # settings import this module, and asyncio is slow to import

    return key_headers(args.sglang_api_key)


_KEYS: dict[str, str] = {}  # of the routers that this process has to do with, by their addresses


def remember_key(args: Any) -> None:
    """Let :func:`key_for` know the routers of ``args``, and their key."""
    if args.sglang_api_key is not None:
        names = (None, *getattr(args, "sglang_model_routers", {}))
        _KEYS.update({get_model_url(args, name, "/"): args.sglang_api_key for name in names})


def key_for(url: str) -> str | None:
    """The key for a request of a user's function, if it goes to a router of the run; a tool's server gets none."""
    return next((key for router, key in _KEYS.items() if url.startswith(router)), None)


def _host_and_port(url: str) -> list[Any]:
    parts = urllib.parse.urlsplit(url)
    return [parts.hostname, parts.port]


def address(host: str, port: int) -> str:
    """The URL of a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def full_address(flag: str, given: str) -> str:
    """``HOST:PORT`` or ``http://HOST:PORT`` as the latter; `ConfigError` that names ``flag`` if it is neither."""
    url = given if "://" in given else f"http://{given}"
    parts = urllib.parse.urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "http" or not parts.hostname or not port or parts.path not in ("", "/") or parts.query:
        raise ConfigError(f"{flag} {given} is not an address; write HOST:PORT, or http://HOST:PORT")
    return url.rstrip("/")


def is_this_machine(url: str) -> bool:
    """Whether a server at ``url`` runs here; ``False`` for a host name that cannot be resolved."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(urllib.parse.urlsplit(url).hostname, None, type=socket.SOCK_DGRAM)
        return any(_can_bind(family, where) for family, _, _, _, where in found)
    return False


def _can_bind(family: int, where: tuple[object, ...]) -> bool:
    """Only this machine's own addresses can be bound; a datagram socket disturbs nobody."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind(where)
        return True
    return False


class Ports:
    """Hands out free ports, each only once, for servers that do not listen yet; never those of ``taken``."""

    def __init__(self, *taken: int | None) -> None:
        self._taken = {port for port in taken if port is not None}

    def take(self, host: str = LOOPBACK) -> int:
        """A free port of an address; errors as of :func:`free_port`."""
        port = free_port(host, without=self._taken)
        self._taken.add(port)
        return port


def free_port(host: str = LOOPBACK, *, without: Collection[int] = ()) -> int:
    """A free port, or a `PortInUseError`; below those of outgoing connections where the kernel leaves room for that.

    Outgoing connections come and go by the hundred, and one may take a port before the server listens.
    """
    below = _upper_end()
    for _ in range(_ATTEMPTS):
        port = random.SystemRandom().randrange(_LOWEST_PORT, below)
        if port in without:
            continue
        with contextlib.suppress(PortInUseError):
            check_port_free(port, host)
            return port
    raise PortInUseError(f"no free port between {_LOWEST_PORT} and {below} on {host} in {_ATTEMPTS} attempts")


def check_port_free(port: int, host: str = LOOPBACK, *, flag: str | None = None) -> None:
    """Raise `PortInUseError` if ``port``, which ``flag`` gave, is taken, or ``host`` is not this machine's address."""
    try:
        with bound(host, port):
            pass
    except OSError as error:
        raise PortInUseError(
            f"{flag or 'port'} {port} cannot be used on {host} ({error.strerror or error}); "
            "give another one, or none to have a free one chosen"
        ) from error


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[None]:
    """Bind a port without listening, which shows whether a server could listen there; raises `OSError` if not."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # It must not listen: a process that another thread forks meanwhile inherits the socket until it executes its
        # program, and the port would look taken for that long. Sockets that are only bound do not exclude each other.
        server.bind((host, port))
        yield


def _upper_end() -> int:
    """The end of our range: some machines give nearly all ports to outgoing connections."""
    try:
        first = int(_PORT_RANGE.read_text().split()[0])
    except OSError:
        return _USUAL_EPHEMERAL
    return first if first >= _LOWEST_PORT + _FEWEST_PORTS else _USUAL_EPHEMERAL


def receivers_beside(engine_urls: Sequence[str], receivers: Sequence[str]) -> tuple[str, ...]:
    """URL of the receiver on each engine's machine, from ``host:port`` of all; a single one serves all engines.

    Raises `ConfigError` if a machine of an engine has none or several.
    """
    urls = [address if "://" in address else f"http://{address}" for address in receivers]
    if len(urls) == 1:
        return tuple(urls * len(engine_urls))
    beside = []
    for engine in engine_urls:
        host = urllib.parse.urlsplit(engine).hostname
        found = [url for url in urls if urllib.parse.urlsplit(url).hostname == host]
        if len(found) != 1:
            raise ConfigError(
                f"--update-weight-receivers {' '.join(receivers)} has {len(found)} on the machine of {engine}; give "
                f"one on each, named as the engine is: {host}:PORT"
            )
        beside += found
    return tuple(beside)


__getattr__ = renamed(__name__, {"require_this_machine": "slime_rollout.engine.channels.require_this_machine"})
