"""Attention over packed rows against all products in float64, by products and by merged variable-length calls."""

import math

import numpy as np
import pytest
import torch

from slime_megatron.attention import Continuation, attend, layout
from slime_megatron.flash import FlashAttention


def seen(row, query):
    """The keys that a query of a layout sees."""
    ends = row.runs.cumsum()
    run = int(np.searchsorted(ends, query, side="right"))
    start = int(ends[run] - row.runs[run])
    others = [one.keys for one in row.continuations if one.start <= query < one.start + one.length]
    return np.concatenate([*others, row.first_key + np.arange(start, query + 1)])


def reference(query, key, value, row, scale=None):
    """Output of each query in float64: all products, masked but for the keys of :func:`seen`."""
    of_head = torch.arange(query.shape[1]) // (query.shape[1] // key.shape[1])
    query, key, value = query.double(), key.double()[:, of_head], value.double()[:, of_head]
    hidden = torch.ones(len(query), len(key), dtype=torch.bool)
    for place in range(len(query)):
        hidden[place, torch.from_numpy(seen(row, place))] = False
    scores = torch.einsum("qhc,khc->hqk", query, key) * (scale or 1 / math.sqrt(query.shape[-1]))
    probs = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
    return torch.einsum("hqk,khw->qhw", probs, value)


def shared_prompts(groups, padding=0):
    """A row of groups, each a prompt and its responses."""
    runs, continuations, start = [], [], 0
    for prompt, *responses in groups:
        runs += [prompt, *responses]
        if responses:
            continuations.append(Continuation(start + prompt, sum(responses), np.arange(start, start + prompt)))
        start += prompt + sum(responses)
    return layout(runs, continuations, start + padding)


ROWS = {
    "runs": layout([5, 1, 9, 300, 7, 40, 700], [], 1064),
    "shared prompts": shared_prompts([(9, 3, 4), (7, 1, 2, 5), (8,), (40, 300, 30, 9)], padding=3),
    # Ten tokens, then two prompts' rests with two responses each, and a sample.
    "common beginning": layout(
        [10, 3, 4, 1, 2, 5, 7, 9],
        [
            Continuation(10, 3, np.arange(10)),
            Continuation(13, 5, np.array([*range(10), *range(10, 13)])),
            Continuation(18, 2, np.arange(10)),
            Continuation(20, 12, np.array([*range(10), *range(18, 20)])),
            Continuation(32, 9, np.arange(10)),
        ],
        41,
    ),
    "long prompt": shared_prompts([(600, 5, 6, 7), (590, 300)]),
    # Two chunks, the second of three ranks' tokens: chunks 1 and 4 of 0 … 5.
    "context parallel": layout(
        [4, 4],
        [Continuation(0, 4, np.arange(4)), Continuation(4, 4, np.array([*range(4), *range(8, 12), *range(16, 24)]))],
        8,
        rank=1,
        ranks=3,
    ),
}


def inputs(row, dtype, heads=4, key_heads=2, channels=8, width=8):
    torch.manual_seed(0)
    tokens, keys = int(row.runs.sum()), row.num_keys
    shapes = (tokens, heads, channels), (keys, key_heads, channels), (keys, key_heads, width)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def check(output, given, expected, tolerance):
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    weights = torch.randn(output.shape, dtype=torch.float64)
    got = torch.autograd.grad((output.double() * weights).sum(), given)
    wanted = torch.autograd.grad((expected * weights).sum(), given)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=4 * tolerance, rtol=4 * tolerance)


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


@pytest.mark.parametrize("heads", [(3, 3), (6, 1)])
def test_values_may_have_another_width(heads):
    row = ROWS["shared prompts"]
    given = inputs(row, torch.float64, *heads, width=5)
    check(attend(*given, row, 0.3), given, reference(*given, row, 0.3), 1e-12)


class LoopKernel:
    """A variable-length kernel as loops over runs, with what flash attention takes and gives."""

    def forward(self, query, key, value, call, scale):
        outputs, lses = [], []
        for queries, keys in self.runs(call):
            scores = self.scores(query[queries], key[keys], call.causal, scale)
            lses.append(scores.logsumexp(-1))
            outputs.append((scores.softmax(-1) @ self.heads(value[keys], query)).transpose(0, 1))
        return torch.cat(outputs), torch.cat(lses, 1)

    def backward(self, grad, query, key, value, output, lse, call, scale):
        """As flash attention has it: from output and LSE, which may be over more keys than those of the call."""
        grads = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        share = query.shape[1] // key.shape[1]
        for queries, keys in self.runs(call):
            probs = (self.scores(query[queries], key[keys], call.causal, scale) - lse[:, queries, None]).exp()
            grad_HRF = grad[queries].transpose(0, 1)
            slope = grad_HRF @ self.heads(value[keys], query).transpose(1, 2)
            slope = probs * (slope - (grad[queries] * output[queries]).sum(-1).t()[..., None]) * scale
            grads[0][queries] = (slope @ self.heads(key[keys], query)).transpose(0, 1)
            for grad_keys, each in (
                (grads[1], slope.mT @ query[queries].transpose(0, 1)),
                (grads[2], probs.mT @ grad_HRF),
            ):
                grad_keys[keys] = each.transpose(0, 1).unflatten(1, (-1, share)).sum(2)
        return tuple(grads)

    def runs(self, call):
        queries, keys = call.query_ends.tolist(), call.key_ends.tolist()
        for number in range(len(queries) - 1):
            yield slice(*queries[number : number + 2]), slice(*keys[number : number + 2])

    def heads(self, tensor, query):
        return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1).transpose(0, 1)

    def scores(self, query, key, causal, scale):
        scores = query.transpose(0, 1) @ self.heads(key, query).transpose(1, 2) * scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -math.inf) if causal else scores


@pytest.mark.parametrize("name", ROWS)
def test_merged_calls(name):
    given = inputs(ROWS[name], torch.float64, width=6)
    output = FlashAttention.apply(*given, ROWS[name].flash_calls, 0.25, LoopKernel())
    check(output, given, reference(*given, ROWS[name], 0.25), 1e-12)


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
