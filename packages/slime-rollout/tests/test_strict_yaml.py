"""YAML files that flags name: numbers as a command line has them, and what is not taken."""

import datetime
import json

import pytest

from slime_core.errors import ConfigError
from slime_rollout.strict_yaml import load_yaml


@pytest.fixture
def load(tmp_path):
    def loading(text, **how):
        (tmp_path / "a.yaml").write_text(text)
        return load_yaml("--file", str(tmp_path / "a.yaml"), **how)

    return loading


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("2.5E+3", 2500.0), (".5", 0.5), ("-1.", -1.0), ("010", 10), ("-08", -8), ("0x1F", 31),
        ("0o17", 15), ("1_000", 1000), ("+3", 3), (".inf", float("inf")), ("1:30", "1:30"), ("1e3", "1e3"),
        ("none", "none"), ("'010'", "010"), ("null", None), ("~", None), ("", None), ("off", False), ("Yes", True),
        ("2026-11-27", datetime.date(2026, 11, 27)), ("1.2.3", "1.2.3"), ("=", "="), ("0b11", 3), ("1e", "1e"),
    ],
)  # fmt: skip
def test_a_plain_value(text, value, load):
    found = load(f"a: {text}")["a"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["1.10", "1e-6", "007", "0x1F", "1_000", "2026-11-27", "2001-12-14 21:59:43.10 -5"])
def test_what_may_be_a_text_is_shown_as_it_is_written(text, load):
    assert str(load(f"a: [{text}]", written=True)["a"][0]) == text


def test_written_numbers_are_numbers_all_the_same(load):
    found = load("a: {b: 010, c: 1.50}", written=True)
    assert json.dumps(found) == '{"a": {"b": 10, "c": 1.5}}'
    assert load("base: &b {x: 1}\nmore: {<<: *b, y: 2}", written=True)["more"] == {"x": 1, "y": 2}


@pytest.mark.parametrize("text", ["a: 1\na: 2", "a: !!python/object:x.y {}", "a: [", "a: !thing 3"])
def test_what_is_not_taken(text, load):
    for written in (False, True):
        with pytest.raises(ConfigError, match=r"--file .*a.yaml, line \d: invalid YAML"):
            load(text, written=written)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "brackets are nested too deeply"),
        ("{a: " * 100_000, "brackets are nested too deeply"),
        ("- " * 20_000, "nested too deeply"),
        ("a: &a {b: *a}", "aliases make 1,000,000 values of it or more"),
        ("&a [*a]", "aliases make 1,000,000 values of it or more"),
        ("a: " + "9" * 5000, "a value that cannot be read: Exceeds the limit"),
        ("a: 2001-99-99", "a value that cannot be read: month must be in 1..12"),
        ("a: " + "x" * 2**20, "at most 524,288 are read"),
    ],
    ids=range(8),
)
def test_what_asks_for_too_much_is_refused(text, problem, load):
    with pytest.raises(ConfigError, match=f"^--file .*{problem}"):
        load(text)


def test_aliases_of_aliases_are_counted(load):
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]" for before, name in ("ab", "bc", "cd", "de", "ef")]
    assert len(load("\n".join(lines[:5]))["e"]) == 10
    with pytest.raises(ConfigError, match="aliases make 1,000,000 values"):
        load("\n".join(lines))
