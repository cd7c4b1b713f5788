"""The held-out sets of a run, each with its own settings, from flags and from the file of ``--eval-config``.

What a set is read, sampled and scored with is looked for in its own entry of the file, then in the file's defaults, in
the flags of evaluation (``--eval-temperature`` …), and in those of rollouts. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slime_core.errors import ConfigError, SlimeError
from slime_core.eval_metrics import set_name_problem
from slime_rollout.eval_config import KEYS, read_eval_config

if TYPE_CHECKING:
    from slime_rollout.config import RolloutConfig

FLAG = "--eval-prompt-data"
_DATA_FILE = re.compile(r"\.(?:jsonl|json|gz|bz2|xz|zst|parquet)(?:@\[.*\])?\Z", re.IGNORECASE)

# Settings of the rows, of the reward, and how responses are made: fields of `RolloutConfig` by the same name.
_OF_CONFIG = (
    *("input_key", "label_key", "metadata_key", "tool_key", "apply_chat_template", "apply_chat_template_kwargs"),
    *("rm_type", "custom_rm_path", "custom_rm_kwargs", "group_rm", "rm_url", "reward_key"),
    "custom_generate_function_path",
)
# Settings of sampling: fields of `RolloutConfig` by the same name with `rollout_` before it.
_OF_ROLLOUTS = (
    *("temperature", "top_p", "top_k", "max_response_len", "max_context_len", "max_prompt_len"),
    *("stop", "stop_token_ids"),
)
# Those for which evaluation has a flag of its own: `eval_` before the name.
_OF_EVALUATION = (
    *("temperature", "top_p", "top_k", "max_response_len", "max_context_len", "max_prompt_len", "min_new_tokens"),
    *("input_key", "label_key", "tool_key", "reward_key"),
)
_NO_REWARD = {"rm_type": None, "custom_rm_path": None, "custom_rm_kwargs": None, "group_rm": False, "rm_url": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSet:
    """A held-out set, and how it is read, sampled and scored.

    Attributes:
        name: What its metrics are called after.
        path: Its prompt file, perhaps with a slice.
        n_samples_per_eval_prompt: Samples of each prompt.
        temperature: 0 is greedy.
        top_p: Nucleus of probability kept.
        top_k: Likeliest tokens kept, -1 for all.
        max_response_len: Longest response, in tokens.
        max_context_len: Longest prompt and response together, in tokens; ``None`` leaves it to the engine.
        min_new_tokens: Tokens before which no response ends by itself.
        stop: Strings that end a response.
        stop_token_ids: Token ids that end a response, besides the model's own.
        metadata_overrides: Entries that are written over those of every prompt's metadata.
        config: The run's settings with this set's own ones of rows and reward in their place, and no held-out sets.

    Raises:
        ConfigError: Two settings contradict each other.
    """

    name: str
    path: str
    n_samples_per_eval_prompt: int
    temperature: float
    top_p: float
    top_k: int
    max_response_len: int
    max_context_len: int | None
    min_new_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    metadata_overrides: Mapping[str, Any]
    config: RolloutConfig

    def __post_init__(self) -> None:
        if self.min_new_tokens > self.max_response_len:
            raise ConfigError(
                f"min_new_tokens {self.min_new_tokens} is more than max_response_len {self.max_response_len}; "
                "raise that, or lower this"
            )

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Put the set's name before the message of whatever goes wrong inside."""
        try:
            yield
        except SlimeError as error:
            error.args = (f"held-out set {self.name}: {error}", *error.args[1:])
            raise


def make_eval_sets(config: RolloutConfig) -> tuple[EvalSet, ...]:
    """The held-out sets: those of ``--eval-prompt-data``, then those of ``--eval-config``, in the order given.

    Raises:
        ConfigError: A name has no path, two sets have one name, or the file or a setting cannot be used.
    """
    base = _settings_of_flags(config)
    sets = [
        _make_set(f"{FLAG}: set {name}", {**base, "name": name, "path": path}, config) for name, path in _pairs(config)
    ]
    if config.eval_config is not None:
        given = read_eval_config(config.eval_config)
        defaults = _merge(base, given.defaults)
        sets += [
            _make_set(f"{config.eval_config}: set {entry['name']}", _merge(defaults, entry), config)
            for entry in given.sets
        ]
    if repeated := [name for name, count in Counter(one.name for one in sets).items() if count > 1]:
        flags = FLAG if config.eval_config is None else f"--eval-config {config.eval_config}"
        flags += f" and {FLAG}" if config.eval_config is not None and config.eval_prompt_data else ""
        raise ConfigError(f"{flags}: the name {repeated[0]} is given twice; give every set its own name")
    return tuple(sets)


def _pairs(config: RolloutConfig) -> list[tuple[str, str]]:
    """Names and paths of ``--eval-prompt-data``."""
    given = config.eval_prompt_data
    if len(given) == 1:
        return [("eval", given[0])]
    if len(given) % 2:
        raise ConfigError(f"{FLAG} got {len(given)} values ({' '.join(given)}); give pairs of NAME PATH, or one PATH")
    pairs = list(zip(given[::2], given[1::2], strict=True))
    for name, path in pairs:
        if "/" in name or _DATA_FILE.search(name):
            raise ConfigError(f"{FLAG} {name} {path}: {name} looks like a path; give pairs of NAME PATH, or one PATH")
    return pairs


def _settings_of_flags(config: RolloutConfig) -> dict[str, Any]:
    """What a set has that says nothing itself."""
    settings: dict[str, Any] = {"min_new_tokens": 0, "metadata_overrides": {}}
    settings |= {key: getattr(config, key) for key in _OF_CONFIG}
    if config.opd_type is not None:
        settings["rm_url"] = None  # the teacher's
    settings |= {key: getattr(config, f"rollout_{key}") for key in _OF_ROLLOUTS}
    settings["n_samples_per_eval_prompt"] = config.n_samples_per_eval_prompt
    own = {key: getattr(config, f"eval_{key}") for key in _OF_EVALUATION}
    return settings | {key: value for key, value in own.items() if value is not None}


def _merge(settings: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """``own`` settings over others. Another reward, or no template, leaves behind what the others said about theirs."""
    merged = dict(settings)
    if "rm_type" in own or "custom_rm_path" in own:
        merged |= _NO_REWARD
    if own.get("apply_chat_template") is False:
        merged["apply_chat_template_kwargs"] = "{}"
    return {**merged, **own}


def _make_set(where: str, settings: dict[str, Any], config: RolloutConfig) -> EvalSet:
    name = settings["name"]
    if problem := set_name_problem(name):
        raise ConfigError(f"{where}: the name {name!r} {problem}; choose another")
    own = {key: settings.pop(key) for key in _OF_CONFIG}
    own["rollout_max_prompt_len"] = settings.pop("max_prompt_len")
    try:
        config = dataclasses.replace(config, eval_prompt_data=(), eval_config=None, opd_type=None, **own)
        return EvalSet(config=config, **settings)
    except ConfigError as error:
        message = str(error) if where.startswith(FLAG) else _in_keys(str(error))
        raise ConfigError(f"{where}: {message}") from None


def _in_keys(message: str) -> str:
    """A message about flags, with keys of the file in their place where there are some."""

    def key_of(match: re.Match[str]) -> str:
        key = match[1].replace("-", "_")
        return key if key in KEYS else match[0]

    return re.sub(r"--([a-z][a-z-]*)", key_of, message)
