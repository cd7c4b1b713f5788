import pytest
import torch

from slime_core.errors import DataError
from slime_core.ops import grpo_advantages


@pytest.mark.parametrize("length", [0, 1, 5])
def test_every_token_has_the_reward(length):
    assert grpo_advantages(-0.25, length).tolist() == [-0.25] * length


def test_type_and_error():
    assert grpo_advantages(1.0, 2, dtype=torch.float64).dtype == torch.float64
    with pytest.raises(DataError, match="response_length -1 is negative"):
        grpo_advantages(1.0, -1)
