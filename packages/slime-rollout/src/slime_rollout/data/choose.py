"""The data source that the flags choose, checked before anything starts, with the prompts to train on."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

from slime_core.errors import ConfigError
from slime_core.hooks import HookArgs
from slime_core.user_functions import load_function
from slime_rollout.config import RolloutConfig
from slime_rollout.data.chat import PromptEncoder
from slime_rollout.data.dataset import PromptDataset
from slime_rollout.data.encode import RowEncoder
from slime_rollout.data.source import (
    AccountedSource,
    BufferFilter,
    CustomSource,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
)
from slime_rollout.data.stream import StreamingPrompts

_SOURCE, _FILTER = "--data-source-path", "--buffer-filter-path"
_FILTER_ARGUMENTS = ("args", "buffer", "num_samples")
_PROTOCOL = {
    "get_samples": ("num_samples",),
    "add_samples": ("groups",),
    "state_dict": (),
    "load_state_dict": ("state",),
}
_SETTINGS = MappingProxyType({"samples_per_prompt": 1, "shuffle": False, "seed": 0, "args": None})


def load_source(config: RolloutConfig, encoder: PromptEncoder, hook_args: HookArgs) -> AccountedSource:
    """The prompts to train on, in memory or as a stream, in the data source that the flags choose.

    A custom data source gets ``hook_args``.

    Raises:
        ConfigError: The data source cannot be used.
        DataError: A prompt file breaks its format; of one that is streamed, only what opening it shows.
    """
    encoding = RowEncoder(config, encoder, config.data.num_data_workers)
    with contextlib.ExitStack() as stack:
        stack.callback(encoding.close)
        dataset: PromptDataset | StreamingPrompts
        if config.data.streaming_data:
            dataset = StreamingPrompts(config, encoder, encoding=encoding)
        else:
            parts = [PromptDataset.load(path, config, encoder, encoding=encoding) for path in config.data.prompt_paths]
            dataset = PromptDataset.join(parts, config.data.prompt_data_weights)
        source = make_data_source(config, dataset, hook_args)
        if config.data.streaming_data:
            stack.pop_all()
    return source


def find_data_source(config: RolloutConfig) -> Callable[..., AccountedSource]:
    """The class of ``--data-source-path``, with the function of ``--buffer-filter-path``.

    By default a source without a buffer, or with one where settings make groups come back.

    Returns:
        What makes the source, of ``(dataset, samples_per_prompt=…, shuffle=…, seed=…, args=…)``.

    Raises:
        ConfigError: A path names nothing that can be used, or a function does not take the arguments it will get.
    """
    kind: type[Any] = RolloutDataSourceWithBuffer if config.selection.gives_back else RolloutDataSource
    if config.data.data_source_path is not None:
        kind = _load_class(config.data.data_source_path)
    if config.data.buffer_filter_path is not None:
        choose = _load_filter(config.data.buffer_filter_path, kind)
        return functools.partial(cast(type[RolloutDataSourceWithBuffer], kind), filter=choose)
    if issubclass(kind, RolloutDataSource):
        return cast(Callable[..., AccountedSource], kind)
    return functools.partial(_make_custom, kind)


def make_data_source(
    config: RolloutConfig, dataset: PromptDataset | StreamingPrompts, hook_args: HookArgs
) -> AccountedSource:
    """The data source of a run, custom or ours, found as :func:`find_data_source` does."""
    return find_data_source(config)(
        dataset,
        samples_per_prompt=config.selection.n_samples_per_prompt,
        shuffle=config.data.rollout_shuffle,
        seed=config.data.rollout_seed,
        args=hook_args,
    )


def _load_filter(path: str, kind: type[Any]) -> BufferFilter:
    if not issubclass(kind, RolloutDataSourceWithBuffer):
        raise ConfigError(
            f"{_FILTER} {path}: {kind.__name__} has no buffer to choose from; give "
            f"{_SOURCE} slime_rollout.data.RolloutDataSourceWithBuffer, or a class derived from it"
        )
    function = load_function(path, _FILTER)
    if _mismatch(function, _FILTER_ARGUMENTS) and not _mismatch(function, ("args", "rollout_id", "buffer", "num")):
        _check_plain(function, f"{_FILTER} {path}")
        return lambda args, buffer, num_samples: function(args, None, buffer, num_samples)  # as upstream calls it
    function = load_function(path, _FILTER, arguments=_FILTER_ARGUMENTS)
    _check_plain(function, f"{_FILTER} {path}")
    return cast(BufferFilter, function)


def _load_class(path: str) -> type[Any]:
    given = f"{_SOURCE} {path}"
    kind = cast(Any, load_function(path, _SOURCE))
    missing = [name for name in _PROTOCOL if not callable(getattr(kind, name, None))]
    if not isinstance(kind, type) or missing:
        raise ConfigError(
            f"{given} is not a class with {', '.join(missing or _PROTOCOL)}; write one that has all of "
            f"{', '.join(_PROTOCOL)}, or derive it from slime_rollout.data.RolloutDataSource or "
            "RolloutDataSourceWithBuffer"
        )
    settings = dict(_SETTINGS)
    if issubclass(kind, RolloutDataSourceWithBuffer):
        settings["filter"] = None
        _check_call(kind.buffer_filter, f"{given}: buffer_filter", ("self", *_FILTER_ARGUMENTS))
        _check_plain(kind.buffer_filter, f"{given}: buffer_filter")
    if issubclass(kind, RolloutDataSource) or _mismatch(kind, ("args",)):
        _check_call(kind, f"{given}: the class", ("dataset",), settings)
    for name, arguments in _PROTOCOL.items():
        _check_call(getattr(kind, name), f"{given}: {name}", ("self", *arguments))
    return cast(type[Any], kind)


def _make_custom(kind: type[Any], dataset: PromptDataset | StreamingPrompts, **settings: Any) -> CustomSource:
    """A source that does not derive from ours: made as ours are, or of the flags alone as upstream's."""
    is_ours = _mismatch(kind, ("dataset",), _SETTINGS) is None
    return CustomSource(kind(dataset, **settings) if is_ours else kind(settings["args"]))


def _check_call(
    function: Callable[..., Any],
    given: str,
    positional: tuple[str, ...],
    named: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    if (error := _mismatch(function, positional, named)) is not None:
        call = ", ".join((*positional, *(f"{name}=…" for name in named)))
        raise ConfigError(f"{given} takes {inspect.signature(function)}; it is called with ({call}): {error}")


def _mismatch(
    function: Callable[..., Any], positional: tuple[str, ...], named: Mapping[str, Any] = MappingProxyType({})
) -> TypeError | None:
    """Why a function cannot be called like this."""
    try:
        inspect.signature(function).bind(*positional, **named)
    except TypeError as error:
        return error
    return None


def _check_plain(function: Callable[..., Any], given: str) -> None:
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{given} is async; choosing from the buffer waits for nothing: write a plain function")
