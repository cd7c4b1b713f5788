"""The user-defined function that changes what is trained on: the last one that sees a rollout before it is split."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.errors import DataError
from slime_core.hooks import HookArgs
from slime_core.types import TrainSample
from slime_core.types.checks import scalar
from slime_rollout.config import RolloutConfig
from slime_rollout.hooks.rollouts import UserFunction

FLAG = "--rollout-data-postprocess-path"
FIXED = {"tokens": "tokens", "response_lengths": "response_length", "sample_indices": "index"}
"""Columns that must stay as they are, each with the field of a sample that it is."""
NUMBERS = {"rewards": "reward", "raw_reward": "raw_reward"}
MASKS = "loss_masks"
LOG_PROBS = ("rollout_log_probs", "teacher_log_probs")
_NAMES = {**FIXED, **NUMBERS, MASKS: "loss_mask"}
_KNOWN = {*_NAMES, *LOG_PROBS}


class DataPostprocess:
    """The function of ``--rollout-data-postprocess-path``: ``(args, rollout_id, rollout_data)``, which returns nothing.

    ``rollout_data`` is a dict of columns, each a list with an entry for each sample: ``tokens``, ``response_lengths``,
    ``sample_indices``, which stay as they are; ``loss_masks``, ``rewards`` (as the estimator takes them),
    ``raw_reward``, ``rollout_log_probs`` and ``teacher_log_probs`` where there are any, and the extras of the rollout.
    A column of another name becomes an extra of the trainer's samples: an array or a number for each.

    Raises:
        ConfigError: It cannot be loaded, or does not take the arguments.
    """

    def __init__(self, config: RolloutConfig, args: HookArgs) -> None:
        path = str(config.hooks.rollout_data_postprocess_path)
        limit = config.selection.hook_timeout
        self._function = UserFunction(path, FLAG, ("args", "rollout_id", "rollout_data"), limit)
        self._args = args

    def __call__(self, rollout_id: int, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """The samples with the columns as the function left them; a `DataError` if one cannot be trained on."""
        data = columns_of(samples)
        found = self._function(self._args, rollout_id, data)
        if found is not None:
            raise DataError(
                f"{self._function.name} returned a {type(found).__name__}, which nothing would use; change the lists "
                "of rollout_data and return nothing"
            )
        if missing := [name for name in (*_NAMES, *LOG_PROBS) if name not in data]:
            raise DataError(f"{self._function.name} took away {', '.join(missing)}; change the values instead")
        columns: dict[str, Any] = dict(data)  # functions set what they like
        for name, column in columns.items():
            if isinstance(column, tuple) or (hasattr(column, "ndim") and column.ndim):  # a row for each sample
                data[name] = column = list(column)
            if not isinstance(column, list) or len(column) != len(samples):
                raise DataError(
                    f"{self._function.name} made {name} {str(column)[:60]}; it must be a list of {len(samples)}, one "
                    "for each sample"
                )
        rows = (dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True))
        return [self._changed(sample, row) for sample, row in zip(samples, rows, strict=True)]

    def _changed(self, sample: TrainSample, row: dict[str, Any]) -> TrainSample:
        values: dict[str, Any] = {field: self._number(sample, name, row[name]) for name, field in NUMBERS.items()}
        for name, field in FIXED.items():
            if not np.array_equal(row[name], getattr(sample, field)):
                raise self._wrong(sample, name, row[name], "which cannot be changed here: a generate function makes it")
        mask = self._array(sample, MASKS, row[MASKS])
        if not np.isin(mask, (0, 1)).all():
            raise self._wrong(sample, MASKS, row[MASKS], "write 1 where a token is trained on, and 0 elsewhere")
        values["loss_mask"] = mask.astype(np.uint8)
        for name in LOG_PROBS:
            given = row[name]
            values[name] = None if given is None else self._array(sample, name, given).astype(np.float32)
        extras = {name: self._extra(sample, name, row[name]) for name in row if name not in _KNOWN}
        return dataclasses.replace(sample, **values, extras=extras)

    def _number(self, sample: TrainSample, name: str, value: Any) -> float:
        number = scalar(value)
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise self._wrong(sample, name, value, "write a finite number")
        return float(number)

    def _array(self, sample: TrainSample, name: str, value: Any) -> NDArray[Any]:
        """A finite number for each token of the response."""
        array = _as_array(value)
        if array.shape != (sample.response_length,) or array.dtype.kind not in "iufb" or not np.isfinite(array).all():
            raise self._wrong(sample, name, value, f"write {sample.response_length} numbers, one a response token")
        return array

    def _extra(self, sample: TrainSample, name: str, value: Any) -> Any:
        if value is None or value is sample.extras.get(name):
            return value
        array = _as_array(value)
        if array.dtype.kind in "iufb" and array.ndim <= 1:
            return array if array.ndim else array.item()
        raise self._wrong(sample, name, value, "write an array or a number for each sample")

    def _wrong(self, sample: TrainSample, name: str, value: Any, advice: str) -> DataError:
        return DataError(f"{self._function.name} left {name} of sample {sample.index} as {str(value)[:60]}; {advice}")


def _as_array(value: Any) -> NDArray[Any]:
    """An array of numbers, or of something else if they are none: a list's entries may be torch's."""
    if isinstance(value, np.ndarray):
        return value
    try:
        return np.asarray([scalar(one) for one in value] if isinstance(value, list | tuple) else scalar(value))
    except ValueError:  # rows of several lengths
        return np.asarray(None)


def columns_of(samples: Sequence[TrainSample]) -> dict[str, list[Any]]:
    """The columns that the function gets, a list each. Arrays that may be changed are copies."""
    data: dict[str, list[Any]] = {name: [getattr(one, field) for one in samples] for name, field in _NAMES.items()}
    data["tokens"] = [row.view() for row in data["tokens"]]
    for row in data["tokens"]:
        row.flags.writeable = False
    data[MASKS] = [mask.copy() for mask in data[MASKS]]
    for name in LOG_PROBS:
        data[name] = [None if (row := getattr(one, name)) is None else row.copy() for one in samples]
    for name in {name: None for sample in samples for name in sample.extras}:
        rows = [sample.extras.get(name) for sample in samples]
        data[name] = [row.copy() if isinstance(row, np.ndarray) else row for row in rows]
    return data
