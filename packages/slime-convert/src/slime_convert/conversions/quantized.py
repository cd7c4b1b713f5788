"""Hugging Face directories to FP8 and INT4, and back to bfloat16, on a CPU.

Weights are read and written one by one: the largest of them must fit into memory, not the model. Quantized are the
projections of decoder layers, but for those that rules leave out.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from slime_convert.errors import QuantizationError, WeightError
from slime_convert.files.partial import Conversion, refuse_unfinished
from slime_convert.files.reading import bytes_of, load_whole
from slime_convert.files.tensors import LazyTensor, TensorInfo, split, tensor_info
from slime_convert.files.writing import NewTensor, in_hand
from slime_convert.formats.hf import HfWeights, OutputOptions, copy_model_files, write_model
from slime_convert.progress import Converted
from slime_convert.quantize.expanding import BLOCKS, PACKED, SCALE, SCALE_INV, SHAPE, is_packed_part
from slime_convert.quantize.formats import Fp8Format, Int4Format, Mxfp4Format, need_whole_groups, read_format

if TYPE_CHECKING:
    from torch import Tensor

_EXPANDING = {Fp8Format: "fp8-to-bf16", Int4Format: "int4-to-bf16", Mxfp4Format: "hf-to-torch-dist"}
_QUANTIZED = (SCALE_INV, f".weight{PACKED}", BLOCKS)
_FLOATS = ("bfloat16", "float16", "float32")

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
"""The modules that Kimi-K2's INT4 checkpoints leave as they are, and Qwen's name for shared experts."""

Shapes = Mapping[str, tuple[int, ...]]
"""Those of a whole model's weights, by name."""


def hf_to_fp8(hf_checkpoint: str | Path, save: str | Path, **output: Unpack[OutputOptions]) -> Converted:
    """Quantize a model's projections to E4M3 with a float32 ``weight_scale_inv`` per block of 128 by 128.

    Args:
        hf_checkpoint: Directory with ``config.json`` and unquantized ``*.safetensors``.
        save: Directory to create.
        output: ``force``, ``max_shard_bytes``, ``on_progress``; see :class:`slime_convert.OutputOptions`.

    Raises:
        ConvertError: The model cannot be quantized, or the output not be written; ``save`` is unchanged then.
    """
    conversion = Conversion("hf-to-fp8", (Path(hf_checkpoint),))
    model = _open_unquantized(hf_checkpoint)
    shapes = {name: info.shape for name, info in model.tensors.items()}
    chosen = set(projections(shapes))
    config = Fp8Format((128, 128)).to_config(left_alone(shapes, chosen))
    return _quantize(model, chosen, _fp8, save, conversion, config, **output)


def hf_to_int4(
    hf_checkpoint: str | Path,
    save: str | Path,
    *,
    group_size: int = 32,
    ignore: Sequence[str] | None = None,
    **output: Unpack[OutputOptions],
) -> Converted:
    """Quantize a model's projections to packed INT4, rounding to nearest; no calibration.

    Args:
        hf_checkpoint: As for :func:`hf_to_fp8`, and so ``save``, ``output``, the result and the errors.
        save: Directory to create.
        group_size: Columns that share a scale: 32 or 128.
        ignore: Modules to leave as they are: names, or ``re:`` and a pattern. By default all but the routed experts
            if the model has any, as in Kimi-K2, else the output layer.
        output: How it is written.
    """
    if type(group_size) is not int or group_size not in (32, 128):
        raise QuantizationError(f"group size {group_size} is not supported; allowed: 32, 128")
    ignore = (ignore,) if isinstance(ignore, str) else ignore
    if ignore is not None and not all(isinstance(rule, str) for rule in ignore):
        raise QuantizationError(f"ignore {ignore!r} is not supported; allowed: names of modules, or re: and a pattern")
    conversion = Conversion("hf-to-int4", (Path(hf_checkpoint),))
    model = _open_unquantized(hf_checkpoint)
    if parts := sorted(name for name in model.tensors if is_packed_part(name)):
        raise QuantizationError(
            f"{model.directory} has {parts[0]}, which would be taken for a part of a packed weight ({len(parts)} such "
            "weights); give an unquantized model without them"
        )
    shapes = {name: info.shape for name, info in model.tensors.items()}
    names = projections(shapes)
    rules = default_ignore(names) if ignore is None else tuple(ignore)
    chosen = set(not_ignored(names, rules))
    others = [module for module in left_alone(shapes, chosen) if not any(is_ignored(module, rule) for rule in rules)]
    config = Int4Format(group_size).to_config([*rules, *others])
    return _quantize(model, chosen, partial(_int4, group_size=group_size), save, conversion, config, **output)


def fp8_to_bf16(hf_checkpoint: str | Path, save: str | Path, **output: Unpack[OutputOptions]) -> Converted:
    """Expand block-scaled FP8 weights, such as DeepSeek-V3's, to bfloat16. Otherwise as :func:`hf_to_fp8`."""
    return _expand(Path(hf_checkpoint), save, Fp8Format, **output)


def int4_to_bf16(hf_checkpoint: str | Path, save: str | Path, **output: Unpack[OutputOptions]) -> Converted:
    """Expand packed INT4 weights, such as Kimi-K2's, to bfloat16. Otherwise as :func:`hf_to_fp8`."""
    return _expand(Path(hf_checkpoint), save, Int4Format, **output)


def projections(shapes: Shapes) -> list[str]:
    """The projections of a model's decoder layers, which may be quantized.

    A :class:`QuantizationError` if there are none, or the experts of a layer are one tensor.
    """
    if fused := next(filter(_FUSED_EXPERTS.fullmatch, shapes), None):
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
    """Modules whose matrix stays as it is. The config lists them: readers would take them for quantized otherwise."""
    kept = {name for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight")} - set(quantized)
    # An output layer that is tied to the embedding has no weight of its own, but is a module.
    return sorted({name.removesuffix(".weight") for name in kept} | {"lm_head"})


def default_ignore(names: Iterable[str]) -> tuple[str, ...]:
    """The default rules: everything except the routed experts, or the output layer if there are no experts."""
    return K2_IGNORE if any(_ROUTED_EXPERT.match(name) for name in names) else ("lm_head",)


def not_ignored(names: Sequence[str], rules: Sequence[str]) -> list[str]:
    """The weights that no rule of compressed-tensors' ``ignore`` names; a :class:`QuantizationError` without any."""
    found = [name for name in names if not any(is_ignored(name.removesuffix(".weight"), rule) for rule in rules)]
    if not found:
        raise QuantizationError(f"ignore= {' '.join(rules)} leaves nothing to quantize; give fewer rules")
    return found


def is_ignored(module: str, rule: str) -> bool:
    """Whether a rule names a module: by its name, or by ``re:`` and a pattern that matches from the beginning.

    Raises `QuantizationError` for a pattern that cannot be compiled.
    """
    if not rule.startswith("re:"):
        return module == rule
    try:
        return re.match(rule.removeprefix("re:"), module) is not None
    except re.error as error:
        raise QuantizationError(f"ignore= {rule} is not a regular expression ({error}); use re:.*PART.*") from error


def _expand(origin: Path, save: str | Path, wanted: type, **output: Unpack[OutputOptions]) -> Converted:
    conversion = Conversion("expand", (origin,))
    form = read_format(origin)
    if form is None:
        raise QuantizationError(f"{origin / 'config.json'} has no quantization_config; give a quantized model")
    if not isinstance(form, wanted):
        raise QuantizationError(f"{origin} is quantized otherwise ({form}); use slime-convert {_EXPANDING[type(form)]}")
    model = HfWeights(origin).expanded()
    others = partial(copy_model_files, origin=origin, config=model.config, dtype="bfloat16")
    return write_model([_kept(model, info) for info in model.tensors.values()], save, conversion, others, **output)


def _open_unquantized(directory: str | Path) -> HfWeights:
    """The weights of a model that is to be quantized; one that is already is refused."""
    origin = Path(directory)
    refuse_unfinished(origin)
    if (form := read_format(origin)) is not None:
        command = _EXPANDING[type(form)]
        raise QuantizationError(f"{origin} is quantized already ({form}); use slime-convert {command} first")
    model = HfWeights(origin)
    for name, info in model.tensors.items():
        if info.dtype.startswith("float8") or name.endswith(_QUANTIZED):
            raise QuantizationError(
                f"{origin} has {name} of type {info.dtype}: it is quantized already, though its config.json has no "
                "quantization_config; give an unquantized model"
            )
    return model


def _quantize(
    model: HfWeights,
    chosen: set[str],
    make: Callable[[HfWeights, TensorInfo], list[NewTensor]],
    save: str | Path,
    conversion: Conversion,
    quantization: Mapping[str, Any],
    **output: Unpack[OutputOptions],
) -> Converted:
    tensors: list[NewTensor] = []
    for name, info in model.tensors.items():
        if name in chosen and info.dtype not in _FLOATS:
            allowed = ", ".join(_FLOATS)
            raise WeightError(f"{name} has type {info.dtype}; allowed: {allowed}; save the model as bfloat16")
        tensors += make(model, info) if name in chosen else [_kept(model, info)]
    changes = {"quantization_config": quantization}
    dtype = model.tensors[min(chosen)].dtype
    others = partial(copy_model_files, origin=model.directory, config=model.config, dtype=dtype, changes=changes)
    return write_model(tensors, save, replace(conversion, options=changes), others, **output)


def _kept(model: HfWeights, info: TensorInfo) -> NewTensor:
    return NewTensor(info, lambda: model.tensor(info.name))


def _fp8(model: HfWeights, info: TensorInfo) -> list[NewTensor]:
    from slime_convert.quantize.numbers import quantize_fp8

    rows, columns = info.shape
    weight = tensor_info(info.name, "float8_e4m3fn", info.shape)
    scales = tensor_info(info.name + SCALE_INV, "float32", (-(-rows // 128), -(-columns // 128)))

    return _together([weight, scales], model.tensor(info.name), partial(quantize_fp8, name=info.name))


def _int4(model: HfWeights, info: TensorInfo, group_size: int) -> list[NewTensor]:
    from slime_convert.quantize.numbers import quantize_int4

    name, (rows, columns) = info.name, info.shape
    need_whole_groups(name, columns, group_size)
    packed = tensor_info(name + PACKED, "int32", (rows, columns // 8))
    scales = tensor_info(name + SCALE, info.dtype, (rows, columns // group_size))
    shape = LazyTensor.made("int64", (2,), lambda: memoryview(struct.pack("<2q", rows, columns)))
    compute = partial(quantize_int4, group_size=group_size, name=name)
    return [*_together([packed, scales], model.tensor(name), compute), in_hand(name + SHAPE, shape)]


def _together(
    infos: Sequence[TensorInfo], weight: LazyTensor, compute: Callable[[Tensor], Iterable[Tensor]]
) -> list[NewTensor]:
    """Tensors that are computed from one weight together."""

    def make() -> memoryview:
        tensors = compute(*load_whole(weight))
        return memoryview(b"".join(map(bytes_of, tensors)))

    sizes = [info.nbytes for info in infos]
    parts = split(LazyTensor.made("uint8", (sum(sizes),), make), sizes)
    made = [LazyTensor(info.dtype, info.shape, part.pieces) for info, part in zip(infos, parts, strict=True)]
    return [in_hand(info.name, tensor) for info, tensor in zip(infos, made, strict=True)]
