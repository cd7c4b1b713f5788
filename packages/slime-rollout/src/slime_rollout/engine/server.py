"""One SGLang server: its command line, its environment, its process."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

from slime_rollout.engine.config import EngineConfig, SglangValue
from slime_rollout.engine.cpu_mode import cpu_environment, cpu_flags
from slime_rollout.engine.device import engine_device
from slime_rollout.engine.errors import EngineDiedError, EngineStartError
from slime_rollout.engine.interpreter import find_package
from slime_rollout.engine.ports import check_port_free, free_port
from slime_rollout.engine.process import ServingProcess, address
from slime_rollout.engine.sglang_flags import check_sglang_args, installed_flags
from slime_rollout.http import HttpError, call
from slime_rollout.supervise import Supervised

logger = logging.getLogger(__name__)

# Seconds that a server gets to end by itself. It has nothing to save, and it would wait for idle clients.
GRACE_SECONDS = 1.0
HEALTH_TIMEOUT_SECONDS = 10.0
POLL_SECONDS = 0.2
FIRST_WEIGHT_VERSION = 0
# A server's processes tell each other their load in a file that begins so. SGLang never removes it.
LOAD_FILES = "/dev/shm/sglang_loads_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What one engine serves, and where.

    Attributes:
        model_path: Hugging Face directory.
        port: Port that it listens on; 0 for one that is free when it starts.
        host: Address that it listens on.
        dtype: ``float32``, ``bfloat16`` …
        context_length: Longest prompt plus response in tokens; the model's own limit if ``None``.
        seed: Seed of requests that bring none.
        device: ``cpu`` or ``cuda``; what this machine has by default.
        base_gpu_id: First GPU of this engine. CUDA only.
        tp_size: Its tensor parallel size; ``rollout_num_gpus_per_engine`` of the config if ``None``.
        sglang_args: SGLang's flags of this engine alone. They win over the config's; ``False`` leaves a flag out.
        worker_type: ``regular``, ``prefill``, ``decode`` or ``encoder``.
        bootstrap_port: Port where a prefill engine hands over to decode engines.
        encoder_urls: Encoders that this engine sends images to.
    """

    model_path: str
    port: int = 0
    host: str = "127.0.0.1"
    dtype: str = "bfloat16"
    context_length: int | None = None
    seed: int = 0
    device: str = dataclasses.field(default_factory=engine_device)
    base_gpu_id: int = 0
    tp_size: int | None = None
    sglang_args: Mapping[str, SglangValue] = dataclasses.field(default_factory=dict)
    worker_type: str = "regular"
    bootstrap_port: int | None = None
    encoder_urls: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Address of the engine."""
        return address(self.host, self.port)

    @property
    def router_role(self) -> dict[str, str | int]:
        """What the router is told of it besides its address: nothing of a regular engine."""
        if self.worker_type == "regular":
            return {}
        port = {} if self.bootstrap_port is None else {"bootstrap_port": self.bootstrap_port}
        return {"worker_type": self.worker_type, **port}

    def ranks(self, config: EngineConfig) -> int:
        """Its tensor parallel size."""
        return self.tp_size or config.rollout_num_gpus_per_engine


def server_command(config: EngineConfig, spec: EngineSpec) -> list[str]:
    """The command line of one server. The user's ``sglang_args`` win over what is chosen here."""
    flags: dict[str, SglangValue] = {
        "model-path": spec.model_path,
        "host": spec.host,
        "port": str(spec.port),
        "dtype": spec.dtype,
        "tp-size": str(spec.ranks(config)),
        "random-seed": str(spec.seed),
        "weight-version": str(FIRST_WEIGHT_VERSION),
        "skip-server-warmup": True,
        "log-level-http": "warning",
    }
    if spec.context_length is not None:
        flags["context-length"] = str(spec.context_length)
    flags |= cpu_flags(spec.context_length) if spec.device == "cpu" else _cuda_flags(spec)
    flags |= _role_flags(spec)
    flags |= {**config.sglang_args, **spec.sglang_args}
    return [config.python, "-m", "sglang.launch_server", *_as_arguments(flags)]


def _cuda_flags(spec: EngineSpec) -> dict[str, SglangValue]:
    """Written from SGLang's documentation; not run on CUDA."""
    return {"base-gpu-id": str(spec.base_gpu_id), "enable-deterministic-inference": True}


def _role_flags(spec: EngineSpec) -> dict[str, SglangValue]:
    """Written from SGLang's documentation for all but regular engines; not run on CUDA."""
    flags: dict[str, SglangValue] = {}
    if spec.worker_type in ("prefill", "decode"):
        flags["disaggregation-mode"] = spec.worker_type
    if spec.bootstrap_port is not None:
        flags["disaggregation-bootstrap-port"] = str(spec.bootstrap_port)
    if spec.worker_type == "encoder":
        flags["encoder-only"] = True
    if spec.encoder_urls:
        flags |= {"language-only": True, "encoder-urls": spec.encoder_urls}
    return flags


def _as_arguments(flags: Mapping[str, SglangValue]) -> list[str]:
    arguments = []
    for name, value in flags.items():
        if value is False:
            continue
        arguments.append(f"--{name}")
        if isinstance(value, tuple):
            arguments += value
        elif isinstance(value, str):
            arguments.append(value)
    return arguments


def server_environment(config: EngineConfig, spec: EngineSpec, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of one server: ``base`` (this process's by default) with what SGLang needs."""
    environment = dict(os.environ if base is None else base)
    # Compiled modules are half of the start-up; without them on disk every process compiles all of SGLang anew.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment |= {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    # The trainer learns from an answer to /health that the server is up; it need not cost a generated token.
    environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    if Path(spec.model_path).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if spec.device == "cpu":
        environment |= cpu_environment(config.threads, spec.ranks(config), environment.get("PYTHONPATH"))
    return environment


class SGLangEngine(ServingProcess):
    """A running ``sglang.launch_server``. As a context manager it ends the process on exit.

    Made by :meth:`start`, which returns at once; :meth:`wait_until_ready` waits until it serves.
    """

    def __init__(self, process: Supervised, spec: EngineSpec) -> None:
        super().__init__(process, spec.url)
        self._was_ready = False
        self.spec = spec

    @classmethod
    def start(cls, config: EngineConfig, spec: EngineSpec, *, log_path: Path) -> SGLangEngine:
        """Start the process; it ends when this one does.

        Args:
            config: The interpreter, and SGLang's flags, which are checked against those that are installed there.
            spec: What it serves, and where.
            log_path: Where its output goes.

        Raises:
            ConfigError: The installed SGLang has no such flag, or it does not take that value. Nothing was started.
            PortInUseError: The port is taken. Nothing was started.
            SupervisionError: The log file cannot be written.
            OSError: Nor can its directory be made.
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

    def is_ready(self, timeout: float = HEALTH_TIMEOUT_SECONDS) -> bool:
        """Whether it answers requests now.

        Args:
            timeout: How long to wait for the answer, in seconds.

        Raises:
            EngineStartError: It ended before it ever answered.
            EngineDiedError: It ended later.
        """
        self.check()
        try:
            call("GET", f"{self.url}/health", timeout=timeout)
        except HttpError:
            return False
        self._was_ready = True
        return True

    def wait_until_ready(self, timeout: float = 300.0) -> None:
        """Return when it answers requests.

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

    def freeze_gc(self) -> None:
        """Have the server's garbage collector leave out all that is there now. For a server that is ready.

        On a CPU, SGLang collects garbage at every flush of its cache, thus in every weight update: 0.3 s for all the
        objects that a server is made of. At its start it tells itself to leave them out, but through a request that may
        come before it listens, or meet the proxy of the environment; SGLang only logs that.
        """
        try:
            call("POST", f"{self.url}/freeze_gc")
        except HttpError as error:
            self.check()
            logger.warning("each weight update of %s may take 0.3 s longer: %s", self.url, error)

    def check(self) -> None:
        """Raise if the process has ended.

        Raises:
            EngineStartError: It ended before it ever answered.
            EngineDiedError: It ended later.
        """
        code = self.exit_code
        if code is None:
            return
        kind = EngineDiedError if self._was_ready else EngineStartError
        what = "ended by itself" if self._was_ready else "did not start"
        raise kind(f"SGLang engine {self.url} {what} (exit code {code}); {self.log_excerpt()}")

    def __enter__(self) -> SGLangEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def check_flags(config: EngineConfig, specs: Iterable[EngineSpec]) -> None:
    """Check all flags that the user gives to engines against the SGLang that is installed.

    Raises:
        ConfigError: It has no such flag, or the flag does not take that value.
    """
    given = [args for args in (config.sglang_args, *(spec.sglang_args for spec in specs)) if args]
    if given:
        flags = installed_flags(config.python)
        for args in given:
            check_sglang_args({name: True if value is False else value for name, value in args.items()}, flags)


def importable_in(python: str, module: str) -> bool:
    """Whether an interpreter can find a package. The package is not imported."""
    return find_package(python, module) is not None
