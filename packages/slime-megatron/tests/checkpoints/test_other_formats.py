"""A Hugging Face model loads directly, with the weights of the converted checkpoint bit for bit."""

import json
import shutil

import pytest

from slime_megatron.checkpoints.find import find_checkpoint
from slime_megatron.errors import TrainerCheckpointError

FAMILIES = ["llama-tied", "llama3-rope", "qwen2-tied", "qwen3", "glm", "glm4", "qwen3-moe", "glm4-moe-mtp", "glm4-air"]
FAMILIES += ["deepseek-mtp", "moonlight", "kimi-k2", "glm4-flash"]
LAYOUTS = {
    "one": (1, {}),
    "tp2+sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
}
DENSE = 6


def cases():
    for number, name in enumerate(FAMILIES):
        for layout in LAYOUTS:
            if number >= DENSE or layout != "ep2":
                # Every family once, with every layout among them; the product in the full run.
                choices = list(LAYOUTS)[: 4 if number >= DENSE else 3]
                shown = choices[number % len(choices)] == layout
                yield pytest.param(name, layout, marks=[] if shown else [pytest.mark.full])


@pytest.mark.parametrize(("name", "layout"), cases())
def test_it_equals_the_converted_checkpoint(ranks, tiny_model, tiny_config, name, layout):
    (world, settings), model = LAYOUTS[layout], tiny_model(name)
    config = {"bf16": layout == "pp2", **settings}
    ranks.start(world, tiny_config(load=model.checkpoint, **config), model.shape)
    expected = ranks.call("hashes")
    ranks.start(world, tiny_config(load=model.hf_directory, **config), model.shape)
    assert ranks.call("hashes") == expected


def test_each_rank_reads_no_more_than_its_part(ranks, tiny_model, tiny_config):
    model = tiny_model("qwen3-moe/4")
    ranks.start(1, tiny_config(load=model.hf_directory), model.shape)
    [whole] = ranks.call("bytes_read", model.hf_directory)
    settings = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}
    ranks.start(4, tiny_config(load=model.hf_directory, **settings), model.shape)
    assert all(read < 0.4 * whole for read in ranks.call("bytes_read", model.hf_directory))


def test_what_does_not_fit_is_named(ranks, tiny_model, tiny_config, tmp_path, rank_error):
    model, other = tiny_model("qwen3"), tiny_model("llama-tied")
    with pytest.raises(rank_error, match=r"by another model .*qk_layernorm False \(config: True\)"):
        ranks.start(1, tiny_config(load=other.hf_directory), model.shape)
    with pytest.raises(rank_error, match="holds no optimizer state"):
        ranks.start(1, tiny_config(), model.shape, resume_from=model.hf_directory)
    copy = shutil.copytree(model.hf_directory, tmp_path / "copy")
    found = find_checkpoint(copy)
    assert (found.directory, found.iteration, found.format) == (copy, None, "hf")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(TrainerCheckpointError, match=r"gone\.safetensors"):
        find_checkpoint(copy)
