"""The workflows of `.github`: each step is a command of the repository, and they leave out nothing that is tested.

What the commands of `tests.yml` do is what `scripts/test` does; here it is checked that there are no others.
"""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import release

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / ".github" / "workflows").iterdir())
}
JOBS = {(name, job): row for name, workflow in WORKFLOWS.items() for job, row in workflow["jobs"].items()}
ACTIONS = re.compile(r"actions/(checkout|setup-python|upload-artifact|download-artifact)@v\d+")
PACKAGES = [release.Package.read(path.parent) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
UV = ROOT / ".venv-tools" / "bin" / "uv"


def expanded(job: dict[str, Any]) -> list[str]:
    """The commands of a job, for each entry of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    found = []
    for values in itertools.product(*matrix.values()):
        for step in (step["run"] for step in job["steps"] if "run" in step):
            for key, value in zip(matrix, values, strict=True):
                step = step.replace(f"${{{{ matrix.{key} }}}}", value)
            found.append(step)
    return found


COMMANDS = {f"{workflow} {job}": expanded(row) for (workflow, job), row in JOBS.items()}


@pytest.mark.parametrize("job", COMMANDS)
def test_each_step_is_a_command_of_the_repository(job: str) -> None:
    for command in COMMANDS[job]:
        assert "${{" not in command, "a value that the host puts into a script may be anybody's code"
        subprocess.run(["bash", "-n", "-c", command], check=True)
        program = ROOT / command.split()[0]
        assert program == UV or (program.is_file() and os.access(program, os.X_OK)), command


def test_all_environments_and_pythons_are_tested() -> None:
    listed = re.findall(r'^    Env\("(\w+)"', (ROOT / "scripts" / "test.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(COMMANDS["tests test"]) == sorted(f"scripts/test {name}" for name in listed) and len(listed) > 6
    assert COMMANDS["tests docs"] == ["scripts/docs"]
    [pythons] = {
        tuple(re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"])))
        for path in ROOT.glob("packages/*/pyproject.toml")
        if (project := tomllib.loads(path.read_text(encoding="utf-8"))["project"])
    }
    assert JOBS["tests", "test"]["strategy"]["matrix"]["python"] == list(pythons)
    for job in JOBS.values():
        [version] = [step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
        assert version in ("${{ matrix.python }}", *pythons)


def test_actions_are_known_ones_and_may_only_read() -> None:
    used = [step["uses"] for job in JOBS.values() for step in job["steps"] if "uses" in step]
    assert used and all(ACTIONS.fullmatch(one) for one in used)
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in WORKFLOWS.values())
    more = {job: row["permissions"] for job, row in JOBS.items() if "permissions" in row}
    assert more == {("release", "publish"): {"contents": "read", "id-token": "write"}}


def test_one_job_builds_and_another_one_uploads_if_it_is_switched_on() -> None:
    build, publish = JOBS["release", "build"], JOBS["release", "publish"]
    assert "environment" not in build and "if" not in build
    assert (publish["needs"], publish["if"], publish["environment"]) == ("build", "vars.PUBLISH == 'true'", "release")
    assert COMMANDS["release publish"] == ["scripts/publish"]
    [sent], [got] = (
        [step["with"] for step in job["steps"] if f"actions/{action}-artifact" in step.get("uses", "")]
        for job, action in ((build, "upload"), (publish, "download"))
    )
    assert sent == got == {"name": "${{ github.ref_name }}", "path": "dist/"}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_tag_has_its_package_released(package: release.Package, tmp_path: Path) -> None:
    patterns = WORKFLOWS["release"][True]["push"]["tags"]  # YAML takes `on` for a truth value
    assert [fnmatch.fnmatchcase(package.tag, pattern) for pattern in patterns] == [True]
    (tmp_path / "scripts").mkdir()
    stub = tmp_path / "scripts" / "release"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    done = subprocess.run(
        ["bash", "-e", "-c", COMMANDS["release build"][0]],
        cwd=tmp_path, env=os.environ | {"GITHUB_REF_NAME": package.tag}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["--tagged", package.directory.name]


@pytest.mark.skipif(not UV.exists(), reason="scripts/test makes uv's environment")
def test_the_tool_that_uploads_has_the_options_that_it_is_given() -> None:
    [command] = re.findall(r"^exec uv publish .*", (ROOT / "scripts" / "publish").read_text(), re.MULTILINE)
    said = subprocess.run([UV, "publish", "--help"], check=True, capture_output=True, text=True).stdout
    assert re.findall(r"--[\w-]+", command) and all(option in said for option in re.findall(r"--[\w-]+", command))


def test_the_citation_names_the_developers_and_the_license() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["authors"] == [{"name": "The slime developers"}]
    projects = (tomllib.loads(path.read_text()) for path in ROOT.glob("packages/*/pyproject.toml"))
    assert {project["project"]["license"] for project in projects} == {citation["license"]}
