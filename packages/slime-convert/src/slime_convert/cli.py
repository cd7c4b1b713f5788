"""The command line: ``slime-convert gguf-to-hf | hf-to-torch-dist | torch-dist-to-hf | megatron-to-hf | …``."""

from __future__ import annotations

import argparse
import difflib
import functools
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from slime_convert.cli_inspect import add_inspect
from slime_convert.cli_quantize import add_quantize
from slime_convert.cli_verify import add_verify
from slime_convert.errors import ConvertError
from slime_convert.printable import printable
from slime_convert.progress_bar import terminal_progress
from slime_convert.shape import SHAPE_FLAGS, ModelShape, check_flags
from slime_convert.shape.families import BRIDGES
from slime_convert.unfinished import refuse_unfinished


def main(argv: Sequence[str] | None = None, *, skip_unknown: bool = False) -> int:
    """Run one command.

    Args:
        argv: Words after the program's name; ``sys.argv`` by default.
        skip_unknown: Take a training run's whole command line: flags unknown here are told and left alone.

    Returns:
        0, 1 if ``verify`` finds differences, or 2 after a user's mistake, which is told in one line on stderr; 130
        after an interrupt, 141 if nobody reads the output any more.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names may hold what the terminal's encoding, or any, has no character for.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _stopping_by_signal():
            args, unknown = _parser().parse_known_args(argv)
            if unknown:
                args.parser.handle_unknown(unknown, skip=skip_unknown)
            code: int | None = args.run(args)
            if sys.stdout is not None:
                sys.stdout.flush()
    except ConvertError as error:
        _say(f"slime-convert: {error}")
        return 2
    except BrokenPipeError:
        _drop_output()
        return 141  # as a shell has it for a program that SIGPIPE ended
    except OSError as error:
        if error.filename is None:
            _drop_output()
        where = "write the output" if error.filename is None else f"use {error.filename}"
        _say(f"slime-convert: cannot {where} ({error.strerror or error}); correct this and run the command again")
        return 2
    except Exception:
        # Or the process would end with 1, which says that two checkpoints differ.
        traceback.print_exc()
        _say("slime-convert: this is a mistake of slime-convert; report it with the lines above")
        return 2
    except KeyboardInterrupt as error:
        _say("; ".join(["slime-convert: interrupted", *getattr(error, "__notes__", ())]))
        return 130
    return code or 0


def _drop_output() -> None:
    """What stdout could not take would be tried again, and told, when the process ends."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextmanager
def _stopping_by_signal() -> Iterator[None]:
    """A conversion that is terminated, or whose terminal is closed, ends like an interrupted one."""
    stops = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    # A signal that the caller has switched off, as nohup does, stays off.
    before = {stop: old for stop in stops if (old := signal.getsignal(stop)) is not signal.SIG_IGN}

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


class _Parser(argparse.ArgumentParser):
    """Tells a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        """One line on stderr, exit code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def handle_unknown(self, words: Sequence[str], *, skip: bool) -> None:
        """Tell words that mean nothing here, and end unless they may be skipped and are no misspelling."""
        flags = [word.partition("=")[0] for word in words if word.startswith("--")] if skip else []
        # Words to be skipped are another program's flags, so only nearly the same word is a misspelling.
        for word in flags or [words[0].partition("=")[0]]:
            nearest = difflib.get_close_matches(word, self._option_string_actions, n=1, cutoff=0.9 if skip else 0.6)
            if nearest:
                self.error(f"unrecognized arguments: {' '.join(words)}; did you mean {nearest[0]}?")
        if not flags:
            self.error(f"unrecognized arguments: {' '.join(words)}")
        _say(f"{self.prog}: left alone, as they do not concern the conversion: {' '.join(dict.fromkeys(flags))}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="slime-convert", description="Convert, inspect and compare model checkpoints. No GPU is needed."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_inspect(commands)
    add_verify(commands, terminal_progress)
    _add_gguf_to_hf(commands)
    _add_hf_to_torch_dist(commands)
    _add_torch_dist_to_hf(commands)
    _add_megatron_to_hf(commands)
    add_quantize(functools.partial(_add, commands), _positive, terminal_progress)
    _add_list_models(commands)
    return parser


def _add(commands: Any, name: str, run: Any, help_: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help_, description=help_, allow_abbrev=False)
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("-f", "--force", action="store_true", help="replace an earlier output")
    return parser


def _add_gguf_to_hf(commands: Any) -> None:
    parser = _add(commands, "gguf-to-hf", _gguf_to_hf, "GGUF file → Hugging Face directory (needs the gguf extra)")
    parser.add_argument("--gguf", required=True, metavar="PATH", help="GGUF file, or directory with exactly one")
    parser.add_argument("--save", required=True, metavar="DIR", help="directory to create")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="type of the written weights (default: float32, which is exact)",
    )


def _add_hf_to_torch_dist(commands: Any) -> None:
    parser = _add(commands, "hf-to-torch-dist", _hf_to_torch_dist, "Hugging Face directory → Megatron torch_dist")
    help_ = "Hugging Face directory; FP8 and INT4 weights become bfloat16"
    parser.add_argument("--hf-checkpoint", required=True, metavar="DIR", help=help_)
    parser.add_argument("--save", required=True, metavar="DIR", help="checkpoint directory to create")
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=_positive,
        default=128,
        metavar="N",
        help="pad the embedding to a multiple of N rows (default: 128)",
    )
    _add_shape_flags(parser)


def _add_torch_dist_to_hf(commands: Any) -> None:
    parser = _add(commands, "torch-dist-to-hf", _torch_dist_to_hf, "Megatron torch_dist → Hugging Face directory")
    parser.add_argument("--input-dir", required=True, metavar="DIR", help="checkpoint, or one iteration of it")
    _add_hf_output(parser, "--origin-hf-dir")


def _add_megatron_to_hf(commands: Any) -> None:
    help_ = "Megatron checkpoint, torch_dist or legacy torch → Hugging Face directory"
    parser = _add(commands, "megatron-to-hf", _megatron_to_hf, help_)
    parser.add_argument("--load", required=True, metavar="DIR", help="checkpoint, or one iteration of it")
    parser.add_argument(
        "--ckpt-format",
        choices=("torch", "torch_dist"),
        help="accepted as in training, where it is the format to save in; the format of --load is detected",
    )
    _add_hf_output(parser, "--origin-hf-dir", "--hf-checkpoint")


def _add_hf_output(parser: argparse.ArgumentParser, *origin: str) -> None:
    """Flags of the commands from Megatron to Hugging Face; ``origin`` are the names of one of them."""
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="directory to create")
    parser.add_argument(
        *origin,
        dest="origin_hf_dir",
        required=True,
        metavar="DIR",
        help="model that training began with (config, tokenizer)",
    )
    parser.add_argument(
        "-a",
        "--add-missing-from-origin-hf",
        action="store_true",
        help="copy weights that the checkpoint lacks from that model (quantized: as bfloat16), and print their names",
    )
    parser.add_argument(
        "--max-shard-gib", type=_positive, default=5, metavar="N", help="largest safetensors file in GiB (default: 5)"
    )
    _add_shape_flags(parser)


def _add_shape_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bridge",
        choices=BRIDGES,
        help="take names and layouts from mbridge instead, which knows more models (needs the mbridge extra)",
    )
    shape = parser.add_argument_group(
        "model shape", "The shape is read from config.json; a flag given here must agree with it."
    )
    for flag in SHAPE_FLAGS:
        if flag.is_switch:
            shape.add_argument(flag.name, dest=flag.dest, action="store_true", help=flag.help)
        else:
            shape.add_argument(flag.name, dest=flag.dest, type=flag.type, help=flag.help)


def _add_list_models(commands: Any) -> None:
    help_ = "published models whose shape flags are kept in scripts/models"
    parser = commands.add_parser("list-models", help=help_, description=help_, allow_abbrev=False)
    parser.set_defaults(run=_list_models, parser=parser)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 1 or more")
    return int(text)


def _gguf_to_hf(args: argparse.Namespace) -> None:
    from slime_convert.gguf import gguf_to_hf

    gguf_to_hf(args.gguf, args.save, dtype=args.dtype, force=args.force, on_progress=terminal_progress())


def _hf_to_torch_dist(args: argparse.Namespace) -> None:
    flags = _checked_flags(args, args.hf_checkpoint)
    from slime_convert.convert import hf_to_torch_dist

    hf_to_torch_dist(
        args.hf_checkpoint,
        args.save,
        flags=flags,
        bridge=args.bridge,
        make_vocab_size_divisible_by=args.make_vocab_size_divisible_by,
        force=args.force,
        on_progress=terminal_progress(),
    )


def _torch_dist_to_hf(args: argparse.Namespace) -> None:
    flags = _checked_flags(args, args.origin_hf_dir)
    from slime_convert.convert import torch_dist_to_hf

    _tell_copied(args.origin_hf_dir, torch_dist_to_hf(args.input_dir, **_hf_output(args), flags=flags))


def _megatron_to_hf(args: argparse.Namespace) -> None:
    flags = _checked_flags(args, args.origin_hf_dir)
    from slime_convert.megatron_to_hf import megatron_to_hf

    _tell_copied(args.origin_hf_dir, megatron_to_hf(args.load, **_hf_output(args), flags=flags))


def _checked_flags(args: argparse.Namespace, hf_directory: str) -> dict[str, Any]:
    """The given shape flags. The likely mistakes are told before torch is imported, which takes seconds."""
    refuse_unfinished(hf_directory)
    flags = {flag.dest: getattr(args, flag.dest) for flag in SHAPE_FLAGS}
    if args.bridge is None:
        check_flags(ModelShape.from_hf_config(hf_directory), flags)
    return flags


def _hf_output(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "output_dir": args.output_dir,
        "origin_hf_dir": args.origin_hf_dir,
        "bridge": args.bridge,
        "add_missing_from_origin_hf": args.add_missing_from_origin_hf,
        "force": args.force,
        "max_shard_bytes": args.max_shard_gib * 2**30,
        "on_progress": terminal_progress(),
    }


def _tell_copied(origin: str, names: Sequence[str]) -> None:
    for name in names:
        print(printable(f"copied from {origin}: {name}"))


def _list_models(args: argparse.Namespace) -> None:
    from slime_convert.list_models import model_table

    print(model_table())


def _say(line: str) -> None:
    if sys.stderr is None:  # the process was started without
        return
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")  # where the progress may stand
    sys.stderr.write(printable(" ".join(line.split())) + "\n")
