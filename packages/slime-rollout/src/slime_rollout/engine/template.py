"""A process that has imported SGLang, from which a run's engines are forked: their imports begin with the command.

They are most of an engine's start on a CPU. They take place while Ray and the workers start on other cores, and once
for all engines, those that replace others as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.server import EngineSpec, server_environment
from slime_rollout.supervise.forked import template

# What `sglang.launch_server` imports before it does anything, in its order, and what names a process, as SGLang does:
# that has to be found out before anything changes the environment, which lies behind the command line in memory.
PREPARE = """
from setproctitle import getproctitle, setproctitle
setproctitle(getproctitle())
from sglang.srt.plugins import load_plugins
load_plugins()
import sglang.srt.entrypoints.http_server
"""


@contextlib.contextmanager
def imported_sglang(config: EngineConfig, spec: EngineSpec) -> Iterator[EngineConfig]:
    """Import SGLang in a process of its own for the length of the block; gives the config of engines forked from it.

    On a GPU, with external engines and with ``--sglang-config``, whose engines differ, there is none. An engine that
    cannot be forked is started: its worker's log says why. ``config`` is as the engines will have it, with their number
    of threads, and ``spec`` is of one of them.
    """
    if spec.runs_on(config) != "cpu" or config.rollout_external_engine_addrs or config.sglang_config:
        yield config
        return
    with template(config.python, PREPARE, server_environment(config, spec)) as address:
        yield dataclasses.replace(config, template=address)
