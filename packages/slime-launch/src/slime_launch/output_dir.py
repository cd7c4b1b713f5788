"""The folder of ``--output-dir``: whose files are in it, and where those of an earlier run go when another begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slime_core.files import read_json
from slime_launch.manifest import FILE_NAME as MANIFEST_FILE
from slime_launch.resolved import FILE_NAME as SETTINGS_FILE
from slime_launch.resume import ROLLOUT_DIR
from slime_launch.step_sums import SUMS_FILE
from slime_launch.tracking import METRICS_FILE, TENSORBOARD_DIR, read_rows
from slime_launch.wandb_run import RUN_ID_FILE
from slime_rollout.service import SAMPLES_DIR

EARLIER = "earlier"
_FILES = (
    *(SETTINGS_FILE, SUMS_FILE, TENSORBOARD_DIR, SAMPLES_DIR, "report.json", "report.html", "reward_curve.png"),
    *("loss_curve.png", RUN_ID_FILE, "wandb", "logs", "profile", ROLLOUT_DIR, METRICS_FILE),
)
"""Files of a run there. Metrics are last: they show that a run is there, so a move that is cut off is done again."""


def make_room(directory: Path, save: Path | None) -> Iterator[str]:
    """Have the folder for a run: move what another one left there to ``earlier/N``, and what this one left back.

    The caller has the folder locked. ``save`` is that of a run that is continued; ``None`` if it is a new one.

    Yields:
        What was done, a line each.
    """
    if _has_run(directory) and not _is_of(directory, save):
        target = _next(directory)
        _move(directory, target)
        yield f"{directory} holds an earlier run; its files are in {target} now"
    if save is not None and not _has_run(directory):
        found = find_run_dir(directory, save)
        if found is not None:
            _move(found, directory)
            yield f"{directory} has the files of this run back, from {found}"


def find_run_dir(directory: Path, save: Path) -> Path | None:
    """Where in an ``--output-dir`` the files of the run in ``save`` are: itself, or the last of ``earlier/N``."""
    earlier = sorted((directory / EARLIER).glob("*"), key=_number, reverse=True)
    places = (place for place in (directory, *earlier) if _has_run(place) and _is_of(place, save))
    return next(places, None)


def _has_run(directory: Path) -> bool:
    """Whether a run has left results, not only logs of a start."""
    return bool(read_rows(directory)) or any((directory / ROLLOUT_DIR).glob("*.npz"))


def _is_of(directory: Path, save: Path | None) -> bool:
    """Whether the run in a folder is the one in ``save``, as far as its settings say."""
    if save is None:
        return False
    try:
        written = read_json(directory / SETTINGS_FILE)["settings"]["save"]["value"]
    except (OSError, ValueError, KeyError, TypeError):
        return True
    return written is not None and Path(written).resolve() == save.resolve()


def _next(directory: Path) -> Path:
    return directory / EARLIER / str(1 + max(map(_number, (directory / EARLIER).glob("*")), default=0))


def _number(path: Path) -> int:
    return int(path.name) if path.name.isdecimal() else 0


def _move(source: Path, target: Path) -> None:
    """Move a run's files, but for rollouts that are of a ``--save`` in the same folder."""
    target.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        if (source / name).exists() and not (name == ROLLOUT_DIR and (source / MANIFEST_FILE).exists()):
            (source / name).replace(target / name)
    if not any(source.iterdir()):
        source.rmdir()
