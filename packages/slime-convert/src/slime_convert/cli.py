"""The command line: ``slime-convert COMMAND …``, also as ``python -m slime_convert``."""

from __future__ import annotations

import signal
import sys
import threading

_starts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
_starts = _starts and threading.current_thread() is threading.main_thread()
try:
    if _starts:  # an interrupt during the imports would be told by their traceback; main() takes over
        signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    import argparse
    import difflib
    import io
    import os
    import re
    import traceback
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import contextmanager, suppress
    from functools import partial
    from typing import Any, NoReturn

    from slime_convert.commands import COMMANDS, Subcommand, in_flags
    from slime_convert.errors import ConvertError
    from slime_convert.files.partial import version
    from slime_convert.progress import drop, flush_or_drop, say
    from slime_convert.shape import SHAPE_FLAGS
finally:
    if _starts:
        signal.signal(signal.SIGINT, signal.default_int_handler)

_PROGRAM = "slime-convert"
_formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=36)
# Flags of training that people also give here.
_PARALLEL = re.compile(r"--(tp|pp|ep|cp|etp|(tensor|pipeline|expert|context|expert-tensor)-(model-)?parallel(-size)?)$")


def main(argv: Sequence[str] | None = None, *, skip_unknown: bool = False) -> int:
    """Run one command.

    Args:
        argv: Words after the program's name; ``sys.argv`` by default.
        skip_unknown: Take a training run's whole command line: flags unknown here are named and left out.

    Returns:
        0; 1 if ``verify`` finds differences or ``check-model`` a proof that does not hold; 2 after a user's mistake,
        which is one line on stderr; 130 after an interrupt; 141 if nobody reads the output any longer.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names may hold what the terminal's encoding, or any, has no character for.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _stopping_by_signal():
            args = build_parser(skip_unknown=skip_unknown).parse_args(argv)
            code: int = args.run(args)
            if sys.stdout is not None:
                sys.stdout.flush()
    except ConvertError as error:
        say(f"{_PROGRAM}: {in_flags(str(error))}")
        return 2
    except BrokenPipeError:
        drop(sys.stdout)
        return 141  # as a shell has it for a program that SIGPIPE ended
    except OSError as error:
        if error.filename is None:
            drop(sys.stdout)
        where = "write the output" if error.filename is None else f"use {error.filename}"
        advice = getattr(error, "__notes__", ["correct this and run the command again"])
        say("; ".join([f"{_PROGRAM}: cannot {where} ({error.strerror or error})", *advice]))
        return 2
    except Exception:
        # Or the process would end with 1, which says that two checkpoints differ.
        with suppress(OSError, ValueError):
            traceback.print_exc()
        say(f"{_PROGRAM}: this is a mistake of slime-convert; report it with the lines above")
        return 2
    except KeyboardInterrupt as error:
        say("; ".join([f"{_PROGRAM}: interrupted", *getattr(error, "__notes__", ())]))
        return 130
    finally:
        flush_or_drop(sys.stderr)  # other modules write warnings there
    return code


def run_script(command: str) -> NoReturn:
    """Run one command with the words of this process's command line, and end the process with its exit code.

    This is for the converter under script names that are known from elsewhere. A training run's whole command line may
    be given: flags that do not concern the conversion are named and left out. Under ``torchrun`` the first process
    converts and the others end at once, as no conversion needs more than one.
    """
    if (os.environ.get("RANK") or "0") != "0":
        sys.exit(0)
    sys.exit(main([command, *sys.argv[1:]], skip_unknown=True))


@contextmanager
def _stopping_by_signal() -> Iterator[None]:
    """A conversion that is terminated, or whose terminal is closed, ends like an interrupted one."""
    # Python lets only the main thread handle signals.
    in_main = threading.current_thread() is threading.main_thread()
    stops = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP] if in_main else []
    # A signal that the caller has switched off, as nohup does, stays off; None is a handler that is not Python's.
    before = {stop: old for stop in stops if (old := signal.getsignal(stop)) not in (signal.SIG_IGN, None)}

    def interrupt(signum: int, frame: Any) -> NoReturn:
        # An impatient second one must not cut the tidying up short.
        for stop in before:
            signal.signal(stop, signal.SIG_IGN)
        raise KeyboardInterrupt

    for stop in before:
        signal.signal(stop, interrupt)
    try:
        yield
    finally:
        for stop, handler in before.items():
            signal.signal(stop, handler)


def build_parser(*, skip_unknown: bool = False) -> argparse.ArgumentParser:
    """The parser of the whole command line; ``skip_unknown`` leaves out unknown flags, unless they are nearly known."""
    examples = "\n".join(f"  {_PROGRAM} {command.example}" for command in COMMANDS[:2])
    parser = _OneLineParser(
        prog=_PROGRAM,
        usage=f"{_PROGRAM} COMMAND …",
        description=f"Convert, inspect and compare model checkpoints, without a GPU.\n\n{examples}",
        epilog=f"{_PROGRAM} COMMAND --help says more of one.",
        formatter_class=_formatter,
    )
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {version() or 'not installed'}")
    parsers = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_CommandParser)
    for command in COMMANDS:
        _add(parsers, command, skip_unknown)
    return parser


def _add(parsers: Any, command: Subcommand, skip_unknown: bool) -> None:
    required = " ".join(
        f"{flag.names[0]} {flag.options['metavar']}" if flag.options.get("required") else flag.options["metavar"]
        for flag in command.flags
        if flag.options.get("required") or not flag.names[0].startswith("-")
    )
    shape = "Megatron's shape flags may be given too, and must agree with config.json (--help-shape)."
    parser: _CommandParser = parsers.add_parser(
        command.name,
        prog=f"{_PROGRAM} {command.name}",
        help=command.help,
        usage=f"{_PROGRAM} {command.name} {required} [flags]".replace("  ", " "),
        description=f"{command.help}\n\n  {_PROGRAM} {command.example}",
        epilog=(shape if command.takes_shape else "") + command.epilog,
        allow_abbrev=False,
        formatter_class=_formatter,
    )
    parser.skip_unknown = skip_unknown
    parser.set_defaults(run=command.run)
    for flag in command.flags:
        parser.add_argument(*flag.names, **flag.options)
    if not command.takes_shape:
        return
    parser.add_argument("--help-shape", action=_HelpShape, nargs=0, dest=argparse.SUPPRESS, help=_HelpShape.__doc__)
    for shape_flag in SHAPE_FLAGS:
        kind: dict[str, Any] = {"action": "store_true"} if shape_flag.is_switch else {"type": shape_flag.type}
        parser.add_argument(shape_flag.name, dest=shape_flag.dest, help=argparse.SUPPRESS, **kind)


class _HelpShape(argparse.Action):
    """List Megatron's shape flags, and end."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print them, and end."""
        width = max(len(flag.name) for flag in SHAPE_FLAGS)
        print("The shape is read from config.json; a flag that is given must agree with it.\n")
        print("\n".join(f"  {flag.name:<{width}}  {flag.help}" for flag in SHAPE_FLAGS))
        parser.exit()


class _OneLineParser(argparse.ArgumentParser):
    """Says a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        """One line on stderr, exit code 2."""
        if wrong := re.match(r"argument COMMAND: invalid choice: '(.*?)'", message):
            nearest = difflib.get_close_matches(wrong[1], [command.name for command in COMMANDS], n=1)
            message = f"unknown command {wrong[1]!r}" + (f"; did you mean {nearest[0]}?" if nearest else "")
        say(f"{self.prog}: {message}; see {self.prog} --help")
        self.exit(2)


class _CommandParser(_OneLineParser):
    """Says of an unknown flag which one may have been meant."""

    skip_unknown = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Look for unknown flags first: one that is misspelt may be one that is required."""
        words = list(sys.argv[1:] if args is None else args)
        flags = [word.partition("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)]
        unknown = list(dict.fromkeys(flag for flag in flags if not self._knows(flag)))
        for flag in unknown:
            if meant := self._meant(flag):
                self.error(f"unknown flag {flag}; did you mean {meant}?")
        if unknown and not self.skip_unknown:
            parallel = any(map(_PARALLEL.match, unknown))
            why = " (no parallel layout has to be given: checkpoints are read and load at any)" if parallel else ""
            self.error(f"unknown flag{'s' * (len(unknown) > 1)} {' '.join(unknown)}{why}")
        parsed, left = super().parse_known_args(words, namespace)
        for action in self._actions:
            if getattr(parsed, action.dest, None) == []:  # argparse drops a "--" that is given as a value
                name = "/".join(action.option_strings) or action.metavar
                self.error(f"argument {name}: '--' is not a value; give another")
        if left and not unknown:  # or they are values of unknown flags
            self.error(f"unrecognized arguments: {' '.join(left)}")
        if unknown:
            say(f"{self.prog}: left out, as they do not concern the conversion: {' '.join(unknown)}")
        return parsed, []

    def _knows(self, flag: str) -> bool:
        """Whether it is a flag; several of one letter may be joined."""
        letters = "" if flag.startswith("--") else flag[1:]
        return flag in self._option_string_actions or (
            bool(letters) and all(f"-{letter}" in self._option_string_actions for letter in letters)
        )

    def _meant(self, flag: str) -> str | None:
        known: Iterable[str] = self._option_string_actions
        bare = {name.lstrip("-"): name for name in known if name.startswith("--") and name != "--help"}
        # Where unknown flags are skipped they are another program's, so only nearly the same word is a misspelling.
        cutoff = 0.9 if self.skip_unknown else 0.6
        nearest = difflib.get_close_matches(flag.lstrip("-"), bare, n=1, cutoff=cutoff)
        if nearest or self.skip_unknown:
            return bare[nearest[0]] if nearest else None
        start = flag.lstrip("-").lower()
        # A single letter means none of the many shape flags.
        others = {shape_flag.name for shape_flag in SHAPE_FLAGS} if len(start) == 1 else set()
        begins = [name for word, name in bare.items() if word.startswith(start) and name not in others]
        return begins[0] if len(begins) == 1 or (begins and len(start) > 2) else None
