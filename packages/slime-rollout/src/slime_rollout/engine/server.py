"""Server processes: what an engine and the router have in common, the SGLang engine, and what starts one."""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from slime_rollout.engine.addresses import Ports, check_port_free, free_port
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.errors import EngineDiedError, EngineStartError
from slime_rollout.engine.sglang_flags import check_sglang_args, importable_in, installed_flags, missing_sglang
from slime_rollout.engine.spec import EngineSpec, server_command, server_environment
from slime_rollout.http import HttpError, call
from slime_rollout.supervise import Supervised, reaper

logger = logging.getLogger(__name__)

# Seconds that a server gets to end by itself. It has nothing to save, and it would wait for idle clients.
GRACE_SECONDS = 1.0
HEALTH_TIMEOUT_SECONDS = 10.0
POLL_SECONDS = 0.2
# A server's processes share their load in a file whose name begins so. SGLang never removes it.
LOAD_FILES = "/dev/shm/sglang_loads_"
LOG_LINES = 20
# Enough to find the line in front of the stack traces of all a server's processes.
PORT_LOG_LINES = 400


def answers(url: str, timeout: float = HEALTH_TIMEOUT_SECONDS) -> bool:
    """Whether a GET of ``url`` succeeds within ``timeout`` seconds."""
    try:
        call("GET", url, timeout=timeout)
    except HttpError:
        return False
    return True


class ServingProcess:
    """A supervised process that serves HTTP. As a context manager it ends the process on exit.

    Attributes:
        url: Its address.
        title: What messages call it.
        ready_path: What it answers once it serves.
    """

    title = "server"
    ready_path = "/health"

    def __init__(self, process: Supervised, url: str) -> None:
        self._process = process
        self._was_ready = False
        self.url = url

    def is_ready(self, timeout: float = HEALTH_TIMEOUT_SECONDS) -> bool:
        """Whether it answers within ``timeout`` seconds.

        Raises:
            EngineStartError: It ended before it ever answered.
            EngineDiedError: It ended later.
        """
        self.check()
        if answers(self.url + self.ready_path, timeout):
            self._was_ready = True
            return True
        return False

    def wait_until_ready(self, timeout: float = 300.0) -> None:
        """Return when it answers.

        Args:
            timeout: Longest wait in seconds.

        Raises:
            EngineStartError: It ended, or does not answer in time; with the end of its log.
        """
        deadline = time.monotonic() + timeout
        while not self.is_ready(min(HEALTH_TIMEOUT_SECONDS, max(deadline - time.monotonic(), POLL_SECONDS))):
            if time.monotonic() > deadline:
                raise EngineStartError(f"{self.url} does not answer after {timeout:g} s; see {self.log_excerpt()}")
            time.sleep(POLL_SECONDS)

    def check(self) -> None:
        """Raise if it has ended; errors as of :meth:`is_ready`."""
        if (code := self.exit_code) is not None:
            kind = EngineDiedError if self._was_ready else EngineStartError
            what = "ended by itself" if self._was_ready else "did not start"
            raise kind(f"{self.title} {self.url} {what} (exit code {code}); {self.log_excerpt()}")

    @property
    def pid(self) -> int:
        """Process id of its supervisor."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended; ``None`` while any of its processes is left."""
        return self._process.poll()

    def process_ids(self) -> list[int]:
        """Process ids of the server itself, then of all that it started; none once it has ended."""
        return [process.pid for process in reaper.descendants(self.pid)]

    def found_port_taken(self) -> bool:
        """Whether its log says that its port was taken after it had been found free."""
        return bool(re.search("address already in use|EADDRINUSE", self._process.log_tail(PORT_LOG_LINES), re.I))

    def log_excerpt(self) -> str:
        """Where the log is, and its last lines."""
        return f"the end of its log {self._process.log_path}:\n{self._process.log_tail(LOG_LINES)}"

    def request_stop(self) -> None:
        """Ask the process to end, without waiting."""
        self._process.request_stop()

    def stop(self) -> None:
        """End the process and all its children; returns when they are gone."""
        self._process.stop()

    def kill(self) -> None:
        """The same by SIGKILL: at once, and also where SIGSTOP has stopped them."""
        self._process.kill()
        self._process.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class SGLangEngine(ServingProcess):
    """A running ``sglang.launch_server``, made by :meth:`start`, which returns at once.

    Attributes:
        spec: What it serves.
    """

    title = "SGLang engine"

    def __init__(self, process: Supervised, spec: EngineSpec) -> None:
        super().__init__(process, spec.url)
        self.spec = spec

    @classmethod
    def start(cls, config: EngineConfig, spec: EngineSpec, *, log_path: Path) -> SGLangEngine:
        """Start the process; it ends when this one does.

        Args:
            config: The interpreter, and SGLang's flags, which are checked against the SGLang installed there.
            spec: What it serves, and where.
            log_path: Where its output goes.

        Raises:
            ConfigError: The installed SGLang does not know a flag or a value. Nothing was started.
            PortInUseError: The port is taken. Nothing was started.
            SupervisionError: The log file cannot be written.
            OSError: Its directory cannot be made.
        """
        check_flags(config, [spec])
        if spec.port == 0:
            spec = dataclasses.replace(spec, port=free_port(spec.host))
        check_port_free(spec.port, spec.host)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        process = Supervised.start(
            server_command(config, spec),
            env=server_environment(config, spec),
            log_path=log_path,
            grace=GRACE_SECONDS,
            remove_files=LOAD_FILES,
        )
        return cls(process, spec)

    def freeze_gc(self) -> None:
        """Exclude all present objects from the server's garbage collection. For a server that is ready.

        On a CPU, SGLang collects garbage at every flush of its cache, thus in every weight update: 0.3 s for all the
        objects that a server consists of. SGLang asks itself to exclude them when it starts, but by a request that may
        come before it listens, or meet the environment's proxy, and only logs that.
        """
        try:
            call("POST", f"{self.url}/freeze_gc")
        except HttpError as error:
            self.check()
            logger.warning("each weight update of %s may take 0.3 s longer: %s", self.url, error)


class EngineLauncher(Protocol):
    """Starts engines somewhere: on this host, or on a node of a cluster. An engine's ``stop`` ends it."""

    def check(self, specs: Iterable[EngineSpec]) -> None:
        """Check that engines can be started there, before any is.

        Raises:
            ConfigError: The SGLang there does not know a flag or a value.
            EngineStartError: SGLang is not installed there.
        """

    def start(self, spec: EngineSpec, *, log_path: Path) -> SGLangEngine:
        """Start one engine, on a free port if that of ``spec`` is 0; returns at once.

        Raises:
            PortInUseError: The port was taken meanwhile; another attempt may succeed.
        """


class HostLauncher:
    """Starts engines on this host.

    Args:
        config: How engines are started.
        ports: Where their ports come from.
    """

    def __init__(self, config: EngineConfig, ports: Ports) -> None:
        self._config, self._ports = config, ports

    def check(self, specs: Iterable[EngineSpec]) -> None:
        """As of :class:`EngineLauncher`."""
        check_flags(self._config, specs)
        if not importable_in(self._config.python, "sglang"):
            raise EngineStartError(missing_sglang(self._config.python))

    def start(self, spec: EngineSpec, *, log_path: Path) -> SGLangEngine:
        """As of :class:`EngineLauncher`."""
        if spec.port == 0:
            spec = dataclasses.replace(spec, port=self._ports.take(spec.host))
        return SGLangEngine.start(self._config, spec, log_path=log_path)


def check_flags(config: EngineConfig, specs: Iterable[EngineSpec]) -> None:
    """Check the user's flags for engines against the SGLang that is installed.

    Raises:
        ConfigError: It does not know a flag or a value.
    """
    given = [args for args in (config.sglang_args, *(spec.sglang_args for spec in specs)) if args]
    if given:
        flags = installed_flags(config.python)
        for args in given:
            check_sglang_args({name: True if value is False else value for name, value in args.items()}, flags)
