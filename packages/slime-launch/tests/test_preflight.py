"""What is found out about engines before anything starts."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import sys
from pathlib import Path

import pytest
import torch

from slime_core.errors import ConfigError
from slime_core.types import RolloutBatch, Sample, Status
from slime_launch.devices import DEVICES
from slime_launch.errors import PreflightError, Problems
from slime_launch.flags import parse_train, read_train
from slime_launch.preflight import check_engines, look_again, preflight
from slime_launch.resume import RunState
from slime_launch.validate import notices
from slime_megatron.errors import TrainerCheckpointError

ENGINES = """
sglang:
  - name: actor
    server_groups: [{num_gpus: 2, num_gpus_per_engine: 1}, {worker_type: placeholder, num_gpus: 1}]
  - name: judge
    model_path: other
    server_groups: [{num_gpus: 1, overrides: {mem_fraction_static: 0.5}}]
"""


@pytest.fixture
def checked(flags, to_words, tmp_path):
    """Runs the checks of a command that starts the engines of a file."""

    def run(text, *words, num_gpus=4):
        file = tmp_path / "engines.yaml"
        file.write_text(text)
        del flags["--colocate"]
        flags.update({"--sglang-config": str(file), "--rollout-num-gpus": str(num_gpus)})
        return preflight(parse_train([*to_words(flags), *words]))

    return run


def test_the_engines_of_a_file_are_counted(checked):
    result = checked(ENGINES)
    assert result.num_engines == 3
    assert [model.name for model in result.topology.models] == ["actor", "judge"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_gpus: 2,", "num_gpus: 3,", "uses 5 GPUs (actor 4, judge 1), and --rollout-num-gpus is 4"),
        ("name: actor", "name: actor\n    update_weights: false", "no model gets the trainer's weights"),
        ("mem_fraction_static", "mem_fraction", "did you mean --sglang-mem-fraction-static?"),
        (
            "[{num_gpus: 1, overrides: {mem_fraction_static: 0.5}}]",
            "[{num_gpus: 1, worker_type: prefill}, {num_gpus: 0, worker_type: decode}]",
            "num_gpus is 0; give a whole number, 1 or more",
        ),
        ("model_path: other", "model_path: other\n    update_weight: true", "did you mean update_weights?"),
    ],
)
def test_a_file_that_cannot_be_used(checked, old, new, message):
    with pytest.raises(ConfigError) as caught:
        checked(ENGINES.replace(old, new, 1))
    assert message in str(caught.value)


def test_halves_need_gpus(checked, monkeypatch):
    monkeypatch.setattr("slime_launch.preflight.run_device", lambda: "cpu")
    halves = "[{num_gpus: 1, worker_type: prefill}, {num_gpus: 2, worker_type: decode}]"
    text = f"sglang: [{{name: actor, server_groups: {halves}}}]"
    with pytest.raises(ConfigError, match="the prefill engines of model actor need GPUs"):
        checked(text, num_gpus=3)


def test_engines_of_others_need_no_sglang_here(flags, to_words, monkeypatch):
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.setattr(sys, "executable", str(Path("/nowhere/python")))
    monkeypatch.setattr("slime_rollout.engine.python.importable_in", lambda python, module: False)
    del flags["--colocate"]
    with pytest.raises(PreflightError, match="SGLang is not installed in /nowhere/python"):
        check_engines(parse_train([*to_words(flags), "--rollout-num-gpus", "1"]))
    result = preflight(parse_train([*to_words(flags), "--rollout-external-engine-addrs", "10.0.0.1:30000"]))
    assert result.num_engines == 0


def test_recorded_rollouts_need_no_engines_and_no_prompts(flags, to_words, monkeypatch, tmp_path):
    monkeypatch.setattr("slime_launch.preflight.importable_in", lambda python, module: False)
    Path(flags["--prompt-data"]).unlink()
    del flags["--colocate"]
    flags |= {"--load-debug-rollout-data": str(tmp_path / "{rollout_id:03d}.npz"), "--debug-train-only": None}
    with pytest.raises(PreflightError, match=r"--load-debug-rollout-data: .*/000\.npz does not exist; give what"):
        preflight(parse_train(to_words(flags)))
    (tmp_path / "000.npz").touch()
    checked = preflight(parse_train(to_words(flags)))
    assert checked.settings.placed.rollout_gpus == 0
    assert checked.settings.placed.actor_gpus == 1
    assert f"rollouts come from {tmp_path}/{{rollout_id:03d}}.npz: no engines are started" in notices(checked.settings)


@pytest.mark.parametrize(
    ("loss", "rewards", "message"),
    [
        ("dpo_loss", [[1.0, 0.0], [1.0, 0.0]], None),
        ("dpo_loss", [[1.0, 0.0], [0.5, 0.5]], "group 1 is not a preference pair"),
        ("rm_loss", [[1.0, 0.0, 0.5], [1.0]], "group 0 is not a preference pair"),
    ],
)
def test_recorded_rollouts_of_a_loss_on_pairs_are_pairs(flags, to_words, tmp_path, loss, rewards, message):
    numbers = itertools.count()
    whole = {"prompt": "p", "tokens": [1, 2, 3], "response_length": 2, "status": Status.COMPLETED}
    groups = [
        [Sample(index=next(numbers), group_index=place, reward=reward, **whole) for reward in group]
        for place, group in enumerate(rewards)
    ]
    RolloutBatch(rollout_id=0, groups=groups).columns().write(tmp_path / "000.npz")
    del flags["--colocate"], flags["--n-samples-per-prompt"]
    flags |= {"--load-debug-rollout-data": str(tmp_path / "{rollout_id:03d}.npz"), "--loss-type": loss}
    flags |= {"--rollout-batch-size": "2", "--global-batch-size": "4", "--micro-batch-size": "2"}
    if message is None:
        preflight(parse_train(to_words(flags)))
        return
    with pytest.raises(PreflightError) as caught:
        preflight(parse_train(to_words(flags)))
    [line] = str(caught.value).splitlines()
    assert f"--load-debug-rollout-data {tmp_path}/000.npz with --loss-type {loss}: {message}" in line


def test_all_problems_of_a_command_are_reported_together(flags, to_words, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{}\n")
    flags |= {"--prompt-data": str(broken), "--rollout-top-k": "1", "--eval-interval": "2"}
    flags |= {"--load": str(tmp_path / "none"), "--custom-rm-path": "nowhere.to_be_found", "--sglang-router-port": "1"}
    flags |= {"--min-lr": "1", "--lr-decay-style": "cosine", "--use-unbiased-kl": None}
    with pytest.raises(PreflightError) as caught:
        preflight(*read_train(to_words(flags)))
    lines = str(caught.value).splitlines()
    contradictions = ("--min-lr", "--use-unbiased-kl")
    files = ("broken.jsonl", "nowhere", str(tmp_path / "none"))
    for problem in (*contradictions, "--rollout-top-k 1", "--eval-interval 2", *files):
        assert sum(problem in line for line in lines) == 1, (problem, lines)


@pytest.mark.parametrize("flag", ["--load", "--ref-load", "--critic-load", "--opd-teacher-load"])
def test_a_checkpoint_of_another_shape_is_named_with_all_that_differs(flags, to_words, tmp_path, flag):
    other = shutil.copytree(tmp_path / "dist", tmp_path / "other")
    torch.save({"args": {"num_layers": 3, "moe_router_topk": 4, "num_experts": 8}}, other / "release" / "common.pt")
    needs = {
        "--ref-load": {"--kl-coef": "0.1"},
        "--critic-load": {"--advantage-estimator": "ppo"},
        "--opd-teacher-load": {"--use-opd": None, "--opd-type": "megatron"},
    }
    flags |= {"--n-samples-per-prompt": "2", flag: str(other), **needs.get(flag, {})}
    with pytest.raises(TrainerCheckpointError) as caught:
        preflight(parse_train(to_words(flags)))
    [line] = str(caught.value).splitlines()
    assert line.startswith(f"{other / 'release'} was written by another model")
    assert "num_layers 3 (config: 2)" in line


def test_a_checkpoint_whose_arguments_cannot_be_read_is_named(flags, to_words, tmp_path):
    (tmp_path / "dist" / "release" / "common.pt").write_bytes(b"torn")
    with pytest.raises(TrainerCheckpointError, match=r"cannot read .*release/common\.pt") as caught:
        preflight(parse_train(to_words(flags)))
    assert "\n" not in str(caught.value)


def test_a_defect_of_a_check_is_hidden_only_by_problems_that_were_reported():
    with pytest.raises(ZeroDivisionError):
        Problems().attempt(lambda: 1 / 0)
    problems = Problems(["--batch 0 must be 1 or more"])
    assert problems.attempt(lambda: 1 / 0) is None
    with pytest.raises(ConfigError, match="--batch 0 must be 1 or more"):
        problems.report()


def test_roles_that_do_not_fit_together_are_named_before_ray_starts(flags, to_words, monkeypatch):
    """The roles of the tiny model take 2.2 and 1.7 MB; with --colocate actor and critic take turns."""
    flags |= {"--advantage-estimator": "ppo"}
    device = dataclasses.replace(DEVICES["h100"], memory=3_000_000)
    monkeypatch.setattr("slime_launch.preflight.find_device", lambda name, memory: device)
    preflight(parse_train(to_words(flags)))
    for words in (["--no-offload-train"], []):
        if not words:
            del flags["--colocate"]
            words = ["--rollout-num-gpus", "1"]
        with pytest.raises(ConfigError, match=r"the actor and the critic take .* and each fits alone") as caught:
            preflight(parse_train([*to_words(flags), *words]))
        assert "\n" not in str(caught.value)
    device = dataclasses.replace(device, memory=500_000)
    with pytest.raises(ConfigError, match="the actor takes") as caught:
        preflight(parse_train([*to_words(flags), "--rollout-num-gpus", "1"]))


def test_a_run_that_appears_in_save_meanwhile_is_seen(flags, to_words, tmp_path):
    flags["--save"] = str(tmp_path / "save")
    checked = preflight(parse_train(to_words(flags)))
    assert look_again(checked) is checked
    state = RunState(checked.settings, None, checked.weights, output_dir=tmp_path)
    state.begin({"position": 3})
    again = look_again(checked)
    assert again.manifest is not None and again.manifest.source_state == {"position": 3}
