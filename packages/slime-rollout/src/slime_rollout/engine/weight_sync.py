"""Settings of the weight sync: by which way new weights reach the engines. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from slime_core.flags import Config, flag

MODES = ("full", "delta")
TRANSPORTS = ("tensor", "nccl", "gloo", "disk")
PAUSE_MODES = ("retract", "in_place")
REQUEST_TIMEOUT_SECONDS = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightSyncConfig(Config):
    """How the trainer's weights reach the engines. Part of :class:`~slime_rollout.engine.config.EngineConfig`.

    Raises:
        ConfigError: A combination that cannot work.
    """

    update_weight_mode: str = flag(
        "full",
        choices=MODES,
        help="send whole tensors, or only the bytes that changed (needs the transport disk)",
        may_change=True,
    )
    update_weight_transport: str = flag(
        "tensor",
        choices=TRANSPORTS,
        help="shared memory or CUDA IPC on one machine, a broadcast with NCCL or gloo, or files",
        may_change=True,
    )
    update_weight_disk_dir: str | None = flag(
        None,
        help="directory that trainer and engines both see; needed by the transport disk",
        metavar="DIR",
        may_change=True,
    )
    update_weight_disk_keep_files: bool = flag(False, help="keep the files of all weight versions", may_change=True)
    update_weight_local_checkpoint_dir: str | None = flag(
        None,
        help="directory on the engines' machine, for the checkpoint that deltas are applied to; needed by delta",
        metavar="DIR",
        may_change=True,
    )
    update_weight_receivers: tuple[str, ...] = flag(
        (),
        help="instead of that, for engines elsewhere: the `slime-rollout receive-weights --listen` on each machine",
        metavar="HOST:PORT",
        may_change=True,
    )
    update_weight_pause_mode: str = flag(
        "retract",
        choices=PAUSE_MODES,
        help="what happens to requests in flight: begin anew with the tokens so far, or go on with the old KV cache",
        may_change=True,
    )
    update_weight_timeout: float = flag(
        REQUEST_TIMEOUT_SECONDS,
        help="longest time of one request of a weight update, such as to load all weights from files",
        unit="seconds",
        above=0,
        may_change=True,
    )
    check_weight_update_equal: bool = flag(
        False, help="after every update, compare checksums of what the engines hold with what was sent", may_change=True
    )

    @property
    def update_request_timeout(self) -> float:
        """Longest time in seconds that an engine may take to answer a request of an update, loading files apart."""
        return self.update_weight_timeout

    def contradictions(self) -> Iterator[str]:
        """What a mode or a transport needs, and what means nothing without one."""
        disk, delta = self.update_weight_transport == "disk", self.update_weight_mode == "delta"
        if delta and not disk:
            yield (
                "--update-weight-mode delta goes through files; give --update-weight-transport disk "
                f"(got {self.update_weight_transport})"
            )
        if disk and self.update_weight_disk_dir is None:
            yield "--update-weight-transport disk needs --update-weight-disk-dir DIR"
        local, receivers = self.update_weight_local_checkpoint_dir, self.update_weight_receivers
        if delta and (local is None) == (not receivers):
            yield (
                "--update-weight-mode delta needs --update-weight-local-checkpoint-dir DIR for engines on this machine "
                "or --update-weight-receivers HOST:PORT for those on others; give one of them"
            )
        if delta and local and _resolved(local) == _resolved(self.update_weight_disk_dir):
            yield (
                "--update-weight-local-checkpoint-dir must be another directory than --update-weight-disk-dir "
                f"{self.update_weight_disk_dir}: engines' copies and what is sent have the same names"
            )
        for name, value, wanted, only in (
            ("disk-dir", self.update_weight_disk_dir, disk, "transport disk"),
            ("disk-keep-files", self.update_weight_disk_keep_files, disk, "transport disk"),
            ("local-checkpoint-dir", local, delta, "mode delta"),
            ("receivers", receivers, delta, "mode delta"),
        ):
            if value and not wanted:
                yield (f"--update-weight-{name} means something only with --update-weight-{only}; drop it, or add that")


def _resolved(path: str | None) -> Path:
    return Path(path or ".").resolve()
