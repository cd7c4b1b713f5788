import json
import math
import os

import pytest

from slime_core.errors import DamagedError, DataError
from slime_launch.errors import PreflightError
from slime_launch.manifest import Manifest, write_manifest
from slime_launch.report.collect import report_data
from slime_launch.report.page import to_json
from slime_launch.report.samples import MOST_UNPACKED, read_kept
from slime_launch.tracking import Tracker, read_rows
from support.run_files import SETTINGS, keep, kept_sample, write_run


def manifest(ledger):
    places = {"checkpoint": None, "output_dir": "out", "load": "load", "ref_load": "load"}
    return Manifest(iteration=2, weight_version=2, source_state={"ledger": ledger}, flags={}, **places)


def test_further_parts_of_the_reward_are_drawn(tmp_path):
    tracker = Tracker(write_run(tmp_path / "first"), tensorboard=False)
    parts = {"rollout/reward/format": 0.5, "rollout/reward/too long/short": 0.25}
    tracker.log("rollout", step=2, rollout_id=2, metrics={"rollout/raw_reward": 1.0, **parts})
    held_out = {"eval/held": 0.75, "eval/held/reward/format": 0.5}
    tracker.log("eval", step=3, rollout_id=3, metrics=held_out)
    tracker.close()
    [run] = report_data([tmp_path / "first"])["runs"]
    charts = {chart["title"]: chart["names"] for chart in run["charts"]}
    assert charts["Further parts of the reward"] == list(parts)
    assert charts["Held-out score"] == ["eval/held"]
    assert run["evals"][-1]["metrics"] == {"reward/format": 0.5}
    assert all(run["titles"][name].startswith("mean of another number") for name in (*parts, "eval/held/reward/format"))


def test_a_run_in_numbers(tmp_path):
    [run] = report_data([write_run(tmp_path / "runs" / "first")])["runs"]
    assert (run["name"], run["state"]) == ("first", "finished")
    assert (
        run["command"]
        == "slime-launch train \\\n  --num-rollout 2 \\\n  --bf16 \\\n  --eval-prompt-data held 'a file.jsonl'"
    )
    assert ("steps", "2 of 2") in run["headline"] and ("held", "0.250 → 0.750") in run["headline"]
    assert run["curves"]["rollout"]["series"]["rollout/raw_reward"] == [0.5, 0.75]
    assert run["curves"]["rollout"]["series"]["perf/odd"] == [None, None]
    assert run["titles"]["train/loss"].startswith("loss of the optimizer step")
    assert [chart["title"] for chart in run["charts"]] == ["Reward", "Held-out score", "Loss"]
    before, after = run["evals"]
    assert (before["low"], before["high"]) == (pytest.approx(0.054), pytest.approx(0.446))
    assert (after["low"], after["metrics"]) == (None, {"pass@1": 0.7})
    assert run["ledger"] == {"dropped": {"all_wrong": 6}}
    assert ["lr", "1e-06", "default"] in run["settings"]


def test_a_run_that_began_has_no_rows_yet(tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps({"settings": SETTINGS}))
    [run] = report_data([tmp_path])["runs"]
    assert run["curves"] == {} and run["samples"] == [] and run["timeline"]["lanes"] == []
    assert run["state"] == "running"
    os.utime(tmp_path / "settings.json", (1, 1))
    assert report_data([tmp_path])["runs"][0]["state"] == "stopped"


def test_a_directory_without_a_run_is_an_error(tmp_path):
    with pytest.raises(PreflightError, match=r"holds neither metrics.jsonl nor settings.json; give the --output-dir"):
        report_data([tmp_path])


@pytest.mark.parametrize(
    ("path", "name"), [("mine/out", "mine/out"), ("mine/outputs", "mine/outputs"), ("mine", "mine")]
)
def test_a_run_is_not_called_by_a_word_that_every_output_has(tmp_path, path, name):
    [run] = report_data([write_run(tmp_path / path)])["runs"]
    assert run["name"] == name


def test_runs_side_by_side_have_names_of_their_own(tmp_path):
    runs = [write_run(tmp_path / name / "run") for name in ("a", "b")]
    assert [run["name"] for run in report_data(runs)["runs"]] == ["a/run", "b/run"]
    assert [run["name"] for run in report_data([runs[0], runs[0]])["runs"]] == [f"{runs[0]} (1)", f"{runs[0]} (2)"]


def test_samples_get_what_the_trainer_computed_and_staleness_is_counted(tmp_path):
    directory = write_run(tmp_path / "run")
    computed = {"0": {"train_log_probs": [-1.0, -2.0], "advantages": [0.5, 0.5]}, "7": {"advantages": [9.0]}}
    keep(directory, 0, [kept_sample(0), kept_sample(7, dropped="all_wrong")], computed)
    keep(directory, 2, [kept_sample(99)])  # of what came after a checkpoint that the run went on from
    [run] = report_data([directory])["runs"]
    first, dropped = run["samples"]
    assert (first["train_log_probs"], first["advantages"]) == ([-1.0, -2.0], [0.5, 0.5])
    assert dropped["advantages"] is None
    assert run["staleness"] == {"versions": [0, 1], "tokens": [1, 1]}


def test_numbers_that_are_not_finite_and_sets_with_like_names(tmp_path):
    directory = write_run(tmp_path / "run")
    tracker = Tracker(directory, iteration=2, tensorboard=False)
    nothing = {"eval/held/stderr": math.nan, "eval/held24": math.nan}
    tracker.log("eval", step=3, rollout_id=3, metrics={"eval/held": 0.5, "eval/held-b": 0.25, **nothing})
    bad = {
        "rollout/reward_failures": math.nan,
        "rollout/dynamic_filter/drop_odd": math.nan,
        "rollout/raw_reward": math.inf,
    }
    tracker.log("rollout", step=2, rollout_id=2, metrics=bad)
    tracker.close()
    keep(directory, 0, [kept_sample(0, log_probs=[math.nan])])
    data = report_data([directory])
    held, other = data["runs"][0]["evals"][-2:]
    assert (held["set"], held["low"], held["metrics"]) == ("held", None, {"stderr": None})
    assert (other["set"], other["metrics"]) == ("held-b", {})
    assert b"NaN" not in to_json(data)


def test_held_out_rows_of_a_data_set_have_a_loss(tmp_path):
    directory = write_run(tmp_path / "out")
    rows = [
        {
            "kind": "eval",
            "step": at,
            "rollout_id": at,
            "time": 1.0 + at,
            "eval/held/loss": 2.0 - at,
            "perf/eval_time": 1.0,
        }
        for at in (0, 1)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [run] = report_data([directory])["runs"]
    assert [(one["set"], one["measure"], one["score"], one["metrics"]) for one in run["evals"]] == [
        ("held", "loss", 2.0, {}),
        ("held", "loss", 1.0, {}),
    ]
    assert {"title": "Held-out loss", "kind": "eval", "names": ["eval/held/loss"], "unit": ""} in run["charts"]
    assert ("held", "2.000 → 1.000") in run["headline"]


def test_the_ledger_is_that_of_the_runs_own_checkpoint_or_of_none(tmp_path, monkeypatch):
    directory, save = write_run(tmp_path / "mine" / "out"), {"value": "save", "origin": "command line"}
    (directory / "settings.json").write_text(json.dumps({"settings": SETTINGS | {"save": save}}))
    elsewhere = tmp_path / "other" / "save"
    elsewhere.mkdir(parents=True)
    write_manifest(elsewhere, manifest({"generated": 99}))
    monkeypatch.chdir(tmp_path / "other")  # the same relative path, of another run
    assert "generated" not in report_data([directory])["runs"][0]["ledger"]
    own = tmp_path / "mine" / "save"
    own.mkdir()
    counts = {"generated": 8, "trained": 4, "filtered": 2, "aborted": 1, "faults": 0}
    write_manifest(own, manifest(counts))
    [run] = report_data([directory])["runs"]
    assert (run["ledger"]["waiting"], run["ledger"]["balances"], run["samples_total"]) == (1, True, 8)
    (own / "manifest.json").write_text("{torn")
    assert "generated" not in report_data([directory])["runs"][0]["ledger"]
    write_manifest(own, manifest(counts))
    last = {"ledger": counts | {"trained": 5, "buffered": 0, "out": 0}, "ledger_balances": False}
    rollouts = sum(row["kind"] == "rollout" for row in read_rows(directory))
    for ended_after, ledger in ((rollouts, (5, 0, False)), (rollouts - 1, (4, 1, True))):  # or was continued since
        (directory / "report.json").write_text(json.dumps(last | {"rollouts": ended_after}))
        [run] = report_data([directory])["runs"]
        assert (run["ledger"]["trained"], run["ledger"]["waiting"], run["ledger"]["balances"]) == ledger


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "settings.json", "report.json", "logs/engine_events.jsonl", "samples/rollout_0000000.json.gz"],
)
@pytest.mark.parametrize("kind", ["pipe", "link to a device"])
def test_a_copied_run_makes_nobody_wait(tmp_path, name, kind):
    """A pipe would be waited for, and the device has no end."""
    run = write_run(tmp_path / "run")
    keep(run, 0, [kept_sample(0)])
    path = run / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(DataError, match=f"^{path} is not a regular file, so it is not read; remove it"):
        report_data([run])


def test_a_copied_runs_samples_fill_no_memory(tmp_path):
    """Each of 100 files of 33 KB unpacks to 32 MiB."""
    run = write_run(tmp_path / "run", rollouts=100)
    keep(run, 0, [kept_sample(0, text="x" * 2**25)])
    first = run / "samples" / "rollout_0000000.json.gz"
    for number in range(1, 100):
        os.link(first, run / "samples" / f"rollout_{number:07d}.json.gz")
    found, total = read_kept(run / "samples", last=100)
    assert len(found) == -(-MOST_UNPACKED // (2**25 + 100)) and total == 100
    keep(run, 0, [kept_sample(0, text="x" * MOST_UNPACKED)])
    with pytest.raises(DataError, match=r"rollout_0000000\.json\.gz unpacks to more than 67,108,864 bytes"):
        report_data([run])


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.jsonl", '{"kind": "train"}\n'),
        ("metrics.jsonl", "5\n"),
        ("metrics.jsonl", '{"kind": "train", "step": 0, "rollout_id": 0, "time": 0, "train/loss": "low"}\n'),
        ("metrics.jsonl", '{"kind": "timeline", "step": 0, "rollout_id": 0, "time": 0, "spans": {"a": [1]}}\n'),
        ("settings.json", '{"settings": {"lr": {"value": 1}}}'),
        ("settings.json", '{"settings": [1]}'),
        ("logs/engine_events.jsonl", "{}\n"),
        ("logs/engine_events.jsonl", '{"time": "soon"}\n'),
        ("samples/rollout_0000000.json.gz", [{}]),
        ("samples/rollout_0000000.json.gz", 7),
        ("samples/rollout_0000000.json.gz", [1]),
        ("samples", [kept_sample(0, versions=["new"])]),
    ],
)
def test_what_no_run_writes_is_said_with_its_file(tmp_path, file, content):
    run = write_run(tmp_path / "run")
    (run / "logs").mkdir()
    if isinstance(content, str):
        (run / file).write_text(content)
    else:
        keep(run, 0, content)
    with pytest.raises(DamagedError, match=f"{run / file} is damaged .*; "):
        report_data([run])


def test_rows_behind_one_that_cannot_be_read_are_left_out(tmp_path):
    run = write_run(tmp_path / "run")
    whole = (run / "metrics.jsonl").read_bytes()
    for torn in (b"\xff\xff", b"[" * 100_000):
        (run / "metrics.jsonl").write_bytes(whole + torn + b"\n" + whole)
        assert len(read_rows(run)) == len(whole.splitlines())
    (run / "logs").mkdir()
    for torn in (b"\xff\xff", b"[" * 100_000):
        (run / "logs" / "engine_events.jsonl").write_bytes(torn)
        assert report_data([run])["runs"][0]["events"] == []


def test_very_long_numbers_are_text_on_the_page():
    assert json.loads(to_json({"a": [2**64 - 1, 2**64, -(2**70), True]})) == {
        "a": [2**64 - 1, str(2**64), str(-(2**70)), True]
    }
