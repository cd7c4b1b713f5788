import base64
import dataclasses
import math
import pickle
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DamagedError, DataError, FormatVersionError
from slime_core.frame import pack_frame, unpack_frame
from slime_core.types import RolloutBatch, Sample, Status
from slime_core.types.packed import SAMPLE_MAGIC

TEXT = st.text(max_size=5)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def samples(draw):
    length = draw(st.integers(0, 4))
    bound = draw(st.sampled_from([1, 2**7, 2**8, 2**15, 2**16, 2**31, 2**32, 2**63, 2**70]))

    def per_token(values, least=length, most=length):
        return draw(st.lists(values, min_size=least, max_size=most))

    def maybe(values):
        return draw(st.none() | st.just(values))

    return Sample(
        index=draw(st.integers(0, 2**70)),
        group_index=draw(st.integers(0)),
        prompt=draw(TEXT | st.lists(st.dictionaries(TEXT, PLAIN, max_size=2), max_size=2)),
        label=draw(st.none() | TEXT),
        trajectory_id=draw(st.none() | st.integers(0)),
        tokens=per_token(st.integers(0, bound), length, length + 3),
        response=draw(TEXT),
        response_length=length,
        loss_mask=maybe(per_token(st.integers(0, 1))),
        rollout_log_probs=maybe(per_token(st.floats())),
        teacher_log_probs=maybe(per_token(st.floats(width=32))),
        weight_versions=per_token(st.integers(-1, bound)),
        reward=draw(st.none() | st.integers() | st.floats() | st.dictionaries(TEXT, st.floats(), max_size=2)),
        status=draw(st.sampled_from(Status)),
        remove_sample=draw(st.booleans()),
        session_id=draw(st.none() | TEXT),
        metadata=draw(st.dictionaries(TEXT, PLAIN, max_size=3)),
        train_metadata=draw(st.dictionaries(TEXT, PLAIN, max_size=3)),
    )


# repr, unlike ==, takes NaN for NaN and tells 0.0 from -0.0 and True from 1.
@given(samples())
def test_a_sample_comes_back_from_bytes_and_from_json_as_it_was(sample):
    assert repr(Sample.from_bytes(sample.to_bytes())) == repr(sample)
    assert repr(Sample.from_json(sample.to_json())) == repr(sample)


@given(st.lists(st.lists(samples(), max_size=2), max_size=3), st.dictionaries(TEXT, st.floats(), max_size=2))
def test_a_batch_comes_back_from_bytes_and_from_json_lines_as_it_was(groups, metrics):
    batch = RolloutBatch(rollout_id=3, groups=groups, weight_version=2, metrics=metrics, seconds={"generate": 0.5})
    assert repr(RolloutBatch.from_bytes(batch.to_bytes())) == repr(batch)
    assert repr(RolloutBatch.from_jsonl(batch.to_jsonl())) == repr(batch)


def make_sample(**fields):
    return Sample(**({"index": 7, "group_index": 0, "prompt": "p", "tokens": [1, 2, 3], "response_length": 2} | fields))


def test_the_bits_of_a_nan_survive():
    odd_nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_DEAD_BEEF))[0]
    sample = Sample.from_bytes(make_sample(rollout_log_probs=[odd_nan, -math.inf]).to_bytes())
    assert struct.pack("<d", sample.rollout_log_probs[0]) == struct.pack("<d", odd_nan)


@pytest.mark.parametrize("bits", [7, 8, 15, 16, 31, 32, 63, 64])
@pytest.mark.parametrize("least", [-1, 0])
def test_integers_about_the_edges_of_their_types(bits, least):
    for top in (2**bits - 2, 2**bits - 1, 2**bits):
        sample = make_sample(tokens=[0, top, top], weight_versions=[least, top])
        assert Sample.from_bytes(sample.to_bytes()) == sample


def test_bytes_are_smaller_than_json_lines_and_pickles():
    length = 2000
    sample = make_sample(
        tokens=[50_000 + 7 * i for i in range(length + 100)],
        response_length=length,
        loss_mask=[1] * length,
        rollout_log_probs=[-i / 1024 for i in range(length)],
        weight_versions=[3] * length,
    )
    size = len(sample.to_bytes())
    assert size < length * (4 + 1 + 4 + 1) + 400 + 700
    assert size < len(pickle.dumps(sample)) / 1.5
    assert size < len(RolloutBatch(rollout_id=0, groups=[[sample]]).to_jsonl()) / 1.5


BYTES = make_sample(rollout_log_probs=[-0.5, -0.25], weight_versions=[1, 1], metadata={"a": 1}).to_bytes()


@given(st.integers(0, len(BYTES) - 1), st.integers(1, 255))
def test_a_changed_byte_is_told(place, flip):
    damaged = bytearray(BYTES)
    damaged[place] ^= flip
    with pytest.raises((DamagedError, FormatVersionError)):
        Sample.from_bytes(damaged)


@given(st.binary(max_size=80) | st.integers(0, len(BYTES) - 1).map(lambda end: BYTES[:end]))
def test_bytes_of_something_else_are_told(data):
    with pytest.raises(DamagedError):
        Sample.from_bytes(data)
    with pytest.raises(DamagedError):
        RolloutBatch.from_bytes(data)


def test_newer_bytes_are_told():
    newer = bytearray(BYTES)
    newer[4] = 2
    with pytest.raises(FormatVersionError, match="a packed sample: format version 2; this slime reads 1 to 1"):
        Sample.from_bytes(newer)
    with pytest.raises(DamagedError, match="starts with b'SLMS' instead of b'SLMB'"):
        RolloutBatch.from_bytes(BYTES)


def test_a_pickle_is_not_run(tmp_path):
    target = tmp_path / "touched"

    class Bomb:
        def __reduce__(self):
            return open, (str(target), "w")

    with pytest.raises(DamagedError):
        Sample.from_bytes(pickle.dumps(Bomb()))
    assert not target.exists()


@pytest.mark.parametrize(
    "arrays",
    [
        [["tokens", "u1", 99]],
        [["tokens", "u1", -1]],
        [["tokens", "u1", 1.0]],
        [["tokens", "f8", 0]],
        [["rollout_log_probs", "u1", 3]],
        [["index", "u1", 3]],
        [["tokens", "x9", 1]],
        [["tokens", [], 1]],
        [["tokens"]],
        [7],
        "tokens",
        [["tokens", "u1", 2]],
    ],
)
def test_forged_arrays_are_told(arrays):
    fields = {"index": 0, "group_index": 0, "prompt": ""}
    with pytest.raises(DamagedError, match=r"a packed sample: .* pack it again"):
        Sample.from_bytes(pack_frame(SAMPLE_MAGIC, 1, {"fields": fields, "arrays": arrays}, b"abc"))


def test_forged_fields_are_told():
    def forge(fields):
        return pack_frame(SAMPLE_MAGIC, 1, {"fields": fields, "arrays": []}, b"")

    with pytest.raises(DataError, match="sample 0: metadata must be a dictionary, got int"):
        Sample.from_bytes(forge({"index": 0, "group_index": 0, "prompt": "", "metadata": 3}))
    with pytest.raises(DataError, match=r"no fields \['__class__'\]"):
        Sample.from_bytes(forge({"index": 0, "group_index": 0, "prompt": "", "__class__": "os.system"}))


@pytest.mark.parametrize(
    "forgery",
    [
        {"group_sizes": [2]},
        {"group_sizes": [-1, 2]},
        {"group_sizes": None},
        {"sample_bytes": [1]},
        {"sample_bytes": [True]},
        {"fields": {"rollout_id": 0}},
        {"fields": None},
    ],
)
def test_a_forged_batch_is_told(forgery):
    batch = RolloutBatch(rollout_id=0, groups=[[make_sample()]])
    head, body = unpack_frame(batch.to_bytes(), b"SLMB", 1, "")
    with pytest.raises(DamagedError, match=r"a packed rollout: .* pack it again"):
        RolloutBatch.from_bytes(pack_frame(b"SLMB", 1, head | forgery, bytes(body)))


WRITERS = [Sample.to_bytes, Sample.to_json]


@pytest.mark.parametrize("write", WRITERS)
def test_what_would_not_come_back_is_refused(write):
    with pytest.raises(DataError, match=r"sample 7: metadata\.turns\[0\] is a tuple"):
        write(make_sample(metadata={"turns": [(1, 2)]}))
    with pytest.raises(DataError, match=r"sample 7: train_metadata has the key 1 of type int; keys must be strings"):
        write(make_sample(train_metadata={1: 2}))
    with pytest.raises(DataError, match=r"sample 7: prompt\[0\]\.image is a bytes"):
        write(make_sample(prompt=[{"role": "user", "image": b"png"}]))
    with pytest.raises(DataError, match="does not fit JSON"):
        write(make_sample(metadata={"n": 10**5000}))


@pytest.mark.parametrize("write", WRITERS)
def test_a_sample_made_invalid_later_is_refused(write):
    sample = make_sample()
    sample.loss_mask = [1]
    with pytest.raises(DataError, match="sample 7: loss_mask has 1 entries, response_length is 2"):
        write(sample)


def test_every_field_is_carried():
    full = make_sample(
        label="l",
        trajectory_id=1,
        response="r",
        loss_mask=[0, 1],
        rollout_log_probs=[-1.0, -2.0],
        teacher_log_probs=[-3.0, -4.0],
        weight_versions=[5, 6],
        reward=0.5,
        status=Status.TRUNCATED,
        remove_sample=True,
        session_id="s",
        metadata={"m": 1},
        train_metadata={"t": 2},
    )
    bare = make_sample(index=8, group_index=1, prompt="q", tokens=[4, 5], response_length=1)
    for field in dataclasses.fields(Sample):
        assert getattr(full, field.name) != getattr(bare, field.name), f"give {field.name} another value above"
    assert Sample.from_bytes(full.to_bytes()) == full
    assert Sample.from_dict(full.to_dict()) == full
    assert Sample.from_json(full.to_json()) == full


WRITTEN_BY_VERSION_1 = (
    "U0xNUwEAAAB7AQAAAAAAACAAAAAAAAAA8Nz1ansiZmllbGRzIjp7ImluZGV4Ijo3LCJncm91cF9pbmRleCI6MSwicHJvbXB0IjoicCIsImxh"
    "YmVsIjpudWxsLCJ0cmFqZWN0b3J5X2lkIjpudWxsLCJyZXNwb25zZSI6IiIsInJlc3BvbnNlX2xlbmd0aCI6MiwidGVhY2hlcl9sb2dfcHJv"
    "YnMiOm51bGwsInJld2FyZCI6eyJhIjoxLjB9LCJzdGF0dXMiOiJjb21wbGV0ZWQiLCJyZW1vdmVfc2FtcGxlIjpmYWxzZSwic2Vzc2lvbl9p"
    "ZCI6bnVsbCwibWV0YWRhdGEiOnsiayI6W251bGwsIsO8Il19LCJ0cmFpbl9tZXRhZGF0YSI6e319LCJhcnJheXMiOltbInRva2VucyIsInU0"
    "IiwzXSxbImxvc3NfbWFzayIsInUxIiwyXSxbIndlaWdodF92ZXJzaW9ucyIsImkxIiwyXSxbInJvbGxvdXRfbG9nX3Byb2JzIiwiZjgiLDJd"
    "XX0BAAAALAEAAHARAQAAAf8DAAAAAAAA4L+amZmZmZm5Pw=="
)


def test_bytes_of_the_first_version_stay_readable():
    assert Sample.from_bytes(base64.b64decode(WRITTEN_BY_VERSION_1)) == make_sample(
        group_index=1,
        tokens=[1, 300, 70000],
        loss_mask=[0, 1],
        rollout_log_probs=[-0.5, 0.1],
        weight_versions=[-1, 3],
        reward={"a": 1.0},
        status=Status.COMPLETED,
        metadata={"k": [None, "ü"]},
    )
