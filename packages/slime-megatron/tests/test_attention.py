"""Attention against a loop in float64."""

import math

import pytest
import torch

from slime_megatron.attention import attend


def reference(query, key, value, mask):
    output = torch.zeros(query.shape, dtype=torch.float64)
    share = query.shape[1] // key.shape[1]
    for g in range(query.shape[0]):
        for h in range(query.shape[1]):
            for q in range(query.shape[2]):
                kept = mask[g, 0, q].nonzero().flatten()
                keys, values = key[g, h // share, kept].double(), value[g, h // share, kept].double()
                probs = torch.softmax(keys @ query[g, h, q].double() / math.sqrt(query.shape[-1]), 0)
                output[g, h, q] = probs @ values
    return output


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("causal", [True, False])
def test_attend(dtype, tolerance, causal):
    torch.manual_seed(0)
    queries, keys = (5, 5) if causal else (3, 7)
    query = torch.randn(2, 4, queries, 8, dtype=dtype, requires_grad=True)
    key = torch.randn(2, 2, keys, 8, dtype=dtype, requires_grad=True)
    value = torch.randn(2, 2, keys, 8, dtype=dtype, requires_grad=True)
    mask = torch.ones(2, 1, queries, keys, dtype=torch.bool).tril(0 if causal else 2)
    output = attend(query, key, value, None if causal else mask)
    expected = reference(query, key, value, mask)
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)

    weights = torch.randn(output.shape)
    got = torch.autograd.grad((output.float() * weights).sum(), (query, key, value))
    wanted = torch.autograd.grad((expected * weights).sum(), (query, key, value))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=2 * tolerance, rtol=2 * tolerance)
