"""The recipes of examples/cluster, as far as they can be checked without Slurm and Kubernetes."""

from __future__ import annotations

import copy
import os
import re
import shlex
import signal
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from launching import Assets, rows, train_command
from nodes import Machines, can_make_nodes, machines

from slime_launch.config import Settings
from slime_launch.devices import find_device
from slime_launch.flags import read_train
from slime_launch.placement import plan_layout
from slime_launch.plan.engines import engine_groups
from slime_launch.plan.layout import check_nodes, place
from slime_launch.validate import check_settings

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "examples" / "cluster"
SRUN = """#!/usr/bin/env bash
# Runs a step on the node that it names: a network namespace.
while [[ $1 == --* ]]; do
    case $1 in --nodelist=*) node=${1#*=} ;; esac
    shift
done
echo "$node: $*" >>"$STEPS"
if [[ $1 == hostname ]]; then
    ip -n "$node" -o -4 address show dev cable | sed 's|.*inet \\([0-9.]*\\)/.*|\\1|'
    exit
fi
exec ip netns exec "$node" "$@"
"""
SCONTROL = "#!/usr/bin/env bash\ntr , '\\n' <<<\"$3\"\n"


def settings_of_the_recipes() -> Settings:
    settings, contradictions = read_train(["--config", str(RECIPES / "run.toml")], on_gpu=True)
    assert contradictions == []
    return settings


def test_the_flags_of_the_recipes_can_be_run() -> None:
    check_settings(settings_of_the_recipes())


def rayjob() -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((RECIPES / "rayjob.yaml").read_text())
    return job


def problems_of(job: dict[str, Any]) -> list[str]:
    """What of a RayJob is not as KubeRay and Kubernetes have it."""
    schema = yaml.safe_load(Path(__file__).with_name("rayjob_schema.yaml").read_text())
    return [error.message for error in Draft202012Validator(schema).iter_errors(job)]


def test_the_job_of_kuberay_is_whole() -> None:
    job = rayjob()
    assert problems_of(job) == []
    program, command, flag, path = shlex.split(job["spec"]["entrypoint"])
    assert (program, command, flag, Path(path).name) == ("slime-launch", "train", "--config", "run.toml")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == version("ray")
    [workers] = cluster["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        names = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == names


def in_bash(command: str, **variables: str) -> str:
    """What a command prints that is given in the repository's root."""
    words, environment = ["bash", "-euo", "pipefail", "-c", command], os.environ | variables
    return subprocess.run(words, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout


def test_the_images_for_gpus_have_what_jobs_need_of_ray(tmp_path: Path) -> None:
    wanted = f"ray[default]=={version('ray')}"
    assert "sync_trainer && sync_ray_jobs &&" in (ROOT / "docker" / "Dockerfile").read_text()
    (tmp_path / "pins.txt").write_text(f"py-spy==0.4.3\nray=={version('ray')} ; sys_platform == 'linux'\n")
    uv = 'source scripts/environments.sh; TOOLS=$PINS; uv() { echo "$@"; }; sync_ray_jobs'
    assert in_bash(uv, PINS=str(tmp_path)).endswith(f" --python .venv/bin/python {wanted}\n")
    [given] = re.findall(r'"ray\[default\].*"$', (ROOT / "docker" / "Dockerfile.rocm").read_text(), re.MULTILINE)
    assert in_bash(f"echo {given}") == f"{wanted}\n"


@pytest.mark.parametrize(
    ("where", "value", "problem"),
    [
        ("spec/rayClusterSpec/workerGroupSpecs/0/replica", 2, "'replica' was unexpected"),
        ("spec/rayClusterSpec/workerGroupSpecs/0/replicas", "2", "'2' is not of type 'integer'"),
        ("spec/rayClusterSpec/headGroupSpec/rayStartParams/num-gpus", 0, "0 is not of type 'string'"),
        ("spec/rayClusterSpec/authOptions/mode", "none", "'none' is not one of"),
        ("spec/backoffLimits", 0, "'backoffLimits' was unexpected"),
        ("metadata/name", "Slime", "'Slime' does not match"),
    ],
)
def test_a_mistake_in_the_job_is_found(where: str, value: object, problem: str) -> None:
    job = copy.deepcopy(rayjob())  # whose groups share parts by anchors
    *way, last = where.split("/")
    part: Any = job
    for step in way:
        part = part[int(step)] if isinstance(part, list) else part[step]
    part[last] = value
    [found] = problems_of(job)
    assert problem in found


def test_the_job_has_the_nodes_and_gpus_that_the_plan_of_its_flags_fills() -> None:
    """A worker's pod is a node; the head has none of the run's GPUs."""
    cluster = rayjob()["spec"]["rayClusterSpec"]
    [workers] = cluster["workerGroupSpecs"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus = int(limits["nvidia.com/gpu"])
    settings, device = settings_of_the_recipes(), find_device("h100", None)
    nodes = place(plan_layout(settings.placed, cuda=True), gpus, engine_groups(settings, None))
    check_nodes(nodes, settings.engine, settings.cluster, device, trains=True)
    assert len(nodes) == workers["replicas"]
    for node in nodes:
        taken = {*node.trainer_ranks} if node.trainer_ranks else {gpu for one in node.engines for gpu in one.gpus}
        assert taken == set(range(gpus))
    assert cluster["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
    assert "nvidia.com/gpu" not in cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["resources"]["limits"]


@pytest.mark.real
@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.skipif(not can_make_nodes(), reason="needs the right to make network namespaces")
def test_the_script_of_slurm_runs_a_command_on_its_nodes(
    qwen3: Assets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    launcher = Path(train_command(qwen3, tmp_path, rollouts=1)[0])
    with machines(tmp_path, cpus=(None, None)) as cluster:
        monkeypatch.setenv("PATH", f"{tmp_path}:{launcher.parent}:{os.environ['PATH']}")
        monkeypatch.setenv("STEPS", str(tmp_path / "steps"))
        monkeypatch.setenv("SLURM_JOB_NODELIST", ",".join(machine.name for machine in cluster.all))
        monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1")
        monkeypatch.setenv("RAY_PORT", "6479")
        command = train_command(qwen3, tmp_path, rollouts=2, colocate=False, save=False)
        given = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with (tmp_path / "log").open("wb") as log:
            words = [RECIPES / "slurm.sh", *command]
            job = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True, env=given)
            try:
                code = job.wait(300)
            finally:
                if job.poll() is None:
                    os.killpg(job.pid, signal.SIGKILL)
        text = (tmp_path / "log").read_text(errors="replace")
        assert code == 0, text
        check_steps(cluster, (tmp_path / "steps").read_text())
    assert "2 nodes: " in text
    assert [row["rollout_id"] for row in rows(tmp_path, "rollout")] == [0, 1]


def check_steps(cluster: Machines, steps: str) -> None:
    """The head is on the first node, one worker on the other, and nothing of them is left."""
    first, second = cluster.all
    assert f"{first.name}: ray start --head --node-ip-address={first.address}" in steps
    assert f"{second.name}: ray start --address={first.address}:6479" in steps
    assert not [process for machine in cluster.all for process in machine.running("--port=6479", ":6479")]
