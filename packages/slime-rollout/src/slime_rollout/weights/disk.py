"""New weights by files: a whole Hugging Face checkpoint for each version, which the engines load."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from slime_core.interfaces import NamedTensors
from slime_rollout.engine.errors import WeightSyncError
from slime_rollout.weights.channel import EngineChannel, check_alive
from slime_rollout.weights.checkpoint import CheckpointWriter, verify_checkpoint, version_name, written_versions
from slime_rollout.weights.control import Engines


@dataclasses.dataclass
class DiskWeightChannel(EngineChannel):
    """Writes ``weight_v000123/`` and has the engines load it (SGLang's ``update_weights_from_disk``).

    Engines generate while it is written, and pause to load it. The directory appears with everything in it or not at
    all, with config and tokenizer of ``hf_checkpoint``. When all engines have confirmed it, earlier versions there are
    removed, whichever process wrote them. What is verified: with ``check``, the files are read back before engines load
    them, and what engines hold is compared; without, that they answer and confirm the version.

    Attributes:
        directory: Where versions are written; trainer and engines see it under the same path.
        keep_files: Keep all versions.
    """

    directory: str = ""
    keep_files: bool = False

    def _forget(self) -> None:
        super()._forget()
        self._writer: CheckpointWriter | None = None
        self._new: Path | None = None
        self._current: Path | None = None

    def close(self) -> None:
        """Remove what a version that was not ended has written. The last whole one stays."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.discard()

    def _begin(self, update: Engines) -> None:
        check_alive(update)
        final = Path(self.directory).absolute() / version_name(update.version)
        self._writer = CheckpointWriter(final, Path(self.hf_checkpoint), update.version)

    def _send(self, update: Engines, bucket: NamedTensors) -> None:
        if self._writer is not None:
            self._writer.add(bucket)

    def _end(self, update: Engines) -> dict[str, str]:
        writer = self._writer
        if writer is None or not writer.checksums:
            raise WeightSyncError(f"weight version {update.version}: no tensor was sent")
        path = self._new = writer.finish()
        self._writer = None
        if self.check:
            verify_checkpoint(path)
        self._pause(update)
        update.on_all(lambda url: load_from_disk(update, url, str(path)))
        return {}

    def _confirmed(self) -> None:
        self._current, self._new = self._new, None
        first = Path(self.hf_checkpoint).resolve()  # may be a version that another run left here
        for path in [] if self.keep_files else written_versions(Path(self.directory).absolute()):
            if path != self._current and path.resolve() != first:
                shutil.rmtree(path, ignore_errors=True)

    def _give_up(self) -> None:
        self.close()
        failed, self._new = self._new, None
        if failed is not None and failed != self._current:
            shutil.rmtree(failed, ignore_errors=True)


def load_from_disk(update: Engines, url: str, path: str) -> None:
    """Have a paused engine load a checkpoint.

    Raises:
        WeightSyncError: It refused, or is gone.
    """
    update.post(url, "/update_weights_from_disk", {"model_path": path, "flush_cache": False}, is_long=True)
