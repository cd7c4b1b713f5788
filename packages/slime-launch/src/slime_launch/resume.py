"""State that survives a restart: the run in ``--save``, its first weights, how far it is, and its stored rollouts."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from slime_convert.errors import ConvertError
from slime_convert.quantize import read_format
from slime_launch.config import Settings, free_flags
from slime_launch.errors import ManifestError, RunError
from slime_launch.manifest import FILE_NAME, Manifest, read_manifest, write_manifest
from slime_launch.redact import may_be_same, without_secrets
from slime_megatron.service import (
    OLD_ACTOR,
    MegatronConfig,
    find_checkpoint,
    iteration_directory,
    may_be_checkpoint,
    may_change,
)
from slime_rollout.service import RolloutStore

ROLLOUT_DIR = "rollouts"


def find_run(save: str | None, flags: Mapping[str, Any]) -> Manifest | None:
    """The run that ``--save`` holds, if it holds one that a command with these ``flags`` continues.

    Raises:
        ManifestError: It holds another run, or parts of one whose manifest is gone.
    """
    if save is None:
        return None
    directory = Path(save)
    manifest, rollouts = read_manifest(directory), directory / ROLLOUT_DIR
    if manifest is None:
        if RolloutStore(rollouts).ids():
            raise ManifestError(
                f"--save {directory} holds rollouts of a run whose {FILE_NAME} is gone; give another directory, or "
                f"remove {rollouts}"
            )
        return None
    if differences := changed_flags(manifest.flags, flags):
        raise ManifestError(
            f"--save {directory} holds a run that was started with other flags ({', '.join(differences)}); give the "
            "same, or another --save"
        )
    return manifest


def changed_flags(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Flags that differ and may not, as ``--lr 1e-06 → 2e-06``. SGLang's own and the router's may, and secrets."""
    names = sorted((old.keys() | new.keys()) - free_flags())
    old = without_secrets(old)  # an older slime wrote them down
    return [
        f"--{name.replace('_', '-')} {old.get(name)} → {new.get(name)}"
        for name in names
        if not name.startswith(("sglang_", "router_"))
        and not may_change(name)
        and not may_be_same(old.get(name), new.get(name))
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartWeights:
    """Checkpoint directories, as ``…/release`` or ``…/iter_0000040``.

    ``--load`` may hold a newer checkpoint later, such as the run's own where it is also ``--save``. A continued run
    therefore keeps the checkpoints that the manifest names, so its reference model stays the same.

    Attributes:
        load: Weights of the policy before the first rollout.
        ref_load: Weights of the reference model.
    """

    load: str
    ref_load: str

    def into(self, megatron: MegatronConfig) -> MegatronConfig:
        """Settings of a trainer that begins with these weights."""
        return dataclasses.replace(megatron, load=self.load, ref_load=self.ref_load)


def start_weights(settings: Settings, manifest: Manifest | None, absent: Collection[str] = ()) -> StartWeights:
    """Find the weights that the run begins with, or began with if it is continued. ``absent`` ones are not looked at.

    Where ``--load`` holds no checkpoint, as ``--save``'s own directory at first, the run begins with ``--ref-load``.
    Without both flags it begins with ``--hf-checkpoint``.

    Raises:
        TrainerCheckpointError: A directory that is needed is not a checkpoint.
    """
    if manifest is not None:
        if manifest.checkpoint is None:
            find_checkpoint(manifest.load)
        if settings.kind.has_reference:
            find_checkpoint(manifest.ref_load)
        return StartWeights(load=manifest.load, ref_load=manifest.ref_load)
    megatron = settings.megatron
    load = megatron.load
    if load is None or (megatron.ref_load is not None and not may_be_checkpoint(load)):
        load = megatron.ref_load or settings.rollout.data.hf_checkpoint
    reference = megatron.ref_load or load
    if megatron.ref_ckpt_step is not None:
        reference = str(iteration_directory(reference, megatron.ref_ckpt_step))
    return StartWeights(load=_newest(load, absent), ref_load=_newest(reference, absent))


def _newest(path: str, absent: Collection[str]) -> str:
    return path if path in absent else str(find_checkpoint(path).directory.resolve())


def beginning(megatron: MegatronConfig, manifest: Manifest | None, weights: StartWeights | None) -> list[str]:
    """A line about the weights that a new run begins with, where they are not those of ``--load``."""
    if weights is None or manifest is not None:
        return []
    load, begins = megatron.load, Path(weights.load)
    flag = "--hf-checkpoint" if megatron.ref_load is None else "--ref-load"
    if load is None:
        return [f"--load is not given, so the run begins with {flag} {weights.load}"]
    if Path(load).resolve() in (begins, *begins.parents):
        return []
    return [f"--load {load} holds no checkpoint, so the run begins with {flag} {weights.load}"]


def start_notes(megatron: MegatronConfig, manifest: Manifest | None, weights: StartWeights | None) -> list[str]:
    """Lines about the weights that a new run begins with, where ``--load`` does not say it, or not all of it."""
    if weights is None or manifest is not None:
        return []
    notes, begins = beginning(megatron, manifest, weights), Path(weights.load)
    found = find_checkpoint(begins)
    if found.format == "torch":
        notes.append(f"{begins} is a legacy checkpoint (format torch): its weights are loaded, its optimizer is not")
    if found.format == "hf" and (form := read_format(begins)) is not None:
        notes.append(f"the weights of {begins} are quantized ({form}): training begins with what they stand for")
    return notes


class Due(NamedTuple):
    """The steps that follow a rollout that was trained on.

    Attributes:
        push: Weights are sent: every ``--update-weights-interval``, and before what else is due. What is evaluated or
            saved is what the engines have, so that a run that continues a checkpoint goes on alike.
        save: A checkpoint is taken: at every ``--save-interval`` and at the end, unless this iteration has one.
        evaluate: Held-out sets are evaluated on: before the first rollout, at every ``--eval-interval``, at the end.
    """

    push: bool
    save: bool
    evaluate: bool


class Position(NamedTuple):
    """Where the run stood when a checkpoint was taken, and the seconds that it has waited for it since."""

    checkpoint: Path
    iteration: int
    weight_version: int
    source_state: dict[str, Any]
    seconds: float


class RunState:
    """How far the run is, from its manifest unless it is new. Its files change only here."""

    def __init__(
        self, settings: Settings, manifest: Manifest | None, weights: StartWeights | None, *, output_dir: Path
    ) -> None:
        self._settings = settings
        self._weights = weights
        self._output_dir = output_dir
        self._save = Path(settings.megatron.save) if settings.megatron.save is not None else None
        self._committed = manifest.iteration if manifest is not None else 0
        self._checkpoint = manifest.checkpoint if manifest is not None else None
        self._saving: Position | None = None
        self.iteration = self._committed
        self.weight_version = manifest.weight_version if manifest is not None else 0
        self.source_state = manifest.source_state if manifest is not None else None
        self._store = RolloutStore((self._save or output_dir) / ROLLOUT_DIR)
        # Rows of a data set need not be written down: they are read again from where the data stood.
        self._writes = self._save is not None and settings.kind.rows is None
        self._writes |= settings.run.keep_rollouts or settings.run.debug_rollout_only
        self.due = self._due_after(self.iteration)

    def reopen(self) -> RunState:
        """The run as a new command would find it: where its last checkpoint was taken, or at its beginning."""
        manifest = find_run(self._settings.megatron.save, self._settings.public_flags())
        return RunState(self._settings, manifest, self._weights, output_dir=self._output_dir)

    @property
    def trained_steps(self) -> int:
        """Steps that the weights were trained on: of this run, or of the checkpoint that is only evaluated.

        0 where a checkpoint does not say it, as a Hugging Face model.
        """
        kind = self._settings.kind
        if self.iteration or not kind.only_evaluates or not kind.trains or self._weights is None:
            return self.iteration
        return find_checkpoint(self._weights.load).iteration or 0

    @property
    def evaluated(self) -> str | None:
        """The weights that are only evaluated: their directory, and the step after which they were saved, if known."""
        if not self._settings.kind.only_evaluates:
            return None
        begins = self._weights if self._settings.kind.trains else None
        path = self.resume_from or (begins.load if begins else self._settings.rollout.data.hf_checkpoint)
        return f"{path}, after step {self.trained_steps}" if self.trained_steps else str(path)

    @property
    def resume_from(self) -> Path | None:
        """Checkpoint directory to continue from; ``None`` where the run starts from ``--load``."""
        if self._checkpoint is None:
            return None
        return (self._save or Path()) / self._checkpoint  # without --save, a replay's, which is absolute

    @property
    def can_resume(self) -> bool:
        """Whether the run can be continued, so that the data source's state has to be saved."""
        return self._save is not None

    def begin(self, source_state: dict[str, Any]) -> None:
        """Make a new run one that can be continued, before its first rollout."""
        if self.source_state is None:
            self._write_manifest(self.iteration, self.weight_version, source_state)

    @property
    def store(self) -> RolloutStore | None:
        """Where rollouts are written down before they are trained on; ``None`` if none are."""
        return self._store if self._writes else None

    def is_written_down(self, rollout_id: int) -> bool:
        """Whether the rollout was generated, but not yet trained on, before a restart.

        Raises:
            DataError: It was, by an older slime.
        """
        return self._save is not None and self._store.has(rollout_id)

    def trained(self, rollout_id: int) -> None:
        """Count a rollout as trained on, and decide what is due: weights that are sent are a version."""
        self.iteration = rollout_id + 1
        self.due = self._due_after(self.iteration)
        if self.due.push:
            self.weight_version = self.iteration

    def _due_after(self, iteration: int) -> Due:
        settings, run = self._settings, self._settings.run

        def at(interval: int | None) -> bool:
            return interval is not None and iteration % interval == 0

        is_new = self._save is not None and iteration != self._committed
        save = is_new and (iteration >= settings.num_rollout or at(settings.megatron.save_interval))
        evaluate = at(run.eval_interval) if iteration else not run.skip_eval_before_train
        evaluate = settings.kind.has_held_out and (evaluate or iteration == settings.num_rollout)
        push = at(settings.rollout.selection.update_weights_interval) or save or evaluate
        return Due(push, save, evaluate)

    def saving(self, checkpoint: Path, source_state: dict[str, Any], *, seconds: float = 0.0) -> None:
        """The ranks write ``checkpoint`` of the weights as they are now; it counts when :meth:`commit` says so.

        The run has waited ``seconds`` for them, and for what :meth:`waited` adds.
        """
        self._saving = Position(checkpoint, self.iteration, self.weight_version, source_state, seconds)
        self.due = self.due._replace(save=False)

    def waited(self, seconds: float) -> None:
        """The run has waited for the checkpoint that is being written."""
        if self._saving is not None:
            self._saving = self._saving._replace(seconds=self._saving.seconds + seconds)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint was taken that does not count yet."""
        return self._saving is not None

    def commit(self) -> tuple[int, float]:
        """Every rank has written the checkpoint: from here on the run continues from it and its source state.

        Returns:
            Its number, and the seconds that the run has waited for it.
        """
        position, self._saving = self._saving, None
        assert self._save is not None and position is not None  # only a run with --save takes checkpoints
        self._checkpoint = position.checkpoint.resolve().relative_to(self._save.resolve()).as_posix()
        before, self._committed = self._committed, position.iteration
        self._write_manifest(position.iteration, position.weight_version, position.source_state)
        if not self._settings.run.keep_rollouts:
            # `slime-launch replay` trains on those since the checkpoint before this one, if that stays.
            is_dropped = before > 0 and self._settings.run.max_checkpoints_kept == 1
            self._store.discard_through((position.iteration if is_dropped else before) - 1)
        return position.iteration, position.seconds

    @property
    def is_exported(self) -> bool:
        """Whether ``--save-hf`` has the checkpoint that counts: a run may have been killed before it was written."""
        return self._settings.run.save_hf is None or self.resume_from is None or self._export_path.is_dir()

    @property
    def _export_path(self) -> Path:
        return Path(str(self._settings.run.save_hf).format(rollout_id=self._committed - 1))

    def export(self) -> None:
        """Write the checkpoint that counts as a Hugging Face model, whole or not at all, to ``--save-hf``.

        Raises:
            RunError: It cannot be written.
        """
        from slime_convert import torch_dist_to_hf

        target, source = self._export_path, self.resume_from
        assert source is not None  # --save-hf needs --save
        try:
            torch_dist_to_hf(source, target, self._settings.rollout.data.hf_checkpoint, force=True)
        except (ConvertError, OSError) as error:
            raise RunError(f"--save-hf {target} could not be written: {error}") from error

    def drop_oldest(self) -> None:
        """Remove all checkpoints of this run but the last ``--max-checkpoints-kept``; never what a run begins with."""
        most = self._settings.run.max_checkpoints_kept
        if most is None or self._save is None or self._checkpoint is None or self._weights is None:
            return
        needed = {Path(path).resolve() for path in (self._weights.load, self._weights.ref_load)}
        critic = self._settings.megatron.critic_save
        others = (self._save / "reference", Path(critic) if critic else self._save / "critic")
        for root in (self._save, *others, *(self._save / OLD_ACTOR).glob("*")):
            found = [path for path in root.glob("iter_*") if path.name <= Path(self._checkpoint).name]
            for path in sorted(found)[:-most]:
                if path.resolve() not in needed:
                    shutil.rmtree(path, ignore_errors=True)

    def _write_manifest(self, iteration: int, weight_version: int, source_state: dict[str, Any]) -> None:
        self.source_state = source_state
        if self._save is None or self._weights is None:
            return
        self._save.mkdir(parents=True, exist_ok=True)
        manifest = Manifest(
            iteration=iteration,
            weight_version=weight_version,
            checkpoint=self._checkpoint,
            source_state=source_state,
            flags=self._settings.public_flags(),
            output_dir=str(self._output_dir.resolve()),
            load=self._weights.load,
            ref_load=self._weights.ref_load,
        )
        write_manifest(self._save, manifest)
