"""The files with a checkpoint's tensors, written by torch one after another; those that are finished can be told.

Torch's writer makes one file for each rank's plan. Here one process writes the files of many plans. Beside the
checkpoint, a small record of each finished file keeps its checksum and where in it everything lies.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from slime_convert.checksums import file_checksum, write_checked

_ALIGNMENT = 64  # bytes


class Part:
    """One file with tensors.

    Args:
        directory: Of the checkpoint.
        plan: What it will hold, with the prefix that torch's writer gave it.
        state: The directory for the record of the finished file; ``None`` to keep none.
    """

    def __init__(self, directory: Path, plan: SavePlan, state: Path | None) -> None:
        self.plan = plan
        self.name = f"{plan.storage_data.prefix}0.distcp"  # as the writer will name it
        self.path = directory / self.name
        self._record = state / f"{self.name}.json" if state else None
        self._places: list[list[int]] = []

    def is_finished(self) -> bool:
        """Whether an earlier run finished the file, and it still is as it was then."""
        if self._record is None or not self._record.is_file():
            return False
        try:
            record = json.loads(self._record.read_text(encoding="utf-8"))
            self._places = record["places"]
            return len(self._places) == len(self.plan.items) and record["checksum"] == file_checksum(self.path)
        except (OSError, ValueError, KeyError, TypeError):  # the power may have failed while it was written
            return False

    def finish(self, places: list[list[int]], checksum: int) -> None:
        """Record that the file is finished.

        Args:
            places: Offset and length of each item of the plan, in bytes.
            checksum: Of the whole file.
        """
        self._places = places
        if self._record:
            begun = self._record.with_suffix(".new")
            begun.write_text(json.dumps({"checksum": checksum, "places": places}), encoding="utf-8")
            begun.replace(self._record)

    def results(self) -> list[WriteResult]:
        """What torch's writer returned when the file was written, now or in an earlier run."""
        return [
            WriteResult(item.index, length, _StorageInfo(self.name, offset, length))
            for item, (offset, length) in zip(self.plan.items, self._places, strict=True)
        ]


class PartsWriter(FileSystemWriter):
    """Torch's writer, file by file and item by item: it keeps the tensors of one call until its end.

    Args:
        directory: Of the checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        # Without copying ahead, one tensor is in memory at a time, on machines with a GPU too.
        super().__init__(directory, sync_files=False, per_thread_copy_ahead=0)

    def storage_meta(self) -> None:
        """None: torch's would hold a random number and the directory's name, which is not the final one yet."""

    def write_part(self, part: Part, planner: SavePlanner) -> Iterator[MetadataIndex]:
        """Write one file.

        Yields:
            What was written, after each item.
        """
        places: list[list[int]] = []
        with part.path.open("wb", buffering=0) as file:
            files = _OneFile(file)
            self.fs = files
            for item in part.plan.items:
                files.stream.align()
                (written,) = self.write_data(replace(part.plan, items=[item]), planner).wait()
                if files.stream.error:
                    raise files.stream.error
                places.append([written.storage_data.offset, written.storage_data.length])
                yield item.index
        self.fs = FileSystem()
        part.finish(places, files.stream.checksum)


class _OneFile(FileSystem):
    """Gives torch's writer the same open file again and again."""

    def __init__(self, file: BinaryIO) -> None:
        self.stream = _ChecksummedStream(file)

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        """The file, at its end."""
        yield self.stream


class _ChecksummedStream(io.RawIOBase):
    """An open file that stays open, and the checksum of all that was written.

    A full disk or an interrupt is kept in ``error``: what torch raises after an error in a write would hide it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.checksum = 0
        self.error: BaseException | None = None

    def writable(self) -> bool:
        """Always."""
        return True

    def align(self) -> None:
        """Go on where torch's alignment of tensors in what it saves holds in this file too."""
        if gap := -self.tell() % _ALIGNMENT:
            self.write(bytes(gap))

    def tell(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def write(self, data: Any) -> int:
        """Write all of it."""
        view = memoryview(data).cast("B")
        try:
            if self.error is None:
                self.checksum = write_checked(view, self._write_all, self.checksum)
        except BaseException as error:
            self.error = error
        return view.nbytes

    def close(self) -> None:
        """Nothing: torch's writer closes after each item."""

    def _write_all(self, data: memoryview) -> None:
        while data:
            data = data[self._file.write(data) :]
