"""The command ``slime-rollout receive-weights``: deltas for engines on a machine that the trainer is not on."""

from __future__ import annotations

import argparse
import fcntl
import os
import threading
from pathlib import Path
from typing import Any, Protocol

from slime_core.errors import ConfigError

SUMMARY = "keep a checkpoint on this machine up to date with the deltas that a trainer publishes"
DESCRIPTION = """\
Keep a checkpoint on this machine up to date with the deltas that a trainer publishes in a directory which both see
(--update-weight-mode delta). The trainer says when, and updates its engines here itself: give the address of --listen
to the run as --update-weight-receivers. Every delta is verified, before and after, and applied in order; a version
appears whole or not at all. Killed at any point and started again, it continues from what is there.
"""
HIGHEST_PORT = 65535


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
    for name, place, metavar, text in (
        ("--from", "source", "DIR", "where versions are published (--update-weight-disk-dir)"),
        ("--to", "directory", "DIR", "on this machine, for up to two copies of the model"),
        ("--hf-checkpoint", "hf_checkpoint", "DIR", "what the run began with"),
        ("--listen", "listen", "HOST:PORT", "wait for the trainer at this address"),
    ):
        parser.add_argument(name, dest=place, required=True, metavar=metavar, help=text)


def receive_weights(given: dict[str, Any]) -> int:
    """``slime-rollout receive-weights``: serve until the process is ended.

    Args:
        given: What was typed, by name.

    Raises:
        ConfigError: A directory or the address cannot be used.
    """
    source, directory = Path(given["source"]).absolute(), Path(given["directory"]).absolute()
    if source.resolve() == directory.resolve():
        raise ConfigError(f"--to must be another directory than --from {source}: versions there have the same names")
    if not source.is_dir():
        raise ConfigError(f"--from {source} is not a directory that this machine sees")
    host, _, port = given["listen"].rpartition(":")
    if not host or not port.isdecimal() or int(port) > HIGHEST_PORT:
        raise ConfigError(f"--listen {given['listen']} is not an address; give HOST:PORT, such as 0.0.0.0:9000")
    from slime_rollout.weights.checkpoint import CheckpointReader
    from slime_rollout.weights.receiver import DeltaReceiver

    CheckpointReader(Path(given["hf_checkpoint"]))  # fails now where it holds no weights, and not at the first update
    lock = _lock(directory)
    try:
        receiver = DeltaReceiver(
            directory=str(directory),
            hf_checkpoint=given["hf_checkpoint"],
            source=str(source),
            host=host,
            port=int(port),
        )
    except OSError as error:
        raise ConfigError(f"--listen {given['listen']} cannot be used: {error}") from error
    try:
        with receiver:
            print(f"listening on {receiver.url}", flush=True)
            threading.Event().wait()
    finally:
        os.close(lock)
    return 0


def _lock(directory: Path) -> int:
    """Lock the directory against other receivers. The lock ends with the process, however that ends."""
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
