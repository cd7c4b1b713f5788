"""Critic, reference and teacher: what they compute, that they change nothing else, and that PPO learns with them."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_core.types import TrainSample
from support.plain import ADAM_EPS, plain_adamw, plain_log_probs, same_step

PPO = AlgorithmConfig(advantage_estimator="ppo", gamma=0.9, lambd=0.8, eps_clip=0.05, value_clip=0.05)
KL = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": "on", "overlap_param_gather": "on"}
LAYOUTS = {
    "one": (1, {}, None),
    "tp2+sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 3),
    "pp2": (2, {"pipeline_model_parallel_size": 2}, 2),
    "cp2": (2, {"context_parallel_size": 2}, 3),
    "dp2+do": (2, {"use_distributed_optimizer": True}, 2),
    "dp2+do+overlap": (2, OVERLAP, 2),
}
PPO_SHOWN = ("one", "tp2+sp", "dp2+do+overlap")
TURNS = {
    "one rank": (1, {}),
    "dp2 + distributed optimizer + overlap, bf16": (2, OVERLAP | {"bf16": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "adam from 0, tp2+sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}
FROZEN_SHOWN = (("dp2+do+overlap", True),)


def marked(sample):
    return torch.tensor(sample.loss_mask, dtype=torch.bool)


def plain_values(critic, sample):
    hidden = critic.model(torch.tensor([sample.tokens])).last_hidden_state[0]
    return critic.score(hidden[sample.prompt_length - 1 : len(sample.tokens) - 1])[marked(sample), 0]


def gae(reward, values, algorithm):
    """Schulman et al. 2016, equation 16, from the end; the reward comes last."""
    advantages, following, value = [], 0.0, 0.0
    for number in reversed(range(len(values))):
        delta = (reward if number == len(values) - 1 else 0.0) + algorithm.gamma * value - values[number]
        following = delta + algorithm.gamma * algorithm.lambd * following
        value = values[number]
        advantages.insert(0, following)
    return torch.tensor(advantages, dtype=torch.float64)


def plain_ppo(hf, rollouts, config, critic_lr):
    """PPO with a critic in float64; both models' steps, and the policy's last weights."""
    actor, critic = copy.deepcopy(hf).double(), copy.deepcopy(hf).double()
    critic.score = torch.nn.Linear(64, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(critic.score.weight)
    optimizers = plain_adamw(actor, config), plain_adamw(critic, dataclasses.replace(config, lr=critic_lr))
    metrics = []
    for steps in rollouts:
        with torch.no_grad():
            samples = [sample for step in steps for sample in step]
            old = {sample.index: plain_log_probs(actor, sample, 1.0)[marked(sample)] for sample in samples}
            values = {sample.index: plain_values(critic, sample) for sample in samples}
        gains = {sample.index: gae(sample.reward, values[sample.index].tolist(), PPO) for sample in samples}
        for step in steps:
            losses = [0.0, 0.0]
            for sample in step:
                key, weight = sample.index, 1 / int(marked(sample).sum()) / len(step)
                ratio = (plain_log_probs(actor, sample, 1.0)[marked(sample)] - old[key]).exp()
                clipped = ratio.clamp(1 - PPO.eps_clip, 1 + PPO.eps_clip)
                losses[0] += weight * torch.maximum(-ratio * gains[key], -clipped * gains[key]).sum()
                found, wanted = plain_values(critic, sample), gains[key] + values[key]
                near = values[key] + (found - values[key]).clamp(-PPO.value_clip, PPO.value_clip)
                losses[1] += weight * torch.maximum((found - wanted) ** 2, (near - wanted) ** 2).sum()
            norms = []
            for model, loss, optimizer in zip((actor, critic), losses, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)))
                optimizer.step()
            metrics.append(
                {
                    "loss": losses[0].item(),
                    "grad_norm": norms[0],
                    "critic-value_loss": losses[1].item(),
                    "critic-grad_norm": norms[1],
                }
            )
    return metrics, {key: value.numpy() for key, value in actor.state_dict().items()}


@pytest.fixture(scope="session")
def expected_ppo(tiny_model, tiny_config, make_samples):
    known = []

    def compute():
        if not known:
            samples = make_samples(groups=4, per_group=3, masks=True)
            rollouts = [[samples[:6], samples[6:]]] * 2
            config = tiny_config(adam_eps=ADAM_EPS)
            known.append((samples, plain_ppo(tiny_model("llama-tied").hf, rollouts, config, 5e-3)))
        return known[0]

    return compute


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[] if layout in PPO_SHOWN else pytest.mark.full) for layout in LAYOUTS]
)
def test_ppo_equals_plain_pytorch(ranks, expected_ppo, tiny_model, tiny_config, make_shards, layout):
    """The second rollout has a critic that has learned."""
    world, settings, micro_batch_size = LAYOUTS[layout]
    samples, (steps, weights) = expected_ppo()
    model = tiny_model("llama-tied")
    config = tiny_config(load=model.checkpoint, adam_eps=ADAM_EPS, critic_lr=5e-3, **settings)
    ranks.start(world, config, model.shape, PPO)
    shards = make_shards(
        samples, data_parallel=config.data_parallel_size(world), steps=2, micro_batch_size=micro_batch_size
    )
    found = [step for _ in range(2) for step in ranks.call("train", shards)[0].steps]
    same_step(found, steps, ("loss", "grad_norm", "critic-value_loss", "critic-grad_norm"))
    assert steps[2]["critic-value_loss"] != pytest.approx(steps[0]["critic-value_loss"], rel=0.05)
    assert {step["critic-lr"] for step in found} == {5e-3}
    for key, value in ranks.first("weights").items():
        np.testing.assert_allclose(value, weights[key], atol=1e-5, rtol=0, err_msg=key)


def test_the_critic_learns_alone_at_first(ranks, tiny_model, tiny_config, make_samples, make_shards):
    model, samples = tiny_model("qwen3"), make_samples()
    ranks.start(1, tiny_config(load=model.checkpoint, num_critic_only_steps=1), model.shape, PPO)
    before = ranks.first("weights")
    first = ranks.first("train", make_shards(samples, rollout_id=0)).steps[0]
    assert {name for name in first if not name.startswith("critic-")} == {"global_batch_size"}
    for key, value in ranks.first("weights").items():
        np.testing.assert_array_equal(value, before[key], err_msg=key)
    values = ranks.first("forward", make_shards(samples), "critic")
    assert max(np.abs(row).max() for row in values) > 1e-3
    second = ranks.first("train", make_shards(samples, rollout_id=1)).steps[0]
    assert {"loss", "critic-value_loss", "grad_norm"} <= second.keys()


@pytest.mark.parametrize("critic_save", [None, "elsewhere"])
def test_actor_and_critic_continue_together(
    ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path, critic_save
):
    model, shards = tiny_model("qwen3"), make_shards(make_samples(), steps=2)
    places = {"save": str(tmp_path / "run"), "critic_save": critic_save and str(tmp_path / critic_save)}
    ranks.start(1, tiny_config(load=model.checkpoint, **places), model.shape, PPO)
    ranks.call("train", shards)
    ranks.call("save", 3)
    expected = ranks.first("train", shards).steps
    root = tmp_path / critic_save if critic_save else tmp_path / "run" / "critic"
    assert (root / "iter_0000003").is_dir()
    ranks.start(1, tiny_config(load=model.checkpoint, **places), model.shape, PPO, resume_from=places["save"])
    assert ranks.iteration == 3
    assert ranks.first("train", shards).steps == expected
    own = tiny_config(load=model.checkpoint, critic_load=str(root))
    ranks.start(1, own, model.shape, PPO)
    values = ranks.first("forward", shards, "critic")
    assert max(np.abs(row).max() for row in values) > 1e-3  # with the head


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[] if layout == "one rank" else pytest.mark.full) for layout in TURNS]
)
def test_roles_that_take_turns_change_nothing(
    ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path, layout
):
    """PPO where actor and critic take turns ends with the bits of a run that holds both; one of them is there."""
    world, settings = TURNS[layout]
    model, ppo = tiny_model("qwen3"), dataclasses.replace(PPO, use_kl_loss=True, kl_loss_coef=0.1)
    samples = make_samples()
    found = {}
    for turns in (False, True):
        save = str(tmp_path / str(turns))
        config = tiny_config(
            load=model.checkpoint, save=save, reset_optimizer_states="adam" in layout, ref_update_interval=2, **settings
        )
        how = {"take_turns": turns, "output_dir": str(tmp_path)}
        shards = make_shards(samples, data_parallel=2 if layout.startswith("dp2") else 1, steps=2)
        ranks.start(world, config, model.shape, ppo, **how)
        steps = ranks.first("train", shards).steps
        for held in ranks.call("role_bytes"):
            assert (held[0] == 0) == turns and held[1] > 0
        ranks.call("save", 1)
        for (report, _), held in zip(ranks.call("sleep", True), ranks.call("role_bytes"), strict=True):
            assert report.device == sum(held) and (held[0] == 0) == turns
        sent = ranks.first("weights")
        assert all(report.device == 0 for report, _ in ranks.call("sleep"))
        ranks.call("wake")
        values = ranks.first("forward", shards, "critic")
        reference = ranks.first("forward", shards, "reference")
        steps += ranks.first("train", shards).steps
        ranks.start(world, config, model.shape, ppo, resume_from=save, weights_first=not turns, **how)
        assert ranks.first("train", shards).steps == steps[2:]
        found[turns] = steps, sent, values, reference, ranks.first("weights")
    (steps, sent, *rows, weights), (other_steps, other_sent, *other_rows, other_weights) = found.values()
    assert steps == other_steps
    for own, other in ((sent, other_sent), (weights, other_weights)):
        assert own.keys() == other.keys() and all(np.array_equal(own[name], other[name]) for name in own)
    for own, other in zip(rows, other_rows, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(own, other, strict=True))


def test_a_critic_that_waits_takes_no_memory(ranks, tiny_config, make_samples, make_shards, tmp_path):
    sizes = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 1}
    shape = ModelShape(
        family="llama", **sizes, num_query_groups=1, kv_channels=32, vocab_size=151_936, max_position_embeddings=64
    )
    ranks.start(1, tiny_config(), shape, PPO)
    ranks.call("train", make_shards(make_samples(vocab=shape.vocab_size)))
    critic, actor = ranks.first("role_bytes")
    ranks.start(1, tiny_config(), shape, PPO, take_turns=True, output_dir=str(tmp_path))
    ranks.call("train", make_shards(make_samples(vocab=shape.vocab_size)))
    assert ranks.first("role_bytes") == [0, actor]
    freed = ranks.first("freed_by_waiting")
    print(f"{freed / critic:.1%} of the critic's {critic / 1e6:.1f} MB given back")
    assert freed > 0.95 * critic


def test_ppo_learns(ranks, tiny_model, tiny_config, make_shards):
    """Two tokens, each of which earns a half if it is even, sampled from the policy; a random one earns a half."""
    model, generator = tiny_model("qwen3"), np.random.default_rng(0)
    config = tiny_config(load=model.checkpoint, lr=1e-3, critic_lr=3e-3, weight_decay=0.0)
    ranks.start(1, config, model.shape, AlgorithmConfig(advantage_estimator="ppo", normalize_advantages=True))
    means = []
    for rollout in range(24):
        rows = [[int(token) for token in (7, 8, 9 + number % 4)] for number in range(64)]
        for _ in range(2):
            asked = [sample_of(number, [*row, 0], 1, 0.0) for number, row in enumerate(rows)]
            logits = ranks.first("logits", asked).astype(np.float64)
            chances = np.exp(logits - logits.max(-1, keepdims=True))
            chances /= chances.sum(-1, keepdims=True)
            rows = [[*row, int(generator.choice(500, p=chance))] for row, chance in zip(rows, chances, strict=True)]
        rewards = [sum(token % 2 == 0 for token in row[-2:]) / 2 for row in rows]
        means.append(np.mean(rewards))
        samples = [sample_of(at, row, 2, reward) for at, (row, reward) in enumerate(zip(rows, rewards, strict=True))]
        ranks.first("train", make_shards(samples, steps=2, rollout_id=rollout))
    assert np.mean(means[:2]) < 0.65 and np.mean(means[-3:]) > 0.9, means


def sample_of(index, tokens, length, reward):
    return TrainSample(
        index=index, group_index=index, tokens=tokens, response_length=length, loss_mask=[1] * length,
        trajectory_tokens=length, reward=reward, raw_reward=reward,
    )  # fmt: skip


def test_supervised_fine_tuning_reaches_a_loss(ranks, tiny_model, tiny_config, make_samples, make_shards):
    """Eight demonstrations learned by heart: below 0.1 nats per token, from more than 6."""
    model = tiny_model("qwen3")
    config = tiny_config(load=model.checkpoint, lr=3e-3, weight_decay=0.0)
    ranks.start(1, config, model.shape, AlgorithmConfig(loss_type="sft_loss", calculate_per_token_loss=True))
    shards = make_shards(make_samples(groups=8, per_group=1))
    losses = [ranks.first("train", shards).steps[0]["loss"] for _ in range(40)]
    assert losses[0] > 6 and losses[-1] < 0.1, losses


@pytest.fixture(scope="module")
def other_weights(tiny_model, tiny_config, make_samples, make_shards, rank_pool, rank_group, tmp_path_factory):
    """A checkpoint that another run has trained."""
    group, model = rank_group(rank_pool), tiny_model("qwen3")
    directory = str(tmp_path_factory.mktemp("other"))
    group.start(1, tiny_config(load=model.checkpoint, save=directory), model.shape)
    group.call("train", make_shards(make_samples(seed=9)))
    group.call("save", 1)
    group.close()
    return directory


@pytest.mark.parametrize(
    ("layout", "bf16"),
    [
        pytest.param(layout, bf16, marks=[] if (layout, bf16) in FROZEN_SHOWN else [pytest.mark.full])
        for layout in ("one", "dp2+do", "dp2+do+overlap", "pp2")
        for bf16 in (False, True)
    ],
)
def test_frozen_roles_are_resident_models_bit_by_bit(
    ranks, other_weights, tiny_model, tiny_config, make_samples, make_shards, layout, bf16
):
    """Reference and teacher are what a worker computes that has these weights alone, before and after training.

    Having them in the actor's place leaves the actor as it was: a run that is asked for them between and after steps
    ends with the same weights as one that is not.
    """
    (world, settings, _), model = LAYOUTS[layout], tiny_model("qwen3")
    config = tiny_config(load=model.checkpoint, bf16=bf16, **settings)
    data_parallel = config.data_parallel_size(world)
    shards = make_shards(make_samples(masks=True), data_parallel=data_parallel, steps=2, micro_batch_size=4)
    ranks.start(world, dataclasses.replace(config, load=other_weights), model.shape)
    resident = ranks.call("forward", shards)
    algorithm = dataclasses.replace(KL, use_opd=True)
    both = dataclasses.replace(config, ref_load=other_weights, opd_teacher_load=other_weights)
    ends = []
    for asked in (True, False):
        ranks.start(world, both, model.shape, algorithm)
        steps = []
        for _ in range(2):
            steps += ranks.first("train", shards).steps
            for role in ("reference", "teacher") if asked else ():
                for rows, expected in zip(ranks.call("forward", shards, role), resident, strict=True):
                    for row, other in zip(rows, expected, strict=True):
                        np.testing.assert_array_equal(row, other)
        ends.append((steps, ranks.first("weights")))
    assert ends[0][0] == ends[1][0]
    for key, value in ends[0][1].items():
        np.testing.assert_array_equal(ends[1][1][key], value, err_msg=key)


def test_a_teacher_in_the_trainer_is_one_whose_log_probs_come_with_the_samples(
    ranks, other_weights, tiny_model, tiny_config, make_samples, make_shards
):
    model, samples = tiny_model("qwen3"), make_samples(masks=True)
    algorithm = AlgorithmConfig(use_opd=True, opd_kl_coef=0.5)
    config = tiny_config(load=model.checkpoint)
    ranks.start(1, dataclasses.replace(config, load=other_weights), model.shape)
    rows = ranks.first("forward", make_shards(samples))
    given = [dataclasses.replace(s, teacher_log_probs=row) for s, row in zip(samples, rows, strict=True)]
    assert "opd_reverse_kl" not in ranks.first("train", make_shards(given)).steps[0]  # nobody asked for it
    found = []
    for own, shards in ((None, make_shards(given, steps=2)), (other_weights, make_shards(samples, steps=2))):
        ranks.start(1, dataclasses.replace(config, opd_teacher_load=own), model.shape, algorithm)
        found.append(ranks.first("train", shards))
    same_step(found[1].steps, found[0].steps, ("loss", "grad_norm", "opd_reverse_kl"))
    assert found[0].steps[0]["opd_reverse_kl"] > 1e-3
    assert "teacher_log_probs" in found[1].seconds and "teacher_log_probs" not in found[0].seconds


def test_a_teacher_may_be_an_earlier_checkpoint(ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path):
    """By its number: the newest is another one."""
    model, shards = tiny_model("qwen3"), make_shards(make_samples())
    config = tiny_config(load=model.checkpoint, save=str(tmp_path))
    ranks.start(1, config, model.shape)
    for iteration in (1, 2):
        ranks.call("train", shards)
        ranks.call("save", iteration)
        if iteration == 1:
            expected = ranks.first("forward", shards)
    of_first = dataclasses.replace(config, opd_teacher_load=str(tmp_path), opd_teacher_ckpt_step=1)
    ranks.start(1, of_first, model.shape, AlgorithmConfig(use_opd=True))
    for row, other in zip(ranks.first("forward", shards, "teacher"), expected, strict=True):
        np.testing.assert_array_equal(row, other)


def test_the_policy_becomes_the_reference(ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path):
    """After every second rollout; a run that continues has the reference that it had."""
    model, samples = tiny_model("qwen3"), make_samples()
    config = tiny_config(load=model.checkpoint, ref_update_interval=2, save=str(tmp_path))
    ranks.start(1, config, model.shape, KL)

    def rollout(number):
        return ranks.first("train", make_shards(samples, rollout_id=number)).steps[0]["kl_loss"]

    first, second, third = (rollout(number) for number in range(3))
    assert first < 1e-6 < second and third < 1e-6
    ranks.call("save", 3)
    reference = ranks.first("forward", make_shards(samples), "reference")
    fourth = rollout(3)
    assert fourth > 1e-6
    ranks.start(1, config, model.shape, KL, resume_from=str(tmp_path))
    for row, other in zip(ranks.first("forward", make_shards(samples), "reference"), reference, strict=True):
        np.testing.assert_array_equal(row, other)
    assert rollout(3) == fourth
