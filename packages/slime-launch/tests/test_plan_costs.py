"""What a plan of a large model says of its times: what they assume, uneven experts, alternatives that are planned."""

import json
import re
from types import SimpleNamespace

import pytest

from slime_launch.cli import main
from slime_launch.devices import find_device
from slime_launch.flags import parse_train
from slime_launch.plan import cost
from slime_launch.plan.cost import PhaseTime

RUN = """
hf-checkpoint = "Qwen/Qwen3-30B-A3B"
num-rollout = 300
rollout-batch-size = 32
n-samples-per-prompt = 8
rollout-max-response-len = 8192
rollout-max-prompt-len = 2048
rm-type = "math"
save = "save"
save-interval = 100
actor-num-nodes = 2
actor-num-gpus-per-node = 8
colocate = true
tensor-model-parallel-size = 4
sequence-parallel = true
expert-model-parallel-size = 8
expert-tensor-parallel-size = 1
recompute-granularity = "full"
recompute-method = "uniform"
recompute-num-layers = 1
use-dynamic-batch-size = true
max-tokens-per-gpu = 20480
optimizer-cpu-offload = true
rollout-num-gpus-per-engine = 8
sglang-mem-fraction-static = 0.7
"""
LAYERS, HIDDEN, WIDTH, CHOSEN = 48, 2048, 768, 8


@pytest.fixture
def planned(tmp_path, monkeypatch, capsys, workspace):
    """A plan of the run on H100s with more words, as JSON or as text."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)

    def plan(*more, text=False):
        words = ["--config", "run.toml", "--prompt-data", str(workspace / "train.jsonl"), *more]
        code = main(["plan", "--device", "h100", *([] if text else ["--json"]), *words])
        out, err = capsys.readouterr()
        assert code == 0, err
        return out if text else json.loads(out)

    return plan


def test_a_figure_that_is_assumed_is_printed(planned):
    out, assumed = planned(text=True), "\n".join(planned()["assumed"])
    for figure in ("35% of a GPU's 989 TFLOP/s", "50%", "40%", "60% of its 3,350 GB/s", "5 ms", "10 GB/s", "3 GB/s"):
        assert figure in assumed
    for figure in ("450 GB/s between the GPUs of a node", "12.5 GB/s between nodes"):
        assert figure in assumed
    assert all(f"assumed: {line}" in out for line in assumed.splitlines())
    assert "1 GB/s of a file system" in "\n".join(planned("--no-async-save")["assumed"])


def test_times_on_a_cpu_assume_no_other_work(flags, to_words):
    """And weights that are sent there are copied within host memory."""
    settings = parse_train(to_words(flags))
    sent = cost.PhaseTime(phase="send weights", seconds=1.0, of="bytes", times=1)
    first, *others = cost.assumed(settings, find_device("cpu", None), [sent])
    assert first == "no other work on the machine: with some, all of this takes longer"
    assert "3 GB/s within host memory" in others
    assert cost.assumed(settings, find_device("cpu", None), []) == []


def test_each_assumption_is_the_one_that_is_computed_with(planned, monkeypatch):
    before = {one["phase"]: one["seconds"] for one in planned()["times"]}
    monkeypatch.setattr(cost, "TRAINING", cost.TRAINING / 2)
    after = planned()
    assert "training at 18% of" in "\n".join(after["assumed"])
    assert {one["phase"]: one["seconds"] for one in after["times"]} == before | {
        "train": pytest.approx(2 * before["train"])
    }


def test_bytes_of_a_number_in_a_checkpoint_and_in_a_step_on_the_host(planned):
    numbers = 61_064_245_248 // 2  # of the published files, in bf16
    found = {one["phase"]: one for one in planned()["times"]}
    assert found["save"]["of"] == f"{14 * numbers:,} bytes"
    step = numbers / 16 * ((4 + 2) / 10e9 + (6 * 4 + 4) / 2 / 3e9)
    assert found["optimizer on the host"]["seconds"] == pytest.approx(step, rel=1e-3)
    found = {one["phase"]: one for one in planned("--fp32", "--no-optimizer-cpu-offload")["times"]}
    assert found["save"]["of"] == f"{12 * numbers:,} bytes"


def test_an_export_is_read_from_the_checkpoint_and_written(planned):
    def saved(*more):
        [found] = [one for one in planned(*more)["times"] if one["phase"] == "save"]
        return found

    exported, alone = saved("--save-hf", "exported/{rollout_id}"), saved()
    assert exported["seconds"] - alone["seconds"] == pytest.approx(2 * 61_064_245_248 / 1e9, rel=1e-3)
    assert exported["of"] == f"{alone['of']}, and exported"


def test_a_step_of_decoding_reads_the_weights_that_its_tokens_visit(planned):
    """With one response at a time on each of two engines: chosen experts, attention, router and head once a token."""
    [found] = [one for one in planned("--rollout-concurrency", "2")["times"] if one["phase"] == "generate"]
    assert found["of"] == "2 engines, 1 of 128 responses at a time"
    attention = HIDDEN * 128 * (32 + 4 + 4 + 32)
    layer = attention + CHOSEN * 3 * HIDDEN * WIDTH + 128 * HIDDEN
    visited, cached = LAYERS * layer + 151_936 * HIDDEN, (2048 + 8192 / 2) * LAYERS * 2 * 4 * 128
    step = 2 * (visited + cached) / (8 * 3350e9 * 0.6) + 5e-3
    assert found["seconds"] == pytest.approx(128 * 8192 * step, rel=1e-3)


@pytest.mark.parametrize(
    ("more", "is_said"),
    [
        ([], True),
        (["--no-async-save"], True),
        (["--no-optimizer-cpu-offload"], True),
        (["--no-async-save", "--no-optimizer-cpu-offload"], False),
    ],
    ids=["both", "steps on the host", "saves beside the run", "neither"],
)
def test_copies_within_host_memory_are_assumed_where_something_is_copied_there(planned, more, is_said):
    assert ("3 GB/s within host memory" in planned(*more)["assumed"]) == is_said


def test_a_run_that_generates_ahead_takes_what_takes_longer():
    times = [
        PhaseTime(phase=phase, seconds=seconds, of="", times=2)
        for phase, seconds in {"generate": 10.0, "train": 3.0, "log-probs": 1.0, "save": 0.5}.items()
    ]

    def seconds(ahead):
        selection = SimpleNamespace(async_buffer_size=ahead)
        return cost.run_seconds(SimpleNamespace(rollout=SimpleNamespace(selection=selection)), times)

    assert (seconds(None), seconds(1)) == (29.0, 21.0)


def test_no_estimate_is_said_to_be_a_bound(planned):
    out = planned(text=True)
    assert "time as estimated, no bound" in out
    after = out[out.index("time as estimated") : out.index("\nnotes")]
    assert "at most" not in after


def test_what_the_run_takes_is_in_gpu_hours_and_tokens_per_second(planned):
    run = planned()["run"]
    assert run["gpus"] == 16
    assert run["gpu_hours"] == pytest.approx(16 * run["seconds"] / 3600, abs=0.1)
    assert run["tokens_per_second"] == pytest.approx(300 * 256 * (2048 + 8192) / run["seconds"], rel=1e-3)
    assert f"16 GPUs: {run['gpu_hours']:,.0f} GPU-hours; {run['tokens_per_second']:,.0f} tokens/s" in planned(text=True)


def test_tokens_at_most_are_no_fewer_where_prompts_are_not_known(planned, tmp_path):
    assert planned()["run"]["tokens_at_most"] == 300 * 256 * (2048 + 8192)
    (tmp_path / "run.toml").write_text(RUN.replace("rollout-max-prompt-len = 2048", ""))
    run, out = planned()["run"], planned(text=True)
    assert run["tokens_at_most"] == 300 * 256 * 40_960  # the model's context
    assert run["tokens"] == 300 * 256 * 8192
    assert "at most 3,145,728,000 tokens (about 629,145,600 with prompts" in out
    assert "micro-batches of about 20,480 tokens" in out


def test_experts_that_are_used_unevenly_take_as_much_as_their_rank_can_have(planned):
    plan = planned()
    even, twice, most = plan["experts"]
    [train] = [one["seconds"] for one in plan["times"] if one["phase"] == "train"]
    assert (even["times"], twice["times"], most["times"]) == (1, 2, 8)  # 16 experts on a rank, and 8 chosen
    assert (even["seconds"], even["memory"]) == (train, plan["trainer"]["total"])
    # Forward, again for memory, and twice as much backward, of three matrices; at 35% of 16 GPUs' peak.
    share = 4 * 256 * 10_240 * LAYERS * CHOSEN * 2 * 3 * HIDDEN * WIDTH / (16 * 989e12 * 0.35)
    assert twice["seconds"] - even["seconds"] == pytest.approx(share, rel=1e-6)
    assert most["seconds"] - even["seconds"] == pytest.approx(7 * share, rel=1e-6)
    assert most["memory"] > twice["memory"] > even["memory"]
    dense = ["--hf-checkpoint", "Qwen/Qwen3-4B", "--load", "Qwen/Qwen3-4B", "--no-optimizer-cpu-offload"]
    assert planned(*dense, "--expert-model-parallel-size", "1", "--expert-tensor-parallel-size", "4")["experts"] == []


def test_an_alternative_has_the_figures_of_its_own_plan(planned, tmp_path):
    first, second = planned()["alternatives"]
    assert first["change"] == "without --optimizer-cpu-offload"
    assert second["change"] == "without --recompute-granularity, --recompute-method, --recompute-num-layers"
    for alternative, gone in ((first, r"optimizer-cpu-offload.*\n"), (second, r"recompute-.*\n")):
        (tmp_path / "run.toml").write_text(re.sub(gone, "", RUN))
        plan = planned()
        assert alternative["cost"]["memory"] == plan["trainer"]["total"]
        assert alternative["cost"]["seconds"] == pytest.approx(plan["run"]["seconds"], abs=0.06)
        assert alternative["cost"]["gpu_hours"] == pytest.approx(plan["run"]["gpu_hours"], abs=0.06)
    (tmp_path / "run.toml").write_text(RUN)
    out = planned(text=True)
    assert re.search(
        r"without --optimizer-cpu-offload +48\.8 GiB of 79\.1 GiB in a step +a rollout 5\.5 s shorter", out
    )


def test_other_numbers_of_nodes_are_planned_where_nothing_else_is_faster(planned):
    found = planned("--no-optimizer-cpu-offload", "--recompute-num-layers", "2")["alternatives"]
    fewer = next(one for one in found if one["change"] == "--actor-num-nodes 1")
    plan = planned("--no-optimizer-cpu-offload", "--recompute-num-layers", "2", "--actor-num-nodes", "1")
    assert fewer["cost"]["gpus"] == 8
    assert fewer["cost"]["seconds"] == pytest.approx(plan["run"]["seconds"], abs=0.06)


def test_an_alternative_that_does_not_fit_is_none(planned):
    found = planned("--device-memory-gib", "60")
    assert found["trainer"]["total"] < 60 * 2**30
    assert not [one for one in found["alternatives"] if one["cost"]["memory"] > 60 * 2**30]
    assert "without --optimizer-cpu-offload" in [one["change"] for one in found["alternatives"]]
    small = planned("--device-memory-gib", "40", "--sglang-mem-fraction-static", "0.6")["alternatives"]
    assert "without --optimizer-cpu-offload" not in [one["change"] for one in small]


def test_generating_ahead_is_an_alternative_of_a_run_that_takes_turns(planned, tmp_path):
    (tmp_path / "run.toml").write_text(RUN.replace("colocate = true", "rollout-num-gpus = 16"))
    ahead = next(one for one in planned()["alternatives"] if one["change"] == "--async-buffer-size 1")
    plan = planned("--async-buffer-size", "1")
    assert ahead["cost"]["seconds"] == pytest.approx(plan["run"]["seconds"], abs=0.06)


def test_a_published_model_is_called_by_its_name(planned):
    assert planned()["checkpoints"] == {"policy": "Qwen/Qwen3-30B-A3B"}
