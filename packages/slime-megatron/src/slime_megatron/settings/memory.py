"""How much device memory a role that is trained takes, before anything is built. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slime_convert.mapping import weight_map
from slime_convert.shape import ModelShape
from slime_core.errors import ConfigError
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.fits import layer_stages
from slime_megatron.settings.trained import Selection


@dataclass(frozen=True)
class RoleMemory:
    """Bytes that a rank holds of a role between two steps; activations come on top.

    Gradients are fp32. Adam keeps two fp32 numbers for each that trains, and with bf16 the fp32 weight; the distributed
    optimizer shares them out over the ranks that hold the same weights. ``host`` is what ``--optimizer-cpu-offload``
    has in host memory, where there is a GPU: the same of what it offloads, and its gradient.
    """

    weights: int
    gradients: int
    optimizer: int
    host: int = 0

    @property
    def total(self) -> int:
        """All that is on the device."""
        return self.weights + self.gradients + self.optimizer


def stages_memory(shape: ModelShape, config: MegatronConfig, world_size: int, **how: bool) -> list[RoleMemory]:
    """The memory of each pipeline stage of a role, as of :func:`stage_memory`."""
    stages = range(config.pipeline_model_parallel_size)
    return [stage_memory(shape, config, world_size, stage, **how) for stage in stages]


def check_memory(roles: Mapping[str, Sequence[RoleMemory]], available: int, *, take_turns: bool) -> None:
    """Check that what is trained fits on a device.

    Args:
        roles: The stages of each role.
        available: Bytes of a device.
        take_turns: Roles wait in host memory while another works; else the device holds all of them.

    Raises:
        ConfigError: A role does not fit alone, or they do not fit together.
    """
    for role, stages in roles.items():
        memory = max(stages, key=lambda own: own.total)
        if memory.total > available:
            raise ConfigError(
                f"the {role} takes {_gib(memory.total)} on each device ({_gib(memory.weights)} weights, "
                f"{_gib(memory.gradients)} gradients, {_gib(memory.optimizer)} optimizer), which has "
                f"{_gib(available)}; {_SPLIT}"
            )
    each = max(([own.total for own in stage] for stage in zip(*roles.values(), strict=True)), key=sum)
    if not take_turns and sum(each) > available:
        raise ConfigError(
            f"the {' and the '.join(roles)} take {' + '.join(map(_gib, each))} on each device, which has "
            f"{_gib(available)}, and each fits alone; have them take turns in device memory (--offload-train, which "
            f"--colocate brings), or {_SPLIT}"
        )


_SPLIT = (
    "split it further (--tensor-model-parallel-size, --pipeline-model-parallel-size, --expert-model-parallel-size), or "
    "give --use-distributed-optimizer, --bf16 or --lora-rank"
)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def stage_memory(
    shape: ModelShape,
    config: MegatronConfig,
    world_size: int,
    stage: int,
    *,
    value_head: bool = False,
    on_gpu: bool = False,
    only_evaluates: bool = False,
) -> RoleMemory:
    """The memory of one pipeline stage; a ``value_head`` has the place of the output layer.

    On a GPU, ``--optimizer-cpu-offload`` has its part elsewhere. What ``only_evaluates`` has weights alone.
    """
    weights = gradients = optimizer = host = 0
    offloaded = config.offload_fraction if on_gpu else 0.0
    for alike, count, is_trained, copies in _numbers(shape, config, world_size, stage, value_head):
        weights += alike * count * (2 if config.bf16 else 4)  # the routers' few fp32 biases count like the others
        if is_trained and not only_evaluates:
            gradients += 4 * alike * count
            kept = count * (12 if config.bf16 else 8)
            own = math.ceil(kept / copies) if config.use_distributed_optimizer else kept
            optimizer += alike * math.ceil((1 - offloaded) * own)
            host += alike * math.ceil(offloaded * own * 16 / 12)  # with a gradient; what is offloaded has bf16
    return RoleMemory(weights, gradients, optimizer, host)


def _numbers(
    shape: ModelShape, config: MegatronConfig, world_size: int, stage: int, value_head: bool
) -> Iterator[tuple[int, int, bool, int]]:
    """The weights of a stage: how many are alike, the numbers of one that a rank holds, whether they train, and the
    ranks that hold them.
    """
    tensor, lora = config.tensor_model_parallel_size, config.lora
    by_name = lora is not None or config.selection != Selection()  # then one expert can be unlike another
    weights = weight_map(shape, shape.padded_vocab_size(tensor), one_expert=not by_name)
    tied = not (shape.untie_embeddings_and_output_weights or value_head)
    stages = _stages(shape, config, tied=tied)
    dense_copies = world_size // (tensor * config.pipeline_model_parallel_size)
    expert_ranks = config.expert_tensor_size * config.expert_model_parallel_size
    expert_copies = world_size // (expert_ranks * config.pipeline_model_parallel_size)
    adapted = set(lora.weights(shape)) if lora is not None else set()
    for name in weights.megatron_names():
        if stage not in stages(name) or (value_head and name == "output_layer.weight"):
            continue
        lengths, is_expert = weights.megatron_shape(name), ".local_experts." in name
        split = config.expert_tensor_size if is_expert else tensor
        axis = weights.split_axis(name)
        own = tuple(length // split if place == axis else length for place, length in enumerate(lengths))
        held = math.prod(own) / (config.expert_model_parallel_size if is_expert else 1)
        copies = expert_copies if is_expert else dense_copies
        is_copy = name.startswith("embedding.") and stage > 0 and not tied
        is_trained = lora is None and not is_copy and config.selection.is_trained(name)
        yield weights.count(name), round(held), is_trained, copies
        if lora is not None and name in adapted:
            yield 1, lora.rank * sum(own), True, copies
    if value_head and stage == config.pipeline_model_parallel_size - 1:
        yield 1, shape.hidden_size, True, dense_copies


def _stages(shape: ModelShape, config: MegatronConfig, *, tied: bool) -> Callable[[str], set[int]]:
    """From a weight to the pipeline stages that hold it; ``tied``: the output layer's is the embedding's."""
    layers, last = layer_stages(config, shape.num_layers), config.pipeline_model_parallel_size - 1

    def of(name: str) -> set[int]:
        words = name.split(".")
        if words[:2] == ["decoder", "layers"]:
            return {layers[int(words[2])]}
        if words[0] == "embedding":
            return {0, last} if tied or shape.mtp_num_layers else {0}
        return {last}

    return of
