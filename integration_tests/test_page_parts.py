"""What reads and runs pages finds what is wrong with them."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from pages import (
    PageError,
    blocks,
    kind_problems,
    missing_line,
    planned_commands,
    run_page,
    written_files,
)

PAGE = """# A page

Some text with `slime-launch train` in it.

<!-- run: 900 s -->
```bash
echo one 1.5 s
```

```text
one 2 s
```

1. In a list:

    <!-- plan -->
    ```bash
    source scripts/models/qwen3-4B.sh
    slime-launch train "${MODEL_ARGS[@]}" --lr 1e-6
    ```

```bash
# not run: needs Slurm
sbatch x
```
"""


def fenced(text: str, before: str = "", language: str = "bash") -> str:
    return f"# Page\n\n{before}\n```{language}\n{text}\n```\n"


def test_a_page_is_read() -> None:
    first, second, third = blocks("page.md", PAGE)
    assert [block.kinds for block in (first, second, third)] == [["run"], ["plan"], ["not run"]]
    assert (first.seconds, first.expected, first.where) == (900, "one 2 s", "page.md:6")
    assert second.text.startswith("source scripts/models")
    assert list(kind_problems("page.md", PAGE)) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (fenced("ls"), "says nothing"),
        (fenced("ls", before="<!-- Run -->"), "says nothing"),
        (fenced("# not run:\nls"), "says nothing"),
        (fenced("# not run: no\nls", before="<!-- run -->"), "says run and not run"),
        (fenced("ls", language="sh"), "write ```bash"),
        (fenced("$ slime-launch train", language="console"), "not ```bash: $ slime-launch train"),
        (fenced("RAY_ADDRESS=a slime-launch train", language=""), "not ```bash: RAY_ADDRESS"),
        (fenced("run: |\n  scripts/quickstart", language="yaml"), "not ```bash: scripts/quickstart"),
        ("# Page\n\n    pip install x\n", "not ```bash: pip install x"),
        (fenced("docker build .", language="text"), "not ```bash: docker build"),
    ],
)
def test_commands_without_a_kind_are_found(text: str, problem: str) -> None:
    [found] = kind_problems("page.md", text)
    assert problem in found


@pytest.mark.parametrize(
    "text",
    [
        fenced("import ray\nray.init()", language="python"),
        fenced("step 1 reward 0.5", language="text"),
        fenced("lr = 1e-6", language="toml"),
        "# Page\n\n- a list\n\n    with a paragraph about pip\n",
    ],
)
def test_other_blocks_hold_no_commands(text: str) -> None:
    assert list(kind_problems("page.md", text)) == []


def test_the_words_of_plan_blocks_are_those_of_bash() -> None:
    [(block, words)] = planned_commands("page.md", PAGE)
    assert block.kinds == ["plan"]
    assert words[:2] == ["train", "--swiglu"] and words[-2:] == ["--lr", "1e-6"]


@pytest.mark.parametrize("line", ["ls", "python x.py", "echo hello", "slime-launch train $UNSET", "source nowhere.sh"])
def test_plan_blocks_call_nothing_else(line: str) -> None:
    with pytest.raises(AssertionError, match="plan blocks"):
        planned_commands("page.md", fenced(line, before="<!-- plan -->"))


def test_files_that_a_page_writes() -> None:
    text = fenced("cat > runs/own.py <<'EOF'\ndef f(): ...\nEOF\nls", before="<!-- run -->")
    text += fenced("# judge.py\ndef g(): ...", language="python") + fenced("def h(): ...", language="python")
    files = written_files("page.md", text)
    assert files == {"runs/own.py": "def f(): ...\n", "judge.py": "# judge.py\ndef g(): ...\n"}


@pytest.mark.parametrize(
    ("expected", "output", "missing"),
    [
        ("step 1  reward 0.25\n…\nstep 9 …", "begin\nstep 1 reward -3e-05\nx\nstep 2 reward 1 in 3 s", None),
        ("a\nb", "b\na", "b"),
        ("50.0% of 128", "7% of 1,024", None),
        ("iter_0000030", "iter_0000002", None),
        ("reward 0.5", "reward high", "reward 0.5"),
        ("done", "\x1b[1mwaiting\rdone\x1b[0m", None),
        ("equal", "not equal", "equal"),
    ],
)
def test_output_is_compared_but_for_numbers(expected: str, output: str, missing: str | None) -> None:
    assert missing_line(expected, output) == missing


def run(tree: Path, *texts: str, slack: float = 1.0, limit: str = "") -> dict[int, str]:
    """What the run blocks of a page print, which share one bash."""
    (tree / "page.md").write_text("".join(fenced(text, before=f"<!-- run{limit} -->") for text in texts))
    return run_page("page.md", tree, activate=False, slack=slack).output


def test_blocks_of_a_page_share_a_shell(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    assert list(run(tmp_path, "cd below; NAME=x", 'echo "$NAME in ${PWD##*/}"').values()) == ["", "x in below\n"]


def test_a_command_that_fails_is_shown_with_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(PageError, match=r"(?s)page.md:10: exit code 3 of\n.*bash -c.*which printed\nbefore\nno such"):
        run(tmp_path, "true", "echo before\nbash -c 'echo no such; exit 3'\necho after")


def test_a_line_that_does_not_come_is_named(tmp_path: Path) -> None:
    text = fenced("echo two", before="<!-- run -->") + "\n```text\nthree\n```\n"
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(PageError, match="the page shows 'three'"):
        run_page("page.md", tmp_path, activate=False)


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(PageError, match=r"(?s)not done after 1 s.*sleep 321"):
        run(tmp_path, "sleep 321", limit=": 2 s", slack=0.5)
    assert time.monotonic() - begun < 20
    assert not [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "321"]]


def test_what_is_left_running_is_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pages.GONE_SECONDS", 2.0)
    with pytest.raises(PageError, match=r"left processes behind.*sleep 322"):
        run(tmp_path, "setsid sleep 322 &")
    assert not [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "322"]]
