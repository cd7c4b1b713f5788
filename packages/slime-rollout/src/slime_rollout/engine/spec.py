"""What one engine serves, and the command line and environment of its server, on CUDA or on a CPU."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from slime_rollout.engine.addresses import LOOPBACK, address
from slime_rollout.engine.config import EngineConfig, SglangValue

FIRST_WEIGHT_VERSION = 0
# Only engine processes on a CPU import what is there.
CPU_SHIMS = Path(__file__).parent / "cpu_shims"
# Limits of an engine on a CPU. Its KV cache holds so many tokens:
KV_TOKENS = 32768
RUNNING_REQUESTS = 128
PREFILL_TOKENS = 512


def engine_device() -> str:
    """``"cuda"`` if the NVIDIA driver shows a GPU to this machine, else ``"cpu"``. Needs no torch."""
    return "cuda" if any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What one engine serves, and where.

    Attributes:
        model_path: Hugging Face directory.
        port: Port that it listens on; 0 for one that is free when it starts.
        host: Address that it listens on.
        dtype: ``float32``, ``bfloat16`` …
        context_length: Longest prompt plus response in tokens; the model's own limit if ``None``.
        seed: Seed of requests without one.
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
    host: str = LOOPBACK
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
        """What the router needs to know besides the address; nothing for a regular engine."""
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
    flags |= _cpu_flags(spec.context_length) if spec.device == "cpu" else _cuda_flags(spec)
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


def server_environment(config: EngineConfig, spec: EngineSpec) -> dict[str, str]:
    """The environment of one server: this process's, and what SGLang needs."""
    environment = import_environment(spec.device)
    environment |= {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    # An answer to /health only has to say that the server is up; it need not cost a generated token.
    environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    if Path(spec.model_path).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if spec.device == "cpu":
        environment["OMP_NUM_THREADS"] = str(config.threads)
        if (ranks := spec.ranks(config)) > 1:
            cores = sorted(os.sched_getaffinity(0))
            bound = (str(cores[rank % len(cores)]) for rank in range(ranks))
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)
    return environment


def import_environment(device: str | None = None) -> dict[str, str]:
    """This process's environment, and what a process needs to import SGLang.

    Args:
        device: ``cpu`` or ``cuda``; what this machine has if ``None``.
    """
    environment = dict(os.environ)
    # Compiled modules are half of the start-up; without them on disk every process compiles all of SGLang.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if (device or engine_device()) == "cpu":
        environment |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "slime_cpu_shims.models",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(CPU_SHIMS), environment.get("PYTHONPATH")))),
            # Threads that wait by spinning make a step twenty times slower as soon as anything else needs their core.
            "OMP_WAIT_POLICY": "PASSIVE",
            # Inductor would need a C++ compiler, and minutes.
            "TORCHDYNAMO_DISABLE": "1",
        }
    return environment


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
        # `sampling_seed` counts only with this.
        "enable-deterministic-inference": True,
    }
