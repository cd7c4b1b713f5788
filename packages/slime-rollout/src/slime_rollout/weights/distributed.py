"""New weights by a broadcast to all engines: NCCL between GPUs, gloo between CPUs, on one machine or many."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import socket
import threading
import urllib.parse
import uuid
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from slime_core.errors import ConfigError
from slime_core.interfaces import NamedTensors
from slime_rollout.engine.errors import WeightSyncError
from slime_rollout.http import HttpError, call
from slime_rollout.weights.channel import EngineChannel, copy_into
from slime_rollout.weights.checkpoint import dtype_name
from slime_rollout.weights.engines import GIVE_UP_SECONDS, EngineUpdate

JOIN_TIMEOUT_SECONDS = 60.0
_DEVICES = {"nccl": "cuda", "gloo": "cpu"}


@dataclasses.dataclass
class DistributedWeightChannel(EngineChannel):
    """Broadcasts tensors to engines (SGLang's ``update_weights_from_distributed``), each bucket as one flat tensor.

    The group is made by the first :meth:`begin` and kept until :meth:`close`. After an error it is dropped, and the
    next :meth:`begin` makes another. Verified: every engine responds that it has received and loaded every bucket, and
    confirms the version; with ``check`` also checksums.

    Attributes:
        backend: ``gloo``, or ``nccl``, which was not run yet: it needs GPUs.
        master_address: This machine, as engines reach it; found out if ``None``.
    """

    backend: str = "gloo"
    master_address: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend not in _DEVICES:
            raise ConfigError(f"backend {self.backend} is unknown; allowed: {', '.join(_DEVICES)}")
        if self.backend == "nccl" and not torch.cuda.is_available():
            raise ConfigError("--update-weight-transport nccl needs CUDA, which this process does not have; use gloo")

    def _forget(self) -> None:
        super()._forget()
        self._group: BroadcastGroup | None = None
        self._buffer: torch.Tensor | None = None

    def close(self) -> None:
        """Leave the group, and have the engines leave it. An engine that is gone does not have to."""
        group, self._group, self._buffer = self._group, None, None
        if group is None:
            return
        group.leave()
        EngineUpdate(self.engine_urls, -1).on_all(lambda url: _destroy(url, group.name))
        group.settle(GIVE_UP_SECONDS)

    def _begin(self, update: EngineUpdate) -> None:
        self._pause(update)
        update.open_update()
        if self._group is None:
            self._group = self._joined(update)

    def _joined(self, update: EngineUpdate) -> BroadcastGroup:
        address = self.master_address or local_address(update.urls[0])
        limit = min(JOIN_TIMEOUT_SECONDS, self.timeout)
        world_size = 1 + self.tp_size * len(update.urls)
        group = BroadcastGroup(f"slime-{uuid.uuid4().hex}", address, world_size, self.backend, limit)
        first_ranks = {url: 1 + place * self.tp_size for place, url in enumerate(update.urls)}

        def invite(url: str) -> None:
            payload = {
                "master_address": address,
                "master_port": group.port,
                "rank_offset": first_ranks[url],
                "world_size": world_size,
                "group_name": group.name,
                "backend": self.backend,
            }
            update.post(url, "/init_weights_update_group", payload)

        try:
            while_engines(update, invite, group.join, limit)
        except WeightSyncError:
            self._group = group  # engines that did join have to leave it
            raise
        group.timeout = datetime.timedelta(seconds=self.timeout)
        return group

    def _send(self, update: EngineUpdate, bucket: NamedTensors) -> None:
        group = self._group
        if group is None:
            raise WeightSyncError("the group is gone; call begin(update) again")
        ordered = largest_elements_first(bucket)
        flat = self._flat(ordered, group.device)
        payload = {
            "names": [name for name, _ in ordered],
            "dtypes": [dtype_name(tensor.dtype) for _, tensor in ordered],
            "shapes": [list(tensor.shape) for _, tensor in ordered],
            "group_name": group.name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        while_engines(
            update,
            lambda url: update.post(url, "/update_weights_from_distributed", payload),
            lambda: group.broadcast(flat),
            self.timeout,
        )

    def _flat(self, ordered: NamedTensors, device: torch.device) -> torch.Tensor:
        total = sum(tensor.nbytes for _, tensor in ordered)
        if self._buffer is None or self._buffer.numel() < total:
            self._buffer = torch.empty(total, dtype=torch.uint8, device=device)
        start = 0
        for _, tensor in ordered:
            copy_into(self._buffer, tensor, start)
            start += tensor.nbytes
        return self._buffer[:total]

    def _end(self, update: EngineUpdate) -> dict[str, str]:
        update.close_update()
        return {}

    def _give_up(self) -> None:
        """Engines that leave close their connections, which ends a broadcast that waits for them, here and there."""
        self._buffer = None  # a broadcast that has not ended yet may still read it
        self.close()


def _destroy(url: str, name: str) -> None:
    with contextlib.suppress(HttpError):
        call("POST", f"{url}/destroy_weights_update_group", {"group_name": name}, timeout=GIVE_UP_SECONDS)


def largest_elements_first(bucket: NamedTensors) -> list[tuple[str, torch.Tensor]]:
    """The order in which tensors lie end to end, each at a multiple of its element size."""
    return sorted(bucket, key=lambda item: -item[1].element_size())


class BroadcastGroup:
    """Rank 0 of a process group with all engines' ranks, which only broadcasts.

    It is made of a store and a backend of its own, and is not registered with torch, so the process's default group and
    Megatron's groups stay as they are. Engines join by ``init_weights_update_group``, where SGLang makes its end with
    torch's own helper; the store's prefixes here are the ones that this helper uses (torch 2.13).

    Args:
        name: The group's name, which must be new to the engines.
        address: This machine, as engines reach it.
        world_size: Ranks of all engines, and this one.
        backend: ``nccl`` or ``gloo``.
        timeout: Time limit in seconds, of joining and of a broadcast.
    """

    def __init__(self, name: str, address: str, world_size: int, backend: str, timeout: float) -> None:
        self.name, self.address, self.world_size, self.backend = name, address, world_size, backend
        self.device = torch.device(_DEVICES[backend])
        self.timeout = datetime.timedelta(seconds=timeout)
        # The store's server is a separate object: dropping it wakes whoever waits for others, here and in engines.
        # Port 0: it takes a free one itself.
        self._server: Any = self._store(0, is_server=True)
        self.port = int(self._server.port)
        self._client: Any = self._store(self.port, is_server=False)
        self._backend: Any = None
        self._thread: threading.Thread | None = None

    def _store(self, port: int, *, is_server: bool) -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]
            self.address, port, self.world_size, is_server, timeout=self.timeout, wait_for_workers=False
        )

    def join(self) -> None:
        """Meet the engines, which must be invited at the same time."""
        self._thread = threading.current_thread()
        store = PrefixStore(self.name, self._client)
        store = PrefixStore(f"{_DEVICES[self.backend]}/", PrefixStore(f"{self.name}/", store))
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.timeout
            self._backend = dist.ProcessGroupNCCL(store, 0, self.world_size, options)
        else:
            self._backend = dist.ProcessGroupGloo(store, 0, self.world_size, self.timeout)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send a tensor to all; return when it is sent, or fail by the time limit."""
        self._thread = threading.current_thread()
        # Destroying a gloo backend waits for its pending work without releasing the GIL. So it must not be destroyed
        # before the broadcast has ended, even if another thread calls `leave`: this variable keeps it alive until then.
        backend = self._backend
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, self.timeout
        backend.broadcast([tensor], options).wait()
        if self.backend == "nccl":
            torch.cuda.synchronize()

    def leave(self) -> None:
        """Drop the group, and end the wait for engines that have not joined.

        A pending broadcast is aborted on NCCL; on gloo it ends when the engines leave.
        """
        if self.backend == "nccl" and self._backend is not None:
            self._backend.abort()
        self._backend = self._server = None

    def settle(self, seconds: float) -> None:
        """Wait for the end of a pending call: a process should not end with a thread in torch's code."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)


def local_address(url: str) -> str:
    """This machine's address on the way to an engine."""
    parts = urllib.parse.urlsplit(url)
    try:
        with socket.create_connection((parts.hostname, parts.port or 80), timeout=10.0) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise WeightSyncError(f"{url} is not there: {error}", url=url) from error


def while_engines(update: EngineUpdate, ask: Callable[[str], Any], act: Callable[[], None], timeout: float) -> None:
    """Send all engines a request that needs an action of this process at the same time.

    Both run in daemon threads: if an engine refuses, the action waits for it in vain, until the group's time limit.

    Args:
        update: The engines.
        ask: The request; called for every engine in parallel.
        act: What this process does meanwhile.
        timeout: Time limit in seconds.

    Raises:
        WeightSyncError: An engine refused or died, or the action failed or took too long.
    """
    asked = {url: _in_thread(lambda url=url: ask(url)) for url in update.urls}  # type: ignore[misc]
    ours = _in_thread(act)
    done, pending = wait([*asked.values(), ours], timeout, FIRST_EXCEPTION)
    errors = [error for future in asked.values() if future in done and (error := future.exception()) is not None]
    # An engine's own message says more than a broken connection, which another engine's refusal may have caused.
    for error in sorted(errors, key=lambda each: "Connection closed" in str(each)):
        if isinstance(error, WeightSyncError):
            error.silent = ()  # all engines wait for each other: which of them is the cause is unknown
        raise error
    if ours in done and (error := ours.exception()) is not None:
        raise WeightSyncError(f"weight version {update.version}: the engines cannot be reached: {error}")
    if pending:
        late = next((url for url, future in asked.items() if future in pending), None)
        raise WeightSyncError(
            f"weight version {update.version}: {late or 'the broadcast'} took over {timeout:g} s", url=late
        )


def _in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Call a function in a thread that does not keep the process alive, as an executor's would."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weight-sync", daemon=True).start()
    return future
