"""Which checkpoints a run begins with. Found once, and then kept in the manifest."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from slime_core.errors import ConfigError
from slime_launch.flags.settings import Settings
from slime_launch.manifest import Manifest
from slime_megatron.checkpoint import find_checkpoint
from slime_megatron.config import MegatronConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartWeights:
    """Checkpoint directories, as ``…/release`` or ``…/iter_0000040``.

    ``--load`` names a directory that may have a newer checkpoint tomorrow, the run's own among them where it is
    ``--save``, too. So a run that is continued does not look again: its reference model stays the same.

    Attributes:
        load: Weights of the policy before the first rollout.
        ref_load: Weights of the reference model.
    """

    load: str
    ref_load: str

    def into(self, megatron: MegatronConfig) -> MegatronConfig:
        """Settings of a trainer that begins with these weights."""
        return dataclasses.replace(megatron, load=self.load, ref_load=self.ref_load)


def start_weights(settings: Settings, manifest: Manifest | None) -> StartWeights:
    """Find the weights to begin with, or take those that the run began with.

    ``--load`` may be ``--save``'s own directory with nothing in it yet; the run then begins with ``--ref-load``.

    Args:
        settings: The command; it names ``--load`` or ``--ref-load``.
        manifest: The run that it continues.

    Raises:
        ConfigError: Neither flag is given.
        CheckpointError: A directory that is needed is not a checkpoint.
    """
    if manifest is not None:
        if manifest.checkpoint is None:
            find_checkpoint(manifest.load)
        if settings.algorithm.needs_reference:
            find_checkpoint(manifest.ref_load)
        return StartWeights(load=manifest.load, ref_load=manifest.ref_load)
    megatron = settings.megatron
    load = megatron.load
    if load is None and megatron.ref_load is None:
        raise ConfigError(
            "the trainer has no weights to start from: give --load DIR, a checkpoint that "
            "`slime-convert hf-to-torch-dist` has written, or one of an earlier run"
        )
    if megatron.ref_load is not None and (load is None or (load == megatron.save and _is_empty(Path(load)))):
        load = megatron.ref_load
    return StartWeights(load=_newest(str(load)), ref_load=_newest(megatron.ref_load or str(load)))


def _newest(path: str) -> str:
    return str(find_checkpoint(path).directory.resolve())


def _is_empty(directory: Path) -> bool:
    return not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
