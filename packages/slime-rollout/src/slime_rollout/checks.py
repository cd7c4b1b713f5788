"""The face of what a launcher asks before a run starts: rows, their tokens, held-out sets, hooks, the model's limits.

Importing this imports nothing else: a name loads its module when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_rollout.data import EncodedChat, PromptEncoder, check_prompt_data
    from slime_rollout.data.chat import template_tokenizer
    from slime_rollout.data.files import PromptFile, RawRow, split_slice
    from slime_rollout.data.notes import data_notes
    from slime_rollout.data.rows import check_row
    from slime_rollout.data_service import check_rows, count_rows, encode_row
    from slime_rollout.eval_sets import read_eval_sets
    from slime_rollout.hook_config import HELD_OUT
    from slime_rollout.hooks import HOOKS, GivenHook, check_hooks, given_hooks
    from slime_rollout.limits import wrong_on_cpu
    from slime_rollout.measure import Measured, check_stop_ids, measure_prompts, measure_rows
    from slime_rollout.run_file import ENDS, FLAG, OFF, check_tables, read_run_file, words_of
    from slime_rollout.strict_yaml import load_yaml
else:
    from slime_core.faces import face

    __all__, __getattr__, __dir__ = face(
        __name__,
        {
            "data": "EncodedChat PromptEncoder check_prompt_data",
            "data.chat": "template_tokenizer",
            "data.files": "PromptFile RawRow split_slice",
            "data.notes": "data_notes",
            "data.rows": "check_row",
            "data_service": "check_rows count_rows encode_row",
            "eval_sets": "read_eval_sets",
            "hook_config": "HELD_OUT",
            "hooks": "HOOKS GivenHook check_hooks given_hooks",
            "limits": "wrong_on_cpu",
            "measure": "Measured check_stop_ids measure_prompts measure_rows",
            "run_file": "ENDS FLAG OFF check_tables read_run_file words_of",
            "strict_yaml": "load_yaml",
        },
    )
