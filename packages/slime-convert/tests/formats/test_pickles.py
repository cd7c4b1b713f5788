"""Pickles are read without running or importing anything, and what is written Python's own unpickler reads."""

import io
import os
import pickle
import pickletools
import struct
import sys
import time
from collections import OrderedDict
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_convert.formats.pickles import External, ForeignNameError, Name, New, Obj, PickleError, dumps, loads

PLAIN = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(), st.binary()
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.tuples(inner),
        st.dictionaries(st.text(max_size=5), inner, max_size=4),
    ),
    max_leaves=20,
)


@given(PLAIN, st.sampled_from([2, 3, 4, 5]))
def test_plain_values_are_read(value, protocol):
    assert unwrapped(loads(pickle.dumps(value, protocol))) == value


def unwrapped(value):
    """Of protocol 2, in which bytes are written as a call."""
    if isinstance(value, Obj):
        assert value.name in ("_codecs encode", "__builtin__ bytes", "builtins bytes")
        return value.args[0].encode(value.args[1]) if value.args else b""
    if isinstance(value, dict):
        return {key: unwrapped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(unwrapped, value))
    return value


@given(PLAIN.filter(lambda value: b"" not in [value]))
def test_what_is_written_pythons_unpickler_reads(value):
    try:
        data = dumps(value)
    except TypeError:
        assert "b'" in repr(value) or 'b"' in repr(value)
        return
    assert pickle.loads(data) == value


def test_objects_are_described():
    data = pickle.dumps(OrderedDict(a=1, b=[2]), 2)
    found = loads(data)
    assert (found.name, found.items, found.state) == ("collections OrderedDict", [("a", 1), ("b", [2])], None)
    found = loads(pickle.dumps({1, 2}, 4))
    assert sorted(found.items) == [1, 2]
    assert sorted(loads(pickle.dumps(frozenset([3]), 4)).args[0]) == [3]
    error = loads(pickle.dumps(ValueError("x"), 4))
    assert error.name == "builtins ValueError" and error.args == ("x",)
    assert loads(pickle.dumps(torch.bfloat16)) == "torch bfloat16" and isinstance(loads(pickle.dumps(int)), Name)


def test_calls_and_external_objects_are_written():
    value = {"a": New(Name("collections OrderedDict")), "b": New(Name("torch Size"), (2, 3)), "c": Name("torch int8")}
    found = pickle.loads(dumps(value))
    assert found == {"a": OrderedDict(), "b": torch.Size([2, 3]), "c": torch.int8}

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, description):
            return ("external", description)

    data = dumps([External(("storage", 1)), New(Name("builtins ValueError"), "x", state={"y": 2})])
    external, error = Unpickler(io.BytesIO(data)).load()
    assert external == ("external", ("storage", 1)) and error.args == ("x",) and error.y == 2


def test_lists_and_dicts_that_hold_themselves():
    value = [1]
    value.append(value)
    found = loads(pickle.dumps(value, 2))
    assert found[1] is found
    value = {}
    value["self"] = value
    found = loads(pickle.dumps(value, 4))
    assert found["self"] is found


class Hostile:
    def __init__(self, mark):
        self._mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self._mark}",)


@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_is_run_or_imported(tmp_path, protocol):
    before = set(sys.modules)
    found = loads(pickle.dumps({"a": [Hostile(tmp_path / "mark")]}, protocol))
    assert found["a"][0].name in ("posix system", "os system") and not (tmp_path / "mark").exists()
    assert loads(b"\x80\x02cantigravity\nfly\n.") == "antigravity fly"
    assert set(sys.modules) == before


def test_members_of_enums_in_either_spelling():
    """Python 3.11.0 to 3.11.3 pickle an enum's member as ``getattr(its class, its name)``."""
    data = b"\x80\x02cbuiltins\ngetattr\ncenum\nEnum\nX\x01\x00\x00\x00a\x86R."
    found = loads(data)
    assert (found.name, found.args) == ("builtins getattr", ("enum Enum", "a"))


GROWING = {
    "memo": b"\x80\x02]q\x00" + b"h\x00" * 30 + b".",
    # Each list holds the one before it twice: 2**200 elements if it were copied or printed.
    "doubling": b"\x80\x02]" + b"".join(b"q%c](h%ch%ce" % (i, i, i) for i in range(200)) + b".",
    "long length": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"x.",
    "long integer": b"\x80\x02\x8b" + struct.pack("<i", 2**30) + b"x.",
    "deep": b"\x80\x02" + b"]" * 99_000 + b"a" * 98_999 + b".",
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", GROWING)
def test_memory_and_time_grow_with_the_bytes_and_no_faster(name):
    """Kilobytes of pickle took all memory, or hung."""
    import tracemalloc

    data = GROWING[name]
    tracemalloc.start()
    begun = time.monotonic()
    with suppress(PickleError):
        loads(data)
    peak, seconds = tracemalloc.get_traced_memory()[1], time.monotonic() - begun
    tracemalloc.stop()
    assert peak < 500 * len(data) + 2**20 and seconds < 10


@pytest.mark.timeout(20)
def test_keys_whose_hashes_collide_are_refused():
    """Integers of any size hash to few numbers: a dict of them would take the square of their count."""
    large = [2**61 - 1 + (2**61 - 1) * i for i in range(5)]
    with pytest.raises(PickleError, match="too large a number"):
        loads(pickle.dumps({2**70: 1}, 2))
    with pytest.raises(PickleError, match="too large a number"):
        loads(pickle.dumps({(large[4], "x"): 1}, 2))
    with pytest.raises(PickleError, match="nested"):
        loads(pickle.dumps({((1,), 2): 1}, 2))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\x80\x02",
        b".",
        b"\x80\x02a.",
        b"\x80\x02(.",
        b"\x80\x02K\x01\x86.",
        b"\x80\x02}K\x01s.",
        b"\x80\x02](K\x01u.",
        b"\x80\x02K\x01}b.",
        b"\x80\x02]R.",
        b"\x80\x02h\x05.",
        b"\x80\x02cos\n",
        b"\x80\x02\xff.",
        b"\x80\x02X\x05\x00\x00\x00a.",
        b"\x80\x02X\x01\x00\x00\x00\xff.",
        b"\x80\x02}](K\x01es.",
        b"\x80\x02(K\x01\x93.",
    ],
)
def test_damage_is_one_error(data):
    with pytest.raises(PickleError, match="damaged pickle at byte"):
        loads(data)


@given(st.binary(max_size=60), st.integers(2, 5))
def test_any_bytes_are_read_or_refused(noise, protocol):
    for data in (noise, bytes([0x80, protocol]) + noise, pickle.dumps({"a": [1, (2, "x")]}, protocol)[:-4] + noise):
        with suppress(PickleError):
            loads(data)


def test_every_opcode_from_protocol_2_on_is_known():
    """But for those that Python's pickler never writes by itself."""
    from slime_convert.formats.pickles import _KNOWN

    never = {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER", "STOP"}
    direct = {"LONG_BINGET", "LONG_BINPUT", "BINGET", "BINPUT", "BININT1"}
    old = {"DUP", "POP", "POP_MARK", "MARK", "TUPLE", "GLOBAL", "REDUCE", "BUILD", "APPEND", "APPENDS", "SETITEM"}
    wanted = {op.code for op in pickletools.opcodes if op.proto >= 2 or op.name in old} | {
        op.code for op in pickletools.opcodes if op.name in {"BINFLOAT", "BININT", "BININT2", "BINUNICODE", "NONE"}
    }
    names = {op.code: op.name for op in pickletools.opcodes}
    assert {code for code in wanted if names[code] not in never | direct} <= set(_KNOWN)


class Seen:
    """What a pickle names; all of it is allowed."""

    def __init__(self):
        self.names = set()

    def __contains__(self, name):
        self.names.add(name)
        return True


class Anything:
    """Stands for whatever a pickle names."""

    def __init__(self, *args, **named):
        pass

    def take(self, *args):
        pass

    append = extend = add = __setitem__ = __setstate__ = take


def names_in_python(data):
    """What Python's own reader looks up, until it ends or fails."""
    seen = set()

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            seen.add(f"{module} {name}")
            return Anything

    with suppress(Exception):
        Unpickler(io.BytesIO(data)).load()
    return seen


def test_a_name_that_is_not_allowed_is_refused_wherever_it_stands():
    for value in (os.system, [1, {"a": (os.system,)}], OrderedDict(a=os.system)):
        for protocol in (2, 3, 4, 5):
            data = pickle.dumps(value, protocol)
            with pytest.raises(ForeignNameError, match=r"^posix system$"):
                loads(data, allowed={"collections OrderedDict"})
            loads(data, allowed={"collections OrderedDict", "posix system"})
    dotted = b"\x80\x04\x8c\x02os\x8c\x0bpath.getcwd\x93."
    with pytest.raises(ForeignNameError, match=r"^os path\.getcwd$"):
        loads(dotted, allowed={"os path", "os getcwd"})


ATOMS = [
    *(b"(", b"0", b"1", b"2", b"N", b"K\x01", b"\x8c\x01a", b"\x8c\x01b", b"\x8c\x01c", b"\x93", b"\x94", b"cm\nn\n"),
    *(b"h\x00", b"h\x01", b"h\x02", b"q\x00", b"q\x01", b"r\x02\x00\x00\x00", b"j\x02\x00\x00\x00"),
    *(b"t", b")", b"\x85", b"\x86", b"\x87", b"]", b"a", b"e", b"}", b"s", b"u", b"\x8f", b"\x90", b"\x91"),
    *(b"R", b"\x81", b"\x92", b"b", b"\x95\x01\x00\x00\x00\x00\x00\x00\x00"),
]


@settings(max_examples=3000)
@given(st.lists(st.sampled_from(ATOMS), max_size=25))
def test_python_looks_up_no_name_that_was_not_looked_at(atoms):
    data = b"\x80\x04" + b"".join(atoms) + b"."
    seen = Seen()
    with suppress(PickleError):
        loads(data, allowed=seen)
        assert names_in_python(data) <= seen.names


def test_a_mark_is_taken_away_as_python_does():
    """Else the text under the mark would go, and the name be another one."""
    data = b"\x80\x04" + b"\x8c\x01m\x8c\x01x(0\x93."
    seen = Seen()
    loads(data, allowed=seen)
    assert seen.names == names_in_python(data) == {"m x"}


@pytest.mark.parametrize(
    ("args", "is_read"),
    [
        ("(cm\nE\nX\x05\0\0\0COLORt", True),
        ("(cm\nE\nX\x08\0\0\0__init__t", False),
        ("(cm\nE\nX\x05\0\0\0COLORNt", False),
        ("(cm\nF\nX\x05\0\0\0COLORt", False),
        ("(X\x03\0\0\0m EX\x05\0\0\0COLORt", False),
        ("(cm\nE\ncm\nE\nt", False),
        (")", False),
        ("](cm\nE\nX\x05\0\0\0COLORe", False),
    ],
)
def test_getattr_gives_an_enums_member_and_nothing_else(args, is_read):
    data = b"\x80\x02cbuiltins\ngetattr\n" + args.encode("latin-1") + b"R."
    if is_read:
        assert loads(data, allowed={"m F"}, enums={"m E"}).args[1] == "COLOR"
    else:
        with pytest.raises(ForeignNameError, match="builtins getattr"):
            loads(data, allowed={"m F"}, enums={"m E"})
    with pytest.raises(ForeignNameError, match="builtins getattr"):
        loads(data, allowed={"m E", "m F"})


def test_a_place_in_the_memo_makes_no_room_below_it():
    """Python's own reader takes 16 bytes for each."""
    with pytest.raises(PickleError, match="place 4294967280 of the memo"):
        loads(b"\x80\x04Nr\xf0\xff\xff\xff.", allowed=())
