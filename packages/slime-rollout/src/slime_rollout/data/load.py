"""The prompts to train on, read as the flags say."""

from __future__ import annotations

import contextlib

from slime_core.hooks import HookArgs
from slime_rollout.config import RolloutConfig
from slime_rollout.data.chat import PromptEncoder
from slime_rollout.data.choose import make_data_source
from slime_rollout.data.dataset import PromptDataset
from slime_rollout.data.encode import RowEncoder
from slime_rollout.data.source import AccountedSource
from slime_rollout.data.stream import StreamingPrompts


def load_source(config: RolloutConfig, encoder: PromptEncoder, hook_args: HookArgs) -> AccountedSource:
    """The prompts to train on, in memory or as a stream, in the data source that the flags choose.

    Args:
        config: Where they are.
        encoder: The tokenizer.
        hook_args: Every flag by its name, for a custom data source.

    Raises:
        ConfigError: The data source cannot be used.
        DataError: A prompt file breaks its format; of one that is streamed, only what opening it shows.
    """
    encoding = RowEncoder(config, encoder, config.num_data_workers)
    with contextlib.ExitStack() as stack:
        stack.callback(encoding.close)
        dataset: PromptDataset | StreamingPrompts
        if config.streaming_data:
            dataset = StreamingPrompts(config, encoder, encoding=encoding)
        else:
            parts = [PromptDataset.load(path, config, encoder, encoding=encoding) for path in config.prompt_paths]
            dataset = PromptDataset.join(parts, config.prompt_data_weights)
        source = make_data_source(config, dataset, hook_args)
        if config.streaming_data:
            stack.pop_all()
    return source
