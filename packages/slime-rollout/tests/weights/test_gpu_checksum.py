"""SGLang's checksum on CUDA: what its kernels of 0.5.23 give under Triton's interpreter, and in any parts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_rollout.weights.gpu_checksum import GpuChecksum


def checksum(*parts):
    whole = GpuChecksum()
    for part in parts:
        whole.update(part)
    return whole.hexdigest()


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.arange(5, dtype=torch.int16), "b2d358eba40925d0"),
        (torch.arange(8192, dtype=torch.int32), "0bed31c740a59498"),
        (torch.arange(30_000, dtype=torch.int32), "47a722d7ee5d35b6"),
        (torch.empty(0), "0000000000000000"),
    ],
)
def test_it_is_what_the_kernels_give(tensor, expected):
    assert checksum(tensor) == expected


@given(size=st.integers(0, 40_000), cuts=st.lists(st.integers(0, 40_000), max_size=4), seed=st.integers(0, 9))
def test_parts_make_no_difference(size, cuts, seed):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    parts = torch.tensor_split(tensor, sorted(min(cut, size) for cut in cuts))
    assert checksum(*parts) == checksum(tensor)


def test_a_bit_and_a_place_count():
    tensor = torch.arange(20_000, dtype=torch.int32)
    other, turned = tensor.clone(), tensor.clone()
    other[11_111] ^= 1
    turned[[3, 9_000]] = tensor[[9_000, 3]]
    assert len({checksum(tensor), checksum(other), checksum(turned)}) == 3
