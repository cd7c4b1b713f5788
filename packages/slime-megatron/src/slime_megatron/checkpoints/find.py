"""The directory that holds a checkpoint. No torch here: a launcher asks before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime_convert.shape import ModelShape, check_args
from slime_core.errors import ConfigError, SlimeError
from slime_core.files import read_json, read_text
from slime_megatron.errors import TrainerCheckpointError, reading_files
from slime_megatron.settings.config import MegatronConfig

TRACKER = "latest_checkpointed_iteration.txt"
OLD_ACTOR = "old_actor"
"""Beside checkpoints, the directory of the policy's earlier weights, by how many rollouts they are older."""
RELEASE = "release"
_TRACKER_BYTES = 1000
_FILES = ("metadata.json", ".metadata", "common.pt")
OLD = ".old"
"""Suffix of a checkpoint's name while another takes its place."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint.

    Attributes:
        directory: The directory with the ``torch_dist`` files or the ``mp_rank_*``, or the Hugging Face model.
        iteration: Rollouts trained on; ``None`` where weights alone can be loaded: of a converted model (``release``)
            and of every format but ``torch_dist``.
        format: ``torch`` is Megatron's legacy format, ``hf`` a Hugging Face model.
    """

    directory: Path
    iteration: int | None
    format: Literal["torch_dist", "torch", "hf"] = "torch_dist"


def iteration_directory(root: str | Path, iteration: int) -> Path:
    """Where checkpoint ``iteration`` under ``root`` is, such as ``iter_0000007``."""
    return Path(root) / f"iter_{iteration:07d}"


def teacher_source(config: MegatronConfig) -> Path | None:
    """The checkpoint of the teacher of ``--use-opd``: ``--opd-teacher-load``, or a checkpoint in it."""
    load, step = config.opd_teacher_load, config.opd_teacher_ckpt_step
    if load is None:
        return None
    return Path(load) if step is None else iteration_directory(load, step)


def find_checkpoint(path: str | Path) -> CheckpointInfo:
    """The newest checkpoint under ``path``, or ``path`` itself.

    That is an ``iter_*`` or ``release`` directory, of Megatron's legacy format ``torch`` too, or a Hugging Face model
    with ``config.json`` and ``*.safetensors``.

    Raises:
        TrainerCheckpointError: There is none; the message says what was looked for.
    """
    root = Path(path)
    if not root.is_dir():
        raise TrainerCheckpointError(
            f"checkpoint directory {root} does not exist; give one that slime or slime-convert wrote, or a "
            "Hugging Face model"
        )
    tracker = root / TRACKER
    if tracker.is_file():
        try:
            text = read_text(tracker, most=_TRACKER_BYTES).strip()
        except (OSError, ValueError, SlimeError) as error:
            raise TrainerCheckpointError(
                f"{tracker} cannot be read ({error}); it must hold a number or {RELEASE!r}"
            ) from error
        if text == RELEASE:
            return _complete(root / RELEASE)
        if re.fullmatch(r"[0-9]{1,18}", text):
            return _complete(_not_yet_replaced(iteration_directory(root, int(text))))
        raise TrainerCheckpointError(f"{tracker} says {text[:80]!r}; it must hold a number or {RELEASE!r}")
    if (root / "config.json").is_file():
        from slime_convert.formats.safetensors import read_directory

        with reading_files():
            read_directory(root)
        return CheckpointInfo(root, None, "hf")
    return _complete(root)


def check_checkpoint(path: str | Path, shape: ModelShape) -> None:
    """Check that a checkpoint can be found, and that what it records of its model is so of ``shape``.

    Raises:
        TrainerCheckpointError: It cannot, or the model is another one: everything that differs, in one line.
    """
    info = find_checkpoint(path)
    with reading_files():
        check_same_model(_recorded(info), shape, info.directory)


def _recorded(info: CheckpointInfo) -> Mapping[str, Any]:
    """Megatron's arguments as a checkpoint records them, or as they follow from a Hugging Face model's config."""
    from slime_convert.formats.legacy import LegacyWeights
    from slime_convert.formats.torch_dist import check_metadata, recorded_arguments

    if info.format == "hf":
        return ModelShape.from_hf_config(info.directory).to_megatron_args()
    if info.format == "torch":
        return LegacyWeights(info.directory).arguments
    check_metadata(info.directory)
    return recorded_arguments(info.directory)


def check_same_model(recorded: Mapping[str, Any], shape: ModelShape, directory: Path) -> None:
    """Check a checkpoint's recorded arguments.

    Raises:
        TrainerCheckpointError: They are another model's: everything that differs, in one line.
    """
    # Modules that predict further tokens may be left out here.
    args = {name: value for name, value in recorded.items() if name != "mtp_num_layers"}
    with reading_files():
        # What slime writes names the family, and has the model's own vocabulary.
        check_args(shape.to_megatron_args(), args, directory, same_vocabulary="hf_model_type" in args)


def may_be_checkpoint(path: str | Path) -> bool:
    """Whether a directory holds something that says it is a checkpoint or a model, complete or not."""
    signs = (TRACKER, *_FILES, "config.json")
    return any((Path(path) / name).exists() for name in signs) or _is_legacy(Path(path))


def _is_legacy(directory: Path) -> bool:
    return any(directory.glob("mp_rank_*"))


def reference_source(load: str | None, ref_load: str | None, resume_from: str | Path | None) -> Path | None:
    """The directory that the frozen reference model's weights come from: ``ref_load``, else ``load``.

    Returns:
        The directory; ``None`` if neither is given, in a new run, where the random policy is its own reference.

    Raises:
        ConfigError: A run continues from its own checkpoints and nothing else is named: the reference would be a model
            that has been trained already.
    """
    source = ref_load or load
    continues = resume_from is not None and ref_load is None
    if continues and (load is None or checkpoint_root(load) == checkpoint_root(str(resume_from))):
        raise ConfigError(
            f"the KL loss needs its reference model, but {resume_from}, from which the run continues, is trained "
            "already; name the model that training began with by --ref-load"
        )
    return None if source is None else Path(source)


def checkpoint_root(path: str | Path) -> Path:
    """The directory of checkpoints that ``path`` is, or is one of."""
    directory = find_checkpoint(path).directory.resolve()
    return directory.parent if directory.name == RELEASE or directory.name.startswith("iter_") else directory


def _not_yet_replaced(directory: Path) -> Path:
    """The checkpoint that a run was replacing by another of the same number when it was killed, or the directory."""
    old = directory.with_name(directory.name + OLD)
    return old if old.exists() and not directory.exists() else directory


def _complete(directory: Path) -> CheckpointInfo:
    """Check that ``directory`` holds a whole Megatron checkpoint. Metadata of ``torch_dist`` are written last."""
    if _is_legacy(directory):
        from slime_convert.formats.legacy import LegacyWeights

        with reading_files():
            LegacyWeights(directory)
        return CheckpointInfo(directory, None, "torch")
    for name in _FILES:
        if not (directory / name).is_file():
            raise TrainerCheckpointError(
                f"{directory} is not a torch_dist checkpoint: it has neither {TRACKER} nor {name}; give a directory "
                "that slime saved or that `slime-convert hf-to-torch-dist` wrote, or a Hugging Face model"
            )
    if (backend := _backend(directory / "metadata.json")) != "torch_dist":
        raise TrainerCheckpointError(
            f"{directory} is a {backend!r} checkpoint; only torch_dist can be loaded; convert it first"
        )
    number = re.fullmatch(rf"iter_(\d+)(?:{re.escape(OLD)})?", directory.name)
    return CheckpointInfo(directory, int(number.group(1)) if number else None)


def _backend(metadata: Path) -> str | None:
    try:
        content = read_json(metadata)
    except (OSError, ValueError, SlimeError) as error:
        raise TrainerCheckpointError(
            f"{metadata} is invalid JSON ({error}); the checkpoint is damaged, give another"
        ) from error
    return content.get("sharded_backend") if isinstance(content, dict) else None
