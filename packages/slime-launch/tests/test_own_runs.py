"""Whose run it is, and what a replay asks before it runs what somebody else's settings name."""

import json
import os
import pty
import subprocess
import sys

import pytest

from slime_launch.own_runs import MARK, is_own, mark_of
from slime_launch.replay import code_of
from slime_launch.written_run import WrittenRun
from support.written import SETTINGS, Written

SECONDS = 120
CODE = {
    "custom_loss_function_path": "theirs.py:loss",
    "custom_megatron_init_path": "module_of_theirs.start",
    "rollout_sample_hook_path": ["theirs.py:one", "theirs.py:two"],
    "sglang_python": "theirs/bin/python",
    "trust_remote_code": True,
    "megatron_config_path": "theirs.yaml",
    "train_env_vars": '{"LD_PRELOAD": "theirs.so"}',
    "eval-config": "theirs.yaml",
    "config=theirs.toml": True,
    "custom-rm-path": "by another spelling",
    "custom-rm-path=theirs.py": True,
    "a_flag_that_nobody_knows": "\x1b[2Khidden",
}
PLAIN = {
    **SETTINGS,
    "dynamic_sampling_filter_path": "slime_rollout.filters.check_reward_nonzero_std",
    "sglang_mem_fraction_static": "0.5",
    "moe_z_loss_coeff": 0.001,
    "custom_rm_path": None,
    "trust_remote_code": False,
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home without a key, and a working folder."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "slime" / "key"


def write(directory, settings, mark=None):
    """A run whose settings have been given, and perhaps a mark."""
    Written(settings=settings).write(directory)
    path = directory / "settings.json"
    found = json.loads(path.read_text())
    for entry in found["settings"].values():
        entry["origin"] = "command line"
    if mark is not None:
        found[MARK] = mark(found["settings"])
    path.write_text(json.dumps(found))
    return WrittenRun(directory)


def test_a_mark_is_of_these_settings_this_folder_and_this_user(tmp_path, home, monkeypatch):
    run = write(tmp_path / "run", CODE, mark_of)
    assert is_own(run.resolved)
    assert home.stat().st_mode & 0o777 == 0o600 and home.parent.stat().st_mode & 0o777 == 0o700
    changed = json.loads(json.dumps(run.resolved))
    changed["settings"]["sglang_python"]["value"] = "another"
    assert not is_own(changed)
    for wrong in (None, 3, "", "\ud800", [], run.resolved[MARK][:-1]):
        assert not is_own(run.resolved | {MARK: wrong})
    assert not is_own({"settings": run.resolved["settings"]})
    monkeypatch.chdir(tmp_path)
    assert not is_own(run.resolved), "its functions may be others here"
    monkeypatch.chdir(tmp_path / "work")
    home.unlink()
    assert not is_own(run.resolved), "another user has another key"


def test_a_key_that_others_know_is_none(tmp_path, home):
    run = write(tmp_path / "run", CODE, mark_of)
    for spoil in (lambda: home.chmod(0o604), lambda: home.write_bytes(b"short"), lambda: planted(home)):
        kept = home.read_bytes()
        spoil()
        assert mark_of(run.resolved["settings"]) is None and not is_own(run.resolved)
        home.unlink()
        home.write_bytes(kept)
        home.chmod(0o600)
        assert is_own(run.resolved)


def planted(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_key_of_another_user_is_none(tmp_path, home):
    run = write(tmp_path / "run", CODE, mark_of)
    os.chown(home, 65534, 65534)
    assert mark_of(run.resolved["settings"]) is None


def test_a_run_without_a_place_for_the_key_has_no_mark(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    assert mark_of({}) is None and not is_own({"settings": {}, MARK: "None"})


def test_all_that_a_replay_would_run_is_listed(tmp_path):
    assert list(code_of(write(tmp_path / "plain", PLAIN))) == []
    named = list(code_of(write(tmp_path / "theirs", PLAIN | CODE)))
    assert named == [
        "--trust-remote-code",
        '--custom-loss-function-path "theirs.py:loss"',
        '--custom-megatron-init-path "module_of_theirs.start"',
        '--rollout-sample-hook-path "theirs.py:one" "theirs.py:two"',
        '--sglang-python "theirs/bin/python"',
        '--megatron-config-path "theirs.yaml"',
        '--train-env-vars "{\\"LD_PRELOAD\\": \\"theirs.so\\"}"',
        '--eval-config "theirs.yaml"',
        '--config "theirs.toml"',
        '--custom-rm-path "by another spelling"',
        '--custom-rm-path "theirs.py"',
        '--a-flag-that-nobody-knows "\\u001b[2Khidden"',
    ]


THEIRS = {
    **SETTINGS,
    "custom_loss_function_path": "theirs.py:loss",
    "sglang_python": "{python}",
    "sglang_mem_fraction_static": 0.5,  # a flag of SGLang's, which its interpreter is asked for
}


@pytest.fixture
def theirs(tmp_path):
    """A run of somebody else's, with a function and an interpreter that leave traces."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/interpreter-ran\n")
    python.chmod(0o755)
    (tmp_path / "work" / "theirs.py").write_text(f"open('{tmp_path}/function-ran', 'w')\ndef loss(inputs): ...\n")
    values = {
        name: str(value).format(python=python) if name == "sglang_python" else value for name, value in THEIRS.items()
    }
    write(tmp_path / "run", values)
    return tmp_path / "run"


def replay(run, *more, **options):
    words = [sys.executable, "-P", "-m", "slime_launch.cli", "replay", str(run), "--step", "1", *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, **options)


def ran(run):
    return sorted(path.name for path in run.parent.glob("*-ran"))


def test_without_a_terminal_nothing_of_somebody_elses_runs(theirs):
    with replay(theirs, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        said = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 2 and ran(theirs) == []
    assert said.count("\n") == 1 and "add --run-its-code if you trust it" in said
    assert '--custom-loss-function-path "theirs.py:loss"' in said and "--sglang-python" in said
    assert not (theirs / "replays").exists()


def test_with_the_flag_it_runs(theirs):
    with replay(theirs, "--run-its-code", stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        said = process.communicate(timeout=SECONDS)[1]
    assert "interpreter-ran" in ran(theirs), said


@pytest.mark.parametrize("place", ["replays", "replays/1", "replays/1/logs"])
def test_nothing_is_written_by_way_of_a_link_in_somebody_elses_run(theirs, place):
    victim = theirs.parent / "victim"
    victim.mkdir()
    (theirs / place).parent.mkdir(parents=True, exist_ok=True)
    (theirs / place).symlink_to(victim)
    with replay(theirs, "--run-its-code", stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        said = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 2 and f"{theirs / place} is a link" in said
    assert list(victim.iterdir()) == []


@pytest.mark.parametrize(("answer", "runs"), [("n\n", False), ("\n", False), ("Y\n", True)])
def test_at_a_terminal_it_is_asked(theirs, answer, runs):
    ours, terminal = pty.openpty()
    with replay(theirs, stdin=terminal, stderr=terminal) as process:
        os.close(terminal)
        said = ""
        while "[y/N]" not in said:
            said += os.read(ours, 4096).decode()
        assert ran(theirs) == []
        os.write(ours, answer.encode())
        assert process.wait(SECONDS) == 2  # what was trusted does not work either
    os.close(ours)
    assert ran(theirs) == (["interpreter-ran"] if runs else [])
    assert "is not a run of yours that began in this folder" in said


def test_a_run_of_ones_own_is_not_asked_for(theirs, tmp_path):
    path = theirs / "settings.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {MARK: mark_of(found["settings"])}))
    with replay(theirs, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        said = process.communicate(timeout=SECONDS)[1]
    assert "--run-its-code" not in said and "interpreter-ran" in ran(theirs)
