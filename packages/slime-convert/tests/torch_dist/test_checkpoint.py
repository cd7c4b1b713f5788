"""What is written can be read by torch's own reader, and what megatron-core would write can be read by ours."""

import io
import json
import pickle
import random
import types
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from slime_convert.errors import CheckpointError
from slime_convert.torch_dist import TorchDistReader, WeightSource, write_release
from slime_convert.torch_dist.headers import read_headers

NORM = "decoder.layers.{}.input_layernorm.weight"
FC1 = "decoder.layers.{}.mlp.linear_fc1.weight"


def source(name, tensor):
    return WeightSource(name, tuple(tensor.shape), tensor.dtype, lambda: tensor)


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(0)
    tensors = {"embedding.word_embeddings.weight": torch.randn(7, 4, generator=generator)}
    for layer in range(3):
        tensors[NORM.format(layer)] = torch.randn(4, generator=generator).bfloat16()
        tensors[FC1.format(layer)] = torch.randn(6, 4, generator=generator)
    return tensors


@pytest.fixture
def written(tmp_path, weights):
    write_release(tmp_path, [source(name, tensor) for name, tensor in weights.items()], {"num_layers": 3})
    return tmp_path


def test_written_weights_are_read_back(written, weights):
    reader = TorchDistReader(written)
    for name, tensor in weights.items():
        loaded = reader.load(name)
        assert torch.equal(loaded, tensor)
        assert (reader.shape(name), reader.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
    assert reader.args() == {"num_layers": 3}


def test_files_and_keys_are_those_that_megatron_core_asks_for(written, weights):
    release = written / "release"
    assert (written / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert {path.name for path in release.iterdir()} == {".metadata", "__0_0.distcp", "common.pt", "metadata.json"}
    assert json.loads((release / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert torch.load(release / "common.pt")["args"] == {"num_layers": 3}
    records = dcp.FileSystemReader(release).read_metadata().state_dict_metadata
    assert records["decoder.layers.self_attention.linear_qkv.layer_norm_weight"].size == (3, 4)
    assert records["decoder.layers.mlp.linear_fc1.weight"].size == (3, 6, 4)
    assert "decoder.layers.mlp.linear_fc1._extra_state/shard_2_3" in records


def test_torch_loads_the_stacked_tensors(written, weights):
    loaded = {
        "embedding.word_embeddings.weight": torch.zeros(7, 4),
        "decoder.layers.mlp.linear_fc1.weight": torch.zeros(3, 6, 4),
        "decoder.layers.mlp.linear_fc1._extra_state/shard_0_3": io.BytesIO(),
    }
    dcp.load(loaded, checkpoint_id=written / "release", no_dist=True)
    assert torch.equal(loaded["embedding.word_embeddings.weight"], weights["embedding.word_embeddings.weight"])
    for layer, tensor in enumerate(loaded["decoder.layers.mlp.linear_fc1.weight"]):
        assert torch.equal(tensor, weights[FC1.format(layer)])
    assert loaded["decoder.layers.mlp.linear_fc1._extra_state/shard_0_3"] == [None]


@pytest.fixture
def iteration(tmp_path, weights):
    """An iteration as a trainer leaves it: layers apart, gate and up apart, optimizer state, foreign types."""
    path = tmp_path / "iter_0000012"
    gate_up = weights[FC1.format(0)].chunk(2)
    state = {
        "embedding.word_embeddings.weight": weights["embedding.word_embeddings.weight"],
        NORM.format(0): weights[NORM.format(0)],
        FC1.format(0) + "_w": gate_up[0],
        FC1.format(0) + "_v": gate_up[1],
        "optimizer.state.exp_avg.embedding.word_embeddings.weight": torch.ones(7, 4),
        "chained_0.optimizer.state.param.x": torch.ones(2),
    }
    dcp.save(state, checkpoint_id=path, no_dist=True)
    record = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (path / "metadata.json").write_text(json.dumps(record))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    torch.save({"args": types.SimpleNamespace(num_layers=1, foreign=Foreign())}, path / "common.pt")
    return path


def test_a_trainers_iteration_is_read_and_its_optimizer_skipped(iteration, weights):
    reader = TorchDistReader(iteration.parent)
    assert reader.directory == iteration and TorchDistReader(iteration).directory == iteration
    assert {key.split(".")[0] for key in reader.weight_keys} == {"embedding", "decoder"}
    for name in ["embedding.word_embeddings.weight", NORM.format(0), FC1.format(0)]:
        assert torch.equal(reader.load(name), weights[name])
    assert reader.shape(FC1.format(0)) == (6, 4)


def test_foreign_types_are_not_unpickled(iteration):
    Foreign.unpickled = False
    assert TorchDistReader(iteration).args() == {"num_layers": 1}
    (iteration / ".metadata").write_bytes(pickle.dumps(Foreign()))
    with pytest.raises(CheckpointError, match="holds no torch checkpoint metadata"):
        TorchDistReader(iteration)
    assert not Foreign.unpickled


class Foreign:
    unpickled = False

    def __reduce__(self):
        return (_unpickle, ())


def _unpickle():
    Foreign.unpickled = True
    return Foreign()


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
    assert Path("run").exists() is False
    for read in (lambda: TorchDistReader(iteration).args(), lambda: read_headers(iteration).arguments):
        with suppress(CheckpointError):
            assert read() == {}
    assert Path("run").exists() is False


def with_metadata(directory, change):
    """Change what ``.metadata`` holds."""
    path = directory / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


FC1_KEY = "decoder.layers.mlp.linear_fc1.weight"


def place_of(metadata, layer):
    return metadata.storage_data[MetadataIndex(FC1_KEY, (layer, 0, 0))]


@pytest.mark.parametrize(
    "change",
    [
        lambda metadata: vars(metadata).clear(),
        lambda metadata: setattr(metadata, "state_dict_metadata", [1]),
        lambda metadata: setattr(metadata, "storage_data", None),
        lambda metadata: setattr(metadata.state_dict_metadata[FC1_KEY], "size", [3, 6, 4]),
        lambda metadata: setattr(metadata.state_dict_metadata[FC1_KEY], "chunks", None),
        lambda metadata: setattr(metadata.state_dict_metadata[FC1_KEY].chunks[0], "sizes", 5),
        lambda metadata: setattr(metadata.state_dict_metadata[FC1_KEY].properties, "dtype", torch.strided),
        lambda metadata: setattr(place_of(metadata, 0), "relative_path", "../../elsewhere/__0_0.distcp"),
        lambda metadata: setattr(place_of(metadata, 0), "relative_path", "/elsewhere/__0_0.distcp"),
    ],
)
def test_metadata_of_wrong_types_or_about_other_directories_is_refused(written, change):
    with_metadata(written, change)
    with pytest.raises(CheckpointError, match="holds no torch checkpoint metadata; the checkpoint is damaged"):
        TorchDistReader(written)


def cut_up(size, offsets, sizes):
    """A record with chunks that are no even grid."""

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
        (cut_up((3, 6, 4), [(0,)], [(72,)]), "its parts are no blocks of it"),
        (cut_up((3, 6, 4), [(0, 0, 0), (0, 3, 0)], [(1, 4, 4), (1, 2, 4)]), "parts overlap"),
        (cut_up((3, 6, 4), [(0, 0, 0), (0, 0, 0)], [(1, 3, 4), (1, 3, 4)]), "parts overlap"),
        (cut_up((3, -6, 4), [(0, 0, 0)], [(1, 6, 4)]), "no blocks|holds"),
        (cut_up((), [()], [()]), "has no axis of layers"),
    ],
)
def test_parts_that_do_not_make_up_the_weight_are_refused(written, change, words):
    with_metadata(written, change)
    with pytest.raises(CheckpointError, match=words):
        TorchDistReader(written).load(FC1.format(0))


@pytest.mark.parametrize(
    "parts",
    [
        {(0, 0): (4, 3), (0, 3): (4, 1), (4, 0): (2, 4)},
        {(row, 0): (1, 4) for row in range(6)},  # as thin as one layer of a stack
    ],
)
def test_uneven_parts_make_up_the_weight(tmp_path, weights, parts):
    """Ranks need not hold equal parts, nor parts of one shape."""
    whole = weights[FC1.format(0)]
    parts = {(r, c): whole[r : r + rows, c : c + columns] for (r, c), (rows, columns) in parts.items()}
    pieces = [source(f"piece{number}", part.contiguous()) for number, part in enumerate(parts.values())]
    write_release(tmp_path, pieces, {})

    def join(metadata):
        records, places = metadata.state_dict_metadata, metadata.storage_data
        chunks = []
        for number, (offsets, part) in enumerate(parts.items()):
            del records[f"piece{number}"]
            place = places.pop(MetadataIndex(f"piece{number}", (0, 0)))
            places[MetadataIndex("output_layer.weight", offsets)] = place
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), part.shape))
        properties = TensorProperties(dtype=whole.dtype)
        records["output_layer.weight"] = TensorStorageMetadata(properties, whole.shape, chunks)

    with_metadata(tmp_path, join)
    assert torch.equal(TorchDistReader(tmp_path).load("output_layer.weight"), whole)


def test_metadata_with_a_trainers_plans_is_read(written, weights):
    """megatron-core stores every rank's save plan beside the metadata."""
    path = written / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.all_local_plans = [dcp.SavePlan([])]
    path.write_bytes(pickle.dumps(metadata))
    assert torch.equal(TorchDistReader(written).load(NORM.format(2)), weights[NORM.format(2)])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda root: (root / "release" / "metadata.json").unlink(), r"metadata\.json.*complete torch_dist"),
        (
            lambda root: (root / "release" / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
            "'zarr'; allowed: 'torch' and 'torch_dist'",
        ),
        (lambda root: (root / "release" / ".metadata").write_bytes(b"\x80\x04"), "damaged"),
        (lambda root: (root / "release" / ".metadata").unlink(), "names release, but"),
        (lambda root: (root / "latest_checkpointed_iteration.txt").write_text("soon"), "'soon'; it must be 'release'"),
        (lambda root: (root / "latest_checkpointed_iteration.txt").write_text("²"), "'²'; it must be 'release'"),
        (lambda root: (root / "latest_checkpointed_iteration.txt").write_text("7"), "names iter_0000007, but"),
    ],
)
def test_a_damaged_checkpoint_is_refused(written, damage, words):
    damage(written)
    with pytest.raises(CheckpointError, match=words):
        TorchDistReader(written)


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp"])
def test_no_damage_is_told_by_anything_but_our_error(written, weights, name):
    """Each file cut off, and with bytes replaced: it is read, or refused by a `CheckpointError`."""
    path, rng = written / "release" / name, random.Random(0)
    data, refused = path.read_bytes(), 0
    for attempt in range(200):
        damaged = bytearray(data[: rng.randrange(len(data))] if attempt % 2 else data)
        for _ in range(0 if attempt % 2 else 4):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            reader = TorchDistReader(written)
            reader.args()
            for weight in weights:
                reader.load(weight)
        except CheckpointError:
            refused += 1
    assert refused > 50


def test_a_full_disk_is_an_os_error(tmp_path, weights, full_disk):
    """Such as the callers expect; in ``common.pt`` too."""
    tiny = [source(NORM.format(0), weights[NORM.format(0)])]
    with full_disk(50_000), pytest.raises(OSError, match="File too large"):
        write_release(tmp_path, tiny, {"long": "x" * 100_000})
    with full_disk(900), pytest.raises(OSError, match="File too large"):
        write_release(tmp_path, tiny, {})


def test_an_interrupt_in_the_middle_of_a_write_stays_one(tmp_path, weights, monkeypatch):
    """Where torch would raise something about an unexpected position."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("slime_convert.torch_dist.parts.write_checked", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_release(tmp_path, [source(NORM.format(0), weights[NORM.format(0)])], {})


def test_missing_parts_are_told_by_name(written):
    reader = TorchDistReader(written)
    with pytest.raises(CheckpointError, match=r"no weight output_layer\.weight"):
        reader.load("output_layer.weight")
    with pytest.raises(CheckpointError, match="has 3 layers; layer 3 was asked for"):
        reader.load(FC1.format(3))
    (written / "release" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        reader.load(FC1.format(0))


def test_a_ranks_missing_part_is_noticed(written):
    path = written / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    del metadata.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"].chunks[1]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="holds 0 of 24 elements"):
        TorchDistReader(written).load(FC1.format(1))


def test_layers_that_cannot_be_stacked_are_refused(tmp_path, weights):
    gap = [source(NORM.format(layer), weights[NORM.format(layer)]) for layer in (0, 2)]
    with pytest.raises(CheckpointError, match=r"0…1 with one shape.*got layers \[0, 2\]"):
        write_release(tmp_path, gap, {})


def test_a_weight_other_than_announced_is_refused(tmp_path):
    wrong = WeightSource("output_layer.weight", (2, 2), torch.float32, lambda: torch.zeros(3, 2))
    with pytest.raises(CheckpointError, match=r"announced as torch\.float32 \(2, 2\)"):
        write_release(tmp_path, [wrong], {})


LAYERS = "decoder.layers.{}.mlp.linear_fc2.weight"


@pytest.mark.parametrize("stack_layers", [True, False])
def test_one_weight_at_a_time_is_in_memory(tmp_path, stack_layers):
    """Sixteen layers of 1 MiB, under one key or under sixteen: all of them are never loaded at once."""
    alive: set[int] = set()
    most = 0

    def load():
        nonlocal most
        tensor = torch.zeros(512, 512)
        alive.add(tensor.data_ptr())
        weakref.finalize(tensor.untyped_storage(), alive.discard, tensor.data_ptr())
        most = max(most, len(alive))
        return tensor

    sources = [WeightSource(LAYERS.format(i), (512, 512), torch.float32, load) for i in range(16)]
    write_release(tmp_path, sources, {}, stack_layers=stack_layers)
    assert most <= 3
    assert Path(tmp_path / "release" / "__0_0.distcp").stat().st_size > 16 * 2**20


PART = 2 * 6 * 4 * 4  # two layers of FC1


def write_parts(root, weights, loaded=None, state=None, on_progress=lambda *_: None):
    """In files of two layers; ``loaded`` gets the names of the weights that are loaded."""

    def source_of(name, tensor):
        def load():
            if loaded is not None:
                loaded.append(name)
            return tensor

        return WeightSource(name, tuple(tensor.shape), tensor.dtype, load)

    sources = [source_of(name, tensor) for name, tensor in weights.items()]
    write_release(root, sources, {"num_layers": 3}, on_progress, part_bytes=PART, state=state)


def files_of(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def places(tmp_path):
    """Directories for two checkpoints, and for what is known of the second's finished files."""
    for name in ("whole", "cut", "state"):
        (tmp_path / name).mkdir()
    return tmp_path / "whole", tmp_path / "cut", tmp_path / "state"


def test_many_files_hold_what_one_would(places, weights):
    root, _, _ = places
    write_parts(root, weights)
    files = sorted(path.name for path in (root / "release").glob("*.distcp"))
    assert files == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    reader = TorchDistReader(root)
    assert all(torch.equal(reader.load(name), tensor) for name, tensor in weights.items())
    stacked = {"decoder.layers.mlp.linear_fc1.weight": torch.zeros(3, 6, 4)}
    dcp.load(stacked, checkpoint_id=root / "release", no_dist=True)
    for layer, tensor in enumerate(stacked["decoder.layers.mlp.linear_fc1.weight"]):
        assert torch.equal(tensor, weights[FC1.format(layer)])


def test_what_is_written_depends_on_nothing_else(places, weights):
    whole, cut, state = places
    write_parts(whole, weights)
    write_parts(cut, weights, state=state)
    assert files_of(whole) == files_of(cut)


@pytest.mark.parametrize("number", range(8))
def test_finished_files_are_not_written_again(places, weights, number):
    """The weights come in the order of the keys: the embedding; the norms; the layers of FC1."""
    whole, cut, state = places
    write_parts(whole, weights)
    order = ["embedding.word_embeddings.weight", *map(NORM.format, range(3)), *map(FC1.format, range(3))]
    loaded = []

    def stop(done, total):
        if len(loaded) > number - 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_parts(cut, weights, loaded, state, stop)
    assert loaded == order[:number]
    finished = max(end for end in (0, 4, 6) if end <= max(number - 1, 0))  # a file ends when the next one begins
    loaded.clear()
    calls = []
    write_parts(cut, weights, loaded, state, lambda *call: calls.append(call))
    assert loaded == order[finished:]
    kept = sum(weights[name].nbytes for name in order[:finished])
    assert calls[0] == (kept, sum(tensor.nbytes for tensor in weights.values())) and calls == sorted(calls)
    assert files_of(cut) == files_of(whole)


def test_a_flipped_byte_in_a_finished_file_is_noticed(places, weights):
    whole, cut, state = places
    write_parts(whole, weights)
    write_parts(cut, weights, state=state)
    path = cut / "release" / "__1_0.distcp"
    right = path.read_bytes()
    for place in random.Random(0).sample(range(len(right)), 20):
        wrong = bytearray(right)
        wrong[place] ^= 1
        path.write_bytes(wrong)
        loaded = []
        write_parts(cut, weights, loaded, state)
        assert loaded == [FC1.format(0), FC1.format(1)] and files_of(cut) == files_of(whole)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"places": 3}', '{"places": [[0, 1], [1, 1]], "checksum": 0}'])
def test_a_damaged_record_of_a_file_counts_for_nothing(places, weights, text):
    _, cut, state = places
    write_parts(cut, weights, state=state)
    (state / "__1_0.distcp.json").write_text(text)
    loaded = []
    write_parts(cut, weights, loaded, state)
    assert loaded == [FC1.format(0), FC1.format(1)]


def test_a_flipped_byte_of_any_weight_is_told(written, weights):
    """Torch's own reader does not compare checksums."""
    path = written / "release" / "__0_0.distcp"
    right = path.read_bytes()
    for name, tensor in weights.items():
        bits = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        for place in (right.index(bits), right.index(bits) + len(bits) - 1):
            wrong = bytearray(right)
            wrong[place] ^= 16
            path.write_bytes(wrong)
            key = TorchDistReader(written).find(name).keys[0]
            with pytest.raises(CheckpointError, match=rf"cannot read {key}.*: .*__0_0\.distcp is damaged .*checksum"):
                TorchDistReader(written).load(name)
    stacked = {"decoder.layers.mlp.linear_fc1.weight": torch.zeros(3, 6, 4)}
    dcp.load(stacked, checkpoint_id=written / "release", no_dist=True)
