"""Whether what a run writes can be written and fits on its disks: checkpoints, exports, rollouts that are kept."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from slime_convert.quantize import Fp8Format, read_format
from slime_core.files import read_json
from slime_launch.config import Settings
from slime_launch.errors import PreflightError, Problems
from slime_launch.names import stored_bytes

TOKEN_BYTES = 16  # of a token in the file of a rollout: its id, two log-probs, and its mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """Files below ``path`` that a flag has the run write.

    Attributes:
        size: Bytes of one of them.
        count: How many are there at a time.
        in_all: How many a run that keeps all of them leaves.
        is_bound: Whether they may be fewer and smaller.
    """

    flag: str
    path: Path
    what: str
    size: float
    count: int
    in_all: int | None = None
    is_bound: bool = False

    @property
    def total(self) -> float:
        """Bytes of all of them."""
        return self.size * self.count

    def __str__(self) -> str:
        several = f"{self.count} {self.what}s take" if self.count > 1 else f"one {self.what} takes"
        return f"{several} {'at most' if self.is_bound else 'about'} {_gib(self.total)}"


def check_disk_space(files: Iterable[Written]) -> None:
    """Checkpoints and exports fit on their disks: as many as are there at a time, one more while it is written.

    Raises:
        PreflightError: They do not, with all sizes.
    """
    for free, found in _too_large(one for one in files if not one.is_bound):
        where = " and ".join(f"{one.flag} {one.path}" for one in found)
        raise PreflightError(
            f"{where} {'have' if found[1:] else 'has'} {_gib(free)} free, and {', '.join(map(str, found))}; make "
            "room, give another directory, a smaller --max-checkpoints-kept, or --no-save-optim"
        )


def disk_space_notes(files: Iterable[Written]) -> list[str]:
    """Files that may fill a disk before the run ends, a line for each disk."""
    whole_run = (dataclasses.replace(one, count=one.in_all or one.count) for one in files)
    return [
        f"{_gib(free)} are free, and the whole run may write more "
        f"({', '.join(f'{one.flag} {one.path}: {one}' for one in found)})"
        for free, found in _too_large(whole_run)
    ]


def written_files(settings: Settings) -> Iterator[Written]:
    """The large files that the run writes; none where the model is not here, for their sizes follow from its."""
    model, megatron, run = Path(settings.rollout.data.hf_checkpoint), settings.megatron, settings.run
    if not (model / "config.json").is_file():
        return
    parameters = _parameters(model)
    if megatron.save is not None:
        each: float = (2 if megatron.bf16 else 4) + (0 if megatron.no_save_optim else 12 if megatron.bf16 else 8)
        each *= 1 + (settings.kind.has_critic and megatron.critic_save is None)  # next to the actor's
        save, kept = Path(megatron.save), run.max_checkpoints_kept
        saves = _saves(settings.num_rollout, megatron.save_interval)
        count = 1 if kept is None else max(1, min(saves, kept + 1) - len([*save.glob("iter_*")]))
        in_all = saves if kept is None else None
        yield Written(flag="--save", path=save, what="checkpoint", size=parameters * each, count=count, in_all=in_all)
        if run.save_hf is not None:
            width = 2 if megatron.bf16 else 4
            path = Path(run.save_hf).parent
            yield Written(flag="--save-hf", path=path, what="export", size=parameters * width, count=saves)
    sampling, rollouts = settings.rollout.sampling, settings.num_rollout
    tokens = (sampling.rollout_max_response_len + (settings.rollout.data.rollout_max_prompt_len or 0)) * TOKEN_BYTES
    size = settings.rollout.selection.rollout_batch_size * settings.samples_per_prompt * tokens
    kept_in: dict[str, tuple[Path, int]] = {}
    if run.save_debug_rollout_data is not None:
        kept_in["--save-debug-rollout-data"] = Path(run.save_debug_rollout_data).parent, rollouts
    if megatron.save_debug_train_data is not None:
        kept_in["--save-debug-train-data"] = Path(megatron.save_debug_train_data).parent, rollouts
    if megatron.save is not None and run.keep_rollouts:
        kept_in["--keep-rollouts"] = Path(megatron.save), rollouts
    elif megatron.save is not None and settings.kind.rows is None:
        # Those since the checkpoint before the last one stay, until the next checkpoint counts.
        kept_in["--save"] = Path(megatron.save), min(rollouts, 2 * (megatron.save_interval or rollouts))
    for flag, (path, count) in kept_in.items():
        yield Written(flag=flag, path=path, what="rollout", size=size, count=count, is_bound=True)


def _saves(rollouts: int, interval: int | None) -> int:
    """Checkpoints of the whole run."""
    return max(1, rollouts // interval + bool(rollouts % interval)) if interval else 1


def _parameters(model: Path) -> float:
    """Numbers in a model's weights, by the size of its files."""
    config = read_json(model / "config.json")
    width: float = 4 if config.get("dtype", config.get("torch_dtype")) == "float32" else 2
    if (form := read_format(model)) is not None:
        width = 1 if isinstance(form, Fp8Format) else 0.5
    return stored_bytes(model) / width


def _too_large(files: Iterable[Written]) -> Iterator[tuple[int, list[Written]]]:
    """The files of each file system that has too little space for them, with its free bytes."""
    by_disk: dict[int, list[Written]] = {}
    for one in files:
        by_disk.setdefault(existing(one.path).stat().st_dev, []).append(one)
    for found in by_disk.values():
        free = shutil.disk_usage(existing(found[0].path)).free
        if free < sum(one.total for one in found):
            yield free, found


def existing(directory: Path) -> Path:
    """The directory, or the nearest one above it that exists."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def check_written(directories: Mapping[str, Path]) -> None:
    """All directories that the run writes to, by flag, can be made, or written to.

    Raises:
        PreflightError: Some cannot, a line each.
    """
    problems = Problems()
    for flag, path in directories.items():
        problems.attempt(check_writable, path, flag)
    problems.report()


def written_directories(settings: Settings) -> dict[str, Path]:
    """The directories that the run writes to, by flag; of a file's name with places to fill in, the part before."""
    run, megatron, kind, tracking = settings.run, settings.megatron, settings.kind, settings.tracking
    named = {
        "--save": megatron.save,
        "--critic-save": megatron.critic_save if kind.updates and kind.has_critic else None,
        "--output-dir": run.output_dir or "outputs",
        "--save-hf": run.save_hf if kind.updates else None,
        "--save-debug-rollout-data": run.save_debug_rollout_data,
        "--save-debug-train-data": megatron.save_debug_train_data if kind.updates else None,
        "--update-weight-disk-dir": settings.engine.update_weight_disk_dir if kind.sends else None,
        "--wandb-dir": tracking.wandb_dir if tracking.use_wandb else None,
    }
    return {flag: _before_places(path) for flag, path in named.items() if path is not None}


def _before_places(path: str) -> Path:
    before, place, _ = path.partition("{")
    return Path(path) if not place else Path(before) if before.endswith("/") else Path(before).parent


def check_writable(directory: Path, flag: str) -> None:
    """A directory can be made, or written to if it is there. Leaves nothing behind.

    Raises:
        PreflightError: It cannot.
    """
    there = existing(directory)
    try:
        with tempfile.TemporaryDirectory(prefix=".slime-", dir=there):
            pass
    except OSError as error:
        place = "" if there == directory else f" (in {there})"
        raise PreflightError(
            f"{flag} {directory} can't be written{place}: {error.strerror}; give a directory that you may write to"
        ) from error
