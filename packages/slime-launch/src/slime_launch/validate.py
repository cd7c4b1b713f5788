"""Rules that span packages. Only arithmetic and text: nothing is read or started here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime_convert.quantize import Int4Format
from slime_convert.shape import ModelShape, check_flags
from slime_core.algorithms import LOSSES, names
from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError
from slime_core.former_names import renamed
from slime_core.schedule import check_batch_sizes
from slime_core.words import counted
from slime_launch.config import ClusterConfig, Settings
from slime_launch.derived import global_batch_size, is_quantized
from slime_launch.devices import run_device
from slime_launch.errors import Problems
from slime_launch.idle import idle_flags
from slime_launch.kind import RunKind
from slime_megatron.service import FUSED_ROUTERS, MegatronConfig, role_config
from slime_rollout.checks import read_eval_sets, wrong_on_cpu
from slime_rollout.config import MOST_KEPT, MOST_LISTED, SFT_ROLLOUT, RolloutConfig
from slime_rollout.engine import EngineConfig, EnginePlan
from slime_rollout.service import ModelLimits

__getattr__ = renamed(
    __name__,
    {"CANARY_LIMITS": "slime_launch.derived.CANARY_LIMITS"},
    {
        "canary_limit": "slime_launch.derived.canary_limit(settings.engine, settings.megatron, settings.rollout), if "
        "settings.kind.sends",
        "engine_dtype": "slime_launch.derived.engine_dtype(settings.megatron, settings.rollout)",
        "limit_threads": "slime_launch.derived.limit_threads(settings.engine, engines=engines)",
        "num_engines": "slime_launch.derived.num_engines(settings.cluster, settings.engine)",
        "num_spare_engines": "slime_launch.derived.num_spare_engines(settings.placed, settings.engine)",
        "row_limit": "slime_launch.derived.row_limit(settings.rollout, context)",
    },
)
_KEEPING = "--rollout-top-p, --rollout-top-k or --rollout-min-p"


def check_settings(settings: Settings) -> None:
    """Check what no package can check alone.

    Raises:
        ConfigError: With the values and what to set; a line for each problem.
    """
    problems = Problems()
    problems.attempt(_check_batches, settings)
    problems.attempt(lambda: Problems(_problems_of_kind(settings)).report())
    problems.attempt(_check_sampling, settings)
    problems.attempt(_check_learning, settings)
    ahead = settings.rollout.selection.async_buffer_size is not None
    problems.attempt(_check_colocation, settings.kind, settings.cluster, settings.engine, ahead=ahead)
    problems.attempt(_check_distillation, settings.algorithm, settings.rollout, settings.megatron)
    problems.attempt(_check_engine_gpus, settings.kind, settings.cluster, settings.engine)
    problems.report()


def _check_batches(settings: Settings) -> None:
    if not settings.kind.updates:
        return
    megatron = settings.megatron
    check_batch_sizes(
        num_samples=settings.rollout.selection.rollout_batch_size * settings.samples_per_prompt,
        global_batch_size=global_batch_size(settings),
        data_parallel_size=megatron.data_parallel_size(settings.cluster.actor_gpus),
        micro_batch_size=megatron.micro_batch_size,
        use_dynamic_batch_size=megatron.use_dynamic_batch_size,
        max_tokens_per_gpu=megatron.max_tokens_per_gpu,
        context_parallel_size=megatron.context_parallel_size,
        pairs=settings.algorithm.on_pairs,
    )


def _problems_of_kind(settings: Settings) -> Iterator[str]:
    """Lines about what a run of this kind needs, and what it cannot have."""
    run, size = settings.run, settings.rollout.selection.n_samples_per_prompt
    if run.debug_train_only and settings.kind.generates:
        yield (
            "--debug-train-only starts no engines; give --load-debug-rollout-data, the rollouts to train on, or a "
            "--loss-type on rows of --prompt-data, such as sft_loss"
        )
    if not settings.rollout.data.prompt_paths and not settings.kind.is_recorded and not settings.kind.only_evaluates:
        yield "missing --prompt-data; see --help"
    if settings.kind.only_evaluates and not settings.rollout.evaluation.has_eval_sets:
        yield "--num-rollout 0 only evaluates; give held-out sets with --eval-prompt-data or --eval-config"
    path, loss = settings.rollout.sampling.rollout_function_path, settings.algorithm.loss_type
    fit = names(LOSSES, lambda row: row.trains_on == "conversations" or row.is_custom)
    if path == SFT_ROLLOUT and loss not in fit:
        yield f"--rollout-function-path {path} gives conversations; add --loss-type {' or '.join(fit)}"
    if path not in (None, SFT_ROLLOUT) and settings.algorithm.on_data:
        yield f"--rollout-function-path {path}: --loss-type {loss} takes rows of --prompt-data as they are: leave out"
    if settings.rollout.rollout_function is not None and settings.rollout.selection.async_buffer_size is not None:
        yield (
            f"--rollout-function-path {path} makes one rollout when it is called, and --async-buffer-size has slime "
            "generate ahead; leave one of them out"
        )
    if settings.kind.rows is not None and size not in (1, settings.samples_per_prompt):
        yield (
            f"--n-samples-per-prompt {size}: a row makes {settings.samples_per_prompt} with --loss-type "
            f"{settings.algorithm.loss_type}; leave it out"
        )
    if settings.algorithm.on_data and run.debug_rollout_only:
        yield f"--debug-rollout-only generates, and --loss-type {settings.algorithm.loss_type} does not"


def _check_sampling(settings: Settings) -> None:
    sampling = settings.rollout.sampling
    if not sampling.keeps_all_tokens and settings.kind.sends:
        _check_kept(settings.rollout, settings.engine)
    if settings.kind.trains:
        Problems(_problems_of_routing(settings.rollout, settings.megatron, settings.algorithm)).report()
    if settings.rollout.selection.partial_rollout and "speculative-algorithm" in settings.engine.sglang_args:
        raise ConfigError(
            "--partial-rollout does not work with --sglang-speculative-algorithm: of a response that is cut off, an "
            "engine has not looked at all tokens of its last step; leave one of them out"
        )


def _check_kept(rollout: RolloutConfig, engine: EngineConfig) -> None:
    """Engine and teacher can work with tokens that are sampled from a part of the vocabulary."""
    top_k, flags = rollout.sampling.rollout_top_k, _KEEPING
    most = int(str(engine.sglang_args.get("sampling-mask-max-tokens", MOST_LISTED)))
    if top_k == 1:
        raise ConfigError(
            "--rollout-top-k 1 leaves every token one choice, so there is nothing to learn; give 2 or more, or "
            "--eval-top-k 1 for evaluation alone"
        )
    if max(top_k, MOST_KEPT if top_k == -1 else 0) > most:
        raise ConfigError(
            f"{f'--rollout-top-k {top_k}' if top_k != -1 else flags} may keep more tokens than an engine lists, "
            f"{most:,}; give --sglang-sampling-mask-max-tokens {max(top_k, MOST_LISTED)}"
            f"{' or a smaller --rollout-top-k' if top_k != -1 else ', or leave it out'}"
        )
    if rollout.rewards.opd_type == "sglang":
        raise ConfigError(
            f"{flags} with --opd-type sglang: the teacher's log-probs are of the whole vocabulary, and the trainer's "
            "of the tokens kept; leave them out, or give --opd-type megatron"
        )


def _problems_of_routing(rollout: RolloutConfig, megatron: MegatronConfig, algorithm: AlgorithmConfig) -> Iterator[str]:
    """Settings under which experts cannot be chosen again."""
    if rollout.sampling.use_rollout_routing_replay:
        flag = "--use-rollout-routing-replay"
        if megatron.megatron_args.get("moe_router_fusion"):
            yield f"{flag} {FUSED_ROUTERS}"
    elif megatron.use_routing_replay:
        advice = "leave one of them out, or add --use-rollout-routing-replay, for the engine's experts"
        if algorithm.use_rollout_logprobs:
            yield (
                "--use-routing-replay takes the experts of the pass that computes old log-probs, and there is none "
                f"with --use-rollout-logprobs; {advice}"
            )
        if algorithm.keep_old_actor:
            yield f"--use-routing-replay with --keep-old-actor: several weights choose experts for a sample; {advice}"


def check_whole_engines(kind: RunKind, rollout: RolloutConfig, engine: EngineConfig) -> None:
    """Refuse settings that engines split into prefill and decoding cannot serve.

    Such requests go to engines without the router, which alone joins the two.
    """
    sampling = rollout.sampling
    asked = [_KEEPING] * (not sampling.keeps_all_tokens)
    asked += ["--use-rollout-routing-replay"] * sampling.use_rollout_routing_replay
    if asked and kind.trains:
        source = "--sglang-config" if engine.sglang_config is not None else "--prefill-num-servers"
        raise ConfigError(
            f"{asked[0]} with prefill engines of {source}: such requests go to engines without the router, which alone "
            "joins prefill and decoding; take regular engines, or leave the other out"
        )


def _check_colocation(kind: RunKind, cluster: ClusterConfig, engine: EngineConfig, *, ahead: bool) -> None:
    if not kind.generates:
        return
    if ahead and not cluster.colocate and (cluster.offloads_train or cluster.offloads_rollout):
        raise ConfigError(
            "--offload-train and --offload-rollout have trainer and engines take turns, and --async-buffer-size has "
            "them work at the same time; leave one of them out"
        )
    if not cluster.colocate:
        return
    if ahead:
        raise ConfigError(
            "--colocate has trainer and engines take turns, and --async-buffer-size has them work at the same time; "
            "give --rollout-num-gpus in place of --colocate"
        )
    row = engine.transport
    if row is not None and row.with_colocate is not None:
        raise ConfigError(
            f"--update-weight-transport {row.name} does not work with --colocate: {row.name.upper()} "
            f"{row.with_colocate}; leave it out, which shares tensors on the GPU"
        )


def _check_learning(settings: Settings) -> None:
    """Refuse what changes no weight, and sends or saves that cannot be."""
    algorithm, size = settings.algorithm, settings.rollout.selection.n_samples_per_prompt
    own = algorithm.custom_advantage_function_path or settings.rollout.hooks.custom_reward_post_process_path
    trained = settings.kind.updates and algorithm.uses_advantages
    if size == 1 and algorithm.centres_rewards and trained and not own and not algorithm.use_opd:
        raise ConfigError(
            f"--n-samples-per-prompt 1: {algorithm.advantage_estimator} compares the samples of a prompt with each "
            "other, so rewards change no weight; give 2 or more, or --disable-rewards-normalization"
        )
    if settings.rollout.selection.update_weights_interval > 1 and settings.engine.use_fault_tolerance:
        raise ConfigError(
            f"--update-weights-interval {settings.rollout.selection.update_weights_interval} does not work with "
            "--use-fault-tolerance: an engine that is replaced needs weights that the trainer no longer has; leave one "
            "of them out"
        )
    if settings.run.save_hf is not None and settings.megatron.lora_rank:
        raise ConfigError(f"--save-hf {settings.run.save_hf} does not merge adapters; leave it out")


LARGER = (2, 4, 8)
"""Micro-batches that are proposed for a CPU: with larger ones little is won."""


def notices(settings: Settings) -> list[str]:
    """Warnings about what the run will do, a line each."""
    lines = [*settings.notes, *settings.algorithm.notices, *_notices_of_kind(settings)]
    if settings.kind.updates:
        steps = settings.num_rollout * settings.run.num_steps_per_rollout
        lines += _notices_of_rates(settings.megatron, steps, has_critic=settings.kind.has_critic)
    return lines


def micro_batch_notes(settings: Settings, *, on_cpu: bool) -> list[str]:
    """A default micro-batch of one sample, which a CPU goes through many of in a step, in a line."""
    megatron = settings.megatron
    if not on_cpu or not settings.kind.updates or megatron.use_dynamic_batch_size:
        return []
    size = megatron.micro_batch_size
    own = global_batch_size(settings) // megatron.data_parallel_size(settings.cluster.actor_gpus)
    larger = max((found for found in LARGER if found % size == 0 and own % found == 0), default=size)
    if "micro_batch_size" in settings.origins or larger == size:
        return []
    return [
        f"each step of a rank has {own // size} micro-batches of --micro-batch-size {size}, the default; a CPU reads "
        f"all weights for each: --micro-batch-size {larger} makes it {own // larger}, if memory allows (with "
        "8, a step of a 135M model took 0.57 of the time for samples of 24 tokens, 0.68 of it for 72)"
    ]


def hand_over_notes(kind: RunKind, cluster: ClusterConfig, *, on_cpu: bool) -> list[str]:
    """Memory that changes hands in every step on a CPU, where it costs time and is of use only if memory is short."""
    if not on_cpu or not cluster.colocate or not kind.sends:
        return []
    kept = {"train": kind.trainer_sleeps, "rollout": kind.engines_sleep}
    flags = " and ".join(f"--no-offload-{half}" for half, sleeps in kept.items() if sleeps)
    if not flags:
        return []
    return [
        f"--colocate on a CPU hands memory over in every step, up to a third of its time: {flags} if memory suffices"
    ]


def _notices_of_rates(megatron: MegatronConfig, steps: int, *, has_critic: bool) -> Iterator[str]:
    """Courses of learning rates that are longer than the run; the critic's where it has one of its own."""
    roles = {"": megatron}
    if has_critic:
        roles["the critic: "] = role_config(megatron, "critic", {})
    said: set[str] = set()
    for role, config in roles.items():
        found = set(config.rate_notes(steps))
        yield from (f"{role}{line}" for line in sorted(found - said))
        said |= found


def _notices_of_kind(settings: Settings) -> list[str]:
    run, lines = settings.run, []
    if settings.kind.is_recorded:
        unscored = "; held-out prompts are not scored" if settings.rollout.evaluation.has_eval_sets else ""
        lines.append(f"rollouts come from {run.load_debug_rollout_data}: no engines are started{unscored}")
    if settings.megatron.ckpt_format != "torch_dist":
        written = "what is read is detected, and torch_dist is written"
        lines.append(f"--ckpt-format {settings.megatron.ckpt_format}: {written}")
    if (rows := settings.kind.rows) is not None:
        lines.append(f"--loss-type {settings.algorithm.loss_type}: --prompt-data holds {rows}, no engines")
    temperature = settings.rollout.sampling.rollout_temperature
    if settings.algorithm.use_opd and settings.rollout.rewards.opd_type == "sglang" and temperature != 1:
        lines.append(
            f"--rollout-temperature {temperature:g}: the policy's log-probs are at it, a server's of the teacher at 1; "
            "so equal models differ, too (SmolLM2-135M at 0.6: by 0.34 nats a token); give 1, or --opd-type megatron, "
            "which has both at the same"
        )
    if run.num_epoch is not None and not settings.kind.only_evaluates:
        lines.append(f"--num-epoch {run.num_epoch}: {counted(settings.num_rollout, 'rollout')}")
    if settings.kind.engines_sleep and settings.engine.sglang_config is not None:
        lines.append("engines of other models than the trained one keep their memory: only its weights are sent again")
    if not settings.kind.trains:
        lines.append("no trainers are started: the engines keep the weights of --hf-checkpoint")
    if not settings.kind.updates:
        lines.append("nothing is trained, and no checkpoint is written")
    lines += idle_flags(settings).notes
    return lines


def _check_distillation(algorithm: AlgorithmConfig, rollout: RolloutConfig, megatron: MegatronConfig) -> None:
    wanted, teacher = algorithm.use_opd, rollout.rewards.opd_type
    own = rollout.rewards.custom_rm_path or rollout.sampling.custom_generate_function_path
    if wanted and teacher is None and own is None:
        raise ConfigError(
            "--use-opd needs the teacher's log-probs: give --opd-type sglang and --rm-url, the address of a SGLang "
            "server with the teacher, --opd-type megatron and --opd-teacher-load, its checkpoint, or a custom reward "
            "or generate function that sets sample.teacher_log_probs"
        )
    directory = megatron.opd_teacher_load
    if wanted and (teacher == "megatron") != (directory is not None):
        raise ConfigError(
            f"--opd-type {teacher} and --opd-teacher-load {directory}: a teacher in the trainer is --opd-type megatron "
            "with --opd-teacher-load, its checkpoint; give both or neither"
        )


def _check_engine_gpus(kind: RunKind, cluster: ClusterConfig, engine: EngineConfig) -> None:
    if not kind.generates:
        return
    if engine.rollout_external_engine_addrs:
        if cluster.rollout_num_gpus is not None or cluster.rollout_max_num_gpus is not None or cluster.colocate:
            raise ConfigError(
                "--rollout-num-gpus, --rollout-max-num-gpus and --colocate mean engines that the run starts, and "
                "--rollout-external-engine-addrs names external engines; give one of the two"
            )
        if cluster.offloads_rollout:
            raise ConfigError(
                "--offload-rollout takes memory from engines that the run starts, and --rollout-external-engine-addrs "
                "names external engines; give --offload-train alone, or leave it out"
            )
        return
    if cluster.rollout_max_num_gpus is not None:
        _check_spare_gpus(cluster, engine, cluster.rollout_max_num_gpus)
    if not cluster.rollout_gpus:
        raise ConfigError("the engines have no GPUs: give --rollout-num-gpus N, or --colocate to share the trainer's")
    if engine.sglang_config is None and cluster.rollout_gpus % engine.rollout_num_gpus_per_engine:
        raise ConfigError(
            f"--rollout-num-gpus {cluster.rollout_gpus} must be a multiple of --rollout-num-gpus-per-engine "
            f"{engine.rollout_num_gpus_per_engine}"
        )


def _check_spare_gpus(cluster: ClusterConfig, engine: EngineConfig, most: int) -> None:
    """Engines can be added: to others that are alike, and next to the trainers."""
    given = f"--rollout-max-num-gpus {most}"
    if cluster.colocate:
        raise ConfigError(f"{given} adds engines where no trainer is, and --colocate has both on the same GPUs")
    if engine.sglang_config is not None or engine.prefill_num_servers is not None:
        raise ConfigError(f"{given} adds engines like the others; leave --sglang-config and --prefill-num-servers out")
    if engine.receives_here:
        raise ConfigError(
            f"{given}: deltas reach engines on other nodes through --update-weight-receivers alone; give them, or "
            "leave --update-weight-mode out"
        )
    if cluster.spare_gpus == 0 or cluster.spare_gpus % engine.rollout_num_gpus_per_engine:
        raise ConfigError(
            f"{given} must be --rollout-num-gpus {cluster.rollout_gpus} and a multiple of "
            f"--rollout-num-gpus-per-engine {engine.rollout_num_gpus_per_engine} more"
        )


def check_shape(rollout: RolloutConfig, given: Mapping[str, Any]) -> ModelShape:
    """The model's shape from ``--hf-checkpoint``, after the flags of it that were ``given`` were compared with it.

    Raises:
        ConvertError: The config cannot be read, or flags contradict it: all of them in one message.
        ConfigError: Experts are to be chosen again, and it has none.
    """
    shape = ModelShape.from_hf_config(rollout.data.hf_checkpoint)
    check_flags(shape, given)
    if rollout.sampling.use_rollout_routing_replay and shape.num_experts is None:
        raise ConfigError("--use-rollout-routing-replay: the model has no experts; leave it out")
    return shape


def check_quantized(rollout: RolloutConfig, engine: EngineConfig, elsewhere: bool = False) -> None:
    """Quantized engines can take the trainer's weights again and again, and run here unless they are ``elsewhere``.

    Raises:
        ConfigError: They cannot.
        ConvertError: How the model is quantized is not known, or is only read.
    """
    directory = rollout.data.hf_checkpoint
    if not is_quantized(directory):
        return
    from slime_convert.stored_form import StoredForm

    form, external = StoredForm(directory), engine.rollout_external_engine_addrs
    way_out = "give it in bfloat16, as slime-convert fp8-to-bf16 or int4-to-bf16 writes it"
    dense = min((name for name in form.quantized if ".experts." not in name), default=None)
    if isinstance(form.format, Int4Format) and dense is not None:
        raise ConfigError(
            f"--hf-checkpoint {directory} has {dense} in INT4, which SGLang can load once but not update; INT4 is for "
            f"routed experts alone; {way_out}, or in INT4 by slime-convert hf-to-int4 of a model with experts"
        )
    if not elsewhere and not external and run_device() == "cpu":
        raise ConfigError(
            f"--hf-checkpoint {directory} is quantized ({form.format}), and SGLang's engines run such models on GPUs "
            f"alone; {way_out}"
        )


def check_on_cpu(kind: RunKind, rollout: RolloutConfig, engine: EngineConfig, plan: EnginePlan | None) -> None:
    """Engines that run here on a CPU compute what their models say, in every kind of run: all of ``plan``, or the one.

    Raises:
        ConfigError: A model has a part that SGLang's attention leaves out there.
    """
    device = str(engine.sglang_args.get("device") or run_device())
    if engine.rollout_external_engine_addrs or device != "cpu":
        return
    own = rollout.data.hf_checkpoint
    limits = [one.max_context_len for one in read_eval_sets(rollout)]
    limits += [rollout.sampling.rollout_max_context_len] * (not kind.only_evaluates)
    longest = None if None in limits else max((limit for limit in limits if limit is not None), default=None)
    others = {spec.model_path for model in plan.models for spec in model.specs} if plan is not None else set()
    lines = []
    for path in dict.fromkeys([own, *sorted(others)]):
        if problem := wrong_on_cpu(path, longest if path == own else None):
            flag = "--hf-checkpoint" if path == own else "--sglang-config: the model"
            lines.append(
                f"{flag} {path}: SGLang on a CPU ignores {problem}; run its engines on GPUs, or take another model"
            )
    Problems(lines).report()


def length_notes(kind: RunKind, rollout: RolloutConfig, shape: ModelShape) -> list[str]:
    """Lines about limits that are beyond the model's own."""
    sampling, context = rollout.sampling, shape.max_position_embeddings
    left = ModelLimits(context=context).tokens_left(1) or 0
    given = {} if kind.only_evaluates else {"--rollout-max-response-len": sampling.rollout_max_response_len}
    given |= {f"held-out set {one.name}: max_response_len": one.max_response_len for one in read_eval_sets(rollout)}
    lines = [
        f"{name} {length:,} is more than the model's context of {context:,} holds: responses end there at the latest"
        for name, length in given.items()
        if length > left
    ]
    if (limit := sampling.rollout_max_context_len) is not None and limit > context:
        lines.append(f"--rollout-max-context-len {limit:,} is more than the model's context, {context:,}: that counts")
    return lines
