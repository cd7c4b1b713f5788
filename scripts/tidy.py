"""House rules that no other tool checks: sizes, one meaning per name, one writer of files, nothing of one machine.

Docs, docstrings and comments are read for the wordings of `words.toml`, too.

Run by `scripts/test lint` and by pre-commit; prints one line per finding and exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80

# Written so that this file does not find itself.
FORBIDDEN = {
    "a package index's host name": re.compile(r"\b(?:test\.)?pypi\.(?:org)\b|\bpythonhosted\.(?:org)\b"),
    "a mark of a merge conflict": re.compile(r"^(?:<{7}|={7}|>{7})(?: |$)"),
    "a path of one machine": re.compile(r"(?<![\w.~}/-])/(?:work|opt|root|home/\w+|Users/\w+)/\w"),
}

WORDINGS = {
    # A space may be the end of a line, and the next one may begin with the mark of a comment.
    re.compile(row["pattern"].replace(" ", r"\s+(?:#\s+)?"), re.IGNORECASE): row["instead"]
    for row in tomllib.loads((ROOT / "scripts" / "words.toml").read_text(encoding="utf-8"))["wording"]
}
CODE = re.compile(r"^(?P<fence>```|~~~).*?^(?P=fence)|``[^`]+``|`[^`\n]*`", re.DOTALL | re.MULTILINE)

WRITTEN = re.compile(r"# written: \w")

LOCKED_HOST = re.compile(r'\bregistry = "(?!https://index\.invalid/)[^"]*|^sdist = |\burl = "[^"]*')


def find(path: str, text: str) -> Iterator[str]:
    """Findings in one file, as `path:line: what`.

    Args:
        path: Name to report; the suffix decides which rules apply.
        text: The file's content.
    """
    lines = text.splitlines()
    forbidden = FORBIDDEN
    if path.endswith(".lock"):
        forbidden = {**FORBIDDEN, "where packages were found (write the file with scripts/lock)": LOCKED_HOST}
    for number, line in enumerate(lines, 1):
        for what, pattern in forbidden.items():
            if match := pattern.search(line):
                yield f"{path}:{number}: {what}: {match.group()}"
    yield from odd_wordings(path, text)
    if not path.endswith(".py"):
        return
    if len(lines) > MAX_FILE_LINES:
        yield f"{path}:1: {len(lines)} lines; split it, {MAX_FILE_LINES} is the far end"
    for node in ast.walk(ast.parse(text, path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines; {MAX_FUNCTION_LINES} is the far end"


def odd_wordings(path: str, text: str) -> Iterator[str]:
    """Wordings of `words.toml` in a page, or in a module's docstrings and comments; code in backticks does not count.

    Args:
        path: Name to report; only Markdown and Python are read.
        text: The file's content.
    """
    if not path.endswith((".md", ".py")):
        return
    # Few files have any of them, and finding a module's comments takes longer than all else here.
    if not (wordings := {pattern: instead for pattern, instead in WORDINGS.items() if pattern.search(text)}):
        return
    prose = CODE.sub(lambda code: re.sub(r"[^\n]", "`", code[0]), text if path.endswith(".md") else _comments(text))
    for pattern, instead in wordings.items():
        for match in pattern.finditer(prose):
            number = prose.count("\n", 0, match.start()) + 1
            yield f"{path}:{number}: {' '.join(match[0].split())}; write: {instead}"


def _comments(text: str) -> str:
    """A module with its docstrings and comments at their places, and spaces for all else."""
    lines = text.splitlines(keepends=True)
    kept = [re.sub(r"[^\n]", " ", line) for line in lines]
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        if is_docstring or token.type == tokenize.COMMENT:
            (first, start), (last, end) = token.start, token.end
            for number in range(first - 1, last):
                left, right = start if number == first - 1 else 0, end if number == last - 1 else len(lines[number])
                kept[number] = kept[number][:left] + lines[number][left:right] + kept[number][right:]
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    return "".join(kept)


def doubled_names(sources: Mapping[str, str]) -> Iterator[str]:
    """Public classes that two modules define, of one package or of two. (A function is read with its module's name.)

    Args:
        sources: Path → content of the packages' modules.
    """
    places: dict[str, list[str]] = {}
    for path, text in sources.items():
        for node in ast.parse(text, path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    for name, found in places.items():
        if len(found) > 1:
            yield f"{found[0]}: the name {name} has another meaning at {', '.join(found[1:])}"


def writers(path: str, text: str) -> Iterator[str]:
    """Places that write a file by a name that somebody may have made a link of, and do not say why they may.

    Such a place is `open` with a mode that writes, `write_text` and `write_bytes`, but of what `whole_file` gives.

    Args:
        path: Name to report.
        text: Content of a module of a package.
    """
    lines, tree = text.splitlines(), ast.parse(text, path)
    given = {
        item.optional_vars.id
        for node in ast.walk(tree)
        if isinstance(node, ast.With | ast.AsyncWith)
        for item in node.items
        if isinstance(item.context_expr, ast.Call) and ast.unparse(item.context_expr.func).endswith("whole_file")
        if isinstance(item.optional_vars, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _writes(node)):
            of = node.func.value if isinstance(node.func, ast.Attribute) else None
            said = any(WRITTEN.search(line) for line in lines[node.lineno - 1 : node.end_lineno])
            if not said and not (isinstance(of, ast.Name) and of.id in given):
                yield (
                    f"{path}:{node.lineno}: {name} writes a file; use slime_core.files, or say at the end of the line "
                    "why nobody can have put a link there: `# written: a private folder`"
                )


def _writes(call: ast.Call) -> str:
    """The name of a function that a call writes a file with, or nothing."""
    of = call.func.value if isinstance(call.func, ast.Attribute) else None
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    if of is not None and name in ("write_text", "write_bytes"):
        return name
    if name != "open" or ast.unparse(call.func) == "os.open":  # of `os`: bare flags, with O_NOFOLLOW where it matters
        return ""
    # The mode is the second argument, but of a path the first; what else has a method `open` is given no such word.
    of_a_path = of is not None and ast.unparse(of) not in ("io", "codecs", "gzip", "bz2", "lzma")
    modes = [word.value for word in call.keywords if word.arg == "mode"]
    modes += call.args[:1] if of_a_path else call.args[1:2]
    for mode in modes:
        word = mode.value if isinstance(mode, ast.Constant) else None if of_a_path else "w"  # computed: may be any
        if isinstance(word, str) and set(word) <= set("rwaxbt+") and set(word) & set("wax+"):
            return name
    return ""


def files() -> list[str]:
    """Files that are, or would be, committed."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted({name for name in output.split("\0") if name and (ROOT / name).is_file()})


def main() -> int:
    """Check every file; returns the exit code."""
    findings: list[str] = []
    modules: dict[str, str] = {}
    names = files()
    for name in names:
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        findings += find(name, text)
        if name.startswith("packages/") and "/src/" in name and name.endswith(".py"):
            modules[name] = text
            findings += writers(name, text)
    findings += doubled_names(modules)
    print("\n".join(findings) or f"tidy: {len(names)} files")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
