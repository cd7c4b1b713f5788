"""The training half's face to a launcher: its settings, what can be asked before a run starts, and a rank's worker.

Importing this loads no other module: a name loads its own when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_megatron.checkpoints.find import (
        OLD_ACTOR,
        check_checkpoint,
        find_checkpoint,
        iteration_directory,
        may_be_checkpoint,
        teacher_source,
    )
    from slime_megatron.errors import TrainerCheckpointError
    from slime_megatron.settings.arguments import may_change
    from slime_megatron.settings.config import FUSED_ROUTERS, MegatronConfig, flag_name
    from slime_megatron.settings.fits import check_fits
    from slime_megatron.settings.megatron_check import argument_notices, check_megatron_args
    from slime_megatron.settings.megatron_words import field_words, megatron_args, other_words, word_answer
    from slime_megatron.settings.memory import check_memory
    from slime_megatron.settings.operations import flops_model
    from slime_megatron.settings.overrides import TRAINED, role_config
    from slime_megatron.settings.trained_roles import trained_roles
    from slime_megatron.start import FUNCTIONS, check_algorithm, given_functions, start_worker
else:
    from slime_core.faces import face

    __all__, __getattr__, __dir__ = face(
        __name__,
        {
            "checkpoints.find": "OLD_ACTOR check_checkpoint find_checkpoint iteration_directory may_be_checkpoint "
            "teacher_source",
            "errors": "TrainerCheckpointError",
            "settings.arguments": "may_change",
            "settings.config": "FUSED_ROUTERS MegatronConfig flag_name",
            "settings.fits": "check_fits",
            "settings.megatron_check": "argument_notices check_megatron_args",
            "settings.megatron_words": "field_words megatron_args other_words word_answer",
            "settings.memory": "check_memory",
            "settings.operations": "flops_model",
            "settings.overrides": "TRAINED role_config",
            "settings.trained_roles": "trained_roles",
            "start": "FUNCTIONS check_algorithm given_functions start_worker",
        },
    )
