"""User-defined functions as flags, and what is given with one of them. Nothing here imports torch."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

from slime_core.flags import Config, flag
from slime_core.needs import GENERATES, ROLLOUTS, SAMPLES, SCORES, TRAINS, Need, given

HELD_OUT = (SCORES, given("eval_prompt_data") | given("eval_config"))


def any_given(*names: str) -> Need:
    """One of several flags."""
    return functools.reduce(operator.or_, map(given, names))


CALLED = any_given("custom_generate_function_path", "rollout_function_path", "eval_function_path", "eval_config")
"""Functions that generate; a held-out set may have one of its own."""
TIMED_HOOKS = any_given(
    *("data_source_path", "buffer_filter_path", "dynamic_sampling_filter_path", "rollout_sample_hook_path"),
    *("rollout_sample_filter_path", "rollout_all_samples_process_path", "custom_reward_post_process_path"),
    *("rollout_data_postprocess_path", "custom_rollout_log_function_path", "custom_eval_rollout_log_function_path"),
)
HOOKS = TIMED_HOOKS | any_given(
    *("custom_generate_function_path", "rollout_function_path", "eval_function_path", "custom_rm_path", "eval_config"),
    *("custom_loss_function_path", "custom_advantage_function_path", "custom_tis_function_path"),
    *("custom_pg_loss_reducer_function_path", "custom_megatron_init_path"),
    *("custom_megatron_before_log_prob_hook_path", "custom_megatron_before_train_step_hook_path"),
)


@dataclass(frozen=True, kw_only=True)
class HookConfig(Config, needs=GENERATES):
    """User-defined functions that no other record has a place for, and the parameters of all of them."""

    custom_config_path: str | None = flag(
        None,
        help="YAML or JSON file of parameters for user-defined functions, which see them as args.NAME",
        metavar="FILE",
        needs=HOOKS,
    )
    rollout_sample_hook_path: tuple[str, ...] = flag(
        (),
        help="functions (args, sample, rollout_id=, evaluation=) that see each sample before it is scored",
        metavar="PATH",
    )
    rollout_sample_filter_path: str | None = flag(
        None,
        help="function (args, groups) that marks samples of a rollout with remove_sample: not trained on",
        metavar="PATH",
    )
    rollout_all_samples_process_path: str | None = flag(
        None,
        help="function (args, all_groups, get_samples) that sees all scored groups, those that were dropped too",
        metavar="PATH",
    )
    custom_reward_post_process_path: str | None = flag(
        None,
        help="function (args, samples) to raw rewards and rewards, in place of the estimator's normalization",
        metavar="PATH",
        needs=(SAMPLES, ROLLOUTS),
    )
    rollout_data_postprocess_path: str | None = flag(
        None,
        help="function (args, rollout_id, rollout_data) that changes what is trained on, before it is split over ranks",
        metavar="PATH",
        needs=TRAINS,
    )
    custom_rollout_log_function_path: str | None = flag(
        None,
        help="function (rollout_id, args, samples, extra_metrics, rollout_time); true leaves out the usual metrics",
        metavar="PATH",
        may_change=True,
        needs=(GENERATES, ROLLOUTS),
    )
    custom_eval_rollout_log_function_path: str | None = flag(
        None,
        help="function (rollout_id, args, data, extra_metrics); true leaves out the usual metrics of an evaluation",
        metavar="PATH",
        may_change=True,
        needs=HELD_OUT,
    )
