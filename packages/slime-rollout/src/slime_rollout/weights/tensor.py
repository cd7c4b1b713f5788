"""New weights for engines on the same machine: through shared memory, or CUDA IPC on shared GPUs.

SGLang is not imported: a bucket is copied into one flat buffer, and a request tells the engines where it is and what
lies where in it (SGLang's ``update_weights_from_tensor`` with ``flattened_bucket``).
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import types
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
import torch.multiprocessing

from slime_core.interfaces import NamedTensors
from slime_rollout.weights.channel import EngineChannel, copy_into
from slime_rollout.weights.engines import EngineUpdate

# Tensors start at multiples of this in the buffer, so that every dtype is aligned.
ALIGNMENT_BYTES = 64
PICKLE_PROTOCOL = 4
SHARED_MEMORY = Path("/dev/shm")


@dataclasses.dataclass
class TensorWeightChannel(EngineChannel):
    """Sends tensors to engines on this machine through shared memory (SGLang's ``update_weights_from_tensor``).

    Every rank of an engine reads the same full tensors and takes its part. Verified: every engine responds that it has
    loaded every bucket, and confirms the version; with ``check`` also checksums.

    Attributes:
        cuda_ipc: Leave tensors on their GPU, and give engines the address there. They must see the same GPUs, as with
            ``--colocate``. Not run on CUDA yet.
    """

    cuda_ipc: bool = False

    def _forget(self) -> None:
        super()._forget()
        self._buffer: torch.Tensor | None = None

    def close(self) -> None:
        """Free the buffer, which is as large as the largest bucket; the next update allocates another.

        On the CPU :meth:`end` does so, too: when a process is killed, torch leaves its file in ``/dev/shm`` until the
        last engine that ever read it has ended, and engines may outlive many trainers. So the file exists only during
        an update.
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

    def _begin(self, update: EngineUpdate) -> None:
        self._pause(update)
        update.open_update()

    def _send(self, update: EngineUpdate, bucket: NamedTensors) -> None:
        flat, metadata = self._copied(bucket)
        # A handle is one reference, which its reader releases: each rank of each engine needs its own.
        handles = {url: [_handle(flat, metadata) for _ in range(self.tp_size)] for url in update.urls}
        update.on_all(lambda url: self._load(update, url, handles[url]))

    def _load(self, update: EngineUpdate, url: str, handles: list[str]) -> None:
        payload = {"serialized_named_tensors": handles, "load_format": "flattened_bucket", "flush_cache": False}
        update.post(url, "/update_weights_from_tensor", payload)

    def _end(self, update: EngineUpdate) -> dict[str, str]:
        update.close_update()
        if self._buffer is not None and not self._buffer.is_cuda:
            self.close()
        return {}

    def _give_up(self) -> None:
        self.close()

    def _copied(self, bucket: NamedTensors) -> tuple[torch.Tensor, list[types.SimpleNamespace]]:
        """The bucket in one buffer, which is reused for the next one, and what lies where."""
        starts, total = [], 0
        for _, tensor in bucket:
            starts.append(total)
            total += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        buffer = self._buffer_on(self._device(bucket), max(total, ALIGNMENT_BYTES))
        metadata = []
        for (name, tensor), start in zip(bucket, starts, strict=True):
            copy_into(buffer, tensor, start)
            size = tensor.nbytes
            place = {"start_idx": start, "end_idx": start + size, "numel": size}
            metadata.append(types.SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **place))
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)
        return buffer, metadata

    def _device(self, bucket: NamedTensors) -> torch.device:
        device = bucket[0][1].device
        return device if self.cuda_ipc and device.type == "cuda" else torch.device("cpu")

    def _buffer_on(self, device: torch.device, size: int) -> torch.Tensor:
        if self._buffer is None or self._buffer.numel() < size or self._buffer.device != device:
            self.close()
            with _file_system_sharing():
                buffer = torch.empty(size, dtype=torch.uint8, device=device)
                self._buffer = buffer if buffer.is_cuda else buffer.share_memory_()  # type: ignore[no-untyped-call]
        return self._buffer


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
