"""Every command on every page is run, planned, or marked as not run with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import PLAN, blocks, kind_problems, pages, planned_commands, written_files
from stand_ins import plan_words

PAGES = pages()
PLANNED = [page for page, text in PAGES.items() if PLAN in text]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_happens_with_its_commands(page: str) -> None:
    assert not (found := "\n".join(kind_problems(page, PAGES[page]))), found


@pytest.mark.parametrize("page", PLANNED)
def test_planned_commands_can_start(page: str, tmp_path: Path) -> None:
    text, problems = PAGES[page], []
    for name, content in written_files(page, text).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    commands = planned_commands(page, text)
    for block, argv in commands:
        found = plan_words(argv, tmp_path).problems
        problems += [f"{block.where}: slime-launch {argv[0]} …: {line}" for line in found]
    assert not problems, "\n".join(problems)
    without = {block.line for block in blocks(page, text) if block.kinds == ["plan"]} - {b.line for b, _ in commands}
    assert not without, f"{page}: plan blocks without a command of slime-launch, at lines {sorted(without)}"
