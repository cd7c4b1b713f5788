"""The fields of Megatron-core's configs, and Megatron's own command line, read from their source. Imports neither."""

from __future__ import annotations

import ast
import functools
import importlib.util
import operator
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from slime_core.errors import ConfigError
from slime_core.importing import install_command

UNKNOWN: Any = object()
"""A default that is not a plain value, such as a function."""

# Where two configs have a field, the later one's type and default count.
_CONFIGS = {
    "OptimizerConfig": "optimizer/optimizer_config.py",
    "DistributedDataParallelConfig": "distributed/distributed_data_parallel_config.py",
    "MLATransformerConfig": "transformer/transformer_config.py",
    "ModelParallelConfig": "model_parallel_config.py",
    "TransformerConfig": "transformer/transformer_config.py",
}
_TRANSFORMER = ("ModelParallelConfig", "TransformerConfig")
_OPERATIONS: dict[type, Any] = {ast.Pow: operator.pow, ast.Mult: operator.mul}
_SCALARS = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "None": types.NoneType}


class MegatronField(NamedTuple):
    """A field of one or several of Megatron's configs.

    Attributes:
        hint: Its type; what is not a number, text or list is a ``TypeVar`` of the type's name.
        default: Its default, or :data:`UNKNOWN`.
        words: How Megatron's command line spells it where the field says so.
        help: The first sentence of its description.
        owners: Names of the configs that have it.
    """

    hint: Any
    default: Any
    words: tuple[str, ...]
    help: str
    owners: frozenset[str]

    @property
    def is_function(self) -> bool:
        """Whether its value is a function."""
        return "Callable" in str(self.hint)


@functools.cache
def megatron_fields() -> dict[str, MegatronField]:
    """The fields of the configs of the model, the optimizer and the gradient buffers, by name.

    Raises:
        ConfigError: Megatron-core is not installed, or has no such configs.
    """
    found: dict[str, MegatronField] = {}
    trees: dict[str, ast.Module] = {}
    for config, file in _CONFIGS.items():
        path = _megatron("core") / file
        try:
            if file not in trees:  # reading the longest takes 50 ms
                trees[file] = ast.parse(path.read_text(encoding="utf-8"))
            classes = (node for node in trees[file].body if isinstance(node, ast.ClassDef))
            [body] = [node.body for node in classes if node.name == config]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the installed Megatron-core has no {config} in {path} ({error}); install megatron-core 0.16.1, with "
                "which slime was tested"
            ) from error
        for name, field in _fields(body, config):
            owners = field.owners | (found[name].owners if name in found else frozenset())
            found[name] = field._replace(owners=owners)
    return found


def transformer_fields(multi_latent_attention: bool) -> set[str]:
    """Names of the fields of the model's config."""
    kinds = {*_TRANSFORMER, "MLATransformerConfig"} if multi_latent_attention else {*_TRANSFORMER}
    return {name for name, field in megatron_fields().items() if field.owners & kinds}


@functools.cache
def training_words() -> dict[str, tuple[str, bool]]:
    """The words of ``megatron/training/arguments.py``, with dashes; none where only megatron-core is installed.

    Of each the name that its value gets, and whether it sets that to False.
    """
    try:
        source = (_megatron("training") / "arguments.py").read_text(encoding="utf-8")
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    except (OSError, SyntaxError, ConfigError):
        return {}
    found = {}
    for call in calls:
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "add_argument":
            continue
        texts = [str(arg.value) for arg in call.args if isinstance(arg, ast.Constant)]
        names = [text for text in texts if text.startswith("--")]
        options = {word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}
        for name in names:
            dest = str(options.get("dest", names[0][2:].replace("-", "_")))
            found[name] = dest, options.get("action") == "store_false"
    return found


def _megatron(part: str) -> Path:
    spec = importlib.util.find_spec("megatron")
    for place in (spec.submodule_search_locations if spec is not None else None) or ():
        if (Path(place) / part).is_dir():
            return Path(place) / part
    raise ConfigError(f"megatron.{part} is not installed; run: {install_command('megatron-core==0.16.1')}")


def _fields(body: list[ast.stmt], config: str) -> Iterator[tuple[str, MegatronField]]:
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue  # a method or a text
        described = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        text = str(after.value.value) if described else ""  # type: ignore[union-attr]
        default, words = _default(node.value)
        help = " ".join(text.split()).split(". ")[0].rstrip(".")
        yield node.target.id, MegatronField(_hint(node.annotation), default, words, help, frozenset({config}))


def _default(node: ast.expr | None) -> tuple[Any, tuple[str, ...]]:
    """A field's default, and its spellings on the command line."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "field"):
        return _value(node), ()
    options = {word.arg: word.value for word in node.keywords}
    metadata = _value(options.get("metadata"))
    meta = metadata.get("argparse_meta", {}) if isinstance(metadata, dict) else {}
    words = tuple(meta.get("arg_names", ()))
    if "default" in options:
        return _value(options["default"]), words
    factory = options.get("default_factory")
    return ([] if isinstance(factory, ast.Name) and factory.id == "list" else UNKNOWN), words


def _value(node: ast.expr | None) -> Any:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    try:
        return UNKNOWN if node is None else ast.literal_eval(node)
    except ValueError:
        return UNKNOWN


def _hint(node: ast.expr) -> Any:
    """The type that an annotation means."""
    if isinstance(node, ast.Constant):
        return types.NoneType if node.value is None else _hint(ast.parse(str(node.value), mode="eval").body)
    if isinstance(node, ast.BinOp):
        return typing.Union[_hint(node.left), _hint(node.right)]  # noqa: UP007
    if not isinstance(node, ast.Subscript):
        name = ast.unparse(node)
        return _SCALARS.get(name, typing.TypeVar(name))
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    kind = ast.unparse(node.value).rpartition(".")[2].lower()
    if kind == "literal":
        return typing.Literal[tuple(ast.literal_eval(value) for value in inner)]
    if kind in ("optional", "union"):
        kinds = (*map(_hint, inner), *([types.NoneType] if kind == "optional" else []))
        return typing.Union[kinds]  # noqa: UP007
    if kind in ("list", "tuple"):
        return list[_hint(inner[0])] if kind == "list" else tuple[tuple(map(_hint, inner))]  # type: ignore[misc]
    return typing.TypeVar(ast.unparse(node))
