"""Attention by batched products."""

import math

import numpy as np
import pytest
import torch

from slime_megatron.model.attention import attend, layout
from support.attention_rows import ROWS, check, inputs, reference, shared_prompts


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        pytest.param(name, *how, marks=[pytest.mark.full] * (name == "long prompt" and how[0] != torch.float32))
        for name in ROWS
        for how in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2))
    ],
)
def test_products(name, dtype, tolerance):
    given = inputs(ROWS[name], dtype)
    check(attend(*given, ROWS[name]), given, reference(*given, ROWS[name]), tolerance)


def needed(row):
    return sum(run * (run + 1) // 2 for run in row.runs.tolist()) + sum(
        one.length * len(one.keys) for one in row.continuations
    )


@pytest.mark.parametrize("share", [False, True])
def test_few_scores_are_computed_for_nothing(share):
    lengths = np.random.default_rng(0).lognormal(math.log(1000), 1, 64).astype(int).clip(16, 16_000).tolist()
    row = shared_prompts([(200, *lengths)]) if share else layout(lengths, [], sum(lengths))
    assert sum(product.num_scores for product in row.products) <= 1.1 * needed(row)
    assert max(product.num_scores for product in row.products) <= 2**20
    assert len(row.products) < 1000
