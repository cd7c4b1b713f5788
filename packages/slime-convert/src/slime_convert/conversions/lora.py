"""LoRA adapters of PEFT, merged into the model that they were trained on (Hu et al., "LoRA", arXiv:2106.09685).

For each weight W that it changes, an adapter has A (rank × inputs) and B (outputs × rank). The merged weight is
W + s B A with s = alpha / rank, or alpha / √rank with ``use_rslora`` (Kalajdzievski, arXiv:2312.03732), computed in
float32 and rounded once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from slime_convert.errors import AdapterError
from slime_convert.files import read_json
from slime_convert.files.partial import Conversion, refuse_unfinished
from slime_convert.files.reading import computed
from slime_convert.files.tensors import ITEM_BYTES, LazyTensor
from slime_convert.files.writing import in_hand
from slime_convert.formats import hf
from slime_convert.formats.safetensors import ADAPTER, read_header
from slime_convert.progress import Converted

if TYPE_CHECKING:
    from torch import Tensor

_Tensors = Mapping[str, LazyTensor]
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.default)?(\.weight)?$")
_SAVED = re.compile(r"(?P<name>.+?)(\.modules_to_save(\.default)?|\.base_layer)?\.(?P<kind>weight|bias)$")
_LARGEST = 2**48
# Settings that give the factors another meaning than the sum above.
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_rslora": (None, False, True),
    "use_dora": (None, False),
    "fan_in_fan_out": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "use_qalora": (None, False),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config"), (None,)),
    **dict.fromkeys(("trainable_token_indices", "use_bdlora"), (None,)),
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}
_ADVICE = "give the model that the adapter was trained on"
_WRITTEN_BY_PEFT = "give a directory that PEFT's save_pretrained wrote"


def merge_lora(
    hf_checkpoint: str | Path, adapter: str | Path, save: str | Path, **output: Unpack[hf.OutputOptions]
) -> Converted:
    """Merge a LoRA adapter into its model.

    Args:
        hf_checkpoint: The model that the adapter was trained on. Quantized weights become ``bfloat16``.
        adapter: Directory of the adapter.
        save: Directory to create.
        output: ``force``, ``max_shard_bytes``, ``on_progress``; see :class:`slime_convert.OutputOptions`.

    Raises:
        AdapterError: The adapter cannot be read, is of another kind, or is for another model.
        ConvertError: The model cannot be read, or the output not be written; ``save`` is unchanged then.
    """
    origin, directory = Path(hf_checkpoint), Path(adapter)
    conversion = Conversion("merge-lora", (origin, directory))
    model = hf.open_model(origin)
    tensors = merged({name: model.tensor(name) for name in model.tensors}, directory)
    hf.refuse_other_copies(tensors, model.shape, f"{origin} with {directory} merged in", tied=model.tied)
    dtype = max(tensors.values(), key=lambda tensor: tensor.nbytes).dtype
    others = partial(hf.copy_model_files, origin=origin, config=model.config, dtype=dtype, with_adapter=False)
    return hf.write_model([in_hand(*item) for item in tensors.items()], save, conversion, others, **output)


def merged(tensors: _Tensors, adapter: Path) -> dict[str, LazyTensor]:
    """A model's weights with an adapter merged in, names and types as they are; errors as of :func:`merge_lora`."""
    refuse_unfinished(adapter)
    config = read_json(adapter, hf.ADAPTER_CONFIG, AdapterError, _WRITTEN_BY_PEFT)
    for key, allowed in _ALLOWED.items():
        if not any(config.get(key) == value and type(config.get(key)) is type(value) for value in allowed):
            shown = ", ".join(str(value) for value in allowed if value is not None) or "none"
            raise AdapterError(f"{key} {str(config.get(key))[:80]} of {adapter} is not supported; allowed: {shown}")
    config["alpha_pattern"] = _patterns(config, adapter)
    factors, saved = _read(adapter)
    result = dict(tensors)
    # PEFT also saves an embedding that it adapts: the factors are for the saved one.
    for name, tensor in saved.items():
        base = _weight(name, tensors, adapter)
        if base.shape != tensor.shape:
            raise AdapterError(f"{name} of {adapter} has shape {tensor.shape}, and the model's {base.shape}; {_ADVICE}")
        cast = partial(_cast, base.dtype)
        result[name] = tensor if tensor.dtype == base.dtype else computed(base.dtype, base.shape, cast, tensor)
    for module, sides in factors.items():
        result[f"{module}.weight"] = _changed(result, module, sides, config, adapter)
    return result


def _read(adapter: Path) -> tuple[dict[str, dict[str, LazyTensor]], dict[str, LazyTensor]]:
    """The factors by module and side, and the weights that were trained as a whole."""
    factors: dict[str, dict[str, LazyTensor]] = {}
    saved: dict[str, LazyTensor] = {}
    for name, entry in read_header(adapter, f"{ADAPTER}.safetensors").items():
        bare, dtype = name.removeprefix(_PREFIX), entry.info.dtype
        if "float" not in dtype or dtype not in ITEM_BYTES:
            raise AdapterError(f"{name} of {adapter} has type {dtype}; allowed: floating-point numbers; fetch it again")
        if match := _FACTOR.match(bare):
            side = (match["embedding"] or "") + match["side"]
            factors.setdefault(match["module"], {})[side] = entry.tensor()
        elif "lora_" not in bare and (match := _SAVED.match(bare)):
            saved[f"{match['name']}.{match['kind']}"] = entry.tensor()
        else:
            raise AdapterError(f"{name} of {adapter} is not a part of a plain LoRA adapter; merge it with PEFT")
    if not factors and not saved:
        raise AdapterError(f"{adapter} holds no factors; {_WRITTEN_BY_PEFT}")
    return factors, saved


def _weight(name: str, tensors: _Tensors, adapter: Path) -> LazyTensor:
    if name not in tensors:
        raise AdapterError(f"{adapter} changes {name}, which the model does not have; {_ADVICE}")
    return tensors[name]


def _changed(tensors: _Tensors, module: str, sides: _Tensors, config: Mapping[str, Any], adapter: Path) -> LazyTensor:
    """A module's weight with the scaled product of its factors added."""
    is_embedding = "embedding_A" in sides  # its rows are the inputs
    names = ("embedding_A", "embedding_B") if is_embedding else ("A", "B")
    if sides.keys() != set(names):
        raise AdapterError(f"{adapter} has only {', '.join(sides)} of {module}'s two factors; fetch it again")
    a, b = (sides[name] for name in names)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        raise AdapterError(f"{module} of {adapter} has factors of shapes {a.shape} and {b.shape}; fetch it again")
    name, rank, product = f"{module}.weight", a.shape[0], (b.shape[0], a.shape[1])
    base = _weight(name, tensors, adapter)  # first: patterns take long to match a very long name
    scale = _alpha(module, config, adapter) / (rank**0.5 if config.get("use_rslora") else rank)
    if base.shape != (product[::-1] if is_embedding else product):
        raise AdapterError(f"{adapter} changes {name} by {product}, and the model's has shape {base.shape}; {_ADVICE}")
    return computed(base.dtype, base.shape, partial(_added, name, scale, is_embedding), base, a, b)


def _patterns(config: Mapping[str, Any], adapter: Path) -> list[tuple[re.Pattern[str], Any]]:
    """``alpha_pattern``, whose first pattern that matches the end of a module's name counts, as in PEFT."""
    found = []
    try:
        for pattern, alpha in (config.get("alpha_pattern") or {}).items():
            # A repeated group, or many repetitions or groups, can take for ever to match.
            repetitions = len(re.findall(r"[*+{]|(?<!\()\?", pattern))
            if re.search(r"\)[*+{]", pattern) or max(repetitions, pattern.count("(")) > 3 or len(pattern) > 1000:
                how = "at most three repetitions and three groups, none repeated; write the modules' names"
                raise AdapterError(f"alpha_pattern {pattern[:80]!r} of {adapter} is too complicated; allowed: {how}")
            found.append((re.compile(rf"(.*\.)?({pattern})$"), alpha))
    except (AttributeError, OverflowError, re.error) as error:
        raise AdapterError(f"alpha_pattern of {adapter} holds no patterns ({error}); fetch it again") from error
    return found


def _alpha(module: str, config: Mapping[str, Any], adapter: Path) -> float:
    matching = (value for pattern, value in config["alpha_pattern"] if pattern.match(module))
    alpha: Any = next(matching, config.get("lora_alpha"))
    if type(alpha) not in (int, float) or not abs(alpha) < _LARGEST:
        shown = str(alpha)[:80]
        raise AdapterError(f"lora_alpha of {adapter} is {shown}; it must be a number below {_LARGEST}; fetch it again")
    return float(alpha)


def _added(name: str, scale: float, transpose: bool, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    delta = (b.float() @ a.float()) * scale
    result = (weight.float() + (delta.T if transpose else delta)).to(weight.dtype)
    if not result.isfinite().all():
        raise AdapterError(f"{name} would hold a NaN or an infinity with the adapter merged in; repair the adapter")
    return result


def _cast(dtype: str, tensor: Tensor) -> Tensor:
    import torch

    return tensor.to(getattr(torch, dtype))
