"""Whoever dies or hangs, at whatever moment of a step: the end is that of a run to which nothing happened, to the bit.

Each victim is struck once, from within the run: `fired` says whom, and /proc that it is gone or stopped. Trainer ranks,
engines and the router are replaced within the run. Where the rollout actor, the Ray node or the launcher is gone, or
anything at the start, the run ends, and the same command continues it.

Every test run strikes one victim after another in one run (`story.py`); with --full each at each moment, in a run of
each victim's own.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from ended import Ended
from launching import Assets
from story import ROLLOUTS as TOLD
from story import SAMPLES, STARTS, Story
from striking import MOMENTS, VICTIMS, Strike, are_struck, command_of, run
from test_healing import assert_same, weights

from slime_rollout.store import RolloutStore

pytestmark = [pytest.mark.real, pytest.mark.timeout(3000)]
ROLLOUTS = 11  # each moment has one of its own, and one is before and one after them
LAST = 4  # the last checkpoint that both runs of `story.py` have


@pytest.fixture(scope="session")
def undisturbed(qwen3: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, which nothing happens to."""
    work = tmp_path_factory.mktemp("undisturbed")
    code, text, struck = run(command_of(qwen3, work, [], rollouts=ROLLOUTS), work, "log.txt")
    assert (code, struck) == (0, set()), text[-4000:]
    return work


def test_the_comparison_sees_all_weights(whole_run: Ended) -> None:
    found = weights(whole_run.work, LAST)
    assert all(np.isfinite(tensor.float().numpy()).all() for tensor in found.values())
    first = weights(whole_run.work, 2)
    assert len([name for name in found if not torch.equal(first[name], found[name])]) > 10


def is_the_end_of_an_undisturbed_run(
    assets: Assets, undisturbed: Path, work: Path, starts: Sequence[Sequence[Strike]]
) -> None:
    """Strike in each start what it says, and go on with the same command; the end is as if nothing had happened."""
    strikes = [one for start in starts for one in start]
    budget = ["--rollout-max-restarts", "20", "--trainer-max-restarts", "20"]
    command, begun, seen = command_of(assets, work, strikes, *budget, rollouts=ROLLOUTS), time.monotonic(), 0
    for number, start in enumerate(starts):
        code, text, struck = run(command, work, f"log-{number}.txt")
        print(f"start {number}: exit code {code} after {time.monotonic() - begun:.0f} s\n{text[-1500:]}")
        if code == 0:  # who was struck at the start may have been up already, and healed: the others came in this start
            start = [one for later in starts[number:] for one in later]
        hurt = [(VICTIMS[who], moment) for who, _, moment in start]
        ends = [(one, moment) for one, moment in hurt if not one.heals or moment == "start"]
        due = set(range(seen, seen := seen + len(start)))
        assert due <= struck or (ends and due <= are_struck(work))  # a run that ends with its victim is seldom seen
        assert all(one.said in text for one, _ in hurt)
        ranks = any("rank" in one.said for one, moment in hurt if (one, moment) not in ends)
        assert ("the trainers are up again" in text) == ranks
        allowed = {code for one, _ in ends for code in one.codes}
        allowed |= {0} if all(one.heals for one, _ in hurt) else set()
        if any(moment == "start" for _, moment in hurt):  # what does not come up may also be an error of the command's
            allowed |= {2}
        assert code in allowed
        if code == 0:
            break
    if code != 0:
        code, text, _ = run(command, work, "continued.txt")
    assert code == 0, text[-4000:]
    assert_same(work, undisturbed, ROLLOUTS)
    print(f"equal to the undisturbed run after {time.monotonic() - begun:.0f} s")
    ours, theirs = (json.loads((one / "save" / "manifest.json").read_text()) for one in (work, undisturbed))
    assert ours["source_state"] == theirs["source_state"]


def test_one_victim_after_another(story: Story, whole_run: Ended) -> None:
    for number, (strikes, start) in enumerate(zip(STARTS, story.starts, strict=True)):
        print(f"start {number}: exit code {start.code}\n{start.text[-1500:]}")
        due = set(range(before := sum(map(len, STARTS[:number])), before + len(strikes)))
        assert due <= start.struck | are_struck(story.work)
        assert all(VICTIMS[who].said in start.text for who, *_ in strikes)
    assert [start.code for start in story.starts] == [-signal.SIGKILL, 1, 0]
    assert "the trainers are up again" in story.starts[0].text
    assert_same(story.work, whole_run.work, LAST, rollouts_of_both=TOLD)


def test_the_same_samples_are_trained_on(story: Story, whole_run: Ended) -> None:
    struck, whole = (RolloutStore(work / "save" / "rollouts") for work in (story.work, whole_run.work))
    for number in range(TOLD):
        batches = [store.read(number).batch() for store in (struck, whole)]
        ours, theirs = ([(one.index, one.prompt, one.tokens, one.reward) for one in batch.samples] for batch in batches)
        assert ours == theirs and len(ours) == SAMPLES


def starts_of(victim: str) -> list[list[Strike]]:
    """One moment after another, in one start where the run heals from them; evaluations follow on odd rollouts."""
    at_the_start, *others = ((victim, rollout, moment) for rollout, moment in enumerate(MOMENTS))
    return [[at_the_start], others] if VICTIMS[victim].heals else [[strike] for strike in (at_the_start, *others)]


@pytest.mark.full
@pytest.mark.parametrize("victim", VICTIMS)
def test_any_victim_at_any_moment(qwen3: Assets, undisturbed: Path, tmp_path: Path, victim: str) -> None:
    is_the_end_of_an_undisturbed_run(qwen3, undisturbed, tmp_path / "run", starts_of(victim))
