"""A train step: its optimizer, what it computes and what it leaves out, what it reports, and its memory."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from plain import ADAM_EPS, close, plain_adamw, plain_log_probs, same_step
from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig

GRPO_WITH_KL = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")


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


FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    ("values", "recomputed"),
    [
        ({}, 0),
        ({"recompute_activations": True}, 2),
        ({"recompute_granularity": "selective"}, 2),
        ({**FULL, "recompute_method": "uniform"}, 2),
        ({**FULL, "recompute_method": "block"}, 1),
    ],
)
def test_recomputation_takes_place(ranks, tiny_model, tiny_config, make_samples, make_shards, values, recomputed):
    """Two layers, one micro-batch: one attention each, and another for each that is recomputed."""
    model = tiny_model("qwen3")
    ranks.start(1, tiny_config(load=model.checkpoint, **values), model.shape)
    assert ranks.first("attention_calls", make_shards(make_samples(groups=1))) == 2 + recomputed


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


@pytest.mark.parametrize("share_prompts", ["off", "on"])
def test_batches_are_packed_when_they_are_due(ranks, tiny_model, tiny_config, make_samples, make_shards, share_prompts):
    """Three passes over eight micro-batches: reference, old log-probs, training. One is computed, the next packed."""
    model = tiny_model("qwen3")
    ranks.start(1, tiny_config(load=model.checkpoint, share_prompts=share_prompts), model.shape, GRPO_WITH_KL)
    shards = make_shards(make_samples(), steps=2, micro_batch_size=2)
    _, packed, alive, passes = ranks.first("train_and_watch_packing", shards)
    assert (packed, passes) == (3 * 8, 3 * 8)
    assert alive <= 2


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


def test_the_threads_of_a_rank_are_those_given(ranks, tiny_model, tiny_config):
    model, found = tiny_model("qwen3"), []
    for threads in (2, 1):
        ranks.start(1, tiny_config(trainer_threads=threads), model.shape)
        found.append(ranks.first("threads"))
    assert found == [2, 1]


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


def test_supervised_fine_tuning(ranks, tiny_model, tiny_config, make_samples, make_shards):
    """Cross-entropy over the trained tokens, whatever the rewards; one step equals plain PyTorch's."""
    model = tiny_model("qwen3")
    config = tiny_config(load=model.checkpoint, adam_eps=ADAM_EPS)
    samples = [dataclasses.replace(sample, reward=0.0) for sample in make_samples(groups=2, masks=True)]
    tokens = sum(sum(sample.loss_mask) for sample in samples)
    plain = copy.deepcopy(model.hf).double()
    optimizer = plain_adamw(plain, config)
    rows = [plain_log_probs(plain, sample, 1.0) @ torch.tensor(sample.loss_mask).double() for sample in samples]
    loss = -sum(rows) / tokens
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), config.clip_grad)
    optimizer.step()

    ranks.start(2, config, model.shape, AlgorithmConfig(loss_type="sft_loss", calculate_per_token_loss=True))
    reports = ranks.call("train", make_shards(samples, data_parallel=2, micro_batch_size=3))
    same_step(reports[0].steps, [{"loss": loss.item(), "grad_norm": float(norm)}], ("loss", "grad_norm"), 2e-6)
    assert set(reports[0].steps[0]) == {"loss", "grad_norm", "lr", "global_batch_size"}
    assert reports[0].seconds.keys() == {"forward_backward", "optimizer", "weight_sums"}
    weights = ranks.first("weights")
    for key, value in plain.state_dict().items():
        if key in weights:
            np.testing.assert_allclose(weights[key], value.numpy(), atol=1e-5, rtol=0, err_msg=key)


def test_a_user_defined_loss(ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path):
    """REINFORCE in one line, with a metric of its own; its gradient is the policy loss's at the first step."""
    (tmp_path / "mine.py").write_text(
        "def reinforce(inputs):\n"
        "    metric = (inputs.log_probs_N.detach() * inputs.weights_N).sum()\n"
        "    loss = -(inputs.log_probs_N * inputs.advantages_N * inputs.weights_N).sum()\n"
        "    return loss, {'log_prob': metric, 'plain': metric.item(), 'of_numpy': metric.double().numpy()[()]}\n"
    )
    model, samples = tiny_model("qwen3"), make_samples(groups=2)
    steps = {}
    own = AlgorithmConfig(loss_type="custom_loss", custom_loss_function_path=f"{tmp_path}/mine.py:reinforce")
    for algorithm in (AlgorithmConfig(), own):
        ranks.start(1, tiny_config(load=model.checkpoint), model.shape, algorithm)
        steps[algorithm.loss_type] = ranks.first("train", make_shards(samples, micro_batch_size=3)).steps[0]
    policy, mine = steps.values()
    assert close(mine["grad_norm"], policy["grad_norm"])
    rows = ranks.first("forward", make_shards(samples))
    assert -20 < mine["log_prob"] < 0 and len(rows) == len(samples)
    assert close(mine["plain"], mine["log_prob"]) and close(mine["of_numpy"], mine["log_prob"])


def test_a_loss_that_is_not_there(ranks, tiny_model, tiny_config, rank_error):
    model, algorithm = tiny_model("qwen3"), AlgorithmConfig(loss_type="custom_loss", custom_loss_function_path="mine")
    with pytest.raises(rank_error, match="--custom-loss-function-path mine names no function") as caught:
        ranks.start(1, tiny_config(load=model.checkpoint), model.shape, algorithm)
    assert caught.value.kind == "ConfigError"


def test_the_first_rollout_waits_for_no_optimizer(ranks, tiny_model, tiny_config, make_samples, make_shards):
    model = tiny_model("llama-tied")
    ranks.start(1, tiny_config(load=model.checkpoint), model.shape)
    for call in ("sleep", "wake"):
        ranks.call(call)
    assert not ranks.first("has_optimizer")
    ranks.call("train", make_shards(make_samples()))
    assert ranks.first("has_optimizer")


LAYOUTS = {
    "replicated optimizer": {"bf16": True},
    "distributed optimizer": {"use_distributed_optimizer": True, "bf16": True},
    "fp32, whose optimizer shares the weights": {"use_distributed_optimizer": True},
    "two stages": {"pipeline_model_parallel_size": 2, "bf16": True},
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=name, marks=pytest.mark.full if name in ("replicated optimizer", "two stages") else [])
        for name, layout in LAYOUTS.items()
    ],
)
def test_sleep_and_wake_change_nothing(ranks, tiny_model, tiny_config, make_samples, make_shards, layout):
    """A run that hands its memory over after each rollout, in the order of `--colocate`, ends with the same bits."""
    model = tiny_model("llama-tied")
    config = tiny_config(load=model.checkpoint, **layout)
    shards = make_shards(make_samples(), data_parallel=2 // config.pipeline_model_parallel_size, steps=2)
    expected = []
    for interrupted in (False, True):
        ranks.start(2, config, model.shape, GRPO_WITH_KL)
        steps, sent = [], []
        for _ in range(2):
            steps += ranks.first("train", shards).steps
            if interrupted:
                before, awake = ranks.call("held"), ranks.call("forward", shards)
                half = ranks.call("sleep", True)
                for rows, same in zip(ranks.call("forward", shards), awake, strict=True):
                    for row, one in zip(rows, same, strict=True):
                        np.testing.assert_array_equal(row, one)
                sent.append(ranks.first("weights"))
                asleep = ranks.call("sleep")
                for (_, held, _), (first, _), (report, _) in zip(before, half, asleep, strict=True):
                    assert first.device > 0 and first.device + first.waiting == held
                    assert (report.device, report.waiting) == (0, held)
                ranks.call("wake")
                assert ranks.call("held") == before
        expected.append((steps, ranks.first("weights")))
    assert expected[0][0] == expected[1][0]
    for key, value in expected[0][1].items():
        np.testing.assert_array_equal(expected[1][1][key], value, err_msg=key)
        np.testing.assert_array_equal(sent[1][key], value, err_msg=f"{key}, sent with the weights alone")


def test_what_a_sleeping_trainer_cannot_do(ranks, tiny_model, tiny_config, make_samples, make_shards):
    model = tiny_model("llama-tied")
    ranks.start(1, tiny_config(load=model.checkpoint), model.shape)
    shards = make_shards(make_samples())
    ranks.call("sleep", True)
    ranks.call("weights")
    ranks.call("forward", shards)
    for call in ("train", "evaluate"):
        error = ranks.first("error_of", call, shards)
        assert error.startswith(f"MemoryStateError: {call} needs all of its device memory (awake), and the trainer ")
        assert error.endswith("holds its weights alone in device memory (half asleep); call wake() first")
    ranks.call("sleep")
    for call in (["weights"], ["forward", shards]):
        error = ranks.first("error_of", *call)
        assert error.endswith("holds nothing in device memory (asleep); call wake(weights_only=True) first")
    assert "sleep would leave the trainer with nothing" in ranks.first("error_of", "sleep")
    ranks.call("wake", True)
    ranks.call("weights")
    ranks.call("wake")
    assert "wake would leave the trainer with all" in ranks.first("error_of", "wake")
    ranks.call("train", shards)


def test_a_resumed_trainer_gives_everything_back(ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path):
    """With a critic and a frozen reference; what a checkpoint's reader made is emptied like anything else."""
    model, ppo = tiny_model("llama-tied"), dataclasses.replace(GRPO_WITH_KL, advantage_estimator="ppo")
    config = tiny_config(load=model.checkpoint, critic_load=model.checkpoint, save=str(tmp_path), bf16=True)
    shards = make_shards(make_samples())
    ranks.start(1, config, model.shape, ppo)
    ranks.call("train", shards)
    ranks.call("save", 1)
    ranks.start(1, config, model.shape, ppo, resume_from=tmp_path)
    before = ranks.first("held")
    report, _ = ranks.first("sleep")
    assert (report.device, report.waiting) == (0, before[1])
    ranks.call("wake")
    assert ranks.first("held") == before
    ranks.call("train", shards)


def test_a_disk_without_room_for_what_a_trainer_gives_back(ranks, tiny_model, tiny_config):
    model = tiny_model("llama-tied")
    ranks.start(1, tiny_config(load=model.checkpoint), model.shape)
    error = ranks.first("error_of_sleep_on_a_full_disk")
    assert error.startswith("TrainingError: no room in ")
    assert error.endswith("(No space left on device); make room there, or give --no-offload-train")
    assert "did not get through its last sleep or wake; start it again" in ranks.first("error_of", "weights")


def test_memory_that_a_trainer_gives_back_is_free(ranks, tiny_config, make_samples, make_shards):
    """Of 4.9 million weights in fp32: 12 bytes each of weights and optimizer state, and 4 of gradients."""
    sizes = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 1}
    shape = ModelShape(
        family="llama", **sizes, num_query_groups=1, kv_channels=32, vocab_size=151_936, max_position_embeddings=64
    )
    ranks.start(1, tiny_config(), shape)
    ranks.call("train", make_shards(make_samples(vocab=shape.vocab_size)))
    _, held, gradients = ranks.first("held")
    report, freed = ranks.first("sleep")
    assert (report.device, report.waiting) == (0, held)
    print(f"{freed / (held + gradients):.1%} of {(held + gradients) / 1e6:.1f} MB given back")
    assert freed > 0.95 * (held + gradients)
    ranks.call("wake")


def test_load_goes_back_to_a_checkpoint(ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path):
    model = tiny_model("qwen3")
    ranks.start(1, tiny_config(load=model.checkpoint, save=str(tmp_path)), model.shape)
    shards = make_shards(make_samples(), steps=2)
    ranks.call("train", shards)
    ranks.call("save", 1)
    expected = ranks.first("train", shards).steps
    assert ranks.first("load", str(tmp_path)) == 1
    assert ranks.first("train", shards).steps == expected
