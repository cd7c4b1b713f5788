"""The loss of supervised fine-tuning. T tokens."""

from __future__ import annotations

from torch import Tensor

from slime_core.ops.masking import masked


def sft_objective(log_probs_T: Tensor, weights_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of the demonstrated tokens: ``−Σ w log π`` (Ouyang et al. 2022, section 3.5, the SFT model).

    Args:
        log_probs_T: Log-probs (nats) of the demonstrated tokens under the model [T].
        weights_T: From :func:`slime_core.ops.token_weights` or one of its siblings [T]. With ``per_token`` the loss is
            the mean negative log-likelihood of the step's trained tokens. Where the weight is 0 the log-prob may be
            anything, NaN too.

    Returns:
        The scalar loss in nats, and the detached scalar ``loss``. It adds up over micro-batches and ranks.

    Raises:
        DataError: The shapes differ.
    """
    (log_probs_T,) = masked(weights_T, log_probs_T=log_probs_T)
    loss = -(log_probs_T * weights_T).sum()
    return loss, {"loss": loss.detach()}
