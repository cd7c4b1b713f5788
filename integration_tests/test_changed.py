"""What `scripts/test --changed` runs for a change, by the repository's own graph."""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import changed
import reach
import recording

ROOT = Path(__file__).resolve().parents[1]
SHIM = "packages/slime-rollout/src/slime_rollout/engine/cpu_shims/slime_cpu_shims/sampling.py"
WORKER = "packages/slime-megatron/src/slime_megatron/worker/worker.py"
LOSSES = "packages/slime-core/src/slime_core/ops/losses.py"
RULES = tomllib.loads((ROOT / "scripts" / "reach.toml").read_text(encoding="utf-8"))["rule"]


@pytest.fixture(scope="module")
def graph() -> reach.Graph:
    return reach.Graph(ROOT)


def reached_by(graph: reach.Graph, *paths: str) -> list[str]:
    return [one.test for one in graph.reached(set(paths))]


def test_the_tests_of_a_module_come_first(graph: reach.Graph) -> None:
    tests = reached_by(graph, LOSSES)
    assert tests[0] == "packages/slime-core/tests/ops/test_losses.py"
    assert "packages/slime-megatron/tests/step/test_losses.py" in tests
    assert not [test for test in tests if test.startswith("packages/slime-convert/")]


def test_what_only_an_engine_runs_is_reached_by_what_starts_engines(graph: reach.Graph) -> None:
    assert not any(SHIM in used for path, used in graph.imports.items() if "/src/" in path and "cpu_shims" not in path)
    found = {one.test: one for one in graph.reached({SHIM})}
    assert next(iter(found)) == "packages/slime-rollout/tests/engine/cpu_shims/test_sampling.py"
    for test in ("packages/slime-rollout/tests/test_real.py", "integration_tests/test_learning.py"):
        assert found[test].started and found[test].real
    # It imports the manager, which could start an engine, and starts no process.
    assert "packages/slime-rollout/tests/test_stale.py" not in found
    assert not [test for test in found if test.startswith(("packages/slime-core/", "packages/slime-convert/"))]


def test_what_only_a_rank_runs_is_reached_by_what_starts_ranks(graph: reach.Graph) -> None:
    importing = {one.test for one in graph.reached({WORKER}) if not one.started}
    found = {one.test for one in graph.reached({WORKER})}
    assert reached_by(graph, WORKER)[0] == "packages/slime-megatron/tests/worker/test_worker.py"
    ranks = {test for test in graph.tests if "/slime-megatron/" in test and "ranks.start(" in (ROOT / test).read_text()}
    assert len(ranks) > 10 and ranks <= found and not ranks <= importing


def test_a_helper_and_a_fixture_reach_those_who_use_them(graph: reach.Graph) -> None:
    assert "integration_tests/test_learning.py" in reached_by(graph, "integration_tests/learning.py")
    assert "integration_tests/test_checks.py" not in reached_by(graph, "integration_tests/launching.py")
    assert "integration_tests/test_canary.py" in reached_by(graph, "integration_tests/imported_megatron.py")
    megatron, core = "packages/slime-megatron/tests", "packages/slime-core/tests"
    assert f"{megatron}/step/test_host_optimizer.py" in reached_by(graph, f"{megatron}/support/rank_host.py")
    assert f"{core}/ops/test_kept_log_probs.py" in reached_by(graph, f"{core}/support/kept_cases.py")
    assert "integration_tests/test_secrets.py" in reached_by(graph, f"{core}/support/planted.py")


def test_what_a_recording_saw_is_added(graph: reach.Graph) -> None:
    path = "packages/slime-convert/src/slime_convert/conversions/from_gguf.py"
    test = "packages/slime-core/tests/test_files.py"
    assert test in reached_by(reach.Graph(ROOT, {test: [path]}), path)
    assert test not in reached_by(graph, path)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["files"])
def test_every_rule_leads_from_a_file_to_a_test(graph: reach.Graph, rule: dict[str, list[str]]) -> None:
    assert any(fnmatch.fnmatch(path, rule["files"]) for path in graph.files)
    for pattern in rule["tests"]:
        assert any(fnmatch.fnmatch(test, pattern) for test in graph.tests), pattern


def test_a_file_that_nobody_is_known_to_read_runs_its_package(graph: reach.Graph) -> None:
    choice = reach.choose(graph, ["packages/slime-core/src/slime_core/new.bin", "unheard.of"], RULES)
    assert {one.test for one in choice.reached} == {test for test in graph.tests if "/slime-core/" in test}
    assert choice.said[0].startswith("packages/slime-core/src/slime_core/new.bin: nothing is known to read it: ")
    assert choice.said[1] == "unheard.of: nothing is known to read it: no test of its own"


def test_ruff_comes_first_then_the_nearest_then_units_then_what_starts_servers(graph: reach.Graph) -> None:
    steps = list(changed.steps([LOSSES], reach.choose(graph, [LOSSES], RULES), ["-m", "not full"]))
    names = [step.name for step in steps]
    assert names[:3] == ["ruff", "format", "core-nearest"]
    assert steps[2].command[:5] == (
        "pytest",
        "--verbose",
        "-m",
        "not full",
        "packages/slime-core/tests/ops/test_losses.py",
    )
    assert names.index("core-unit") < names.index("mypy") < names.index("integration-real")
    ran = [word for step in steps if step.tests for word in step.command if word.endswith(".py")]
    assert sorted(ran) == sorted(reached_by(graph, LOSSES))


def test_all_that_differs_from_a_revision_is_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True)

    def write(*names: str) -> None:
        for name in names:
            (tmp_path / name).write_text(f"{name} {os.urandom(4).hex()}")

    git("init", "--initial-branch=main")
    write("same", "committed", "staged", "unstaged", "gone", "on main")
    git("add", ".")
    git("commit", "-m", "first")
    git("checkout", "-b", "branch")
    write("committed")
    git("commit", "-am", "second")
    git("checkout", "main")
    write("on main")
    git("commit", "-am", "elsewhere")
    git("checkout", "branch")
    write("staged")
    git("add", "staged")
    write("unstaged", "untracked")
    (tmp_path / "gone").unlink()
    assert reach.changed_files(tmp_path, "main") == ["committed", "gone", "staged", "unstaged", "untracked"]


def test_child_processes_are_recorded_by_the_test_that_starts_them(tmp_path: Path) -> None:
    environment = os.environ | recording.settings(tmp_path, ROOT)
    code = "import os, slime_core.flops\nif os.fork() == 0:\n    import slime_core.balance\n    os._exit(0)\nos.wait()"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=240)
    outside = {key: value for key, value in environment.items() if key != "PYTEST_CURRENT_TEST"}
    subprocess.run([sys.executable, "-c", "import slime_core.memory"], env=outside, check=True, timeout=240)
    recorded = recording.collect(tmp_path, ROOT)
    (files,) = [recorded["integration_tests/test_changed.py"]]
    assert list(recorded) == ["integration_tests/test_changed.py"]
    assert {f"packages/slime-core/src/slime_core/{name}.py" for name in ("flops", "balance")} <= set(files)
    assert "packages/slime-core/src/slime_core/memory.py" not in files
