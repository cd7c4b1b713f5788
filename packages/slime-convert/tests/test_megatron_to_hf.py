"""Legacy checkpoints of a real megatron-core model, and converted ``torch_dist`` ones, back to Hugging Face."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_convert.convert import hf_to_torch_dist, torch_dist_to_hf
from slime_convert.errors import CheckpointError, OutputError, ShapeMismatchError, WeightError
from slime_convert.legacy import LegacyReader
from slime_convert.megatron_to_hf import megatron_to_hf

RANK_FILE = "mp_rank_00/model_optim_rng.pt"


def weights_of(directory):
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_equal_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


@pytest.mark.parametrize(
    ("model", "directories"),
    [
        ("llama-tied", {"mp_rank_00"}),
        ("qwen3-untied", {"mp_rank_00", "mp_rank_01"}),
        ("qwen3-tied", {"mp_rank_00_000", "mp_rank_00_001"}),
        ("llama3-scaled", {"mp_rank_00_000", "mp_rank_00_001"}),
    ],
    ids=["one-rank", "tensor-parallel", "pipeline-uneven", "pipeline-virtual"],
)
def test_what_megatron_wrote_is_the_model_it_came_from(legacy_runs, tmp_path, model, directories):
    run = legacy_runs[model]
    assert {path.parent.name for path in run.save.rglob("model_optim_rng.pt")} == directories
    calls = []
    assert megatron_to_hf(run.save, tmp_path / "hf", run.origin, on_progress=lambda *call: calls.append(call)) == []
    assert_equal_bits(weights_of(tmp_path / "hf"), weights_of(run.origin))
    assert (tmp_path / "hf" / "config.json").read_bytes() == (run.origin / "config.json").read_bytes()
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1] > 0


@pytest.mark.parametrize("where", ["iter_0000005", "release", "."])
def test_an_iteration_its_parent_or_release(legacy_runs, tmp_path, where):
    run = legacy_runs["llama-tied"]
    shutil.copytree(run.save, tmp_path / "legacy")
    if where == "release":
        (tmp_path / "legacy" / "iter_0000005").rename(tmp_path / "legacy" / "release")
        (tmp_path / "legacy" / "latest_checkpointed_iteration.txt").write_text("release\n")
        megatron_to_hf(tmp_path / "legacy", tmp_path / "parent", run.origin)
    megatron_to_hf(tmp_path / "legacy" / where, tmp_path / "hf", run.origin)
    assert_equal_bits(weights_of(tmp_path / "hf"), weights_of(run.origin))


def test_torch_dist_is_detected(origin, converted, tmp_path):
    for where in (".", "release"):
        megatron_to_hf(converted / where, tmp_path / "hf", origin, force=True)
        assert_equal_bits(weights_of(tmp_path / "hf"), weights_of(origin))


class Hostile:
    def __init__(self, mark):
        self._mark = mark

    def __reduce__(self):
        return (os.system, (f"touch {self._mark}",))


def edited(run, target, edit):
    """A copy of a run's checkpoint, whose first rank's file has been changed."""
    shutil.copytree(run.save, target)
    path = target / "iter_0000005" / RANK_FILE
    state = torch.load(path, weights_only=False)
    edit(state)
    torch.save(state, path)
    return target


@pytest.mark.parametrize("place", ["args", "optimizer", "rng_state"])
def test_a_hostile_pickle_beside_the_model_runs_nothing(legacy_runs, tmp_path, place):
    run, hostile = legacy_runs["llama-tied"], Hostile(tmp_path / "mark")

    def edit(state):
        if place == "args":
            state["args"].extra = hostile
        elif place == "optimizer":
            state["optimizer"]["optimizer"]["state"][0]["exp_avg"] = hostile
        else:
            state["rng_state"] = hostile

    megatron_to_hf(edited(run, tmp_path / "legacy", edit), tmp_path / "hf", run.origin)
    assert_equal_bits(weights_of(tmp_path / "hf"), weights_of(run.origin))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda s, h: s.update(model=h), "holds no state dict under 'model'"),
        (lambda s, h: s["model"].update({"decoder.final_layernorm.weight": h}), "which is no plain tensor"),
        (lambda s, h: s.update(args=h, model=h), "holds no state dict"),
        (lambda s, h: s["model"].update({"more.weight": torch.zeros(1)}), "1 weights that the given .* more.weight"),
        (lambda s, h: s["model"].pop("decoder.final_layernorm.weight"), "has no weight decoder.final_layernorm"),
        (lambda s, h: setattr(s["args"], "hidden_size", 48), r"hidden_size 48 \(config: 24\)"),
        (lambda s, h: setattr(s["args"], "tensor_model_parallel_size", 2), "no mp_rank.* of tensor rank 1"),
    ],
    ids=["model", "weight", "both", "unknown", "absent", "other-model", "rank"],
)
def test_what_is_wrong_inside_is_told_and_nothing_is_left(legacy_runs, tmp_path, edit, told):
    run = legacy_runs["llama-tied"]
    edited(run, tmp_path / "legacy", lambda state: edit(state, Hostile(tmp_path / "mark")))
    with pytest.raises((CheckpointError, ShapeMismatchError), match=told):
        megatron_to_hf(tmp_path / "legacy", tmp_path / "hf", run.origin)
    assert [path.name for path in tmp_path.iterdir()] == ["legacy"]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-5000])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda root: truncate(root / "iter_0000005" / RANK_FILE), "cannot read .*model_optim_rng.pt"),
        (lambda root: shutil.rmtree(root / "iter_0000005" / "mp_rank_01"), "no mp_rank.* of tensor rank 1 of stage 0"),
        (lambda root: shutil.rmtree(root / "iter_0000005"), "names iter_0000005, but that has no mp_rank"),
        (lambda root: (root / "latest_checkpointed_iteration.txt").write_text("x"), "'x'; it must be 'release' or a"),
        (
            lambda root: (root / "latest_checkpointed_iteration.txt").unlink(),
            "is no checkpoint of a known format; give one of",
        ),
        (lambda root: shutil.rmtree(root), "there is no .*legacy; give a checkpoint: torch .*; torch_dist"),
    ],
    ids=["truncated", "rank", "iteration", "tracker", "no-tracker", "nothing"],
)
def test_a_damaged_checkpoint_is_told_and_nothing_is_left(legacy_runs, tmp_path, damage, told):
    run = legacy_runs["qwen3-untied"]
    shutil.copytree(run.save, tmp_path / "legacy")
    damage(tmp_path / "legacy")
    with pytest.raises(CheckpointError, match=told):
        megatron_to_hf(tmp_path / "legacy", tmp_path / "hf", run.origin)
    assert not [path for path in tmp_path.iterdir() if path.name != "legacy"]


def test_a_flipped_byte_is_told_and_nothing_is_left(legacy_runs, tmp_path):
    run = legacy_runs["llama-tied"]
    shutil.copytree(run.save, tmp_path / "legacy")
    path = tmp_path / "legacy" / "iter_0000005" / RANK_FILE
    norm = torch.load(path, weights_only=False)["model"]["decoder.final_layernorm.weight"]
    data = bytearray(path.read_bytes())
    data[data.index(norm.view(torch.uint8).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"is damaged .*checksum"):
        megatron_to_hf(tmp_path / "legacy", tmp_path / "hf", run.origin)
    assert [path.name for path in tmp_path.iterdir()] == ["legacy"]


def test_another_format_and_another_origin_are_refused(legacy_runs, converted, origin, tmp_path):
    run = legacy_runs["llama-tied"]
    with pytest.raises(ShapeMismatchError, match=r"was written by another model than the given Hugging Face config"):
        megatron_to_hf(run.save, tmp_path / "hf", legacy_runs["qwen3-untied"].origin)
    with pytest.raises(ShapeMismatchError, match="--num-layers 7"):
        megatron_to_hf(run.save, tmp_path / "hf", run.origin, flags={"num_layers": 7})
    (converted / "release" / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(CheckpointError, match="format 'zarr'; allowed: 'torch' and 'torch_dist'"):
        megatron_to_hf(converted, tmp_path / "hf", origin)
    with pytest.raises(OutputError, match="is or holds the input"):
        megatron_to_hf(run.save / "iter_0000005", run.save, run.origin, force=True)
    assert not (tmp_path / "hf").exists()


def test_optimizer_state_stays_on_disk(legacy_runs, tmp_path):
    """Adam's moments, most of the file, are overwritten: reading them would tell a wrong checksum."""
    run = legacy_runs["llama-tied"]
    path = run.save / "iter_0000005" / RANK_FILE
    state = torch.load(path, weights_only=False)
    moments = [value for entry in state["optimizer"]["optimizer"]["state"].values() for value in entry.values()]
    moments = [tensor for tensor in moments if tensor.dim()]
    assert sum(tensor.nbytes for tensor in moments) > path.stat().st_size / 3
    data = bytearray(path.read_bytes())
    for tensor in moments:
        at = data.index(tensor.numpy().tobytes())
        data[at : at + tensor.nbytes] = bytes(tensor.nbytes)
    shutil.copytree(run.save, tmp_path / "legacy")
    (tmp_path / "legacy" / "iter_0000005" / RANK_FILE).write_bytes(data)
    megatron_to_hf(tmp_path / "legacy", tmp_path / "hf", run.origin)
    assert_equal_bits(weights_of(tmp_path / "hf"), weights_of(run.origin))


@pytest.fixture
def origin_with_more(origin, tmp_path):
    """The original model with a part that Megatron does not train."""
    path = tmp_path / "with-more"
    shutil.copytree(origin, path)
    index = path / "model.safetensors.index.json"
    record = json.loads(index.read_text())
    record["weight_map"] |= {"visual.proj.weight": "more.safetensors", "lm_head.weight": "more.safetensors"}
    head = weights_of(origin).get("lm_head.weight", torch.zeros(101, 24, dtype=torch.bfloat16))
    save_file({"visual.proj.weight": torch.ones(2, 3), "lm_head.weight": head}, path / "more.safetensors")
    index.write_text(json.dumps(record))
    return path


@pytest.mark.parametrize("convert", [torch_dist_to_hf, megatron_to_hf])
def test_missing_weights_come_from_the_origin(origin, origin_with_more, converted, tmp_path, convert):
    plain = weights_of(origin)
    assert convert(converted, tmp_path / "plain", origin_with_more) == []
    assert_equal_bits(weights_of(tmp_path / "plain"), plain)
    copied = convert(converted, tmp_path / "hf", origin_with_more, add_missing_from_origin_hf=True)
    assert copied == ["visual.proj.weight"]
    assert_equal_bits(weights_of(tmp_path / "hf"), plain | {"visual.proj.weight": torch.ones(2, 3)})


def test_a_weight_that_the_checkpoint_lacks_comes_from_the_origin(legacy_runs, tmp_path):
    run = legacy_runs["llama-tied"]
    edited(run, tmp_path / "legacy", lambda state: state["model"].pop("decoder.layers.1.mlp.linear_fc1.weight"))
    copied = megatron_to_hf(tmp_path / "legacy", tmp_path / "hf", run.origin, add_missing_from_origin_hf=True)
    assert copied == ["model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"]
    assert_equal_bits(weights_of(tmp_path / "hf"), weights_of(run.origin))


def test_a_quantized_part_of_the_origin_is_not_copied(origin_with_more, converted, tmp_path):
    """It would need its scales, and the config would have to say so."""
    more = load_file(origin_with_more / "more.safetensors")
    more["visual.proj.weight"] = more["visual.proj.weight"].to(torch.float8_e4m3fn)
    save_file(more, origin_with_more / "more.safetensors")
    with pytest.raises(WeightError, match=r"visual\.proj\.weight of .* has type F8_E4M3"):
        megatron_to_hf(converted, tmp_path / "hf", origin_with_more, add_missing_from_origin_hf=True)
    assert not (tmp_path / "hf").exists()


def test_what_cannot_be_copied_is_told(legacy_runs, tmp_path):
    run = legacy_runs["llama-tied"]
    edited(run, tmp_path / "legacy", lambda state: state["model"].pop("decoder.final_layernorm.weight"))
    shutil.copytree(run.origin, tmp_path / "origin")
    (tmp_path / "origin" / "model.safetensors.index.json").unlink()
    for path in (tmp_path / "origin").glob("*.safetensors"):
        weights = load_file(path)
        weights.pop("model.norm.weight", None)
        save_file(weights or {"more": torch.zeros(1)}, path)
    with pytest.raises(WeightError, match=r"has no weight model\.norm\.weight"):
        megatron_to_hf(tmp_path / "legacy", tmp_path / "hf", tmp_path / "origin", add_missing_from_origin_hf=True)
    edited(run, tmp_path / "empty", lambda state: state.update(model={"other": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match="has no weight of the model that the given Hugging Face config"):
        megatron_to_hf(tmp_path / "empty", tmp_path / "hf", run.origin, add_missing_from_origin_hf=True)
    assert not (tmp_path / "hf").exists()


def test_all_formats_give_the_same(legacy_runs, tmp_path):
    run = legacy_runs["qwen3-tied"]
    hf_to_torch_dist(run.origin, tmp_path / "torch_dist")
    megatron_to_hf(tmp_path / "torch_dist", tmp_path / "a", run.origin)
    megatron_to_hf(run.save, tmp_path / "b", run.origin)
    for path in (tmp_path / "a").iterdir():
        assert (tmp_path / "b" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("k", [6, 15])
def test_killed_it_continues(legacy_runs, tmp_path, monkeypatch, killed_at, bytes_written, k):
    """A legacy checkpoint: weights whose parts are finished are not read again."""
    run = legacy_runs["qwen3-untied"]

    def convert(out, **kwargs):
        megatron_to_hf(run.save, out, run.origin, max_shard_bytes=12_000, **kwargs)

    num_bytes = bytes_written(lambda: convert(tmp_path / "whole"))
    killed_at(lambda: convert(tmp_path / "out"), num_bytes * k // 20)
    assert not (tmp_path / "out").exists()
    loaded, calls, load = [], [], LegacyReader.load
    monkeypatch.setattr(LegacyReader, "load", lambda self, name: loaded.append(name) or load(self, name))
    convert(tmp_path / "out", on_progress=lambda *call: calls.append(call))
    assert calls[0][0] > 0 and len(calls) == len(loaded) + 1
    one, other = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("whole", "out"))
    assert one == other and "config.json" in one
