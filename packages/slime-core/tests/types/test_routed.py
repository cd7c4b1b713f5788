import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.types import Sample
from slime_core.types.routed import is_routed, routed_rows, routed_text

BASE = {"index": 7, "group_index": 0, "prompt": "p", "tokens": [1, 2, 3], "response_length": 2}


@given(
    st.integers(1, 5).flatmap(lambda width: st.lists(st.lists(st.integers(0, 65535), min_size=width, max_size=width)))
)
def test_routed_experts_come_back_from_text(rows):
    text = routed_text(np.array(rows, np.int32).reshape(len(rows), -1 if rows else 3))
    assert routed_rows("s", text).tolist() == rows
    assert len(routed_rows("s", text)) == len(rows)


def test_routed_experts_that_are_no_base64():
    with pytest.raises(DataError, match="s: routed_experts is not text such as"):
        routed_rows("s", "2x1:A?==")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (7, "sample 7: routed_experts must be text such as '16x1:AAEC…' .*, got int"),
        ("AAEC", "sample 7: routed_experts must be text .*, got 'AAEC'"),
        ("2x1:AAE", "sample 7: routed_experts is cut off"),
        ("2x1:AAEC", "sample 7: routed_experts is cut off"),
        ("2x1:AAECAwQF", "sample 7: routed_experts has rows of 3 tokens; at most 2 choose experts"),
    ],
)
def test_routed_experts_are_rows_of_all_tokens_but_the_last(text, message):
    with pytest.raises(DataError, match=message):
        Sample(**BASE, routed_experts=text)
    Sample(**BASE, routed_experts="2x1:AAECAw==")
    assert is_routed("2x1:AAECAw==", 2) and not is_routed("2x1:AAECAw==", 1) and not is_routed("2x1:AAE", 2)
