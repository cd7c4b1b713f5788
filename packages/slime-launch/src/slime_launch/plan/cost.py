"""How long the phases of a rollout take, roughly: operations and bytes against what a device can do.

Every response is taken to be as long as it may be, so these are upper bounds of the work; how much of a device's peak
is reached is a guess. On a CPU with other work beside it everything takes longer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from slime_convert.shape import ModelShape
from slime_launch.config import Settings
from slime_launch.devices import Device
from slime_launch.plan.engines import EngineMemory, engine_weights, kv_numbers, num_parameters
from slime_launch.plan.memory import frozen_models
from slime_launch.validate import engine_dtype
from slime_megatron.operations import flops_model

# Parts of a GPU's peak that training, prefill and decoding reach, as published runs report them; a CPU's operations
# are what is reached already.
TRAINING, PREFILL, DECODING_BYTES, DECODING_OPERATIONS = 0.35, 0.5, 0.6, 0.4
STEP_LATENCY = 0.005  # seconds of a decoding step whatever its size
CPU_LATENCY = 0.02
HOST_COPY, DISK, NETWORK = 3e9, 1e9, 12.5e9  # bytes per second: shared memory, a file system, between nodes
CHECKPOINT_BYTES = {True: 14, False: 12}  # per number, by --bf16: weights, two moments, master weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What goes through a rollout at most.

    Attributes:
        prompt_tokens: Of one prompt.
        response_tokens: Of one response.
        samples: Responses of a rollout.
        prompts: Prompts of a rollout.
    """

    prompt_tokens: int
    response_tokens: int
    prompts: int
    samples: int

    @property
    def sample_tokens(self) -> int:
        """Tokens of one sample."""
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> int:
        """Tokens of a rollout that are trained on or seen."""
        return self.samples * self.sample_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """Seconds of a phase of one rollout, and what they are of."""

    phase: str
    seconds: float
    of: str


def phase_times(
    settings: Settings,
    shape: ModelShape,
    device: Device,
    engines: Sequence[EngineMemory],
    sizes: Sizes,
    ways: Sequence[Transport],
) -> list[PhaseTime]:
    """The phases of a rollout in their order; weights travel by the chosen one of ``ways``."""
    generating = [engine for engine in engines if engine.group.generates]
    found = [_generation(settings, shape, device, generating, sizes)] if generating else []
    if settings.trains and not settings.only_evaluates:
        found += _training(settings, shape, device, sizes)
    if settings.generates:
        chosen = next((one for one in ways if one.chosen), None)
        if chosen is not None:
            found.append(PhaseTime(phase="send weights", seconds=chosen.seconds, of=f"{chosen.sent:,} bytes"))
    if settings.megatron.save is not None:
        each = CHECKPOINT_BYTES[settings.megatron.bf16] if not settings.megatron.no_save_optim else 2
        size = num_parameters(shape) * each
        found.append(PhaseTime(phase="save", seconds=size / DISK, of=f"{size:,} bytes, when a checkpoint is due"))
    return found


def _training(settings: Settings, shape: ModelShape, device: Device, sizes: Sizes) -> Iterator[PhaseTime]:
    """The trainer's passes over a rollout: those without gradients, then those that train."""
    model, ranks, algorithm = flops_model(shape), settings.cluster.actor_gpus, settings.algorithm
    forward = sizes.samples * model.forward(sizes.sample_tokens)
    rate = ranks * device.operations * (1.0 if device.is_cpu else TRAINING)
    before = frozen_models(algorithm, settings.megatron) + algorithm.needs_critic
    again = settings.run.num_steps_per_rollout > 1 or algorithm.advantages_need_log_probs or algorithm.needs_step_sums
    again = (again or algorithm.keep_old_actor) and not algorithm.on_data
    before += int(again and not algorithm.use_rollout_logprobs)
    if before:
        what = f"{before} forward pass{'es' if before > 1 else ''} over {sizes.tokens:,} tokens"
        yield PhaseTime(phase="log-probs", seconds=before * forward / rate, of=what)
    passes = (2 if settings.megatron.lora is not None else 3) + (settings.megatron.recompute == "full")
    passes *= 1 + algorithm.needs_critic
    what = f"{passes * forward:.2g} operations on {ranks} ranks"
    yield PhaseTime(phase="train", seconds=passes * forward / rate, of=what)


def rollout_seconds(settings: Settings, times: list[PhaseTime]) -> float:
    """Seconds of a rollout without saving; with --async-buffer-size it is generated while others are trained on."""
    seconds = {one.phase: one.seconds for one in times if one.phase != "save"}
    if settings.rollout.selection.async_buffer_size is None:
        return sum(seconds.values())
    generate, send = seconds.get("generate", 0.0), seconds.get("send weights", 0.0)
    return max(generate, sum(seconds.values()) - generate - send) + send


def _generation(
    settings: Settings, shape: ModelShape, device: Device, generating: Sequence[EngineMemory], sizes: Sizes
) -> PhaseTime:
    """All responses of a rollout: as many at a time as the KV cache holds, each step reading weights and cache."""
    engine = min(generating, key=lambda engine: engine.kv_tokens)
    engines = sum(one.group.count for one in generating)
    of_engine = -(-sizes.samples // engines)
    running = int(str(engine.group.args.get("max-running-requests", 128 if device.is_cpu else of_engine)))
    fitting = max(1, engine.kv_tokens // max(1, sizes.sample_tokens))
    at_once = max(1, min(of_engine, running, fitting, -(-settings.rollout.sampling.rollout_concurrency // engines)))
    model, width = flops_model(shape), 2 if engine_dtype(settings) == "bfloat16" else 4
    operations = device.operations * engine.ranks
    context = sizes.prompt_tokens + sizes.response_tokens / 2
    all_numbers = num_parameters(shape)
    # Experts that no token visits rest.
    visited = min(model.per_token // 2 * at_once, all_numbers) / all_numbers * engine_weights(settings, shape)
    cached = at_once * context * kv_numbers(shape, 1) * width
    reached, bytes_part = (1.0, 1.0) if device.is_cpu else (DECODING_OPERATIONS, DECODING_BYTES)
    step = max(
        (visited + cached) / (device.bandwidth * engine.ranks * bytes_part),
        at_once * (model.per_token + context * model.per_pair) / (operations * reached),
    )
    step += CPU_LATENCY if device.is_cpu else STEP_LATENCY
    prefill = sizes.prompts / engines * model.forward(max(1, sizes.prompt_tokens))
    seconds = prefill / (operations * (1.0 if device.is_cpu else PREFILL))
    seconds += -(-of_engine // at_once) * sizes.response_tokens * step
    what = f"{engines} engine{'s' * (engines > 1)}, {at_once} of {of_engine} responses at a time"
    return PhaseTime(phase="generate", seconds=seconds, of=what)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transport:
    """A way for weights to travel.

    Attributes:
        sent: Bytes that leave the trainer in an update, at most.
        received: Bytes that all engines take in.
        problem: Why it cannot be used here; ``None`` if it can.
    """

    name: str
    sent: int
    received: int
    seconds: float
    chosen: bool
    problem: str | None


def transports(
    settings: Settings, shape: ModelShape, device: Device, chosen: str | None, *, engines: int, within_node: bool
) -> list[Transport]:
    """Every transport, with what an update of so many engines takes.

    They may all be on the node of the trainer's first rank.
    """
    size = engine_weights(settings, shape)
    between = device.link if within_node else NETWORK
    problems = {
        "tensor": None if within_node else "works within one machine",
        "nccl": "needs CUDA" if device.is_cpu else "takes no GPU twice" if settings.cluster.colocate else None,
    }
    seconds = {
        "tensor": size / (device.link if settings.cluster.colocate and not device.is_cpu else HOST_COPY),
        "nccl": size / (between / 2),
        "gloo": size / min(between, 1e9),
        "disk": size / DISK + engines * size / DISK,
    }
    return [
        Transport(
            name=name,
            sent=size,
            received=engines * size,
            seconds=seconds[name],
            chosen=name == chosen,
            problem=problems.get(name),
        )
        for name in seconds
    ]
