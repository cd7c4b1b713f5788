"""The trainer's errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from slime_convert.errors import ConvertError
from slime_core.errors import SlimeError
from slime_core.former_names import renamed

__getattr__ = renamed(__name__, {"CheckpointError": "slime_megatron.errors.TrainerCheckpointError"})


class TrainingError(SlimeError):
    """Training cannot go on: a loss or a gradient is not finite."""


class TrainerCheckpointError(SlimeError):
    """A checkpoint is missing or invalid, or does not fit the run."""


@contextlib.contextmanager
def reading_files(problem: str = "") -> Iterator[None]:
    """Raise errors of slime-convert's, which reads the files, as the trainer's, behind the text of the ``problem``."""
    try:
        yield
    except ConvertError as error:
        raise TrainerCheckpointError(f"{problem}{error}") from error
