"""A train step: its optimizer, what it computes and what it leaves out, what it reports, and its memory."""

import dataclasses

import numpy as np
import pytest

from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig

GRPO_WITH_KL = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")


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
