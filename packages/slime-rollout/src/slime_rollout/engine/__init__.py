"""SGLang engines: their flags, their processes, the router before them. Here: their face to a launcher, and errors.

Importing this imports nothing else: a name loads its module when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from slime_core.errors import SlimeError

if TYPE_CHECKING:
    from slime_rollout.engine.addresses import LOOPBACK, Ports, address, free_port, full_address, is_this_machine
    from slime_rollout.engine.config import API_KEY, EngineConfig, SglangValue
    from slime_rollout.engine.python import find_python, has_sglang, importable_in, run_python
    from slime_rollout.engine.router import check_router_port
    from slime_rollout.engine.router_flags import ROUTER_CONTROLLED, ROUTER_PREFIX, router_specs
    from slime_rollout.engine.server import KV_TOKENS, EngineLauncher, EngineSpec, SGLangEngine, check_flags
    from slime_rollout.engine.sglang_flags import CONTROLLED, SglangFlag, engine_device, installed_flags, missing_sglang
    from slime_rollout.engine.template import imported_sglang
    from slime_rollout.engine.topology_plan import (
        EnginePlan,
        PlannedModel,
        Topology,
        check_runs_here,
        plan_engines,
        topology_of,
    )
    from slime_rollout.engine.transports import (
        DISK,
        HOST_COPY,
        MODES,
        NETWORK,
        PCIE,
        Route,
        Way,
        WeightSyncConfig,
        chosen_of,
        in_words,
        refusal,
        ways_of,
    )
else:
    from slime_core.faces import face

    __all__, __getattr__, __dir__ = face(
        __name__,
        {
            "engine.addresses": "LOOPBACK Ports address free_port full_address is_this_machine",
            "engine.config": "API_KEY EngineConfig SglangValue",
            "engine.python": "find_python has_sglang importable_in run_python",
            "engine.router": "check_router_port",
            "engine.router_flags": "ROUTER_CONTROLLED ROUTER_PREFIX router_specs",
            "engine.server": "KV_TOKENS EngineLauncher EngineSpec SGLangEngine check_flags",
            "engine.sglang_flags": "CONTROLLED SglangFlag engine_device installed_flags missing_sglang",
            "engine.template": "imported_sglang",
            "engine.topology_plan": "EnginePlan PlannedModel Topology check_runs_here plan_engines topology_of",
            "engine.transports": "DISK HOST_COPY MODES NETWORK PCIE Route Way WeightSyncConfig chosen_of "
            "in_words refusal ways_of",
        },
    )


class EngineError(SlimeError):
    """Base of all errors of engines, the router and the weight channels."""


class PortInUseError(EngineError):
    """A port that was asked for is taken."""


class NoRoomError(EngineError):
    """No node has room for an engine now; one may have it later."""


class EngineStartError(EngineError):
    """An engine or the router did not come up."""


class EngineDiedError(EngineError):
    """An engine or the router ended by itself."""


class EngineRestartsError(EngineDiedError):
    """An engine or the router failed once more than ``--rollout-max-restarts`` allows to replace it."""


class ExternalEngineError(EngineError):
    """An external engine does not report what it is, or does not fit the run."""


class WeightSyncError(EngineError):
    """An engine refused new weights, or does not confirm their version.

    Attributes:
        url: The engine, or its receiver, that caused the error; ``None`` if no single one did.
        silent: Addresses of all that gave no answer in time, where no other engine is the cause. ``url`` may be among
            them.
    """

    def __init__(self, message: str, *, url: str | None = None, silent: Collection[str] = ()) -> None:
        super().__init__(message)
        self.url = url
        self.silent = tuple(silent)
