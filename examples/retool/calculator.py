"""A model that calls a calculator: the generate function, the tool and the reward.

    slime-launch train … --custom-generate-function-path examples/tool-calculator/calculator.py \
        --custom-rm-path examples/tool-calculator/calculator.py

The model writes ``<call>12 * 34</call>``, is shown ``<result>408</result>``, and goes on, until it has written
``Answer: 408`` or --max-turns is reached. Only what it wrote itself is trained on.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from slime_rollout import Trajectory

CALL = re.compile(r"<call>(.*?)</call>", re.DOTALL)
ANSWER = re.compile(r"Answer:\s*(-?[\d,]+(?:\.\d+)?(?:/\d+)?)")
CALLED = 0.1  # for a call that gave a result before a wrong answer, so that there is something to learn from at first

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}
_LONGEST, _LARGEST = 200, 10**30  # characters of an expression; any number in it


async def custom_generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Turns of the model, with the calculator's results between them."""
    trajectory = Trajectory.start(sample)
    while not trajectory.done:
        call = CALL.search(await trajectory.generate(stop=["</call>"]))
        if call is None:
            break
        result = calculate(call[1])
        sample.metadata["results"] = sample.metadata.get("results", 0) + (not result.startswith("error"))
        trajectory.observe(f"<result>{result}</result>")
    return sample


def custom_rm(args: Any, sample: Any) -> float:
    """1 for the right answer; a little for a call that gave a result."""
    answers = ANSWER.findall(sample.response)
    if answers and _number(answers[-1]) == _number(sample.label):
        return 1.0
    return CALLED if sample.metadata.get("results") else 0.0


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, exactly; or what is wrong with it, for the model to read."""
    if len(expression) > _LONGEST:
        return "error: the expression is too long"
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        return f"error: {str(error).split(' (')[0]}"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        result = Fraction(str(node.value))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        result = -_value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        result = _BINARY[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("only numbers, brackets and + - * / // % are known")
    if max(abs(result.numerator), result.denominator) > _LARGEST:
        raise ValueError("the numbers are too large")
    return result


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(text.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None
