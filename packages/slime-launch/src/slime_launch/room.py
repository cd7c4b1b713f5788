"""Whether what a run writes can be written and fits on its disks: checkpoints, exports, rollouts that are kept."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slime_convert.quantize import Fp8Format, read_format
from slime_core.files import read_json
from slime_launch.config import Settings
from slime_launch.errors import PreflightError, Problems
from slime_launch.names import stored_bytes

TOKEN_BYTES = 16  # of a token in the file of a rollout: its id, two log-probs, and its mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """What a flag has the run write: ``count`` things of ``size`` bytes below ``path``; ``is_bound``: at most those."""

    flag: str
    path: Path
    what: str
    size: float
    count: int
    is_bound: bool = False

    @property
    def total(self) -> float:
        """Bytes of all of them."""
        return self.size * self.count

    def __str__(self) -> str:
        several = f"{self.count} {self.what}s take" if self.count > 1 else f"one {self.what} takes"
        return f"{several} {'at most' if self.is_bound else 'about'} {_gib(self.total)}"


def check_room(settings: Settings) -> None:
    """Checkpoints and exports fit on their disks: as many as are there at a time, one more while it is written.

    Raises:
        PreflightError: They do not, with all sizes.
    """
    for place, found in _by_disk([one for one in written(settings) if not one.is_bound]).items():
        free = shutil.disk_usage(place).free
        if free < sum(one.total for one in found):
            where = " and ".join(f"{one.flag} {one.path}" for one in found)
            raise PreflightError(
                f"{where} {'have' if found[1:] else 'has'} {_gib(free)} free, and {', '.join(map(str, found))}; make "
                "room, give another directory, a smaller --max-checkpoints-kept, or --no-save-optim"
            )


def room_notes(settings: Settings) -> list[str]:
    """What may fill a disk before the run ends, a line each."""
    run, lines = settings.run, []
    found = written(settings)
    if run.max_checkpoints_kept is None:
        count = _saves(settings)
        found = [dataclasses.replace(one, count=count) if one.what == "checkpoint" else one for one in found]
    for place, parts in _by_disk(found).items():
        free = shutil.disk_usage(place).free
        if free < sum(one.total for one in parts):
            text = ", ".join(f"{one.flag} {one.path}: {one}" for one in parts)
            lines.append(f"{_gib(free)} are free, and the whole run may write more ({text})")
    return lines


def written(settings: Settings) -> list[Written]:
    """What the run writes that is large."""
    model = Path(settings.rollout.data.hf_checkpoint)
    if not (model / "config.json").is_file():
        return []
    return list(_written(settings, _parameters(model)))


def _written(settings: Settings, parameters: float) -> Iterator[Written]:
    megatron, run = settings.megatron, settings.run
    if megatron.save is not None:
        each: float = (2 if megatron.bf16 else 4) + (0 if megatron.no_save_optim else 12 if megatron.bf16 else 8)
        each *= 1 + (settings.algorithm.needs_critic and megatron.critic_save is None)  # next to the actor's
        save, kept, saves = Path(megatron.save), run.max_checkpoints_kept, _saves(settings)
        there = len([*save.glob("iter_*")])
        count = 1 if kept is None else max(1, min(saves, kept + 1) - there)
        yield Written(flag="--save", path=save, what="checkpoint", size=parameters * each, count=count)
        if run.save_hf is not None:
            width = 2 if megatron.bf16 else 4
            path = Path(run.save_hf).parent
            yield Written(flag="--save-hf", path=path, what="export", size=parameters * width, count=saves)
    sampling = settings.rollout.sampling
    tokens = (sampling.rollout_max_response_len + (settings.rollout.data.rollout_max_prompt_len or 0)) * TOKEN_BYTES
    size = settings.rollout.selection.rollout_batch_size * settings.samples_per_prompt * tokens
    for flag, template in (
        ("--save-debug-rollout-data", run.save_debug_rollout_data),
        ("--save-debug-train-data", megatron.save_debug_train_data),
    ):
        if template is not None:
            path = Path(template).parent
            yield Written(flag=flag, path=path, what="rollout", size=size, count=settings.num_rollout, is_bound=True)
    if megatron.save is not None and (run.keep_rollouts or settings.rows is None):
        flag = "--keep-rollouts" if run.keep_rollouts else "--save"
        interval = megatron.save_interval
        # Those since the checkpoint before the last one stay, until the next checkpoint counts.
        kept = settings.num_rollout if run.keep_rollouts or interval is None else 2 * interval
        count = min(kept, settings.num_rollout)
        yield Written(flag=flag, path=Path(megatron.save), what="rollout", size=size, count=count, is_bound=True)


def _saves(settings: Settings) -> int:
    """Checkpoints of the whole run."""
    rollouts, interval = settings.num_rollout, settings.megatron.save_interval
    return max(1, rollouts // interval + bool(rollouts % interval)) if interval else 1


def _parameters(model: Path) -> float:
    """Numbers in a model's weights, by the size of its files."""
    config = read_json(model / "config.json")
    width: float = 4 if config.get("dtype", config.get("torch_dtype")) == "float32" else 2
    if (form := read_format(model)) is not None:
        width = 1 if isinstance(form, Fp8Format) else 0.5
    return stored_bytes(model) / width


def _by_disk(found: list[Written]) -> dict[Path, list[Written]]:
    """By file system, each named by a directory that exists on it."""
    places: dict[int, Path] = {}
    parts: dict[Path, list[Written]] = {}
    for one in found:
        place = existing(one.path)
        parts.setdefault(places.setdefault(place.stat().st_dev, place), []).append(one)
    return parts


def existing(directory: Path) -> Path:
    """The directory, or the nearest one above it that exists."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def check_written(settings: Settings) -> None:
    """All directories that the run writes to can be made, or written to.

    Raises:
        PreflightError: Some cannot, a line each.
    """
    problems = Problems()
    for flag, path in written_below(settings).items():
        problems.attempt(check_writable, path, flag)
    problems.report()


def written_below(settings: Settings) -> dict[str, Path]:
    """The directories that the run writes to, by flag; of a file's name with places to fill in, what is before them."""
    run, megatron, engine = settings.run, settings.megatron, settings.engine
    trains = settings.trains and not settings.only_evaluates
    on_disk = settings.trains and settings.generates
    named = {
        "--save": megatron.save,
        "--critic-save": megatron.critic_save if trains and settings.algorithm.needs_critic else None,
        "--output-dir": run.output_dir or "outputs",
        "--save-hf": run.save_hf if trains else None,
        "--save-debug-rollout-data": run.save_debug_rollout_data,
        "--save-debug-train-data": megatron.save_debug_train_data if trains else None,
        "--update-weight-disk-dir": engine.update_weight_disk_dir if on_disk else None,
        "--wandb-dir": settings.tracking.wandb_dir if settings.tracking.use_wandb else None,
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
