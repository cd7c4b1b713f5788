"""`uv.lock`: every version pinned, no host in it, and no environment's making changes it."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
lock, tidy = importlib.import_module("lock"), importlib.import_module("tidy")
UV = ROOT / ".venv-tools" / "bin" / "uv"
LOCK = (ROOT / "uv.lock").read_text()
FOUND = """\
[[package]]
name = "numpy"
version = "2.4.6"
source = { registry = "https://packages.example/simple" }
sdist = { url = "https://packages.example/numpy.tar.gz", hash = "sha256:0", size = 1 }
wheels = [
    { url = "https://packages.example/numpy.whl", hash = "sha256:0", size = 1 },
]

[[package]]
name = "torch"
"""


def test_hosts_and_files_are_taken_out_and_nothing_else() -> None:
    assert lock.without_hosts(FOUND) == (
        '[[package]]\nname = "numpy"\nversion = "2.4.6"\n'
        f'source = {{ registry = "{lock.PLACEHOLDER}" }}\n\n[[package]]\nname = "torch"\n'
    )
    assert lock.without_hosts(LOCK) == LOCK


def test_lint_refuses_a_lock_file_that_says_where_packages_were_found() -> None:
    assert not list(tidy.find("uv.lock", lock.without_hosts(FOUND)))
    assert {int(finding.split(":")[1]) for finding in tidy.find("uv.lock", FOUND)} == {4, 5, 6, 7}


@pytest.mark.skipif(not UV.exists(), reason="scripts/test makes uv's environment")
def test_the_lock_file_fits_the_settings_and_pins_what_they_lead_to() -> None:
    """Needs no index: uv reads what a package depends on from the lock file, too."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}  # as scripts/lock has it
    subprocess.run(
        [UV, "lock", "--check", "--offline"], cwd=ROOT, check=True, capture_output=True, timeout=60, env=plain
    )
    words = (
        "export --frozen --quiet --all-packages --all-extras --no-emit-workspace --no-hashes --no-annotate --no-header"
    )
    pins = subprocess.run(
        [UV, *words.split()], cwd=ROOT, check=True, capture_output=True, text=True, timeout=240
    ).stdout
    names = {line.partition("==")[0] for line in pins.splitlines()}
    assert len(names) > 100 and all(re.match(r"[\w.-]+==\S+", line) for line in pins.splitlines())
    assert {"torch", "sglang", "ray", "megatron-core", "aiohttp", "huggingface-hub", "safetensors", "mbridge"} <= names
