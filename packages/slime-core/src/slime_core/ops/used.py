"""Which arguments of a batch a loss uses, as data: an argument that nothing uses is refused, not dropped.

A row is an argument and its needs, as a flag's are (`slime_core.needs`): of a configuration's settings, or of other
arguments of the same call. Several must all hold.
"""

from __future__ import annotations

from collections.abc import Mapping

from slime_core.algorithms import estimator_that
from slime_core.config import RELATIVE, AlgorithmConfig
from slime_core.errors import ConfigError
from slime_core.needs import Condition, Need, either, given, unless

_ENGINES = ("use_tis", "use_mis", "use_opsm", "use_rollout_logprobs", "get_mismatch_metrics")
_ARGUMENTS = ("advantages", "estimator")
_USED: dict[str, tuple[Need, ...]] = {
    "rewards": (unless("advantages"),),
    "group_ids": (unless("advantages"), RELATIVE, unless("disable_rewards_normalization")),
    "old_log_probs": (unless("use_rollout_logprobs") | given("kl_coef") | given("use_opd"),),
    "ref_log_probs": (given("use_kl_loss") | given("kl_coef"),),
    "rollout_log_probs": (Need(tuple(Condition(name) for name in _ENGINES)),),
    "teacher_log_probs": (given("use_opd"),),
    "values": (
        unless("advantages"),
        estimator_that(lambda row: row.needs_critic) | given("custom_advantage_function_path") | given("estimator"),
    ),
}
"""Arguments that are not here are always used: entropies are a metric, counts are those of the step."""

_SETTINGS = {
    "kl_loss_coef": "ref_log_probs",
    "gamma": "rewards",
    "lambd": "rewards",
    "value_clip": "new_values",
    "value_coef": "new_values",
}
"""Settings of the losses with a name, and the argument that each is about."""


def check_used(config: AlgorithmConfig, batch: Mapping[str, object]) -> None:
    """Refuse arguments that a loss of this configuration does not use.

    Raises:
        ConfigError: One is given; with what uses it.
    """
    for name, needs in _USED.items():
        if batch.get(name) is None:
            continue
        for need in needs:
            if not any(_holds(one, config, batch) for one in need.any_of if isinstance(one, Condition)):
                raise ConfigError(_refusal(name, need))


def check_settings(loss: str, arguments: Mapping[str, object]) -> None:
    """Refuse settings that were given to a loss without what they are about.

    Raises:
        ConfigError: One is given; with the argument that is missing.
    """
    for name, needed in _SETTINGS.items():
        if arguments.get(name) and arguments.get(needed) is None:
            raise ConfigError(
                f"{name} {arguments[name]} has no effect in {loss} without {needed}; give {needed}, or leave {name} out"
            )


def _holds(one: Condition, config: AlgorithmConfig, batch: Mapping[str, object]) -> bool:
    if one.dest in _ARGUMENTS:
        found = batch.get(one.dest) is not None
    else:
        value = getattr(config, one.dest)
        found = value in one.values if one.values else bool(value)
    return found != one.absent


def _refusal(name: str, need: Need) -> str:
    if need.is_without:
        return f"{name} has no effect with {either(need.flags)}, which was given too; leave one of them out"
    return (
        f"{name} has no effect in this loss; algorithm_loss uses it with {either(need.flags)} in its AlgorithmConfig: "
        "set that, or leave it out"
    )
