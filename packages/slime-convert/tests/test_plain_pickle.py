import importlib
import io
import pickle

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from slime_convert import plain_pickle

MODULE = "torch.distributed.checkpoint.metadata"


def getattr_of(module, name, attribute):
    """The pickle of ``getattr(module.name, attribute)``, as some versions of Python write a member of an enum."""
    return b"cbuiltins\ngetattr\n(c%b\n%b\nV%b\ntR." % (module.encode(), name.encode(), attribute.encode())


def load(data):
    return plain_pickle.load(io.BytesIO(data))


def test_members_of_a_known_enum_are_read_in_either_spelling():
    for member in _MEM_FORMAT_ENCODING:
        by_name = getattr_of(MODULE, "_MEM_FORMAT_ENCODING", member.name)
        by_value = b"c%b\n_MEM_FORMAT_ENCODING\n(I%d\ntR." % (MODULE.encode(), member.value)
        assert load(by_name) is load(by_value) is load(pickle.dumps(member)) is member
        assert pickle.loads(by_name) is member


@pytest.mark.parametrize(
    ("module", "name", "attribute"),
    [
        (MODULE, "_MEM_FORMAT_ENCODING", "mro"),  # no member
        (MODULE, "Metadata", "__init__"),  # no enum
        ("os", "environ", "clear"),  # not known at all
        ("builtins", "dict", "fromkeys"),
    ],
)
def test_nothing_else_comes_through_getattr(module, name, attribute):
    assert isinstance(load(getattr_of(module, name, attribute)), plain_pickle.Inert)


@pytest.mark.parametrize(
    ("module", "name"), [(MODULE, "Metadata"), (MODULE, "_MEM_FORMAT_ENCODING"), ("pathlib", "PosixPath")]
)
def test_a_type_that_a_pickle_changes_is_put_back(module, name):
    """An object's state may be set; a type is an object too."""
    kind = getattr(importlib.import_module(module), name)
    before = dict(vars(kind))
    state = b"(N}(Vshape\nI1\nV__doc__\nI2\nut"  # (None, {"shape": 1, "__doc__": 2})
    data = b"c%b\n%b\n%bb." % (module.encode(), name.encode(), state)
    with pytest.raises(pickle.UnpicklingError, match=f"changes the types {name}"):
        load(data)
    assert dict(vars(kind)) == before
