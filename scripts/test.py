"""Runs the tox environments, counts their tests and says what happened. Started by `scripts/test`.

    scripts/test                    every environment
    scripts/test core launch        only these
    scripts/test --full             the tests marked `full` as well
    scripts/test core -- -k kl      with options for pytest
    scripts/test --changed          only what reaches what changed since main, the nearest first
    scripts/test --changed HEAD~1   since another revision
    scripts/test --record           and write down which files run in child processes, for --changed

The last line is `N passed, N failed`, with `, N skipped` when tests were skipped; above it stand the tests that failed,
and, by reason, how many were left out.
Logs and JUnit files lie in outputs/test.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "outputs" / "test"
STAMP = ROOT / ".tox" / "built-from"
FULL_FACTOR = 6.0
LAST_WORDS_SECONDS = 15.0
LINE_CHARACTERS = 300
INSTALL_SECONDS = 600.0
LANES = 3
MARKS = ["-m", "not full", "--hypothesis-profile=few"]
FULL = ["--timeout=900"]
"""Tests without a limit of their own have time beside all the others, which are about thirty processes on two cores."""
NO_TESTS = 5  # pytest's exit code


@dataclass(frozen=True)
class Env:
    """A tox environment.

    Attributes:
        name: As in `[tool.tox]`.
        minutes: Longest time it may take, generous because machines are shared. The longest begin first.
        engine: Its tests need `.venv-engine`.
        full: Options for pytest under --full.
    """

    name: str
    minutes: float
    engine: bool = False
    full: tuple[str, ...] = ()


ENVS = (
    Env("lint", 20),
    Env("core", 20),
    Env("convert", 30),
    Env("megatron", 45),
    Env("launch", 45, engine=True),
    Env("rollout", 40, engine=True),  # late: its two processes use both cores when little else is left
    Env("integration", 75, engine=True, full=("--numprocesses=3",)),  # it has most of them by far
)


@dataclass(frozen=True)
class Result:
    """What came of one environment.

    Attributes:
        note: There when the counts do not tell the whole story.
        failures: A line for each test that failed: where it is, and what it said first.
        left_out: The reason of each test that was skipped.
    """

    name: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    note: str = ""
    failures: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


class Processes:
    """Everything that was started, each in a process group of its own, so that nothing is left behind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopping = False

    @contextmanager
    def start(self, command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
        """Start `command`; its process group is gone when the block ends."""
        with self._lock:
            if self._stopping:
                raise KeyboardInterrupt
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._running.add(process)
        try:
            yield process
        finally:
            self.stop(process)
            with self._lock:
                self._running.discard(process)

    def stop(self, process: subprocess.Popen[str]) -> None:
        """End a process group: politely, then not."""
        if process.poll() is None:
            _signal_group(process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_SECONDS)
        _signal_group(process, signal.SIGKILL)
        process.wait()

    def stop_all(self) -> None:
        """End everything, and let nothing new start."""
        with self._lock:
            self._stopping = True
            running = list(self._running)
        for process in running:
            _signal_group(process, signal.SIGTERM)


def _signal_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def run_env(env: Env, pytest_args: Sequence[str], *, recreate: bool, factor: float, processes: Processes) -> Result:
    """Run one environment to its end or its time limit."""
    report = LOGS / f"{env.name}.xml"
    report.unlink(missing_ok=True)
    command = ["tox", "run", "-e", env.name, *(["--recreate"] if recreate else []), "--", *pytest_args]
    code, seconds, note = run(env.name, command, env.minutes * 60 * factor, processes)
    return count(env.name, report, code, seconds, note)


def run(name: str, command: Sequence[str], limit: float, processes: Processes) -> tuple[int, float, str]:
    """Run a command, passing its output on line by line: its exit code, its seconds, and whether it came too late.

    Args:
        name: Of the log file, and in front of each line.
        command: What to run.
        limit: Seconds that it may take.
        processes: Ends it with all others.
    """
    late = threading.Event()
    started = time.monotonic()
    with processes.start(command) as process, (LOGS / f"{name}.log").open("w", encoding="utf-8") as log:

        def give_up() -> None:
            late.set()
            processes.stop(process)

        timer = threading.Timer(limit, give_up)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                print(f"{name:>11} | {line.rstrip()}", flush=True)
            code = process.wait()
        finally:
            timer.cancel()
    note = f"stopped after {limit / 60:.0f} minutes" if late.is_set() else ""
    return code, time.monotonic() - started, note


def count(name: str, report: Path, code: int, seconds: float, note: str = "") -> Result:
    """Read a JUnit file. An environment without one is a single check that its exit code decides.

    Args:
        name: The environment.
        report: Its JUnit file, which need not exist.
        code: Exit code of tox.
        seconds: Wall time.
        note: Why it ended early, if it did.
    """
    if not report.exists():
        is_check = name == "lint"
        passed = int(is_check and code == 0)
        return Result(name, passed, 1 - passed, 0, seconds, note or ("" if is_check else "no test ran"))
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, failures, errors, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    passed = max(total - failed - skipped, 0)
    if total == 0:
        failed, note = 1, note or "no test ran"
    elif code != 0 and failed == 0:
        failed, note = 1, note or f"exit code {code}"
    return Result(name, passed, failed, skipped, seconds, note, tuple(failed_tests(report)), tuple(reasons(report)))


def reasons(report: Path) -> Iterator[str]:
    """Why each skipped test of a JUnit file was skipped."""
    for found in ElementTree.parse(report).getroot().iter("skipped"):
        yield (found.get("message") or "no reason given").partition("\n")[0][:LINE_CHARACTERS]


def left_out(results: Sequence[Result]) -> Iterator[str]:
    """A line for each reason why tests were skipped, with how many; reasons say how to get what was missing."""
    counts = Counter((result.name, reason) for result in results for reason in result.left_out)
    for (name, reason), number in counts.items():
        yield f"{name}: {number} {'test' if number == 1 else 'tests'} left out: {reason}"


def failed_tests(report: Path) -> Iterator[str]:
    """A line for each failure and error in a JUnit file."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        for kind in ("failure", "error"):
            for found in case.findall(kind):
                said = (found.get("message") or "").partition("\n")[0]
                yield f"{case.get('classname')}::{case.get('name')}: {kind}: {said[:LINE_CHARACTERS]}"


def table(results: Sequence[Result]) -> str:
    """The results as aligned text."""
    rows = [("environment", "passed", "failed", "skipped", "seconds", "")]
    rows += [(r.name, str(r.passed), str(r.failed), str(r.skipped), f"{r.seconds:.0f}", r.note) for r in results]
    return "\n".join(f"{a:<12} {b:>7} {c:>7} {d:>8} {e:>8}  {f}".rstrip() for a, b, c, d, e, f in rows)


def last_line(results: Sequence[Result]) -> str:
    """The line for programs."""
    passed, failed, skipped = (sum(getattr(r, key) for r in results) for key in ("passed", "failed", "skipped"))
    return f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else "")


def build_engine(processes: Processes) -> int:
    """Make `.venv-engine`; returns uv's exit code."""
    environments = ROOT / "scripts" / "environments.sh"
    with processes.start(["bash", "-c", f'source "{environments}" && sync_engine']) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"     engine | {line.rstrip()}", flush=True)
        return process.wait()


def settings_digest() -> str:
    """Changes when uv.lock or a pyproject.toml does; tox itself does not see what an editable package declares."""
    files = [ROOT / "uv.lock", ROOT / "pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml"))]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def stale(env: Env) -> bool:
    """Whether an environment was built from other settings than today's."""
    stamp = STAMP / env.name
    return not stamp.exists() or stamp.read_text() != settings_digest()


def stamp(env: Env) -> None:
    """Note that an environment was built from today's settings."""
    if (ROOT / ".tox" / env.name / "bin").exists():
        STAMP.mkdir(parents=True, exist_ok=True)
        (STAMP / env.name).write_text(settings_digest())


@dataclass(frozen=True)
class Request:
    """What was asked for.

    Attributes:
        envs: The environments to run.
        pytest_args: Options for pytest.
        full: Whether tests marked `full` run as well.
        changed: Revision with which to compare; all tests run without one.
        record: Whether to write down which files run in child processes.
    """

    envs: list[Env]
    pytest_args: list[str]
    full: bool = False
    changed: str | None = None
    record: bool = False

    @property
    def factor(self) -> float:
        """On time limits."""
        return FULL_FACTOR if self.full else 1.0


def parse(argv: Sequence[str]) -> Request:
    """Read the command line."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="scripts/test", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environments", nargs="*", metavar="ENV", help=", ".join(env.name for env in ENVS))
    parser.add_argument("--full", action="store_true", help="run the tests marked `full`, too")
    parser.add_argument(
        "--changed", nargs="?", const="main", metavar="REV", help="run what a change reaches, nearest first"
    )
    parser.add_argument("--record", action="store_true", help="record what runs in child processes, for --changed")
    args = parser.parse_args(words[:at])
    if args.changed and args.environments:
        parser.error("--changed chooses the environments itself")
    unknown = sorted(set(args.environments) - {env.name for env in ENVS})
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(env.name for env in ENVS)}")
    chosen = [env for env in ENVS if not args.environments or env.name in args.environments]
    marks = FULL if args.full else MARKS
    return Request(chosen, [*marks, *words[at + 1 :]], args.full, args.changed, args.record)


def run_all(request: Request, processes: Processes) -> list[Result]:
    """Run them in lanes, the longest first. On two cores the third lane has the time in which the others wait."""
    queue = sorted(request.envs, key=lambda env: -env.minutes)
    with concurrent.futures.ThreadPoolExecutor(1) as builder, concurrent.futures.ThreadPoolExecutor(LANES) as lanes:
        engine = builder.submit(build_engine, processes) if any(env.engine for env in queue) else None

        def one(env: Env) -> Result:
            if env.engine and engine is not None and engine.result() != 0:
                return Result(env.name, 0, 1, 0, 0.0, "could not build .venv-engine")
            args = [*request.pytest_args, *(env.full if request.full else ())]
            result = run_env(env, args, recreate=stale(env), factor=request.factor, processes=processes)
            stamp(env)
            return result

        return list(lanes.map(one, queue))


def run_changed(request: Request, processes: Processes) -> list[Result]:
    """Run what reaches the change, one step after the other, and say how each ended as soon as it has."""
    from changed import plan  # needs grimp, which nothing else here does

    steps, lines = plan(str(request.changed), request.pytest_args)
    print("\n".join(lines), flush=True)
    envs, results, started = {env.name: env for env in ENVS}, [], time.monotonic()
    ready: set[str] = set()
    for step in steps:
        env = envs[step.environment]
        if env.name not in ready:
            ready.add(env.name)
            prepare(env, processes)
        report = LOGS / f"{step.name}.xml"
        report.unlink(missing_ok=True)
        junit = [f"--junitxml={report}"] if step.tests else []
        command = ["tox", "exec", "-q", "-e", env.name, "--", *step.command, *junit]
        code, seconds, note = run(step.name, command, env.minutes * 60 * request.factor, processes)
        if step.tests and code == NO_TESTS:
            results.append(Result(step.name, 0, 0, 0, seconds, "all of them are left out by -m or -k"))
        elif step.tests:
            results.append(count(step.name, report, code, seconds, note))
        else:
            results.append(Result(step.name, int(code == 0), int(code != 0), 0, seconds, note))
        after = time.monotonic() - started
        print(f"{step.name}: {last_line(results[-1:])}, {after:.0f} s after the start", flush=True)
    return results


def run_recorded(request: Request, processes: Processes) -> list[Result]:
    """Run, and write down for `--changed` which files run in the child processes of each test file."""
    import recording  # needs coverage

    for env in request.envs:
        prepare(env, processes)
    environments = [ROOT / ".tox" / env.name for env in request.envs] + [ROOT / ".venv-engine"]
    for python in (environment / "bin" / "python" for environment in environments):
        if python.exists():
            install = ["uv", "pip", "install", "--quiet", "--python", str(python), recording.COVERAGE]
            run("coverage", install, INSTALL_SECONDS, processes)
    shutil.rmtree(folder := LOGS / "coverage", ignore_errors=True)
    folder.mkdir()
    os.environ |= recording.settings(folder, ROOT)
    results = run_all(request, processes)
    recording.save(recording.collect(folder, ROOT), LOGS / "children.json")
    return results


def prepare(env: Env, processes: Processes) -> None:
    """Build an environment that is missing or was built from other settings."""
    if env.engine:
        build_engine(processes)
    if stale(env):
        run(env.name, ["tox", "run", "--notest", "--recreate", "-e", env.name], env.minutes * 60, processes)
        stamp(env)


def main(argv: Sequence[str]) -> int:
    """Run what was asked for; returns the exit code."""
    request = parse(argv)
    LOGS.mkdir(parents=True, exist_ok=True)
    processes = Processes()

    def stop(number: int, _frame: object) -> None:
        processes.stop_all()
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    if request.changed:
        results = run_changed(request, processes)
    elif request.record:
        results = run_recorded(request, processes)
    else:
        results = run_all(request, processes)
    print("\n" + table(results), flush=True)
    for result in results:
        for line in result.failures:
            print(f"{result.name}: {line}", flush=True)
    for line in left_out(results):
        print(line, flush=True)
    print(last_line(results), flush=True)
    return int(any(r.failed for r in results) or not any(r.passed for r in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
