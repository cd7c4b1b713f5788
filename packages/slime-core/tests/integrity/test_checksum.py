import hashlib
import itertools
import json
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_tensors import DTYPES, LAYOUTS, bits, peak_bytes, random_tensor, relaid, tensors

from slime_core.errors import DataError, IntegrityError
from slime_core.integrity import ChecksumStream, combined_checksum, tensor_checksum, verify_checksums

BLOCK = 65_536


def splitmix64_keys():
    """Steele, Lea and Flood (2014), figure 16, with the lowest bit set; 2 × 8192 of them."""
    keys, state = [], 0
    for _ in range(2 * 8192):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        keys.append((z ^ (z >> 31)) | 1)
    return keys[:8192], keys[8192:]


LOW, HIGH = splitmix64_keys()


def by_the_definition(tensor):
    """The checksum word by word in Python's integers."""
    data = bytes(bits(tensor))
    hasher = hashlib.blake2b(digest_size=16)
    name = str(tensor.dtype).split(".")[1]
    hasher.update(json.dumps(["multilinear64-blake2b128", name, list(tensor.shape)]).encode())
    for start in range(0, len(data), BLOCK):
        block = data[start : start + BLOCK]
        block += b"\0" * (-len(block) % 8)
        words = [int.from_bytes(block[i : i + 8], "little", signed=True) for i in range(0, len(block), 8)]
        whole = sum(k * w for k, w in zip(LOW, words, strict=False)) % 2**64
        upper = sum(k * (w >> 32) for k, w in zip(HIGH, words, strict=False)) % 2**64
        hasher.update(whole.to_bytes(8, "little") + upper.to_bytes(8, "little"))
    return hasher.hexdigest()


@given(tensors())
def test_it_is_what_its_description_says(tensor):
    assert tensor_checksum(tensor) == by_the_definition(tensor)


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 17 * BLOCK + 5])
def test_many_blocks_are_what_the_description_says(size):
    tensor = random_tensor(torch.uint8, (size,), 1)
    assert tensor_checksum(tensor) == by_the_definition(tensor)


def test_it_never_changes():
    # Both ends may run different releases: these are part of the format.
    assert tensor_checksum(torch.empty(0)) == "5c90c0ef1eb7b3670c0bf6929993e5d4"
    assert tensor_checksum(torch.arange(100_000)) == "fcc17f2e118fe960930c5369df3ae308"


@given(st.integers(0, 3 * BLOCK), st.lists(st.integers(0, 3 * BLOCK), max_size=4), st.integers(0, 9))
def test_how_a_tensor_is_cut_makes_no_difference(size, cuts, seed):
    tensor = random_tensor(torch.uint8, (size,), seed)
    stream = ChecksumStream(torch.uint8, (size,))
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    for start, end in itertools.pairwise(edges):
        stream.update(tensor[start:end])
    assert stream.digest() == tensor_checksum(tensor) == stream.digest()


def test_a_buffer_may_be_used_again_for_the_next_part():
    tensor, stream = random_tensor(torch.uint8, (1000,), 0), ChecksumStream(torch.uint8, (1000,))
    buffer = torch.empty(100, dtype=torch.uint8)
    for part in tensor.split(100):
        stream.update(buffer.copy_(part))
    assert stream.digest() == tensor_checksum(tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_memory_layout_makes_no_difference(dtype, layout):
    tensor = random_tensor(dtype, (300, 7, 130), 0)  # more than a chunk, rows that do not fill one
    other = relaid(tensor, layout)
    assert other.stride() != tensor.stride() or layout in ("contiguous", "offset")
    assert tensor_checksum(other) == tensor_checksum(tensor)


def test_rows_larger_than_a_chunk_are_cut():
    tensor = random_tensor(torch.uint8, (3, 3 * 2**20), 0)
    assert tensor_checksum(relaid(tensor, "strided")) == tensor_checksum(tensor)


@pytest.mark.parametrize(("layout", "limit"), [("contiguous", 1.1), ("strided", 2.1)])
def test_memory_does_not_grow_with_the_tensor(layout, limit):
    """A chunk of 1 MiB for products, and one for a copy where elements do not lie side by side."""
    tensor = relaid(random_tensor(torch.uint8, (8, 2**20), 0), layout)
    assert peak_bytes(lambda: tensor_checksum(tensor)) < limit * 2**20


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_is_told(dtype):
    tensor = random_tensor(dtype, (3,), 0)
    seen = {tensor_checksum(tensor)}
    raw = tensor.view(torch.uint8)
    for place in range(raw.numel()):
        for bit in range(1 if dtype == torch.bool else 8):
            raw[place] ^= 1 << bit
            seen.add(tensor_checksum(tensor))
            raw[place] ^= 1 << bit
    assert len(seen) == 1 + raw.numel() * (1 if dtype == torch.bool else 8)


def test_swaps_of_any_two_words_of_a_block_change_its_sums():
    # Keys differ in their lower 33 bits, words in their lower or upper 32: no product can be a multiple of 2^64.
    for keys in (LOW, HIGH):
        assert len({key % 2**33 for key in keys}) == len(keys) and all(key % 2 for key in keys)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_swapped_and_moved_elements_are_told(dtype):
    tensor = random_tensor(dtype, (40_000,), 3)
    raw = tensor.view(torch.uint8).view(-1, dtype.itemsize)
    whole, rng = tensor_checksum(tensor), random.Random(0)
    for _ in range(200):
        i, j = rng.sample(range(len(raw)), 2)
        if not torch.equal(raw[i], raw[j]):
            raw[[i, j]] = raw[[j, i]]
            assert tensor_checksum(tensor) != whole
            raw[[i, j]] = raw[[j, i]]
    for shift in (1, 4, BLOCK // dtype.itemsize):
        assert tensor_checksum(tensor.view(torch.uint8).view(raw.shape).roll(shift, 0).view(dtype).view(-1)) != whole
    assert tensor_checksum(tensor) == whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_flipped_signs_are_told(dtype):
    # The top bits of words: what a plain sum modulo 2^64 with odd keys is blind to, two by two.
    tensor = torch.ones(4096, dtype=dtype)
    seen = {tensor_checksum(tensor)}
    for i in range(40):
        for j in range(i):
            flipped = tensor.clone()
            flipped[[i, j]] = -1.0
            seen.add(tensor_checksum(flipped))
    for count in (64, 128, 1024, 4096):
        seen.add(tensor_checksum(torch.cat([-tensor[:count], tensor[count:]])))
    assert len(seen) == 1 + 40 * 39 // 2 + 4


def test_swapped_blocks_are_told():
    tensor = random_tensor(torch.uint8, (4, BLOCK), 0)
    assert tensor_checksum(tensor[[1, 0, 2, 3]]) != tensor_checksum(tensor)


def test_dtype_and_shape_count():
    zeros = [
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(4, 1),
        torch.zeros(5),
        torch.zeros(0),
        torch.zeros(0, 3),
        torch.zeros(()),
        torch.zeros(1),
    ]
    assert len({tensor_checksum(tensor) for tensor in zeros}) == len(zeros)


def test_gradients_and_views_are_nothing_to_it():
    tensor = torch.randn(5, requires_grad=True)
    assert tensor_checksum(tensor) == tensor_checksum(tensor.detach())
    complex_ = torch.randn(5, dtype=torch.complex64)
    assert tensor_checksum(complex_.conj()) == tensor_checksum(complex_.conj().resolve_conj())
    assert tensor_checksum(complex_.conj().imag) == tensor_checksum(-complex_.imag)


def test_a_stream_that_does_not_fit_is_refused():
    stream = ChecksumStream(torch.bfloat16, (2, 3))
    stream.update(torch.zeros(2, 2, dtype=torch.bfloat16))
    with pytest.raises(DataError, match=r"shape \[2, 3\] has 12 bytes, but 8 came"):
        stream.digest()
    with pytest.raises(DataError, match=r"has 12 bytes; after 8, 6 more came"):
        stream.update(torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(DataError, match="a part of float16 for a tensor of bfloat16"):
        stream.update(torch.zeros(2, dtype=torch.float16))
    stream.update(torch.zeros(2, dtype=torch.bfloat16))
    assert stream.digest() == tensor_checksum(torch.zeros(2, 3, dtype=torch.bfloat16))


@pytest.mark.parametrize("tensor", [torch.zeros(3).to_sparse(), torch.zeros(3, device="meta")], ids=["sparse", "meta"])
def test_what_has_no_bytes_is_refused(tensor):
    with pytest.raises(DataError, match="has no bytes to read; give a dense tensor"):
        tensor_checksum(tensor)


@pytest.mark.filterwarnings("ignore")  # torch is about to drop these
def test_tensors_quantized_by_torch_are_refused():
    with pytest.raises(DataError, match=r"cpu tensor of qint8 .* has no bytes to read"):
        tensor_checksum(torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8))


def test_many_tensors_have_one_checksum():
    assert combined_checksum({"a": "1", "b": "2"}) == combined_checksum({"b": "2", "a": "1"})
    others = [{"a": "2", "b": "1"}, {"a": "1"}, {}, {"a": "1", "b": "2", "c": "3"}]
    assert combined_checksum({"a": "1", "b": "2"}) not in [combined_checksum(other) for other in others]


def test_a_receiver_that_differs_is_told_where():
    sent = {f"w{i}": str(i) for i in range(9)}
    verify_checksums(dict(sent), sent)
    with pytest.raises(IntegrityError, match="of 9 tensors, 1 differ: w3; 1 are missing: w4; 1 were not sent: x; send"):
        verify_checksums({name: value for name, value in sent.items() if name != "w4"} | {"w3": "?", "x": "1"}, sent)
    with pytest.raises(IntegrityError, match="9 are missing: w0, w1, w2, w3, w4 …; send the weights again"):
        verify_checksums({}, sent)
