"""A plan refuses what a start would refuse before, and after, processes are there; what it cannot check it lists."""

import json
import shutil
import sys

import pytest

from slime_launch.cli import main
from slime_launch.plan.build import UNREAD

WRITTEN = {
    "--critic-save": ["/proc/none", "--advantage-estimator", "ppo"],
    "--save-hf": ["/proc/none/{rollout_id}"],
    "--save-debug-rollout-data": ["/proc/none/rollout_{rollout_id}.npz"],
    "--save-debug-train-data": ["/proc/none/train_{rollout_id}_{rank}.npz"],
    "--update-weight-disk-dir": ["/proc/none", "--update-weight-transport", "disk"],
    "--wandb-dir": ["/proc/none", "--use-wandb", "--wandb-mode", "offline"],
}
"""Flags that name what a run writes; `--save` and `--output-dir` have their own test."""


@pytest.fixture
def planned(flags, to_words, workspace, monkeypatch, capsys):
    """Exit code, the plan, and its problems, of a good command with more words."""
    monkeypatch.chdir(workspace)

    def plan(*more, **changed):
        code = main(["plan", "--json", *to_words(flags | changed), *more])
        found = json.loads(capsys.readouterr().out)
        return code, found, found["problems"]

    return plan


@pytest.mark.parametrize("flag", WRITTEN)
def test_a_directory_that_cannot_be_written_is_refused_before_anything_starts(flag, planned):
    code, _, problems = planned(flag, *WRITTEN[flag])
    assert code == 2
    assert [line for line in problems if line.startswith(f"{flag} /proc")] == problems
    elsewhere, plan, _ = planned("--device", "h100", flag, *WRITTEN[flag])
    assert elsewhere == 0 and any("directories that can be written" in line for line in plan["unchecked"])


@pytest.mark.parametrize(("rows", "pairs", "code"), [(1, False, 2), (2, False, 0), (1, True, 0)])
def test_a_held_out_set_of_fewer_samples_than_ranks_is_refused(rows, pairs, code, planned, flags, workspace):
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2 3"}]
    row = {"prompt": "1", "chosen": "2", "rejected": "3"} if pairs else {"messages": turns}
    for name, count in (("own", 8), ("held", rows)):
        (workspace / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * count)
    for name in ("--colocate", "--global-batch-size", "--n-samples-per-prompt"):
        del flags[name]
    loss = ["--loss-type", "dpo_loss" if pairs else "sft_loss", "--actor-num-gpus-per-node", "2"]
    held = str(workspace / "held.jsonl")
    found, _, problems = planned(
        *loss, "--eval-prompt-data", "few", held, **{"--prompt-data": str(workspace / "own.jsonl")}
    )
    message = f"held-out set few: {held} has 1 usable row for 2 data-parallel ranks; give it more rows, or fewer ranks"
    assert (found, problems) == (code, [message] if code else [])


def test_layers_for_gpus_are_refused_without_one_and_planned_for_one(planned):
    code, _, problems = planned("--transformer-impl", "transformer_engine")
    assert (code, len(problems)) == (2, 1)
    assert problems[0].startswith("--transformer-impl transformer_engine: there is no GPU for its layers")
    words = ["--bf16", "--recompute-granularity", "selective", "--recompute-modules", "layernorm"]
    assert planned("--device", "h100", "--transformer-impl", "transformer_engine", *words)[0] == 0


@pytest.mark.parametrize(
    ("words", "made", "code", "rows"),
    [
        (["--eval-prompt-data", "held", "held.jsonl"], True, 0, 2),
        (["--eval-prompt-data", "held", "held.jsonl"], False, 2, None),
        (["--eval-prompt-data", "held", "held.jsonl", "--device", "h100"], False, 0, None),
        (["--eval-prompt-data", "held", "held.jsonl", "--streaming-data"], True, 0, 2),
    ],
)
def test_an_evaluation_has_a_time_only_where_its_rows_were_counted(words, made, code, rows, planned, workspace):
    if made:
        (workspace / "held.jsonl").write_text('{"prompt": "1 + 1 =", "label": "2"}\n' * 2)
    found, plan, _ = planned(*words)
    times = [one for one in plan["times"] if one["phase"] == "evaluate"]
    said = [line for line in plan["notices"] if "held-out set held were not counted: the time of their evalua" in line]
    assert (found, len(times), len(said)) == ((code, 1, 0) if rows else (code, 0, 1))
    assert all((one["of"], one["times"]) == (f"{rows} held-out samples", 2) for one in times)
    assert any(one["phase"] == "generate" for one in plan["times"])


@pytest.mark.parametrize("words", [["--lrr", "3"], ["--bf-16"], ["--lr", "abc"], ["--rollout-batch-siz", "3"]])
def test_a_plan_without_what_could_not_be_read_says_so_once_and_names_no_other_flag(words, planned):
    code, plan, problems = planned(*words)
    assert (code, len(problems)) == (2, 1) and words[0] in problems[0]
    assert [line for line in plan["notices"] if "left out" in line or "not known" in line] == [UNREAD]
    assert planned()[1]["notices"].count(UNREAD) == 0


def test_what_was_checked_whole_leaves_nothing_unchecked(planned):
    code, plan, _ = planned()
    assert (code, plan["unchecked"]) == (0, [])


def test_the_list_of_what_was_not_checked_is_whole(planned, workspace, monkeypatch):
    monkeypatch.delenv("PYTHONPATH")
    (workspace / "hf" / "model.safetensors").unlink()
    shutil.rmtree(workspace / "dist")
    words = ["--device", "h100", "--sglang-python", sys.executable, "--sglang-log-level", "info"]
    words += ["--eval-prompt-data", "held", "none/held.jsonl@[:4]", "--sglang-router-url", "http://10.0.0.1:3000"]
    hf = str(workspace / "hf")
    code, plan, problems = planned(*words, **{"--prompt-data": "none/train.jsonl", "--load": hf})
    assert (code, problems) == (0, [])
    assert plan["unchecked"] == [
        f"the weights of {hf} are not downloaded yet",
        "SGLang is not installed on this machine, so these flags are not checked: --sglang-log-level",
        "the data is not checked: none/train.jsonl, none/held.jsonl@[:4] are not on this machine",
        "directories that can be written, room on disks, free ports and logins are the other machine's",
        "whether http://10.0.0.1:3000 answers as a router",
    ]
    assert set(plan["unchecked"]) <= set(plan["notices"])


def test_rows_that_are_streamed_are_not_checked(planned):
    [line] = planned("--streaming-data")[1]["unchecked"]
    assert line.endswith("is streamed: the length of a prompt is known when its turn comes")


def test_data_that_is_missing_here_is_refused_where_the_run_is_to_start_here(planned):
    code, _, [problem] = planned(**{"--prompt-data": "none.jsonl"})
    assert code == 2 and "none.jsonl does not exist" in problem


def test_the_text_of_a_plan_ends_with_what_was_not_checked(flags, to_words, capsys):
    assert main(["plan", "--device", "h100", *to_words(flags)]) == 0
    *_, last = capsys.readouterr().out.strip().split("\n\n")
    assert last.splitlines() == [
        "not checked, so that a start may refuse it",
        "  directories that can be written, room on disks, free ports and logins are the other machine's",
    ]
