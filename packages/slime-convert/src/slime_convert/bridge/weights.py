"""`BridgedWeights`: a model's weights under both names, as mbridge knows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from mbridge.core import VLMBridge
from mbridge.core.bridge import _MODEL_REGISTRY
from mbridge.core.parallel_states import ParallelStates
from torch import Tensor

from slime_convert.bridge.args import check_flags_with, megatron_args
from slime_convert.bridge.corrections import corrected_settings, has_swapped_halves, swap_halves
from slime_convert.bridge.hf_config import config_for_mbridge
from slime_convert.bridge.megatron_model import BUILD_SETTINGS, MegatronWeight, model_weights
from slime_convert.errors import UnsupportedModelError, WeightError
from slime_convert.shape.hf_config import read_config

_OF_THE_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


class BridgedWeights:
    """A :class:`slime_convert.mapping.WeightTranslation` through mbridge.

    Args:
        hf_directory: Holds the ``config.json`` of the model.
        flags: Shape flags to be checked against it, by ``dest``.
        make_vocab_size_divisible_by: The embedding is padded to a multiple of this.

    Raises:
        HfConfigError: There is no readable ``config.json``.
        UnsupportedModelError: mbridge does not know the model, or it has something that cannot be converted here.
        ShapeMismatchError: Flags contradict the config.
    """

    def __init__(self, hf_directory: str | Path, flags: Mapping[str, Any], make_vocab_size_divisible_by: int) -> None:
        settings, where = read_config(hf_directory)
        kind = _kind_of(settings.get("model_type"), where)
        config = config_for_mbridge(settings, where)
        self.family: str = config.model_type
        self._vocab_size: int = config.vocab_size
        self.padded_vocab_size = -(-self._vocab_size // make_vocab_size_divisible_by) * make_vocab_size_divisible_by
        self._tied = bool(getattr(config, "tie_word_embeddings", False))
        self._where = where
        self._bridge = _bridge(kind, config, where)
        model_args = _model_args(self._bridge) | {"vocab_size": self.padded_vocab_size}
        self._args = megatron_args(self._bridge.config, model_args, config)
        check_flags_with(self._args, flags)
        try:
            weights = model_weights(self._bridge.config, model_args, tied=self._tied)
        except Exception as error:  # Megatron stumbles over a wrong config in many ways
            raise UnsupportedModelError(
                f"Megatron cannot build the {self.family} model of {where} ({error}); use the original config"
            ) from error
        self.equal_layers = all(weight.stacked for weight in weights if weight.name.startswith("decoder.layers."))
        self._weights = {weight.name: weight for weight in weights}
        self._by_name = self._weights | {weight.engine_name: weight for weight in weights}
        self._hf = {weight.name: self._hf_shapes(weight) for weight in weights}

    def megatron_args(self) -> Mapping[str, Any]:
        """The arguments that a Megatron checkpoint of this model records, as plain values."""
        return self._args

    def megatron_names(self) -> Iterator[str]:
        """Every Megatron weight of the model, in the model's order."""
        return iter(self._weights)

    def megatron_shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a Megatron weight, with the vocabulary's padding."""
        return self._find(name).shape

    def stored_as(self, name: str) -> list[str]:
        """The names, one or two, under which ``torch_dist`` checkpoints hold a Megatron weight."""
        return list(self._find(name).stored_as)

    def expert(self, name: str) -> int | None:
        """The number of the expert that a Megatron weight belongs to, if it does."""
        return self._find(name).expert

    def hf_names(self) -> Iterator[str]:
        """Every Hugging Face weight of the model, in the model's order."""
        for shapes in self._hf.values():
            yield from shapes

    def hf_parts(self, name: str) -> list[str]:
        """The Hugging Face weights that one Megatron weight is made of."""
        names: list[str] = self._bridge._weight_name_mapping_mcore_to_hf(self._find(name).engine_name)
        return names

    def hf_copies(self) -> dict[str, str]:
        """Hugging Face weights that are copies of another, by name."""
        return {
            copy: parts[0]
            for name, shapes in self._hf.items()
            if (parts := self.hf_parts(name)) and len(shapes) > len(parts)
            for copy in shapes
            if copy not in parts
        }

    def to_hf(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """The Hugging Face weights inside a Megatron weight; as :meth:`slime_convert.mapping.WeightMap.to_hf`."""
        if name == "output_layer.weight" and self._tied:
            return []
        weight = self._find(name)
        expected = self._unpadded(weight)
        if weight.name in _OF_THE_VOCABULARY and tensor.dim() == 2 and tensor.shape[0] > expected[0]:
            tensor = tensor[: expected[0]]
        if tuple(tensor.shape) != expected:
            raise WeightError(f"{name} has shape {tuple(tensor.shape)}, but the model's config says {expected}")
        return self._cut(weight, tensor)

    def from_hf(self, name: str, load: Callable[[str], Tensor]) -> Tensor:
        """A whole Megatron weight; as :meth:`slime_convert.mapping.WeightMap.from_hf`."""
        weight = self._find(name)
        parts = []
        for part in self.hf_parts(name):
            tensor, expected = load(part), self._hf[weight.name][part]
            if tuple(tensor.shape) != expected:
                raise WeightError(f"{part} has shape {tuple(tensor.shape)}, but the model's config says {expected}")
            parts.append(tensor)
        whole: Tensor = self._bridge._weight_to_mcore_format(weight.engine_name, parts)
        if has_swapped_halves(self.family, weight.name):
            whole = swap_halves(whole)
        missing = weight.shape[0] - whole.shape[0]
        return torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])]) if missing else whole

    def merge_tp(self, name: str, shards: Sequence[Tensor]) -> Tensor:
        """A whole Megatron weight from its tensor-parallel shards in rank order."""
        weight, ranks = self._find(name), len(shards)
        # Transformer Engine's layers may hold whole on each rank what local ones split.
        if ranks == 1 or weight.split is None or tuple(shards[0].shape) == weight.shape:
            return shards[0]
        self._bridge.mpu = ParallelStates(tp_size=ranks, etp_size=ranks)
        parameter = SimpleNamespace(tensor_model_parallel=True, partition_dim=weight.split)
        whole: Tensor = self._bridge._weight_merge_across_tp(weight.engine_name, list(shards), parameter)
        return whole

    def _find(self, name: str) -> MegatronWeight:
        try:
            return self._by_name[name]
        except KeyError:
            raise WeightError(
                f"{name!r} is no weight of the {self.family} model of {self._where}; weights look like "
                f"{list(self._weights)[1]!r}; use whole-model layer numbers and no wrapper's prefix"
            ) from None

    def _unpadded(self, weight: MegatronWeight) -> tuple[int, ...]:
        return (self._vocab_size, *weight.shape[1:]) if weight.name in _OF_THE_VOCABULARY else weight.shape

    def _cut(self, weight: MegatronWeight, tensor: Tensor) -> list[tuple[str, Tensor]]:
        if has_swapped_halves(self.family, weight.name):
            tensor = swap_halves(tensor)
        return list(zip(*self._bridge._weight_to_hf_format(weight.engine_name, tensor.contiguous()), strict=True))

    def _hf_shapes(self, weight: MegatronWeight) -> dict[str, tuple[int, ...]]:
        """The Hugging Face weights inside a Megatron weight, copies too, and their shapes."""
        try:
            cut = self._cut(weight, torch.empty(self._unpadded(weight), device="meta"))
        except (NotImplementedError, AssertionError, KeyError) as error:
            raise UnsupportedModelError(
                f"mbridge has no Hugging Face name for {weight.engine_name} of the {self.family} model of "
                f"{self._where} ({error}); convert another model"
            ) from error
        return {name: tuple(tensor.shape) for name, tensor in cut}


def _kind_of(family: Any, where: str) -> Any:
    """mbridge's class for a family."""
    known = sorted(name for name, kind in _MODEL_REGISTRY.items() if not issubclass(kind, VLMBridge))
    if family in known:
        return _MODEL_REGISTRY[family]
    in_registry = isinstance(family, str) and family in _MODEL_REGISTRY
    why = "has a vision tower, which this cannot convert" if in_registry else "is unknown to mbridge"
    raise UnsupportedModelError(
        f"model_type {family!r} of {where} {why}; allowed with --bridge mbridge: {', '.join(known)}; "
        "convert a model of one of these families"
    )


def _bridge(kind: Any, config: Any, where: str) -> Any:
    """mbridge's object for a model, told that this process is alone, with a Megatron config that needs no GPU."""
    # mbridge changes a table of its class for tied models: a class of our own keeps that from the next model.
    # `dtype` is that of Megatron's model, which has no elements; weights keep their own.
    try:
        own_settings = {**BUILD_SETTINGS, **corrected_settings(config)}
        kind = type(
            kind.__name__,
            (kind,),
            {
                "_DIRECT_MAPPING": dict(kind._DIRECT_MAPPING),
                "TransformerConfigClass": staticmethod(_config_of(kind.TransformerConfigClass, own_settings)),
            },
        )
        bridge = kind(config, dtype=torch.bfloat16, parallel_states=ParallelStates())
    except (AttributeError, TypeError, ValueError, AssertionError, KeyError) as error:
        raise UnsupportedModelError(
            f"mbridge cannot describe the {config.model_type} model of {where} ({error}); use the original config"
        ) from error
    bridge.dtype = None
    if isinstance(freq := bridge.config.moe_layer_freq, list) and all(freq):
        bridge.config.moe_layer_freq = 1  # of a list, Megatron would give each layer keys of its own
    if not bridge.config.mtp_num_layers:
        bridge.config.mtp_num_layers = None
    return bridge


def _model_args(bridge: Any) -> dict[str, Any]:
    """What Megatron's model is made with beside its config, without the prediction modules: mbridge would make
    those of MiMo from Transformer Engine's parts."""
    modules, bridge.config.mtp_num_layers = bridge.config.mtp_num_layers, None
    args: dict[str, Any] = bridge._get_gptmodel_args()
    bridge.config.mtp_num_layers = modules
    return args


def _config_of(kind: Any, own_settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Makes a Megatron config from mbridge's settings, where there are none of our own."""
    names = {field.name for field in dataclasses.fields(kind)}

    def make(**settings: Any) -> Any:
        if "max_position_embeddings" in settings and "max_position_embeddings" not in names:
            # Before megatron-core 0.13 YaRN's field had this name.
            settings["original_max_position_embeddings"] = settings.pop("max_position_embeddings")
        return kind(**{**settings, **own_settings})

    return make
