"""The public names of each package: those of a release are kept by the next one, under a former name if need be.

    python scripts/public_names.py                    write the record of each package
    python scripts/public_names.py slime-core         only this one's
    python scripts/public_names.py --tree DIRECTORY   as another checkout has them

A name is public if a module lists it in `__all__`, if a module that has a page (`PUBLIC` in docs/conf.py) defines it
without an underscore, or if code on a page or in an example imports it. A package's
record is `tests/data/public_names.txt`; `scripts/release` commits it with a release, and
`integration_tests/test_public_names.py` compares it with what is there.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path("tests", "data", "public_names.txt")
PAGES = ("*.md", "docs/**/*.md", "examples/**/*.md", "examples/**/*.py", "packages/*/README.md", "packages/*/docs/*.md")
IMPORT = re.compile(r"^\s*from (slime_\w+)((?:\.\w+)*) import (\([^)]*\)|[^\n#;(]+)", re.MULTILINE)

Names = dict[str, set[str]]
"""Names by the module that has them."""


def main(argv: Sequence[str]) -> int:
    """Write the records; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help="directories in packages/; all, if none is given")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to read")
    args = parser.parse_args(argv)
    for name in args.packages or sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")):
        path = write(args.tree, name, ROOT)
        print(f"{path.relative_to(ROOT)}: {sum(map(len, read(path).values()))} names")
    return 0


def write(tree: Path, package: str, root: Path) -> Path:
    """Write the record of a package.

    Args:
        tree: The checkout to read.
        package: Directory in `packages/`.
        root: The checkout to write in.
    """
    project = tomllib.loads((tree / "packages" / package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    head = f"# Public names of {project['name']} {project['version']}, by module. Written by scripts/public_names.py."
    rows = [
        f"{module}\n{textwrap.fill(' '.join(sorted(names)), 120, initial_indent='    ', subsequent_indent='    ')}"
        for module, names in sorted(public_names(tree, package).items())
    ]
    path = root / "packages" / package / RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([head, *rows]) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> Names:
    """The names of a record."""
    names: Names = {}
    module = ""
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        if line.startswith(" "):
            names[module] |= set(line.split())
        else:
            module = line
            names[module] = set()
    return names


def public_names(tree: Path, package: str) -> Names:
    """The public names of a package, as its sources have them."""
    source = next((tree / "packages" / package / "src").glob("*/__init__.py")).parent
    paged = set(modules_with_pages(tree, source))
    names: Names = {}
    for path in sorted(source.rglob("*.py")):
        module = ".".join(path.relative_to(source.parent).with_suffix("").parts).removesuffix(".__init__")
        body = ast.parse(path.read_text(encoding="utf-8"), str(path)).body
        if found := {*listed(body, module, source.parent), *(defined(body) if path in paged else ())}:
            names[module] = found
    for module, name in imported_on_pages(tree, source.name):
        names.setdefault(module, set()).add(name)
    return names


def modules_with_pages(tree: Path, source: Path) -> Iterator[Path]:
    """Files of the modules that `PUBLIC` in docs/conf.py names; `ops.*` is `ops` and all modules in it."""
    conf = tree / "docs" / "conf.py"
    if not conf.is_file():
        return
    [public] = (
        ast.literal_eval(node.value)
        for node in ast.parse(conf.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PUBLIC"
    )
    for name in public.get(source.name.removeprefix("slime_"), "").split():
        place = source / name.removesuffix(".*").replace(".", "/")
        yield from (place.with_suffix(".py"), place / "__init__.py")
        if name.endswith(".*"):
            yield from (path for path in place.glob("*.py") if not path.name.startswith("_"))


def listed(body: Sequence[ast.stmt], module: str, source: Path) -> Iterator[str]:
    """Names in `__all__`; a module that computes it is imported, by an interpreter of its own."""
    for node in body:
        if isinstance(node, ast.If):
            yield from listed([*node.body, *node.orelse], module, source)
        elif isinstance(node, ast.Assign) and re.match(r"\W*__all__\b", ast.unparse(node.targets[0])):
            try:
                yield from ast.literal_eval(node.value)
            except ValueError:
                command = [sys.executable, "-P", "-c", f"import {module}; print(*{module}.__all__)"]
                # A face needs the packages below it, which are its neighbours in the workspace.
                sources = sorted(source.parents[1].glob("*/src"))
                path = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [source, *sources]))}
                done = subprocess.run(command, env=path, check=True, stdout=subprocess.PIPE, text=True)
                yield from done.stdout.split()


def defined(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Functions, classes and constants that a module defines, without those that begin with an underscore."""
    for node in body:
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not _is_plumbing(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        yield from (name for name in names if not name.startswith("_"))


def _is_plumbing(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("TypeVar", "ParamSpec", "logging.getLogger")


def imported_on_pages(tree: Path, package: str) -> Iterator[tuple[str, str]]:
    """Modules and names of an import package that code on pages and in examples imports."""
    for text in (path.read_text(encoding="utf-8") for pattern in PAGES for path in sorted(tree.glob(pattern))):
        for top, below, names in IMPORT.findall(text):
            if top == package:
                words = (name.split(" as ")[0].strip() for name in re.sub(r"#.*", "", names).strip("() \n").split(","))
                yield from ((f"{top}{below}", word) for word in words if word)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
