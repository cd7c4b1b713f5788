"""Prompt files in, groups of fresh samples out."""

from slime_rollout.data.check import check_prompt_data, check_prompt_file
from slime_rollout.data.dataset import PromptDataset, TokenizedPrompt
from slime_rollout.data.read import read_prompts
from slime_rollout.data.rows import PromptRow, RowFields
from slime_rollout.data.source import RolloutDataSource
from slime_rollout.data.tokenizer import PromptEncoder, load_tokenizer

__all__ = [
    "PromptDataset",
    "PromptEncoder",
    "PromptRow",
    "RolloutDataSource",
    "RowFields",
    "TokenizedPrompt",
    "check_prompt_data",
    "check_prompt_file",
    "load_tokenizer",
    "read_prompts",
]
