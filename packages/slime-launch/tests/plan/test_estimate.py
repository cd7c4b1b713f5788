"""Plans of runs that have no trainers, no engines, or rows of a data set in place of prompts."""

import json

import pytest

CONVERSATION = [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}]


ROWS = {
    "sft_loss": {"messages": CONVERSATION},
    "dpo_loss": {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"},
    "rm_loss": {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"},
}


def test_a_trainer_that_does_not_fit_is_refused(planned):
    code, plan, problems = planned("--n-samples-per-prompt", "2")
    assert code == 2
    assert problems == [line for line in problems if "a trainer rank takes 1" in line] and len(problems) == 1
    assert plan["nodes"][0]["trainer_ranks"] == [0]


@pytest.mark.parametrize("kind", ["generation", "evaluation"])
def test_what_trains_nothing_needs_no_trainers(planned, workspace, kind):
    words = ["--debug-rollout-only", "--n-samples-per-prompt", "2"]
    if kind == "evaluation":
        words = ["--num-rollout", "0", "--eval-prompt-data", str(workspace / "train.jsonl")]
    code, plan, problems = planned(*words, without=("--load",))
    assert (code, problems) == (0, [])
    assert any("no trainers are started" in line for line in plan["notices"])
    assert plan["nodes"] == [{"node": 0, "trainer_ranks": [], "engines": [{"number": 0, "title": "", "gpus": [0]}]}]
    assert plan["trainer"] is None and plan["batch"] is None and plan["transports"] == []
    assert [phase["phase"] for phase in plan["phases"]] == ["generate"]
    assert not {"train", "log-probs", "send weights", "save"} & {one["phase"] for one in plan["times"]}
    assert plan["run"]["optimizer_steps"] == 0


def test_an_evaluation_of_a_checkpoint_has_trainers_that_make_no_pass(planned, workspace):
    words = ["--num-rollout", "0", "--eval-prompt-data", str(workspace / "train.jsonl")]
    code, plan, _ = planned(*words, "--device-memory-gib", "200")
    assert code == 0
    trainer = plan["trainer"]
    assert trainer["activations"] == trainer["logits"] == trainer["gradients"] == trainer["optimizer"] == 0
    assert trainer["weights"] > 0
    assert [phase["phase"] for phase in plan["phases"]] == ["send weights", "generate"]


def test_host_memory_that_is_not_known_is_noted(planned):
    words = ["--n-samples-per-prompt", "2", "--use-kl-loss", "--device-memory-gib", "200"]
    note = "trainer ranks take 29.9 GiB of their node's host memory"  # two copies of 16 billion bytes
    assert any(note in line for line in planned(*words)[1]["notices"])
    assert not any("host memory" in line for line in planned(*words[:2], *words[3:])[1]["notices"])


def test_recorded_rollouts_need_no_engines(planned, workspace):
    (workspace / "0.npz").touch()
    words = ["--load-debug-rollout-data", f"{workspace}/{{rollout_id}}.npz", "--n-samples-per-prompt", "2"]
    code, plan, problems = planned(*words, "--device-memory-gib", "200")
    assert (code, problems) == (0, [])
    assert plan["nodes"] == [{"node": 0, "trainer_ranks": [0], "engines": []}]
    assert plan["engines"] == [] and plan["transports"] == []
    assert [phase["phase"] for phase in plan["phases"]] == ["train"]
    assert {"generate", "send weights"} & {one["phase"] for one in plan["times"]} == set()


@pytest.mark.parametrize("loss", ROWS)
def test_rows_of_a_data_set(planned, workspace, loss):
    """Micro-batches of rows that are as long as they may be; a pair is two samples."""
    (workspace / "train.jsonl").write_text(json.dumps(ROWS[loss]) + "\n")
    words = ["--loss-type", loss, "--rollout-max-context-len", "2048", "--micro-batch-size", "4"]
    code, plan, problems = planned(*words, "--rollout-batch-size", "16", "--device-memory-gib", "400")
    assert (code, problems) == (0, [])
    identity = "16 conversations × 1 samples = 16 = 1 steps × global batch 16"
    if loss != "sft_loss":
        identity = "16 pairs × 2 samples = 32 = 1 steps × global batch 32"
    assert plan["batch"]["identity"] == identity
    assert plan["batch"]["tokens_per_micro_batch"] == 4 * 2048
    assert plan["sizes"]["samples"] * plan["sizes"]["response_tokens"] == plan["run"]["tokens_at_most"] / 2
    found = [(one["title"], one["tokens"], one["trained"]) for one in plan["samples"]]
    pairs = [("chosen", 5, 1), ("rejected", 5, 1)]
    assert found == ([("conversation", 7, 1)] if loss == "sft_loss" else pairs)


def test_functions_of_the_algorithm_are_listed(planned, workspace):
    (workspace / "own.py").write_text("def advantage(inputs): pass\ndef weigh(**given): pass\n")
    words = ["--custom-advantage-function-path", f"{workspace}/own.py:advantage", "--use-tis"]
    words += ["--custom-tis-function-path", f"{workspace}/own.py:weigh", "--custom-rm-path", "json.dumps"]
    plan = planned(*words, "--device-memory-gib", "400")[1]
    assert plan["hooks"] == [
        f"--custom-tis-function-path {workspace}/own.py:weigh",
        f"--custom-advantage-function-path {workspace}/own.py:advantage",
    ]


def test_the_two_samples_of_a_pair_are_in_one_micro_batch(planned, workspace):
    (workspace / "train.jsonl").write_text(json.dumps(ROWS["dpo_loss"]) + "\n")
    words = ["--loss-type", "dpo_loss", "--rollout-max-context-len", "2048", "--device-memory-gib", "400"]
    assert planned(*words)[1]["batch"]["tokens_per_micro_batch"] == 2 * 2048
    dynamic = ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "1024"]
    assert planned(*words, *dynamic)[1]["batch"]["tokens_per_micro_batch"] == 2 * 2048


BAD_ROWS = {
    "lacks an answer": ("dpo_loss", [{"prompt": "1 + 1 =", "chosen": " 2"}]),
    "both answers are one": ("dpo_loss", [{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 2"}]),
    "pairs of a reward model": ("rm_loss", [{"prompt": "1 + 1 =", "chosen": " 2"}]),
    "a later row": ("dpo_loss", [ROWS["dpo_loss"], {"prompt": "1 + 1 = ? ? ? ?", "chosen": " 2"}]),
    "no conversation": ("sft_loss", [{"messages": []}]),
    "no rows": ("sft_loss", []),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_brings_no_problem_of_memory(planned, workspace, name):
    """Nothing is said of how long rows are at most where they cannot be read."""
    loss, rows = BAD_ROWS[name]
    (workspace / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, plan, problems = planned("--loss-type", loss)
    assert (code, len(problems)) == (2, 1)
    assert "memory" not in problems[0] and "GiB" not in problems[0]
    assert plan["sizes"] is None and plan["trainer"] is None
