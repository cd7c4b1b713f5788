"""Public names of earlier versions: what is only renamed lives on with a warning, of the others an error says more."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

RENAMED = {
    "slime_core.ops": {
        "gae": "slime_core.ops.gae_advantages",
        "leave_one_out_by_group": "slime_core.rewards.leave_one_out_rewards",
        "normalize_rewards_by_group": "slime_core.rewards.normalize_group_rewards",
        "policy_loss": "slime_core.ops.policy_token_loss",
    },
}
"""By module: what a former name is now called. Arguments have the same meaning and order."""

REPLACED = {
    "slime_core": {
        "context_parallel": "nothing: how a sequence is cut over context-parallel ranks is slime_megatron's",
        "integrity": "slime_core.sums for checksums",
        "packing": "slime_core.balance.balance",
    },
    "slime_core.ops": {
        "Discounted": 'slime_core.ops.estimator_named("reinforce_plus_plus", gamma=…)',
        "Distillation": "slime_core.ops.distilled_advantages, or AlgorithmConfig(use_opd=True)",
        "GeneralizedAdvantage": 'slime_core.ops.estimator_named("ppo", gamma=…, lambd=…)',
        "compute_advantages": "slime_core.ops.policy_advantages, which takes an AlgorithmConfig",
        "grpo_advantages": "slime_core.ops.outcome_advantages",
        "sequence_log_ratio": "slime_core.ops.gspo_log_ratio, which gives a value per token",
        "token_weights_by_constant": "slime_core.ops.token_weights(…, divisor=…)",
        "token_weights_per_trajectory": "slime_core.ops.token_weights(…, trajectory_tokens=…)",
    },
}
"""By module: what to use in place of a former name whose arguments were others."""


def former(module: str, name: str) -> Any:
    """What a name that ``module`` does not have was renamed to, with a `DeprecationWarning`.

    Raises:
        AttributeError: It was not renamed. The message says what there is in its place, if it was there once.
    """
    now = RENAMED.get(module, {}).get(name)
    if now is not None:
        warnings.warn(
            f"{module}.{name} is now {now}; the old name goes with the next release", DeprecationWarning, stacklevel=3
        )
        home, _, attribute = now.rpartition(".")
        return getattr(import_module(home), attribute)
    instead = REPLACED.get(module, {}).get(name)
    more = "" if instead is None else f"; it was there in an earlier version, use {instead}"
    raise AttributeError(f"module {module!r} has no attribute {name!r}{more}", name=name)
