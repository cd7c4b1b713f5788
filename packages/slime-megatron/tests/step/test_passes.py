"""Log-probs without gradient, and the gradient of a step."""

import torch

from slime_core.config import AlgorithmConfig
from support.plain import close, plain_log_probs, same_step


def test_loss_per_token_weighs_tokens_alike(ranks, tiny_model, tiny_config, make_samples, make_shards):
    """With one micro-batch per sample, and in one: the mean over all trained tokens either way."""
    model = tiny_model("qwen3")
    samples = make_samples(masks=True)
    algorithm = AlgorithmConfig(calculate_per_token_loss=True)
    losses = []
    for micro_batch_size in (1, None):
        ranks.start(1, tiny_config(load=model.checkpoint), model.shape, algorithm)
        report = ranks.first("train", make_shards(samples, micro_batch_size=micro_batch_size))
        losses.append(report.steps[0])
    tokens = sum(sum(sample.loss_mask) for sample in samples)
    expected = -sum(sum(sample.loss_mask) * sample.reward for sample in samples) / tokens
    same_step(losses[:1], losses[1:], ("loss", "grad_norm"))
    assert close(losses[0]["loss"], expected)


def test_log_probs_and_their_distance_from_the_engine(ranks, tiny_model, tiny_config, make_samples, make_shards):
    model = tiny_model("llama3-rope")
    samples = make_samples(masks=True)
    ranks.start(1, tiny_config(load=model.checkpoint, share_prompts="on"), model.shape)
    shards = make_shards(samples, micro_batch_size=5, temperature=0.7)
    with torch.no_grad():
        expected = [plain_log_probs(model.hf, sample, 0.7) * torch.tensor(sample.loss_mask) for sample in samples]
    for got, wanted in zip(ranks.first("forward", shards), expected, strict=True):
        torch.testing.assert_close(torch.tensor(got), wanted, atol=2e-5, rtol=0)
    engine = [torch.tensor(sample.rollout_log_probs) * torch.tensor(sample.loss_mask) for sample in samples]
    differences = [(ours - theirs).abs() for ours, theirs in zip(expected, engine, strict=True)]
    means = [float(row.sum()) / sum(s.loss_mask) for row, s in zip(differences, samples, strict=True)]
    step = ranks.first("train", shards).steps[0]
    assert close(step["train_rollout_logprob_abs_diff"], sum(means) / len(means), 1e-4)
    assert close(step["train_rollout_logprob_abs_diff_max"], float(torch.cat(differences).max()), 1e-4)
