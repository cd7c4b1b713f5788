"""Small files that ask for much: time, memory and output are bounded by the bytes that are there."""

import argparse
import json
import os
import pickle
import shutil
import struct
import time
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from slime_convert import ModelShape, WeightMap, formats, hf_to_fp8, hf_to_torch_dist
from slime_convert.cli import main
from slime_convert.errors import CheckpointError, GgufError, HfConfigError, WeightError
from slime_convert.files import read_file, read_json
from slime_convert.files.tensors import LazyTensor, concat, split
from slime_convert.formats.gguf import read_gguf
from slime_convert.formats.legacy import LegacyWeights
from slime_convert.formats.torch_dist import TorchDistWeights
from support.family_models import make_model, tree, weights_of


@pytest.fixture
def in_seconds():
    """A limit far above what the work takes, and far below what it took without bounds."""
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < 10


@pytest.fixture
def refused(capsys, tmp_path):
    """Runs a command, which has to refuse in one line and to leave everything as it was."""

    def run(*words):
        before = tree(tmp_path)
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and tree(tmp_path) == before, line
        return line

    return run


def legacy(root, *models, **more):
    """A legacy checkpoint, a model for each tensor-parallel rank."""
    for rank, model in enumerate(models):
        directory = root / f"mp_rank_{rank:02d}"
        directory.mkdir(parents=True)
        args = argparse.Namespace(tensor_model_parallel_size=len(models))
        torch.save({"checkpoint_version": 3.0, "args": args, **model, **more}, directory / "model_optim_rng.pt")
    return root


def megatron_shards(hf, tp):
    """The model of a Hugging Face directory as the state dicts of tensor-parallel ranks."""
    shape = ModelShape.from_hf_config(hf)
    weight_map, weights = WeightMap(shape, shape.padded_vocab_size(tp)), weights_of(hf)
    ranks = [{} for _ in range(tp)]
    for name in weight_map.megatron_names():
        for rank, shard in zip(
            ranks, weight_map.split_tp(name, weight_map.from_hf(name, weights.get), tp), strict=True
        ):
            rank[name] = shard.clone()
    return ranks


class TestPieces:
    def test_without_bytes_there_are_none(self, in_seconds):
        empty = LazyTensor("float32", (2**40, 0), ())
        assert concat([empty, empty], 1) == LazyTensor("float32", (2**40, 0), ())
        assert [part.shape for part in split(empty, [0, 0], 1)] == [(2**40, 0)] * 2

    def test_one_part_may_be_empty(self):
        some = LazyTensor.zeros("uint8", (3, 2))
        assert concat([LazyTensor("uint8", (3, 0), ()), some], 1).nbytes == 6

    def test_too_many_of_a_few_bytes(self, in_seconds):
        tall = LazyTensor.zeros("uint8", (2**34, 2))
        for what in (lambda: concat([tall, tall], 1), lambda: split(tall, [1, 1], 1)):
            with pytest.raises(WeightError, match=r"bytes would be put together from \d+ pieces"):
                what()

    def test_empty_shards(self, made, tmp_path, refused, in_seconds):
        hf, ranks = made("qwen3-untied"), megatron_shards(made("qwen3-untied"), 2)
        for rank in ranks:
            rank["decoder.layers.0.self_attention.linear_proj.weight"] = torch.empty(2**40, 0)
        place = legacy(tmp_path / "td", *({"model": rank} for rank in ranks))
        words = ["--load", place, "--output-dir", tmp_path / "out", "--origin-hf-dir", hf]
        assert "has shape (1099511627776, 0)" in refused("megatron-to-hf", *words)
        assert main(["verify", str(place), str(hf)]) == 1


class TestSharedRecords:
    def test_a_state_dict_under_many_keys(self, tmp_path, in_seconds):
        state, weight = {}, torch.zeros(1)
        for number in range(1000):
            state[f"decoder.layers.0.w{number}"] = weight
        legacy(tmp_path / "td", {f"model{number}": state for number in range(1000)})
        with pytest.raises(CheckpointError, match="holds one state dict under several keys; use another checkpoint"):
            LegacyWeights(tmp_path / "td")

    def test_a_list_of_parts_under_many_keys(self, tmp_path, in_seconds):
        chunks = [ChunkStorageMetadata(torch.Size([i]), torch.Size([1])) for i in range(1000)]
        size, properties = torch.Size([1000]), TensorProperties(dtype=torch.uint8)
        state = {f"k{number}": TensorStorageMetadata(properties, size, chunks) for number in range(1000)}
        with (tmp_path / ".metadata").open("wb") as file:
            pickle.dump(Metadata(state, storage_data={}), file)
        with pytest.raises(CheckpointError, match="several tensors have one list of parts"):
            TorchDistWeights(tmp_path)


class TestSharedBytes:
    def test_weights_of_one_storage(self, tmp_path):
        storage = torch.zeros(1000)
        model = {f"decoder.layers.0.w{number}": storage[:] for number in range(50)}
        legacy(tmp_path / "td", {"model": model})
        with pytest.raises(CheckpointError, match=r"its weights would have 200000: .*; allowed: twice the file; use"):
            LegacyWeights(tmp_path / "td")

    def test_a_tied_output_layer_and_views_of_one_buffer(self, tmp_path):
        buffer = torch.arange(2000.0)
        model = {"embedding.word_embeddings.weight": buffer[:1000].view(100, 10), "decoder.w": buffer[1000:]}
        model["output_layer.weight"] = model["embedding.word_embeddings.weight"]
        legacy(tmp_path / "td", {"model": model})
        assert len(LegacyWeights(tmp_path / "td").tensors) == 3

    def test_parts_of_one_range(self, made, tmp_path):
        hf_to_torch_dist(made("llama-tied"), tmp_path / "td")
        path = tmp_path / "td" / "release" / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        index, info = next(iter(metadata.storage_data.items()))
        metadata.storage_data[MetadataIndex("other", index.offset)] = info
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=r"names bytes of .*distcp twice; it is damaged, use another"):
            TorchDistWeights(path.parent)

    def test_parts_of_one_range_of_a_file_with_two_names(self, made, tmp_path):
        hf_to_torch_dist(made("llama-tied"), tmp_path / "td")
        path = tmp_path / "td" / "release" / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        index, info = next(iter(metadata.storage_data.items()))
        (path.parent / "link").symlink_to(info.relative_path)
        more = type(info)("link", info.offset, info.length)
        metadata.storage_data[MetadataIndex("other", index.offset)] = more
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=r"names bytes of .*distcp twice"):
            TorchDistWeights(path.parent)

    def test_gguf_tensors_at_one_place(self, tmp_path):
        def text(words):
            return struct.pack("<Q", len(words)) + words.encode()

        tensors = b"".join(text(f"t{i}") + struct.pack("<IQIQ", 1, 64, 0, 0) for i in range(3))
        (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 3, 0) + tensors + bytes(512))
        with pytest.raises(GgufError, match=r"is damaged: t0 and t1 overlap; fetch it again"):
            read_gguf(tmp_path / "a.gguf")


class TestUnknownType:
    """``F4`` is a type of safetensors that torch lacks."""

    @pytest.fixture
    def model(self, made, tmp_path):
        def make(origin, name):
            shutil.copytree(origin, tmp_path / name)
            index = tmp_path / name / "model.safetensors.index.json"
            if index.exists():
                save_file(weights_of(origin), tmp_path / name / "model.safetensors")
                for path in (index, *(tmp_path / name).glob("model-*")):
                    path.unlink()
            path = tmp_path / name / "model.safetensors"
            tensors = path.read_bytes()
            length = int.from_bytes(tensors[:8], "little")
            header, data = json.loads(tensors[8 : 8 + length]), tensors[8 + length :]
            header.get("__metadata__", {}).pop("crc32", None)
            header["more.weight"] = {"dtype": "F4", "shape": [4], "data_offsets": [len(data), len(data) + 2]}
            written = json.dumps(header).encode()
            path.write_bytes(len(written).to_bytes(8, "little") + written + data + b"\x12\x34")
            return tmp_path / name

        return make

    @pytest.mark.parametrize(("command", "more"), [("hf-to-fp8", []), ("hf-to-int4", ["--group-size", "32"])])
    def test_it_is_not_quantized(self, model, tmp_path, refused, command, more):
        origin = make_model("qwen3-moe", tmp_path / "origin", hidden_size=32, moe_intermediate_size=32)
        told = refused(command, "--hf-checkpoint", model(origin, "hf"), "--save", tmp_path / "out", *more)
        assert "more.weight has type F4" in told and "allowed: " in told

    def test_it_is_not_expanded_or_compared(self, made, model, tmp_path, refused):
        hf_to_fp8(made("qwen3-untied"), tmp_path / "fp8")
        place = model(tmp_path / "fp8", "more")
        told = refused("fp8-to-bf16", "--hf-checkpoint", place, "--save", tmp_path / "out")
        assert "more.weight has type F4" in told and "allowed: " in told
        refused("verify", place, model(made("qwen3-untied"), "hf"))


def sparse(path, size=2**40):
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)
    return path


class TestSparseFiles:
    def test_a_file_that_is_read_as_a_whole(self, tmp_path):
        sparse(tmp_path / "config.json")
        for read in (read_file, read_json):
            with pytest.raises(HfConfigError, match=r"has 1099511627776 bytes; allowed: 100000000; fetch it"):
                read(tmp_path, "config.json", HfConfigError, "fetch it")

    def test_metadata(self, tmp_path):
        sparse(tmp_path / ".metadata")
        with pytest.raises(CheckpointError, match=r"has 1099511627776 bytes; allowed: 1073741824; use"):
            TorchDistWeights(tmp_path)

    def test_the_command_tells_it(self, made, tmp_path, refused):
        shutil.copytree(made("llama-tied"), tmp_path / "hf")
        sparse(tmp_path / "hf" / "config.json", 2**27)
        assert "config.json has 134217728 bytes" in refused("inspect", tmp_path / "hf")

    def test_no_memory(self, tmp_path, monkeypatch):
        (tmp_path / "a.json").write_text("[]")

        def fail(*_):
            raise MemoryError

        monkeypatch.setattr(os, "fdopen", fail)
        with pytest.raises(HfConfigError, match=r"cannot read .*a\.json \(not enough memory\); fetch it"):
            read_json(tmp_path, "a.json", HfConfigError, "fetch it")

    def test_a_gguf_text(self, tmp_path):
        path = sparse(tmp_path / "a.gguf", 2**30)
        with path.open("r+b") as file:
            file.write(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**29))
        with pytest.raises(GgufError, match="its names and texts have more than 100000000 bytes"):
            read_gguf(path)

    def test_a_pickle(self, tmp_path):
        directory = legacy(tmp_path / "td", {"model": {"a": torch.zeros(1)}})
        path = directory / "mp_rank_00" / "model_optim_rng.pt"
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            info = next(info for info in infos if info.filename.endswith("data.pkl"))
        whole = path.read_bytes()
        # A record of zeros, one byte more than is read, whose directory comes behind.
        end = whole.rindex(b"PK\x05\x06")
        (first,) = struct.unpack_from("<I", whole, end + 16)
        listed = bytearray(whole[first:])
        entry = listed.index(info.filename.encode()) - 46
        size = 2**30 + 1
        struct.pack_into("<III", listed, entry + 16, 0, size, size)
        struct.pack_into("<I", listed, listed.rindex(b"PK\x05\x06") + 16, size + 2**20)
        with path.open("r+b") as file:
            file.truncate(0)
            file.write(whole[:first])
            file.seek(size + 2**20)
            file.write(listed[: listed.index(b"PK\x06\x06")] if b"PK\x06\x06" in listed else listed)
            if b"PK\x06\x06" in listed:
                file.write(listed[listed.rindex(b"PK\x05\x06") :])
        with pytest.raises(CheckpointError, match=r"has 1073741825 bytes; allowed: 1073741824\)"):
            LegacyWeights(directory)


class TestCopies:
    @pytest.mark.parametrize(
        ("model", "weight"),
        [
            ("qwen3-untied", "decoder.final_layernorm.weight"),
            ("qwen3-untied", "decoder.layers.1.self_attention.q_layernorm.weight"),
            ("deepseek", "decoder.layers.0.self_attention.linear_kv_down_proj.weight"),
        ],
    )
    @pytest.mark.parametrize("differs", [False, True])
    def test_ranks_have_to_agree(self, made, tmp_path, refused, model, weight, differs):
        hf, ranks = made(model), megatron_shards(made(model), 2)
        ranks[1][weight].view(-1)[-1] += differs
        place = legacy(tmp_path / "td", *({"model": rank} for rank in ranks))
        words = ["--load", place, "--output-dir", tmp_path / "out", "--origin-hf-dir", hf]
        if differs:
            told = f"{weight} must be the same on each tensor-parallel rank, but differs between ranks 0 and 1; use"
            assert told in refused("megatron-to-hf", *words) and told in refused("verify", place, hf)
        else:
            assert main(["megatron-to-hf", *map(str, words)]) == 0
            assert main(["verify", str(tmp_path / "out"), str(hf)]) == 0

    def test_so_do_tensors_of_torch(self, made):
        weight_map = WeightMap(ModelShape.from_hf_config(made("qwen3-untied")))
        one, name = torch.ones(24), "decoder.final_layernorm.weight"
        assert weight_map.merge_tp(name, [one, one.clone()]) is one
        with pytest.raises(WeightError, match="differs between ranks 0 and 2"):
            weight_map.merge_tp(name, [one, one, one + 1])


class TestLinks:
    def test_an_iteration_that_lies_elsewhere(self, made, tmp_path, refused):
        hf = made("llama-tied")
        hf_to_torch_dist(hf, tmp_path / "real")
        (tmp_path / "lk").mkdir()
        shutil.copy(tmp_path / "real" / "latest_checkpointed_iteration.txt", tmp_path / "lk")
        (tmp_path / "lk" / "release").symlink_to("../real/release")
        assert "release leads outside of" in refused("inspect", tmp_path / "lk")
        # What the user gives may be a link, and one inside of the checkpoint is as good as a directory.
        (tmp_path / "link").symlink_to("real")
        (tmp_path / "real" / "release").rename(tmp_path / "real" / "iter_0000000")
        (tmp_path / "real" / "release").symlink_to("iter_0000000")
        for place in (tmp_path / "link", tmp_path / "lk" / "release"):
            assert formats.open_checkpoint(place).tensors

    def test_one_that_leads_to_itself(self, made, tmp_path, refused):
        (tmp_path / "loop").symlink_to("loop")
        assert "(Symlink loop from " in refused("inspect", tmp_path / "loop")
        refused("verify", tmp_path / "loop", made("llama-tied"))
        (tmp_path / "td").mkdir()
        (tmp_path / "td" / "latest_checkpointed_iteration.txt").write_text("release")
        (tmp_path / "td" / "release").symlink_to("release")
        assert "names release, but that has no mp_rank" in refused("inspect", tmp_path / "td")
