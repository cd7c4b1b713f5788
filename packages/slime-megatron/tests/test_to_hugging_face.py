"""What the trainer saves, optimizer state and all, becomes a Hugging Face model, the same at every parallel size."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime_convert import inspect_checkpoint, torch_dist_to_hf, verify

MODELS = ("llama-tied", pytest.param("qwen3", marks=pytest.mark.full))
SPLIT = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2 + sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "dp2 + distributed optimizer": {"use_distributed_optimizer": True},
}
LAYOUTS = {"one rank": {}, "one rank, bf16": {"bf16": True}, **SPLIT}
# Adam's first step is lr · g / (|g| + eps). With an eps far above a gradient's rounding, another order of summation
# moves a weight by no more than rounding does; with the usual 1e-8 it moves some by a hundredth of the step.
STEP = {"lr": 1e-2, "adam_eps": 1e-3}
ROUNDING = 1e-6


@dataclass
class Saved:
    """Two checkpoints of one run.

    Attributes:
        start: Before the first optimizer step.
        trained: After it.
        exported: The trainer's own weights after it, under Hugging Face names, as float32.
    """

    start: Path
    trained: Path
    exported: dict


@pytest.fixture(scope="module")
def saved(rank_group, rank_pool, tiny_model, tiny_config, make_samples, make_shards, tmp_path_factory):
    """Trains each model once in each layout, all from the same weights on the same samples."""
    made = {}

    def run(name, layout):
        if (name, layout) in made:
            return made[name, layout]
        values, model = LAYOUTS[layout], tiny_model(name)
        world, tensor_parallel = 1 + (layout in SPLIT), values.get("tensor_model_parallel_size", 1)
        config = tiny_config(**STEP, load=model.checkpoint, save=str(tmp_path_factory.mktemp("run")), **values)
        ranks = rank_group(rank_pool)
        try:
            ranks.start(world, config, model.shape)
            start = ranks.first("save", 0)
            ranks.call("train", make_shards(make_samples(), data_parallel=world // tensor_parallel))
            trained = ranks.first("save", 1)
            made[name, layout] = Saved(Path(start), Path(trained), ranks.first("weights"))
        finally:
            ranks.close()
        return made[name, layout]

    return run


@pytest.fixture
def to_hf(tmp_path):
    """The weights of a Hugging Face directory that a checkpoint is converted into."""

    def convert(checkpoint, model):
        output = tmp_path / checkpoint.name
        assert torch_dist_to_hf(checkpoint, output, model.hf_directory).copied == ()
        return load_file(output / "model.safetensors")

    return convert


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_converted_checkpoint_is_what_the_trainer_sends_to_the_engines(saved, tiny_model, to_hf, name, layout):
    run, model = saved(name, layout), tiny_model(name)
    assert len(inspect_checkpoint(run.trained).optimizer) > 0
    weights = to_hf(run.trained, model)
    assert weights.keys() == run.exported.keys()
    dtype = torch.bfloat16 if "bf16" in layout else torch.float32
    assert {weight.dtype for weight in weights.values()} == {dtype}
    assert all(np.array_equal(weight.float().numpy(), run.exported[key]) for key, weight in weights.items())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", SPLIT)
def test_before_training_every_parallel_size_gives_the_weights_it_began_with(saved, tiny_model, to_hf, name, layout):
    one, two, model = saved(name, "one rank"), saved(name, layout), tiny_model(name)
    origin, weights = load_file(Path(model.hf_directory) / "model.safetensors"), to_hf(two.start, model)
    assert weights.keys() == origin.keys()
    assert all(torch.equal(weight.view(torch.int32), origin[key].view(torch.int32)) for key, weight in weights.items())
    assert verify(one.start, two.start).equal
    assert verify(model.hf_directory, two.start).equal


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", SPLIT)
def test_after_a_step_parallel_sizes_differ_by_rounding(saved, tiny_model, to_hf, name, layout):
    one, two, model = saved(name, "one rank"), saved(name, layout), tiny_model(name)
    comparison = verify(one.trained, two.trained, tolerance=ROUNDING, origin_hf_dir=model.hf_directory)
    assert comparison.equal, comparison.differences
    # The step itself has moved every weight, and further.
    moved = verify(one.start, one.trained, origin_hf_dir=model.hf_directory)
    assert len(moved.differences) == len(one.exported)
    assert all(difference.max_abs_diff > 1000 * ROUNDING for difference in moved.differences)
    for key, weight in to_hf(two.trained, model).items():
        np.testing.assert_allclose(weight.numpy(), one.exported[key], rtol=0, atol=ROUNDING)


def test_transformers_gives_the_trainers_logits(
    ranks, tiny_model, tiny_config, make_samples, make_shards, hf_logits, tmp_path
):
    model = tiny_model("llama-tied")
    config = tiny_config(load=model.checkpoint, save=str(tmp_path / "run"), tensor_model_parallel_size=2)
    samples = make_samples(groups=2)
    ranks.start(2, config, model.shape)
    ranks.call("train", make_shards(samples))
    ranks.call("save", 1)
    logits = torch.from_numpy(ranks.first("logits", samples))

    torch_dist_to_hf(tmp_path / "run", tmp_path / "hf", model.hf_directory)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    with torch.no_grad():
        assert (hf_logits(exported, samples) - logits).abs().max() < 1e-4
        assert (hf_logits(model.hf, samples) - logits).abs().max() > 1e-2
