"""How long the phases of a rollout take, as estimated: operations and bytes against what a device can do.

Every response is taken to be as long as it may be, so there is no more work than that; how much of a device's peak is
reached is a guess, which a plan prints, so seconds are not bounds. On a CPU with other work everything takes longer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from slime_convert.mapping import weight_map
from slime_convert.shape import ModelShape
from slime_launch.config import Settings
from slime_launch.devices import Device
from slime_launch.plan.engines import EngineMemory, engine_weights, kv_numbers, num_parameters
from slime_launch.plan.memory import TrainerMemory, frozen_models
from slime_launch.validate import engine_dtype
from slime_megatron.operations import flops_model
from slime_rollout.engine.transports import DISK, HOST_COPY, NETWORK, Transport
from slime_rollout.eval_sets import read_eval_sets

# Parts of a GPU's peak that training, prefill and decoding reach, as published runs report them; a CPU's operations
# are what is reached already.
TRAINING, PREFILL, DECODING_BYTES, DECODING_OPERATIONS = 0.35, 0.5, 0.6, 0.4
STEP_LATENCY = 0.005  # seconds of a decoding step whatever its size
CPU_LATENCY = 0.02
HOST_LINK = 1e10  # bytes per second between a GPU and its host's memory
# Per number, of a step of Adam in host memory: gradients come there in fp32 and weights go back in bf16; weight and
# moments are read and written, and the gradient is read. A copy reads and writes.
ADAM_LINK_BYTES, ADAM_COPIED_BYTES = 4 + 2, (2 * 3 * 4 + 4) / 2
DELTA_ENTRY = 300  # bytes of a tensor's place and checksums in the index of a delta
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
    """Seconds of a phase, what they are of, and how often it comes in the whole run."""

    phase: str
    seconds: float
    of: str
    times: int


def phase_times(
    settings: Settings,
    shape: ModelShape,
    device: Device,
    engines: Sequence[EngineMemory],
    sizes: Sizes,
    ways: Sequence[Transport],
    *,
    trainer: TrainerMemory | None,
    rows: Mapping[str, int],
) -> list[PhaseTime]:
    """The phases of a run in their order; weights travel by the chosen one of ``ways``.

    Scoring is none of them: it goes on while engines generate, and only the user knows how long it takes.

    Args:
        trainer: What a rank holds, which it gives back while engines generate, where it does.
        rows: Usable rows of each prompt file.
    """
    rollouts, generating = settings.num_rollout, [engine for engine in engines if engine.group.generates]
    saves, evaluations = _saves(settings), _evaluations(settings)
    found = []
    if generating:
        seconds, what = _generation(settings, shape, device, generating, sizes)
        found.append(PhaseTime(phase="generate", seconds=seconds, of=what, times=rollouts))
    if settings.trains and not settings.only_evaluates:
        found += _training(settings, shape, device, sizes)
        if settings.megatron.offload_fraction and not device.is_cpu:
            found.append(_host_steps(settings, shape))
    if trainer is not None and settings.trainer_sleeps:
        found.append(_hand_over(settings, device, trainer))
    if (chosen := next((one for one in ways if one.chosen), None)) is not None:
        sent = {0, *_at(settings, settings.rollout.selection.update_weights_interval), *saves, *evaluations}
        of = f"{chosen.sent:,} bytes"
        found.append(PhaseTime(phase="send weights", seconds=chosen.seconds, of=of, times=len(sent)))
    if saves:
        found.append(_saving(settings, shape, len(saves)))
    if evaluations and (generating or not settings.generates):
        found += _evaluation(settings, shape, device, generating, sizes, rows, len(evaluations))
    return [one for one in found if one.times]


def _at(settings: Settings, interval: int | None) -> set[int]:
    """Numbers of rollouts after which something is due: at every interval and at the end."""
    return {*range(interval, settings.num_rollout + 1, interval)} if interval else set()


def _saves(settings: Settings) -> set[int]:
    if settings.megatron.save is None:
        return set()
    return _at(settings, settings.megatron.save_interval) | {settings.num_rollout}


def _evaluations(settings: Settings) -> set[int]:
    if not settings.rollout.evaluation.has_eval_sets or settings.is_recorded:
        return set()
    first = set() if settings.run.skip_eval_before_train else {0}
    return _at(settings, settings.run.eval_interval) | {settings.num_rollout} | first


def _saving(settings: Settings, shape: ModelShape, times: int) -> PhaseTime:
    """A checkpoint, with --async-save only what the loop waits for; and its export."""
    megatron, numbers = settings.megatron, num_parameters(shape)
    each = CHECKPOINT_BYTES[megatron.bf16] if not megatron.no_save_optim else 2
    seconds, of = numbers * each / (HOST_COPY if megatron.async_save else DISK), f"{numbers * each:,} bytes"
    if settings.run.save_hf is not None:  # is read from the checkpoint, and written
        seconds, of = seconds + 2 * engine_weights(settings, shape) / DISK, f"{of}, and exported"
    return PhaseTime(phase="save", seconds=seconds, of=of, times=times)


def _host_steps(settings: Settings, shape: ModelShape) -> PhaseTime:
    """Steps of an optimizer in host memory; its ranks share the numbers out, and each goes through its own."""
    models = 1 + settings.algorithm.needs_critic
    numbers = models * num_parameters(shape) * settings.megatron.offload_fraction / settings.cluster.actor_gpus
    seconds = numbers * (ADAM_LINK_BYTES / HOST_LINK + ADAM_COPIED_BYTES / HOST_COPY)
    steps = settings.run.num_steps_per_rollout
    of = f"{steps} step{'s' if steps > 1 else ''} of {numbers:,.0f} numbers in each rank's host memory"
    return PhaseTime(phase="optimizer on the host", seconds=steps * seconds, of=of, times=settings.num_rollout)


def _hand_over(settings: Settings, device: Device, trainer: TrainerMemory) -> PhaseTime:
    """Weights and optimizer state leave each GPU and come back; of a CPU's ranks they go to files."""
    each = trainer.waiting
    ranks = settings.cluster.actor_num_gpus_per_node if device.is_cpu else 1  # GPUs have a link each
    seconds = 2 * each * ranks / (HOST_COPY if device.is_cpu else HOST_LINK)
    of = f"{each:,} bytes of each trainer rank, given back and taken again"
    return PhaseTime(phase="hand over", seconds=seconds, of=of, times=settings.num_rollout)


def _evaluation(
    settings: Settings,
    shape: ModelShape,
    device: Device,
    generating: Sequence[EngineMemory],
    sizes: Sizes,
    rows: Mapping[str, int],
    times: int,
) -> list[PhaseTime]:
    """All held-out sets whose rows were counted, if any: their responses, or a forward pass over their rows."""
    seconds, samples, uncounted = 0.0, 0, uncounted_sets(settings, rows)
    for held_out in read_eval_sets(settings.rollout):
        if held_out.name in uncounted:
            continue
        prompts = rows[held_out.path]
        if generating:
            limit = min(held_out.max_context_len or shape.max_position_embeddings, shape.max_position_embeddings)
            response = max(1, min(held_out.max_response_len, limit - sizes.prompt_tokens))
            own = Sizes(
                prompt_tokens=sizes.prompt_tokens,
                response_tokens=response,
                prompts=prompts,
                samples=prompts * held_out.n_samples_per_eval_prompt,
            )
            seconds += _generation(settings, shape, device, generating, own)[0] if prompts else 0
        else:
            own = dataclasses.replace(sizes, prompts=prompts, samples=prompts * settings.samples_per_prompt)
            seconds += own.samples * flops_model(shape).forward(own.sample_tokens) / _training_rate(settings, device)
        samples += own.samples
    without = f", without {', '.join(uncounted)}" if uncounted else ""
    of = f"{samples:,} held-out samples{without}"
    return [PhaseTime(phase="evaluate", seconds=seconds, of=of, times=times)] if samples else []


def uncounted_sets(settings: Settings, rows: Mapping[str, int]) -> list[str]:
    """The names of the held-out sets whose rows are not known."""
    return [one.name for one in read_eval_sets(settings.rollout) if one.path not in rows]


def _training_rate(settings: Settings, device: Device) -> float:
    """Operations per second of all trainer ranks."""
    return settings.cluster.actor_gpus * device.operations * (1.0 if device.is_cpu else TRAINING)


def _training(settings: Settings, shape: ModelShape, device: Device, sizes: Sizes) -> Iterator[PhaseTime]:
    """The trainer's passes over a rollout: those without gradients, then those that train."""
    model, ranks, algorithm = flops_model(shape), settings.cluster.actor_gpus, settings.algorithm
    forward = sizes.samples * model.forward(sizes.sample_tokens)
    rate, times = _training_rate(settings, device), settings.num_rollout
    before = frozen_models(algorithm, settings.megatron) + algorithm.needs_critic
    again = settings.run.num_steps_per_rollout > 1 or algorithm.advantages_need_log_probs or algorithm.needs_step_sums
    again = (again or algorithm.keep_old_actor) and not algorithm.on_data
    before += int(again and not algorithm.use_rollout_logprobs)
    if before:
        what = f"{before} forward pass{'es' if before > 1 else ''} over {sizes.tokens:,} tokens"
        yield PhaseTime(phase="log-probs", seconds=before * forward / rate, of=what, times=times)
    passes = (2 if settings.megatron.lora is not None else 3) + (settings.megatron.recompute == "full")
    passes *= 1 + algorithm.needs_critic
    what = f"{passes * forward:.2g} operations on {ranks} ranks"
    yield PhaseTime(phase="train", seconds=passes * forward / rate, of=what, times=times)


def assumed(settings: Settings, device: Device, times: Sequence[PhaseTime]) -> list[str]:
    """What the phases that there are were computed with, a line each."""
    tera, giga = device.operations / 1e12, device.bandwidth / 1e9
    generates = (
        f"prefill at {PREFILL:.0%} of these, decoding at {DECODING_OPERATIONS:.0%}, or at {DECODING_BYTES:.0%} of"
    )
    rows = [
        (("log-probs", "train"), f"training at {TRAINING:.0%} of a GPU's {tera:,.0f} TFLOP/s"),
        (("generate",), f"{generates} its {giga:,.0f} GB/s, and {STEP_LATENCY * 1e3:g} ms for each step of decoding"),
        (("optimizer on the host", "hand over"), f"{HOST_LINK / 1e9:g} GB/s between a GPU and its host's memory"),
    ]
    if device.is_cpu:
        core = f"{device.operations / 1e9:,.0f} GFLOP/s and {giga:,.0f} GB/s of a core"
        rows = [
            (tuple(one.phase for one in times), "no other work on the machine: with some, all of this takes longer"),
            (("log-probs", "train", "generate"), f"{core}, and {CPU_LATENCY * 1e3:g} ms for each step of decoding"),
        ]
    copies = settings.megatron.async_save or device.is_cpu or settings.megatron.offload_fraction
    if copies:
        copied = ("optimizer on the host", "hand over", "save", *(("send weights",) if device.is_cpu else ()))
        rows.append((copied, f"{HOST_COPY / 1e9:g} GB/s within host memory"))
    if not settings.megatron.async_save or settings.run.save_hf is not None:
        rows.append((("save",), f"{DISK / 1e9:g} GB/s of a file system"))
    if not device.is_cpu:
        link = f"{device.link / 1e9:,.0f} GB/s between the GPUs of a node"
        rows.append((("send weights",), f"{link}, {NETWORK / 1e9:g} GB/s between nodes"))
    there = {one.phase for one in times}
    return [text for phases, text in rows if there.intersection(phases)]


def run_seconds(settings: Settings, times: Sequence[PhaseTime]) -> float:
    """Seconds of the whole run; with --async-buffer-size a rollout is generated while others are trained on."""
    seconds = {one.phase: one.times * one.seconds for one in times}
    training = sum(seconds.get(phase, 0.0) for phase in ("log-probs", "train", "optimizer on the host"))
    together = min(seconds.get("generate", 0.0), training)
    return sum(seconds.values()) - (0 if settings.rollout.selection.async_buffer_size is None else together)


def _generation(
    settings: Settings, shape: ModelShape, device: Device, generating: Sequence[EngineMemory], sizes: Sizes
) -> tuple[float, str]:
    """Seconds of all responses, and how many at a time: as many as the cache holds."""
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
    return seconds, what


def with_delta(ways: Sequence[Transport], settings: Settings, shape: ModelShape) -> list[Transport]:
    """The ways and, as one more, files of what changed; --update-weight-mode delta chooses them over whole files."""
    disk, size = next(way for way in ways if way.name == "disk"), engine_weights(settings, shape)
    delta = dataclasses.replace(
        disk,
        name="disk, delta",
        # Only what changed is sent: all of it at most, and less the smaller the steps are.
        sent=disk.sent + DELTA_ENTRY * weight_map(shape, one_expert=True).hf_count(),
        # Read and applied to a whole copy on the engines' machine, too, which they load.
        seconds=disk.seconds + 2 * size / DISK,
        chosen=disk.chosen and settings.engine.update_weight_mode == "delta",
    )
    return [*(dataclasses.replace(way, chosen=way.chosen and not delta.chosen) for way in ways), delta]
