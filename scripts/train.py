"""For people who type `python train.py`: the same as `slime-launch train`."""

import sys

from slime_launch.cli import main

sys.exit(main(["train", *sys.argv[1:]]))
