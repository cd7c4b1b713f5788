"""Files altered as readers are likely to stumble over: by chance, by structure, and by whoever means harm.

All that is drawn comes from the generator that is given, so that a mutant's number makes it again.
"""

from __future__ import annotations

import bz2
import contextlib
import functools
import gzip
import importlib
import io
import json
import lzma
import os
import random
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HUGE = 10**400
VALUES: list[Any] = [
    *(0, -1, 1, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**9, HUGE, -HUGE),
    *(1.5, -0.0, 1e308, float("nan"), float("inf"), True, False, None, "", "x", "0", "\ud800", "\0", "x" * 70_000),
    *(
        "../x",
        "../../../etc/passwd",
        "/etc/passwd",
        "/dev/zero",
        "NaN",
        "auto",
        [],
        {},
        [[]],
        ["a"] * 50,
        {"a": {"": 1}},
    ),
]
"""What takes the place of a value in JSON, and, as text, of a word in YAML, TOML and Jinja."""
NUMBERS = [0, 1, 0x7F, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
"""What takes the place of four or eight bytes."""
LINKS = ["/dev/zero", "/dev/tty", "/etc/passwd", ".."]
DEEP = 100_000
PACKED: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    ".gz": (gzip.decompress, functools.partial(gzip.compress, compresslevel=1)),
    ".bz2": (bz2.decompress, bz2.compress),
    ".xz": (lzma.decompress, functools.partial(lzma.compress, preset=0)),
}
with contextlib.suppress(ImportError):
    _zstd = importlib.import_module("backports.zstd")
    PACKED[".zst"] = (_zstd.decompress, _zstd.compress)
ZIPPED = (".npz", ".pt")
JSON, TEXT = (".json", ".jsonl"), (".yaml", ".toml", ".jinja", ".sh", ".txt")
TEMPLATES = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10**11 }}",
    "{{ [0] * 10**10 }}",
    "{% set n = messages|length * 10**11 %}{{ 'x' * n }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ '{:>99999999999}'.format(1) }}",
    "{{ 'x'.ljust(10**11) }}",
    "{{ 'x'|center(10**11) }}",
    "{{ lipsum(n=10**6) }}",
    "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s=[0]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "not " * 5000 + "1 }}",
    "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "{{ " + " + ".join(["1"] * 50_000) + " }}",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch ran') }}",
    "{{ raise_exception('x' * 10**6) }}",
    "{% include '/etc/passwd' %}",
    "{{ messages[0].content|replace('', 'x' * 10**6)|replace('x', 'y' * 10**6) }}",
    "{{ strftime_now('%Y' * 10**6) }}",
]
"""Jinja bombs."""
_NINE = b"%c: &%c [" + b",".join([b"*%c"] * 9) + b"]\n"
BOMBS: dict[str, list[bytes]] = {
    ".jinja": [text.encode() for text in TEMPLATES],
    ".yaml": [
        b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(_NINE % (n, n, *[n - 1] * 9) for n in range(98, 115)),
        b"a: &a {b: *a}\n",
        b"&a [*a]\n",
        b"a: !!python/object/apply:os.system [touch ran]\n",
        b"[" * DEEP,
        b"{a: " * 2000,
        b"- " * 5000,
        b"a: " + b"9" * 100_000,
        b"a: 1e" + b"9" * 1000,
        b"? " * 500 + b"a",
        b"<<: [{a: 1}, {b: 2}]\n",
        b"--- 1\n--- 2\n",
        b"a: !!binary " + b"A" * 1001,
        b"a: 2001-99-99\n",
    ],
    ".toml": [
        b"a = " + b"[" * DEEP,
        b"a = " + b"{a=" * 2000,
        b"a." * 5000 + b"a = 1",
        b"[" + b"a." * 5000 + b"a]",
        b"a = " + b"9" * 100_000,
        b"a = 1e" + b"9" * 1000,
        b'a = "\\uD800"',
        b"a = 0x" + b"f" * 100_000,
        b"a = 9999-99-99",
    ],
    ".json": [b"[" * DEEP, b'{"a":' * DEEP, b"9" * 100_000, b"1e" + b"9" * 1000, b'"\\ud800"', b"nul", b"[1,]"],
    ".jsonl": [b"[" * DEEP, b'{"prompt":' * DEEP, b'{"prompt": "a", "label": ' + b"9" * 100_000 + b"}", b"\0" * 1000],
}
"""Whole contents by the end of a file's name."""


def mutate(rng: random.Random, root: Path, others: list[Path]) -> str:
    """Alter one file below a folder, or two of them; returns the file and how."""
    paths = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    path = rng.choice(paths)
    kind = rng.choices(["bytes", "inside", "bomb", "other", "swapped"], [40, 40, 8, 8, 4])[0]
    old = path.read_bytes()
    if kind == "swapped":
        other = rng.choice([*others, *paths])
        path.write_bytes(other.read_bytes())
        return f"{path.relative_to(root)}: the bytes of {other.name}"
    if kind == "other":
        return f"{path.relative_to(root)}: {_replaced(rng, path)}"
    if kind == "bomb":
        how, new = bomb(rng, path.name, old)
    else:
        how, new = (inside if kind == "inside" else altered_bytes)(rng, path.name, old)
    path.write_bytes(new)
    return f"{path.relative_to(root)}: {how}"


def _replaced(rng: random.Random, path: Path) -> str:
    """Something else in a file's place."""
    kind = rng.choice(
        ["gone", "empty", "folder", "pipe", "loop", "/dev/zero", "/dev/tty", "/etc/passwd", "..", "sparse"]
    )
    if kind == "sparse":
        os.truncate(path, rng.choice([path.stat().st_size + 2**20, 2**33, 2**40]))
        return kind
    path.unlink()
    if kind == "empty":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "gone":
        path.symlink_to(path.name if kind == "loop" else kind)
    return kind


def altered_bytes(rng: random.Random, _name: str, old: bytes) -> tuple[str, bytes]:
    """Bytes altered without a look at what they mean; headers and ends more often than what is between."""
    new = bytearray(old)
    kind = rng.choice(["flip", "number", "number", "cut", "removed", "inserted", "repeated", "filled"])
    near = min(len(old), 200)
    place = rng.choice([rng.randrange(near + 1), len(old) - rng.randrange(near + 1), rng.randrange(len(old) + 1)])
    length = rng.choice([1, 2, 4, 8, 16, 64, 1000, 10_000])
    if kind == "flip":
        for _ in range(rng.choice([1, 1, 2, 20])):
            at = min(max(place + rng.randrange(-20, 20), 0), max(len(new) - 1, 0))
            new[at : at + 1] = bytes([rng.randrange(256)])
    elif kind == "number":
        form = rng.choice(["<Q", ">Q", "<I", ">I", "<H"])
        size = struct.calcsize(form)
        at = place - place % rng.choice([1, 4, 8])
        new[at : at + size] = struct.pack(form, rng.choice(NUMBERS) % 2 ** (8 * size))
    elif kind == "cut":
        del new[place:]
    elif kind == "removed":
        del new[place : place + length]
    elif kind == "inserted":
        new[place:place] = rng.randbytes(length)
    elif kind == "repeated":
        new[place:place] = new[place : place + length] * rng.choice([1, 2, 100])
    else:
        new[place : place + length] = bytes([rng.choice([0, 0xFF, 0x20, 0x7B])]) * len(new[place : place + length])
    return f"{kind} at {place}", bytes(new)


def inside(rng: random.Random, name: str, old: bytes) -> tuple[str, bytes]:
    """What a file holds altered, so that its form is still right: JSON, a header, a packed or zipped part."""
    end = Path(name).suffix
    with contextlib.suppress(Exception):  # a format that this file is not of after all
        if end in PACKED:
            unpack, pack = PACKED[end]
            how, new = inside(rng, Path(name).stem, unpack(old))
            return f"packed, {how}", pack(new)
        if end in ZIPPED:
            return _zipped(rng, old)
        if end == ".safetensors":
            (length,) = struct.unpack_from("<Q", old)
            how, header = _json(rng, old[8 : 8 + length])
            said = len(header) if rng.random() < 0.9 else rng.choice(NUMBERS)
            return f"header, {how}", struct.pack("<Q", said) + header + old[8 + length :]
        if end in JSON:
            lines = old.splitlines(keepends=True) if end == ".jsonl" else [old]
            at = rng.randrange(len(lines))
            how, line = _json(rng, lines[at])
            lines[at] = line + b"\n" * (end == ".jsonl")
            return how, b"".join(lines)
        if end in TEXT:
            return _words(rng, old)
    return altered_bytes(rng, name, old)


def _zipped(rng: random.Random, old: bytes) -> tuple[str, bytes]:
    """A zip archive with one member altered, its checksum right."""
    with zipfile.ZipFile(io.BytesIO(old)) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist()]
    at, made = rng.randrange(len(members)), io.BytesIO()
    packs = rng.random() < 0.1
    how = "packed" if packs else ""
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED if packs else zipfile.ZIP_STORED) as archive:
        for number, (info, data) in enumerate(members):
            if number == at and not packs:
                how, data = altered_bytes(rng, info.filename, data)
            archive.writestr(info.filename, data)
    return f"{members[at][0].filename}, {how}", made.getvalue()


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value: a container and a key of it."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    found = [(value, key) for key in keys]
    return found + [node for key in keys for node in _nodes(value[key])]


def _json(rng: random.Random, old: bytes) -> tuple[str, bytes]:
    """JSON with a value replaced, removed, renamed, repeated or nested."""
    content = json.loads(old)
    places = _nodes(content)
    if not places:
        return "a value", json.dumps(rng.choice(VALUES)).encode()
    container, key = rng.choice(places)
    kind, value = (
        rng.choice(["replaced", "replaced", "removed", "renamed", "nested", "twice", "deep"]),
        rng.choice(VALUES),
    )
    if kind == "removed":
        del container[key]
    elif kind == "renamed" and isinstance(container, dict):
        container[str(value)[:100]] = container.pop(key)
    elif kind == "nested":
        container[key] = {"a": container[key]} if rng.random() < 0.5 else [container[key]] * 3
    elif kind == "twice":
        text = json.dumps(content)
        return f"{key} {kind}", text.replace("{", "{" + f"{json.dumps(str(key))}: {json.dumps(value)}, ", 1).encode()
    elif kind == "deep":
        container[key] = "DEEP"
        much = rng.choice([300, 5000, DEEP])
        return f"{key} {kind}", json.dumps(content).replace('"DEEP"', "[" * much + "]" * much).encode()
    else:
        container[key] = value
    return f"{key} {kind} {str(value)[:20]!r}", json.dumps(content).encode()


def _words(rng: random.Random, old: bytes) -> tuple[str, bytes]:
    """Text with a word, a quoted text or a line replaced, removed or repeated."""
    pattern = rng.choice([rb"[\w.+-]+", rb"\"[^\"\n]*\"", rb"[^\n]+\n?", rb"[^\w\s]"])
    found = list(re.finditer(pattern, old))
    if not found:
        return altered_bytes(rng, "", old)
    match = rng.choice(found)
    texts = [str(one)[:5000].encode("utf-8", "replace") for one in VALUES]
    value = rng.choice([*texts, b"", match[0] * 2, b"&a [*a]", b"{{", b"'", b"\xff"])
    return f"{match[0][:20]!r} → {value[:20]!r}", old[: match.start()] + value + old[match.end() :]


def bomb(rng: random.Random, name: str, old: bytes) -> tuple[str, bytes]:
    """Little that claims to be much."""
    end = Path(name).suffix
    if end in PACKED:
        part = rng.choice([b'{"prompt": "1 + 1", "label": "2"}\n' * 2**16, bytes(2**22), b" " * 2**22])
        member = gzip.compress(part) if end == ".gz" else PACKED[end][1](part)
        times = max(1, min(2**30 // len(part), 20_000 // len(member)))
        return f"{times * len(part) >> 20} MiB in small", member * times
    if end == ".npz":
        made = io.BytesIO()
        shape = rng.choice([(2**40,), (2**31, 2**31), (-1,), (2**62,), (10**9,)])
        header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}".encode()
        data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n"
        with zipfile.ZipFile(io.BytesIO(old)) as archive, zipfile.ZipFile(made, "w") as written:
            for info in archive.infolist():
                written.writestr(info.filename, data if info.filename == "tokens.npy" else archive.read(info))
        return f"tokens of the shape {shape}", made.getvalue()
    if name == "tokenizer_config.json" and rng.random() < 0.8:
        text = rng.choice(TEMPLATES)
        return f"template {text[:30]}", json.dumps(json.loads(old) | {"chat_template": text}).encode()
    if end in BOMBS:
        content = rng.choice(BOMBS[end])
        return f"{content[:30]!r}", content
    if end in ("", ".pt"):
        content = pickled(rng)
        return f"a pickle, {content[:30]!r}", content
    return altered_bytes(rng, name, old)


def pickled(rng: random.Random) -> bytes:
    """Pickles that run something, ask for much, or have no end."""
    return rng.choice(
        [
            b"cos\nsystem\n(S'touch ran'\ntR.",
            b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x09touch ran\x85R.",
            b"\x80\x04\x8c\x08builtins\x8c\x09bytearray\x93\x8a\x05\x00\x00\x00\x00\x10\x85R.",
            b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",
            b"\x80\x04\x95" + struct.pack("<Q", 2**63 - 1) + b"N.",
            b"\x80\x04" + b"(" * DEEP + b".",
            b"\x80\x04]" + b"\x94h\x00a" * 1000 + b".",
            b"\x80\x04]\x94" + b"h\x00a" * 10 + b".",
            b"\x80\x04" + b"]" * 20_000 + b"a" * 19_999 + b".",
            b"\x80\x04r" + struct.pack("<I", 2**32 - 1) + b"N.",
            b"\x80\x04Nr" + struct.pack("<I", 2**31 - 1) + b".",
            b"\x80\x04\x8b" + struct.pack("<i", -1) + b".",
            b"L" + b"9" * 100_000 + b"L\n.",
            b'\x80\x02c__builtin__\neval\n(S\'open("ran","w")\'\ntR.',
            b"\x80\x04ctorch.storage\n_load_from_bytes\nB\x04\x00\x00\x00abcd\x85R.",
            b"\x80\x04K\x01" + b"\x860" * 10 + b".",
            b"\x80\x04)" + b"2\x86" * 40 + b".",
        ]
    )


def copied(source: Path, target: Path) -> None:
    """A folder's copy in a new place."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
