"""Servers: what an engine serves, its command line and environment, its process, and what starts it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol, Self

from slime_core.errors import ConfigError
from slime_rollout.engine import EngineDiedError, EngineStartError, with_key
from slime_rollout.engine.addresses import LOOPBACK, Ports, address, check_port_free
from slime_rollout.engine.config import API_KEY, EngineConfig, SglangValue
from slime_rollout.engine.python import importable_in
from slime_rollout.engine.sglang_flags import (
    check_sglang_args,
    engine_device,
    import_environment,
    installed_flags,
    missing_sglang,
)
from slime_rollout.http import HttpError, call
from slime_rollout.supervise import Supervised
from slime_rollout.supervise.folders import private_folder

logger = logging.getLogger(__name__)

# Limits of an engine on a CPU. Its KV cache holds so many tokens:
KV_TOKENS = 32768
RUNNING_REQUESTS = 128
PREFILL_TOKENS = 512
# Seconds that a server gets to end by itself. It has nothing to save, and it would wait for idle clients.
GRACE_SECONDS = 1.0
HEALTH_TIMEOUT_SECONDS = 10.0
POLL_SECONDS = 0.2
# A server's processes share their load in a file whose name begins so. SGLang never removes it.
LOAD_FILES = "/dev/shm/sglang_loads_"
LOG_LINES = 20
MEETING = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
PAGE = 4096  # bytes; with fewer, nothing can be written
# Enough to find the line in front of the stack traces of all a server's processes.
PORT_LOG_LINES = 400


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """An engine before it starts: its model, place and limits."""

    model_path: str
    port: int = 0  # that it listens on; 0 for one that is free when it starts
    dtype: str = "bfloat16"
    context_length: int | None = None  # longest prompt plus response in tokens; the model's own limit if `None`
    seed: int = 0  # of requests without one
    device: str | None = None  # `cpu` or `cuda`; if `None` that of the config's `sglang_args`, or what this machine has
    base_gpu_id: int = 0
    tp_size: int | None = None  # its tensor parallel size; the config's `rollout_num_gpus_per_engine` if `None`
    # SGLang's flags of this engine alone. They win over the config's; `False` leaves a flag out.
    sglang_args: Mapping[str, SglangValue] = dataclasses.field(default_factory=dict)
    worker_type: str = "regular"  # or `prefill`, `decode`, `encoder`
    bootstrap_port: int | None = None  # where a prefill engine hands over to decode engines
    encoder_urls: tuple[str, ...] = ()  # encoders that this engine sends images to
    memory_saver: bool = False  # whether it is to give its memory back, which on CUDA SGLang must know at its start
    host: str = LOOPBACK
    nodes: int = 1  # number of nodes that it runs on, each with as many of its GPUs; it is reached on the first of them
    node_rank: int = 0  # which of these nodes this process is for
    meeting_point: str | None = None  # `HOST:PORT` on the first node, where the processes of several nodes meet
    seeded: bool = True  # whether requests have seeds that count; SGLang ends at one with both a seed and min-p
    returns_experts: bool = False  # whether requests will ask which experts were chosen

    @property
    def url(self) -> str:
        """Address of the engine."""
        return address(self.host, self.port)

    @property
    def router_role(self) -> dict[str, str | int]:
        """The router's knowledge of it besides the address; nothing for a regular engine."""
        if self.worker_type == "regular":
            return {}
        port = {} if self.bootstrap_port is None else {"bootstrap_port": self.bootstrap_port}
        return {"worker_type": self.worker_type, **port}

    def ranks(self, config: EngineConfig) -> int:
        """Its tensor parallel size."""
        return self.tp_size or config.rollout_num_gpus_per_engine

    def runs_on(self, config: EngineConfig) -> str:
        """Its device."""
        return self.device or str(config.sglang_args.get("device") or engine_device())


def equal_specs(model: EngineSpec, number: int, config: EngineConfig) -> list[EngineSpec]:
    """Specs of ``number`` engines of one model, each with its seed and GPUs."""
    size = config.rollout_num_gpus_per_engine
    return [dataclasses.replace(model, seed=model.seed + i, base_gpu_id=i * size) for i in range(number)]


def server_command(config: EngineConfig, spec: EngineSpec) -> list[str]:
    """The command line of one server. The user's ``sglang_args`` win over what is chosen here."""
    flags: dict[str, SglangValue] = {
        "model-path": spec.model_path,
        "host": spec.host,
        "port": str(spec.port),
        "dtype": spec.dtype,
        "tp-size": str(spec.ranks(config)),
        "random-seed": str(spec.seed),
        "weight-version": "0",
        "skip-server-warmup": True,
        "log-level-http": "warning",
    }
    if spec.context_length is not None:
        flags["context-length"] = str(spec.context_length)
    flags["enable-deterministic-inference"] = spec.seeded  # `sampling_seed` counts only with this
    flags["enable-return-routed-experts"] = spec.returns_experts
    # For CUDA written from SGLang's documentation; not run there.
    flags |= (
        _cpu_flags(spec.context_length) if spec.runs_on(config) == "cpu" else {"base-gpu-id": str(spec.base_gpu_id)}
    )
    flags |= _role_flags(config, spec)
    if spec.meeting_point is not None:
        flags |= {"nnodes": str(spec.nodes), "node-rank": str(spec.node_rank), "dist-init-addr": spec.meeting_point}
    flags |= {**dict.fromkeys(config.sglang_off, False), **config.sglang_args, **spec.sglang_args}
    given = {name: value for name, value in flags.items() if value is not False and name != API_KEY}
    return [config.python, *module_words("sglang.launch_server", config.key), *flag_words(given)]


def module_words(module: str, key: str | None) -> list[str]:
    """How an interpreter runs a server's module, with the key of :func:`key_environment` if there is one.

    No module of the working folder is imported by it.
    """
    return ["-P", "-m", module] if key is None else ["-P", with_key.__file__, module]


def flag_words(flags: Mapping[str, object]) -> list[str]:
    """Values of a server's flags, by their names without dashes, as words of its command line."""
    words = []
    for name, value in flags.items():
        values = [] if value is True else list(value) if isinstance(value, tuple) else [value]
        words += [f"--{name}", *map(str, values)]
    return words


def key_environment(key: str | None) -> dict[str, str]:
    """The part of a server's environment in which the module of :func:`module_words` finds its key."""
    return {} if key is None else {with_key.KEY: key}


def _role_flags(config: EngineConfig, spec: EngineSpec) -> dict[str, SglangValue]:
    """Written from SGLang's documentation for all but regular engines; not run on CUDA."""
    flags: dict[str, SglangValue] = {}
    if spec.worker_type in ("prefill", "decode"):
        flags["disaggregation-mode"] = spec.worker_type
    if spec.bootstrap_port is not None:
        flags["disaggregation-bootstrap-port"] = str(spec.bootstrap_port)
    if spec.worker_type == "encoder":
        flags["encoder-only"] = True
    if spec.memory_saver and spec.runs_on(config) != "cpu":
        flags["enable-memory-saver"] = True
    if spec.encoder_urls:
        flags |= {"language-only": True, "encoder-urls": spec.encoder_urls}
    return flags


def folder_environment(config: EngineConfig, spec: EngineSpec, folder: Path) -> dict[str, str]:
    """Has an engine keep its sockets in a folder, and its ranks meet there, so that nothing listens for that."""
    args = {**config.sglang_args, **spec.sglang_args}
    replicas = args.get("data-parallel-size", args.get("dp-size", "1"))
    several_groups = replicas != "1" and "enable-dp-attention" not in args
    environment = {"TMPDIR": str(folder)}
    if spec.meeting_point is not None or "dist-init-addr" in args or several_groups or MEETING in os.environ:
        return environment
    if spec.runs_on(config) == "cpu":
        # Ranks share memory under a name that SGLang makes of these, and of where they meet if that is a port.
        environment |= {"MASTER_ADDR": spec.host, "MASTER_PORT": str(spec.port)}
    return environment | {MEETING: f"file://{folder}/ranks"}


def _cpu_flags(context_length: int | None) -> dict[str, SglangValue]:
    return {
        "device": "cpu",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "grammar-backend": "none",
        "disable-overlap-schedule": True,
        "cuda-graph-backend-decode": "disabled",
        "cuda-graph-backend-prefill": "disabled",
        # The cache's size is given in tokens. SGLang only compares this share with what loading seemed to take, and
        # that includes whatever other processes took meanwhile: at 0.1 it gave up while a trainer was starting.
        "mem-fraction-static": "0.8",
        "max-total-tokens": str(max(KV_TOKENS, context_length or 0)),
        "max-running-requests": str(RUNNING_REQUESTS),
        # Samples of one prompt arrive together. A small first part of them is prefilled, and serves the others.
        "schedule-policy": "lpm",
        "chunked-prefill-size": str(PREFILL_TOKENS),
        # Without it an idle server keeps one core busy, and a trainer on the same machine runs at half its speed.
        "sleep-on-idle": True,
    }


def server_environment(config: EngineConfig, spec: EngineSpec) -> dict[str, str]:
    """The environment of one server: this process's, and what SGLang needs."""
    device = spec.runs_on(config)
    environment = import_environment(device)
    environment |= {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", **key_environment(config.key)}
    # An answer to /health only has to say that the server is up; it need not cost a generated token.
    environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    if spec.nodes > 1:  # else its ranks tell each other the address of the first interface that they find
        environment.setdefault("SGLANG_HOST_IP", spec.host)
    if Path(spec.model_path).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if spec.memory_saver and device != "cpu":
        environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
    if device == "cpu":
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # the worker that starts it has its own
            environment[name] = str(config.threads)
        # glibc gives each freed block of over 32 MB back, and the kernel has to clear the next: 5% of a rollout.
        environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 30))
        environment.setdefault("MALLOC_TRIM_THRESHOLD_", str((1 << 31) - 1))
        if spec.ranks(config) > 1:
            cores = sorted(os.sched_getaffinity(0))
            bound = (str(cores[rank % len(cores)]) for rank in range(spec.ranks(config) // spec.nodes))
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)
    return environment


def answers(url: str, timeout: float = HEALTH_TIMEOUT_SECONDS, *, key: str | None = None) -> bool:
    """Whether a GET of ``url`` succeeds within ``timeout`` seconds."""
    try:
        call("GET", url, key=key, timeout=timeout)
    except HttpError:
        return False
    return True


def wait_for(is_ready: Callable[[float], bool], timeout: float, problem: Callable[[], str]) -> None:
    """Return when ``is_ready``, which gets seconds to find out, is true; else `EngineStartError` with ``problem``."""
    deadline = time.monotonic() + timeout
    while not is_ready(min(HEALTH_TIMEOUT_SECONDS, max(deadline - time.monotonic(), POLL_SECONDS))):
        if time.monotonic() > deadline:
            raise EngineStartError(problem())
        time.sleep(POLL_SECONDS)


class _Process(Protocol):
    """The process of a server: a `Supervised`, or one on another node that is asked and ended likewise."""

    @property
    def log_path(self) -> Path | None: ...
    @property
    def pid(self) -> int: ...
    @property
    def ending(self) -> str: ...
    def poll(self) -> int | None: ...
    def process_ids(self) -> list[int]: ...
    def log_tail(self, lines: int) -> str: ...
    def request_stop(self) -> None: ...
    def stop(self) -> object: ...
    def kill(self) -> None: ...


class ServingProcess:
    """A supervised process that serves HTTP. As a context manager it ends the process on exit."""

    title = "server"  # what messages call it
    ready_path = "/health"  # what it answers once it serves

    def __init__(self, process: _Process, url: str) -> None:
        self._process = process
        self._was_ready = False
        self.url = url

    def is_ready(self, timeout: float = HEALTH_TIMEOUT_SECONDS) -> bool:
        """Whether it answers in time. `EngineStartError` if it ended before it ever did, `EngineDiedError` if later."""
        self.check()
        is_up = answers(self.url + self.ready_path, timeout)
        self._was_ready |= is_up
        return is_up

    def wait_until_ready(self, timeout: float = 300.0) -> None:
        """Return when it answers; raises `EngineStartError`, with the end of its log, if it ends or takes too long."""
        hint = f"does not answer after {timeout:g} s; see"
        wait_for(self.is_ready, timeout, lambda: f"{self.url} {hint} {self.log_excerpt()}")

    def check(self) -> None:
        """Raise if it has ended; errors as of :meth:`is_ready`."""
        if self.exit_code is not None:
            kind = EngineDiedError if self._was_ready else EngineStartError
            what = "ended by itself" if self._was_ready else "did not start"
            raise kind(f"{self.title} {self.url} {what} ({self.ending}); {self.log_excerpt()}")

    @property
    def pid(self) -> int:
        """Process id of its supervisor."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended; ``None`` while any of its processes is left."""
        return self._process.poll()

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        return self._process.ending

    def process_ids(self) -> list[int]:
        """Process ids of the server itself, then of all that it started; none once it has ended."""
        return self._process.process_ids()

    def found_port_taken(self) -> bool:
        """Whether its log says that its port was taken after it had been found free."""
        return bool(re.search("address already in use|EADDRINUSE", self._process.log_tail(PORT_LOG_LINES), re.I))

    def log_tail(self, lines: int = LOG_LINES) -> str:
        """The last lines of its log."""
        return self._process.log_tail(lines)

    def log_excerpt(self) -> str:
        """Where the log is, and its last lines; they may be missing, where the disk is full."""
        path = self._process.log_path
        is_full = path is not None and path.parent.is_dir() and shutil.disk_usage(path.parent).free < PAGE
        note = ", which is incomplete because the disk is full" if is_full else ""
        return f"the end of its log {path}{note}:\n{self.log_tail()}"

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

    def __exit__(self, *error: object) -> None:
        self.stop()


class SGLangEngine(ServingProcess):
    """A running ``sglang.launch_server``, made by :meth:`start`, which returns at once."""

    title = "SGLang engine"

    def __init__(self, process: _Process, spec: EngineSpec, key: str | None = None) -> None:
        super().__init__(process, spec.url)
        self.spec, self._key = spec, key

    @classmethod
    def start(
        cls, config: EngineConfig, spec: EngineSpec, *, log_path: Path, ports: Ports | None = None
    ) -> SGLangEngine:
        """Start the process; it ends when this one does. Its port comes from ``ports`` if that of ``spec`` is 0.

        Raises `ConfigError` for flags that do not fit, `PortInUseError`, `SupervisionError`; nothing was started then.
        """
        check_flags(config, [spec])
        if spec.port == 0:
            spec = dataclasses.replace(spec, port=(ports or Ports()).take(spec.host))
        check_port_free(spec.port, spec.host)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            folder = private_folder("slime-engine-")
            undo.callback(shutil.rmtree, folder)
            process = Supervised.start(
                server_command(config, spec),
                env=server_environment(config, spec) | folder_environment(config, spec, folder),
                log_path=log_path,
                grace=GRACE_SECONDS,
                remove_files=LOAD_FILES,
                folder=folder,
                template=config.template if spec.runs_on(config) == "cpu" else None,
            )
            undo.pop_all()
        return cls(process, spec, config.key)

    def freeze_gc(self) -> None:
        """Exclude all present objects from the server's garbage collection. For a server that is ready.

        On a CPU, SGLang collects garbage at every flush of its cache, thus in every weight update: 0.3 s for all the
        objects that a server consists of. SGLang asks itself to exclude them when it starts, but by a request that may
        come before it listens, or meet the environment's proxy, and only logs that.
        """
        try:
            call("POST", f"{self.url}/freeze_gc", key=self._key)
        except HttpError as error:
            self.check()
            logger.warning("each weight update of %s may take 0.3 s longer: %s", self.url, error)


class EngineLauncher:
    """Starts engines on this host; a subclass may start them elsewhere. An engine's ``stop`` ends it."""

    def __init__(self, config: EngineConfig, ports: Ports) -> None:
        self._config, self._ports = config, ports

    def check(self, specs: Iterable[EngineSpec]) -> None:
        """Before any is started: `ConfigError` on invalid flags, `EngineStartError` where SGLang is not installed."""
        check_flags(self._config, specs)
        if not importable_in(self._config.python, "sglang"):
            raise EngineStartError(missing_sglang(self._config.python))

    def start(self, spec: EngineSpec, *, log_path: Path) -> SGLangEngine:
        """Start one engine, on a free port if that of ``spec`` is 0; returns at once. `PortInUseError`: try again."""
        return SGLangEngine.start(self._config, spec, log_path=log_path, ports=self._ports)


def check_flags(config: EngineConfig, specs: Iterable[EngineSpec]) -> None:
    """Check the user's flags for engines; `ConfigError` if the installed SGLang does not know a flag or a value."""
    given = [args for args in (config.sglang_args, *(spec.sglang_args for spec in specs)) if args]
    if any(API_KEY in spec.sglang_args for spec in specs):
        raise ConfigError("api-key cannot be given for one group: all engines have one key; use --sglang-api-key")
    if given:
        flags = installed_flags(config.python)
        for args in given:
            check_sglang_args({name: True if value is False else value for name, value in args.items()}, flags)
