"""The flags of the SGLang that is installed in some interpreter, read from its source.

Importing SGLang takes seconds and needs its own interpreter; its flags stand in literal form in a few files.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from slime_core.errors import ConfigError
from slime_rollout.engine.config import SglangValue
from slime_rollout.engine.interpreter import find_package

_PARSE_ATTEMPTS = 50
_PARSE_AGAIN_SECONDS = 0.1

# Flags that slime sets itself, and what to use instead.
CONTROLLED: Mapping[str, str] = {
    "model-path": "use --hf-checkpoint",
    "model": "use --hf-checkpoint",
    "config": "give the flags themselves",
    "host": "slime's engines listen on this machine's loopback address",
    "port": "slime chooses free ports for engines; --sglang-router-port sets the router's",
    "tp-size": "use --rollout-num-gpus-per-engine",
    "tensor-parallel-size": "use --rollout-num-gpus-per-engine",
    "nnodes": "slime starts engines on single nodes",
    "node-rank": "slime starts engines on single nodes",
    "dist-init-addr": "slime starts engines on single nodes",
    "nccl-port": "slime chooses free ports for engines",
    "base-gpu-id": "slime places engines on GPUs",
    "gpu-id-step": "slime places engines on GPUs",
    "random-seed": "use --seed",
    "weight-version": "slime numbers the weights",
    "skip-server-warmup": "slime always sets it",
    "ssl-keyfile": "slime talks plain HTTP to engines, which listen on this machine's loopback address",
    "ssl-certfile": "slime talks plain HTTP to engines, which listen on this machine's loopback address",
    "grpc-mode": "slime talks HTTP to engines",
    "smg-grpc-mode": "slime talks HTTP to engines",
    "api-key": "slime sends engines no key; they listen on this machine's loopback address",
    "admin-api-key": "slime sends engines no key; they listen on this machine's loopback address",
    "disaggregation-mode": "use worker_type in --sglang-config",
    "disaggregation-bootstrap-port": "use worker_type in --sglang-config",
    "encoder-only": "use worker_type in --sglang-config",
    "language-only": "use worker_type in --sglang-config",
    "encoder-urls": "use worker_type in --sglang-config",
}
_TYPES: Mapping[str, type] = {"int": int, "float": float}


@dataclasses.dataclass(frozen=True)
class SglangFlag:
    """One flag of SGLang.

    Attributes:
        name: Without the leading dashes, such as ``mem-fraction-static``.
        takes_value: Whether a value follows it.
        several: Whether several values may follow it.
        type: ``int`` or ``float`` where each value must be one, else ``str``.
        choices: All allowed values, where SGLang's source lists them beside the flag; else none.
    """

    name: str
    takes_value: bool
    several: bool = False
    type: type = str
    choices: tuple[str, ...] = ()


def installed_flags(python: str) -> dict[str, SglangFlag]:
    """All flags of the SGLang that ``python`` would import, by name.

    Args:
        python: An interpreter.

    Raises:
        ConfigError: It has no SGLang, or one whose flags are written in a way that is not understood.
    """
    root = _package_directory(python)
    flags = {flag.name: flag for file in _files_with_flags(root / "srt") for flag in _flags_of(file)}
    if "model-path" not in flags:
        raise ConfigError(
            f"the flags of the SGLang in {root} are not written as slime expects; it was tested with SGLang 0.5.23"
        )
    return flags


def check_sglang_args(args: Mapping[str, SglangValue], flags: Mapping[str, SglangFlag]) -> None:
    """Check the user's ``--sglang-*`` flags against those that the installed SGLang has.

    Args:
        args: Values by name, without ``--sglang-``.
        flags: What :func:`installed_flags` returned.

    Raises:
        ConfigError: One is unknown, with the nearest known one; or slime sets it itself; or its value is missing, too
            much, or none that it takes.
    """
    for name, value in args.items():
        if name in CONTROLLED:
            raise ConfigError(f"--sglang-{name} cannot be given: {CONTROLLED[name]}")
        if name not in flags:
            near = difflib.get_close_matches(name, sorted(set(flags) - set(CONTROLLED)), n=1)
            hint = f"did you mean --sglang-{near[0]}?" if near else "see the flags of sglang.launch_server"
            raise ConfigError(f"--sglang-{name} is no flag of the installed SGLang; {hint}")
        flag = flags[name]
        if flag.takes_value and value is True:
            raise ConfigError(f"--sglang-{name} needs a value")
        if not flag.takes_value and value is not True:
            raise ConfigError(f"--sglang-{name} takes no value, got {value!r}")
        if isinstance(value, tuple) and not flag.several:
            raise ConfigError(f"--sglang-{name} takes one value, got {' '.join(value)!r}")
        if flag.takes_value:
            _check_values(flag, value if isinstance(value, tuple) else (str(value),))


def _check_values(flag: SglangFlag, values: tuple[str, ...]) -> None:
    kind = {int: "a whole number", float: "a number"}.get(flag.type)
    for value in values:
        if kind is not None and not _converts(flag.type, value):
            raise ConfigError(f"--sglang-{flag.name} {value} is not {kind}")
        if flag.choices and value not in flag.choices:
            raise ConfigError(f"--sglang-{flag.name} {value} is unknown; allowed: {', '.join(flag.choices)}")


def _converts(kind: type, value: str) -> bool:
    try:
        kind(value)
    except ValueError:
        return False
    return True


def _package_directory(python: str) -> Path:
    directory = find_package(python, "sglang")
    if directory is None:
        raise ConfigError(
            f"SGLang is not installed in {python}; install it there, or name the interpreter that has it with "
            "--sglang-python"
        )
    return directory


def _files_with_flags(srt: Path) -> Iterator[Path]:
    yield srt / "server_args.py"
    yield from sorted((srt / "arg_groups" / "fields").glob("*.py"))


def _parsed(source: str) -> ast.Module:
    """The syntax tree of some source.

    CPython 3.11 counts the depth of trees under construction for all threads together, and raises `SystemError` where
    another thread, such as one that imports torch, builds one at the same time (seen with 3.11.7; compare
    python/cpython issue 106905).
    """
    for _ in range(_PARSE_ATTEMPTS):
        try:
            return ast.parse(source)
        except SystemError:
            time.sleep(_PARSE_AGAIN_SECONDS)
    return ast.parse(source)


def _flags_of(file: Path) -> Iterator[SglangFlag]:
    if not file.is_file():
        return
    for node in ast.walk(_parsed(file.read_text())):
        if isinstance(node, ast.AnnAssign):
            yield from _flags_of_field(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            yield from _flags_of_call(node)


def _flags_of_field(node: ast.AnnAssign) -> Iterator[SglangFlag]:
    """``name: A[type, "help"]`` and ``name: A[type, Arg(...)]``, where ``A`` is ``typing.Annotated``."""
    annotation = node.annotation
    if not (
        isinstance(node.target, ast.Name)
        and isinstance(annotation, ast.Subscript)
        and ast.unparse(annotation.value) in ("A", "Annotated")
        and isinstance(annotation.slice, ast.Tuple)
    ):
        return
    kind, known = _unwrapped(annotation.slice.elts[0])
    options = _options_of_arg(annotation.slice.elts[1:])
    if _literal(options.get("no_cli")):
        return
    aliases = _literal(options.get("aliases"))
    names = [str(_literal(options.get("cli_name")) or "--" + node.target.id.replace("_", "-"))]
    names += aliases if isinstance(aliases, list) else []
    parsed = "type_parser" in options
    several = _literal(options.get("nargs")) in ("+", "*") or ("ist[" in kind and not parsed)
    is_bool = "action" not in options and kind == "bool"
    item = str if parsed else _TYPES.get(kind.removeprefix("List[").removeprefix("list[").rstrip("]"), str)
    yield from _named(names, options, several=several, switch=is_bool, type=item, choices=known)


def _unwrapped(node: ast.expr) -> tuple[str, tuple[str, ...]]:
    """A field's type without ``Optional``; and of a ``Literal`` the type of its values, and the values."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Optional":
        node = node.slice
    if isinstance(node, ast.BinOp) and ast.unparse(node.right) == "None":
        node = node.left
    if not (isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal"):
        return ast.unparse(node), ()
    values = [_literal(item) for item in (node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice])]
    return type(values[0]).__name__, tuple(str(value) for value in values if value is not None)


def _options_of_arg(metadata: Iterable[ast.expr]) -> dict[str, ast.expr]:
    for item in metadata:
        if isinstance(item, ast.Call) and ast.unparse(item.func) == "Arg":
            return {keyword.arg: keyword.value for keyword in item.keywords if keyword.arg is not None}
    return {}


def _flags_of_call(node: ast.Call) -> Iterator[SglangFlag]:
    """``parser.add_argument("--name", …)``."""
    names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    options = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
    several = _literal(options.get("nargs")) in ("+", "*")
    kind = _TYPES.get(ast.unparse(options["type"]), str) if "type" in options else str
    yield from _named([str(name) for name in names], options, several=several, type=kind)


def _named(
    names: Iterable[str],
    options: Mapping[str, ast.expr],
    *,
    several: bool,
    switch: bool = False,
    type: type,
    choices: tuple[str, ...] = (),
) -> Iterator[SglangFlag]:
    action = ast.unparse(options["action"]) if "action" in options else ""
    both_ways = "BooleanOptional" in action
    # A deprecated constant that has `choices` still takes its old value.
    constant = "Const" in action and "choices" not in options
    switch = switch or both_ways or constant or "store_true" in action or "StoreTrue" in action
    listed = _literal(options.get("choices"))
    if isinstance(listed, list):
        choices = tuple(str(choice) for choice in listed)
    for name in names:
        if name.startswith("--"):
            bare = name.removeprefix("--")
            yield SglangFlag(bare, False) if switch else SglangFlag(bare, True, several, type, choices)
            if both_ways:
                yield SglangFlag(name.replace("--", "no-", 1), takes_value=False)


def _literal(node: ast.expr | None) -> object:
    try:
        return None if node is None else ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
