"""Every command on every page is run, planned, or marked as not run with the reason.

In ``scripts/test --full`` somebody who knows only the pages follows them in a clean clone.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pages import (
    PLAN,
    PageRun,
    blocks,
    copy_tree,
    kind_problems,
    pages,
    planned_commands,
    report,
    run_page,
    written_files,
)
from stand_ins import plan_words

PAGES = pages()
PLANNED = [page for page, text in PAGES.items() if PLAN in text]
RUNNING = [page for page, text in PAGES.items() if any(block.kinds == ["run"] for block in blocks(page, text))]
START, FIRST_RUN = "docs/start.md", "docs/tutorials/first-run.md"
OWN_REWARD = "docs/tutorials/own-reward.md"
HOW_TO = next(page for page in ("docs/how-to/debugging.md", "docs/how-to/new-family.md") if page in RUNNING)
JOURNEY = [START, FIRST_RUN, OWN_REWARD, HOW_TO]
"""What a stranger reads, in this order."""
SLACK = 3.0
"""A page's limits are for a quiet machine."""
OWN_TASK_MINUTES = 20.0
"""From the clone to an own reward that has risen, on a quiet machine."""


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_happens_with_its_commands(page: str) -> None:
    assert not (found := "\n".join(kind_problems(page, PAGES[page]))), found


@pytest.fixture(scope="session")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for all plans: the flags of an SGLang are read once for each path that leads to it."""
    return tmp_path_factory.mktemp("plans")


@pytest.mark.parametrize("page", PLANNED)
def test_planned_commands_can_start(page: str, planner: Path) -> None:
    for path in planner.iterdir():  # what the page before has left
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()
    text, problems = PAGES[page], []
    for name, content in written_files(page, text).items():
        (planner / name).parent.mkdir(parents=True, exist_ok=True)
        (planner / name).write_text(content)
    commands = planned_commands(page, text)
    for block, argv in commands:
        if re.fullmatch(r"train --config examples/[^/]+/run\.toml", " ".join(argv)):
            continue  # `test_recipes.py` plans it
        found = plan_words(argv, planner).problems
        problems += [f"{block.where}: slime-launch {argv[0]} …: {line}" for line in found]
    assert not problems, "\n".join(problems)
    without = {block.line for block in blocks(page, text) if block.kinds == ["plan"]} - {b.line for b, _ in commands}
    assert not without, f"{page}: plan blocks without a command of slime-launch, at lines {sorted(without)}"


@dataclass
class Clone:
    """A clean clone in which the start page was followed.

    Attributes:
        copy_seconds: What the clone itself took.
        runs: The pages that were followed in it.
    """

    tree: Path
    copy_seconds: float
    runs: dict[str, PageRun] = field(default_factory=dict)

    def follow(self, page: str) -> PageRun:
        """Run a page's commands, unless they were run already."""
        if page not in self.runs:
            self.runs[page] = run_page(page, self.tree, activate=page != START, slack=SLACK)
        return self.runs[page]


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """Made once: environments, model and first run are made by the start page's own commands."""
    begun = time.monotonic()
    tree = copy_tree(tmp_path_factory.mktemp("stranger") / "slime")
    made = Clone(tree, time.monotonic() - begun)
    made.follow(START)
    return made


@pytest.mark.full
@pytest.mark.real
@pytest.mark.timeout(4 * 3600)
def test_a_strangers_hour(clone: Clone) -> None:
    """Start page, two tutorials and a how-to, to the letter, in order, in one clone."""
    runs = {page: clone.follow(page) for page in JOURNEY}
    print(f"{clone.copy_seconds:7.1f} s  clone\n{report(runs)}")
    minutes = (clone.copy_seconds + sum(run.whole_seconds for run in runs.values())) / 60
    print(f"from the clone to the end: {minutes:.1f} min")
    assert minutes < 60 * SLACK


@pytest.mark.full
@pytest.mark.real
@pytest.mark.timeout(4 * 3600)
def test_an_own_reward_rises(tmp_path: Path) -> None:
    """By somebody who reads this one page, in a clean clone; where the run's report is, the page says."""
    begun = time.monotonic()
    tree = copy_tree(tmp_path / "slime")
    run_page(OWN_REWARD, tree, activate=False, slack=SLACK)
    minutes = (time.monotonic() - begun) / 60
    print(f"from the clone to an own reward that rises: {minutes:.1f} min")
    named = set(re.findall(r"[\w./-]+/report\.json", PAGES[OWN_REWARD]))
    [path] = [tree / name for name in named if (tree / name).is_file()]
    report = json.loads(path.read_text())
    rewards = report["rewards"]
    part = max(len(rewards) // 4, 1)
    first, last = sum(rewards[:part]) / part, sum(rewards[-part:]) / part
    print(f"mean reward of the first {part} of {len(rewards)} steps {first:.3f}, of the last {part} {last:.3f}")
    print(f"held-out prompts: {report['eval_before']} before, {report['eval_after']} after")
    assert last > first and report["eval_after"]["heldout"] > report["eval_before"]["heldout"]
    assert minutes < OWN_TASK_MINUTES * SLACK


@pytest.mark.full
@pytest.mark.real
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("page", RUNNING)
def test_commands_of_a_page_run(page: str, clone: Clone) -> None:
    if page not in clone.runs:
        shutil.rmtree(clone.tree / "runs", ignore_errors=True)  # a page builds on the quick start, not on others
    run = clone.follow(page)
    print(report({page: run}))
