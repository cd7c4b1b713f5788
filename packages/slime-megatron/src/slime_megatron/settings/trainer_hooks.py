"""User-defined functions that a trainer rank calls around its own work. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slime_core.errors import ConfigError, SlimeError
from slime_core.hooks import HookArgs
from slime_megatron.settings.config import flag_name

INIT = "custom_megatron_init_path"
BEFORE_LOG_PROBS = "custom_megatron_before_log_prob_hook_path"
BEFORE_TRAIN_STEP = "custom_megatron_before_train_step_hook_path"
HOOKS: Mapping[str, tuple[str, ...]] = {
    INIT: ("args",),
    BEFORE_LOG_PROBS: ("args", "model", "store_prefix"),
    BEFORE_TRAIN_STEP: ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"),
}
"""The settings that name them, and the arguments that they are called with: upstream's."""
PREFIXES = {"reference": "ref_", "teacher": "teacher_"}
"""``store_prefix`` of a hook before log-probs, by role; empty for the policy."""


class TrainerHooks:
    """The hooks of a rank, by the settings that name them; those that are not given do nothing."""

    def __init__(self, found: Mapping[str, Callable[..., Any]], args: HookArgs) -> None:
        self._found, self._args = found, args

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call the hook of a setting with ``args`` and ``arguments``.

        Raises:
            ConfigError: It raised.
        """
        if (hook := self._found.get(name)) is None:
            return
        try:
            hook(self._args, *arguments)
        except SlimeError:
            raise
        except Exception as error:
            raise ConfigError(f"{flag_name(name)} raised {type(error).__name__}: {error}") from error
