"""A calculator: exact arithmetic on what a model wrote, without running it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}
_LONGEST, _LARGEST = 200, 10**30  # characters of an expression; any number in it


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
