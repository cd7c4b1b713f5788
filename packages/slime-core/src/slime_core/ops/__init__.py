"""The algorithms as pure functions on tensors. Importing this imports torch; nothing else in `slime_core` does.

Shapes, in every file here: T tokens (of all responses of a micro-batch, one after the other), V vocabulary columns of
this rank, C rows of a chunk, R tokens of one response.
"""

from slime_core.ops.advantages import grpo_advantages
from slime_core.ops.aggregate import token_weights
from slime_core.ops.kl import kl_penalty
from slime_core.ops.logprobs import log_probs_and_entropy
from slime_core.ops.losses import policy_loss
from slime_core.ops.objective import policy_objective

__all__ = [
    "grpo_advantages",
    "kl_penalty",
    "log_probs_and_entropy",
    "policy_loss",
    "policy_objective",
    "token_weights",
]
