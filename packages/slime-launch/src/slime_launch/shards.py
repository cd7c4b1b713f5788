"""A rollout as the trainer's ranks take it, as the settings say. Only arithmetic: nothing is started here."""

from __future__ import annotations

from slime_convert.shape import ModelShape
from slime_core.flops import FlopsModel
from slime_core.schedule import build_shards
from slime_core.step_plan import Cost, token_count
from slime_core.types import RolloutBatch, TrainShard
from slime_launch.config import Settings


def split_rollout(
    batch: RolloutBatch, settings: Settings, shape: ModelShape, *, data_parallel_size: int, global_batch_size: int
) -> list[TrainShard]:
    """:func:`slime_core.schedule.build_shards` with a run's settings.

    Args:
        batch: The rollout.
        settings: Micro-batches, the algorithm's rewards, temperature.
        shape: The model, whose operations are balanced with ``--balance-by-flops``.
        data_parallel_size: Number of shards.
        global_batch_size: Trajectories per optimizer step.

    Raises:
        DataError: A sample cannot be trained on.
    """
    megatron = settings.megatron
    return build_shards(
        batch,
        algorithm=settings.algorithm,
        temperature=settings.rollout.rollout_temperature,
        data_parallel_size=data_parallel_size,
        micro_batch_size=megatron.micro_batch_size,
        global_batch_size=global_batch_size,
        reward_key=settings.rollout.reward_key,
        keep_groups_together=megatron.share_prompts,
        use_dynamic_batch_size=megatron.use_dynamic_batch_size,
        max_tokens_per_gpu=megatron.max_tokens_per_gpu,
        cost=training_flops(shape) if megatron.balance_by_flops else token_count,
    )


def training_flops(shape: ModelShape) -> Cost:
    """What training on a sequence of so many tokens costs this model, in floating-point operations."""
    return FlopsModel(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        head_dim=shape.kv_channels,
        vocab_size=shape.vocab_size,
    ).training
