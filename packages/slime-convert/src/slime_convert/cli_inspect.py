"""``slime-convert inspect``. It imports no torch, so that it answers at once."""

from __future__ import annotations

import argparse
from typing import Any

CHECKPOINT = "Hugging Face directory, torch_dist or legacy torch checkpoint, or GGUF file"
_HELP = "say what a checkpoint holds (its headers are read, not its weights)"


def add_inspect(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    parser = commands.add_parser("inspect", help=_HELP, description=_HELP, allow_abbrev=False)
    parser.set_defaults(run=_run, parser=parser)
    parser.add_argument("checkpoint", metavar="PATH", help=CHECKPOINT)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _run(args: argparse.Namespace) -> None:
    from slime_convert.inspection import inspect_checkpoint, to_json, to_text

    contents = inspect_checkpoint(args.checkpoint)
    if args.json:
        import json

        print(json.dumps(to_json(contents), indent=2))
    else:
        print(to_text(contents))
