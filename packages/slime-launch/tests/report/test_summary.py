import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_launch.cli import main
from slime_launch.flags import parse_train
from slime_launch.report import draw_chart, make_report, report_lines, scoring_problem, write_report
from slime_launch.resume import RunState, StartWeights
from slime_launch.tracking import Tracker

ROWS = [
    {"kind": "eval", "step": 0, "rollout_id": 0, "eval/sums": 0.25, "eval/sums-pass@2": 0.5},
    {"kind": "train", "step": 0, "rollout_id": 0, "train/loss": 1.0},
    {
        "kind": "rollout",
        "step": 0,
        "rollout_id": 0,
        "rollout/raw_reward": 0.5,
        "perf/step_time": 10.0,
        "perf/train_time": 6.0,
        "perf/actor_train_time": 5.0,
    },
    {"kind": "train", "step": 1, "rollout_id": 1, "train/loss": 0.5},
    {
        "kind": "rollout",
        "step": 1,
        "rollout_id": 1,
        "rollout/raw_reward": 0.75,
        "perf/step_time": 20.0,
        "perf/train_time": 8.0,
        "perf/actor_train_time": 7.0,
    },
    {"kind": "eval", "step": 2, "rollout_id": 2, "eval/sums": 0.875, "eval/sums/response_len/mean": 9.0},
]


def test_figures(tmp_path):
    report = make_report(ROWS, output_dir=tmp_path, checkpoint=tmp_path / "iter_0000002", minutes=1.5)
    assert (report.rollouts, report.steps, report.minutes, report.training_minutes) == (2, 2, 1.5, 0.5)
    assert report.eval_before == {"sums": 0.25}
    assert report.eval_after == {"sums": 0.875}
    assert report.evals == [(0, {"sums": 0.25}), (2, {"sums": 0.875})]
    assert report.rewards == [0.5, 0.75]
    assert report.seconds == {"step": 15.0, "train": 7.0, "actor_train": 6.0}


def test_text_names_what_matters(tmp_path):
    report = make_report(ROWS, output_dir=tmp_path, checkpoint=None, minutes=1.5)
    text = "\n".join(report_lines(report))
    assert "mean reward on sums: 0.250 → 0.875" in text
    assert "none; --save DIR writes one" in text
    assert str(tmp_path) in text
    order = [text.index(word) for word in ("train  ", "· actor_train", "whole step")]
    assert order == sorted(order)


def test_samples_without_a_score_are_counted(tmp_path):
    rows = [*ROWS, {"kind": "rollout", "step": 2, "rollout_id": 2, "rollout/reward_failures": 7.0}]
    report = make_report(rows, output_dir=tmp_path, checkpoint=None, minutes=1.5)
    assert report.unscored == 7
    assert report_lines(report)[-1] == f"7 samples could not be scored; {tmp_path}/logs/rollout.log says why"
    scored = make_report(ROWS, output_dir=tmp_path, checkpoint=None, minutes=1.5)
    assert not any("scored" in line for line in report_lines(scored))


def test_files_for_people_and_programs(tmp_path):
    report = make_report(ROWS, output_dir=tmp_path, checkpoint=None, minutes=1.5)
    write_report(report)
    assert Path(report.reward_curve).read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "report.json").read_text())["eval_after"] == {"sums": 0.875}


def test_a_run_whose_rewards_failed_mostly_is_no_success(tmp_path):
    """3 rollouts of 8 samples: 12 failures are half of them and tolerated, as a service may be down; 13 are more."""
    for failed, problem in ((12.0, None), (13.0, "13 of 24 samples could not be scored")):
        rows = [*ROWS, {"kind": "rollout", "step": 2, "rollout_id": 2, "rollout/reward_failures": failed}]
        found = scoring_problem(make_report(rows, output_dir=tmp_path, checkpoint=None, minutes=1.5), 8)
        assert found == problem or found.startswith(problem)


def test_an_evaluation_alone_says_of_what_and_of_no_checkpoint_that_it_could_have_written(tmp_path):
    row = {"kind": "eval", "step": 2, "rollout_id": 2, "eval/sums": 0.25}
    report = make_report(
        [row], output_dir=tmp_path, checkpoint=None, minutes=0.5, evaluated="a/iter_0000002, after step 2"
    )
    lines = report_lines(report)
    assert lines[1] == "evaluated a/iter_0000002, after step 2, in 30.0 s"
    assert "mean reward on sums: 0.250" in lines and not any("--save" in line for line in lines)


def test_what_a_run_did_is_counted_in_words(tmp_path):
    def done(*rows):
        return report_lines(make_report(rows, output_dir=tmp_path, checkpoint=None, minutes=0.0))[1]

    train, rollout = ({"kind": kind, "step": 0, "rollout_id": 0} for kind in ("train", "rollout"))
    assert done(train, rollout) == "trained for 1 step"
    assert done(train, train, rollout) == "trained for 1 step of 2 optimizer steps"
    assert done(rollout) == "generated 1 rollout" and done(rollout, rollout) == "generated 2 rollouts"


def test_parts_of_a_step_are_no_more_than_the_whole_unless_they_are_done_ahead(tmp_path):
    """A rollout that was read after a restart took no time to generate: the mean counts it as 0."""

    def lines(*times):
        rows = [
            {"kind": "rollout", "step": at, "rollout_id": at, "rollout/raw_reward": 0.5}
            | {f"perf/{name}_time": value for name, value in row.items()}
            for at, row in enumerate(times)
        ]
        return report_lines(make_report(rows, output_dir=tmp_path, checkpoint=None, minutes=1.0))

    resumed = lines({"rollout": 20.0, "generate": 18.0}, {"rollout": 1.0})
    assert "  generate and score    10.50" in resumed and "  · generate             9.00" in resumed
    ahead = lines({"rollout": 2.0, "generate": 18.0})
    assert any(line.split() == ["·", "generate,", "ahead", "18.00"] for line in ahead)


@pytest.fixture
def curves(monkeypatch):
    """What is drawn, by its label: the points of each curve."""
    from matplotlib.axes import Axes

    drawn, plot = {}, Axes.plot

    def keep(self, x, y, *words, **how):
        drawn[how.get("label")] = (list(x), list(y))
        return plot(self, x, y, *words, **how)

    monkeypatch.setattr(Axes, "plot", keep)
    return drawn


def test_the_curve_has_the_points_of_rollouts_and_evaluations(curves, tmp_path):
    write_report(make_report(ROWS, output_dir=tmp_path, checkpoint=None, minutes=1.5))
    assert curves == {"trained on": ([1, 2], [0.5, 0.75]), "sums": ([0, 2], [0.25, 0.875])}


def test_the_curve_of_a_data_set_has_its_losses(curves, tmp_path):
    rows = [row for row in ROWS if row["kind"] == "train"]
    rows += [{"kind": "eval", "step": 1, "rollout_id": 1, "eval/held/loss": 0.75}]
    write_report(make_report(rows, output_dir=tmp_path, checkpoint=None, minutes=1.5))
    assert curves == {"trained on": ([1, 2], [1.0, 0.5]), "held": ([1], [0.75])}


def test_answers_before_and_after_are_shown(tmp_path):
    before, after = ({"prompt": "1 + 1 =", "response": text, "reward": int(text == "2")} for text in "32")
    rows = [ROWS[0] | {"samples": [before]}, *ROWS[1:5], ROWS[5] | {"samples": [after]}]
    lines = report_lines(make_report(rows, output_dir=tmp_path, checkpoint=None, minutes=0.0))
    at = lines.index("before training")
    assert lines[at : at + 4] == [
        "before training", "  1 + 1 = → 3 (reward 0)", "after training", "  1 + 1 = → 2 (reward 1)",
    ]  # fmt: skip


def test_an_evaluation_alone_is_shown_once(tmp_path):
    answer = {"prompt": "1 + 1 =", "response": "2", "reward": 1}
    row = {"kind": "eval", "step": 0, "rollout_id": 0, "eval/sums": 0.25, "samples": [answer]}
    report = make_report([row], output_dir=tmp_path, checkpoint=None, minutes=0.0)
    assert (report.eval_before, report.eval_after, report.samples_after) == ({"sums": 0.25}, {"sums": 0.25}, [])
    lines = report_lines(report)
    at = lines.index("mean reward on sums: 0.250")
    assert lines[at + 1 : at + 3] == ["held-out prompts", "  1 + 1 = → 2 (reward 1)"]
    assert not any("training" in line for line in lines)


def test_without_held_out_prompts_samples_of_rollouts_are_shown_and_kept_whole(tmp_path):
    first, last = ({"prompt": "q " * 300, "response": word * 300, "reward": None} for word in ("a b ", "c d "))
    rollouts = [row for row in ROWS if row["kind"] == "rollout"]
    rows = [rollouts[0] | {"samples": [first]}, rollouts[1] | {"samples": [last]}]
    report = make_report(rows, output_dir=tmp_path, checkpoint=None, minutes=0.0)
    write_report(report)
    written = json.loads((tmp_path / "report.json").read_text())
    assert (written["samples_before"], written["samples_after"]) == ([first], [last])
    lines = report_lines(report)
    at = lines.index("in the first rollout")
    assert lines[at + 2] == "in the last rollout"
    for line, text in ((lines[at + 1], "a b "), (lines[at + 3], "c d ")):
        assert f" → {text}{text}" in line and line.endswith("…") and 200 <= len(line) < 210
    assert "in the last rollout" not in report_lines(
        make_report(rows[:1], output_dir=tmp_path, checkpoint=None, minutes=0.0)
    )


def test_a_run_without_rows_has_a_report(tmp_path):
    report = make_report([], output_dir=tmp_path, checkpoint=None, minutes=0.0)
    write_report(report)
    assert report_lines(report)


def test_a_run_on_a_data_set_has_a_curve_of_its_loss(tmp_path):
    rows = [
        {"kind": "eval", "step": 0, "rollout_id": 0, "eval/held/loss": 0.7, "eval/held/accuracy": 0.5},
        {"kind": "train", "step": 0, "rollout_id": 0, "train/loss": 0.7},
        {"kind": "train", "step": 1, "rollout_id": 0, "train/loss": 0.5},
        {"kind": "rollout", "step": 0, "rollout_id": 0, "perf/data_time": 0.1, "perf/rollout_time": 0.2},
        {"kind": "train", "step": 2, "rollout_id": 1, "train/loss": 0.25},
        {"kind": "rollout", "step": 1, "rollout_id": 1, "perf/data_time": 0.1, "perf/update_weights_time": 0.0},
        {"kind": "eval", "step": 2, "rollout_id": 2, "eval/held/loss": 0.2},
    ]
    report = make_report(rows, output_dir=tmp_path, checkpoint=None, minutes=0.0)
    write_report(report)
    assert report.losses == [0.6, 0.25] and report.reward_curve is None
    assert Path(report.loss_curve).name == "loss_curve.png" and Path(report.loss_curve).exists()
    text = "\n".join(report_lines(report))
    assert "loss on held: 0.700 → 0.200" in text and "loss per rollout" in text and "read and split rows" in text
    assert "reward" not in text and "send weights" not in text


def test_no_evaluation_before_gives_no_before(tmp_path):
    report = make_report(ROWS[1:], output_dir=tmp_path, checkpoint=None, minutes=0.0)
    assert report.eval_before == {}
    assert "mean reward on sums: 0.875" in "\n".join(report_lines(report))


def test_chart_of_a_ramp():
    assert draw_chart([0.0, 1.0, 2.0], height=2) == ["       2 ┤ ▁█", "       0 ┤▁██"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300))
def test_chart_has_its_size_and_its_peak_on_top(values):
    rows = draw_chart(values, width=40, height=5)
    assert len(rows) == 5
    bodies = [row.split("┤")[1] for row in rows]
    assert {len(body) for body in bodies} == {min(40, len(values))}
    if max(values) > min(values) and len(values) <= 40:
        assert bodies[0][values.index(max(values))] == "█"


@pytest.fixture
def finished(flags, to_words, workspace):
    """A run of two rollouts that is done; gives the words of its command."""
    settings = parse_train(to_words(flags))
    weights = StartWeights(load=str(workspace / "dist"), ref_load=str(workspace / "dist"))
    state = RunState(settings, None, weights, output_dir=workspace / "out")
    state.begin({})
    (workspace / "out").mkdir()
    tracker = Tracker(workspace / "out")
    for rollout_id in range(2):
        state.trained(rollout_id)
        metrics = {"rollout/raw_reward": rollout_id / 2, "perf/step_time": 3.0}
        tracker.log("rollout", step=rollout_id, rollout_id=rollout_id, metrics=metrics)
    tracker.close()
    shutil.copytree(workspace / "dist" / "release", workspace / "save" / "iter_0000002")
    state.saving(workspace / "save" / "iter_0000002", {})
    state.commit()
    return ["train", *to_words(flags)]


def test_a_finished_run_says_so_and_reports_again(finished, workspace):
    command = [sys.executable, "-m", "slime_launch.cli", *finished]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert f"the run in {workspace / 'save'} is finished after 2 steps; give a larger --num-rollout" in done.stdout
    assert "mean reward per rollout" in done.stdout
    assert str(workspace / "save" / "iter_0000002") in done.stdout


def test_it_is_found_without_the_output_directory(finished, capsys):
    del finished[finished.index("--output-dir") : finished.index("--output-dir") + 2]
    assert main(finished) == 0
    assert "mean reward per rollout" in capsys.readouterr().out


def test_another_output_directory_shows_the_same_report(finished, workspace, capsys):
    finished[finished.index("--output-dir") + 1] = str(workspace / "elsewhere")
    assert main(finished) == 0
    assert "mean reward per rollout" in capsys.readouterr().out
    assert not (workspace / "elsewhere").exists()


def test_metrics_that_are_gone_do_not_matter(finished, workspace):
    shutil.rmtree(workspace / "out")
    assert main(finished) == 0
    assert not (workspace / "out").exists()


def test_a_report_that_a_kill_prevented_is_written_now(finished, workspace):
    report = workspace / "out" / "report.json"
    assert not report.exists()
    assert main(finished) == 0
    assert json.loads(report.read_text())["rewards"] == [0.0, 0.5]
    assert (workspace / "out" / "reward_curve.png").exists()
    written = report.stat().st_mtime_ns
    assert main(finished) == 0
    assert report.stat().st_mtime_ns == written  # it has the minutes that the run took


def test_the_report_of_the_first_part_of_a_longer_run_is_replaced(finished, workspace):
    report = workspace / "out" / "report.json"
    report.write_text(json.dumps({"rollouts": 1}))
    assert main(finished) == 0
    assert json.loads(report.read_text())["rollouts"] == 2
