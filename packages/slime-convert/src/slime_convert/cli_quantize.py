"""``slime-convert hf-to-fp8 | fp8-to-bf16 | hf-to-int4 | int4-to-bf16``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from slime_convert.progress import OnProgress

AddCommand = Callable[[str, Callable[[argparse.Namespace], None], str], argparse.ArgumentParser]


def add_quantize(add: AddCommand, positive: Callable[[str], int], progress: Callable[[], OnProgress]) -> None:
    """Add the four commands to the command line.

    Args:
        add: Makes a subparser of a name, what it runs, and a line of help.
        positive: The type of an argument that is a whole number of 1 or more.
        progress: Makes what draws the progress.
    """

    def run(args: argparse.Namespace) -> None:
        _run(args, progress())

    _add(add, positive, "hf-to-fp8", run, "quantize a Hugging Face directory to FP8, E4M3 in blocks of 128 by 128")
    _add(add, positive, "fp8-to-bf16", run, "expand a block-scaled FP8 directory, such as DeepSeek-V3's, to bfloat16")
    parser = _add(add, positive, "hf-to-int4", run, "quantize a Hugging Face directory to packed INT4")
    parser.add_argument(
        "--group-size", type=int, choices=(32, 128), default=32, help="columns that share a scale (default: 32)"
    )
    parser.add_argument(
        "--ignore",
        nargs="+",
        metavar="RULE",
        help="modules to leave as they are: names, or re:PATTERN (default: all but the routed experts if there are "
        "any, else lm_head)",
    )
    _add(add, positive, "int4-to-bf16", run, "expand a packed INT4 directory, such as Kimi-K2's, to bfloat16")


def _add(
    add: AddCommand, positive: Callable[[str], int], name: str, run: Callable[[argparse.Namespace], None], help_: str
) -> argparse.ArgumentParser:
    parser = add(name, run, help_)
    parser.set_defaults(command=name)
    parser.add_argument("--hf-checkpoint", required=True, metavar="DIR", help="Hugging Face directory")
    parser.add_argument("--save", required=True, metavar="DIR", help="directory to create")
    parser.add_argument(
        "--max-shard-gib", type=positive, default=5, metavar="N", help="largest safetensors file in GiB (default: 5)"
    )
    return parser


def _run(args: argparse.Namespace, on_progress: OnProgress) -> None:
    from slime_convert.quantize import convert

    commands: dict[str, Callable[..., None]] = {
        "hf-to-fp8": convert.hf_to_fp8,
        "fp8-to-bf16": convert.fp8_to_bf16,
        "hf-to-int4": convert.hf_to_int4,
        "int4-to-bf16": convert.int4_to_bf16,
    }
    own: dict[str, Any] = {}
    if args.command == "hf-to-int4":
        own = {"group_size": args.group_size, "ignore": args.ignore}
    commands[args.command](
        args.hf_checkpoint,
        args.save,
        force=args.force,
        max_shard_bytes=args.max_shard_gib * 2**30,
        on_progress=on_progress,
        **own,
    )
