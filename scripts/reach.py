"""Which test files reach a change: by the import graph, by the programs they start, and by what a recording saw.

grimp knows what our packages import. Tests are in no package: their own imports are read here, and, of every file, the
strings that name a program of ours, since ranks, actors and engines are processes that no test imports. A conftest.py
counts for a test file by the fixtures that it names.

Every reason is kept: a file reaches another directly, or through the one that it was found by.
"""

from __future__ import annotations

import ast
import fnmatch
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grimp

STARTERS = ("mark.real", "subprocess", "multiprocessing")
CODE_FOLDERS = ("scripts", "benchmarks")
RECORDED, FAR = 4, 9  # how far away a file counts that only a recording knows, or a rule
Edges = dict[str, set[str]]


@dataclass(frozen=True)
class Reached:
    """A test file and how far it is from the change.

    Attributes:
        steps: Files between them, and one.
        started: Whether the way goes through a program that is started.
        real: Whether it has tests that start real servers.
    """

    test: str
    steps: int
    started: bool
    real: bool = False

    @property
    def environment(self) -> str:
        """The environment that runs it."""
        parts = self.test.split("/")
        return parts[1].removeprefix("slime-") if parts[0] == "packages" else "integration"


IMPORT = re.compile(r"^ *(?:from +([\w.]+) +import +(\([^)]*\)|.*)|import +([\w., ]+))", re.MULTILINE)
WORD = re.compile(r"""["']([^"'\s{}]+)["']""")
NAME = re.compile(r"[A-Za-z_]\w*")


def imported(text: str) -> set[str]:
    """Every module that code imports, anywhere in it and in programs that it holds as text; `a` and `a.b` of
    `from a import b`.
    """
    found: set[str] = set()
    for module, names, plain in IMPORT.findall(text):
        found.update(name.split()[0] for name in plain.split(",") if name.strip())
        if module:
            found.update((module, *(f"{module}.{name}" for name in NAME.findall(names))))
    return found


class Fixtures:
    """A conftest.py: what each of its definitions uses."""

    def __init__(self, text: str) -> None:
        self.definitions: dict[str, str] = {}
        self.automatic: set[str] = set()
        self._imports: dict[str, set[str]] = {}
        for node in ast.parse(text).body:
            code = "\n".join(text.splitlines()[_first_line(node) - 1 : node.end_lineno])
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    name = (alias.asname or alias.name).partition(".")[0]
                    self._imports.setdefault(name, set()).update(imported(code) & _modules(node, alias))
            for name in _names(node):
                self.definitions[name] = code
                if name.startswith("pytest_") or "autouse=True" in code.partition("def ")[0]:
                    self.automatic.add(name)

    def used_by(self, names: Iterable[str]) -> tuple[set[str], str]:
        """Modules and the code that definitions use, and those of whatever they use."""
        modules, code = set[str](), ""
        todo, seen = list(names), set[str]()
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                modules |= self._imports.get(name, set())
                code += self.definitions.get(name, "") + "\n"
                todo += NAME.findall(self.definitions.get(name, ""))
        return modules | imported(code), code


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)])


def _modules(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> set[str]:
    return {alias.name} if isinstance(node, ast.Import) else {node.module or "", f"{node.module}.{alias.name}"}


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


@dataclass
class Graph:
    """Which file of the repository uses which.

    Attributes:
        root: The checkout.
        imports: File → files that it imports.
        starts: File → programs and data that it names.
        recorded: Test file → files that ran in its child processes when that was recorded.
    """

    root: Path
    recorded: Mapping[str, list[str]] = field(default_factory=dict)
    imports: Edges = field(default_factory=dict)
    starts: Edges = field(default_factory=dict)

    def __post_init__(self) -> None:
        listed = git(self.root, "ls-files", "--cached", "--others", "--exclude-standard")
        self.files = [path for path in listed if (self.root / path).is_file()]
        self.tests = [path for path in self.files if Path(path).name.startswith("test_") and path.endswith(".py")]
        self._known = set(self.files)
        self._modules = dict(self._named_modules())
        self._programs = dict(self._console_scripts())
        self._by_name: dict[str, list[str]] = {}
        for path in set(self.files) - set(self.tests):
            self._by_name.setdefault(Path(path).name, []).append(path)
        self._texts: dict[str, str] = {}
        self._fixtures: dict[str, Fixtures] = {}
        self._read_packages()
        for path in self.files:
            if path.endswith(".py") and Path(path).name != "conftest.py":
                self._read(path)
        for test in self.tests:
            self._read_fixtures(test)

    def reached(self, changed: set[str]) -> list[Reached]:
        """The test files that reach one of these, the nearest first."""
        names = {Path(path).stem for path in changed}
        found = [reached for test in self.tests if (reached := self._reach(test, changed)) is not None]

        def order(reached: Reached) -> tuple[bool, bool, int, bool, str]:
            stem = Path(reached.test).stem.removeprefix("test_")
            alike = any(stem.startswith(name) or name.startswith(stem) for name in names)
            own = any(package(reached.test) == package(path) for path in changed)
            return (not own, not alike, reached.steps, reached.started, reached.test)

        return sorted(found, key=order)

    def _reach(self, test: str, changed: set[str]) -> Reached | None:
        text = self._text(test)
        starts = any(path.endswith(".py") for path in self.starts[test]) or any(word in text for word in STARTERS)
        queue, seen = deque([(test, 0, False)]), {test}
        while queue:
            path, steps, started = queue.popleft()
            if path in changed:
                return Reached(test, steps, started, self.is_real(test))
            near = [(other, started) for other in self.imports.get(path, ())]
            near += [(other, True) for other in self.starts.get(path, ()) if starts]
            for other, by_start in sorted(near):
                if other not in seen:
                    seen.add(other)
                    queue.append((other, steps + 1, by_start))
        is_recorded = bool(changed & set(self.recorded.get(test, ())))
        return Reached(test, RECORDED, True, self.is_real(test)) if is_recorded else None

    def is_real(self, test: str) -> bool:
        """Whether a test file has tests that start real servers."""
        return "mark.real" in self._text(test)

    def _named_modules(self) -> Iterator[tuple[str, str]]:
        """Modules of the packages, helpers of their tests, and what is on a path of a process: the engine's shims."""
        tops = [path.removesuffix("sitecustomize.py") for path in self.files if path.endswith("/sitecustomize.py")]
        for path in self.files:
            is_ours = "/src/" in path or "/tests/support/" in path
            beginnings = [*tops, *("/".join(path.split("/")[:3]) + "/" for _ in range(is_ours))]
            for top in beginnings:
                if path.startswith(top) and path.endswith(".py"):
                    yield path[len(top) :].removesuffix(".py").removesuffix("/__init__").replace("/", "."), path
                    break

    def _console_scripts(self) -> Iterator[tuple[str, str]]:
        for path in self.root.glob("packages/*/pyproject.toml"):
            for name, entry in tomllib.loads(path.read_text(encoding="utf-8"))["project"].get("scripts", {}).items():
                yield name, self._modules[entry.partition(":")[0]]

    def _read_packages(self) -> None:
        sources = sorted(str(path) for path in self.root.glob("packages/*/src"))
        packages = sorted({name.partition(".")[0] for name in self._modules if name.startswith("slime_")})
        sys.path[:0] = sources
        try:
            graph = grimp.build_graph(*(p for p in packages if p != "slime_cpu_shims"), cache_dir=None)
        finally:
            del sys.path[: len(sources)]
        for module in graph.modules & set(self._modules):
            direct = graph.find_modules_directly_imported_by(module) & set(self._modules)
            self.imports[self._modules[module]] = {self._modules[other] for other in direct}

    def _read(self, path: str) -> None:
        text = self._text(path)
        if path not in self.imports:
            self.imports[path] = set(self._found(path, imported(text)))
        self.starts[path] = set(self._named(path, WORD.findall(text))) - {path}

    def _read_fixtures(self, test: str) -> None:
        """What a test file uses of the conftest.py files of its folder and of those above."""
        wanted = set(NAME.findall(self._text(test)))
        for folder in Path(test).parents:
            path = str(folder / "conftest.py")
            if path in self._known:
                fixtures = self._fixtures.setdefault(path, Fixtures(self._text(path)))
                modules, code = fixtures.used_by({*(wanted & set(fixtures.definitions)), *fixtures.automatic})
                self.imports[test] |= {*self._found(path, modules), path}
                self.starts[test] |= set(self._named(path, WORD.findall(code)))
                wanted |= set(NAME.findall(code))

    def _text(self, path: str) -> str:
        if path not in self._texts:
            self._texts[path] = (self.root / path).read_text(encoding="utf-8")
        return self._texts[path]

    def _found(self, path: str, modules: Iterable[str]) -> Iterator[str]:
        """Files of imported modules: ours, those of its folder and of those above, scripts and benchmarks."""
        folders = [str(folder) for folder in Path(path).parents if str(folder) != "."] + list(CODE_FOLDERS)
        for module in modules:
            if module in self._modules:
                yield self._modules[module]
            else:
                beside = (f"{folder}/{module.partition('.')[0]}.py" for folder in folders)
                yield from (other for other in beside if other in self._known)

    def _named(self, path: str, strings: Iterable[str]) -> Iterator[str]:
        """Files that strings name: a console script, a module, a path, the shims' folder, a name that one file has."""
        for text in strings:
            module = text.partition(":")[0]
            beside = os.path.normpath(f"{Path(path).parent}/{text}")
            if text in self._programs:
                yield self._programs[text]
            elif "." in module and module in self._modules:
                yield self._modules[module]
            elif text in self._known or beside in self._known:
                yield text if text in self._known else beside
            elif "." in text and len(self._by_name.get(text, ())) == 1:
                yield self._by_name[text][0]
            elif text.isidentifier() and (self.root / beside).is_dir() and "/src/" in beside:
                yield from (other for other in self.files if other.startswith(f"{beside}/"))


def package(path: str) -> str:
    """The folder of a package, or the first folder of any other path."""
    parts = path.split("/")
    return parts[1] if parts[0] == "packages" else parts[0]


def git(root: Path, *arguments: str) -> list[str]:
    """The lines of a git command's output."""
    command = ["git", "-C", str(root), "-c", "core.quotePath=off", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def changed_files(root: Path, revision: str) -> list[str]:
    """What differs from where this branch left ``revision``: committed, staged, unstaged and untracked."""
    base = git(root, "merge-base", revision, "HEAD")[0]
    differing = git(root, "diff", "--name-only", "--no-renames", base)
    return sorted({*differing, *git(root, "ls-files", "--others", "--exclude-standard")})


@dataclass(frozen=True)
class Choice:
    """What to run for a change.

    Attributes:
        reached: Test files, the nearest first.
        said: A line for each changed file that the graph does not know.
    """

    reached: list[Reached]
    said: list[str]


def choose(graph: Graph, changed: Iterable[str], rules: Iterable[Mapping[str, Any]]) -> Choice:
    """The test files for changed files: by the graph and the rules that fit; where both know none, their packages'.

    Args:
        graph: Of the checkout.
        changed: Paths.
        rules: Rows of `reach.toml`.
    """
    said, others, rows = [], set[str](), list(rules)
    for path in sorted(changed):
        patterns = [one for row in rows if fnmatch.fnmatch(path, row["files"]) for one in row["tests"]]
        found = {test for test in graph.tests if any(fnmatch.fnmatch(test, one) for one in patterns)}
        if not found and not graph.reached({path}):
            found = {test for test in graph.tests if path.startswith("packages/") and package(test) == package(path)}
            of_package = f"{len(found)} test files of its package" if found else "no test of its own"
            said.append(f"{path}: nothing is known to read it: {of_package}")
        others |= found
    reached = graph.reached(set(changed))
    others -= {one.test for one in reached}
    return Choice([*reached, *(Reached(test, FAR, False, graph.is_real(test)) for test in sorted(others))], said)


def load_recording(path: Path) -> dict[str, list[str]]:
    """The recording of child processes, empty where none was made."""
    found: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found
