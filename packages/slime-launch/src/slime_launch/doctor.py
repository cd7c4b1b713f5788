"""``slime-launch doctor``: whether a run could start on this machine, a line for each part, with what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from slime_core.importing import install_command
from slime_launch.cluster import cluster_notices
from slime_launch.config import ClusterConfig
from slime_launch.parser import WordsParser
from slime_launch.plain_text import BETWEEN_NODES
from slime_rollout.engine import engine_device, find_python, importable_in, missing_sglang, run_python

PARTS = ("slime-core", "slime-convert", "slime-rollout", "slime-megatron", "slime-launch")
OK, NOTE, MISSING = "ok", "note", "missing"
LITTLE_DISK = 20 * 2**30
SECONDS = 60.0
SGLANG_VERSION = "from importlib.metadata import version; print(version('sglang'))"
TORCH_CUDA = "import torch; print(torch.version.cuda or torch.version.hip or '')"


@dataclass(frozen=True)
class Finding:
    """One line: ``ok``, ``note`` (a run can start) or ``missing`` (it cannot), and what about it."""

    level: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:<8} {self.text}"


def doctor(argv: list[str]) -> int:
    """Print what was found; returns 1 if a run could not start, else 0."""
    parser = WordsParser(prog="slime-launch doctor", description=__doc__)
    parser.add_argument("--sglang-python", metavar="PYTHON", help="interpreter that SGLang runs in")
    given = parser.parse_args(argv)
    findings = [*check_packages(), *check_sglang(given.sglang_python), *check_device(engine_device())]
    findings += [*check_space(Path.cwd(), Path("/dev/shm")), *check_machine(os.environ.get("RAY_ADDRESS"))]
    for finding in findings:
        print(finding)
    return int(any(finding.level == MISSING for finding in findings))


def check_packages() -> Iterator[Finding]:
    """The packages that ours need, each in a version that was tested with them."""
    needed: dict[str, Requirement] = {}
    for part in PARTS:
        try:
            texts = requires(part) or []
        except PackageNotFoundError:
            yield Finding(
                MISSING, f"{part} is not installed; run in a clone of slime: {install_command(f'./packages/{part}')}"
            )
            continue
        for requirement in map(Requirement, texts):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed.setdefault(requirement.name, requirement)
    for name, requirement in sorted(needed.items()):
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding(MISSING, f"{name} is not installed; run: {install_command(_plain(requirement))}")
            continue
        yield check_version(name, found, requirement)


def check_version(name: str, found: str, requirement: Requirement, python: str = sys.executable) -> Finding:
    """One package's version, in an interpreter, against what is needed."""
    if requirement.specifier.contains(found, prereleases=True):
        return Finding(OK, f"{name} {found}")
    advice = f"run: {install_command(_plain(requirement), python=python)}"
    return Finding(MISSING, f"{name} {found} is installed, {requirement.specifier} is needed; {advice}")


def _plain(requirement: Requirement) -> str:
    """A requirement without the environment that it is for."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"


def check_sglang(given: str | None) -> Iterator[Finding]:
    """The interpreter of SGLang, and the version there."""
    python = find_python(given)
    if not importable_in(python, "sglang"):
        yield Finding(MISSING, missing_sglang(python))
        return
    found = _output(python, SGLANG_VERSION)
    if found is None:
        yield Finding(NOTE, f"SGLang in {python}: its version cannot be read")
        return
    needed = [Requirement(text) for text in requires("slime-rollout") or () if text.startswith("sglang>")]
    finding = check_version("sglang", found, needed[0], python) if needed else Finding(OK, f"sglang {found}")
    yield Finding(finding.level, f"{finding.text} (in {python})")


def check_device(device: str) -> Iterator[Finding]:
    """GPUs, or what their absence means."""
    if device == "cpu":
        yield Finding(NOTE, "no CUDA: trainers and engines are CPU processes, for small models")
        return
    if cuda := _output(sys.executable, TORCH_CUDA):
        yield Finding(OK, f"GPUs, and a torch for CUDA or ROCm {cuda}")
    else:
        yield Finding(MISSING, "there are GPUs, but this torch is built without CUDA; install one that is")


def check_space(directory: Path, shared: Path) -> Iterator[Finding]:
    """Free space for checkpoints and logs, and in shared memory for Ray."""
    free = shutil.disk_usage(directory).free
    low = "; checkpoints may not fit: give --save and --output-dir on a larger disk" if free < LITTLE_DISK else ""
    yield Finding(NOTE if low else OK, f"{free / 2**30:.1f} GiB free in {directory}{low}")
    if not shared.is_dir():
        yield Finding(MISSING, f"{shared} is not there; Ray needs it for shared memory")
        return
    free, needed = shutil.disk_usage(shared).free, ClusterConfig().ray_object_store_memory
    if free < needed:
        advice = f"Ray needs {needed / 2**20:.0f}; make it larger (docker run --shm-size=16g)"
        yield Finding(MISSING, f"{free / 2**20:.0f} MiB free in {shared}; {advice}")
    else:
        yield Finding(OK, f"{free / 2**30:.1f} GiB free in {shared}")


def check_machine(ray_address: str | None) -> Iterator[Finding]:
    """Cores, memory and the cluster that a run would join."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Finding(OK, f"{cores} CPU cores, {memory / 2**30:.0f} GiB memory")
    joined = f"a run joins the cluster at {ray_address}" if ray_address else "a run starts its own Ray (no RAY_ADDRESS)"
    yield Finding(OK, joined)
    if ray_address:
        yield from (Finding(NOTE, line) for line in [*cluster_notices(ray_address), BETWEEN_NODES])


def _output(python: str, program: str) -> str | None:
    """The output of a program; ``None`` if it fails."""
    try:
        done = run_python(python, program, None, SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
