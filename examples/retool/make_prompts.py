"""Writes prompts.jsonl: 100 problems of three or four numbers, the same in every run."""

from __future__ import annotations

import json
import random
from pathlib import Path

from calculator import calculate

PATH = Path(__file__).with_name("prompts.jsonl")
SYSTEM = (
    "Solve the problem. You may use a calculator: write <call>12 * 34</call> and you are shown <result>408</result>. "
    "End with a line such as: Answer: 408"
)


def problems(count: int = 100, seed: int = 1) -> list[dict[str, object]]:
    """The rows."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        expression = str(draw.randint(11, 999))
        for _ in range(draw.randint(2, 3)):
            expression = f"({expression} {draw.choice('+-*')} {draw.randint(11, 999)})"
        expression = expression[1:-1]
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What is {expression}?"}]
        rows.append({"prompt": messages, "label": calculate(expression)})
    return rows


if __name__ == "__main__":
    PATH.write_text("".join(json.dumps(row) + "\n" for row in problems()), encoding="utf-8")
