"""The manifest: the one small file that says what a run can be continued from.

It is written last, when the checkpoint of every trainer rank lies on disk, and it is replaced in one move. So
whatever is found in ``--save`` besides it is either what it names, or older, or half-written and ignored.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from slime_core.files import write_whole
from slime_launch.errors import ManifestError

FORMAT_VERSION = 2
FILE_NAME = "manifest.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What to continue from.

    Attributes:
        iteration: Rollouts trained on: the number of the checkpoint and of the next rollout.
        weight_version: Number of the weights in the checkpoint: how often weights were updated.
        checkpoint: The checkpoint's directory below ``--save``; ``None`` before the first one.
        source_state: State of the data source after the last rollout trained on.
        flags: Every flag's value, to see that the same run is continued.
        output_dir: Where the run writes its metrics and logs.
        load: Checkpoint directory that the run began with.
        ref_load: Checkpoint directory of its reference model.
    """

    iteration: int
    weight_version: int
    checkpoint: str | None
    source_state: dict[str, Any]
    flags: dict[str, Any]
    output_dir: str
    load: str
    ref_load: str


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest; a reader finds either the old one or this one.

    Args:
        directory: The run's ``--save``.
        manifest: What to write.
    """
    values = {"format_version": FORMAT_VERSION, **dataclasses.asdict(manifest)}
    write_whole(directory / FILE_NAME, json.dumps(values, indent=1))


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest in ``directory``, or ``None`` if there is none.

    Raises:
        ManifestError: It is of another format, or no manifest at all, or its checkpoint is gone.
    """
    path = directory / FILE_NAME
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        version = values.pop("format_version")
        if version != FORMAT_VERSION:
            raise ManifestError(
                f"{path} has format_version {version}; this slime reads {FORMAT_VERSION}: finish that run with the "
                "slime that began it, or give another --save"
            )
        manifest = Manifest(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ManifestError(f"{path} is no manifest ({error}); remove it, or give another --save") from error
    if manifest.checkpoint is not None and not (directory / manifest.checkpoint).is_dir():
        raise ManifestError(
            f"{path} names the checkpoint {manifest.checkpoint}, which is not there; put it back, or give another "
            "--save"
        )
    return manifest
