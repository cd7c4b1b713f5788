"""How many tokens the rows of data sets have, and which of them the model cannot take, before anything is started.

A file is tokenized whole where that takes a few seconds, and what was found is kept in the user's cache directory, by
the file's path, size and time, the model's tokenizer and config, and the settings of rows. Of a larger file, and of one
that is streamed, each row is checked when its turn comes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from slime_core.errors import DataError
from slime_core.files import write_whole
from slime_rollout.config import RolloutConfig
from slime_rollout.data.chat import PromptEncoder, check_files, load_tokenizer, with_checked_template
from slime_rollout.data.dataset import RowEncoder, all_too_long, longest_prompt
from slime_rollout.data.files import PromptFile, split_slice
from slime_rollout.data.rows import usable
from slime_rollout.data_service import DataSpec, encode_row
from slime_rollout.eval_sets import data_files, read_eval_sets
from slime_rollout.limits import ModelLimits, stop_problem, tokens_beyond

SECONDS = 5.0
"""Longest time that a command's rows are tokenized for."""
_FORM = 1  # of what is kept; counted up where the same row may be counted otherwise
_ENCODED_BY = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".py")  # files of a model that tokens depend on

Length = int | None | DataError
"""Tokens of a row; ``None`` for one that is left out; or what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class RowLengths:
    """How many rows a file has, and how long they are."""

    used: int  # rows that a run uses
    left_out: int  # others that can be used: those over `--rollout-max-prompt-len`, or with nothing to train on
    longest: int  # tokens of the longest row that is used


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The rows of each file by its path as given, as far as they were counted, and what else a user should know."""

    files: dict[str, RowLengths] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    @property
    def longest(self) -> int:
        """Tokens of the longest row of all files."""
        return max((found.longest for found in self.files.values()), default=0)


def measure_prompts(config: RolloutConfig, *, seconds: float = SECONDS) -> Measured:
    """Tokenize the prompts of a run that generates, held-out sets too, for at most so many ``seconds``.

    Raises `ConfigError` if the tokenizer cannot be used, `DataError` if a row cannot be, or no row is left.
    """
    held_out, counting = read_eval_sets(config), _Counting(config, seconds)
    for path, own, named in data_files(config):
        with named:
            if own is config and config.data.streaming_data:
                counting.notices.append(f"{path} is streamed: the length of a prompt is known when its turn comes")
            else:
                # What a prompt's tokens, and whether it can be used, depend on.
                settings = repr((own.data, own.rewards, own.takes_messages, longest_prompt(own)))
                counting.count(path, own, settings, functools.partial(_prompts, config=own))
    for text in dict.fromkeys([*config.sampling.rollout_stop, *(text for one in held_out for text in one.stop)]):
        counting.check_stop(text)
    return counting.found()


def measure_rows(spec: DataSpec, *, seconds: float = SECONDS) -> Measured:
    """The same for rows that are trained on as they are: conversations, or preference pairs."""
    config = spec.rollout
    counting = _Counting(config, seconds)
    for path, own, named in data_files(config):
        with named:
            settings = repr((own.data, spec.rows, spec.max_length))
            counting.count(path, own, settings, functools.partial(_rows, spec=replace(spec, rollout=own)))
    return counting.found()


def check_stop_ids(config: RolloutConfig) -> None:
    """Raise `DataError` where a token id that is to end responses is none of the model's."""
    limits = ModelLimits.of(config.data.hf_checkpoint)
    given = {"--rollout-stop-token-ids": config.sampling.rollout_stop_token_ids}
    given |= {f"held-out set {one.name}: stop_token_ids": one.stop_token_ids for one in read_eval_sets(config)}
    for what, tokens in given.items():
        if problem := limits.token_problem(tokens):
            raise DataError(f"{what}: {problem.partition(';')[0]}, so it ends no response; leave it out")


class _Counting:
    """Counts the rows of files until the time is up; the tokenizer is loaded for the first that the cache lacks."""

    def __init__(self, config: RolloutConfig, seconds: float) -> None:
        self._config, self._seconds, self._left = config, seconds, seconds
        self._files: dict[str, RowLengths] = {}
        self.notices: list[str] = []

    def found(self) -> Measured:
        limits = ModelLimits.of(self._config.data.hf_checkpoint)
        beyond = self._kept("beyond", lambda: tokens_beyond(limits, self._tokenizer) or "")
        return Measured(files=self._files, notices=[*([beyond] if beyond else []), *dict.fromkeys(self.notices)])

    def check_stop(self, text: str) -> None:
        """Note a stop text that cannot end a response."""
        if problem := self._kept(f"stop {text!r}", lambda: stop_problem(text, self._tokenizer) or ""):
            self.notices.append(problem)

    def count(
        self, path: str, config: RolloutConfig, settings: str, lengths: Callable[[str, Any], Iterable[Length]]
    ) -> None:
        """Count a file, whose rows have ``lengths`` that depend on ``settings``; a `DataError` if it is bad."""
        made = self._kept(f"{_of_file(path)} {settings}", functools.partial(self._counted, path, config, lengths))
        if made is None:
            self.notices.append(
                f"{path}: not all rows were tokenized within {self._seconds:g} s; each is checked when its turn comes"
            )
        elif isinstance(made, str):
            raise DataError(made)
        else:
            found = self._files[path] = RowLengths(**made)
            if found.left_out:
                total = found.used + found.left_out
                self.notices.append(
                    f"{path}: {found.left_out} of {total} rows are left out, too long or without a token to train on"
                )

    def _counted(
        self, path: str, config: RolloutConfig, lengths: Callable[[str, Any], Iterable[Length]]
    ) -> dict[str, int] | str | None:
        """The counts, the message of an error, or nothing where the time is up."""
        tokenizer = self._tokenizer  # loading it takes a second that does not count
        try:
            found = usable(path, self._in_time(lengths(path, tokenizer)), config.data.on_bad_data, logs=False)
        except TimeoutError:
            return None
        except DataError as error:
            return str(error)
        used = [length for length in found if length is not None]
        if not used:
            return f"{path}: none of the {len(found)} rows has a token to train on"
        return asdict(RowLengths(used=len(used), left_out=len(found) - len(used), longest=max(used)))

    def _in_time(self, lengths: Iterable[Length]) -> Iterator[Length]:
        start = None
        try:
            for length in lengths:
                start = start or time.monotonic()  # the start of processes does not count
                if time.monotonic() - start > self._left:
                    raise TimeoutError
                yield length
        finally:
            self._left = max(self._left - (time.monotonic() - (start or time.monotonic())), 0.0)

    def _kept(self, key: str, make: Callable[[], Any]) -> Any:
        """The cached value of ``key``, or else that of ``make``, which is kept unless it is ``None``."""
        file = _cache_file(_of_model(self._config), key)
        with contextlib.suppress(OSError, ValueError):
            return json.loads(file.read_bytes())
        if (value := make()) is not None:
            with contextlib.suppress(OSError, RuntimeError):  # then the next process counts again
                file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(file, json.dumps(value))
        return value

    @functools.cached_property
    def _tokenizer(self) -> Any:
        data = self._config.data
        found = load_tokenizer(data.hf_checkpoint, trust_remote_code=data.trust_remote_code)
        return with_checked_template(found)


def _prompts(path: str, tokenizer: Any, *, config: RolloutConfig) -> Iterator[Length]:
    limit = config.data.rollout_max_prompt_len
    encoding = RowEncoder(config, PromptEncoder.of(config, tokenizer), config.data.num_data_workers)
    lengths = []
    with contextlib.closing(encoding):
        for _, outcome in encoding.outcomes(PromptFile(path).rows()):
            if isinstance(outcome, DataError):
                yield outcome
            else:
                lengths.append(len(outcome.tokens))
                yield None if limit is not None and lengths[-1] > limit else lengths[-1]
    if limit is not None and lengths and min(lengths) > limit:
        raise all_too_long(path, lengths, limit)


def _rows(path: str, tokenizer: Any, *, spec: DataSpec) -> Iterator[Length]:
    for _, raw in PromptFile(path).rows():
        try:
            sides = encode_row(raw, spec, tokenizer)
        except DataError as error:
            yield error
            continue
        differ = len(sides) == 1 or sides[0].tokens != sides[1].tokens
        yield max(len(side.tokens) for side in sides) if differ and all(1 in side.loss_mask for side in sides) else None


def _of_file(path: str) -> list[Any]:
    """A file as given, and the sizes and times of its parts."""
    name = Path(split_slice(path)[0])
    parts = sorted(name.iterdir()) if name.is_dir() else [name]
    return [path, str(name.resolve()), *((part.name, part.stat().st_size, part.stat().st_mtime_ns) for part in parts)]


def _of_model(config: RolloutConfig) -> list[Any]:
    """The files of the model that tokens depend on, by size and time."""
    directory = Path(config.data.hf_checkpoint)
    check_files(directory)
    files = sorted(file for file in directory.iterdir() if file.suffix in _ENCODED_BY)
    stats = ((file.name, file.stat()) for file in files)
    return [str(directory.resolve()), *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)]


def _cache_file(model: Sequence[Any], key: str) -> Path:
    digest = hashlib.sha256(json.dumps([_FORM, model, key]).encode()).hexdigest()[:24]
    directory = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    with contextlib.suppress(RuntimeError):  # no home directory
        directory = directory.expanduser()
    return directory / "slime" / f"rows-{digest}.json"
