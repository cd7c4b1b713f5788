"""The steps of a rank: which samples and micro-batches they have, and what is computed before the first."""

import dataclasses

import numpy as np
import pytest

from slime_core.config import AlgorithmConfig
from slime_core.schedule import ShardSpec, build_shards
from slime_core.types import RolloutBatch, Sample, Status
from support.plain import ADAM_EPS, close, same_step


def test_samples_that_contribute_nothing_are_skipped(ranks, tiny_model, tiny_config, make_samples, make_shards):
    model = tiny_model("qwen3")
    samples = make_samples(groups=3)
    flat = [dataclasses.replace(sample, reward=0.0) if sample.group_index == 1 else sample for sample in samples]
    steps = []
    for algorithm in (AlgorithmConfig(), AlgorithmConfig(use_kl_loss=True)):
        ranks.start(1, tiny_config(load=model.checkpoint), model.shape, algorithm)
        steps.append(ranks.first("train", make_shards(flat)))
    skipped, full = steps
    assert skipped.tokens["forward_backward"] < full.tokens["forward_backward"] * 0.7
    same_step(skipped.steps, full.steps, ("pg_loss", "grad_norm"))

    nothing = [dataclasses.replace(sample, reward=0.0) for sample in samples]
    ranks.start(1, tiny_config(load=model.checkpoint, weight_decay=0.0), model.shape)
    before = ranks.first("weights")
    report = ranks.first("train", make_shards(nothing))
    assert report.steps[0]["grad_norm"] == 0.0
    assert all(np.array_equal(value, before[key]) for key, value in ranks.first("weights").items())


@pytest.mark.parametrize("distributed", [False, True], ids=["replicated optimizer", "distributed optimizer"])
@pytest.mark.parametrize("idle", ["one rank has less to do", "one rank has nothing to do"])
def test_every_rank_runs_equally_many_micro_batches(
    ranks, tiny_model, tiny_config, make_samples, make_shards, distributed, idle
):
    """Rank 1 of two has the odd samples: some or all of them contribute nothing and are left out."""
    model = tiny_model("qwen3")
    first_kept = 4 if idle == "one rank has less to do" else 100
    samples = [
        dataclasses.replace(sample, reward=0.0) if number % 2 and number < first_kept else sample
        for number, sample in enumerate(make_samples(groups=2))
    ]
    ranks.start(1, tiny_config(load=model.checkpoint, adam_eps=ADAM_EPS), model.shape)
    expected = ranks.first("train", make_shards(samples)).steps
    weights = ranks.first("weights")
    config = tiny_config(load=model.checkpoint, adam_eps=ADAM_EPS, use_distributed_optimizer=distributed)
    ranks.start(2, config, model.shape)
    shards = make_shards(samples, data_parallel=2, micro_batch_size=1)
    (first, *counts), (second, *others) = ranks.call("train_and_watch_packing", shards)
    assert counts == others == [4, counts[1], 4]
    reports = [first, second]
    assert reports[0].performance == reports[1].performance
    tokens = sum(report.tokens["forward_backward"] for report in reports)
    slowest = max(report.seconds["forward_backward"] for report in reports)
    assert close(reports[0].performance["forward_backward_tok_per_s"], tokens / slowest)
    same_step(reports[0].steps, expected, ("loss", "pg_loss", "grad_norm"))
    assert reports[1].steps == reports[0].steps
    assert reports[1].tokens["forward_backward"] < reports[0].tokens["forward_backward"]
    for key, value in ranks.first("weights").items():
        np.testing.assert_allclose(value, weights[key], atol=1e-5, rtol=0, err_msg=key)


@pytest.mark.parametrize(
    ("flags", "field"), [({"use_tis": True}, "rollout_log_probs"), ({"use_opd": True}, "teacher_log_probs")]
)
def test_samples_without_the_log_probs_that_the_algorithm_needs(
    ranks, tiny_model, tiny_config, near_samples, make_shards, rank_error, flags, field
):
    model, samples = tiny_model("qwen3"), near_samples(groups=1)
    samples[1] = dataclasses.replace(samples[1], **{field: None})
    ranks.start(1, tiny_config(load=model.checkpoint), model.shape, AlgorithmConfig(**flags))
    with pytest.raises(rank_error, match=rf"samples \[{samples[1].index}\] have no {field}") as caught:
        ranks.first("train", make_shards(samples))
    assert caught.value.kind == "DataError"


def test_micro_batches_of_the_schedule_of_which_one_is_empty(ranks, tiny_model, tiny_config, near_samples):
    """Five samples of four trajectories on two ranks, each alone by the token limit; the trainer fills the sixth."""
    model, config = tiny_model("qwen3"), tiny_config(load=tiny_model("qwen3").checkpoint, adam_eps=ADAM_EPS)
    samples = [
        Sample(
            index=part.index, group_index=part.group_index, trajectory_id=part.index - (number % 3 == 2), prompt="p",
            tokens=part.tokens, response_length=part.response_length, loss_mask=part.loss_mask,
            reward=float(number % 3 == 0), rollout_log_probs=part.rollout_log_probs, status=Status.COMPLETED,
        )
        for number, part in enumerate(near_samples(groups=2))
    ]  # fmt: skip
    batch, metrics = RolloutBatch(rollout_id=0, groups=[samples[:3], samples[3:5]]), []
    algorithm = AlgorithmConfig(disable_grpo_std_normalization=True)
    for world, limits in ((1, {}), (2, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 5})):
        spec = ShardSpec(
            algorithm=algorithm, temperature=0.8, data_parallel_size=world, micro_batch_size=1,
            global_batch_size=4, **limits,
        )  # fmt: skip
        shards = build_shards(batch, spec)
        empty = [positions for shard in shards for positions in shard.steps[0].micro_batches if not positions]
        assert len(empty) == world - 1
        ranks.start(world, config, model.shape, algorithm)
        metrics.append(ranks.call("train", shards)[0].steps)
    same_step(metrics[1], metrics[0], ("loss", "pg_loss", "grad_norm"))


def test_an_advantage_function_of_ones_own(ranks, tiny_model, tiny_config, near_samples, make_shards, tmp_path):
    """Half of what the estimator gives: half the loss."""
    (tmp_path / "mine.py").write_text(
        "from slime_core.ops import Advantages, estimator_named\n"
        "def half(inputs):\n"
        "    return Advantages(*(values / 2 for values in estimator_named('grpo')(inputs)))\n"
    )
    model, samples = tiny_model("qwen3"), near_samples(groups=2)
    losses = []
    for path in (None, f"{tmp_path}/mine.py:half"):
        algorithm = AlgorithmConfig(custom_advantage_function_path=path)
        ranks.start(1, tiny_config(load=model.checkpoint), model.shape, algorithm)
        losses.append(ranks.first("train", make_shards(samples, temperature=0.8)).steps[0]["pg_loss"])
    assert losses[1] == pytest.approx(losses[0] / 2, rel=1e-5)
    assert losses[0] != 0
