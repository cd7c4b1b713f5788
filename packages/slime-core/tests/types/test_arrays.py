import dataclasses
import json
import math
import os
import pickle
import resource
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DamagedError, DataError, FormatVersionError
from slime_core.types import RolloutBatch, RolloutColumns, Sample, Status
from slime_core.types.arrays import (
    KEPT,
    ROUTED,
    SAMPLE_COLUMNS,
    Ragged,
    columns_of,
    read_kept,
    read_npz,
    samples_of,
    write_npz,
)
from slime_core.types.kept import kept_text

TEXT = st.text(max_size=5)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def samples(draw):
    length = draw(st.integers(0, 4))
    bound = draw(st.sampled_from([1, 2**7, 2**8, 2**15, 2**16, 2**31, 2**32, 2**63 - 1]))

    def per_token(values, least=length, most=length):
        return draw(st.lists(values, min_size=least, max_size=most))

    def maybe(values):
        return draw(st.none() | st.just(values))

    return Sample(
        index=draw(st.integers(0, 2**63 - 1)),
        group_index=draw(st.integers(0, 2**63 - 1)),
        prompt=draw(TEXT | st.lists(st.dictionaries(TEXT, PLAIN, max_size=2), max_size=2)),
        label=draw(st.none() | TEXT),
        trajectory_id=draw(st.none() | st.integers(0, 2**63 - 1)),
        tokens=per_token(st.integers(0, bound), length, length + 3),
        response=draw(TEXT),
        response_length=length,
        loss_mask=maybe(per_token(st.integers(0, 1))),
        rollout_log_probs=maybe(per_token(st.floats())),
        teacher_log_probs=maybe(per_token(st.floats(width=32))),
        weight_versions=per_token(st.integers(-1, bound)),
        kept_tokens=maybe(kept_text(per_token(st.lists(st.integers(0, 2**29), max_size=3)))),
        reward=draw(st.none() | st.integers() | st.floats() | st.dictionaries(TEXT, st.floats(), max_size=2)),
        status=draw(st.sampled_from(Status)),
        remove_sample=draw(st.booleans()),
        session_id=draw(st.none() | TEXT),
        metadata=draw(st.dictionaries(TEXT, PLAIN, max_size=3)),
        train_metadata=draw(st.dictionaries(TEXT, PLAIN, max_size=3)),
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("arrays") / "rollout.npz"


def written(path, batch):
    batch.columns().write(str(path))
    return RolloutColumns.read(str(path)).batch()


# repr, unlike ==, takes NaN for NaN and tells 0.0 from -0.0 and True from 1.
@given(st.lists(st.lists(samples(), max_size=2), max_size=3), st.dictionaries(TEXT, st.floats(), max_size=2))
def test_a_batch_comes_back_from_its_file_as_it_was(path, groups, metrics):
    batch = RolloutBatch(rollout_id=3, groups=groups, weight_version=2, metrics=metrics, seconds={"generate": 0.5})
    assert repr(batch.columns().batch()) == repr(batch)
    assert repr(written(path, batch)) == repr(batch)


def make_sample(**fields):
    return Sample(**({"index": 7, "group_index": 0, "prompt": "p", "tokens": [1, 2, 3], "response_length": 2} | fields))


def again(sample):
    (found,) = samples_of(columns_of([sample]))
    return found


def as_bytes(text):
    return np.frombuffer(text.encode(), np.uint8)


@given(st.lists(st.lists(st.integers(0, 999_999_999), max_size=4), max_size=6))
def test_kept_tokens_are_read_as_they_were_written(sets):
    ids, counts = read_kept("sample 7", as_bytes(kept_text(sets)))
    assert (ids.dtype, counts.dtype) == (np.int32, np.int32)
    assert ids.tolist() == [one for kept in sets for one in kept]
    assert counts.tolist() == [len(kept) for kept in sets]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2;", "may hold token ids, spaces and semicolons only"),
        ("-1;", "may hold token ids, spaces and semicolons only"),
        ("1;2147483648;", "has 2147483648, which is not a token id"),
    ],
)
def test_other_kept_tokens_are_refused(text, message):
    with pytest.raises(DataError, match=f"sample 7: kept_tokens {message}"):
        read_kept("sample 7", as_bytes(text))


def test_samples_without_kept_tokens_or_experts_have_no_column_for_them():
    sample = Sample(index=0, group_index=0, prompt="p", tokens=[1, 2], response_length=1)
    assert not {KEPT, ROUTED} & columns_of([sample]).keys()
    other = Sample(index=1, group_index=0, prompt="p", tokens=[1, 2], response_length=1, kept_tokens="2 5;")
    columns = columns_of([sample, other])
    assert [one.kept_tokens for one in samples_of(columns)] == [None, "2 5;"]


def test_the_bits_of_a_nan_survive():
    odd_nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_DEAD_BEEF))[0]
    sample = again(make_sample(rollout_log_probs=[odd_nan, -math.inf]))
    assert struct.pack("<d", sample.rollout_log_probs[0]) == struct.pack("<d", odd_nan)


@pytest.mark.parametrize("bits", [7, 8, 15, 16, 31, 32, 63])
@pytest.mark.parametrize("least", [-1, 0])
def test_integers_about_the_edges_of_their_types(bits, least):
    for top in (2**bits - 2, 2**bits - 1, 2**bits):
        sample = make_sample(tokens=[0, top, top], weight_versions=[least, top])
        if top < 2**63:
            assert again(sample) == sample
        else:
            with pytest.raises(DataError, match="does not fit 64 bits"):
                columns_of([sample])


def test_numbers_take_few_bytes():
    """Log-probs of an engine are float32; only what that cannot hold takes more, for all samples alike."""
    sample = make_sample(loss_mask=[0, 1], rollout_log_probs=[-0.5, float(np.float32(-0.1))], weight_versions=[1, 2])
    columns = columns_of([sample])
    kinds = {name: columns[name].values.dtype for name in ("tokens", "loss_mask", "weight_versions")}
    assert kinds == {"tokens": np.int32, "loss_mask": np.uint8, "weight_versions": np.int32}
    assert columns["rollout_log_probs"].values.dtype == np.float32
    assert columns_of([sample, make_sample(rollout_log_probs=[0.1, 1e300])])["rollout_log_probs"].values.tolist() == [
        -0.5, float(np.float32(-0.1)), 0.1, 1e300
    ]  # fmt: skip


def test_lists_that_hooks_set_become_plain():
    sample = make_sample()
    sample.tokens, sample.loss_mask = np.array([1, 2, 3]), (True, 0.0)
    sample.rollout_log_probs, sample.weight_versions = np.array([-0.5, 2], np.float32), [np.int64(1), 2]
    plain = make_sample(loss_mask=[1, 0], rollout_log_probs=[-0.5, 2.0], weight_versions=[1, 2])
    assert repr(again(sample)) == repr(plain)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_mask": [1]}, "sample 7: loss_mask has 1 entries, response_length is 2"),
        ({"loss_mask": [1, 2]}, "sample 7: loss_mask may hold 0 and 1 only"),
        ({"loss_mask": [1, -1]}, "sample 7: loss_mask may hold 0 and 1 only"),
        ({"tokens": [1, 2, -3]}, r"sample 7: tokens\[2\] is -3"),
        ({"tokens": [1, 2, 3.5]}, r"sample 7: tokens\[2\] must be an integer"),
        ({"tokens": "abc"}, "sample 7: tokens must be a list of integers"),
        ({"weight_versions": [0, -2]}, r"sample 7: weight_versions\[1\] is -2"),
        ({"rollout_log_probs": [0.5, "x"]}, r"sample 7: rollout_log_probs\[1\] must be a number"),
        ({"reward": "1"}, "sample 7: reward must be a number"),
        ({"metadata": {"turns": [(1, 2)]}}, r"sample 7: metadata\.turns\[0\] is a tuple"),
        ({"train_metadata": {1: 2}}, r"sample 7: train_metadata has the key 1 of type int; keys must be strings"),
        ({"prompt": [{"role": "user", "image": b"png"}]}, r"sample 7: prompt\[0\]\.image is a bytes"),
        ({"metadata": {"n": 10**5000}}, "sample 7: metadata: a value does not fit JSON"),
    ],
)
def test_what_would_not_come_back_is_refused(fields, message):
    sample = make_sample()
    vars(sample).update(fields)
    with pytest.raises(DataError, match=message):
        columns_of([make_sample(), sample])


FULL = make_sample(
    label="l",
    trajectory_id=1,
    response="r",
    loss_mask=[0, 1],
    rollout_log_probs=[-1.0, -2.0],
    teacher_log_probs=[-3.0, -4.0],
    weight_versions=[5, 6],
    kept_tokens="2 5;3;",
    routed_experts="2x1:AAE=",
    reward=0.5,
    status=Status.TRUNCATED,
    remove_sample=True,
    session_id="s",
    metadata={"m": 1},
    train_metadata={"t": 2},
)


def test_every_field_is_carried():
    bare = make_sample(index=8, group_index=1, prompt="q", tokens=[4, 5], response_length=1)
    for field in dataclasses.fields(Sample):
        assert getattr(FULL, field.name) != getattr(bare, field.name), f"give {field.name} another value above"
    assert (
        columns_of([FULL]).keys()
        == SAMPLE_COLUMNS | {KEPT, ROUTED}
        == {field.name for field in dataclasses.fields(Sample)}
    )
    assert samples_of(columns_of([FULL, bare])) == [FULL, bare]
    assert Sample.from_dict(FULL.to_dict()) == FULL


def test_the_file_is_what_its_description_says(path):
    """Whoever has numpy can read it, today's files too when slime has changed."""
    RolloutBatch(rollout_id=4, groups=[[FULL, make_sample()]], metrics={"a": 0.1}).columns().write(path)
    with np.load(path, allow_pickle=False) as found:
        assert json.loads(found["head"].tobytes()) == {
            "rollout_id": 4, "group_sizes": [2], "weight_version": None, "metrics": {"a": 0.1}, "seconds": {},
            "format_version": 1,
        }  # fmt: skip
        assert found["tokens"].tolist() == [1, 2, 3, 1, 2, 3] and found["tokens.lengths"].tolist() == [3, 3]
        assert found["loss_mask"].tolist() == [0, 1] and found["loss_mask.lengths"].tolist() == [2, -1]
        assert found["rollout_log_probs"].dtype == np.float32
        assert found["status"].tolist() == [2, 0] and found["trajectory_id"].tolist() == [1, -1]
        assert [found[name].tobytes() for name in ("response", "label", "prompt", "reward", "metadata")] == [
            b"r", b"l", b'"p""p"', b"0.5", b'{"m":1}{}'
        ]  # fmt: skip


def test_extras_are_carried(path):
    """Arrays that nobody in between understands: per token of any shape, per sample, and rows that only some have."""
    batch = RolloutBatch(rollout_id=0, groups=[[make_sample(), make_sample(index=8)]]).columns()
    routing = np.arange(2 * 3 * 2 * 4, dtype=np.uint8).reshape(6, 2, 4)
    extras = {
        "routing": Ragged(routing, np.array([3, 3])),
        "mask": Ragged(np.ones(2, np.float16), np.array([-1, 2])),
        "image": np.array([[1, 2], [3, 4]]),
    }
    dataclasses.replace(batch, samples=batch.samples | extras).write(path)
    found = RolloutColumns.read(path).samples
    assert (found["routing"].rows[1] == routing[3:]).all() and found["routing"].values.dtype == np.uint8
    assert found["mask"].rows[0] is None and found["mask"].rows[1].dtype == np.float16
    assert found["image"].tolist() == [[1, 2], [3, 4]]
    with pytest.raises(DataError, match=r"the columns \['odd'\] hold Python objects"):
        write_npz(path, {}, {"odd": np.array([{}])})


@pytest.fixture(scope="module")
def file(path):
    RolloutBatch(rollout_id=4, groups=[[FULL]]).columns().write(path)
    return path.read_bytes()


@given(st.data(), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_changes_nothing(path, file, data, flip):
    """The archive's own records hold bytes that say nothing, such as times."""
    damaged = bytearray(file)
    damaged[data.draw(st.integers(0, len(file) - 1))] ^= flip
    path.write_bytes(damaged)
    try:
        batch = RolloutColumns.read(path).batch()
    except (DamagedError, FormatVersionError):
        return
    assert repr(batch.groups) == repr([[FULL]])


@given(st.data())
def test_a_file_that_was_cut_off_is_refused(path, file, data):
    path.write_bytes(file[: data.draw(st.integers(0, len(file) - 1))])
    with pytest.raises(DamagedError, match="a rollout file is cut off, altered or something else"):
        RolloutColumns.read(path)


def test_a_pickle_is_not_run(tmp_path):
    target = tmp_path / "touched"

    class Bomb:
        def __reduce__(self):
            return open, (str(target), "w")

    (tmp_path / "file").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DamagedError):
        RolloutColumns.read(tmp_path / "file")
    np.savez(tmp_path / "file.npz", head=np.array([Bomb()], object))
    with pytest.raises(DamagedError):
        RolloutColumns.read(tmp_path / "file.npz")
    assert not target.exists()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        ({"head": {"format_version": 2}}, FormatVersionError, "a rollout file: format_version 2; this slime reads 1"),
        ({"head": {"rollout_id": 4}}, DamagedError, "format_version"),
        ({"head": [1]}, DamagedError, "altered"),
        ({"head": {"format_version": 1, "rollout_id": 4}}, DamagedError, "lacks some of its entries"),
        ({"tokens": None}, DamagedError, "lacks some of its entries"),
        ({"tokens": np.zeros(2)}, DamagedError, "tokens has 2 values, its lengths say otherwise"),
        ({"index": np.zeros(3)}, DamagedError, "differ in their number of samples"),
        ({"group_sizes": [2]}, DamagedError, "rollout 4: 1 samples, its head says 2"),
        ({"group_sizes": [-1, 2]}, DataError, "a rollout file: group_sizes"),
        ({"group_sizes": None}, DamagedError, "lacks some of its entries"),
    ],
)
def test_what_does_not_fit_together_is_refused(path, damage, error, message):
    RolloutBatch(rollout_id=4, groups=[[FULL]]).columns().write(path)
    with np.load(path) as found:
        members = dict(found)
    head = json.loads(members["head"].tobytes())
    if "group_sizes" in damage:
        damage = {"head": head | damage}
    if "head" in damage:
        damage = {"head": np.frombuffer(json.dumps(damage["head"]).encode(), np.uint8)}
    np.savez(path, **{name: array for name, array in (members | damage).items() if array is not None})
    with pytest.raises(error, match=message):
        RolloutColumns.read(path)


def test_another_archive_is_refused(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "mine")
    with pytest.raises(DamagedError, match="something else"):
        read_npz(path, "a file")


def test_packed_members_are_refused(path):
    """A megabyte of them could become a gigabyte of numbers."""
    RolloutBatch(rollout_id=4, groups=[[FULL]]).columns().write(path)
    with np.load(path) as found:
        members = dict(found)
    np.savez_compressed(path, **members)
    with pytest.raises(DamagedError, match="it has packed members, which may be of any size"):
        RolloutColumns.read(path)


@pytest.mark.timeout(20)
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "file.npz")
    with pytest.raises(DataError, match="is not a regular file"):
        RolloutColumns.read(tmp_path / "file.npz")


@pytest.mark.parametrize("shape", [(2**40,), (10**9,), (2**31, 2**31), (-1,), (10**200,), "((1,)"])
def test_room_is_made_for_what_a_file_can_hold(path, shape):
    """numpy makes room for the shape that a member's head says, before it reads any of it."""
    RolloutBatch(rollout_id=4, groups=[[FULL]]).columns().write(path)
    with zipfile.ZipFile(path) as found:
        members = {name: found.read(name) for name in found.namelist()}
    head = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    members["tokens.npy"] = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head
    with zipfile.ZipFile(path, "w") as written:
        for name, data in members.items():
            written.writestr(name, data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedError, match="is cut off, altered or something else"):
        RolloutColumns.read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000
