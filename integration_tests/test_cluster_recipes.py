"""The recipes of examples/cluster, as far as they can be checked without Slurm and Kubernetes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from launching import Assets, rows, train_command
from nodes import Machines, can_make_nodes, machines

from slime_launch.config import Settings
from slime_launch.flags import read_train
from slime_launch.validate import check_settings

RECIPES = Path(__file__).parents[1] / "examples" / "cluster"
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


def test_the_job_of_kuberay_is_whole() -> None:
    job = yaml.safe_load((RECIPES / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    program, command, flag, path = shlex.split(job["spec"]["entrypoint"])
    assert (program, command, flag, Path(path).name) == ("slime-launch", "train", "--config", "run.toml")
    cluster = job["spec"]["rayClusterSpec"]
    settings = settings_of_the_recipes()
    [workers] = cluster["workerGroupSpecs"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (
        workers["replicas"] * int(limits["nvidia.com/gpu"]) == settings.placed.actor_gpus + settings.placed.rollout_gpus
    )
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        names = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == names


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
        monkeypatch.delenv("RAY_ADDRESS")
        monkeypatch.setenv("PATH", f"{tmp_path}:{launcher.parent}:{os.environ['PATH']}")
        monkeypatch.setenv("STEPS", str(tmp_path / "steps"))
        monkeypatch.setenv("SLURM_JOB_NODELIST", ",".join(machine.name for machine in cluster.all))
        monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1")
        monkeypatch.setenv("RAY_PORT", "6479")
        command = train_command(qwen3, tmp_path, rollouts=2, colocate=False, save=False)
        with (tmp_path / "log").open("wb") as log:
            job = subprocess.Popen([RECIPES / "slurm.sh", *command], stdout=log, stderr=log, start_new_session=True)
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
