"""How `scripts/test` counts, and what `scripts/tidy.py` finds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _script(name: str) -> ModuleType:
    """A script by its path: `test` is also a module of the standard library."""
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


runner, tidy = _script("test"), _script("tidy")


def _junit(path: Path, *, tests: int, failures: int = 0, errors: int = 0, skipped: int = 0) -> Path:
    counts = f'tests="{tests}" failures="{failures}" errors="{errors}" skipped="{skipped}"'
    path.write_text(f'<testsuites><testsuite name="pytest" {counts}></testsuite></testsuites>')
    return path


def test_counts_come_from_the_junit_file(tmp_path: Path) -> None:
    report = _junit(tmp_path / "core.xml", tests=10, failures=1, errors=1, skipped=3)
    result = runner.count("core", report, 1, 2.0)
    assert (result.passed, result.failed, result.skipped, result.note) == (5, 2, 3, "")


@pytest.mark.parametrize(
    ("tests", "code", "note", "expected"),
    [
        (4, 0, "", (4, 0, "")),
        (4, 3, "", (4, 1, "exit code 3")),  # all passed, then the process crashed
        (4, 143, "stopped after 8 minutes", (4, 1, "stopped after 8 minutes")),
        (0, 5, "", (0, 1, "no test ran")),
        (0, 0, "", (0, 1, "no test ran")),
        (None, 1, "", (0, 1, "no test ran")),  # the environment could not be built
    ],
)
def test_an_environment_that_ends_badly_counts_as_a_failure(
    tmp_path: Path, tests: int | None, code: int, note: str, expected: tuple[int, int, str]
) -> None:
    report = tmp_path / "core.xml"
    if tests is not None:
        _junit(report, tests=tests)
    result = runner.count("core", report, code, 1.0, note)
    assert (result.passed, result.failed, result.note) == expected


def test_a_test_that_failed_is_named_with_the_first_line_of_what_it_said(tmp_path: Path) -> None:
    report = tmp_path / "core.xml"
    report.write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="1" skipped="0">'
        '<testcase classname="tests.test_loss" name="test_kl[k3]">'
        '<failure message="assert 1 == 2&#10; m"/></testcase>'
        '<testcase classname="tests.test_loss" name="test_good"/>'
        '<testcase classname="tests.test_pool" name="test_end"><error message="failed on teardown"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert runner.count("core", report, 1, 1.0).failures == (
        "tests.test_loss::test_kl[k3]: failure: assert 1 == 2",
        "tests.test_pool::test_end: error: failed on teardown",
    )


def test_what_was_left_out_is_counted_by_its_reason(tmp_path: Path) -> None:
    report = tmp_path / "launch.xml"
    reason = "no Chromium with its driver: apt-get install chromium chromium-driver"
    case = '<testcase classname="test_browser" name="test_{}"><skipped type="pytest.skip" message="{}"/></testcase>'
    cases = [case.format(number, why) for number, why in enumerate([reason, reason, "outside the repository"])]
    report.write_text(f'<testsuites><testsuite tests="4" skipped="3">{"".join(cases)}</testsuite></testsuites>')
    result = runner.count("launch", report, 0, 1.0)
    assert list(runner.left_out([result])) == [
        f"launch: 2 tests left out: {reason}",
        "launch: 1 test left out: outside the repository",
    ]


def test_lint_is_one_check(tmp_path: Path) -> None:
    good, bad = (runner.count("lint", tmp_path / "lint.xml", code, 1.0) for code in (0, 1))
    assert (good.passed, good.failed, bad.passed, bad.failed) == (1, 0, 0, 1)


def test_the_last_line_sums_all_environments() -> None:
    one = runner.Result("core", 5, 0, 0, 1.0)
    assert runner.last_line([one, runner.Result("lint", 1, 0, 0, 1.0)]) == "6 passed, 0 failed"
    assert runner.last_line([one, runner.Result("launch", 2, 1, 3, 1.0)]) == "7 passed, 1 failed, 3 skipped"


def test_words_after_two_dashes_go_to_pytest() -> None:
    request = runner.parse(["launch", "core", "--", "-k", "kl"])
    assert [env.name for env in request.envs] == ["core", "launch"]
    assert (request.pytest_args, request.factor, request.changed) == ([*runner.MARKS, "-k", "kl"], 1.0, None)
    request = runner.parse(["--full"])
    assert (len(request.envs), request.pytest_args) == (7, runner.FULL)
    assert request.factor > 1


def test_changed_compares_with_main_or_what_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.parse(["--changed"]).changed == "main"
    assert runner.parse(["--changed", "HEAD~1", "--", "-x"]).changed == "HEAD~1"
    with pytest.raises(SystemExit):
        runner.parse(["--changed", "main", "core"])
    assert "--changed chooses the environments itself" in capsys.readouterr().err


def test_an_unknown_environment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        runner.parse(["cor"])
    assert stop.value.code == 2
    assert "unknown: cor; there are lint, core" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("index = 'https://py" + "pi.org/simple'", "a.py:1: a package index's host name"),
        ("x = 1\npath = '/ro" + "ot/models'", "a.py:2: a path of one machine"),
        ("x = 1\n" * 601, "a.py:1: 601 lines"),
        ("def f():\n" + "    x = 1\n" * 80, "a.py:1: f has 81 lines"),
    ],
)
def test_tidy_finds(text: str, finding: str) -> None:
    (found,) = tidy.find("a.py", text)
    assert found.startswith(finding)


@pytest.mark.parametrize(
    ("path", "text", "number"),
    [
        ("a.md", "One.\n\nGenerated an" + "ew, from the start.\n", 3),
        ("a.md", "A file beside\nthe other one.\n", 1),
        ("a.py", '"""What is no' + ' number."""\n', 1),
        ("a.py", 'def f():\n    """Text.\n\n    More, beside' + ' the text.\n    """\n', 4),
        ("a.py", "x = 1\n# It was made an" + "ew.\n", 2),
        ("a.py", "x = [\n    1,  # beside\n    # the other\n]\n", 2),
    ],
)
def test_tidy_finds_odd_wordings(path: str, text: str, number: int) -> None:
    (found,) = tidy.find(path, text)
    assert found.startswith(f"{path}:{number}: ") and "; write: " in found


def test_tidy_reads_no_code_for_wordings() -> None:
    word = "an" + "ew"
    assert list(tidy.find("a.md", f"```text\n{word}\n```\n\nThe name `{word}`.\n")) == []
    assert list(tidy.find("a.py", f'{word} = f(\n    "{word}",\n)\n"""Its name is ``{word}``."""\n')) == []
    assert list(tidy.find("a.sh", f"# {word}\n")) == []


def test_tidy_leaves_alone() -> None:
    text = "def f():\n" + "    x = 1\n" * 79 + "url = 'https://example.com/work/item'\npath = 'outputs/work/a'\n"
    assert list(tidy.find("a.py", text)) == []
    assert list(tidy.find("a.md", "line\n" * 700)) == []


def test_tidy_finds_a_public_class_with_two_meanings() -> None:
    text = "class Batch: ...\nclass _Own: ...\ndef run(): ...\n"
    same = {"packages/p/src/p/a.py": text, "packages/p/src/p/b.py": "\n" + text, "packages/q/src/q/a.py": text}
    (found,) = tidy.doubled_names(same)
    others = "packages/p/src/p/b.py:2, packages/q/src/q/a.py:1"
    assert found == f"packages/p/src/p/a.py:1: the name Batch has another meaning at {others}"


@pytest.mark.parametrize(
    "call",
    [
        "path.write_text('x')",
        "(folder / 'a').write_bytes(b'x')",
        "open(path, 'w')",
        "open(path, mode='ab')",
        "io.open(path, 'x')",
        "path.open('r+b')",
        "path.open(mode='wb')",
        "open(path, mode)",
        "path.open(\n    'w',\n)",
    ],
)
def test_tidy_finds_a_file_that_is_written_past_the_one_writer(call: str) -> None:
    (found,) = tidy.writers("a.py", f"x = 1\n{call}\n")
    assert found.startswith("a.py:2: ") and "use slime_core.files" in found
    (found,) = tidy.writers("a.py", f"{call}  # written: \n")  # without a reason
    assert list(tidy.writers("a.py", f"{call}  # written: a private folder\n")) == []


def test_tidy_lets_files_be_read_and_written_by_the_one_writer() -> None:
    for text in (
        "open(path)\nopen(path, 'rb')\npath.open()\npath.open('rb')\nopen(path, encoding='utf-8')\nfile.write('x')\n",
        "os.open(path, os.O_WRONLY | os.O_NOFOLLOW)\nformats.open(directory)\npath.read_text()\n",
        "with whole_file(path) as partial, partial.open('wb') as file:\n    partial.write_text('x')\n",
    ):
        assert list(tidy.writers("a.py", text)) == []


@pytest.mark.parametrize("place", ["packages/slime-core/src/slime_core/a.py", "packages/slime-core/tests/a.py"])
def test_tidy_looks_at_who_writes_in_packages_only(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text("path.write_text('x')\n")
    monkeypatch.setattr(tidy, "ROOT", tmp_path)
    monkeypatch.setattr(tidy, "files", lambda: [place])
    assert tidy.main() == ("/src/" in place)
    assert ("write_text writes a file" in capsys.readouterr().out) == ("/src/" in place)
