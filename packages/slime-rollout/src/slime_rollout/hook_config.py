"""User-defined functions as flags, and what is given with one of them. Nothing here imports torch."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

from slime_core.flags import Config, flag
from slime_core.needs import GENERATES, ROLLOUTS, SAMPLES, SCORES, TRAINS, Need, given

HELD_OUT = (SCORES, given("eval_prompt_data") | given("eval_config"))


def function_flag(help: str, default: tuple[str, ...] | None = None, **more: Any) -> Any:
    """A flag whose value is the path of a user-defined function or class."""
    return flag(default, help=help, metavar="PATH", **more)


def time_limit(default: float | None, help: str, **more: Any) -> Any:
    """A flag of seconds above 0; another value may be given when a run goes on."""
    return flag(default, help=help, unit="seconds", above=0, may_change=True, **more)


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
    rollout_sample_hook_path: tuple[str, ...] = function_flag(
        "functions (args, sample, rollout_id=, evaluation=) that see each sample before it is scored", ()
    )
    rollout_sample_filter_path: str | None = function_flag(
        "function (args, groups) that marks samples of a rollout with remove_sample: not trained on"
    )
    rollout_all_samples_process_path: str | None = function_flag(
        "function (args, all_groups, get_samples) that sees all scored groups, those that were dropped too"
    )
    custom_reward_post_process_path: str | None = function_flag(
        "function (args, samples) to raw rewards and rewards, in place of the estimator's normalization",
        needs=(SAMPLES, ROLLOUTS),
    )
    rollout_data_postprocess_path: str | None = function_flag(
        "function (args, rollout_id, rollout_data) that changes what is trained on, before it is split over ranks",
        needs=TRAINS,
    )
    custom_rollout_log_function_path: str | None = function_flag(
        "function (rollout_id, args, samples, extra_metrics, rollout_time); true leaves out the usual metrics",
        may_change=True,
        needs=(GENERATES, ROLLOUTS),
    )
    custom_eval_rollout_log_function_path: str | None = function_flag(
        "function (rollout_id, args, data, extra_metrics); true leaves out the usual metrics of an evaluation",
        may_change=True,
        needs=HELD_OUT,
    )
