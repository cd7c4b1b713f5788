"""Prompt files in, groups of fresh samples out."""

from slime_core.types import Account
from slime_rollout.data.chat import PromptEncoder, load_tokenizer
from slime_rollout.data.chat_mask import ChatEncoder, EncodedChat
from slime_rollout.data.choose import (
    CustomSource,
    SourceCalls,
    checked_groups,
    find_data_source,
    load_source,
    make_data_source,
)
from slime_rollout.data.dataset import PromptDataset, RowEncoder, TokenizedPrompt
from slime_rollout.data.group_state import copied_group
from slime_rollout.data.ledger import Fate, Ledger
from slime_rollout.data.offline import (
    PreferenceBatch,
    PreferenceDataset,
    PreferenceEncoder,
    PreferenceFields,
    PreferenceRow,
    SftDataset,
    SftFields,
    SftRow,
    preference_batch,
    read_preferences,
    read_sft,
)
from slime_rollout.data.rows import PromptRow, check_prompt_data, check_prompt_file
from slime_rollout.data.source import AccountedSource, RolloutDataSource, RolloutDataSourceWithBuffer
from slime_rollout.data.stream import StreamingPrompts

__all__ = [
    "Account",
    "AccountedSource",
    "ChatEncoder",
    "CustomSource",
    "EncodedChat",
    "Fate",
    "Ledger",
    "PreferenceBatch",
    "PreferenceDataset",
    "PreferenceEncoder",
    "PreferenceFields",
    "PreferenceRow",
    "PromptDataset",
    "PromptEncoder",
    "PromptRow",
    "RolloutDataSource",
    "RolloutDataSourceWithBuffer",
    "RowEncoder",
    "SftDataset",
    "SftFields",
    "SftRow",
    "SourceCalls",
    "StreamingPrompts",
    "TokenizedPrompt",
    "check_prompt_data",
    "check_prompt_file",
    "checked_groups",
    "copied_group",
    "find_data_source",
    "load_source",
    "load_tokenizer",
    "make_data_source",
    "preference_batch",
    "read_preferences",
    "read_sft",
]
