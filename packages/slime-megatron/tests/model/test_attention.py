"""Attention over packed rows against all products in float64."""

import pytest
import torch

from slime_megatron.model.attention import attend
from support.attention_rows import ROWS, check, inputs, reference


@pytest.mark.parametrize("heads", [(3, 3), (6, 1)])
def test_values_may_have_another_width(heads):
    row = ROWS["shared prompts"]
    given = inputs(row, torch.float64, *heads, width=5)
    check(attend(*given, row, 0.3), given, reference(*given, row, 0.3), 1e-12)
