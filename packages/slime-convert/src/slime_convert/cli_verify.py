"""``slime-convert verify``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from slime_convert.cli_inspect import CHECKPOINT
from slime_convert.progress import OnProgress
from slime_convert.shape.families import BRIDGES

_HELP = "compare two checkpoints, of any two formats, weight by weight"
_EPILOG = (
    "Quantized weights are expanded, unless both checkpoints are quantized in the same way. "
    "Exit code: 0 if they are equal, 1 if they differ, 2 if they cannot be compared."
)


def add_verify(commands: Any, progress: Callable[[], OnProgress]) -> None:
    """Add the command to the subparsers of the command line.

    Args:
        commands: What ``add_subparsers`` returned.
        progress: Makes what shows how far the comparison is.
    """
    parser = commands.add_parser("verify", help=_HELP, description=_HELP, epilog=_EPILOG, allow_abbrev=False)
    parser.set_defaults(run=lambda args: _run(args, progress()), parser=parser)
    for name in ("left", "right"):
        parser.add_argument(name, metavar="PATH", help=CHECKPOINT)
    parser.add_argument(
        "--origin-hf-dir", metavar="DIR", help="config.json of both, if neither checkpoint tells the model's shape"
    )
    parser.add_argument(
        "--bridge",
        choices=BRIDGES,
        help="take names and layouts of Megatron's weights from mbridge, which knows more models (needs the mbridge "
        "extra, and the model's config.json)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="accept absolute differences up to X, whatever the types (default: bits and types must be equal)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _run(args: argparse.Namespace, on_progress: OnProgress) -> int:
    from slime_convert.formats import detect

    # The likely mistakes are told before torch is imported, which takes seconds.
    detect(args.left)
    detect(args.right)
    from slime_convert.verify import verify

    found = verify(
        args.left,
        args.right,
        origin_hf_dir=args.origin_hf_dir,
        bridge=args.bridge,
        tolerance=args.tolerance,
        on_progress=on_progress,
    )
    if args.json:
        import json

        print(json.dumps(found.to_json(), indent=2))
    else:
        print(found.to_text())
    return 0 if found.equal else 1
