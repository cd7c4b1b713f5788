"""Mutants: changes of lines that compute. Some test must notice each.

Cosmic Ray finds the places and writes the changed code; coverage.py knows which tests run a line, and only those are
asked. The checkout stays as it is: tests import a copy of the package.

A change that nothing can notice, such as `>=` for `>` where both sides are never equal, says nothing about the tests:
read the survivors.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WORK = ROOT / "outputs" / "mutants"
COMPUTING = {
    "core": ("ops/*.py", "rewards.py", "schedule.py", "balance.py", "micro_batches.py", "metrics.py", "step_plan.py"),
    "convert": ("quantize/*.py", "compare/*.py", "formats/*.py", "mapping.py", "conversions/lora.py"),
    "rollout": (
        "rewards/rules.py",
        "data/chat_mask.py",
        "filters.py",
        "evaluate.py",
        "generate/completion.py",
        "prepare.py",
    ),
    "megatron": ("model/packing.py", "step/losses.py", "step/pairs.py", "settings/trained.py", "weights/sums.py"),
    "launch": ("batch_spec.py", "step_metrics.py", "step_sums.py", "plan/cost.py", "plan/engines.py"),
}
OPERATORS = (
    *("ReplaceComparisonOperator_" + pair for pair in ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Eq_NotEq", "NotEq_Eq")),
    *("ReplaceComparisonOperator_" + pair for pair in ("Is_IsNot", "IsNot_Is", "Lt_Gt", "Gt_Lt")),
    *("ReplaceBinaryOperator_" + pair for pair in ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul")),
    *("ReplaceUnaryOperator_USub_UAdd", "ReplaceUnaryOperator_Delete_Not", "AddNot", "NumberReplacer"),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop"),
)
REDUCTIONS = {"amax": "amin", "max": "min", "sum": "mean", "any": "all", "maximum": "minimum", "argmax": "argmin"}
REDUCTIONS |= {new: old for old, new in REDUCTIONS.items()}
CHEAP, FEW = "not real and not full", ("--hypothesis-profile=few",)
SECONDS, SUITE_SECONDS = 300, 3600
FAILED_FILE, MOST_FAILED = WORK / "failed", 10  # such as tests of signals, which coverage.py disturbs


@dataclass(frozen=True)
class Mutant:
    """One change of one file: of the ``line``, by the ``occurrence``-th place of an operator."""

    file: Path
    operator: str
    occurrence: int
    line: int


@dataclass
class Package:
    """A package and a copy of its source that mutants are written into."""

    name: str
    folder: Path
    contexts: dict[Path, dict[int, list[str]]] = field(default_factory=dict)

    @property
    def import_name(self) -> str:
        """The name it is imported by."""
        return f"slime_{self.name}"

    @property
    def source(self) -> Path:
        """The folder that holds its module."""
        return ROOT / "packages" / f"slime-{self.name}" / "src"

    def files(self) -> list[Path]:
        """Of what computes, relative to the source folder."""
        own = self.source / self.import_name
        found = {path for pattern in COMPUTING[self.name] for path in own.glob(pattern)}
        return sorted(path.relative_to(self.source) for path in found)

    def run(self, *command: str, seconds: float) -> subprocess.CompletedProcess[str]:
        """A command of the package's environment, which imports the copy. Raises TimeoutExpired."""
        python = ROOT / ".tox" / self.name / "bin" / "python"
        variables = {"PYTHONPATH": f"{self.folder}:{ROOT / 'scripts'}", "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [python, *command],
            cwd=ROOT,
            env=_environment() | variables,
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    def prepare(self) -> None:
        """Make the environment and the copy, and find out which tests run which lines."""
        subprocess.run(["tox", "run", "-q", "-e", self.name, "--notest"], cwd=ROOT, check=True)
        python = ROOT / ".tox" / self.name / "bin" / "python"
        subprocess.run(["uv", "pip", "install", "-q", "--python", python, "coverage>=7.10,<8"], check=True)
        shutil.copytree(self.source, self.folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        data, settings = self.folder / "coverage", self.folder / "coverage.ini"
        settings.write_text("[run]\n", encoding="utf-8")  # not the repository's, which are for many processes
        tests = f"packages/slime-{self.name}/tests"
        FAILED_FILE.unlink(missing_ok=True)
        done = self.run(
            *("-m", "coverage", "run", f"--rcfile={settings}", f"--data-file={data}", f"--source={self.folder}"),
            *("-m", "pytest", "-p", "mutants", "-p", "no:cacheprovider", "-q", "-m", CHEAP, *FEW, tests),
            seconds=SUITE_SECONDS,
        )
        failed = FAILED_FILE.read_text(encoding="utf-8").splitlines() if FAILED_FILE.exists() else []
        if done.returncode not in (0, 1) or len(failed) > MOST_FAILED:
            output = done.stdout[-2000:] + done.stderr[-500:]
            sys.exit(f"the tests of slime-{self.name} fail without a mutant:\n{output}")
        for test in failed:
            print(f"left out, as it fails without a mutant: {test}")
        from coverage import CoverageData

        recorded = CoverageData(str(data))
        recorded.read()
        for file in self.files():
            found = recorded.contexts_by_lineno(str(self.folder / file))
            self.contexts[file] = {
                line: [one for one in tests if one and one not in failed] for line, tests in found.items()
            }

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The tests that run its line; for a line that runs at import, those that run anything of its file. Those of
        the file that is named like it come first.
        """
        lines = self.contexts[mutant.file]
        ran = [lines[line] for line in _statement(self.source / mutant.file, mutant.line) if line in lines]
        tests = {test for of_line in ran for test in of_line}
        if ran and not tests:
            tests = {test for others in lines.values() for test in others}
        return sorted(tests, key=lambda test: (mutant.file.stem not in test.partition("::")[0], test))


def _statement(path: Path, line: int) -> range:
    """The lines of the statement that a line is of, without those of a body."""
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.stmt):  # an inner one is met later
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno or line
            if first <= line <= max(end, node.lineno):
                found = range(first, max(end, node.lineno) + 1)
    return found


def mutants_of(package: Package) -> Iterator[Mutant]:
    """Every mutant of what computes in a package."""
    from cosmic_ray.ast import ast_nodes, get_ast

    for file in package.files():
        text = (package.source / file).read_text(encoding="utf-8")
        nodes, ignored = list(ast_nodes(get_ast(text))), _spared(text)
        for operator in (*OPERATORS, SwapReduction.__name__):
            positions = (where for node in nodes for where in _operator(operator).mutation_positions(node))
            for occurrence, ((line, column), _) in enumerate(positions):
                if not any(start <= (line, column) < end for start, end in ignored):
                    yield Mutant(file, operator, occurrence, line)


def drawn(packages: Sequence[Package], chance: random.Random) -> Iterator[tuple[Package, Mutant]]:
    """All mutants in a random order in which each operator is equally likely next: half of all are numbers."""
    by_operator: dict[str, list[tuple[Package, Mutant]]] = {}
    for package in packages:
        for mutant in mutants_of(package):
            by_operator.setdefault(mutant.operator, []).append((package, mutant))
    for found in by_operator.values():
        chance.shuffle(found)
    while by_operator:
        operator = chance.choice(list(by_operator))
        yield by_operator[operator].pop()
        if not by_operator[operator]:
            del by_operator[operator]


def _spared(text: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations and decorators begin and end: they compute nothing."""
    nodes = (
        part
        for node in ast.walk(ast.parse(text))
        for part in (
            getattr(node, "annotation", None),
            getattr(node, "returns", None),
            *getattr(node, "decorator_list", ()),
        )
        if isinstance(part, ast.expr)
    )
    return [((one.lineno, one.col_offset), (one.end_lineno or 0, one.end_col_offset or 0)) for one in nodes]


def _operator(name: str) -> Any:
    from cosmic_ray.plugins import get_operator

    return SwapReduction() if name == SwapReduction.__name__ else get_operator(f"core/{name}")()


class SwapReduction:
    """A reduction is another one: an operator as Cosmic Ray's are."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Names of reductions that are called."""
        following = node.get_next_leaf() if node.type == "name" and node.value in REDUCTIONS else None
        if following is not None and following.value == "(" and node.parent.type != "funcdef":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """The other name."""
        node.value = REDUCTIONS[node.value]
        return node


def verdict(package: Package, mutant: Mutant) -> tuple[str, str]:
    """Killed, survived, untested or invalid; and the change as a diff."""
    from cosmic_ray.mutating import mutate_code

    path = package.folder / mutant.file
    text = path.read_text(encoding="utf-8")
    changed = mutate_code(text, _operator(mutant.operator), mutant.occurrence)
    try:
        compile(changed or "", str(path), "exec")
    except SyntaxError:
        return "invalid", ""
    lines = difflib.unified_diff(text.splitlines(), (changed or "").splitlines(), lineterm="", n=0)
    diff = "\n".join(line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---"))
    if changed is None or changed == text or not (tests := package.tests_of(mutant)):
        return ("untested" if changed not in (None, text) else "invalid"), diff
    chosen = package.folder / "tests.txt"
    chosen.write_text("\n".join(tests), encoding="utf-8")
    _write(path, changed)
    try:
        done = package.run(
            *("-m", "pytest", "-p", "no:cacheprovider", "-q", "-x", "--no-header", *FEW, f"@{chosen}"), seconds=SECONDS
        )
    except subprocess.TimeoutExpired:
        return "killed", diff
    finally:
        _write(path, text)
    return ("survived" if done.returncode == 0 else "killed"), diff


def _write(path: Path, text: str) -> None:
    """Write a module, and drop its byte-code: a change within a second may keep the time and the size."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def pytest_runtest_protocol(item: Any, nextitem: Any) -> None:
    """As a plugin of pytest: what runs now is that test's, for coverage.py."""
    from coverage import Coverage

    if (current := Coverage.current()) is not None:
        current.switch_context(item.nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """As that plugin: write down the test that fails."""
    if report.failed:
        with FAILED_FILE.open("a", encoding="utf-8") as file:
            file.write(report.nodeid + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the survivors as they are found, then a table; returns 1 if there are any."""
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("number", nargs="?", type=int, default=100, metavar="N", help="mutants to try [default 100]")
    parser.add_argument("package", nargs="?", choices=COMPUTING, help="of this package alone")
    parser.add_argument("--seed", type=int, default=0, help="which mutants are drawn [default 0]")
    args = parser.parse_args(arguments)
    WORK.mkdir(parents=True, exist_ok=True)
    counts: dict[Path, Counter[str]] = {}
    with tempfile.TemporaryDirectory(dir=WORK) as folder:
        packages = [Package(name, Path(folder) / name) for name in ([args.package] if args.package else COMPUTING)]
        for package, mutant in drawn(packages, random.Random(args.seed)):
            if sum(map(Counter.total, counts.values())) == args.number:
                break
            if not package.contexts:
                print(f"slime-{package.name}: running its tests, to see which lines they run", flush=True)
                package.prepare()
            result, diff = verdict(package, mutant)
            if result == "invalid":
                continue
            counts.setdefault(mutant.file, Counter())[result] += 1
            if result != "killed":
                print(f"{result}: {mutant.file}:{mutant.line}  {mutant.operator}\n{diff}", flush=True)
    print(f"\n{'file':<44} killed survived untested")
    for file, found in [*sorted(counts.items()), (Path("all"), sum(counts.values(), Counter()))]:
        print(f"{file!s:<44} {found['killed']:6} {found['survived']:8} {found['untested']:8}")
    total = sum(counts.values(), Counter())
    print(f"{total['killed'] / max(1, total['killed'] + total['survived']):.0%} of those that tests run are killed")
    return int(total["survived"] > 0)


if __name__ == "__main__":
    sys.exit(main())
