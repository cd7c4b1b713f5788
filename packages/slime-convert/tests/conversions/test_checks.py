"""Checks that several conversions make."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from slime_convert import hf_to_torch_dist
from slime_convert.errors import (
    HfConfigError,
    ShapeMismatchError,
    WeightError,
)


def test_weights_that_would_be_lost_are_refused(origin, tmp_path):
    extended = shutil.copytree(origin, tmp_path / "extended")
    (extended / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file({"model.layers.0.self_attn.further.bias": torch.zeros(24)}, extended / "extra.safetensors")
    with pytest.raises(WeightError, match=r"1 weights that a \w+ model does not have, such as .*further\.bias"):
        hf_to_torch_dist(extended, tmp_path / "td")
    assert list(tmp_path.iterdir()) == [extended]


def test_an_incomplete_model_is_refused(one_origin, tmp_path):
    broken = shutil.copytree(one_origin, tmp_path / "broken")
    shard = sorted(broken.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:50])
    with pytest.raises(HfConfigError, match=r"cannot read .*safetensors"):
        hf_to_torch_dist(broken, tmp_path / "td")
    shard.unlink()
    with pytest.raises(HfConfigError, match=rf"1 of the .* files that .* names are missing, such as {shard.name}"):
        hf_to_torch_dist(broken, tmp_path / "td")
    (broken / "model.safetensors.index.json").unlink()
    with pytest.raises(WeightError, match=r"has no weight .*, which its config\.json asks for"):
        hf_to_torch_dist(broken, tmp_path / "td")
    for path in broken.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(HfConfigError, match=r"has no \*\.safetensors"):
        hf_to_torch_dist(broken, tmp_path / "td")
    assert list(tmp_path.iterdir()) == [broken]


def test_flags_are_checked(one_origin, tmp_path):
    with pytest.raises(ShapeMismatchError, match="--num-layers 7"):
        hf_to_torch_dist(one_origin, tmp_path / "td", flags={"num_layers": 7, "hidden_size": 24})
    with pytest.raises(
        ShapeMismatchError, match="make_vocab_size_divisible_by 0 must be a whole number from 1 to 1048576"
    ):
        hf_to_torch_dist(one_origin, tmp_path / "td", make_vocab_size_divisible_by=0)
    assert not any(tmp_path.iterdir())
