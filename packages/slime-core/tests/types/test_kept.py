import pytest

from slime_core.errors import DataError
from slime_core.types import Sample
from slime_core.types.kept import is_kept, kept_text, nothing_kept

BASE = {"index": 7, "group_index": 0, "prompt": "p", "tokens": [1, 2, 3], "response_length": 2}


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([[1], [2]], "sample 7: kept_tokens must be text such as '5 17;5;', got list"),
        ("1;", "sample 7: kept_tokens has 1 sets, each to end with ';', for 2 tokens"),
        ("1;2;3", "sample 7: kept_tokens has 2 sets, each to end with ';', for 2 tokens"),
    ],
)
def test_kept_tokens_are_a_set_for_each_token(kept, message):
    with pytest.raises(DataError, match=message):
        Sample(**BASE, kept_tokens=kept)


def test_sets_are_counted_by_their_ends():
    assert kept_text([[5, 17], [], [5]]) == "5 17;;5;"
    assert is_kept("5 17;;5;", 3) and is_kept(nothing_kept(4), 4) and is_kept("", 0)
    assert not is_kept("5 17;;5;", 2) and not is_kept("5;1", 1)
