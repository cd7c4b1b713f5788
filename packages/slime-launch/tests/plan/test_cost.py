"""The times in a plan of a large model, and what they assume."""

import json

import pytest

from slime_launch.devices import find_device
from slime_launch.flags import parse_train
from slime_launch.plan import cost
from slime_launch.plan.cost import PhaseTime, run_seconds
from support.large_plan import CHOSEN, HIDDEN, LAYERS, RUN, WIDTH
from support.planning import run


@pytest.fixture
def times(words, workspace, capsys):
    """The phases of a plan of ten rollouts on an H100, each as (times, seconds), and the seconds of the run."""

    def planned(*more):
        held = ["--eval-prompt-data", str(workspace / "train.jsonl"), "--n-samples-per-eval-prompt", "16"]
        given = words("--device", "h100", "--json", *held, *more, **{"--num-rollout": "10"})
        code, out, err = run(given, capsys)
        assert code == 0, err
        plan = json.loads(out)
        return {one["phase"]: (one["times"], one["seconds"]) for one in plan["times"]}, plan["run"]["seconds"]

    return planned


def test_a_figure_that_is_assumed_is_printed(planned_large):
    out, assumed = planned_large(text=True), "\n".join(planned_large()["assumed"])
    for figure in ("35% of a GPU's 989 TFLOP/s", "50%", "40%", "60% of its 3,350 GB/s", "5 ms", "10 GB/s", "3 GB/s"):
        assert figure in assumed
    for figure in ("450 GB/s between the GPUs of a node", "12.5 GB/s between nodes"):
        assert figure in assumed
    assert all(f"assumed: {line}" in out for line in assumed.splitlines())
    assert "1 GB/s of a file system" in "\n".join(planned_large("--no-async-save")["assumed"])


def test_times_on_a_cpu_assume_no_other_work(flags, to_words):
    """And weights that are sent there are copied within host memory."""
    settings = parse_train(to_words(flags))
    sent = cost.PhaseTime(phase="send weights", seconds=1.0, of="bytes", times=1)
    first, *others = cost.assumed(settings.megatron, find_device("cpu", None), [sent], exports=False)
    assert first == "no other work on the machine: with some, all of this takes longer"
    assert "3 GB/s within host memory" in others
    assert cost.assumed(settings.megatron, find_device("cpu", None), [], exports=False) == []


def test_each_assumption_is_the_one_that_is_computed_with(planned_large, monkeypatch):
    before = {one["phase"]: one["seconds"] for one in planned_large()["times"]}
    monkeypatch.setattr(cost, "TRAINING", cost.TRAINING / 2)
    after = planned_large()
    assert "training at 18% of" in "\n".join(after["assumed"])
    assert {one["phase"]: one["seconds"] for one in after["times"]} == before | {
        "train": pytest.approx(2 * before["train"])
    }


def test_bytes_of_a_number_in_a_checkpoint_and_in_a_step_on_the_host(planned_large):
    numbers = 61_064_245_248 // 2  # of the published files, in bf16
    found = {one["phase"]: one for one in planned_large()["times"]}
    assert found["save"]["of"] == f"{14 * numbers:,} bytes"
    step = numbers / 16 * ((4 + 2) / 10e9 + (6 * 4 + 4) / 2 / 3e9)
    assert found["optimizer on the host"]["seconds"] == pytest.approx(step, rel=1e-3)
    found = {one["phase"]: one for one in planned_large("--fp32", "--no-optimizer-cpu-offload")["times"]}
    assert found["save"]["of"] == f"{12 * numbers:,} bytes"


def test_an_export_is_read_from_the_checkpoint_and_written(planned_large):
    def saved(*more):
        [found] = [one for one in planned_large(*more)["times"] if one["phase"] == "save"]
        return found

    exported, alone = saved("--save-hf", "exported/{rollout_id}"), saved()
    assert exported["seconds"] - alone["seconds"] == pytest.approx(2 * 61_064_245_248 / 1e9, rel=1e-3)
    assert exported["of"] == f"{alone['of']}, and exported"


def test_a_step_of_decoding_reads_the_weights_that_its_tokens_visit(planned_large):
    """With one response at a time on each of two engines: chosen experts, attention, router and head once a token."""
    [found] = [one for one in planned_large("--rollout-concurrency", "2")["times"] if one["phase"] == "generate"]
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
def test_copies_within_host_memory_are_assumed_where_something_is_copied_there(planned_large, more, is_said):
    assert ("3 GB/s within host memory" in planned_large(*more)["assumed"]) == is_said


def test_a_run_that_generates_ahead_takes_what_takes_longer():
    times = [
        PhaseTime(phase=phase, seconds=seconds, of="", times=2)
        for phase, seconds in {"generate": 10.0, "train": 3.0, "log-probs": 1.0, "save": 0.5}.items()
    ]
    assert [cost.run_seconds(times, overlaps=overlaps) for overlaps in (False, True)] == [29.0, 21.0]


def test_no_estimate_is_said_to_be_a_bound(planned_large):
    out = planned_large(text=True)
    assert "time as estimated, no bound" in out
    after = out[out.index("time as estimated") : out.index("\nnotes")]
    assert "at most" not in after


def test_what_the_run_takes_is_in_gpu_hours_and_tokens_per_second(planned_large):
    run = planned_large()["run"]
    assert run["gpus"] == 16
    assert run["gpu_hours"] == pytest.approx(16 * run["seconds"] / 3600, abs=0.1)
    assert run["tokens_per_second"] == pytest.approx(300 * 256 * (2048 + 8192) / run["seconds"], rel=1e-3)
    assert f"16 GPUs: {run['gpu_hours']:,.0f} GPU-hours; {run['tokens_per_second']:,.0f} tokens/s" in planned_large(
        text=True
    )


def test_tokens_at_most_are_no_fewer_where_prompts_are_not_known(planned_large, tmp_path):
    assert planned_large()["run"]["tokens_at_most"] == 300 * 256 * (2048 + 8192)
    (tmp_path / "run.toml").write_text(RUN.replace("rollout-max-prompt-len = 2048", ""))
    run, out = planned_large()["run"], planned_large(text=True)
    assert run["tokens_at_most"] == 300 * 256 * 40_960  # the model's context
    assert run["tokens"] == 300 * 256 * 8192
    assert "at most 3,145,728,000 tokens (about 629,145,600 with prompts" in out
    assert "micro-batches of about 20,480 tokens" in out


def test_a_published_model_is_called_by_its_name(planned_large):
    assert planned_large()["checkpoints"] == {"policy": "Qwen/Qwen3-30B-A3B"}


def test_generation_and_training_overlap_where_rollouts_are_made_ahead():
    seconds = {"generate": (10.0, 3), "train": (8.0, 3), "send weights": (1.0, 4), "save": (20.0, 1)}
    times = [PhaseTime(phase=phase, seconds=value, of="", times=count) for phase, (value, count) in seconds.items()]
    assert run_seconds(times, overlaps=False) == 30 + 24 + 4 + 20
    assert run_seconds(times, overlaps=True) == 30 + 4 + 20


def test_evaluations_saves_and_hand_overs_count_as_often_as_they_come(times):
    found, whole = times("--eval-interval", "4", "--save-interval", "5")
    counts = {phase: count for phase, (count, _) in found.items()}
    assert counts == {"generate": 10, "train": 10, "hand over": 10, "send weights": 11, "save": 2, "evaluate": 4}
    assert whole == pytest.approx(sum(count * seconds for count, seconds in found.values()), abs=0.1)
    # 128 held-out samples of 8 prompts against 8 samples of 4 prompts in a rollout.
    assert found["evaluate"][1] > found["generate"][1] > 0
    fewer, _ = times("--skip-eval-before-train", "--no-offload-train", "--update-weights-interval", "5")
    assert {phase: count for phase, (count, _) in fewer.items()} == {
        **{"generate": 10, "train": 10, "send weights": 3, "save": 1, "evaluate": 1}
    }
    longer, _ = times("--eval-max-response-len", "100")
    assert longer["evaluate"][1] < found["evaluate"][1]
    exported, _ = times("--save-hf", "export/{rollout_id}")
    assert exported["save"][1] > found["save"][1]
    assert times("--no-async-save")[0]["save"][1] > found["save"][1] == times("--async-save")[0]["save"][1]
    offloaded, _ = times("--optimizer-cpu-offload", "--use-precision-aware-optimizer")
    half, _ = times("--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--optimizer-offload-fraction", "0.5")
    assert offloaded["optimizer on the host"] == (10, pytest.approx(2 * half["optimizer on the host"][1]))
    assert "optimizer on the host" not in found
