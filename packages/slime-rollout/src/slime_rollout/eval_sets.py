"""The held-out sets of a run, each with its own settings, from flags and from the YAML file of ``--eval-config``:

    eval:
      defaults: {temperature: 0.6, max_response_len: 8192}
      datasets:
        - {name: aime, path: aime.jsonl, n_samples_per_eval_prompt: 16, rm_type: math}
        - {name: gsm8k, path: gsm8k.parquet, temperature: 0}

``datasets`` may also be a mapping from name to settings. A setting is looked up in the set's entry, then in the file's
defaults, the flags of evaluation (``--eval-temperature`` …) and those of rollouts. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from slime_core.errors import ConfigError, SlimeError
from slime_core.flags import flag_specs, flag_values
from slime_core.metrics import set_name_problem
from slime_rollout.config import EvalConfig, RolloutConfig
from slime_rollout.strict_yaml import load_yaml

FLAG = "--eval-prompt-data"
FILE_FLAG = "--eval-config"
_DATA_FILE = re.compile(r"\.(?:jsonl|json|gz|bz2|xz|zst|parquet)(?:@\[.*\])?\Z", re.IGNORECASE)

# The words of each type stand in messages after "must be".
_QUOTED = "a text that is not empty; put it in quotes where YAML reads something else"
_Text = Annotated[str, Meta(min_length=1, description=_QUOTED)]
_Switch = Annotated[bool, Meta(description="true or false")]
_Count = Annotated[int, Meta(ge=1, description="a whole number, 1 or more")]
_TopK = Annotated[int, Meta(ge=-1, description="a whole number, 1 or more, or -1 to leave no token out")]
_MinTokens = Annotated[int, Meta(ge=0, description="a whole number, 0 or more")]
_Temperature = Annotated[float, Meta(ge=0, le=1e9, description="a number, 0 (greedy) or more")]
_TopP = Annotated[float, Meta(gt=0, le=1, description="a number above 0 and at most 1")]
_Texts = Annotated[tuple[_Text, ...], Meta(description="a list of texts that are not empty, or one of them")]
_TokenId = Annotated[int, Meta(ge=0)]
_TokenIds = Annotated[tuple[_TokenId, ...], Meta(description="a list of token ids, which count from 0, or one of them")]
_JSON = "a mapping of what JSON can hold: texts, numbers, true, false, null, lists and mappings"
_JsonObject = Annotated[dict[str, Any], Meta(description=_JSON)]

KEYS: Mapping[str, Any] = {
    "name": _Text,
    "path": _Text,
    "n_samples_per_eval_prompt": _Count,
    "temperature": _Temperature,
    "top_p": _TopP,
    "top_k": _TopK,
    "max_prompt_len": _Count,
    "max_response_len": _Count,
    "max_context_len": _Count,
    "min_new_tokens": _MinTokens,
    "stop": _Texts,
    "stop_token_ids": _TokenIds,
    "skip_special_tokens": _Switch,
    "input_key": _Text,
    "label_key": _Text,
    "metadata_key": _Text,
    "tool_key": _Text,
    "apply_chat_template": _Switch,
    "apply_chat_template_kwargs": _JsonObject,
    "rm_type": _Text,
    "custom_generate_function_path": _Text,
    "custom_rm_path": _Text,
    "custom_rm_kwargs": _JsonObject,
    "group_rm": _Switch,
    "rm_url": _Text,
    "reward_key": _Text,
    "metadata_overrides": _JsonObject,
}
"""Every key of a set in the file, and its type."""

_FIELDS = {"max_prompt_len": "rollout_max_prompt_len"}  # keys that are called otherwise in `RolloutConfig`
_NO_REWARD = {"rm_type": None, "custom_rm_path": None, "custom_rm_kwargs": None, "group_rm": False, "rm_url": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSet:
    """A held-out set, and how it is read, sampled and scored. Lengths are in tokens."""

    name: str  # prefix of its metrics
    path: str  # its prompt file, perhaps with a slice
    n_samples_per_eval_prompt: int
    temperature: float  # 0 is greedy
    top_p: float
    top_k: int  # -1 for all
    max_response_len: int
    max_context_len: int | None  # `None` leaves it to the engine
    min_new_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]  # besides the model's own
    skip_special_tokens: bool  # in texts
    metadata_overrides: Mapping[str, Any]  # they replace entries of every prompt's metadata
    config: RolloutConfig  # the run's, with this set's settings of rows and reward, and without held-out sets
    in_file: frozenset[str]  # the settings that it has from `--eval-config`, where they are keys and no flags

    def __post_init__(self) -> None:
        if self.min_new_tokens > self.max_response_len:
            raise ConfigError(
                f"min_new_tokens {self.min_new_tokens} is more than max_response_len {self.max_response_len}; "
                "raise that, or lower this"
            )

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Put the set's name in front of the message of any error inside, which names flags of evaluation, or keys."""
        try:
            yield
        except SlimeError as error:
            error.args = (f"held-out set {self.name}: {self._in_own_words(str(error))}", *error.args[1:])
            raise

    def _in_own_words(self, message: str) -> str:
        """A message with the file's keys and flags of evaluation in place of flags of rollouts."""
        flags = {spec.dest.removeprefix("eval_"): spec.name for spec in flag_specs(EvalConfig)}
        names = {key: flags[key] for key in KEYS if key in flags} | {key: key for key in self.in_file}
        return _renamed(message, names)


def read_eval_sets(config: RolloutConfig) -> tuple[EvalSet, ...]:
    """The held-out sets: those of ``--eval-prompt-data``, then those of the file, which is read now.

    Raises `ConfigError` if a name has no path or is given twice, or the file or a setting is invalid.
    """
    base, file = _settings_of_flags(config), config.evaluation.eval_config
    sets = [
        _make_set(f"{FLAG}: set {name}", {**base, "name": name, "path": path}, config) for name, path in _pairs(config)
    ]
    if file is not None:
        given = read_eval_config(file)
        defaults = _merge(base, given.defaults)
        sets += [
            _make_set(f"{file}: set {entry['name']}", _merge(defaults, entry), config, {*given.defaults, *entry})
            for entry in given.sets
        ]
    if repeated := [name for name, count in Counter(one.name for one in sets).items() if count > 1]:
        flags = [FLAG] if config.evaluation.eval_prompt_data else []
        flags = flags if file is None else [f"{FILE_FLAG} {file}", *flags]
        raise ConfigError(f"{' and '.join(flags)}: the name {repeated[0]} is given twice; give every set its own name")
    return tuple(sets)


def data_files(config: RolloutConfig) -> Iterator[tuple[str, RolloutConfig, contextlib.AbstractContextManager[None]]]:
    """The files that a run reads, those that are trained on first, each with its settings, and a block to work in.

    Errors in the block of a held-out set name it. Held-out sets are read after the other files.
    """
    yield from ((path, config, contextlib.nullcontext()) for path in config.data.prompt_paths)
    yield from ((one.path, one.config, one.named()) for one in read_eval_sets(config))


def _pairs(config: RolloutConfig) -> list[tuple[str, str]]:
    """Names and paths of ``--eval-prompt-data``."""
    given = config.evaluation.eval_prompt_data
    if len(given) == 1:
        return [("eval", given[0])]
    pairs = list(zip(given[::2], given[1::2], strict=True))
    for name, path in pairs:
        if "/" in name or _DATA_FILE.search(name):
            raise ConfigError(f"{FLAG} {name} {path}: {name} looks like a path; give pairs of NAME PATH, or one PATH")
    return pairs


def _settings_of_flags(config: RolloutConfig) -> dict[str, Any]:
    """The settings of a set that has none itself: of the flag of evaluation, of rows and rewards, or of rollouts."""
    flags, settings = flag_values(config), {}
    if config.rewards.opd_type == "sglang":
        flags["rm_url"] = None  # the teacher's
    for key in KEYS:
        if values := [flags[name] for name in (f"eval_{key}", key, f"rollout_{key}") if name in flags]:
            settings[key] = next((value for value in values if value is not None), None)
    own: dict[str, Any] = {"min_new_tokens": settings["min_new_tokens"] or 0, "metadata_overrides": {}}
    return settings | own | {"skip_special_tokens": config.sampling.skips_special_tokens}


def _merge(settings: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others over them. Another reward, or no template, discards what came with the one before."""
    merged = dict(settings)
    if "rm_type" in over or "custom_rm_path" in over:
        merged |= _NO_REWARD
    if over.get("apply_chat_template") is False:
        merged["apply_chat_template_kwargs"] = "{}"
    return {**merged, **over}


def _make_set(where: str, settings: dict[str, Any], config: RolloutConfig, in_file: Collection[str] = ()) -> EvalSet:
    name = settings["name"]
    if problem := set_name_problem(name):
        raise ConfigError(f"{where}: the name {name!r} {problem}; choose another")
    of_config = settings.keys() - {field.name for field in dataclasses.fields(EvalSet)}
    changes = {_FIELDS.get(key, key): settings.pop(key) for key in of_config}
    changes["rollout_max_context_len"] = settings["max_context_len"]
    try:
        config = config.adapted(eval_prompt_data=(), eval_config=None, opd_type=None).changed(**changes)
        return EvalSet(config=config, in_file=frozenset(in_file), **settings)
    except ConfigError as error:
        message = str(error) if where.startswith(FLAG) else _renamed(str(error), {key: key for key in KEYS})
        raise ConfigError(f"{where}: {message}") from None


def _renamed(message: str, names: Mapping[str, str]) -> str:
    """A message with other names in place of the flags of some keys."""
    flags = {f"--{place}{key}".replace("_", "-"): name for key, name in names.items() for place in ("", "rollout_")}
    return re.sub(r"--[a-z-]+", lambda match: flags.get(match[0], match[0]), message)


class EvalFile(NamedTuple):
    """The file of ``--eval-config``: settings of all sets, and those of each, its name and path included."""

    defaults: dict[str, Any]
    sets: list[dict[str, Any]]


def read_eval_config(path: str) -> EvalFile:
    """Read and check the file. Raises `ConfigError` for unknown keys and invalid values, with the place."""
    where = f"{FILE_FLAG} {path}"
    whole = _mapping(f"{where}: the file", load_yaml(FILE_FLAG, path), ("eval",), where)
    if "eval" not in whole:
        raise ConfigError(f"{where} has no key eval; write eval: {{datasets: [{{name: …, path: …}}]}}")
    given = _mapping(f"{where}: eval", whole["eval"], ("defaults", "datasets"))
    return EvalFile(
        defaults=_settings(f"{path}: defaults", given.get("defaults", {}), KEYS.keys() - {"name", "path"}),
        sets=[_settings(place, entry, KEYS) for place, entry in _entries(path, given.get("datasets"))],
    )


def _entries(path: str, datasets: Any) -> list[tuple[str, dict[Any, Any]]]:
    """The sets and where each is, for messages."""
    if not isinstance(datasets, list | dict) or not datasets:
        raise ConfigError(
            f"{FILE_FLAG} {path}: eval needs datasets: a list of {{name: …, path: …}}, or a mapping by name"
        )
    entries, by_name = [], isinstance(datasets, dict)
    for key, value in datasets.items() if isinstance(datasets, dict) else enumerate(datasets, 1):
        place = f"{path}: set {key}" if by_name else f"{path}: entry {key} of datasets"
        entry = _mapping(place, value)
        if by_name and "name" in entry:
            raise ConfigError(f"{place}: name is given twice; leave it out, the key before it is the name")
        entry = {"name": key, **entry} if by_name else entry
        if missing := [needed for needed in ("name", "path") if needed not in entry]:
            raise ConfigError(f"{place} has no {missing[0]}; give one")
        entries.append((f"{path}: set {entry['name']}", entry))
    return entries


def _settings(where: str, given: Any, known: Collection[str]) -> dict[str, Any]:
    settings = {}
    for key, value in _mapping(where, given, known).items():
        try:
            settings[key] = _value(key, value)
        except (msgspec.ValidationError, TypeError, ValueError, RecursionError):
            allowed = KEYS[key].__metadata__[0].description
            raise ConfigError(f"{where}: {key} {_shown(value)} must be {allowed}") from None
    return settings


def _value(key: str, given: Any) -> Any:
    kind = KEYS[key]
    value = msgspec.convert([given] if kind in (_Texts, _TokenIds) and not isinstance(given, list) else given, kind)
    if kind is _TopK and value == 0:
        raise ValueError
    if kind is not _JsonObject:
        return value
    text = json.dumps(value, allow_nan=False)
    if json.loads(text) != value:
        raise ValueError  # a key that is not text
    return text if key.endswith("_kwargs") else value  # as the flags have it


def _mapping(what: str, value: Any, known: Collection[str] | None = None, where: str | None = None) -> dict[Any, Any]:
    """``value``, if it is a mapping that has only ``known`` keys."""
    if not isinstance(value, dict):
        raise ConfigError(f"{what} must be a mapping of keys to values, got {_shown(value)}")
    for key in value:
        if known is not None and key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(sorted(known))}"
            raise ConfigError(f"{where or what}: the key {key} is unknown; {hint}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:80] + "…"
