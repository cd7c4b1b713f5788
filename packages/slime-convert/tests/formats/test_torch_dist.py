"""torch's own reader reads what is written here, and our reader what megatron-core would write."""

import io
import pickle
import random
import shutil
import types
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from slime_convert.errors import CheckpointError
from slime_convert.files.reading import TensorReader, bytes_of
from slime_convert.files.tensors import ITEM_BYTES
from slime_convert.formats.torch_dist import TorchDistWeights, check_metadata
from support.releases import EMBEDDING, FC1, FC1_KEY, NORM, load
from support.releases import write_release as write


def test_written_weights_are_read_back(written, weights):
    checkpoint = TorchDistWeights(written)
    assert checkpoint.tensors.keys() == {
        name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_") for name in weights
    }
    for name, tensor in weights.items():
        assert torch.equal(load(written, name), tensor)
    assert checkpoint.arguments == {"num_layers": 3} and checkpoint.notes == ()


class Foreign:
    unpickled = False

    def __reduce__(self):
        return (_unpickle, ())


def _unpickle():
    Foreign.unpickled = True
    return Foreign()


@pytest.fixture
def iteration(tmp_path, weights):
    """An iteration as a trainer leaves it: layers apart, gate and up apart, optimizer state, foreign types."""
    path = tmp_path / "iter_0000012"
    gate_up = weights[FC1.format(0)].chunk(2)
    state = {
        EMBEDDING: weights[EMBEDDING],
        NORM.format(0): weights[NORM.format(0)],
        FC1.format(0) + "_w": gate_up[0],
        FC1.format(0) + "_v": gate_up[1],
        f"optimizer.state.exp_avg.{EMBEDDING}": torch.ones(7, 4),
        "chained_0.optimizer.state.param.x": torch.ones(2),
    }
    dcp.save(state, checkpoint_id=path, no_dist=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    args = types.SimpleNamespace(num_layers=1, lr=0.5, path=["a", 1], none=None, tensor=torch.ones(3), f=Foreign())
    torch.save({"args": args, "iteration": 12}, path / "common.pt")
    return path


def test_a_trainers_iteration_is_read_and_its_optimizer_skipped(iteration, weights):
    checkpoint = TorchDistWeights(iteration)
    assert {key.split(".")[0] for key in checkpoint.tensors} == {"embedding", "decoder"} and checkpoint.step == 12
    assert {info.nbytes for info in checkpoint.optimizer} == {7 * 4 * 4, 8}
    for name in [EMBEDDING, NORM.format(0), FC1.format(0)]:
        assert torch.equal(load(iteration, name), weights[name])
    assert checkpoint.arguments == {"num_layers": 1, "lr": 0.5, "path": ["a", 1]}


def test_foreign_types_are_not_unpickled(iteration):
    Foreign.unpickled = False
    TorchDistWeights(iteration)
    (iteration / ".metadata").write_bytes(pickle.dumps(Foreign()))
    with pytest.raises(
        CheckpointError, match=r"\.metadata names .*_unpickle, which describes no checkpoint and may run"
    ):
        TorchDistWeights(iteration)
    assert not Foreign.unpickled


def test_code_in_front_of_a_description_is_refused(written):
    """The description is whole, and torch would load it: after it has run what stands before."""
    path = written / ".metadata"
    check_metadata(written)
    before = pickle.dumps(Foreign(), 4)[:-1] + b"0"  # its object is taken away again
    path.write_bytes(before + path.read_bytes()[2:])
    assert pickle.loads(path.read_bytes()) and Foreign.unpickled
    Foreign.unpickled = False
    for read in (check_metadata, TorchDistWeights):
        with pytest.raises(CheckpointError, match=r"names .*_unpickle, .*; nothing was run"):
            read(written)
    assert not Foreign.unpickled


class ArchiveOfCode(torch.nn.Module):
    """What torch.load runs in an archive of TorchScript, though it unpickles nothing."""

    @torch.jit.export
    def __getstate__(self):
        return 1, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[int, bool]):
        self.training = state[1]
        torch.save(torch.ones(1), "run")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_archive_of_code_under_common_pts_name_is_not_run(iteration, monkeypatch):
    monkeypatch.chdir(iteration.parent)
    torch.jit.save(torch.jit.script(ArchiveOfCode()), iteration / "common.pt")
    with suppress(CheckpointError):
        assert TorchDistWeights(iteration).arguments == {}
    assert not Path("run").exists()


def test_enums_that_python_3_11_0_pickled_through_getattr_are_read(iteration):
    """Python 3.11.0 to 3.11.3 pickle an enum's member as ``getattr(its class, its name)``."""
    path = iteration / ".metadata"
    metadata = pickle.loads(path.read_bytes())

    class Pickler(pickle.Pickler):
        def reducer_override(self, value):
            if type(value).__name__ == "_MEM_FORMAT_ENCODING":
                return getattr, (type(value), value.name)
            return NotImplemented

    buffer = io.BytesIO()
    Pickler(buffer).dump(metadata)
    path.write_bytes(buffer.getvalue())
    assert EMBEDDING in TorchDistWeights(iteration).tensors


@settings(max_examples=20)
@given(
    st.dictionaries(
        st.text("abc.", min_size=1, max_size=8),
        st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(1, 4), max_size=3)),
        max_size=4,
    )
)
def test_tensors_are_those_that_torch_wrote(tmp_path_factory, kinds):
    state = {f"x{name}": torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in kinds.items()}
    path = tmp_path_factory.mktemp("any") / "iter_0000003"
    dcp.save(state | {"bytes": io.BytesIO(b"no tensor")}, checkpoint_id=path, no_dist=True)
    torch.save({"iteration": 3}, path / "common.pt")
    checkpoint = TorchDistWeights(path)
    assert set(checkpoint.tensors) == set(state)
    for name, info in checkpoint.tensors.items():
        found = (info.name, f"torch.{info.dtype}", info.shape, info.nbytes)
        assert found == (name, str(state[name].dtype), tuple(state[name].shape), state[name].nbytes)
        assert load(path, name).shape == state[name].shape
    assert checkpoint.files == {file.name: file.stat().st_size for file in path.glob("*.distcp")}


def with_metadata(directory, change):
    """Change what ``.metadata`` holds."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def place_of(metadata, layer):
    return metadata.storage_data[MetadataIndex(FC1_KEY, (layer, 0, 0))]


@pytest.mark.parametrize(
    "change",
    [
        lambda metadata: vars(metadata).clear(),
        lambda metadata: setattr(metadata, "state_dict_metadata", [1]),
        lambda metadata: setattr(metadata, "storage_data", None),
        lambda metadata: setattr(metadata.state_dict_metadata[FC1_KEY], "chunks", None),
        lambda metadata: setattr(metadata.state_dict_metadata[FC1_KEY], "size", 3),
        lambda metadata: setattr(metadata.state_dict_metadata[FC1_KEY].chunks[0], "sizes", 5),
        lambda metadata: setattr(metadata.state_dict_metadata[FC1_KEY].properties, "dtype", torch.strided),
        lambda metadata: setattr(place_of(metadata, 0), "offset", -1),
        lambda metadata: setattr(place_of(metadata, 0), "length", 1.5),
        lambda metadata: setattr(place_of(metadata, 0), "relative_path", 3),
        lambda metadata: setattr(place_of(metadata, 0), "transform_descriptors", ["zstd"]),
    ],
)
def test_metadata_of_wrong_types_is_refused(written, change):
    with_metadata(written, change)
    with pytest.raises(CheckpointError, match=r"cannot read .*\.metadata \(.*\); the checkpoint is damaged"):
        TorchDistWeights(written)


@pytest.mark.parametrize("place", ["../secret", "ABSOLUTE"])
def test_metadata_leads_to_no_other_directory(written, place):
    """A checkpoint could name any file that the user may read."""
    secret = written.parent / "secret"
    shutil.copy(written / "__0_0.distcp", secret)
    place = str(secret) if place == "ABSOLUTE" else place
    with_metadata(written, lambda metadata: setattr(place_of(metadata, 0), "relative_path", place))
    with pytest.raises(CheckpointError, match="outside the checkpoint's directory"):
        TorchDistWeights(written)


def cut_up(size, offsets, sizes):
    """A record with blocks that are not an even grid."""

    def change(metadata):
        record = metadata.state_dict_metadata[FC1_KEY]
        record.size = torch.Size(size)
        record.chunks = [
            ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in zip(offsets, sizes, strict=True)
        ]

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # A range of the flattened tensor, as optimizers once were saved.
        (cut_up((3, 6, 4), [(0,)], [(72,)]), "has another number of axes"),
        (
            cut_up((3, 6, 4), [(0, 0, 0), (0, 3, 0)], [(1, 4, 4), (1, 2, 4)]),
            "parts overlap|nothing from|it is \\w+ \\(",
        ),
        (cut_up((3, 6, 4), [(0, 0, 0), (0, 0, 0)], [(1, 6, 4), (1, 6, 4)]), "parts overlap"),
        (cut_up((3, -6, 4), [(0, 0, 0)], [(1, 6, 4)]), "not a short list of whole numbers"),
        (cut_up((2**40, 6, 4), [(0, 0, 0)], [(2**40, 6, 4)]), r"incomplete .*: it holds \d+ of \d+ bytes of"),
    ],
)
def test_parts_that_do_not_make_up_the_weight_are_refused(written, change, words):
    with_metadata(written, change)
    with pytest.raises(CheckpointError, match=words):
        TorchDistWeights(written).tensor(FC1.format(0))


def test_a_ranks_missing_part_is_noticed(written):
    """A checkpoint without one of its parts was converted, in part."""
    with_metadata(written, lambda metadata: metadata.storage_data.pop(MetadataIndex(FC1_KEY, (1, 0, 0))))
    with pytest.raises(CheckpointError, match=r"is damaged: it lacks the place of .*linear_fc1\.weight; use"):
        TorchDistWeights(written).tensor(FC1.format(1))
    with_metadata(written, lambda metadata: metadata.state_dict_metadata[FC1_KEY].chunks.pop(1))
    with pytest.raises(
        CheckpointError, match=r"cannot read .*or one is missing \(nothing from \(1, 0, 0\) to \(2, 6, 4\)\)"
    ):
        TorchDistWeights(written).tensor(FC1.format(1))


GRIDS = st.lists(st.integers(1, 3), min_size=1, max_size=3)


@settings(max_examples=40)
@given(GRIDS, GRIDS, st.data())
def test_any_blocks_that_cover_a_weight_make_it_up(tmp_path_factory, rows, columns, data):
    """Ranks need not hold equal parts, nor parts of one shape: some blocks of a grid are joined or cut up further."""
    whole = torch.randn(sum(rows), sum(columns))
    blocks, top = [], 0
    for height in rows:
        left = 0
        for width in columns:
            if height > 1 and data.draw(st.booleans()):
                blocks += [(top, left, 1, width), (top + 1, left, height - 1, width)]
            else:
                blocks.append((top, left, height, width))
            left += width
        top += height
    data.draw(st.randoms(use_true_random=False)).shuffle(blocks)
    parts = {(r, c): whole[r : r + h, c : c + w].contiguous() for r, c, h, w in blocks}
    root = tmp_path_factory.mktemp("blocks")
    write(root, {f"piece{number}": part for number, part in enumerate(parts.values())})

    def join(metadata):
        records, located = metadata.state_dict_metadata, metadata.storage_data
        chunks = []
        for number, (offsets, part) in enumerate(parts.items()):
            del records[f"piece{number}"]
            place = located.pop(MetadataIndex(f"piece{number}", (0, 0)))
            located[MetadataIndex("output_layer.weight", offsets)] = place
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), part.shape))
        properties = TensorProperties(dtype=whole.dtype)
        records["output_layer.weight"] = TensorStorageMetadata(properties, whole.shape, chunks)

    with_metadata(root, join)
    assert torch.equal(load(root, "output_layer.weight"), whole)


def test_metadata_with_a_trainers_plans_is_read(written, weights):
    """megatron-core stores every rank's save plan next to the metadata."""
    with_metadata(written, lambda metadata: setattr(metadata, "all_local_plans", [dcp.SavePlan([])]))
    assert torch.equal(load(written, NORM.format(2)), weights[NORM.format(2)])


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp"])
def test_damage_raises_nothing_but_our_error(written, weights, name):
    """Each file cut off, and with bytes replaced: it is read as it was, or refused by a `CheckpointError`."""
    path, rng = written / name, random.Random(0)
    data, refused = path.read_bytes(), 0
    for attempt in range(200):
        damaged = bytearray(data[: rng.randrange(len(data))] if attempt % 2 else data)
        for _ in range(0 if attempt % 2 else 4):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            checkpoint = TorchDistWeights(written)
            for weight, tensor in weights.items():
                found = checkpoint.tensor(weight)
                if name == "__0_0.distcp":
                    with TensorReader() as reader:
                        assert torch.equal(reader.load(found), tensor)
                        reader.finish()
        except CheckpointError:
            refused += 1
    assert refused > 50


def test_missing_parts_are_named(written):
    checkpoint = TorchDistWeights(written)
    for name in ("output_layer.weight", FC1.format(3)):
        with pytest.raises(CheckpointError, match=rf"has no weight {name} \(looked for"):
            checkpoint.tensor(name)
    (written / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read decoder\.layers\.mlp"):
        checkpoint.tensor(FC1.format(0))
    with pytest.raises(CheckpointError, match=r"1 of the 1 files that .*\.metadata names are missing, such as __0_0"):
        TorchDistWeights(written)


def test_a_file_that_is_cut_off(written):
    path = written / "__0_0.distcp"
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=rf"is cut off: it has {len(data) - 100} of \d+ bytes; copy"):
        TorchDistWeights(written)


def test_a_flipped_byte_of_any_weight_is_noticed(written, weights):
    """Torch's own reader does not compare checksums."""
    path = written / "__0_0.distcp"
    right = path.read_bytes()
    for name, tensor in weights.items():
        bits = bytes(bytes_of(tensor))
        for place in (right.index(bits), right.index(bits) + len(bits) - 1):
            wrong = bytearray(right)
            wrong[place] ^= 16
            path.write_bytes(wrong)
            with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged: the checksum of .* is wrong"):
                load(written, name)
    dcp.load({FC1_KEY: torch.zeros(3, 6, 4)}, checkpoint_id=written, no_dist=True)


def test_what_describes_nothing_is_refused_before_torch_reads_it(written):
    """torch would look for another file instead, and log what it did not find."""
    check_metadata(written, is_read=True)
    (written / ".metadata").write_bytes(pickle.dumps((1, 2), 4))
    with pytest.raises(CheckpointError, match=r"cannot read .*\.metadata \(it holds something else than Metadata\)"):
        check_metadata(written, is_read=True)
