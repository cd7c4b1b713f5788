"""The losses of slime-core in a trainer shaped like TRL's `GRPOTrainer`. Only `slime-core` and `torch` are needed.

`compute_loss` takes what that trainer's takes: prompts padded on the left, completions padded on the right with a mask,
one advantage per completion, log-probs [B, L] from before the update. A subclass of it could have the same body. The
loss is a plain sum over the step's micro-batches, so nothing is divided by their number afterwards.
"""

import copy
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from slime_core.config import AlgorithmConfig
from slime_core.ops import algorithm_loss, log_probs_and_entropy
from slime_core.rewards import normalize_group_rewards

CONFIG = AlgorithmConfig(eps_clip=0.2, eps_clip_high=0.28, use_kl_loss=True, kl_loss_coef=1e-3, kl_loss_type="k3")
STOP, PAD = 10, 11  # tokens 0 to 9 are digits; the model is to count up to 9 and stop
PROMPTS, GROUP, LONGEST = 16, 8, 12  # prompts per step, completions per prompt, tokens of the longest completion


class TinyModel(nn.Sequential):
    """Called as a causal language model of transformers. It looks at one token only, so there is nothing to mask."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=super().forward(input_ids))


class Trainer:
    def __init__(self, model: nn.Module, config: AlgorithmConfig = CONFIG, batch_size: int = PROMPTS * GROUP) -> None:
        self.model, self.ref_model = model, copy.deepcopy(model)
        self.config, self.batch_size = config, batch_size  # completions per optimizer step
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)

    def per_token_logps(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        targets = inputs["completion_ids"]
        logits = model(input_ids=ids, attention_mask=mask).logits[:, -targets.shape[1] - 1 : -1]
        return log_probs_and_entropy(logits.flatten(0, 1), targets.flatten())[0].view(targets.shape)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        loss, _ = algorithm_loss(
            self.config,
            self.per_token_logps(model, inputs),
            inputs["completion_mask"],
            advantages=inputs["advantages"],
            old_log_probs=inputs["old_per_token_logps"],
            ref_log_probs=inputs["ref_per_token_logps"],
            num_sequences=self.batch_size,  # the denominators are the whole step's, not this micro-batch's
            num_tokens=int(inputs["num_items_in_batch"][0]),
        )
        return loss

    @torch.no_grad()
    def generate_and_score(self) -> tuple[dict[str, Tensor], float]:
        prompts = torch.randint(0, 10, (PROMPTS, 1)).repeat_interleave(GROUP, dim=0)
        ids, stopped = prompts, torch.zeros(len(prompts), dtype=torch.bool)
        for _ in range(LONGEST):
            logits = self.model(input_ids=ids[:, -1:], attention_mask=torch.ones_like(prompts)).logits[:, -1, :PAD]
            token = torch.multinomial(logits.softmax(-1), 1).masked_fill(stopped.unsqueeze(1), PAD)
            ids, stopped = torch.cat([ids, token], dim=1), stopped | (token.squeeze(1) == STOP)
        inputs = {"prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "completion_ids": ids[:, 1:]}
        inputs["completion_mask"] = mask = (ids[:, 1:] != PAD).long()
        rewards = ((ids[:, 1:] == ids[:, :-1] + 1) * mask).sum(1) / mask.sum(1)  # STOP is the number after 9
        groups = torch.arange(PROMPTS).repeat_interleave(GROUP)
        inputs["advantages"] = torch.as_tensor(normalize_group_rewards(rewards, groups))
        inputs["num_items_in_batch"] = mask.sum().expand(len(mask))
        inputs["old_per_token_logps"] = self.per_token_logps(self.model, inputs)
        inputs["ref_per_token_logps"] = self.per_token_logps(self.ref_model, inputs)
        return inputs, float(rewards.mean())

    def train(self, steps: int) -> None:
        for step in range(steps):
            inputs, reward = self.generate_and_score()
            for _ in range(2):  # two updates on each generation: in the second one the ratio is not 1
                for rows in torch.randperm(self.batch_size).chunk(4):
                    self.compute_loss(self.model, {name: value[rows] for name, value in inputs.items()}).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            print(f"step {step}: mean reward {reward:.2f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    Trainer(TinyModel(nn.Embedding(12, 32), nn.Linear(32, 12))).train(steps=30)
