"""A loss in one call, for any training loop: from log-probs, a mask, rewards and group ids to a scalar and its metrics.

B sequences in a batch, L tokens of the longest. Per-token inputs have one of three shapes, the same for all inputs of a
call: rows [B, L], with padding where the mask is 0; a list of B tensors; or all sequences in one row [T], with
``lengths``. Each function has its paper's clip ranges as defaults. :func:`algorithm_loss` computes the loss of any
:class:`slime_core.config.AlgorithmConfig`. ``torch.compile`` makes one graph of it with advantages and a ready config.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError, DataError
from slime_core.ops.advantages import AdvantageEstimator, Advantages, policy_advantages
from slime_core.ops.objective import policy_objective, reducer_weights, value_objective
from slime_core.ops.off_policy import mis_weight_sums
from slime_core.ops.preference import dpo_of_log_ratios, preference_objective
from slime_core.ops.tokens import Lengths, scaled, sequence_lengths, sequence_sum, widen
from slime_core.ops.used import check_settings, check_used
from slime_core.rewards import estimator_rewards
from slime_core.user_functions import load_function

Tokens: TypeAlias = Tensor | Sequence[Tensor]
"""A number per token: [B, L], B tensors, or [T] with ``lengths``."""

Ids: TypeAlias = Sequence[Hashable] | Tensor
"""Names of each sequence's prompt: integers, or anything else that can be compared, such as texts."""

_Arguments = ParamSpec("_Arguments")
_HELP = """\
    Of a batch (``Batch``) of B sequences, by keyword; numbers per token (``Tokens``) are all [B, L] with padding where
    the mask is 0, all lists of B tensors, or all [T] in one row. An argument without effect is refused:

        log_probs: Log-probs (nats) of the sampled tokens under the policy being trained, per token.
        mask: 1 where a token is trained on, else 0, such as for padding, per token; there the other inputs may be
            anything, NaN too. ``None`` if all count.
        rewards: One number per sequence [B], unless ``advantages`` are given.
        group_ids: The prompt that each sequence answers [B], numbers or texts, with rewards; not for ppo and
            reinforce_plus_plus. Groups must be here whole; they may differ in size.
        advantages: In place of rewards and group ids: one per sequence [B], or one per token.
        old_log_probs: Log-probs from before the update, per token; unset means on-policy, those of ``log_probs``.
        ref_log_probs: Log-probs under the reference, per token, for the KL divergence.
        rollout_log_probs: Log-probs that the engine gave, per token, for ``use_tis``, ``use_mis``, ``use_opsm`` and
            ``use_rollout_logprobs`` of :func:`algorithm_loss`.
        teacher_log_probs: Log-probs under the teacher, per token, for ``use_opd`` of :func:`algorithm_loss`.
        values: A critic's values from before its update, per token, for ppo and custom estimators.
        entropy: Entropies (nats), per token: the metric ``entropy_loss``, and with gradient the bonus of
            ``entropy_coef`` of :func:`algorithm_loss`.
        estimator: A custom estimator in place of the configuration's; with rewards.
        lengths: Tokens of each sequence [B], for numbers per token in one row [T].
        num_sequences: Sequences of the whole optimizer step, where this is one of its micro-batches.
        num_tokens: Tokens of the whole step where the mask is 1, likewise. Then losses add up over micro-batches. Each
            loss uses the one that it is a mean over; both may always be given.
"""
_RESULT = """
    Returns:
        ``Loss``, a tuple of the scalar ``loss`` to call ``backward()`` on, and ``metrics``: detached scalars by name,
        those of :func:`slime_core.ops.policy_objective`.

    Raises:
        ConfigError: An argument is missing, has no effect here, or a setting is outside its range.
        DataError: The shapes do not match, a reward is not finite, or no group has two sequences.
        TypeError: An argument is unknown.
"""


class Loss(NamedTuple):
    """A loss to call ``backward()`` on, and detached scalars by name."""

    loss: Tensor
    metrics: dict[str, Tensor]


class Batch(TypedDict, total=False):
    """Keyword arguments of the policy losses, besides their own settings; the losses' help describes each."""

    rewards: Sequence[float] | Tensor | None
    group_ids: Ids | None
    advantages: Tokens | None
    old_log_probs: Tokens | None
    ref_log_probs: Tokens | None
    rollout_log_probs: Tokens | None
    teacher_log_probs: Tokens | None
    values: Tokens | None
    entropy: Tokens | None
    estimator: AdvantageEstimator | None
    lengths: Sequence[int] | Tensor | None
    num_sequences: int | None
    num_tokens: int | None


def _described(function: Callable[_Arguments, Loss]) -> Callable[_Arguments, Loss]:
    """Add the batch's arguments to the help, and name settings in errors as in Python: ``eps_clip``, not a flag."""
    parameters = inspect.signature(function).parameters
    own = [name for name, one in parameters.items() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    known = own if len(own) == len(parameters) else [*Batch.__annotations__, *own]
    if known is not own:
        function.__doc__ = f"{(function.__doc__ or '').rstrip()}\n\n{_HELP}{_RESULT}"

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Loss:
        if unknown := [name for name in kwargs if name not in known]:
            raise TypeError(f"unknown arguments {', '.join(unknown)}; known: {', '.join(known)}")
        try:
            check_settings(function.__name__, kwargs)
            return function(*args, **kwargs)
        except ConfigError as error:
            text = re.sub(r"--([a-z][a-z-]*)", lambda flag: flag[1].replace("-", "_"), str(error))
            raise ConfigError(text) from None

    return call


@_described
def algorithm_loss(
    config: AlgorithmConfig, log_probs: Tokens, mask: Tokens | None = None, **batch: Unpack[Batch]
) -> Loss:
    """The policy's loss by configuration: rewards, advantages, aggregation, corrections, KL and entropy.

    Args:
        config: All settings. Sums over a step (whitening, the mean of ``mis_batch_normalize``) are over this call.

    Raises:
        ConfigError: The configuration needs an input that is missing, or does not use one that is given.
        DataError: The shapes do not match, a reward is not finite, or no group has two sequences.
    """
    check_used(config, batch)
    rows = _Rows.of(log_probs, mask, batch)
    weights_T = rows.weights(config)
    mis_sums = None
    if config.needs_step_sums and (engine_T := rows.maybe("rollout_log_probs")) is not None:
        mis_sums = mis_weight_sums(
            config,
            train_log_probs_T=rows.old,
            rollout_log_probs_T=engine_T,
            mask_T=rows.mask_T,
            weights_T=weights_T,
            lengths=rows.lengths,
        )
    loss, metrics = policy_objective(
        config,
        log_probs_T=rows.log_probs_T,
        old_log_probs_T=rows.old,
        advantages_T=rows.advantages(config),
        weights_T=weights_T,
        lengths=rows.lengths,
        ref_log_probs_T=rows.maybe("ref_log_probs"),
        rollout_log_probs_T=rows.maybe("rollout_log_probs"),
        entropy_T=rows.maybe("entropy"),
        mis_sums=mis_sums,
        pg_weights_T=rows.pg_weights(config),
    )
    return Loss(loss, metrics)


@_described
def grpo_loss(
    log_probs: Tokens,
    mask: Tokens | None = None,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    kl_loss_coef: float = 0.04,
    **batch: Unpack[Batch],
) -> Loss:
    """GRPO (Shao et al. 2024, equations 3 and 4): normalised group rewards, PPO's clip, the mean of responses' means.

    The clip range is 0.2. With ``ref_log_probs`` the paper's KL estimate, k3, is added with its coefficient, 0.04.
    """
    config = _config("grpo", batch, eps_clip, eps_clip_high, kl_loss_coef)
    return algorithm_loss(config, log_probs, mask, **batch)


@_described
def dr_grpo_loss(
    log_probs: Tokens,
    mask: Tokens | None = None,
    *,
    loss_divisor: float,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    kl_loss_coef: float = 0.0,
    **batch: Unpack[Batch],
) -> Loss:
    """Dr.GRPO (Liu et al. 2025, listing 1): no standard deviation, and each response's sum over one constant.

    ``loss_divisor`` is that constant, in the paper the largest number of a response's tokens. The clip range is 0.2.
    """
    settings: dict[str, Any] = {"disable_grpo_std_normalization": True, "loss_divisor": loss_divisor}
    config = _config("grpo", batch, eps_clip, eps_clip_high, kl_loss_coef, **settings)
    return algorithm_loss(config, log_probs, mask, **batch)


@_described
def dapo_loss(
    log_probs: Tokens,
    mask: Tokens | None = None,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = 0.28,
    kl_loss_coef: float = 0.0,
    **batch: Unpack[Batch],
) -> Loss:
    """DAPO (Yu et al. 2025, equation 8): GRPO clipped at 0.2 and 0.28, with the mean over all tokens.

    The paper's mean is over the tokens of each prompt's group, here it is over those of the step. Filtering groups of
    equal rewards, and the reward for overlong responses, are the sampler's part.
    """
    config = _config("grpo", batch, eps_clip, eps_clip_high, kl_loss_coef, calculate_per_token_loss=True)
    return algorithm_loss(config, log_probs, mask, **batch)


@_described
def gspo_loss(
    log_probs: Tokens,
    mask: Tokens | None = None,
    *,
    eps_clip: float = 3e-4,
    eps_clip_high: float | None = 4e-4,
    kl_loss_coef: float = 0.0,
    **batch: Unpack[Batch],
) -> Loss:
    """GSPO (Zheng et al. 2025, equation 5): one ratio per sequence, and therefore narrow bounds, 3e-4 and 4e-4."""
    config = _config("gspo", batch, eps_clip, eps_clip_high, kl_loss_coef)
    return algorithm_loss(config, log_probs, mask, **batch)


@_described
def cispo_loss(
    log_probs: Tokens,
    mask: Tokens | None = None,
    *,
    eps_clip: float = 1.0,
    eps_clip_high: float | None = 4.0,
    kl_loss_coef: float = 0.0,
    **batch: Unpack[Batch],
) -> Loss:
    """CISPO (MiniMax 2025, equations 4 and 5): clipped importance weights, and every token keeps its gradient.

    ``eps_clip`` is 1, which means without a lower bound, as in the paper, which does not give its upper one; 1 + 4,
    the default, is usual. The paper's mean is over the tokens of each prompt's group, here over those of the step.
    """
    config = _config("cispo", batch, eps_clip, eps_clip_high, kl_loss_coef, calculate_per_token_loss=True)
    return algorithm_loss(config, log_probs, mask, **batch)


@_described
def ppo_loss(
    log_probs: Tokens,
    mask: Tokens | None = None,
    *,
    new_values: Tokens | None = None,
    gamma: float = 1.0,
    lambd: float = 0.95,
    value_clip: float = 0.2,
    value_coef: float = 1.0,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    kl_loss_coef: float = 0.0,
    **batch: Unpack[Batch],
) -> Loss:
    """PPO (Schulman et al. 2017, equations 7 and 9): the surrogate clipped at 0.2, a mean over tokens; a critic's loss.

    ``rewards`` and ``values``, those from before the update, give the advantages (GAE; γ and λ are those of Ziegler et
    al. 2019); group ids are not needed. With ``new_values``, under the critic being trained, ``value_coef`` times its
    clipped squared error is added, and the metrics have ``value_loss`` and ``value_clipfrac``.
    """
    config = _config(
        "ppo", batch, eps_clip, eps_clip_high, kl_loss_coef, gamma=gamma, lambd=lambd, calculate_per_token_loss=True
    )
    if new_values is None:
        return algorithm_loss(config, log_probs, mask, **batch)
    values = batch.get("values")
    if values is None or batch.get("rewards") is None:
        raise ConfigError("the critic's loss needs rewards, and values from before the update")
    policy = batch.copy()
    if batch.get("advantages") is not None:  # the policy's; rewards and values are the critic's alone
        policy["rewards"] = policy["values"] = None
    loss, metrics = algorithm_loss(config, log_probs, mask, **policy)
    rows = _Rows.of(log_probs, mask, batch)
    critic_loss, found = value_objective(
        values_T=rows.flat("new_values", new_values),
        old_values_T=rows.flat("values", values),
        returns_T=rows.estimated(config).returns_T,
        weights_T=rows.weights(config),
        value_clip=value_clip,
    )
    loss = loss + value_coef * critic_loss
    return Loss(loss, {**metrics, **found, "loss": loss.detach()})


@_described
def dpo_loss(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    ref_chosen_log_probs: Tensor | None = None,
    ref_rejected_log_probs: Tensor | None = None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    num_pairs: int | None = None,
) -> Loss:
    """DPO (Rafailov et al. 2023, equation 7) on log-probs that are summed over each response's tokens, all [P].

    Sum them in fp32 or better. Where the tokens' log-probs are at hand, :func:`slime_core.ops.dpo_pair_loss` keeps more
    digits for long responses. Without the reference's, it is left out.

    Args:
        chosen_log_probs: Of the preferred responses under the policy; ``ref_chosen_log_probs`` under the reference.
        rejected_log_probs: Of the other responses, likewise.
        ref_chosen_log_probs: See ``chosen_log_probs``.
        ref_rejected_log_probs: See ``rejected_log_probs``.
        beta: β, above 0: how much a departure from the reference costs.
        label_smoothing: The probability that a label is the wrong way round (conservative DPO; Mitchell 2023).
        num_pairs: Pairs of the whole optimizer step, where this is one of its micro-batches.

    Returns:
        The mean over the pairs, and the metrics of :func:`slime_core.ops.preference_objective`.

    Raises:
        ConfigError: β or the smoothing is outside its range, or only one of the reference's two is given.
        DataError: The shapes differ.
    """
    if (ref_chosen_log_probs is None) != (ref_rejected_log_probs is None):
        raise ConfigError("give the reference's log-probs of the chosen and of the rejected responses, or of neither")
    chosen_P, rejected_P = widen(chosen_log_probs), widen(rejected_log_probs)
    given = [chosen_P, rejected_P, ref_chosen_log_probs, ref_rejected_log_probs]
    if len({tensor.shape for tensor in given if tensor is not None}) != 1 or chosen_P.dim() != 1:
        shapes = [list(tensor.shape) for tensor in given if tensor is not None]
        raise DataError(
            f"DPO takes one summed log-prob per response, in tensors of one length; got the shapes {shapes}"
        )
    if ref_chosen_log_probs is not None and ref_rejected_log_probs is not None:
        chosen_P, rejected_P = chosen_P - ref_chosen_log_probs.detach(), rejected_P - ref_rejected_log_probs.detach()
    found = dpo_of_log_ratios(chosen_P, rejected_P, beta, label_smoothing)
    return Loss(*preference_objective(*found, global_pairs=len(chosen_P) if num_pairs is None else num_pairs))


def _config(
    estimator: str, batch: Batch, eps_clip: float, eps_clip_high: float | None, kl_loss_coef: float, **settings: Any
) -> AlgorithmConfig:
    with_reference = batch.get("ref_log_probs") is not None
    settings |= {"advantage_estimator": estimator, "eps_clip": eps_clip, "eps_clip_high": eps_clip_high}
    settings |= {"use_kl_loss": True, "kl_loss_coef": kl_loss_coef} if with_reference else {}
    return _checked_config(**settings)


@functools.lru_cache(maxsize=64)
def _checked_config(**settings: Any) -> AlgorithmConfig:
    """A config is checked once, not in every step."""
    return AlgorithmConfig(**settings)


def _numbered(group_ids: Ids) -> Tensor:
    """Integers that are equal where the ids are [B]."""
    if isinstance(group_ids, Tensor):
        return group_ids
    numbers: dict[object, int] = {}
    plain = [one.item() if isinstance(one, Tensor | np.generic) else one for one in group_ids]
    return torch.tensor([numbers.setdefault(one, len(numbers)) for one in plain])


@dataclass(frozen=True)
class _Rows:
    """The batch as one row of T tokens, whatever shape it came in."""

    batch: Batch
    log_probs_T: Tensor
    lengths: Lengths
    size: int
    shape: torch.Size | None
    mask_T: Tensor

    @classmethod
    def of(cls, log_probs: Tokens, mask: Tokens | None, batch: Batch) -> _Rows:
        lengths = batch.get("lengths")
        sizes: Lengths
        if not isinstance(log_probs, Tensor):
            if lengths is not None:
                raise DataError(
                    "lengths are for numbers per token in one row; tensors in a list have theirs: leave it out"
                )
            log_probs_T, sizes = torch.cat(list(log_probs)), [len(row) for row in log_probs]
            size, shape = len(log_probs), None
        elif log_probs.dim() == 2 and lengths is None:
            log_probs_T, sizes = log_probs.reshape(-1), log_probs.shape[1]
            size, shape = len(log_probs), log_probs.shape
        elif log_probs.dim() == 1 and lengths is not None:
            log_probs_T, sizes, size, shape = log_probs, lengths, len(lengths), log_probs.shape
        else:
            raise DataError(
                f"log_probs have shape {list(log_probs.shape)}; give [sequences, tokens], a list of tensors, or one "
                "row of all tokens with lengths"
            )
        rows = cls(batch, log_probs_T, sizes, size, shape, log_probs_T)
        wide = torch.promote_types(log_probs_T.dtype, torch.float32)
        mask_T = torch.ones_like(log_probs_T, dtype=wide) if mask is None else rows.flat("mask", mask).to(wide)
        return replace(rows, mask_T=mask_T)

    @property
    def old(self) -> Tensor:
        old_T = self.maybe("old_log_probs")
        return self.log_probs_T.detach() if old_T is None else old_T

    def flat(self, name: str, values: Tokens | NDArray[Any]) -> Tensor:
        """Numbers per token as [T]."""
        if isinstance(values, np.ndarray):
            values = torch.as_tensor(values, device=self.log_probs_T.device)
        if isinstance(values, Tensor):
            flat_T, fits, given = values.reshape(-1), values.shape == self.shape, list(values.shape)
        else:
            rows = [torch.as_tensor(row, device=self.log_probs_T.device) for row in values]
            if any(row.dim() != 1 for row in rows):
                raise DataError(
                    f"{name} is a list of {len(rows)} tensors or numbers of the shapes "
                    f"{sorted({tuple(row.shape) for row in rows})}; give one row of tokens for each of the "
                    f"{self.size} sequences"
                )
            flat_T, given = torch.cat(rows), [len(row) for row in rows]
            fits = self.shape is None and given == self.lengths
        if not fits:
            kind = f"the lengths {self.lengths}" if self.shape is None else f"the shape {list(self.shape)}"
            raise DataError(f"{name} must come as log_probs do, in {kind}; got {given}")
        return flat_T

    def maybe(self, name: str) -> Tensor | None:
        """Numbers per token of the batch, if they are in it."""
        values: Any = self.batch.get(name)
        return None if values is None else self.flat(name, values)

    def advantages(self, config: AlgorithmConfig) -> Tensor:
        """One number per token [T] or sequence [B]."""
        given, custom = self.batch.get("advantages"), self.batch.get("estimator") is not None
        if given is None:
            custom = custom or config.custom_advantage_function_path is not None
            outcome = config.estimator.is_outcome and not (custom or config.normalize_advantages)
            if outcome and not config.advantages_need_log_probs:
                return self.rewards(config)
            return self.estimated(config).advantages_T
        if custom or config.advantages_need_log_probs or config.normalize_advantages:
            raise ConfigError(
                "advantages were given, which --kl-coef, --use-opd, --normalize-advantages and estimators would "
                "change; give rewards instead, or leave these out"
            )
        if not isinstance(given, Tensor) and all(np.ndim(one) == 0 for one in given):
            given = torch.as_tensor(given, dtype=self.mask_T.dtype, device=self.log_probs_T.device)
        if isinstance(given, Tensor) and given.shape == (self.size,):
            return given
        if isinstance(given, Tensor) and given.dim() == 1 and self.shape != given.shape:
            raise DataError(
                f"advantages has {len(given)} numbers for {self.size} sequences; give one each, or per token"
            )
        return self.flat("advantages", given)

    def rewards(self, config: AlgorithmConfig) -> Tensor:
        """The rewards as the estimator takes them [B]."""
        name, rewards, group_ids = config.advantage_estimator, self.batch.get("rewards"), self.batch.get("group_ids")
        grouped = config.centres_rewards
        if rewards is None or (group_ids is None and grouped):
            raise ConfigError(f"{name} needs advantages, or rewards{' and group_ids' if grouped else ''}")
        for given, values in (("rewards", rewards), ("group_ids", group_ids)):
            shape = [self.size] if values is None else list(getattr(values, "shape", [len(values)]))
            if shape != [self.size]:
                raise DataError(f"{given} has the shape {shape}; give one of each of the {self.size} sequences")
        ids = torch.arange(self.size) if group_ids is None else _numbered(group_ids)
        if grouped and self.size and len(torch.unique(ids)) == len(ids):
            raise DataError(
                "every group has one sequence, so that every advantage would be 0; sequences that answer the same "
                "prompt must have the same group id, and be in one call"
            )
        found = estimator_rewards(
            name, rewards, ids, normalize=grouped, divide_by_std=not config.disable_grpo_std_normalization
        )
        return torch.as_tensor(found, dtype=self.mask_T.dtype, device=self.log_probs_T.device)

    def estimated(self, config: AlgorithmConfig) -> Advantages:
        estimator, path = self.batch.get("estimator"), config.custom_advantage_function_path
        if estimator is None and path is not None:
            estimator = load_function(path, "--custom-advantage-function-path", arguments=("inputs",))
        return policy_advantages(
            config,
            rewards_N=self.rewards(config),
            mask_T=self.mask_T,
            lengths=[self.lengths] * self.size if isinstance(self.lengths, int) else self.lengths,
            old_log_probs_T=self.old,
            ref_log_probs_T=self.maybe("ref_log_probs"),
            teacher_log_probs_T=self.maybe("teacher_log_probs"),
            values_T=self.maybe("values"),
            estimator=estimator,
        )

    def weights(self, config: AlgorithmConfig) -> Tensor:
        """The tokens' weights in the loss, as :func:`slime_core.ops.loss_weights` has them [T]."""
        tokens, sequences = self.batch.get("num_tokens"), self.batch.get("num_sequences")
        if config.calculate_per_token_loss:
            return self.mask_T / (self.mask_T.sum().clamp(min=1) if tokens is None else max(tokens, 1))
        count = max(self.size if sequences is None else sequences, 1)
        if config.loss_divisor is not None:
            return self.mask_T / (config.loss_divisor * count)
        lengths_N = sequence_lengths(self.lengths, self.mask_T)
        return scaled(self.mask_T, 1 / (sequence_sum(self.mask_T, lengths_N).clamp(min=1) * count), lengths_N)

    def pg_weights(self, config: AlgorithmConfig) -> Tensor | None:
        """Those of a custom reducer of the policy loss [T]."""
        tokens, sequences = self.batch.get("num_tokens"), self.batch.get("num_sequences")
        if config.custom_pg_loss_reducer_function_path is None:
            return None
        return reducer_weights(
            config,
            self.mask_T,
            self.lengths,
            global_trajectories=self.size if sequences is None else sequences,
            global_tokens=int(self.mask_T.sum()) if tokens is None else tokens,
        )
