"""For people who type `python train_async.py`: the same as `slime-launch train-async`."""

import sys

from slime_launch.cli import main

sys.exit(main(["train-async", *sys.argv[1:]]))
