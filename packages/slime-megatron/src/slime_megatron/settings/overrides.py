"""The settings of each role that is trained. No torch here."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from slime_core.errors import ConfigError
from slime_core.flags import collected_problems
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.trainer_hooks import HOOKS

TRAINED = ("actor", "critic")
"""Roles with an optimizer, whose settings may be overridden."""

_SHARED = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
    *("micro_batch_size", "global_batch_size", "use_dynamic_batch_size", "max_tokens_per_gpu", "share_prompts"),
    *HOOKS,
    *("deterministic_mode", "megatron_args", "trainer_threads", "distributed_timeout_minutes"),
)
"""The layout, the micro-batches, the hooks, and what is the process's."""

_CHOSEN = (
    *("lora_rank", "lora_alpha", "lora_target_modules"),
    *("only_train_params_name_list", "freeze_params_name_list"),
)
"""Settings that say which weights of the actor train. The critic trains whole unless overrides say otherwise."""


def role_config(config: MegatronConfig, role: str, overrides: Mapping[str, Mapping[str, Any]]) -> MegatronConfig:
    """The settings of a role that is trained: the critic's flags in the places of the actor's, then the overrides.

    What is wrong with ``config`` itself, which a launcher reports, is not said again.

    Raises:
        ConfigError: An override is of an unknown role or setting, of what all roles share, or has a wrong value.
    """
    if problems := list(_problems(role, overrides)):
        raise ConfigError("\n".join(problems))
    own, whose = dict(overrides.get(role, {})), f"overrides of the role {role}" if overrides.get(role) else role
    if role == "critic":
        critic: dict[str, Any] = {
            **dict.fromkeys(_CHOSEN),
            "load": config.critic_load or config.load or config.ref_load,
            "save": config.critic_save or (config.save and f"{config.save}/critic"),
            "lr": config.lr if config.critic_lr is None else config.critic_lr,
        }
        if config.critic_lr_warmup_iters is not None:
            critic["lr_warmup_iters"] = config.critic_lr_warmup_iters
        own = critic | own
    with collected_problems() as known:
        dataclasses.replace(config)
    with collected_problems() as found:  # a flag of the actor's may have no effect on the critic
        made = dataclasses.replace(config, **own)
    if new := [f"{whose}: {line}" for line in found if line not in known]:
        raise ConfigError("\n".join(new))
    return made


def _problems(role: str, overrides: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name in overrides:
        if name not in TRAINED:
            yield f"overrides of the role {name}: no such role is trained; give {' or '.join(TRAINED)}"
    hints = typing.get_type_hints(MegatronConfig)
    for name, value in overrides.get(role, {}).items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=3)
            close = f"near names: {', '.join(near)}" if near else "leave it out"
            yield f"overrides of the role {role}: unknown setting {name}; {close}"
        elif name in _SHARED:
            yield f"overrides of the role {role}: {name} is the same for all roles; give it as a flag"
        elif not has_type(value, hints[name]):
            yield f"overrides of the role {role}: {name} {value!r} must be {shown(hints[name])}"


def has_type(value: Any, hint: Any) -> bool:
    """Whether a field with this annotation takes a value."""
    kinds = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return any(has_type(value, kind) for kind in kinds)
    if origin is typing.Literal:
        return value in kinds
    if origin in (list, tuple):
        return isinstance(value, list | tuple) and all(has_type(item, kinds[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def shown(hint: Any) -> str:
    """An annotation in words."""
    kinds = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(map(shown, kinds))
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(str, kinds))
    if kinds:
        return f"a list of {shown(kinds[0])}"
    name = str(getattr(hint, "__name__", hint))
    return {"NoneType": "None", "bool": "True or False"}.get(name, name)
