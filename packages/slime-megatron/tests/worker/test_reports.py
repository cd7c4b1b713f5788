"""The report of a rollout."""

import numpy as np

from slime_core.config import AlgorithmConfig


def test_learning_rate_and_report(ranks, tiny_model, tiny_config, make_samples, make_shards):
    model = tiny_model("qwen3")
    config = tiny_config(
        load=model.checkpoint, lr=0.1, lr_decay_style="linear", lr_warmup_iters=1, lr_decay_iters=5, bf16=True
    )
    ranks.start(1, config, model.shape, AlgorithmConfig(entropy_coef=0.01))
    report = ranks.first("train", make_shards(make_samples(), steps=4))
    # The course is 0, 0.1, 0.075, 0.05, 0.025, 0: of five decay steps the last is one fourth above the end.
    assert [round(step["lr"], 6) for step in report.steps] == [0.0, 0.1, 0.075, 0.05]
    assert report.seconds.keys() == {"log_probs", "forward_backward", "optimizer", "weight_sums"}
    rates = {f"{phase}_{unit}" for phase in ("log_probs", "forward_backward") for unit in ("tok_per_s", "tflops")}
    assert report.performance.keys() == {*rates, "peak_memory_bytes"}
    assert 1e8 < report.performance["peak_memory_bytes"] < 1e10
    assert all(0 < step["entropy_loss"] < np.log(500) for step in report.steps)
    assert ranks.first("threads") == 1
