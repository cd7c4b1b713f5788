"""Settings of the engines and the router, checked when they are built. No torch here."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
import urllib.parse
from collections.abc import Iterator, Mapping

from slime_core.errors import ConfigError
from slime_core.flags import flag
from slime_rollout.engine.weight_sync import WeightSyncConfig

SESSION_POLICIES = ("manual", "consistent_hashing")
"""Policies that send all requests with the same ``X-SMG-Routing-Key`` header to one engine."""
ROUTER_POLICIES = ("cache_aware", "round_robin", "random", "power_of_two", *SESSION_POLICIES)
SglangValue = str | bool | tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(WeightSyncConfig):
    """How SGLang engines and sglang-router are started, and how they get new weights.

    Attributes:
        sglang_args: SGLang's own flags by name, without ``--sglang-``: ``{"chunked-prefill-size": "512",
            "enable-metrics": True}``. They win over what slime would choose.

    Raises:
        ConfigError: A value is outside its range, with the value, the range and what to do.
    """

    sglang_python: str | None = flag(
        None, help="Python interpreter that SGLang runs in; the running one if not given", may_change=True
    )
    rollout_num_gpus_per_engine: int = flag(
        1, help="GPUs of one engine: its tensor parallel size", unit="GPUs", least=1, may_change=True
    )
    sglang_router_ip: str = flag("127.0.0.1", help="address that the router listens on")
    sglang_router_port: int | None = flag(
        None, help="port that the router listens on; a free one if not given", least=1, most=65535
    )
    sglang_router_request_timeout_secs: int = flag(
        14400, help="longest time that the router waits for one request", unit="seconds", least=1
    )
    sglang_router_url: str | None = flag(
        None,
        help="address of a router that others run, to use instead of starting one; it has no other workers",
        metavar="URL",
    )
    router_policy: str = flag(
        "cache_aware",
        choices=ROUTER_POLICIES,
        help="how the router spreads requests; manual and consistent_hashing keep a session at one engine",
        may_change=True,
    )
    engine_startup_timeout: float = flag(
        300.0, help="longest time that an engine may take to start", unit="seconds", above=0, may_change=True
    )
    engine_threads: int | None = flag(
        None,
        help="CPU threads per engine without CUDA; 2, or the launcher's share of the cores, unless given",
        unit="threads",
        least=1,
        may_change=True,
    )
    use_fault_tolerance: bool = flag(
        False, help="replace engines and the router where they die or hang, instead of ending the run", may_change=True
    )
    rollout_health_check_interval: float = flag(
        30.0,
        help="time between two health checks of an engine, with --use-fault-tolerance",
        unit="seconds",
        least=0,
        may_change=True,
    )
    rollout_health_check_timeout: float = flag(
        30.0,
        help="longest time that an engine may take to answer a health check",
        unit="seconds",
        least=2,
        advice="SGLang takes at least one to answer",
        may_change=True,
    )
    rollout_health_check_first_wait: float = flag(
        0.0,
        help="time before the first health check of an engine that has started",
        unit="seconds",
        least=0,
        may_change=True,
    )
    rollout_max_restarts: int = flag(
        5, help="how often each engine, and the router, may be replaced before the run ends", least=0, may_change=True
    )
    rollout_external_engine_addrs: tuple[str, ...] = flag(
        (), help="SGLang engines that others run, to use instead of starting some", metavar="HOST:PORT", may_change=True
    )
    sglang_config: str | None = flag(
        None, help="YAML file of several models and server groups; see slime-rollout's docs/engines.md", metavar="FILE"
    )
    sglang_args: Mapping[str, SglangValue] = dataclasses.field(default_factory=dict)

    def contradictions(self) -> Iterator[str]:
        """Flags without effect on external engines and routers, and values that are no addresses or names."""
        yield from super().contradictions()
        yield from self._invalid_values()
        if self.sglang_router_url is not None:
            yield from _check_given_router(self)
        if self.rollout_external_engine_addrs:
            yield from _check_external(self)

    def _invalid_values(self) -> Iterator[str]:
        try:
            find_python(self.sglang_python)
            for name, value in self.sglang_args.items():
                _check_pass_through(name, value)
            if self.sglang_router_url is not None:
                _url("--sglang-router-url", self.sglang_router_url)
            _ = self.external_urls
        except ConfigError as error:
            yield str(error)

    @property
    def external_urls(self) -> tuple[str, ...]:
        """``rollout_external_engine_addrs`` as full addresses."""
        return tuple(_url("--rollout-external-engine-addrs", address) for address in self.rollout_external_engine_addrs)

    @property
    def update_request_timeout(self) -> float:
        """With fault tolerance, as long as it may take elsewhere to notice that an engine hangs."""
        if not self.use_fault_tolerance:
            return self.update_weight_timeout
        return min(self.rollout_health_check_interval + self.rollout_health_check_timeout, self.update_weight_timeout)

    @property
    def python(self) -> str:
        """The interpreter that SGLang runs in."""
        return find_python(self.sglang_python)

    @property
    def threads(self) -> int:
        """CPU threads per engine on a machine without CUDA."""
        return self.engine_threads or 2


def find_python(given: str | None) -> str:
    """The interpreter that ``--sglang-python`` names, by its path or as a command in PATH; the running one if unset.

    Raises:
        ConfigError: There is no such program.
    """
    found = sys.executable if given is None else shutil.which(given)
    if found is None:
        problem = "is not an executable file" if os.sep in str(given) else "is not a command in PATH"
        raise ConfigError(f"--sglang-python {given} {problem}; give the Python interpreter that SGLang is installed in")
    return found


def _url(name: str, address: str) -> str:
    """``HOST:PORT`` or ``http://HOST:PORT`` as the latter."""
    url = address if "://" in address else f"http://{address}"
    parts = urllib.parse.urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "http" or not parts.hostname or not port or parts.path not in ("", "/") or parts.query:
        raise ConfigError(f"{name} {address} is no address; write HOST:PORT, or http://HOST:PORT")
    return url.rstrip("/")


def _check_given_router(config: EngineConfig) -> Iterator[str]:
    idle = _changed(
        config, "sglang_router_ip", "sglang_router_port", "sglang_router_request_timeout_secs", "router_policy"
    )
    if idle:
        yield (f"{', '.join(idle)}: no effect on the router at --sglang-router-url, which others run; leave out")


def _check_external(config: EngineConfig) -> Iterator[str]:
    urls = config.external_urls
    if repeated := sorted({url for url in urls if urls.count(url) > 1}):
        yield f"--rollout-external-engine-addrs names {', '.join(repeated)} twice; name every engine once"
    idle = _changed(config, "sglang_python", "engine_threads", "sglang_config", "use_fault_tolerance")
    if idle := [*idle, *(f"--sglang-{name}" for name in config.sglang_args)]:
        yield (
            f"{', '.join(idle)}: no effect on the engines of --rollout-external-engine-addrs, which others run; "
            "leave out"
        )


def _changed(config: EngineConfig, *names: str) -> list[str]:
    """The flags among ``names`` that do not have their default."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return ["--" + name.replace("_", "-") for name in names if getattr(config, name) != defaults[name]]


def _check_pass_through(name: str, value: SglangValue) -> None:
    """Names and values only; whether the installed SGLang knows the flag is `sglang_flags`' matter."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise ConfigError(f"sglang_args: {name!r} is no flag's name; write it as in --sglang-NAME, with dashes")
    if value is False or not isinstance(value, str | bool | tuple):
        raise ConfigError(f"--sglang-{name}: got {value!r}; give a string, several in a tuple, or True for a switch")
