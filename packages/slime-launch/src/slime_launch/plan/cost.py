"""How long the phases of a rollout take, as estimated: operations and bytes against what a device can do.

Every response is taken to be as long as it may be, so there is no more work than that; how much of a device's peak is
reached is a guess, which a plan prints, so seconds are not bounds. On a CPU with other work everything takes longer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from slime_convert.shape import ModelShape
from slime_launch.config import Settings
from slime_launch.derived import engine_dtype
from slime_launch.devices import DeviceSpec
from slime_launch.plan.engines import EngineEstimate, engine_weights, kv_numbers, num_parameters
from slime_launch.plan.memory import TrainerMemory, frozen_models
from slime_megatron.service import MegatronConfig, flops_model
from slime_rollout.checks import read_eval_sets
from slime_rollout.config import RolloutConfig
from slime_rollout.engine import DISK, HOST_COPY, NETWORK, Way

# Parts of a GPU's peak that training, prefill and decoding reach, as published runs report them; a CPU's operations
# are what is reached already.
TRAINING, PREFILL, DECODING_BYTES, DECODING_OPERATIONS = 0.35, 0.5, 0.6, 0.4
STEP_LATENCY = 0.005  # seconds of a decoding step whatever its size
CPU_LATENCY = 0.02
HOST_LINK = 1e10  # bytes per second between a GPU and its host's memory
# Per number, of a step of Adam in host memory: gradients come there in fp32 and weights go back in bf16; weight and
# moments are read and written, and the gradient is read. A copy reads and writes.
ADAM_LINK_BYTES, ADAM_COPIED_BYTES = 4 + 2, (2 * 3 * 4 + 4) / 2
CHECKPOINT_BYTES = {True: 14, False: 12}  # per number, by --bf16: weights, two moments, master weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Prompts and samples of a rollout, and the most tokens that one prompt and one response have."""

    prompt_tokens: int
    response_tokens: int
    prompts: int
    samples: int

    @property
    def sample_tokens(self) -> int:
        """Tokens of one sample."""
        return self.prompt_tokens + self.response_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """Seconds of a phase, what they are of, and how often it comes in the whole run."""

    phase: str
    seconds: float
    of: str
    times: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a command, and the devices that do it.

    Attributes:
        engines: Those that generate.
        rows: Usable rows of each prompt file.
    """

    settings: Settings
    shape: ModelShape
    device: DeviceSpec
    engines: Sequence[EngineEstimate]
    sizes: Sizes
    rows: Mapping[str, int]

    def phases(self, chosen: Way | None, trainer: TrainerMemory | None) -> list[PhaseTime]:
        """The phases of the run in their order.

        Scoring is none of them: it goes on while engines generate, and only the user knows how long it takes.

        Args:
            chosen: The way of the weights to the engines.
            trainer: What a rank holds, which it gives back while engines generate, where it does.
        """
        settings, megatron, kind = self.settings, self.settings.megatron, self.settings.kind
        rollouts = settings.num_rollout
        saves = set() if megatron.save is None else _at(rollouts, megatron.save_interval) | {rollouts}
        evaluations = set[int]()
        if kind.has_held_out:
            evaluations = _at(rollouts, settings.run.eval_interval) | {rollouts}
            if not settings.run.skip_eval_before_train:
                evaluations.add(0)
        found = []
        if self.engines:
            seconds, what = self._generation(self.sizes)
            found.append(PhaseTime(phase="generate", seconds=seconds, of=what, times=rollouts))
        if kind.updates:
            found += self._training()
            if megatron.offload_fraction and not self.device.is_cpu:
                found.append(self._host_steps())
        if trainer is not None and kind.trainer_sleeps:
            found.append(self._hand_over(trainer))
        if chosen is not None:
            sent = {0, *_at(rollouts, settings.rollout.selection.update_weights_interval), *saves, *evaluations}
            of = f"{chosen.sent:,} bytes"
            found.append(PhaseTime(phase="send weights", seconds=chosen.seconds, of=of, times=len(sent)))
        if saves:
            found.append(self._saving(len(saves)))
        if evaluations and (self.engines or not kind.generates):
            found += self._evaluation(len(evaluations))
        return [one for one in found if one.times]

    def _saving(self, times: int) -> PhaseTime:
        """A checkpoint, with --async-save only what the loop waits for; and its export."""
        megatron, numbers = self.settings.megatron, num_parameters(self.shape)
        each = CHECKPOINT_BYTES[megatron.bf16] if not megatron.no_save_optim else 2
        seconds, of = numbers * each / (HOST_COPY if megatron.async_save else DISK), f"{numbers * each:,} bytes"
        if self.settings.run.save_hf is not None:  # is read from the checkpoint, and written
            seconds, of = seconds + 2 * engine_weights(self.settings, self.shape) / DISK, f"{of}, and exported"
        return PhaseTime(phase="save", seconds=seconds, of=of, times=times)

    def _host_steps(self) -> PhaseTime:
        """Steps of an optimizer in host memory; its ranks share the numbers out, and each goes through its own."""
        settings, models = self.settings, 1 + self.settings.kind.has_critic
        numbers = models * num_parameters(self.shape) * settings.megatron.offload_fraction / settings.cluster.actor_gpus
        seconds = numbers * (ADAM_LINK_BYTES / HOST_LINK + ADAM_COPIED_BYTES / HOST_COPY)
        steps = settings.run.num_steps_per_rollout
        of = f"{steps} step{'s' if steps > 1 else ''} of {numbers:,.0f} numbers in each rank's host memory"
        return PhaseTime(phase="optimizer on the host", seconds=steps * seconds, of=of, times=settings.num_rollout)

    def _hand_over(self, trainer: TrainerMemory) -> PhaseTime:
        """Weights and optimizer state leave each GPU and come back; of a CPU's ranks they go to files."""
        each, is_cpu = trainer.waiting, self.device.is_cpu
        ranks = self.settings.cluster.actor_num_gpus_per_node if is_cpu else 1  # GPUs have a link each
        seconds = 2 * each * ranks / (HOST_COPY if is_cpu else HOST_LINK)
        of = f"{each:,} bytes of each trainer rank, given back and taken again"
        return PhaseTime(phase="hand over", seconds=seconds, of=of, times=self.settings.num_rollout)

    def _evaluation(self, times: int) -> list[PhaseTime]:
        """All held-out sets whose rows were counted, if any: their responses, or a forward pass over their rows."""
        settings, sizes, longest = self.settings, self.sizes, self.shape.max_position_embeddings
        seconds, samples, uncounted = 0.0, 0, uncounted_sets(settings.rollout, self.rows)
        for held_out in read_eval_sets(settings.rollout):
            if held_out.name in uncounted:
                continue
            prompts = self.rows[held_out.path]
            if self.engines:
                limit = min(held_out.max_context_len or longest, longest)
                response = max(1, min(held_out.max_response_len, limit - sizes.prompt_tokens))
                count = prompts * held_out.n_samples_per_eval_prompt
                own = dataclasses.replace(sizes, response_tokens=response, prompts=prompts, samples=count)
                seconds += self._generation(own)[0] if prompts else 0
            else:
                own = dataclasses.replace(sizes, prompts=prompts, samples=prompts * settings.samples_per_prompt)
                seconds += own.samples * flops_model(self.shape).forward(own.sample_tokens) / self._training_rate
            samples += own.samples
        without = f", without {', '.join(uncounted)}" if uncounted else ""
        of = f"{samples:,} held-out samples{without}"
        return [PhaseTime(phase="evaluate", seconds=seconds, of=of, times=times)] if samples else []

    @property
    def _training_rate(self) -> float:
        """Operations per second of all trainer ranks."""
        return self.settings.cluster.actor_gpus * self.device.operations * (1.0 if self.device.is_cpu else TRAINING)

    def _training(self) -> Iterator[PhaseTime]:
        """The trainer's passes over a rollout: those without gradients, then those that train."""
        settings, sizes, algorithm = self.settings, self.sizes, self.settings.algorithm
        forward = sizes.samples * flops_model(self.shape).forward(sizes.sample_tokens)
        rate, times = self._training_rate, settings.num_rollout
        before = frozen_models(algorithm, settings.megatron) + algorithm.needs_critic
        again = (
            settings.run.num_steps_per_rollout > 1 or algorithm.advantages_need_log_probs or algorithm.needs_step_sums
        )
        again = (again or algorithm.keep_old_actor) and not algorithm.on_data
        before += int(again and not algorithm.use_rollout_logprobs)
        if before:
            tokens = sizes.samples * sizes.sample_tokens
            what = f"{before} forward pass{'es' if before > 1 else ''} over {tokens:,} tokens"
            yield PhaseTime(phase="log-probs", seconds=before * forward / rate, of=what, times=times)
        passes = (2 if settings.megatron.lora is not None else 3) + (settings.megatron.recompute == "full")
        passes *= 1 + algorithm.needs_critic
        what = f"{passes * forward:.2g} operations on {settings.cluster.actor_gpus} ranks"
        yield PhaseTime(phase="train", seconds=passes * forward / rate, of=what, times=times)

    def _generation(self, sizes: Sizes) -> tuple[float, str]:
        """Seconds of all responses, and how many at a time: as many as the cache holds."""
        settings, shape, device = self.settings, self.shape, self.device
        engine = min(self.engines, key=lambda engine: engine.kv_tokens)
        engines = sum(one.group.count for one in self.engines)
        of_engine = -(-sizes.samples // engines)
        running = int(str(engine.group.args.get("max-running-requests", 128 if device.is_cpu else of_engine)))
        fitting = max(1, engine.kv_tokens // max(1, sizes.sample_tokens))
        at_once = max(1, min(of_engine, running, fitting, -(-settings.rollout.sampling.rollout_concurrency // engines)))
        model = flops_model(shape)
        width = 2 if engine_dtype(settings.megatron, settings.rollout) == "bfloat16" else 4
        operations = device.operations * engine.group.ranks
        context = sizes.prompt_tokens + sizes.response_tokens / 2
        all_numbers = num_parameters(shape)
        # Experts that no token visits rest.
        visited = min(model.per_token // 2 * at_once, all_numbers) / all_numbers * engine_weights(settings, shape)
        cached = at_once * context * kv_numbers(shape, 1) * width
        reached, bytes_part = (1.0, 1.0) if device.is_cpu else (DECODING_OPERATIONS, DECODING_BYTES)
        step = max(
            (visited + cached) / (device.bandwidth * engine.group.ranks * bytes_part),
            at_once * (model.per_token + context * model.per_pair) / (operations * reached),
        )
        step += CPU_LATENCY if device.is_cpu else STEP_LATENCY
        prefill = sizes.prompts / engines * model.forward(max(1, sizes.prompt_tokens))
        seconds = prefill / (operations * (1.0 if device.is_cpu else PREFILL))
        seconds += -(-of_engine // at_once) * sizes.response_tokens * step
        what = f"{engines} engine{'s' * (engines > 1)}, {at_once} of {of_engine} responses at a time"
        return seconds, what


def _at(rollouts: int, interval: int | None) -> set[int]:
    """Numbers of rollouts after which something is due: at every interval and at the end."""
    return {*range(interval, rollouts + 1, interval)} if interval else set()


def uncounted_sets(rollout: RolloutConfig, rows: Mapping[str, int]) -> list[str]:
    """The names of the held-out sets whose rows are not known."""
    return [one.name for one in read_eval_sets(rollout) if one.path not in rows]


def assumed(megatron: MegatronConfig, device: DeviceSpec, times: Sequence[PhaseTime], *, exports: bool) -> list[str]:
    """The figures that the phases were computed with, a line each; with ``exports`` checkpoints are exported, too."""
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
    copies = megatron.async_save or device.is_cpu or megatron.offload_fraction
    if copies:
        copied = ("optimizer on the host", "hand over", "save", *(("send weights",) if device.is_cpu else ()))
        rows.append((copied, f"{HOST_COPY / 1e9:g} GB/s within host memory"))
    if not megatron.async_save or exports:
        rows.append((("save",), f"{DISK / 1e9:g} GB/s of a file system"))
    if not device.is_cpu:
        link = f"{device.link / 1e9:,.0f} GB/s between the GPUs of a node"
        rows.append((("send weights",), f"{link}, {NETWORK / 1e9:g} GB/s between nodes"))
    there = {one.phase for one in times}
    return [text for phases, text in rows if there.intersection(phases)]


def run_seconds(times: Sequence[PhaseTime], *, overlaps: bool) -> float:
    """Seconds of the whole run; if it ``overlaps``, a rollout is generated while others are trained on."""
    seconds = {one.phase: one.times * one.seconds for one in times}
    training = sum(seconds.get(phase, 0.0) for phase in ("log-probs", "train", "optimizer on the host"))
    together = min(seconds.get("generate", 0.0), training)
    return sum(seconds.values()) - (together if overlaps else 0)
