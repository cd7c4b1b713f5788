"""``slime-convert inspect``. It imports no torch, so that it answers at once."""

from __future__ import annotations

import argparse
from typing import Any

_HELP = "say what a checkpoint holds (its headers are read, not its weights)"


def add_inspect(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    parser = commands.add_parser("inspect", help=_HELP, description=_HELP, allow_abbrev=False)
    parser.set_defaults(run=_run, parser=parser)
    parser.add_argument("directory", metavar="DIR", help="Hugging Face directory, or torch_dist checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _run(args: argparse.Namespace) -> None:
    from slime_convert.inspection import inspect_checkpoint, to_json, to_text

    contents = inspect_checkpoint(args.directory)
    if args.json:
        import json

        print(json.dumps(to_json(contents), indent=2))
    else:
        print(to_text(contents))
