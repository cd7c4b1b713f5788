"""What `slime-launch report` makes of a run that was killed and continued."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from launching import LAUNCHER, RUN_SECONDS
from story import ROLLOUTS, Story

pytestmark = [pytest.mark.real, pytest.mark.timeout(3000)]


def test_a_report_shows_all_of_a_run_that_was_killed(story: Story, tmp_path: Path) -> None:
    page, figures = tmp_path / "page.html", tmp_path / "page.json"
    words = [str(LAUNCHER), "report", str(story.work / "out"), "--output", str(page), "--json", str(figures)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stderr
    assert page.read_text().startswith("<!doctype html>")
    [run] = json.loads(figures.read_text())["runs"]
    assert run["state"] == "finished"
    assert dict(run["headline"])["steps"] == f"{ROLLOUTS} of {ROLLOUTS}"
