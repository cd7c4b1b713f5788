"""Prompt files of every format, or slices of them, as rows.

A directory is one that ``datasets.save_to_disk`` wrote, ``.parquet`` is Parquet, and everything else JSON Lines,
unpacked where it ends in ``.gz``, ``.bz2``, ``.xz`` or ``.zst``. Any of them may end in ``@[a:b]``, which takes the
rows from a to b as a Python slice does.
"""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from slime_core.errors import DataError
from slime_rollout.data.faults import Faults
from slime_rollout.data.jsonl import read_jsonl
from slime_rollout.data.rows import PromptRow, RawRow, RowFields, make_row
from slime_rollout.data.tables import read_parquet, read_saved

_SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>|-?\d+):(?P<stop>|-?\d+)\]")


def read_prompts(path: str, fields: RowFields | None = None, *, on_bad_data: str = "error") -> list[PromptRow]:
    """Read a prompt file, or the slice of it that ``path`` names.

    Args:
        path: Path of the file or directory, with ``@[a:b]`` behind it for some rows only.
        fields: The names of the fields.
        on_bad_data: What to do about rows that break the format: ``error``, or ``skip`` and log how many and which.

    Returns:
        The rows in the file's order, at least one.

    Raises:
        DataError: The file is missing, empty or damaged, or a row breaks the format; says which and how.
    """
    faults = Faults(path, on_bad_data)
    rows = [row for raw in raw_rows(path) if (row := faults.catch(make_row, raw, fields or RowFields())) is not None]
    faults.settle()
    return rows


def raw_rows(path: str) -> Iterable[RawRow]:
    """The rows that ``path`` names, not checked yet; at least one.

    Raises:
        DataError: The file is missing, empty or damaged, or the slice is empty.
    """
    name, rows = split_slice(path)
    file = Path(name)
    with file_errors(file):
        check_kind(file)
        total, chosen = _read(file, rows)
    check_rows_left(path, total)
    return chosen


def check_rows_left(path: str, total: int) -> None:
    """Whether a file of ``total`` rows, or at least so many, leaves any.

    Raises:
        DataError: It is empty, or the slice is.
    """
    name, rows = split_slice(path)
    if total == 0:
        row = '{"prompt": "2 + 2 ="}'
        raise DataError(f"{Path(name)} is empty; write one row per prompt, in JSON Lines such as {row}")
    if not range(total)[rows]:
        raise DataError(f"{path} leaves no row: the file has {total}; give a slice that holds some of them")


def check_kind(file: Path) -> None:
    """Whether it is a file or a directory.

    Raises:
        DataError: It is a pipe or a device, of which whoever reads second gets nothing, or waits without end.
        OSError: It is not there.
    """
    mode = file.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise DataError(
            f"the prompt file {file} is a pipe or a device, which can be read only once; prompts are read more often: "
            "write them into a file, and give that"
        )


def is_table(file: Path) -> bool:
    """Whether it has columns: Parquet, or a directory of ``datasets``."""
    return file.is_dir() or file.suffix.lower() == ".parquet"


@contextlib.contextmanager
def file_errors(file: Path) -> Iterator[None]:
    """A file that is missing or cannot be read is a `DataError`."""
    try:
        yield
    except FileNotFoundError:
        hint = "; a slice is @[a:b], with whole numbers or nothing for a and b" if "@[" in file.name else ""
        raise DataError(f"the prompt file {file} does not exist; give the path of a prompt file{hint}") from None
    except OSError as error:
        raise DataError(
            f"the prompt file {file} cannot be read: {error.strerror or error}; give a readable one"
        ) from None


def split_slice(path: str) -> tuple[str, slice]:
    """Take ``file@[a:b]`` apart; a path without a slice stands for all rows."""
    match = _SLICE.fullmatch(path)
    if match is None:
        return path, slice(None)
    start, stop = (int(text) if text else None for text in match.group("start", "stop"))
    return match["path"], slice(start, stop)


def _read(file: Path, rows: slice) -> tuple[int, Iterable[RawRow]]:
    if not is_table(file):
        return read_jsonl(file, rows)
    return read_saved(file, rows) if file.is_dir() else read_parquet(file, rows)
