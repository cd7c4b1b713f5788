"""Megatron's shape flags: which a shape writes, and what a given one must equal."""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from slime_convert.errors import ShapeMismatchError

_MAX_LAYERS = 100_000

KINDS: Mapping[str, Callable[[Any], bool]] = {
    "always": lambda _: True,
    "experts": lambda shape: shape.num_experts is not None,
    "grouped heads": lambda shape: shape.num_query_groups < shape.num_attention_heads,
    "plain attention": lambda shape: not shape.multi_latent_attention,
    "latent attention": lambda shape: shape.multi_latent_attention,
    "llama3 scaling": lambda shape: shape.use_rope_scaling,
    "yarn": lambda shape: shape.rope_type == "yarn",
    "latent yarn": lambda shape: shape.rope_type == "yarn" and shape.multi_latent_attention,
    "plain yarn": lambda shape: shape.position_embedding_type == "yarn",
    "not plain yarn": lambda shape: shape.position_embedding_type != "yarn",
    "unrounded yarn": lambda shape: shape.position_embedding_type == "yarn" and not shape.yarn_rounds_range,
    "no biases": lambda shape: not shape.add_bias_linear,
    "window": lambda shape: shape.window_size is not None,
}
"""Kinds of shapes, by which it is decided whether a flag is written."""


@dataclass(frozen=True)
class ShapeFlag:
    """A shape flag of Megatron's command line.

    Attributes:
        name: As typed, such as ``--num-layers``.
        type: ``int``, ``float``, ``str``, or ``bool`` for a switch.
        help: One line, without the default.
        when: In which shapes the flag is written, one of :data:`KINDS`; empty for those whose value is not ``default``.
        field: The field or property of a shape that says its value; empty for a switch that ``when`` decides.
        default: Megatron's own.
        compared: Whether a given value must equal the shape's.
    """

    name: str
    type: type
    help: str
    when: str
    field: str = ""
    default: Any = None
    compared: bool = True

    @property
    def dest(self) -> str:
        """Its name without dashes; the key in :func:`check_flags`."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.type is bool

    def value(self, shape: Any) -> Any:
        """Its value for a shape."""
        return getattr(shape, self.field) if self.field else KINDS[self.when](shape)

    def words(self, shape: Any) -> list[str]:
        """The flag as a shape writes it; empty if it does not."""
        value = self.value(shape)
        if self.is_switch:
            return [self.name] if value else []
        written = value is not None and (KINDS[self.when](shape) if self.when else value != self.default)
        return [self.name, flag_text(value)] if written else []


def shape_field(
    help_: str, default: Any = dataclasses.MISSING, *, flag: str = "", megatron: str = "", **how: Any
) -> Any:
    """A field of a shape that a flag of Megatron's sets.

    ``flag`` is the flag's name, and ``megatron`` that of the field in megatron-core's configs, if it is another.
    ``how`` has further attributes of :class:`ShapeFlag`.
    """
    how = {"help": help_, "when": "always" if default is dataclasses.MISSING else "", **how}
    return dataclasses.field(default=default, metadata={"flag": flag, "megatron": megatron, "how": how})


_TYPES = {"int": int, "float": float, "bool": bool}


def shape_flags(shape_type: type[Any]) -> tuple[ShapeFlag, ...]:
    """The flags of a shape's class: of its fields, in their order, then the derived ones."""
    found = []
    for field in dataclasses.fields(shape_type):
        if "flag" in field.metadata:
            name = field.metadata["flag"] or "--" + field.name.replace("_", "-")
            type_ = _TYPES.get(str(field.type).removesuffix(" | None"), str)  # lists are given as text
            default = None if field.default is dataclasses.MISSING else field.default
            found.append(ShapeFlag(name, type_, field=field.name, default=default, **field.metadata["how"]))
    return (*found, *getattr(shape_type, "derived_flags", ()))


def check_flags(shape: Any, given: Mapping[str, Any]) -> None:
    """Refuse flags that contradict a model's config (:class:`ShapeMismatchError`, with every contradiction).

    Args:
        shape: A :class:`slime_convert.ModelShape` from the Hugging Face config.
        given: Values by ``dest`` of :data:`slime_convert.SHAPE_FLAGS`. ``None``, a switch that is ``False``, and other
            keys count as not given; a flag that is not given takes the config's value.
    """
    wrong = [text for flag in shape_flags(type(shape)) if (text := _contradiction(flag, shape, given.get(flag.dest)))]
    if wrong:
        count = f"{len(wrong)} shape flags contradict" if wrong[1:] else "1 shape flag contradicts"
        advice = "Leave the flags out (the config's values are used), or give the config that they describe"
        raise ShapeMismatchError(f"{count} the model's config: {'; '.join(wrong)}. {advice}")


def _contradiction(flag: ShapeFlag, shape: Any, value: Any) -> str | None:
    expected, is_written = flag.value(shape), bool(flag.words(shape))
    # Megatron does not read a head's channels with latent attention.
    if value is None or value is False or not flag.compared or (flag.when == "plain attention" and not is_written):
        return None
    if flag.is_switch:
        return None if expected else f"{flag.name} is given, but the config says no"
    # Numbers of a scaling that the model does not have count for nothing; every model has a kind of position embedding.
    has_setting = expected is not None and (is_written or flag.when not in _GROUPS or flag.type is str)
    if flag.dest in _PATTERNS:
        pattern = _pattern(value, flag.dest, shape.num_layers)
        if pattern is not None and pattern == _pattern(expected, flag.dest, shape.num_layers):
            return None
    elif has_setting and _is_same(flag, value, expected):
        return None
    wanted = f"says {flag_text(expected)}" if has_setting else "has no such setting"
    return f"{flag.name} {flag_text(value)} is given, but the config {wanted}"


_GROUPS = ("llama3 scaling", "yarn", "latent yarn", "plain yarn")


def _is_same(flag: ShapeFlag, value: Any, expected: Any) -> bool:
    if flag.type is float:
        return math.isclose(value, expected, rel_tol=1e-6)
    if flag.type is str:
        return str(value).replace(" ", "").strip("()") == str(expected)
    return bool(value == expected)


# What a single number means: layers 0, N, 2N …; or all but layers N - 1, 2N - 1 … (megatron-core, of each flag).
_PATTERNS: Mapping[str, Callable[[int, int], bool]] = {
    "moe_layer_freq": lambda layer, step: layer % step == 0,
    "window_attn_skip_freq": lambda layer, step: (layer + 1) % step != 0,
    "linear_attention_freq": lambda layer, step: (layer + 1) % step != 0,
}


def _pattern(value: Any, dest: str, layers: int) -> list[int] | None:
    """A 0 or 1 for each layer, from the value of such a flag; ``None`` if Megatron would not understand it."""
    if isinstance(value, str):
        try:
            value = _evaluate(ast.parse(value, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
    if isinstance(value, int):
        is_one = _PATTERNS[dest]
        return [int(is_one(layer, value)) for layer in range(layers)] if 0 < value <= _MAX_LAYERS else None
    return None if value is None else list(value)


def _evaluate(node: ast.expr) -> Any:
    """Lists of integers, their sums and repetitions; nothing else is evaluated."""
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value <= _MAX_LAYERS:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluate(element) for element in node.elts]
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            if len(left) * right > _MAX_LAYERS:
                raise ValueError
            return left * right
    raise ValueError


def flag_text(value: Any) -> str:
    """A value as it stands on a command line. Whole floats lose their fraction: Megatron reads some as integers."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _runs_text(list(value))
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _runs_text(values: list[int]) -> str:
    """A list with an entry for each layer, in short: ``([0]*3+[1]*58)``, or ``([1]*5+[0]*1)*4`` if it repeats."""
    count = len(values)
    repeats = (n for n in range(1, count) if count % n == 0 and values == values[:n] * (count // n))
    period = next(repeats, count)
    runs = ((value, len(list(run))) for value, run in groupby(values[:period]))
    text = "(" + "+".join(f"[{value}]*{length}" for value, length in runs) + ")"
    return text if period == count else f"{text}*{count // period}"
