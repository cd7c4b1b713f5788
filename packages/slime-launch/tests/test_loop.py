"""A run killed at any point of the loop, and started again by the same command, is the run that was never stopped.

The two halves are stand-ins whose numbers follow from their state alone, so that a doubled or lost step shows; what is
on disk is real. On real parts, with a real SIGKILL, the claim is in `integration_tests/test_resume.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import sys
import types
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import slime_launch.run
from slime_core.errors import DataError
from slime_launch.batch_spec import batch_spec
from slime_launch.calls import Watch
from slime_launch.console import RunConsole
from slime_launch.errors import RunError
from slime_launch.flags import parse_train
from slime_launch.loop import Parts, next_batch
from slime_launch.preflight import preflight, with_output
from slime_launch.report import report_if_finished
from slime_launch.sources import RecordedRollouts
from slime_launch.tracking import Tracker, read_rows
from slime_launch.weights import NothingToSend
from slime_rollout.store import RolloutStore
from support.halves import Clock, Killed, Rollout, Trainers


@pytest.fixture
def clock(monkeypatch):
    """Ticks before and after everything that changes the disk, and at every call of a half."""
    clock = Clock()

    def around(owner, name):
        real = getattr(owner, name)

        def ticking(self, *args, **kwargs):
            clock.tick(f"before {owner.__name__}.{name}")
            result = real(self, *args, **kwargs)
            clock.tick(f"after {owner.__name__}.{name}")
            return result

        monkeypatch.setattr(owner, name, ticking)

    around(Path, "replace")
    around(Tracker, "log")
    around(RolloutStore, "discard_through")
    return clock


@pytest.fixture
def launch(clock, flags, to_words, monkeypatch):
    """The command, from its checks to its report, in a directory of its own; gives whether anything was started."""
    monkeypatch.setattr("slime_launch.preflight.importable_in", lambda python, module: True)
    monkeypatch.setattr(
        "slime_launch.report.summary.save_curve", lambda values, path, *_, **__: path.write_text("a picture")
    )

    def run(home: Path, rollouts: int = 4, *, driver: bool = False, **more: str) -> bool | int:
        home.mkdir(exist_ok=True)
        monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))  # a run that finds counted rows there writes no file
        flags.update(
            {"--save": str(home / "save"), "--output-dir": str(home / "out"), "--num-rollout": str(rollouts)}
            | {"--save-interval": "2", "--eval-interval": "1", "--eval-prompt-data": flags["--prompt-data"]}
            | {"--" + name.replace("_", "-"): value for name, value in more.items()}
        )
        checked = preflight(parse_train(to_words(flags)))
        if checked.manifest is not None and report_if_finished(checked, home / "out"):
            return False

        def start(*_, state, **__):
            how = {"store": state.store, "can_resume": state.can_resume}
            rollout = Rollout(clock, batch_spec(checked.settings, checked.shape, 1, **how))
            trainers = Trainers(clock, home / "save", Path(flags["--load"]) / "release", state.resume_from)
            if checked.settings.kind.engines_sleep:
                rollout.sleep()
            return trainers, rollout

        monkeypatch.setattr(slime_launch.run, "start", start)
        if driver:
            return slime_launch.run.run(with_output(checked, home / "out"), Watch())
        (home / "out").mkdir(exist_ok=True)
        slime_launch.run.drive(checked, home / "out", RunConsole(io.StringIO()), Watch())
        return True

    return run


def outcome(home: Path) -> dict[str, object]:
    """All that a run leaves, but for wall time."""
    rows = [
        {name: value for name, value in row.items() if name != "time" and not name.startswith("perf/")}
        for row in read_rows(home / "out")
        if row["kind"] != "timeline"
    ]
    events = EventAccumulator(str(home / "out" / "tensorboard"))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith("perf/")]
    report = json.loads((home / "out" / "report.json").read_text())
    return {
        "rows": rows,
        "curves": {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags},
        "report": {name: report[name] for name in ("rollouts", "steps", "rewards", "eval_before")}
        | {"eval_after": report["eval_after"], "checkpoint": Path(report["checkpoint_dir"]).name},
        "weights": (home / "save" / "iter_0000004" / "weights.json").read_text(),
    }


at_points = pytest.mark.parametrize(
    ("in_background", "every"),
    [(True, 3), pytest.param(True, 1, marks=pytest.mark.full), pytest.param(False, 1, marks=pytest.mark.full)],
    ids=["every third point", "every point", "every point, no async save"],
)


@at_points
def test_killed_anywhere_it_ends_the_same(clock, flags, launch, tmp_path, monkeypatch, in_background, every):
    monkeypatch.setattr(Trainers, "in_background", in_background)
    if not in_background:
        flags["--no-async-save"] = None
    assert launch(tmp_path / "first")  # what a process does once, such as writing a cache, is left out of the points
    clock.names = []
    assert launch(tmp_path / "whole")
    points, expected = clock.names, outcome(tmp_path / "whole")
    assert [row["rollout_id"] for row in expected["rows"] if row["kind"] == "train"] == [0, 1, 2, 3]
    assert [row["rollout_id"] for row in expected["rows"] if row["kind"] == "eval"] == [0, 1, 2, 3, 4]
    assert {"generate 3", "train 3", "save 4", "saved 4", "evaluate 4", "leave"} <= set(points)
    for place, point in [*enumerate(points)][::every]:
        home = tmp_path / f"killed-{place}"
        clock.names, clock.deadly = [], place
        with pytest.raises(Killed, match=point):
            launch(home)
        written = RolloutStore(home / "save" / "rollouts").ids()
        if point.startswith("train "):
            assert int(point.split()[1]) in written
        clock.names, clock.deadly = [], None
        launch(home)
        assert outcome(home) == expected, f"killed at {place}: {point}"
        assert not {f"generate {rollout_id}" for rollout_id in written} & set(clock.names), f"killed at {point}"
        clock.names = []
        assert not launch(home), f"killed at {place}: {point}"  # the same command once more does nothing
        assert not [name for name in clock.names if not name.endswith("Path.replace")]
    print(f"killed at {len(points[::every])} of {len(points)} points")


OF_TRAINERS = ("train ", "trained ", "push ", "save ", "saved ", "generate ", "evaluate ", "trainers: ")
"""Points at which trainers may be lost: their calls, and where they are only looked at."""


@at_points
def test_trainers_lost_anywhere_are_started_again_and_it_ends_the_same(
    clock, flags, launch, tmp_path, monkeypatch, in_background, every
):
    monkeypatch.setattr(Trainers, "in_background", in_background)
    if not in_background:
        flags["--no-async-save"] = None
    assert launch(tmp_path / "first")
    clock.names = []
    assert launch(tmp_path / "whole")
    points, expected = clock.names, outcome(tmp_path / "whole")
    places = [place for place, point in enumerate(points) if point.startswith(OF_TRAINERS)]
    assert len(places) > 20
    for place in places[::every]:
        home = tmp_path / f"lost-{place}"
        clock.names, clock.losses = [], [place]
        assert launch(home)
        clock.losses = []
        names = clock.names
        assert names[place] == points[place], f"not lost at {points[place]}"
        assert names[names.index("cancel") :].index("restart") <= 3, f"lost at {points[place]}"
        assert names.count("restart") == 1
        assert outcome(home) == expected, f"lost at {place}: {points[place]}"
        generated = [name for name in names if name.startswith("generate ") and name != points[place]]
        assert len(generated) == len(set(generated)), f"lost at {points[place]}"
    print(f"trainers lost at {len(places[::every])} of {len(places)} points")


def test_weights_may_be_sent_less_often_and_a_killed_run_ends_the_same(clock, launch, tmp_path):
    often = {"update_weights_interval": "2", "save_interval": "3", "eval_interval": "7", "max_checkpoints_kept": "1"}

    def end(home: Path) -> tuple[object, ...]:
        rows = [row for row in read_rows(home / "out") if row["kind"] in ("train", "rollout")]
        rewards = [row.get("rollout/raw_reward", row.get("train/loss")) for row in rows]
        return rewards, sorted(path.name for path in (home / "save").glob("iter_*"))

    assert launch(tmp_path / "whole", 7, **often)
    points, expected = clock.names, end(tmp_path / "whole")
    assert [name for name in points if name.startswith("push")] == [f"push {version}" for version in (0, 2, 3, 4, 6, 7)]
    assert expected[1] == ["iter_0000007"]
    for point in ("generate 1", "train 3", "push 4", "trained 4", "save 6", "saved 7"):
        home = tmp_path / point
        clock.names, clock.deadly = [], points.index(point)
        with pytest.raises(Killed, match=point):
            launch(home, 7, **often)
        clock.names, clock.deadly = [], None
        launch(home, 7, **often)
        assert end(home) == expected, f"killed at {point}"


def test_weights_are_sent_when_they_are_due_whatever_was_logged(clock, launch, tmp_path, monkeypatch):
    """An evaluation that metrics.jsonl has is not made again, but the weights that are due with it are sent."""
    seldom = {"update_weights_interval": "4", "save_interval": "9", "eval_interval": "2"}

    def sent() -> list[str]:
        return [name for name in clock.names if name.startswith(("push", "evaluate"))]

    assert launch(tmp_path / "whole", 5, **seldom)
    pushes = [name for name in sent() if name.startswith("push")]
    assert pushes == ["push 0", "push 2", "push 4", "push 5"]
    monkeypatch.setattr(Tracker, "has_eval", lambda self, iteration: True)
    clock.names = []
    assert launch(tmp_path / "logged", 5, **seldom)
    assert sent() == pushes


def test_a_secret_is_in_no_file_of_a_run_and_not_sent(launch, flags, tmp_path, monkeypatch):
    secrets = [digit * 32 for digit in "1234"]
    sent: list[object] = []
    run = types.SimpleNamespace(id="1", define_metric=lambda *_, **__: None, log=sent.append, finish=lambda: None)
    module = types.SimpleNamespace(
        init=lambda **given: sent.append(given) or run, Settings=lambda **given: given, __spec__=types.SimpleNamespace()
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("HF_TOKEN", secrets[1])
    flags |= {"--use-wandb": None, "--wandb-project": "p", "--wandb-key": secrets[0]}
    flags |= {"--train-env-vars": json.dumps({"HF_TOKEN": secrets[1], "MY_TOKEN": secrets[2], "PLAIN": "seen"})}
    flags |= {"--rm-type": "remote_rm", "--rm-url": f"http://me:{secrets[3]}@127.0.0.1:9/score"}
    flags |= {"--dump-details": str(tmp_path / "run" / "details")}
    assert launch(tmp_path / "run", 2, driver=True) == 0
    assert os.environ["WANDB_API_KEY"] == secrets[0]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"manifest.json", "settings.json"} < {path.name for path in files} and len(files) > 8
    assert any("details" in path.parts for path in files)
    for secret in secrets:
        assert len(sent) > 5 and secret not in repr(sent)
        assert not [path for path in files if secret.encode() in path.read_bytes()]
    assert "seen" in (tmp_path / "run" / "save" / "manifest.json").read_text() and "seen" in repr(sent)
    # the same command goes on, whatever its secrets are by now
    monkeypatch.delenv("HF_TOKEN")
    flags["--train-env-vars"] = flags["--train-env-vars"].replace(secrets[2], "rotated")
    assert launch(tmp_path / "run", 3, driver=True) == 0


def test_trainers_lost_again_and_while_they_start(clock, launch, tmp_path):
    launch(tmp_path / "whole")
    place, expected = clock.names.index("train 3"), outcome(tmp_path / "whole")
    twice = [place, place + 2]  # again when they start
    clock.names, clock.losses = [], twice
    assert launch(tmp_path / "lost twice")
    third = clock.names.index("train 2", place)  # and when they train again
    clock.names, clock.losses = [], [*twice, third]
    assert launch(tmp_path / "lost")
    assert clock.names[place : place + 5] == ["train 3", "cancel", "restart", "cancel", "restart"]
    assert clock.names.count("restart") == 3
    assert outcome(tmp_path / "lost") == expected


@pytest.mark.parametrize(("most", "code"), [("1", 3), ("0", 1)])
def test_past_the_budget_one_line_names_the_first_cause(clock, flags, launch, tmp_path, capsys, most, code):
    flags["--trainer-max-restarts"] = most
    launch(tmp_path / "whole", driver=True)
    place = clock.names.index("train 1")
    clock.names, clock.losses = [], [place, place + 2]
    assert launch(tmp_path / "lost", driver=True) == code
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("slime-launch: ") and line.endswith("trainer rank 0 died: train 1")
    assert ("once more after 1 restarts" in line) == (code == 3)
    clock.losses = []
    assert launch(tmp_path / "lost")  # the same command goes on


def test_recorded_rollouts_train_the_same_without_engines(flags, launch, to_words, tmp_path, monkeypatch):
    template = str(tmp_path / "recorded" / "{rollout_id}.npz")
    flags["--save-debug-rollout-data"] = template
    assert launch(tmp_path / "generated")
    del flags["--save-debug-rollout-data"]
    flags["--load-debug-rollout-data"] = template

    class Recorded(Rollout):
        host = RecordedRollouts(template)

        def generated(self, rollout_id):
            return self.host.generate(rollout_id)

        def state_dict(self):
            return self.host.state_dict()

        evaluate = begin_update = confirm_update = None

    monkeypatch.setitem(globals(), "Rollout", Recorded)
    assert launch(tmp_path / "recorded")
    for kind in ("train", "rollout"):
        generated, recorded = (
            [
                {name: value for name, value in row.items() if "/" in name and not name.startswith("perf/")}
                for row in read_rows(tmp_path / run / "out")
                if row["kind"] == kind
            ]
            for run in ("generated", "recorded")
        )
        assert generated == recorded and len(generated) == 4
    last = "save/iter_0000004/weights.json"
    assert (tmp_path / "recorded" / last).read_text() == (tmp_path / "generated" / last).read_text()
    with pytest.raises(DataError, match=r"recorded/9\.npz, rollout 9, does not exist"):
        Recorded.host.generate(9)
    shown = [row.get("samples", []) for row in read_rows(tmp_path / "recorded" / "out") if row["kind"] == "rollout"]
    assert [len(samples) for samples in shown] == [3, 0, 0, 3]  # no held-out prompt is answered here
    shown = [row.get("samples", []) for row in read_rows(tmp_path / "generated" / "out") if row["kind"] == "rollout"]
    assert [len(samples) for samples in shown] == [3, 0, 0, 0]  # the last answers are those to held-out prompts


def test_killed_twice_it_ends_the_same(clock, launch, tmp_path):
    launch(tmp_path / "whole")
    count, expected = len(clock.names), outcome(tmp_path / "whole")
    for place in range(7, count, 9):
        home = tmp_path / f"killed-{place}"
        for deadly in (place, 5):
            clock.names, clock.deadly = [], deadly
            with contextlib.suppress(Killed):  # late in the run, the second start has nothing left to do
                launch(home)
        clock.deadly = None
        launch(home)
        assert outcome(home) == expected, place


def test_a_longer_run_continues_a_finished_one(clock, launch, tmp_path):
    launch(tmp_path / "whole", 4)
    launch(tmp_path / "parts", 2)
    assert json.loads((tmp_path / "parts" / "out" / "report.json").read_text())["rollouts"] == 2
    launch(tmp_path / "parts", 4)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_a_file_that_cannot_be_written_is_one_line(launch, tmp_path, capsys):
    (path := tmp_path / "home" / "save" / "rollouts").parent.mkdir(parents=True)
    path.write_text("in the way")
    assert launch(tmp_path / "home", driver=True) == 1
    assert (
        "a file of the run can't be written or read: " in (line := capsys.readouterr().err) and "save/rollouts" in line
    )


def test_rows_that_are_skipped_are_told_once(flags, launch, tmp_path, caplog):
    """By the process that checks the command first, and not again by the one that runs it."""
    with Path(flags["--prompt-data"]).open("a") as prompts:
        prompts.write("no json\n")
    assert launch(tmp_path / "home", driver=True, on_bad_data="skip") == 0
    # of the prompts, and of the held-out set, which is the same file
    assert sum("skipped 1 of" in record.getMessage() for record in caplog.records) == 2


def test_a_trainer_that_dies_ends_the_generation(clock, flags, to_words, tmp_path):
    class Dead(Trainers):
        def check(self) -> None:
            raise RunError("trainer rank 0 died")

    class Nothing:
        store, can_resume = None, False

        def is_written_down(self, _):
            return False

    clock.tick("push 0")
    trainers = Dead(clock, tmp_path, tmp_path, None)
    parts = Parts(
        settings=parse_train(to_words(flags)),
        trainers=trainers,
        rollout=Rollout(clock, None),
        memory=types.SimpleNamespace(to_generate=lambda: None),
        training=None,
        sending=NothingToSend(),
        state=Nothing(),
        tracker=None,
        console=RunConsole(io.StringIO()),
    )
    with pytest.raises(RunError, match="rank 0 died"):
        next_batch(parts, 0)
    assert trainers.finished_at == ["push 0"]  # what was left of a checkpoint is loaded while engines generate


@pytest.mark.parametrize(("replaced", "versions"), [(3, [0, 3, 4, 5]), (4, [0, 4, 4, 5])])
def test_a_version_is_the_same_weights_on_engines_that_were_replaced(
    clock, flags, launch, tmp_path, monkeypatch, replaced, versions
):
    """A rollout begins while an engine has no weights; the others have those of three rollouts ago, or of now."""
    del flags["--colocate"]
    flags["--rollout-num-gpus"] = "1"
    prepare = Rollout.prepare

    def prepare_without_an_engine(self, rollout_id):
        self.behind = rollout_id == replaced
        return prepare(self, rollout_id)

    monkeypatch.setattr(Rollout, "prepare", prepare_without_an_engine)
    launch(tmp_path / "run", 5, update_weights_interval="4", save_interval="9", eval_interval="9")
    assert [name for name in clock.names if name.startswith("push")] == [f"push {version}" for version in versions]


def test_a_token_beyond_max_weight_staleness_ends_the_run(clock, flags, launch, tmp_path, monkeypatch):
    """Such as a rollout function of your own gives back; the run's own generation holds the bound by itself."""
    del flags["--colocate"]
    flags |= {"--rollout-num-gpus": "1", "--async-buffer-size": "2", "--max-weight-staleness": "1"}
    sample = Rollout.sample
    monkeypatch.setattr(Rollout, "sample", lambda *given: dataclasses.replace(sample(*given), weight_versions=[0]))
    with pytest.raises(RunError, match="of step 3 has tokens of weight version 0 where all must be 1 to 2: "):
        launch(tmp_path / "run")
    assert "train 1" in clock.names and "train 2" not in clock.names


@pytest.mark.parametrize(
    ("drift", "words", "ends"),
    [
        (0.5, {"max_logprob_drift": "0.01"}, True),
        (float("nan"), {"max_logprob_drift": "0.01"}, True),
        (0.5, {"max_logprob_drift": "0.01", "logprob_drift_action": "warn"}, False),
        (0.01, {"max_logprob_drift": "0.01"}, False),
        (None, {"max_logprob_drift": "0.01"}, False),
        (0.5, {}, False),
    ],
)
def test_a_drift_beyond_the_limit_ends_the_run_or_is_said(launch, tmp_path, monkeypatch, capsys, drift, words, ends):
    """After the step, whose metrics are written."""
    train = Trainers.train

    def drifting(self, *args, **kwargs):
        report = train(self, *args, **kwargs)
        if drift is not None:
            report.steps[0]["train_rollout_logprob_abs_diff"] = drift
        return report

    monkeypatch.setattr(Trainers, "train", drifting)
    problem = "step 1: the trainer's log-probs are (0.5|nan) nats from the engine's in the mean, .* allows 0.01; stale"
    if ends:
        with pytest.raises(RunError, match=problem):
            launch(tmp_path / "run", **words)
        assert [row["kind"] for row in read_rows(tmp_path / "run" / "out")].count("train") == 1
    else:
        launch(tmp_path / "run", driver=True, **words)
        assert bool(re.search(problem, capsys.readouterr().out)) is ("logprob_drift_action" in words)


def test_what_became_of_every_sample_is_the_last_word(launch, tmp_path, monkeypatch, capsys):
    """A run whose samples do not add up fails, after its report."""
    assert launch(tmp_path / "run", driver=True) == 0
    assert "samples: 32 generated = 32 trained + 0 filtered + 0 aborted + 0 waiting" in capsys.readouterr().out
    report = json.loads((tmp_path / "run" / "out" / "report.json").read_text())
    assert (report["ledger"]["generated"], report["ledger_balances"]) == (32, True)
    monkeypatch.setattr(Rollout, "problem", "the ledger does not balance: 32 generated, 31 trained")
    assert launch(tmp_path / "other", driver=True) == 1
    out, err = capsys.readouterr()
    assert "samples: 32 generated ≠ " in out
    assert err.startswith("slime-launch: the ledger does not balance: 32 generated, 31 trained; see logs/rollout.log")
    assert not json.loads((tmp_path / "other" / "out" / "report.json").read_text())["ledger_balances"]


@pytest.mark.parametrize("colocate", [True, False])
def test_a_weight_that_arrives_wrong_ends_the_run_before_it_is_used(
    clock, flags, launch, tmp_path, monkeypatch, colocate
):
    """In the second update; what came before was trained on."""
    if not colocate:
        del flags["--colocate"]
        flags["--rollout-num-gpus"] = "1"
    push = Trainers.push_weights

    def wrong(self, engine, version, **how):
        report = push(self, engine, version, **how)
        engine.weights += version
        return report

    monkeypatch.setattr(Trainers, "push_weights", wrong)
    with pytest.raises(RunError, match=r"version 1: 1 of 1 engines .* by 39 nats in reading for a token; 0\.0001 is"):
        launch(tmp_path / "run", skip_eval_before_train=None)
    assert "trained 0" in clock.names and "inspect" in clock.names
    assert "evaluate 1" not in clock.names and "generate 1" not in clock.names
