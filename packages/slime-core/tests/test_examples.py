import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

PLAIN = Path(__file__).parents[3] / "examples" / "losses-elsewhere" / "plain_grpo.py"


@pytest.mark.skipif(not PLAIN.exists(), reason="the examples belong to the repository, not to the package")
def test_the_plain_loop_learns(capsys):
    spec = importlib.util.spec_from_file_location("plain_grpo", PLAIN)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main()
    rewards = [float(reward) for reward in re.findall(r"mean reward (\S+)", capsys.readouterr().out)]
    assert len(rewards) == 30
    assert rewards[0] < 0.2  # chance is 0.1
    assert rewards[-1] > 0.95


EXAMPLE = Path(__file__).parents[3] / "examples" / "losses-elsewhere" / "trl_style_grpo.py"

pytestmark = pytest.mark.skipif(
    not EXAMPLE.exists(), reason="the examples belong to the repository, not to the package"
)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("trl_style_grpo", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model(example):
    torch.manual_seed(0)
    return example.TinyModel(nn.Embedding(12, 32), nn.Linear(32, 12))


def batch(model):
    """Three completions of 4, 2 and 1 tokens. The policy has moved since, beyond both bounds for either sign of A."""
    rows = [([11, 3], [4, 5, 10, 2], 0.8), ([2, 7], [8, 1], -1.3), ([0, 1], [10], 0.4)]
    completions = torch.tensor([ids + [11] * (4 - len(ids)) for _, ids, _ in rows])
    inputs = {
        "prompt_ids": torch.tensor([prompt for prompt, _, _ in rows]),
        "prompt_mask": torch.tensor([[0, 1], [1, 1], [1, 1]]),
        "completion_ids": completions,
        "completion_mask": torch.tensor([[1] * len(ids) + [0] * (4 - len(ids)) for _, ids, _ in rows]),
        "advantages": torch.tensor([advantage for _, _, advantage in rows]),
        "num_items_in_batch": torch.tensor([7, 7, 7]),
    }
    with torch.no_grad():
        ids = torch.cat([inputs["prompt_ids"], completions], dim=1)
        log_probs = model(ids, torch.ones_like(ids)).logits.double().log_softmax(-1)[:, 1:-1]
        log_probs = log_probs.gather(2, completions.unsqueeze(2)).squeeze(2)
    generator = torch.Generator().manual_seed(1)
    inputs["old_per_token_logps"] = log_probs + torch.empty(3, 4).uniform_(-0.8, 0.8, generator=generator)
    inputs["ref_per_token_logps"] = log_probs + torch.empty(3, 4).uniform_(-0.8, 0.8, generator=generator)
    return inputs, log_probs


def by_hand(inputs, log_probs, per_token):
    """GRPO (Shao et al. 2024, equations 3 and 4) with DAPO's bounds, token by token."""
    loss = 0.0
    for row in range(3):
        length = int(inputs["completion_mask"][row].sum())
        for token in range(length):
            new, old, ref = (
                float(values[row, token])
                for values in (log_probs, inputs["old_per_token_logps"], inputs["ref_per_token_logps"])
            )
            ratio, advantage = math.exp(new - old), float(inputs["advantages"][row])
            surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
            divergence = math.exp(ref - new) - (ref - new) - 1
            loss += (1e-3 * divergence - surrogate) / (7 if per_token else 3 * length)
    return loss


@pytest.mark.parametrize("per_token", [False, True])
def test_its_loss_is_that_of_the_papers_whatever_lies_in_the_padding(example, model, per_token):
    inputs, log_probs = batch(model)
    config = example.AlgorithmConfig(
        eps_clip=0.2,
        eps_clip_high=0.28,
        use_kl_loss=True,
        kl_loss_coef=1e-3,
        kl_loss_type="k3",
        calculate_per_token_loss=per_token,
    )
    trainer = example.Trainer(model, config, batch_size=3)
    expected = by_hand(inputs, log_probs, per_token)
    assert trainer.compute_loss(model, inputs).item() == pytest.approx(expected, rel=1e-5)
    inputs["old_per_token_logps"] = inputs["old_per_token_logps"].where(inputs["completion_mask"] == 1, 30.0)
    assert trainer.compute_loss(model, inputs).item() == pytest.approx(expected, rel=1e-5)


def test_its_micro_batches_add_up(example, model):
    inputs, _ = batch(model)
    trainer = example.Trainer(model, batch_size=3)
    whole = trainer.compute_loss(model, inputs)
    parts = [{name: value[rows] for name, value in inputs.items()} for rows in ([0, 2], [1])]
    assert sum(trainer.compute_loss(model, part) for part in parts).item() == pytest.approx(whole.item(), rel=1e-5)


def test_it_learns(example, model, capsys):
    example.Trainer(model).train(steps=15)
    rewards = [float(reward) for reward in re.findall(r"mean reward (\S+)", capsys.readouterr().out)]
    assert len(rewards) == 15
    assert rewards[0] < 0.2  # chance is 0.1 or less
    assert rewards[-1] > 0.85
