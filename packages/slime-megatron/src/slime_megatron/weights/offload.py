"""Where weights and optimizer state wait while a trainer sleeps. Importing this does not import Megatron."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from slime_megatron.errors import TrainingError
from slime_megatron.ranks.device import Device

ALIGNMENT_BYTES = 64


class OffloadStore:
    """Holds the content of tensors that are emptied meanwhile, and all views of them with them.

    On a GPU's machine that is host memory, which is kept from one sleep to the next. (Not run on CUDA.) On a CPU host
    memory is what the tensors are in already, so their content goes to a file without a name in ``directory``: its
    pages are the kernel's, which may drop them from memory, and nothing is left of it when the process ends.
    """

    def __init__(self, device: Device, directory: Path) -> None:
        self._is_cpu = device.is_cpu
        self._directory = directory
        self._file: int | None = None
        self._host = torch.empty(0, dtype=torch.uint8)
        self._places: list[tuple[torch.UntypedStorage, int, int]] = []

    @property
    def nbytes(self) -> int:
        """Bytes that wait here now."""
        return sum(size for _, _, size in self._places)

    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take the tensors' content and empty them. A storage that cannot be emptied stays where it is.

        Raises:
            TrainingError: There is no room for it on the disk. Nothing was emptied.
        """
        places, total = [], 0
        for storage in unique_storages(tensors):
            if storage.resizable():
                places.append((storage, total, storage.nbytes()))
                total += -(-storage.nbytes() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        with self._space(total) as space:
            for storage, start, size in places:
                space[start : start + size].copy_(bytes_of(storage))
                storage.resize_(0)
        self._places = places
        if self._is_cpu:
            _give_to_kernel()

    def give_back(self) -> None:
        """Undo :meth:`take`."""
        places, self._places = self._places, []
        if not places:
            return
        _, start, size = places[-1]
        with self._space(start + size) as space:
            for storage, start, size in places:
                storage.resize_(size)
                bytes_of(storage).copy_(space[start : start + size])

    @contextlib.contextmanager
    def _space(self, size: int) -> Iterator[torch.Tensor]:
        """At least ``size`` bytes to write or to read, which are in this process's memory for as long as the block."""
        if not self._is_cpu or not size:
            if len(self._host) < size:
                self._host = torch.empty(size, dtype=torch.uint8)
            yield self._host
            return
        with mmap.mmap(self._reserved(size), size) as mapped:
            space = torch.frombuffer(mapped, dtype=torch.uint8)
            yield space
            del space

    def _reserved(self, size: int) -> int:
        """The file, with room on the disk: to write to a mapped file on a full one would end the process."""
        if self._file is None:
            place = self._directory if self._directory.is_dir() else Path(tempfile.gettempdir())
            self._file, path = tempfile.mkstemp(prefix="offload-", dir=place)
            Path(path).unlink()
        try:
            os.posix_fallocate(self._file, 0, size)
        except OSError as error:
            raise TrainingError(
                f"no room in {self._directory} for the {size / 2**30:.1f} GiB that a trainer rank gives back while it "
                f"sleeps ({error.strerror}); make room there, or give --no-offload-train"
            ) from error
        return self._file


def unique_storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages of the tensors, each once, without empty ones."""
    storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [storage for storage in storages.values() if storage.nbytes()]


def resident_bytes(device: Device) -> int:
    """Bytes of this process: on CUDA what its tensors take (not run), on a CPU its memory without mapped files."""
    if not device.is_cpu:
        return int(torch.cuda.memory_allocated())
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def _give_to_kernel() -> None:
    """Have the C library keep nothing of what was freed: of up to 32 MB it else does."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as bytes, in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
