"""New weights bucket by bucket: through shared memory, CUDA IPC, or a broadcast by NCCL or gloo.

SGLang is not imported: a bucket is copied into one flat buffer, and a request says what lies in it (SGLang's
``flattened_bucket``).
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import datetime
import io
import socket
import threading
import types
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.distributed_c10d import PrefixStore

from slime_core.errors import ConfigError
from slime_core.interfaces import NamedTensors
from slime_rollout.engine import WeightSyncError
from slime_rollout.engine.transports import AUTO
from slime_rollout.http import HttpError, call
from slime_rollout.threads import start_call
from slime_rollout.weights.channel import GIVE_UP_SECONDS, LAST_WORD_SECONDS, EngineChannel
from slime_rollout.weights.checkpoint import dtype_name

# Tensors start at multiples of this in the buffer, so that every dtype is aligned.
ALIGNMENT_BYTES = 64
PICKLE_PROTOCOL = 4
# A bucket crosses shared memory in pieces of so many bytes, or as many as its largest tensor has. So most of it goes
# through memory that is there already: making memory takes many times as long as copying into it.
PIECE_BYTES = 32 << 20
SHARED_MEMORY = Path("/dev/shm")
JOIN_TIMEOUT_SECONDS = 60.0
_THREAD = "weight-sync"
_DEVICES = {"nccl": "cuda", "gloo": "cpu"}


class TensorWeightChannel(EngineChannel):
    """Sends tensors to engines on this machine through shared memory (SGLang's ``update_weights_from_tensor``).

    Every rank of an engine reads the same full tensors and takes its part. With ``colocate`` tensors stay on their GPU,
    and engines, which must see the same GPUs, get the address there (CUDA IPC). Not run on CUDA yet.
    """

    def _prepare(self) -> None:
        self._buffer: torch.Tensor | None = None

    def close(self) -> None:
        """Free the buffer, which is as large as the largest piece; the next update allocates another.

        On the CPU :meth:`end` does so, too: when a process is killed, torch leaves its file in ``/dev/shm`` until the
        last engine that ever read it has ended, and engines may outlive many trainers.
        """
        buffer, self._buffer = self._buffer, None
        if buffer is None or buffer.is_cuda:
            return
        storage = buffer.untyped_storage()
        _, name, _ = storage._share_filename_cpu_()
        # Torch removes the file with its last reference, and ends the process if it is gone by then. References that
        # went to an engine which has died are never given up, and the traceback of a failed update may keep the
        # tensor: so the last reference never goes, and the file is removed here.
        storage._shared_incref()  # type: ignore[no-untyped-call]
        del buffer, storage
        with contextlib.suppress(FileNotFoundError):
            (SHARED_MEMORY / name.decode().removeprefix("/")).unlink()

    def _send(self, bucket: NamedTensors) -> int:
        whole = sum(tensor.nbytes for _, tensor in bucket)
        limit = whole if self._stays(bucket[0][1]) else max(PIECE_BYTES, *(tensor.nbytes for _, tensor in bucket))
        for piece in in_pieces(bucket, limit):
            self._load(*self._copied(piece, min(limit, whole)))
        return whole

    def _load(self, flat: torch.Tensor, metadata: list[types.SimpleNamespace]) -> None:
        # A handle is one reference, which its reader releases: each rank of each engine needs its own.
        handles = {url: [_handle(flat, metadata) for _ in range(self.spec.tp_size)] for url in self.spec.engine_urls}

        def load(url: str) -> None:
            payload = {"serialized_named_tensors": handles[url], "load_format": "flattened_bucket"}
            self._post(url, "/update_weights_from_tensor", payload | {"flush_cache": False})

        self._on_all(load)

    def _stays(self, tensor: torch.Tensor) -> bool:
        return self.spec.colocate and tensor.is_cuda

    def _end(self) -> dict[str, str]:
        checksums = super()._end()
        if self._buffer is not None and not self._buffer.is_cuda:
            self.close()
        return checksums

    def _copied(
        self, piece: NamedTensors, least: int = ALIGNMENT_BYTES
    ) -> tuple[torch.Tensor, list[types.SimpleNamespace]]:
        """Some tensors in a buffer of ``least`` bytes or more, which is reused for the next, and what lies where."""
        metadata, total = [], 0
        for name, tensor in piece:
            place = {"start_idx": total, "end_idx": total + tensor.nbytes, "numel": tensor.nbytes}
            metadata.append(types.SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **place))
            total += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        buffer = self._buffer_beside(piece[0][1], max(total, least, ALIGNMENT_BYTES))
        for (_, tensor), entry in zip(piece, metadata, strict=True):
            copy_into(buffer, tensor, entry.start_idx)
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)
        return buffer, metadata

    def _buffer_beside(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        device = tensor.device if self._stays(tensor) else torch.device("cpu")
        if self._buffer is None or self._buffer.numel() < size or self._buffer.device != device:
            self.close()
            if device.type == "cpu":  # made as shared memory; making it so later would copy it
                storage = torch.UntypedStorage._new_using_filename_cpu(size)
                self._buffer = torch.empty(0, dtype=torch.uint8).set_(storage)
            else:
                self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        return self._buffer


def in_pieces(bucket: NamedTensors, limit: int) -> Iterator[NamedTensors]:
    """A bucket in parts of at most ``limit`` bytes, aligned, or of one larger tensor."""
    piece: list[tuple[str, torch.Tensor]] = []
    size = 0
    for item in bucket:
        nbytes = -(-item[1].nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if piece and size + nbytes > limit:
            yield piece
            piece, size = [], 0
        piece.append(item)
        size += nbytes
    yield piece


def _handle(flat: torch.Tensor, metadata: list[types.SimpleNamespace]) -> str:
    """Where the buffer is and what lies in it, as SGLang reads it."""
    stream = io.BytesIO()
    with _file_system_sharing():
        ForkingPickler(stream, PICKLE_PROTOCOL).dump({"flattened_tensor": flat, "metadata": metadata})
    return base64.b64encode(stream.getvalue()).decode()


@contextlib.contextmanager
def _file_system_sharing() -> Iterator[None]:
    """Share CPU tensors by name while sending; then restore the process's setting.

    The other strategy passes file descriptors over a socket, which SGLang's scheduler cannot read. Torch keeps a helper
    process for the names, ``torch_shm_manager``. It is a child of this process and ends after it, but holds its
    standard error open until then.
    """
    before = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]


class DistributedWeightChannel(EngineChannel):
    """Broadcasts tensors to engines (SGLang's ``update_weights_from_distributed``), each bucket as one flat tensor.

    The group is made by the first :meth:`begin` and kept until :meth:`close`. After an error it is dropped, and the
    next :meth:`begin` makes another. The backend is the transport, gloo where that is left open. The backend ``nccl``
    was not run yet: it needs GPUs.
    """

    def _prepare(self) -> None:
        chosen = self._sync.update_weight_transport
        self.backend = "gloo" if chosen == AUTO else chosen
        if self.backend not in _DEVICES:
            raise ConfigError(f"backend {self.backend} is unknown; allowed: {', '.join(_DEVICES)}")
        if self.backend == "nccl" and not torch.cuda.is_available():
            raise ConfigError("--update-weight-transport nccl needs CUDA, which this process does not have; use gloo")
        self._group: BroadcastGroup | None = None
        self._buffer: torch.Tensor | None = None

    def close(self) -> None:
        """Leave the group, and have the engines leave it. An engine that is gone does not have to.

        Engines that leave close their connections, which ends a broadcast that waits for them, here and there.
        """
        group, self._group = self._group, None
        self._buffer = None  # a broadcast that has not ended yet may still read it
        if group is None:
            return

        def destroy(url: str) -> None:
            with contextlib.suppress(HttpError):
                payload = {"group_name": group.name}
                call("POST", f"{url}/destroy_weights_update_group", payload, key=self.spec.key, timeout=GIVE_UP_SECONDS)

        group.leave()
        self._on_all(destroy)
        group.settle(GIVE_UP_SECONDS)

    def _begin(self) -> None:
        super()._begin()
        if self._group is None:
            self._join()

    def _join(self) -> None:
        urls, tp_size = self.spec.engine_urls, self.spec.tp_size
        address, world_size = local_address(urls[0]), 1 + tp_size * len(urls)
        limit = min(JOIN_TIMEOUT_SECONDS, self._sync.update_request_timeout)
        # Should joining fail, engines that did join have to leave it.
        self._group = group = BroadcastGroup(f"slime-{uuid.uuid4().hex}", address, world_size, self.backend, limit)

        def invite(url: str) -> None:
            payload = {
                "master_address": address,
                "master_port": group.port,
                "rank_offset": 1 + urls.index(url) * tp_size,
                "world_size": world_size,
                "group_name": group.name,
                "backend": self.backend,
            }
            self._post(url, "/init_weights_update_group", payload)

        self._while_engines(invite, group.join, limit)
        group.stop_listening()
        group.timeout = datetime.timedelta(seconds=self._sync.update_request_timeout)

    def _send(self, bucket: NamedTensors) -> int:
        group = self._group
        if group is None:
            raise self._error("the group is gone; call begin(update) again")
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
        self._while_engines(
            lambda url: self._post(url, "/update_weights_from_distributed", payload),
            lambda: group.broadcast(flat),
            self._sync.update_request_timeout,
        )
        return flat.nbytes

    def _flat(self, ordered: NamedTensors, device: torch.device) -> torch.Tensor:
        total = sum(tensor.nbytes for _, tensor in ordered)
        if self._buffer is None or self._buffer.numel() < total:
            self._buffer = torch.empty(total, dtype=torch.uint8, device=device)
        start = 0
        for _, tensor in ordered:
            copy_into(self._buffer, tensor, start)
            start += tensor.nbytes
        return self._buffer[:total]

    def _while_engines(self, ask: Callable[[str], Any], act: Callable[[], None], timeout: float) -> None:
        """Send all engines a request that needs an action of this process at the same time.

        Both run in daemon threads: if an engine refuses, the action waits for it in vain, until the group's time limit.
        """
        asked = {url: start_call(_THREAD, ask, url) for url in self.spec.engine_urls}
        ours = start_call(_THREAD, act)
        done, pending = wait([*asked.values(), ours], timeout, FIRST_EXCEPTION)
        if ours in done and ours.exception() is not None:  # which engine it was, its own connection says
            done |= wait(asked.values(), LAST_WORD_SECONDS, FIRST_EXCEPTION).done
        errors = [error for future in asked.values() if future in done and (error := future.exception()) is not None]
        # An engine's own message says more than a broken connection, which another engine's refusal may have caused.
        for error in sorted(errors, key=lambda each: "Connection closed" in str(each)):
            if isinstance(error, WeightSyncError):
                error.silent = ()  # all engines wait for each other: which of them is the cause is unknown
            raise error
        if ours in done and (error := ours.exception()) is not None:
            raise self._error(f"the engines cannot be reached: {error}")
        if pending:
            late = next((url for url, future in asked.items() if future in pending), None)
            raise self._error(f"{late or 'the broadcast'} took over {timeout:g} s", late)


def largest_elements_first(bucket: NamedTensors) -> list[tuple[str, torch.Tensor]]:
    """The order in which tensors lie end to end, each at a multiple of its element size."""
    return sorted(bucket, key=lambda item: -item[1].element_size())


class BroadcastGroup:
    """Rank 0 of a process group with all engines' ranks, which only broadcasts.

    It is made of a store and a backend of its own, and is not registered with torch, so the process's default group and
    Megatron's groups stay as they are. Engines join by ``init_weights_update_group``, where SGLang makes its end with
    torch's own helper; the store's prefixes here are the ones that this helper uses (torch 2.13).

    Engines, to which ``name`` must be new, reach this machine by ``address``; ``world_size`` counts this rank, too.
    """

    def __init__(self, name: str, address: str, world_size: int, backend: str, timeout: float) -> None:
        self.name, self.address, self.world_size, self.backend = name, address, world_size, backend
        self.device = torch.device(_DEVICES[backend])
        self.timeout = datetime.timedelta(seconds=timeout)
        # The store's server is a separate object: dropping it wakes whoever waits for others, here and in engines.
        # Port 0 is a free one.
        self._server: Any = self._store(0, is_server=True)
        self.port = int(self._server.port)
        self._client: Any = self._store(self.port, is_server=False)
        self._backend: Any = None
        self._thread: threading.Thread | None = None

    def _store(self, port: int, *, is_server: bool) -> Any:
        listen: int | None = None
        if is_server:  # without a socket of its own it listens on every interface
            family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
            server = socket.create_server((self.address, port), family=family)
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

    def stop_listening(self) -> None:
        """Close the store, which anybody can read and write, once all have met. NCCL goes on using it."""
        if self.backend == "gloo":
            self._server = self._client = None

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send a tensor to all; return when it is sent, or fail by the time limit."""
        self._thread = threading.current_thread()
        # Destroying a gloo backend waits for its pending work without releasing the GIL. So it must not be destroyed
        # before the broadcast has ended, even if another thread calls `leave`: this variable keeps it alive until then.
        backend = self._backend
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, self.timeout
        try:
            backend.broadcast([tensor], options).wait()
        finally:
            del backend  # an error keeps this frame, and so would keep the connections on which other engines wait
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


def copy_into(buffer: torch.Tensor, tensor: torch.Tensor, start: int) -> None:
    """Copy a tensor into a flat buffer of uint8, from any device and layout, at a multiple of its element size."""
    place = buffer[start : start + tensor.nbytes]
    if tensor.is_cpu and buffer.is_cpu and tensor.is_contiguous():
        # By this thread alone: an engine on the same machine needs the other cores, and torch's threads would wait for
        # each other at every tensor. Not through NumPy: what it has seen cannot be emptied when trainers sleep.
        ctypes.memmove(place.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    else:
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
