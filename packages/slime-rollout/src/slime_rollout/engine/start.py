"""The engines of a run, however they come about: started here, as a YAML file says, or run by others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.external import ExternalFleet
from slime_rollout.engine.fleet import EngineFleet, Progress
from slime_rollout.engine.models import ModelFleets
from slime_rollout.engine.topology import Topology, read_topology
from slime_rollout.engine.topology_plan import plan_engines


class Engines(Protocol):
    """Engines behind a router, as a run sees them."""

    @property
    def router_url(self) -> str:
        """Where requests to the model that is trained go."""

    @property
    def engine_urls(self) -> Sequence[str]:
        """The engines of that model: where its weights go."""

    @property
    def tp_size(self) -> int:
        """Tensor parallel size of one of them."""

    @property
    def startup_seconds(self) -> float:
        """How long it took until the first request could be sent."""

    @property
    def model_urls(self) -> Mapping[str, str]:
        """Name of every model → address of its router."""

    def check(self) -> None:
        """Raise `EngineDiedError` if something is gone that does not come back."""

    def not_serving(self) -> list[str]:
        """Names of what is being replaced."""

    def engines_behind(self) -> list[str]:
        """Addresses of engines that miss the weights of the last confirmed update."""

    def begin_update(self, *, only_behind: bool = False) -> list[str]:
        """Where to send weights now; with ``only_behind`` those of the last confirmed update."""

    def confirm_update(self, version: int) -> None:
        """Every engine of :meth:`begin_update` has confirmed ``version``."""

    def fail_update(self, silent: Collection[str] = ()) -> bool:
        """The update failed, perhaps as some did not answer; whether an engine that is being replaced is to blame."""

    def stop(self) -> None:
        """End what was started, and leave what others run. Does nothing the second time."""


def start_engines(
    config: EngineConfig,
    *,
    model_path: str,
    num_engines: int,
    dtype: str,
    context_length: int | None,
    seed: int,
    log_dir: Path,
    num_gpus: int | None = None,
    topology: Topology | None = None,
    longest_sample: int | None = None,
    weights_follow: bool = False,
    device: str | None = None,
    on_progress: Progress | None = None,
) -> Engines:
    """Start the engines that ``config`` asks for, or find those that others run; return when requests can be sent.

    Args:
        config: Says which.
        model_path: Hugging Face directory.
        num_engines: Number of engines to start, unless ``sglang_config`` says it.
        dtype: ``float32``, ``bfloat16`` …
        context_length: Longest prompt plus response of engines that are started; the model's own limit if ``None``.
        seed: Seed of requests that bring none.
        log_dir: Directory for logs; made if missing.
        num_gpus: GPUs for generation, which ``sglang_config`` must use up; those of ``num_engines`` if ``None``.
        topology: What ``sglang_config`` holds, where it has been read already.
        longest_sample: Prompt plus response that engines which others run must take; not looked at if ``None``.
        weights_follow: Whether new weights are sent before the first request.
        device: ``cpu`` or ``cuda``; found out if ``None``.
        on_progress: Told how far it is.

    Raises:
        ConfigError: A flag or a value that the installed SGLang does not know.
        EngineError: Something does not come up, or does not fit the run. Everything was stopped again.
    """
    if config.sglang_config is not None:
        plan = plan_engines(
            topology or read_topology(config.sglang_config),
            config,
            hf_checkpoint=model_path,
            num_gpus=num_engines * config.rollout_num_gpus_per_engine if num_gpus is None else num_gpus,
            dtype=dtype,
            context_length=context_length,
            seed=seed,
            device=device,
        )
        return ModelFleets.start(plan, log_dir=log_dir, on_progress=on_progress)
    if config.rollout_external_engine_addrs:
        return ExternalFleet.attach(
            config,
            model_path=model_path,
            dtype=dtype,
            context_length=longest_sample,
            log_dir=log_dir,
            weights_follow=weights_follow,
            on_progress=on_progress,
        )
    return EngineFleet.start(
        config,
        model_path=model_path,
        num_engines=num_engines,
        dtype=dtype,
        context_length=context_length,
        seed=seed,
        log_dir=log_dir,
        device=device,
        on_progress=on_progress,
    )
