"""A run's metrics in Weights & Biases, as an extra: what lies in ``metrics.jsonl`` stays the truth.

The API key reaches W&B through the environment alone. It is in no setting, so it cannot be stored or tracked.
"""

from __future__ import annotations

import importlib.util
import logging
import netrc
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime_core.files import write_whole
from slime_core.importing import install_hint
from slime_launch.config import TrackingConfig
from slime_launch.errors import PreflightError

logger = logging.getLogger(__name__)

KEY = "WANDB_API_KEY"
HOST = "https://api.wandb.ai"
RUN_ID_FILE = "wandb_run_id"
AXES = {"train": "train/step", "rollout": "rollout/step", "perf": "rollout/step", "passrate": "rollout/step"}
"""The metric that the curves of each group are drawn over; ``eval`` has ``eval/step``."""


def hide_key(given: dict[str, Any]) -> None:
    """Move ``--wandb-key`` from the flags that were given to the environment, where W&B looks for it."""
    if (key := given.pop("wandb_key", None)) is not None:
        os.environ[KEY] = key


def check_wandb(config: TrackingConfig) -> None:
    """W&B can be used: it is installed, and has a key where it is online.

    Raises:
        PreflightError: It is not, or has none.
    """
    if not config.use_wandb:
        return
    if importlib.util.find_spec("wandb") is None:
        raise PreflightError(
            f"--use-wandb needs the package wandb; run: {install_hint('slime-launch', 'wandb')}, or leave it out"
        )
    if config.wandb_mode == "online" and not os.environ.get(KEY) and not _has_login(config.wandb_host or HOST):
        raise PreflightError(
            f"--use-wandb has no key: run `wandb login`, set {KEY}, give --wandb-key, or --wandb-mode offline"
        )


def _has_login(host: str) -> bool:
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(urlsplit(host).hostname or host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class WandbRun:
    """One run in W&B. What goes wrong in it after the start is logged once, and ends nothing.

    Args:
        config: Project, names, mode.
        flags: What W&B shows as the run's configuration; it holds no secrets.
        output_dir: Where the run's id is kept, so that a continued run goes on in it, and W&B's files unless
            ``--wandb-dir`` says where.
        resumed: Whether a run is continued.
        steps_per_rollout: Optimizer steps of a rollout, for ``--wandb-always-use-train-step``.

    Raises:
        PreflightError: W&B does not start.
    """

    def __init__(
        self,
        config: TrackingConfig,
        flags: Mapping[str, Any],
        output_dir: Path,
        *,
        resumed: bool,
        steps_per_rollout: int,
    ) -> None:
        import wandb

        stored = output_dir / RUN_ID_FILE
        run_id = config.wandb_run_id or (stored.read_text(encoding="utf-8") if resumed and stored.exists() else None)
        suffix = "" if config.disable_wandb_random_suffix else f"-{secrets.token_hex(3)}"
        group = None if config.wandb_group is None else config.wandb_group + suffix
        hosts = {} if config.wandb_host is None else {"base_url": config.wandb_host}
        try:
            self._run = wandb.init(
                project=config.wandb_project,
                entity=config.wandb_team,
                group=group,
                name=group,
                id=run_id,
                resume=None if run_id is None else "allow",
                dir=config.wandb_dir or str(output_dir),
                mode=config.wandb_mode,
                config=dict(flags),
                settings=wandb.Settings(console="off", silent=True, **hosts),
            )
        except Exception as error:  # wrong key, no such team, no network
            raise PreflightError(f"--use-wandb: W&B does not start: {error}; try --wandb-mode offline") from error
        write_whole(stored, str(self._run.id))
        for prefix in ("train", "rollout", "perf", "passrate", "eval"):
            self._run.define_metric(f"{prefix}/*", step_metric=AXES.get(prefix, f"{prefix}/step"))
        self._factor = steps_per_rollout if config.wandb_always_use_train_step else 1
        self._has_failed = False

    def log(self, row: Mapping[str, Any]) -> None:
        """Add one row of ``metrics.jsonl``."""
        kind, values = row["kind"], {name: value for name, value in row.items() if "/" in name and value is not None}
        step = row["step"] if kind == "train" else row["step"] * self._factor
        self._try("log", values | {f"{kind}/step": step})

    def close(self) -> None:
        """Finish the run: W&B's files are complete, and sent where it is online."""
        self._try("finish")

    def _try(self, method: str, *given: Any) -> None:
        try:
            getattr(self._run, method)(*given)
        except Exception as error:  # no network, a full disk
            if not self._has_failed:
                logger.warning("W&B failed, and the run goes on without what it lost: %s", error)
            self._has_failed = True
