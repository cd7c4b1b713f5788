"""Legacy checkpoints compared: of a real megatron-core model, and hand-made where two ranks are too few."""

import argparse
import json
import shutil
import subprocess
import sys

import pytest
import torch

from slime_convert import ModelShape, hf_to_torch_dist, verify
from slime_convert.errors import CheckpointError
from slime_convert.inspection import inspect_checkpoint
from slime_convert.mapping import WeightMap
from support.family_models import weights_of

RANK_FILE = "iter_0000005/mp_rank_00/model_optim_rng.pt"
MODELS = ["llama-tied", "qwen3-untied", "qwen3-tied", "llama3-scaled"]  # one rank, tensor-parallel, two of stages


def edited(run, target, edit):
    """A copy of a run's checkpoint, whose first rank's file has been changed."""
    shutil.copytree(run.save, target)
    state = torch.load(target / RANK_FILE, weights_only=False)
    edit(state)
    torch.save(state, target / RANK_FILE)
    return target


@pytest.mark.parametrize("model", MODELS)
def test_what_megatron_wrote_is_equal_to_the_model_it_came_from(legacy_runs, model):
    run = legacy_runs[model]
    # The last stage of a tied model stores the embedding a second time, as its output layer.
    count = len(weights_of(run.origin)) + (model == "qwen3-tied")
    for left, right in [(run.save, run.origin), (run.origin, run.save / "iter_0000005")]:
        found = verify(left, right)
        assert (found.equal, found.num_equal, found.naming, found.notes) == (True, count, "huggingface", ())


@pytest.mark.parametrize("model", MODELS)
def test_the_shape_may_come_from_recorded_arguments(legacy_runs, tmp_path, model):
    run = legacy_runs[model]
    shutil.copytree(run.origin, tmp_path / "bare")
    (tmp_path / "bare" / "config.json").unlink()
    assert verify(run.save, tmp_path / "bare").equal and verify(run.save, run.save).naming == "huggingface"


def test_torch_dist_and_legacy_are_equal(legacy_runs, tmp_path):
    run = legacy_runs["qwen3-untied"]
    hf_to_torch_dist(run.origin, tmp_path / "td")
    found = verify(run.save, tmp_path / "td")
    assert found.equal and (found.left.format, found.right.format) == ("torch", "torch_dist")


def test_one_element_of_a_shard_is_found_and_named(legacy_runs, tmp_path):
    run = legacy_runs["qwen3-untied"]

    def edit(state):
        state["model"]["decoder.layers.1.mlp.linear_fc1.weight"][0, 3] += 1

    found = verify(edited(run, tmp_path / "legacy", edit), run.origin)
    assert [(d.name, d.num_differing) for d in found.differences] == [("model.layers.1.mlp.gate_proj.weight", 1)]


def test_an_output_layer_that_a_tied_model_stores_too_is_compared_with_the_embedding(legacy_runs, tmp_path):
    run = legacy_runs["qwen3-tied"]
    shutil.copytree(run.save, tmp_path / "legacy")
    path = tmp_path / "legacy" / "iter_0000005" / "mp_rank_00_001" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["model"]["output_layer.weight"][100, 5] += 1
    state["model"]["output_layer.weight"][101:] += 1  # padding
    torch.save(state, path)
    found = verify(tmp_path / "legacy", run.origin)
    assert [(d.name, d.num_differing) for d in found.differences] == [("lm_head.weight", 1)]


def test_missing_and_extra_weights_are_named(legacy_runs, tmp_path):
    run = legacy_runs["llama-tied"]

    def edit(state):
        del state["model"]["decoder.layers.0.mlp.linear_fc2.weight"]
        state["model"]["decoder.adapter.weight"] = torch.ones(2)

    found = verify(run.origin, edited(run, tmp_path / "legacy", edit))
    assert [(d.name, d.kind) for d in found.differences] == [
        ("model.layers.0.mlp.down_proj.weight", "missing"),
        ("decoder.adapter.weight", "extra"),
    ]


def write_ranks(root, origin, *, grouped, recorded=True):
    """A model with experts as two tensor-parallel × two expert-parallel ranks of Transformer Engine write it."""
    shape = ModelShape.from_hf_config(origin)
    weight_map, local = WeightMap(shape, 128), shape.num_experts // 2
    ranks = {(t, e): {} for t in range(2) for e in range(2)}
    stored = weights_of(origin)
    for name in weight_map.megatron_names():
        expert = weight_map.expert(name)
        shards = weight_map.split_tp(name, weight_map.from_hf(name, stored.__getitem__), 2)
        for (t, e), state in ranks.items():
            if expert is not None and expert // local != e:
                continue
            key = weight_map.te_name(name) if grouped else name
            if expert is not None:
                old, new = (
                    (f"weight{expert}", f"weight{expert % local}")
                    if grouped
                    else (f".{expert}.", f".{expert % local}.")
                )
                head, stem, tail = key.rpartition(".local_experts") if not grouped else ("", "", key)
                key = head + stem + tail.replace(old, new)
            state[key] = shards[t].clone()
    args = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
    args |= shape.to_megatron_args() if recorded else {}
    for (t, e), state in ranks.items():
        path = root / "release" / f"mp_rank_{t:02d}_{e:03d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save({"checkpoint_version": 3.0, "model": state, "args": argparse.Namespace(**args)}, path)
    (root / "latest_checkpointed_iteration.txt").write_text("release")
    return root


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "sequential"])
def test_experts_of_several_ranks_are_joined(origin_of, tmp_path, grouped):
    origin = origin_of("qwen3-moe")
    legacy = write_ranks(tmp_path / "legacy", origin, grouped=grouped)
    assert verify(legacy, origin).equal and verify(origin, legacy).equal
    theirs, ours = inspect_checkpoint(origin), inspect_checkpoint(legacy)
    assert (ours.num_parameters, ours.notes) == (theirs.num_parameters, ())


def test_without_a_shape_shards_are_not_joined(origin_of, tmp_path):
    origin = origin_of("qwen3-moe")
    legacy = write_ranks(tmp_path / "legacy", origin, grouped=True, recorded=False)
    with pytest.raises(CheckpointError, match=r"in 2 shards, and nothing says how they are joined; .*origin_hf_dir="):
        verify(legacy, legacy)
    assert verify(legacy, legacy, origin_hf_dir=origin).equal
    assert (
        "note          of each weight, the shard of the first tensor-parallel rank"
        in inspect_checkpoint(legacy).to_text()
    )


def test_two_checkpoints_of_an_unknown_model_are_compared_under_megatrons_names(tmp_path):
    state = {"embedding.word_embeddings.weight": torch.arange(12.0).view(4, 3), "decoder.mixer.weight": torch.ones(2)}
    paths = []
    for number in range(2):
        path = tmp_path / str(number) / "mp_rank_00" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save({"model": state}, path)
        state = state | {"decoder.mixer.weight": torch.ones(2) * 3}
        paths.append(tmp_path / str(number))
    found = verify(*paths)
    assert found.naming == "megatron" and [(d.name, d.max_abs_diff) for d in found.differences] == [
        ("decoder.mixer.weight", 2.0)
    ]


@pytest.mark.parametrize("model", MODELS)
def test_inspect_counts_as_in_the_model_it_came_from(legacy_runs, model):
    run = legacy_runs[model]
    theirs, ours = inspect_checkpoint(run.origin), inspect_checkpoint(run.save)
    assert (ours.num_parameters, ours.format, ours.notes) == (theirs.num_parameters, "torch", ())
    assert (ours.iteration, ours.iterations) == ("iter_0000005", ("iter_0000005",))
    assert ours.arguments["hidden_size"] == 24 and ours.arguments["params_dtype"] == "bfloat16"
    files = {str(path.relative_to(ours.directory)): path.stat().st_size for path in ours.directory.rglob("*.pt")}
    assert ours.files == files
    # The run's optimizer has fp32 masters and Adam's moments and step for what each rank holds.
    told = json.loads(json.dumps(ours.to_json()))
    moments = [info for info in ours.optimizer if ".exp_avg." not in info.name and info.name.endswith(".exp_avg")]
    masters = [info for info in ours.optimizer if "fp32_from_fp16" in info.name]
    assert sum(info.num_elements for info in moments) == sum(info.num_elements for info in masters)
    assert sum(info.num_elements for info in masters) >= theirs.num_parameters
    assert told["optimizer"]["tensors"] == len(ours.optimizer) >= 3 * len(masters)


def test_inspect_imports_no_torch_for_one_tensor_rank(tmp_path):
    path = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir()
    args = argparse.Namespace(num_layers=1, params_dtype=torch.bfloat16, tensor_model_parallel_size=1)
    torch.save({"model": {"decoder.final_layernorm.weight": torch.ones(7)}, "args": args}, path)
    code = "import sys; from slime_convert.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    words = [sys.executable, "-c", code, "inspect", tmp_path]
    lines = subprocess.run(words, capture_output=True, text=True, timeout=240).stdout.splitlines()
    assert lines[0] == "format        torch" and "parameters    7" in lines and lines[-1] == "0 False"
