"""Engines and the router before them: what every fleet offers a run, and the fleet of one model started here."""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Self

from slime_rollout.engine import EngineError
from slime_rollout.engine.addresses import Ports
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.health import FleetMonitor
from slime_rollout.engine.server import GRACE_SECONDS, POLL_SECONDS, EngineLauncher, EngineSpec, equal_specs, wait_for
from slime_rollout.engine.slots import EngineSlot, EventLog, RouterSlot

# A server that has died is gone once its supervisor has ended what it left behind.
DEATH_SECONDS = GRACE_SECONDS + 2.0

Progress = Callable[[int, int, float], None]
"""Called about five times a second with: processes that are ready, processes in all, seconds since the start."""


class Fleet(abc.ABC):
    """Engines behind a router, as a run sees them. As a context manager it is stopped on exit.

    Whoever sends weights says so before and after: :meth:`begin_update`, then :meth:`confirm_update` or
    :meth:`fail_update`. Only engines with the weights of the last confirmed update get requests.

    ``tp_size`` is that of the trained model.
    """

    tp_size: int
    _router: RouterSlot
    _updating = False  # whether engines may be paused for new weights
    _monitor: FleetMonitor | None = None  # replaces what fails, with fault tolerance

    @property
    def router_url(self) -> str:
        """Where requests to the trained model go. It stays the same."""
        return self._router.url

    @property
    @abc.abstractmethod
    def engine_urls(self) -> list[str]:
        """The engines of that model that are up: where its weights go, and other control traffic."""

    @property
    def model_urls(self) -> dict[str, str]:
        """Name of every model → address of its router."""
        return {"default": self.router_url}

    @abc.abstractmethod
    def check(self) -> None:
        """Raise if something has failed for good: `EngineDiedError` with the end of a log, or a repair's own error."""

    def not_serving(self) -> list[str]:
        """Names of what is being replaced; empty without fault tolerance."""
        return [] if self._monitor is None else self._monitor.not_serving()

    def engines_behind(self) -> list[str]:
        """Addresses of engines that miss the weights of the last confirmed update; empty without fault tolerance."""
        return [] if self._monitor is None else self._monitor.behind()

    def serves(self) -> bool:
        """Whether an engine gets requests; always without fault tolerance."""
        return self._monitor is None or self._monitor.serves()

    def begin_sleep(self) -> None:
        """Engines are about to give their memory back: wait for those that start; none is started until the end."""
        if self._monitor is not None:
            self._monitor.begin_sleep()

    def end_sleep(self, *, awake: bool) -> None:
        """There is memory for engines again; where they are ``awake``, they have all of theirs."""
        if self._monitor is not None:
            self._monitor.end_sleep(awake=awake)

    def replace(self, urls: Collection[str]) -> None:
        """Replace engines that did not hand their memory over; an `EngineError` if nobody replaces engines."""
        if self._monitor is not None:
            return self._monitor.replace(urls)
        deadline = time.monotonic() + DEATH_SECONDS
        while time.monotonic() < deadline:
            self.check()
            time.sleep(POLL_SECONDS)
        raise EngineError(f"engines do not hand their memory over: {', '.join(urls)}")

    def begin_update(self, *, only_behind: bool = False) -> list[str]:
        """Where to send weights now: to all engines, or ``only_behind`` to those that lack the last confirmed ones.

        With fault tolerance, waits until an engine is up. Raises as :meth:`check`.
        """
        self.check()
        if self._monitor is not None:
            return self._monitor.begin_update(only_behind=only_behind)
        urls = [] if only_behind else self.engine_urls
        self._updating = bool(urls)
        return urls

    def confirm_update(self, version: int) -> None:
        """Every engine of :meth:`begin_update` has confirmed ``version``, which is the current one now."""
        self._updating = False
        if self._monitor is not None:
            self._monitor.confirm_update(version)

    def fail_update(self, silent: Collection[str] = ()) -> bool:
        """The update failed; its engines get no more requests before another one. Raises as :meth:`check`.

        Returns whether an engine died, hangs, or is one of the ``silent`` addresses, and is now being replaced: then a
        retry may succeed. Finding out takes as long as a health check may take. ``False`` without fault tolerance.
        """
        self._updating = False
        self.check()
        return self._monitor is not None and self._monitor.fail_update(silent)

    @abc.abstractmethod
    def stop(self) -> None:
        """End what was started here, and leave what is external. Does nothing the second time."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class EngineFleet(Fleet):
    """Engines of one model behind a router. Made by :meth:`start`.

    Without ``--use-fault-tolerance`` a process that ends is an error in :meth:`check`, and nothing else happens. With
    it, a thread replaces what dies or hangs, and ``engine_events.jsonl`` in the log directory says what it did.
    """

    def __init__(
        self, engines: list[EngineSlot], router: RouterSlot, monitor: FleetMonitor | None, tp_size: int
    ) -> None:
        self._engines = engines
        self._router = router
        self._monitor = monitor
        self._everything: list[EngineSlot | RouterSlot] = [*engines, router]
        self.tp_size = tp_size

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
        launcher: EngineLauncher | None = None,
    ) -> EngineFleet:
        """Start everything; return when the router sends requests to every engine.

        Args:
            model_path: Hugging Face directory.
            dtype: ``float32``, ``bfloat16`` …
            context_length: Longest prompt plus response in tokens; the model's own limit if ``None``.
            seed: Seed of requests without one; engine i gets ``seed + i``.
            log_dir: Directory for ``engine_<i>.log`` and ``router.log``; made if missing.
            device: ``cpu`` or ``cuda``; detected if ``None``.
            launcher: Starts the engines; on this host if ``None``.

        Raises:
            ConfigError: The installed SGLang does not know a flag or a value.
            PortInUseError: A port that was asked for is taken. Nothing was started.
            EngineStartError: A process did not come up, with the end of its log. Everything was stopped again.
            EngineDiedError: A process ended while others were starting. Everything was stopped again.
        """
        model = EngineSpec(model_path=model_path, dtype=dtype, context_length=context_length, seed=seed, device=device)
        specs = equal_specs(model, num_engines, config)
        return cls.launch(config, specs, log_dir=log_dir, on_progress=on_progress, launcher=launcher)

    @classmethod
    def launch(
        cls,
        config: EngineConfig,
        specs: Sequence[EngineSpec],
        *,
        log_dir: Path,
        spare: Sequence[EngineSpec] = (),
        on_progress: Progress | None = None,
        launcher: EngineLauncher | None = None,
    ) -> EngineFleet:
        """Start an engine for each of ``specs``, on a port that is free; otherwise as :meth:`start`.

        With fault tolerance, engines of ``spare`` are started later, each once the ``launcher`` has room for it.
        """
        ports = Ports(config.sglang_router_port)
        launcher = launcher or EngineLauncher(config, ports)
        launcher.check(specs)
        log_dir.mkdir(parents=True, exist_ok=True)
        engines = [
            EngineSlot(index, spec, launcher, log_path=log_dir / f"engine_{index}.log", spare=index >= len(specs))
            for index, spec in enumerate([*specs, *spare])
        ]
        split = any(spec.worker_type == "prefill" for spec in specs)
        router = RouterSlot(config, ports, log_path=log_dir / "router.log", disaggregated=split)
        monitor = FleetMonitor(engines, router, config, EventLog(log_dir)) if config.use_fault_tolerance else None
        fleet = cls(engines, router, monitor, max(spec.ranks(config) for spec in specs))
        try:
            fleet._start_all(config.engine_startup_timeout, on_progress)
        except BaseException:
            fleet.stop()
            raise
        return fleet

    def _start_all(self, timeout: float, on_progress: Progress | None) -> None:
        self._router.start()
        engines = [slot for slot in self._engines if not slot.spare]
        for slot in engines:
            slot.start()
        self._wait_until_ready([*engines, self._router], timeout, on_progress)
        for slot in engines:
            slot.process.freeze_gc()
        self._router.process.add_workers(
            [slot.url for slot in engines], roles={slot.url: slot.process.spec.router_role for slot in engines}
        )
        if self._monitor is not None:
            self._monitor.start()

    def _wait_until_ready(
        self, slots: list[EngineSlot | RouterSlot], timeout: float, on_progress: Progress | None
    ) -> None:
        waiting, total, started = slots, len(slots), time.monotonic()

        def all_ready(seconds: float) -> bool:
            nonlocal waiting
            for slot in slots:
                if slot not in waiting:  # the router is up long before the engines are
                    slot.process.check()
            waiting = [slot for slot in waiting if not slot.is_ready(seconds)]
            if on_progress is not None:
                on_progress(total - len(waiting), total, time.monotonic() - started)
            return not waiting

        hint = f"does not answer after {timeout:g} s; raise --engine-startup-timeout, or see"
        wait_for(all_ready, timeout, lambda: f"{waiting[0].url} {hint} {waiting[0].process.log_excerpt()}")

    @property
    def engine_urls(self) -> list[str]:
        """As of :class:`Fleet`."""
        return [slot.url for slot in self._engines if self._monitor is None or slot.now.up]

    def process_ids(self) -> dict[str, list[int]]:
        """``engine 0``, ``engine 1`` …, ``router`` → ids of its processes, the server itself first."""
        return {slot.name: slot.process.process_ids() for slot in self._everything}

    def check(self) -> None:
        """As of :class:`Fleet`; without fault tolerance, if any process is gone."""
        if self._monitor is not None:
            self._monitor.check()
        for slot in self._everything:
            if self._monitor is None or (slot is self._router and self._router.is_external):
                slot.process.check()

    def stop(self) -> None:
        """End all processes; returns when they are gone."""
        if self._monitor is not None:
            self._monitor.stop()
        for slot in self._everything:
            slot.request_stop()
        with contextlib.ExitStack() as stack:  # an error with one of them must not keep the others
            for slot in self._everything:
                stack.callback(slot.stop)
