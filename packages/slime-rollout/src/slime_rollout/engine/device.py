"""Which kind of device engines run on here, found without torch."""

from __future__ import annotations

from pathlib import Path


def engine_device() -> str:
    """``"cuda"`` if the NVIDIA driver shows a GPU to this machine, else ``"cpu"``."""
    return "cuda" if any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"
