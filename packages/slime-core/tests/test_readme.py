"""The README and the pages on this package alone: their examples print what they show, and what they name is there."""

import re
from pathlib import Path

import pytest

import slime_core

README = Path(__file__).parents[1] / "README.md"
DOCS = Path(__file__).parents[3] / "docs"
OWN_LOOP = DOCS / "how-to" / "own-loop.md"
NAMES = DOCS / "reference" / "core.md"

of_repository = pytest.mark.skipif(
    not OWN_LOOP.exists(), reason="the pages belong to the repository, not to the package"
)


def check_examples(page: Path, count: int, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """Each block of Python is followed by what it prints; later blocks use the names of earlier ones."""
    text = page.read_text()
    examples = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)
    assert len(examples) == text.count("```python") == count
    scope: dict[str, object] = {}
    for code, shown in examples:
        exec(compile(code, page.name, "exec"), scope)
        assert capsys.readouterr().out == shown
    return scope


def test_every_example_runs_as_shown(capsys):
    scope = check_examples(README, 1, capsys)
    assert scope["logits"].grad.isfinite().all()


@of_repository
def test_every_example_of_a_loop_runs_as_shown(capsys):
    check_examples(OWN_LOOP, 4, capsys)


def check_names(cells: list[str]) -> None:
    """`ops.tis_weights`, then further names of what holds it; or a name of the package."""
    for cell in cells:
        holder = slime_core
        for path in re.findall(r"`(\w[\w.]*)`", cell):
            parts = path.split(".")
            if len(parts) > 1 or hasattr(slime_core, parts[0]):
                holder = slime_core
            for name in parts:
                value = getattr(holder, name)
                holder = value if name != parts[-1] else holder


def test_the_ten_names_are_there():
    (table,) = re.findall(r"\| name \| what it does \| more \|\n.*?\n\n", README.read_text(), re.DOTALL)
    rows = [row.split("|")[1:3] for row in table.strip().splitlines()[2:]]
    assert len(rows) == 10
    check_names([name + text for name, text in rows])


@of_repository
def test_every_name_in_the_tables_is_there():
    page = NAMES.read_text()
    (table,) = re.findall(r"\| you want \| take \|\n.*?\n\n", page, re.DOTALL)
    check_names([row.split("|")[2] for row in table.strip().splitlines()[2:]])
    modules = re.findall(r"^\| `slime_core\.(\w+)`(.*?)\|", page, re.MULTILINE)
    assert len(modules) == 9
    for module, further in modules:
        for name in [module, *re.findall(r"`\.(\w+)`", further)]:
            assert hasattr(slime_core, name), name
