"""Every algorithm in the trainer equals slime-core's functions over whole responses, on transformers' log-probs.

slime-core's tests compare those functions with the papers. Here the trainer packs trained tokens only, splits steps
into micro-batches and ranks, and computes log-probs and advantages in passes of its own: nothing of that may show.
"""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from slime_core.config import AlgorithmConfig
from slime_core.ops import loss_weights, mis_weight_sums, policy_advantages, policy_objective
from support.plain import ADAM_EPS, plain_adamw, plain_log_probs, same_step

TEMPERATURE = 0.8
WHITENED = {"normalize_advantages": True}
ALGORITHMS = {
    "dual clip, per token": {"eps_clip": 0.1, "eps_clip_c": 1.2, "calculate_per_token_loss": True},
    "constant divisor, entropy": {"loss_divisor": 10.0, "entropy_coef": 0.05},
    "KL in the reward": {"kl_coef": 0.3, "kl_loss_type": "k2"},
    "unbiased KL": {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "use_unbiased_kl": True},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.05},
    "gspo with KL in the reward": {"advantage_estimator": "gspo", "eps_clip": 0.1, "kl_coef": 0.3},
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.1},
    "rloo, whitened": {"advantage_estimator": "rloo", **WHITENED},
    "reinforce++": {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.9, "kl_coef": 0.1, **WHITENED},
    "reinforce++ baseline": {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.1, **WHITENED},
    "distillation": {"use_opd": True, "opd_kl_coef": 0.5},
    "the engine's log-probs": {"use_rollout_logprobs": True, "kl_coef": 0.1},
    "tis": {"use_tis": True, "tis_clip": 1.1},
    "icepop": {"use_tis": True, "tis_mode": "icepop", "tis_clip": 1.3, "tis_clip_low": 0.7},
    "mis": {"use_mis": True, "mis_level": "sequence", "mis_rs_level": "geometric", "mis_batch_normalize": True},
    "opsm": {"use_opsm": True, "opsm_delta": 0.0},
    "own reducer": {"custom_pg_loss_reducer_function_path": f"{__file__}:over_ten", "entropy_coef": 0.05},
}  # fmt: skip
# The plainest one is in test_worker.py. These show each kind once in the normal run.
SHOWN = ("KL in the reward", "gspo with KL in the reward", "reinforce++", "distillation", "mis", "opsm", "own reducer")
EVERY = [pytest.param(name, marks=[] if name in SHOWN else pytest.mark.full) for name in ALGORITHMS]


def over_ten(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """A reducer: the sum over each response, divided by ten."""
    assert not calculate_per_token_loss and total_lengths == response_lengths == list(map(len, loss_masks))
    return lambda losses: sum(
        (part * mask).sum() / 10 for part, mask in zip(losses.split(response_lengths), loss_masks, strict=True)
    )


def flat(samples, name):
    return torch.tensor([value for sample in samples for value in getattr(sample, name)])


def expected_training(hf, steps, *, config, algorithm):
    """Each step's loss and gradient norm, of whole responses in one piece."""
    model, reference = copy.deepcopy(hf), copy.deepcopy(hf)
    optimizer = plain_adamw(model, config)
    samples = [sample for step in steps for sample in step]
    with torch.no_grad():
        ref = torch.cat([plain_log_probs(reference, sample, TEMPERATURE) for sample in samples])
    old = flat(samples, "rollout_log_probs") if algorithm.use_rollout_logprobs else ref  # the same weights at first
    lengths = [sample.response_length for sample in samples]
    advantages = policy_advantages(
        algorithm, rewards_N=torch.tensor([sample.reward for sample in samples]), mask_T=flat(samples, "loss_mask"),
        lengths=lengths, old_log_probs_T=old, ref_log_probs_T=ref,
        teacher_log_probs_T=flat(samples, "teacher_log_probs"),
    ).advantages_T  # fmt: skip
    metrics, start = [], 0
    for step in steps:
        part = slice(start, start + sum(sample.response_length for sample in step))
        start = part.stop
        weights = loss_weights(
            algorithm, [sample.loss_mask for sample in step],
            trajectory_tokens=[sample.trajectory_tokens for sample in step],
            global_trajectories=len(step), global_tokens=sum(sum(sample.loss_mask) for sample in step),
        )  # fmt: skip
        given = {"lengths": [sample.response_length for sample in step], "weights_T": weights}
        rollout = flat(step, "rollout_log_probs")
        sums = mis_weight_sums(
            algorithm, train_log_probs_T=old[part], rollout_log_probs_T=rollout, mask_T=weights, **given
        )
        optimizer.zero_grad()
        new = torch.cat([plain_log_probs(model, sample, TEMPERATURE) for sample in step])
        own = algorithm.custom_pg_loss_reducer_function_path is not None
        loss, found = policy_objective(
            algorithm, pg_weights_T=flat(step, "loss_mask") / 10 / len(step) if own else None,
            log_probs_T=new, old_log_probs_T=old[part], advantages_T=advantages[part],
            ref_log_probs_T=ref[part], rollout_log_probs_T=rollout, entropy_T=plain_entropies(model, step),
            mis_sums=sums, **given,
        )  # fmt: skip
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
        optimizer.step()
        metrics.append({"loss": loss.item(), "pg_loss": found["pg_loss"].item(), "grad_norm": float(norm)})
    return metrics


def plain_entropies(model, samples):
    rows = []
    for sample in samples:
        logits = model(torch.tensor([sample.tokens])).logits[0].float() / TEMPERATURE
        log_probs = logits[sample.prompt_length - 1 : len(sample.tokens) - 1].log_softmax(-1)
        rows.append(-(log_probs.exp() * log_probs).sum(-1))
    return torch.cat(rows)


@pytest.mark.parametrize("name", EVERY)
def test_two_steps_in_micro_batches(ranks, tiny_model, tiny_config, near_samples, make_shards, name):
    model, algorithm, samples = tiny_model("qwen3"), AlgorithmConfig(**ALGORITHMS[name]), near_samples()
    config = tiny_config(load=model.checkpoint, adam_eps=ADAM_EPS, share_prompts="on")
    expected = expected_training(model.hf, [samples[:6], samples[6:]], config=config, algorithm=algorithm)
    ranks.start(1, config, model.shape, algorithm)
    report = ranks.first("train", make_shards(samples, steps=2, micro_batch_size=4, temperature=TEMPERATURE))
    same_step(report.steps, expected, ("loss", "pg_loss", "grad_norm"))
    assert abs(expected[1]["grad_norm"]) > 1e-3


@pytest.mark.parametrize("name", EVERY)
def test_two_ranks(ranks, tiny_model, tiny_config, near_samples, make_shards, name):
    model, algorithm, samples = tiny_model("qwen3"), AlgorithmConfig(**ALGORITHMS[name]), near_samples(groups=3)
    config = tiny_config(load=model.checkpoint, adam_eps=ADAM_EPS)
    expected = expected_training(model.hf, [samples], config=config, algorithm=algorithm)
    ranks.start(2, config, model.shape, algorithm)
    reports = ranks.call("train", make_shards(samples, data_parallel=2, micro_batch_size=2, temperature=TEMPERATURE))
    same_step(reports[0].steps, expected, ("loss", "pg_loss", "grad_norm"))
    assert reports[1].steps == reports[0].steps


def test_the_divergence_in_the_reward_is_reported(ranks, tiny_model, tiny_config, near_samples, make_shards):
    """Of the log-probs from before the update, here the engine's: a mean over trajectories, by `--kl-loss-type`."""
    model, samples = tiny_model("qwen3"), near_samples(groups=2)
    algorithm = AlgorithmConfig(use_rollout_logprobs=True, kl_coef=0.1, kl_loss_type="k2")
    total = trajectories = 0.0
    for sample in samples:
        with torch.no_grad():
            ref = plain_log_probs(model.hf, sample, TEMPERATURE).double().numpy()
        found = (np.asarray(sample.rollout_log_probs) - ref)[np.asarray(sample.loss_mask, bool)] ** 2 / 2
        total += found.sum() / sample.trajectory_tokens
        trajectories += len(found) / sample.trajectory_tokens
    expected = total / trajectories
    assert expected > 1e-4
    ranks.start(2, tiny_config(load=model.checkpoint, share_prompts="off"), model.shape, algorithm)
    reports = ranks.call("train", make_shards(samples, data_parallel=2, micro_batch_size=2, temperature=TEMPERATURE))
    assert [report.steps[0]["kl"] for report in reports] == pytest.approx([expected] * 2, rel=1e-4)


def test_metrics_of_the_ratio_and_the_drift(ranks, tiny_model, tiny_config, near_samples, make_shards):
    """Means over the tokens that were computed, under the loss's weights."""
    model, samples = tiny_model("qwen3"), near_samples()
    samples = [dataclasses.replace(s, reward=0.0) if s.group_index == 1 else s for s in samples]
    algorithm = AlgorithmConfig(use_tis=True, get_mismatch_metrics=True)
    ranks.start(1, tiny_config(load=model.checkpoint), model.shape, algorithm)
    first, second = ranks.first("train", make_shards(samples, steps=2, temperature=TEMPERATURE)).steps
    computed = [sample for sample in samples[:6] if sample.reward]
    total = weighted = 0.0
    for sample in computed:
        with torch.no_grad():
            difference = (plain_log_probs(model.hf, sample, TEMPERATURE) - torch.tensor(sample.rollout_log_probs)).abs()
        mask = torch.tensor(sample.loss_mask)
        weight = mask.sum() / sample.trajectory_tokens
        total, weighted = total + weight, weighted + (difference * mask).sum() / sample.trajectory_tokens
    assert first["train_rollout_logprob_abs_diff"] == pytest.approx(float(weighted / total), rel=1e-4)
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert abs(second["ratio_mean"] - 1) > 1e-4
    assert 0 < second["ratio_ess"] < 1
    assert {"tis", "tis_clipfrac", "mismatch_kl", "mismatch_seq_ratio_ess", "pg_clipfrac_low"} <= second.keys()


def test_the_drift_is_that_of_the_samples_whose_log_probs_the_engine_gave(
    ranks, tiny_model, tiny_config, near_samples, make_shards
):
    model = tiny_model("qwen3")
    whole = near_samples()
    samples = [dataclasses.replace(s, rollout_log_probs=None) if place % 2 else s for place, s in enumerate(whole)]
    ranks.start(1, tiny_config(load=model.checkpoint), model.shape, AlgorithmConfig())
    (step,) = ranks.first("train", make_shards(samples, micro_batch_size=1, temperature=TEMPERATURE)).steps
    total = weighted = 0.0
    for sample in whole[::2]:
        with torch.no_grad():
            difference = (plain_log_probs(model.hf, sample, TEMPERATURE) - torch.tensor(sample.rollout_log_probs)).abs()
        mask = torch.tensor(sample.loss_mask)
        total += mask.sum() / sample.trajectory_tokens
        weighted += (difference * mask).sum() / sample.trajectory_tokens
    assert step["train_rollout_logprob_abs_diff"] == pytest.approx(float(weighted / total), rel=1e-4)


def test_samples_of_no_advantage_count_in_the_mean_of_the_importance_weights(
    ranks, tiny_model, tiny_config, near_samples, make_shards
):
    model, algorithm = tiny_model("qwen3"), AlgorithmConfig(use_mis=True, mis_batch_normalize=True)
    samples = [dataclasses.replace(s, reward=s.reward * (s.group_index == 0)) for s in near_samples(groups=2)]
    config = tiny_config(load=model.checkpoint, adam_eps=ADAM_EPS)
    expected = expected_training(model.hf, [samples], config=config, algorithm=algorithm)
    ranks.start(1, config, model.shape, algorithm)
    report = ranks.first("train", make_shards(samples, micro_batch_size=2, temperature=TEMPERATURE))
    same_step(report.steps, expected, ("loss", "grad_norm"))
