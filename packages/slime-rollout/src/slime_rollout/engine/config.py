"""Settings of the engines and the router, checked when they are built. No torch here."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Self

from slime_core.errors import ConfigError
from slime_core.flags import flag
from slime_core.former_names import renamed
from slime_core.needs import GENERATES, given, unless
from slime_rollout.engine.addresses import full_address
from slime_rollout.engine.python import find_python
from slime_rollout.engine.transports import WeightSyncConfig, setting

SESSION_POLICIES = ("manual", "consistent_hashing")
"""Policies that send all requests with the same ``X-SMG-Routing-Key`` header to one engine."""
ROUTER_POLICIES = ("cache_aware", "round_robin", "random", "power_of_two", *SESSION_POLICIES)
API_KEY = "api-key"
"""SGLang's flag for the key that requests must carry."""
_OWN_ROUTER = (GENERATES, unless("sglang_router_url"))
_OWN_ENGINES = (GENERATES, unless("rollout_external_engine_addrs"))
_WATCHED = given("use_fault_tolerance")
SglangValue = str | bool | tuple[str, ...]
RouterValue = str | int | float


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(WeightSyncConfig, needs=GENERATES):
    """How SGLang engines and sglang-router are started, and how they get new weights.

    Attributes:
        sglang_args: SGLang's own flags by name, without ``--sglang-``: ``{"chunked-prefill-size": "512",
            "enable-metrics": True}``. They win over slime's choices.
        sglang_off: SGLang's own switches that are off also where slime would choose them.
        router_args: sglang-router's own flags by name, without ``--router-``, likewise.
        own_key: The key that engines and router ask for where ``--sglang-api-key`` gives none, of :meth:`with_key`.
        template: Address of a process that has imported SGLang, to fork engines from; of `engine.template`.
    """

    sglang_python: str | None = setting(
        None,
        help="Python interpreter that SGLang runs in, path or command; if unset the first that has SGLang: the running "
        "one, .venv-engine next to its environment, python3 in PATH",
        needs=_OWN_ENGINES,
        harmless=True,
    )
    rollout_num_gpus_per_engine: int = setting(
        1, help="GPUs of one engine: its tensor parallel size", unit="GPUs", least=1
    )
    sglang_router_ip: str = flag("127.0.0.1", help="address that the router listens on", needs=_OWN_ROUTER)
    sglang_router_port: int | None = flag(
        None, help="port that the router listens on; a free one if unset", least=1, most=65535, needs=_OWN_ROUTER
    )
    sglang_router_request_timeout_secs: int = flag(
        14400, help="longest time that the router waits for one request", unit="seconds", least=1, needs=_OWN_ROUTER
    )
    sglang_router_url: str | None = flag(
        None,
        help="address of an external router, to use instead of starting one; it must have no other workers",
        metavar="URL",
    )
    router_policy: str = setting(
        "cache_aware",
        choices=ROUTER_POLICIES,
        help="how the router spreads requests; manual and consistent_hashing keep a session at one engine",
        needs=_OWN_ROUTER,
    )
    engine_startup_timeout: float = setting(
        300.0, help="longest time that an engine may take to start", unit="seconds", above=0
    )
    engine_threads: int | None = setting(
        None,
        help="CPU threads per engine without CUDA; if unset 2, or its share of the cores with the launcher",
        unit="threads",
        least=1,
        needs=_OWN_ENGINES,
    )
    use_fault_tolerance: bool = setting(
        False,
        help="replace engines and the router when they die or hang, instead of ending the run",
        needs=_OWN_ENGINES,
    )
    rollout_health_check_interval: float = setting(
        30.0,
        help="time between two health checks of an engine, with --use-fault-tolerance",
        unit="seconds",
        least=0,
        needs=_WATCHED,
    )
    rollout_health_check_timeout: float = setting(
        30.0,
        help="longest time to wait for the answer to a health check",
        unit="seconds",
        least=2,
        advice="SGLang takes at least one to answer",
        needs=_WATCHED,
    )
    rollout_health_check_first_wait: float = setting(
        0.0, help="time before the first health check of a new engine", unit="seconds", least=0, needs=_WATCHED
    )
    rollout_max_restarts: int = setting(
        5, help="how often each engine, and the router, may be replaced before the run fails", least=0, needs=_WATCHED
    )
    rollout_external_engine_addrs: tuple[str, ...] = setting(
        (), help="external SGLang engines, to use instead of starting some", metavar="HOST:PORT"
    )
    sglang_config: str | None = flag(
        None,
        help="YAML file of several models and server groups; see slime-rollout's docs/engines.md",
        metavar="FILE",
        needs=_OWN_ENGINES,
    )
    prefill_num_servers: int | None = setting(
        None,
        help="engines that only read prompts; the others generate (short for a --sglang-config)",
        least=1,
        needs=_OWN_ENGINES,
    )
    sglang_args: Mapping[str, SglangValue] = dataclasses.field(default_factory=dict, repr=False)  # a key is among them
    sglang_off: tuple[str, ...] = ()
    router_args: Mapping[str, RouterValue | tuple[RouterValue, ...]] = dataclasses.field(default_factory=dict)
    own_key: str | None = dataclasses.field(default=None, repr=False)
    template: str | None = dataclasses.field(default=None, repr=False)

    def contradictions(self) -> Iterator[str]:
        """Flags without effect on external engines and routers, and values that are not addresses or names."""
        yield from super().contradictions()
        yield from self._invalid_values()
        if self.sglang_router_url is not None and self.router_args:
            idle = ", ".join(f"--router-{name}" for name in self.router_args)
            yield f"{idle}: no effect on the external router at --sglang-router-url; leave out"
        if self.sglang_config is not None and self.prefill_num_servers is not None:
            yield (
                f"--sglang-config {self.sglang_config} and --prefill-num-servers {self.prefill_num_servers} both say "
                "what the engines are; give one of them"
            )
        own = [f"--sglang-{name}" for name in self.sglang_args if name != API_KEY]
        if self.rollout_external_engine_addrs and own:
            engines = "the external engines of --rollout-external-engine-addrs"
            yield f"{', '.join(own)}: no effect on {engines}; leave out"

    def _invalid_values(self) -> Iterator[str]:
        try:
            if self.sglang_python is not None:
                find_python(self.sglang_python)
            for name, value in self.sglang_args.items():
                _check_pass_through(name, value)
            if self.sglang_router_url is not None:
                full_address("--sglang-router-url", self.sglang_router_url)
            urls = self.external_urls
            if repeated := sorted({url for url in urls if urls.count(url) > 1}):
                yield f"--rollout-external-engine-addrs names {', '.join(repeated)} twice; name every engine once"
        except ConfigError as error:
            yield str(error)

    @property
    def external_urls(self) -> tuple[str, ...]:
        """``rollout_external_engine_addrs`` as full addresses."""
        return tuple(
            full_address("--rollout-external-engine-addrs", given) for given in self.rollout_external_engine_addrs
        )

    @property
    def update_request_timeout(self) -> float:
        """With fault tolerance, no longer than the health checks need to notice that an engine hangs."""
        if not self.use_fault_tolerance:
            return self.update_weight_timeout
        return min(self.rollout_health_check_interval + self.rollout_health_check_timeout, self.update_weight_timeout)

    @property
    def python(self) -> str:
        """The interpreter that SGLang runs in."""
        return find_python(self.sglang_python)

    @property
    def key(self) -> str | None:
        """The API key that requests to engines and router carry, and that these ask for; ``None`` if there is none."""
        given = self.sglang_args.get(API_KEY)
        return self.own_key if given is None else str(given) or None

    def with_key(self) -> Self:
        """The same with a random :attr:`key`, unless ``--sglang-api-key`` gives one, or says by ``""`` to have none."""
        return self if API_KEY in self.sglang_args else dataclasses.replace(self, own_key=secrets.token_urlsafe(32))

    @property
    def threads(self) -> int:
        """CPU threads per engine on a machine without CUDA."""
        return self.engine_threads or 2


def _check_pass_through(name: str, value: SglangValue) -> None:
    """Check the form; `sglang_flags` checks whether the installed SGLang has the flag."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise ConfigError(f"sglang_args: {name!r} is not a flag's name; write it as in --sglang-NAME, with dashes")
    if value is False or not isinstance(value, str | bool | tuple):
        raise ConfigError(f"--sglang-{name}: got {value!r}; give a string, several in a tuple, or True for a switch")


_MOVED = ("MODES", "PAUSE_MODES", "REQUEST_TIMEOUT_SECONDS", "SYNC")
__getattr__ = renamed(
    __name__,
    {name: f"slime_rollout.engine.transports.{name}" for name in _MOVED}
    | {"TRANSPORTS": "slime_rollout.engine.transports.CHOICES"},
)
