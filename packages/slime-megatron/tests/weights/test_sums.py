"""Checksums of weights: any bit and any place counts, and two runs of one layout agree."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_megatron.weights.sums import LANES, lane_sums

SIZES = st.integers(2, 10_000)


def drawn(size, dtype, seed):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(size=SIZES, place=st.integers(0, 9_999), bit=st.integers(0, 15), seed=st.integers(0, 99))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bit_counts(dtype, size, place, bit, seed):
    tensor = drawn(size, dtype, seed)
    other = tensor.clone()
    other.view(torch.int16)[place % size] ^= -(1 << bit) if bit == 15 else 1 << bit
    assert (lane_sums(tensor) & 0xFFFFFFFF).tolist() != (lane_sums(other) & 0xFFFFFFFF).tolist()


@given(size=SIZES, places=st.tuples(st.integers(0, 9_999), st.integers(0, 9_999)), seed=st.integers(0, 99))
def test_a_place_counts(size, places, seed):
    tensor = drawn(size, torch.float32, seed)
    one, two = (place % size for place in places)
    other = tensor.clone()
    other[one], other[two] = tensor[two], tensor[one]
    changed = not torch.equal(tensor, other)
    assert (lane_sums(tensor).tolist() != lane_sums(other).tolist()) == changed


@pytest.mark.parametrize("size", [9_000, 2_500_000])
def test_it_is_the_sum_of_the_bits(size):
    tensor = drawn(size, torch.float32, 1)
    bits = tensor.view(torch.int32).to(torch.int64)
    rows, columns = torch.arange(size) // 4096 + 1, torch.arange(size) % 4096 + 1
    assert lane_sums(tensor).tolist() == [int(bits.sum()), int((bits * rows).sum()), int((bits * columns).sum())]


def test_a_large_weight_is_not_copied_at_once():
    weight = torch.zeros(6_000_000)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        lane_sums(weight)
    assert 0 < max(event.cpu_memory_usage for event in seen.events()) < 20e6  # all of it in int64 has 48e6 bytes


def test_ranks_agree_and_a_step_changes_every_weight(ranks, tiny_model, tiny_config, make_samples, make_shards):
    model = tiny_model("qwen3")
    config = tiny_config(load=model.checkpoint, tensor_model_parallel_size=2)
    found = []
    for _ in range(2):
        ranks.start(2, config, model.shape)
        (names, sums), (others, same) = ranks.call("weight_sums")
        assert names == others and sums.shape == (len(names), LANES)
        np.testing.assert_array_equal(sums, same)
        report = ranks.first("train", make_shards(make_samples()))
        assert report.weight_names == names
        found.append((sums, report.weight_sums))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (found[0][0] != found[0][1]).any(1).all()
