"""Headers of files that ``gguf``'s own writer made, compared with what its own reader finds."""

import json
import random
import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_convert import ModelShape
from slime_convert.errors import GgufError
from slime_convert.formats.gguf import KINDS, hf_config, read_gguf
from slime_convert.inspection import inspect_checkpoint

PLAIN = {"F32": np.float32, "F16": np.float16, "I8": np.int8, "I64": np.int64, "F64": np.float64}
SETTINGS = {
    "block_count": 3,
    "embedding_length": 24,
    "feed_forward_length": 40,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "attention.key_length": 8,
    "context_length": 256,
}


def write(path, tensors=(), settings=None, architecture="llama"):
    """Tensors as names, types and sizes (the outermost first)."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (settings or {}).items():
        kind = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kind.get(type(value), writer.add_array)(name, value)
    for name, kind, shape in tensors:
        if kind in PLAIN:
            writer.add_tensor(name, np.zeros(shape, PLAIN[kind]))
        else:
            type_ = gguf.GGMLQuantizationType[kind]
            nbytes = gguf.quant_shape_to_byte_shape(shape, type_)
            writer.add_tensor(name, np.zeros(nbytes, np.uint8), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model(architecture="llama"):
    """Settings and tensors of a small model."""
    tensors = [("token_embd.weight", "Q8_0", (101, 32)), ("output_norm.weight", "F32", (24,))]
    return tensors, {f"{architecture}.{name}": value for name, value in SETTINGS.items()}


def test_every_type_is_known_as_gguf_knows_it():
    theirs = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert theirs == KINDS


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.one_of(
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.floats(width=32, allow_nan=False),
    TEXTS,
    st.lists(TEXTS, min_size=1, max_size=5),
    st.lists(st.integers(-5, 5), min_size=1, max_size=5),
)
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(
    settings_=st.dictionaries(TEXTS.map(lambda text: f"x.{text}"), VALUES, max_size=5),
    kinds=st.lists(
        st.tuples(st.sampled_from(["F32", "F16", "I8", "I64", "F64", "Q4_0", "Q6_K", "BF16"]), SHAPES), max_size=5
    ),
)
def test_headers_are_read_as_gguf_reads_them(tmp_path_factory, settings_, kinds):
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    blocks = {name: block for name, block, _ in KINDS.values()}
    tensors = [(f"t{i}", kind, (*s[:-1], s[-1] * blocks[kind])) for i, (kind, s) in enumerate(kinds)]
    write(path, tensors, settings_)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    told = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.settings == {name: None if isinstance(value, list) else value for name, value in told.items()}
    assert [(t.name, t.kind, t.shape, t.offset, t.nbytes) for t in ours.tensors] == [
        (t.name, t.tensor_type.name, tuple(t.shape.tolist()[::-1]), t.data_offset, t.n_bytes) for t in theirs.tensors
    ]


def test_tensors_lie_where_the_files_own_alignment_puts_them(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "x")
    writer.add_custom_alignment(512)
    for name in "ab":
        writer.add_tensor(name, np.arange(3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = [tensor.data_offset for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors]
    assert [tensor.offset for tensor in read_gguf(tmp_path / "a.gguf").tensors] == theirs == [512, 1024]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_inspect_tells_types_and_shape(tmp_path, architecture):
    tensors, settings_ = model(architecture)
    words = {"tokenizer.ggml.tokens": ["a", "b"], f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5}
    path = write(
        tmp_path / "a.gguf", tensors, settings_ | words | {f"{architecture}.rope.freq_base": 5e5}, architecture
    )
    contents = inspect_checkpoint(tmp_path)
    assert (contents.format, contents.directory, contents.family) == ("gguf", path, architecture)
    assert contents.shape == ModelShape.from_hf_config(
        {
            "model_type": architecture,
            "num_hidden_layers": 3,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": 101,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        }
    )
    assert (contents.num_parameters, contents.quantization) == (101 * 32 + 24, "Q8_0")
    assert contents.files == {"a.gguf": path.stat().st_size}
    told = json.loads(json.dumps(contents.to_json()))
    assert told["dtypes"]["Q8_0"] == {"tensors": 1, "elements": 101 * 32, "bytes": 101 * 34}
    assert told["dtypes"]["float32"]["bytes"] == 24 * 4
    assert f"file          {path}\n" in contents.to_text()


def test_inspect_imports_neither_torch_nor_gguf(tmp_path):
    write(tmp_path / "a.gguf", *model())
    code = "import sys; from slime_convert.cli import main; print(main(sys.argv[1:]), HEAVY & set(sys.modules))"
    code = code.replace("HEAVY", "{'torch', 'numpy', 'gguf'}")
    words = [sys.executable, "-c", code, "inspect", tmp_path]
    lines = subprocess.run(words, capture_output=True, text=True, timeout=240).stdout.splitlines()
    assert lines[0] == "format        gguf" and lines[-1] == "0 set()"


def test_what_is_not_known_is_left_out(tmp_path):
    tensors, settings_ = model()
    scaled = settings_ | {"llama.rope.scaling.type": "linear"}
    per_layer = settings_ | {"llama.feed_forward_length": [1, 2, 3]}
    for number, (more, given_) in enumerate(
        [((), scaled), ((("rope_freqs.weight", "F32", (4,)),), settings_), ((), per_layer)]
    ):
        path = write(tmp_path / f"{number}.gguf", [*tensors, *more], given_)
        contents = inspect_checkpoint(path)
        assert (contents.family, contents.shape) == ("llama", None)
    other = write(tmp_path / "other.gguf", tensors, settings_, architecture="mamba")
    assert inspect_checkpoint(other).family == "mamba" and hf_config(read_gguf(other)) is None


def test_one_part_of_several_is_refused(tmp_path):
    path = write(tmp_path / "a.gguf", settings={"split.count": 3})
    with pytest.raises(GgufError, match=r"is one of 3 parts of a model; join them"):
        read_gguf(path)


def test_no_damage_is_told_by_anything_but_our_error(tmp_path):
    """Cut off at any place, or with bytes replaced: the header is read, or refused."""
    tensors, settings_ = model()
    path = write(tmp_path / "a.gguf", tensors, settings_ | {"words": ["a", "bc"], "numbers": [1, 2]})
    data, rng, refused = path.read_bytes(), random.Random(0), 0
    for attempt in range(400):
        damaged = bytearray(data[: rng.randrange(len(data))] if attempt % 3 == 0 else data)
        for _ in range(3 if attempt % 3 else 0):
            damaged[rng.randrange(900)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            read_gguf(path)
        except GgufError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "cannot read"),
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "has version 1, and 2 and 3 are read"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "has version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "cannot read"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "cannot read"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"x", 9) + struct.pack("<IQ", 9, 1) * 5000, "cannot read"),
    ],
    ids=["empty", "magic", "version", "big-endian", "tensors", "settings", "nested"],
)
def test_other_files_are_refused(tmp_path, data, told):
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(GgufError, match=told):
        read_gguf(tmp_path / "a.gguf")
