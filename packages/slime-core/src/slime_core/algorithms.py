"""The losses and the advantage estimators by name, a row each: what flags, checks, plans and trainers go by.

A new loss is a row of :data:`LOSSES`, and a function in the table of `slime_megatron.step.losses`. A new estimator is a
row of :data:`ADVANTAGE_ESTIMATORS`, and where none of those that are there will do, a function in the table of
`slime_core.ops.advantages` or of `slime_core.ops.objective`. The first row of each is the default. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from slime_core.errors import ConfigError
from slime_core.needs import Need, given
from slime_core.words import either


@dataclass(frozen=True, kw_only=True)
class LossType:
    """A row about a value of ``--loss-type``. What is not said is not so.

    Attributes:
        name: The value.
        help: Its part of the flag's help.
        trains_on: Generated samples with a reward; or rows of a data set: conversations, or pairs of two samples each.
        is_policy_gradient: It cannot be had without advantages, and tokens whose advantage is 0 add nothing to it.
        is_custom: A function of the user computes it.
        value_head: The model gives a number per token in place of log-probs.
        has_reference: It compares with a reference model, without a KL term too.
        reference_unless: The setting that leaves that model out.
        settings: Settings that have an effect with this loss alone, or with others that have them here too.
        programs: Parts of the names of other launchers' programs that train by it.
    """

    name: str
    help: str = ""
    trains_on: Literal["samples", "conversations", "pairs"] = "samples"
    is_policy_gradient: bool = False
    is_custom: bool = False
    value_head: bool = False
    has_reference: bool = False
    reference_unless: str | None = None
    settings: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()

    @property
    def on_data(self) -> bool:
        """Whether it trains on rows of a data set."""
        return self.trains_on != "samples"

    @property
    def on_pairs(self) -> bool:
        """Whether it trains on preference pairs: two samples each."""
        return self.trains_on == "pairs"


@dataclass(frozen=True, kw_only=True)
class EstimatorType:
    """A row about a value of ``--advantage-estimator``. What is not said is not so.

    Attributes:
        name: The value.
        estimate: Its function's name in the table of `slime_core.ops.advantages`.
        baseline: What is taken off a reward: the mean of its group's, or of the others of its group. Without one,
            groups do not matter.
        divides: The result is divided by the group's standard deviation.
        needs_critic: Advantages come from the values of a critic.
        is_whitened: Its paper has advantages whitened, and it is refused without that.
        sequence_ratio: A response has one policy ratio, in place of one per token.
        token_loss: Its function's name in the table of `slime_core.ops.objective`.
        settings: Settings that have an effect only with estimators that have them here; the function takes them.
        ignores: Settings of all estimators that have no effect with this one.
        paper_bounds: The clip range of its paper, as flags, where the default is far from it.
        paper_sums: Its paper sums over the tokens of a response.
    """

    name: str
    estimate: str = "outcome"
    baseline: Literal["group", "others"] | None = None
    divides: bool = False
    needs_critic: bool = False
    is_whitened: bool = False
    sequence_ratio: bool = False
    token_loss: str = "clipped_ratio"
    settings: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()
    paper_bounds: str | None = None
    paper_sums: bool = False

    @property
    def is_outcome(self) -> bool:
        """Whether every token has its response's reward for an advantage."""
        return self.estimate == "outcome"

    @property
    def is_relative(self) -> bool:
        """Whether a group of one sample has an advantage of 0."""
        return self.baseline is not None


_LOSSES = (
    LossType(name="policy_loss", help="the policy gradient", is_policy_gradient=True),
    LossType(
        name="sft_loss", help="the cross-entropy of conversations (sft)", trains_on="conversations", programs=("sft",)
    ),
    LossType(
        name="dpo_loss",
        help="DPO",
        trains_on="pairs",
        has_reference=True,
        reference_unless="dpo_reference_free",
        settings=("dpo_beta", "dpo_label_smoothing", "dpo_reference_free"),
        programs=("dpo",),
    ),
    LossType(
        name="rm_loss", help="a reward model's loss", trains_on="pairs", value_head=True, programs=("reward", "_rm")
    ),
    LossType(name="custom_loss", help="a custom loss", is_custom=True, settings=("custom_loss_function_path",)),
)

_ESTIMATORS = (
    EstimatorType(name="grpo", baseline="group", divides=True),
    EstimatorType(
        name="gspo",
        baseline="group",
        divides=True,
        sequence_ratio=True,
        paper_bounds="--eps-clip 3e-4 --eps-clip-high 4e-4",
    ),
    EstimatorType(
        name="cispo",
        baseline="group",
        divides=True,
        token_loss="clipped_weight",
        ignores=("eps_clip_c",),
        paper_bounds="no lower bound, --eps-clip 1, and a larger upper one, such as --eps-clip-high 4",
    ),
    EstimatorType(name="ppo", estimate="gae", needs_critic=True, settings=("gamma", "lambd")),
    EstimatorType(name="reinforce_plus_plus", estimate="returns", is_whitened=True, settings=("gamma",)),
    EstimatorType(name="reinforce_plus_plus_baseline", baseline="group", is_whitened=True),
    EstimatorType(name="rloo", baseline="others", paper_sums=True),
)


LOSSES: Mapping[str, LossType] = {row.name: row for row in _LOSSES}
ADVANTAGE_ESTIMATORS: Mapping[str, EstimatorType] = {row.name: row for row in _ESTIMATORS}

Row = TypeVar("Row", LossType, EstimatorType)


def estimator_row(name: str) -> EstimatorType:
    """The row of that name; raises `ConfigError` if there is none."""
    if name not in ADVANTAGE_ESTIMATORS:
        raise ConfigError(f"the advantage estimator {name} is unknown; allowed: {', '.join(ADVANTAGE_ESTIMATORS)}")
    return ADVANTAGE_ESTIMATORS[name]


def names(table: Mapping[str, Row], wanted: Callable[[Row], bool]) -> tuple[str, ...]:
    """The names of some rows, in the table's order. Raises ValueError if there are none, for nothing can need that."""
    if not (found := tuple(name for name, row in table.items() if wanted(row))):
        raise ValueError("no row of the table is wanted")
    return found


def loss_that(wanted: Callable[[LossType], bool]) -> Need:
    """One of some losses, as what a flag needs."""
    return given("loss_type", *names(LOSSES, wanted))


def estimator_that(wanted: Callable[[EstimatorType], bool]) -> Need:
    """One of some estimators, likewise."""
    return given("advantage_estimator", *names(ADVANTAGE_ESTIMATORS, wanted))


def losses_in_words() -> str:
    """The losses by what they train on, for help."""
    help_on: dict[str, list[str]] = {"samples": [], "conversations": [], "pairs": [], "custom": []}
    for row in LOSSES.values():
        help_on["custom" if row.is_custom else row.trains_on].append(row.help)
    samples, conversations, pairs, custom = map(either, help_on.values())
    return (
        f"{samples} on generated samples; on rows of --prompt-data, {conversations}, {pairs} of preference pairs; "
        f"or {custom}"
    )
