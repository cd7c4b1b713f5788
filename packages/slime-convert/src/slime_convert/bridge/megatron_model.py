"""The names and shapes of a Megatron model's weights, told by the model itself, built on torch's meta device."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import multi_latent_attention


def _leave(tensor: torch.Tensor) -> None:
    """Initialise nothing: there are no elements."""


BUILD_SETTINGS: Mapping[str, Any] = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "moe_grouped_gemm": False,
    "moe_shared_expert_overlap": False,
    "moe_token_dispatcher_type": "allgather",
    "variable_seq_lengths": False,
    "moe_router_load_balancing_type": "none",
    **dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), _leave),
    "disable_bf16_reduced_precision_matmul": False,  # Megatron would change torch's own setting
}
"""Fields of Megatron's config with which a model can be built without a GPU. None of them changes its weights."""

_ENVIRONMENT = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_LAYER = re.compile(r"^(?P<layer>decoder\.layers\.\d+\.|mtp\.layers\.\d+\.transformer_layer\.)(?P<weight>.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<linear>linear_fc[12])\.weight$")
# Where Transformer Engine fuses a norm into the linear layer behind it.
_FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_FUSED_LATENT = {
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}


@dataclass(frozen=True)
class MegatronWeight:
    """A weight of a Megatron model, without its elements.

    Attributes:
        name: In a model of local layers.
        engine_name: In a model of Transformer Engine's layers.
        shape: Its whole shape.
        stored_as: Its names in a ``torch_dist`` checkpoint, with the layer's number: that which Transformer Engine's
            layers ask for, then that of local layers if it is another.
        stacked: Whether a checkpoint stacks it with the other layers' weights of its kind.
        expert: Number of the expert that it belongs to, if it does.
        split: Dimension that is split over tensor-parallel ranks, if one is.
    """

    name: str
    engine_name: str
    shape: tuple[int, ...]
    stored_as: tuple[str, ...]
    stacked: bool
    expert: int | None
    split: int | None


def model_weights(config: Any, model_args: Mapping[str, Any], *, tied: bool) -> list[MegatronWeight]:
    """The weights of the model that a Megatron config describes, in the model's order.

    Args:
        config: A ``TransformerConfig`` with :data:`BUILD_SETTINGS`.
        model_args: What else ``GPTModel`` is made with.
        tied: Whether the output layer shares the embedding's weights.
    """
    group = _OneProcess()
    groups = ProcessGroupCollection(**{field.name: group for field in fields(ProcessGroupCollection)})
    with _alone(groups), torch.device("meta"):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", pp_rank=0)
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = _Attention
        further = (
            {"mtp_block_spec": get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)}
            if config.mtp_num_layers
            else {}
        )
        model = GPTModel(
            config, spec, pg_collection=groups, share_embeddings_and_output_weights=tied, **model_args, **further
        )
        stored = model.sharded_state_dict(metadata={"dp_cp_group": group})
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("._extra_state")}
    splits = {name: _split(parameter) for name, parameter in model.named_parameters()}
    latent = hasattr(config, "kv_lora_rank")
    return [
        _weight(name, tuple(tensor.shape), stored[name].key, splits.get(name), tensors, latent=latent)
        for name, tensor in tensors.items()
    ]


def _weight(
    name: str, shape: tuple[int, ...], key: str, split: int | None, names: Mapping[str, Any], *, latent: bool
) -> MegatronWeight:
    if (match := _LAYER.match(name)) is None:
        return MegatronWeight(name, name, shape, (key,), False, None, split)
    layer, weight = match["layer"], match["weight"]
    stacked = layer.startswith("decoder.") and not key.startswith(layer)
    if stacked:
        key = layer + key.removeprefix("decoder.layers.")
    if expert := _EXPERT.match(weight):
        number = int(expert["expert"])
        engine_name = f"{layer}mlp.experts.{expert['linear']}.weight{number}"
        return MegatronWeight(name, engine_name, shape, (key,), stacked, number, split)
    fused = dict(_FUSED_LATENT if latent else _FUSED)
    if f"{layer}mlp.router.weight" in names:
        del fused["pre_mlp_layernorm.weight"]
    engine_name = layer + fused.get(weight, weight)
    return MegatronWeight(name, engine_name, shape, tuple(dict.fromkeys((engine_name, key))), stacked, None, split)


def _split(parameter: Any) -> int | None:
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


class _Attention(torch.nn.Module):
    """In the place of core attention, which has no weights; Megatron's own does not take latent attention's sizes."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class _OneProcess:
    """A process group of one, which Megatron asks for nothing but this."""

    def size(self) -> int:
        """Processes of the group."""
        return 1

    def rank(self) -> int:
        """This process's number."""
        return 0


@contextmanager
def _alone(groups: ProcessGroupCollection) -> Iterator[None]:
    """Megatron's modules can be built without a GPU, other processes and Transformer Engine; all is then as before.

    megatron-core 0.16 places the buffers of a router on the GPU, and compares layers with classes that it defines
    only where Transformer Engine is installed.
    """
    # Megatron's models write these for Transformer Engine, and refuse other values in them.
    environment = {name: os.environ.pop(name) for name in _ENVIRONMENT if name in os.environ}
    with ExitStack() as stack:
        stack.callback(os.environ.update, environment)
        stack.callback(lambda: [os.environ.pop(name, None) for name in _ENVIRONMENT])
        stack.enter_context(_replaced(torch.cuda, "current_device", lambda: "meta"))
        # Prediction modules ask these for their groups and their stage.
        stack.enter_context(_replaced(ProcessGroupCollection, "use_mpu_process_groups", lambda *_, **__: groups))
        stack.enter_context(_replaced(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", groups.tp))
        for axis in ("TENSOR", "PIPELINE"):
            stack.enter_context(_replaced(parallel_state, f"_MPU_{axis}_MODEL_PARALLEL_RANK", 0))
            stack.enter_context(_replaced(parallel_state, f"_MPU_{axis}_MODEL_PARALLEL_WORLD_SIZE", 1))
        for name in ("TELinear", "TEColumnParallelLinear"):
            if not isinstance(getattr(multi_latent_attention, name, None), type):
                stack.enter_context(_replaced(multi_latent_attention, name, type(name, (), {})))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    missing = object()
    before = vars(owner).get(name, missing)  # of a class, what was defined there
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
