"""What a GGUF file holds, read from its header. No torch, no numpy and no ``gguf`` package here.

The ``gguf`` package reads headers too, but makes an array of every text: it takes 11 s for a vocabulary of 150,000
tokens and merges. The format, version 2 and 3: magic, version, counts of tensors and settings; the settings, each a
name, a type and a value; of each tensor its name, sizes (the innermost first), type and offset; then, aligned, the
tensors (ggml's documentation, "GGUF").
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_convert.errors import GgufError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

KINDS: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""ggml's element types: name, elements of a block, bytes of a block."""

PLAIN_KINDS = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}
"""Torch's names of the types that are not quantized."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        name: As llama.cpp names it.
        kind: ggml's name of the element type.
        shape: The outermost size first, as in torch.
        offset: Of its first byte in the file.
        nbytes: Bytes of its elements.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file.

    Attributes:
        path: The file.
        settings: Settings by name; of lists, which hold the vocabulary, nothing.
        tensors: Its tensors, as they lie there.
    """

    path: Path
    settings: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's architecture."""
        return str(self.settings.get("general.architecture"))

    @property
    def quantized_kinds(self) -> list[str]:
        """The types of its quantized tensors."""
        return sorted({tensor.kind for tensor in self.tensors} - PLAIN_KINDS.keys())


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that ``path`` is, or the only one in or below the directory that it is; ``None`` without any.

    Raises:
        GgufError: There are several.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" or _begins_like_gguf(path) else None
    found = sorted(path.rglob("*.gguf"))
    if len(found) > 1:
        names = " ".join(str(file.relative_to(path)) for file in found[:5])
        raise GgufError(f"{path} holds {len(found)} .gguf files: {names}; give one of them")
    return found[0] if found else None


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file.

    Raises:
        GgufError: It is none, cut off, damaged, of another version, or one of several parts of a model.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _read(path, data)
            size = len(data)
    except (OSError, ValueError, KeyError, struct.error, RecursionError, OverflowError) as error:
        raise GgufError(f"cannot read {path} ({error}); give a GGUF file that is complete") from error
    needed = max((tensor.offset + tensor.nbytes for tensor in header.tensors), default=0)
    if size < needed:
        raise GgufError(f"{path} is cut off: it has {size} of {needed} bytes; fetch it again")
    parts = header.settings.get("split.count", 1)
    if parts != 1:
        raise GgufError(
            f"{path} is one of {parts} parts of a model; join them with llama.cpp's `llama-gguf-split --merge` first"
        )
    return header


def _begins_like_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


class _Cursor:
    """Reads one value after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.place = data, 0

    def numbers(self, letters: str) -> tuple[Any, ...]:
        """Little-endian numbers, by the letters of :mod:`struct`."""
        values = struct.unpack_from(f"<{letters}", self._data, self.place)
        self.place += struct.calcsize(f"<{letters}")
        return values

    def text(self) -> str:
        """A length and as many bytes."""
        start = self.skip_text()
        return self._data[start : self.place].decode()

    def skip_text(self) -> int:
        """Go past a text; where its bytes begin."""
        (length,) = struct.unpack_from("<Q", self._data, self.place)
        start = self.place + 8
        self.skip(8 + length)
        return start

    def skip(self, nbytes: int) -> None:
        """Go on by some bytes."""
        self.place += nbytes
        if self.place > len(self._data):
            raise ValueError("it ends within its header")

    def value(self, kind: int) -> Any:
        """A setting; ``None`` in place of a list."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._skip_list()
        return self.numbers(_FORMATS[kind])[0]

    def _skip_list(self) -> None:
        kind, count = self.numbers("IQ")
        if kind in _FORMATS:
            self.skip(count * struct.calcsize(f"<{_FORMATS[kind]}"))
            return
        for _ in range(count):
            if kind == _STRING:
                self.skip_text()
            elif kind == _ARRAY:
                self._skip_list()
            else:
                raise ValueError(f"a list of unknown type {kind}")


def _read(path: Path, data: mmap.mmap) -> GgufFile:
    if data[: len(MAGIC)] != MAGIC:
        raise ValueError("it does not begin with GGUF")
    cursor = _Cursor(data)
    _, version, num_tensors, num_settings = cursor.numbers("IIQQ")
    if version not in _VERSIONS:
        raise ValueError(f"it has version {version}, and {' and '.join(map(str, _VERSIONS))} are read")
    settings: dict[str, Any] = {}
    for _ in range(num_settings):
        name = cursor.text()
        settings[name] = cursor.value(*cursor.numbers("I"))
    found = [_tensor(cursor) for _ in range(num_tensors)]
    alignment = settings.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment is {alignment!r}")
    start = -(-cursor.place // alignment) * alignment
    tensors = tuple(GgufTensor(name, kind, shape, start + offset, size) for name, kind, shape, offset, size in found)
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise ValueError("two of its tensors have one name")
    return GgufFile(path, settings, tensors)


def _tensor(cursor: _Cursor) -> tuple[str, str, tuple[int, ...], int, int]:
    name = cursor.text()
    (num_axes,) = cursor.numbers("I")
    shape = cursor.numbers("Q" * min(num_axes, 8))[::-1]
    number, offset = cursor.numbers("IQ")
    if number not in KINDS or num_axes > 8:
        raise ValueError(f"{name} has {num_axes} axes and type {number}")
    kind, block, nbytes = KINDS[number]
    if shape and shape[-1] % block:
        raise ValueError(f"{name} has rows of {shape[-1]} elements, which are no blocks of {block}")
    return name, kind, shape, offset, math.prod(shape) // block * nbytes


FAMILIES = ("llama", "qwen3")
"""Architectures whose settings and names are translated; Hugging Face calls them the same."""

FREQUENCIES = "rope_freqs.weight"
"""Llama 3.1's rotary scaling, as a tensor."""


def hf_config(file: GgufFile) -> dict[str, Any] | None:
    """What ``config.json`` would say of the model's shape.

    Returns:
        ``None`` of an architecture that is none of :data:`FAMILIES`, or if a setting is missing. The rotary embedding
        is told without its scaling (:func:`is_scaled`).
    """
    if file.architecture not in FAMILIES:
        return None
    names = {tensor.name: tensor for tensor in file.tensors}
    embedding = names.get("token_embd.weight")

    def setting(name: str, default: Any = None) -> Any:
        return file.settings.get(f"{file.architecture}.{name}", default)

    heads, width = setting("attention.head_count"), setting("embedding_length")
    config = {
        "num_hidden_layers": setting("block_count"),
        "hidden_size": width,
        "intermediate_size": setting("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": setting("attention.head_count_kv", heads),
        "max_position_embeddings": setting("context_length"),
        "vocab_size": embedding.shape[0] if embedding and embedding.shape else None,
    }
    if not all(type(value) is int and value > 0 for value in config.values()):
        return None
    return config | {
        "model_type": file.architecture,
        "head_dim": setting("attention.key_length", width // heads),
        "rms_norm_eps": _decimal(setting("attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_theta": _decimal(setting("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in names,
    }


def is_scaled(file: GgufFile) -> bool:
    """Whether the rotary embedding is scaled."""
    kind = file.settings.get(f"{file.architecture}.rope.scaling.type", "none")
    return kind != "none" or any(tensor.name == FREQUENCIES for tensor in file.tensors)


def _decimal(number: Any) -> Any:
    """A setting as it was before it was stored in 32 bits: 1e-5 comes back as 9.999999747378752e-06."""
    return float(f"{number:.7g}") if isinstance(number, float) else number
