"""W&B gets the rows of metrics, and never the key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types

import pytest

from slime_core.errors import ConfigError
from slime_launch.config import TrackingConfig
from slime_launch.errors import PreflightError
from slime_launch.flags import parse_train
from slime_launch.tracking import Tracker
from slime_launch.wandb_run import KEY, WandbRun, check_wandb

SECRET = "0123456789abcdef0123456789abcdef01234567"


class Recorded:
    """A run of W&B that keeps what it is told."""

    id = "run-7"

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.axes: dict[str, str] = {}
        self.is_finished = False

    def define_metric(self, name, *, step_metric):
        self.axes[name] = step_metric

    def log(self, values):
        if len(self.rows) == 3:
            raise OSError("no network")
        self.rows.append(values)

    def finish(self):
        self.is_finished = True


@pytest.fixture
def wandb(monkeypatch):
    """A module in place of W&B; gives the arguments of `init`, and the run."""
    run, given = Recorded(), {}

    def init(**arguments):
        given.update(arguments)
        return run

    module = types.ModuleType("wandb")
    module.init, module.Settings, module.__spec__ = init, lambda **values: values, types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return given, run


def follow(tracker):
    tracker.log("eval", step=0, rollout_id=0, metrics={"eval/sums": 0.5})
    for step in range(2):
        tracker.log("train", step=step, rollout_id=0, metrics={"train/loss": 1.0 - step})
    tracker.log("rollout", step=1, rollout_id=1, metrics={"rollout/raw_reward": float("nan")})


def test_rows_arrive_with_their_axes_and_a_failure_ends_nothing(wandb, tmp_path):
    given, run = wandb
    config = TrackingConfig(use_wandb=True, wandb_group="sums", wandb_project="p", wandb_host="http://wandb.invalid")
    tracker = Tracker(tmp_path, wandb_run=WandbRun(config, {"lr": 1.0}, tmp_path, resumed=False, steps_per_rollout=2))
    follow(tracker)
    tracker.close()
    assert run.rows == [
        {"eval/sums": 0.5, "eval/step": 0},
        {"train/loss": 1.0, "train/step": 0},
        {"train/loss": 0.0, "train/step": 1},
    ]
    assert run.is_finished and run.axes["perf/*"] == "rollout/step" and run.axes["eval/*"] == "eval/step"
    assert given["group"].startswith("sums-") and len(given["group"]) == 11 and given["id"] is None
    assert given["settings"]["base_url"] == "http://wandb.invalid" and given["config"] == {"lr": 1.0}


def test_a_continued_run_goes_on_in_the_same_one_over_optimizer_steps(wandb, tmp_path):
    given, run = wandb
    config = TrackingConfig(
        use_wandb=True, wandb_group="g", disable_wandb_random_suffix=True, wandb_always_use_train_step=True
    )
    WandbRun(config, {}, tmp_path, resumed=False, steps_per_rollout=4)
    again = WandbRun(config, {}, tmp_path, resumed=True, steps_per_rollout=4)
    again.log({"kind": "eval", "step": 3, "eval/sums": 1.0})
    assert (given["id"], given["resume"], given["group"]) == ("run-7", "allow", "g")
    assert run.rows == [{"eval/sums": 1.0, "eval/step": 12}]


def test_the_key_is_in_no_setting(flags, to_words, monkeypatch):
    monkeypatch.setenv(KEY, "another")
    settings = parse_train([*to_words(flags), "--use-wandb", "--wandb-key", SECRET])
    assert SECRET not in repr(settings) + repr(settings.flags()) and os.environ[KEY] == SECRET


def test_what_is_missing_is_said_at_the_start(wandb, monkeypatch, tmp_path):
    monkeypatch.delenv(KEY, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    online = TrackingConfig(use_wandb=True)
    with pytest.raises(PreflightError, match="has no key: run `wandb login`"):
        check_wandb(online)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    check_wandb(online)
    check_wandb(TrackingConfig(use_wandb=True, wandb_mode="offline"))
    with pytest.raises(ConfigError, match="--wandb-project p, --wandb-group g have no effect without --use-wandb"):
        TrackingConfig(wandb_project="p", wandb_group="g")
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PreflightError, match=r"run: .* pip install .*'wandb>=[\d.]+', or leave"):
        check_wandb(online)


REAL = """
import sys
from pathlib import Path
from slime_launch.flags import parse_train
from slime_launch.run import start_wandb
from slime_launch.tracking import Tracker

out = Path(sys.argv[1])
words = sys.stdin.read().splitlines()  # W&B notes the arguments, and a run's process has none of the flags
tracker = Tracker(out, wandb_run=start_wandb(parse_train(words), out, resumed=False))
tracker.log("eval", step=0, rollout_id=0, metrics={"eval/sums": 0.5})
tracker.log("rollout", step=0, rollout_id=0, metrics={"rollout/raw_reward": 0.25})
tracker.close()
"""


def test_offline_files_of_the_real_one_hold_the_metrics_and_no_secret(flags, to_words, tmp_path):
    (tmp_path / "out").mkdir()
    environment = os.environ | {KEY: SECRET, "HF_TOKEN": SECRET[::-1], "HOME": str(tmp_path)}
    secrets = [SECRET, SECRET[::-1], "pass-of-the-scorer"]
    flags |= {"--use-wandb": None, "--wandb-mode": "offline", "--wandb-project": "p", "--wandb-group": "g"}
    flags |= {"--rm-type": "remote_rm", "--rm-url": f"http://me:{secrets[2]}@127.0.0.1:9/score"}
    flags |= {"--train-env-vars": json.dumps({"HF_TOKEN": secrets[1]})}
    command, words = [sys.executable, "-c", REAL, str(tmp_path / "out")], "\n".join(to_words(flags))
    done = subprocess.run(command, input=words.encode(), env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    [written] = {path.resolve() for path in files if path.suffix == ".wandb"}
    for word in (b"raw_reward", b"sums", b"train_env_vars", b"127.0.0.1:9/score"):
        assert word in written.read_bytes()
    for secret in map(str.encode, secrets):
        assert not [path for path in files if secret in path.read_bytes()]
        assert secret not in done.stdout + done.stderr
