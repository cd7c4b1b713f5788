"""Ray itself: started inside the run's process and gone with it, or the cluster that ``RAY_ADDRESS`` names."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import shlex
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime_core.importing import keep_to_installed
from slime_launch.cluster import check_own_token, has_token, knock
from slime_launch.config import ClusterConfig
from slime_launch.errors import PlacementError, RayDiedError, Stopped
from slime_launch.placement import KEEP_CHILDREN, plan_layout
from slime_launch.processes import stopped_below
from slime_rollout.engine import LOOPBACK, free_port
from slime_rollout.supervise import descendants, is_alive, private_folder

# Ray makes Unix sockets below it, and their paths may have 107 bytes: 21 after the session's name of 43, ours of 27.
MAX_TEMP_DIR = 14
RAY_FILES = "r"  # below a directory of this user's alone, for Ray lets everybody write into its own
ESSENTIAL = ("gcs_server", "raylet")
SERVICES = ("start_monitor", "start_log_monitor", "start_api_server")
AGENTS = {
    "--dashboard_agent_command": (
        "METRICS_AGENT_PORT_NAME",
        "METRICS_EXPORT_PORT_NAME",
        "DASHBOARD_AGENT_LISTEN_PORT_NAME",
    ),
    "--runtime_env_agent_command": ("RUNTIME_ENV_AGENT_PORT_NAME",),
}
"""The raylet's flags of its agents, and the names of the ports that they write down."""
AGENT_WAITS = 8  # seconds, in which the parts of a run start that need no environment of their own
OWN_PORT = "--runtime-env-agent-port"
TEMP_PREFIX = "slime-ray-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayRuntime:
    """A Ray that runs, with GPUs or without; ``processes`` maps pid → name of its own, where it is embedded."""

    cuda: bool
    processes: Mapping[int, str]

    def check(self) -> None:
        """Raise if one of its processes is gone: Ray itself would hang for a minute, or end this process."""
        for pid, name in self.processes.items():
            if not is_alive(pid):
                raise RayDiedError(f"Ray's {name} (process {pid}) ended by itself; the run cannot go on without it")


@contextlib.contextmanager
def ray_runtime(cluster: ClusterConfig, *, address: str | None, directory: Path | None = None) -> Iterator[RayRuntime]:
    """Start Ray inside this process, or join the cluster at ``address``, for the length of the block.

    A Ray of this process's own has its files below ``directory``, or below one that is removed afterwards.

    Raises:
        PlacementError: Ray does not start, or the cluster does not answer.
        Stopped: SIGTERM came meanwhile.
    """
    with contextlib.ExitStack() as stack:
        if address is None:
            options = _embedded_options(cluster, directory or stack.enter_context(temp_dir()))
        else:
            check_own_token(address)
            if has_token():
                os.environ.setdefault("RAY_AUTH_MODE", "token")
            options = {"address": address}
        ray = _start(options, agent_waits=0 if cluster.train_environment else AGENT_WAITS)
        stack.callback(ray.shutdown)
        processes = _own_processes() if address is None else {}
        yield RayRuntime(cuda=ray.cluster_resources().get("GPU", 0) > 0, processes=processes)


class RayAhead(contextlib.AbstractContextManager[RayRuntime]):
    """A Ray of this process's own that starts when this is made, before the block, which raises what went wrong."""

    def __init__(self, cluster: ClusterConfig, directory: Path) -> None:
        self._stack = contextlib.ExitStack()
        self._error: BaseException | None = None
        try:
            self._runtime = self._stack.enter_context(ray_runtime(cluster, address=None, directory=directory))
        except (PlacementError, Stopped) as error:
            self._error = error

    def __enter__(self) -> RayRuntime:
        if self._error is not None:
            raise self._error
        return self._runtime

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, whether or not there was a block; once is enough."""
        self._stack.close()


def _own_processes() -> dict[int, str]:
    """Ray's essential processes among this process's children: of each the one that started last."""
    found = {}
    for process in sorted(descendants(os.getpid()), key=lambda process: process.start_time):
        with contextlib.suppress(OSError):  # it has just ended
            name = Path(f"/proc/{process.pid}/comm").read_text(encoding="utf-8").strip()
            # What a raylet starts has its name until it runs its own program; Ray leaves one alone that is slow to end.
            if name in ESSENTIAL and process.parent == os.getpid():
                found[name] = process.pid
    return {pid: name for name, pid in found.items()}


def _start(options: dict[str, Any], *, agent_waits: int) -> Any:
    """Initialise Ray; gives its module. ``agent_waits`` is of :func:`_agent`."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray  # reads its settings from the environment, once

    alone = contextlib.nullcontext() if "address" in options else without_services(agent_waits)
    try:
        knock(options.get("address", ""))
        with alone, keep_to_installed(), _empty_folder(options):
            ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=False, **options)
    except ConnectionError as error:
        raise PlacementError(
            f"no Ray cluster answers at RAY_ADDRESS={options['address']} ({error}); start one with `ray start --head`, "
            "or unset RAY_ADDRESS to let slime start Ray itself"
        ) from error
    except SystemExit as error:  # how Ray reacts to SIGTERM
        raise Stopped(signal.SIGTERM) from error
    except Exception as error:  # the class that Ray raises when its processes do not start in time
        stopped, _ = stopped_below("")
        why = f"stopped by a signal: {', '.join(stopped)}" if stopped else "the machine may be overloaded, try again"
        raise PlacementError(f"Ray did not start: {error}; {why}") from error
    return ray


@contextlib.contextmanager
def _empty_folder(options: Mapping[str, Any]) -> Iterator[None]:
    """Work in a folder of this user's alone for the length of the block.

    Ray has its workers look for modules where it was initialised, before all other places. They go to the run's working
    folder when they start.
    """
    if (path := os.environ.get("RAY_AUTH_TOKEN_PATH")) and not path.startswith("~"):
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(Path(path).absolute())
    with contextlib.ExitStack() as stack:
        # Processes of a Ray of this run's own begin there, so it stays.
        own = options.get("_temp_dir")
        folder = Path(own).parent if own else stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.chdir(folder))
        yield


@contextlib.contextmanager
def without_services(agent_waits: int) -> Iterator[None]:
    """Start a Ray of this process's own without what only serves a cluster, for the length of the block.

    That is the autoscaler's monitor, the collector of logs, and the API server, which Ray starts even where it has no
    dashboard, and the agent of metrics: four Python processes. A Ray that has no such methods starts all of it.
    """
    from ray._private import services
    from ray._private.node import Node

    kept = {name: getattr(Node, name) for name in SERVICES if hasattr(Node, name)}
    start = services.start_ray_process

    def start_without_agents(command: list[str], *args: Any, **kwargs: Any) -> Any:
        return start([_agent(word, agent_waits) for word in command], *args, **kwargs)

    for name in kept:
        setattr(Node, name, lambda self, *_args, **_kwargs: None)
    services.start_ray_process = start_without_agents
    try:
        yield
    finally:
        services.start_ray_process = start
        for name, method in kept.items():
            setattr(Node, name, method)


def _agent(word: str, waits: int) -> str:
    """A flag of the raylet, which waits until each of its agents has written its ports down, and ends where one does.

    The agent of metrics and jobs becomes a process that sleeps: -1 is not in use, as Ray's own minimal agent writes it.
    The one that sets up environments gets its port now, so that nobody waits for it. It starts after ``waits`` seconds,
    and works when nobody else does.
    """
    flag, _, command = word.partition("=")
    if flag not in AGENTS or not command:
        return word
    import ray._raylet as names

    given = dict(part.split("=", 1) for part in shlex.split(command) if part.startswith("--") and "=" in part)
    ports, persist = [getattr(names, name, None) for name in AGENTS[flag]], getattr(names, "persist_port", None)
    if None in ports or persist is None or not {"--session-dir", "--node-id"} <= given.keys():
        return word
    own = f"{OWN_PORT}={given.get(OWN_PORT)}"
    port = free_port(LOOPBACK) if own in command else -1
    for name in ports:
        persist(given["--session-dir"], given["--node-id"], name, port)
    if port < 0:
        return f"{flag}=sleep infinity"
    later = f"sleep {waits}; exec nice -n 19 {command.replace(own, f'{OWN_PORT}={port}')}"
    return f"{flag}=sh -c {shlex.quote(later)}"


def keep_to_this_user() -> None:
    """Have a Ray of this process's own listen on 127.0.0.1 alone, and ask for a token. Ray reads both only once."""
    # Despite its name, this setting decides on which address Ray listens. On Linux the default is all addresses.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # keeps out other users of this machine


def _embedded_options(cluster: ClusterConfig, directory: Path) -> dict[str, Any]:
    keep_to_this_user()
    os.environ.update(KEEP_CHILDREN)
    # Ray's default, 15, leaves ranks and engines hardly any time beside whatever else the machine does.
    os.environ.setdefault("RAY_worker_niceness", "0")
    bundles = len(plan_layout(cluster, cuda=False).bundles)
    return {
        "num_cpus": max(bundles, os.cpu_count() or 1),
        "include_dashboard": False,
        "object_store_memory": cluster.ray_object_store_memory,
        "_temp_dir": str(directory.absolute() / RAY_FILES),
        "_system_config": {"enable_worker_prestart": False},
    }


@contextlib.contextmanager
def temp_dir() -> Iterator[Path]:
    """A short-named directory, for this user alone, that is removed afterwards, along with those of killed runs."""
    directory = private_folder(TEMP_PREFIX, longest=MAX_TEMP_DIR)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
