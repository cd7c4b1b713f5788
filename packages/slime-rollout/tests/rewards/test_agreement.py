"""How far the verifiers agree with 500 pairs of answers, made from templates that tell whether the two are equal."""

import asyncio
import random
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

import pytest

from slime_rollout.rewards import VerifierError, VerifierPool, find_rule


class Pair(NamedTuple):
    kind: str
    answer: str
    label: str
    equal: bool


def _integers(rng):
    n = rng.randint(1000, 10**7)
    yield from (("integer", text, str(n), True) for text in (f"{n:,}", f"0{n}", f"{n}.0", f"+{n}", f"${n}$", f"{n}."))
    yield from (("integer", str(other), str(n), False) for other in (n + 1, -n, n * 10, n // 10))
    huge = rng.randint(10**25, 10**26)
    yield "integer", str(huge + 1), str(huge), False
    yield "integer", f"{huge:,}", str(huge), True


def _fractions(rng):
    value = Fraction(rng.randint(1, 30), rng.choice([3, 7, 9, 11, 13]))
    if value.denominator == 1:
        value += Fraction(1, 3)
    p, q = value.numerator, value.denominator
    label = f"\\frac{{{p}}}{{{q}}}"
    for text in (f"{p}/{q}", f"\\dfrac{{{p}}}{{{q}}}", f"\\tfrac{{{3 * p}}}{{{3 * q}}}", f"{2 * p}/{2 * q}"):
        yield "fraction", text, label, True
    for text in (f"\\frac{{{q}}}{{{p}}}", f"-\\frac{{{p}}}{{{q}}}", f"{p}", f"{float(value):.2f}", f"{p}/{q + 1}"):
        yield "fraction", text, label, False
    whole, rest = divmod(p + q, q)
    mixed = f"{whole}\\frac{{{rest}}}{{{q}}}"
    yield "mixed number", mixed, f"\\frac{{{p + q}}}{{{q}}}", True
    yield "mixed number", f"{whole} {rest}/{q}", f"\\frac{{{p + q}}}{{{q}}}", True
    yield "mixed number", f"{whole} {rest}/{q}", str(whole), False


def _decimals(rng):
    thousandths = rng.randint(1, 999) * 10 + rng.choice([1, 3, 7, 9])
    value = f"{thousandths / 1000:.3f}"
    yield "decimal", value + "00", value, True
    yield "decimal", f"\\frac{{{thousandths}}}{{1000}}", value, True
    yield "decimal", f"{thousandths}e-3", value, True
    yield "decimal", f"{thousandths} \\times 10^{{-3}}", value, True
    yield "decimal", f"{(thousandths + 1) / 1000:.3f}", value, False
    yield "decimal", f"{thousandths / 100:.2f}", value, False
    percent = rng.randint(1, 99)
    yield "percent", f"{percent}\\%", f"{percent}", True
    yield "percent", f"{percent}%", f"\\frac{{{percent}}}{{100}}", True
    yield "percent", f"{percent}\\%", f"{percent + 1}\\%", False


def _units(rng):
    n = rng.randint(2, 500)
    for text in (f"{n} cm", f"{n}\\text{{ cm}}", f"\\${n}", f"{n}^\\circ", f"{n}^{{\\circ}}", f"{n} \\text{{ units}}"):
        yield "unit", text, str(n), True
        yield "unit", text, str(n + 1), False


def _roots(rng):
    a, b = rng.randint(2, 9), rng.choice([2, 3, 5, 7])
    label = f"{a}\\sqrt{{{b}}}"
    yield "root", f"\\sqrt{{{a * a * b}}}", label, True
    yield "root", f"\\frac{{{a * b}}}{{\\sqrt{{{b}}}}}", label, True
    yield "root", f"{a}\\cdot\\sqrt{{{b}}}", label, True
    yield "root", f"{b}\\sqrt{{{a}}}", label, a * a * b == b * b * a
    yield "root", f"\\sqrt{{{a * b}}}", label, False
    yield "power", f"{b}^{{{a}}}", str(b**a), True
    yield "power", f"{a}^{{{b}}}", str(b**a), a**b == b**a
    yield "constant", f"{2 * a}\\pi", f"\\pi\\cdot {2 * a}", True
    yield "constant", f"{2 * a * 3.14:.2f}", f"{2 * a}\\pi", False


def _algebra(rng):
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    label = f"x^2+{a + b}x+{a * b}"
    yield "expression", f"(x+{a})(x+{b})", label, True
    yield "expression", f"{a * b}+{a + b}x+x^2", label, True
    yield "expression", f"(x-{a})(x-{b})", label, False
    yield "expression", f"x^2+{a * b}x+{a + b}", label, a * b == a + b
    yield "expression", f"y={a}x+{b}", f"{a}x+{b}", True
    yield "expression", f"x={a}", str(a), True
    yield "expression", f"x={a}", f"x={a + 1}", False


def _many(rng):
    a, b, c = sorted(rng.sample(range(-20, 20), 3))
    yield "tuple", f"({a}, {b})", f"({a},{b})", True
    yield "tuple", f"({b}, {a})", f"({a},{b})", False
    yield "tuple", f"\\left({a}, {b}, {c}\\right)", f"({a},{b},{c})", True
    yield "tuple", f"({a}, {b}, {c})", f"({a},{c},{b})", False
    yield "set", f"\\{{{c}, {a}, {b}\\}}", f"\\{{{a},{b},{c}\\}}", True
    yield "set", f"\\{{{a}, {b}\\}}", f"\\{{{a},{b},{c}\\}}", False
    yield "list", f"{b}, {a}", f"{a},{b}", True
    yield "list", f"{a} \\text{{ and }} {b}", f"{a},{b}", True
    yield "list", f"{a} or {b}", str(a), False
    yield "interval", f"[{a}, {b}]", f"\\left[{a},{b}\\right]", True
    yield "interval", f"[{a}, {b})", f"[{a},{b}]", False
    yield "interval", f"(-\\infty, {b})", f"(-\\infty,{b}]", False
    rows = f"{a} & {b} \\\\ {b} & {c}"
    yield "matrix", f"\\begin{{pmatrix}} {rows} \\end{{pmatrix}}", f"\\begin{{pmatrix}}{rows}\\end{{pmatrix}}", True
    yield "matrix", f"\\begin{{pmatrix}} {rows} \\end{{pmatrix}}", f"\\begin{{pmatrix}}{rows}1\\end{{pmatrix}}", False


def _words(rng):
    first, second = rng.sample(["Monday", "even", "Alice", "blue", "circle", "increasing", "true"], 2)
    yield "word", f"\\text{{{first}}}", first, True
    yield "word", first.upper(), first, True
    yield "word", second, first, False
    yield "word", "".join(reversed(first)), first, False
    yield "letter", "\\text{(B)}", "B", True
    yield "letter", rng.choice("ACD"), "B", False
    hour, minute = rng.randint(1, 12), rng.randint(10, 58)
    yield "time", f"{hour}:{minute}", f"{hour}:{minute}", True
    yield "time", f"{hour}:{minute}", f"{hour}:{minute + 1}", False


def _broken(rng):
    n = str(rng.randint(1, 99))
    for text in ("", "\\frac{", "}{", "\\", "?", "\\text{}", "()", "\\frac{1}{0}", "^", "\\sqrt", "_" * 20, "no idea"):
        yield "broken", text, n, False


def answer_pairs(count):
    """The first ``count`` different pairs, the same every time."""
    rng, pairs = random.Random(0), {}
    makers = (_integers, _fractions, _decimals, _units, _roots, _algebra, _many, _words, _broken)
    while len(pairs) < count:
        for maker in makers:
            pairs |= {pair[1:3]: Pair(*pair) for pair in maker(rng)}
    return list(pairs.values())[:count]


PAIRS = answer_pairs(500)


@pytest.fixture(scope="module")
def math_scores():
    pool = VerifierPool("boxed_math", workers=2, time_limit=20.0, memory_limit=2 * 2**30)

    async def all_of_them():
        asked = (pool.score(f"\\boxed{{{pair.answer}}}", pair.label, {}) for pair in PAIRS)
        return await asyncio.gather(*asked, return_exceptions=True)

    yield asyncio.run(asyncio.wait_for(all_of_them(), 200))
    pool.close()


def table(scores):
    """Kind → verdicts that are right, and all."""
    right = Counter(pair.kind for pair, score in zip(PAIRS, scores, strict=True) if (score == 1.0) == pair.equal)
    return {kind: (right[kind], count) for kind, count in Counter(pair.kind for pair in PAIRS).items()}


def text_scores(name):
    compare = find_rule(name).compare
    scores = [compare(pair.answer, pair.label) for pair in PAIRS]
    return [score["acc"] if isinstance(score, dict) else score for score in scores]


def test_the_pairs_are_balanced_and_different():
    assert len({(pair.answer, pair.label) for pair in PAIRS}) == 500
    assert 200 < sum(pair.equal for pair in PAIRS) < 300
    assert len({pair.kind for pair in PAIRS}) >= 18


def test_math_is_right_about_all_of_them(math_scores):
    assert [
        (*pair, score) for pair, score in zip(PAIRS, math_scores, strict=True) if (score == 1.0) != pair.equal
    ] == []


def test_math_fails_on_nothing_but_broken_answers(math_scores):
    failed = {pair.kind for pair, score in zip(PAIRS, math_scores, strict=True) if isinstance(score, Exception)}
    assert failed <= {"broken"}
    assert all(isinstance(score, float | VerifierError) for score in math_scores)


def test_the_table_of_agreement(math_scores):
    scores = {name: text_scores(name) for name in ("exact", "boxed_first_integer", "f1", "dapo")} | {
        "math": math_scores
    }
    tables = {name: table(values) for name, values in scores.items()}
    for kind, (_, count) in tables["math"].items():
        print(f"{kind:14} of {count:2}:", *(f"{name} {rows[kind][0]}" for name, rows in tables.items()))
    right = {name: sum(count for count, _ in rows.values()) for name, rows in tables.items()}
    print(right)
    assert right["exact"] < right["dapo"] < right["math"]


@pytest.mark.parametrize("name", ["exact", "dapo"])
def test_the_simpler_rules_never_take_wrong_for_right(name):
    taken = [pair for pair, score in zip(PAIRS, text_scores(name), strict=True) if score == 1.0]
    assert [pair for pair in taken if not pair.equal] == []
