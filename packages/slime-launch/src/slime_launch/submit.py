"""``slime-launch submit``: the command that puts a training command on a Ray cluster as a job.

It is printed, not run: Ray's client for jobs needs ``ray[default]``, with the dashboard and its servers, which a
machine that trains does not need; whoever has a cluster has its ``ray``.
"""

from __future__ import annotations

import os
import shlex
import sys

from slime_launch.errors import FlagError
from slime_launch.flags import parse_train

USAGE = """\
usage: slime-launch submit [--ray-address URL] [flags of slime-launch train]

    Checks the flags, and prints the `ray job submit` that runs the command on a cluster. URL is its dashboard's,
    http://HEAD:8265; by default RAY_ADDRESS, where that is one. Nothing is uploaded: paths are those of the cluster.
    `ray job submit` prints the job's id and follows its log; Ctrl-C leaves the job running, `ray job stop ID` ends it.
    Run what is printed with Ray's own command, of `pip install "ray[default]"`."""


def submit(argv: list[str]) -> int:
    """Print the command.

    Raises:
        FlagError: There is no address, or the training command cannot be read.
        ConfigError: Its values contradict each other.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    address, words = os.environ.get("RAY_ADDRESS", ""), list(argv)
    if words[0].split("=")[0] == "--ray-address":
        _, equals, value = words.pop(0).partition("=")
        address = value if equals else words.pop(0) if words else ""
    if not address.startswith(("http://", "https://")):
        raise FlagError(
            f"--ray-address {address or '(not given)'} must be the address of the cluster's dashboard, "
            "http://HEAD:8265; give it first, or set RAY_ADDRESS"
        )
    if any(word.split("=")[0] == "--wandb-key" for word in words):
        raise FlagError("--wandb-key would be shown to all who see the cluster's jobs; set WANDB_API_KEY there instead")
    parse_train(words, on_gpu=True)
    job = ["ray", "job", "submit", "--address", address, "--", "slime-launch", "train", *words]
    print("run this where Ray's own command is installed:", file=sys.stderr)
    print(shlex.join(job))
    return 0
