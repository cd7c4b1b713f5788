"""The losses of a train step. A new one is a function here and a row in `slime_core.algorithms`.

Notation: N trained tokens of a micro-batch, one sample after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from slime_core.algorithms import LOSSES as LOSS_TYPES
from slime_core.algorithms import LossType
from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError
from slime_core.former_names import renamed
from slime_core.ops import (
    Statistics,
    dpo_pair_loss,
    drift_statistics,
    kl_penalty,
    policy_objective,
    policy_statistics,
    preference_objective,
    reward_model_loss,
    sft_objective,
    value_objective,
)
from slime_core.ops.off_policy import weighted_sum
from slime_core.ops.tokens import needed
from slime_core.user_functions import load_function

__getattr__ = renamed(__name__, {"Loss": "slime_megatron.step.losses.LossFunction"})

Computed = tuple[torch.Tensor, Statistics | Mapping[str, torch.Tensor]]
DRIFT_WEIGHT = "drift_weight"
"""Sum of the weights under which ``mismatch_`` and ``train_rollout_`` are means: of tokens that an engine generated."""


@dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """Numbers of the trained tokens of a micro-batch [N] that are known before a step.

    A new one is a field here, and a value where it is computed: `slime_megatron.step.plan`.

    Attributes:
        advantages_N: Advantages, for a loss that takes them.
        old_log_probs_N: What the policy ratio compares with; ``None`` for the current log-probs.
        ref_log_probs_N: Log-probs under the reference model, if the algorithm needs them.
        rollout_log_probs_N: The engine's, if all samples have them.
        teacher_log_probs_N: The teacher's, if all samples have them.
        old_values_N: Values from before the update, for a critic.
        returns_N: What a critic's values should be.
    """

    advantages_N: torch.Tensor | None = None
    old_log_probs_N: torch.Tensor | None = None
    ref_log_probs_N: torch.Tensor | None = None
    rollout_log_probs_N: torch.Tensor | None = None
    teacher_log_probs_N: torch.Tensor | None = None
    old_values_N: torch.Tensor | None = None
    returns_N: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LossInputs(TokenInputs):
    """Everything that the loss of a micro-batch may be computed from: the :class:`TokenInputs`, and these.

    Attributes:
        algorithm: Settings of the loss.
        output_N: What the gradient flows through: ``log_probs_N`` (nats) under the policy, or ``values_N`` of a model
            with a value head.
        weights_N: Weights of the tokens. Their denominators are the whole step's, so a loss is a plain sum under them.
        lengths: Trained tokens of each sample.
        entropy_N: Entropies (nats), with ``--entropy-coef``.
        mis_sums: :func:`slime_core.ops.mis_weight_sums` over the step, if the algorithm needs them.
        pg_weights_N: :func:`slime_core.ops.reducer_weights` of the tokens, if the user's function sums the policy loss.
        global_pairs: Preference pairs in the step over all ranks; samples are chosen, rejected, chosen, rejected, …
        margins_P: By how much the chosen one of each pair should lead.
    """

    algorithm: AlgorithmConfig
    output_N: torch.Tensor
    weights_N: torch.Tensor
    lengths: tuple[int, ...]
    entropy_N: torch.Tensor | None = None
    mis_sums: torch.Tensor | None = None
    pg_weights_N: torch.Tensor | None = None
    global_pairs: int = 0
    margins_P: torch.Tensor | None = None

    @property
    def log_probs_N(self) -> torch.Tensor:  # noqa: N802
        """Log-probs (nats) under the policy."""
        return self.output_N

    @property
    def values_N(self) -> torch.Tensor:  # noqa: N802
        """Outputs of the value head."""
        return self.output_N


@dataclass(frozen=True)
class LossFunction:
    """The function of a loss, with what its row says of it.

    Attributes:
        compute: Returns the micro-batch's share of the step's loss and its metrics: statistics, or sums under the
            tokens' weights by name, which are reported as means.
        value_head: The model gives a number per token in place of log-probs.
        pairs: Samples are preference pairs, and metrics are means over them.
    """

    compute: Callable[[LossInputs], Computed]
    value_head: bool = False
    pairs: bool = False

    @classmethod
    def of(cls, row: LossType, compute: Callable[[LossInputs], Computed]) -> LossFunction:
        """The function of a row."""
        return cls(compute, value_head=row.value_head, pairs=row.on_pairs)

    @property
    def scores(self) -> bool:
        """Whether it is computed from one number per response."""
        return self.pairs and self.value_head

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, Statistics]:
        """The loss and its statistics, ``loss`` among them."""
        loss, found = self.compute(inputs)
        if not isinstance(found, Statistics):
            found = Statistics(sums={"loss": loss.detach(), **found})
        return loss, found


def policy_loss(inputs: LossInputs) -> tuple[torch.Tensor, Statistics]:
    """The policy gradient of ``--advantage-estimator``, with KL, entropy and off-policy corrections."""
    old_N = inputs.log_probs_N.detach() if inputs.old_log_probs_N is None else inputs.old_log_probs_N
    loss, sums = policy_objective(
        inputs.algorithm,
        log_probs_T=inputs.log_probs_N,
        old_log_probs_T=old_N,
        advantages_T=needed(inputs.advantages_N, "the policy loss", "advantages"),
        weights_T=inputs.weights_N,
        lengths=inputs.lengths,
        ref_log_probs_T=inputs.ref_log_probs_N,
        rollout_log_probs_T=inputs.rollout_log_probs_N,
        entropy_T=inputs.entropy_N,
        mis_sums=inputs.mis_sums,
        pg_weights_T=inputs.pg_weights_N,
    )
    weights_N = inputs.weights_N
    sums_before = {name: weighted_sum(value, weights_N, weights_N) for name, value in _from_before(inputs, old_N)}
    before = Statistics(sums=sums_before)
    return loss, Statistics.merged([Statistics(sums=sums), _ratio_statistics(inputs), _drift(inputs, old_N), before])


def _from_before(inputs: LossInputs, old_N: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The divergences (nats) from teacher and reference that are in the advantages, from before the update."""
    algorithm, teacher_N, ref_N = inputs.algorithm, inputs.teacher_log_probs_N, inputs.ref_log_probs_N
    if algorithm.use_opd and teacher_N is not None:
        yield "opd_reverse_kl", old_N - teacher_N
    if algorithm.kl_coef and ref_N is not None:
        yield "kl", kl_penalty(old_N, ref_N, algorithm.kl_loss_type or "k1", mask_T=inputs.weights_N)


def sft_loss(inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Cross-entropy of the trained tokens."""
    return sft_objective(inputs.log_probs_N, inputs.weights_N)


def value_loss(inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """The critic's squared error, clipped by ``--value-clip``."""
    return value_objective(
        values_T=inputs.values_N,
        old_values_T=needed(inputs.old_values_N, "the value loss", "the values from before the update"),
        returns_T=needed(inputs.returns_N, "the value loss", "the returns"),
        weights_T=inputs.weights_N,
        value_clip=inputs.algorithm.value_clip,
    )


def preference_loss(inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """DPO, with ``--dpo-beta``, ``--dpo-label-smoothing`` and ``--dpo-reference-free``."""
    loss_P, chosen_P, rejected_P = dpo_pair_loss(
        inputs.log_probs_N,
        inputs.ref_log_probs_N,
        mask_T=torch.ones_like(inputs.weights_N),
        lengths=inputs.lengths,
        beta=inputs.algorithm.dpo_beta,
        label_smoothing=inputs.algorithm.dpo_label_smoothing,
        reference_free=inputs.algorithm.dpo_reference_free,
    )
    return preference_objective(loss_P, chosen_P, rejected_P, global_pairs=inputs.global_pairs)


def score_loss(inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """The likelihood of the preferences under a reward model's scores."""
    chosen_P, rejected_P = inputs.values_N.view(-1, 2).unbind(1)
    loss_P = reward_model_loss(chosen_P, rejected_P, margins_P=inputs.margins_P)
    return preference_objective(loss_P, chosen_P, rejected_P, global_pairs=inputs.global_pairs)


_COMPUTED: Mapping[str, Callable[[LossInputs], Computed]] = {
    "policy_loss": policy_loss,
    "sft_loss": sft_loss,
    "dpo_loss": preference_loss,
    "rm_loss": score_loss,
}
LOSSES = {name: LossFunction.of(LOSS_TYPES[name], compute) for name, compute in _COMPUTED.items()}
"""The built-in losses, by the names of their rows in `slime_core.algorithms`."""
CRITIC_LOSS = LossFunction(value_loss, value_head=True)


def loss_of(algorithm: AlgorithmConfig) -> LossFunction:
    """The loss of ``--loss-type``.

    A user-defined one is called with :class:`LossInputs`; it returns the loss and a dictionary of sums under
    ``weights_N``.

    Raises:
        ConfigError: The user-defined one cannot be used, or a row has no function here.
    """
    if (path := algorithm.custom_loss_function_path) is not None:
        compute = load_function(path, "--custom-loss-function-path", arguments=("inputs",))
        return LossFunction.of(algorithm.loss, compute)
    if algorithm.loss_type in LOSSES:
        return LOSSES[algorithm.loss_type]
    raise ConfigError(f"--loss-type {algorithm.loss_type}: slime_megatron.step.losses has no function for it; add one")


def _ratio_statistics(inputs: LossInputs) -> Statistics:
    """How far the policy has moved in this rollout."""
    if inputs.old_log_probs_N is None or inputs.advantages_N is None:
        return Statistics()
    return policy_statistics(
        log_probs_T=inputs.log_probs_N.detach(),
        old_log_probs_T=inputs.old_log_probs_N,
        advantages_T=inputs.advantages_N,
        mask_T=inputs.weights_N,
        weights_T=inputs.weights_N,
        eps_clip=inputs.algorithm.eps_clip,
        eps_clip_high=inputs.algorithm.clip_high,
        eps_clip_c=inputs.algorithm.eps_clip_c,
    )


def _drift(inputs: LossInputs, old_N: torch.Tensor) -> Statistics:
    """How far the engine's log-probs are from the trainer's."""
    if inputs.rollout_log_probs_N is None:
        return Statistics()
    drift = drift_statistics(
        train_log_probs_T=old_N,
        rollout_log_probs_T=inputs.rollout_log_probs_N,
        mask_T=inputs.weights_N,
        weights_T=inputs.weights_N,
        lengths=inputs.lengths,
    )
    always = {DRIFT_WEIGHT: inputs.weights_N.sum(), "train_rollout_ratio": drift.moments["mismatch_ratio"][1]}
    if not inputs.algorithm.get_mismatch_metrics:
        name = "train_rollout_logprob_abs_diff"
        drift = Statistics(sums={name: drift.sums[name]}, maxima={name: drift.maxima[name]})
    return Statistics.merged([drift, Statistics(sums=always)])
