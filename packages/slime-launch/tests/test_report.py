import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from slime_launch.chart import draw_chart
from slime_launch.report import make_report, report_lines, write_report

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
    assert "samples that could not be scored: 7; logs/rollout.log says why" in report_lines(report)
    scored = make_report(ROWS, output_dir=tmp_path, checkpoint=None, minutes=1.5)
    assert not any("scored" in line for line in report_lines(scored))


def test_files_for_people_and_programs(tmp_path):
    report = make_report(ROWS, output_dir=tmp_path, checkpoint=None, minutes=1.5)
    write_report(report)
    assert Path(report.reward_curve).read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "report.json").read_text())["eval_after"] == {"sums": 0.875}


def test_a_run_without_rows_has_a_report(tmp_path):
    report = make_report([], output_dir=tmp_path, checkpoint=None, minutes=0.0)
    write_report(report)
    assert report_lines(report)


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
