import torch
from hypothesis import given
from hypothesis import strategies as st
from random_tensors import bits, tensors

from slime_core.integrity.bits import as_integers, flat, flat_chunks, from_bytes, to_bytes


@given(tensors(), st.integers(1, 20))
def test_chunks_are_all_elements_in_order_and_never_too_many(tensor, limit):
    chunks = list(flat_chunks(as_integers(tensor), limit))
    assert all(0 < chunk.numel() <= limit and chunk.stride() == (1,) for chunk in chunks)
    assert [byte for chunk in chunks for byte in bits(chunk)] == bits(tensor)


@given(tensors())
def test_bytes_there_and_back(tensor):
    data = to_bytes(flat(as_integers(tensor)))
    assert list(data) == bits(tensor)
    assert from_bytes(memoryview(data), torch.device("cpu")).tolist() == bits(tensor)


def test_a_contiguous_tensor_is_not_copied():
    tensor = torch.zeros(3, 5, dtype=torch.bfloat16)
    assert [chunk.data_ptr() for chunk in flat_chunks(as_integers(tensor), 8)] == [
        tensor.data_ptr(),
        tensor.data_ptr() + 16,
    ]
