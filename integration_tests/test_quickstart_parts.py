"""The quick start's data, command and summary."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

from quickstart_parts import (
    EVAL_NAME,
    HELD_OUT_PROBLEMS,
    PROMPT_TEMPLATE,
    WORKED_SUMS,
    Places,
    command_script,
    jsonl,
    make_problems,
    make_result,
    replace_flags,
    summary_lines,
    train_flags,
)

from slime_launch.cli import main as slime_launch
from slime_launch.flags import parse_train
from slime_rollout.eval_sets import read_eval_sets

REPORT = {
    "steps": 40,
    "rewards": [0.3, 0.5, 0.7],
    "eval_before": {EVAL_NAME: 0.28125},
    "eval_after": {EVAL_NAME: 0.7578125},
    "seconds": {"rollout": 4.5, "train": 4.25, "update_weights": 0.75, "step": 9.5, "log_probs": 1.0},
    "run_dir": "/repo/outputs/quickstart/seed-1/run",
    "checkpoint_dir": "/repo/outputs/quickstart/seed-1/checkpoints/iter_0000040",
    "reward_curve": "/repo/outputs/quickstart/seed-1/run/reward_curve.png",
}


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places.under(tmp_path / "out put", seed=7)


def _unordered(problems: list[tuple[int, int]]) -> set[tuple[int, int]]:
    return {(min(pair), max(pair)) for pair in problems}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_training_held_out_and_worked_sums_are_disjoint_even_when_swapped(seed: int) -> None:
    train, held_out = make_problems(seed)
    sets = [_unordered(train), _unordered(held_out), _unordered(list(WORKED_SUMS))]
    assert [len(train), len(held_out)] == [2048, HELD_OUT_PROBLEMS]
    assert len(set.union(*sets)) == sum(len(problems) for problems in sets) == 2048 + HELD_OUT_PROBLEMS + 3
    assert all(10 <= number <= 99 for pair in train + held_out for number in pair)
    assert any(a > b for a, b in train) and any(a < b for a, b in train)


def test_problems_follow_from_the_seed_alone() -> None:
    assert make_problems(5) == make_problems(5)
    assert make_problems(5) != make_problems(6)


def test_no_more_problems_than_there_are_sums() -> None:
    with pytest.raises(ValueError, match="4092 different sums"):
        make_problems(1, train=4000)


def test_rows_have_the_documented_format_and_the_right_answer() -> None:
    (row,) = [json.loads(line) for line in jsonl([(57, 26)]).splitlines()]
    assert row == {"prompt": PROMPT_TEMPLATE.format(a=57, b=26), "label": "83"}
    assert row["prompt"].endswith("\n57 + 26 =")
    for line, (a, b) in zip(row["prompt"].splitlines(), WORKED_SUMS, strict=False):
        assert line == f"{a} + {b} = {a + b}"


def test_replaced_flags_keep_their_place_and_new_ones_come_last(places: Places) -> None:
    flags = train_flags(places, engine_python=Path("py"), seed=1, steps=3)
    merged = replace_flags(flags, ["--lr", "1e-5", "--eval-interval=5", "--rollout-stop", "a", "b"])
    assert list(merged) == [*flags, "--rollout-stop"]
    assert (merged["--lr"], merged["--eval-interval"], merged["--rollout-stop"]) == (["1e-5"], ["5"], ["a", "b"])
    with pytest.raises(ValueError, match="before any flag"):
        replace_flags(flags, ["1e-5"])


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        (["--custom-rm-path", "f.py:score"], "--rm-type"),
        (["--async-buffer-size=1"], "--colocate"),
        (["--offload-train"], "--no-offload-train"),
    ],
)
def test_a_flag_takes_the_place_of_the_one_that_it_excludes(places: Places, words: list[str], gone: str) -> None:
    merged = replace_flags(train_flags(places, engine_python=Path(sys.executable), seed=1, steps=3), words)
    assert gone not in merged
    settings = parse_train([word for name, values in merged.items() for word in (name, *values)])
    own = settings.rollout
    assert own.rewards.custom_rm_path or own.selection.async_buffer_size or settings.kind.trainer_sleeps


def test_the_printed_command_is_what_a_shell_runs(places: Places, tmp_path: Path) -> None:
    flags = train_flags(places, engine_python=Path(sys.executable), seed=1, steps=3)
    (tmp_path / "shape.sh").write_text("MODEL_ARGS=(--num-layers 30)\n")
    launcher = tmp_path / "launcher"
    launcher.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    launcher.chmod(0o755)
    script = tmp_path / "command.sh"
    script.write_text(
        command_script(flags, model_args=tmp_path / "shape.sh", launcher=launcher, root=tmp_path), encoding="utf-8"
    )
    words = subprocess.run(
        ["bash", script], check=True, capture_output=True, text=True, timeout=240
    ).stdout.splitlines()
    expected = [word for name, values in flags.items() for word in (name, *values)]
    assert words == ["train", "--num-layers", "30", *expected]


def test_the_launcher_knows_every_flag(places: Places) -> None:
    flags = train_flags(places, engine_python=Path(sys.executable), seed=9, steps=3)
    settings = parse_train([word for name, values in flags.items() for word in (name, *values)])
    assert settings.run.num_rollout == 3
    assert settings.megatron.seed == 9
    (held_out,) = read_eval_sets(settings.rollout)
    assert (held_out.name, held_out.path) == (EVAL_NAME, str(places.held_out_data))
    assert settings.rollout.selection.rollout_batch_size * settings.rollout.selection.n_samples_per_prompt == 128
    assert settings.algorithm.use_kl_loss and settings.algorithm.kl_loss_coef == 0.001
    without = train_flags(places, engine_python=Path(sys.executable), seed=9, steps=3, bf16=False)
    assert flags.keys() - without.keys() == {"--bf16"} and not without.keys() - flags.keys()


def test_result_and_summary_tell_the_reports_figures() -> None:
    result = make_result(REPORT, hf_dir=Path("/repo/hf"), minutes=6.789)
    assert result == {
        "pass_rate_before": 0.28125,
        "pass_rate_after": 0.7578125,
        "minutes": 6.79,
        "steps": 40,
        "run_dir": REPORT["run_dir"],
        "checkpoint_dir": REPORT["checkpoint_dir"],
        "hf_dir": "/repo/hf",
        "prompt_template": PROMPT_TEMPLATE,
    }
    text = "\n".join(summary_lines(result, REPORT, next_command="quickstart --steps 80", command="run/command.sh"))
    assert "28.1% before, 75.8% after 40 steps in 6.8 min" in text
    assert "generate 4.5 s, train 4.2 s, send weights 0.8 s, in all 9.5 s" in text
    assert "tensorboard --logdir /repo/outputs\n" in text
    assert "what was run     run/command.sh\nlonger           quickstart --steps 80\n" in text


def test_the_summary_ends_with_what_to_do_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = make_result(REPORT, hf_dir=Path("/repo/hf"), minutes=6.789)
    lines = summary_lines(result, REPORT, next_command="quickstart --steps 80", command="run/command.sh")
    page = re.search(r"\((docs/\S+)\)", lines[-4])
    assert page and (Path(__file__).resolve().parents[1] / page[1]).is_file()
    assert lines[-3] == "    source .venv/bin/activate"
    monkeypatch.chdir(tmp_path)
    new, train = (line.split() for line in lines[-2:])
    assert slime_launch(new[1:]) == 0
    assert train[:3] == ["slime-launch", "train", "--config"] and Path(train[3]).is_file()
