"""Every test that the pages of claims name exists, and none that is said to be in `scripts/test` is left out there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "explanation" / "claims.md"
FAILURES = PAGE.with_name("what-cannot-go-wrong.md")
SECURITY = PAGE.with_name("security.md")
NAME = re.compile(r"`([\w/]+)::(test_\w+)`")


def rows() -> Iterator[tuple[str, str, str]]:
    """The tables' rows: a claim, what shows it in every test run, and what only `--full` adds."""
    for line in (PAGE.read_text(encoding="utf-8") + SECURITY.read_text(encoding="utf-8")).splitlines():
        cells = [cell.strip(" |") for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and "---" not in line and cells[0] not in ("claim", "promise"):
            yield cells[0], cells[1], cells[2].strip("| ") if len(cells) > 2 else ""


def functions(place: str, name: str) -> tuple[ast.Module, list[ast.FunctionDef]]:
    """A file of tests by its short name, and its functions of a name."""
    package, _, module = place.rpartition("/")
    package, _, below = package.partition("/")
    directory = ROOT / "packages" / f"slime-{package}" / "tests" / below if package else ROOT / "integration_tests"
    tree = ast.parse((directory / f"test_{module}.py").read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    return tree, found


def is_full(tree: ast.Module, function: ast.FunctionDef) -> bool:
    """Whether the file or the function has the mark `full`, not only some of its parameters."""
    marks = [ast.unparse(one) for one in function.decorator_list]
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            listed = node.value.elts if isinstance(node.value, ast.List) else [node.value]
            marks += [ast.unparse(one) for one in listed]
    return "pytest.mark.full" in marks


ROWS = list(rows())


@pytest.mark.parametrize(("claim", "default", "full"), ROWS, ids=[claim for claim, *_ in ROWS])
def test_what_shows_a_claim_is_there(claim: str, default: str, full: str) -> None:
    named = NAME.findall(default)
    assert named or "(`--full` alone" in default
    for place, name in named:
        tree, [function] = functions(place, name)
        assert not is_full(tree, function), f"{place}::{name} runs in --full alone"
    for place, name in NAME.findall(full):
        assert functions(place, name)[1], f"there is no {place}::{name}"


def kinds() -> dict[str, str]:
    """The sections of the page of failures."""
    parts = re.split(r"^## (\d+)\. .*$", FAILURES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


KINDS = kinds()


@pytest.mark.parametrize("kind", [str(number) for number in range(1, 11)])
def test_a_kind_of_failure_has_its_tests(kind: str) -> None:
    text = KINDS[kind]
    assert re.search(r"^\*[\w-]+ #\d+.*\*$", text, re.MULTILINE), "the reports are named"
    assert "**You see:** " in text
    named = NAME.findall(re.sub(r"\*`[^`]+`\*", "", text))
    assert named and len(NAME.findall(text)) == text.count("::test_"), "a test is named otherwise"
    for place, name in named:
        tree, [function] = functions(place, name)
        assert not is_full(tree, function), f"{place}::{name} runs in --full alone; write it in italics"
    for place, name in NAME.findall(" ".join(re.findall(r"\*(`[^`]+`)\*", text))):
        tree, [function] = functions(place, name)
        assert is_full(tree, function), f"{place}::{name} runs in scripts/test; write it without italics"


def test_tests_in_italics_on_the_page_of_security_run_in_full_alone() -> None:
    named = NAME.findall(" ".join(re.findall(r"\*(`[^`]+`)\*", SECURITY.read_text(encoding="utf-8"))))
    assert named
    for place, name in named:
        tree, [function] = functions(place, name)
        assert is_full(tree, function), f"{place}::{name} runs in scripts/test; write it without italics"


def test_a_test_that_does_not_exist_is_found() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        _, [_] = functions("routing", "test_that_nobody_wrote")


def test_the_mark_is_seen() -> None:
    tree, [function] = functions("replay", "test_a_run_is_trained_again_from_its_beginning")
    assert is_full(tree, function)
    tree, [function] = functions("rollout/engine/real_chaos", "test_engines_fail_while_they_read_prompts")
    assert is_full(tree, function)
