"""The process that holds a run together. Started by `cli`, below a supervisor."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from slime_core.importing import without_collections
from slime_launch.calls import Watch


def main() -> int:
    """Listen to signals before anything that takes time, then run what the command's own process has checked."""
    watch = Watch()
    watch.listen(at_once=True)
    with without_collections():
        from slime_launch.run import run

    with Path(sys.argv[1]).open("rb") as file:
        checked = pickle.load(file)  # noqa: S301  # of this process's parent
    return run(checked, watch)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is stopped; threads of Ray's that are left can crash an interpreter that takes itself apart
