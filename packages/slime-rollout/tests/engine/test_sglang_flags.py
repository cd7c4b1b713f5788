import json
import subprocess

import pytest

from slime_core.errors import ConfigError
from slime_rollout.engine.sglang_flags import CONTROLLED, SglangFlag, check_sglang_args, installed_flags

FLAGS = {
    flag.name: flag
    for flag in [
        SglangFlag("mem-fraction-static", True, type=float),
        SglangFlag("enable-metrics", False),
        SglangFlag("lora-paths", True, several=True),
        SglangFlag("cuda-graph-bs", True, several=True, type=int),
        SglangFlag("schedule-policy", True, choices=("lpm", "fcfs")),
        SglangFlag("disaggregation-mode", True),
        SglangFlag("ssl-keyfile", True),
        SglangFlag("tp-size", True, type=int),
    ]
}
# What SGLang's own parser says about its flags.
TRUTH = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
types = {int: "int", float: "float"}
print(json.dumps({
    name.removeprefix("--"): [
        action.nargs != 0,
        action.nargs in ("+", "*"),
        types.get(action.type, "str"),
        sorted(str(choice) for choice in action.choices or () if choice is not None),
    ]
    for action in parser._actions for name in action.option_strings if name.startswith("--") and name != "--help"
}))
"""


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"mem-fraction-static": "0.5"},
        {"enable-metrics": True},
        {"lora-paths": "a"},
        {"lora-paths": ("a", "b")},
        {"cuda-graph-bs": ("1", "2"), "schedule-policy": "lpm"},
    ],
)
def test_good_flags_pass(args):
    check_sglang_args(args, FLAGS)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"mem-fraction": "0.5"}, "did you mean --sglang-mem-fraction-static?"),
        ({"tp-sise": "2"}, "--sglang-tp-sise is no flag of the installed SGLang; see"),
        ({"tp-size": "2"}, "--sglang-tp-size cannot be given: use --rollout-num-gpus-per-engine"),
        ({"mem-fraction-static": True}, "--sglang-mem-fraction-static needs a value"),
        ({"enable-metrics": "1"}, "--sglang-enable-metrics takes no value, got '1'"),
        ({"mem-fraction-static": ("1", "2")}, "--sglang-mem-fraction-static takes one value, got '1 2'"),
        ({"mem-fraction-static": "half"}, "--sglang-mem-fraction-static half is not a number"),
        ({"cuda-graph-bs": ("1", "2.5")}, "--sglang-cuda-graph-bs 2.5 is not a whole number"),
        ({"schedule-policy": "both"}, "--sglang-schedule-policy both is unknown; allowed: lpm, fcfs"),
        (
            {"disaggregation-mode": "decode"},
            "--sglang-disaggregation-mode cannot be given: use worker_type in --sglang",
        ),
        ({"ssl-keyfile": "key"}, "--sglang-ssl-keyfile cannot be given: slime talks plain HTTP to engines"),
    ],
)
def test_bad_flags_are_refused(args, message):
    with pytest.raises(ConfigError) as caught:
        check_sglang_args(args, FLAGS)
    assert message in str(caught.value)


def test_an_interpreter_without_sglang(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=f"SGLang is not installed in {python}"):
        installed_flags(str(python))


def test_an_sglang_whose_flags_stand_elsewhere(tmp_path):
    package = tmp_path / "sglang"
    package.mkdir()
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {package}/__init__.py\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match="are not written as slime expects"):
        installed_flags(str(python))


@pytest.mark.real
@pytest.mark.timeout(180)
def test_every_flag_of_the_installed_sglang_is_read_right(engine_python, engine_environment):
    result = subprocess.run(
        [engine_python, "-c", TRUTH], env=engine_environment, capture_output=True, text=True, check=True, timeout=150
    )
    truth = json.loads(result.stdout.splitlines()[-1])
    flags = installed_flags(engine_python)
    read = {name: [flag.takes_value, flag.several, flag.type.__name__] for name, flag in flags.items()}
    assert read == {name: facts[:3] for name, facts in truth.items()}
    chosen = {name: sorted(flag.choices) for name, flag in flags.items() if flag.choices}
    assert chosen == {name: truth[name][3] for name in chosen}
    # The rest are lists that SGLang's plugins may extend, or that are computed.
    assert len(chosen) > len([name for name, facts in truth.items() if facts[3]]) / 2
    assert chosen["disaggregation-mode"] == ["decode", "null", "prefill"]
    assert set(CONTROLLED) <= set(flags)
