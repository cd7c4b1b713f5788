"""The training half of slime, on Megatron-core. Importing this changes nothing; see `slime_megatron.service`."""

from slime_core.former_names import moved_modules

moved_modules(
    __name__,
    {
        "arguments": "settings.arguments",
        "checkpoint": "checkpoints.find",
        "config": "settings.config",
        "device": "ranks.device",
        "losses": "step.losses",
        "lora": "model.lora",
        "memory": "settings.memory",
        "operations": "settings.operations",
    },
)
