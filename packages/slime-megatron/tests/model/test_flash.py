"""Attention by variable-length calls that are merged."""

import math

import pytest
import torch

from slime_megatron.model.flash import FlashAttention
from support.attention_rows import ROWS, check, inputs, reference


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
