"""Losses on pairs of responses, one preferred. P pairs; T tokens of their 2P responses, one after the other."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from slime_core.errors import ConfigError, DataError
from slime_core.ops.tokens import Lengths, masked, sequence_lengths, sequence_sum


def dpo_pair_loss(
    log_probs_T: Tensor,
    ref_log_probs_T: Tensor | None,
    *,
    mask_T: Tensor,
    lengths: Lengths,
    beta: float,
    label_smoothing: float = 0.0,
    reference_free: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """DPO: ``−(1 − ε) log σ(h) − ε log σ(−h)``, h the chosen response's implicit reward less the rejected one's.

    The implicit reward is β Σ (log π − log π_ref) over the response's unmasked tokens (Rafailov et al. 2023; the loss
    is equation 7). ε is the probability that a label is the wrong way round (conservative DPO; Mitchell 2023).
    Reference-free, the rewards are β Σ log π, as if every response were as likely as any other under the reference. The
    log-ratios are summed, not the log-probs: long responses' sums of log-probs have too few digits in fp32 for their
    difference.

    Args:
        log_probs_T: Log-probs (nats) under the policy [T], of chosen, rejected, chosen, rejected, …
        ref_log_probs_T: Log-probs under the reference [T], taken as constants; ``None`` if and only if
            ``reference_free``.
        mask_T: 0 where a token does not count [T], such as a prompt's; there the log-probs may be anything, NaN too.
        lengths: Tokens of each response, 2P numbers that add up to T; 0 is allowed.
        beta: β, above 0: how much a departure from the reference costs.
        label_smoothing: ε, 0 or more and below 0.5.
        reference_free: Leave the reference out.

    Returns:
        The loss [P] with gradient to ``log_probs_T``, and the implicit rewards of the chosen and of the rejected
        responses [P], detached.

    Raises:
        ConfigError: β or ε is outside its range, or ``reference_free`` contradicts ``ref_log_probs_T``.
        DataError: The shapes or the lengths do not match, or the responses do not come in pairs.
    """
    if reference_free != (ref_log_probs_T is None):
        state = "none were given" if ref_log_probs_T is None else "they were given with reference_free"
        raise ConfigError(f"DPO takes the reference's log-probs unless it is reference_free, and {state}")
    if ref_log_probs_T is None:
        ref_log_probs_T = torch.zeros_like(log_probs_T)
    new_T, ref_T = masked(mask_T, log_probs_T=log_probs_T, ref_log_probs_T=ref_log_probs_T.detach())
    log_ratios_N = sequence_sum(new_T - ref_T, sequence_lengths(lengths, new_T))
    if len(log_ratios_N) % 2:
        raise DataError(f"{len(log_ratios_N)} responses are not pairs; give chosen, rejected, chosen, rejected, …")
    chosen_P, rejected_P = log_ratios_N.view(-1, 2).unbind(1)
    return dpo_of_log_ratios(chosen_P, rejected_P, beta, label_smoothing)


def dpo_of_log_ratios(
    chosen_P: Tensor, rejected_P: Tensor, beta: float, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """DPO's loss and detached implicit rewards, from the responses' summed log π − log π_ref."""
    if not 0 < beta < math.inf:
        raise ConfigError(f"beta {beta} must be a finite number above 0")
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(f"label_smoothing {label_smoothing} must be 0 or more and below 0.5")
    margin_P = beta * chosen_P - beta * rejected_P
    loss_P = -(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)
    return loss_P, (beta * chosen_P).detach(), (beta * rejected_P).detach()


def reward_model_loss(chosen_P: Tensor, rejected_P: Tensor, *, margins_P: Tensor | None = None) -> Tensor:
    """The Bradley–Terry likelihood of the preferences: ``−log σ(r_chosen − r_rejected − m)``.

    Ouyang et al. 2022, equation 1; the margin m, larger where raters were surer, as in Touvron et al. 2023 (Llama 2),
    equation 2.

    Args:
        chosen_P: The reward model's scores of the preferred responses [P].
        rejected_P: Its scores of the others [P].
        margins_P: By how much the chosen one should lead [P], taken as constants; ``None`` means 0.
    """
    if margins_P is None:
        margins_P = torch.zeros_like(chosen_P)
    chosen_P, rejected_P, margins_P = masked(None, chosen_P=chosen_P, rejected_P=rejected_P, margins_P=margins_P)
    return -logsigmoid(chosen_P - rejected_P - margins_P.detach())


def preference_objective(
    loss_P: Tensor, chosen_P: Tensor, rejected_P: Tensor, *, global_pairs: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over a step's pairs, as a plain sum over micro-batches and ranks.

    Args:
        loss_P: From :func:`dpo_pair_loss` or :func:`reward_model_loss` [P].
        chosen_P: Rewards of the chosen responses [P]: DPO's implicit ones, or the reward model's scores.
        rejected_P: Rewards of the rejected responses [P].
        global_pairs: Pairs in the step over all ranks.

    Returns:
        The scalar loss, and detached scalars by name: ``loss``, ``accuracy`` (the share of pairs whose chosen response
        has the strictly larger reward), ``chosen_reward``, ``rejected_reward`` and ``reward_margin``. All of them add
        up over micro-batches and ranks.

    Raises:
        DataError: The shapes differ, or ``global_pairs`` is below 1.
    """
    if global_pairs < 1:
        raise DataError(f"global_pairs {global_pairs} must be 1 or more: the pairs of the step over all ranks")
    loss_P, chosen_P, rejected_P = masked(None, loss_P=loss_P, chosen_P=chosen_P, rejected_P=rejected_P)
    loss = loss_P.sum() / global_pairs
    means = {
        "loss": loss_P,
        "accuracy": (chosen_P > rejected_P).to(loss_P.dtype),
        "chosen_reward": chosen_P,
        "rejected_reward": rejected_P,
        "reward_margin": chosen_P - rejected_P,
    }
    return loss, {name: values_P.detach().sum() / global_pairs for name, values_P in means.items()}
