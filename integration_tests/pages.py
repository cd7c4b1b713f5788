"""The commands on pages: which are run, which are planned, which are neither and why; and one bash that runs a page.

A fenced ``bash`` block has one of three kinds:

- ``run``: the line before the fence is ``<!-- run -->``, or ``<!-- run: 900 s -->`` for another limit than `SECONDS`. A
  ``text`` block that follows at once is what it prints: its lines, in that order; any number stands for any
  number, and ``…`` for anything.
- ``plan``: the line before the fence is ``<!-- plan -->``. The block holds commands of ``slime-launch``, variables and
  ``source scripts/models/NAME.sh``.
- not run: its first line is ``# not run: REASON``.

A ``python`` block whose first line is ``# NAME.py`` is that file for the commands that are planned; so is what a run
block writes with ``cat > NAME <<EOF``.

    python integration_tests/pages.py PAGE…     run the pages' commands in this tree, where scripts/quickstart has run
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = ("*.md", "docs/**/*.md", "examples/**/*.md", "packages/*/README.md", "packages/*/docs/*.md")
SECONDS = 300.0
GONE_SECONDS = 20.0
MARK = "SLIME_PAGE"
"""In the environment of everything that a page starts, so that what it leaves behind is found."""
RUN = re.compile(r"<!-- run(?:: (\d+) s)? -->")
PLAN = "<!-- plan -->"
NOT_RUN = re.compile(r"# not run: \S")
FENCE = re.compile(r"( *)(`{3,}|~{3,})\s*([\w+-]*)")
COMMAND = re.compile(
    r"\s*(?:[$>] +)?(?:[A-Z_]+=\S+ +)*"
    r"(?:slime-(?:launch|rollout|convert)|(?:bash |\./)?scripts/\w+|pip3?|uv|tox|python3? (?:-m \w|\S+\.py)|pytest"
    r"|ray (?:start|stop|status|job|up|list)|docker|podman|apptainer|sbatch|srun|salloc|kubectl|helm|sky|git"
    r"|source [\w.$\"]|hf download|huggingface-cli|trl|torchrun|tensorboard|curl|apt|apt-get)(?: |$)"
)
OUTPUT = "text"
HEREDOC = re.compile(r"cat >\s*(\S+)\s*<<\s*['\"]?(\w+)['\"]?\n(.*?)^\2$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\d+(?:[.,:]\d+)*(?:e[+-]?\d+)?")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        line: Number of its first line, from 1: the fence, or the first of an indented block.
        language: As the fence says it; ``indented`` for a block without a fence.
        before: The line before the fence.
        expected: What it prints, as the ``text`` block after it says; ``None`` without one.
    """

    page: str
    line: int
    language: str
    before: str
    text: str
    expected: str | None = None

    @property
    def kinds(self) -> list[str]:
        """What is said to happen with its commands; should be one."""
        said = {
            "run": RUN.fullmatch(self.before) is not None,
            "plan": self.before == PLAN,
            "not run": NOT_RUN.match(self.text) is not None,
        }
        return [kind for kind, is_so in said.items() if is_so]

    @property
    def seconds(self) -> float:
        """How long it may run."""
        found = RUN.fullmatch(self.before)
        return float(found[1]) if found and found[1] else SECONDS

    @property
    def where(self) -> str:
        """``page:line``."""
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Lines that look like a command for a shell."""
        return [line.strip() for line in self.text.splitlines() if COMMAND.match(line)]


def pages() -> dict[str, str]:
    """The text of every page by its path from the root."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for pattern in PATTERNS
        for path in sorted(ROOT.glob(pattern))
    }


def blocks(page: str, text: str) -> list[Block]:
    """The blocks of a page, fenced and indented, in order."""
    lines, found, at, last = text.splitlines(), list[Block](), 0, 0
    in_list = False
    while at < len(lines):
        line, before = lines[at], lines[at - 1].strip() if at else ""
        fence = FENCE.match(line)
        begin = at
        if fence:
            indent, marks, language = len(fence[1]), fence[2], fence[3]
            at += 1
            while at < len(lines) and not re.fullmatch(rf" *{marks[0]}{{{len(marks)},}} *", lines[at]):
                at += 1
            inner = "\n".join(part[min(indent, len(part) - len(part.lstrip())) :] for part in lines[begin + 1 : at])
            block = Block(page, begin + 1, language, before, inner)
            follows = found and language == OUTPUT and not any(part.strip() for part in lines[last:begin])
            if follows and found[-1].language == "bash":
                found[-1] = Block(**{**vars(found[-1]), "expected": inner})
            else:
                found.append(block)
            last = at + 1
        elif line.startswith("    ") and not before and not in_list:
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                at += 1
            found.append(Block(page, begin + 1, "indented", before, "\n".join(lines[begin:at])))
            continue
        elif line.strip():
            in_list = bool(re.match(r" *(?:[-*+]|\d+[.)]) ", line)) or (in_list and line.startswith("  "))
        at += 1
    return found


def kind_problems(page: str, text: str) -> Iterator[str]:
    """Blocks of which it does not say what happens with their commands, and commands where none is looked for."""
    for block in blocks(page, text):
        if block.language == "bash":
            if len(block.kinds) != 1:
                said = " and ".join(block.kinds) or "nothing"
                yield f"{block.where}: says {said} of what happens with it; integration_tests/pages.py has the kinds"
        elif block.commands:
            yield f"{block.where}: a command in a block that is not ```bash: {block.commands[0]}"
        elif block.language in ("sh", "shell", "console", "zsh"):
            yield f"{block.where}: write ```bash and not ```{block.language}"


def written_files(page: str, text: str) -> dict[str, str]:
    """Files that a page writes or shows, by the name that its commands have for them."""
    files: dict[str, str] = {}
    for block in blocks(page, text):
        if block.language == "bash":
            files |= {name: content for name, _, content in HEREDOC.findall(block.text)}
        elif found := re.match(r"# ([\w./-]+\.(?:py|yaml|toml|json))\n", block.text):
            files[found[1]] = block.text + "\n"
    return files


RECORDER = """
slime-launch() { printf '%s\\0' "$BLOCK" "$@" >>"$WORDS"; printf '\\n\\0' >>"$WORDS"; }
PATH=
"""
"""No program can be found; what a block says to ``slime-launch`` is written down."""


def planned_commands(page: str, text: str) -> list[tuple[Block, list[str]]]:
    """The words of each ``slime-launch`` command in a page's plan blocks, as bash expands them.

    Raises:
        AssertionError: A block does something else than to set variables and call ``slime-launch``.
    """
    chosen = [block for block in blocks(page, text) if block.kinds == ["plan"]]
    with tempfile.TemporaryDirectory() as directory:
        words = Path(directory, "words")
        words.touch()
        script = RECORDER + "".join(f"BLOCK={number}\n{block.text}\n" for number, block in enumerate(chosen))
        done = subprocess.run(
            ["/bin/bash", "--noprofile", "--norc", "-euc", script],
            cwd=ROOT,
            env={"WORDS": str(words)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, f"{page}: its plan blocks do more than call slime-launch:\n{done.stderr}"
        assert not done.stdout, f"{page}: its plan blocks print {done.stdout!r}"
        found = [part.split("\0") for part in words.read_text().split("\0\n\0") if part]
    return [(chosen[int(number)], argv) for number, *argv in found]


def missing_line(expected: str, output: str) -> str | None:
    """The first line of ``expected`` that does not come in its turn in ``output``; ``None`` if all do."""
    printed = iter(ESCAPE.sub("", output).replace("\r", "\n").splitlines())
    for line in expected.splitlines():
        if line.strip(" …") and not any(_pattern(line).fullmatch(" ".join(got.split())) for got in printed):
            return line
    return None


def _pattern(line: str) -> re.Pattern[str]:
    """What an expected line matches, with spaces made one."""
    parts = re.split(rf"({NUMBER.pattern}|…)", " ".join(line.split()))
    wild = {"…": ".*"}
    return re.compile("".join(wild.get(p, NUMBER.pattern if NUMBER.fullmatch(p) else re.escape(p)) for p in parts))


class PageError(AssertionError):
    """A command of a page failed, was late, printed something else or left something running."""


@dataclass
class PageRun:
    """What a page's commands did.

    Attributes:
        seconds: Of every block that was run, by its line.
        output: What it printed.
    """

    page: str
    seconds: dict[int, float] = field(default_factory=dict)
    output: dict[int, str] = field(default_factory=dict)

    @property
    def whole_seconds(self) -> float:
        """Of all blocks."""
        return sum(self.seconds.values())


def run_page(page: str, tree: Path, *, activate: bool = True, slack: float = 1.0) -> PageRun:
    """Run the run blocks of a page in one bash, from the root of a tree.

    Args:
        page: The page's path from the root.
        tree: A copy of the repository, in which everything is done.
        activate: Whether ``.venv`` is activated first.
        slack: Factor on the page's limits.

    Raises:
        PageError: The first thing that went wrong, with the block and what it printed.
    """
    text = (tree / page).read_text(encoding="utf-8")
    chosen = [block for block in blocks(page, text) if block.kinds == ["run"]]
    run = PageRun(page)
    with tempfile.TemporaryDirectory(prefix="slime-page-") as directory:
        work, mark = Path(directory), secrets.token_hex(8)
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_A_READERS}
        script = _script(work, chosen, activate=activate)
        process = subprocess.Popen(
            ["bash", "--noprofile", "--norc", str(script)],
            cwd=tree,
            env=environment | {MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            for number, block in enumerate(chosen):
                _follow(process, work, number, block, run, block.seconds * slack)
            process.wait(60)
        finally:
            left = _end_all(process, mark)
    if left:
        raise PageError(f"{page} left processes behind, which were ended: {'; '.join(left)}")
    return run


_NOT_A_READERS = ("PYTHONPATH", "SLIME_ENGINE_PYTHON", "VIRTUAL_ENV", "OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE")
"""Variables of the tests that a reader of the pages does not have."""


def _script(work: Path, chosen: Sequence[Block], *, activate: bool) -> Path:
    """A script that runs the blocks, each with its output in a file and a file that says it is done."""
    lines = ["set -e"] + (["source .venv/bin/activate"] if activate else [])
    for number, block in enumerate(chosen):
        (work / f"{number}.sh").write_text(block.text + "\n", encoding="utf-8")
        at = f"{work}/{number}"
        lines += [f"exec >{at}.out 2>&1", f"source {at}.sh", f"touch {at}.done"]
    path = work / "page.sh"
    path.write_text("\n".join([*lines, "exec >/dev/null 2>&1"]) + "\n")
    return path


def _follow(
    process: subprocess.Popen[bytes], work: Path, number: int, block: Block, run: PageRun, limit: float
) -> None:
    """Wait until a block is done; raises `PageError` if it fails, is late, or prints something else."""
    done, out, begun = work / f"{number}.done", work / f"{number}.out", time.monotonic()
    while not done.exists():
        code = process.poll()
        if code is not None and not done.exists():
            raise PageError(f"{block.where}: exit code {code} of\n{block.text}\nwhich printed\n{_tail(out)}")
        if time.monotonic() - begun > limit:
            raise PageError(f"{block.where}: not done after {limit:g} s:\n{block.text}\nprinted\n{_tail(out)}")
        time.sleep(0.05)
    run.seconds[block.line] = time.monotonic() - begun
    run.output[block.line] = out.read_text(encoding="utf-8", errors="replace")
    if block.expected is not None and (line := missing_line(block.expected, run.output[block.line])) is not None:
        raise PageError(f"{block.where}: the page shows {line!r}, which did not come in its turn in\n{_tail(out)}")


def _tail(path: Path, characters: int = 6000) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-characters:] if path.exists() else "nothing"


def _end_all(process: subprocess.Popen[bytes], mark: str) -> list[str]:
    """End what a page started; returns what was still there after the shell had ended and some seconds had passed."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        process.kill()
        process.wait()
    deadline = time.monotonic() + GONE_SECONDS
    while (left := list(_marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.2)
    names = []
    for one in left:
        with contextlib.suppress(psutil.Error):
            names.append(f"{one.pid} {' '.join(one.cmdline())[:120]}")
            one.kill()
    deadline = time.monotonic() + GONE_SECONDS  # a busy machine takes a while to end what was killed
    while list(_marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return names


def _marked(mark: str) -> Iterator[psutil.Process]:
    """Processes that a page started, whoever their parent is now."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def copy_tree(target: Path) -> Path:
    """The files that are, or would be, committed, in a directory of their own: a clean clone."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    ).stdout
    target.mkdir(parents=True)
    copied = subprocess.run(
        ["tar", "--create", "--null", "--files-from=-", "--ignore-failed-read"],
        cwd=ROOT,
        input=names,
        check=True,
        capture_output=True,
        timeout=120,
    ).stdout
    subprocess.run(["tar", "--extract"], cwd=target, input=copied, check=True, timeout=120)
    subprocess.run(["git", "init", "--quiet"], cwd=target, check=True, timeout=240)
    return target


def report(runs: Mapping[str, PageRun]) -> str:
    """Seconds of pages, a line each."""
    return "\n".join(f"{run.whole_seconds:7.1f} s  {page}" for page, run in runs.items())


def main(argv: Sequence[str]) -> int:
    """Run the commands of pages in this tree; returns the exit code."""
    for page in argv:
        try:
            run = run_page(page, ROOT)
        except PageError as error:
            print(error, file=sys.stderr)
            return 1
        for line, seconds in run.seconds.items():
            print(f"{page}:{line}: {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
