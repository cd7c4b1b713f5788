"""Imports what a run imports, in the trainer's interpreter and in the engine's: `warm_up.py ENGINE_PYTHON`."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from slime_rollout.engine.sglang_flags import engine_device, import_environment

RUN = "import ray, slime_launch.preflight, slime_launch.run"
TRAINER = """
import slime_launch.trainers
from slime_megatron.ranks.device import select_device
select_device()
import slime_megatron.worker
"""
ROLLOUT = """
from slime_rollout.data.chat import remember_structure
remember_structure()
import aiohttp, slime_launch.rollouts, slime_rollout.rollout
from transformers import PreTrainedTokenizerFast
"""
ENGINE = """
import sglang.launch_server, sglang.srt.entrypoints.http_server
from sglang.srt.plugins import load_plugins
load_plugins()
"""


def main(engine: str) -> int:
    """Run all of them, the engine's at the same time as the others; returns 1 if one failed."""
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    sides = [
        ([engine], [ENGINE], import_environment(engine_device())),
        ([sys.executable], [RUN, TRAINER, ROLLOUT], ours),
    ]
    with ThreadPoolExecutor(len(sides)) as pool:
        codes = pool.map(lambda side: [run([*side[0], "-c", code], side[2]) for code in side[1]], sides)
        return int(any(code for several in codes for code in several))


def run(words: list[str], environment: dict[str, str]) -> int:
    """Run a command that prints nothing; its exit code."""
    quiet = subprocess.DEVNULL
    return subprocess.run(words, env=environment, stdout=quiet, stderr=quiet).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
