"""Writes prompts.jsonl: 100 problems, the same in every run; every second one is easier with a program."""

from __future__ import annotations

import json
import random
from pathlib import Path

from calculator import calculate

PATH = Path(__file__).with_name("prompts.jsonl")
SYSTEM = (
    "Solve the problem. You may call tools. Write <calculator>12 * 34</calculator> for arithmetic, or "
    "<python>print(sum(range(10)))</python> to run a program and see what it prints; you are shown "
    "<result>408</result>. End with a line such as: Answer: 408"
)


def problems(count: int = 100, seed: int = 1) -> list[dict[str, object]]:
    """The rows."""
    draw, rows = random.Random(seed), []
    for number in range(count):
        question, label = _counting(draw) if number % 2 else _arithmetic(draw)
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        rows.append({"prompt": messages, "label": label})
    return rows


def _arithmetic(draw: random.Random) -> tuple[str, str]:
    expression = str(draw.randint(11, 999))
    for _ in range(draw.randint(2, 3)):
        expression = f"({expression} {draw.choice('+-*')} {draw.randint(11, 999)})"
    return f"What is {expression[1:-1]}?", calculate(expression)


def _counting(draw: random.Random) -> tuple[str, str]:
    kind, first, second = draw.randrange(3), draw.randint(3, 12), draw.randint(20, 60)
    if kind == 0:
        digits = sum(map(int, str(first**second)))
        return f"What is the sum of the digits of {first} to the power of {second}?", str(digits)
    if kind == 1:
        limit = 10 * second
        primes = sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(2, limit))
        return f"How many prime numbers are less than {limit}?", str(primes)
    limit, other = 10 * second, first + draw.randint(1, 5)
    count = sum(n % first == 0 or n % other == 0 for n in range(1, limit + 1))
    return f"How many whole numbers from 1 to {limit} can be divided by {first} or by {other}?", str(count)


if __name__ == "__main__":
    PATH.write_text("".join(json.dumps(row) + "\n" for row in problems()), encoding="utf-8")
