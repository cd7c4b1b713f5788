"""A run whose only engine is killed goes on with another one, or ends with one error if it may not."""

from __future__ import annotations

from pathlib import Path

import pytest
from ended import kill_one, trained
from launching import Assets, rows, started, train_command, tree, wait_for, wait_until_gone

from slime_rollout.engine.slots import read_events

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.timeout(600)]
ROLLOUTS = 8


def run_and_kill_the_engine(assets: Assets, work: Path, *extra: str) -> tuple[int, str]:
    """Its exit code, and what it printed."""
    command = train_command(assets, work, "--use-fault-tolerance", *extra, rollouts=ROLLOUTS, save=False)
    log = work / "log.txt"
    with started(command, log) as process:
        wait_for(trained(work, 1), "the first step", process=process, log=log)
        family = tree(process)
        kill_one("sglang.launch_server")(family)
        code = process.wait(300)
        assert not wait_until_gone(family, 30)
    return code, log.read_text(errors="replace")


def test_a_run_goes_on_without_its_only_engine(qwen3: Assets, tmp_path: Path) -> None:
    code, text = run_and_kill_the_engine(qwen3, tmp_path)
    assert code == 0, text[-6000:]
    assert [row["rollout_id"] for row in rows(tmp_path, "rollout")] == list(range(ROLLOUTS))
    events = [event["event"] for event in read_events(tmp_path / "out" / "logs") if event["engine"] == "engine 0"]
    assert events == ["unhealthy", "restarted", "started", "weights", "registered"]


def test_past_the_budget_a_run_ends_with_one_error(qwen3: Assets, tmp_path: Path) -> None:
    code, text = run_and_kill_the_engine(qwen3, tmp_path, "--rollout-max-restarts", "0")
    assert code == 3
    assert text.count("slime-launch: ") == 1
    assert "slime-launch: engine 0 (http://127.0.0.1:" in text
    assert "after it was restarted 0 times, as often as --rollout-max-restarts allows; the end of its log" in text
