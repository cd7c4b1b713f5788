"""GRPO in plain PyTorch: a tiny model learns to count. Only `slime-core` and `torch` are needed."""

from itertools import pairwise

import numpy as np
import torch

from slime_core.config import AlgorithmConfig
from slime_core.metrics import rollout_metrics
from slime_core.ops import grpo_loss, log_probs_and_entropy
from slime_core.schedule import ShardSpec, build_shards
from slime_core.types import RolloutBatch, Sample

PROMPTS, GROUP, LENGTH = 16, 8, 5  # prompts per rollout, samples per prompt, tokens per response


@torch.no_grad()
def generate(model: torch.nn.Module, rollout_id: int) -> RolloutBatch:
    tokens = torch.randint(0, 10, (PROMPTS, 1)).repeat_interleave(GROUP, dim=0)
    for _ in range(LENGTH):
        tokens = torch.cat([tokens, torch.multinomial(model(tokens[:, -1]).softmax(-1), 1)], dim=1)
    groups: list[list[Sample]] = [[] for _ in range(PROMPTS)]
    for index, row in enumerate(tokens.tolist()):
        sample = Sample(index=index, group_index=index // GROUP, prompt="", tokens=row, response_length=LENGTH)
        sample.reward = sum(after == (before + 1) % 10 for before, after in pairwise(row)) / LENGTH
        groups[sample.group_index].append(sample)
    return RolloutBatch(rollout_id=rollout_id, groups=groups)


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 32), torch.nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for rollout_id in range(30):
        batch = generate(model, rollout_id)
        (shard,) = build_shards(
            batch,
            ShardSpec(
                algorithm=AlgorithmConfig(),
                temperature=1.0,
                data_parallel_size=1,
                micro_batch_size=32,
                global_batch_size=128,
            ),
        )
        (step,) = shard.steps
        for members in step.micro_batches:
            samples = [shard.samples[member] for member in members]
            tokens = torch.tensor(np.stack([sample.tokens for sample in samples])).long()
            log_probs, _ = log_probs_and_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss, _ = (
                grpo_loss(  # one step per rollout: the policy has not moved yet, so its log-probs are the old ones
                    log_probs.view(-1, LENGTH),
                    torch.tensor(np.stack([sample.loss_mask for sample in samples])),
                    advantages=torch.tensor([sample.reward for sample in samples]),
                    num_sequences=step.global_trajectories,
                )
            )
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rollout {rollout_id}: mean reward {rollout_metrics(batch.samples)['raw_reward']:.2f}")


if __name__ == "__main__":
    main()
