"""The converter under script names that are known from elsewhere (``convert_hf_to_torch_dist.py`` and its like)."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from slime_convert.cli import main


def run_script(command: str) -> NoReturn:
    """Run one command with the words of this process's command line, and end the process with its exit code.

    A training run's whole command line may be given: flags that do not concern the conversion are told and left alone.
    Under ``torchrun`` the first process converts and the others end at once, as no conversion needs more than one.

    Args:
        command: Of ``slime-convert``.
    """
    if (os.environ.get("RANK") or "0") != "0":
        sys.exit(0)
    sys.exit(main([command, *sys.argv[1:]], skip_unknown=True))
