import pytest
import torch

from support.releases import EMBEDDING, FC1, NORM, write_release


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(0)
    tensors = {EMBEDDING: torch.randn(7, 4, generator=generator)}
    for layer in range(3):
        tensors[NORM.format(layer)] = torch.randn(4, generator=generator).bfloat16()
        tensors[FC1.format(layer)] = torch.randn(6, 4, generator=generator)
    return tensors


@pytest.fixture
def written(tmp_path, weights):
    return write_release(tmp_path / "release", weights, {"num_layers": 3})
