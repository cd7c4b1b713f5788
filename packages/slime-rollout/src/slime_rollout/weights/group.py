"""A process group of the trainer's rank 0 and all engines' ranks, beside whatever groups this process has.

It is made of a store and a backend of its own, so the process's default group and torch's list of groups take no part:
Megatron's stay as they are. Engines join by ``init_weights_update_group``, in which SGLang makes its end by torch's
own helper; the store's prefixes here are the ones that this helper uses (torch 2.13).
"""

from __future__ import annotations

import datetime
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from slime_rollout.engine.errors import WeightSyncError
from slime_rollout.weights.control import Engines

BACKENDS = ("nccl", "gloo")
_DEVICES = {"nccl": "cuda", "gloo": "cpu"}
POLL_SECONDS = 0.05


class BroadcastGroup:
    """Rank 0 of a group that only ever broadcasts from here.

    Args:
        name: The group's name, which must be new to the engines.
        address: This machine, as engines reach it.
        world_size: Ranks of all engines, and this one.
        backend: ``nccl`` or ``gloo``.
        timeout: Time limit in seconds, of joining and of a broadcast.
    """

    def __init__(self, name: str, address: str, world_size: int, backend: str, timeout: float) -> None:
        self.name, self.address, self.world_size, self.backend = name, address, world_size, backend
        self.timeout = datetime.timedelta(seconds=timeout)
        # The store's server is an object of its own, so that its end wakes whoever waits for others, here and there.
        # Port 0: it takes a free one itself.
        self._server: Any = self._store(0, is_server=True)
        self._client: Any = self._store(self.port, is_server=False)
        self._backend: Any = None
        self._thread: threading.Thread | None = None

    def _store(self, port: int, *, is_server: bool) -> Any:
        listen: int | None = None
        if is_server:  # without a socket of its own it listens on every interface
            server = socket.create_server((self.address, port))
            port, listen = server.getsockname()[1], server.detach()
        return dist.TCPStore(  # type: ignore[attr-defined]
            self.address,
            port,
            self.world_size,
            is_server,
            timeout=self.timeout,
            wait_for_workers=False,
            master_listen_fd=listen,
        )

    @property
    def port(self) -> int:
        """Where engines meet."""
        return int(self._server.port)

    @property
    def device(self) -> torch.device:
        """Where tensors must be."""
        return torch.device(_DEVICES[self.backend])

    def join(self) -> None:
        """Meet the engines; they must be told at the same time."""
        self._thread = threading.current_thread()
        store = PrefixStore(self.name, self._client)
        store = PrefixStore(f"{_DEVICES[self.backend]}/", PrefixStore(f"{self.name}/", store))
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.timeout
            self._backend = dist.ProcessGroupNCCL(store, 0, self.world_size, options)
        else:
            self._backend = dist.ProcessGroupGloo(store, 0, self.world_size, self.timeout)

    def limit(self, timeout: float) -> None:
        """Give broadcasts another time limit than joining had."""
        self.timeout = datetime.timedelta(seconds=timeout)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send a tensor to all; return when it is sent, or fail by the time limit."""
        self._thread = threading.current_thread()
        # Gloo's end waits for what is under way and lets no other thread run meanwhile. So it must not come before the
        # broadcast's end, whoever leaves in between: this name keeps the backend until then.
        backend = self._backend
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, self.timeout
        backend.broadcast([tensor], options).wait()
        if self.backend == "nccl":
            torch.cuda.synchronize()

    def leave(self) -> None:
        """Give up the group, and end the wait for those that have not joined.

        A broadcast that waits on NCCL is ended; on gloo it ends when the engines leave.
        """
        if self.backend == "nccl" and self._backend is not None:
            self._backend.abort()
        self._backend = self._server = None

    def settle(self, seconds: float) -> None:
        """Wait for the end of what was under way: a thread in torch's code is nothing for the end of a process."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)


def local_address(url: str) -> str:
    """This machine's address on the way to an engine.

    Raises:
        WeightSyncError: The engine is not there.
    """
    parts = urllib.parse.urlsplit(url)
    try:
        with socket.create_connection((parts.hostname, parts.port or 80), timeout=10.0) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise WeightSyncError(f"{url} is not there: {error}", url=url) from error


def while_engines(update: Engines, ask: Callable[[str], Any], act: Callable[[], None], timeout: float) -> None:
    """Ask all engines for something that needs an act of this process at the same time.

    The act runs in a thread of its own: where an engine refuses, it would wait for that engine in vain. The thread
    ends by the group's time limit at the latest.

    Args:
        update: The engines.
        ask: Called for every engine at once, each in a thread.
        act: What this process does meanwhile.
        timeout: Time limit in seconds.

    Raises:
        WeightSyncError: An engine refused or died, or the act failed or took too long.
    """
    calls = [_Call(lambda url=url: ask(url)) for url in update.urls]  # type: ignore[misc]
    ours = _Call(act)
    _wait((*calls, ours), time.monotonic() + timeout)
    failed = [call.error for call in calls if call.error is not None]
    # An engine's own words say more than a connection that broke; the first that refused caused what came after it.
    for error in sorted(failed, key=lambda each: "Connection closed" in str(each)):
        if isinstance(error, WeightSyncError):
            error.silent = ()  # all engines wait for one another: who keeps them waiting cannot be told
        raise error
    if ours.error is not None:
        raise WeightSyncError(f"weight version {update.version}: the engines cannot be reached: {ours.error}")
    late = [url for url, call in zip(update.urls, calls, strict=True) if not call.done]
    if late or not ours.done:
        url = late[0] if late else None
        raise WeightSyncError(
            f"weight version {update.version}: {url or 'the broadcast'} took over {timeout:g} s", url=url
        )


class _Call:
    """A call in a thread that nobody waits for at the end of the process."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self._function = function
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self.error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(POLL_SECONDS)


def _wait(calls: tuple[_Call, ...], deadline: float) -> None:
    """Until all have ended, one has failed, or it is too late."""
    while time.monotonic() < deadline and not any(call.error for call in calls):
        running = [call for call in calls if not call.done]
        if not running:
            return
        running[0].join()
