import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from slime_core.errors import ConfigError
from slime_core.flags import flag_specs
from slime_rollout.engine.config import EngineConfig


def test_every_field_but_the_pass_through_is_a_flag():
    names = {spec.dest for spec in flag_specs(EngineConfig)}
    assert names == {field.name for field in dataclasses.fields(EngineConfig)} - {
        "sglang_args",
        "sglang_off",
        "router_args",
        "own_key",
        "template",
    }


def test_defaults_are_this_interpreter_and_two_threads(monkeypatch):
    monkeypatch.setattr("slime_rollout.engine.python.importable_in", lambda python, package: False)
    monkeypatch.setenv("PYTHONPATH", "another")  # what was found is kept by it
    config = EngineConfig()
    assert config.python == sys.executable
    assert config.threads == 2
    assert EngineConfig(engine_threads=1).threads == 1


def test_an_interpreter_is_looked_up_in_path(monkeypatch):
    path = Path(sys.executable)
    monkeypatch.setenv("PATH", str(path.parent))
    assert EngineConfig(sglang_python=path.name).python == str(path)
    assert EngineConfig(sglang_python=str(path)).python == str(path)
    with pytest.raises(ConfigError, match="--sglang-python python0 is not a command in PATH; give the Python"):
        EngineConfig(sglang_python="python0")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rollout_num_gpus_per_engine": 0}, "--rollout-num-gpus-per-engine 0 must be 1 or more"),
        ({"engine_threads": 0}, "--engine-threads 0"),
        ({"engine_startup_timeout": 0.0}, "--engine-startup-timeout 0.0"),
        ({"sglang_router_port": 70000}, "--sglang-router-port 70000"),
        (
            {"rollout_health_check_timeout": 1.0},
            "--rollout-health-check-timeout 1.0 must be 2 or more; SGLang takes at least one to answer",
        ),
        ({"rollout_health_check_interval": -1.0}, "--rollout-health-check-interval -1.0 must be 0 or more"),
        ({"rollout_health_check_first_wait": -0.5}, "--rollout-health-check-first-wait -0.5 must be 0 or more"),
        ({"rollout_max_restarts": -1}, "--rollout-max-restarts -1 must be 0 or more"),
        ({"router_policy": "roundrobin"}, "--router-policy roundrobin is unknown; allowed: cache_aware"),
        ({"sglang_python": "/nonexistent/python"}, "--sglang-python /nonexistent/python is not an executable file"),
        ({"sglang_args": {"--page-size": "1"}}, "'--page-size' is not a flag's name"),
        ({"sglang_args": {"page_size": "1"}}, "'page_size' is not a flag's name"),
        ({"sglang_args": {"page-size": False}}, "--sglang-page-size: got False"),
        (
            {"sglang_router_url": "http://a"},
            "--sglang-router-url http://a is not an address; write HOST:PORT, or http://",
        ),
        (
            {"sglang_router_url": "http://a:1", "sglang_router_port": 2, "router_policy": "manual"},
            "--sglang-router-port 2, --router-policy manual have no effect with --sglang-router-url; leave one of",
        ),
        ({"rollout_external_engine_addrs": ("a",)}, "--rollout-external-engine-addrs a is not an address"),
        (
            {"rollout_external_engine_addrs": ("https://a:1",)},
            "--rollout-external-engine-addrs https://a:1 is not an",
        ),
        (
            {"rollout_external_engine_addrs": ("a:1/path",)},
            "--rollout-external-engine-addrs a:1/path is not an addr",
        ),
        ({"rollout_external_engine_addrs": ("a:70000",)}, "--rollout-external-engine-addrs a:70000 is not an address"),
        ({"rollout_external_engine_addrs": ("a:1", "http://a:1/")}, "names http://a:1 twice"),
        (
            {"rollout_external_engine_addrs": ("a:1",), "engine_threads": 2, "sglang_args": {"page-size": "1"}},
            "--sglang-page-size: no effect on the external engines of --rollout-external-engine-addrs; leave out\n"
            "--engine-threads 2 has no effect with --rollout-external-engine-addrs; leave one of them out",
        ),
    ],
)
def test_a_bad_value_is_named(values, message):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**values)
    assert message in str(caught.value)


def test_external_addresses_in_full():
    config = EngineConfig(rollout_external_engine_addrs=("10.0.0.1:30000", "http://b:1/", "[::1]:2"))
    assert config.external_urls == ("http://10.0.0.1:30000", "http://b:1", "http://[::1]:2")


def test_reading_the_flags_imports_no_torch():
    code = "import sys, slime_rollout.engine.config; sys.exit(bool({'torch', 'aiohttp'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0


DISK = {"update_weight_transport": "disk", "update_weight_disk_dir": "a"}
LOCAL = {"update_weight_local_checkpoint_dir": "b"}
FAR = {"update_weight_receivers": ("h:1",)}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"update_weight_mode": "half"}, "--update-weight-mode half is unknown; allowed: full, delta"),
        ({"update_weight_transport": "mail"}, "transport mail is unknown; allowed: auto, tensor, nccl, gloo, disk"),
        ({"update_weight_pause_mode": "abort"}, "pause-mode abort is unknown; allowed: retract, in_place"),
        *(
            (
                {"update_weight_timeout": seconds},
                f"--update-weight-timeout {seconds} must be .*above 0",
            )
            for seconds in (0.0, -1.0, float("nan"), float("inf"))
        ),
        ({"update_weight_transport": "disk"}, "disk needs --update-weight-disk-dir"),
        ({"update_weight_mode": "delta"}, r"give --update-weight-transport disk \(got auto\)"),
        ({**DISK, "update_weight_mode": "delta"}, "delta needs --update-weight-local-checkpoint-dir"),
        ({**DISK, "update_weight_mode": "delta", "update_weight_local_checkpoint_dir": "./a"}, "another directory"),
        ({**DISK, "update_weight_mode": "delta", "update_weight_local_checkpoint_dir": "b/../a"}, "another directory"),
        ({**DISK, **LOCAL, **FAR, "update_weight_mode": "delta"}, "give one of them"),
        (
            {**DISK, **FAR},
            "receivers h:1 has no effect with --update-weight-mode full; give --update-weight-mode delta",
        ),
        (
            {"update_weight_disk_dir": "a", "update_weight_transport": "gloo"},
            "disk-dir a has no effect with --update-weight-transport gloo; give --update-weight-transport auto or disk",
        ),
        (
            {"update_weight_disk_keep_files": True},
            "keep-files has no effect without --update-weight-disk-dir",
        ),
        (
            {**DISK, **LOCAL},
            "local-checkpoint-dir .* has no effect with --update-weight-mode full; give --update-weight-mode delta",
        ),
    ],
)
def test_what_cannot_work_is_said_in_a_line(flags, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**flags)


def test_what_works():
    EngineConfig(**DISK, update_weight_disk_keep_files=True)
    EngineConfig(update_weight_disk_dir="a", update_weight_disk_keep_files=True)  # auto may choose it
    EngineConfig(**DISK, **FAR, update_weight_mode="delta")
    assert EngineConfig(**DISK, **LOCAL, update_weight_mode="delta").update_weight_pause_mode == "retract"
