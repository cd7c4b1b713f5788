"""`DataService`: batches of a run that generates nothing: rows of a data set, tokenized, epoch after epoch."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any, Literal

from slime_core.errors import ConfigError, SlimeError
from slime_core.metrics import length_metrics
from slime_core.types import Account, Group, Progress, RolloutBatch, Status
from slime_rollout.config import RolloutConfig
from slime_rollout.data.chat import load_tokenizer
from slime_rollout.data.chat_mask import ChatEncoder, EncodedChat
from slime_rollout.data.dataset import Dataset
from slime_rollout.data.files import PromptFile, RawRow
from slime_rollout.data.ledger import Fate
from slime_rollout.data.offline import (
    PreferenceDataset,
    PreferenceEncoder,
    PreferenceFields,
    SftDataset,
    SftFields,
    encode_conversation,
    encode_pair,
    read_preferences,
    read_sft,
)
from slime_rollout.data.source import RolloutDataSource
from slime_rollout.eval_sets import data_files, read_eval_sets
from slime_rollout.limits import ModelLimits

Rows = Literal["conversations", "pairs"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Settings of a run on a data set. ``max_length`` is the longest row in tokens; a longer one loses its end."""

    rollout: RolloutConfig
    rows: Rows
    max_length: int | None


class DataService:
    """The rows of ``--prompt-data`` as batches of groups: a conversation, or a chosen and a rejected response.

    Its state is the data's position. :meth:`progress` may be called from another thread at any time.
    """

    def __init__(self, spec: DataSpec) -> None:
        self._spec = spec
        self._source: RolloutDataSource | None = None
        self._rows = 0
        self._held_out: dict[str, list[Group]] = {}
        self._progress = Progress()

    def start(self) -> list[str]:
        """Read, check and tokenize everything; returns what was left out or cut, a line each.

        Raises `ConfigError` if the tokenizer cannot be used, `DataError` if a file is invalid or has nothing to train
        on.
        """
        config = self._spec.rollout
        self._progress = Progress(note="reading the data")
        tokenizer = load_tokenizer(config.data.hf_checkpoint, trust_remote_code=config.data.trust_remote_code)
        parts = [self._load(path, config, tokenizer) for path in config.data.prompt_paths]
        dataset: Dataset[Any] = Dataset.join(parts, config.data.prompt_data_weights)
        self._rows, notices = len(dataset), [*dataset.notices]
        for held_out in read_eval_sets(config):
            with held_out.named():
                found = self._load(held_out.path, held_out.config, tokenizer)
            notices += found.notices
            self._held_out[held_out.name] = found.groups(self._group_size)
        self._source = RolloutDataSource(
            dataset,
            samples_per_prompt=self._group_size,
            shuffle=config.data.rollout_shuffle,
            seed=config.data.rollout_seed,
        )
        self._progress = Progress(note="the data is read; the trainers are loading")
        return notices

    def generate(self, rollout_id: int) -> RolloutBatch:
        """The next ``--rollout-batch-size`` rows; the metric ``epoch`` counts epochs up to their last."""
        started, source = time.perf_counter(), self._started
        groups = source.get_samples(self._spec.rollout.selection.rollout_batch_size)
        source.ledger.settle(groups, Fate.TRAINED)
        return RolloutBatch(
            rollout_id=rollout_id,
            groups=groups,
            metrics=row_metrics(groups) | {"epoch": (groups[-1][0].group_index + 1) / self._rows},
            seconds={"data": time.perf_counter() - started},
        )

    def held_out(self, iteration: int) -> dict[str, RolloutBatch]:
        """All rows of each held-out set, by its name."""
        return {name: RolloutBatch(rollout_id=iteration, groups=groups) for name, groups in self._held_out.items()}

    def account(self) -> Account:
        """The fate of all rows so far."""
        return Account(self._started.ledger.counts, self._started.check_ledger())

    def state_dict(self) -> dict[str, Any]:
        """The data's position."""
        return self._started.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the row that came next when ``state`` was saved; a `DataError` if it is of other rows."""
        self._started.load_state_dict(state)

    def cancel(self) -> None:
        """Nothing takes long."""

    def progress(self) -> Progress:
        """The present step."""
        return self._progress

    def close(self) -> None:
        """Nothing has to be stopped."""

    @property
    def _group_size(self) -> int:
        return 2 if self._spec.rows == "pairs" else 1

    @property
    def _started(self) -> RolloutDataSource:
        if self._source is None:
            raise SlimeError("the data is not read; call start() first")
        return self._source

    def _load(self, path: str, config: RolloutConfig, tokenizer: Any) -> Dataset[Any]:
        encoder, how = _encoding(config, self._spec.rows, self._spec.max_length, tokenizer)
        kind = PreferenceDataset if self._spec.rows == "pairs" else SftDataset
        return kind.load(path, encoder, on_bad_data=config.data.on_bad_data, **how)


def encode_row(raw: RawRow, spec: DataSpec, tokenizer: Any) -> list[EncodedChat]:
    """The samples of a row of ``--prompt-data``; a `DataError` if it is bad, a `ConfigError` if the tokenizer is."""
    encoder, how = _encoding(spec.rollout, spec.rows, spec.max_length, tokenizer)
    encode: Any = encode_pair if spec.rows == "pairs" else encode_conversation
    return list(encode(raw, encoder, **how)[1:])


def _encoding(config: RolloutConfig, rows: Rows, max_length: int | None, tokenizer: Any) -> tuple[Any, dict[str, Any]]:
    """The encoder of rows, and its settings."""
    chat, how = None, {"max_length": max_length, "limits": ModelLimits.of(config.data.hf_checkpoint)}
    if tokenizer.chat_template or rows == "conversations":
        chat = ChatEncoder(tokenizer, template_kwargs=config.data.chat_template_kwargs)
    if rows == "pairs":
        return PreferenceEncoder(tokenizer, chat), {"fields": PreferenceFields.of(config), **how}
    last = config.data.loss_mask_type == "distill_qwen"
    return chat, {"fields": SftFields.of(config), "last_turn_only": last, **how}


def row_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Named numbers that describe a batch of rows: tokens of each sample, those trained on, and the share cut."""
    samples = [sample for group in groups for sample in group]
    trained = [float(sum(sample.trained_mask)) for sample in samples]
    return length_metrics([len(sample.tokens) for sample in samples], "total_len", percentiles=()) | {
        "trained_tokens": sum(trained),
        "trained_tokens/mean": statistics.fmean(trained),
        "truncated_ratio": sum(sample.status == Status.TRUNCATED for sample in samples) / len(samples),
    }


def check_rows(config: RolloutConfig, rows: Rows) -> dict[str, int]:
    """Read every file that a run on a data set will read and check its rows, without a tokenizer.

    Returns usable rows per path as given: those that are trained on, then the held-out sets. Raises `ConfigError` if
    rows cannot be streamed, `DataError` if a file is missing or breaks the format: a conversation without an
    assistant's message, a pair without one of its responses, or with two that are the same.
    """
    if config.data.streaming_data:
        raise ConfigError("--streaming-data reads prompts; rows that are trained on are read whole: leave it out")
    counts = {}
    for path, own, named in data_files(config):
        with named:
            if rows == "pairs":
                counts[path] = len(read_preferences(path, PreferenceFields.of(own), on_bad_data=own.data.on_bad_data))
            else:
                counts[path] = len(read_sft(path, SftFields.of(own), on_bad_data=own.data.on_bad_data))
    return counts


def count_rows(paths: Sequence[str]) -> int:
    """Rows of data sets, usable or not; blank lines are none. A `DataError` if a file cannot be read."""
    return sum(sum(1 for _ in PromptFile(path).rows()) for path in paths)
