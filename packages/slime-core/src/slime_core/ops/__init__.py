"""The algorithms as pure functions on tensors. Importing this imports torch; nothing else in `slime_core` does.

Shapes, in every file here: T tokens (of all responses of a micro-batch, one after the other), V vocabulary columns of
this rank, C rows of a chunk, R tokens of one response.
"""

from slime_core.ops.advantages import distilled_advantages, grpo_advantages, outcome_advantages
from slime_core.ops.aggregate import (
    token_weights,
    token_weights_by_constant,
    token_weights_per_trajectory,
    trajectory_tokens,
)
from slime_core.ops.corrections import icepop_weights, mis_weight_sums, mis_weights, opsm_mask, tis_weights
from slime_core.ops.diagnostics import Statistics, drift_statistics, policy_statistics, weight_statistics
from slime_core.ops.estimators import (
    AdvantageEstimator,
    AdvantageInputs,
    Advantages,
    Discounted,
    Distillation,
    GeneralizedAdvantage,
    compute_advantages,
    estimator_named,
)
from slime_core.ops.gae import gae_advantages
from slime_core.ops.kl import kl_penalty
from slime_core.ops.linear_logprobs import linear_log_probs_and_entropy
from slime_core.ops.logprobs import log_probs_and_entropy
from slime_core.ops.losses import cispo_loss, gspo_loss, policy_loss
from slime_core.ops.objective import loss_weights, policy_objective
from slime_core.ops.off_policy import correction_factors
from slime_core.ops.policy_advantages import policy_advantages
from slime_core.ops.preference import dpo_loss, preference_objective, reward_model_loss
from slime_core.ops.returns import discounted_returns, token_rewards
from slime_core.ops.sequence_ratio import gspo_log_ratio, sequence_log_ratio
from slime_core.ops.sft import sft_objective
from slime_core.ops.value import value_loss, value_objective
from slime_core.ops.whitening import whiten

__all__ = [
    "AdvantageEstimator",
    "AdvantageInputs",
    "Advantages",
    "Discounted",
    "Distillation",
    "GeneralizedAdvantage",
    "Statistics",
    "cispo_loss",
    "compute_advantages",
    "correction_factors",
    "discounted_returns",
    "distilled_advantages",
    "dpo_loss",
    "drift_statistics",
    "estimator_named",
    "gae_advantages",
    "grpo_advantages",
    "gspo_log_ratio",
    "gspo_loss",
    "icepop_weights",
    "kl_penalty",
    "linear_log_probs_and_entropy",
    "log_probs_and_entropy",
    "loss_weights",
    "mis_weight_sums",
    "mis_weights",
    "opsm_mask",
    "outcome_advantages",
    "policy_advantages",
    "policy_loss",
    "policy_objective",
    "policy_statistics",
    "preference_objective",
    "reward_model_loss",
    "sequence_log_ratio",
    "sft_objective",
    "tis_weights",
    "token_rewards",
    "token_weights",
    "token_weights_by_constant",
    "token_weights_per_trajectory",
    "trajectory_tokens",
    "value_loss",
    "value_objective",
    "weight_statistics",
    "whiten",
]
