"""GGUF files: headers read without the ``gguf`` package, weights expanded with it.

The ``gguf`` package reads headers too, but takes 11 s for a vocabulary of 150,000 tokens. The format, version 2 and 3:
magic, version, counts of tensors and settings; the settings, each a name, a type and a value; of each tensor its name,
sizes (the innermost first), type and offset; then, aligned, the tensors (ggml's documentation, "GGUF").
"""

from __future__ import annotations

import importlib.util
import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from slime_convert.errors import GgufError, UnsupportedModelError
from slime_convert.extras import install_hint
from slime_convert.families.layouts import deinterleave, interleave
from slime_convert.files import file_inside, open_file
from slime_convert.files.reading import read_whole
from slime_convert.files.tensors import LazyTensor, StoredBytes, tensor_info
from slime_convert.formats.checkpoint import Weights
from slime_convert.mapping import WeightMap
from slime_convert.shape import ModelShape

INSTEAD = "convert the model's Hugging Face release instead"
_MAGIC, _VERSIONS, _ALIGNMENT = b"GGUF", (2, 3), 32
_MAX_TEXT_BYTES = 100_000_000  # of names and settings; lists, such as the vocabulary, are not read
_ROWS_ELEMENTS = 2**22  # expanded at a time
_STRING, _ARRAY = 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

_KINDS = """
0 F32 1 4, 1 F16 1 2, 2 Q4_0 32 18, 3 Q4_1 32 20, 6 Q5_0 32 22, 7 Q5_1 32 24, 8 Q8_0 32 34,
9 Q8_1 32 40, 10 Q2_K 256 84, 11 Q3_K 256 110, 12 Q4_K 256 144, 13 Q5_K 256 176, 14 Q6_K 256 210,
15 Q8_K 256 292, 16 IQ2_XXS 256 66, 17 IQ2_XS 256 74, 18 IQ3_XXS 256 98, 19 IQ1_S 256 50,
20 IQ4_NL 32 18, 21 IQ3_S 256 110, 22 IQ2_S 256 82, 23 IQ4_XS 256 136, 24 I8 1 1, 25 I16 1 2,
26 I32 1 4, 27 I64 1 8, 28 F64 1 8, 29 IQ1_M 256 56, 30 BF16 1 2, 34 TQ1_0 256 54, 35 TQ2_0 256 66,
39 MXFP4 32 17, 40 NVFP4 64 36, 41 Q1_0 128 18
"""
KINDS: Mapping[int, tuple[str, int, int]] = {
    int(number): (name, int(elements), int(nbytes))
    for number, name, elements, nbytes in (kind.split() for kind in _KINDS.split(","))
}
"""ggml's element types: name, elements of a block, bytes of a block."""

PLAIN_KINDS = {
    **{"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
}
"""Torch's names of the types that are not quantized."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file, with llama.cpp's name and ggml's name of the element type.

    Its shape has the outermost size first, as in torch. Its bytes begin at ``offset`` in the file.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file: its settings by name, ``None`` in place of lists (the vocabulary), and its tensors."""

    path: Path
    settings: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's architecture."""
        return str(self.settings.get("general.architecture"))


def find_gguf(path: Path) -> Path | None:
    """The GGUF file at a path, or the only one in a directory; ``None`` without any."""
    if path.is_file():
        with os.fdopen(open_file(path), "rb") as file:
            return path if path.suffix == ".gguf" or file.read(len(_MAGIC)) == _MAGIC else None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = " ".join(file.name for file in found[:5])
        raise GgufError(f"{path} holds {len(found)} .gguf files: {names}; give one of them")
    return file_inside(path, found[0].name, GgufError) if found else None


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file; a :class:`GgufError` if it is damaged, or one of several parts of a model."""
    try:
        with os.fdopen(open_file(path), "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _read(path, data)
            size = len(data)
    except (OSError, ValueError, KeyError, struct.error, RecursionError, OverflowError) as error:
        raise GgufError(f"cannot read {path} ({error}); give a GGUF file that is complete") from error
    needed = max((tensor.offset + tensor.nbytes for tensor in header.tensors), default=0)
    for one, other in pairwise(sorted((t for t in header.tensors if t.nbytes), key=lambda t: t.offset)):
        if one.offset + one.nbytes > other.offset:  # else a small file could hold any number of weights
            raise GgufError(f"{path} is damaged: {one.name} and {other.name} overlap; fetch it again")
    if size < needed:
        raise GgufError(f"{path} is cut off: it has {size} of {needed} bytes; fetch it again")
    parts = header.settings.get("split.count", 1)
    if parts != 1:
        raise GgufError(
            f"{path} is one of {parts} parts of a model; join them with llama.cpp's `llama-gguf-split --merge` first"
        )
    return header


class _HeaderReader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.place, self._left = data, 0, _MAX_TEXT_BYTES

    def numbers(self, letters: str) -> tuple[Any, ...]:
        """Little-endian numbers, by the letters of :mod:`struct`."""
        values = struct.unpack_from(f"<{letters}", self._data, self.place)
        self.place += struct.calcsize(f"<{letters}")
        return values

    def text(self) -> str:
        start = self._skip_text()
        self._left -= self.place - start
        if self._left < 0:
            raise ValueError(f"its names and texts have more than {_MAX_TEXT_BYTES} bytes")
        return self._data[start : self.place].decode()

    def value(self, kind: int) -> Any:
        """A setting; ``None`` in place of a list."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._skip_list()
        return self.numbers(_FORMATS[kind])[0]

    def _skip(self, nbytes: int) -> None:
        self.place += nbytes
        if self.place > len(self._data):
            raise ValueError("it ends within its header")

    def _skip_text(self) -> int:
        """Go past a text; where its bytes begin."""
        length: int = struct.unpack_from("<Q", self._data, self.place)[0]
        self._skip(8 + length)
        return self.place - length

    def _skip_list(self) -> None:
        kind, count = self.numbers("IQ")
        if kind in _FORMATS:
            self._skip(count * struct.calcsize(f"<{_FORMATS[kind]}"))
        elif kind in (_STRING, _ARRAY):
            for _ in range(count):
                self._skip_text() if kind == _STRING else self._skip_list()
        else:
            raise ValueError(f"a list of unknown type {kind}")


def _read(path: Path, data: mmap.mmap) -> GgufFile:
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    cursor = _HeaderReader(data)
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
    if len({tensor.name for tensor in found}) < len(found):
        raise ValueError("two of its tensors have one name")
    return GgufFile(path, settings, tuple(replace(tensor, offset=start + tensor.offset) for tensor in found))


def _tensor(cursor: _HeaderReader) -> GgufTensor:
    """A tensor, its offset counted from the first tensor's."""
    name = cursor.text()
    (num_axes,) = cursor.numbers("I")
    shape = cursor.numbers("Q" * min(num_axes, 8))[::-1]
    number, offset = cursor.numbers("IQ")
    if number not in KINDS or num_axes > 8:
        raise ValueError(f"{name} has {num_axes} axes and type {number}")
    kind, block, nbytes = KINDS[number]
    if shape and shape[-1] % block:
        raise ValueError(f"{name} has rows of {shape[-1]} elements, not a multiple of its blocks' {block}")
    return GgufTensor(name, kind, shape, offset, math.prod(shape) // block * nbytes)


_FAMILIES = ("llama", "qwen3")
"""Architectures whose settings and names are translated; Hugging Face calls them the same."""

_FREQUENCIES = "rope_freqs.weight"  # Llama 3.1's rotary scaling, as a tensor


def hf_config(file: GgufFile) -> dict[str, Any] | None:
    """The entries of ``config.json`` for the model's shape, but for the rotary embedding's scaling (:func:`is_scaled`).

    ``None`` for an architecture that is not among :data:`_FAMILIES`, or if a setting is missing.
    """
    if file.architecture not in _FAMILIES:
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
        "rms_norm_eps": decimal(setting("attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_theta": decimal(setting("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in names,
    }


def is_scaled(file: GgufFile) -> bool:
    """Whether the rotary embedding is scaled."""
    kind = file.settings.get(f"{file.architecture}.rope.scaling.type", "none")
    return kind != "none" or any(tensor.name == _FREQUENCIES for tensor in file.tensors)


def decimal(number: Any) -> Any:
    """A setting as it was before it was stored in 32 bits: 1e-5 comes back as 9.999999747378752e-06."""
    return float(f"{number:.7g}") if isinstance(number, float) else number


_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}


def name_in_gguf(name: str) -> str:
    """llama.cpp's name of a weight, from Hugging Face's."""
    stem = name.removesuffix(".weight")
    if stem in _TOP:
        return f"{_TOP[stem]}.weight"
    layer, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_IN_LAYER[rest]}.weight"


def need_extra(*modules: str) -> None:
    """Refuse to go on without a module of the ``gguf`` extra (:class:`GgufError`)."""
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        are = "is" if len(missing) == 1 else "are"
        raise GgufError(
            f"reading GGUF needs {' and '.join(missing)}, which {are} not installed; run: "
            f"{install_hint('slime-convert', 'gguf')}"
        )


class GgufWeights(Weights):
    """The weights of a GGUF file under Hugging Face's names, expanded to ``float32``.

    Tensors that are not among the model's weights keep their names; a rotary scaling stored as a tensor is left out.

    Raises:
        GgufError: The file is not a readable GGUF file, or holds far fewer weights than its settings ask for.
        UnsupportedModelError: The names of the model's weights are not known.
    """

    naming = "huggingface"

    def __init__(self, path: Path) -> None:
        self.directory = path
        self.header = file = read_gguf(path)
        self.files = {path.name: path.stat().st_size}
        if file.architecture not in _FAMILIES:
            raise UnsupportedModelError(
                f"{path} holds a {file.architecture} model; GGUF files are read of {', '.join(_FAMILIES)}; {INSTEAD}"
            )
        config = hf_config(file)
        if config is None:
            raise GgufError(f"{path} lacks a number that gives the model's shape, or its embedding; fetch it again")
        shape = ModelShape.from_hf_config(config)
        if shape.num_layers > len(file.tensors):
            raise GgufError(f"{path} holds {len(file.tensors)} tensors for {shape.num_layers} layers; fetch it again")
        # With a scaling the shape is another, which is not read.
        self.shape = None if is_scaled(file) else shape
        self.tied = not shape.untie_embeddings_and_output_weights
        self.storage = f"{', '.join(sorted({tensor.kind for tensor in file.tensors}))}; expanded to float32"
        theirs = {name_in_gguf(name): name for name in WeightMap(shape).hf_names()}
        self._places = {theirs.get(t.name, t.name): t for t in file.tensors if t.name != _FREQUENCIES}
        self.tensors = {name: tensor_info(name, "float32", t.shape) for name, t in self._places.items()}
        rotated = {"q_proj": shape.num_attention_heads, "k_proj": shape.num_query_groups}
        self._rotated = rotated if shape.family == "llama" else {}

    def tensor(self, name: str) -> LazyTensor:
        """One weight, to be read. It needs the ``gguf`` extra."""
        need_extra("gguf")
        place = self._places[name]
        tensor = LazyTensor.made("float32", place.shape, partial(_expanded, self.directory, place))
        heads = self._rotated.get(name.split(".")[-2]) if "." in name else None
        if heads is None or len(place.shape) != 2 or place.shape[0] % (2 * heads) or not tensor.nbytes:
            return tensor
        # llama.cpp rotates neighbouring channels of a head, transformers the two halves.
        half = place.shape[0] // 2
        rotated: LazyTensor = interleave(deinterleave(tensor, [half, half], half), heads)
        return rotated


def _expanded(path: Path, place: GgufTensor) -> memoryview:
    import numpy as np
    from gguf import GGMLQuantizationType, dequantize

    stored = StoredBytes(path, place.offset, place.nbytes, place.name, error=GgufError)
    data = np.frombuffer(read_whole(LazyTensor.stored("uint8", (place.nbytes,), stored)), np.uint8)
    if not (count := math.prod(place.shape)):
        return memoryview(b"")
    columns = place.shape[-1] if place.shape else 1
    expanded = np.empty((count // columns, columns), np.float32)
    step = max(1, _ROWS_ELEMENTS // columns)
    try:
        rows, kind = data.reshape(len(expanded), -1), GGMLQuantizationType[place.kind]
        for start in range(0, len(rows), step):
            expanded[start : start + step] = dequantize(rows[start : start + step], kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise GgufError(f"cannot read {place.name} of {path} ({error}); give another file") from error
    return expanded.data.cast("B")
