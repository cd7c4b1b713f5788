"""The algorithm's settings, checked when they are built. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slime_core.algorithms import (
    ADVANTAGE_ESTIMATORS,
    LOSSES,
    EstimatorType,
    LossType,
    estimator_that,
    loss_that,
    losses_in_words,
    names,
)
from slime_core.flags import Config, flag
from slime_core.needs import LAGS, TRAINS, given, unless

ESTIMATORS = tuple(ADVANTAGE_ESTIMATORS)
"""The estimators by name. A user-defined one has no name but a function: see :mod:`slime_core.ops.advantages`."""

OTHER_ESTIMATORS = (
    "opo, gpg and pass@k are rewards normalized otherwise, by a function: --custom-reward-post-process-path; in "
    "place of remax, which has a greedy response of each prompt for a baseline, take rloo"
)
OTHER_LOSSES = (
    "sapo, gmpo, clip_cov and kl_cov are a function of yours: custom_loss with --custom-loss-function-path; gspo and "
    "cispo are values of --advantage-estimator"
)
"""Advice to those who ask for estimators or losses of other libraries."""
GROUP_RELATIVE = names(ADVANTAGE_ESTIMATORS, lambda row: row.is_relative)
"""Those that give a group of one sample an advantage of 0."""

LOSS_TYPES = tuple(LOSSES)
"""The losses by name: the values of ``--loss-type``."""

DATA_LOSSES = names(LOSSES, lambda row: row.on_data)
"""Those that are trained on rows of a data set, without rewards."""

PAIR_LOSSES = names(LOSSES, lambda row: row.on_pairs)
"""Those of preference pairs."""

KL_LOSS_TYPES = ("k1", "k2", "k3", "low_var_kl")

POLICY = (TRAINS, loss_that(lambda row: not row.on_data))
"""Needs of the policy loss's flags; a custom loss may look at them."""
ADVANTAGES = (*POLICY, unless("disable_compute_advantages_and_returns"))
OWN_ADVANTAGES = given("custom_advantage_function_path")
CRITIC = (*ADVANTAGES, estimator_that(lambda row: row.needs_critic), unless("custom_advantage_function_path"))
TOKENS = (TRAINS, loss_that(lambda row: not row.on_pairs))
"""The losses that are sums over tokens."""
RELATIVE = estimator_that(lambda row: row.is_relative)
LOG_PROBS = given(
    "loss_type", *names(LOSSES, lambda row: not row.on_data), *names(LOSSES, lambda row: row.has_reference)
)
"""The losses that may need log-probs from before the first step."""
DPO = (TRAINS, loss_that(lambda row: "dpo_beta" in row.settings))

_CUSTOM = names(LOSSES, lambda row: row.is_custom)
_GRADIENTS = names(LOSSES, lambda row: row.is_policy_gradient)
_CRITICS = names(ADVANTAGE_ESTIMATORS, lambda row: row.needs_critic)
_GAMMA = names(ADVANTAGE_ESTIMATORS, lambda row: "gamma" in row.settings)
_LAMBDA = names(ADVANTAGE_ESTIMATORS, lambda row: "lambd" in row.settings)
_WITHOUT_DUAL_CLIP = names(ADVANTAGE_ESTIMATORS, lambda row: "eps_clip_c" in row.ignores)

WEIGHED = (given("use_mis"), unless("mis_mode", "none"))
"""Needs of flags about weights that are not all 1."""

MIS_LEVELS = ("token", "sequence", "geometric")
MIS_MODES = ("truncate", "clip", "mask", "none")
TIS_MODES = ("truncate", "icepop")


@dataclass(frozen=True, kw_only=True)
class MisConfig(Config, needs=given("use_mis")):
    """The importance weights and rejections of :func:`slime_core.ops.mis_weights`.

    Raises:
        ConfigError: A value is outside its range, with the value, the range and what to do.
    """

    mis_level: str = flag(
        "token",
        choices=MIS_LEVELS,
        help="what a weight is the ratio of: the token, the whole sequence (product), or its geometric mean",
    )
    mis_mode: str = flag(
        "truncate",
        choices=MIS_MODES,
        help="weights beyond the bounds: cut at the upper one, cut at both, set to 0; or all weights 1",
    )
    mis_upper_bound: float = flag(2.0, help="upper bound of the importance weights", above=0, needs=WEIGHED)
    mis_lower_bound: float | None = flag(
        None,
        help="lower bound of the weights (clip, mask); 1 / --mis-upper-bound if left out",
        least=0,
        needs=(given("use_mis"), given("mis_mode", "clip", "mask")),
    )
    mis_batch_normalize: bool = flag(False, help="scale the step's weights to a mean of 1", needs=WEIGHED)
    mis_rs_level: str | None = flag(
        None, choices=MIS_LEVELS, help="reject what has a ratio beyond the rejection bounds, at this level"
    )
    mis_rs_upper_bound: float = flag(2.0, help="upper rejection bound", above=0, needs=given("mis_rs_level"))
    mis_rs_lower_bound: float | None = flag(
        None, help="lower rejection bound; 1 / --mis-rs-upper-bound if left out", least=0, needs=given("mis_rs_level")
    )
    mis_veto_threshold: float | None = flag(
        None,
        help="reject a whole sequence if the ratio of one of its tokens is below this",
        above=0,
        most=1,
        advice="1e-4 is usual",
    )

    def contradictions(self) -> Iterator[str]:
        """Lower bounds above the upper ones."""
        for name, (lower, upper) in (("--mis", self.bounds), ("--mis-rs", self.rejection_bounds)):
            if lower > upper:
                yield f"{name}-lower-bound {lower:g} must be at most {name}-upper-bound {upper:g}; set both"

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the weights."""
        return _or_inverse(self.mis_lower_bound, self.mis_upper_bound), self.mis_upper_bound

    @property
    def rejection_bounds(self) -> tuple[float, float]:
        """Lower and upper bound of what is not rejected."""
        return _or_inverse(self.mis_rs_lower_bound, self.mis_rs_upper_bound), self.mis_rs_upper_bound


@dataclass(frozen=True, kw_only=True)
class OffPolicyConfig(MisConfig, needs=POLICY):
    """Corrections for tokens that another policy sampled than the one that trains on them.

    Raises:
        ConfigError: A value is outside its range, or two of them contradict each other.
    """

    use_rollout_logprobs: bool = flag(
        False, help="compare the policy with the engine's log-probs instead of the trainer's before the update"
    )
    keep_old_actor: bool = flag(
        False,
        help="compare the policy with the weights that generated each token, which the trainer keeps copies of in host "
        "memory, instead of those before the update; for asynchronous training",
        needs=(*POLICY, LAGS),
        harmless=True,
    )
    use_tis: bool = flag(
        False, help="multiply each token's loss by its importance weight, trainer over engine (truncated IS)"
    )
    tis_mode: str = flag(
        "truncate",
        choices=TIS_MODES,
        help="weights beyond the bounds: cut to them, or set to 0 (IcePop)",
        needs=given("use_tis"),
    )
    tis_clip: float = flag(2.0, help="upper bound of the importance weights", least=0, needs=given("use_tis"))
    tis_clip_low: float = flag(0.0, help="lower bound of the importance weights", least=0, needs=given("use_tis"))
    custom_tis_function_path: str | None = flag(
        None,
        help="function of upstream's form that weighs and masks tokens in place of --tis-mode, with --use-tis",
        metavar="PATH",
        needs=given("use_tis"),
    )
    use_mis: bool = flag(
        False, help="the same by token, sequence or geometric mean, with rejection and veto (masked IS; --mis-*)"
    )
    use_opsm: bool = flag(
        False, help="leave out sequences of negative advantage that have drifted (off-policy sequence masking)"
    )
    opsm_delta: float = flag(
        1e-4, unit="nats per token", help="largest drift that --use-opsm allows", least=0, needs=given("use_opsm")
    )
    get_mismatch_metrics: bool = flag(False, help="write how differently trainer and engine see the tokens, in detail")

    def contradictions(self) -> Iterator[str]:
        """Bounds that cross, and two corrections of the same thing."""
        yield from super().contradictions()
        if self.tis_clip_low > self.tis_clip:
            yield f"--tis-clip-low {self.tis_clip_low} must be at most --tis-clip {self.tis_clip}"
        if self.use_tis and self.use_mis:
            yield "--use-tis and --use-mis would weigh each token twice; give one of them"
        if self.use_rollout_logprobs and self.keep_old_actor:
            yield "--use-rollout-logprobs and --keep-old-actor both say what the policy is compared with; give one"
        if self.use_rollout_logprobs and (self.use_tis or self.use_mis):
            other = "--use-tis" if self.use_tis else "--use-mis"
            yield f"--use-rollout-logprobs and {other} would both correct for the engine's log-probs; give one of them"

    @property
    def needs_rollout_log_probs(self) -> bool:
        """Whether the samples must carry the engine's log-probs."""
        return self.use_rollout_logprobs or self.use_tis or self.use_mis or self.get_mismatch_metrics

    @property
    def needs_step_sums(self) -> bool:
        """Whether the loss needs sums over the whole step that are known only after log-probs were computed."""
        return self.use_mis and self.mis_batch_normalize


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(OffPolicyConfig, needs=POLICY):
    """How rewards become a loss.

    Raises:
        ConfigError: A value is outside its range, or values contradict each other; with the values and what to do.
    """

    loss_type: str = flag(
        LOSS_TYPES[0],
        choices=LOSS_TYPES,
        help=f"what a step minimises: {losses_in_words()}",
        needs=TRAINS,
        advice=OTHER_LOSSES,
    )
    custom_loss_function_path: str | None = flag(
        None,
        metavar="PATH",
        help=f"pkg.mod.fn or file.py:fn, from inputs to the loss and metrics ({', '.join(_CUSTOM)})",
        needs=(TRAINS, given("loss_type", *_CUSTOM)),
    )
    disable_compute_advantages_and_returns: bool = flag(
        False,
        help="a custom loss takes no advantages; those on rows of a data set never do",
        needs=(TRAINS, unless("loss_type", *_GRADIENTS)),
    )
    advantage_estimator: str = flag(
        ESTIMATORS[0],
        choices=ESTIMATORS,
        help="how rewards become advantages",
        needs=ADVANTAGES,
        advice=OTHER_ESTIMATORS,
    )
    custom_advantage_function_path: str | None = flag(
        None,
        metavar="PATH",
        help="pkg.mod.fn or file.py:fn, from inputs to advantages, in place of the estimator's",
        needs=ADVANTAGES,
    )
    disable_rewards_normalization: bool = flag(
        False, help="leave out subtracting the group's mean reward", needs=(*ADVANTAGES, RELATIVE), harmless=True
    )
    disable_grpo_std_normalization: bool = flag(
        False,
        help="leave out dividing by the group's standard deviation of rewards (Dr.GRPO)",
        needs=(*ADVANTAGES, estimator_that(lambda row: row.divides), unless("disable_rewards_normalization")),
        harmless=True,
    )
    gamma: float = flag(
        1.0,
        help=f"discount of later rewards ({', '.join(_GAMMA)})",
        least=0,
        most=1,
        needs=(*ADVANTAGES, given("advantage_estimator", *_GAMMA) | OWN_ADVANTAGES),
    )
    lambd: float = flag(
        1.0,
        help=f"lambda of generalised advantage estimation ({', '.join(_LAMBDA)})",
        least=0,
        most=1,
        needs=(*ADVANTAGES, given("advantage_estimator", *_LAMBDA) | OWN_ADVANTAGES),
    )
    normalize_advantages: bool = flag(
        False, help="whiten advantages over all trained tokens of a rollout; REINFORCE++ asks for it", needs=ADVANTAGES
    )
    kl_coef: float = flag(
        0.0, help="coefficient of the KL penalty in the reward, for every estimator", least=0, needs=ADVANTAGES
    )
    use_opd: bool = flag(
        False, help="on-policy distillation: add the teacher's log-probs to the advantages", needs=ADVANTAGES[1:]
    )
    opd_kl_coef: float = flag(1.0, help="weight of on-policy distillation", least=0, needs=(TRAINS, given("use_opd")))
    eps_clip: float = flag(
        0.2, help="lower clip range of the policy ratio; the upper one too unless --eps-clip-high is given", least=0
    )
    eps_clip_high: float | None = flag(None, help="upper clip range of the policy ratio (DAPO's clip-higher)", least=0)
    eps_clip_c: float | None = flag(
        None,
        help="most that a token of negative advantage loses, in units of it; above 1 (dual clip)",
        above=1,
        advice="3 is usual",
        needs=(*POLICY, unless("advantage_estimator", *_WITHOUT_DUAL_CLIP)),
    )
    value_clip: float = flag(
        0.2, help=f"how far a critic's value may move from the old one ({', '.join(_CRITICS)})", least=0, needs=CRITIC
    )
    entropy_coef: float = flag(0.0, help="coefficient of the entropy bonus in the loss")
    use_kl_loss: bool = flag(False, help="add the KL divergence to the reference model to the loss")
    kl_loss_coef: float = flag(0.0, help="coefficient of the KL loss", least=0, needs=given("use_kl_loss"))
    kl_loss_type: str | None = flag(
        None,
        choices=KL_LOSS_TYPES,
        help="estimator of the KL divergence; unset: k3 in the loss, k1 in the reward",
        needs=given("use_kl_loss") | given("kl_coef"),
        harmless=True,
    )
    use_unbiased_kl: bool = flag(
        False,
        help="multiply the KL loss by the policy ratio, so that its gradient is right",
        needs=given("use_kl_loss"),
    )
    calculate_per_token_loss: bool = flag(
        False, help="average the loss over all tokens of the step instead of over samples", needs=TOKENS
    )
    loss_divisor: float | None = flag(
        None,
        unit="tokens",
        help="divide each sample's summed loss by this instead of its length (Dr.GRPO)",
        above=0,
        advice="the largest response length is usual",
        needs=TOKENS,
    )
    custom_pg_loss_reducer_function_path: str | None = flag(
        None,
        help="function of upstream's form that sums the policy loss over the tokens in place of the mean over samples",
        metavar="PATH",
    )
    dpo_beta: float = flag(0.1, help="what a departure from the reference costs (DPO)", above=0, needs=DPO)
    dpo_label_smoothing: float = flag(
        0.0,
        help="probability that a preference is the wrong way round (conservative DPO)",
        least=0,
        below=0.5,
        needs=(TRAINS, loss_that(lambda row: "dpo_label_smoothing" in row.settings)),
    )
    dpo_reference_free: bool = flag(
        False,
        help="leave the reference model out of DPO",
        needs=(TRAINS, loss_that(lambda row: "dpo_reference_free" in row.settings)),
    )

    def contradictions(self) -> Iterator[str]:
        """Settings that need, repeat or undo each other."""
        yield from super().contradictions()
        if self.loss.is_custom and self.custom_loss_function_path is None:
            yield f"--loss-type {self.loss_type} needs --custom-loss-function-path, the loss; add that"
        if self.estimator.is_whitened and not self.normalize_advantages:
            yield (
                f"--advantage-estimator {self.advantage_estimator} is defined with whitened advantages; "
                "set --normalize-advantages"
            )
        if self.kl_coef and self.use_kl_loss and self.kl_loss_coef:
            yield (
                f"--kl-coef {self.kl_coef} and --kl-loss-coef {self.kl_loss_coef} would count the KL divergence twice, "
                "in the reward and in the loss; leave one at 0"
            )
        if self.kl_loss_type == "k1" and self.use_kl_loss and self.kl_loss_coef and not self.use_unbiased_kl:
            yield (
                "--kl-loss-type k1 as a loss has a mean gradient of 0, and so holds the policy nowhere; give k3 or k2, "
                "or add --use-unbiased-kl"
            )
        if self.calculate_per_token_loss and self.loss_divisor is not None:
            yield (
                f"--calculate-per-token-loss and --loss-divisor {self.loss_divisor} are two denominators of the loss; "
                "give one of them"
            )
        if self.custom_pg_loss_reducer_function_path is not None and self.loss_divisor is not None:
            yield (
                f"--custom-pg-loss-reducer-function-path and --loss-divisor {self.loss_divisor} both say how the "
                "policy loss is summed; give one of them"
            )

    @property
    def clip_high(self) -> float:
        """The upper clip range: ``eps_clip_high``, or ``eps_clip`` when that is not given."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    @property
    def notices(self) -> tuple[str, ...]:
        """Effects of these settings that a user may not expect, a line each."""
        found = []
        if self.use_kl_loss and not self.kl_loss_coef:
            found.append("--use-kl-loss without --kl-loss-coef: the KL divergence is measured, and changes no weight")
        elif self.use_kl_loss and self.kl_loss_type is None:
            found.append("--kl-loss-type is unset: k3; the upstream system's default, k1, has a mean gradient of 0")
        name, usual = self.advantage_estimator, self.estimator.paper_bounds
        if usual and self.eps_clip == 0.2 and self.eps_clip_high is None:
            found.append(f"{name} with --eps-clip 0.2, the default of PPO: its paper takes {usual}")
        if self.estimator.paper_sums and self.loss_divisor is None and not self.calculate_per_token_loss:
            found.append(f"{name} averages over the tokens of a response; its paper sums over them: --loss-divisor 1")
        return tuple(found)

    @property
    def loss(self) -> LossType:
        """The row of ``loss_type``."""
        return LOSSES.get(self.loss_type) or LossType(name=self.loss_type)

    @property
    def estimator(self) -> EstimatorType:
        """The row of ``advantage_estimator``."""
        return ADVANTAGE_ESTIMATORS.get(self.advantage_estimator) or EstimatorType(name=self.advantage_estimator)

    @property
    def on_data(self) -> bool:
        """Whether the loss is one of rows of a data set."""
        return self.loss.on_data

    @property
    def on_pairs(self) -> bool:
        """Whether the loss is one of preference pairs: two samples each."""
        return self.loss.on_pairs

    @property
    def uses_advantages(self) -> bool:
        """Whether rewards become advantages."""
        return not self.on_data and not self.disable_compute_advantages_and_returns

    @property
    def compares_samples(self) -> bool:
        """Whether advantages are differences of rewards within a group alone, and so 0 where those are equal."""
        own = self.custom_advantage_function_path is not None
        return self.uses_advantages and self.centres_rewards and not (own or self.advantages_need_log_probs)

    @property
    def centres_rewards(self) -> bool:
        """Whether the estimator starts from differences of rewards within a group."""
        return self.estimator.is_relative and not self.disable_rewards_normalization

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs under the reference model enter the loss or the advantages."""
        if self.loss.has_reference:
            unless = self.loss.reference_unless
            return unless is None or not getattr(self, unless)
        return self.uses_advantages and (self.use_kl_loss or self.kl_coef != 0)

    @property
    def needs_critic(self) -> bool:
        """Whether advantages are estimated from the values of a critic."""
        own = self.custom_advantage_function_path is not None
        return self.uses_advantages and self.estimator.needs_critic and not own

    @property
    def advantages_need_log_probs(self) -> bool:
        """Whether advantages depend on log-probs from before the update, and so come after a forward pass."""
        return self.kl_coef != 0 or self.use_opd

    @property
    def zero_advantages_add_nothing(self) -> bool:
        """Whether samples whose advantages are 0 change neither the loss nor its gradient.

        They do where the KL loss or the entropy bonus counts them, or a mean of importance weights over the step; and
        under another loss than the policy's.
        """
        others = self.use_kl_loss or self.entropy_coef != 0 or self.needs_step_sums
        return self.loss.is_policy_gradient and not others

    @property
    def zero_rewards_add_nothing(self) -> bool:
        """The same of samples whose reward, as the estimator takes it, is 0: their advantages are 0 too."""
        own = self.estimator.needs_critic or self.custom_advantage_function_path is not None
        moved = self.normalize_advantages or self.advantages_need_log_probs
        return self.zero_advantages_add_nothing and not (own or moved)


def _or_inverse(lower: float | None, upper: float) -> float:
    return 1 / upper if lower is None else lower
