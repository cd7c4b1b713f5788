import dataclasses
import math

import numpy as np
import pytest

from slime_core.errors import ConfigError
from slime_core.flags import Config, Range, flag


@pytest.mark.parametrize(
    ("allowed", "words", "inside", "outside"),
    [
        (Range(), "any number", (-1e9, 0, 1.5), (math.nan, math.inf, -math.inf)),
        (Range(least=0), "0 or more", (0, 3.5), (-1, math.nan)),
        (Range(above=0, below=1), "above 0 and below 1", (0.5,), (0, 1)),
        (Range(least=0, below=1), "at least 0 and below 1", (0, 0.9), (-0.1, 1)),
        (Range(least=1, most=65535), "between 1 and 65535", (1, 65535), (0, 65536)),
        (Range(least=1, most=1), "1", (1,), (0, 2)),
    ],
)
def test_ranges(allowed, words, inside, outside):
    assert str(allowed) == words
    assert all(number in allowed for number in inside) and not any(number in allowed for number in outside)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Typed(Config):
    path: str | None = flag(None, help="a function")
    files: tuple[str, ...] = flag((), help="files")
    size: int = flag(1, help="size", least=1)
    rate: float = flag(1.0, help="rate")
    on: bool = flag(False, help="a switch")
    layers: tuple[bool, ...] = flag((), help="one per layer")


def a_reward(args, sample):
    return 1.0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "path",
            a_reward,
            "--path takes text, got the function a_reward: other processes look it up, so give",
        ),
        ("path", len, "--path takes text, got the function len"),
        ("files", (a_reward,), "--files takes text, got the function a_reward"),
        ("path", 3, "--path takes text, got 3 (int)"),
        ("path", ("a",), "--path takes text, got ('a',) (tuple)"),
        ("size", "4", "--size takes a whole number, got '4' (str)"),
        ("size", True, "--size takes a whole number, got True (bool)"),
        ("size", 1.5, "--size takes a whole number, got 1.5 (float)"),
        ("rate", "1e-6", "--rate takes a number, got '1e-6' (str)"),
        ("on", "false", "--on takes True or False, got 'false' (str)"),
        ("on", 1, "--on takes True or False, got 1 (int)"),
        ("layers", (1,), "--layers takes True or False, got 1 (int)"),
    ],
)
def test_a_value_of_another_type_is_refused_where_it_is_given(name, value, message):
    with pytest.raises(ConfigError) as caught:
        Typed.of(**{name: value})
    assert str(caught.value).startswith(message)


def test_numbers_and_paths_of_other_libraries_are_taken(tmp_path):
    values = {"path": tmp_path, "size": np.int64(3), "rate": np.float32(0.5), "files": ["a"], "on": True}
    made = Typed.of(**values, layers=(True, False))
    assert (made.path, made.size, made.rate, made.files) == (tmp_path, 3, 0.5, ["a"])
    assert Typed.of(rate=1).rate == 1 and Typed.of(path=None).path is None
