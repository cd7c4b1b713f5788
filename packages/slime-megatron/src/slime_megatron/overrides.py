"""The settings of each role that is trained. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slime_core.errors import ConfigError
from slime_megatron.config import MegatronConfig

TRAINED = ("actor", "critic")
"""Roles with an optimizer, whose settings may be overridden."""

_SHARED = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
    *("micro_batch_size", "global_batch_size", "use_dynamic_batch_size", "max_tokens_per_gpu", "share_prompts"),
)
"""The layout, and the micro-batches."""

_CHOSEN = (
    *("lora_rank", "lora_alpha", "lora_target_modules"),
    *("only_train_params_name_list", "freeze_params_name_list"),
)
"""What trains of the actor; the critic trains whole unless overrides say otherwise."""


def role_config(config: MegatronConfig, role: str, overrides: Mapping[str, Mapping[str, Any]]) -> MegatronConfig:
    """The settings of a role that is trained: the critic's flags in the places of the actor's, then the overrides.

    Raises:
        ConfigError: An override is of an unknown role or setting, or of what all roles share.
    """
    for name in overrides:
        if name not in TRAINED:
            raise ConfigError(f"overrides of the role {name}: no such role is trained; give {' or '.join(TRAINED)}")
    own = dict(overrides.get(role, {}))
    known = {field.name for field in dataclasses.fields(config)}
    for name in own:
        if name not in known:
            raise ConfigError(f"overrides of the role {role}: unknown setting {name}")
        if name in _SHARED:
            raise ConfigError(f"overrides of the role {role}: {name} is the same for all roles; give it as a flag")
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
    return dataclasses.replace(config, **own)
