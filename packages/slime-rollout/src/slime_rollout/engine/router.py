"""sglang-router: one process in front of all engines."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.errors import EngineDiedError, EngineStartError, PortInUseError
from slime_rollout.engine.ports import check_port_free
from slime_rollout.engine.process import ServingProcess, address
from slime_rollout.engine.router_api import CONTROL_TIMEOUT_SECONDS, OFFER_SECONDS, RouterApi
from slime_rollout.supervise import Supervised

GRACE_SECONDS = 1.0
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
# The router has this policy, but its own command line does not list it.
_WITH_POLICY = """
import sys
from sglang_router.launch_router import launch_router, parse_router_args
args = parse_router_args(sys.argv[2:])
args.policy = sys.argv[1]
launch_router(args)
"""


def router_command(config: EngineConfig, *, port: int, prometheus_port: int, disaggregated: bool = False) -> list[str]:
    """The router's command line, for this process's own interpreter."""
    flags = {
        "host": config.sglang_router_ip,
        "port": str(port),
        "request-timeout-secs": str(config.sglang_router_request_timeout_secs),
        "prometheus-host": "127.0.0.1",
        "prometheus-port": str(prometheus_port),
        "log-level": "warn",
        **_RECOVERY_FLAGS,
    }
    if config.router_policy == "manual":
        # A session that comes for the first time goes where the fewest have requests in flight, and stays there.
        flags["assignment-mode"] = "min_group"
    arguments = [part for name, value in flags.items() for part in (f"--{name}", value)]
    arguments += ["--pd-disaggregation"] if disaggregated else []
    if config.router_policy in POLICIES_WITHOUT_FLAG:
        return [sys.executable, "-c", _WITH_POLICY, config.router_policy, *arguments]
    return [sys.executable, "-m", "sglang_router.launch_router", *arguments, "--policy", config.router_policy]


def router_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of the router: ``base`` (this process's by default) without proxies.

    It talks to our engines alone, and a proxy cannot reach those that listen on the loopback address.
    """
    environment = os.environ if base is None else base
    return {name: value for name, value in environment.items() if name.lower() not in PROXIES}


def check_router_port(host: str, port: int) -> None:
    """Check that the router could listen.

    Raises:
        PortInUseError: The port is taken, perhaps by a router that was meant to be used.
    """
    try:
        check_port_free(port, host, flag="--sglang-router-port")
    except PortInUseError as error:
        raise PortInUseError(f"{error}; a router that runs already is given with --sglang-router-url") from error


class Router(ServingProcess, RouterApi):
    """A running router. Made by :meth:`start`, which returns at once; :meth:`is_ready` tells when it serves."""

    @classmethod
    def start(
        cls, config: EngineConfig, *, port: int, prometheus_port: int, log_path: Path, disaggregated: bool = False
    ) -> Router:
        """Start the process; it ends when this one does.

        Args:
            config: Its address, policy and time limit.
            port: Port that it listens on.
            prometheus_port: Port of its own metrics.
            log_path: Where its output goes.
            disaggregated: Whether it gets prefill and decode engines.

        Raises:
            PortInUseError: The port is taken. Nothing was started.
            SupervisionError: The log file cannot be written.
        """
        check_router_port(config.sglang_router_ip, port)
        command = router_command(config, port=port, prometheus_port=prometheus_port, disaggregated=disaggregated)
        process = Supervised.start(command, env=router_environment(), log_path=log_path, grace=GRACE_SECONDS)
        return cls(process, address(config.sglang_router_ip, port))

    def is_ready(self, timeout: float = CONTROL_TIMEOUT_SECONDS) -> bool:
        """Whether the router itself answers. It has no workers at first.

        Args:
            timeout: How long to wait for the answer, in seconds.

        Raises:
            EngineStartError: It ended.
        """
        if (code := self.exit_code) is not None:
            raise EngineStartError(f"sglang-router {self.url} did not start (exit code {code}); {self.log_excerpt()}")
        return self.answers(timeout)

    def check(self) -> None:
        """Raise if the process has ended.

        Raises:
            EngineDiedError: It has.
        """
        if (code := self.exit_code) is not None:
            raise EngineDiedError(f"sglang-router {self.url} ended by itself (exit code {code}); {self.log_excerpt()}")
