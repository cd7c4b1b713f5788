"""Passes of each role."""

import dataclasses

import numpy as np
import pytest

from slime_core.config import AlgorithmConfig

GRPO_WITH_KL = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")


@pytest.mark.parametrize("share_prompts", ["off", "on"])
def test_batches_are_packed_when_they_are_due(ranks, tiny_model, tiny_config, make_samples, make_shards, share_prompts):
    """Three passes over eight micro-batches: reference, old log-probs, training. One is computed, the next packed."""
    model = tiny_model("qwen3")
    ranks.start(1, tiny_config(load=model.checkpoint, share_prompts=share_prompts), model.shape, GRPO_WITH_KL)
    shards = make_shards(make_samples(), steps=2, micro_batch_size=2)
    _, packed, alive, passes = ranks.first("train_and_watch_packing", shards)
    assert (packed, passes) == (3 * 8, 3 * 8)
    assert alive <= 2


def test_forward_by_role(ranks, tiny_model, tiny_config, make_samples, make_shards, rank_error):
    """After training the actor has moved, and the reference has not. Ranks of different work get all of theirs."""
    model, samples = tiny_model("qwen3"), make_samples(masks=True, groups=2)
    samples = [dataclasses.replace(s, loss_mask=[0] * s.response_length) if s.index % 2 else s for s in samples]
    ranks.start(2, tiny_config(load=model.checkpoint), model.shape, GRPO_WITH_KL)
    shards = make_shards(samples, data_parallel=2, micro_batch_size=2)
    before = ranks.call("forward", shards, "reference")
    assert [[row.dtype for row in rows] for rows in before] == [[np.float32] * 4] * 2
    for got, wanted in zip(ranks.call("forward", shards, "actor"), before, strict=True):
        for row, other in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(row, other)
    ranks.call("train", shards)
    after = ranks.call("forward", shards, "actor")
    assert max(np.abs(row - other).max() for row, other in zip(after[0], before[0], strict=True)) > 1e-3
    for row, other in zip(ranks.first("forward", shards, "reference"), before[0], strict=True):
        np.testing.assert_array_equal(row, other)
    assert not any(row.any() for row in before[1])  # none of the odd samples has a trained token
    with pytest.raises(rank_error, match="this trainer has no critic model; set --advantage-estimator ppo"):
        ranks.call("forward", shards, "critic")
