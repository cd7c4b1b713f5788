"""The algorithms as pure functions on tensors. Importing this imports torch; nothing else in `slime_core` does.

`losses.py` has whole losses in one call. Shapes, in the names of all other arguments: T tokens (of all responses of a
micro-batch, one after the other), N responses, V vocabulary columns of this rank, C rows of a chunk, R tokens of one
response, P pairs.
"""

from slime_core.former_names import RENAMED, REPLACED, renamed
from slime_core.ops.advantages import (
    AdvantageEstimator,
    AdvantageInputs,
    Advantages,
    distilled_advantages,
    estimator_named,
    outcome_advantages,
    policy_advantages,
    whiten,
)
from slime_core.ops.diagnostics import Statistics, drift_statistics, policy_statistics, weight_statistics
from slime_core.ops.kept_log_probs import kept_log_probs_and_entropy
from slime_core.ops.linear_log_probs import linear_log_probs_and_entropy
from slime_core.ops.log_probs import log_probs_and_entropy
from slime_core.ops.losses import (
    Loss,
    algorithm_loss,
    cispo_loss,
    dapo_loss,
    dpo_loss,
    dr_grpo_loss,
    grpo_loss,
    gspo_loss,
    ppo_loss,
)
from slime_core.ops.objective import (
    loss_weights,
    policy_objective,
    reducer_weights,
    sft_objective,
    token_weights,
    trajectory_tokens,
    value_objective,
)
from slime_core.ops.off_policy import (
    correction_factors,
    icepop_weights,
    mis_weight_sums,
    mis_weights,
    opsm_mask,
    tis_weights,
)
from slime_core.ops.preference import dpo_pair_loss, preference_objective, reward_model_loss
from slime_core.ops.returns import discounted_returns, gae_advantages, token_rewards
from slime_core.ops.token_losses import (
    cispo_token_loss,
    gspo_log_ratio,
    gspo_token_loss,
    kl_penalty,
    policy_token_loss,
    value_loss,
)

__all__ = [
    "AdvantageEstimator",
    "AdvantageInputs",
    "Advantages",
    "Loss",
    "Statistics",
    "algorithm_loss",
    "cispo_loss",
    "cispo_token_loss",
    "correction_factors",
    "dapo_loss",
    "discounted_returns",
    "distilled_advantages",
    "dpo_loss",
    "dpo_pair_loss",
    "dr_grpo_loss",
    "drift_statistics",
    "estimator_named",
    "gae_advantages",
    "grpo_loss",
    "gspo_log_ratio",
    "gspo_loss",
    "gspo_token_loss",
    "icepop_weights",
    "kept_log_probs_and_entropy",
    "kl_penalty",
    "linear_log_probs_and_entropy",
    "log_probs_and_entropy",
    "loss_weights",
    "mis_weight_sums",
    "mis_weights",
    "opsm_mask",
    "outcome_advantages",
    "policy_advantages",
    "policy_objective",
    "policy_statistics",
    "policy_token_loss",
    "ppo_loss",
    "preference_objective",
    "reducer_weights",
    "reward_model_loss",
    "sft_objective",
    "tis_weights",
    "token_rewards",
    "token_weights",
    "trajectory_tokens",
    "value_loss",
    "value_objective",
    "weight_statistics",
    "whiten",
]

__getattr__ = renamed(__name__, RENAMED[__name__], REPLACED[__name__])
