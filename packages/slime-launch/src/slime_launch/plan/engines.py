"""The engines of a run, those that are alike together, and what each holds in memory."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from slime_convert.errors import ConvertError
from slime_convert.mapping import weight_map
from slime_convert.quantize import read_format
from slime_convert.shape import ModelShape
from slime_launch.config import Settings
from slime_launch.derived import engine_dtype, is_quantized
from slime_launch.devices import GIB, DeviceSpec
from slime_launch.names import stored_bytes
from slime_rollout.engine import API_KEY, KV_TOKENS, EngineConfig, EnginePlan, EngineSpec, PlannedModel, SglangValue

# What an engine of three processes takes before it holds a model, measured on a CPU (0.62 to 0.73 GiB); on CUDA the
# context, its libraries and NCCL's buffers, as users report them (not measured here).
ENGINE_PROCESS, CUDA_PROCESS = int(0.7 * GIB), 2 * GIB
# SGLang chooses its --mem-fraction-static by device and parallel size; this is about what it comes to.
MEM_FRACTION = 0.85


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineGroup:
    """Engines that are alike.

    Attributes:
        model: Its name in ``--sglang-config``; ``None`` where all engines serve the trained model.
        path: Its Hugging Face directory.
        trained: Whether it gets the trainer's weights.
        role: ``regular``, or a half: ``prefill``, ``decode`` or ``encoder``.
        first_gpus: Of each engine the number of its first GPU among those that generate.
        ranks: GPUs of one engine.
        args: SGLang's flags of these engines, without dashes in front.
    """

    model: str | None
    path: str
    trained: bool
    role: str
    first_gpus: tuple[int, ...]
    ranks: int
    args: Mapping[str, SglangValue]

    @property
    def count(self) -> int:
        """Number of engines."""
        return len(self.first_gpus)

    @property
    def generates(self) -> bool:
        """Whether responses of the trained model come from it."""
        return self.trained and self.role in ("regular", "decode")

    @property
    def title(self) -> str:
        """In front of the word engine: the model, and the role of a half."""
        names = (self.model, None if self.role == "regular" else self.role)
        return " ".join(name for name in names if name is not None and name != "default")


def engine_groups(settings: Settings, plan: EnginePlan | None) -> list[EngineGroup]:
    """All engines that the run starts; ``plan`` is that of a file with several models, or of halves."""
    engine, gpus = settings.engine, settings.cluster.rollout_gpus
    if not settings.kind.generates or engine.rollout_external_engine_addrs or not gpus:
        return []
    if plan is not None:
        return [group for model in plan.models for group in _groups_of(model, settings.engine)]
    if engine.sglang_config is not None or engine.prefill_num_servers is not None:
        return []  # it has a problem
    path, size = settings.rollout.data.hf_checkpoint, engine.rollout_num_gpus_per_engine
    first = tuple(range(0, gpus - size + 1, size))
    args = _shown(engine.sglang_args)
    return [EngineGroup(model=None, path=path, trained=True, role="regular", first_gpus=first, ranks=size, args=args)]


def _groups_of(model: PlannedModel, engine: EngineConfig) -> Iterator[EngineGroup]:
    """The engines of one model in the order of their GPUs."""
    alike: dict[str, list[EngineSpec]] = {}
    for spec in sorted(model.specs, key=lambda spec: spec.base_gpu_id):
        key = repr((spec.worker_type, spec.tp_size, sorted(spec.sglang_args.items())))
        alike.setdefault(key, []).append(spec)
    for specs in alike.values():
        spec = specs[0]
        yield EngineGroup(
            model=model.name,
            path=spec.model_path,
            trained=model.trained,
            role=spec.worker_type,
            first_gpus=tuple(spec.base_gpu_id for spec in specs),
            ranks=spec.ranks(engine),
            args=_shown({**engine.sglang_args, **spec.sglang_args}),
        )


def _shown(args: Mapping[str, SglangValue]) -> dict[str, SglangValue]:
    """Flags that are in force, without the key."""
    return {name: value for name, value in args.items() if value is not False and name != API_KEY}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineEstimate:
    """Bytes of one GPU of an engine; without CUDA, of the whole engine.

    Attributes:
        kv_cache: Of all tokens that the engine can hold at a time.
        rest: Processes, activations, and on CUDA what ``--sglang-mem-fraction-static`` leaves.
        kv_tokens: Tokens of all requests that fit into the cache.
    """

    group: EngineGroup
    weights: int
    kv_cache: int
    rest: int
    kv_tokens: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.rest


def shape_of(group: EngineGroup, trained: ModelShape) -> ModelShape | None:
    """The shape of a group's model; ``None`` where its config is not there, or of a family that is not known."""
    if group.trained:
        return trained
    try:
        return ModelShape.from_hf_config(group.path)
    except (ConvertError, OSError):
        return None


def engine_memory(settings: Settings, shape: ModelShape, device: DeviceSpec, group: EngineGroup) -> EngineEstimate:
    """The memory of an engine of a group, whose model has this shape."""
    ranks, args = group.ranks, group.args
    width = 2 if engine_dtype(settings.megatron, settings.rollout) == "bfloat16" else 4
    whole = engine_weights(settings, shape) if group.trained else _stored_weights(group.path, shape, width)
    per_token = kv_numbers(shape, ranks) * width
    if device.is_cpu:
        limit = settings.rollout.sampling.rollout_max_context_len or shape.max_position_embeddings
        tokens = int(str(args.get("max-total-tokens", max(KV_TOKENS, limit))))
        cache, rest = tokens * per_token * ranks, ENGINE_PROCESS
        return EngineEstimate(group=group, weights=whole, kv_cache=cache, rest=rest, kv_tokens=tokens)
    fraction = float(str(args.get("mem-fraction-static", MEM_FRACTION)))
    weights, static = whole // ranks, int(device.memory * fraction)
    tokens = max(0, static - weights) // per_token
    if "max-total-tokens" in args:
        tokens = min(tokens, int(str(args["max-total-tokens"])))
    return EngineEstimate(
        group=group, weights=weights, kv_cache=tokens * per_token, rest=CUDA_PROCESS, kv_tokens=tokens
    )


def engine_weights(settings: Settings, shape: ModelShape) -> int:
    """Bytes of the weights that engines hold and are sent; a quantized model's are those of its files."""
    if is_quantized(settings.rollout.data.hf_checkpoint):
        return stored_bytes(Path(settings.rollout.data.hf_checkpoint)) or num_parameters(shape)
    return num_parameters(shape) * (2 if engine_dtype(settings.megatron, settings.rollout) == "bfloat16" else 4)


def _stored_weights(path: str, shape: ModelShape, width: int) -> int:
    """Of a model that is not trained: one that is quantized is served as it is."""
    try:
        as_it_is = read_format(Path(path)) is not None
    except ConvertError:  # in a way that SGLang may know
        as_it_is = True
    return (stored_bytes(Path(path)) if as_it_is else 0) or num_parameters(shape) * (1 if as_it_is else width)


@functools.cache
def num_parameters(shape: ModelShape) -> int:
    """Numbers in all weights of the model, without padding of the vocabulary."""
    weights = weight_map(shape, one_expert=True)
    return sum(weights.count(name) * math.prod(weights.megatron_shape(name)) for name in weights.megatron_names())


def kv_numbers(shape: ModelShape, ranks: int) -> int:
    """Numbers that a token takes in the KV cache of one of an engine's ranks; latents are on every rank."""
    if shape.multi_latent_attention:
        return shape.num_layers * ((shape.kv_lora_rank or 0) + (shape.qk_pos_emb_head_dim or 0))
    return shape.num_layers * 2 * max(1, -(-shape.num_query_groups // ranks)) * shape.kv_channels
