"""The memory that trainer ranks and engines hold, at the moment of a step when it is most, against what there is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_launch.config import Settings
from slime_launch.devices import GIB, DeviceSpec
from slime_launch.overrides import Overrides
from slime_launch.plan.engines import CUDA_PROCESS, EngineEstimate
from slime_megatron.service import MegatronConfig, trained_roles
from slime_rollout.config import RolloutConfig

TRAINER_PROCESS = int(0.45 * GIB)  # what a rank takes before it holds a model, measured on a CPU
PARTS = ("process", "weights", "gradients", "optimizer", "critic", "frozen", "activations", "logits")
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
        """Bytes that it holds between steps."""
        return self.total - self.activations - self.logits

    @property
    def asleep(self) -> int:
        """Bytes that it keeps when it has given its memory back: frozen models are where they were."""
        return self.process + self.frozen

    @property
    def waiting(self) -> int:
        """Bytes that wait in host memory, or in a CPU's files, while it gives its memory back; gradients do not."""
        return self.weights + self.optimizer + self.critic

    @property
    def total(self) -> int:
        """Bytes that it needs in a step."""
        return sum(int(getattr(self, part)) for part in PARTS)

    def parts(self) -> str:
        """The parts that take something, the largest first, in words."""
        sizes = sorted(((getattr(self, name), name) for name in PARTS), reverse=True)
        return ", ".join(f"{name} {gib(size)}" for size, name in sizes if size >= GIB / 20)


def trainer_memory(
    settings: Settings, shape: ModelShape, device: DeviceSpec, *, tokens: int, micro_batches: int, overrides: Overrides
) -> TrainerMemory:
    """The memory of the pipeline stage that needs most, for micro-batches of so many tokens.

    Where nothing is trained there is no backward pass, and without held-out rows no pass at all.
    """
    evaluates, algorithm = settings.kind.only_evaluates, settings.algorithm
    phase = "train" if not evaluates else "send weights" if settings.kind.generates else "evaluate"
    megatron, world = settings.megatron, settings.cluster.actor_gpus
    on_gpu, passes = not device.is_cpu, phase != "send weights"
    given = (megatron, algorithm, shape, overrides)
    roles = trained_roles(*given, world_size=world, on_gpu=on_gpu, only_evaluates=evaluates)
    actor, critic = roles["actor"], roles.get("critic")
    alone = actor.config.tensor_model_parallel_size * actor.config.pipeline_model_parallel_size
    in_copy = device.is_cpu and actor.config.use_distributed_optimizer and world > alone
    in_copy = in_copy and not actor.config.overlaps_gradients(on_gpu)  # then it is a bucket's

    def of(stage: int) -> TrainerMemory:
        own, second = actor.memory(stage), critic and critic.memory(stage)
        other, offloaded = (second.total, own.host + second.host) if second else (0, own.host)
        activations = actor.activations(stage, tokens=tokens, micro_batches=micro_batches)
        copies = own.weights * (frozen_models(algorithm, megatron) + old_actors(algorithm, settings.rollout))
        return TrainerMemory(
            phase=phase,
            stage=stage,
            process=TRAINER_PROCESS if device.is_cpu else CUDA_PROCESS,
            weights=own.weights,
            gradients=own.gradients * (1 + in_copy),
            optimizer=own.optimizer,
            critic=max(0, other - own.total) if settings.kind.trainer_sleeps else other,
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


def old_actors(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> int:
    """Copies of earlier weights that --keep-old-actor holds at most, that of the weights in training included."""
    selection = rollout.selection
    if not algorithm.keep_old_actor or not rollout.may_lag:
        return 0
    return selection.most_behind // selection.update_weights_interval + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """Memory of a device in a phase: bytes needed, and bytes that there are."""

    phase: str
    where: str
    needed: int
    available: int


def phases(
    settings: Settings, device: DeviceSpec, trainer: TrainerMemory | None, engines: Sequence[EngineEstimate]
) -> list[Phase]:
    """The phases of a step, each with the device that needs most; without trainers or engines those of the others."""
    if device.is_cpu:
        return list(_phases_of_host(settings, device, trainer, engines))
    most: dict[str, Phase] = {}
    found: list[Phase] = []
    if trainer is not None and not settings.placed.colocate:
        found.append(Phase(phase=trainer.phase, where="trainer GPU", needed=trainer.total, available=device.memory))
    for engine in engines:
        if trainer is None or not settings.placed.colocate or engine.group.first_gpus[0] >= settings.cluster.actor_gpus:
            where = f"{engine.group.title} engine GPU".lstrip()
            found.append(Phase(phase="generate", where=where, needed=engine.total, available=device.memory))
            continue
        for phase in _phases_of_shared(settings, device, trainer, engine):
            most[phase.phase] = max(most.get(phase.phase, phase), phase, key=lambda one: one.needed)
    return [*most.values(), *found]


def host_phase(device: DeviceSpec, trainer: TrainerMemory, ranks: int, *, sleeps: bool) -> Phase | None:
    """The host memory of a node that its trainer ranks take while engines generate; ``None`` if they take none.

    With ``sleeps`` they give their memory back then.
    """
    needed = ranks * (trainer.host + (trainer.waiting if sleeps else 0))
    if device.is_cpu or not needed:
        return None
    return Phase(phase="generate", where="host memory of a node", needed=needed, available=device.host_memory or 0)


def _phases_of_shared(
    settings: Settings, device: DeviceSpec, trainer: TrainerMemory, engine: EngineEstimate
) -> Iterator[Phase]:
    """Ranks and engines share a GPU; each phase with what both hold then. Engines of another model stay awake."""
    trainer_sleeps, engines_sleep = settings.kind.trainer_sleeps, settings.kind.engines_sleep and engine.group.trained
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
    settings: Settings, device: DeviceSpec, trainer: TrainerMemory | None, engines: Sequence[EngineEstimate]
) -> Iterator[Phase]:
    """Ranks and engines share the machine's memory. On a CPU engines keep theirs; trainers' goes to a file."""
    kind, ranks = settings.kind, settings.cluster.actor_num_gpus_per_node
    serving = sum(engine.group.count * engine.total for engine in engines)
    if kind.generates:
        own = 0 if trainer is None else trainer.asleep if kind.trainer_sleeps else trainer.resident
        yield Phase(phase="generate", where="machine", needed=ranks * own + serving, available=device.memory)
    if trainer is not None:
        needed = ranks * trainer.total + serving
        yield Phase(phase=trainer.phase, where="machine", needed=needed, available=device.memory)


def gib(size: float) -> str:
    """Bytes in words."""
    return f"{size / GIB:.1f} GiB"
