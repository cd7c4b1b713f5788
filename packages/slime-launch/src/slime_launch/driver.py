"""The process that holds a run together. Started by `cli`, below a supervisor."""

from __future__ import annotations

import sys

from slime_launch.watch import Watch


def main() -> int:
    """Listen to signals before anything that takes time, then run the command line of this process."""
    watch = Watch()
    watch.listen(at_once=True)
    from slime_launch.run import run

    return run(sys.argv[1:], watch)


if __name__ == "__main__":
    sys.exit(main())
