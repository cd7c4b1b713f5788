"""``python -m slime_convert``."""

import sys

from slime_convert.cli import main

if __name__ == "__main__":
    sys.exit(main())
