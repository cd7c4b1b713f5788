"""What trainer ranks and engines hold in memory, at the moment of a step when that is most, against what there is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

from slime_convert.mapping import WeightMap
from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_launch.config import Settings
from slime_launch.overrides import Overrides
from slime_launch.plan.devices import GIB, Device
from slime_launch.validate import engine_dtype, is_quantized
from slime_megatron.activations import activation_memory
from slime_megatron.config import MegatronConfig
from slime_megatron.memory import stage_memory
from slime_megatron.overrides import role_config
from slime_rollout.engine.server import KV_TOKENS

# What a rank, or an engine of three processes, takes before it holds a model: measured on a CPU; on CUDA the
# context, its libraries and NCCL's buffers, as users report them (not measured here).
TRAINER_PROCESS, ENGINE_PROCESS, CUDA_PROCESS = int(0.45 * GIB), int(0.82 * GIB), 2 * GIB
SLEEPING_ENGINE = 3 * GIB  # what an engine keeps of a GPU while it sleeps, as users report it
# SGLang chooses its --mem-fraction-static by device and parallel size; this is about what it comes to.
MEM_FRACTION = 0.85


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerMemory:
    """Bytes of the trainer rank that needs most.

    Attributes:
        stage: Its pipeline stage.
        process: What it takes without a model.
        critic: Everything of the critic between steps.
        frozen: Reference and teacher, where they share the memory: on a CPU.
        activations: Of the micro-batch; ``logits`` those of the output layer.
        host: Bytes of host memory that frozen models take beside a GPU.
        phase: What it does then: train, or where nothing is trained evaluate, or send weights.
    """

    phase: str
    stage: int
    process: int
    weights: int
    gradients: int
    optimizer: int
    critic: int
    frozen: int
    activations: int
    logits: int
    host: int = 0

    @property
    def resident(self) -> int:
        """What it holds between steps."""
        return self.total - self.activations - self.logits

    @property
    def asleep(self) -> int:
        """What is left between steps of one that gave its memory back: frozen models are where they were."""
        return self.process + self.frozen

    @property
    def total(self) -> int:
        """What it needs in a step."""
        parts = ("process", "weights", "gradients", "optimizer", "critic", "frozen", "activations", "logits")
        return sum(int(getattr(self, part)) for part in parts)

    def parts(self) -> str:
        """The parts that take something, the largest first, in words."""
        names = ("weights", "gradients", "optimizer", "critic", "frozen", "activations", "logits", "process")
        sizes = sorted(((getattr(self, name), name) for name in names), reverse=True)
        return ", ".join(f"{name} {gib(size)}" for size, name in sizes if size >= GIB / 20)


def trainer_memory(
    settings: Settings, shape: ModelShape, device: Device, *, tokens: int, micro_batches: int, overrides: Overrides
) -> TrainerMemory:
    """The memory of the pipeline stage that needs most, for micro-batches of so many tokens.

    Where nothing is trained there is no backward pass, and without held-out rows no pass at all.
    """
    phase = "train" if not settings.only_evaluates else "send weights" if settings.generates else "evaluate"
    megatron, world = settings.megatron, settings.cluster.actor_gpus
    fused, passes = not device.is_cpu and megatron.bf16, phase != "send weights"
    actor = role_config(megatron, "actor", overrides)
    critic = role_config(megatron, "critic", overrides) if settings.algorithm.needs_critic else None

    def of(stage: int) -> TrainerMemory:
        own = stage_memory(shape, actor, world, stage)
        other = None if critic is None else stage_memory(shape, critic, world, stage, value_head=True)
        activations = activation_memory(
            shape, actor, stage=stage, tokens=tokens, micro_batches=micro_batches, fused=fused
        )
        copies = own.weights * (frozen_models(settings.algorithm, megatron) + old_actors(settings))
        return TrainerMemory(
            phase=phase,
            stage=stage,
            process=TRAINER_PROCESS if device.is_cpu else CUDA_PROCESS,
            weights=own.weights,
            gradients=own.gradients,
            optimizer=own.optimizer,
            critic=0 if other is None else other.weights + other.gradients + other.optimizer,
            frozen=copies if device.is_cpu else 0,
            activations=(activations.layers if phase == "train" else 0) + (activations.working if passes else 0),
            logits=activations.logits if passes else 0,
            host=0 if device.is_cpu else copies + (own.weights if copies else 0),
        )

    return max(map(of, range(megatron.pipeline_model_parallel_size)), key=lambda found: found.total)


def frozen_models(algorithm: AlgorithmConfig, megatron: MegatronConfig) -> int:
    """Models that are not trained, whose weights wait in host memory: reference and teacher."""
    own = megatron.base_is_reference
    return int(algorithm.needs_reference and not own) + int(megatron.opd_teacher_load is not None)


def old_actors(settings: Settings) -> int:
    """Copies of earlier weights that --keep-old-actor holds at most: a rollout may be as old as the buffer is long."""
    if not settings.algorithm.keep_old_actor or not settings.rollout.may_lag:
        return 0
    selection = settings.rollout.selection
    return max(selection.async_buffer_size or 0, selection.update_weights_interval - 1, 1) + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Bytes of one GPU of an engine; without CUDA, of the whole engine.

    Attributes:
        weights: Of the model.
        kv_cache: Of all tokens that the engine can hold at a time.
        rest: Processes, activations, and on CUDA what ``--sglang-mem-fraction-static`` leaves.
        kv_tokens: Tokens of all requests that fit into the cache.
        ranks: GPUs of the engine.
    """

    weights: int
    kv_cache: int
    rest: int
    kv_tokens: int
    ranks: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.rest


def engine_memory(settings: Settings, shape: ModelShape, device: Device) -> EngineMemory:
    """The memory of an engine of the trained model; of ``--sglang-config`` those of the run's own size."""
    ranks = settings.engine.rollout_num_gpus_per_engine
    width = 2 if engine_dtype(settings) == "bfloat16" else 4
    whole = engine_weights(settings, shape)
    per_token = kv_numbers(shape, ranks) * width
    args = settings.engine.sglang_args
    if device.is_cpu:
        limit = settings.rollout.sampling.rollout_max_context_len or shape.max_position_embeddings
        tokens = int(str(args.get("max-total-tokens", max(KV_TOKENS, limit))))
        return EngineMemory(
            weights=whole, kv_cache=tokens * per_token * ranks, rest=ENGINE_PROCESS, kv_tokens=tokens, ranks=ranks
        )
    fraction = float(str(args.get("mem-fraction-static", MEM_FRACTION)))
    weights, static = whole // ranks, int(device.memory * fraction)
    tokens = max(0, static - weights) // per_token
    if "max-total-tokens" in args:
        tokens = min(tokens, int(str(args["max-total-tokens"])))
    return EngineMemory(weights=weights, kv_cache=tokens * per_token, rest=CUDA_PROCESS, kv_tokens=tokens, ranks=ranks)


def engine_weights(settings: Settings, shape: ModelShape) -> int:
    """Bytes of the weights that engines hold and are sent; a quantized model's are those of its files."""
    if is_quantized(settings):
        return sum(path.stat().st_size for path in Path(settings.rollout.data.hf_checkpoint).glob("*.safetensors"))
    return num_parameters(shape) * (2 if engine_dtype(settings) == "bfloat16" else 4)


def num_parameters(shape: ModelShape) -> int:
    """Numbers in all weights of the model, without padding of the vocabulary."""
    weight_map = WeightMap(shape, shape.vocab_size)
    return sum(math.prod(weight_map.megatron_shape(name)) for name in weight_map.megatron_names())


def kv_numbers(shape: ModelShape, ranks: int) -> int:
    """Numbers that a token takes in the KV cache of one of an engine's ranks; latents are on every rank."""
    if shape.multi_latent_attention:
        return shape.num_layers * ((shape.kv_lora_rank or 0) + (shape.qk_pos_emb_head_dim or 0))
    return shape.num_layers * 2 * max(1, -(-shape.num_query_groups // ranks)) * shape.kv_channels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """What a device holds in a phase: bytes needed, and bytes that there are."""

    phase: str
    where: str
    needed: int
    available: int


def phases(
    settings: Settings, device: Device, trainer: TrainerMemory | None, engine: EngineMemory | None
) -> list[Phase]:
    """The phases of a step, each with the device that needs most; without trainers or engines those of the others."""
    if device.is_cpu:
        return list(_phases_of_host(settings, device, trainer, engine))
    if trainer is not None and engine is not None and settings.placed.colocate:
        return list(_phases_of_shared(settings, device, trainer, engine))
    found = []
    if trainer is not None:
        found.append(Phase(phase=trainer.phase, where="trainer GPU", needed=trainer.total, available=device.memory))
    if engine is not None:
        found.append(Phase(phase="generate", where="engine GPU", needed=engine.total, available=device.memory))
    return found


def _phases_of_shared(
    settings: Settings, device: Device, trainer: TrainerMemory, engine: EngineMemory
) -> Iterator[Phase]:
    """Ranks and engines share a GPU; each phase with what both hold then."""
    trainer_sleeps, engines_sleep = settings.trainer_sleeps, settings.engines_sleep
    keeps_weights = settings.rollout.selection.update_weights_interval > 1
    sleeping = SLEEPING_ENGINE + (engine.weights if keeps_weights else 0)
    bucket = 2 * settings.megatron.update_weight_buffer_size
    parts = {
        "generate": ("trainer", trainer_sleeps, trainer.asleep if trainer_sleeps else trainer.resident, engine.total),
        "train": ("engine", engines_sleep, trainer.total, sleeping if engines_sleep else engine.total),
        "send weights": (
            "KV cache",
            engines_sleep,
            bucket + (trainer.process + trainer.weights if trainer_sleeps else trainer.resident),
            engine.weights + engine.rest if engines_sleep else engine.total,
        ),
    }
    if trainer.phase != "train":
        del parts["train"]
    for name, (who, asleep, ranks, engines) in parts.items():
        where = f"shared GPU, {who} {'asleep' if asleep else 'awake'}"
        yield Phase(phase=name, where=where, needed=ranks + engines, available=device.memory)


def _phases_of_host(
    settings: Settings, device: Device, trainer: TrainerMemory | None, engine: EngineMemory | None
) -> Iterator[Phase]:
    """Ranks and engines share the machine's memory. On a CPU engines keep theirs; trainers' goes to a file."""
    ranks = settings.cluster.actor_num_gpus_per_node
    engines = 0 if engine is None else settings.cluster.rollout_gpus // engine.ranks
    serving = 0 if engine is None else engines * engine.total
    if settings.generates:
        own = 0 if trainer is None else trainer.asleep if settings.trainer_sleeps else trainer.resident
        yield Phase(phase="generate", where="machine", needed=ranks * own + serving, available=device.memory)
    if trainer is not None:
        needed = ranks * trainer.total + serving
        yield Phase(phase=trainer.phase, where="machine", needed=needed, available=device.memory)


def gib(size: float) -> str:
    """Bytes in words."""
    return f"{size / GIB:.1f} GiB"
