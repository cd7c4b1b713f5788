"""The flags of ``slime-launch train``, in the groups of ``--help``, and the way from a command line to `Settings`.

SGLang's own flags have ``--sglang-`` in front, and are read from the installed SGLang only when one is typed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from slime_convert.shape import SHAPE_FLAGS
from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError
from slime_core.flags import FlagSpec, collected_problems, flag_specs
from slime_launch.config import CONFIGS, ClusterConfig, RunConfig, Settings, TrackingConfig, sglang_dest
from slime_launch.config_file import last_value, with_config
from slime_launch.devices import run_device
from slime_launch.errors import FlagError, about_read
from slime_launch.megatron_flags import megatron_groups, megatron_help
from slime_launch.parser import FlagGroup, build_parser, check_has_flags, leading_strays, parse_all, unexpected, without
from slime_launch.switches import OFF, switched
from slime_megatron import service  # a name of it is loaded when it is used
from slime_megatron.service import MegatronConfig
from slime_rollout.checks import check_tables
from slime_rollout.config import RolloutConfig
from slime_rollout.engine import (
    CONTROLLED,
    ROUTER_CONTROLLED,
    ROUTER_PREFIX,
    EngineConfig,
    SglangFlag,
    find_python,
    has_sglang,
    installed_flags,
    router_specs,
)

PROG = "slime-launch train"
DESCRIPTION = """\
Post-train a language model: SGLang generates, Megatron-core trains, Ray places both.

Flags have units and defaults in brackets. A flag with several values may be repeated; its values add up."""
EPILOG = """\
What it prints ends with the run's report. The same command continues a stopped run from its last checkpoint in --save.
Exit codes: 0 done, 1 a part of the run failed, 2 the command cannot work, 3 the trainers were lost too often,
130 Ctrl-C, 143 SIGTERM."""
WANDB_NOTE = (
    "metrics.jsonl is always written, and TensorBoard's files unless --disable-tensorboard is given.\n"
    "The key is neither stored nor tracked."
)
MEGATRON_NOTE = "Megatron's own names, where Megatron has the flag."
SHAPE_NOTE = "Megatron's own names. What is not given is taken from --hf-checkpoint; what is given must agree with it."
SGLANG_NOTE = (
    "Every flag of the installed SGLang with --sglang- in front, such as --sglang-mem-fraction-static 0.8.\n"
    "`slime-launch train --help-sglang` lists them."
)
ROUTER_NOTE = (
    "Every flag of the installed sglang-router with --router- in front, such as --router-cache-threshold 0.5.\n"
    "`slime-launch train --help-router` lists them."
)
PREFIX = "--sglang-"


def parse_train(argv: Sequence[str], *, on_gpu: bool | None = None) -> Settings:
    """Read the words after ``slime-launch train``.

    Raises:
        FlagError: The command line cannot be read; a line for each reason.
        ConfigError: Values contradict each other: all of them, a line each.
    """
    settings, problems, contradictions = _read(argv, on_gpu=on_gpu, planned=False)
    if problems:
        raise FlagError("\n".join([*problems, *contradictions]))
    if contradictions:
        raise ConfigError("\n".join(contradictions))
    return settings


def read_train(argv: Sequence[str], *, on_gpu: bool | None = None, planned: bool = False) -> tuple[Settings, list[str]]:
    """As :func:`parse_train`; what is wrong is returned, so that the preflight reports it with what it finds.

    ``on_gpu`` says what the command is for; ``None`` is this machine. If it is only ``planned``, SGLang's flags are
    taken as given where there is no SGLang on this machine.

    Raises:
        FlagError: Nothing can be read.
        ConfigError: The file of ``--config`` cannot.
    """
    settings, problems, contradictions = _read(argv, on_gpu=on_gpu, planned=planned)
    return settings, [*problems, *contradictions]


def read_anywhere(argv: Sequence[str]) -> tuple[Settings, list[str]]:
    """As :func:`read_train` for a machine with GPUs, without a look at what is installed here.

    Raises:
        FlagError: Nothing can be read.
    """
    settings, problems, contradictions = _read(argv, on_gpu=True, planned=True, sglang=known_sglang_specs())
    return settings, [*problems, *contradictions]


def _read(
    argv: Sequence[str], *, on_gpu: bool | None, planned: bool, sglang: Sequence[FlagSpec] | None = None
) -> tuple[Settings, list[str], list[str]]:
    """Settings; what cannot be read of the command line; how values contradict each other.

    ``sglang`` are SGLang's flags; the installed one says them if ``None``.
    """
    from slime_launch.derived import derived_values  # these four --help does not need
    from slime_launch.idle import idle_flags
    from slime_launch.translate import answered, items, translate_upstream
    from slime_launch.wandb_run import hide_key

    check_has_flags(argv, own_flags())
    stray = leading_strays(argv)
    expanded = with_config(argv[len(stray) :])
    words, as_given = expanded.words, dict[str, Any]()
    if sglang is None and planned and not has_sglang(sglang_python(words)):
        words, as_given = _without_sglang(words, expanded.booleans)
    groups, parser, refused = _command(words, sglang)
    words = without(words, [line.split()[0] for line in refused])
    known = {spec.name: spec for group in groups for spec in group.flags}
    check_tables(
        expanded.path, {name: value for name, value in expanded.values.items() if not _is_sglangs(name, known)}, known
    )
    if not groups[-1].flags:
        words = without(words, [word.split("=")[0] for word in words if _is_sglangs(word, known)])
    switches = switched(words, known, booleans=expanded.booleans, empty=expanded.empty)
    translated = translate_upstream(switches.words, known)
    megatrons = answered(translated.words, known)
    refused = [*(unexpected(word, "", known) for word in stray), *refused, *switches.problems]
    found = parse_all(groups, parser, megatrons.words, [*refused, *translated.problems, *megatrons.problems])
    given = _without_switched_off(found.given, switches.off, groups)
    from_file = {item.name for item in items(translate_upstream(expanded.from_file, known).words)}
    origins = {
        spec.dest: "config file" if name in from_file else "command line"
        for name, spec in known.items()
        if spec.dest in given
    }
    hide_key(given)
    given |= {
        spec.dest: spec.type(1 if spec.type in (int, float) else "(not given)")
        for spec in known.values()
        if spec.default is dataclasses.MISSING and spec.dest not in given
    }
    given |= derived_values(given, on_gpu=run_device() == "cuda" if on_gpu is None else on_gpu)
    with collected_problems() as contradictions:
        configs = _configs(given, groups, as_given)
    shape = {flag.dest: given[flag.dest] for flag in SHAPE_FLAGS if flag.dest in given}
    unused = [*translated.unused, *megatrons.unused]
    notes = (*([f"no effect here: {', '.join(unused)}"] if unused else []), *switches.notes, *translated.notes)
    unread = _with_followers(found.unread.union(known[name].dest for name in switches.unread), given)
    settings = Settings(shape=shape, notes=notes, origins=origins, unread=unread, switched_off=switches.off, **configs)
    return settings, found.problems, about_read([*contradictions, *idle_flags(settings).problems], unread)


def _without_switched_off(given: dict[str, Any], off: frozenset[str], groups: Sequence[FlagGroup]) -> dict[str, Any]:
    """Without the switches that are off: ours are off unless given, those of Megatron and SGLang may be on."""
    others = {spec.dest for group in (*groups[-4:-2], groups[-1]) for spec in group.flags}
    return {name: value for name, value in given.items() if name not in off} | dict.fromkeys(off & others, False)


def _configs(given: Mapping[str, Any], groups: Sequence[FlagGroup], as_given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of flags as records, by part."""
    sglang = {spec.dest: spec.name.removeprefix(PREFIX) for spec in groups[-1].flags}
    router = {spec.dest: spec.name.removeprefix(ROUTER_PREFIX) for spec in groups[-2].flags}
    megatron = {spec.dest for group in groups[-4:-2] for spec in group.flags}
    configs: dict[str, Any] = {}
    for part, config in CONFIGS.items():
        dests = {spec.dest for spec in flag_specs(config)}
        values = {dest: value for dest, value in given.items() if dest in dests}
        if config is EngineConfig:
            args = {sglang[dest]: value for dest, value in given.items() if dest in sglang}
            if given.get("trust_remote_code"):
                args.setdefault("trust-remote-code", True)
            args |= as_given
            values["sglang_off"] = tuple(name for name, value in args.items() if value is False)
            values["sglang_args"] = {name: value for name, value in args.items() if value is not False}
            values["router_args"] = {router[dest]: value for dest, value in given.items() if dest in router}
        if config is MegatronConfig:
            words = {dest: value for dest, value in given.items() if dest in megatron}
            values["megatron_args"] = service.megatron_args(words)
        configs[part] = config.of(**values)
    return configs


def _with_followers(unread: frozenset[str], given: Mapping[str, Any]) -> frozenset[str]:
    """With the sizes that follow from those that could not be read."""
    sizes = {"rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout"}
    return unread | {"global_batch_size"} if unread & sizes and "global_batch_size" not in given else unread


def _is_sglangs(word: str, known: Collection[str]) -> bool:
    return word.startswith(PREFIX) and word.split("=")[0] not in known


def _without_sglang(words: Sequence[str], booleans: Collection[str]) -> tuple[list[str], dict[str, Any]]:
    """The words without SGLang's own flags, and these by name with their values; refused ones are left in.

    ``booleans`` are flags to which a run file gives ``true`` or ``false``.
    """
    known = own_flags()
    kept: list[str] = []
    args: dict[str, list[str]] = {}
    into: list[str] | None = None
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            into = None
            if _is_sglangs(word, known) and name.removeprefix(PREFIX) not in CONTROLLED:
                into = args.setdefault(name.removeprefix(PREFIX), [])
                into.extend([value] if equals else [])
                continue
        (kept if into is None else into).append(word)
    off = {name for name, values in args.items() if PREFIX + name in booleans and values == list(OFF[:1])}
    return kept, {
        name: name not in off if name in off or not values else values[0] if len(values) == 1 else tuple(values)
        for name, values in args.items()
    }


def command(
    argv: Sequence[str], sglang: Sequence[FlagSpec] | None = None
) -> tuple[list[FlagGroup], argparse.ArgumentParser]:
    """The flags and the parser for this command line.

    The last groups have the flags of others, if one was typed: two of Megatron's, sglang-router's and SGLang's, which
    are those that are given or else those of the installed one.

    Raises:
        FlagError: A flag that slime sets itself was typed, or one of SGLang's, which is not installed in the
            interpreter of ``--sglang-python``, or cannot be imported there.
    """
    groups, parser, refused = _command(argv, sglang)
    if refused:
        raise FlagError("\n".join(refused))
    return groups, parser


def _command(
    argv: Sequence[str], sglang: Sequence[FlagSpec] | None = None
) -> tuple[list[FlagGroup], argparse.ArgumentParser, list[str]]:
    """As :func:`command`, with what is refused, a line each; a flag that was refused is its first word."""
    known = own_flags()
    typed = {word.split("=")[0] for word in argv if word.startswith((PREFIX, ROUTER_PREFIX))} - known.keys()
    names = sorted(typed, key=lambda name: (name.startswith(ROUTER_PREFIX), name))  # SGLang's first
    reasons = {name: set_by_slime(name) for name in names}
    left = [name for name, reason in reasons.items() if reason is None]
    refused = [f"{name} cannot be given: {reason}" for name, reason in reasons.items() if reason is not None]
    specs: list[FlagSpec] = []
    if any(name.startswith(PREFIX) for name in left):
        try:
            found = sglang_specs(argv) if sglang is None else sglang
            specs = [spec for spec in found if spec.name not in known]
        except ConfigError as error:
            refused.append(str(error))
    router = tuple(router_specs().values()) if any(name.startswith(ROUTER_PREFIX) for name in left) else ()
    others = (
        *megatron_groups(argv, known),
        FlagGroup("sglang-router: its own flags", router, ROUTER_NOTE, hidden=True),
        FlagGroup("SGLang: its own flags", tuple(specs), SGLANG_NOTE, hidden=True),
    )
    return [*train_groups(), *others], _parser(others), refused


def set_by_slime(name: str) -> str | None:
    """Why a flag of SGLang's or its router's cannot be given; ``None`` if it can."""
    if name in own_flags():
        return None
    for prefix, controlled in ((PREFIX, CONTROLLED), (ROUTER_PREFIX, ROUTER_CONTROLLED)):
        if name.startswith(prefix) and name.removeprefix(prefix) in controlled:
            return controlled[name.removeprefix(prefix)]
    return None


@functools.lru_cache(maxsize=8)  # most command lines of a process have the same ones, and a plan reads several
def _parser(others: tuple[FlagGroup, ...]) -> argparse.ArgumentParser:
    """The parser of our flags and of these."""
    return build_parser([*train_groups(), *others], prog=PROG, description=DESCRIPTION, epilog=EPILOG)


def train_groups() -> list[FlagGroup]:
    """All groups except SGLang's own flags."""
    return [*_own_groups()]


@functools.cache
def own_flags() -> Mapping[str, FlagSpec]:
    """The flags of :func:`train_groups`, by name."""
    return MappingProxyType({spec.name: spec for group in _own_groups() for spec in group.flags})


@functools.cache
def _own_groups() -> tuple[FlagGroup, ...]:
    rollout, evaluation = _split(RolloutConfig)
    run, run_evaluation = _split(RunConfig)
    shape = tuple(
        FlagSpec(name=flag.name, dest=flag.dest, type=flag.type, default=None, help=flag.help) for flag in SHAPE_FLAGS
    )
    return (
        FlagGroup("run", run),
        FlagGroup("cluster", tuple(flag_specs(ClusterConfig)), 'Without CUDA a "GPU" is a CPU worker process.'),
        FlagGroup("prompts, sampling and rewards", rollout),
        FlagGroup("evaluation", evaluation + run_evaluation),
        FlagGroup("tracking", tuple(flag_specs(TrackingConfig)), WANDB_NOTE),
        FlagGroup("algorithm", tuple(flag_specs(AlgorithmConfig))),
        FlagGroup("Megatron: training", tuple(flag_specs(MegatronConfig)), MEGATRON_NOTE),
        FlagGroup("Megatron: model shape", shape, SHAPE_NOTE),
        FlagGroup("SGLang: engines and router", tuple(flag_specs(EngineConfig))),
    )


def sglang_specs(argv: Sequence[str]) -> list[FlagSpec]:
    """The flags of the SGLang in the interpreter of ``--sglang-python``, without those that slime sets itself.

    Raises:
        ConfigError: SGLang is not installed there, or cannot be imported.
    """
    flags = installed_flags(find_python(sglang_python(argv)))
    return [_sglang_spec(flag) for name, flag in sorted(flags.items()) if name not in CONTROLLED]


@functools.cache
def known_sglang_specs(*, typed: bool = False) -> tuple[FlagSpec, ...]:
    """The flags of the SGLang that slime is tested with, without those that slime sets itself. None need be here.

    Values are texts, as an engine is given them, unless they are to be ``typed``.
    """
    text = files("slime_launch").joinpath("sglang_flags.txt").read_text(encoding="utf-8")
    types = {"switch": bool, "int": int, "float": float, "str": str}
    rows = [line.split() for line in text.splitlines()]
    return tuple(
        FlagSpec(
            name=PREFIX + name,
            dest=sglang_dest(name),
            type=types[kind.removesuffix("+")] if typed or kind == "switch" else str,
            default=None,
            help="",
            nargs="+" if kind.endswith("+") else None,
        )
        for name, kind in rows
    )


def sglang_python(argv: Sequence[str]) -> str | None:
    """The value of ``--sglang-python``, read before the parser exists."""
    return last_value(argv, "--sglang-python") or None


def _lines(specs: Iterable[FlagSpec]) -> Iterator[str]:
    for spec in specs:
        value = "" if spec.is_switch else f" VALUE{' …' if spec.nargs else ''}"
        yield f"{spec.name}{value}  {spec.help}".rstrip()


OTHERS: dict[str, Callable[[Sequence[str]], Iterable[str]]] = {
    "--help-sglang": lambda argv: _lines(sglang_specs(argv)),
    "--help-router": lambda _: _lines(router_specs().values()),
    "--help-megatron": lambda _: megatron_help(own_flags()),
}
"""The flags that list the flags of others, and the lines that they show."""


def _sglang_spec(flag: SglangFlag) -> FlagSpec:
    return FlagSpec(
        name=PREFIX + flag.name,
        dest=sglang_dest(flag.name),
        type=str if flag.takes_value else bool,
        default=None,
        help=flag.help if flag.default is None else f"{flag.help} [SGLang's default {flag.default}]".lstrip(),
        nargs="+" if flag.several else None,
    )


def _split(config: type[Any]) -> tuple[tuple[FlagSpec, ...], tuple[FlagSpec, ...]]:
    """Split the flags of a config: not about evaluation, about evaluation."""
    specs = tuple(flag_specs(config))
    about_eval = [spec for spec in specs if "eval" in spec.dest.split("_")]
    return tuple(spec for spec in specs if spec not in about_eval), tuple(about_eval)
