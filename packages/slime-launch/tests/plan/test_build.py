"""A plan as one record: what is known, beside all that is wrong."""

import json

import pytest

from support.planning import problems_of, run

HOOK = """
def reward(args, sample, **kwargs):
    return 1.0
"""


def test_json_has_the_same_facts(words, workspace, capsys):
    (workspace / "own.py").write_text(HOOK)
    code, out, _ = run(words("--json", "--custom-rm-path", f"{workspace}/own.py:reward"), capsys)
    plan = json.loads(out)
    assert code == 0 and plan["problems"] == []
    assert plan["batch"]["samples"] == 8
    seconds = plan["run"].pop("seconds")
    assert plan["run"].pop("seconds_at_most") == seconds > 0  # its old name
    assert plan["run"].pop("tokens_per_second") == pytest.approx(16 * 512 / seconds, rel=0.2)  # of rounded seconds
    tokens = {"tokens": 16 * 512, "tokens_at_most": 16 * 512}
    assert plan["run"] == {"rollouts": 2, "optimizer_steps": 2, "samples": 16} | tokens
    assert plan["prompt"]["tokens"] == 4
    assert plan["checkpoints"] == {"policy": str((workspace / "dist" / "release").resolve())}
    assert plan["hooks"] == [f"--custom-rm-path {workspace}/own.py:reward"]
    assert {one["name"] for one in plan["transports"] if one["problem"]} == {"nccl", "disk", "disk, delta"}
    assert [one["phase"] for one in plan["times"]] == ["generate", "train", "hand over", "send weights", "save"]
    assert plan["trainer"]["total"] > plan["trainer"]["weights"] > 0


def test_all_problems_come_at_once_with_what_is_known(words, capsys):
    changed = {"--global-batch-size": "7", "--load": "/nowhere", "--save": "/proc/save"}
    code, out, err = run(words("--device-memory-gib", "0.25", **changed), capsys)
    lines = [line for line in err.splitlines() if line.startswith("slime-launch: ")]
    assert code == 2
    for text in ("must equal global_batch_size (7)", "/nowhere does not exist", "/proc/save can't be written"):
        assert sum(text in line for line in lines) == 1
    assert "first prompt, 4 tokens" in out


def test_what_cannot_be_read_is_reported_with_all_else(words, capsys):
    wrong = {"--num-rollout": None, "--num-rolout": "3", "--lr": "abc", "--load": "/none", "--global-batch-size": "7"}
    given = [word for word in words(**wrong) if word != "--num-rollout"]
    found = problems_of([*given, "--sglang-port", "1", "--sglang-model-path", "x", "--router-port", "1"], capsys)
    expected = [
        "unknown flag --num-rolout; did you mean --num-rollout",
        "--router-port cannot be given",
        "--sglang-model-path cannot be given",
        "--sglang-port cannot be given",
        "--lr: 'abc' is not a number",
        "/none does not exist",
        "rollout_batch_size (4) × n_samples_per_prompt (2) = 8 must equal global_batch_size (7)",
    ]
    assert len(found) == len(expected), found
    assert all(any(text in line for line in found) for text in expected), found
