"""Release one package of the workspace. Started by `scripts/release`, which brings uv.

Checks the version against the changelog and the tags, writes down the public names (`public_names.py`), which the next
release keeps, builds wheel and sdist, checks the built metadata, installs the wheel outside the workspace (siblings
from wheels built here), runs the sdist's tests there, commits the names, writes a bill of materials (`sbom.py`), puts
the three files into `dist/`, and sets the tag, such as `slime-convert-v0.1.1`. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import contextlib
import email
import email.message
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import public_names
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

TEST_MARKS = "not full and not real"
LIMIT_SECONDS = 3600.0  # a package's tests, on a busy machine


class ReleaseError(Exception):
    """The package cannot be released; the text says why and what to do."""


@dataclass(frozen=True)
class Package:
    """A member of the workspace.

    Attributes:
        directory: Where it lies.
        name: Distribution name, from its pyproject.toml.
        version: As declared there.
    """

    directory: Path
    name: str
    version: Version

    @classmethod
    def read(cls, directory: Path) -> Package:
        """Read a package's pyproject.toml.

        Raises:
            ReleaseError: The version is none.
        """
        project = _read_toml(directory / "pyproject.toml")["project"]
        try:
            return cls(directory, project["name"], Version(project["version"]))
        except InvalidVersion as error:
            raise ReleaseError(f"{directory}/pyproject.toml: {error}; give one such as 0.1.1") from error

    @property
    def tag(self) -> str:
        """Git tag of this version."""
        return f"{self.name}-v{self.version}"

    @property
    def import_name(self) -> str:
        """Name of the directory in `src/`."""
        return next((self.directory / "src").glob("*/__init__.py")).parent.name


@dataclass(frozen=True)
class Built:
    """The files made from a package."""

    package: Package
    wheel: Path
    sdist: Path


def main(argv: Sequence[str]) -> int:
    """Run a release; returns the exit code."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="scripts/release", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", help="a directory in packages/, such as slime-convert")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="all but the names and the tag; an uncommitted change is only noted; pytest gets what follows --",
    )
    parser.add_argument(
        "--tagged",
        action="store_true",
        help="the tag is there, on this commit, with the names: all but those two",
    )
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help=argparse.SUPPRESS)
    args, pytest_args = parser.parse_args(words[:at]), words[at + 1 :]
    if pytest_args and not args.dry_run:
        parser.error("a release runs every test: options for pytest are for --dry-run")
    if args.tagged and args.dry_run:
        parser.error("--tagged makes the files of a tag, and --dry-run none; give one of them")
    try:
        release(args.root, args.package, dry_run=args.dry_run, tagged=args.tagged, pytest_args=pytest_args)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 2
    return 0


def release(root: Path, name: str, *, dry_run: bool, tagged: bool = False, pytest_args: Sequence[str] = ()) -> None:
    """Release a package of the workspace.

    Args:
        root: The workspace.
        name: The package's directory.
        dry_run: Leave nothing behind.
        tagged: The tag is there already, on this commit; make its files.
        pytest_args: Choose tests in a dry run.

    Raises:
        ReleaseError: It cannot be released.
    """
    packages = {path.parent.name: Package.read(path.parent) for path in sorted(root.glob("packages/*/pyproject.toml"))}
    if name not in packages:
        raise ReleaseError(f"there is no packages/{name}; there are {', '.join(packages)}")
    package = packages[name]
    say(f"{package.name} {package.version}")
    check_changelog(package)
    check_lock(root, package, packages.values())
    check_repository(root, package, dry_run=dry_run, tagged=tagged)
    with tempfile.TemporaryDirectory(prefix="release-") as scratch:
        outside = Path(scratch)
        with contextlib.nullcontext() if dry_run or tagged else recorded_names(root, package):
            built = build(package, outside / "dist")
            check_metadata(built, packages.values())
            siblings = [build(packages[sibling], outside / "dist") for sibling in siblings_of(package, packages)]
            check_outside(root, built, siblings, outside, pytest_args)
            bill = write_bill(root, built, packages.values(), outside)
        if not dry_run:
            (root / "dist").mkdir(exist_ok=True)
            for path in (built.wheel, built.sdist, bill):
                shutil.copy2(path, root / "dist" / path.name)
    if dry_run:
        say(f"dry run: everything holds; without --dry-run the tag {package.tag} would be set now")
        return
    if not tagged:
        run(["git", "tag", "--annotate", package.tag, "--message", f"{package.name} {package.version}"], cwd=root)
        say(f"tagged {package.tag}")
    say(f"{built.wheel.name}, {built.sdist.name} and {bill.name} in dist are ready to upload")


def check_changelog(package: Package) -> None:
    """The newest entry of the changelog is this version, and says something.

    Raises:
        ReleaseError: It is not so.
    """
    path = package.directory / "CHANGELOG.md"
    entries = re.split(r"^## ", path.read_text(encoding="utf-8") if path.exists() else "", flags=re.MULTILINE)[1:]
    versions = [entry.split()[0] for entry in entries if entry.split()]
    if str(package.version) not in versions:
        raise ReleaseError(
            f"{path} has no entry `## {package.version}` (it has {', '.join(versions) or 'none'}); write one"
        )
    if versions[0] != str(package.version):
        raise ReleaseError(
            f"pyproject.toml says {package.version} but the newest entry of {path} is {versions[0]}; make them agree"
        )
    if not entries[0].partition("\n")[2].strip():
        raise ReleaseError(f"the entry {package.version} of {path} is empty; say what changed")
    say("version and changelog agree")


def check_lock(root: Path, package: Package, packages: Iterable[Package]) -> None:
    """uv.lock has a version of all that the package asks for; its bill of materials is made of them.

    Raises:
        ReleaseError: It is not so.
    """
    try:
        locked = {row["name"]: row["version"] for row in _read_toml(root / "uv.lock")["package"]}
    except FileNotFoundError as error:
        raise ReleaseError("uv.lock, with the versions of what is needed, is not there; run scripts/lock") from error
    ours = {canonicalize_name(other.name) for other in packages}  # their versions are those of the workspace
    project = _read_toml(package.directory / "pyproject.toml")["project"]
    asked = [project.get("dependencies", []), *project.get("optional-dependencies", {}).values()]
    for requirement in (Requirement(text) for texts in asked for text in texts):
        version = locked.get(name := canonicalize_name(requirement.name))
        if name not in ours and (version is None or not requirement.specifier.contains(version, prereleases=True)):
            said = f"{package.name} requires `{requirement}` but uv.lock has {version or 'no version of it'}"
            raise ReleaseError(f"{said}; run scripts/lock")


def check_repository(root: Path, package: Package, *, dry_run: bool, tagged: bool) -> None:
    """The tree is clean and the tag new, or `tagged` and on this commit. A dry run only notes what is not so.

    Raises:
        ReleaseError: It is not so, and this is not a dry run.
    """
    problems = []
    if changes := run(["git", "status", "--porcelain"], cwd=root).splitlines():
        first = ", ".join(line[3:] for line in changes[:3])
        problems.append(f"{len(changes)} uncommitted changes ({first} …); commit them, a tag names a commit")
    if tagged and not run(["git", "tag", "--list", package.tag, "--points-at", "HEAD"], cwd=root).strip():
        problems.append(f"this commit does not have the tag {package.tag}, of the version in pyproject.toml")
    if not tagged and run(["git", "tag", "--list", package.tag], cwd=root).strip():
        problems.append(f"the tag {package.tag} is there already; raise the version in pyproject.toml")
    if problems and not dry_run:
        raise ReleaseError("; ".join(problems))
    for problem in problems:
        say(f"note: {problem}")


@contextlib.contextmanager
def recorded_names(root: Path, package: Package) -> Iterator[None]:
    """Write down the public names, and commit them if the block holds: what it builds is what the tag names.

    If it does not hold, or they cannot be committed, the record is as it was.
    """
    path = package.directory / public_names.RECORD
    before = path.read_bytes() if path.exists() else None
    public_names.write(root, package.directory.name, root)
    record = str(path.relative_to(root))
    try:
        yield
        run(["git", "add", record], cwd=root)
        if run(["git", "status", "--porcelain", "--", record], cwd=root):
            text = f"The public names of {package.name} {package.version}, which the next release keeps"
            run(["git", "commit", "--quiet", "--message", text, "--", record], cwd=root)
            say(f"committed {record}")
    except BaseException:
        run(["git", "reset", "--quiet", "--", record], cwd=root)
        path.unlink() if before is None else path.write_bytes(before)
        raise


def build(package: Package, destination: Path) -> Built:
    """Build wheel and sdist; the wheel is built from the sdist, so that the sdist is known to be whole.

    Raises:
        ReleaseError: It cannot be built.
    """
    run(["uv", "build", "--no-sources", "--quiet", "--out-dir", str(destination), str(package.directory)])
    stem = f"{canonicalize_name(package.name).replace('-', '_')}-{package.version}"
    (wheel,) = destination.glob(f"{stem}-*.whl")
    say(f"built {wheel.name}")
    return Built(package, wheel, destination / f"{stem}.tar.gz")


def check_metadata(built: Built, packages: Iterable[Package]) -> None:
    """What the wheel says about itself: name, version, typed, and bounds on siblings that today's siblings meet.

    Raises:
        ReleaseError: It is not so.
    """
    names, metadata = read_wheel(built.wheel)
    package = built.package
    if (metadata["Name"], metadata["Version"]) != (package.name, str(package.version)):
        raise ReleaseError(f"{built.wheel.name} calls itself {metadata['Name']} {metadata['Version']}")
    if f"{package.import_name}/py.typed" not in names:
        raise ReleaseError(f"{built.wheel.name} lacks {package.import_name}/py.typed; its types would not be seen")
    versions = {canonicalize_name(other.name): other.version for other in packages}
    for requirement in map(Requirement, metadata.get_all("Requires-Dist", [])):
        sibling = canonicalize_name(requirement.name)
        if sibling in versions and sibling != canonicalize_name(package.name):
            check_bounds(package, requirement, versions[sibling])
    say("metadata holds: name, version, types, bounds on siblings")


def read_wheel(wheel: Path) -> tuple[list[str], email.message.Message]:
    """The names of a wheel's files, and what it says about itself."""
    with zipfile.ZipFile(wheel) as archive:  # noqa: TID251  (made here)
        names = archive.namelist()
        # Only the wheel's own: a package may carry another distribution's metadata further down.
        own = (name for name in names if name.count("/") == 1 and name.endswith(".dist-info/METADATA"))
        return names, email.message_from_bytes(archive.read(next(own)))


def check_bounds(package: Package, requirement: Requirement, version: Version) -> None:
    """A sibling is bounded on both sides, and today's version lies between.

    Raises:
        ReleaseError: It is not so.
    """
    operators = {clause.operator for clause in requirement.specifier}
    example = f"{requirement.name}>={version.major}.{version.minor},<{version.major}.{version.minor + 1}"
    if not (operators & {">=", ">", "==", "~="} and operators & {"<", "<=", "==", "~="}):
        raise ReleaseError(f"{package.name} requires `{requirement}`; give both bounds, such as {example}")
    if version not in requirement.specifier:
        raise ReleaseError(f"{package.name} requires `{requirement}` but the workspace has {version}; widen the bounds")


def siblings_of(package: Package, packages: dict[str, Package]) -> list[str]:
    """Directories of the packages that this one needs, and that those need."""
    by_name = {canonicalize_name(other.name): directory for directory, other in packages.items()}
    found: list[str] = []
    queue = [package]
    while queue:
        project = _read_toml(queue.pop().directory / "pyproject.toml")["project"]
        for requirement in map(Requirement, project.get("dependencies", [])):
            directory = by_name.get(canonicalize_name(requirement.name))
            if directory is not None and directory not in found:
                found.append(directory)
                queue.append(packages[directory])
    return found


def check_outside(
    root: Path, built: Built, siblings: Sequence[Built], outside: Path, pytest_args: Sequence[str]
) -> None:
    """Install the wheel in an empty environment and run the sdist's tests there.

    The wheels are named by path: a distribution of the same name on an index is never taken instead.

    Raises:
        ReleaseError: It cannot be installed, comes from elsewhere, or a test fails.
    """
    python = outside / "env" / "bin" / "python"
    run(["uv", "venv", "--quiet", str(outside / "env")], cwd=outside)
    pins = outside / "constraints.txt"
    pins.write_text("\n".join(_read_toml(root / "pyproject.toml")["tool"]["uv"]["constraint-dependencies"]))
    wheels = [f"{built.package.name}[test] @ {built.wheel.as_uri()}"]
    wheels += [f"{sibling.package.name} @ {sibling.wheel.as_uri()}" for sibling in siblings]
    install = ["uv", "pip", "install", "--quiet", "--no-config", "--python", str(python), "--constraints", str(pins)]
    run([*install, *wheels], cwd=outside)
    module = built.package.import_name
    place = run([str(python), "-I", "-c", f"import {module}; print({module}.__file__)"], cwd=outside).strip()
    if not Path(place).is_relative_to(outside / "env"):
        raise ReleaseError(f"{module} was imported from {place}, not from the wheel")
    say(f"installed outside the workspace: {module}")
    shutil.unpack_archive(built.sdist, outside / "sdist")  # noqa: TID251  (made here)
    source = next((outside / "sdist").iterdir())
    shutil.rmtree(source / "src")
    command = [str(python), "-m", "pytest", "-c", str(root / "pyproject.toml"), f"--rootdir={source}"]
    command += ["-o", f"pythonpath={source / 'tests'}"]  # the archive's own helpers of tests
    engine = {"SLIME_ENGINE_PYTHON": str(root / ".venv-engine" / "bin" / "python")}
    output = run([*command, "-m", TEST_MARKS, str(source / "tests"), *pytest_args], cwd=source, env=engine)
    say(output.strip().splitlines()[-1])


def write_bill(root: Path, built: Built, packages: Iterable[Package], outside: Path) -> Path:
    """Write the bill of materials, from uv.lock and the environment that the tests ran in; returns its path.

    Its time is `SOURCE_DATE_EPOCH`, as of every build, or that of the commit.
    """
    from sbom import bill  # only `.venv-release` has what it needs, and nothing before this needs it

    time = os.environ.get("SOURCE_DATE_EPOCH") or run(["git", "log", "-1", "--format=%ct"], cwd=root)
    (site_packages,) = (outside / "env" / "lib").glob("python*/site-packages")
    versions = {str(canonicalize_name(package.name)): package.version for package in packages}
    path = built.sdist.with_name(built.sdist.name.removesuffix(".tar.gz") + ".cdx.json")
    _, metadata = read_wheel(built.wheel)
    text = bill(metadata, (built.wheel, built.sdist), root / "uv.lock", versions, site_packages, int(time))
    path.write_text(text, encoding="utf-8")
    say(f"wrote {path.name}, of {len(text):,} characters")
    return path


def run(command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a command and return its standard output.

    Args:
        command: Program and arguments.
        cwd: Working directory.
        env: Variables to add to this process's, less those that name an active environment.

    Raises:
        ReleaseError: It did not exit with 0; the text holds the end of its output.
    """
    environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_SECONDS,
            env=environment | dict(env or {}),
        )
    except subprocess.TimeoutExpired as error:
        raise ReleaseError(f"`{' '.join(command[:4])} …` took more than {LIMIT_SECONDS:.0f} s") from error
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        raise ReleaseError(f"`{' '.join(command[:4])} …` ended with exit code {done.returncode}:\n{tail}")
    return done.stdout


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def _read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
