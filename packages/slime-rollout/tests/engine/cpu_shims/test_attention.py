"""Batched attention against one sequence at a time in float64. H: heads, N: KV heads, D: head size."""

import itertools
import sys
from types import SimpleNamespace

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


def attend(module, query, output, k_cache, v_cache, table, requests, key_lens, query_lens, scaling):
    groups = query.shape[1] // k_cache.shape[1]
    parts = module.plan(table, requests, key_lens, query_lens, groups, query.dtype)
    return module.attend(query, output, k_cache, v_cache, parts, scaling)


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
        return attend(
            attention,
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


@pytest.mark.parametrize("shape", [(4, 2, 16, 16), (9, 3, 64, 64), (4, 1, 48, 32)], ids=str)
def test_a_token_does_not_depend_on_which_tokens_are_computed_with_it(attention, shape, threads):
    """Read whole, in parts, or decoded: lengths on both sides of where the kernel adds keys in another order."""
    torch.manual_seed(0)
    heads, kv_heads, width, value_width = shape
    length = 530
    keys, values = torch.randn(length, kv_heads, width), torch.randn(length, kv_heads, value_width)
    table, queries = torch.randperm(length)[None], torch.randn(length, heads, width)

    def computed(*parts):
        query = torch.cat([queries[start:end] for start, end in parts])
        out = query.new_full((len(query), heads, value_width), float("nan"))
        lens = [end for _, end in parts], [end - start for start, end in parts]
        rows, requests = table.expand(len(parts), -1), torch.arange(len(parts))
        attend(attention, query, out, keys, values, rows, requests, *lens, 0.1)
        return torch.split(out, lens[1])

    (whole,) = computed((0, length))
    cuts = [0, 1, 60, 150, 200, 264, 300, 301, 400, length]
    parts = [
        *itertools.pairwise(cuts),
        *((end - 1, end) for end in range(1, length, 13)),
        (0, 200),
        (130, 310),
    ]
    for (start, end), part in zip(parts, computed(*parts), strict=True):
        assert part.equal(whole[start:end]), (start, end)


class Pass:
    """A forward pass as SGLang's backend sees it: all layers have the same lengths, each its own keys and values."""

    def __init__(self, attention, backend, cache):
        self.attention, self.backend, self.cache = attention, backend, cache
        self.lens, self.new = torch.tensor(cache.key_lens), torch.tensor(cache.query_lens)
        attention.forget(None, backend, None)

    def layer(self, **changes):
        c = self.cache
        common = (torch.full_like(c.query, float("nan")), c.k, c.v, c.table, c.requests, self.lens)
        others = {"scaling": SCALING, "is_cross_attn": False, "sliding_window_size": None, "causal": True} | changes
        if set(c.query_lens) == {1}:
            return self.attention.decode(None, self.backend, c.query, *common, **others)
        return self.attention.extend(None, self.backend, c.query, *common, self.lens - self.new, self.new, **others)


def test_layers_of_a_pass_share_a_plan_and_passes_do_not(attention, monkeypatch):
    backend, plans = SimpleNamespace(), []
    plan = attention.plan
    monkeypatch.setattr(attention, "plan", lambda *args: plans.append(args) or plan(*args))
    for number, case in enumerate(("decode", "prefix", "decode"), 1):
        cache = Cache(CASES[case])
        one = Pass(attention, backend, cache)
        for _ in range(3):
            cache.k, cache.v = torch.randn(2, SLOTS, N, D)
            assert (one.layer().double() - cache.reference()).abs().max() < 2e-6
        assert len(plans) == number
    cache.table = cache.table.flip(0)  # requests lie elsewhere in the next pass, although they are as long
    again = Pass(attention, backend, cache)
    assert (again.layer().double() - cache.reference()).abs().max() < 2e-6
