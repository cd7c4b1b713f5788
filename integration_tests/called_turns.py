"""A generate function of three turns with a tool between them, which keeps a list of its calls."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from slime_core.types import Sample
from slime_rollout import Trajectory, call_tool

HOLD = "hold"
"""From the sample whose number is in this file on, the tool answers in its second turn only once the file is gone."""


async def custom_generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """Held-out prompts are answered in one turn."""
    trajectory = Trajectory.start(sample)
    while not trajectory.done:
        await trajectory.generate(max_new_tokens=3)
        if evaluation:
            break
        found = await call_tool(look, str(Path(args.save).parent), sample.index, trajectory.turns)
        trajectory.observe(f" = {found['sum']} +")
    return sample


async def look(directory: str, index: int, turn: int) -> dict[str, int]:
    """The sum of its two arguments, after the call is in the list."""
    with Path(directory, "calls.txt").open("a") as file:
        file.write(f"{index} {turn}\n")
    hold = Path(directory, HOLD)
    while turn == 2 and hold.exists() and index >= int(hold.read_text()):
        await asyncio.sleep(0.05)
    return {"sum": index + turn, "index": index, "turn": turn}
