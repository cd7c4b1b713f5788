"""Batched attention against one sequence at a time in float64. H: heads, N: KV heads, D: head size."""

import sys

import pytest
import torch

from slime_rollout.engine.sglang_flags import CPU_SHIMS

H, N, D, SLOTS = 6, 2, 16, 1000
SCALING = D**-0.5
# (tokens in the cache, new tokens): decode, prefill, prefill after a cached prefix, all in one batch.
CASES = {
    "decode": [(1, 1), (5, 1), (64, 1), (65, 1), (200, 1)],
    "prefill": [(1, 1), (40, 40), (17, 17), (16, 16), (100, 100)],
    "prefix": [(40, 1), (60, 3), (90, 25), (33, 32)],
}


@pytest.fixture(scope="module")
def attention():
    sys.path.insert(0, str(CPU_SHIMS))
    try:
        from slime_cpu_shims import attention
    finally:
        sys.path.remove(str(CPU_SHIMS))
    return attention


@pytest.fixture(params=[1, 2, 4], ids="{} threads".format)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Cache:
    """Random queries, keys and values in a paged cache."""

    def __init__(self, lengths, dtype=torch.float32):
        torch.manual_seed(0)
        self.key_lens = [cached for cached, _ in lengths]
        self.query_lens = [new for _, new in lengths]
        self.k, self.v = (torch.randn(SLOTS, N, D).to(dtype) for _ in range(2))
        self.table = torch.randint(0, SLOTS, (len(lengths) + 3, 256)).to(torch.int32)
        self.requests = torch.randperm(len(lengths) + 3)[: len(lengths)]
        self.query = torch.randn(sum(self.query_lens), H, D).to(dtype)

    def run(self, attention, only=None):
        chosen = range(len(self.key_lens)) if only is None else [only]
        queries = torch.split(self.query, self.query_lens)
        query = torch.cat([queries[i] for i in chosen])
        return attention.attention(
            query,
            torch.full_like(query, float("nan")),
            self.k,
            self.v,
            self.table,
            self.requests[list(chosen)],
            [self.key_lens[i] for i in chosen],
            [self.query_lens[i] for i in chosen],
            SCALING,
        )

    def reference(self):
        parts = []
        for i, query in enumerate(torch.split(self.query.double(), self.query_lens)):
            slots = self.table[self.requests[i], : self.key_lens[i]]
            heads = torch.arange(H) // (H // N)
            key, value = (cached.double()[slots][:, heads] for cached in (self.k, self.v))
            scores = torch.einsum("qhd,khd->hqk", query, key) * SCALING
            position = self.key_lens[i] - self.query_lens[i] + torch.arange(self.query_lens[i])
            hidden = torch.arange(self.key_lens[i])[None, :] > position[:, None]
            parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value))
        return torch.cat(parts)


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES.keys())
def test_equals_one_sequence_at_a_time(attention, lengths):
    cache = Cache(lengths)
    assert (cache.run(attention).double() - cache.reference()).abs().max() < 2e-6


def test_all_kinds_in_one_batch_and_in_small_parts(attention, monkeypatch, threads):
    cache = Cache([lengths for case in CASES.values() for lengths in case])
    whole = cache.run(attention)
    assert (whole.double() - cache.reference()).abs().max() < 2e-6
    monkeypatch.setattr(attention, "MASK_ENTRIES", 64)
    assert cache.run(attention).equal(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_does_not_depend_on_its_neighbours(attention, dtype, threads):
    lengths = [lengths for case in CASES.values() for lengths in case]
    cache = Cache(lengths, dtype)
    together = torch.split(cache.run(attention), cache.query_lens)
    for i in range(len(lengths)):
        assert cache.run(attention, only=i).equal(together[i])
