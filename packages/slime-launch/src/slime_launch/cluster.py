"""The Ray cluster that ``RAY_ADDRESS`` names: whether it answers, has GPUs, and asks for a token."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from pathlib import Path

from slime_launch.errors import PlacementError

KNOCK_SECONDS = 10.0
ASK_SECONDS = 60.0
COUNT_GPUS = (
    "import logging, sys, ray; "
    "ray.init(sys.argv[1], log_to_driver=False, logging_level=logging.ERROR, configure_logging=False); "
    "print(ray.cluster_resources().get('GPU', 0))"
)
WITHOUT_A_TOKEN = """
import sys
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
address = sys.argv[1]
try:
    GcsClient(address=address if ":" in address else canonicalize_bootstrap_address_or_die(address))
    print("accepted")
except AuthenticationError:
    print("refused")
"""
MAKE_A_TOKEN = "make one with `ray get-auth-token --generate`, and start every node with RAY_AUTH_MODE=token"


@functools.cache
def cluster_has_gpus(address: str) -> bool:
    """Whether a node of the cluster at ``address`` has a GPU; false where it does not answer, which joining it says."""
    try:
        return float(_ask(COUNT_GPUS, address)) > 0
    except ValueError:
        return False


@functools.cache
def asks_for_token(address: str) -> bool | None:
    """Whether the cluster at ``address`` refuses who has no token; ``None`` where it does not answer.

    A client that has no token tries: what this process has in its environment says nothing about the cluster. One that
    is reached by ``ray://`` does not say.
    """
    if address.startswith("ray://"):
        return None
    return {"accepted": False, "refused": True}.get(_ask(WITHOUT_A_TOKEN, address, RAY_AUTH_MODE="disabled"))


def cluster_notices(address: str | None) -> list[str]:
    """A warning if the cluster at ``address`` accepts commands without a token."""
    if address is None or asks_for_token(address) is not False:
        return []
    return [
        f"the Ray cluster at RAY_ADDRESS={address} asks for no token: whoever reaches its ports can run code on it; "
        f"{MAKE_A_TOKEN} (--ray-require-token refuses such a cluster)"
    ]


def check_token(address: str | None, *, required: bool) -> None:
    """Refuse a cluster without a token where one is ``required``.

    Raises:
        PlacementError: The cluster at ``address`` accepts commands without a token, or does not say.
    """
    if not required or address is None:
        return
    asks = asks_for_token(address)
    if asks is None:
        raise PlacementError(
            f"--ray-require-token: the Ray cluster at RAY_ADDRESS={address} could not be asked whether it asks for a "
            "token; give the address of its head as HOST:PORT, and see whether it answers (`ray status`)"
        )
    if not asks:
        raise PlacementError(
            f"--ray-require-token: the Ray cluster at RAY_ADDRESS={address} accepts commands without a token; "
            f"{MAKE_A_TOKEN}"
        )


def check_own_token(address: str) -> None:
    """Refuse to join without the token that the cluster at ``address`` asks for: Ray would end this process.

    Raises:
        PlacementError: The cluster, or ``RAY_AUTH_MODE``, asks for a token, and this process has none.
    """
    if has_token() or not (os.environ.get("RAY_AUTH_MODE") == "token" or asks_for_token(address)):
        return
    raise PlacementError(
        f"the Ray cluster at RAY_ADDRESS={address} is used with a token, and none is here; copy the one of its head to "
        "~/.ray/auth_token, or set RAY_AUTH_TOKEN_PATH to a file that has it"
    )


def has_token() -> bool:
    """Whether Ray will find a token for the cluster: in the environment, or in ~/.ray/auth_token."""
    given = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(given) or (Path.home() / ".ray" / "auth_token").is_file()


def knock(address: str) -> None:
    """Ray itself would try for minutes.

    Raises:
        ConnectionError: Nobody listens at ``address``.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return  # such as `auto`
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from error


def _ask(program: str, address: str, **environment: str) -> str:
    """The last word that ``program`` prints, nothing if it fails.

    A process of its own asks: this one has not read yet what Ray should be started with.
    """
    command, given = [sys.executable, "-P", "-c", program, address], os.environ | environment
    try:
        knock(address)
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=True, env=given)
        return done.stdout.split()[-1]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""
