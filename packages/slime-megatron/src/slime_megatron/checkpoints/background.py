"""Writing a checkpoint while the run goes on: the thread, and the tensors that it reads, which are to change meanwhile.

Importing this does not import Megatron.
"""

from __future__ import annotations

import contextlib
import datetime
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime_megatron.errors import TrainerCheckpointError
from slime_megatron.ranks.exchange import gather_values
from slime_megatron.weights.offload import bytes_of

_CGROUP = Path("/sys/fs/cgroup")
MARGIN_BYTES = 2**30
"""Host memory that is left free: it is not only a trainer's."""


class LiveTensors:
    """Host tensors that one thread reads, each once, while another one may want to change them.

    They are read in place until :meth:`release` is called, which has what is left of them copied. So nothing is copied
    of what is written before the next optimizer step. ``neighbours`` processes have such tensors on this machine.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], neighbours: int = 1) -> None:
        found = list(tensors)
        self._storages = {_key(tensor): tensor.untyped_storage() for tensor in found}
        self._left = Counter(map(_key, found))
        self._copies: dict[int, torch.Tensor] = {}
        self._is_released = False
        self._neighbours = neighbours
        self._reading = threading.Lock()
        # Whoever reads goes through here first: it takes the other lock again at once, and would leave no gap.
        self._next = threading.Lock()
        self._ended = threading.Event()

    @contextlib.contextmanager
    def reading(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """The tensor as it was at first, for as long as the block, and never again."""
        with self._next:
            self._reading.acquire()
        try:
            yield self._as_it_was(tensor)
            self._left[key := _key(tensor)] -= 1
            if not self._left[key]:
                del self._storages[key]
                self._copies.pop(key, None)
        finally:
            self._reading.release()

    def _as_it_was(self, tensor: torch.Tensor) -> torch.Tensor:
        key = _key(tensor)
        if key not in self._storages:
            raise RuntimeError("a tensor was to be written to a checkpoint a second time, and may have changed")
        if not self._is_released:
            return tensor
        own = torch.empty(0, dtype=tensor.dtype)
        return own.set_(self._copies[key].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def release(self) -> None:
        """Let the tensors change: what is left of them is copied, or waited for where memory has no room for it."""
        if self._ended.is_set() or self._is_released:
            return
        with self._next, self._reading:
            size = sum(storage.nbytes() for storage in self._storages.values())
            has_space = size <= spare_memory() // self._neighbours
            if has_space:
                self._copies = {key: bytes_of(storage).clone() for key, storage in self._storages.items()}
                self._is_released = True
        if not has_space:
            self._ended.wait()

    def end(self) -> None:
        """Nothing is read any more, whether all of it was or not."""
        self._storages, self._copies = {}, {}
        self._ended.set()


def _key(tensor: torch.Tensor) -> int:
    """The storage of a tensor; its address changes while a trainer sleeps."""
    return int(tensor.untyped_storage()._cdata)


def spare_memory() -> int:
    """Bytes of the host's memory that may be taken: of the machine's, or of its container's if that is less."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    left = next(1024 * int(words[1]) for words in lines if words[0] == "MemAvailable:")
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        most = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        counts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        left = min(left, most - used + int(counts["inactive_file"]))
    return max(left - MARGIN_BYTES, 0)


class Background:
    """Writes one checkpoint at a time in a thread, through a process group that nothing else uses.

    All ranks make one together, and call its methods in the same order.
    """

    def __init__(self, timeout_minutes: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(minutes=timeout_minutes))
        self._neighbours = gather_values(socket.gethostname()).count(socket.gethostname())
        self._thread: threading.Thread | None = None
        self._live = LiveTensors([])
        self._live.end()  # nothing is written yet
        self._problem: str | None = None

    def has_space(self, tensors: Sequence[torch.Tensor], directory: Path) -> bool:
        """Whether host memory takes a copy of the device's tensors, and the disk all of them; the same on all ranks.

        Where the disk is nearly full, that is better known at once.
        """
        copied = sum(tensor.nbytes for tensor in tensors if not tensor.is_cpu)
        written = torch.tensor(sum(tensor.nbytes for tensor in tensors), device=torch.cuda.current_device())
        dist.all_reduce(written)
        memory, disk = spare_memory() // self._neighbours, shutil.disk_usage(directory).free
        return _everywhere(copied <= memory and int(written) <= disk)

    def start(self, write: Callable[[LiveTensors, Any], None], tensors: Iterable[torch.Tensor]) -> None:
        """Call ``write`` in a thread, with host ``tensors`` and the process group; nothing may be under way."""
        assert self._thread is None
        live = self._live = LiveTensors(tensors, self._neighbours)

        def run() -> None:
            try:
                write(live, self._group)
            except Exception as error:
                self._problem = str(error) or type(error).__name__
            finally:
                live.end()

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Call it before weights or optimizer state change: see :meth:`LiveTensors.release`. A rank does so alone."""
        self._live.release()

    def finished(self, *, wait: bool) -> bool:
        """Whether every rank is done with what was started last; with ``wait``, once they are. The same on all ranks.

        Raises:
            TrainerCheckpointError: It failed, on any rank; raised once.
        """
        if self._thread is None:
            return True
        if wait:
            self._thread.join()
        elif not _everywhere(not self._thread.is_alive()):
            return False
        self._thread.join()
        self._thread, problem = None, self._problem
        self._problem = None
        if found := [text for text in gather_values(problem) if text is not None]:
            raise TrainerCheckpointError(found[0])
        return True


def _everywhere(condition: bool) -> bool:
    """Whether it holds on every rank."""
    flag = torch.tensor(int(condition), device=torch.cuda.current_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)
