"""A model that calls tools, after ReTool (Feng et al. 2025): the generate function and the reward.

The model writes ``<calculator>12 * 34</calculator>`` or ``<python>print(2**10)</python>``, is shown
``<result>408</result>``, and goes on, until it ends its answer (``Answer: 408``) or --max-turns is reached. Only what
it wrote itself is trained on.
"""

from __future__ import annotations

import asyncio
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

from slime_rollout import Trajectory, call_tool

sys.path.append(str(Path(__file__).parent))

from calculator import calculate
from sandbox import run_python

CALL = re.compile(r"<(calculator|python)>(.*?)</\1>", re.DOTALL)
ANSWER = re.compile(r"Answer:\s*(-?[\d,]+(?:\.\d+)?(?:/\d+)?)")
CALLED = 0.1  # for a call that gave a result before a wrong answer, so that there is something to learn from at first
AT_ONCE = asyncio.Semaphore(16)  # processes that run the model's code


async def custom_generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Turns of the model, with the tools' results between them."""
    trajectory = Trajectory.start(sample)
    while not trajectory.done:
        call = CALL.search(await trajectory.generate(stop=["</calculator>", "</python>"]))
        if call is None:
            break
        result = await call_tool(use, *call.groups())
        failed = result.rpartition("\n")[2].startswith("error:") or "Traceback (most recent call last)" in result
        sample.metadata["results"] = sample.metadata.get("results", 0) + (not failed)
        trajectory.observe(f"<result>{result}</result>")
    return sample


async def use(tool: str, request: str) -> str:
    """A tool's result. The calculator answers at once; Python runs outside the event loop, which all samples share."""
    if tool == "calculator":
        return calculate(request)
    async with AT_ONCE:
        return await asyncio.to_thread(run_python, request)


def custom_rm(args: Any, sample: Any) -> float:
    """1 for the right answer; a little for a call that gave a result."""
    answers = ANSWER.findall(sample.response)
    if answers and _number(answers[-1]) == _number(sample.label):
        return 1.0
    return CALLED if sample.metadata.get("results") else 0.0


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(text.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None
