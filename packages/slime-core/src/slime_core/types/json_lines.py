"""Samples and batches as lines of JSON, for people to read and other programs to search.

A sample's line is an object of its fields and ``format_version``. A batch is a head, with ``format_version`` and
``group_sizes``, and then a line per sample, without the version. All is ASCII. What JSON would give back otherwise than
it was given is refused, so that a file that was written can be read.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from slime_core.errors import DataError, FormatVersionError
from slime_core.frame import check_plain
from slime_core.types import checks
from slime_core.types.sample import Sample

if TYPE_CHECKING:
    from slime_core.types.rollout import RolloutBatch

FORMAT_VERSION = 1


def sample_line(sample: Sample) -> str:
    """A sample as one line, without a line break at its end.

    Raises:
        DataError: A field is invalid, or holds a value that would not come back as it is.
    """
    return _line({"format_version": FORMAT_VERSION, **_row(sample)}, f"sample {sample.index}")


def read_sample_line(line: str) -> Sample:
    """The reverse of :func:`sample_line`.

    Raises:
        FormatVersionError: The line is of another format version.
        DataError: It is cut off, is no sample, or holds one with an invalid field.
    """
    row = _parse(line, "a sample's line")
    _check_version(row, "a sample's line")
    return Sample.from_dict({name: value for name, value in row.items() if name != "format_version"})


def batch_lines(batch: RolloutBatch) -> str:
    """A batch as lines, each with a line break at its end.

    Raises:
        DataError: A field is invalid, or holds a value that would not come back as it is.
    """
    batch.validate()
    head = {
        "format_version": FORMAT_VERSION,
        "rollout_id": batch.rollout_id,
        "group_sizes": [len(group) for group in batch.groups],
        "weight_version": batch.weight_version,
        "metrics": batch.metrics,
        "seconds": batch.seconds,
    }
    where = f"rollout {batch.rollout_id}"
    lines = [_line(head, where), *(_line(_row(sample), f"sample {sample.index}") for sample in batch.samples)]
    return "".join(line + "\n" for line in lines)


def read_batch_lines(text: str) -> dict[str, Any]:
    """The fields of the batch that :func:`batch_lines` wrote.

    Raises:
        FormatVersionError: The text is of another format version.
        DataError: It is cut off, lacks an entry or has one of a wrong type, or has fewer or more samples than its head
            says.
    """
    if not text:
        raise DataError("a rollout file is empty; delete it and generate that rollout again")
    head, *rows = [
        _parse(line, f"line {number} of a rollout file") for number, line in enumerate(text.splitlines(), start=1)
    ]
    _check_version(head, "a rollout file")
    try:
        fields, sizes = {name: head[name] for name in ("rollout_id", "metrics", "seconds")}, head["group_sizes"]
    except KeyError as error:
        raise DataError(
            f"an entry of a rollout file is missing or of a wrong type ({error!r}); generate that rollout again"
        ) from error
    sizes = checks.integers("a rollout file", "group_sizes", sizes, least=0)
    if len(rows) != sum(sizes):
        raise DataError(f"rollout {fields['rollout_id']}: {len(rows)} samples, its head says {sum(sizes)}")
    samples = iter([_read_row(row, number) for number, row in enumerate(rows, start=2)])
    fields["weight_version"] = head.get("weight_version")  # older files have none
    return fields | {"groups": [[next(samples) for _ in range(size)] for size in sizes]}


def _row(sample: Sample) -> dict[str, Any]:
    sample.validate()
    for name in ("prompt", "metadata", "train_metadata"):
        check_plain(getattr(sample, name), f"sample {sample.index}: {name}")
    return sample.to_dict()


def _line(row: dict[str, Any], where: str) -> str:
    try:
        line = json.dumps(row)
    except ValueError as error:  # an integer of more digits than Python prints
        raise DataError(
            f"{where}: a value does not fit JSON ({error}); keep it out of the metadata, or store it as text"
        ) from None
    # Escaped surrogates are a character beyond 16 bits or, joined by that, two that stood alone.
    if "\\ud" in line and repr(json.loads(line)) != repr(row):
        raise DataError(f"{where}: a text has two lone surrogates in a row, which JSON would join; clean the text")
    return line


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}); generate it again") from None
    if not isinstance(row, dict):
        raise DataError(f"{where} is no JSON object; generate it again")
    return row


def _check_version(row: dict[str, Any], what: str) -> None:
    if type(version := row.get("format_version")) is not int or version != FORMAT_VERSION:
        raise FormatVersionError(f"{what}: format_version {version!r}; this slime reads {FORMAT_VERSION}")


def _read_row(row: dict[str, Any], number: int) -> Sample:
    try:
        return Sample.from_dict(row)
    except DataError as error:
        raise DataError(
            f"line {number} of a rollout file: an entry is missing or of a wrong type or value ({error}); "
            "generate that rollout again"
        ) from error
