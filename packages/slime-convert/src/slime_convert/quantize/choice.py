"""Which weights are quantized. No torch here: names and shapes decide."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from slime_convert.errors import QuantizationError

# Norms, embeddings, output layers, routers and gates, biases, convolutions and state-space parameters keep their type.
# So do an MTP layer's `eh_proj` and the sparse indexer's `weights_proj`, as in DeepSeek's own checkpoints.
_PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),  # attention
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),  # multi-head latent attention
    *("wq_b", "wk"),  # sparse attention's indexer
    *("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj"),  # linear attention
    *("gate_proj", "up_proj", "down_proj", "gate_up_proj"),  # MLP and experts
    *("w1", "w2", "w3"),  # experts of Mixtral and MiniMax
)
_PROJECTION = re.compile(rf"(?:.*\.)?layers\.\d+\.(?:.*\.)?(?:{'|'.join(_PROJECTIONS)})\.weight")
_OTHER_TOWERS = re.compile(r"(?:^|[._])(?:vision|visual|audio|mm|multi_modal)(?:[._]|$)")
_FUSED_EXPERTS = re.compile(r".*\.experts\.(?:gate_up_proj|down_proj)")
_ROUTED_EXPERT = re.compile(r".*\.experts\.\d+\.")

K2_IGNORE = ("lm_head", "re:.*self_attn.*", "re:.*shared_experts?.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*")
"""What Kimi-K2's INT4 checkpoints leave as it is: all but the routed experts (Qwen's name for shared ones included)."""

Shapes = Mapping[str, tuple[int, ...]]


def projections(shapes: Shapes) -> list[str]:
    """The weights of a model that may be quantized: the projections of its decoder layers.

    Args:
        shapes: Sizes by name, of the whole model.

    Raises:
        QuantizationError: There are none, or the experts of a layer are one tensor.
    """
    fused = next((name for name in shapes if _FUSED_EXPERTS.fullmatch(name)), None)
    if fused is not None:
        raise QuantizationError(
            f"{fused} holds all experts of a layer in one tensor, which neither format has a place for; "
            "give a model that stores a weight for each expert"
        )
    found = [
        name
        for name, shape in shapes.items()
        if len(shape) == 2 and _PROJECTION.fullmatch(name) and not _OTHER_TOWERS.search(name)
    ]
    if not found:
        raise QuantizationError("the model has no projections in decoder layers, so there is nothing to quantize")
    return found


def left_alone(shapes: Shapes, quantized: Iterable[str]) -> list[str]:
    """Modules with a matrix that stays as it is, for the config; readers would take them for quantized otherwise.

    Args:
        shapes: Sizes by name, of the whole model.
        quantized: Names of the weights that do not stay.
    """
    kept = {name for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight")} - set(quantized)
    # An output layer that is tied to the embedding has no weight of its own, but is a module.
    return sorted({name.removesuffix(".weight") for name in kept} | {"lm_head"})


def default_ignore(names: Iterable[str]) -> tuple[str, ...]:
    """What :func:`not_ignored` is given by default: with routed experts all but them, else the output layer."""
    return K2_IGNORE if any(_ROUTED_EXPERT.match(name) for name in names) else ("lm_head",)


def not_ignored(names: Sequence[str], rules: Sequence[str]) -> list[str]:
    """The weights that no rule of compressed-tensors' ``ignore`` list names.

    Args:
        names: Of weights, ending in ``.weight``.
        rules: Names of modules, or ``re:`` and a pattern that matches a module's name from its beginning.

    Raises:
        QuantizationError: A pattern is no regular expression, or nothing is left.
    """
    found = [name for name in names if not any(is_ignored(name.removesuffix(".weight"), rule) for rule in rules)]
    if not found:
        raise QuantizationError(f"--ignore {' '.join(rules)} leaves nothing to quantize; give fewer rules")
    return found


def is_ignored(module: str, rule: str) -> bool:
    """Whether one rule of an ``ignore`` list names a module.

    Raises:
        QuantizationError: The rule's pattern is no regular expression.
    """
    if not rule.startswith("re:"):
        return module == rule
    try:
        return re.match(rule.removeprefix("re:"), module) is not None
    except re.error as error:
        raise QuantizationError(f"--ignore {rule} is no regular expression ({error}); write re:.*PART.*") from error
