"""Answers of finished turns and tools, written down while their samples are still in the making.

A rollout is written down once it is complete. Until then a killed run would ask engines and tools again; a tool that
runs code, sends mail or costs money would do so twice. So in a run with ``--save`` each turn of the model and each
result of :func:`~slime_rollout.generate.trajectory.call_tool` goes into a file at once. A function that is called
again for the same sample is told what is in it, in place of asking: it makes the same decisions and comes to the place
where it was.

An entry is found by what was asked: the sample, its tokens so far, and the request or the tool with its arguments. So
nothing old is taken where anything differs.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from slime_core.files import whole_file
from slime_core.types import Sample, Status
from slime_core.types.checks import json_default
from slime_rollout.errors import GenerationError
from slime_rollout.generate.completion import Completion

_SYNC_SECONDS = 1.0
_REWRITE_BYTES = 1 << 20
"""A file is rewritten once it holds twice what is still needed, and more than this."""


class TurnLog:
    """One file; one process writes it.

    An entry is with the operating system before anybody uses it, so that it survives every kill of a process. The disk
    is waited for once a second at most: after a loss of power the last turns may be asked again.

    Attributes:
        versions: Weight versions, from the oldest to the newest, whose tokens may be used; ``None`` allows all.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[int, dict[str, bytes]] = {}
        self._used: set[int] | None = set()
        self._file, self._written, self._synced = -1, 0, 0.0
        self.versions: tuple[int, int] | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in _lines(path):
            self._entries.setdefault(line["sample"], {})[line["key"]] = orjson.dumps(line["value"])
        self._rewrite()

    def turn(self, sample: Sample, request: dict[str, Any]) -> Completion | None:
        """An engine's answer to a request for a sample; ``None`` if it is unknown, or of other weights."""
        value = self._find(sample, _turn_key(sample, request))
        if value is None:
            return None
        experts, status = value.pop("experts_TW"), Status(value.pop("status"))
        table = None if experts is None else np.array(experts, np.int32).reshape(len(experts), -1)
        done = Completion(**value, status=status, experts_TW=table)
        oldest, newest = self.versions or (0, max(done.weight_versions, default=0))
        return done if all(oldest <= version <= newest for version in done.weight_versions) else None

    def add_turn(self, sample: Sample, request: dict[str, Any], done: Completion) -> None:
        """Write down a turn that is complete."""
        if done.status is Status.ABORTED:
            return
        value = {field.name: getattr(done, field.name) for field in dataclasses.fields(done)}
        value["experts_TW"] = None if done.experts_TW is None else done.experts_TW.tolist()
        value["status"] = done.status.value
        self._add(sample, _turn_key(sample, request), value)

    def tool(self, sample: Sample, call: list[Any]) -> list[Any] | None:
        """The one result of a tool, as a list, of a ``call``: its name, its arguments, and how often it came before."""
        value: list[Any] | None = self._find(sample, _tool_key(sample, call))
        return value

    def add_tool(self, sample: Sample, call: list[Any], result: Any) -> None:
        """Write down a tool's result; a `GenerationError` if it is not JSON."""
        self._add(sample, _tool_key(sample, call), [result])

    def drop(self, indices: Iterable[int]) -> None:
        """Drop what is known of samples, by their numbers: they are to be asked again."""
        for index in indices:
            self._entries.pop(index, None)

    def forget(self, indices: Collection[int]) -> None:
        """Drop what is known of samples that are part of a written rollout, or of none, by their numbers."""
        self.drop(indices)
        if self._used is not None and indices:
            # The first rollout since the start: what came before its samples and was not asked for is settled.
            newest = max(self._used | set(indices))
            for index in [one for one in self._entries if one < newest and one not in self._used]:
                del self._entries[index]
            self._used = None
        if self._written > _REWRITE_BYTES and self._written > 2 * self._needed():
            self._rewrite()

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _find(self, sample: Sample, key: str) -> Any:
        if self._used is not None:
            self._used.add(sample.index)
        content = self._entries.get(sample.index, {}).get(key)
        return None if content is None else orjson.loads(content)

    def _add(self, sample: Sample, key: str, value: Any) -> None:
        content = as_json(value, f"sample {sample.index}")
        line = orjson.dumps({"sample": sample.index, "key": key, "value": orjson.Fragment(content)}) + b"\n"
        if os.write(self._file, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._entries.setdefault(sample.index, {})[key] = content
        self._written += len(line)
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            os.fdatasync(self._file)
            self._synced = time.monotonic()

    def _needed(self) -> int:
        return sum(len(content) for entries in self._entries.values() for content in entries.values())

    def _rewrite(self) -> None:
        """Put what is still needed into a new file, in the place of the old one."""
        self.close()
        with whole_file(self._path) as partial, partial.open("wb") as file:
            for index, entries in self._entries.items():
                for key, content in entries.items():
                    file.write(orjson.dumps({"sample": index, "key": key, "value": orjson.Fragment(content)}) + b"\n")
            self._written = file.tell()
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        self._synced = time.monotonic()


def as_json(value: Any, where: str) -> bytes:
    """A value as JSON, which reads back as the same; a `GenerationError` if there is none."""
    try:
        return orjson.dumps(value, default=json_default)
    except TypeError as error:
        raise GenerationError(
            f"{where}: a tool's result must be JSON (numbers, texts, lists, dictionaries with texts as keys), so that "
            f"it can be written down: {error}; have the tool return that"
        ) from error


def _turn_key(sample: Sample, request: dict[str, Any]) -> str:
    asked = {name: value for name, value in request.items() if name != "session_id"}
    return _key(["turn", sample.tokens, asked])


def _tool_key(sample: Sample, call: list[Any]) -> str:
    return _key(["tool", sample.tokens, call])


def _key(asked: list[Any]) -> str:
    try:
        content = orjson.dumps(asked, default=repr, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError:  # half a surrogate pair, which a model may write
        content = repr(asked).encode(errors="backslashreplace")
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """All whole lines; the last may be cut off."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for text in file:
            try:
                yield orjson.loads(text)
            except orjson.JSONDecodeError:
                return
