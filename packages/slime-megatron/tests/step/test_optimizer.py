"""AdamW on fp32 weights, and gradients that it refuses."""

import dataclasses

import numpy as np
import pytest
import torch

from slime_core.config import AlgorithmConfig


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_the_optimizer_is_adamw_on_fp32_weights(ranks, tiny_model, tiny_config, make_samples, make_shards, bf16):
    """Fed with the same gradients, torch's AdamW takes the same weights to the same place, step by step.

    In bf16 the model has the fp32 weights rounded, and steps too small for bf16 add up.
    """
    model = tiny_model("qwen3")
    lr, limit = 1e-5, 0.5
    config = tiny_config(load=model.checkpoint, bf16=bf16, lr=lr, clip_grad=limit, adam_beta2=0.98)
    ranks.start(1, config, model.shape)
    (start, start_rounded), seen = ranks.first("train_and_watch_the_optimizer", make_shards(make_samples(), steps=8))
    assert len(seen) == 8

    weights = {name: torch.nn.Parameter(torch.from_numpy(value)) for name, value in start.items()}
    decays = [[weight for weight in weights.values() if (weight.dim() > 1) is matrix] for matrix in (True, False)]
    optimizer = torch.optim.AdamW(
        [
            {"params": params, "weight_decay": decay}
            for params, decay in zip(decays, (config.weight_decay, 0.0), strict=True)
        ],
        lr=lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
    )
    for grads, masters, trained in seen:
        for name, weight in weights.items():
            weight.grad = torch.from_numpy(grads[name])
        assert torch.nn.utils.clip_grad_norm_(weights.values(), limit) > limit
        optimizer.step()
        for name, weight in weights.items():
            np.testing.assert_allclose(masters[name], weight.detach().numpy(), rtol=1e-6, atol=1e-8, err_msg=name)
            rounded = torch.from_numpy(masters[name]).bfloat16().float().numpy() if bf16 else masters[name]
            np.testing.assert_array_equal(trained[name], rounded, err_msg=name)
    moved = {name: (trained[name] != start_rounded[name]).mean() for name in trained}
    at_once = {name: (seen[0][2][name] != start_rounded[name]).mean() for name in trained}
    matrix = "decoder.layers.0.mlp.linear_fc1.weight"
    assert moved[matrix] > (1.5 * at_once[matrix] if bf16 else 0.99)


@pytest.mark.parametrize("broken", ["loss", "grad_norm"])
def test_what_is_not_finite_stops_the_run_before_the_weights_change(
    ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path, broken
):
    model, algorithm = tiny_model("qwen3"), AlgorithmConfig()
    samples = [dataclasses.replace(sample, reward=3e38) for sample in make_samples(groups=1)]
    if broken == "loss":  # its gradient is finite
        (tmp_path / "mine.py").write_text("def infinite(inputs): return inputs.log_probs_N.sum() + float('inf'), {}\n")
        own = f"{tmp_path}/mine.py:infinite"
        algorithm = AlgorithmConfig(loss_type="custom_loss", custom_loss_function_path=own)
        samples = make_samples(groups=1)
    ranks.start(1, tiny_config(load=model.checkpoint, lr=0.1), model.shape, algorithm)
    error, unchanged = ranks.first("train_and_fail", make_shards(samples))
    assert error.startswith(f"{broken} of an optimizer step must be finite; the step was not taken")
    assert unchanged
