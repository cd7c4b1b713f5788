"""The command ``slime-rollout receive-weights``: deltas for engines on a machine that the trainer is not on."""

from __future__ import annotations

import argparse
import fcntl
import math
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.errors import ConfigError
from slime_rollout.engine.config import PAUSE_MODES, REQUEST_TIMEOUT_SECONDS
from slime_rollout.engine.errors import WeightSyncError

if TYPE_CHECKING:
    from slime_rollout.weights.local import LocalVersion

SUMMARY = "keep a checkpoint on this machine up to date with the deltas that a trainer publishes"
DESCRIPTION = """\
Keep a checkpoint on this machine up to date with the deltas that a trainer publishes in a directory which both see
(--update-weight-mode delta). Every delta is verified, before and after, and applied in order; a version appears whole
or not at all. Killed at any point and started again, it goes on from what is there.

Without --listen it follows the directory by itself; engines given by --url load each new version, and one that was
started anew is given the current one. With --listen it waits for a trainer to say when, which then updates its engines
itself: give its address to the run as --update-weight-receivers.
"""
HIGHEST_PORT = 65535
POLL_SECONDS, LONGEST_PAUSE_SECONDS, PATIENCE_SECONDS = 1.0, 30.0, 300.0


class _Commands(Protocol):
    def add_parser(self, name: str, **how: Any) -> argparse.ArgumentParser: ...


def add_receive_weights(commands: _Commands) -> None:
    """Add the command to a command line."""
    parser = commands.add_parser(
        "receive-weights",
        help=SUMMARY,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=receive_weights)
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="DIR",
        help="where versions are published (--update-weight-disk-dir)",
    )
    parser.add_argument(
        "--to",
        dest="directory",
        required=True,
        metavar="DIR",
        help="of this machine, for up to two copies of the model, or three while an engine of --url is late",
    )
    parser.add_argument("--hf-checkpoint", required=True, metavar="DIR", help="what the run began with")
    parser.add_argument(
        "--url", action="append", default=[], help="engine that loads each version from --to; repeat it for more"
    )
    parser.add_argument("--listen", metavar="HOST:PORT", help="wait for a trainer to say when, at this address")
    parser.add_argument("--once", action="store_true", help="bring all to the newest version, and end")
    parser.add_argument(
        "--pause-mode", choices=PAUSE_MODES, help=f"of engines with requests in flight [{PAUSE_MODES[0]}]"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help=f"how long an engine of --url may take to load a version [{REQUEST_TIMEOUT_SECONDS:g}]",
    )
    parser.add_argument(
        "--patience",
        type=float,
        metavar="SECONDS",
        help=f"how long errors may last before the command ends with one; with --once 0 [{PATIENCE_SECONDS:g}]",
    )


def receive_weights(given: dict[str, Any]) -> int:
    """``slime-rollout receive-weights``.

    Args:
        given: What was typed, by name.

    Returns:
        0.

    Raises:
        SlimeError: The settings contradict each other, or an error lasted too long.
    """
    source, directory = Path(given["source"]).absolute(), Path(given["directory"]).absolute()
    _check(given, source, directory)
    from slime_rollout.weights.checkpoint import CheckpointReader

    CheckpointReader(Path(given["hf_checkpoint"]))  # no patience with a directory that is none
    lock = _lock(directory)
    try:
        if given["listen"] is not None:
            _listen(given, source, directory)
        else:
            _follow(given, source, directory)
    except OSError as error:  # a full disk
        raise WeightSyncError(str(error)) from error
    finally:
        os.close(lock)
    return 0


def _check(given: dict[str, Any], source: Path, directory: Path) -> None:
    if source.resolve() == directory.resolve():
        raise ConfigError(f"--to must be another directory than --from {source}: versions there have the same names")
    if not source.is_dir():
        raise ConfigError(f"--from {source} is no directory that this machine sees")
    if given["patience"] is not None and not given["patience"] >= 0:
        raise ConfigError(f"--patience {given['patience']:g} is no time limit; give seconds, 0 or more")
    if given["timeout"] is not None and not 0 < given["timeout"] < math.inf:
        raise ConfigError(f"--timeout {given['timeout']:g} is no time limit; give seconds, above 0")
    of_engines = {"--pause-mode": given["pause_mode"], "--timeout": given["timeout"]}
    others = {"--url": given["url"], "--once": given["once"], "--patience": given["patience"] is not None} | of_engines
    if given["listen"] is not None and (ignored := [name for name, value in others.items() if value]):
        raise ConfigError(f"{ignored[0]} means nothing with --listen, where a trainer tells the engines; drop one")
    if not given["url"] and (idle := [name for name, value in of_engines.items() if value]):
        raise ConfigError(f"{idle[0]} is for the engines of --url; give both")


def _lock(directory: Path) -> int:
    """The only receiver that writes here. The lock ends with the process, however that ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"--to {directory} cannot be used: {error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if isinstance(error, BlockingIOError):
            raise ConfigError(f"another receiver writes to {directory}; end it, or give another --to") from error
        raise ConfigError(f"--to {directory} cannot be locked ({error}); give a directory of this machine") from error
    return handle


def _listen(given: dict[str, Any], source: Path, directory: Path) -> None:
    from slime_rollout.weights.receiver import DeltaReceiver

    host, _, port = given["listen"].rpartition(":")
    if not host or not port.isdecimal() or int(port) > HIGHEST_PORT:
        raise ConfigError(f"--listen {given['listen']} is no address; give HOST:PORT, such as 0.0.0.0:9000")
    try:
        receiver = DeltaReceiver.start(
            directory=str(directory),
            hf_checkpoint=given["hf_checkpoint"],
            source=str(source),
            host=host,
            port=int(port),
        )
    except OSError as error:
        raise ConfigError(f"--listen {given['listen']} cannot be used: {error}") from error
    with receiver:
        print(f"listening on {receiver.url}", flush=True)
        threading.Event().wait()


def _follow(given: dict[str, Any], source: Path, directory: Path) -> None:
    from slime_rollout.weights.follow import Follower, Patience
    from slime_rollout.weights.local import LocalCheckpoint

    checkpoint = LocalCheckpoint(directory, Path(given["hf_checkpoint"]), source)
    follower = Follower(
        checkpoint,
        source,
        tuple(given["url"]),
        pause_mode=given["pause_mode"] or PAUSE_MODES[0],
        timeout=given["timeout"] or REQUEST_TIMEOUT_SECONDS,
    )
    usual = 0.0 if given["once"] else PATIENCE_SECONDS
    patience = Patience(
        usual if given["patience"] is None else given["patience"],
        lambda text: print(f"trying again: {text}", flush=True),
    )
    while True:
        with patience:
            local = follower.step(wait_for_all=given["once"])
            if local is not None:
                print(_news(local, given["url"], follower.late), flush=True)
            if given["once"]:
                if checkpoint.current.version is None:
                    raise ConfigError(f"{source} holds no deltas; a run with --update-weight-mode delta publishes them")
                return
        # Not the same damage every second: each attempt may read the whole model.
        time.sleep(min(POLL_SECONDS * 2 ** min(patience.failures, 10), LONGEST_PAUSE_SECONDS))


def _news(local: LocalVersion, urls: Sequence[str], late: Sequence[str]) -> str:
    """Which engines have a version, and which are not waited for."""
    loaded = [url for url in urls if url.rstrip("/") not in late]
    engines = f", and in {', '.join(loaded)}" if loaded else ""
    others = f"; not waiting for {', '.join(late)}" if late else ""
    return f"weight version {local.version} is in {local.path}{engines}{others}"
