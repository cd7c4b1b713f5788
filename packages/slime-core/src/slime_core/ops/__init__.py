"""The algorithms as pure functions on tensors. Importing this imports torch; nothing else in `slime_core` does.

Shapes, in every file here: T tokens (of all responses of a micro-batch, one after the other), V vocabulary columns of
this rank, C rows of a chunk, R tokens of one response.
"""

from slime_core.ops.advantages import grpo_advantages
from slime_core.ops.aggregate import (
    token_weights,
    token_weights_by_constant,
    token_weights_per_trajectory,
    trajectory_tokens,
)
from slime_core.ops.corrections import icepop_weights, mis_weight_sums, mis_weights, opsm_mask, tis_weights
from slime_core.ops.diagnostics import Statistics, drift_statistics, policy_statistics, weight_statistics
from slime_core.ops.kl import kl_penalty
from slime_core.ops.linear_logprobs import linear_log_probs_and_entropy
from slime_core.ops.logprobs import log_probs_and_entropy
from slime_core.ops.losses import cispo_loss, gspo_loss, policy_loss
from slime_core.ops.objective import policy_objective
from slime_core.ops.preference import dpo_loss, preference_objective, reward_model_loss
from slime_core.ops.sequence_ratio import gspo_log_ratio, sequence_log_ratio
from slime_core.ops.sft import sft_objective
from slime_core.ops.value import value_loss, value_objective

__all__ = [
    "Statistics",
    "cispo_loss",
    "dpo_loss",
    "drift_statistics",
    "grpo_advantages",
    "gspo_log_ratio",
    "gspo_loss",
    "icepop_weights",
    "kl_penalty",
    "linear_log_probs_and_entropy",
    "log_probs_and_entropy",
    "mis_weight_sums",
    "mis_weights",
    "opsm_mask",
    "policy_loss",
    "policy_objective",
    "policy_statistics",
    "preference_objective",
    "reward_model_loss",
    "sequence_log_ratio",
    "sft_objective",
    "tis_weights",
    "token_weights",
    "token_weights_by_constant",
    "token_weights_per_trajectory",
    "trajectory_tokens",
    "value_loss",
    "value_objective",
    "weight_statistics",
]
