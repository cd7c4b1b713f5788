"""What five changes take, as the page "Find your way" walks through them: so many files and no more, and they work."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import places

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "how-to" / "find-your-way.md").read_text(encoding="utf-8")
SECTIONS = {
    text.partition("\n")[0].partition(":")[0].lower(): text for text in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
}
MOST_FILES = {"rule": 2, "loss": 2, "estimator": 2, "transport": 2, "family": 3}
FILE = re.compile(r"`((?:slime_\w+|tests|docs|scripts|integration_tests)/[\w./-]+\.\w+)`")


@pytest.mark.parametrize("name", MOST_FILES)
def test_the_page_names_the_files_of_a_change(name: str) -> None:
    change = places.CHANGES[name]
    steps = re.findall(r"^\d+\. .*(?:\n   .*)*", SECTIONS[change.what], re.MULTILINE)
    named = {file for step in steps for file in FILE.findall(step)}
    assert named == {file.partition("/src/")[2] for file in change.files}
    assert len(steps) == len(change.files) <= MOST_FILES[name]


def test_every_file_that_the_page_names_is_there() -> None:
    assert set(places.CHANGES) == set(MOST_FILES)
    planted = {edit.path.partition("/src/")[2] for change in places.CHANGES.values() for edit in change.edits}
    for name in FILE.findall(PAGE):
        there = [*ROOT.glob(f"packages/*/src/{name}"), *ROOT.glob(f"packages/*/{name}"), *ROOT.glob(name)]
        assert there or name in planted, name


@pytest.mark.parametrize("name", MOST_FILES)
def test_a_change_works_where_it_is_planted(name: str) -> None:
    done = subprocess.run([sys.executable, places.__file__, name], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    change = places.CHANGES[name]
    assert done.stdout == f"{change.what}: {len(change.files)} files: {', '.join(change.files)}\n"


def test_a_place_that_moved_is_said(tmp_path: Path) -> None:
    (tmp_path / "table.py").write_text("a = 1\na = 1\n")
    for after, found in (("a = 1\n", 2), ("b = 1\n", 0)):
        with pytest.raises(places.PlaceError, match=rf"table\.py has {found} places that read '{after[0]}"):
            places.Edit("table.py", "c = 1\n", after=after).plant(tmp_path)


def test_a_change_that_does_not_work_is_said(tmp_path: Path) -> None:
    change = places.Change("a toy", (places.Edit("toy.py", "x = 1\n"),), "import toy; assert toy.x == 2, 'no toy'")
    with pytest.raises(places.PlaceError, match=r"a toy does not work in the copy:(?s:.*)AssertionError: no toy"):
        change.try_in(tmp_path)
