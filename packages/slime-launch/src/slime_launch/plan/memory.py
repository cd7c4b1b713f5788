"""What trainer ranks and engines hold in memory, at the moment of a step when that is most, against what there is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_launch.config import Settings
from slime_launch.devices import GIB, Device
from slime_launch.overrides import Overrides
from slime_launch.plan.engines import CUDA_PROCESS, EngineMemory
from slime_megatron.activations import activation_memory
from slime_megatron.config import MegatronConfig
from slime_megatron.memory import stage_memory
from slime_megatron.overrides import role_config

TRAINER_PROCESS = int(0.45 * GIB)  # what a rank takes before it holds a model, measured on a CPU
SLEEPING_ENGINE = 3 * GIB  # what an engine keeps of a GPU while it sleeps, as users report it


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerMemory:
    """Bytes of the trainer rank that needs most.

    Attributes:
        stage: Its pipeline stage.
        process: What it takes without a model.
        gradients: With the distributed optimizer on a CPU, and a copy: gloo adds them up in one.
        critic: Everything of the critic between steps; where it takes turns with the actor, what it takes more.
        frozen: Reference and teacher, where they share the memory: on a CPU.
        activations: Of the micro-batch; ``logits`` those of the output layer.
        host: Bytes of host memory of a GPU that frozen models take, and what of the optimizer is there.
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
    def waiting(self) -> int:
        """What waits in host memory, or in a CPU's files, while it gives its memory back; gradients do not."""
        return self.weights + self.optimizer + self.critic

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
    on_gpu, passes = not device.is_cpu, phase != "send weights"
    actor = role_config(megatron, "actor", overrides)
    trains = not settings.only_evaluates
    critic = role_config(megatron, "critic", overrides) if settings.algorithm.needs_critic and trains else None
    scores = settings.algorithm.loss_type == "rm_loss"  # it has a value head

    alone = actor.tensor_model_parallel_size * actor.pipeline_model_parallel_size
    in_copy = device.is_cpu and actor.use_distributed_optimizer and world > alone
    in_copy = in_copy and not actor.overlaps_gradients(on_gpu)  # then it is a bucket's

    def of(stage: int) -> TrainerMemory:
        own = stage_memory(shape, actor, world, stage, value_head=scores, on_gpu=on_gpu, only_evaluates=not trains)
        second = critic and stage_memory(shape, critic, world, stage, value_head=True, on_gpu=on_gpu)
        other, offloaded = (second.total, own.host + second.host) if second else (0, own.host)
        activations = activation_memory(
            shape,
            actor,
            stage=stage,
            tokens=tokens,
            micro_batches=micro_batches,
            fused=on_gpu and megatron.bf16,
            value_head=scores,
        )
        copies = own.weights * (frozen_models(settings.algorithm, megatron) + old_actors(settings))
        return TrainerMemory(
            phase=phase,
            stage=stage,
            process=TRAINER_PROCESS if device.is_cpu else CUDA_PROCESS,
            weights=own.weights,
            gradients=own.gradients * (1 + in_copy),
            optimizer=own.optimizer,
            critic=max(0, other - own.total) if settings.trainer_sleeps else other,
            frozen=copies if device.is_cpu else 0,
            activations=(activations.layers if phase == "train" else 0) + (activations.working if passes else 0),
            logits=activations.logits if passes else 0,
            host=0 if device.is_cpu else offloaded + copies + (own.weights if copies else 0),
        )

    return max(map(of, range(megatron.pipeline_model_parallel_size)), key=lambda found: found.total)


def frozen_models(algorithm: AlgorithmConfig, megatron: MegatronConfig) -> int:
    """Models that are not trained, whose weights wait in host memory: reference and teacher."""
    own = megatron.base_is_reference
    return int(algorithm.needs_reference and not own) + int(megatron.opd_teacher_load is not None)


def old_actors(settings: Settings) -> int:
    """Copies of earlier weights that --keep-old-actor holds at most, that of the weights in training included."""
    selection = settings.rollout.selection
    if not settings.algorithm.keep_old_actor or not settings.rollout.may_lag:
        return 0
    return selection.most_behind // selection.update_weights_interval + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """What a device holds in a phase: bytes needed, and bytes that there are."""

    phase: str
    where: str
    needed: int
    available: int


def phases(
    settings: Settings, device: Device, trainer: TrainerMemory | None, engines: Sequence[EngineMemory]
) -> list[Phase]:
    """The phases of a step, each with the device that needs most; without trainers or engines those of the others."""
    if device.is_cpu:
        return list(_phases_of_host(settings, device, trainer, engines))
    shared: list[EngineMemory] = []
    found: list[Phase] = []
    of_shared: list[Phase] = []
    if trainer is not None and settings.placed.colocate:
        shared = [engine for engine in engines if engine.group.first_gpus[0] < settings.cluster.actor_gpus]
        of_shared = [phase for engine in shared for phase in _phases_of_shared(settings, device, trainer, engine)]
    elif trainer is not None:
        found.append(Phase(phase=trainer.phase, where="trainer GPU", needed=trainer.total, available=device.memory))
    for engine in engines:
        if engine not in shared:
            where = f"{engine.group.title} engine GPU".lstrip()
            found.append(Phase(phase="generate", where=where, needed=engine.total, available=device.memory))
    return [*_worst(of_shared), *found]


def host_phase(settings: Settings, device: Device, trainer: TrainerMemory, ranks: int) -> Phase | None:
    """What ``ranks`` trainer ranks have in the host memory of their node while engines generate; ``None``: nothing."""
    needed = ranks * (trainer.host + (trainer.waiting if settings.trainer_sleeps else 0))
    if device.is_cpu or not needed:
        return None
    return Phase(phase="generate", where="host memory of a node", needed=needed, available=device.host_memory or 0)


def _worst(found: Sequence[Phase]) -> list[Phase]:
    """Of each phase the device that needs most."""
    most: dict[str, Phase] = {}
    for one in found:
        if one.phase not in most or one.needed > most[one.phase].needed:
            most[one.phase] = one
    return list(most.values())


def _phases_of_shared(
    settings: Settings, device: Device, trainer: TrainerMemory, engine: EngineMemory
) -> Iterator[Phase]:
    """Ranks and engines share a GPU; each phase with what both hold then. Engines of another model stay awake."""
    trainer_sleeps, engines_sleep = settings.trainer_sleeps, settings.engines_sleep and engine.group.trained
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
    settings: Settings, device: Device, trainer: TrainerMemory | None, engines: Sequence[EngineMemory]
) -> Iterator[Phase]:
    """Ranks and engines share the machine's memory. On a CPU engines keep theirs; trainers' goes to a file."""
    ranks = settings.cluster.actor_num_gpus_per_node
    serving = sum(engine.group.count * engine.total for engine in engines)
    if settings.generates:
        own = 0 if trainer is None else trainer.asleep if settings.trainer_sleeps else trainer.resident
        yield Phase(phase="generate", where="machine", needed=ranks * own + serving, available=device.memory)
    if trainer is not None:
        needed = ranks * trainer.total + serving
        yield Phase(phase=trainer.phase, where="machine", needed=needed, available=device.memory)


def gib(size: float) -> str:
    """Bytes in words."""
    return f"{size / GIB:.1f} GiB"
