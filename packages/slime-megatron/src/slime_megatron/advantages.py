"""Advantages of a rank's samples, before its first optimizer step on a rollout.

Notation: N trained response tokens of all given samples, one sample after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import parallel_state

from slime_core.config import AlgorithmConfig
from slime_core.ops import AdvantageEstimator, policy_advantages
from slime_core.types import TrainSample
from slime_megatron.packing import trained_values


def teacher_log_probs(samples: Sequence[TrainSample], device: torch.device) -> torch.Tensor:
    """The teacher's log-probs (nats) of the trained tokens [N]."""
    values = trained_values(samples, [sample.teacher_log_probs or [] for sample in samples])
    return torch.tensor(values, dtype=torch.float32, device=device)


def sample_advantages(
    algorithm: AlgorithmConfig,
    samples: Sequence[TrainSample],
    *,
    device: torch.device,
    estimator: AdvantageEstimator | None = None,
    old_log_probs_N: torch.Tensor | None = None,
    ref_log_probs_N: torch.Tensor | None = None,
) -> dict[int, torch.Tensor]:
    """Advantages of each sample's trained tokens. With whitening, every data-parallel rank must call this.

    Tokens that are not trained on take no part in any estimator, so those that are stand for the whole response.

    Args:
        algorithm: The estimator and what is added to it.
        samples: This rank's samples of the rollout that have a trained token.
        device: Where to compute.
        estimator: One of the user's own.
        old_log_probs_N: Log-probs from before the update; needed where advantages depend on them.
        ref_log_probs_N: Log-probs under the reference, likewise.

    Returns:
        By the samples' ``id()``.
    """
    lengths = [sum(sample.loss_mask) for sample in samples]
    advantages_N, _ = policy_advantages(
        algorithm,
        rewards_N=torch.tensor([sample.reward for sample in samples], dtype=torch.float32, device=device),
        mask_T=torch.ones(sum(lengths), device=device),
        lengths=lengths,
        old_log_probs_T=old_log_probs_N,
        ref_log_probs_T=ref_log_probs_N,
        teacher_log_probs_T=teacher_log_probs(samples, device) if algorithm.use_opd else None,
        estimator=estimator,
        group=parallel_state.get_data_parallel_group(),
    )
    return dict(zip(map(id, samples), torch.split(advantages_N, lengths), strict=True))


def contributes(advantages: torch.Tensor, algorithm: AlgorithmConfig) -> bool:
    """Whether a sample with these advantages adds anything to the loss or its gradient.

    With advantages of zero it does not, unless the KL loss or the entropy bonus wants it, or its importance weights
    enter a mean over the step.
    """
    wanted = algorithm.use_kl_loss or algorithm.entropy_coef != 0 or algorithm.needs_step_sums
    return wanted or bool(advantages.any())
