"""The flags of the installed sglang-router."""

import argparse
import subprocess
import sys

import pytest

from slime_core.errors import ConfigError
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.router import router_command
from slime_rollout.engine.router_flags import ROUTER_CONTROLLED, router_specs

NEEDS_NO_ROUTER = "import sys, slime_rollout.engine.router_flags; assert 'sglang_router' not in sys.modules"


def test_reading_the_module_imports_no_router():
    subprocess.run([sys.executable, "-c", NEEDS_NO_ROUTER], check=True, timeout=240)


def test_each_flag_of_the_router_is_passed_or_answered():
    from sglang_router.router_args import RouterArgs

    specs = router_specs()
    assert {"cache-threshold", "max-concurrent-requests", "disable-retries"} <= specs.keys()
    assert not specs.keys() & ROUTER_CONTROLLED.keys()
    parser = argparse.ArgumentParser(add_help=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    installed = {option[2:] for action in parser._actions for option in action.option_strings}
    assert specs.keys() | ROUTER_CONTROLLED.keys() | {"policy"} == installed


def test_types_and_choices_are_the_routers():
    specs = router_specs()
    assert specs["cache-threshold"].type is float
    assert specs["queue-size"].type is int
    assert specs["disable-retries"].is_switch
    assert specs["history-backend"].choices is not None
    assert specs["request-id-headers"].nargs == "+"
    assert specs["cache-threshold"].name == "--router-cache-threshold"


def test_given_flags_win_over_slimes_choices():
    from sglang_router.launch_router import parse_router_args

    args = {
        "health-check-interval-secs": 7,
        "log-level": "info",
        "disable-retries": True,
        "request-id-headers": ("a", "b"),
    }
    command = router_command(EngineConfig(router_args=args), port=1, prometheus_port=2)
    read = parse_router_args(command[command.index("sglang_router.launch_router") + 1 :])
    assert (read.health_check_interval_secs, read.log_level, read.disable_retries) == (7, "info", True)
    assert read.request_id_headers == ["a", "b"]
    assert read.cb_success_threshold == 1


def test_they_have_no_effect_on_an_external_router():
    with pytest.raises(ConfigError, match="--router-queue-size: no effect on the external router"):
        EngineConfig(sglang_router_url="http://10.0.0.1:30000", router_args={"queue-size": 3})
