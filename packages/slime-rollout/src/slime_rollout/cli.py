"""The command ``slime-rollout``: checks hooks before a run, and receives weights for engines."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from slime_core.errors import ConfigError, SlimeError
from slime_core.flags import FlagSpec, flag_specs
from slime_core.hooks import HookArgs
from slime_core.importing import keep_to_installed, leave_to_user
from slime_core.one_line import OneLineParser
from slime_core.redact import redact_logs, redacted, secrets_of
from slime_core.words import counted
from slime_rollout.config import RolloutConfig
from slime_rollout.hooks import HOOKS, GivenHook, given_hooks, hook_args_of
from slime_rollout.run_file import ENDS, FLAG, check_tables, read_run_file, words_of

CHECK_HOOKS = """\
Find the hooks that the flags name, and check that each takes the arguments it will be called with.
With --run each is also called as in a rollout, with a stand-in for the engine: nothing needs a GPU or a model.
"""
RECEIVE_WEIGHTS = """\
Keep a checkpoint on this machine up to date with the deltas that a trainer publishes in a directory which both see
(--update-weight-mode delta). The trainer says when, and updates its engines here itself: give the address of --listen
to the run as --update-weight-receivers. Every delta is verified, before and after, and applied in order; a version
appears whole or not at all. Killed at any point and started again, it continues from what is there.
Requests must carry the key of the run that publishes in --from, which leaves a hash of it there. If the environment has
SLIME_API_KEY, they must carry that one: give it to the run as --sglang-api-key. If it is empty, none is asked for.
"""
# What a run requires and check-hooks does not.
_STAND_INS: dict[str, Any] = {"hf_checkpoint": "", "prompt_data": "none given", "rollout_batch_size": 2}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns 0, 2 if a hook or the command is invalid, or 130 if it was interrupted."""
    redact_logs()
    try:
        with keep_to_installed():
            given = vars(_parser().parse_args(with_run_file(sys.argv[1:] if argv is None else argv)))
            command: Callable[[dict[str, Any]], int] = given.pop("command")
            return command(given)
    except SlimeError as error:
        print(f"slime-rollout: {redacted(str(error), secrets_of(os.environ))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("slime-rollout: interrupted", file=sys.stderr)
        return 130


def check_hooks_command(given: dict[str, Any]) -> int:
    """``slime-rollout check-hooks``: print one line for each hook; returns 2 if one cannot be used, otherwise 0."""
    options = {name: given.pop(name, None) for name in ("run", "reply", "time_limit")}
    given.pop("config", None)  # its flags are among the words
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    config = RolloutConfig.of(**_STAND_INS | values)
    args, hooks = hook_args_of(config), given_hooks(config)
    if not hooks:
        raise ConfigError(f"no hook is given; give one or more of {', '.join(hook.flag for hook in HOOKS)}")
    if not options.pop("run"):
        if ignored := [name for name, value in options.items() if value is not None]:
            raise ConfigError(f"--{ignored[0].replace('_', '-')} is for --run; give both")
        return max(_report(hook, lambda hook: _load(hook, args)) for hook in hooks)
    from slime_rollout.hooks.contracts import REPLIES, TIME_LIMIT, Trial, try_hook

    leave_to_user()
    limit = TIME_LIMIT if options["time_limit"] is None else options["time_limit"]
    if not limit > 0:
        raise ConfigError(f"--time-limit {limit} is invalid; give seconds above 0")
    trial = Trial.make(
        config,
        args,
        has_model="hf_checkpoint" in given,
        has_prompts="prompt_data" in given,
        replies=options["reply"] or REPLIES,
        time_limit=limit,
    )
    code = max(_report(hook, lambda hook: try_hook(hook, trial)) for hook in hooks)
    said, turns = len(options["reply"] or ()), max(trial.turns, default=-1) + 1
    if said > max(turns, 1) or (said and not turns):
        why = f"no interaction asked the engine for more than {counted(turns, 'turn')}" if turns else "nobody asked it"
        raise ConfigError(f"--reply is given {counted(said, 'time')}, and {why}; a further one is for a further turn")
    return code


def with_run_file(argv: Sequence[str]) -> list[str]:
    """The words of ``check-hooks``, after the flags of its ``--config`` file that are a rollout's.

    Those of trainers and engines have no part in this, and are named in a line. The command line wins over the file.
    Raises `ConfigError` if the file cannot be read, has a rollout's flags in a table, or is given without its flag.
    """
    if argv[:1] == ["check-hooks"] and argv[1:] and argv[1].lower().endswith(ENDS):
        raise ConfigError(f"unexpected {argv[1]!r}; give a run file as {FLAG} {argv[1]}")
    looking = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    looking.add_argument(FLAG)
    if argv[:1] != ["check-hooks"] or (path := looking.parse_known_args(list(argv))[0].config) is None:
        return list(argv)
    typed = {word.partition("=")[0] for word in argv}
    specs, others, words = {spec.name: spec for spec in flag_specs(RolloutConfig)}, [], list[str]()
    given = read_run_file(path)
    check_tables(path, given, specs, others=True)
    for name, value in given.items():
        if name not in specs:
            others.append(name)
        elif name not in typed:
            is_off = specs[name].is_switch and (value is False or str(value).lower() in ("false", "off", "no"))
            is_on = specs[name].is_switch and not is_off
            words += [] if is_off or value == [] else [name] if is_on else words_of(path, name, value)
    if others:
        print(f"note   {path}: {len(others)} of its flags are not a rollout's and not looked at: {', '.join(others)}")
    return [*argv[:1], *words, *argv[1:]]


def receive_weights(given: dict[str, Any]) -> int:
    """``slime-rollout receive-weights``: serve until the process is ended; a `ConfigError` if that cannot begin."""
    from slime_rollout.weights.receiver import serve

    serve(**given)
    return 0


def _load(hook: GivenHook, args: HookArgs) -> str:
    hook.load(args)
    return "loads, and takes what it will be called with"


def _report(hook: GivenHook, look: Callable[[GivenHook], str]) -> int:
    start = time.monotonic()
    try:
        text = look(hook)
    except SlimeError as error:
        text = str(error).removeprefix(hook.of)
        print(f"wrong  {hook.of + text if text.startswith(hook.kind.flag) else f'{hook.name}: {text}'}", flush=True)
        return 2
    print(f"ok     {hook.name}: {text} ({time.monotonic() - start:.1f} s)", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="slime-rollout", description=(__doc__ or "").strip())
    parser.add_argument("--version", action="version", version=f"slime-rollout {version('slime-rollout')}")
    commands = parser.add_subparsers(
        required=True, metavar="check-hooks | receive-weights", title="commands", parser_class=OneLineParser
    )
    checking = commands.add_parser(
        "check-hooks",
        help="check the hooks that flags name",
        description=CHECK_HOOKS,
        usage="slime-rollout check-hooks [--run] [flags]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    checking.set_defaults(command=check_hooks_command)
    checking.add_argument("--run", action="store_true", help="call each hook, too")
    checking.add_argument(
        "--reply",
        action="append",
        metavar="TEXT",
        help="the engine's reply with --run; repeat it for the second turn, the third …",
    )
    checking.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="time limit of all calls of a hook with --run [60]"
    )
    checking.add_argument(FLAG, metavar="FILE", help="flags of a run in TOML or YAML, as of slime-launch train")
    hook_flags = {hook.field for hook in HOOKS}
    specs = list(flag_specs(RolloutConfig))
    _add(checking.add_argument_group("hooks"), [spec for spec in specs if spec.dest in hook_flags])
    others = checking.add_argument_group("what they are checked with", "As in a run; all may be left out.")
    _add(others, [spec for spec in specs if spec.dest not in hook_flags])
    receiving = commands.add_parser(
        "receive-weights",
        help="keep a checkpoint on this machine up to date with the deltas that a trainer publishes",
        description=RECEIVE_WEIGHTS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    receiving.set_defaults(command=receive_weights)
    for name, place, metavar, text in (
        ("--from", "source", "DIR", "where versions are published (--update-weight-disk-dir)"),
        ("--to", "directory", "DIR", "on this machine, for up to two copies of the model"),
        ("--hf-checkpoint", "hf_checkpoint", "DIR", "what the run began with"),
        ("--listen", "listen", "HOST:PORT", "wait for the trainer at this address"),
    ):
        receiving.add_argument(name, dest=place, required=True, metavar=metavar, help=text)
    return parser


def _add(section: argparse._ArgumentGroup, specs: Sequence[FlagSpec]) -> None:
    for spec in specs:
        how: dict[str, Any] = {"dest": spec.dest, "help": spec.help.replace("%", "%%")}
        if spec.is_switch:
            section.add_argument(spec.name, action="store_true", **how)
            continue
        if spec.nargs:
            how |= {"nargs": spec.nargs, "action": "extend"}
        metavar = spec.metavar or (None if spec.choices else spec.type.__name__.upper())
        section.add_argument(spec.name, type=spec.type, choices=spec.choices, metavar=metavar, **how)
