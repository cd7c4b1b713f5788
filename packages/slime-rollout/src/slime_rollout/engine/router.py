"""sglang-router, one process in front of all engines: started here or external, and what it is asked over HTTP."""

from __future__ import annotations

import abc
import logging
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from slime_rollout.engine import EngineDiedError, EngineStartError, PortInUseError
from slime_rollout.engine.addresses import address, check_port_free
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.server import ServingProcess, answers, flag_words, key_environment, module_words
from slime_rollout.engine.with_key import KEY
from slime_rollout.http import HttpError, call
from slime_rollout.supervise import Supervised
from slime_rollout.supervise.reaper import is_stopped

logger = logging.getLogger(__name__)

GRACE_SECONDS = 1.0
LIVENESS_PATH = "/liveness"
CONTROL_TIMEOUT_SECONDS = 5.0
# An external router is asked this often at most, and counts as gone after so many failures in a row.
CHECK_SECONDS = 5.0
MISSED_CHECKS = 3
POLL_SECONDS = 0.1
WORKER_TIMEOUT_SECONDS = 60.0
OFFER_SECONDS = 30
NOT_FOUND = 404
# At a start nothing else waits while a request is retried.
START_ATTEMPTS = 3
PROXIES = ("http_proxy", "https_proxy", "all_proxy")

# With the router's own defaults, an engine that was started again gets no requests for more than ten seconds.
_RECOVERY_FLAGS = {
    "cb-failure-threshold": "3",
    "cb-timeout-duration-secs": "4",
    "cb-success-threshold": "1",
    "health-check-interval-secs": "5",
    "health-check-timeout-secs": "20",
    "health-failure-threshold": "3",
    "health-success-threshold": "1",
    "worker-startup-check-interval": "1",
    "worker-startup-timeout-secs": str(OFFER_SECONDS),
    "shutdown-grace-period-secs": "1",
}

POLICIES_WITHOUT_FLAG = ("consistent_hashing",)
# The router has these policies, but its own command line does not list them.
_WITH_POLICY = f"""
import os, sys
from sglang_router.launch_router import launch_router, parse_router_args
args = parse_router_args(sys.argv[2:])
args.policy, args.api_key = sys.argv[1], os.environ.pop({KEY!r}, None)
launch_router(args)
"""


def router_command(config: EngineConfig, *, port: int, prometheus_port: int, disaggregated: bool = False) -> list[str]:
    """The router's command line, for this process's own interpreter."""
    flags: dict[str, object] = {
        "host": config.sglang_router_ip,
        "port": str(port),
        "request-timeout-secs": str(config.sglang_router_request_timeout_secs),
        "prometheus-host": "127.0.0.1",
        "prometheus-port": str(prometheus_port),
        "log-level": "warn",
        **_RECOVERY_FLAGS,
    }
    if config.router_policy == "manual":
        # A new session goes to the engine with the fewest requests in flight, and stays there.
        flags["assignment-mode"] = "min_group"
    arguments = flag_words(flags | dict(config.router_args))
    arguments += ["--pd-disaggregation"] if disaggregated else []
    if config.router_policy in POLICIES_WITHOUT_FLAG:
        return [sys.executable, "-P", "-c", _WITH_POLICY, config.router_policy, *arguments]
    words = module_words("sglang_router.launch_router", config.key)
    return [sys.executable, *words, *arguments, "--policy", config.router_policy]


def check_router_port(host: str, port: int) -> None:
    """Raise `PortInUseError` if the router could not listen there."""
    try:
        check_port_free(port, host, flag="--sglang-router-port")
    except PortInUseError as error:
        raise PortInUseError(f"{error}; give a router that runs already with --sglang-router-url") from error


Workers = dict[str, tuple[str, bool]]
"""Address of every engine that a router knows → its id there, and whether it gets requests."""


class RouterApi(abc.ABC):
    """Requests to any running sglang-router.

    A request that gets no answer, or a server error, is tried ``attempts`` times. It carries ``key``, if there is one.
    """

    url: str
    key: str | None = None
    attempts: ClassVar[int] = 1

    @abc.abstractmethod
    def check(self) -> None:
        """Raise `EngineDiedError` if it is gone."""

    @abc.abstractmethod
    def log_excerpt(self) -> str:
        """Where its log is, and its last lines where they can be read."""

    def add_workers(
        self,
        urls: Sequence[str],
        *,
        roles: Mapping[str, Mapping[str, Any]] | None = None,
        timeout: float = WORKER_TIMEOUT_SECONDS,
    ) -> None:
        """Register engines that are ready, and perhaps known already; return when it sends them requests.

        ``roles`` has what else the router must know of an engine, by its address.

        Raises:
            EngineStartError: It refuses one of them, or does not use it in time.
            EngineDiedError: The router is gone.
        """
        try:
            known = self.workers(attempts=START_ATTEMPTS)
            for url in urls:
                if url not in known:
                    self.offer_worker(url, (roles or {}).get(url), attempts=START_ATTEMPTS)
            deadline = time.monotonic() + timeout
            while missing := sorted(set(urls) - self.healthy_workers()):
                self.check()
                if time.monotonic() > deadline:
                    raise EngineStartError(
                        f"the router {self.url} does not use {', '.join(missing)} after {timeout:g} s; see whether it "
                        f"can reach them, and {self.log_excerpt()}"
                    )
                time.sleep(POLL_SECONDS)
        except HttpError as error:
            what = "did not answer when it was given engines" if error.status is None else "refused an engine"
            raise EngineStartError(f"the router {self.url} {what}: {error}; see {self.log_excerpt()}") from error

    def healthy_workers(self) -> set[str]:
        """Addresses of the engines that get requests; errors as of :meth:`workers`."""
        return {url for url, (_, healthy) in self.workers(attempts=START_ATTEMPTS).items() if healthy}

    def workers(self, *, attempts: int | None = None) -> Workers:
        """The engines that it knows; `HttpError` if it does not answer in time, or not like a router."""
        attempts = attempts or self.attempts
        answer = call("GET", f"{self.url}/workers", key=self.key, timeout=CONTROL_TIMEOUT_SECONDS, attempts=attempts)
        try:
            return {worker["url"]: (worker["id"], bool(worker["is_healthy"])) for worker in answer["workers"]}
        except (KeyError, TypeError):
            raise HttpError("GET", f"{self.url}/workers", 200, f"not a list of workers: {str(answer)[:200]}") from None

    def offer_worker(self, url: str, role: Mapping[str, Any] | None = None, *, attempts: int | None = None) -> None:
        """Register an engine, without waiting; the router tries the engine first, for :data:`OFFER_SECONDS`.

        It tries ten at once, duplicates included: ten offers of one engine that hangs keep every other engine out.
        """
        # Client requests bring the key along, but what the router itself asks an engine does not.
        body = {"url": url, **(role or {}), **({"api_key": self.key} if self.key else {})}
        attempts = attempts or self.attempts
        call("POST", f"{self.url}/workers", body, key=self.key, timeout=CONTROL_TIMEOUT_SECONDS, attempts=attempts)

    def remove_worker(self, url: str) -> None:
        """Stop it from sending requests to an engine; does nothing if it does not know that one."""
        if url not in (workers := self.workers()):
            return
        try:
            path = f"{self.url}/workers/{workers[url][0]}"
            call("DELETE", path, key=self.key, timeout=CONTROL_TIMEOUT_SECONDS)
        except HttpError as error:
            if error.status != NOT_FOUND:  # else it was removed meanwhile
                raise


class Router(ServingProcess, RouterApi):
    """A running router, made by :meth:`start`, which returns at once. It has no workers at first."""

    title = "sglang-router"
    ready_path = LIVENESS_PATH

    @classmethod
    def start(
        cls, config: EngineConfig, *, port: int, prometheus_port: int, log_path: Path, disaggregated: bool = False
    ) -> Router:
        """Start the process; it ends when this one does. ``disaggregated``: its engines are for prefill and decode.

        Raises `PortInUseError` and `SupervisionError`; nothing was started then.
        """
        check_router_port(config.sglang_router_ip, port)
        command = router_command(config, port=port, prometheus_port=prometheus_port, disaggregated=disaggregated)
        # Proxies cannot reach engines on the loopback address.
        environment = {name: value for name, value in os.environ.items() if name.lower() not in PROXIES}
        environment |= key_environment(config.key)
        process = Supervised.start(command, env=environment, log_path=log_path, grace=GRACE_SECONDS)
        router = cls(process, address(config.sglang_router_ip, port))
        router.key = config.key
        return router

    def log_excerpt(self) -> str:
        """As of any server; before it, which of the router's processes, all on this node, a signal has stopped."""
        stopped = ", ".join(f"process {pid}" for pid in self.process_ids() if is_stopped(pid))
        return f"{stopped}, stopped by a signal, and {super().log_excerpt()}" if stopped else super().log_excerpt()


class ExternalRouter(RouterApi):
    """An external sglang-router, made by :meth:`connect`; used like :class:`Router`, but never stopped.

    It lists only the engines of this run: those given to :meth:`connect`, and those that it was offered.
    """

    attempts = 3
    exit_code = None  # it is not this run's process

    def __init__(self, url: str, known: Collection[str] = (), key: str | None = None) -> None:
        self.url, self.key = url, key
        self._known = frozenset(known)
        self._added: set[str] = set()
        self._next_check = 0.0
        self._missed = 0

    @classmethod
    def connect(cls, url: str, engine_urls: Collection[str] = (), *, key: str | None = None) -> ExternalRouter:
        """An sglang-router with no healthy workers but ``engine_urls``; else an `EngineStartError`."""
        router = cls(url.rstrip("/"), engine_urls, key)
        try:
            workers = super(cls, router).workers()
        except HttpError as error:
            raise EngineStartError(f"--sglang-router-url {url} does not answer as a router: {error}") from error
        others = {worker: healthy for worker, (_, healthy) in workers.items() if worker not in engine_urls}
        if used := sorted(worker for worker, healthy in others.items() if healthy):
            raise EngineStartError(
                f"the router {url} sends requests to {', '.join(used)}, not of this run; give a router without other "
                f"workers, or remove them with DELETE {router.url}/workers/ID"
            )
        if others:
            logger.warning("the router %s has workers that do not answer: %s", url, ", ".join(sorted(others)))
        return router

    def is_ready(self, timeout: float = CONTROL_TIMEOUT_SECONDS) -> bool:
        """As :meth:`ServingProcess.is_ready`."""
        return answers(self.url + LIVENESS_PATH, timeout)

    def offer_worker(self, url: str, role: Mapping[str, Any] | None = None, *, attempts: int | None = None) -> None:
        """As :meth:`RouterApi.offer_worker`."""
        # It counts as this run's even after its removal: the router lists an engine only once it has tried it.
        self._added.add(url)
        super().offer_worker(url, role, attempts=attempts)

    def process_ids(self) -> list[int]:
        """None: it is not this run's process."""
        return []

    def check(self) -> None:
        """Raise `EngineDiedError` if it has not answered three times in a row. Asks every five seconds at most."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_SECONDS
        self._missed = 0 if self.is_ready() else self._missed + 1
        if self._missed >= MISSED_CHECKS:
            raise EngineDiedError(f"the external router {self.url} does not answer; start it again")

    def log_excerpt(self) -> str:
        """Where its log is."""
        return "the log of that external router"

    def request_stop(self) -> None:
        """Unregister the engines that this run has registered."""
        try:
            for url in sorted(self._added):
                self.remove_worker(url)
        except HttpError as error:
            logger.warning("engines of this run may be left in the router %s: %s", self.url, error)
        self._added.clear()

    stop = request_stop

    def workers(self, *, attempts: int | None = None) -> Workers:
        """As :meth:`RouterApi.workers`, but of this run alone."""
        ours = self._known | self._added
        return {url: state for url, state in super().workers(attempts=attempts).items() if url in ours}
