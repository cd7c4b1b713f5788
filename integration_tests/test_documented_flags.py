"""The page of algorithms names no flag that `slime-launch train` does not have."""

from __future__ import annotations

import re
from pathlib import Path

from slime_launch.flags.tables import train_groups

PAGE = Path(__file__).resolve().parents[1] / "docs" / "algorithms.md"


def test_every_flag_of_the_page_is_one_of_ours() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", PAGE.read_text(encoding="utf-8")))
    assert len(named) > 40
    assert named <= {spec.name for group in train_groups() for spec in group.flags}
