"""The SkyPilot task of examples/cluster, as far as it can be checked without SkyPilot."""

from __future__ import annotations

import copy
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from test_cluster_recipes import RECIPES, settings_of_the_recipes

from slime_launch.devices import find_device
from slime_launch.placement import plan_layout
from slime_launch.plan.engines import engine_groups
from slime_launch.plan.layout import check_nodes, place

FIRST = "10.0.0.1"
RAY = """#!/usr/bin/env bash
# Notes its words and its token. A `start` stays until it is ended; only then `health-check` finds nobody.
echo "ray $* token=$RAY_AUTH_TOKEN mode=$RAY_AUTH_MODE" >>"$STEPS"
case $1 in
    start) trap 'rm "$UP"; exit' TERM; touch "$UP"; [[ $* == *--head* ]] || exit 1; while :; do sleep 0.05; done ;;
    health-check) [[ -e $UP ]] ;;
esac
"""
LAUNCH = '#!/usr/bin/env bash\necho "slime-launch $* RAY_ADDRESS=$RAY_ADDRESS" >>"$STEPS"\nexit "$CODE"\n'


def task() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((RECIPES / "skypilot.yaml").read_text())
    return found


def problems_of(found: dict[str, Any]) -> list[str]:
    """What of a task is not as SkyPilot has it."""
    schema = yaml.safe_load(Path(__file__).with_name("skypilot_schema.yaml").read_text())
    return [error.message for error in Draft202012Validator(schema).iter_errors(found)]


def test_the_task_is_whole() -> None:
    assert problems_of(task()) == []


@pytest.mark.parametrize(
    ("where", "value", "problem"),
    [
        ("num_node", 2, "'num_node' was unexpected"),
        ("num_nodes", "2", "'2' is not of type 'integer'"),
        ("resources/accelerator", "H100:8", "'accelerator' was unexpected"),
        ("resources/accelerators", "8xH100", "'8xH100' does not match"),
        ("volumes/shared", "slime-shared", "'shared' does not match"),
    ],
)
def test_a_mistake_in_the_task_is_found(where: str, value: object, problem: str) -> None:
    found = copy.deepcopy(task())
    *way, last = where.split("/")
    part: Any = found
    for step in way:
        part = part[step]
    part[last] = value
    [line] = problems_of(found)
    assert problem in line


def test_the_task_has_the_nodes_and_gpus_that_the_plan_of_its_flags_fills() -> None:
    name, _, gpus = task()["resources"]["accelerators"].partition(":")
    settings, device = settings_of_the_recipes(), find_device(name.lower(), None)
    nodes = place(plan_layout(settings.placed, cuda=True), int(gpus), engine_groups(settings, None))
    check_nodes(nodes, settings.engine, settings.cluster, device, trains=True)
    assert len(nodes) == task()["num_nodes"]
    assert Path(task()["envs"]["CONFIG"]).name == "run.toml"


def run_on(rank: int, directory: Path, *, code: int = 0) -> tuple[int, list[str]]:
    """The task's command on a node, with stand-ins of Ray and the launcher; its exit code and what it called."""
    for name, text in {"ray": RAY, "slime-launch": LAUNCH}.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    given = {
        **task()["envs"],
        "PATH": f"{directory}:{os.environ['PATH']}",
        "RAY_AUTH_TOKEN": "secret",
        "SKYPILOT_NODE_IPS": f"{FIRST}\n10.0.0.2",
        "SKYPILOT_NODE_RANK": str(rank),
        "STEPS": str(directory / "steps"),
        "UP": str(directory / "up"),
        "CODE": str(code),
    }
    done = subprocess.run(["bash", "-c", task()["run"]], env=given, timeout=240, check=False, capture_output=True)
    return done.returncode, (directory / "steps").read_text().splitlines()


@pytest.mark.parametrize("code", [0, 2])
def test_the_first_node_starts_ray_and_the_command_and_ends_ray(code: int, tmp_path: Path) -> None:
    found, steps = run_on(0, tmp_path, code=code)
    assert found == code
    [start] = [step for step in steps if step.startswith("ray start")]
    assert f"--head --node-ip-address {FIRST} --port 6379" in start
    assert start.endswith("token=secret mode=token")
    assert steps[-1] == f"slime-launch train --config /shared/run.toml RAY_ADDRESS={FIRST}:6379"
    assert not (tmp_path / "up").exists()


def test_another_node_joins_and_ends_when_the_first_has_ended(tmp_path: Path) -> None:
    (tmp_path / "up").touch()
    code, steps = run_on(1, tmp_path)
    assert code == 0
    assert steps[-1].startswith(f"ray start --address {FIRST}:6379 --disable-usage-stats --block")
    assert not any(step.startswith("slime-launch") for step in steps)


def test_without_a_token_nothing_is_started(tmp_path: Path) -> None:
    given = {"PATH": os.environ["PATH"], "SKYPILOT_NODE_IPS": FIRST, "SKYPILOT_NODE_RANK": "0"}
    done = subprocess.run(["bash", "-c", task()["run"]], env=given, timeout=240, check=False, capture_output=True)
    assert done.returncode != 0
    assert b"give it with --secret" in done.stderr
