"""A run's settings as those of its batches: how each is checked, written down and split."""

from __future__ import annotations

from slime_convert.shape import ModelShape
from slime_core.schedule import ShardSpec
from slime_core.step_plan import token_count
from slime_launch.config import Settings
from slime_launch.derived import global_batch_size
from slime_megatron.service import flops_model
from slime_rollout.service import BatchSpec, ModelLimits, RolloutStore, hook_args_of


def batch_spec(
    settings: Settings,
    shape: ModelShape,
    data_parallel_size: int,
    *,
    store: RolloutStore | None = None,
    can_resume: bool = False,
) -> BatchSpec:
    """Settings of all batches of a run; the arguments are those of :class:`~slime_rollout.prepare.BatchSpec`."""
    megatron, algorithm, run, kind = settings.megatron, settings.algorithm, settings.run, settings.kind
    of_data, sampling, size = kind.rows is not None, settings.rollout.sampling, megatron.global_batch_size or 1
    shards = ShardSpec(
        algorithm=algorithm,
        temperature=1.0 if of_data else sampling.rollout_temperature,
        data_parallel_size=data_parallel_size,
        micro_batch_size=megatron.micro_batch_size,
        global_batch_size=size if kind.only_evaluates else global_batch_size(settings),  # an evaluation splits none
        reward_key=None if of_data else settings.rollout.rewards.reward_key,
        keep_groups_together=megatron.may_share_prompts and not algorithm.on_pairs,
        pairs=algorithm.on_pairs,
        use_dynamic_batch_size=megatron.use_dynamic_batch_size,
        max_tokens_per_gpu=megatron.max_tokens_per_gpu,
        context_parallel_size=megatron.context_parallel_size,
        cost=flops_model(shape).training if megatron.balance_by_flops else token_count,
        drop_untrained=True,
        drop_rest=True,
        needs_kept=not of_data and not sampling.keeps_all_tokens,
        needs_experts=not of_data and sampling.use_rollout_routing_replay,
    )
    return BatchSpec(
        shards=shards,
        rollout=settings.rollout,
        hook_args=hook_args_of(settings.rollout, settings.flags()),
        limits=ModelLimits(vocab_size=shape.vocab_size, context=shape.max_position_embeddings),
        checks_versions=kind.generates,
        of_data=of_data,
        trains=kind.trains,
        log_passrate=run.log_passrate,
        store=store,
        can_resume=can_resume,
        copies=run.save_debug_rollout_data,
        shown=run.report_samples,
        shown_in=None if run.output_dir is None else str(run.output_dir),
    )
