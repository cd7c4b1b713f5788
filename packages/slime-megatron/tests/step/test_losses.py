"""Every loss on every kind of layout equals plain PyTorch on transformers in float64, over three steps."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from slime_core import algorithms
from slime_core.config import AlgorithmConfig
from slime_core.types import TrainSample
from slime_megatron.model.packing import MicroBatch
from slime_megatron.step import losses
from slime_megatron.step.plan import PlannedBatch
from support import layouts
from support.plain import ADAM_EPS, close, plain_adamw, plain_log_probs, same_step

STEPS = 3
LAYOUTS = {
    "one": (1, {}, None),
    "tp2+sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 4),
    "tp2": (2, {"tensor_model_parallel_size": 2}, 4),
    "pp2": (2, {"pipeline_model_parallel_size": 2}, 2),
    "cp2": (2, {"context_parallel_size": 2}, 4),
    "shared prompts": (1, {"share_prompts": "on"}, 4),
}


def marked(sample):
    return torch.tensor(sample.loss_mask, dtype=torch.bool)


def gspo(model, samples, known):
    """Zheng et al. 2025, equations 5 and 7."""
    total = 0.0
    for sample in samples:
        new = plain_log_probs(model, sample, 1.0)[marked(sample)]
        ratio = (new - known["old"][sample.index][marked(sample)]).mean().exp()
        total = total + torch.maximum(-ratio * sample.reward, -ratio.clamp(0.98, 1.02) * sample.reward)
    return total / len(samples)


def sft(model, samples, known):
    rows = [plain_log_probs(model, sample, 1.0)[marked(sample)] for sample in samples]
    return -torch.cat(rows).mean()


def dpo(model, samples, known):
    """Rafailov et al. 2023, equation 7, with a tenth of the labels the wrong way round."""
    total = 0.0
    for rejected, chosen in zip(samples[::2], samples[1::2], strict=True):
        gains = [
            (plain_log_probs(model, sample, 1.0) - known["old"][sample.index])[marked(sample)].sum()
            for sample in (chosen, rejected)
        ]
        margin = 0.3 * (gains[0] - gains[1])
        total = total - 0.9 * logsigmoid(margin) - 0.1 * logsigmoid(-margin)
    return total / (len(samples) / 2)


def plain_score(model, sample):
    last = sample.prompt_length + int(marked(sample).nonzero()[-1])
    hidden = model.model(torch.tensor([sample.tokens])).last_hidden_state[0, last]
    return hidden @ model.score.weight[0]


def reward_model(model, samples, known):
    """Ouyang et al. 2022, equation 1, with a margin."""
    scores = [plain_score(model, sample) for sample in samples]
    margins = [scores[at + 1] - scores[at] - samples[at + 1].extras["margin"] for at in range(0, len(samples), 2)]
    return -logsigmoid(torch.stack(margins)).mean()


LOSSES = {
    "gspo": (AlgorithmConfig(advantage_estimator="gspo", eps_clip=0.02), gspo),
    "sft": (AlgorithmConfig(loss_type="sft_loss", calculate_per_token_loss=True), sft),
    "dpo": (AlgorithmConfig(loss_type="dpo_loss", dpo_beta=0.3, dpo_label_smoothing=0.1), dpo),
    "rm": (AlgorithmConfig(loss_type="rm_loss"), reward_model),
}


@pytest.fixture(scope="session")
def make_pairs(make_samples):
    """Groups of a rejected and a chosen response, with gaps in their masks."""

    def build(groups=9, **how):
        return [
            dataclasses.replace(sample, extras={"margin": 0.1 * sample.group_index})
            for sample in make_samples(groups=groups, per_group=2, masks=True, **how)
        ]

    return build


@pytest.fixture(scope="session")
def plain_training(tiny_model, tiny_config, make_pairs):
    """A loss's steps and last weights, once for all layouts."""
    known = {}

    def compute(name):
        if name not in known:
            loss_of = LOSSES[name][1]
            model, samples = copy.deepcopy(tiny_model("llama-tied").hf).double(), make_pairs()
            config = tiny_config(adam_eps=ADAM_EPS)
            given = {}
            with torch.no_grad():
                given["old"] = {sample.index: plain_log_probs(model, sample, 1.0) for sample in samples}
            if name == "rm":
                model.score = torch.nn.Linear(64, 1, bias=False, dtype=torch.float64)
                torch.nn.init.zeros_(model.score.weight)
            optimizer, steps = plain_adamw(model, config), []
            size = len(samples) // STEPS
            for number in range(STEPS):
                optimizer.zero_grad()
                loss = loss_of(model, samples[number * size : (number + 1) * size], given)
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
                optimizer.step()
                steps.append({"loss": loss.item(), "grad_norm": float(norm)})
            known[name] = steps, {key: value.numpy() for key, value in model.state_dict().items()}
        return known[name]

    return compute


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=pytest.mark.full if layout in ("tp2", "shared prompts") else []) for layout in LAYOUTS],
)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_equals_plain_pytorch(
    ranks, plain_training, tiny_model, tiny_config, make_pairs, make_shards, name, layout
):
    world, settings, micro_batch_size = LAYOUTS[layout]
    algorithm, _ = LOSSES[name]
    model = tiny_model("llama-tied")
    config = tiny_config(load=model.checkpoint, adam_eps=ADAM_EPS, **settings)
    expected, weights = plain_training(name)
    ranks.start(world, config, model.shape, algorithm)
    first = make_shards(make_pairs()[: len(make_pairs()) // STEPS], micro_batch_size=micro_batch_size)
    assert close(ranks.first("evaluate", first)["loss"], expected[0]["loss"])
    reports = ranks.call("train", make_shards(make_pairs(), steps=STEPS, micro_batch_size=micro_batch_size))
    same_step(reports[0].steps, expected, ("loss", "grad_norm"))
    assert all(report.steps == reports[0].steps for report in reports)
    found = ranks.first("weights")
    assert ("score.weight" in found) == (name == "rm")
    moved = 0.0
    for key, value in found.items():
        np.testing.assert_allclose(value, weights[key], atol=1e-5, rtol=0, err_msg=key)
        moved = max(moved, np.abs(value).max())
    assert moved > 1e-3


@pytest.fixture(scope="session")
def known():
    return {}


@pytest.mark.full
@pytest.mark.parametrize("name", [*LOSSES, "ppo"])
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        (family, layout)
        for family in ("qwen3/4", "qwen3-moe/4", "deepseek/4")
        for layout, (_, _, _, max_tokens, uneven) in layouts.LAYOUTS.items()
        if layouts.suits(family, layout) and not max_tokens and not uneven
    ],
)
def test_a_loss_on_any_layout_equals_one_process(
    ranks, known, tiny_model, tiny_config, make_pairs, make_shards, family, layout, name
):
    """GRPO's are in test_parallel.py. Two data-parallel ranks have two pairs and one.

    A step divided otherwise, in one process, changes the third gradient norm of Qwen3-MoE's critic by 1.6e-5 with
    layouts.EPS, by 2e-7 at a tenth of the learning rate: Adam's enlarged rounding. With this eps it is 5e-6. So it is
    with one layout of DeepSeek-V3, whose norms differ by 2e-7, 1e-5 and 3e-6 in the three steps.
    """
    eps = 10 * ADAM_EPS if name == "ppo" and family in ("qwen3-moe/4", "deepseek/4") else layouts.EPS
    algorithm = AlgorithmConfig(advantage_estimator="ppo") if name == "ppo" else LOSSES[name][0]

    def train(layout):
        config = tiny_config(load=tiny_model(family).checkpoint, adam_eps=eps, **layout.settings)
        ranks.start(layout.world, config, tiny_model(family).shape, algorithm)
        size, ranks_of_data = layout.micro_batch_size, config.data_parallel_size(layout.world)
        pairs = {"micro_batch_size": size and size + size % 2, "data_parallel": ranks_of_data, "together": 2}
        return ranks.call("train", make_shards(make_pairs(), steps=STEPS, **pairs))[0].steps, ranks.first("weights")

    if (family, name) not in known:
        known[family, name] = train(layouts.Layout(1, {}))
    expected, weights = known[family, name]
    steps, found = train(layouts.LAYOUTS[layout])
    critics = ("critic-value_loss", "critic-grad_norm") if name == "ppo" else ()
    same_step(steps, expected, ("loss", "grad_norm", *critics))
    for key, value in weights.items():
        np.testing.assert_allclose(found[key], value, atol=1e-5, rtol=0, err_msg=key)


def test_pairs_over_two_data_parallel_ranks(ranks, plain_training, tiny_model, tiny_config, make_pairs, make_shards):
    """Both samples of a pair on one rank; metrics are means over all pairs."""
    model, (algorithm, _) = tiny_model("llama-tied"), LOSSES["dpo"]
    samples = make_pairs()
    shards = make_shards(samples[:16], data_parallel=2, micro_batch_size=2, together=2)
    found = []
    for world, given in ((1, make_shards(samples[:16], micro_batch_size=6)), (2, shards)):
        ranks.start(world, tiny_config(load=model.checkpoint, lr=1e-3), model.shape, algorithm)
        ranks.call("train", given)
        found.append(ranks.call("train", given)[0].steps)
    same_step(found[1], found[0], ("loss", "grad_norm", "chosen_reward", "rejected_reward", "reward_margin"))
    assert found[0][0]["accuracy"] == found[1][0]["accuracy"] > 0.5
    assert found[0][0]["reward_margin"] > 0


def test_scores_of_a_reward_model(ranks, tiny_model, tiny_config, make_pairs, make_shards, tmp_path):
    """At the last trained token; they are saved, loaded at another layout, and need no pairs."""
    model, samples = tiny_model("qwen3"), make_pairs()
    config = tiny_config(load=model.checkpoint, save=str(tmp_path))
    ranks.start(1, config, model.shape, AlgorithmConfig(loss_type="rm_loss"))
    ranks.first("train", make_shards(samples, steps=STEPS))
    ranks.first("save", 1)
    weights = ranks.first("weights")
    plain = copy.deepcopy(model.hf)
    plain.load_state_dict(
        {key: torch.from_numpy(weights[key]) for key in plain.state_dict() if key in weights}, strict=False
    )
    plain.score = torch.nn.Linear(64, 1, bias=False)
    plain.score.weight.data = torch.from_numpy(weights["score.weight"])
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    ranks.start(2, tiny_config(load=str(tmp_path), **layout), model.shape, AlgorithmConfig(loss_type="rm_loss"))
    for sample, row in zip(samples[:7], ranks.first("forward", make_shards(samples[:7])), strict=True):
        with torch.no_grad():
            score = plain_score(plain, sample)
        last = int(marked(sample).nonzero()[-1])
        assert row[last] == pytest.approx(float(score), abs=2e-5) and abs(row[last]) > 1e-3
        assert np.count_nonzero(row) == 1 and len(row) == sample.response_length


def test_reference_free(ranks, tiny_model, tiny_config, make_pairs, make_shards):
    """The first loss is that of the log-probs alone, and no reference is computed."""
    model, samples = tiny_model("qwen3"), make_pairs(groups=2)
    algorithm = AlgorithmConfig(loss_type="dpo_loss", dpo_reference_free=True)
    ranks.start(1, tiny_config(load=model.checkpoint), model.shape, algorithm)
    report = ranks.first("train", make_shards(samples))
    with torch.no_grad():
        sums = [plain_log_probs(model.hf, sample, 1.0)[marked(sample)].sum() for sample in samples]
    margins = 0.1 * (torch.stack(sums[1::2]) - torch.stack(sums[::2]))
    assert report.steps[0]["loss"] == pytest.approx(float(-logsigmoid(margins).mean()), rel=1e-5)
    assert "ref_log_probs" not in report.seconds


@pytest.mark.parametrize("loss", ["dpo_loss", "rm_loss"])
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("alone", r"group 0 has 1 samples in its micro-batch, of rewards \[0.0\]; this loss needs preference pairs"),
        ("equal", r"group 0 has 2 samples in its micro-batch, of rewards \[1.0\]"),
        ("untrained", "sample 100 of a preference pair has no token to train on; leave the pair out"),
    ],
)
def test_what_is_not_a_pair(ranks, tiny_model, tiny_config, make_pairs, make_shards, rank_error, loss, broken, message):
    model, (first, second, *others) = tiny_model("qwen3"), make_pairs(groups=2)
    given = {
        "alone": [first, *others],
        "equal": [dataclasses.replace(first, raw_reward=1.0), second, *others],
        "untrained": [dataclasses.replace(first, loss_mask=[0] * first.response_length), second, *others],
    }
    ranks.start(1, tiny_config(load=model.checkpoint), model.shape, AlgorithmConfig(loss_type=loss))
    with pytest.raises(rank_error, match=message) as caught:
        ranks.first("train", make_shards(given[broken]))
    assert caught.value.kind == "DataError"


@pytest.mark.parametrize("loss", ["dpo_loss", "rm_loss"])
def test_held_out_pairs_are_ordered(ranks, tiny_model, tiny_config, make_pairs, make_shards, loss):
    """Responses of even tokens are preferred to those of odd ones, also where the prompt was never seen."""
    model = tiny_model("qwen3")
    samples = []
    for number, sample in enumerate(make_pairs(groups=64, prompt=3, seed=5)):
        tokens = np.array(sample.tokens)[-sample.response_length - 3 :]
        tokens[3:] = tokens[3:] % 20 * 2 + (1 - number % 2)
        samples.append(dataclasses.replace(sample, tokens=tokens.tolist(), extras={}))
    trained, held_out = samples[:96], samples[96:]
    config = tiny_config(load=model.checkpoint, lr=2e-3)
    ranks.start(1, config, model.shape, AlgorithmConfig(loss_type=loss))
    before = [row.sum() for row in ranks.first("forward", make_shards(held_out))]
    for _ in range(4):
        ranks.first("train", make_shards(trained, steps=6))
    after = [row.sum() for row in ranks.first("forward", make_shards(held_out))]
    gains = np.array(after) - np.array(before)
    assert (gains[1::2] > gains[::2]).mean() > 0.9


def test_every_row_of_a_built_in_loss_has_its_function():
    assert tuple(losses.LOSSES) == algorithms.names(algorithms.LOSSES, lambda row: not row.is_custom)
    assert losses.LOSSES["rm_loss"].scores and losses.LOSSES["dpo_loss"].pairs and not losses.LOSSES["dpo_loss"].scores


def test_numbers_of_samples_are_a_losses_inputs_where_none_were_computed():
    row = np.array([-1, -2, -3], np.float32)
    counts = {"response_length": 3, "trajectory_tokens": 2, "index": 0, "group_index": 0}
    brought = {"rollout_log_probs": row, "teacher_log_probs": row - 1, "loss_mask": np.array([1, 0, 1], np.uint8)}
    sample = TrainSample(tokens=np.arange(5), reward=1.0, raw_reward=1.0, **counts, **brought)
    device, computed = torch.device("cpu"), torch.tensor([-7.0, -8.0])
    known = PlannedBatch(MicroBatch([sample])).known(device)
    assert known.pop("rollout_log_probs_N").tolist() == [-1, -3] and known.pop("teacher_log_probs_N").tolist() == [
        -2,
        -4,
    ]
    assert set(known.values()) == {None} and len(known) == 5
    known = PlannedBatch(MicroBatch([sample]), teacher_log_probs_N=computed, advantages_N=computed).known(device)
    assert known["teacher_log_probs_N"] is computed and known["advantages_N"] is computed


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
