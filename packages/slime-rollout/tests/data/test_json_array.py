import io

import pytest

from slime_core.errors import DataError
from slime_rollout.data.json_array import array_items, is_array

TEXT = b'\xef\xbb\xbf \n[ {"a": "],[ \\" "}, 2 ,\n[3, [4]] ]\n'
ITEMS = [b'{"a": "],[ \\" "}', b"2", b"[3, [4]]"]


def read(text, offset=0, row=0, longest=99):
    return list(array_items(io.BytesIO(text), offset=offset, row=row, longest=longest, name="p.json"))


def test_elements_are_read_from_behind_any_of_them():
    found = read(TEXT)
    assert [(row, item) for row, _, item in found] == list(enumerate(ITEMS, 1))
    for place, (row, offset, _) in enumerate(found, 1):
        assert read(TEXT, offset, row) == found[place:]


@pytest.mark.parametrize(("text", "found"), [(TEXT, True), (b" \n[", True), (b'{"a": [1]}', False), (b"", False)])
def test_an_array_is_known_by_its_first_character(text, found):
    assert is_array(io.BytesIO(text), most=99) is found


def test_a_wrong_array_is_told_by_its_name():
    for text, words in ((b"[1, 2", "has no end"), (b"[1] 2", "something follows"), (b"[1]" + b" " * 99, None)):
        if words is None:
            assert len(read(text)) == 1
            continue
        with pytest.raises(DataError, match=f"p.json.*{words}"):
            read(text)
    with pytest.raises(DataError, match=r"p\.json, row 2: over 0 MiB long"):
        read(b'[1, "' + b"x" * 200_000, longest=99)
