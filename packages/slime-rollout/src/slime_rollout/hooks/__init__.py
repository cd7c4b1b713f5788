"""User-defined hooks by their flags: found and checked before a run, but not called (see `hooks.contracts`).

What finds a hook is imported only if the hook is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from slime_core.errors import ConfigError
from slime_core.flags import flag_values
from slime_core.hooks import HookArgs
from slime_rollout.config import BUILT_IN_ROLLOUTS, RolloutConfig
from slime_rollout.eval_sets import read_eval_sets
from slime_rollout.strict_yaml import load_yaml

__all__ = ["HOOKS", "GivenHook", "Hook", "check_hooks", "given_hooks", "hook_args_of"]


@dataclass(frozen=True)
class Hook:
    """A kind of hook: the field of its path, what finds and checks it, and further fields that its calls depend on.

    ``finder`` is a function or class of this package, which is called with the configuration and, if it ``takes_args``,
    with the hooks' ``args``.
    """

    field: str
    finder: str
    settings: tuple[str, ...] = ()
    takes_args: bool = True

    @property
    def flag(self) -> str:
        """The flag that gives the path."""
        return "--" + self.field.replace("_", "-")

    def key(self, config: RolloutConfig) -> list[Any]:
        """The path and those fields; equal where two configurations have the same hook."""
        flags = flag_values(config)
        path = flags[self.field]
        return [None if path in BUILT_IN_ROLLOUTS else path, *(flags[name] for name in self.settings)]

    def load(self, config: RolloutConfig, hook_args: HookArgs) -> Any:
        """Import the finder, and have it find and check the hook. Raises `ConfigError` if it cannot be used."""
        find = resolve_name(f"slime_rollout.{self.finder}")
        return find(config, hook_args) if self.takes_args else find(config)


@dataclass(frozen=True)
class GivenHook:
    """A hook that the settings of the run or of a held-out set name; ``of`` names the set in messages, if any."""

    kind: Hook
    config: RolloutConfig
    of: str = ""

    @property
    def name(self) -> str:
        """The flag and the path."""
        path = flag_values(self.config)[self.kind.field]
        return f"{self.of}{self.kind.flag} {path if isinstance(path, str) else ' '.join(path)}"

    def load(self, hook_args: HookArgs) -> Any:
        """Find it and check its arguments. Raises ConfigError if it cannot be used."""
        try:
            return self.kind.load(self.config, hook_args)
        except ConfigError as error:
            raise ConfigError(f"{self.of}{error}") from error


def hook_args_of(config: RolloutConfig, flags: Mapping[str, Any] | None = None) -> HookArgs:
    """The ``args`` of user-defined functions: flags by name, and the parameters of ``--custom-config-path``.

    ``flags`` are all flags of a run; by default those of ``config``.

    Raises:
        ConfigError: The file cannot be read, is not a mapping from names, or has the name of a flag.
    """
    values = HookArgs.from_configs(config) if flags is None else HookArgs(flags)
    path, flag = config.hooks.custom_config_path, "--custom-config-path"
    if path is None:
        return values
    found = load_yaml(flag, path)
    if not isinstance(found, dict) or not all(isinstance(name, str) and name.isidentifier() for name in found):
        raise ConfigError(f"{flag} {path} is not a mapping from names to values; write lines such as `max_calls: 3`")
    if taken := [name for name in found if name in values]:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in taken)
        raise ConfigError(f"{flag} {path} sets {', '.join(taken)}, which are flags; give {given}, or rename them")
    return values | found


def given_hooks(config: RolloutConfig) -> list[GivenHook]:
    """The hooks that a configuration names: the run's, then the different ones of held-out sets."""
    found = [GivenHook(hook, config) for hook in HOOKS]
    for one in read_eval_sets(config):
        other = [hook for hook in HOOKS if hook.key(one.config) != hook.key(config)]
        found += [GivenHook(hook, one.config, f"held-out set {one.name}: ") for hook in other]
    return [given for given in found if given.kind.key(given.config)[0] not in (None, ())]


def check_hooks(config: RolloutConfig, hook_args: HookArgs) -> None:
    """Find every hook that a configuration names, and check its arguments, before anything is started.

    Raises:
        ConfigError: One does not load, is of the wrong kind, or does not take the arguments it will be called with.
    """
    for hook in given_hooks(config):
        hook.load(hook_args)


HOOKS = (
    Hook("data_source_path", "data:find_data_source", takes_args=False),
    Hook("buffer_filter_path", "data:find_data_source", takes_args=False),
    Hook("custom_generate_function_path", "generate:make_generate", takes_args=False),
    Hook("rollout_function_path", "hooks.rollout_function:find_functions"),
    Hook("eval_function_path", "hooks.rollout_function:find_functions"),
    Hook("custom_rm_path", "rewards:make_scorer", ("custom_rm_kwargs", "group_rm")),
    Hook("dynamic_sampling_filter_path", "filters:make_filter"),
    Hook("rollout_sample_hook_path", "hooks.rollouts:SampleHooks"),
    Hook("rollout_sample_filter_path", "hooks.rollouts:RolloutHooks"),
    Hook("rollout_all_samples_process_path", "hooks.rollouts:RolloutHooks"),
    Hook("custom_reward_post_process_path", "hooks.rollouts:RewardPostProcess"),
    Hook("rollout_data_postprocess_path", "hooks.train_data:DataPostprocess"),
    Hook("custom_rollout_log_function_path", "hooks.rollouts:RolloutHooks"),
    Hook("custom_eval_rollout_log_function_path", "hooks.rollouts:RolloutHooks"),
)
