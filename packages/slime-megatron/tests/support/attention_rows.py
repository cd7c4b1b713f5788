"""Packed rows, and attention over them as all products in float64."""

import math

import numpy as np
import torch

from slime_megatron.model.attention import Continuation, layout


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
