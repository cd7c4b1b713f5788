"""All engines and the router before them, started at once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType

from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.device import engine_device
from slime_rollout.engine.errors import EngineStartError
from slime_rollout.engine.events import EVENTS_FILE, EventLog
from slime_rollout.engine.health import FleetMonitor
from slime_rollout.engine.ports import free_port
from slime_rollout.engine.server import (
    HEALTH_TIMEOUT_SECONDS,
    POLL_SECONDS,
    EngineSpec,
    SGLangEngine,
    check_flags,
    importable_in,
)
from slime_rollout.engine.slots import AnyRouterSlot, EngineSlot, FreePort, GivenRouterSlot, RouterSlot

Progress = Callable[[int, int, float], None]
"""Called about five times a second with: processes that are ready, processes in all, seconds since the start."""


class EngineFleet:
    """Engines behind a router. Made by :meth:`start`; as a context manager it stops them on exit.

    Without ``--use-fault-tolerance`` a process that ends is an error in :meth:`check`, and nothing else happens. With
    it, a thread replaces what dies or hangs, and ``engine_events.jsonl`` in the log directory says what it did.
    Whoever sends weights then says so, before and after (:meth:`begin_update`, :meth:`confirm_update`,
    :meth:`fail_update`): only engines with the weights of the last confirmed update get requests.
    :meth:`engines_behind` names those that these weights have to be sent to again.

    Attributes:
        tp_size: Tensor parallel size of one engine.
        startup_seconds: How long it took until the first request could be sent.
    """

    def __init__(
        self, engines: list[EngineSlot], router: AnyRouterSlot, monitor: FleetMonitor | None, tp_size: int
    ) -> None:
        self._engines = engines
        self._router = router
        self._monitor = monitor
        self.tp_size = tp_size
        self.startup_seconds = 0.0

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        model_path: str,
        num_engines: int,
        dtype: str,
        context_length: int | None,
        seed: int,
        log_dir: Path,
        device: str | None = None,
        on_progress: Progress | None = None,
    ) -> EngineFleet:
        """Start everything; return when the router sends requests to every engine.

        Args:
            config: How engines and router are started.
            model_path: Hugging Face directory.
            num_engines: Number of engines.
            dtype: ``float32``, ``bfloat16`` …
            context_length: Longest prompt plus response in tokens; the model's own limit if ``None``.
            seed: Seed of requests that bring none; engine i gets ``seed + i``.
            log_dir: Directory for ``engine_<i>.log`` and ``router.log``; made if missing.
            device: ``cpu`` or ``cuda``; found out if ``None``.
            on_progress: Told how far it is.

        Raises:
            ConfigError: ``sglang_args`` has a flag or a value that the installed SGLang does not know.
            PortInUseError: A port that was asked for is taken. Nothing was started.
            EngineStartError: Something did not come up, with the last lines of its log. Everything was stopped again.
            EngineDiedError: Something ended while the rest was starting. Everything was stopped again.
        """
        specs = [
            EngineSpec(
                model_path=model_path,
                dtype=dtype,
                context_length=context_length,
                seed=seed + index,
                device=device or str(config.sglang_args.get("device") or engine_device()),
                base_gpu_id=index * config.rollout_num_gpus_per_engine,
            )
            for index in range(num_engines)
        ]
        return cls.launch(config, specs, log_dir=log_dir, on_progress=on_progress)

    @classmethod
    def launch(
        cls,
        config: EngineConfig,
        specs: Sequence[EngineSpec],
        *,
        log_dir: Path,
        on_progress: Progress | None = None,
    ) -> EngineFleet:
        """Start an engine for each of ``specs``, on a port that is free; otherwise as :meth:`start`."""
        started = time.monotonic()
        check_flags(config, specs)
        log_dir.mkdir(parents=True, exist_ok=True)
        ports = _free_ports(without=config.sglang_router_port)
        engines = [
            EngineSlot(
                index,
                config,
                functools.partial(_on_port, spec),
                log_path=log_dir / f"engine_{index}.log",
                free_port=ports,
            )
            for index, spec in enumerate(specs)
        ]
        router: AnyRouterSlot
        if config.sglang_router_url is None:
            split = any(spec.worker_type == "prefill" for spec in specs)
            router = RouterSlot(config, log_path=log_dir / "router.log", free_port=ports, disaggregated=split)
        else:
            router = GivenRouterSlot(config, log_path=log_dir / "router.log", free_port=ports)
        monitor = None
        if config.use_fault_tolerance:
            monitor = FleetMonitor(engines, router, config, EventLog(log_dir / EVENTS_FILE))
        fleet = cls(engines, router, monitor, max(spec.ranks(config) for spec in specs))
        try:
            fleet._start_all(config, on_progress)
        except BaseException:
            fleet.stop()
            raise
        fleet.startup_seconds = time.monotonic() - started
        return fleet

    @property
    def router_url(self) -> str:
        """Where requests go. It stays the same."""
        return self._router.url

    @property
    def engine_urls(self) -> list[str]:
        """Where control traffic goes: weights, cache, health. With fault tolerance, to the engines that are up."""
        return [slot.url for slot in self._engines if self._monitor is None or slot.now.up]

    def process_ids(self) -> dict[str, list[int]]:
        """``engine 0``, ``engine 1`` …, ``router`` → process ids of all that belongs to it, the server itself first."""
        return {slot.name: slot.process.process_ids() for slot in self._everything}

    @property
    def _servers(self) -> list[SGLangEngine]:
        return [slot.process for slot in self._engines]

    @property
    def _everything(self) -> list[EngineSlot | AnyRouterSlot]:
        return [*self._engines, self._router]

    def _start_all(self, config: EngineConfig, on_progress: Progress | None) -> None:
        if not importable_in(config.python, "sglang"):
            raise EngineStartError(
                f"SGLang is not installed in {config.python}; install it there, or name the interpreter that has it "
                "with --sglang-python"
            )
        started = time.monotonic()
        self._router.start()
        for slot in self._engines:
            slot.start()
        self._wait_until_ready(started, config.engine_startup_timeout, on_progress)
        for server in self._servers:
            server.freeze_gc()
        self._router.process.add_workers(
            [server.url for server in self._servers],
            roles={server.url: server.spec.router_role for server in self._servers},
        )
        if self._monitor is not None:
            self._monitor.start()

    def _wait_until_ready(self, started: float, timeout: float, on_progress: Progress | None) -> None:
        waiting = self._everything
        total = len(waiting)
        while True:
            left = max(timeout - (time.monotonic() - started), POLL_SECONDS)
            for slot in self._everything:
                if slot not in waiting:  # the router is up long before the engines are
                    slot.process.check()
            waiting = [slot for slot in waiting if not slot.is_ready(min(left, HEALTH_TIMEOUT_SECONDS))]
            seconds = time.monotonic() - started
            if on_progress is not None:
                on_progress(total - len(waiting), total, seconds)
            if not waiting:
                return
            if seconds > timeout:
                raise EngineStartError(
                    f"{waiting[0].url} does not answer after {timeout:g} s; raise --engine-startup-timeout, or see "
                    + waiting[0].process.log_excerpt()
                )
            time.sleep(POLL_SECONDS)

    @property
    def model_urls(self) -> dict[str, str]:
        """The one model that there is, and where requests for it go."""
        return {"default": self.router_url}

    def check(self) -> None:
        """Raise if any process is gone; with fault tolerance, only if it may not be replaced any more.

        Raises:
            EngineDiedError: Naming the first one, with the last lines of its log.
            SlimeError: A repair failed.
        """
        if self._monitor is not None:
            self._monitor.check()
            if isinstance(self._router, GivenRouterSlot):
                self._router.process.check()
            return
        for slot in self._everything:
            slot.process.check()

    def not_serving(self) -> list[str]:
        """Names of what is being replaced; empty without fault tolerance."""
        return self._monitor.not_serving() if self._monitor is not None else []

    def engines_behind(self) -> list[str]:
        """Addresses of engines that wait for the weights of the last confirmed update; none without fault tolerance."""
        return self._monitor.behind() if self._monitor is not None else []

    def begin_update(self, *, only_behind: bool = False) -> list[str]:
        """Where to send weights now. With fault tolerance, waits until an engine is up.

        Args:
            only_behind: Only to the engines that are behind; the weights are those of the last confirmed update.

        Raises:
            EngineDiedError: As :meth:`check`.
        """
        self.check()
        if self._monitor is None:
            return [] if only_behind else self.engine_urls
        return self._monitor.begin_update(only_behind=only_behind)

    def confirm_update(self, version: int) -> None:
        """Say that every engine of :meth:`begin_update` has confirmed ``version``, which is the current one now."""
        if self._monitor is not None:
            self._monitor.confirm_update(version)

    def fail_update(self, silent: Collection[str] = ()) -> bool:
        """Say that the update failed; its engines get no more requests before another one.

        Args:
            silent: Addresses of the engines that did not answer a request of the update; they are replaced.

        Returns:
            Whether that is because an engine died or hangs, which is now being replaced: then another update may do.
            Looking takes as long as a health check may take. ``False`` without fault tolerance.

        Raises:
            EngineDiedError: As :meth:`check`.
        """
        self.check()
        return self._monitor.fail_update(silent) if self._monitor is not None else False

    def stop(self) -> None:
        """End all processes; returns when they are gone. Does nothing the second time."""
        if self._monitor is not None:
            self._monitor.stop()
        for slot in self._everything:
            slot.request_stop()
        with contextlib.ExitStack() as stack:  # one that cannot be stopped does not keep the others
            for slot in self._everything:
                stack.callback(slot.stop)

    def __enter__(self) -> EngineFleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _on_port(spec: EngineSpec, port: int) -> EngineSpec:
    return dataclasses.replace(spec, port=port)


def _free_ports(*, without: int | None) -> FreePort:
    """Ports for all of a fleet, each only once; ``without`` is promised to the router, which is not yet listening."""
    taken = set() if without is None else {without}

    def take(host: str) -> int:
        port = free_port(host, without=taken)
        taken.add(port)
        return port

    return take
