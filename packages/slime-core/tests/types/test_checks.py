import json

import pytest

from slime_core.errors import DataError
from slime_core.types import Sample
from slime_core.types.arrays import columns_of, read_npz, samples_of, write_npz
from slime_core.types.checks import check_plain


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, (1, 2)]}, r"meta\.a\[1\] is a tuple; allowed: None, bool"),
        ({"a": {1: 2}}, r"meta\.a has the key 1 of type int; keys must be strings"),
        ({"a": b"x"}, r"meta\.a is a bytes"),
        ({"a": {1, 2}}, r"meta\.a is a set"),
        ({"a": object}, r"meta\.a is a type"),
    ],
)
def test_what_would_not_come_back_is_refused(value, message):
    with pytest.raises(DataError, match=message):
        check_plain(value, "meta")


def test_values_of_other_libraries_become_plain():
    import numpy
    import torch

    given = {
        "a": [numpy.int64(3), {"b": numpy.float32(0.5)}],
        "c": numpy.arange(4).reshape(2, 2),
        "d": torch.tensor([0.5], requires_grad=True),
        "e": torch.tensor(True),
        "f": [1, "text", None],
    }
    plain = {"a": [3, {"b": 0.5}], "c": [[0, 1], [2, 3]], "d": [0.5], "e": True, "f": [1, "text", None]}
    assert repr(check_plain(given, "meta")) == repr(plain)
    assert check_plain(plain, "meta") is plain
    (sample,) = samples_of(
        columns_of([Sample(index=0, group_index=0, prompt="", metadata=given, train_metadata=given)])
    )
    assert sample.metadata == sample.train_metadata == plain
    with pytest.raises(DataError, match=r"meta\.a is a complex"):
        check_plain({"a": numpy.array(1j)}, "meta")


@pytest.mark.parametrize("levels", range(97, 102))
def test_what_is_not_too_deep_to_write_is_not_too_deep_to_read(levels, tmp_path):
    def stack(depth):
        return [] if depth == 1 else [stack(depth - 1), 0]

    head = {"a": stack(levels)}
    if levels < 100:  # the head is a level too
        write_npz(tmp_path / "file", head, {})
        assert read_npz(tmp_path / "file", "a file") == (head, {})
    else:
        with pytest.raises(DataError, match="nested too deeply"):
            write_npz(tmp_path / "file", head, {})


def test_a_value_that_holds_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(DataError, match=r"is nested too deeply \(over 100 levels\), or holds itself"):
        check_plain(loop, "x")
    with pytest.raises(DataError, match="does not fit JSON"):
        columns_of([Sample(index=0, group_index=0, prompt="", metadata={"n": 10**5000})])
    assert json.loads(json.dumps(10**4000)) == 10**4000  # so the limit is Python's own, far off
