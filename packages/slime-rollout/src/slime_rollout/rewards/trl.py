"""TRL's reward functions: ``(prompts, completions, **columns)`` to a list of floats."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from slime_core.errors import ConfigError
from slime_core.types import Group, Sample

GIVEN = ("prompts", "completions", "completion_ids")


def is_trl_form(function: Callable[..., Any]) -> bool:
    """Whether a function takes ``completions`` by name, as TRL's reward functions do."""
    try:
        return "completions" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


class TrlReward:
    """A function of TRL's form, called with samples.

    Prompts that are chat messages give completions of one message each, as in TRL; text gives text. Columns are the
    values in the rows' metadata, and ``label``, also under the name of ``--label-key``, the last of a dotted one. A
    function without ``**kwargs`` gets those that it names. Raises `ConfigError` if it needs one that cannot be given by
    name.
    """

    def __init__(self, function: Callable[..., Any], name: str, *, label_key: str | None = None) -> None:
        self._function, self._labels = function, ("label", (label_key or "label").rpartition(".")[2])
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self._names = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
        if unnamed := [one.name for one in parameters if one.kind is one.POSITIONAL_ONLY]:
            raise ConfigError(f"{name} takes {unnamed[0]} by place; a function of this form is called by names")

    def __call__(self, samples: Group) -> Any:
        """The function's value for the samples: a list of floats, or an awaitable of one."""
        values: dict[str, list[Any]] = {
            "prompts": [sample.prompt for sample in samples],
            "completions": [_completion(sample) for sample in samples],
            "completion_ids": [sample.response_tokens for sample in samples],
        }
        columns = dict.fromkeys(name for sample in samples for name in sample.metadata)
        columns |= dict.fromkeys(self._labels) if any(sample.label is not None for sample in samples) else {}
        for name in columns:
            if name not in GIVEN and name.isidentifier():
                labels = name in self._labels
                values[name] = [sample.label if labels else sample.metadata.get(name) for sample in samples]
        return self._function(**{key: value for key, value in values.items() if self._takes_all or key in self._names})


def _completion(sample: Sample) -> str | list[dict[str, str]]:
    if isinstance(sample.prompt, str):
        return sample.response
    return [{"role": "assistant", "content": sample.response}]
