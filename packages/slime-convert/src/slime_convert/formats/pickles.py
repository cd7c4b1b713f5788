"""Pickles read and written without running, or even importing, what they name.

A checkpoint may come from anywhere, and the `pickle` module calls whatever a file names. Here names stay texts: an
object becomes an :class:`Obj` that keeps what the pickle says of it. Memory and time grow no faster than the pickle's
bytes: nothing is copied, and no length in it is trusted.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import Any

_MAX_STACK = 100_000  # Python's pickler puts at most 1,000 items there, except for longer tuples
_MAX_KEY = 2**63
_GETATTR = ("builtins getattr", "__builtin__ getattr")


class PickleError(ValueError):
    """Bytes are not a pickle that can be read."""


class ForeignNameError(PickleError):
    """A pickle names what is not allowed there: whoever loads it with Python's own reader may run code."""


class Name(str):
    """The name of a type, a function or a value in a module: ``module name``."""

    __slots__ = ()


class Obj:
    """An object as a pickle describes it.

    Attributes:
        name: Of the type or function that made it, such as ``collections OrderedDict``; empty if that is an object.
        args: The arguments of that call; of an external object, such as a storage of torch, its description.
        state: The state that the object was given, or ``None``.
        items: What was added to it: values, as to a list or set, or pairs, as to a mapping.
    """

    __slots__ = ("args", "items", "name", "state")

    def __init__(self, name: str, args: Any) -> None:
        self.name, self.args = name, args
        self.state: Any = None
        self.items: list[Any] = []


def loads(data: bytes, *, allowed: Container[str] | None = None, enums: Collection[str] = ()) -> Any:
    """The object that a pickle describes.

    Args:
        allowed: What it may name, as :class:`Name` writes it; anything by default. Python's own reader, given the same
            bytes, looks up no other names: this one ends with an error wherever the two might differ.
        enums: Classes that it may name, and get members of with ``getattr``, as Python 3.11.0 to 3.11.3 write them.

    Returns:
        Plain values, lists, tuples and dicts; :class:`Name` for types and functions; :class:`Obj` for everything that
        is made with them, and for sets. A list or dict may hold itself.

    Raises:
        ForeignNameError: It names something that is not allowed.
        PickleError: It is damaged, or needs more of the stack than any real one.
    """
    machine = _Machine(data, allowed, enums)
    try:
        return machine.run()
    except ForeignNameError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error, OverflowError) as error:
        raise PickleError(f"damaged pickle at byte {machine.place} of {len(data)}: {error}") from error


class _Machine:
    """Runs a pickle's opcodes (see `pickletools`). Values are on ``stack``, and ``marks`` are places there."""

    def __init__(self, data: bytes, allowed: Container[str] | None, enums: Collection[str]) -> None:
        self.data = data
        self.allowed, self.enums = allowed, enums
        self.place = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.names: dict[str, Name] = {}

    def run(self) -> Any:
        data, stack, memo, place = self.data, self.stack, self.memo, 0
        # Python's own reader makes room for all places below one; here none is made.
        most = 2**32 if self.allowed is None else len(data)
        while True:
            code = data[place]
            place += 1
            # The memo's opcodes and small numbers are most of a large pickle, so they are done on the spot.
            if code == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[place : place + 4], "little")])
                place += 4
            elif code == 0x72:  # LONG_BINPUT
                number = int.from_bytes(data[place : place + 4], "little")
                if number > most:
                    raise ValueError(f"place {number} of the memo")
                memo[number] = stack[-1]
                place += 4
            elif code == 0x68:  # BINGET
                stack.append(memo[data[place]])
                place += 1
            elif code == 0x71:  # BINPUT
                memo[data[place]] = stack[-1]
                place += 1
            elif code == 0x4B:  # BININT1
                stack.append(data[place])
                place += 1
            elif code == 0x2E:  # STOP
                return stack.pop()
            else:
                self.place = place
                _OPCODES[code](self)
                place = self.place
            if len(stack) > _MAX_STACK:
                raise ValueError(f"more than {_MAX_STACK} values wait for use")

    def number(self, letter: str, order: str = "<") -> Any:
        """The number that follows, in a format of :mod:`struct`."""
        (value,) = struct.unpack_from(order + letter, self.data, self.place)
        self.place += struct.calcsize(order + letter)
        return value

    def bytes_of(self, letter: str) -> bytes:
        """Bytes that follow their length."""
        length = self.number(letter)
        if not 0 <= length <= len(self.data) - self.place:
            raise ValueError(f"{length} bytes are announced")
        self.place += length
        return self.data[self.place - length : self.place]

    def line(self) -> bytes:
        start = self.place
        self.place = self.data.index(b"\n", start) + 1
        return self.data[start : self.place - 1]

    def top(self, count: int) -> tuple[Any, ...]:
        """The last values, taken from the stack."""
        if count > len(self.stack):
            raise IndexError("the stack is empty")
        values = tuple(self.stack[-count:])
        del self.stack[-count:]
        return values

    def above_mark(self) -> list[Any]:
        """The values since the last mark, taken from the stack."""
        place = self.marks.pop()
        values = self.stack[place:]
        del self.stack[place:]
        return values

    def named(self, module: Any, name: Any) -> Name:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name is not a text")
        text = f"{module} {name}"
        if self.allowed is not None and not (
            text in self.allowed or text in self.enums or (self.enums and text in _GETATTR)
        ):
            raise ForeignNameError(text)
        return self.names.setdefault(text, Name(text))

    def add(self, values: Sequence[Any]) -> None:
        target = self.stack[-1]
        (target if isinstance(target, list) else target.items).extend(values)

    def set_items(self, values: Sequence[Any]) -> None:
        target = self.stack[-1]
        if len(values) % 2:
            raise ValueError("a key lacks its value")
        pairs = zip(values[::2], values[1::2], strict=True)
        if isinstance(target, dict):
            target.update((_key(key), value) for key, value in pairs)
        else:
            target.items.extend(pairs)


def _key(key: Any) -> Any:
    """A dict's key, if its hash is quick to compute and cannot be made to collide."""
    for part in key if isinstance(key, tuple) else (key,):
        if isinstance(part, tuple) or (isinstance(part, int) and not -_MAX_KEY <= part < _MAX_KEY):
            raise ValueError("a key is nested, or too large a number")
    return key


def _pushes(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(value(m))


def _long(m: _Machine) -> None:
    """Refuse an integer of more than 255 bytes: checkpoints have none, and Python refuses to print the longest."""
    raise ValueError(f"an integer has {len(m.bytes_of('i'))} bytes")


def _reduce(m: _Machine) -> None:
    function, args = m.top(2)
    if m.allowed is not None and isinstance(function, Name) and function in _GETATTR and not _is_member(args, m.enums):
        raise ForeignNameError(function)
    m.stack.append(Obj(function if isinstance(function, Name) else "", args))


def _is_member(args: Any, enums: Container[str]) -> bool:
    """Whether these arguments of ``getattr`` are a class of ``enums`` and the name of a member."""
    if type(args) is not tuple or len(args) != 2 or not isinstance(args[0], Name) or args[0] not in enums:
        return False
    return type(args[1]) is str and re.fullmatch("[A-Z][A-Z_]*", args[1]) is not None


def _new_ex(m: _Machine) -> None:
    m.stack.pop()  # keyword arguments
    _reduce(m)


def _build(m: _Machine) -> None:
    state = m.stack.pop()
    m.stack[-1].state = state  # an error for what is not an object


def _pop(m: _Machine) -> None:
    if m.marks and m.marks[-1] == len(m.stack):
        m.marks.pop()
    else:
        m.stack.pop()


def _memoize(m: _Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


def _unknown(m: _Machine) -> None:
    raise ValueError(f"opcode {m.data[m.place - 1]}")


# The opcodes that Python's pickler writes from protocol 2 on, which torch uses; older ones are not read.
_KNOWN: Mapping[str, Callable[[_Machine], None]] = {
    "\x80": lambda m: m.number("B"),
    "\x95": lambda m: m.number("Q"),
    "(": lambda m: m.marks.append(len(m.stack)),
    "0": _pop,
    "1": lambda m: m.above_mark().clear(),
    "2": lambda m: m.stack.append(m.stack[-1]),
    "N": _pushes(lambda m: None),
    "\x88": _pushes(lambda m: True),
    "\x89": _pushes(lambda m: False),
    "J": _pushes(lambda m: m.number("i")),
    "M": _pushes(lambda m: m.number("H")),
    "\x8a": _pushes(lambda m: int.from_bytes(m.bytes_of("B"), "little", signed=True)),
    "\x8b": _long,
    "G": _pushes(lambda m: m.number("d", order=">")),
    "X": _pushes(lambda m: m.bytes_of("I").decode("utf-8", "surrogatepass")),
    "\x8c": _pushes(lambda m: m.bytes_of("B").decode("utf-8", "surrogatepass")),
    "\x8d": _pushes(lambda m: m.bytes_of("Q").decode("utf-8", "surrogatepass")),
    "B": _pushes(lambda m: m.bytes_of("I")),
    "C": _pushes(lambda m: m.bytes_of("B")),
    "\x8e": _pushes(lambda m: m.bytes_of("Q")),
    "\x96": _pushes(lambda m: m.bytes_of("Q")),
    "]": _pushes(lambda m: []),
    "a": lambda m: m.add(m.top(1)),
    "e": lambda m: m.add(m.above_mark()),
    ")": _pushes(lambda m: ()),
    "t": _pushes(lambda m: tuple(m.above_mark())),
    "\x85": _pushes(lambda m: m.top(1)),
    "\x86": _pushes(lambda m: m.top(2)),
    "\x87": _pushes(lambda m: m.top(3)),
    "}": _pushes(lambda m: {}),
    "s": lambda m: m.set_items(m.top(2)),
    "u": lambda m: m.set_items(m.above_mark()),
    "\x8f": _pushes(lambda m: Obj("builtins set", ())),
    "\x90": lambda m: m.add(m.above_mark()),
    "\x91": _pushes(lambda m: Obj("builtins frozenset", (m.above_mark(),))),
    "\x94": _memoize,
    "c": _pushes(lambda m: m.named(m.line().decode(), m.line().decode())),
    "\x93": _pushes(lambda m: m.named(*m.top(2))),
    "R": _reduce,
    "\x81": _reduce,  # NEWOBJ: the same to those who only look
    "\x92": _new_ex,
    "b": _build,
    "Q": lambda m: m.stack.append(Obj("persistent", m.stack.pop())),
}
_OPCODES = [_KNOWN.get(chr(code), _unknown) for code in range(256)]


class New:
    """An object to be written, made by a type or function and its arguments.

    Args:
        state: The state of an object of a type; ``None`` for what a function returns.
    """

    def __init__(self, name: Name, *args: Any, state: Any = None) -> None:
        self.name, self.args, self.state = name, args, state


class External:
    """An object that is stored elsewhere, to be written as its description."""

    def __init__(self, description: Any) -> None:
        self.description = description


def dumps(value: Any) -> bytes:
    """A pickle, of protocol 2, of plain values, :class:`Name`, :class:`New` and :class:`External`."""
    return b"\x80\x02" + b"".join(_Writer().pieces(value)) + b"."


class _Writer:
    """Writes opcodes; a name or text is written once and then taken from the memo."""

    def __init__(self) -> None:
        self._memo: dict[tuple[bool, str], int] = {}

    def pieces(self, value: Any) -> Iterator[bytes]:
        if isinstance(value, str):
            yield self._text(value)
        elif isinstance(value, New):
            yield self._text(value.name)
            yield from self.pieces(value.args)
            yield b"R" if value.state is None else b"\x81"
            if value.state is not None:
                yield from self.pieces(value.state)
                yield b"b"
        elif isinstance(value, External):
            yield from self.pieces(value.description)
            yield b"Q"
        elif isinstance(value, Mapping):
            yield b"}("
            for key, item in value.items():
                yield from self.pieces(key)
                yield from self.pieces(item)
            yield b"u"
        elif isinstance(value, list | tuple):
            yield b"](" if isinstance(value, list) else b"("
            for item in value:
                yield from self.pieces(item)
            yield b"e" if isinstance(value, list) else b"t"
        else:
            yield _scalar(value)

    def _text(self, value: str) -> bytes:
        key = isinstance(value, Name), value
        if key in self._memo:
            return b"j" + struct.pack("<I", self._memo[key])
        number = self._memo[key] = len(self._memo)
        if isinstance(value, Name):
            module, _, attribute = value.partition(" ")
            written = f"c{module}\n{attribute}\n".encode()
        else:
            text = value.encode("utf-8", "surrogatepass")
            written = b"X" + struct.pack("<I", len(text)) + text
        return written + b"r" + struct.pack("<I", number)


def _scalar(value: Any) -> bytes:
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        if 0 <= value < 256:
            return b"K" + bytes([value])
        size = value.bit_length() // 8 + 1
        return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    raise TypeError(f"cannot write {value!r}")
